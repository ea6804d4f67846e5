// Registration of torch.ops.adaptivespec.* for the CPU, and the Python module whose import loads them.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include "ops.h"
#include "schemas.h"

STABLE_TORCH_LIBRARY(adaptivespec, m) { adaptivespec::define_ops(m); }

STABLE_TORCH_LIBRARY_IMPL(adaptivespec, CPU, m) {
  m.impl("build_tree", TORCH_BOX(&adaptivespec::build_tree));
  m.impl("walk_trees", TORCH_BOX(&adaptivespec::walk_trees));
  m.impl("tree_attention", TORCH_BOX(&adaptivespec::tree_attention));
  m.impl("tree_part_attention", TORCH_BOX(&adaptivespec::tree_part_attention));
  m.impl("commit_kv", TORCH_BOX(&adaptivespec::commit_kv));
  m.impl("topk_logprobs", TORCH_BOX(&adaptivespec::topk_logprobs));
  m.impl("linear", TORCH_BOX(&adaptivespec::linear));
  m.impl("draft_input", TORCH_BOX(&adaptivespec::draft_input));
  m.impl("draft_layer", TORCH_BOX(&adaptivespec::draft_layer));
}

namespace {

PyObject* vector_isa(PyObject*, PyObject*) { return PyUnicode_FromString(adaptivespec::vector_isa()); }

PyMethodDef methods[] = {{"vector_isa", vector_isa, METH_NOARGS, "Instruction set of the CPU kernels."},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module); }
