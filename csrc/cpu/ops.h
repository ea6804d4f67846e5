// Entry points of the CPU ops, one a file; bindings.cpp registers them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

namespace adaptivespec {

using torch::stable::Tensor;

void build_tree(const Tensor& parents, const Tensor& start, const Tensor& root_positions, const Tensor& depths,
                const Tensor& positions, const Tensor& ancestors, const Tensor& status);

void walk_trees(const Tensor& logits, const Tensor& start, const Tensor& parents, const Tensor& tokens,
                const std::optional<Tensor>& sampled, const std::optional<Tensor>& max_log_ratio,
                const std::optional<Tensor>& max_promotions, const std::optional<Tensor>& max_regret,
                const std::optional<Tensor>& protected_tokens, const Tensor& paths, const Tensor& lengths,
                const Tensor& next_tokens, const Tensor& promotions, const Tensor& regrets,
                const std::optional<Tensor>& workspace);

void tree_attention(const Tensor& out, const Tensor& query, const Tensor& tree_key, const Tensor& tree_value,
                    const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                    const Tensor& prefix_lens, const Tensor& query_start, const Tensor& key_start,
                    const Tensor& ancestors, double scale);

void tree_part_attention(const Tensor& out, const Tensor& lse, const Tensor& query, const Tensor& tree_key,
                         const Tensor& tree_value, const Tensor& query_start, const Tensor& key_start,
                         const Tensor& ancestors, double scale);

void commit_kv(const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
               const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches, const Tensor& paths,
               const Tensor& lengths, const Tensor& root_rows, const Tensor& slots);

void topk_logprobs(const Tensor& logits, int64_t k, const Tensor& values, const Tensor& indices);

void linear(const Tensor& out, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias);

void draft_input(const Tensor& x, const Tensor& residual, const Tensor& tokens, const Tensor& parent_rows,
                 const Tensor& embeddings, const Tensor& hidden, const Tensor& embed_norm, const Tensor& hidden_norm,
                 double eps, bool norm_before_residual);

void draft_layer(const Tensor& normed, const Tensor& residual, const Tensor& keys, const Tensor& values,
                 const Tensor& x, const Tensor& qkv, const std::optional<Tensor>& qkv_bias,
                 const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, const Tensor& o,
                 const std::optional<Tensor>& o_bias, const Tensor& post_norm, const Tensor& gate_up,
                 const std::optional<Tensor>& gate_up_bias, const Tensor& down,
                 const std::optional<Tensor>& down_bias, const Tensor& next_norm, double eps, const Tensor& cos_sin,
                 const Tensor& positions, const Tensor& scratch_rows, const Tensor& key_cache,
                 const Tensor& value_cache, const Tensor& block_table, const Tensor& prefix_lens,
                 const Tensor& query_start, const Tensor& key_start, const Tensor& ancestors, double scale);

// The instruction set that the vector kernels run with here: "avx512", "avx2" or "portable".
const char* vector_isa();

}  // namespace adaptivespec
