#include "transport/mpi/requests.h"

#include <algorithm>
#include <stdexcept>

namespace multicomm::mpi {

std::string error_text(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return "MPI error " + std::to_string(code);
  return std::string(text, static_cast<size_t>(length));
}

void check(int code, const char* call) {
  if (code != MPI_SUCCESS) throw std::runtime_error(std::string(call) + ": " + error_text(code));
}

void Requests::add(MPI_Request request, RequestHandler& handler) {
  requests_.push_back(request);
  handlers_.push_back(&handler);
}

void Requests::cancel(RequestHandler& handler) {
  for (size_t i = 0; i < handlers_.size(); ++i) {
    if (handlers_[i] != &handler) continue;
    MPI_Cancel(&requests_[i]);
    MPI_Request_free(&requests_[i]);
    requests_[i] = requests_.back();
    handlers_[i] = handlers_.back();
    requests_.pop_back();
    handlers_.pop_back();
    return;
  }
}

size_t Requests::poll() {
  const size_t count = requests_.size();
  if (count == 0) return 0;
  indices_.resize(count);
  statuses_.resize(count);
  int done = 0;
  const int code = MPI_Testsome(static_cast<int>(count), requests_.data(), &done, indices_.data(), statuses_.data());
  if (done <= 0 || done == MPI_UNDEFINED) return 0;
  finished_.clear();
  for (int i = 0; i < done; ++i) {
    const auto at = static_cast<size_t>(indices_[static_cast<size_t>(i)]);
    const MPI_Status& status = statuses_[static_cast<size_t>(i)];
    finished_.push_back({handlers_[at], status, code == MPI_ERR_IN_STATUS ? status.MPI_ERROR : code});
    handlers_[at] = nullptr;
  }
  // Compact before any handler runs: handlers start new requests.
  size_t kept = 0;
  for (size_t i = 0; i < count; ++i) {
    if (handlers_[i] == nullptr) continue;
    requests_[kept] = requests_[i];
    handlers_[kept++] = handlers_[i];
  }
  requests_.resize(kept);
  handlers_.resize(kept);
  // Handlers may call back into poll()'s owner but never into poll(): the list is ours until the loop ends.
  std::vector<Finished> finished;
  finished.swap(finished_);
  for (const Finished& f : finished) {
    if (f.code == MPI_SUCCESS) {
      f.handler->request_done(f.status, nullptr);
    } else {
      const std::string text = error_text(f.code);
      f.handler->request_done(f.status, &text);
    }
  }
  finished_.swap(finished);
  return finished_.size();
}

}  // namespace multicomm::mpi
