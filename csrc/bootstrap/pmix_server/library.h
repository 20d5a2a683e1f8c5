// libpmix, opened at run time.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>

#include "bootstrap/pmix_server/pmix_abi.h"

namespace multicomm::pmix {

struct Library {
  explicit Library(const std::string& path);  // throws std::runtime_error that says what is missing

  Status (*server_init)(ServerModule*, Info*, size_t);
  Status (*server_finalize)();
  Status (*register_nspace)(const char*, int, Info*, size_t, OperationCallback, void*);
  void (*deregister_nspace)(const char*, OperationCallback, void*);
  Status (*register_client)(const Proc*, uid_t, gid_t, void*, OperationCallback, void*);
  Status (*setup_fork)(const Proc*, char***);
  const char* (*error_string)(Status);

  void check(Status status, const char* call) const;
};

// Waits for an asynchronous call.
class Completion {
 public:
  static void done(Status status, void* self) {
    auto* completion = static_cast<Completion*>(self);
    const std::lock_guard lock(completion->mutex_);
    completion->status_ = status;
    completion->done_ = true;
    completion->changed_.notify_all();
  }
  // kError when nothing comes within 10 s.
  Status wait();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  Status status_ = kSuccess;
};

}  // namespace multicomm::pmix
