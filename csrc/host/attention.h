// Arguments of the attention of tree rows, on any device.
#pragma once

#include <algorithm>

#include "adaptivespec/attention.h"
#include "adaptivespec/scalar_types.h"
#include "adaptivespec/tree.h"
#include "checks.h"

namespace adaptivespec {

// The rows of a batch: Tq queries, the fresh keys and values of Tk tree rows.
struct RowShape {
  ScalarType type;
  int64_t queries, heads, tree_rows, kv_heads, dims;
};

// Which rows are whose, and what they see.
struct TreeTensors {
  const Tensor& query_start;  // [B + 1]
  const Tensor& key_start;    // [B + 1]
  const Tensor& ancestors;    // [Tq]
};

struct PrefixTensors {
  const Tensor& key_cache;    // [blocks, Hkv, block_size, D]
  const Tensor& value_cache;  // [blocks, Hkv, block_size, D]
  const Tensor& block_table;  // [B, max_blocks]
  const Tensor& prefix_lens;  // [B]
};

// The arguments without prefixes, the rows' own views and the scale. Indices inside the tensors are not read here.
template <class T>
AttentionArgs<T> tree_arguments(const Place& at, const TreeTensors& tensors, const RowShape& shape) {
  const Argument query_start(at, "query_start", tensors.query_start, 1);
  const Argument key_start(at, "key_start", tensors.key_start, 1);
  const Argument ancestors(at, "ancestors", tensors.ancestors, 1);
  ADAPTIVESPEC_CHECK(shape.kv_heads > 0 && shape.heads > 0 && shape.heads % shape.kv_heads == 0, at.op, "the ",
                     shape.heads, " query heads must be a multiple of the ", shape.kv_heads, " KV heads");
  ADAPTIVESPEC_CHECK(shape.dims > 0 && shape.dims <= 1024, at.op, "head size must be in 1..1024, got ", shape.dims);
  const int64_t requests = std::max<int64_t>(query_start.size(0) - 1, 0);
  query_start.of_type(ScalarType::Int).of_size(0, requests + 1).contiguous();
  key_start.of_type(ScalarType::Int).of_size(0, requests + 1).contiguous();
  ancestors.of_type(ScalarType::Long).of_size(0, shape.queries).contiguous();

  AttentionArgs<T> args{};
  args.query_start = query_start.read<int32_t>();
  args.key_start = key_start.read<int32_t>();
  args.ancestors = ancestors.read<int64_t>();
  args.requests = requests;
  args.kv_heads = shape.kv_heads;
  args.group = shape.heads / shape.kv_heads;
  args.head_dim = shape.dims;
  args.queries = shape.queries;
  args.tree_rows = shape.tree_rows;
  return args;
}

template <class T>
void add_prefixes(const Place& at, const PrefixTensors& tensors, const RowShape& shape, AttentionArgs<T>& args) {
  const Argument key_cache(at, "key_cache", tensors.key_cache, 4);
  const Argument value_cache(at, "value_cache", tensors.value_cache, 4);
  const Argument block_table(at, "block_table", tensors.block_table, 2);
  const Argument prefix_lens(at, "prefix_lens", tensors.prefix_lens, 1);
  args.blocks = key_cache.size(0);
  args.block_size = key_cache.size(2);
  key_cache.of_type(shape.type).of_size(1, shape.kv_heads).of_size(3, shape.dims);
  value_cache.of_type(shape.type).of_size(0, args.blocks).of_size(1, shape.kv_heads);
  value_cache.of_size(2, args.block_size).of_size(3, shape.dims);
  block_table.of_type(ScalarType::Int).of_size(0, args.requests).last_contiguous();
  prefix_lens.of_type(ScalarType::Int).of_size(0, args.requests).contiguous();
  const auto paged = [](const Argument& cache) {
    return PagedView<T>{cache.read<T>(), cache.stride(0), cache.stride(1), cache.stride(2), cache.stride(3)};
  };
  args.key_cache = paged(key_cache);
  args.value_cache = paged(value_cache);
  args.block_table = block_table.read<int32_t>();
  args.table_stride = block_table.stride(0);
  args.table_blocks = block_table.size(1);
  args.prefix_lens = prefix_lens.read<int32_t>();
}

// Where the log of each row's sum of exponentials goes, float32 [Hq, Tq].
template <class T>
void add_lse(const Place& at, const Tensor& lse, const RowShape& shape, AttentionArgs<T>& args) {
  const Argument lse_arg(at, "lse", lse, 2);
  lse_arg.of_type(ScalarType::Float).of_size(0, shape.heads).of_size(1, shape.queries).distinct(0).distinct(1);
  args.lse = lse_arg.write<float>();
  args.lse_head_stride = lse_arg.stride(0);
  args.lse_row_stride = lse_arg.stride(1);
}

// The rows' own tensors.
struct RowTensors {
  Argument out;         // [Tq, Hq, D]
  Argument query;       // [Tq, Hq, D]
  Argument tree_key;    // [Tk, Hkv, D]
  Argument tree_value;  // [Tk, Hkv, D]

  RowTensors(const Place& at, const Tensor& out_, const Tensor& query_, const Tensor& key_, const Tensor& value_)
      : out(at, "out", out_, 3), query(at, "query", query_, 3), tree_key(at, "tree_key", key_, 3),
        tree_value(at, "tree_value", value_, 3) {
    const RowShape all = shape();
    query.last_contiguous();
    out.of_type(all.type).of_size(0, all.queries).of_size(1, all.heads).of_size(2, all.dims);
    out.last_contiguous().distinct(0).distinct(1);
    tree_key.of_type(all.type).of_size(2, all.dims).last_contiguous();
    tree_value.of_type(all.type).of_size(0, all.tree_rows).of_size(1, all.kv_heads).of_size(2, all.dims);
    tree_value.last_contiguous();
  }

  RowShape shape() const {
    return {query.type(), query.size(0), query.size(1), tree_key.size(0), tree_key.size(1), query.size(2)};
  }

  template <class T>
  void add_to(AttentionArgs<T>& args) const {
    args.out = {out.write<T>(), out.stride(0), out.stride(1)};
    args.query = {query.read<T>(), query.stride(0), query.stride(1)};
    args.tree_key = {tree_key.read<T>(), tree_key.stride(0), tree_key.stride(1)};
    args.tree_value = {tree_value.read<T>(), tree_value.stride(0), tree_value.stride(1)};
  }
};

// Calls launch(static_cast<T*>(nullptr)) with the element type of the queries.
template <class Launch>
void for_query_type(const Place& at, ScalarType type, const Launch& launch) {
  switch (type) {
    case ScalarType::Float: return launch(static_cast<float*>(nullptr));
    case ScalarType::BFloat16: return launch(static_cast<bf16*>(nullptr));
    case ScalarType::Half: return launch(static_cast<fp16*>(nullptr));
    default: fail(at.op, "query must be float32, bfloat16 or float16, got ", dtype_name(type));
  }
}

}  // namespace adaptivespec
