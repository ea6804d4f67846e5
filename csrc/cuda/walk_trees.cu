// The margin check and the walk: the rows of logits are read once, then one small block a request walks its tree.
//
// Bytes that must move: T rows of V values, T = requests x rows; everything else is under 30 bytes a row. Floor in
// microseconds at 4.8 TB/s, 16-bit logits (32-bit: twice that):
//
//                  V = 131072                          V = 262144
//   rows     batch 1    batch 8   batch 64       batch 1   batch 8   batch 64
//      8        0.44        3.5       28.0          0.87       7.0       55.9
//     16        0.87        7.0       55.9          1.75      14.0        112
//     64        3.5        28.0        224          7.0       55.9        447
//
// Under about 4 us the two launches cost more than the bytes. A walk steps through shared memory, a node of the path and
// its children at a time: about 1 us at depth 8.
#include <limits>

#include "adaptivespec/row_max.h"
#include "adaptivespec/tree.h"
#include "kernels.h"
#include "launch.h"
#include "loads.h"
#include "warp.h"

namespace adaptivespec::cuda {

namespace {

constexpr int kThreads = 256;

// Vectors that a thread has under way.
constexpr int kUnroll = 4;

template <class T>
struct Scan {
  const T* logits;
  int64_t row_stride, vocab;
  int parts;
  int64_t gather_blocks;  // the first blocks gather, the others scan
  uint64_t* keys;         // [T, parts]
  float* child_logits;    // [T]

  __device__ float child_logit(const WalkBatch& batch, int64_t row) const {
    const float never = -std::numeric_limits<float>::infinity();
    const int64_t b = request_of(batch.start, batch.requests, row);
    if (b < 0) return never;
    const int64_t first = batch.start[b];
    const int32_t parent = batch.parents[row], token = batch.tokens[row];
    if (parent < 0 || parent >= row - first || token < 0 || token >= vocab) return never;
    return to_float(logits[(first + parent) * row_stride + token]);
  }
};

// The best key among the values of one vector, looked for only when its maximum is better than `best`.
template <class T>
__device__ inline void take(const VectorRow<T>& row, const uint4& bits, int64_t vector, float& best, uint64_t& key) {
  float x[kVector<T>];
  unpack(bits, static_cast<const T*>(nullptr), x);
  float high = x[0];
#pragma unroll
  for (int e = 1; e < kVector<T>; ++e) high = max_nan(high, x[e]);
  if (high <= best) return;
  const uint32_t index = static_cast<uint32_t>(row.index(vector));
#pragma unroll
  for (int e = 0; e < kVector<T>; ++e) key = Max{}(key, rank_key(x[e], index + e));
  best = key_value(key);
}

template <class T>
__global__ void __launch_bounds__(kThreads) scan_rows(const WalkBatch batch, const Scan<T> scan) {
  if (blockIdx.x < scan.gather_blocks) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (row < batch.rows) scan.child_logits[row] = scan.child_logit(batch, row);
    return;
  }
  __shared__ uint64_t warp_keys[kThreads / kLanes];
  const int64_t block = blockIdx.x - scan.gather_blocks, row = block / scan.parts, part = block % scan.parts;
  if (row >= batch.start[batch.requests]) return;  // padding
  const VectorRow<T> values(scan.logits + row * scan.row_stride, scan.vocab);
  const int64_t begin = values.vectors * part / scan.parts, end = values.vectors * (part + 1) / scan.parts;

  float best = -std::numeric_limits<float>::infinity();
  uint64_t key = rank_key(best, 0);  // a row of nothing but -inf: its first value
  for (int64_t vector = begin + threadIdx.x; vector < end; vector += kUnroll * kThreads) {
    uint4 bits[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      bits[u] = vector + u * kThreads < end ? values.load(vector + u * kThreads) : uint4{};
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (vector + u * kThreads < end) take(values, bits[u], vector + u * kThreads, best, key);
    }
  }

  // The values outside whole vectors, fewer than a vector on each side.
  const int64_t tail = values.tail();
  if (part == 0 && threadIdx.x < values.head) {
    key = Max{}(key, rank_key(to_float(values.values[threadIdx.x]), threadIdx.x));
  }
  if (part == scan.parts - 1 && tail + threadIdx.x < values.count) {
    const int64_t i = tail + threadIdx.x;
    key = Max{}(key, rank_key(to_float(values.values[i]), static_cast<uint32_t>(i)));
  }
  key = block_all<kThreads>(key, warp_keys, Max{});
  if (threadIdx.x == 0) scan.keys[row * scan.parts + part] = key;
}

// What the walk asks about logits, from shared memory.
struct KnownLogits {
  const uint64_t* keys;
  const float* child_logits;

