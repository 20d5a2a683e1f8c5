// Inquiries over MPI messages.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "transport/inquiry.h"
#include "transport/mpi/requests.h"

namespace multicomm::mpi {

// What is known of the world besides MPI.
struct World {
  int rank = 0;
  int size = 1;
  std::function<std::vector<int>()> dead_ranks;  // whose process has ended
  std::function<std::string(int)> place_of;
  std::function<std::string(int)> seen_of;
};

// On a duplicate of the world of its own. What has come is looked for now and then (MPI_Improbe) instead of by a
// receive that is always there: nothing has to be cancelled at the end, and a dead rank breaks nothing. Driver only.
class Inquiries final : public InquiryPlane {
 public:
  Inquiries(MPI_Comm communicator, Requests& requests, InquirySink& sink, World world)
      : communicator_(communicator), requests_(requests), sink_(sink), world_(std::move(world)) {}
  void ask(int global_rank, const Inquiry& inquiry) override;
  void tell(int global_rank, const Notice& notice) override;
  void ask_report(int global_rank, const ReportInquiry& inquiry) override;
  void send_report(int global_rank, uint64_t number, const std::string& report) override;
  void look() override;
  std::vector<int> dead_ranks() const override { return world_.dead_ranks(); }
  int rank() const override { return world_.rank; }
  int size() const override { return world_.size; }
  std::string place_of(int global_rank) const override { return world_.place_of(global_rank); }
  std::string seen_of(int global_rank) const override { return world_.seen_of(global_rank); }

 private:
  // A report travels in pieces small enough to be sent at once: a send that waited for an asker that has gone would be
  // there for ever, and MPI_Finalize with it.
  struct Piece {
    uint64_t number;
    uint32_t index;
    uint32_t pieces;
    uint32_t bytes;
    char text[2028];
  };
  struct Sending final : RequestHandler {
    Inquiries* owner = nullptr;
    std::vector<std::byte> data;
    std::list<Sending>::iterator self;
    void request_done(const MPI_Status&, const std::string*) override { owner->sending_.erase(self); }
  };
  struct Receiving final : RequestHandler {
    Inquiries* owner = nullptr;
    int from = 0;
    Piece piece;
    std::list<Receiving>::iterator self;
    void request_done(const MPI_Status&, const std::string* error) override {
      owner->received(*this, error == nullptr);
    }
  };
  // The pieces of a rank's latest report.
  struct Assembly {
    uint64_t number = 0;
    std::map<uint32_t, std::string> pieces;
  };
  void send(const void* data, size_t bytes, int tag, int to);
  void receive_piece(MPI_Message message, int from);
  void received(Receiving& receiving, bool whole);

  const MPI_Comm communicator_;
  Requests& requests_;
  InquirySink& sink_;
  const World world_;
  std::list<Sending> sending_;
  std::list<Receiving> receiving_;
  std::map<int, Assembly> assemblies_;  // by rank
};

}  // namespace multicomm::mpi
