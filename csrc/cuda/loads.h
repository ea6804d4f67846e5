// Rows of values read 16 bytes at a time, each once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "adaptivespec/scalar_types.h"

namespace adaptivespec::cuda {

template <class T>
constexpr int kVector = 16 / sizeof(T);

// A row of any alignment: some values up to the first 16-byte boundary, whole vectors, the rest.
template <class T>
struct VectorRow {
  const T* values;
  int64_t head, vectors, count;

  __device__ VectorRow(const T* row, int64_t count_) : values(row), count(count_) {
    const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    head = past ? kVector<T> - past : 0;
    if (head > count) head = count;
    vectors = (count - head) / kVector<T>;
  }

  __device__ int64_t tail() const { return head + vectors * kVector<T>; }
  __device__ uint4 load(int64_t vector) const {
    return __ldcs(reinterpret_cast<const uint4*>(values + head) + vector);
  }
  __device__ int64_t index(int64_t vector) const { return head + vector * kVector<T>; }
};

__device__ inline void unpack(const uint4& bits, const float*, float (&x)[4]) {
  x[0] = float_from_bits(bits.x);
  x[1] = float_from_bits(bits.y);
  x[2] = float_from_bits(bits.z);
  x[3] = float_from_bits(bits.w);
}

template <class T>
__device__ inline void unpack(const uint4& bits, const T*, float (&x)[8]) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = to_float(T{static_cast<uint16_t>(words[i] & 0xffffu)});
    x[2 * i + 1] = to_float(T{static_cast<uint16_t>(words[i] >> 16)});
  }
}

// The greater of two, NaN if one is.
__device__ inline float max_nan(float a, float b) {
#ifdef __CUDA_ARCH__
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a != a || a > b ? a : b;
#endif
}

}  // namespace adaptivespec::cuda
