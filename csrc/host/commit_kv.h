// Arguments of commit_kv, on any device.
#pragma once

#include <vector>

#include "adaptivespec/commit.h"
#include "checks.h"

namespace adaptivespec {

// The batch, and for keys and for values the data of every layer.
struct CommitArguments {
  CommitBatch batch{};
  int64_t element_bytes = 0;
  std::vector<const void*> fresh[2];
  std::vector<void*> caches[2];

  int64_t layers() const { return static_cast<int64_t>(caches[0].size()); }
};

inline CommitArguments commit_kv_arguments(const Place& at, const std::vector<Tensor>& keys,
                                           const std::vector<Tensor>& values, const std::vector<Tensor>& key_caches,
                                           const std::vector<Tensor>& value_caches, const Tensor& paths,
                                           const Tensor& lengths, const Tensor& root_rows, const Tensor& slots) {
  const Argument paths_arg(at, "paths", paths, 2);              // [B, D]
  const Argument lengths_arg(at, "lengths", lengths, 1);        // [B]
  const Argument root_rows_arg(at, "root_rows", root_rows, 1);  // [B]
  const Argument slots_arg(at, "slots", slots, 1);              // [R]
  CommitArguments arguments;
  CommitBatch& batch = arguments.batch;
  batch.requests = lengths_arg.size(0);
  batch.path_capacity = paths_arg.size(1);
  batch.rows = slots_arg.size(0);
  batch.paths = paths_arg.of_type(ScalarType::Int).of_size(0, batch.requests).contiguous().read<int32_t>();
  batch.lengths = lengths_arg.of_type(ScalarType::Int).contiguous().read<int32_t>();
  batch.root_rows = root_rows_arg.of_type(ScalarType::Int).of_size(0, batch.requests).contiguous().read<int32_t>();
  batch.slots = slots_arg.of_type(ScalarType::Long).contiguous().read<int64_t>();
  const size_t layers = key_caches.size();
  ADAPTIVESPEC_CHECK(keys.size() == layers && values.size() == layers && value_caches.size() == layers, at.op,
                     "keys, values, key_caches and value_caches must have one tensor a layer, got ", keys.size(), ", ",
                     values.size(), ", ", layers, " and ", value_caches.size());
  if (layers == 0) return arguments;

  const Argument first(at, "key_caches[0]", key_caches[0], 4);
  batch.blocks = first.size(0);
  batch.kv_heads = first.size(1);
  batch.block_size = first.size(2);
  batch.head_dim = first.size(3);
  arguments.element_bytes = first.element_bytes();
  const char* names[2][2] = {{"keys", "key_caches"}, {"values", "value_caches"}};
  const std::vector<Tensor>* fresh_tensors[2] = {&keys, &values};
  const std::vector<Tensor>* cache_tensors[2] = {&key_caches, &value_caches};
  for (int h = 0; h < 2; ++h) {
    CommitHalf& half = batch.half[h];
    for (size_t layer = 0; layer < layers; ++layer) {
      const Argument fresh(at, names[h][0], (*fresh_tensors[h])[layer], 3);   // [R, Hkv, D]
      const Argument cache(at, names[h][1], (*cache_tensors[h])[layer], 4);  // [blocks, Hkv, block_size, D]
      cache.of_type(first.type()).of_size(0, batch.blocks).of_size(1, batch.kv_heads).of_size(2, batch.block_size);
      cache.of_size(3, batch.head_dim).distinct(0).distinct(1).distinct(2).distinct(3);
      ADAPTIVESPEC_CHECK(fresh.type() == first.type(), at.op, names[h][0],
                         " must have the dtype of the caches: a quantized cache is written by its backend");
      fresh.of_size(1, batch.kv_heads).of_size(2, batch.head_dim);
      ADAPTIVESPEC_CHECK(fresh.size(0) >= batch.rows, at.op, names[h][0], " must have a row for each of the ",
                         batch.rows, " slots, got ", fresh.shape());
      const CommitHalf mine{fresh.stride(0), fresh.stride(1), fresh.stride(2), cache.stride(0),
                            cache.stride(1), cache.stride(2), cache.stride(3)};
      if (layer == 0) half = mine;
      ADAPTIVESPEC_CHECK(half.row_stride == mine.row_stride && half.head_stride == mine.head_stride &&
                             half.dim_stride == mine.dim_stride && half.block_stride == mine.block_stride &&
                             half.cache_head_stride == mine.cache_head_stride &&
                             half.token_stride == mine.token_stride &&
                             half.cache_dim_stride == mine.cache_dim_stride,
                         at.op, names[h][0], " and ", names[h][1], " must have the same strides in every layer");
      arguments.fresh[h].push_back(fresh.read<void>());
      arguments.caches[h].push_back(cache.write<void>());
    }
  }
  return arguments;
}

}  // namespace adaptivespec
