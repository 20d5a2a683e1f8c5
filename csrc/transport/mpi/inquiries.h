// Inquiries over MPI messages.
#pragma once

#include <mpi.h>

#include <functional>
#include <list>
#include <vector>

#include "transport/inquiry.h"
#include "transport/mpi/requests.h"

namespace multicomm::mpi {

// On a duplicate of the world of its own. What has come is looked for now and then (MPI_Improbe) instead of by a
// receive that is always there: nothing has to be cancelled at the end, and a dead rank breaks nothing. Driver only.
class Inquiries final : public InquiryPlane {
 public:
  // `dead_ranks`: ranks of the world whose process has ended.
  Inquiries(MPI_Comm world, Requests& requests, InquirySink& sink, std::function<std::vector<int>()> dead_ranks)
      : world_(world), requests_(requests), sink_(sink), dead_ranks_(std::move(dead_ranks)) {}
  void ask(int global_rank, const Inquiry& inquiry) override;
  void look() override;
  std::vector<int> dead_ranks() const override { return dead_ranks_(); }

 private:
  struct Sending final : RequestHandler {
    Inquiries* owner = nullptr;
    Inquiry inquiry;
    Answer answer;
    std::list<Sending>::iterator self;
    void request_done(const MPI_Status&, const std::string*) override { owner->sending_.erase(self); }
  };
  Sending& new_sending();
  void send(Sending& sending, const void* data, size_t bytes, int tag, int to);

  const MPI_Comm world_;
  Requests& requests_;
  InquirySink& sink_;
  const std::function<std::vector<int>()> dead_ranks_;
  std::list<Sending> sending_;
};

}  // namespace multicomm::mpi
