#include "bootstrap/death_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "bootstrap/background.h"
#include "bootstrap/parse.h"
#include "bootstrap/relay.h"
#include "bootstrap/wire.h"

namespace multicomm::bootstrap {
namespace {

using namespace std::chrono_literals;

// One question to the store's host per node and interval, whatever the number of ranks.
constexpr int kAskStore = 500;  // ms
constexpr auto kStopBound = 1s;

}  // namespace

DeathWatch::DeathWatch(Place place, std::shared_ptr<KeyValueStore> store)
    : place_(std::move(place)), origin_(std::move(store)) {
  socket_ = wire::connect_to_server(place_.job, place_.node);
  if (socket_ < 0 || !wire::send(socket_, 'H', static_cast<uint64_t>(place_.rank), {})) {
    if (socket_ >= 0) close(socket_);
    throw std::runtime_error("the PMIx server of this node does not answer: " + std::string(std::strerror(errno)));
  }
  stop_ = eventfd(0, EFD_CLOEXEC);
  thread_ = start_thread("mc-deaths", [this] { run(); });
}

bool DeathWatch::stop(bool leaving) {
  if (!thread_.joinable()) return true;
  if (leaving) leaving_ = true;
  const uint64_t one = 1;
  while (write(stop_, &one, sizeof(one)) < 0 && errno == EINTR) continue;
  if (end_.wait_for(kStopBound) != std::future_status::ready) return false;
  thread_.join();
  return true;
}

DeathWatch::~DeathWatch() {
  if (thread_.joinable() && !stop(false)) thread_.join();
  close(socket_);
  close(stop_);
}

std::vector<int> DeathWatch::dead() const {
  const std::lock_guard lock(mutex_);
  return dead_;
}

std::string DeathWatch::trouble() const {
  const std::lock_guard lock(mutex_);
  return trouble_;
}

bool DeathWatch::insert(int dead) {
  const std::lock_guard lock(mutex_);
  if (std::find(dead_.begin(), dead_.end(), dead) != dead_.end()) return false;
  dead_.push_back(dead);
  return true;
}

void DeathWatch::lose(const std::string& what) {
  const std::lock_guard lock(mutex_);
  trouble_ += (trouble_.empty() ? "" : "; ") + what;
}

void DeathWatch::run() {
  watch();
  if (leaving_ && place_.nodes > 1 && !store_lost_) {
    insert(place_.rank);
    try {
      exchange_with_other_nodes();
    } catch (const std::exception&) {
      // Nobody there to be told.
    }
  }
  ended_.set_value();
}

void DeathWatch::watch() {
  while (true) {
    const bool ask = place_.nodes > 1 && !store_lost_ && speaks_for_node();
    pollfd watched[] = {{stop_, POLLIN, 0}, {server_lost_ ? -1 : socket_, POLLIN, 0}};
    const int ready = poll(watched, 2, ask ? kAskStore : -1);
    if (watched[0].revents != 0) return;
    if (ready > 0 && watched[1].revents != 0) receive();
    if (place_.nodes == 1 || store_lost_ || !speaks_for_node()) continue;
    try {
      exchange_with_other_nodes();
    } catch (const std::exception& error) {
      store_lost_ = true;
      lose(std::string("the store cannot be reached, its host may have ended (") + error.what() + ")");
    }
  }
}

void DeathWatch::receive() {
  wire::Message message;
  if (wire::receive(socket_, message, 0)) {
    if (message.type == 'D' && message.id < static_cast<uint64_t>(place_.world)) insert(static_cast<int>(message.id));
    return;
  }
  server_lost_ = true;
  lose("the PMIx server of this node has ended");
}

// Without the server nobody can pass on what another rank has read, so each reads for itself.
bool DeathWatch::speaks_for_node() const {
  if (server_lost_) return true;
  const std::vector<int> gone = dead();
  const auto alive = std::find_if(place_.local.begin(), place_.local.end(),
                                  [&](int r) { return std::find(gone.begin(), gone.end(), r) == gone.end(); });
  return alive != place_.local.end() && *alive == place_.rank;
}

void DeathWatch::exchange_with_other_nodes() {
  if (!store_) store_ = origin_->clone();
  for (const int rank : dead()) {
    if (!std::binary_search(place_.local.begin(), place_.local.end(), rank) || !posted_.insert(rank).second) continue;
    // With its lowest rank, which relays for the server, a node can take part in no exchange any more.
    if (rank == place_.local.front()) store_->set(lost_node_key(place_.prefix, place_.node), "1");
    // The rank that spoke for the node before may have posted it already, and then died.
    if (store_->add(place_.prefix + "dead/posted/" + std::to_string(rank), 1) != 1) continue;
    const int64_t number = store_->add(place_.prefix + "dead/count", 1);
    store_->set(place_.prefix + "dead/" + std::to_string(number), std::to_string(rank));
  }
  if (server_lost_) store_->set(lost_node_key(place_.prefix, place_.node), "1");
  while (store_->check(place_.prefix + "dead/" + std::to_string(next_))) {
    const std::string text = store_->get(place_.prefix + "dead/" + std::to_string(next_++), 1s);
    const auto rank = static_cast<int>(parse_number(text, 0, place_.world - 1, "a dead rank"));
    if (insert(rank) && !server_lost_) wire::send(socket_, 'D', static_cast<uint64_t>(rank), {});
  }
}

}  // namespace multicomm::bootstrap
