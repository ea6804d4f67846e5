// Accepted keys and values to their slots of the paged cache, of all layers in one launch.
//
// Bytes: every accepted node is read and written once, 2 x 2 x Hkv x D x element size a layer; with 8 KV heads of 128 in
// 16 bits and 32 layers 256 KiB a node. How many nodes are drafted does not matter, only how many are accepted: at most
// 8 of a tree of depth 8, whether it has 8, 16 or 64 rows. Floor in microseconds at 4.8 TB/s:
//
//   accepted a request    batch 1    batch 8    batch 64
//          1                0.05       0.44        3.5
//          4                0.22       1.75       14.0
//          8                0.44       3.5        28.0
#include <cuda_runtime.h>

#include "kernels.h"
#include "launch.h"

namespace adaptivespec::cuda {

namespace {

constexpr int kThreads = 256;

struct Layers {
  const void* fresh[2][kCommitLayers];
  void* caches[2][kCommitLayers];
};

// A block moves one node in one layer. All lengths and strides are in units: elements, or vectors of them.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    move_rows(const CommitBatch batch, const Layers layers) {
  const int64_t nodes = batch.requests * batch.path_capacity;
  const int64_t layer = blockIdx.x / nodes, node = blockIdx.x % nodes;
  const CommitMove move = commit_move(batch, node / batch.path_capacity, node % batch.path_capacity);
  if (move.row < 0) return;
  const int units = static_cast<int>(batch.kv_heads * batch.head_dim), dims = static_cast<int>(batch.head_dim);
  for (int i = threadIdx.x; i < 2 * units; i += kThreads) {
    const int h = i >= units, head = (i - h * units) / dims, dim = (i - h * units) % dims;
    const CommitHalf& half = batch.half[h];
    const Unit* fresh = static_cast<const Unit*>(layers.fresh[h][layer]);
    Unit* cache = static_cast<Unit*>(layers.caches[h][layer]);
    cache[cache_offset(half, move, head) + dim * half.cache_dim_stride] =
        fresh[fresh_offset(half, move, head) + dim * half.dim_stride];
  }
}

// The same batch in vectors of `per` elements.
CommitBatch in_vectors(CommitBatch batch, int64_t per) {
  batch.head_dim /= per;
  for (CommitHalf& half : batch.half) {
    half.row_stride /= per;
    half.head_stride /= per;
    half.block_stride /= per;
    half.cache_head_stride /= per;
    half.token_stride /= per;
  }
  return batch;
}

bool divisible(const CommitBatch& batch, int64_t per) {
  if (batch.head_dim % per != 0) return false;
  for (const CommitHalf& half : batch.half) {
    if (half.dim_stride != 1 || half.cache_dim_stride != 1) return false;
    for (const int64_t stride : {half.row_stride, half.head_stride, half.block_stride, half.cache_head_stride,
                                 half.token_stride}) {
      if (stride % per != 0) return false;
    }
  }
  return true;
}

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % sizeof(uint4) == 0; }

}  // namespace

void commit_kv(const CommitBatch& batch, const std::vector<const void*> (&fresh)[2],
               const std::vector<void*> (&caches)[2], int64_t element_bytes, cudaStream_t stream) {
  const int64_t count = static_cast<int64_t>(caches[0].size()), nodes = batch.requests * batch.path_capacity;
  const int64_t per = static_cast<int64_t>(sizeof(uint4)) / element_bytes;
  for (int64_t first = 0; first < count; first += kCommitLayers) {
    Layers layers{};
    const int64_t here = count - first < kCommitLayers ? count - first : kCommitLayers;
    bool vectors = divisible(batch, per);
    for (int h = 0; h < 2; ++h) {
      for (int64_t layer = 0; layer < here; ++layer) {
        layers.fresh[h][layer] = fresh[h][first + layer];
        layers.caches[h][layer] = caches[h][first + layer];
        vectors = vectors && aligned(fresh[h][first + layer]) && aligned(caches[h][first + layer]);
      }
    }
    const int64_t blocks = here * nodes;
    if (vectors) {
      launch(move_rows<uint4>, blocks, kThreads, stream, in_vectors(batch, per), layers);
    } else if (element_bytes == 1) {
      launch(move_rows<uint8_t>, blocks, kThreads, stream, batch, layers);
    } else if (element_bytes == 2) {
      launch(move_rows<uint16_t>, blocks, kThreads, stream, batch, layers);
    } else {
      launch(move_rows<uint32_t>, blocks, kThreads, stream, batch, layers);
    }
  }
}

}  // namespace adaptivespec::cuda
