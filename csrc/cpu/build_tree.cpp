#include "build_tree.h"

#include "ops.h"

namespace adaptivespec {

namespace {

int32_t build_one_tree(const TreeBuild& build, int64_t b) {
  const int64_t first = build.start[b], rows = build.start[b + 1] - first;
  const int32_t* parents = build.parents + first;
  if (rows < 1 || parents[0] != -1) return tree_status(kTreeNoRoot, 0);
  if (rows > kMaxTreeRows) return tree_status(kTreeTooLarge, kMaxTreeRows);
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t status = row_status(parents, row);
    if (status != kTreeOk) return status;
    build.fill(b, first, row, parents);
  }
  return kTreeOk;
}

}  // namespace

void build_tree(const Tensor& parents, const Tensor& start, const Tensor& root_positions, const Tensor& depths,
                const Tensor& positions, const Tensor& ancestors, const Tensor& status) {
  constexpr const char* op = "build_tree";
  const TreeBuild build =
      build_tree_arguments(op, parents, start, root_positions, depths, positions, ancestors, status);
  check_starts(op, "start", build.start, build.requests, build.rows);
  for (int64_t b = 0; b < build.requests; ++b) build.status[b] = build_one_tree(build, b);
}

}  // namespace adaptivespec