  __device__ RowMax max(int32_t row) const { return {key_value(keys[row]), static_cast<int64_t>(key_index(keys[row]))}; }
  __device__ float child_logit(int32_t, int32_t child) const { return child_logits[child]; }
};

// Protected tokens kept in shared memory; a longer list is read where it is.
constexpr int kSharedTokens = 64;

__global__ void __launch_bounds__(kMaxTreeRows)
    walk_requests(const WalkBatch batch, const uint64_t* keys, int parts, const float* child_logits) {
  __shared__ unsigned long long children[kMaxTreeRows];
  __shared__ uint64_t best[kMaxTreeRows];
  __shared__ int64_t sampled[kMaxTreeRows];
  __shared__ int32_t tokens[kMaxTreeRows];
  __shared__ float logits[kMaxTreeRows];
  __shared__ int32_t protected_tokens[kSharedTokens];
  __shared__ int32_t length;
  const int64_t b = blockIdx.x, first = batch.start[b];
  const int row = threadIdx.x;
  int64_t rows = batch.start[b + 1] - first;
  if (first < 0 || first + rows > batch.rows) rows = 0;
  if (rows > kMaxTreeRows) rows = kMaxTreeRows;
  const bool exists = row < rows;
  children[row] = 0;
  if (row < batch.num_protected && row < kSharedTokens) {
    protected_tokens[row] = batch.protected_tokens[b * batch.num_protected + row];
  }
  __syncthreads();
  if (exists) {
    const int32_t parent = batch.parents[first + row];
    if (parent >= 0 && parent < row) atomicOr(&children[parent], 1ull << row);
    tokens[row] = batch.tokens[first + row];
    if (batch.sampled) sampled[row] = batch.sampled[first + row];
    if (keys) {
      uint64_t key = 0;
      for (int part = 0; part < parts; ++part) key = Max{}(key, keys[(first + row) * parts + part]);
      best[row] = key;
    }
    if (child_logits) logits[row] = child_logits[first + row];
  }
  __syncthreads();
  int32_t* path = batch.paths + b * batch.path_capacity;
  if (row == 0) {
    WalkLimits limits = batch.limits(b);
    if (limits.num_protected <= kSharedTokens) limits.protected_tokens = protected_tokens;
    // uint64_t and what atomicOr takes are different types of the same size.
    const WalkTree tree{reinterpret_cast<const uint64_t*>(children), tokens, batch.sampled ? sampled : nullptr};
    WalkOutcome outcome;  // of a request without rows: nothing accepted, token 0
    if (rows > 0) outcome = walk_one_tree(tree, limits, KnownLogits{best, logits}, path, batch.path_capacity);
    batch.store(b, outcome);
    length = outcome.length;
  }
  __syncthreads();
  for (int64_t i = length + row; i < batch.path_capacity; i += kMaxTreeRows) path[i] = -1;
}

// As many parts as fill the machine, none shorter than one round of loads of a block.
template <class T>
int parts_of(int64_t rows, int64_t vocab) {
  const int64_t fill = (4 * multiprocessors() + rows - 1) / rows;
  const int64_t longest = vocab / (kThreads * kUnroll * kVector<T>);
  const int64_t parts = fill < longest ? fill : longest;
  return static_cast<int>(parts < 1 ? 1 : parts > kScanParts ? kScanParts : parts);
}

}  // namespace

template <class T>
void walk_trees(const WalkBatch& batch, const T* logits, int64_t row_stride, int64_t vocab, int64_t* workspace,
                cudaStream_t stream) {
  const bool margin = batch.max_log_ratio != nullptr;
  if (batch.rows == 0 || (batch.sampled && !margin)) {  // strict, and the choices are given
    launch(walk_requests, batch.requests, kMaxTreeRows, stream, batch, static_cast<const uint64_t*>(nullptr), 0,
           static_cast<const float*>(nullptr));
    return;
  }
  Scan<T> scan{};
  scan.logits = logits;
  scan.row_stride = row_stride;
  scan.vocab = vocab;
  scan.parts = parts_of<T>(batch.rows, vocab);
  scan.gather_blocks = margin ? (batch.rows + kThreads - 1) / kThreads : 0;
  scan.keys = reinterpret_cast<uint64_t*>(workspace);
  scan.child_logits = reinterpret_cast<float*>(workspace + batch.rows * kScanParts);
  launch(scan_rows<T>, scan.gather_blocks + batch.rows * scan.parts, kThreads, stream, batch, scan);
  launch(walk_requests, batch.requests, kMaxTreeRows, stream, batch, static_cast<const uint64_t*>(scan.keys),
         scan.parts, static_cast<const float*>(margin ? scan.child_logits : nullptr));
}

template void walk_trees<float>(const WalkBatch&, const float*, int64_t, int64_t, int64_t*, cudaStream_t);
template void walk_trees<bf16>(const WalkBatch&, const bf16*, int64_t, int64_t, int64_t*, cudaStream_t);
template void walk_trees<fp16>(const WalkBatch&, const fp16*, int64_t, int64_t, int64_t*, cudaStream_t);

}  // namespace adaptivespec::cuda
