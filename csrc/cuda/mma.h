// Tensor core products of 16-bit values with float32 sums, a warp at a time. Lane l has group g = l / 4, t = l % 4.
//
//   A [16, 16]  a[0]: row g, columns 2t, 2t+1     a[1]: row g + 8, the same     a[2], a[3]: as these, columns + 8
//   B [16, 8]   b[0]: rows 2t, 2t+1 of column g   b[1]: rows + 8
//   C [16, 8]   c[0], c[1]: row g, columns 2t, 2t+1                             c[2], c[3]: row g + 8
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "adaptivespec/scalar_types.h"

namespace adaptivespec::cuda {

#ifdef __CUDACC__

__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const bf16*) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const fp16*) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices from shared memory: lanes 8i to 8i + 7 point at the rows of matrix i, 16 bytes each. Lane l gets
// of each matrix row g, columns 2t and 2t + 1; transposed, column g, rows 2t and 2t + 1.
__device__ inline void load_matrices(uint32_t (&r)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

#else  // the sources run on the CPU: tests/gpu/emulate

template <class T>
inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const T*) {
  emulate_multiply_add(c, a, b0, b1, [](uint16_t bits) { return to_float(T{bits}); });
}
inline void load_matrices(uint32_t (&r)[4], const void* row) { emulate_load_matrices(r, row, false); }
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) { emulate_load_matrices(r, row, true); }

#endif

// Two values as A and B hold them, the first in the low half.
template <class T>
__device__ inline uint32_t pack(float low, float high) {
  return uint32_t{from_float<T>(low).bits} | uint32_t{from_float<T>(high).bits} << 16;
}

}  // namespace adaptivespec::cuda
