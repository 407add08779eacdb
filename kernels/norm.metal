// Row norms of W + s (A B)^T:  n_o = sqrt(sum_i (W_oi + sum_r A_ir sB_ro)^2)
//
// Replaces: dequantize, the product B^T A^T, their sum and its norm: four passes over dense (O, I)
// matrices. Here the sum is formed in float32, element by element, in registers; nothing of that
// size is stored, and nothing cancels that the sum itself does not (the factored form
// |W|^2 + 2 s (W A) B + s^2 B^T A^T A B does where s B^T A^T is near -W).
//
// Layout: weight (O, I) packed or dense; a (R, I) float32, that is A transposed; b (R, O) float32
// with s in it; n (O,) float32. A threadgroup is SETS sets of TILE rows by STRIPS strips of 256
// columns, one SIMD-group each. A thread has TILE rows by 8 columns in registers: at TILE = 4 these
// are 32 sums, 8 of A and little else, within the 128 registers that let an Apple core keep its full
// number of threads. B's part for the rows is staged in threadgroup memory (32 R SETS * TILE / 8
// bytes at most 16 KB); A is not: neighbouring lanes read neighbouring columns of it, and the
// SIMD-groups of one strip read the same ones, from L1.
//
// Bytes: packed W once; A once per SETS * TILE rows, from the last-level cache. Operations per
// element: about 4 to unpack, R + 1 multiply-adds.
const int O = b_shape[1], I = a_shape[1];
const int lane = int(thread_index_in_simdgroup), group = int(simdgroup_index_in_threadgroup);
const int set = group / STRIPS, strip = group % STRIPS;
const int block = int(threadgroup_position_in_grid.x) * SETS * TILE, first = block + set * TILE;
threadgroup float sb[R * SETS * TILE];  // (R, rows of the threadgroup)
threadgroup float sums[SETS * STRIPS * TILE];
for (int k = int(thread_position_in_threadgroup.x); k < R * SETS * TILE; k += 32 * SETS * STRIPS) {
  const int row = block + k % (SETS * TILE);
  sb[k] = row < O ? b[k / (SETS * TILE) * O + row] : 0.0f;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

float total[TILE];
for (int j = 0; j < TILE; j++) total[j] = 0.0f;
for (int column = (strip * 32 + lane) * 8; column < I; column += STRIPS * 256) {
  float w[TILE][8];
  for (int j = 0; j < TILE; j++)
    load_weights<MODE>(weight, scales, biases, min(first + j, O - 1), column, I, w[j]);
  for (int r = 0; r < R; r++) {
    float ar[8];
    load8(a + size_t(r) * I + column, I - column, ar);
    for (int j = 0; j < TILE; j++) {
      const float br = sb[(r * SETS + set) * TILE + j];
      for (int k = 0; k < 8; k++) w[j][k] = fma(br, ar[k], w[j][k]);
    }
  }
  for (int j = 0; j < TILE; j++)
    for (int k = 0; k < 8; k++) total[j] = fma(w[j][k], w[j][k], total[j]);
}
for (int j = 0; j < TILE; j++) {
  const float sum = simd_sum(total[j]);
  if (lane == 0) sums[group * TILE + j] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (strip == 0 && lane < TILE && first + lane < O) {
  float square = 0.0f;
  for (int k = 0; k < STRIPS; k++) square += sums[(set * STRIPS + k) * TILE + lane];
  n[first + lane] = precise::sqrt(square);
}
