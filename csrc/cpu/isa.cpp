#include "isa.h"

#include <cstdlib>
#include <cstring>

#include "ops.h"

namespace adaptivespec {

namespace {

Isa probe() {
#ifdef ADAPTIVESPEC_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  // For tests and measurements: run a lesser set than the machine has. Never a greater one.
  const char* cap = std::getenv("VLLM_ADAPTIVESPEC_ISA");
  if (avx512 && !(cap && (!std::strcmp(cap, "avx2") || !std::strcmp(cap, "portable")))) return Isa::avx512;
  if (avx2 && !(cap && !std::strcmp(cap, "portable"))) return Isa::avx2;
#endif
  return Isa::portable;
}

}  // namespace

Isa detect_isa() {
  static const Isa isa = probe();
  return isa;
}

const char* vector_isa() {
  switch (detect_isa()) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    default: return "portable";
  }
}

}  // namespace adaptivespec
