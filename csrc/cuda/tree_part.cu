// Attention of tree rows over the fresh tree keys alone, on tensor cores, with the log-sum-exp that merges it with the
// attention over the prefix.
//
// A block takes 64 (query, head of the group) rows of one KV head of one request, 16 a warp. The at most 64 keys are one
// tile, so the softmax needs no second look; a warp leaves out the keys behind the last one that its rows see.
//
// Bytes: query and output once, keys and values once a block of rows. Batch 8 of 64 rows, 32 heads of 128 over 8 KV
// heads, 16 bits: 8.4 MB + 2.1 MB, 2.2 us at 4.8 TB/s; batch 1 of 64 rows 0.3 us, batch 64 17.5 us.
#include <limits>

#include "adaptivespec/tree.h"
#include "kernels.h"
#include "launch.h"
#include "mma.h"
#include "warp.h"

namespace adaptivespec::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kWarpRows = 16;
constexpr int kBlockRows = kThreads / kLanes * kWarpRows;
constexpr int kKeyTiles = kMaxTreeRows / 8;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// Rows of keys or values in shared memory; 16 more bytes a row put the rows of a matrix into different banks.
template <class T, int Dims>
struct Tile {
  static constexpr int kStride = Dims + 8;
  alignas(16) uint16_t values[kMaxTreeRows * kStride];

  // Rows that do not exist become zeros up to the end of their matrix, so that weight 0 times them is 0.
  __device__ void load(const RowView<const T>& rows, int64_t first, int64_t head, int count) {
    constexpr int kVectors = Dims / 8;
    const int padded = (count + 15) / 16 * 16;
    for (int i = threadIdx.x; i < padded * kVectors; i += kThreads) {
      const int row = i / kVectors, vector = i % kVectors;
      uint4 bits = {0, 0, 0, 0};
      if (row < count) bits = reinterpret_cast<const uint4*>(rows.at(first + row, head))[vector];
      *reinterpret_cast<uint4*>(values + row * kStride + vector * 8) = bits;
    }
  }
  __device__ const void* at(int row, int dim) const { return values + row * kStride + dim; }
};

// One of the two rows that a lane works on; one that does not exist sees no key.
template <class T>
struct LaneRow {
  const T* query = nullptr;
  T* out = nullptr;
  float* lse = nullptr;
  uint64_t word = 0;

  __device__ LaneRow(const AttentionArgs<T>& args, int64_t first_query, int64_t rows, int64_t kv_head, int64_t row,
                     int keys) {
    if (row >= rows) return;
    const int64_t at = first_query + row / args.group, head = kv_head * args.group + row % args.group;
    query = args.query.at(at, head);
    out = args.out.at(at, head);
    lse = args.lse_at(at, head);
    word = mask_word(args.ancestors[at], keys);
  }
  __device__ uint32_t query_pair(int dim) const {
    return query ? *reinterpret_cast<const uint32_t*>(query + dim) : 0;
  }
};

// Turns the scores of a row (its entries 2 * second, 2 * second + 1 of each tile) into weights; 1 / their sum.
template <class T>
__device__ inline float soften(float (&scores)[kKeyTiles][4], int second, const LaneRow<T>& row, float scale, int t) {
  constexpr float kLog2e = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;
  float high = kMinusInf;
#pragma unroll
  for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& score = scores[tile][2 * second + i];
      score = visible(row.word, tile * 8 + 2 * t + i) ? score * (scale * kLog2e) : kMinusInf;
      high = fmaxf(high, score);
    }
  }
  // The four lanes of a group hold the row.
  high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, 1));
  high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, 2));
  float sum = 0.0f;
#pragma unroll
  for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& score = scores[tile][2 * second + i];
      score = score == kMinusInf ? 0.0f : exp2f(score - high);
      sum += score;
    }
  }
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, 2);
  if (row.lse && t == 0) *row.lse = sum == 0.0f ? kMinusInf : (high + log2f(sum)) * kLn2;
  return sum == 0.0f ? 0.0f : 1.0f / sum;
}

