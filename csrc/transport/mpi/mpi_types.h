// MPI's datatypes and operations for ours; made once per process, after MPI is up.
#pragma once

#include <mpi.h>

#include "coordinator/types.h"

namespace multicomm::mpi {

class Types {
 public:
  Types();
  MPI_Datatype record() const { return record_; }
  MPI_Op combine_records() const { return combine_; }
  MPI_Datatype table_entry() const { return table_entry_; }
  // Datatype and operation of a reduction on the accumulation type of `dtype`.
  MPI_Datatype reducible(DType dtype) const;
  MPI_Op reduction(DType dtype, ReduceOp op) const;
  // `size_of(dtype)` opaque bytes as one element, so that counts stay counts of elements.
  MPI_Datatype movable(DType dtype) const;

 private:
  MPI_Datatype record_ = MPI_DATATYPE_NULL;
  MPI_Datatype table_entry_ = MPI_DATATYPE_NULL;
  MPI_Datatype wide_ = MPI_DATATYPE_NULL;  // 16 bytes
  MPI_Op combine_ = MPI_OP_NULL;
  MPI_Op small_sum_ = MPI_OP_NULL;  // of 8 and 16 bits: wraps
  MPI_Op minimum_ = MPI_OP_NULL;    // of floating point: NaN wins, zeros are ordered, as in the inline path
  MPI_Op maximum_ = MPI_OP_NULL;
};

}  // namespace multicomm::mpi
