// Launches of kernels on a stream, and the errors of launching. Nothing here waits for the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace adaptivespec::cuda {

// A grid of one dimension and its threads a block; without blocks nothing is launched.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
            const Arguments&... arguments) {
  if (blocks <= 0) return;
#ifdef __CUDACC__
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(arguments...);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA launch: ") + cudaGetErrorString(error));
#else
  (void)stream;
  emulate_grid(blocks, threads, [&] { kernel(arguments...); });
#endif
}

// Multiprocessors of the current device; asked once a device.
inline int multiprocessors() {
  constexpr int kDevices = 64;
  static int known[kDevices] = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return 1;
  if (known[device] == 0) {
    int count = 1;
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) count = 1;
    known[device] = count;
  }
  return known[device];
}

}  // namespace adaptivespec::cuda
