// Stand-in for MLX's header of this name, which uses builtins of Apple's compiler: overloads for
// bfloat, computed in float and rounded once.
#pragma once
#include <metal_stdlib>

#define MSL_BF1(name) \
  METAL_FUNC bfloat name(bfloat x) { return (bfloat)name((float)x); }
#define MSL_BF2(name) \
  METAL_FUNC bfloat name(bfloat x, bfloat y) { return (bfloat)name((float)x, (float)y); }
// clang-format off
#define MSL_BF_MATH \
  MSL_BF1(acos)     \
  MSL_BF1(acosh)    \
  MSL_BF1(asin)     \
  MSL_BF1(asinh)    \
  MSL_BF1(atan)     \
  MSL_BF1(atanh)    \
  MSL_BF1(ceil)     \
  MSL_BF1(cos)      \
  MSL_BF1(cosh)     \
  MSL_BF1(cospi)    \
  MSL_BF1(exp)      \
  MSL_BF1(exp2)     \
  MSL_BF1(exp10)    \
  MSL_BF1(fabs)     \
  MSL_BF1(floor)    \
  MSL_BF1(log)      \
  MSL_BF1(log2)     \
  MSL_BF1(log10)    \
  MSL_BF1(rint)     \
  MSL_BF1(round)    \
  MSL_BF1(rsqrt)    \
  MSL_BF1(sin)      \
  MSL_BF1(sinh)     \
  MSL_BF1(sinpi)    \
  MSL_BF1(sqrt)     \
  MSL_BF1(tan)      \
  MSL_BF1(tanh)     \
  MSL_BF1(tanpi)    \
  MSL_BF1(trunc)    \
  MSL_BF2(atan2)    \
  MSL_BF2(divide)   \
  MSL_BF2(fmax)     \
  MSL_BF2(fmin)     \
  MSL_BF2(fmod)     \
  MSL_BF2(fdim)     \
  MSL_BF2(pow)      \
  MSL_BF2(powr)     \
  MSL_BF2(copysign)
// clang-format on

namespace metal {
MSL_BF_MATH
MSL_BF1(abs)
MSL_BF2(max)
MSL_BF2(min)
METAL_FUNC bfloat fma(bfloat a, bfloat b, bfloat c) {
  return (bfloat)fma((float)a, (float)b, (float)c);
}
METAL_FUNC bfloat clamp(bfloat x, bfloat low, bfloat high) {
  return (bfloat)clamp((float)x, (float)low, (float)high);
}
namespace fast {
MSL_BF_MATH
}
namespace precise {
MSL_BF_MATH
}

#define MSL_BF_PERMUTE(name)                                   \
  METAL_FUNC bfloat name(bfloat x, ushort k, MSL_LINE) {       \
    return as_type<bfloat>(name(as_type<ushort>(x), k, line)); \
  }
MSL_BF_PERMUTE(simd_broadcast)
MSL_BF_PERMUTE(simd_shuffle)
MSL_BF_PERMUTE(simd_shuffle_xor)
MSL_BF_PERMUTE(simd_shuffle_up)
MSL_BF_PERMUTE(simd_shuffle_down)
MSL_BF_PERMUTE(simd_shuffle_rotate_up)
MSL_BF_PERMUTE(simd_shuffle_rotate_down)

#define MSL_BF_REDUCE(name) \
  METAL_FUNC bfloat name(bfloat x, MSL_LINE) { return (bfloat)name((float)x, line); }
MSL_BF_REDUCE(simd_sum)
MSL_BF_REDUCE(simd_product)
MSL_BF_REDUCE(simd_max)
MSL_BF_REDUCE(simd_min)
MSL_BF_REDUCE(simd_prefix_inclusive_sum)
MSL_BF_REDUCE(simd_prefix_exclusive_sum)
MSL_BF_REDUCE(simd_prefix_inclusive_product)
MSL_BF_REDUCE(simd_prefix_exclusive_product)

#define MSL_BF_FILL(name)                                                             \
  METAL_FUNC bfloat name(bfloat x, bfloat fill, ushort k, MSL_LINE) {                 \
    return as_type<bfloat>(name(as_type<ushort>(x), as_type<ushort>(fill), k, line)); \
  }
MSL_BF_FILL(simd_shuffle_and_fill_up)
MSL_BF_FILL(simd_shuffle_and_fill_down)
}  // namespace metal
