// Entry points of the CUDA ops; bindings.cpp registers them. Signatures are those of the CPU ops.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

namespace adaptivespec::cuda_ops {

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
               const Tensor& tree_value, const Tensor& query_start, const Tensor& key_start, const Tensor& ancestors,
               double scale);

void commit_kv(const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
               const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches, const Tensor& paths,
               const Tensor& lengths, const Tensor& root_rows, const Tensor& slots);

void topk_logprobs(const Tensor& logits, int64_t k, const Tensor& values, const Tensor& indices);

}  // namespace adaptivespec::cuda_ops
