#include "transport/mpi/control_plane.h"

namespace multicomm::mpi {

void MpiControlPlane::start_round(const Record& mine, Record& result, Completion& done) {
  done_ = &done;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Iallreduce(&mine, &result, 1, types_.record(), types_.combine_records(), communicator_, &request),
        "MPI_Iallreduce");
  requests_.add(request, *this);
}

void MpiControlPlane::start_table(const TableEntry& mine, TableEntry* all, Completion& done) {
  done_ = &done;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Iallgather(&mine, 1, types_.table_entry(), all, 1, types_.table_entry(), communicator_, &request),
        "MPI_Iallgather");
  requests_.add(request, *this);
}

void MpiControlPlane::start_order(const uint64_t& mine, uint64_t& maximum, Completion& done) {
  done_ = &done;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Iallreduce(&mine, &maximum, 1, MPI_UINT64_T, MPI_MAX, communicator_, &request), "MPI_Iallreduce");
  requests_.add(request, *this);
}

void MpiControlPlane::request_done(const MPI_Status&, const std::string* error) {
  Completion* done = done_;
  done_ = nullptr;
  done->complete(error);
}

}  // namespace multicomm::mpi
