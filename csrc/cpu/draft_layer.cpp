#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <optional>

#include "attend_trees.h"
#include "linear.h"
#include "ops.h"
#include "rows.h"

namespace adaptivespec {

namespace {

constexpr const char* kOp = "draft_layer";

// What a layer computes on its way, one buffer a thread that only grows.
class Workspace {
 public:
  // 64-byte aligned room for `rows` rows of `size` values, behind what was taken since `reserve`.
  Rows take(int64_t rows, int64_t size) {
    const int64_t stride = padded(size);
    Rows here{next_, stride};
    next_ += rows * stride;
    return here;
  }

  void reserve(int64_t rows, std::initializer_list<int64_t> sizes) {
    int64_t count = 0;
    for (const int64_t size : sizes) count += rows * padded(size);
    if (count > capacity_) {
      memory_.reset(static_cast<float*>(::operator new(sizeof(float) * count, std::align_val_t{64})));
      capacity_ = count;
    }
    next_ = memory_.get();
  }

 private:
  static int64_t padded(int64_t size) { return (size + 15) / 16 * 16; }

  struct Release {
    void operator()(float* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<float, Release> memory_;
  float* next_ = nullptr;
  int64_t capacity_ = 0;
};

const float* check_norm(const char* name, const Tensor& weight, int64_t size) {
  const Argument norm(kOp, name, weight, 1);  // [size]
  return norm.of_type(ScalarType::Float).of_size(0, size).contiguous().read<float>();
}

const float* check_norm(const char* name, const std::optional<Tensor>& weight, int64_t size) {
  return weight ? check_norm(name, *weight, size) : nullptr;
}

// The layer's weights and sizes.
struct Layer {
  PackedLinear qkv, o, gate_up, down;
  const float* q_norm;     // [D] or null
  const float* k_norm;     // [D] or null
  const float* post_norm;  // [H]
  const float* next_norm;  // [H]
  const float* cos_sin;    // [positions, 2 * half]
  int64_t cos_sin_stride, half, heads, kv_heads, head_dim;
  float eps;

