// The k most likely tokens of each row: a block a row, which it reads once.
//
// Bytes: R rows of V values; a level of 64 requests x 8 nodes over a draft vocabulary of 32768 in 16 bits is 33.6 MB,
// 7.0 us at 4.8 TB/s; one request 0.1 us, less than the launch.
//
// Every warp keeps the best k of what it has read as a list over its lanes (place j in lane j % 32) and takes up a value
// only if it ranks above the last of the list: of n values in random order about k ln(n / k) do.
#include <limits>

#include "adaptivespec/row_max.h"
#include "adaptivespec/topk.h"
#include "kernels.h"
#include "launch.h"
#include "loads.h"
#include "warp.h"

namespace adaptivespec::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kLanes;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// The k greatest keys offered to a warp, in order. Its functions are called by all lanes together.
struct WarpList {
  uint64_t low = 0, high = 0;  // places lane and lane + 32; 0 is below every key
  uint64_t last = 0;           // place k - 1
  float bar;                   // its value; NaN while the list is not full
  int k, lane;

  __device__ WarpList(int k_, int lane_) : bar(key_value(0)), k(k_), lane(lane_) {}

  __device__ void insert(uint64_t key) {
    const int place = __popc(__ballot_sync(kAllLanes, low > key)) + __popc(__ballot_sync(kAllLanes, high > key));
    if (place >= k) return;
    if (k > kLanes) {
      const uint64_t before = __shfl_up_sync(kAllLanes, high, 1), carried = __shfl_sync(kAllLanes, low, kLanes - 1);
      if (lane + kLanes > place) high = lane == 0 ? carried : before;
      if (lane + kLanes == place) high = key;
    }
    const uint64_t before = __shfl_up_sync(kAllLanes, low, 1);
    if (lane > place) low = before;
    if (lane == place) low = key;
    last = __shfl_sync(kAllLanes, k > kLanes ? high : low, (k - 1) % kLanes);
    bar = key_value(last);
  }

  // One key a lane; 0: none.
  __device__ void offer(uint64_t key) {
    unsigned better = __ballot_sync(kAllLanes, key > last);
    for (; better != 0; better &= better - 1) {
      insert(__shfl_sync(kAllLanes, key, __ffs(static_cast<int>(better)) - 1));
    }
  }
};

// exp(value - high) summed up, of what one thread or one block has seen.
struct ExpSum {
  float high, sum;

  __device__ void operator+=(float x) {
    if (!(x <= high)) {
      sum *= expf(high - x);
      high = x;
    }
    if (high != kMinusInf) sum += expf(x - high);
  }
};

__device__ inline float scaled(const ExpSum& part, float high) {
  return part.sum == 0.0f ? 0.0f : part.sum * expf(part.high - high);
}

template <class T>
__device__ inline void take(const VectorRow<T>& row, int64_t vector, bool exists, const uint4& bits, ExpSum& total,
                            WarpList& list) {
  float x[kVector<T>];
  float high = kMinusInf;
  if (exists) {
    unpack(bits, static_cast<const T*>(nullptr), x);
#pragma unroll
    for (int e = 0; e < kVector<T>; ++e) high = max_nan(high, x[e]);
    if (!(high <= total.high)) {
      total.sum *= expf(total.high - high);  // 0 at first; NaN from a NaN on
      total.high = high;
    }
    if (total.high != kMinusInf) {
#pragma unroll
      for (int e = 0; e < kVector<T>; ++e) total.sum += expf(x[e] - total.high);
    }
  }
  if (!__any_sync(kAllLanes, exists && !(high <= list.bar))) return;
  const uint32_t index = static_cast<uint32_t>(row.index(vector));
#pragma unroll
  for (int e = 0; e < kVector<T>; ++e) list.offer(exists ? rank_key(x[e], index + e) : 0);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    topk(const T* logits, int64_t row_stride, int64_t vocab, int k, float* values, int64_t* indices) {
  constexpr int kUnroll = 2;
  __shared__ uint64_t lists[kWarps][kMaxTopK];
  __shared__ float warp_high[kWarps], warp_sum[kWarps];
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int64_t r = blockIdx.x;
  const VectorRow<T> row(logits + r * row_stride, vocab);
  WarpList list(k, lane);
  ExpSum total{kMinusInf, 0.0f};

  // In the order of their indices: a value equal to the last of a full list comes too late.
  const auto single = [&](int64_t i, bool exists) {
    const float x = exists ? to_float(row.values[i]) : 0.0f;
    if (exists) total += x;
    list.offer(exists ? rank_key(x, static_cast<uint32_t>(i)) : 0);
  };
  if (warp == 0) single(lane, lane < row.head);
  for (int64_t vector = threadIdx.x; vector - lane < row.vectors; vector += kUnroll * kThreads) {
    uint4 bits[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      bits[u] = vector + u * kThreads < row.vectors ? row.load(vector + u * kThreads) : uint4{};
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      take(row, vector + u * kThreads, vector + u * kThreads < row.vectors, bits[u], total, list);
    }
  }
  if (warp == 0) single(row.tail() + lane, row.tail() + lane < row.count);

  const float high = warp_all(total.high, max_nan);
  const float sum = warp_all(scaled(total, high), [](float a, float b) { return a + b; });
  if (lane == 0) {
    warp_high[warp] = high;
    warp_sum[warp] = sum;
  }
  if (lane < k) lists[warp][lane] = list.low;
  if (lane + kLanes < k) lists[warp][lane + kLanes] = list.high;
  __syncthreads();
  if (warp > 0) return;

  for (int other = 1; other < kWarps; ++other) {
    list.offer(lane < k ? lists[other][lane] : 0);
    if (k > kLanes) list.offer(lane + kLanes < k ? lists[other][lane + kLanes] : 0);
  }
  const ExpSum mine{lane < kWarps ? warp_high[lane] : kMinusInf, lane < kWarps ? warp_sum[lane] : 0.0f};
  const float row_high = warp_all(mine.high, max_nan);
  const float row_sum = warp_all(scaled(mine, row_high), [](float a, float b) { return a + b; });
  const float log_sum = logf(row_sum);
  const auto store = [&](int place, uint64_t key) {
    if (place >= k) return;
    values[r * k + place] = key_value(key) - row_high - log_sum;
    indices[r * k + place] = key_index(key);
  };
  store(lane, list.low);
  store(lane + kLanes, list.high);
}

}  // namespace

template <class T>
void topk_logprobs(const T* logits, int64_t rows, int64_t row_stride, int64_t vocab, int k, float* values,
                   int64_t* indices, cudaStream_t stream) {
  launch(topk<T>, rows, kThreads, stream, logits, row_stride, vocab, k, values, indices);
}

template void topk_logprobs<float>(const float*, int64_t, int64_t, int64_t, int, float*, int64_t*, cudaStream_t);
template void topk_logprobs<bf16>(const bf16*, int64_t, int64_t, int64_t, int, float*, int64_t*, cudaStream_t);
template void topk_logprobs<fp16>(const fp16*, int64_t, int64_t, int64_t, int, float*, int64_t*, cudaStream_t);

}  // namespace adaptivespec::cuda
