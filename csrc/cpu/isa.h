// Vector kernels are compiled once per instruction set from one source and chosen at run time.
//
// A kernel file `x.inc` is included once a set, between isa_begin.inc and isa_end.inc, with ADAPTIVESPEC_ISA naming the
// set. The functions of each inclusion live in their own namespace and carry that set as a target attribute, so the
// rest of the translation unit, and every inline function of a header, stays portable.
#pragma once

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define ADAPTIVESPEC_X86 1
#include <immintrin.h>
#endif

namespace adaptivespec {

enum class Isa { portable, avx2, avx512 };

Isa detect_isa();

// ADAPTIVESPEC_DISPATCH(f) names the twin of function f for the running machine.
#ifdef ADAPTIVESPEC_X86
#define ADAPTIVESPEC_DISPATCH(function)                                       \
  (::adaptivespec::detect_isa() == ::adaptivespec::Isa::avx512 ? &avx512::function \
   : ::adaptivespec::detect_isa() == ::adaptivespec::Isa::avx2 ? &avx2::function   \
                                                               : &portable::function)
#else
#define ADAPTIVESPEC_DISPATCH(function) (&portable::function)
#endif

}  // namespace adaptivespec
