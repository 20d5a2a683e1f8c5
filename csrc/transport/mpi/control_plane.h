// Rounds over one group's control communicator.
#pragma once

#include "transport/mpi/mpi_types.h"
#include "transport/mpi/requests.h"

namespace multicomm::mpi {

class MpiControlPlane final : public ControlPlane {
 public:
  MpiControlPlane(MPI_Comm communicator, Requests& requests, const Types& types)
      : communicator_(communicator), requests_(requests), types_(types) {}
  void start_round(const Record& mine, Record& result, Completion& done) override;
  void start_table(const TableEntry& mine, TableEntry* all, Completion& done) override;
  void start_order(const uint64_t& mine, uint64_t& maximum, Completion& done) override;

 private:
  // One at a time is in flight of each: a round or a table, and a second phase.
  struct Slot final : RequestHandler {
    void request_done(const MPI_Status& status, const std::string* error) override;
    Completion* done = nullptr;
  };

  MPI_Comm communicator_;
  Requests& requests_;
  const Types& types_;
  Slot round_;
  Slot order_;
};

}  // namespace multicomm::mpi
