// Reductions over the lanes of a warp and the warps of a block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace adaptivespec::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kLanes = 32;

// Every lane gets combine() of all lanes' values.
template <class T, class Combine>
__device__ inline T warp_all(T value, const Combine& combine) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

// combine() of all threads' values, in every thread of the first warp. `shared` holds a value a warp.
template <int Threads, class T, class Combine>
__device__ inline T block_all(T value, T* shared, const Combine& combine) {
  constexpr int kWarps = Threads / kLanes;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  value = warp_all(value, combine);
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  if (warp > 0) return value;
  value = shared[lane % kWarps];
  return warp_all(value, combine);
}

struct Max {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

}  // namespace adaptivespec::cuda
