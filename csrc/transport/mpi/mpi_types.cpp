#include "transport/mpi/mpi_types.h"

#include "coordinator/record.h"
#include "coordinator/reduce_kernels.h"
#include "transport/mpi/requests.h"
#include "transport/transport.h"

namespace multicomm::mpi {
namespace {

// MPI calls these inside its progress, on whichever thread is in MPI: they must stay pure.
void combine_in_mpi(void* in, void* inout, int* length, MPI_Datatype*) {
  for (int i = 0; i < *length; ++i) combine(static_cast<const Record*>(in)[i], static_cast<Record*>(inout)[i]);
}

template <ReduceOp kOp>
void reduce_floats(void* in, void* inout, int* length, MPI_Datatype* type) {
  reduce_into(*type == MPI_DOUBLE ? DType::kFloat64 : DType::kFloat32, kOp, inout, in, *length);
}

// Open MPI's own sum of small integers saturates where the processor has instructions for that; sums wrap, as torch's.
void sum_small_integers(void* in, void* inout, int* length, MPI_Datatype* type) {
  const DType dtype = *type == MPI_INT8_T    ? DType::kInt8
                      : *type == MPI_UINT8_T ? DType::kUint8
                      : *type == MPI_INT16_T ? DType::kInt16
                                             : DType::kUint16;
  reduce_into(dtype, ReduceOp::kSum, inout, in, *length);
}

MPI_Datatype make_block(size_t bytes) {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  check(MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &type), "MPI_Type_contiguous");
  check(MPI_Type_commit(&type), "MPI_Type_commit");
  return type;
}

}  // namespace

Types::Types()
    : record_(make_block(sizeof(Record))), table_entry_(make_block(sizeof(TableEntry))), wide_(make_block(16)) {
  check(MPI_Op_create(combine_in_mpi, 1, &combine_), "MPI_Op_create");
  check(MPI_Op_create(sum_small_integers, 1, &small_sum_), "MPI_Op_create");
  check(MPI_Op_create(reduce_floats<ReduceOp::kMin>, 1, &minimum_), "MPI_Op_create");
  check(MPI_Op_create(reduce_floats<ReduceOp::kMax>, 1, &maximum_), "MPI_Op_create");
}

MPI_Datatype Types::reducible(DType dtype) const {
  switch (accumulation_type(dtype)) {
    case DType::kBool:
    case DType::kUint8: return MPI_UINT8_T;
    case DType::kInt8: return MPI_INT8_T;
    case DType::kUint16: return MPI_UINT16_T;
    case DType::kInt16: return MPI_INT16_T;
    case DType::kUint32: return MPI_UINT32_T;
    case DType::kInt32: return MPI_INT32_T;
    case DType::kUint64: return MPI_UINT64_T;
    case DType::kInt64: return MPI_INT64_T;
    case DType::kFloat32: return MPI_FLOAT;
    case DType::kFloat64: return MPI_DOUBLE;
    case DType::kComplex64: return MPI_C_FLOAT_COMPLEX;
    case DType::kComplex128: return MPI_C_DOUBLE_COMPLEX;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kOther8:
    case DType::kOther16:
    case DType::kOther32: break;
  }
  return MPI_DATATYPE_NULL;
}

MPI_Op Types::reduction(DType dtype, ReduceOp op) const {
  const DType type = accumulation_type(dtype);
  const bool floating = type == DType::kFloat32 || type == DType::kFloat64;
  const bool logical = type == DType::kBool;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kPremulSum:
    case ReduceOp::kAvg: return logical ? MPI_LOR : size_of(type) <= 2 ? small_sum_ : MPI_SUM;
    case ReduceOp::kProduct: return logical ? MPI_LAND : MPI_PROD;
    case ReduceOp::kMin: return logical ? MPI_LAND : floating ? minimum_ : MPI_MIN;
    case ReduceOp::kMax: return logical ? MPI_LOR : floating ? maximum_ : MPI_MAX;
    case ReduceOp::kBitAnd: return logical ? MPI_LAND : MPI_BAND;
    case ReduceOp::kBitOr: return logical ? MPI_LOR : MPI_BOR;
    case ReduceOp::kBitXor: return logical ? MPI_LXOR : MPI_BXOR;
    case ReduceOp::kNone: break;
  }
  return MPI_OP_NULL;
}

MPI_Datatype Types::movable(DType dtype) const {
  switch (size_of(dtype)) {
    case 1: return MPI_UINT8_T;
    case 2: return MPI_UINT16_T;
    case 4: return MPI_UINT32_T;
    case 8: return MPI_UINT64_T;
    default: return wide_;
  }
}

}  // namespace multicomm::mpi
