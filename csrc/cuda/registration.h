// The CUDA ops under their names.
#pragma once

#include <torch/csrc/stable/library.h>

#include "ops.h"

namespace adaptivespec::cuda_ops {

inline void implement_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("build_tree", TORCH_BOX(&build_tree));
  m.impl("walk_trees", TORCH_BOX(&walk_trees));
  m.impl("tree_attention", TORCH_BOX(&tree_attention));
  m.impl("tree_part_attention", TORCH_BOX(&tree_part_attention));
  m.impl("commit_kv", TORCH_BOX(&commit_kv));
  m.impl("topk_logprobs", TORCH_BOX(&topk_logprobs));
}

}  // namespace adaptivespec::cuda_ops
