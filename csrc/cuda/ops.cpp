// Host side of the CUDA ops: check the arguments, launch on torch's current stream, return without waiting.
#include "ops.h"

#include <limits>

#include "attention.h"
#include "build_tree.h"
#include "commit_kv.h"
#include "kernels.h"
#include "stream.h"
#include "topk_logprobs.h"
#include "walk_trees.h"

namespace adaptivespec::cuda_ops {

namespace {

// Row indices and the index in a rank key are 32-bit.
void check_vocabulary(const Place& at, const Argument& logits) {
  ADAPTIVESPEC_CHECK(logits.size(1) < std::numeric_limits<int32_t>::max(), at.op, "logits has ", logits.size(1),
                     " columns, more than fit 32 bits");
}

template <class T>
void check_head_size(const Place& at, const AttentionArgs<T>& args) {
  ADAPTIVESPEC_CHECK(args.head_dim <= cuda::kMostDims, at.op, "head size must be at most ", cuda::kMostDims,
                     " on CUDA, got ", args.head_dim);
}

}  // namespace

void build_tree(const Tensor& parents, const Tensor& start, const Tensor& root_positions, const Tensor& depths,
                const Tensor& positions, const Tensor& ancestors, const Tensor& status) {
  const Place at("build_tree", parents);
  const TreeBuild build =
      build_tree_arguments(at, parents, start, root_positions, depths, positions, ancestors, status);
  const OnDevice device(at);
  cuda::build_tree(build, device.stream);
}

void walk_trees(const Tensor& logits, const Tensor& start, const Tensor& parents, const Tensor& tokens,
                const std::optional<Tensor>& sampled, const std::optional<Tensor>& max_log_ratio,
                const std::optional<Tensor>& max_promotions, const std::optional<Tensor>& max_regret,
                const std::optional<Tensor>& protected_tokens, const Tensor& paths, const Tensor& lengths,
                const Tensor& next_tokens, const Tensor& promotions, const Tensor& regrets,
                const std::optional<Tensor>& workspace) {
  const Place at("walk_trees", logits);
  const Argument logits_arg(at, "logits", logits, 2);  // [T, V]
  const WalkBatch batch =
      walk_trees_arguments(at, logits_arg, start, parents, tokens, sampled, max_log_ratio, max_promotions, max_regret,
                           protected_tokens, paths, lengths, next_tokens, promotions, regrets);
  check_vocabulary(at, logits_arg);
  ADAPTIVESPEC_CHECK(workspace.has_value(), at.op, "workspace must be given for tensors on a GPU");
  const Argument workspace_arg(at, "workspace", *workspace, 2);  // [T or more, kWalkWorkspaceWords]
  workspace_arg.of_type(ScalarType::Long).of_size(1, cuda::kWalkWorkspaceWords).contiguous();
  ADAPTIVESPEC_CHECK(workspace_arg.size(0) >= batch.rows, at.op, "workspace must have a row for each of the ",
                     batch.rows, " tree rows, got ", workspace_arg.shape());
  const OnDevice device(at);
  const auto run = [&]<class T>(T*) {
    cuda::walk_trees(batch, logits_arg.read<T>(), logits_arg.stride(0), logits_arg.size(1),
                     workspace_arg.write<int64_t>(), device.stream);
  };
  switch (logits_arg.type()) {
    case ScalarType::BFloat16: return run(static_cast<bf16*>(nullptr));
    case ScalarType::Half: return run(static_cast<fp16*>(nullptr));
    default: return run(static_cast<float*>(nullptr));
  }
}

void tree_attention(const Tensor& out, const Tensor& query, const Tensor& tree_key, const Tensor& tree_value,
                    const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                    const Tensor& prefix_lens, const Tensor& query_start, const Tensor& key_start,
                    const Tensor& ancestors, double scale) {
  const Place at("tree_attention", query);
  const RowTensors rows(at, out, query, tree_key, tree_value);
  const RowShape shape = rows.shape();
  for_query_type(at, shape.type, [&]<class T>(T*) {
    AttentionArgs<T> args = tree_arguments<T>(at, {query_start, key_start, ancestors}, shape);
    add_prefixes(at, {key_cache, value_cache, block_table, prefix_lens}, shape, args);
    rows.add_to(args);
    args.scale = static_cast<float>(scale);
    check_head_size(at, args);
    const OnDevice device(at);
    cuda::tree_attention(args, device.stream);
  });
}

void tree_part_attention(const Tensor& out, const Tensor& lse, const Tensor& query, const Tensor& tree_key,
               const Tensor& tree_value, const Tensor& query_start, const Tensor& key_start, const Tensor& ancestors,
               double scale) {
  const Place at("tree_part_attention", query);
  const RowTensors rows(at, out, query, tree_key, tree_value);
  const RowShape shape = rows.shape();
  for_query_type(at, shape.type, [&]<class T>(T*) {
    AttentionArgs<T> args = tree_arguments<T>(at, {query_start, key_start, ancestors}, shape);
    rows.add_to(args);
    args.scale = static_cast<float>(scale);
    add_lse(at, lse, shape, args);
    check_head_size(at, args);
    const OnDevice device(at);
    if constexpr (sizeof(T) == 2) {
      if (cuda::fits_tensor_cores(args)) return cuda::tree_part(args, device.stream);
    }
    cuda::tree_attention(args, device.stream);
  });
}

void commit_kv(const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
               const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches, const Tensor& paths,
               const Tensor& lengths, const Tensor& root_rows, const Tensor& slots) {
  const Place at("commit_kv", slots);
  const CommitArguments arguments =
      commit_kv_arguments(at, keys, values, key_caches, value_caches, paths, lengths, root_rows, slots);
  const int64_t bytes = arguments.element_bytes;
  if (arguments.layers() == 0) return;
  ADAPTIVESPEC_CHECK(bytes == 1 || bytes == 2 || bytes == 4, at.op, "caches must have elements of 1, 2 or 4 bytes");
  const OnDevice device(at);
  cuda::commit_kv(arguments.batch, arguments.fresh, arguments.caches, bytes, device.stream);
}

void topk_logprobs(const Tensor& logits, int64_t k, const Tensor& values, const Tensor& indices) {
  const Place at("topk_logprobs", logits);
  const TopkTensors tensors(at, logits, k, values, indices);
  check_vocabulary(at, tensors.logits);
  const OnDevice device(at);
  const auto run = [&]<class T>(T*) {
    cuda::topk_logprobs(tensors.logits.read<T>(), tensors.logits.size(0), tensors.logits.stride(0),
                        tensors.logits.size(1), static_cast<int>(k), tensors.values.write<float>(),
                        tensors.indices.write<int64_t>(), device.stream);
  };
  switch (tensors.logits.type()) {
    case ScalarType::BFloat16: return run(static_cast<bf16*>(nullptr));
    case ScalarType::Half: return run(static_cast<fp16*>(nullptr));
    default: return run(static_cast<float*>(nullptr));
  }
}

}  // namespace adaptivespec::cuda_ops
