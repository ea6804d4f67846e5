#include "rows.h"

#include <cmath>
#include <cstring>

#include "adaptivespec/scalar_types.h"
#include "isa.h"

#define ADAPTIVESPEC_KERNELS "rows.inc"
#include "each_isa.inc"

namespace adaptivespec {

void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* y) {
  ADAPTIVESPEC_DISPATCH(rms_norm_row)(x, weight, size, eps, y);
}

void add_rms_norm(const float* x, float* residual, const float* weight, int64_t size, float eps, float* y) {
  ADAPTIVESPEC_DISPATCH(add_row)(x, size, residual);
  rms_norm(residual, weight, size, eps, y);
}

void rotate(float* x, int64_t heads, int64_t head_dim, const float* cos_sin, int64_t half) {
  ADAPTIVESPEC_DISPATCH(rotate_heads)(x, heads, head_dim, cos_sin, half);
}

void silu_mul(const float* gate, const float* up, int64_t size, float* y) {
  ADAPTIVESPEC_DISPATCH(silu_mul_row)(gate, up, size, y);
}

}  // namespace adaptivespec
