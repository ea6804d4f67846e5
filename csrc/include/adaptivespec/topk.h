// The k largest of a stream of values, largest first, ties by the lower index.
#pragma once

#include <cstdint>
#include <limits>

#include "adaptivespec/host_device.h"

namespace adaptivespec {

constexpr int kMaxTopK = 64;

struct TopEntry {
  float value;
  int64_t index;
};

// NaN ranks above every number, as it does in the arg-max.
ADAPTIVESPEC_HOST_DEVICE bool ranks_above(const TopEntry& a, const TopEntry& b) {
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  if (a_nan || b_nan) return a_nan != b_nan ? a_nan : a.index < b.index;
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

struct TopList {
  TopEntry entries[kMaxTopK];
  int size = 0;

  // Keeps `entry` if it is among the k best seen so far.
  ADAPTIVESPEC_HOST_DEVICE void offer(const TopEntry& entry, int k) {
    if (size == k && !ranks_above(entry, entries[k - 1])) return;
    int slot = size < k ? size++ : k - 1;
    for (; slot > 0 && ranks_above(entry, entries[slot - 1]); --slot) entries[slot] = entries[slot - 1];
    entries[slot] = entry;
  }

  // A value below this one cannot enter the list.
  ADAPTIVESPEC_HOST_DEVICE float threshold(int k) const {
    return size < k ? -std::numeric_limits<float>::infinity() : entries[k - 1].value;
  }
};

}  // namespace adaptivespec
