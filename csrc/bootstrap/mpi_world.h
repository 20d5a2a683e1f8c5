// The steps of start-up that speak to MPI, and what they depend on.
#pragma once

#include <mpi.h>

#include <stdexcept>
#include <string>

namespace multicomm::bootstrap {

// An MPI call has failed.
struct MpiError : std::runtime_error {
  MpiError(const std::string& call, int code);
};

int available_cores();

// Where Open MPI was unpacked; empty when it lies where it was built for.
std::string relocated_prefix();

// These two throw BootstrapError.
void check_threads();
void compare_worlds(int rank, int size, int mpi_rank, int mpi_size, bool preinitialised);

// These throw MpiError.
void init_mpi();
// A duplicate of MPI_COMM_WORLD that returns errors. Collective. `leave_handler`: the world's own handler is somebody
// else's.
MPI_Comm duplicate_world(bool leave_handler);
// Makes the connections of a nonblocking barrier. Collective. The barrier before MPI_Finalize is where ranks meet that
// have gone: a message to them over a connection that is only being made ends the process inside Open MPI, whatever the
// error handler.
void connect_barrier(MPI_Comm communicator);

}  // namespace multicomm::bootstrap
