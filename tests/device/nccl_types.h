// The part of NCCL's C interface (2.28) that the double offers. nccl_abi.cpp holds it to the real header.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "stream.h"

namespace multicomm::tests::nccl {

struct ncclComm;
using ncclComm_t = ncclComm*;
using cudaStream_t = DeviceStream*;

struct ncclUniqueId {
  char internal[128];
};

enum ncclResult_t {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
};

enum ncclDataType_t {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12,
};

// Values from ncclNumOps on are operations that ncclRedOpCreatePreMulSum made.
enum ncclRedOp_t {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5,
  ncclMaxRedOp = INT_MAX,
};

enum ncclScalarResidence_t { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 };

inline constexpr unsigned kConfigMagic = 0xcafebeef;

// The start of the configuration, which has grown with every version; the rest concerns performance.
struct ncclConfig_t {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};

}  // namespace multicomm::tests::nccl

#ifndef MULTICOMM_REAL_NCCL
using namespace multicomm::tests::nccl;  // the functions below are NCCL's, by name and type
#endif

#define NCCL_DOUBLE_API __attribute__((visibility("default")))

extern "C" {
NCCL_DOUBLE_API ncclResult_t ncclGetVersion(int* version);
NCCL_DOUBLE_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
NCCL_DOUBLE_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                                    ncclConfig_t* config);
NCCL_DOUBLE_API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank);
NCCL_DOUBLE_API ncclResult_t ncclCommFinalize(ncclComm_t comm);
NCCL_DOUBLE_API ncclResult_t ncclCommDestroy(ncclComm_t comm);
NCCL_DOUBLE_API ncclResult_t ncclCommAbort(ncclComm_t comm);
NCCL_DOUBLE_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state);
NCCL_DOUBLE_API const char* ncclGetErrorString(ncclResult_t result);
NCCL_DOUBLE_API const char* ncclGetLastError(ncclComm_t comm);
NCCL_DOUBLE_API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count);
NCCL_DOUBLE_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank);
NCCL_DOUBLE_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                                      ncclScalarResidence_t residence, ncclComm_t comm);
NCCL_DOUBLE_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);
NCCL_DOUBLE_API ncclResult_t ncclGroupStart();
NCCL_DOUBLE_API ncclResult_t ncclGroupEnd();
NCCL_DOUBLE_API ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
NCCL_DOUBLE_API ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                                           ncclComm_t comm, cudaStream_t stream);
NCCL_DOUBLE_API ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                        int root, ncclComm_t comm, cudaStream_t stream);
NCCL_DOUBLE_API ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type,
                                           ncclComm_t comm, cudaStream_t stream);
NCCL_DOUBLE_API ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type,
                                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
NCCL_DOUBLE_API ncclResult_t ncclAlltoAll(const void* send, void* recv, size_t count, ncclDataType_t type,
                                          ncclComm_t comm, cudaStream_t stream);
NCCL_DOUBLE_API ncclResult_t ncclGather(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                                        ncclComm_t comm, cudaStream_t stream);
NCCL_DOUBLE_API ncclResult_t ncclScatter(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                                         ncclComm_t comm, cudaStream_t stream);
NCCL_DOUBLE_API ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                      cudaStream_t stream);
NCCL_DOUBLE_API ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                      cudaStream_t stream);

// The double's own.
NCCL_DOUBLE_API void nccl_double_fail(const char* faults);
NCCL_DOUBLE_API size_t nccl_double_log(char* out, size_t size);
NCCL_DOUBLE_API void nccl_double_counts(uint64_t* kernels, uint64_t* calls, uint64_t* communicators);
}
