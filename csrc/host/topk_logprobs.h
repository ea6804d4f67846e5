// Arguments of topk_logprobs, on any device.
#pragma once

#include <algorithm>

#include "adaptivespec/topk.h"
#include "checks.h"

namespace adaptivespec {

struct TopkTensors {
  Argument logits;   // [R, V]
  Argument values;   // [R, k]
  Argument indices;  // [R, k]

  TopkTensors(const Place& at, const Tensor& logits_, int64_t k, const Tensor& values_, const Tensor& indices_)
      : logits(at, "logits", logits_, 2), values(at, "values", values_, 2), indices(at, "indices", indices_, 2) {
    logits.last_contiguous();
    ADAPTIVESPEC_CHECK(logits.type() == ScalarType::Float || logits.type() == ScalarType::BFloat16 ||
                           logits.type() == ScalarType::Half,
                       at.op, "logits must be float32, bfloat16 or float16, got ", dtype_name(logits.type()));
    ADAPTIVESPEC_CHECK(k >= 1 && k <= kMaxTopK && k <= logits.size(1), at.op, "k must be in 1..",
                       std::min<int64_t>(kMaxTopK, logits.size(1)), ", got ", k);
    values.of_type(ScalarType::Float).of_size(0, logits.size(0)).of_size(1, k).contiguous();
    indices.of_type(ScalarType::Long).of_size(0, logits.size(0)).of_size(1, k).contiguous();
  }
};

}  // namespace adaptivespec
