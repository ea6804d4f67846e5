// Depths, positions and ancestor words of one draft tree, from its parent rows.
//
//   row      0      1      2      3      4          row 0 is the root: parent -1, depth 0
//   parent   -1     0      0      1      3          a parent always comes before its children
//   depth    0      1      1      2      3
//   ancestors (bit j = row j is an ancestor or the row itself)
//            00001  00011  00101  01011  11011
#pragma once

#include <cstdint>

#include "adaptivespec/host_device.h"

namespace adaptivespec {

// The ancestors of a row are one 64-bit word.
constexpr int kMaxTreeRows = 64;

// What is wrong with a tree. A status word holds the kind in its low 8 bits and the row in the rest.
enum TreeStatus : int32_t {
  kTreeOk = 0,
  kTreeNoRoot = 1,        // no rows, or row 0 has a parent
  kTreeTooLarge = 2,      // more than kMaxTreeRows rows
  kTreeParentOrder = 3,   // a row whose parent is not an earlier row of the same tree
};

ADAPTIVESPEC_HOST_DEVICE int32_t tree_status(TreeStatus kind, int64_t row) {
  return static_cast<int32_t>(kind) | (static_cast<int32_t>(row) << 8);
}

// Fills depths[rows], positions[rows], ancestors[rows] of one tree. Writes nothing past the first bad row.
ADAPTIVESPEC_HOST_DEVICE int32_t build_one_tree(const int32_t* parents, int64_t rows, int64_t root_position,
                                                int32_t* depths, int64_t* positions, int64_t* ancestors) {
  if (rows < 1 || parents[0] != -1) return tree_status(kTreeNoRoot, 0);
  if (rows > kMaxTreeRows) return tree_status(kTreeTooLarge, kMaxTreeRows);
  depths[0] = 0;
  positions[0] = root_position;
  ancestors[0] = 1;
  for (int64_t row = 1; row < rows; ++row) {
    const int32_t parent = parents[row];
    if (parent < 0 || parent >= row) return tree_status(kTreeParentOrder, row);
    depths[row] = depths[parent] + 1;
    positions[row] = root_position + depths[row];
    ancestors[row] = static_cast<int64_t>(static_cast<uint64_t>(ancestors[parent]) | (uint64_t{1} << row));
  }
  return kTreeOk;
}

}  // namespace adaptivespec
