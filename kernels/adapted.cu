// The adapted weight, dense:  out_oi = g_o (W_oi + sum_r A_ir sB_ro), rounded once, to type T.
//
// Replaces: dequantize, the product x A B, its sum with x W^T, the scaling by g and their
// backward: with this transient copy a training layer is one product forward and one backward,
// and no pass over (T, O) is left. It takes less time than mx.dequantize alone.
//
// Layout: as in norm.cu; g (O,) float32; out (O, I). Bytes: packed W once, out once, A once per
// SETS * 8 rows from L2. Operations per element: about 5, R multiply-adds. Hopper: bound by them
// and by the stores about equally; a separate pass for the norm is faster than one kernel for both,
// which needs more than the 128 registers that leave two blocks per SM.
const int O = b_shape[1], I = a_shape[1];
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
const int set = warp / STRIPS, strip = warp % STRIPS;
const int block = blockIdx.x * SETS * 8, first = block + set * 8;
const bool wide = rows_aligned(a, I);
__shared__ float sb[R * SETS * 8];  // (R, rows of the block)
for (int k = threadIdx.x; k < R * SETS * 8; k += 32 * SETS * STRIPS) {
  const int row = block + k % (SETS * 8);
  sb[k] = row < O ? b[k / (SETS * 8) * O + row] : 0.0f;
}
__syncthreads();

for (int column = (strip * 32 + lane) * 8; column < I; column += STRIPS * 256) {
  float w[8][8];
  adapted_tile(weight, scales, biases, a, sb + set * 8, SETS * 8, first, column, O, I, wide, w);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    if (first + j < O) {
      T* to = out + size_t(first + j) * I + column;
      alignas(16) T part[8];
#pragma unroll
      for (int k = 0; k < 8; k++) part[k] = static_cast<T>(g[first + j] * w[j][k]);
      if (wide) {
#pragma unroll
        for (int k = 0; k < int(sizeof(T)) / 2; k++)
          reinterpret_cast<uint4*>(to)[k] = reinterpret_cast<uint4*>(part)[k];
      } else {
        for (int k = 0; k < 8 && column + k < I; k++) to[k] = part[k];
      }
    }
  }
}
