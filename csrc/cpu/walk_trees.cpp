#include "adaptivespec/walk.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "adaptivespec/scalar_types.h"
#include "checks.h"
#include "isa.h"
#include "ops.h"

#define ADAPTIVESPEC_KERNELS "row_max.inc"
#include "each_isa.inc"

namespace adaptivespec {

namespace {

constexpr const char* kOp = "walk_trees";

// From this many bytes on, one row of a lone request is read by all threads: it then takes longer than they take to meet.
constexpr int64_t kSplitRowBytes = int64_t{1} << 20;

RowMax (*row_max_of(const float*))(const float*, int64_t) { return ADAPTIVESPEC_DISPATCH(row_max_f32); }
RowMax (*row_max_of(const bf16*))(const bf16*, int64_t) { return ADAPTIVESPEC_DISPATCH(row_max_bf16); }
RowMax (*row_max_of(const fp16*))(const fp16*, int64_t) { return ADAPTIVESPEC_DISPATCH(row_max_fp16); }

// Rows of one request's logits.
template <class T>
struct LogitRows {
  const T* data;
  int64_t row_stride;
  int64_t vocab;
  RowMax (*kernel)(const T*, int64_t);
  int parts;  // threads that share a row

  float at(int64_t row, int64_t token) const { return to_float(data[row * row_stride + token]); }

  RowMax max(int64_t row) const {
    const T* values = data + row * row_stride;
    if (parts <= 1) return kernel(values, vocab);
    constexpr int kMostParts = 64;
    RowMax found[kMostParts];
    const int used = std::min(parts, kMostParts);
    torch::stable::parallel_for(0, used, 1, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; ++part) {
        const int64_t begin = vocab * part / used, end = vocab * (part + 1) / used;
        found[part] = kernel(values + begin, end - begin);
        found[part].index += begin;
      }
    });
    RowMax best = found[0];
    for (int part = 1; part < used && best.value == best.value; ++part) {
      if (found[part].value > best.value || found[part].value != found[part].value) best = found[part];
    }
    return best;
  }
};

struct Batch {
  const int32_t* start;
  const int32_t* parents;
  const int32_t* tokens;
  const int64_t* sampled;
  const float* max_log_ratio;
  const int32_t* max_promotions;
  const float* max_regret;
  const int32_t* protected_tokens;
  int64_t num_protected;
  int32_t* paths;
  int64_t path_capacity;
  int32_t* lengths;
  int64_t* next_tokens;
  int32_t* promotions;
  float* regrets;
};

template <class T>
void walk_request(const Batch& batch, const LogitRows<T>& all_rows, int64_t b) {
  const int64_t first = batch.start[b];
  WalkLimits limits;
  if (batch.max_log_ratio) limits.max_log_ratio = batch.max_log_ratio[b];
  if (batch.max_promotions) limits.max_promotions = batch.max_promotions[b];
  if (batch.max_regret) limits.max_regret = batch.max_regret[b];
  if (batch.protected_tokens) {
    limits.protected_tokens = batch.protected_tokens + b * batch.num_protected;
    limits.num_protected = batch.num_protected;
  }
  LogitRows<T> rows = all_rows;
  rows.data += first * rows.row_stride;
  const WalkTree tree{batch.parents + first, batch.tokens + first, batch.sampled ? batch.sampled + first : nullptr,
                      batch.start[b + 1] - first};
  int32_t* path = batch.paths + b * batch.path_capacity;
  const WalkOutcome outcome = walk_one_tree(tree, limits, rows, rows.vocab, path, batch.path_capacity);
  for (int64_t i = outcome.length; i < batch.path_capacity; ++i) path[i] = -1;
  batch.lengths[b] = outcome.length;
  batch.next_tokens[b] = outcome.next_token;
  batch.promotions[b] = outcome.promotions;
  batch.regrets[b] = outcome.regret;
}

template <class T>
void walk_batch(const Batch& batch, const Argument& logits, int64_t requests) {
  LogitRows<T> rows{logits.read<T>(), logits.stride(0), logits.size(1), row_max_of(static_cast<const T*>(nullptr)), 1};
  if (requests == 1) {
    if (rows.vocab * static_cast<int64_t>(sizeof(T)) >= kSplitRowBytes) {
      rows.parts = static_cast<int>(torch::stable::get_num_threads());
    }
    walk_request(batch, rows, 0);
    return;
  }
  torch::stable::parallel_for(0, requests, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) walk_request(batch, rows, b);
  });
}

}  // namespace

