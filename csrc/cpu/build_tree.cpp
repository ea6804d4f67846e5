#include "adaptivespec/tree.h"

#include "checks.h"
#include "ops.h"

namespace adaptivespec {

void build_tree(const Tensor& parents, const Tensor& start, const Tensor& root_positions, const Tensor& depths,
                const Tensor& positions, const Tensor& ancestors, const Tensor& status) {
  constexpr const char* op = "build_tree";
  const Argument parents_arg(op, "parents", parents, 1);                       // [T]
  const Argument start_arg(op, "start", start, 1);                             // [B + 1]
  const Argument root_positions_arg(op, "root_positions", root_positions, 1);  // [B]
  const Argument depths_arg(op, "depths", depths, 1);                          // [T]
  const Argument positions_arg(op, "positions", positions, 1);                 // [T]
  const Argument ancestors_arg(op, "ancestors", ancestors, 1);                 // [T]
  const Argument status_arg(op, "status", status, 1);                          // [B]
  const int64_t rows = parents_arg.size(0);
  const int64_t requests = root_positions_arg.size(0);
  parents_arg.of_type(ScalarType::Int).contiguous();
  start_arg.of_type(ScalarType::Int).of_size(0, requests + 1).contiguous();
  root_positions_arg.of_type(ScalarType::Long).contiguous();
  depths_arg.of_type(ScalarType::Int).of_size(0, rows).contiguous();
  positions_arg.of_type(ScalarType::Long).of_size(0, rows).contiguous();
  ancestors_arg.of_type(ScalarType::Long).of_size(0, rows).contiguous();
  status_arg.of_type(ScalarType::Int).of_size(0, requests).contiguous();
  const int32_t* first = start_arg.read<int32_t>();
  check_starts(op, "start", first, requests, rows);

  for (int64_t b = 0; b < requests; ++b) {
    const int64_t row = first[b];
    status_arg.write<int32_t>()[b] =
        build_one_tree(parents_arg.read<int32_t>() + row, first[b + 1] - row, root_positions_arg.read<int64_t>()[b],
                       depths_arg.write<int32_t>() + row, positions_arg.write<int64_t>() + row,
                       ancestors_arg.write<int64_t>() + row);
  }
}

}  // namespace adaptivespec
