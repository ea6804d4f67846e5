// The walk over one verified draft tree: exact match first, then the margin rule, then stop.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "adaptivespec/host_device.h"

namespace adaptivespec {

// The row's maximum and the first index that holds it. A NaN counts as the maximum.
struct RowMax {
  float value;
  int64_t index;
};

// What the margin rule may do for one request in this step.
struct WalkLimits {
  float max_log_ratio = -1.0f;           // ln(1 / kappa), nats; negative = strict
  int32_t max_promotions = -1;           // -1 = no limit
  float max_regret = std::numeric_limits<float>::infinity();  // nats
  const int32_t* protected_tokens = nullptr;
  int64_t num_protected = 0;             // -1 entries are padding

  ADAPTIVESPEC_HOST_DEVICE bool is_protected(int64_t token) const {
    for (int64_t i = 0; i < num_protected; ++i) {
      if (protected_tokens[i] >= 0 && protected_tokens[i] == token) return true;
    }
    return false;
  }
};

// One request's tree; every pointer is at its row 0.
struct WalkTree {
  const int32_t* parents;   // [rows]
  const int32_t* tokens;    // [rows]
  const int64_t* sampled;   // [rows] or null: the target's own choice after each row
  int64_t rows;
};

struct WalkOutcome {
  int64_t next_token = 0;
  int32_t length = 0;
  int32_t promotions = 0;
  float regret = 0.0f;
};

// Walks from the root and writes accepted rows to path[0 .. capacity). At `capacity` accepted rows the walk ends
// as it does at a leaf.
//
// LogitRows: `RowMax max(int64_t row)` and `float at(int64_t row, int64_t token)`; row 0 is the root. `max` is
// called at most once for a visited row, and for no other.
template <class LogitRows>
ADAPTIVESPEC_HOST_DEVICE WalkOutcome walk_one_tree(const WalkTree& tree, const WalkLimits& limits,
                                                   const LogitRows& logits, int64_t vocab, int32_t* path,
                                                   int64_t capacity) {
  WalkOutcome outcome;
  int64_t row = 0;
  while (true) {
    const bool choose = tree.sampled == nullptr;
    RowMax top{0.0f, 0};
    if (choose) top = logits.max(row);
    const int64_t choice = choose ? top.index : tree.sampled[row];
    outcome.next_token = choice;
    if (outcome.length >= capacity) return outcome;

    int64_t next = -1;
    bool has_child = false;
    for (int64_t child = row + 1; child < tree.rows; ++child) {
      if (tree.parents[child] != row) continue;
      has_child = true;
      if (tree.tokens[child] == choice) {
        next = child;
        break;
      }
    }

    const bool may_promote = has_child && next < 0 && limits.max_log_ratio >= 0.0f &&
                             (limits.max_promotions < 0 || outcome.promotions < limits.max_promotions) &&
                             !limits.is_protected(choice);
    if (may_promote) {
      if (!choose) top = logits.max(row);
      float best = -std::numeric_limits<float>::infinity();
      int64_t candidate = -1;
      for (int64_t child = row + 1; child < tree.rows; ++child) {
        const int64_t token = tree.tokens[child];
        if (tree.parents[child] != row || token < 0 || token >= vocab || limits.is_protected(token)) continue;
        const float value = logits.at(row, token);
        if (value > best) {
          best = value;
          candidate = child;
        }
      }
      if (candidate >= 0) {
        const float gap = top.value - best;  // NaN when the maximum is: no comparison below holds
        if (gap <= limits.max_log_ratio && outcome.regret + gap <= limits.max_regret) {
          next = candidate;
          outcome.promotions += 1;
          outcome.regret += gap;
        }
      }
    }
    if (next < 0) return outcome;
    path[outcome.length++] = static_cast<int32_t>(next);
    row = next;
  }
}

}  // namespace adaptivespec
