#include "linear.h"

#include <algorithm>

#include "isa.h"
#include "ops.h"

#define ADAPTIVESPEC_KERNELS "linear.inc"
#include "each_isa.inc"

namespace adaptivespec {

namespace {

constexpr const char* kOp = "linear";

// Multiply-adds a thread must have to itself before another one is worth waking; a row's share of reading the weights
// counts like three rows more.
constexpr int64_t kThreadWork = int64_t{1} << 18;
constexpr int64_t kReadingRows = 3;

}  // namespace

void apply_linear(const PackedLinear& linear, ConstRows x, int64_t rows, Rows y) {
  if (rows == 0) return;
  const auto multiply = ADAPTIVESPEC_DISPATCH(multiply_panels);
  const int64_t panel_work = std::max<int64_t>(1, linear.inputs * kPanelOutputs * (rows + kReadingRows));
  const int64_t grain = std::max<int64_t>(1, kThreadWork / panel_work);
  torch::stable::parallel_for(0, linear.panels(), grain, [&](int64_t first, int64_t last) {
    multiply(linear, x, rows, y, first, last);
  });
}

PackedLinear check_linear(const char* op, const char* name, const Tensor& weight, const std::optional<Tensor>& bias,
                          int64_t inputs, int64_t outputs) {
  PackedLinear linear{nullptr, nullptr, inputs, outputs};
  const Argument weight_arg(op, name, weight, 4);  // [panels, inputs, 16, 2]
  weight_arg.of_type(ScalarType::BFloat16).of_size(0, linear.panels()).of_size(1, inputs);
  weight_arg.of_size(2, kPanelOutputs / 2).of_size(3, 2).contiguous();
  linear.weight = weight_arg.read<bf16>();
  if (bias) {
    const Argument bias_arg(op, name, *bias, 1);  // [outputs]
    linear.bias = bias_arg.of_type(ScalarType::Float).of_size(0, outputs).contiguous().read<float>();
  }
  return linear;
}

void linear(const Tensor& out, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const Argument out_arg(kOp, "out", out, 2);  // [M, N]
  const Argument x_arg(kOp, "x", x, 2);        // [M, K]
  const int64_t rows = x_arg.size(0);
  out_arg.of_type(ScalarType::Float).of_size(0, rows).last_contiguous().distinct(0);
  x_arg.of_type(ScalarType::Float).last_contiguous();
  const PackedLinear layer = check_linear(kOp, "weight", weight, bias, x_arg.size(1), out_arg.size(1));
  apply_linear(layer, {x_arg.read<float>(), x_arg.stride(0)}, rows, {out_arg.write<float>(), out_arg.stride(0)});
}

}  // namespace adaptivespec
