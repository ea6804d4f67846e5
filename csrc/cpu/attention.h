// The attention of tree rows, for the ops that contain it.
#pragma once

#include <cstdint>

#include "adaptivespec/paged_kv.h"
#include "adaptivespec/tree.h"
#include "checks.h"

namespace adaptivespec {

template <class T>
struct AttentionArgs {
  RowView<T> out;               // [Tq, Hq, D]
  RowView<const T> query;       // [Tq, Hq, D]
  RowView<const T> tree_key;    // [Tk, Hkv, D]
  RowView<const T> tree_value;  // [Tk, Hkv, D]
  PagedView<T> key_cache;
  PagedView<T> value_cache;
  const int32_t* block_table;  // [B, max_blocks]
  int64_t table_stride;
  const int32_t* prefix_lens;  // [B]
  const int32_t* query_start;  // [B + 1]
  const int32_t* key_start;    // [B + 1]
  const int64_t* ancestors;    // [Tq]
  int64_t requests, kv_heads, group, head_dim, block_size;
  float scale;
};

// The tensors that say where the rows of a batch stand: its trees and their paged prefixes.
struct TreesAndPrefixes {
  const Tensor& key_cache;    // [blocks, Hkv, block_size, D]
  const Tensor& value_cache;  // [blocks, Hkv, block_size, D]
  const Tensor& block_table;  // [B, max_blocks]
  const Tensor& prefix_lens;  // [B]
  const Tensor& query_start;  // [B + 1]
  const Tensor& key_start;    // [B + 1]
  const Tensor& ancestors;    // [Tq]
};

// The arguments with everything but the rows' own views and the scale: each tensor and each index in it checked.
template <class T>
AttentionArgs<T> check_trees(const char* op, const TreesAndPrefixes& tensors, ScalarType type, int64_t queries,
                             int64_t tree_rows, int64_t heads, int64_t kv_heads, int64_t dims) {
  const Argument key_cache(op, "key_cache", tensors.key_cache, 4);
  const Argument value_cache(op, "value_cache", tensors.value_cache, 4);
  const Argument block_table(op, "block_table", tensors.block_table, 2);
  const Argument prefix_lens(op, "prefix_lens", tensors.prefix_lens, 1);
  const Argument query_start(op, "query_start", tensors.query_start, 1);
  const Argument key_start(op, "key_start", tensors.key_start, 1);
  const Argument ancestors(op, "ancestors", tensors.ancestors, 1);

  const int64_t requests = prefix_lens.size(0);
  const int64_t blocks = key_cache.size(0), block_size = key_cache.size(2);
  ADAPTIVESPEC_CHECK(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, op, "the ", heads,
                     " query heads must be a multiple of the ", kv_heads, " KV heads");
  ADAPTIVESPEC_CHECK(dims > 0 && dims <= 1024, op, "head size must be in 1..1024, got ", dims);
  key_cache.of_type(type).of_size(1, kv_heads).of_size(3, dims);
  value_cache.of_type(type).of_size(0, blocks).of_size(1, kv_heads).of_size(2, block_size).of_size(3, dims);
  block_table.of_type(ScalarType::Int).of_size(0, requests).last_contiguous();
  prefix_lens.of_type(ScalarType::Int).contiguous();
  query_start.of_type(ScalarType::Int).of_size(0, requests + 1).contiguous();
  key_start.of_type(ScalarType::Int).of_size(0, requests + 1).contiguous();
  ancestors.of_type(ScalarType::Long).of_size(0, queries).contiguous();

  const int32_t* lens = prefix_lens.read<int32_t>();
  const int32_t* table = block_table.read<int32_t>();
  const int32_t* key_starts = key_start.read<int32_t>();
  check_starts(op, "query_start", query_start.read<int32_t>(), requests, queries);
  check_starts(op, "key_start", key_starts, requests, tree_rows);
  for (int64_t b = 0; b < requests; ++b) {
    ADAPTIVESPEC_CHECK(key_starts[b + 1] - key_starts[b] <= kMaxTreeRows, op, "request ", b, " has more than ",
                       kMaxTreeRows, " tree keys");
    ADAPTIVESPEC_CHECK(lens[b] >= 0 && (lens[b] == 0 || lens[b] <= block_table.size(1) * block_size), op,
                       "the prefix of request ", b, " (", lens[b], ") does not fit its ", block_table.size(1),
                       " blocks of ", block_size);
    for (int64_t i = 0; i * block_size < lens[b]; ++i) {
      const int32_t block = table[b * block_table.stride(0) + i];
      ADAPTIVESPEC_CHECK(block >= 0 && block < blocks, op, "block ", i, " of request ", b, " is ", block,
                         ", the cache has ", blocks);
    }
  }

  const auto paged = [](const Argument& cache) {
    return PagedView<T>{cache.read<T>(), cache.stride(0), cache.stride(1), cache.stride(2), cache.stride(3)};
  };
  AttentionArgs<T> args{};
  args.key_cache = paged(key_cache);
  args.value_cache = paged(value_cache);
  args.block_table = table;
  args.table_stride = block_table.stride(0);
  args.prefix_lens = lens;
  args.query_start = query_start.read<int32_t>();
  args.key_start = key_starts;
  args.ancestors = ancestors.read<int64_t>();
  args.requests = requests;
  args.kv_heads = kv_heads;
  args.group = heads / kv_heads;
  args.head_dim = dims;
  args.block_size = block_size;
  return args;
}

// On torch's threads; tree_attention.cpp.
template <class T>
void attend_trees(const AttentionArgs<T>& args);

extern template void attend_trees<float>(const AttentionArgs<float>&);

}  // namespace adaptivespec
