// Conversions between IEEE 754 binary16, bfloat16 and float, round to nearest even.
#pragma once

#include <bit>
#include <cstdint>

namespace multicomm {

inline float half_bits_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  if (rest >= 0x0400u) return std::bit_cast<float>(sign | ((rest << 13) + 0x38000000u));
  // Subnormal or zero: rest * 2^-24 is exact in float.
  const float value = static_cast<float>(rest) * 0x1p-24f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

inline uint16_t float_to_half_bits(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return sign | 0x7e00u;   // NaN, made quiet
  if (rest >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
  if (rest < 0x38800000u) {                        // below 2^-14: subnormal; adding 0.5 aligns the rounding
    const float shifted = std::bit_cast<float>(rest) + 0.5f;
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(shifted) - 0x3f000000u);
  }
  const uint32_t odd = (rest >> 13) & 1u;
  return sign | static_cast<uint16_t>((rest - 0x38000000u + 0x0fffu + odd) >> 13);
}

inline float bfloat_bits_to_float(uint16_t b) { return std::bit_cast<float>(static_cast<uint32_t>(b) << 16); }

inline uint16_t float_to_bfloat_bits(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline void half_to_float(float* dst, const uint16_t* src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = half_bits_to_float(src[i]);
}
inline void float_to_half(uint16_t* dst, const float* src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = float_to_half_bits(src[i]);
}
inline void bfloat_to_float(float* dst, const uint16_t* src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = bfloat_bits_to_float(src[i]);
}
inline void float_to_bfloat(uint16_t* dst, const float* src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = float_to_bfloat_bits(src[i]);
}

}  // namespace multicomm