template <class T, int Dims>
__global__ void __launch_bounds__(kThreads) attend_tile(const AttentionArgs<T> args, const int64_t row_blocks) {
  // Both at once where 48 KiB hold them.
  constexpr bool kBoth = 2 * sizeof(Tile<T, Dims>) <= 48 * 1024;
  __shared__ Tile<T, Dims> tiles[kBoth ? 2 : 1];
  Tile<T, Dims>& key_tile = tiles[0];
  Tile<T, Dims>& value_tile = tiles[kBoth ? 1 : 0];
  const int lane = threadIdx.x % kLanes, g = lane / 4, t = lane % 4, matrix = lane / 8, matrix_row = lane % 8;
  const int64_t block = blockIdx.x, kv_head = block / row_blocks % args.kv_heads;
  const int64_t b = block / row_blocks / args.kv_heads;
  const int64_t first_query = args.query_start[b], first_key = args.key_start[b];
  int64_t rows = (args.query_start[b + 1] - first_query) * args.group;
  if (first_query < 0 || args.query_start[b + 1] > args.queries) rows = 0;
  int64_t all_keys = args.key_start[b + 1] - first_key;
  if (first_key < 0 || first_key + all_keys > args.tree_rows) all_keys = 0;
  const int keys = static_cast<int>(all_keys < kMaxTreeRows ? all_keys : kMaxTreeRows);

  for (int64_t first = block % row_blocks * kBlockRows; first < rows; first += row_blocks * kBlockRows) {
    key_tile.load(args.tree_key, first_key, kv_head, keys);
    if (kBoth) value_tile.load(args.tree_value, first_key, kv_head, keys);
    __syncthreads();
    const int64_t row = first + threadIdx.x / kLanes * kWarpRows + g;
    const LaneRow<T> upper(args, first_query, rows, kv_head, row, keys);
    const LaneRow<T> lower(args, first_query, rows, kv_head, row + 8, keys);
    const uint64_t seen = warp_all(upper.word | lower.word, [](uint64_t x, uint64_t y) { return x | y; });
    const int last = seen ? 64 - __clzll(static_cast<long long>(seen)) : 0;  // keys from here on are not seen

    float scores[kKeyTiles][4] = {};
#pragma unroll
    for (int dim = 0; dim < Dims; dim += 16) {
      const uint32_t a[4] = {upper.query_pair(dim + 2 * t), lower.query_pair(dim + 2 * t),
                             upper.query_pair(dim + 8 + 2 * t), lower.query_pair(dim + 8 + 2 * t)};
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; tile += 2) {
        if (tile * 8 >= last) continue;
        uint32_t k[4];
        load_matrices(k, key_tile.at(tile * 8 + matrix / 2 * 8 + matrix_row, dim + matrix % 2 * 8));
        multiply_add(scores[tile], a, k[0], k[1], static_cast<const T*>(nullptr));
        multiply_add(scores[tile + 1], a, k[2], k[3], static_cast<const T*>(nullptr));
      }
    }
    const float upper_inverse = soften(scores, 0, upper, args.scale, t);
    const float lower_inverse = soften(scores, 1, lower, args.scale, t);
    uint32_t weights[kKeyTiles / 2][4];
#pragma unroll
    for (int pair = 0; pair < kKeyTiles / 2; ++pair) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* score = scores[2 * pair + i];
        weights[pair][2 * i] = pack<T>(score[0], score[1]);
        weights[pair][2 * i + 1] = pack<T>(score[2], score[3]);
      }
    }
    if (!kBoth) {
      __syncthreads();
      value_tile.load(args.tree_value, first_key, kv_head, keys);
      __syncthreads();
    }

#pragma unroll
    for (int dim = 0; dim < Dims; dim += 16) {
      float out[2][4] = {};
#pragma unroll
      for (int pair = 0; pair < kKeyTiles / 2; ++pair) {
        if (pair * 16 >= last) continue;
        uint32_t v[4];
        load_matrices_transposed(v, value_tile.at(pair * 16 + matrix % 2 * 8 + matrix_row, dim + matrix / 2 * 8));
        multiply_add(out[0], weights[pair], v[0], v[1], static_cast<const T*>(nullptr));
        multiply_add(out[1], weights[pair], v[2], v[3], static_cast<const T*>(nullptr));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = dim + i * 8 + 2 * t;
        const uint32_t high_pair = pack<T>(out[i][0] * upper_inverse, out[i][1] * upper_inverse);
        const uint32_t low_pair = pack<T>(out[i][2] * lower_inverse, out[i][3] * lower_inverse);
        if (upper.out) *reinterpret_cast<uint32_t*>(upper.out + at) = high_pair;
        if (lower.out) *reinterpret_cast<uint32_t*>(lower.out + at) = low_pair;
      }
    }
    __syncthreads();  // the tiles are read no more
  }
}

template <class T, int Dims>
void launch_tile(const AttentionArgs<T>& args, cudaStream_t stream) {
  const int64_t most = args.queries < kMaxTreeRows ? args.queries : kMaxTreeRows;
  const int64_t row_blocks = (most * args.group + kBlockRows - 1) / kBlockRows;
  launch(attend_tile<T, Dims>, row_blocks * args.kv_heads * args.requests, kThreads, stream, args, row_blocks);
}

template <class View>
bool aligned(const View& view) {
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.row_stride % 8 == 0 && view.head_stride % 8 == 0;
}

}  // namespace

template <class T>
bool fits_tensor_cores(const AttentionArgs<T>& args) {
  switch (args.head_dim) {
    case 64:
    case 80:
    case 96:
    case 128:
    case 256: break;
    default: return false;
  }
  return aligned(args.query) && aligned(args.out) && aligned(args.tree_key) && aligned(args.tree_value);
}

template <class T>
void tree_part(const AttentionArgs<T>& args, cudaStream_t stream) {
  switch (args.head_dim) {
    case 64: return launch_tile<T, 64>(args, stream);
    case 80: return launch_tile<T, 80>(args, stream);
    case 96: return launch_tile<T, 96>(args, stream);
    case 128: return launch_tile<T, 128>(args, stream);
    default: return launch_tile<T, 256>(args, stream);
  }
}

template void tree_part<bf16>(const AttentionArgs<bf16>&, cudaStream_t);
template void tree_part<fp16>(const AttentionArgs<fp16>&, cudaStream_t);
template bool fits_tensor_cores<bf16>(const AttentionArgs<bf16>&);
template bool fits_tensor_cores<fp16>(const AttentionArgs<fp16>&);

}  // namespace adaptivespec::cuda
