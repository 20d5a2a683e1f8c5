// Element types and their reduction.
#pragma once

#include <cstddef>

#include "nccl_types.h"

namespace multicomm::tests::nccl {

size_t size_of(ncclDataType_t type);
const char* name_of(ncclDataType_t type);
inline bool reducible(ncclDataType_t type) { return type >= 0 && type <= ncclBfloat16; }

// out[i] = op over `inputs` in their order; halves in float, rounded once.
void reduce(const char* const* inputs, int number, char* out, size_t count, ncclDataType_t type, ncclRedOp_t op);
// out[i] = scalar * in[i]; the scalar has the same type.
void scale(const char* in, char* out, size_t count, ncclDataType_t type, const void* scalar);

}  // namespace multicomm::tests::nccl
