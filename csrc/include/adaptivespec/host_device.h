// Marks functions that both the CPU ops and their CUDA twins compile.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#define ADAPTIVESPEC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ADAPTIVESPEC_HOST_DEVICE inline
#endif
