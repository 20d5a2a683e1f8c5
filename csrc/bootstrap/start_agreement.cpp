#include "bootstrap/start_agreement.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "bootstrap/parse.h"

namespace multicomm::bootstrap {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// A settled outcome is written at once by the rank that settled it; longer means that this rank is gone.
constexpr auto kSettled = 10s;
constexpr std::chrono::milliseconds kAskDead{500};

std::chrono::milliseconds left_until(Clock::time_point deadline) {
  return std::max(1ms, std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()));
}

std::string tries_key() { return attempt_prefix() + "start/tries"; }

}  // namespace

std::string attempt_prefix() {
  const char* count = std::getenv("TORCHELASTIC_RESTART_COUNT");
  return std::string("multicomm/") + (count != nullptr ? count : "0") + "/";
}

std::string name_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (const int rank : ranks) text += (rank == ranks.front() ? " " : ", ") + std::to_string(rank);
  return text;
}

StartAgreement::StartAgreement(KeyValueStore& store, int rank, int world_size, std::chrono::milliseconds timeout)
    : store_(store), rank_(rank), world_size_(world_size), deadline_(Clock::now() + timeout) {
  prefix_ = attempt_prefix() + "start/" + std::to_string(store_.add(tries_key(), 0)) + "/";
}

std::vector<std::string> StartAgreement::all_gather(const std::string& text) {
  store_.set(prefix_ + "host/" + std::to_string(rank_), text);
  std::vector<std::string> all;
  try {
    for (int r = 0; r < world_size_; ++r) {
      all.push_back(store_.get(prefix_ + "host/" + std::to_string(r), left_until(deadline_)));
    }
  } catch (const StoreTimeout&) {
    const std::vector<int> missing = without_key("host/");
    if (!missing.empty()) {
      fail(name_ranks(missing) + " of the default world (" + std::to_string(world_size_) +
           " ranks) did not start multicomm in time. MPI's world is the default world: every rank must make a group "
           "with "
           "backend=\"multicomm\" or call multicomm.start()");
    }
    fail("the last rank of the default world came too late to start MPI in time; raise the time-out");
  }
  return all;
}

void StartAgreement::publish_environment(int node, const std::string& environment) {
  store_.set(prefix_ + "environment/" + std::to_string(node), "+" + environment);
}

void StartAgreement::publish_failure(int node, const std::string& why) {
  settle(why);
  store_.set(prefix_ + "environment/" + std::to_string(node), "-");
}

std::string StartAgreement::environment_of(int node, const std::string& host, int lowest_rank) {
  try {
    const std::string answer = store_.get(prefix_ + "environment/" + std::to_string(node), left_until(deadline_));
    if (answer.starts_with('+')) return answer.substr(1);
  } catch (const StoreTimeout&) {
    fail("rank " + std::to_string(lowest_rank) + " did not start the PMIx server of node " + host +
         " in time; has this rank ended?");
  }
  fail("the PMIx server of node " + host + " was not started");
}

void StartAgreement::await_all(const std::function<std::vector<int>()>& dead) {
  store_.set(prefix_ + "here/" + std::to_string(rank_), "1");
  if (store_.add(prefix_ + "arrived", 1) == world_size_) settle({});
  while (true) {
    try {
      const std::string failure = outcome(std::min<std::chrono::milliseconds>(left_until(deadline_), kAskDead));
      if (failure.empty()) return;
      throw std::runtime_error(failure);
    } catch (const StoreTimeout&) {
      const std::vector<int> gone = dead();
      if (gone.empty() && Clock::now() < deadline_) continue;
      const std::vector<int> missing = without_key("here/");
      std::string why = "the ranks' agreement to start MPI did not come to its end in time";
      if (!gone.empty()) why = name_ranks(gone) + " ended before MPI was started";
      else if (!missing.empty())
        why = name_ranks(missing) + " began to start multicomm but did not come to MPI_Init in time; have they ended?";
      // Settled to go just now: the others are on their way into MPI_Init, so this rank goes too.
      const std::string failure = settle(why);
      if (failure.empty()) return;
      throw std::runtime_error(failure);
    }
  }
}

std::string StartAgreement::settle(const std::string& failure) {
  if (store_.add(prefix_ + "settled", 1) == 1) {
    // First the way to the next try, then the word that this one has failed: a rank that reads it may come again at
    // once.
    if (!failure.empty()) store_.add(tries_key(), 1);
    store_.set(prefix_ + "outcome", failure.empty() ? "go" : "-" + failure);
  }
  return outcome(kSettled);
}

std::string StartAgreement::outcome(std::chrono::milliseconds timeout) {
  std::string text = store_.get(prefix_ + "outcome", timeout);
  std::replace(text.begin(), text.end(), '\0', '?');  // it becomes the text of an exception
  if (text == "go") return {};
  // Never to be taken for "go": this rank would enter MPI_Init by itself.
  if (!text.starts_with('-')) return "the store holds " + quoted(text) + " for the outcome of the start";
  return text.size() > 1 ? text.substr(1) : "a rank could not start, and did not say why";
}

std::vector<int> StartAgreement::without_key(const std::string& kind) const {
  std::vector<int> ranks;
  for (int r = 0; r < world_size_; ++r) {
    if (!store_.check(prefix_ + kind + std::to_string(r))) ranks.push_back(r);
  }
  return ranks;
}

void StartAgreement::fail(const std::string& why) {
  const std::string settled = settle(why);
  throw std::runtime_error(settled.empty() ? why : settled);  // empty: a store that says "go" without this rank
}

}  // namespace multicomm::bootstrap
