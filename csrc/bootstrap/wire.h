// Messages on the socket between a node's lowest rank and the node's PMIx server.
//   rank -> server   'C' the configuration (see NodeConfig)     'x' / 'f'  an exchange is done / has failed
//   server -> rank   'R' ready: the environment for the ranks   'X' exchange a blob among nodes   'E' fatal error
#pragma once

#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <string>

namespace multicomm::bootstrap::wire {

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

// False when the other side has gone.
inline bool send(int fd, char type, uint64_t id, const std::string& body) {
  const Header header{static_cast<uint64_t>(type), id, body.size()};
  return send_bytes(fd, &header, sizeof(header)) && send_bytes(fd, body.data(), body.size());
}

inline bool receive(int fd, Message& message) {
  Header header{};
  if (!receive_bytes(fd, &header, sizeof(header))) return false;
  message.type = static_cast<char>(header.type);
  message.id = header.id;
  message.body.resize(header.size);
  return receive_bytes(fd, message.body.data(), message.body.size());
}

}  // namespace multicomm::bootstrap::wire
