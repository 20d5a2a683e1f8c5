#include "coordinator/reduce_kernels.h"

#include <bit>
#include <complex>
#include <cstring>
#include <limits>
#include <type_traits>

#include "coordinator/half.h"

namespace multicomm {
namespace {

template <typename T>
struct IsComplex : std::false_type {};
template <typename T>
struct IsComplex<std::complex<T>> : std::true_type {};

template <typename T>
using BitsOf = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

template <bool kMax, typename T>
T extreme(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a || b != b) return std::numeric_limits<T>::quiet_NaN();
    if (a == b) {  // differs at most in the sign of zero: -0 < +0, whatever the order of operands
      const auto x = std::bit_cast<BitsOf<T>>(a), y = std::bit_cast<BitsOf<T>>(b);
      return std::bit_cast<T>(static_cast<BitsOf<T>>(kMax ? x & y : x | y));
    }
  }
  return (a < b) == kMax ? b : a;
}

template <typename T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {  // wraps like torch; signed overflow is undefined in C++
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  } else {
    return a + b;
  }
}

template <typename T>
T multiply(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else if constexpr (IsComplex<T>::value) {
    return T(a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real());
  } else {
    return a * b;
  }
}

template <typename T>
T identity(ReduceOp op) {
  if constexpr (IsComplex<T>::value) {
    using Real = typename T::value_type;
    return op == ReduceOp::kProduct ? T(1) : T(-Real(0), -Real(0));
  } else {
    using Limits = std::numeric_limits<T>;
    constexpr bool kInfinite = Limits::has_infinity;
    switch (op) {
      case ReduceOp::kProduct: return T(1);
      case ReduceOp::kMin: return kInfinite ? Limits::infinity() : Limits::max();
      case ReduceOp::kMax: return kInfinite ? -Limits::infinity() : Limits::lowest();
      case ReduceOp::kBitAnd:
        if constexpr (std::is_integral_v<T>) return static_cast<T>(~T(0));
        return T(0);
      default: return std::is_floating_point_v<T> ? -T(0) : T(0);
    }
  }
}

template <typename T, typename F>
void apply(void* dst, const void* src, int64_t count, F f) {
  T* d = static_cast<T*>(dst);
  const T* s = static_cast<const T*>(src);
  for (int64_t i = 0; i < count; ++i) d[i] = f(d[i], s[i]);
}

template <typename T>
void reduce_bits(ReduceOp op, void* dst, const void* src, int64_t count) {
  if (op == ReduceOp::kBitAnd) apply<T>(dst, src, count, [](T a, T b) { return static_cast<T>(a & b); });
  else if (op == ReduceOp::kBitOr) apply<T>(dst, src, count, [](T a, T b) { return static_cast<T>(a | b); });
  else apply<T>(dst, src, count, [](T a, T b) { return static_cast<T>(a ^ b); });
}

template <typename T>
void reduce_typed(ReduceOp op, void* dst, const void* src, int64_t count) {
  switch (op) {
    case ReduceOp::kNone: return;
    case ReduceOp::kSum:
    case ReduceOp::kPremulSum:
    case ReduceOp::kAvg: return apply<T>(dst, src, count, add<T>);
    case ReduceOp::kProduct: return apply<T>(dst, src, count, multiply<T>);
    case ReduceOp::kMin:
      if constexpr (!IsComplex<T>::value) apply<T>(dst, src, count, extreme<false, T>);
      return;
    case ReduceOp::kMax:
      if constexpr (!IsComplex<T>::value) apply<T>(dst, src, count, extreme<true, T>);
      return;
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      if constexpr (std::is_integral_v<T>) reduce_bits<T>(op, dst, src, count);
      return;
  }
}

void reduce_bool(ReduceOp op, void* dst, const void* src, int64_t count) {
  if (op == ReduceOp::kBitXor)
    return apply<uint8_t>(dst, src, count,
                          [](uint8_t a, uint8_t b) { return static_cast<uint8_t>((a != 0) != (b != 0)); });
  const bool any = op == ReduceOp::kSum || op == ReduceOp::kMax || op == ReduceOp::kBitOr;
  if (any) {
    apply<uint8_t>(dst, src, count, [](uint8_t a, uint8_t b) { return static_cast<uint8_t>((a | b) != 0); });
  } else {
    apply<uint8_t>(dst, src, count, [](uint8_t a, uint8_t b) { return static_cast<uint8_t>(a != 0 && b != 0); });
  }
}

