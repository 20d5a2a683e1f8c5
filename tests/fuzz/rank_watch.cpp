// The server's socket for its ranks, when whoever connects sends anything.
#include "bootstrap/pmix_server/rank_watch.h"

#include <sys/socket.h>
#include <unistd.h>

#include "bootstrap/wire.h"
#include "fuzz.h"

namespace {

namespace wire = multicomm::bootstrap::wire;
constexpr int kWorld = 4;

std::string message(uint64_t type, uint64_t id, uint64_t size) {
  std::string text;
  for (const uint64_t word : {type, id, size}) text.append(reinterpret_cast<const char*>(&word), sizeof(word));
  return text;
}

void turn(multicomm::pmix::RankWatch& watch) {
  std::vector<pollfd> watched;
  int timeout = 0;
  watch.prepare(watched, timeout);
  poll(watched.data(), watched.size(), 0);
  watch.handle(watched.data(), {});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string job = "fuzz-" + std::to_string(getpid()) + "-secret";
  multicomm::pmix::RankWatch watch(job, 0, kWorld, {0, 1}, {getpid(), getpid()});
  fuzz::Reader in(data, size);
  const int listener = wire::connect_to_server(job, 0);
  fuzz::require(listener >= 0, "a connection");
  turn(watch);
  for (int connection = 0; connection < 4 && !in.done(); ++connection) {
    const int fd = wire::connect_to_server(job, 0);
    fuzz::require(fd >= 0, "another connection");
    std::string sent;
    for (int length = in.byte(); length > 0 && !in.done(); --length) sent += static_cast<char>(in.byte());
    wire::send_bytes(fd, sent.data(), sent.size());
    shutdown(fd, SHUT_WR);  // whoever sends half a message and then nothing is given up after a second
    for (size_t n = 0; n < sent.size() / sizeof(wire::Header) + 3; ++n) turn(watch);
    close(fd);
  }
  turn(watch);
  shutdown(listener, SHUT_WR);
  int told = 0;
  for (wire::Message news;
       recv(listener, &news, 1, MSG_PEEK | MSG_DONTWAIT) == 1 && wire::receive(listener, news, 0);) {
    fuzz::require(news.type == 'D' && news.id < kWorld, "word of a rank that there is");
    ++told;
  }
  fuzz::require(told <= kWorld, "each death once");
  close(listener);
  return 0;
}

std::vector<std::string> fuzz::seeds() {
  std::vector<std::string> list;
  const auto add = [&](const std::string& sent) { list.push_back(static_cast<char>(sent.size()) + sent); };
  add(message('H', 1, 0));
  add(message('H', 1, 0) + message('D', 3, 0) + message('D', 2, 0));
  add(message('D', kWorld, 0));
  add(message('D', UINT64_MAX, 0));
  add(message('D', 1, UINT64_MAX));
  add(message('D', 1, 1000) + "x");
  add(message(0x144, 1, 0));
  add("half");
  list.push_back(list[0] + list[1] + list[2]);
  return list;
}
