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

// What is wrong with row `row`, given that the rows before it are good.
ADAPTIVESPEC_HOST_DEVICE int32_t row_status(const int32_t* parents, int64_t row) {
  const int32_t parent = parents[row];
  if (row == 0) return parent == -1 ? kTreeOk : tree_status(kTreeNoRoot, 0);
  return parent >= 0 && parent < row ? kTreeOk : tree_status(kTreeParentOrder, row);
}

struct TreeRow {
  int32_t depth;
  uint64_t ancestors;
};

// Climbs from `row` to the root; this row and those before it are good.
ADAPTIVESPEC_HOST_DEVICE TreeRow climb_tree(const int32_t* parents, int64_t row) {
  TreeRow found{0, uint64_t{1} << row};
  for (int32_t at = parents[row]; at >= 0; at = parents[at]) {
    found.depth += 1;
    found.ancestors |= uint64_t{1} << at;
  }
  return found;
}

// Everything of a batch of trees; `status` says for each what is wrong. Nothing is written past the first bad row.
struct TreeBuild {
  const int32_t* parents;         // [T]
  const int32_t* start;           // [B + 1]
  const int64_t* root_positions;  // [B]
  int32_t* depths;                // [T]
  int64_t* positions;             // [T]
  int64_t* ancestors;             // [T]
  int32_t* status;                // [B]
  int64_t requests, rows;

  // Fills one row of the tree whose first row is `first`.
  ADAPTIVESPEC_HOST_DEVICE void fill(int64_t b, int64_t first, int64_t row, const int32_t* tree_parents) const {
    const TreeRow found = climb_tree(tree_parents, row);
    depths[first + row] = found.depth;
    positions[first + row] = root_positions[b] + found.depth;
    ancestors[first + row] = static_cast<int64_t>(found.ancestors);
  }
};

// The request whose rows hold `row`, or -1 where none does. `start` [requests + 1] never falls.
ADAPTIVESPEC_HOST_DEVICE int64_t request_of(const int32_t* start, int64_t requests, int64_t row) {
  if (row < start[0] || row >= start[requests]) return -1;
  int64_t low = 0, high = requests;  // start[low] <= row < start[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (start[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace adaptivespec
