// Row norms of W + s (A B)^T:  n_o = sqrt(sum_i (W_oi + sum_r A_ir sB_ro)^2)
//
// Replaces: dequantize, the product B^T A^T, their sum and its norm: four passes over dense (O, I)
// matrices. Here the sum is formed in float32, element by element, in registers; nothing of that
// size is stored, and nothing cancels that the sum itself does not (the factored form
// |W|^2 + 2 s (W A) B + s^2 B^T A^T A B does where s B^T A^T is near -W).
//
// Layout: weight (O, I) packed or dense; a (R, I) float32, that is A transposed; b (R, O) float32
// with s in it; n (O,) float32. A block is SETS sets of 8 rows by STRIPS strips of 256 columns, one
// warp each; sets meet the same part of A in L1. B's part is staged in shared memory.
//
// Bytes: packed W once; A once per SETS * 8 rows, from L2. Operations per element: about 4 to
// unpack, R + 1 multiply-adds. On Hopper these bound it (4 bits, R = 8). 126 registers: two blocks
// of 256 threads per SM. Few rows take SETS = 1, so that all SMs have work.
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

float total[8] = {};
for (int column = (strip * 32 + lane) * 8; column < I; column += STRIPS * 256) {
  float w[8][8];
  adapted_tile(weight, scales, biases, a, sb + set * 8, SETS * 8, first, column, O, I, wide, w);
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int k = 0; k < 8; k++) total[j] = fmaf(w[j][k], w[j][k], total[j]);
}
__shared__ float sums[SETS * STRIPS][8];  // (warp, row)
#pragma unroll
for (int j = 0; j < 8; j++) {
  total[j] = warp_sum(total[j]);
  if (lane == 0) sums[warp][j] = total[j];
}
__syncthreads();
if (strip == 0 && lane < 8 && first + lane < O) {
  float square = 0.0f;
  for (int k = 0; k < STRIPS; k++) square += sums[set * STRIPS + k][lane];
  n[first + lane] = sqrtf(square);
}
