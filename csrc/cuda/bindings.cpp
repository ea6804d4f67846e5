// Registration of torch.ops.adaptivespec.* for CUDA, and the Python module whose import loads them, after that of `_C`,
// which has the schemas.
#include <Python.h>

#include "registration.h"

STABLE_TORCH_LIBRARY_IMPL(adaptivespec, CUDA, m) { adaptivespec::cuda_ops::implement_ops(m); }

namespace {

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C_cuda() { return PyModule_Create(&module); }
