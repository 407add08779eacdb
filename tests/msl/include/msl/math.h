// Functions of numbers. A float goes through libm; a half is computed in float and rounded once.
// <metal_stdlib> has no overloads for bfloat, which converts to float; MLX adds them, and so does
// the stand-in for its bf16_math.h.
#pragma once

namespace metal {

// `expression` is of the float x, or x and y. The macro WRAP adds noise to it, or does nothing.
#define MSL_UNARY(name, WRAP, expression)                     \
  METAL_FUNC float name(float x) { return WRAP(expression); } \
  METAL_FUNC half name(half h) {                              \
    float x = h;                                              \
    return (half)WRAP(expression);                            \
  }                                                           \
  template <class T, int N>                                   \
  METAL_FUNC vec<T, N> name(vec<T, N> v) {                    \
    return msl_detail::map(v, [](T x) { return name(x); });   \
  }
#define MSL_BINARY(name, WRAP, expression)                             \
  METAL_FUNC float name(float x, float y) { return WRAP(expression); } \
  METAL_FUNC half name(half a, half b) {                               \
    float x = a;                                                       \
    float y = b;                                                       \
    return (half)WRAP(expression);                                     \
  }                                                                    \
  template <class T, int N>                                            \
  METAL_FUNC vec<T, N> name(vec<T, N> v, vec<T, N> w) {                \
    return msl_detail::map(v, w, [](T x, T y) { return name(x, y); }); \
  }
#define MSL_EXACT(value) (value)
#define MSL_NOISY(value) (MSL_FAST_ULPS ? msl_noise((value), MSL_FAST_ULPS) : (value))

// Those that metal::fast has with less accuracy.
#define MSL_APPROXIMATE(WRAP)                                          \
  MSL_UNARY(exp, WRAP, __builtin_expf(x))                              \
  MSL_UNARY(exp2, WRAP, __builtin_exp2f(x))                            \
  MSL_UNARY(exp10, WRAP, __builtin_exp2f(x * 3.32192809488736234787f)) \
  MSL_UNARY(log, WRAP, __builtin_logf(x))                              \
  MSL_UNARY(log2, WRAP, __builtin_log2f(x))                            \
  MSL_UNARY(log10, WRAP, __builtin_log10f(x))                          \
  MSL_UNARY(sin, WRAP, __builtin_sinf(x))                              \
  MSL_UNARY(cos, WRAP, __builtin_cosf(x))                              \
  MSL_UNARY(tan, WRAP, __builtin_tanf(x))                              \
  MSL_UNARY(asin, WRAP, __builtin_asinf(x))                            \
  MSL_UNARY(acos, WRAP, __builtin_acosf(x))                            \
  MSL_UNARY(atan, WRAP, __builtin_atanf(x))                            \
  MSL_UNARY(sinh, WRAP, __builtin_sinhf(x))                            \
  MSL_UNARY(cosh, WRAP, __builtin_coshf(x))                            \
  MSL_UNARY(tanh, WRAP, __builtin_tanhf(x))                            \
  MSL_UNARY(asinh, WRAP, __builtin_asinhf(x))                          \
  MSL_UNARY(acosh, WRAP, __builtin_acoshf(x))                          \
  MSL_UNARY(atanh, WRAP, __builtin_atanhf(x))                          \
  MSL_UNARY(sqrt, WRAP, __builtin_sqrtf(x))                            \
  MSL_UNARY(rsqrt, WRAP, (1.0f / __builtin_sqrtf(x)))                  \
  MSL_UNARY(sinpi, WRAP, __builtin_sinf(M_PI_F * x))                    \
  MSL_UNARY(cospi, WRAP, __builtin_cosf(M_PI_F * x))                    \
  MSL_UNARY(tanpi, WRAP, __builtin_tanf(M_PI_F * x))                    \
  MSL_BINARY(pow, WRAP, __builtin_powf(x, y))                          \
  MSL_BINARY(powr, WRAP, __builtin_powf(x, y))                         \
  MSL_BINARY(atan2, WRAP, __builtin_atan2f(x, y))                      \
  MSL_BINARY(divide, WRAP, (x / y))

#define MSL_CORRECT                                  \
  MSL_UNARY(fabs, MSL_EXACT, __builtin_fabsf(x))     \
  MSL_UNARY(ceil, MSL_EXACT, __builtin_ceilf(x))     \
  MSL_UNARY(floor, MSL_EXACT, __builtin_floorf(x))   \
  MSL_UNARY(trunc, MSL_EXACT, __builtin_truncf(x))   \
  MSL_UNARY(rint, MSL_EXACT, __builtin_rintf(x))     \
  MSL_UNARY(round, MSL_EXACT, __builtin_roundf(x))   \
  MSL_BINARY(fmod, MSL_EXACT, __builtin_fmodf(x, y)) \
  MSL_BINARY(fmin, MSL_EXACT, __builtin_fminf(x, y)) \
  MSL_BINARY(fmax, MSL_EXACT, __builtin_fmaxf(x, y)) \
  MSL_BINARY(fdim, MSL_EXACT, __builtin_fdimf(x, y)) \
  MSL_BINARY(copysign, MSL_EXACT, __builtin_copysignf(x, y))

namespace precise {
MSL_APPROXIMATE(MSL_EXACT)
MSL_CORRECT
}  // namespace precise
namespace fast {
MSL_APPROXIMATE(MSL_NOISY)
MSL_CORRECT
}  // namespace fast
#if MSL_FAST_MATH
MSL_APPROXIMATE(MSL_NOISY)
#else
MSL_APPROXIMATE(MSL_EXACT)
#endif
MSL_CORRECT

METAL_FUNC float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
METAL_FUNC half fma(half a, half b, half c) {
  // twice rounded, which is harmless: the 53 bits of a double are more than 2 * 11 + 2
  return (half)__builtin_fma((double)a, (double)b, (double)c);
}
template <class T, int N>
METAL_FUNC vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = fma(T(a[i]), T(b[i]), T(c[i]));
  return r;
}
METAL_FUNC float fract(float x) {
  return __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f);  // less than 1
}
METAL_FUNC float ldexp(float x, int k) { return __builtin_ldexpf(x, k); }
METAL_FUNC bool isnan(float x) { return x != x; }
METAL_FUNC bool isinf(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
METAL_FUNC bool isfinite(float x) { return __builtin_fabsf(x) < __builtin_inff(); }
METAL_FUNC bool signbit(float x) { return as_type<uint>(x) >> 31; }

// Both arguments must have one type. With two, MSL calls it ambiguous and clang finds no match.
template <class T>
METAL_FUNC enable_if_t<is_integral_v<T>, T> max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
METAL_FUNC enable_if_t<is_integral_v<T>, T> min(T a, T b) {
  return b < a ? b : a;
}
METAL_FUNC float max(float a, float b) { return __builtin_fmaxf(a, b); }
METAL_FUNC float min(float a, float b) { return __builtin_fminf(a, b); }
METAL_FUNC half max(half a, half b) { return (half)__builtin_fmaxf(a, b); }
METAL_FUNC half min(half a, half b) { return (half)__builtin_fminf(a, b); }
template <class T, int N>
METAL_FUNC vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  return msl_detail::map(a, b, [](T x, T y) { return max(x, y); });
}
template <class T, int N>
METAL_FUNC vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  return msl_detail::map(a, b, [](T x, T y) { return min(x, y); });
}

