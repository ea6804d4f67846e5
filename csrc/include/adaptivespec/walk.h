// The walk over one verified draft tree: exact match first, then the margin rule, then stop.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "adaptivespec/host_device.h"
#include "adaptivespec/row_max.h"

namespace adaptivespec {

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
  const uint64_t* children;  // [rows] bit c: row c is a child of this row
  const int32_t* tokens;     // [rows]
  const int64_t* sampled;    // [rows] or null: the target's own choice after each row
};

struct WalkOutcome {
  int64_t next_token = 0;
  int32_t length = 0;
  int32_t promotions = 0;
  float regret = 0.0f;
};

// The walks of a batch: B requests, T rows.
struct WalkBatch {
  const int32_t* start;             // [B + 1]
  const int32_t* parents;           // [T]
  const int32_t* tokens;            // [T]
  const int64_t* sampled;           // [T] or null
  const float* max_log_ratio;       // [B] or null: strict
  const int32_t* max_promotions;    // [B] or null
  const float* max_regret;          // [B] or null
  const int32_t* protected_tokens;  // [B, num_protected] or null
  int64_t num_protected;
  int32_t* paths;                   // [B, path_capacity]
  int64_t path_capacity;
  int32_t* lengths;                 // [B]
  int64_t* next_tokens;             // [B]
  int32_t* promotions;              // [B]
  float* regrets;                   // [B]
  int64_t requests, rows;

  ADAPTIVESPEC_HOST_DEVICE WalkLimits limits(int64_t b) const {
    WalkLimits found;
    if (max_log_ratio) found.max_log_ratio = max_log_ratio[b];
    if (max_promotions) found.max_promotions = max_promotions[b];
    if (max_regret) found.max_regret = max_regret[b];
    if (protected_tokens) {
      found.protected_tokens = protected_tokens + b * num_protected;
      found.num_protected = num_protected;
    }
    return found;
  }

  // Everything but the path.
  ADAPTIVESPEC_HOST_DEVICE void store(int64_t b, const WalkOutcome& outcome) const {
    lengths[b] = outcome.length;
    next_tokens[b] = outcome.next_token;
    promotions[b] = outcome.promotions;
    regrets[b] = outcome.regret;
  }
};

// The lowest row of a non-empty set of rows.
ADAPTIVESPEC_HOST_DEVICE int32_t first_row(uint64_t rows) {
#ifdef __CUDA_ARCH__
  return __ffsll(static_cast<long long>(rows)) - 1;
#else
  return __builtin_ctzll(rows);
#endif
}

// Walks from the root and writes accepted rows to path[0 .. capacity). At `capacity` accepted rows the walk ends
// as it does at a leaf.
//
// LogitRows: `RowMax max(int32_t row)`, called at most once for a visited row and for no other, and
// `float child_logit(int32_t row, int32_t child)`, the logit of the child's token in the row: -inf outside the vocabulary.
template <class LogitRows>
ADAPTIVESPEC_HOST_DEVICE WalkOutcome walk_one_tree(const WalkTree& tree, const WalkLimits& limits,
                                                   const LogitRows& logits, int32_t* path, int64_t capacity) {
  WalkOutcome outcome;
  int32_t row = 0;
  while (true) {
    const bool choose = tree.sampled == nullptr;
    RowMax top{0.0f, 0};
    if (choose) top = logits.max(row);
    const int64_t choice = choose ? top.index : tree.sampled[row];
    outcome.next_token = choice;
    if (outcome.length >= capacity) return outcome;

    const uint64_t children = tree.children[row];
    int32_t next = -1;
    for (uint64_t rest = children; rest != 0 && next < 0; rest &= rest - 1) {
      const int32_t child = first_row(rest);
      if (tree.tokens[child] == choice) next = child;
    }

    const bool may_promote = children != 0 && next < 0 && limits.max_log_ratio >= 0.0f &&
                             (limits.max_promotions < 0 || outcome.promotions < limits.max_promotions) &&
                             !limits.is_protected(choice);
    if (may_promote) {
      if (!choose) top = logits.max(row);
      float best = -std::numeric_limits<float>::infinity();
      int32_t candidate = -1;
      for (uint64_t rest = children; rest != 0; rest &= rest - 1) {
        const int32_t child = first_row(rest);
        if (limits.is_protected(tree.tokens[child])) continue;
        const float value = logits.child_logit(row, child);
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
    path[outcome.length++] = next;
    row = next;
  }
}

}  // namespace adaptivespec
