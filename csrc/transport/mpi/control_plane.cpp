#include "transport/mpi/control_plane.h"

#include <utility>

namespace multicomm::mpi {

void MpiControlPlane::start_round(const Record& mine, Record& result, Completion& done) {
  round_.done = &done;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Iallreduce(&mine, &result, 1, types_.record(), types_.combine_records(), communicator_, &request),
        "MPI_Iallreduce");
  requests_.add(request, round_);
}

void MpiControlPlane::start_table(const TableEntry& mine, TableEntry* all, Completion& done) {
  round_.done = &done;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Iallgather(&mine, 1, types_.table_entry(), all, 1, types_.table_entry(), communicator_, &request),
        "MPI_Iallgather");
  requests_.add(request, round_);
}

void MpiControlPlane::start_order(const uint64_t& mine, uint64_t& maximum, Completion& done) {
  order_.done = &done;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Iallreduce(&mine, &maximum, 1, MPI_UINT64_T, MPI_MAX, communicator_, &request), "MPI_Iallreduce");
  requests_.add(request, order_);
}

void MpiControlPlane::Slot::request_done(const MPI_Status&, const std::string* error) {
  std::exchange(done, nullptr)->complete(error);
}

}  // namespace multicomm::mpi
