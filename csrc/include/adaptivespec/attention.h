// What the attention of tree rows works on: queries, the trees' fresh keys and values, the paged prefixes.
#pragma once

#include <cstdint>

#include "adaptivespec/host_device.h"
#include "adaptivespec/paged_kv.h"

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
  const int32_t* prefix_lens;  // [B], null: no prefix
  const int32_t* query_start;  // [B + 1]
  const int32_t* key_start;    // [B + 1]
  const int64_t* ancestors;    // [Tq]
  int64_t requests, kv_heads, group, head_dim, block_size;
  float scale;
  float* lse;  // [Hq, Tq] or null: log of the sum of exp(score), -inf where no key is visible
  int64_t lse_head_stride, lse_row_stride;
  int64_t queries, tree_rows, blocks, table_blocks;  // Tq, Tk, blocks of the cache, max_blocks

  ADAPTIVESPEC_HOST_DEVICE int64_t prefix(int64_t b) const { return prefix_lens ? prefix_lens[b] : 0; }
  ADAPTIVESPEC_HOST_DEVICE float* lse_at(int64_t row, int64_t head) const {
    return lse + head * lse_head_stride + row * lse_row_stride;
  }
};

}  // namespace adaptivespec