template <typename T>
void average_typed(void* data, int64_t count, int ranks) {
  T* d = static_cast<T*>(data);
  if constexpr (std::is_integral_v<T>) {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    for (int64_t i = 0; i < count; ++i) d[i] = static_cast<T>(static_cast<Wide>(d[i]) / static_cast<Wide>(ranks));
  } else {
    using Real = decltype(std::real(T{}));
    for (int64_t i = 0; i < count; ++i) d[i] = d[i] / static_cast<Real>(ranks);
  }
}

// Calls f with a null pointer of the C++ type that carries `dtype`.
template <typename F>
void with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kUint8: return f(static_cast<uint8_t*>(nullptr));
    case DType::kInt8: return f(static_cast<int8_t*>(nullptr));
    case DType::kUint16: return f(static_cast<uint16_t*>(nullptr));
    case DType::kInt16: return f(static_cast<int16_t*>(nullptr));
    case DType::kUint32: return f(static_cast<uint32_t*>(nullptr));
    case DType::kInt32: return f(static_cast<int32_t*>(nullptr));
    case DType::kUint64: return f(static_cast<uint64_t*>(nullptr));
    case DType::kInt64: return f(static_cast<int64_t*>(nullptr));
    case DType::kFloat32: return f(static_cast<float*>(nullptr));
    case DType::kFloat64: return f(static_cast<double*>(nullptr));
    case DType::kComplex64: return f(static_cast<std::complex<float>*>(nullptr));
    case DType::kComplex128: return f(static_cast<std::complex<double>*>(nullptr));
    case DType::kBool:
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kOther8:
    case DType::kOther16:
    case DType::kOther32: return;
  }
}

}  // namespace

bool can_reduce(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kOther8:
    case DType::kOther16:
    case DType::kOther32: return false;
    case DType::kBool: return op != ReduceOp::kAvg && op != ReduceOp::kPremulSum && op != ReduceOp::kNone;
    case DType::kComplex64:
    case DType::kComplex128:
      return op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kProduct || op == ReduceOp::kPremulSum;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat32:
    case DType::kFloat64: return op != ReduceOp::kNone && !is_bitwise(op);
    default: return op != ReduceOp::kNone;
  }
}

void reduce_into(DType dtype, ReduceOp op, void* dst, const void* src, int64_t count) {
  if (dtype == DType::kBool) return reduce_bool(op, dst, src, count);
  with_type(dtype, [&](auto* type) { reduce_typed<std::remove_pointer_t<decltype(type)>>(op, dst, src, count); });
}

void unify_nans(DType dtype, void* data, int64_t count) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (!std::is_integral_v<T>) {
      using Real = decltype(std::real(T{}));
      auto* const d = static_cast<Real*>(data);
      const auto parts = count * static_cast<int64_t>(sizeof(T) / sizeof(Real));
      for (int64_t i = 0; i < parts; ++i)
        if (d[i] != d[i]) d[i] = std::numeric_limits<Real>::quiet_NaN();
    }
  });
}

void widen(DType dtype, void* dst, const void* src, int64_t count) {
  if (dtype == DType::kFloat16) {
    half_to_float(static_cast<float*>(dst), static_cast<const uint16_t*>(src), count);
  } else if (dtype == DType::kBFloat16) {
    bfloat_to_float(static_cast<float*>(dst), static_cast<const uint16_t*>(src), count);
  } else if (count > 0 && dst != src) {
    std::memcpy(dst, src, static_cast<size_t>(count) * size_of(dtype));
  }
}

void narrow(DType dtype, void* dst, const void* src, int64_t count) {
  if (dtype == DType::kFloat16) {
    float_to_half(static_cast<uint16_t*>(dst), static_cast<const float*>(src), count);
  } else if (dtype == DType::kBFloat16) {
    float_to_bfloat(static_cast<uint16_t*>(dst), static_cast<const float*>(src), count);
  } else if (count > 0 && dst != src) {
    std::memcpy(dst, src, static_cast<size_t>(count) * size_of(dtype));
  }
}

void fill_identity(DType dtype, ReduceOp op, void* data, int64_t count) {
  const size_t element = size_of(dtype);
  alignas(16) std::byte wide[16] = {}, one[16] = {};
  if (dtype == DType::kBool) {
    wide[0] = std::byte(op == ReduceOp::kProduct || op == ReduceOp::kMin || op == ReduceOp::kBitAnd ? 1 : 0);
  } else {
    with_type(accumulation_type(dtype), [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      const T value = identity<T>(op);
      std::memcpy(wide, &value, sizeof(T));
    });
  }
  narrow(dtype, one, wide, 1);
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(static_cast<std::byte*>(data) + static_cast<size_t>(i) * element, one, element);
}

void finish_average(DType dtype, void* data, int64_t count, int ranks) {
  with_type(dtype, [&](auto* type) { average_typed<std::remove_pointer_t<decltype(type)>>(data, count, ranks); });
}

}  // namespace multicomm
