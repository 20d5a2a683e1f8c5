// Drives a fuzz target where the compiler has no libFuzzer: replays the corpus, then mutates it blindly, without
// feedback from coverage. Takes the few of libFuzzer's options that the Makefile uses, ignores the others.
#include <chrono>
#include <random>

#include "fuzz.h"

namespace {

void run(const std::string& input) {
  // A block of its own, so that the address sanitizer sees where it ends.
  std::vector<uint8_t> bytes(input.begin(), input.end());
  bytes.shrink_to_fit();
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
}

std::string mutate(std::string text, const std::vector<std::string>& corpus, std::mt19937_64& random) {
  constexpr char kTelling[] = {0, 1, -1, 0x7f, '0', '9', '-', ' ', '\n', 'G'};
  for (uint64_t n = 1 + random() % 8; n > 0; --n) {
    const size_t at = text.empty() ? 0 : random() % text.size();
    switch (random() % 6) {
      case 0:
        if (!text.empty()) text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
        break;
      case 1:
        if (!text.empty()) text[at] = kTelling[random() % sizeof(kTelling)];
        break;
      case 2: text.insert(at, 1 + random() % 8, kTelling[random() % sizeof(kTelling)]); break;
      case 3: text.erase(at, 1 + random() % 16); break;
      case 4: text.insert(at, text.substr(at, 1 + random() % 64)); break;
      default: {
        const std::string& other = corpus[random() % corpus.size()];
        text = text.substr(0, at) + other.substr(other.empty() ? 0 : random() % other.size());
      }
    }
  }
  return text.substr(0, 8192);
}

}  // namespace

int main(int argc, char** argv) {
  LLVMFuzzerInitialize(&argc, &argv);
  double seconds = 0;
  uint64_t seed = 1;
  std::vector<std::string> corpus{""};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("-max_total_time=")) seconds = std::atof(argument.c_str() + 16);
    else if (argument.starts_with("-seed=")) seed = std::strtoull(argument.c_str() + 6, nullptr, 10);
    else if (std::filesystem::is_directory(argument)) {
      for (const auto& entry : std::filesystem::directory_iterator(argument)) {
        std::ifstream in(entry.path(), std::ios::binary);
        corpus.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
      }
    }
  }
  for (const std::string& input : corpus) run(input);
  std::mt19937_64 random(seed);
  uint64_t runs = corpus.size();
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  for (; elapsed() < seconds; ++runs) run(mutate(corpus[random() % corpus.size()], corpus, random));
  std::printf("Done %llu runs in %.0f second(s), without feedback\n", static_cast<unsigned long long>(runs), elapsed());
  return 0;
}
