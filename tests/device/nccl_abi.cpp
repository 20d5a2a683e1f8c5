// Holds nccl_types.h to the real header. By hand, as it needs NCCL's and CUDA's headers:
//   g++ -std=c++20 -fsyntax-only -I$NCCL/include -I$CUDA/include tests/device/nccl_abi.cpp
// Prototypes that differ from NCCL's are an error by themselves: both are declared here, in terms of NCCL's types.
#if __has_include(<nccl.h>)
#include <nccl.h>
#define MULTICOMM_REAL_NCCL
#include "nccl_types.h"

namespace real_names {
namespace ours = multicomm::tests::nccl;

static_assert(sizeof(ours::ncclUniqueId) == sizeof(ncclUniqueId) && NCCL_UNIQUE_ID_BYTES == 128);
static_assert(offsetof(ours::ncclConfig_t, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(ours::ncclConfig_t, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(ours::ncclConfig_t, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(ours::ncclConfig_t, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(sizeof(ours::ncclConfig_t) <= sizeof(ncclConfig_t) && ours::kConfigMagic == NCCL_API_MAGIC);

#define SAME(name) static_assert(int(ours::name) == int(::name))
SAME(ncclSuccess);
SAME(ncclUnhandledCudaError);
SAME(ncclSystemError);
SAME(ncclInternalError);
SAME(ncclInvalidArgument);
SAME(ncclInvalidUsage);
SAME(ncclRemoteError);
SAME(ncclInProgress);
SAME(ncclInt8);
SAME(ncclUint8);
SAME(ncclInt32);
SAME(ncclUint32);
SAME(ncclInt64);
SAME(ncclUint64);
SAME(ncclFloat16);
SAME(ncclFloat32);
SAME(ncclFloat64);
SAME(ncclBfloat16);
SAME(ncclFloat8e4m3);
SAME(ncclFloat8e5m2);
SAME(ncclNumTypes);
SAME(ncclSum);
SAME(ncclProd);
SAME(ncclMax);
SAME(ncclMin);
SAME(ncclAvg);
SAME(ncclNumOps);
SAME(ncclMaxRedOp);
SAME(ncclScalarDevice);
SAME(ncclScalarHostImmediate);
static_assert(sizeof(ours::ncclResult_t) == sizeof(::ncclResult_t));
static_assert(sizeof(ours::ncclDataType_t) == sizeof(::ncclDataType_t));
static_assert(sizeof(ours::ncclRedOp_t) == sizeof(::ncclRedOp_t));
static_assert(sizeof(ours::ncclScalarResidence_t) == sizeof(::ncclScalarResidence_t));

}  // namespace real_names
#endif
