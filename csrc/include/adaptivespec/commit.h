// Which fresh row of keys and values goes to which slot of the paged cache.
//
//   rows in the batch     root  a  b  c  d        accepted path: b, d
//   sequential slots      s0    s1 s2 s3 s4       commit: row b -> s1, row d -> s2
#pragma once

#include <cstdint>

#include "adaptivespec/host_device.h"

namespace adaptivespec {

// Layers that one launch takes: their pointers are parameters of the kernel, of which there are 4 KiB.
constexpr int kCommitLayers = 96;

// Keys or values of all layers; every layer has the same strides, in elements.
struct CommitHalf {
  int64_t row_stride, head_stride, dim_stride;                                    // fresh rows [R, Hkv, D]
  int64_t block_stride, cache_head_stride, token_stride, cache_dim_stride;        // cache [blocks, Hkv, block_size, D]
};

struct CommitBatch {
  const int32_t* paths;      // [B, path_capacity] tree rows
  const int32_t* lengths;    // [B]
  const int32_t* root_rows;  // [B] row of each root among the fresh rows and the slots
  const int64_t* slots;      // [R] each row's place as if the rows were a sequence; negative: none
  int64_t requests, path_capacity, rows, blocks, block_size, kv_heads, head_dim;
  CommitHalf half[2];  // keys, values
};

// The j-th accepted node of request b; row -1: there is none, or it has no place.
struct CommitMove {
  int64_t row, block, offset;
};

ADAPTIVESPEC_HOST_DEVICE CommitMove commit_move(const CommitBatch& batch, int64_t b, int64_t j) {
  const CommitMove none{-1, 0, 0};
  if (j >= batch.lengths[b]) return none;
  const int64_t root = batch.root_rows[b], row = root + batch.paths[b * batch.path_capacity + j];
  const int64_t sequential = root + 1 + j;
  if (root < 0 || row < root || row >= batch.rows || sequential >= batch.rows) return none;
  const int64_t slot = batch.slots[sequential];
  if (slot < 0 || slot >= batch.blocks * batch.block_size) return none;
  return CommitMove{row, slot / batch.block_size, slot % batch.block_size};
}

// Elements from the start of the fresh rows to (row, head) and from the start of the cache to the move's (block, head).
ADAPTIVESPEC_HOST_DEVICE int64_t fresh_offset(const CommitHalf& half, const CommitMove& move, int64_t head) {
  return move.row * half.row_stride + head * half.head_stride;
}
ADAPTIVESPEC_HOST_DEVICE int64_t cache_offset(const CommitHalf& half, const CommitMove& move, int64_t head) {
  return move.block * half.block_stride + head * half.cache_head_stride + move.offset * half.token_stride;
}

}  // namespace adaptivespec
