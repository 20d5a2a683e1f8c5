// The environment, of any content: settings in their bounds, or an error that names the variable.
#include "coordinator/settings.h"

#include <stdexcept>

#include "fuzz.h"

namespace {

using namespace multicomm;

std::string name_at(size_t index) {
  const auto known = describe_settings({});
  return known[index % known.size()].name;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Reader in(data, size);
  std::vector<std::string> entries;
  while (!in.done()) {
    const uint8_t form = in.byte();  // below 64: a known name; else the text is the whole entry
    const std::string text = in.field('\0');
    entries.push_back(form < 64 ? name_at(form) + "=" + text : text);
  }
  std::vector<char*> environment;
  for (std::string& entry : entries) environment.push_back(entry.data());
  environment.push_back(nullptr);
  try {
    const Settings settings = read_settings(environment.data());
    fuzz::require(settings.chunk_elements > 0 && settings.chunk_elements <= INT32_MAX, "chunks fit MPI's counts");
    fuzz::require(settings.shutdown_timeout.count() >= 0 && settings.stall_warning.count() >= 0, "times forward");
    fuzz::require(settings.shared_text().size() < 512, "the text that ranks compare fits its field");
    for (const auto& one : describe_settings(settings))  // a path may be of any length
      fuzz::require(one.value.size() < 100 || one.value == settings.nccl_library || one.value == settings.timeline,
                    "a short value");
  } catch (const std::invalid_argument& error) {
    fuzz::require(std::string(error.what()).find("MULTICOMM_") != std::string::npos, "an error that names a variable");
  }
  return 0;
}

std::vector<std::string> fuzz::seeds() {
  std::vector<std::string> list{"@MULTICOMM_UNKNOWN=1", "@MULTICOMM_", "@PATH=/bin", "@MULTICOMM_FUSION_BYTES", "@"};
  for (char name = 0; name < static_cast<char>(describe_settings({}).size()); ++name) {
    for (const char* value : {"", "0", "1", "on", "-1", "1e9", "nan", "0x10", "18446744073709551615",
                              "99999999999999999999", "2.5", " 1", "1 ", "2147483648"})
      list.push_back(std::string(1, name) + value);
  }
  return list;
}