void walk_trees(const Tensor& logits, const Tensor& start, const Tensor& parents, const Tensor& tokens,
                const std::optional<Tensor>& sampled, const std::optional<Tensor>& max_log_ratio,
                const std::optional<Tensor>& max_promotions, const std::optional<Tensor>& max_regret,
                const std::optional<Tensor>& protected_tokens, const Tensor& paths, const Tensor& lengths,
                const Tensor& next_tokens, const Tensor& promotions, const Tensor& regrets) {
  const Argument logits_arg(kOp, "logits", logits, 2);              // [T, V]
  const Argument start_arg(kOp, "start", start, 1);                 // [B + 1]
  const Argument parents_arg(kOp, "parents", parents, 1);           // [T]
  const Argument tokens_arg(kOp, "tokens", tokens, 1);              // [T]
  const Argument paths_arg(kOp, "paths", paths, 2);                 // [B, D]
  const Argument lengths_arg(kOp, "lengths", lengths, 1);           // [B]
  const Argument next_tokens_arg(kOp, "next_tokens", next_tokens, 1);
  const Argument promotions_arg(kOp, "promotions", promotions, 1);
  const Argument regrets_arg(kOp, "regrets", regrets, 1);
  const int64_t rows = parents_arg.size(0);
  const int64_t requests = lengths_arg.size(0);
  logits_arg.last_contiguous();
  ADAPTIVESPEC_CHECK(logits_arg.size(0) >= rows, kOp, "logits must have a row for each of the ", rows,
                     " tree rows, got ", shape_text(logits));
  ADAPTIVESPEC_CHECK(logits_arg.size(1) > 0, kOp, "logits must have at least one column");
  parents_arg.of_type(ScalarType::Int).contiguous();
  tokens_arg.of_type(ScalarType::Int).of_size(0, rows).contiguous();
  paths_arg.of_type(ScalarType::Int).of_size(0, requests).contiguous();
  lengths_arg.of_type(ScalarType::Int).contiguous();
  next_tokens_arg.of_type(ScalarType::Long).of_size(0, requests).contiguous();
  promotions_arg.of_type(ScalarType::Int).of_size(0, requests).contiguous();
  regrets_arg.of_type(ScalarType::Float).of_size(0, requests).contiguous();
  start_arg.of_type(ScalarType::Int).of_size(0, requests + 1).contiguous();

  Batch batch{};
  batch.start = start_arg.read<int32_t>();
  check_starts(kOp, "start", batch.start, requests, rows);
  for (int64_t b = 0; b < requests; ++b) {
    ADAPTIVESPEC_CHECK(batch.start[b] < batch.start[b + 1], kOp, "the tree of request ", b, " has no root");
  }
  batch.parents = parents_arg.read<int32_t>();
  batch.tokens = tokens_arg.read<int32_t>();
  if (sampled) {
    const Argument sampled_arg(kOp, "sampled", *sampled, 1);  // [T]
    batch.sampled = sampled_arg.of_type(ScalarType::Long).of_size(0, rows).contiguous().read<int64_t>();
  }
  const auto per_request = [&](const char* name, const std::optional<Tensor>& tensor, ScalarType type) -> const void* {
    if (!tensor) return nullptr;
    return Argument(kOp, name, *tensor, 1).of_type(type).of_size(0, requests).contiguous().template read<void>();
  };
  batch.max_log_ratio = static_cast<const float*>(per_request("max_log_ratio", max_log_ratio, ScalarType::Float));
  batch.max_promotions = static_cast<const int32_t*>(per_request("max_promotions", max_promotions, ScalarType::Int));
  batch.max_regret = static_cast<const float*>(per_request("max_regret", max_regret, ScalarType::Float));
  if (protected_tokens) {
    const Argument protected_arg(kOp, "protected_tokens", *protected_tokens, 2);  // [B, M]
    batch.protected_tokens = protected_arg.of_type(ScalarType::Int).of_size(0, requests).contiguous().read<int32_t>();
    batch.num_protected = protected_arg.size(1);
  }
  batch.paths = paths_arg.write<int32_t>();
  batch.path_capacity = paths_arg.size(1);
  batch.lengths = lengths_arg.write<int32_t>();
  batch.next_tokens = next_tokens_arg.write<int64_t>();
  batch.promotions = promotions_arg.write<int32_t>();
  batch.regrets = regrets_arg.write<float>();

  switch (logits_arg.type()) {
    case ScalarType::Float: return walk_batch<float>(batch, logits_arg, requests);
    case ScalarType::BFloat16: return walk_batch<bf16>(batch, logits_arg, requests);
    case ScalarType::Half: return walk_batch<fp16>(batch, logits_arg, requests);
    default: fail(kOp, "logits must be float32, bfloat16 or float16");
  }
}

}  // namespace adaptivespec
