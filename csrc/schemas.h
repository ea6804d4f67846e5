// Schemas of the ops, the same for every device: outputs are arguments.
#pragma once

#include <torch/csrc/stable/library.h>

namespace adaptivespec {

inline void define_ops(torch::stable::detail::StableLibrary& m) {
  m.def(
      "build_tree(Tensor parents, Tensor start, Tensor root_positions, Tensor(a!) depths, Tensor(b!) positions, "
      "Tensor(c!) ancestors, Tensor(d!) status) -> ()");
  m.def(
      "walk_trees(Tensor logits, Tensor start, Tensor parents, Tensor tokens, Tensor? sampled, Tensor? max_log_ratio, "
      "Tensor? max_promotions, Tensor? max_regret, Tensor? protected_tokens, Tensor(a!) paths, Tensor(b!) lengths, "
      "Tensor(c!) next_tokens, Tensor(d!) promotions, Tensor(e!) regrets, Tensor(f!)? workspace=None) -> ()");
  m.def(
      "tree_attention(Tensor(a!) out, Tensor query, Tensor tree_key, Tensor tree_value, Tensor key_cache, "
      "Tensor value_cache, Tensor block_table, Tensor prefix_lens, Tensor query_start, Tensor key_start, "
      "Tensor ancestors, float scale) -> ()");
  m.def(
      "tree_part_attention(Tensor(a!) out, Tensor(b!) lse, Tensor query, Tensor tree_key, Tensor tree_value, "
      "Tensor query_start, Tensor key_start, Tensor ancestors, float scale) -> ()");
  m.def(
      "commit_kv(Tensor[] keys, Tensor[] values, Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor paths, "
      "Tensor lengths, Tensor root_rows, Tensor slots) -> ()");
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

}  // namespace adaptivespec
