// What start-up reads from the store, of any content: who is where, the server's environment, the outcome of a try.
// Refused with a text, or a job that can be started; and nothing but "go" lets a rank go.
#include "bootstrap/introductions.h"

#include <stdexcept>

#include "bootstrap/scoped_environment.h"
#include "bootstrap/start_agreement.h"
#include "fuzz.h"

namespace {

using namespace multicomm::bootstrap;
using fuzz::HostileStore;
using fuzz::Reader;
using fuzz::require;

void check_arrangement(const std::vector<std::string>& texts, int rank) {
  NodeConfig config = arrange_nodes(texts, rank);
  config.libpmix = "/lib/libpmix.so.2";
  const NodeConfig again = NodeConfig::from_text(config.to_text());  // throws, and so fails, if a server refused it
  require(again.ranks == config.ranks && again.hosts == config.hosts && again.pids == config.pids, "the same job");
}

void check_agreement(Reader& in) {
  const auto values = std::make_shared<HostileStore::Values>();
  HostileStore store(std::make_shared<Reader>(in), values);
  constexpr int kWorld = 3;
  StartAgreement agreement(store, 0, kWorld, std::chrono::milliseconds(0));
  std::vector<std::string> introductions;
  try {
    introductions = agreement.all_gather("1 job host");
    read_environment(agreement.environment_of(0, "host", 0));
    agreement.await_all([] { return std::vector<int>{1}; });
    require(values->at(agreement.prefix() + "outcome") == "go", "only 'go' lets a rank go");
  } catch (const std::runtime_error& error) {
    require(*error.what() != '\0', "an error with a text");
  }
  if (introductions.empty()) return;
  NodeConfig config;
  try {
    config = arrange_nodes(introductions, 0);
  } catch (const std::runtime_error&) {
    return;
  }
  check_arrangement(introductions, 2);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Reader in(data, size);
  switch (in.byte() % 3) {
    case 0: {
      std::vector<std::string> texts;
      while (!in.done()) texts.push_back(in.field('\x01'));
      if (texts.empty()) break;
      try {
        arrange_nodes(texts, 0);
      } catch (const std::runtime_error& error) {
        require(std::string(error.what()).find("rank ") != std::string::npos, "an error that names the rank");
        break;
      }
      check_arrangement(texts, static_cast<int>(texts.size()) - 1);
      break;
    }
    case 1: {
      std::map<std::string, std::string> environment;
      try {
        environment = read_environment(in.rest());
      } catch (const std::runtime_error&) {
        break;
      }
      for (const auto& [name, value] : environment) {
        require(is_mpi_variable(name), "variables of MPI's only");
        require(value.find('\0') == std::string::npos, "values that can be set");
      }
      break;
    }
    default: check_agreement(in);
  }
  return 0;
}

std::vector<std::string> fuzz::seeds() {
  using namespace std::string_literals;
  return {
      "\0"
      "12 multicomm-12-1-2 host|boot|1:2\x01"
      "13 multicomm-13-3-4 host|boot|1:2\x01"
      "9 j host|other"s,
      "\0"
      "1 j a,b;c d|x\x01"
      "1 j |x\x01"
      "1 j |y"s,
      "\0"
      "-1 j h"s,
      "\0"
      "0 j h"s,
      "\0"
      "1 ../../x h"s,
      "\0"
      "1 j "s,
      "\0"
      "1 a x\x01"
      "1 a x-node2|\x01"
      "1 a x|2"s,
      "\1"
      "PMIX_NAMESPACE=job\0PMIX_RANK=0\0OMPI_MCA_x=\0"s,
      "\1"
      "LD_PRELOAD=/tmp/evil.so\0"s,
      "\1"
      "PMIX_NAMESPACE=no end"s,
      "\2"
      "+1 j h\x01+1 j h\x01++PMIX_A=b\0\x01+go\x01"s,
      "\2"
      "+1 j h\x01+1 j h\x01++PMIX_A=b\0\x01+-\x01"s,
      "\2"
      "+1 j h\x01+1 j h\x01++PMIX_A=b\0\x01+nonsense\x01"s,
      "\2"
      "+1 j h\x01!!!!"s,
      "\2"
      "+1 j h\x01+1 j h\x01+-\x01+-no libpmix\x01"s};
}
