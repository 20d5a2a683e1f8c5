#include "bootstrap/server_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <thread>

#include "bootstrap/scoped_environment.h"
#include "bootstrap/wire.h"

namespace multicomm::bootstrap {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kEndBound{5000};

bool readable_by(int fd, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd waiting{fd, POLLIN, 0};
    const int ready = poll(&waiting, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 1'000'000)));
    if (ready >= 0) return ready > 0;
    if (errno != EINTR) return false;
  }
}

}  // namespace

ServerProcess::ServerProcess(const std::string& program, const NodeConfig& config, Clock::time_point deadline) {
  spawn(program);
  const auto fail = [this](const std::string& why) {
    kill(pid_, SIGKILL);
    ended_within(kEndBound);
    close(socket_);
    throw std::runtime_error(why);
  };
  wire::Message message;
  if (!wire::send(socket_, 'C', 0, config.to_text())) fail(program + " ended at its start");
  if (!readable_by(socket_, deadline)) fail(program + " did not come up in time");
  if (!wire::receive(socket_, message)) fail(program + " ended at its start");
  if (message.type != 'R') fail(message.body);
  const size_t end = message.body.find('\0');
  if (end == std::string::npos) fail(program + " sent something else than its environment");
  folder_ = message.body.substr(0, end);
  environment_ = message.body.substr(end + 1);
}

void ServerProcess::spawn(const std::string& program) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
    throw std::runtime_error("socketpair: " + std::string(std::strerror(errno)));
  }
  // dup2 of a descriptor onto itself would leave close-on-exec set: hand over one that cannot be the server's number.
  const int handed = fcntl(pair[1], F_DUPFD_CLOEXEC, wire::kServerSocket + 61);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, handed, wire::kServerSocket);
  // A session of its own from its first instruction: whoever kills the rank's process group must not kill the server,
  // which cleans up behind the ranks. And no signals blocked, as threads like the calling one may have them.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);

  std::string name = program;
  char* arguments[] = {name.data(), nullptr};
  const int code = handed < 0 ? errno : posix_spawn(&pid_, program.c_str(), &actions, &attributes, arguments, environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  close(pair[1]);
  if (handed >= 0) close(handed);
  if (code != 0) {
    close(pair[0]);
    throw std::runtime_error("cannot run " + program + ": " + std::strerror(code));
  }
  socket_ = pair[0];
}

bool ServerProcess::ended_within(std::chrono::milliseconds bound) {
  const auto deadline = Clock::now() + bound;
  while (!reaped_) {
    const pid_t got = waitpid(pid_, nullptr, WNOHANG);
    // An error other than an interruption: the program reaps all its children, ours too.
    reaped_ = got == pid_ || (got < 0 && errno != EINTR);
    if (reaped_) break;
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(5ms);
  }
  return true;
}

void ServerProcess::remove_folder() {
  std::error_code ignored;  // there only if the server was killed
  if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
}

void ServerProcess::stop() {
  shutdown(socket_, SHUT_WR);  // nobody is behind the socket any more; the server ends with the last local rank
  if (ended_within(kEndBound)) remove_folder();
}

void ServerProcess::quit() {
  const bool told = !reaped_ && wire::send(socket_, 'Q', 0, {});
  if (ended_within(told ? kEndBound : 100ms)) remove_folder();
  shutdown(socket_, SHUT_RDWR);
}

ServerProcess::~ServerProcess() {
  quit();
  close(socket_);
}

}  // namespace multicomm::bootstrap
