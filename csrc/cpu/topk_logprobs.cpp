#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "adaptivespec/scalar_types.h"
#include "isa.h"
#include "ops.h"
#include "topk_logprobs.h"

namespace adaptivespec {

// What one segment of a row contributes to the row's result.
struct SegmentResult {
  float high;
  double sum;  // of exp(value - high)
  TopList top;
};

}  // namespace adaptivespec

#define ADAPTIVESPEC_KERNELS "topk_logprobs.inc"
#include "each_isa.inc"

namespace adaptivespec {

namespace {

constexpr const char* kOp = "topk_logprobs";

// A fixed length, so that the sums do not depend on the number of threads.
constexpr int64_t kSegment = 16384;

// Values a thread must have to itself before another one is worth waking.
constexpr int64_t kThreadValues = 32768;

template <class T>
using Scan = void (*)(const T*, int64_t, int64_t, int, SegmentResult*);

Scan<float> scan_of(const float*) { return ADAPTIVESPEC_DISPATCH(scan_segment_f32); }
Scan<bf16> scan_of(const bf16*) { return ADAPTIVESPEC_DISPATCH(scan_segment_bf16); }
Scan<fp16> scan_of(const fp16*) { return ADAPTIVESPEC_DISPATCH(scan_segment_fp16); }

void merge_row(const SegmentResult* segments, int64_t count, int k, float* values, int64_t* indices) {
  float high = segments[0].high;
  for (int64_t s = 1; s < count; ++s) high = std::max(high, segments[s].high);
  double sum = 0.0;
  TopList top;
  for (int64_t s = 0; s < count; ++s) {
    const SegmentResult& segment = segments[s];
    if (segment.sum != 0.0) sum += segment.sum * std::exp(static_cast<double>(segment.high) - high);
    for (int i = 0; i < segment.top.size; ++i) top.offer(segment.top.entries[i], k);
  }
  const double log_sum = std::log(sum);
  for (int i = 0; i < k; ++i) {
    values[i] = static_cast<float>(static_cast<double>(top.entries[i].value) - high - log_sum);
    indices[i] = top.entries[i].index;
  }
}

template <class T>
void run(const Argument& logits, int k, float* values, int64_t* indices) {
  const T* data = logits.read<T>();
  const int64_t rows = logits.size(0), vocab = logits.size(1), stride = logits.stride(0);
  const int64_t segments = (vocab + kSegment - 1) / kSegment;
  const Scan<T> scan = scan_of(data);
  thread_local std::vector<SegmentResult> partial;  // grows once
  if (static_cast<int64_t>(partial.size()) < rows * segments) partial.resize(rows * segments);
  SegmentResult* results = partial.data();
  const int64_t grain = std::max<int64_t>(1, kThreadValues / std::min(vocab, kSegment));
  torch::stable::parallel_for(0, rows * segments, grain, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / segments, first = item % segments * kSegment;
      scan(data + row * stride, first, std::min(first + kSegment, vocab), k, results + item);
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    merge_row(results + row * segments, segments, k, values + row * k, indices + row * k);
  }
}

}  // namespace

void topk_logprobs(const Tensor& logits, int64_t k, const Tensor& values, const Tensor& indices) {
  const TopkTensors tensors(kOp, logits, k, values, indices);
  if (tensors.logits.size(0) == 0) return;
  float* out_values = tensors.values.write<float>();
  int64_t* out_indices = tensors.indices.write<int64_t>();
  switch (tensors.logits.type()) {
    case ScalarType::BFloat16: return run<bf16>(tensors.logits, static_cast<int>(k), out_values, out_indices);
    case ScalarType::Half: return run<fp16>(tensors.logits, static_cast<int>(k), out_values, out_indices);
    default: return run<float>(tensors.logits, static_cast<int>(k), out_values, out_indices);
  }
}

}  // namespace adaptivespec
