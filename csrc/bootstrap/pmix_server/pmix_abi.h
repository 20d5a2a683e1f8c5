// The few PMIx types, keys and functions that a server needs, laid out as the PMIx standard's ABI has them since
// version 4 (OpenPMIx only appends). Declared here, so that building needs no PMIx headers and any site's libpmix.so.2
// can be opened at run time.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace multicomm::pmix {

using Status = int;
using Rank = uint32_t;
inline constexpr Rank kRankWildcard = UINT32_MAX - 1;
inline constexpr Status kSuccess = 0;
inline constexpr Status kError = -1;
inline constexpr Status kOperationSucceeded = -157;

enum Type : uint16_t {
  kBool = 1,
  kString = 3,
  kSize = 4,
  kUint16 = 13,
  kUint32 = 14,
  kProc = 22,
  kInfo = 24,
  kDataArray = 39,
  kProcRank = 40,
};

struct Proc {
  char nspace[256];
  Rank rank;
};
struct DataArray {
  uint16_t type;
  size_t size;
  void* array;
};
struct Value {
  uint16_t type;
  union {
    bool flag;
    char* string;
    size_t size;
    uint16_t uint16;
    uint32_t uint32;
    Rank rank;
    DataArray* array;
    uint64_t room[3];
  } data;
};
struct Info {
  char key[512];
  uint32_t flags;
  Value value;
};
static_assert(sizeof(Proc) == 260 && sizeof(Value) == 32 && sizeof(Info) == 552, "layout of the PMIx ABI");

using OperationCallback = void (*)(Status, void*);
using ReleaseCallback = void (*)(void*);
using ModexCallback = void (*)(Status, const char*, size_t, void*, ReleaseCallback, void*);
using InfoCallback = void (*)(Status, Info*, size_t, void*, ReleaseCallback, void*);

// Upcalls of the server, in the standard's order; null where a request is not served.
struct ServerModule {
  Status (*client_connected)(const Proc*, void*, OperationCallback, void*);
  Status (*client_finalized)(const Proc*, void*, OperationCallback, void*);
  Status (*abort)(const Proc*, void*, int, const char*, Proc*, size_t, OperationCallback, void*);
  Status (*fence)(const Proc*, size_t, const Info*, size_t, char*, size_t, ModexCallback, void*);
  void* unserved1[15];  // direct modex, publish ... allocate
  Status (*job_control)(const Proc*, const Proc*, size_t, const Info*, size_t, InfoCallback, void*);
  void* unserved2[5];  // monitor ... push stdin
  Status (*group)(int, char*, const Proc*, size_t, const Info*, size_t, InfoCallback, void*);
  void* unserved3[38];  // fabric and whatever later versions append
};

}  // namespace multicomm::pmix
