// Element addresses of a paged key or value cache whose strides are not known beforehand.
#pragma once

#include <cstdint>

#include "adaptivespec/host_device.h"

namespace adaptivespec {

// A cache [num_blocks, kv_heads, block_size, head_dim] in elements of T, with any strides.
//
// vLLM's CPU backend stores the key half of a block transposed (token_stride 1, dim_stride block_size) and the value
// half token-major (dim_stride 1).
template <class T>
struct PagedView {
  const T* data;
  int64_t block_stride;
  int64_t head_stride;
  int64_t token_stride;
  int64_t dim_stride;

  // The element (block, head, token 0 of the block + offset, dim 0).
  ADAPTIVESPEC_HOST_DEVICE const T* at(int64_t block, int64_t head, int64_t offset) const {
    return data + block * block_stride + head * head_stride + offset * token_stride;
  }
};

// Fresh keys or values of the tree rows, [rows, kv_heads, head_dim] with contiguous head_dim.
template <class T>
struct RowView {
  T* data;
  int64_t row_stride;
  int64_t head_stride;

  ADAPTIVESPEC_HOST_DEVICE T* at(int64_t row, int64_t head) const {
    return data + row * row_stride + head * head_stride;
  }
};

// Whether tree key `column` (local to the request) is visible to the row that carries this ancestor word.
ADAPTIVESPEC_HOST_DEVICE bool visible(uint64_t ancestors, int64_t column) { return (ancestors >> column) & 1u; }

// The word without bits of tree keys that do not exist.
ADAPTIVESPEC_HOST_DEVICE uint64_t mask_word(int64_t ancestors, int64_t tree_keys) {
  const uint64_t word = static_cast<uint64_t>(ancestors);
  return tree_keys >= 64 ? word : word & ((uint64_t{1} << tree_keys) - 1);
}

}  // namespace adaptivespec