template <class T>
METAL_FUNC enable_if_t<is_integral_v<T>, T> abs(T x) {
  return is_signed_v<T> && x < T(0) ? T(-x) : x;
}
METAL_FUNC float abs(float x) { return __builtin_fabsf(x); }
METAL_FUNC half abs(half x) { return (half)__builtin_fabsf(x); }
template <class T, int N>
METAL_FUNC vec<T, N> abs(vec<T, N> v) {
  return msl_detail::map(v, [](T x) { return abs(x); });
}
template <class T>
METAL_FUNC T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T>
METAL_FUNC T max3(T a, T b, T c) {
  return max(max(a, b), c);
}
template <class T>
METAL_FUNC T min3(T a, T b, T c) {
  return min(min(a, b), c);
}
template <class T>
METAL_FUNC T saturate(T x) {
  return clamp(x, T(0), T(1));
}
template <class T>
METAL_FUNC T sign(T x) {
  return x > T(0) ? T(1) : x < T(0) ? T(-1) : T(0);
}
template <class T>
METAL_FUNC T mix(T a, T b, T t) {
  return a + (b - a) * t;
}
template <class T>
METAL_FUNC enable_if_t<is_arithmetic_v<T>, T> select(T a, T b, bool second) {
  return second ? b : a;
}
template <class T, int N, class M>
METAL_FUNC vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<M, N> second) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = second[i] ? b[i] : a[i];
  return r;
}

template <class M, int N>
METAL_FUNC bool any(vec<M, N> v) {
  bool found = false;
  for (int i = 0; i < N; i++) found = found || v[i];
  return found;
}
template <class M, int N>
METAL_FUNC bool all(vec<M, N> v) {
  bool every = true;
  for (int i = 0; i < N; i++) every = every && v[i];
  return every;
}
template <class T, int N>
METAL_FUNC T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}
template <class T, int N>
METAL_FUNC T length_squared(vec<T, N> a) {
  return dot(a, a);
}
template <class T, int N>
METAL_FUNC T length(vec<T, N> a) {
  return sqrt(dot(a, a));
}

METAL_FUNC uint popcount(uint x) { return __builtin_popcount(x); }
METAL_FUNC uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
METAL_FUNC uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
METAL_FUNC uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
METAL_FUNC uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
template <class T>
METAL_FUNC enable_if_t<is_unsigned_v<T>, T> extract_bits(T x, uint offset, uint bits) {
  if (bits == 0) return T(0);
  T mask = bits >= 8 * sizeof(T) ? T(~T(0)) : T((T(1) << bits) - 1);
  return T((x >> offset) & mask);
}
template <class T>
METAL_FUNC T rotate(T x, T k) {
  uint n = 8 * sizeof(T);
  k &= n - 1;
  return k ? T((x << k) | (x >> (n - k))) : x;
}

}  // namespace metal
