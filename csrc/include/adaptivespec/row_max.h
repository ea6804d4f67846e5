// The maximum of a row with its first index, and its form as one integer whose order is the order of the maxima.
#pragma once

#include <cstdint>

#include "adaptivespec/host_device.h"
#include "adaptivespec/scalar_types.h"

namespace adaptivespec {

// The row's maximum and the first index that holds it. A NaN counts as the maximum.
struct RowMax {
  float value;
  int64_t index;
};

// The greater the key, the better: NaN first, then by value, of equals the lower index. -0 equals 0. Never 0 itself.
ADAPTIVESPEC_HOST_DEVICE uint64_t rank_key(float value, uint32_t index) {
  const uint32_t bits = bits_from_float(value);
  uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  if (value == 0.0f) ordered = 0x80000000u;
  if (value != value) ordered = 0xffffffffu;
  return uint64_t{ordered} << 32 | (0xffffffffu - index);
}

ADAPTIVESPEC_HOST_DEVICE float key_value(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  if (ordered == 0xffffffffu) return float_from_bits(0x7fc00000u);
  return float_from_bits(ordered >> 31 ? ordered ^ 0x80000000u : ~ordered);
}

ADAPTIVESPEC_HOST_DEVICE uint32_t key_index(uint64_t key) { return 0xffffffffu - static_cast<uint32_t>(key); }

}  // namespace adaptivespec
