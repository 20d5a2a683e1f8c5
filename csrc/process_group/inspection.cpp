#include "process_group/inspection.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "bootstrap/background.h"
#include "bootstrap/peers.h"

namespace multicomm {
namespace {

using namespace std::chrono_literals;

constexpr auto kCoordinatorBound = 5s;  // for the whole picture: well above what the coordinator waits for others
constexpr auto kStopBound = 1s;
constexpr auto kStackBound = 2s;
constexpr time_t kClientSeconds = 2;  // for each read from, and write to, who asks

// What a signal handler and a fork need to find, neither of which can be handed anything.
std::atomic<int> signal_event{-1};
std::atomic<int> listening{-1};
std::atomic<int> handled_signal{0};
struct sigaction handler_before;  // set before handled_signal

void on_signal(int) {
  const int saved = errno;
  const uint64_t one = 1;
  const int event = signal_event.load();
  if (event >= 0 && write(event, &one, sizeof(one)) < 0) {
    // It is full of signals already.
  }
  errno = saved;
}

// Async-signal-safe, as a child of a process with threads must be.
void in_forked_child() {
  signal_event.store(-1);
  if (const int signal = handled_signal.load(); signal != 0) sigaction(signal, &handler_before, nullptr);
  if (const int socket = listening.exchange(-1); socket >= 0) close(socket);
}

// With the process namespace, since containers may share a network and have the same process numbers.
std::string socket_name() {
  struct stat space{};
  if (stat("/proc/self/ns/pid", &space) != 0) space.st_ino = 0;
  return "multicomm-" + std::to_string(geteuid()) + "-" + std::to_string(getpid()) + "-" + std::to_string(space.st_ino);
}

bool send_all(int socket, const std::string& text) {
  for (size_t sent = 0; sent < text.size();) {
    const ssize_t count = send(socket, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    sent += static_cast<size_t>(count);
  }
  return true;
}

// A request is one short line, sent at once.
std::string receive_line(int socket) {
  char text[64];
  const ssize_t count = recv(socket, text, sizeof(text), 0);
  const std::string all(text, static_cast<size_t>(std::max<ssize_t>(count, 0)));
  return all.substr(0, all.find('\n'));
}

bool may_ask(int socket) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && (peer.uid == geteuid() || peer.uid == 0);
}

void say(const std::string& text) { std::fprintf(stderr, "multicomm: %s\n", text.c_str()); }

}  // namespace

Inspection::Inspection(Coordinator& coordinator, Driver& driver, int signal)
    : coordinator_(coordinator), driver_(driver), stacks_([this](const std::string& stack) {
        coordinator_.post([this, stack] { coordinator_.pictures().stack_came(stack); });
        driver_.wake();
      }) {
  coordinator_.post([this] {
    Pictures& pictures = coordinator_.pictures();
    pictures.set_place(bootstrap::place_text(bootstrap::this_process()));
    pictures.request_stack = [this] { stacks_.request(); };
  });
  driver_.wake();
  stop_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (stop_ < 0) {
    say(std::string("inspect will not work: eventfd: ") + std::strerror(errno));
    return;
  }
  listen();
  if (signal != 0) handle_signal(signal);
  pthread_atfork(nullptr, nullptr, in_forked_child);
  thread_ = bootstrap::start_thread("mc-inspect", [this] { run(); });
}

void Inspection::listen() {
  const std::string name = socket_name();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path + 1, sizeof(address.sun_path) - 1);  // after a zero byte: abstract
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  socket_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (socket_ < 0 || bind(socket_, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      ::listen(socket_, 16) != 0) {
    say("inspect will not work: its socket @" + name + ": " + std::strerror(errno));
    if (socket_ >= 0) close(std::exchange(socket_, -1));
  }
  listening.store(socket_);
}

void Inspection::handle_signal(int signal) {
  struct sigaction before{};
  sigaction(signal, nullptr, &before);
  if ((before.sa_flags & SA_SIGINFO) != 0 || (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)) {
    return say("MULTICOMM_INSPECT_SIGNAL: the program handles signal " + std::to_string(signal) +
               " itself, and goes on doing so; name another one");
  }
  signals_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (signals_ < 0) return say(std::string("MULTICOMM_INSPECT_SIGNAL: eventfd: ") + std::strerror(errno));
  signal_event.store(signals_);
  handler_before = before;
  struct sigaction ours{};
  ours.sa_handler = on_signal;
  ours.sa_flags = SA_RESTART;  // what it interrupts is the program's business
  sigfillset(&ours.sa_mask);
  sigaction(signal, &ours, nullptr);
  handled_signal.store(signal);
}

void Inspection::joins(int rank, int world_size) {
  {
    const std::lock_guard lock(mutex_);
    if (rank_ >= 0) return;
    rank_ = rank;
    world_size_ = world_size;
  }
  coordinator_.post([this, rank, world_size] { coordinator_.pictures().set_rank(rank, world_size); });
  driver_.wake();
}

void Inspection::started(int rank, int world_size, uint64_t job) {
  const std::lock_guard lock(mutex_);
  rank_ = rank;
  world_size_ = world_size;
  job_ = job;
}

void Inspection::run() {
  pollfd wanted[] = {{stop_, POLLIN, 0}, {socket_, POLLIN, 0}, {signals_, POLLIN, 0}};  // those below 0 are skipped
  while (true) {
    const int ready = poll(wanted, 3, -1);
    if (ready < 0 && errno != EINTR) {
      say(std::string("inspect has ended: poll: ") + std::strerror(errno));
      break;
    }
    if (ready <= 0) continue;
    if (wanted[0].revents != 0) break;
    if (wanted[1].revents != 0) serve();
    uint64_t signals = 0;
    if (wanted[2].revents != 0 && read(signals_, &signals, sizeof(signals)) > 0) print_picture();
  }
  if (const int socket = listening.exchange(-1); socket >= 0) close(socket);
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

// One at a time; each step has a bound, so nobody who asks can keep others from it.
void Inspection::serve() {
  const int client = accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC);
  if (client < 0) {
    std::this_thread::sleep_for(100ms);  // no descriptor left: who waits stays in poll's answer, which must not spin
    return;
  }
  const timeval bound{kClientSeconds, 0};
  setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &bound, sizeof(bound));
  setsockopt(client, SOL_SOCKET, SO_SNDTIMEO, &bound, sizeof(bound));
  if (may_ask(client)) send_all(client, reply(receive_line(client)));
  shutdown(client, SHUT_RDWR);  // a child forked meanwhile has a copy: closing ours would not end the stream
  close(client);
}

