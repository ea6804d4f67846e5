// A linear layer with packed weights, for the ops that contain one.
//
// Weights [outputs, inputs] lie in panels of 32 outputs, the last one padded with zeros. A panel is
// [inputs][16][2] bfloat16: one 32-bit word holds the weights of outputs i (low half) and 16 + i (high half) for one
// input, so that a cache line is one input's part of the panel and a load gives two vectors of float32.
#pragma once

#include <cstdint>
#include <optional>

#include "adaptivespec/scalar_types.h"
#include "checks.h"

namespace adaptivespec {

constexpr int64_t kPanelOutputs = 32;

struct PackedLinear {
  const bf16* weight;  // [panels, inputs, 16, 2]
  const float* bias;   // [outputs] or null
  int64_t inputs, outputs;

  int64_t panels() const { return (outputs + kPanelOutputs - 1) / kPanelOutputs; }
};

// Rows of float32, the values of a row contiguous.
struct Rows {
  float* data;
  int64_t stride;
};
struct ConstRows {
  const float* data;
  int64_t stride;
};

// y [rows, outputs] = x [rows, inputs] W^T + bias, on torch's threads. Each result is one sum in the order of the
// inputs, whatever the number of rows or threads.
void apply_linear(const PackedLinear& linear, ConstRows x, int64_t rows, Rows y);

// The layer that the arguments `name` and its bias describe, checked.
PackedLinear check_linear(const char* op, const char* name, const Tensor& weight, const std::optional<Tensor>& bias,
                          int64_t inputs, int64_t outputs);

}  // namespace adaptivespec
