// Schemas and registration of torch.ops.adaptivespec.*, and the Python module whose import loads them.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include "ops.h"

STABLE_TORCH_LIBRARY(adaptivespec, m) {
  m.def(
      "build_tree(Tensor parents, Tensor start, Tensor root_positions, Tensor(a!) depths, Tensor(b!) positions, "
      "Tensor(c!) ancestors, Tensor(d!) status) -> ()");
  m.def(
      "walk_trees(Tensor logits, Tensor start, Tensor parents, Tensor tokens, Tensor? sampled, Tensor? max_log_ratio, "
      "Tensor? max_promotions, Tensor? max_regret, Tensor? protected_tokens, Tensor(a!) paths, Tensor(b!) lengths, "
      "Tensor(c!) next_tokens, Tensor(d!) promotions, Tensor(e!) regrets) -> ()");
  m.def(
      "tree_attention(Tensor(a!) out, Tensor query, Tensor tree_key, Tensor tree_value, Tensor key_cache, "
      "Tensor value_cache, Tensor block_table, Tensor prefix_lens, Tensor query_start, Tensor key_start, "
      "Tensor ancestors, float scale) -> ()");
  m.def("topk_logprobs(Tensor logits, int k, Tensor(a!) values, Tensor(b!) indices) -> ()");
  m.def("linear(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()");
  m.def(
      "draft_input(Tensor(a!) x, Tensor(b!) residual, Tensor tokens, Tensor parent_rows, Tensor embeddings, "
      "Tensor hidden, Tensor embed_norm, Tensor hidden_norm, float eps, bool norm_before_residual) -> ()");
  m.def(
      "draft_layer(Tensor(a!) normed, Tensor(b!) residual, Tensor(c!) keys, Tensor(d!) values, Tensor x, Tensor qkv, "
      "Tensor? qkv_bias, Tensor? q_norm, Tensor? k_norm, Tensor o, Tensor? o_bias, Tensor post_norm, Tensor gate_up, "
      "Tensor? gate_up_bias, Tensor down, Tensor? down_bias, Tensor next_norm, float eps, Tensor cos_sin, "
      "Tensor positions, Tensor scratch_rows, Tensor key_cache, Tensor value_cache, Tensor block_table, "
      "Tensor prefix_lens, Tensor query_start, Tensor key_start, Tensor ancestors, float scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(adaptivespec, CPU, m) {
  m.impl("build_tree", TORCH_BOX(&adaptivespec::build_tree));
  m.impl("walk_trees", TORCH_BOX(&adaptivespec::walk_trees));
  m.impl("tree_attention", TORCH_BOX(&adaptivespec::tree_attention));
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
