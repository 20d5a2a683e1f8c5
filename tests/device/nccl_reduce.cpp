#include "nccl_reduce.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace multicomm::tests::nccl {
namespace {

struct Bfloat16 {
  uint16_t bits;

  Bfloat16() = default;
  explicit Bfloat16(float value) {
    const auto wide = std::bit_cast<uint32_t>(value);
    // To the nearest, ties to even; a NaN stays one.
    bits = std::isnan(value) ? 0x7fc0 : static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};

template <typename T>
inline constexpr bool kHalf = std::is_same_v<T, Bfloat16> || std::is_same_v<T, _Float16>;

// What elements are summed in: integers wrap round, in an unsigned type that overflows as it may.
template <typename T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  else return a + b;
}

template <typename T>
T multiply(T a, T b) {
  if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  else return a * b;
}

template <typename T>
T apply(ncclRedOp_t op, T a, T b) {
  switch (op) {
    case ncclProd: return multiply(a, b);
    case ncclMax: return a > b ? a : b;
    case ncclMin: return a < b ? a : b;
    default: return add(a, b);
  }
}

template <typename T>
T load(const char* from, size_t index) {
  T value;
  std::memcpy(&value, from + index * sizeof(T), sizeof(T));
  return value;
}

// Calls f with a value of the element type.
template <typename F>
void with_type(ncclDataType_t type, F&& f) {
  switch (type) {
    case ncclInt8: return f(int8_t{});
    case ncclUint8: return f(uint8_t{});
    case ncclInt32: return f(int32_t{});
    case ncclUint32: return f(uint32_t{});
    case ncclInt64: return f(int64_t{});
    case ncclUint64: return f(uint64_t{});
    case ncclFloat16: return f(_Float16{});
    case ncclFloat32: return f(float{});
    case ncclFloat64: return f(double{});
    case ncclBfloat16: return f(Bfloat16{});
    default: return;  // refused at the call
  }
}

}  // namespace

size_t size_of(ncclDataType_t type) {
  static constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kSizes[type];
}

const char* name_of(ncclDataType_t type) {
  static constexpr const char* kNames[] = {"int8",    "uint8",   "int32",   "uint32",   "int64",      "uint64",
                                           "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return type >= 0 && type < ncclNumTypes ? kNames[type] : "?";
}

void reduce(const char* const* inputs, int number, char* out, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  with_type(type, [&]<typename T>(T) {
    using Wide = std::conditional_t<kHalf<T>, float, T>;
    for (size_t i = 0; i < count; ++i) {
      auto sum = static_cast<Wide>(load<T>(inputs[0], i));
      for (int r = 1; r < number; ++r) sum = apply(op, sum, static_cast<Wide>(load<T>(inputs[r], i)));
      if (op == ncclAvg) sum = static_cast<Wide>(sum / static_cast<Wide>(number));
      const auto result = static_cast<T>(sum);
      std::memcpy(out + i * sizeof(T), &result, sizeof(T));
    }
  });
}

void scale(const char* in, char* out, size_t count, ncclDataType_t type, const void* scalar) {
  with_type(type, [&]<typename T>(T) {
    using Wide = std::conditional_t<kHalf<T>, float, T>;
    const auto factor = static_cast<Wide>(load<T>(static_cast<const char*>(scalar), 0));
    for (size_t i = 0; i < count; ++i) {
      const auto result = static_cast<T>(multiply(factor, static_cast<Wide>(load<T>(in, i))));
      std::memcpy(out + i * sizeof(T), &result, sizeof(T));
    }
  });
}

}  // namespace multicomm::tests::nccl
