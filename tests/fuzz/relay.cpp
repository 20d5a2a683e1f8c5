// The relay between a server's socket and the store, both of any content. Also covers the messages themselves.
#include "bootstrap/relay.h"

#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "bootstrap/wire.h"
#include "fuzz.h"

namespace {

using namespace multicomm::bootstrap;

void put(std::string& text, uint64_t value) { text.append(reinterpret_cast<const char*>(&value), sizeof(value)); }

std::string message(uint64_t type, uint64_t id, uint64_t size, const std::string& body) {
  std::string text;
  for (const uint64_t word : {type, id, size}) put(text, word);
  return text + body;
}

}  // namespace

// The input: the length of what the server sends, that, then what is in the store.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto in = std::make_shared<fuzz::Reader>(data, size);
  std::string sent;
  for (int length = in->word(); length > 0 && !in->done(); --length) sent += static_cast<char>(in->byte());
  int pair[2];
  fuzz::require(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "a socket");
  std::thread server([&] {  // reads meanwhile: the answers may be longer than a socket holds
    wire::send_bytes(pair[1], sent.data(), sent.size());
    shutdown(pair[1], SHUT_WR);
    for (wire::Message answer; wire::receive(pair[1], answer);) {
      fuzz::require(answer.type == 'x' || answer.type == 'f', "an answer");
      fuzz::require(answer.type != 'x' || answer.body.size() >= sizeof(uint64_t), "with a context");
    }
  });
  Relay(pair[0], 0, "p/", std::make_unique<fuzz::HostileStore>(in, std::make_shared<fuzz::HostileStore::Values>()))
      .run();
  shutdown(pair[0], SHUT_RDWR);
  server.join();
  close(pair[0]);
  close(pair[1]);
  return 0;
}

std::vector<std::string> fuzz::seeds() {
  using namespace std::string_literals;
  std::vector<std::string> list;
  const auto add = [&](const std::string& sent, const std::string& stored) {
    list.push_back(std::string{static_cast<char>(sent.size()), static_cast<char>(sent.size() >> 8)} + sent + stored);
  };
  const std::string two =
      "fence#0\0"
      "0 1\0"
      "blob"s;
  add(message('X', 1, two.size(), two), "+12345678blob of node 1\x01");
  add(message('X', 1, two.size(), two), "+short\x01");
  add(message('X', 1, two.size(), two), "!+1\x01");
  add(message('X', 1, two.size(), two) + message('X', 2, two.size(), two), "!!");
  for (const std::string& body : {"no end"s, "one\0end"s, "no nodes\0\0"s, "node\0x\0"s, "node\0-1\0"s, ""s})
    add(message('X', 3, body.size(), body), "+12345678\x01");
  add(message('X', 4, UINT64_MAX, "x"), "");
  add(message('X', 4, uint64_t{1} << 30, "x"), "");
  add(message(uint64_t{1} << 40, 5, 0, ""), "");
  add("half", "");
  return list;
}
