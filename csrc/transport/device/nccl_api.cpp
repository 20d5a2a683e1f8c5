#include "transport/device/nccl_api.h"

#include <c10/core/Device.h>
#include <dlfcn.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

namespace multicomm::device {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr int kOldest = 21800;  // communicators that do not block, made as they are here

// torch's wheels have NCCL in a package beside torch.
std::vector<std::string> wheel_places() {
  Dl_info torch{};
  if (dladdr(reinterpret_cast<const void*>(&c10::DeviceTypeName), &torch) == 0 || torch.dli_fname == nullptr) return {};
  std::string folder = torch.dli_fname;  // .../site-packages/torch/lib/libc10.so
  for (int up = 0; up < 3; ++up) {
    const size_t slash = folder.rfind('/');
    if (slash == std::string::npos) return {};
    folder.resize(slash);
  }
  return {folder + "/nvidia/nccl/lib/" + kName, folder + "/torch/lib/" + kName};
}

struct Loaded {
  std::optional<NcclApi> api;
  std::string why;
};

Loaded load(const std::string& given) {
  Loaded loaded;
  void* library = nullptr;
  std::string path, looked_for;
  const auto attempt = [&](const std::string& candidate, int extra) {
    if (library != nullptr) return;
    library = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL | extra);
    if (library != nullptr) path = candidate;
    else if (extra == 0) looked_for += std::string("\n  ") + candidate + ": " + dlerror();
  };
  if (!given.empty()) {
    attempt(given, 0);
  } else {
    attempt(kName, RTLD_NOLOAD);
    attempt(kName, 0);
    for (const std::string& place : wheel_places()) attempt(place, 0);
  }
  if (library == nullptr) {
    loaded.why = "NCCL was not found. Looked for:" + looked_for +
                 "\nInstall torch's CUDA build, which brings it, or name one by MULTICOMM_NCCL_LIBRARY";
    return loaded;
  }
  NcclApi api;
  std::string missing;
  const auto find = [&](auto& member, const char* symbol, bool needed) {
    member = reinterpret_cast<std::remove_reference_t<decltype(member)>>(dlsym(library, symbol));
    if (member == nullptr && needed) missing += (missing.empty() ? "" : ", ") + std::string(symbol);
  };
#define MULTICOMM_NCCL_FIND(member, symbol, arguments) find(api.member, #symbol, true);
  MULTICOMM_NCCL_FUNCTIONS(MULTICOMM_NCCL_FIND)
#undef MULTICOMM_NCCL_FIND
#define MULTICOMM_NCCL_FIND(member, symbol, arguments) find(api.member, #symbol, false);
  MULTICOMM_NCCL_NEWER_FUNCTIONS(MULTICOMM_NCCL_FIND)
#undef MULTICOMM_NCCL_FIND
  find(api.get_error_string, "ncclGetErrorString", true);
  find(api.get_last_error, "ncclGetLastError", false);
  if (api.get_version != nullptr) api.get_version(&api.version);
  if (!missing.empty() || api.version < kOldest) {
    loaded.why = "NCCL in " + path + " (version " + version_text(api.version) + ") is too old: multicomm needs " +
                 version_text(kOldest) + " or later" + (missing.empty() ? "" : "; it lacks " + missing);
    return loaded;
  }
  if (const char* blocking = std::getenv("NCCL_COMM_BLOCKING"); blocking != nullptr && std::atoi(blocking) != 0) {
    loaded.why = "NCCL_COMM_BLOCKING=1 makes NCCL's calls block, so that nothing could end them; unset it";
    return loaded;
  }
  loaded.api = api;
  return loaded;
}

}  // namespace

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

const NcclApi* nccl_api(const std::string& given_path, std::string& why) {
  static const auto* loaded = new Loaded(load(given_path));
  why = loaded->why;
  return loaded->api ? &*loaded->api : nullptr;
}

}  // namespace multicomm::device
