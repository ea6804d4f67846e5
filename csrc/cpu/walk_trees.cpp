#include "walk_trees.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "adaptivespec/scalar_types.h"
#include "adaptivespec/tree.h"
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
  const int32_t* tokens;

  float child_logit(int32_t row, int32_t child) const {
    const int32_t token = tokens[child];
    if (token < 0 || token >= vocab) return -std::numeric_limits<float>::infinity();
    return to_float(data[row * row_stride + token]);
  }

  RowMax max(int32_t row) const {
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

template <class T>
void walk_request(const WalkBatch& batch, const LogitRows<T>& all_rows, int64_t b) {
  const int64_t first = batch.start[b], rows = batch.start[b + 1] - first;
  uint64_t children[kMaxTreeRows] = {};
  for (int64_t row = 1; row < rows; ++row) {
    const int32_t parent = batch.parents[first + row];
    if (parent >= 0 && parent < row) children[parent] |= uint64_t{1} << row;
  }
  LogitRows<T> logits = all_rows;
  logits.data += first * logits.row_stride;
  logits.tokens = batch.tokens + first;
  const WalkTree tree{children, batch.tokens + first, batch.sampled ? batch.sampled + first : nullptr};
  int32_t* path = batch.paths + b * batch.path_capacity;
  const WalkOutcome outcome = walk_one_tree(tree, batch.limits(b), logits, path, batch.path_capacity);
  for (int64_t i = outcome.length; i < batch.path_capacity; ++i) path[i] = -1;
  batch.store(b, outcome);
}

template <class T>
void walk_batch(const WalkBatch& batch, const Argument& logits) {
  LogitRows<T> rows{logits.read<T>(), logits.stride(0), logits.size(1), row_max_of(static_cast<const T*>(nullptr)), 1, nullptr};
  if (batch.requests == 1) {
    if (rows.vocab * static_cast<int64_t>(sizeof(T)) >= kSplitRowBytes) {
      rows.parts = static_cast<int>(torch::stable::get_num_threads());
    }
    walk_request(batch, rows, 0);
    return;
  }
  torch::stable::parallel_for(0, batch.requests, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) walk_request(batch, rows, b);
  });
}

}  // namespace

void walk_trees(const Tensor& logits, const Tensor& start, const Tensor& parents, const Tensor& tokens,
                const std::optional<Tensor>& sampled, const std::optional<Tensor>& max_log_ratio,
                const std::optional<Tensor>& max_promotions, const std::optional<Tensor>& max_regret,
                const std::optional<Tensor>& protected_tokens, const Tensor& paths, const Tensor& lengths,
                const Tensor& next_tokens, const Tensor& promotions, const Tensor& regrets,
                const std::optional<Tensor>& /*workspace: a lone pass needs none*/) {
  const Argument logits_arg(kOp, "logits", logits, 2);  // [T, V]
  const WalkBatch batch =
      walk_trees_arguments(kOp, logits_arg, start, parents, tokens, sampled, max_log_ratio, max_promotions, max_regret,
                           protected_tokens, paths, lengths, next_tokens, promotions, regrets);
  check_starts(kOp, "start", batch.start, batch.requests, batch.rows);
  for (int64_t b = 0; b < batch.requests; ++b) {
    const int64_t rows = batch.start[b + 1] - batch.start[b];
    ADAPTIVESPEC_CHECK(rows > 0, kOp, "the tree of request ", b, " has no root");
    ADAPTIVESPEC_CHECK(rows <= kMaxTreeRows, kOp, "the tree of request ", b, " has ", rows, " rows, more than ",
                       kMaxTreeRows);
  }
  switch (logits_arg.type()) {
    case ScalarType::BFloat16: return walk_batch<bf16>(batch, logits_arg);
    case ScalarType::Half: return walk_batch<fp16>(batch, logits_arg);
    default: return walk_batch<float>(batch, logits_arg);
  }
}

}  // namespace adaptivespec
