#include "bootstrap/pmix_server/library.h"

#include <dlfcn.h>

#include <chrono>
#include <stdexcept>

namespace multicomm::pmix {
namespace {

template <typename Function>
void load(void* library, const std::string& path, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr)
    throw std::runtime_error(path + " has no " + name + "; Open MPI 5 brings a libpmix that has");
}

}  // namespace

Library::Library(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);  // its plugins look symbols up globally
  if (library == nullptr) throw std::runtime_error(dlerror());
  load(library, path, "PMIx_server_init", server_init);
  load(library, path, "PMIx_server_finalize", server_finalize);
  load(library, path, "PMIx_server_register_nspace", register_nspace);
  load(library, path, "PMIx_server_deregister_nspace", deregister_nspace);
  load(library, path, "PMIx_server_register_client", register_client);
  load(library, path, "PMIx_server_setup_fork", setup_fork);
  load(library, path, "PMIx_Error_string", error_string);
}

void Library::check(Status status, const char* call) const {
  if (status != kSuccess && status != kOperationSucceeded)
    throw std::runtime_error(std::string(call) + ": " + error_string(status));
}

Status Completion::wait() {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::seconds(10), [this] { return done_; }) ? status_ : kError;
}

}  // namespace multicomm::pmix