std::string Inspection::reply(const std::string& request) {
  if (request == "who") {
    const std::lock_guard lock(mutex_);
    return "ok\n" + std::to_string(rank_) + " " + std::to_string(world_size_) + " " + std::to_string(job_) + "\n";
  }
  if (request != "picture" && request != "picture stacks")
    return "failed\nthis process runs another version of multicomm, which does not know '" + request + "'\n";
  if (const auto text = picture(request == "picture stacks")) return "ok\n" + *text;
  const std::lock_guard lock(mutex_);
  if (stopping_) return "failed\nthis process is at its end\n";
  return "failed\nthe coordinator thread of this process does not answer: it is stuck, probably inside MPI\n";
}

std::optional<std::string> Inspection::picture(bool stacks) {
  // Owned by whoever comes last: the wait may be over before the picture is.
  struct Result {
    std::mutex mutex;
    std::optional<std::string> text;  // guarded by mutex
  };
  auto result = std::make_shared<Result>();
  coordinator_.post([this, stacks, result] {
    coordinator_.pictures().take(stacks, [this, result](std::string text) {
      {
        const std::lock_guard lock(result->mutex);
        result->text = std::move(text);
      }
      const std::lock_guard lock(mutex_);
      changed_.notify_all();
    });
  });
  driver_.wake();
  std::optional<std::string> text;
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kCoordinatorBound, [&] {
    const std::lock_guard result_lock(result->mutex);
    text = result->text;
    return text.has_value() || stopping_;
  });
  return text;
}

void Inspection::print_picture() {
  const auto text = picture(true);
  // One call, so that the pictures of several ranks do not mix.
  if (text) {
    std::fputs(text->c_str(), stderr);
    return;
  }
  const std::lock_guard lock(mutex_);
  if (!stopping_) say("asked by a signal for a picture of the job, but the coordinator thread does not answer");
}

void Inspection::stop() {
  {
    std::unique_lock lock(mutex_);
    if (std::exchange(stopping_, true)) return;
    signal_event.store(-1);  // the handler stays: a late signal must not end the process
    changed_.notify_all();
    const uint64_t one = 1;
    if (thread_.joinable() && write(stop_, &one, sizeof(one)) == sizeof(one)) {
      const bool ended = changed_.wait_for(lock, kStopBound, [this] { return ended_; });
      lock.unlock();
      if (ended) thread_.join();
      else thread_.detach();
    }
  }
  stacks_.stop(kStackBound);
}

}  // namespace multicomm