  int64_t hidden() const { return o.outputs; }
  int64_t inner() const { return down.inputs; }
};

// The rows of the level.
struct Level {
  int64_t rows;
  ConstRows x;                 // normalised input
  Rows residual, normed;
  float* keys;                 // [Tk, Hkv, D]
  float* values;               // [Tk, Hkv, D]
  const int64_t* positions;    // [R]
  const int64_t* slots;        // [R], scratch rows within the request
  AttentionArgs<float> trees;  // of all rows, but for query and output
};

ConstRows readable(const Rows& rows) { return {rows.data, rows.stride}; }

void norm_heads(float* x, int64_t count, const float* weight, const Layer& layer) {
  if (!weight) return;
  for (int64_t h = 0; h < count; ++h) {
    float* head = x + h * layer.head_dim;
    rms_norm(head, weight, layer.head_dim, layer.eps, head);
  }
}

// Turns query and key heads of every row and puts its key and value where its descendants find them.
void place_rows(const Layer& layer, const Level& level, const Rows& qkv) {
  const int64_t queries = layer.heads * layer.head_dim, keys = layer.kv_heads * layer.head_dim;
  const AttentionArgs<float>& trees = level.trees;
  for (int64_t b = 0; b < trees.requests; ++b) {
    for (int64_t r = trees.query_start[b]; r < trees.query_start[b + 1]; ++r) {
      float* row = qkv.data + r * qkv.stride;
      norm_heads(row, layer.heads, layer.q_norm, layer);
      norm_heads(row + queries, layer.kv_heads, layer.k_norm, layer);
      const float* cos_sin = layer.cos_sin + level.positions[r] * layer.cos_sin_stride;
      rotate(row, layer.heads + layer.kv_heads, layer.head_dim, cos_sin, layer.half);
      const int64_t own = (trees.key_start[b] + level.slots[r]) * keys;
      std::copy_n(row + queries, keys, level.keys + own);
      std::copy_n(row + queries + keys, keys, level.values + own);
    }
  }
}

void add_and_norm(const Layer& layer, const Level& level, const Rows& update, const float* weight) {
  for (int64_t r = 0; r < level.rows; ++r) {
    add_rms_norm(update.data + r * update.stride, level.residual.data + r * level.residual.stride, weight,
                 layer.hidden(), layer.eps, level.normed.data + r * level.normed.stride);
  }
}

void run_layer(const Layer& layer, const Level& level) {
  const int64_t rows = level.rows, dims = layer.head_dim, kept = layer.kv_heads * dims;
  thread_local Workspace workspace;
  workspace.reserve(rows, {layer.qkv.outputs, layer.o.inputs, layer.hidden(), 2 * layer.inner(), layer.inner()});
  const Rows qkv = workspace.take(rows, layer.qkv.outputs), context = workspace.take(rows, layer.o.inputs);
  const Rows update = workspace.take(rows, layer.hidden()), gate_up = workspace.take(rows, 2 * layer.inner());
  const Rows activations = workspace.take(rows, layer.inner());

  apply_linear(layer.qkv, level.x, rows, qkv);
  place_rows(layer, level, qkv);
  AttentionArgs<float> attention = level.trees;
  attention.out = {context.data, context.stride, dims};
  attention.query = {qkv.data, qkv.stride, dims};
  attention.tree_key = {level.keys, kept, dims};
  attention.tree_value = {level.values, kept, dims};
  attend_trees(attention);
  apply_linear(layer.o, readable(context), rows, update);
  add_and_norm(layer, level, update, layer.post_norm);

  apply_linear(layer.gate_up, readable(level.normed), rows, gate_up);
  for (int64_t r = 0; r < rows; ++r) {
    const float* gate = gate_up.data + r * gate_up.stride;
    silu_mul(gate, gate + layer.inner(), layer.inner(), activations.data + r * activations.stride);
  }
  apply_linear(layer.down, readable(activations), rows, update);
  add_and_norm(layer, level, update, layer.next_norm);
}

void check_places(const Level& level, int64_t positions) {
  const AttentionArgs<float>& trees = level.trees;
  const int32_t* start = trees.query_start;
  ADAPTIVESPEC_CHECK(start[0] == 0 && start[trees.requests] == level.rows, kOp, "query_start must cover the ",
                     level.rows, " rows, it covers ", start[0], " to ", start[trees.requests]);
  for (int64_t b = 0; b < trees.requests; ++b) {
    const int64_t room = trees.key_start[b + 1] - trees.key_start[b];
    for (int64_t r = start[b]; r < start[b + 1]; ++r) {
      ADAPTIVESPEC_CHECK(level.positions[r] >= 0 && level.positions[r] < positions, kOp, "position ", r, " is ",
                         level.positions[r], ", cos_sin has ", positions);
      ADAPTIVESPEC_CHECK(level.slots[r] >= 0 && level.slots[r] < room, kOp, "scratch row ", r, " is ",
                         level.slots[r], ", request ", b, " has ", room);
    }
  }
}

}  // namespace

void draft_layer(const Tensor& normed, const Tensor& residual, const Tensor& keys, const Tensor& values,
                 const Tensor& x, const Tensor& qkv, const std::optional<Tensor>& qkv_bias,
                 const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, const Tensor& o,
                 const std::optional<Tensor>& o_bias, const Tensor& post_norm, const Tensor& gate_up,
                 const std::optional<Tensor>& gate_up_bias, const Tensor& down,
                 const std::optional<Tensor>& down_bias, const Tensor& next_norm, double eps, const Tensor& cos_sin,
                 const Tensor& positions, const Tensor& scratch_rows, const Tensor& key_cache,
                 const Tensor& value_cache, const Tensor& block_table, const Tensor& prefix_lens,
                 const Tensor& query_start, const Tensor& key_start, const Tensor& ancestors, double scale) {
  const Argument normed_arg(kOp, "normed", normed, 2);             // [R, H]
  const Argument residual_arg(kOp, "residual", residual, 2);       // [R, H]
  const Argument keys_arg(kOp, "keys", keys, 3);                   // [Tk, Hkv, D]
  const Argument values_arg(kOp, "values", values, 3);             // [Tk, Hkv, D]
  const Argument x_arg(kOp, "x", x, 2);                            // [R, H or 2H]
  const Argument cos_sin_arg(kOp, "cos_sin", cos_sin, 2);          // [P, rotated]
  const Argument positions_arg(kOp, "positions", positions, 1);    // [R]
  const Argument slots_arg(kOp, "scratch_rows", scratch_rows, 1);  // [R]
  ADAPTIVESPEC_CHECK(o.dim() == 4 && down.dim() == 4, kOp, "o and down must be packed linear layers");
  const int64_t rows = x_arg.size(0), size = residual_arg.size(1), attended = o.size(1), inner = down.size(1);
  const int64_t kv_heads = keys_arg.size(1), dims = keys_arg.size(2), rotated = cos_sin_arg.size(1);
  ADAPTIVESPEC_CHECK(dims > 0 && attended % dims == 0, kOp, "o takes ", attended,
                     " inputs, which is no multiple of the head size ", dims);
  ADAPTIVESPEC_CHECK(rotated % 2 == 0 && rotated <= dims, kOp, "cos_sin has ", rotated,
                     " values a position for heads of ", dims);
  normed_arg.of_type(ScalarType::Float).of_size(0, rows).of_size(1, size).contiguous();
  residual_arg.of_type(ScalarType::Float).of_size(0, rows).contiguous();
  keys_arg.of_type(ScalarType::Float).contiguous();
  values_arg.of_type(ScalarType::Float).of_size(0, keys_arg.size(0)).of_size(1, kv_heads).of_size(2, dims).contiguous();
  x_arg.of_type(ScalarType::Float).last_contiguous();
  cos_sin_arg.of_type(ScalarType::Float).last_contiguous();
  positions_arg.of_type(ScalarType::Long).of_size(0, rows).contiguous();
  slots_arg.of_type(ScalarType::Long).of_size(0, rows).contiguous();

  Layer layer{};
  layer.head_dim = dims;
  layer.kv_heads = kv_heads;
  layer.heads = attended / dims;
  layer.qkv = check_linear(kOp, "qkv", qkv, qkv_bias, x_arg.size(1), attended + 2 * kv_heads * dims);
  layer.o = check_linear(kOp, "o", o, o_bias, attended, size);
  layer.gate_up = check_linear(kOp, "gate_up", gate_up, gate_up_bias, size, 2 * inner);
  layer.down = check_linear(kOp, "down", down, down_bias, inner, size);
  layer.q_norm = check_norm("q_norm", q_norm, dims);
  layer.k_norm = check_norm("k_norm", k_norm, dims);
  layer.post_norm = check_norm("post_norm", post_norm, size);
  layer.next_norm = check_norm("next_norm", next_norm, size);
  layer.cos_sin = cos_sin_arg.read<float>();
  layer.cos_sin_stride = cos_sin_arg.stride(0);
  layer.half = rotated / 2;
  layer.eps = static_cast<float>(eps);

  Level level{};
  level.rows = rows;
  level.x = {x_arg.read<float>(), x_arg.stride(0)};
  level.residual = {residual_arg.write<float>(), size};
  level.normed = {normed_arg.write<float>(), size};
  level.keys = keys_arg.write<float>();
  level.values = values_arg.write<float>();
  level.positions = positions_arg.read<int64_t>();
  level.slots = slots_arg.read<int64_t>();
  const RowShape shape{ScalarType::Float, rows, layer.heads, keys_arg.size(0), kv_heads, dims};
  level.trees = tree_arguments<float>(kOp, {query_start, key_start, ancestors}, shape);
  add_prefixes(kOp, {key_cache, value_cache, block_table, prefix_lens}, shape, level.trees);
  check_indices(kOp, level.trees);
  level.trees.scale = static_cast<float>(scale);
  check_places(level, cos_sin_arg.size(0));
  run_layer(layer, level);
}

}  // namespace adaptivespec
