// Arguments of build_tree, on any device.
#pragma once

#include "adaptivespec/tree.h"
#include "checks.h"

namespace adaptivespec {

inline TreeBuild build_tree_arguments(const Place& at, const Tensor& parents, const Tensor& start,
                                      const Tensor& root_positions, const Tensor& depths, const Tensor& positions,
                                      const Tensor& ancestors, const Tensor& status) {
  const Argument parents_arg(at, "parents", parents, 1);                       // [T]
  const Argument start_arg(at, "start", start, 1);                             // [B + 1]
  const Argument root_positions_arg(at, "root_positions", root_positions, 1);  // [B]
  const Argument depths_arg(at, "depths", depths, 1);                          // [T]
  const Argument positions_arg(at, "positions", positions, 1);                 // [T]
  const Argument ancestors_arg(at, "ancestors", ancestors, 1);                 // [T]
  const Argument status_arg(at, "status", status, 1);                          // [B]
  const int64_t rows = parents_arg.size(0);
  const int64_t requests = root_positions_arg.size(0);
  parents_arg.of_type(ScalarType::Int).contiguous();
  start_arg.of_type(ScalarType::Int).of_size(0, requests + 1).contiguous();
  root_positions_arg.of_type(ScalarType::Long).contiguous();
  depths_arg.of_type(ScalarType::Int).of_size(0, rows).contiguous();
  positions_arg.of_type(ScalarType::Long).of_size(0, rows).contiguous();
  ancestors_arg.of_type(ScalarType::Long).of_size(0, rows).contiguous();
  status_arg.of_type(ScalarType::Int).of_size(0, requests).contiguous();
  return TreeBuild{parents_arg.read<int32_t>(),     start_arg.read<int32_t>(),
                   root_positions_arg.read<int64_t>(), depths_arg.write<int32_t>(),
                   positions_arg.write<int64_t>(),  ancestors_arg.write<int64_t>(),
                   status_arg.write<int32_t>(),     requests,
                   rows};
}

}  // namespace adaptivespec
