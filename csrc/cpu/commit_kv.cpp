#include "commit_kv.h"

#include <cstring>

#include "ops.h"

namespace adaptivespec {

namespace {

void copy_row(const CommitHalf& half, const char* from, char* to, int64_t dims, int64_t bytes) {
  if (half.dim_stride == 1 && half.cache_dim_stride == 1) {
    std::memcpy(to, from, dims * bytes);
    return;
  }
  for (int64_t d = 0; d < dims; ++d) {
    std::memcpy(to + d * half.cache_dim_stride * bytes, from + d * half.dim_stride * bytes, bytes);
  }
}

}  // namespace

void commit_kv(const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
               const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches, const Tensor& paths,
               const Tensor& lengths, const Tensor& root_rows, const Tensor& slots) {
  const CommitArguments arguments =
      commit_kv_arguments("commit_kv", keys, values, key_caches, value_caches, paths, lengths, root_rows, slots);
  const CommitBatch& batch = arguments.batch;
  const int64_t bytes = arguments.element_bytes;
  torch::stable::parallel_for(0, arguments.layers(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin * batch.requests; item < end * batch.requests; ++item) {
      const int64_t layer = item / batch.requests, b = item % batch.requests;
      for (int64_t j = 0; j < batch.path_capacity; ++j) {
        const CommitMove move = commit_move(batch, b, j);
        if (move.row < 0) continue;
        for (int h = 0; h < 2; ++h) {
          const CommitHalf& half = batch.half[h];
          const char* fresh = static_cast<const char*>(arguments.fresh[h][layer]);
          char* cache = static_cast<char*>(arguments.caches[h][layer]);
          for (int64_t head = 0; head < batch.kv_heads; ++head) {
            copy_row(half, fresh + fresh_offset(half, move, head) * bytes,
                     cache + cache_offset(half, move, head) * bytes, batch.head_dim, bytes);
          }
        }
      }
    }
  });
}

}  // namespace adaptivespec
