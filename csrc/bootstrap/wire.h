// Messages between ranks and their node's PMIx server.
// On the socket pair of the node's lowest rank:
//   rank -> server   'C' the configuration (see NodeConfig)   'x' / 'f'  an exchange is done / has failed   'Q' end now
//   server -> rank   'R' ready: the server's folder, NUL, the environment for the ranks
//                    'X' exchange a blob among nodes   'E' fatal error
// On the connection that every local rank keeps:
//   rank -> server   'H' I am rank id   'D' rank id, of another node, is dead
//   server -> rank   'D' rank id is dead
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>

namespace multicomm::bootstrap::wire {

inline constexpr int kServerSocket = 3;  // the server's end of the socket pair

struct Message {
  char type = 0;
  uint64_t id = 0;
  std::string body;
};

inline bool send_bytes(int fd, const void* data, size_t size) {
  const char* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t sent = ::send(fd, at, size, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    size -= static_cast<size_t>(sent);
  }
  return true;
}

inline bool receive_bytes(int fd, void* data, size_t size) {
  char* at = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t got = ::recv(fd, at, size, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    size -= static_cast<size_t>(got);
  }
  return true;
}

struct Header {
  uint64_t type;
  uint64_t id;
  uint64_t size;
};

// No message of ours comes near. What is longer is no message.
inline constexpr uint64_t kLongestBody = uint64_t{1} << 30;

// False when the other side has gone.
inline bool send(int fd, char type, uint64_t id, const std::string& body) {
  const Header header{static_cast<uint64_t>(type), id, body.size()};
  return send_bytes(fd, &header, sizeof(header)) && send_bytes(fd, body.data(), body.size());
}

// False when the other side has gone, or has sent what is no message with a body of at most `longest` bytes.
inline bool receive(int fd, Message& message, uint64_t longest = kLongestBody) {
  Header header{};
  if (!receive_bytes(fd, &header, sizeof(header))) return false;
  if (header.type > 0x7f || header.size > longest) return false;
  message.type = static_cast<char>(header.type);
  message.id = header.id;
  message.body.clear();
  // Memory is taken as the bytes come, not as the header promises.
  constexpr size_t kStep = size_t{1} << 20;
  while (message.body.size() < header.size) {
    const size_t have = message.body.size();
    message.body.resize(have + std::min<size_t>(header.size - have, kStep));
    if (!receive_bytes(fd, message.body.data() + have, message.body.size() - have)) return false;
  }
  return true;
}

// The server's address for the local ranks, in the abstract namespace: no path to be too long, no file to be left
// behind. Every user can read these addresses, so the last part of the job's name, its secret, is left out.
inline socklen_t server_address(const std::string& job, int node, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const std::string name = job.substr(0, job.rfind('-')) + "/" + std::to_string(node);
  const size_t used = name.copy(address.sun_path + 1, sizeof(address.sun_path) - 1);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + used);
}

// Abstract addresses carry no permissions: whoever is on the other end must be the same user.
inline bool same_user(int fd) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

// -1 when there is no such server.
inline int connect_to_server(const std::string& job, int node) {
  sockaddr_un address;
  const socklen_t size = server_address(job, node, address);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), size) == 0 && same_user(fd)) return fd;
  close(fd);
  return -1;
}

}  // namespace multicomm::bootstrap::wire
