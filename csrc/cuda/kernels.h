// What the CUDA sources offer the host: each checks nothing, launches on the stream and returns.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "adaptivespec/attention.h"
#include "adaptivespec/commit.h"
#include "adaptivespec/tree.h"
#include "adaptivespec/walk.h"

namespace adaptivespec::cuda {

void build_tree(const TreeBuild& build, cudaStream_t stream);

// Parts that a row of logits is read in, at the most; a part leaves one key in the workspace.
constexpr int kScanParts = 16;

// Of int64, a row: the parts' keys, and the logit of the row's token in its parent's row.
constexpr int kWalkWorkspaceWords = kScanParts + 1;

// T is float, bf16 or fp16; workspace [T, kWalkWorkspaceWords] may hold anything.
template <class T>
void walk_trees(const WalkBatch& batch, const T* logits, int64_t row_stride, int64_t vocab, int64_t* workspace,
                cudaStream_t stream);

// Any head size up to kMostDims and any strides; prefixes and lse where the arguments have them.
constexpr int kMostDims = 256;
template <class T>
void tree_attention(const AttentionArgs<T>& args, cudaStream_t stream);

// On tensor cores, without prefixes. T is bf16 or fp16.
template <class T>
void tree_part(const AttentionArgs<T>& args, cudaStream_t stream);

// Whether `tree_part` takes these arguments: head size, 16-byte alignment.
template <class T>
bool fits_tensor_cores(const AttentionArgs<T>& args);

// One launch per kCommitLayers layers.
void commit_kv(const CommitBatch& batch, const std::vector<const void*> (&fresh)[2],
               const std::vector<void*> (&caches)[2], int64_t element_bytes, cudaStream_t stream);

template <class T>
void topk_logprobs(const T* logits, int64_t rows, int64_t row_stride, int64_t vocab, int k, float* values,
                   int64_t* indices, cudaStream_t stream);

}  // namespace adaptivespec::cuda
