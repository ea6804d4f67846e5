// The device of an op's tensors made current, and torch's current stream on it.
#pragma once

#include <cuda_runtime.h>

#include "checks.h"

#ifndef ADAPTIVESPEC_EMULATED
#include <torch/csrc/stable/accelerator.h>

// Declared by torch only in its own CUDA builds. Weak: the module also loads beside a torch without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#endif

namespace adaptivespec::cuda_ops {

#ifdef ADAPTIVESPEC_EMULATED

struct OnDevice {
  cudaStream_t stream = nullptr;
  explicit OnDevice(const Place&) {}
};

#else

struct OnDevice {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  explicit OnDevice(const Place& at) : guard(at.device), stream(current_stream(at)) {
    // Torch's runtime has the device current now; ours keeps account of its own.
    ADAPTIVESPEC_CHECK(cudaSetDevice(at.device) == cudaSuccess, at.op, "device ", at.device, " cannot be used");
  }

 private:
  static cudaStream_t current_stream(const Place& at) {
    ADAPTIVESPEC_CHECK(aoti_torch_get_current_cuda_stream != nullptr, at.op, "this torch was built without CUDA");
    void* stream = nullptr;
    ADAPTIVESPEC_CHECK(aoti_torch_get_current_cuda_stream(at.device, &stream) == AOTI_TORCH_SUCCESS, at.op,
                       "torch has no current stream on device ", at.device);
    return static_cast<cudaStream_t>(stream);
  }
};

#endif

}  // namespace adaptivespec::cuda_ops
