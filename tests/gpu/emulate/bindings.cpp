// torch.ops.adaptivespec_emulated.*: the CUDA ops, host side and kernels, on CPU tensors.
#include "registration.h"
#include "schemas.h"

STABLE_TORCH_LIBRARY(adaptivespec_emulated, m) { adaptivespec::define_ops(m); }

STABLE_TORCH_LIBRARY_IMPL(adaptivespec_emulated, CPU, m) { adaptivespec::cuda_ops::implement_ops(m); }
