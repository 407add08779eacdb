// simdgroup_matrix<T, 8, 8>. Each lane holds two neighbours of one row. Apple does not document
// which; this is the layout that MLX's matrix kernels rely on.
#pragma once

namespace metal {

template <class T, int R, int C>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "a simdgroup_matrix is 8x8");
  vec<T, 2> e;

  simdgroup_matrix() { __builtin_memset(&e, 0xff, sizeof e); }
  explicit simdgroup_matrix(T diagonal, MSL_LINE) {
    uint lane = msl_detail::exchange(true, "simdgroup_matrix", line).lane;
    for (uint k = 0; k < 2; k++) e[k] = row(lane) == column(lane) + k ? diagonal : T(0);
  }
  vec<T, 2>& thread_elements() { return e; }
  const vec<T, 2>& thread_elements() const { return e; }

  // where the lane's first element is
  static uint row(uint lane) { return (lane / 16) * 4 + lane / 2 % 4; }
  static uint column(uint lane) { return (lane / 8 % 2) * 4 + (lane % 2) * 2; }
  // which lane holds an element; component column % 2 of its two
  static uint lane_of(uint row, uint column) {
    return row / 4 * 16 + column / 4 * 8 + row % 4 * 2 + column / 2 % 2;
  }
};
template <class T>
using simdgroup_matrix8x8 = simdgroup_matrix<T, 8, 8>;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int R, int C>
METAL_FUNC simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, R, C> m;
  m.e = (vec<T, 2>)(value);
  return m;
}

namespace msl_detail {
// where element k of the caller's two lies in memory
METAL_FUNC ulong element(uint lane, uint k, ulong stride, vec<ulong, 2> origin, bool transpose) {
  ulong row = simdgroup_float8x8::row(lane);
  ulong column = simdgroup_float8x8::column(lane) + k;
  ulong along = transpose ? row : column;
  ulong down = transpose ? column : row;
  return (down + origin[1]) * stride + along + origin[0];
}
}  // namespace msl_detail

template <class T, class P>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, P from, ulong stride = 8,
                               vec<ulong, 2> origin = vec<ulong, 2>{0, 0}, bool transpose = false,
                               MSL_LINE) {
  uint lane = msl_detail::exchange(true, __func__, line).lane;
  for (uint k = 0; k < 2; k++)
    m.e[k] = from[msl_detail::element(lane, k, stride, origin, transpose)];
}
template <class T, class P>
METAL_FUNC void simdgroup_store(simdgroup_matrix<T, 8, 8> m, P to, ulong stride = 8,
                                vec<ulong, 2> origin = vec<ulong, 2>{0, 0}, bool transpose = false,
                                MSL_LINE) {
  uint lane = msl_detail::exchange(true, __func__, line).lane;
  for (uint k = 0; k < 2; k++) to[msl_detail::element(lane, k, stride, origin, transpose)] = m.e[k];
}

// d = a b + c
template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                              const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b,
                                              const simdgroup_matrix<C, 8, 8>& c, MSL_LINE) {
  struct Pair {
    vec<A, 2> a;
    vec<B, 2> b;
  };
  msl_exchange_t e = msl_detail::exchange(Pair{a.e, b.e}, __func__, line);
  uint row = d.row(e.lane);
  uint column = d.column(e.lane);
  vec<float, 2> sum = {(float)c.e[0], (float)c.e[1]};
  for (uint k = 0; k < 8; k++) {
    float x = (float)msl_detail::slot<Pair>(e, d.lane_of(row, k)).a[k % 2];
    vec<B, 2> y = msl_detail::slot<Pair>(e, d.lane_of(k, column)).b;
    for (uint i = 0; i < 2; i++) sum[i] = __builtin_fmaf(x, (float)y[i], sum[i]);
  }
  for (uint i = 0; i < 2; i++) d.e[i] = (D)sum[i];
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b, MSL_LINE) {
  simdgroup_matrix<D, 8, 8> zero = make_filled_simdgroup_matrix<D, 8, 8>(D(0));
  simdgroup_multiply_accumulate(d, a, b, zero, line);
}

}  // namespace metal
