// Sums over tokens for the gradient of the magnitude:  p_so = sum_t c_to y_to, t in chunk s.
//
// Replaces: both (T, O) matrices as float32, their product, its sum: 12 bytes moved per element
// where reading the two takes 4 (bf16). The chunks' sums are added afterwards, in a fixed order.
//
// Layout: c, y (T, O) of type T; p (chunks, O) float32. A block is 8 warps on the same 256 columns
// and TOKENS tokens; a lane has 8 columns. Bytes: c and y once. Hopper: bound by them; TOKENS = 128
// gives 128 blocks even to the narrowest layer of an 8B model at 4096 tokens.
const int L = c_shape[0], O = c_shape[1];
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
const int first = blockIdx.x * 256, column = first + lane * 8;
const int begin = blockIdx.y * TOKENS, end = min(begin + TOKENS, L);
const bool wide = rows_aligned(c, O) && rows_aligned(y, O);
__shared__ float sums[8][256];
float total[8] = {};
if (column < O) {
#pragma unroll 4
  for (int t = begin + warp; t < end; t += 8) {
    float u[8], v[8];
    load8(c + size_t(t) * O + column, wide, O - column, u);
    load8(y + size_t(t) * O + column, wide, O - column, v);
#pragma unroll
    for (int k = 0; k < 8; k++) total[k] = fmaf(u[k], v[k], total[k]);
  }
}
#pragma unroll
for (int k = 0; k < 8; k++) sums[warp][lane * 8 + k] = total[k];
__syncthreads();
const int mine = threadIdx.x;
if (first + mine < O) {
  float sum = 0.0f;
  for (int k = 0; k < 8; k++) sum += sums[k][mine];
  p[size_t(blockIdx.y) * O + first + mine] = sum;
}
