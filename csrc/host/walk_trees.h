// Arguments of walk_trees, on any device.
#pragma once

#include <optional>

#include "adaptivespec/walk.h"
#include "checks.h"

namespace adaptivespec {

// The arguments but for the logits [T or more, V], which are checked too.
inline WalkBatch walk_trees_arguments(const Place& at, const Argument& logits, const Tensor& start,
                                      const Tensor& parents, const Tensor& tokens,
                                      const std::optional<Tensor>& sampled, const std::optional<Tensor>& max_log_ratio,
                                      const std::optional<Tensor>& max_promotions,
                                      const std::optional<Tensor>& max_regret,
                                      const std::optional<Tensor>& protected_tokens, const Tensor& paths,
                                      const Tensor& lengths, const Tensor& next_tokens, const Tensor& promotions,
                                      const Tensor& regrets) {
  const Argument start_arg(at, "start", start, 1);                 // [B + 1]
  const Argument parents_arg(at, "parents", parents, 1);           // [T]
  const Argument tokens_arg(at, "tokens", tokens, 1);              // [T]
  const Argument paths_arg(at, "paths", paths, 2);                 // [B, D]
  const Argument lengths_arg(at, "lengths", lengths, 1);           // [B]
  const Argument next_tokens_arg(at, "next_tokens", next_tokens, 1);
  const Argument promotions_arg(at, "promotions", promotions, 1);
  const Argument regrets_arg(at, "regrets", regrets, 1);
  const int64_t rows = parents_arg.size(0);
  const int64_t requests = lengths_arg.size(0);
  logits.last_contiguous();
  ADAPTIVESPEC_CHECK(logits.type() == ScalarType::Float || logits.type() == ScalarType::BFloat16 ||
                         logits.type() == ScalarType::Half,
                     at.op, "logits must be float32, bfloat16 or float16, got ", dtype_name(logits.type()));
  ADAPTIVESPEC_CHECK(logits.size(0) >= rows, at.op, "logits must have a row for each of the ", rows,
                     " tree rows, got ", logits.shape());
  ADAPTIVESPEC_CHECK(logits.size(1) > 0, at.op, "logits must have at least one column");
  parents_arg.of_type(ScalarType::Int).contiguous();
  tokens_arg.of_type(ScalarType::Int).of_size(0, rows).contiguous();
  paths_arg.of_type(ScalarType::Int).of_size(0, requests).contiguous();
  lengths_arg.of_type(ScalarType::Int).contiguous();
  next_tokens_arg.of_type(ScalarType::Long).of_size(0, requests).contiguous();
  promotions_arg.of_type(ScalarType::Int).of_size(0, requests).contiguous();
  regrets_arg.of_type(ScalarType::Float).of_size(0, requests).contiguous();
  start_arg.of_type(ScalarType::Int).of_size(0, requests + 1).contiguous();

  WalkBatch batch{};
  batch.requests = requests;
  batch.rows = rows;
  batch.start = start_arg.read<int32_t>();
  batch.parents = parents_arg.read<int32_t>();
  batch.tokens = tokens_arg.read<int32_t>();
  if (sampled) {
    const Argument sampled_arg(at, "sampled", *sampled, 1);  // [T]
    batch.sampled = sampled_arg.of_type(ScalarType::Long).of_size(0, rows).contiguous().read<int64_t>();
  }
  const auto per_request = [&](const char* name, const std::optional<Tensor>& tensor, ScalarType type) -> const void* {
    if (!tensor) return nullptr;
    return Argument(at, name, *tensor, 1).of_type(type).of_size(0, requests).contiguous().template read<void>();
  };
  batch.max_log_ratio = static_cast<const float*>(per_request("max_log_ratio", max_log_ratio, ScalarType::Float));
  batch.max_promotions = static_cast<const int32_t*>(per_request("max_promotions", max_promotions, ScalarType::Int));
  batch.max_regret = static_cast<const float*>(per_request("max_regret", max_regret, ScalarType::Float));
  if (protected_tokens) {
    const Argument protected_arg(at, "protected_tokens", *protected_tokens, 2);  // [B, M]
    batch.protected_tokens = protected_arg.of_type(ScalarType::Int).of_size(0, requests).contiguous().read<int32_t>();
    batch.num_protected = protected_arg.size(1);
  }
  batch.paths = paths_arg.write<int32_t>();
  batch.path_capacity = paths_arg.size(1);
  batch.lengths = lengths_arg.write<int32_t>();
  batch.next_tokens = next_tokens_arg.write<int64_t>();
  batch.promotions = promotions_arg.write<int32_t>();
  batch.regrets = regrets_arg.write<float>();
  return batch;
}

}  // namespace adaptivespec
