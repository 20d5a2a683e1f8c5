// Every outstanding MPI request of the process, tested together.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace multicomm::mpi {

// Text of an MPI error code, or of a failed call: "MPI_Iallreduce: ...".
std::string error_text(int code);
// Throws std::runtime_error when `code` is not MPI_SUCCESS.
void check(int code, const char* call);

// Told once when its request is over.
class RequestHandler {
 public:
  virtual void request_done(const MPI_Status& status, const std::string* error) = 0;

 protected:
  ~RequestHandler() = default;
};

// One MPI_Testsome for all groups: a rank waits in dozens of groups at once, and a test per group would cost a lock and
// a progress sweep each. Driver only.
class Requests {
 public:
  size_t poll();
  void add(MPI_Request request, RequestHandler& handler);
  // Cancels a receive that nothing will match any more; its handler is not told.
  void cancel(RequestHandler& handler);

 private:
  std::vector<MPI_Request> requests_;
  std::vector<RequestHandler*> handlers_;  // same index as requests_
  std::vector<int> indices_;               // scratch of poll()
  std::vector<MPI_Status> statuses_;       // scratch of poll()
  struct Finished {
    RequestHandler* handler;
    MPI_Status status;
    int code;
  };
  std::vector<Finished> finished_;  // scratch of poll()
};

}  // namespace multicomm::mpi
