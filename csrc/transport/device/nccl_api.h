// What multicomm uses of NCCL, found at run time: nothing is linked against it, and tests put a double in its place.
// Declared by hand from NCCL's public interface (nccl.h), whose binary layout is stable within version 2.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <string>

namespace multicomm::device {

using NcclComm = struct NcclCommStruct*;
struct NcclUniqueId {
  char bytes[128];
};

enum NcclResult : int { kNcclSuccess = 0, kNcclInProgress = 7 };
enum NcclType : int {
  kNcclInt8 = 0,
  kNcclUint8 = 1,
  kNcclInt32 = 2,
  kNcclUint32 = 3,
  kNcclInt64 = 4,
  kNcclUint64 = 5,
  kNcclFloat16 = 6,
  kNcclFloat32 = 7,
  kNcclFloat64 = 8,
  kNcclBFloat16 = 9,
};
enum NcclOp : int { kNcclSum = 0, kNcclProd = 1, kNcclMax = 2, kNcclMin = 3, kNcclAvg = 4 };

// The first fields of ncclConfig_t, as NCCL 2.14 had them; `size` and `version` tell the library which it has been
// given.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = 0;
};

// X(member, symbol, arguments): what must be there.
#define MULTICOMM_NCCL_FUNCTIONS(X)                                                                     \
  X(get_version, ncclGetVersion, (int*))                                                                \
  X(get_unique_id, ncclGetUniqueId, (NcclUniqueId*))                                                    \
  X(comm_init, ncclCommInitRankConfig, (NcclComm*, int, NcclUniqueId, int, NcclConfig*))                \
  X(comm_finalize, ncclCommFinalize, (NcclComm))                                                        \
  X(comm_destroy, ncclCommDestroy, (NcclComm))                                                          \
  X(comm_abort, ncclCommAbort, (NcclComm))                                                              \
  X(comm_get_async_error, ncclCommGetAsyncError, (NcclComm, NcclResult*))                               \
  X(group_start, ncclGroupStart, ())                                                                    \
  X(group_end, ncclGroupEnd, ())                                                                        \
  X(all_reduce, ncclAllReduce, (const void*, void*, size_t, NcclType, NcclOp, NcclComm, void*))         \
  X(broadcast, ncclBroadcast, (const void*, void*, size_t, NcclType, int, NcclComm, void*))             \
  X(reduce, ncclReduce, (const void*, void*, size_t, NcclType, NcclOp, int, NcclComm, void*))           \
  X(all_gather, ncclAllGather, (const void*, void*, size_t, NcclType, NcclComm, void*))                 \
  X(reduce_scatter, ncclReduceScatter, (const void*, void*, size_t, NcclType, NcclOp, NcclComm, void*)) \
  X(send, ncclSend, (const void*, size_t, NcclType, int, NcclComm, void*))                              \
  X(receive, ncclRecv, (void*, size_t, NcclType, int, NcclComm, void*))
// From NCCL 2.28 on; null before: sends and receives then do the same.
#define MULTICOMM_NCCL_NEWER_FUNCTIONS(X)                                             \
  X(gather, ncclGather, (const void*, void*, size_t, NcclType, int, NcclComm, void*)) \
  X(scatter, ncclScatter, (const void*, void*, size_t, NcclType, int, NcclComm, void*))

struct NcclApi {
  int version = 0;  // as ncclGetVersion has it: 22807 for 2.28.7
#define MULTICOMM_NCCL_MEMBER(member, symbol, arguments) NcclResult(*member) arguments = nullptr;
  MULTICOMM_NCCL_FUNCTIONS(MULTICOMM_NCCL_MEMBER)
  MULTICOMM_NCCL_NEWER_FUNCTIONS(MULTICOMM_NCCL_MEMBER)
#undef MULTICOMM_NCCL_MEMBER
  const char* (*get_error_string)(NcclResult) = nullptr;
  const char* (*get_last_error)(NcclComm) = nullptr;  // from 2.13 on
};

// Loads NCCL once per process: the library named by MULTICOMM_NCCL_LIBRARY, or else libnccl.so.2: the one that the
// process (torch) has loaded, or the loader finds, or lies where torch's wheel has it. Null without one, or with one
// that is too old; `why` then says what was looked for and where.
const NcclApi* nccl_api(const std::string& given_path, std::string& why);

std::string version_text(int version);  // "2.28.7"

}  // namespace multicomm::device
