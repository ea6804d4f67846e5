// Attention of tree rows over a paged prefix and the fresh tree keys: a warp a row and head, for any head size and dtype.
//
// It is the plain form of the op: right for every case, fast where the keys are few. Long prefixes belong to an attention
// backend, whose output is merged with that of tree_part by the log-sum-exp.
#include <limits>

#include "adaptivespec/scalar_types.h"
#include "adaptivespec/tree.h"
#include "kernels.h"
#include "launch.h"
#include "warp.h"

namespace adaptivespec::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kLanes;

// The running softmax of one row: lane l holds dimensions l, l + 32, ...
template <int Dims>
struct RowState {
  float query[Dims], out[Dims];
  float high = -std::numeric_limits<float>::infinity(), sum = 0.0f;
  int lane, dims;

  template <class T>
  __device__ void take(const T* key, int64_t key_stride, const T* value, int64_t value_stride) {
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < Dims; ++i) {
      const int d = lane + i * kLanes;
      if (d < dims) score += query[i] * to_float(key[d * key_stride]);
    }
    score = warp_all(score, [](float a, float b) { return a + b; });
    if (score == -std::numeric_limits<float>::infinity()) return;
    const float before = high;
    high = score <= high ? high : score;
    const float decay = sum == 0.0f ? 0.0f : expf(before - high), weight = expf(score - high);
    sum = sum * decay + weight;
#pragma unroll
    for (int i = 0; i < Dims; ++i) {
      const int d = lane + i * kLanes;
      if (d < dims) out[i] = out[i] * decay + weight * to_float(value[d * value_stride]);
    }
  }
};

template <class T, int Dims>
__global__ void __launch_bounds__(kThreads) attend(const AttentionArgs<T> args) {
  const int64_t heads = args.kv_heads * args.group;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  const int64_t row = item / heads, head = item % heads, kv_head = head / args.group;
  if (row >= args.queries) return;
  const int64_t b = request_of(args.query_start, args.requests, row);
  if (b < 0) return;
  RowState<Dims> state;
  state.lane = threadIdx.x % kLanes;
  state.dims = static_cast<int>(args.head_dim);
  const T* query = args.query.at(row, head);
#pragma unroll
  for (int i = 0; i < Dims; ++i) {
    const int d = state.lane + i * kLanes;
    state.query[i] = d < state.dims ? to_float(query[d]) * args.scale : 0.0f;
    state.out[i] = 0.0f;
  }

  if (args.prefix_lens) {
    int64_t prefix = args.prefix(b);
    if (prefix > args.table_blocks * args.block_size) prefix = args.table_blocks * args.block_size;
    for (int64_t position = 0; position < prefix; ++position) {
      const int64_t block = args.block_table[b * args.table_stride + position / args.block_size];
      if (block < 0 || block >= args.blocks) continue;
      const int64_t offset = position % args.block_size;
      state.take(args.key_cache.at(block, kv_head, offset), args.key_cache.dim_stride,
                 args.value_cache.at(block, kv_head, offset), args.value_cache.dim_stride);
    }
  }
  const int64_t first = args.key_start[b];
  int64_t keys = args.key_start[b + 1] - first;
  if (first < 0 || first + keys > args.tree_rows) keys = 0;
  const uint64_t word = mask_word(args.ancestors[row], keys);
  for (int64_t column = 0; column < keys && column < kMaxTreeRows; ++column) {
    if (!visible(word, column)) continue;
    state.take(args.tree_key.at(first + column, kv_head), 1, args.tree_value.at(first + column, kv_head), 1);
  }

  // No visible key: zeros, and no mass. A NaN stays.
  const float inverse = state.sum == 0.0f ? 0.0f : 1.0f / state.sum;
  T* out = args.out.at(row, head);
#pragma unroll
  for (int i = 0; i < Dims; ++i) {
    const int d = state.lane + i * kLanes;
    if (d < state.dims) out[d] = from_float<T>(state.out[i] * inverse);
  }
  if (args.lse && state.lane == 0) {
    *args.lse_at(row, head) =
        state.sum == 0.0f ? -std::numeric_limits<float>::infinity() : state.high + logf(state.sum);
  }
}

}  // namespace

template <class T>
void tree_attention(const AttentionArgs<T>& args, cudaStream_t stream) {
  const int64_t items = args.queries * args.kv_heads * args.group, blocks = (items + kWarps - 1) / kWarps;
  if (args.head_dim <= 4 * kLanes) {
    launch(attend<T, 4>, blocks, kThreads, stream, args);
  } else {
    launch(attend<T, 8>, blocks, kThreads, stream, args);
  }
}

template void tree_attention<float>(const AttentionArgs<float>&, cudaStream_t);
template void tree_attention<bf16>(const AttentionArgs<bf16>&, cudaStream_t);
template void tree_attention<fp16>(const AttentionArgs<fp16>&, cudaStream_t);

}  // namespace adaptivespec::cuda
