// Element-wise arithmetic on host memory: reduction, conversion to and from the accumulation type, averaging.
// Pure functions: no lock, no allocation, never throw; they also run inside MPI's progress.
#pragma once

#include <cstdint>

#include "coordinator/types.h"

namespace multicomm {

// Whether `op` has a meaning for `dtype` here. Mirrored by the argument checks, so that a refusal is raised at the
// call.
bool can_reduce(DType dtype, ReduceOp op);

// dst[i] = dst[i] op src[i]. Symmetric bit for bit but for which of two NaNs a sum or product hands on: zeros of either
// sign are ordered, NaN wins in MIN and MAX. AVG adds; see finish_average.
// `dtype` must be an accumulation type. bool: SUM, MAX and BOR are or, PRODUCT, MIN and BAND are
// and, as in torch.
void reduce_into(DType dtype, ReduceOp op, void* dst, const void* src, int64_t count);

// Makes every NaN the same one. With it a reduction is symmetric in all bits, as it must be where MPI may swap the
// operands on some ranks: all of them must hold the same result.
void unify_nans(DType dtype, void* data, int64_t count);

// Caller's type -> accumulation type, and back (round to nearest even). A plain copy where both are the same.
void widen(DType dtype, void* dst, const void* src, int64_t count);
void narrow(DType dtype, void* dst, const void* src, int64_t count);

// Fills with what changes nothing in a reduction, of the caller's type: -0 in sums of floating-point numbers, since +0
// would turn a -0. `op` has a meaning for `dtype`.
void fill_identity(DType dtype, ReduceOp op, void* data, int64_t count);

// Divides sums by `ranks`; integers truncate towards zero, as NCCL does. `dtype` must be an accumulation type.
void finish_average(DType dtype, void* data, int64_t count, int ranks);

}  // namespace multicomm
