// What happens to the rows of a level between its matrix products: norms, rotation, activation. float32, one thread.
#pragma once

#include <cstdint>

namespace adaptivespec {

// y = x / sqrt(mean(x^2) + eps) * weight over `size` values; y may be x.
void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* y);

// residual += x, then y = rms_norm(residual).
void add_rms_norm(const float* x, float* residual, const float* weight, int64_t size, float eps, float* y);

// Rotary embedding, in place, of `heads` heads that lie behind each other: the first half of the rotated dimensions is
// turned with the second. `cos_sin`: 2 * half values, cosines first.
void rotate(float* x, int64_t heads, int64_t head_dim, const float* cos_sin, int64_t half);

// y = silu(gate) * up.
void silu_mul(const float* gate, const float* up, int64_t size, float* y);

}  // namespace adaptivespec
