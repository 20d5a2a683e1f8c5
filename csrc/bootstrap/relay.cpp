#include "bootstrap/relay.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "bootstrap/parse.h"
#include "bootstrap/wire.h"

namespace multicomm::bootstrap {
namespace {

using namespace std::chrono_literals;

constexpr int kShortestPause = 1;  // ms
constexpr int kLongestPause = 50;

}  // namespace

std::string lost_node_key(const std::string& prefix, int node) { return prefix + "lost/" + std::to_string(node); }

Relay::Relay(int socket, int node, std::string prefix, std::unique_ptr<KeyValueStore> store)
    : socket_(socket), self_(node), prefix_(std::move(prefix)), store_(std::move(store)) {}

std::string Relay::key_of(const Exchange& exchange, int node) const {
  return prefix_ + "exchange/" + exchange.key + "/" + std::to_string(node);
}

// Publishes each request as it comes and answers whichever is complete: two servers may ask for two exchanges in
// different orders, and reading one to the end before publishing the other would be a deadlock.
void Relay::run() {
  int pause = kShortestPause;
  while (true) {
    pollfd waiting{socket_, POLLIN, 0};
    const int ready = poll(&waiting, 1, open_.empty() ? -1 : pause);
    if (ready < 0 && errno != EINTR) return;
    wire::Message message;
    if (ready > 0 && !wire::receive(socket_, message)) return;
    // An exchange may wait for a rank that is minutes late: asking as often as at first would load the store's host.
    pause = ready > 0 ? kShortestPause : std::min(pause * 2, kLongestPause);
    try {
      if (ready > 0 && message.type == 'X') publish(message.body, message.id);
      open_.erase(std::remove_if(open_.begin(), open_.end(), [this](const Exchange& e) { return advance(e); }),
                  open_.end());
    } catch (const std::exception& error) {
      // Goes on serving: with nobody to answer, the server's later requests, and so MPI, would wait for ever.
      fail_all(error.what());
    }
  }
}

void Relay::publish(const std::string& body, uint64_t id) {
  Exchange exchange{id, {}, {}};
  std::string_view blob = body;
  try {
    const std::string what = "an exchange";
    exchange.key = take_field(blob, '\0', what);
    std::istringstream words{std::string(take_field(blob, '\0', what))};
    for (std::string node; words >> node;)
      exchange.nodes.push_back(static_cast<int>(parse_number(node, 0, INT_MAX, "a node")));
    if (exchange.nodes.empty()) throw std::runtime_error(what + " of no nodes");
  } catch (const std::runtime_error& error) {
    wire::send(socket_, 'f', id, error.what());
    return;
  }
  open_.push_back(exchange);
  // The first node of the exchange draws the number by which all know the new context.
  uint64_t context = 0;
  if (exchange.nodes.front() == self_) context = static_cast<uint64_t>(store_->add(prefix_ + "context", 1));
  store_->set(key_of(exchange, self_),
              std::string(reinterpret_cast<const char*>(&context), sizeof(context)) + std::string(blob));
}

bool Relay::advance(const Exchange& exchange) {
  for (const int node : exchange.nodes) {
    if (store_->check(key_of(exchange, node))) continue;
    if (!store_->check(lost_node_key(prefix_, node))) return false;
    wire::send(socket_, 'f', exchange.id, "node " + std::to_string(node) + " has gone");
    return true;
  }
  std::string all;
  for (const int node : exchange.nodes) {
    const std::string blob = store_->get(key_of(exchange, node), 10s);
    if (blob.size() < sizeof(uint64_t)) {
      wire::send(socket_, 'f', exchange.id, "node " + std::to_string(node) + " published something else than its part");
      return true;
    }
    all += all.empty() ? blob : blob.substr(sizeof(uint64_t));
  }
  wire::send(socket_, 'x', exchange.id, all);
  return true;
}

void Relay::fail_all(const std::string& why) {
  if (!open_.empty()) std::fprintf(stderr, "multicomm: exchange between nodes failed: %s\n", why.c_str());
  for (const Exchange& exchange : open_) wire::send(socket_, 'f', exchange.id, why);
  open_.clear();
}

}  // namespace multicomm::bootstrap
