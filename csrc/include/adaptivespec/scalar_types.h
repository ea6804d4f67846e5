// bfloat16 and float16 as 16-bit words, and their conversions.
#pragma once

#include <cstdint>
#include <cstring>

#include "adaptivespec/host_device.h"

namespace adaptivespec {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

ADAPTIVESPEC_HOST_DEVICE float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
ADAPTIVESPEC_HOST_DEVICE uint32_t bits_from_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

ADAPTIVESPEC_HOST_DEVICE float to_float(float value) { return value; }
ADAPTIVESPEC_HOST_DEVICE float to_float(bf16 value) { return float_from_bits(uint32_t{value.bits} << 16); }
ADAPTIVESPEC_HOST_DEVICE float to_float(fp16 value) {
#ifdef __CUDA_ARCH__
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#else
  const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude < 0x400u) {  // subnormal: value = magnitude * 2^-24
    return float_from_bits(sign | bits_from_float(static_cast<float>(magnitude) * 5.9604644775390625e-8f));
  }
  return float_from_bits(sign | ((magnitude << 13) + (112u << 23)));
#endif
}

// Round to nearest, ties to even.
template <class T>
ADAPTIVESPEC_HOST_DEVICE T from_float(float value);
template <>
ADAPTIVESPEC_HOST_DEVICE float from_float<float>(float value) {
  return value;
}
template <>
ADAPTIVESPEC_HOST_DEVICE bf16 from_float<bf16>(float value) {
#ifdef __CUDA_ARCH__
  bf16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#else
  const uint32_t bits = bits_from_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}
template <>
ADAPTIVESPEC_HOST_DEVICE fp16 from_float<fp16>(float value) {
#ifdef __CUDA_ARCH__
  fp16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#else
  const uint32_t bits = bits_from_float(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // rounds past 65504
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: the addition rounds the mantissa to multiples of 2^-24
    half = bits_from_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return fp16{static_cast<uint16_t>(sign | half)};
#endif
}

}  // namespace adaptivespec
