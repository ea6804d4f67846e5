// The attention of tree rows, for the ops that contain it.
#pragma once

#include "attention.h"

namespace adaptivespec {

// Every index that the kernel follows.
template <class T>
void check_indices(const char* op, const AttentionArgs<T>& args) {
  check_starts(op, "query_start", args.query_start, args.requests, args.queries);
  check_starts(op, "key_start", args.key_start, args.requests, args.tree_rows);
  for (int64_t b = 0; b < args.requests; ++b) {
    const int64_t prefix = args.prefix(b);
    ADAPTIVESPEC_CHECK(args.key_start[b + 1] - args.key_start[b] <= kMaxTreeRows, op, "request ", b,
                       " has more than ", kMaxTreeRows, " tree keys");
    ADAPTIVESPEC_CHECK(prefix >= 0 && (prefix == 0 || prefix <= args.table_blocks * args.block_size), op,
                       "the prefix of request ", b, " (", prefix, ") does not fit its ", args.table_blocks,
                       " blocks of ", args.block_size);
    for (int64_t i = 0; i * args.block_size < prefix; ++i) {
      const int32_t block = args.block_table[b * args.table_stride + i];
      ADAPTIVESPEC_CHECK(block >= 0 && block < args.blocks, op, "block ", i, " of request ", b, " is ", block,
                         ", the cache has ", args.blocks);
    }
  }
}

// On torch's threads; tree_attention.cpp.
template <class T>
void attend_trees(const AttentionArgs<T>& args);

extern template void attend_trees<float>(const AttentionArgs<float>&);

}  // namespace adaptivespec
