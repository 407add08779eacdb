// One to eight tokens through an adapted layer:  out = g (x W^T) + (x A) gsB + bias, in one launch.
//
// Replaces: the packed product, x A, (x A) B, the magnitude and the bias: four or five launches,
// each of which costs more than its work. Every block computes h = x A (N, R) for itself, from L2:
// that is cheaper than another launch.
//
// Layout: x (..., I), N rows of type T; weight (O, I) packed or dense; a (R, I) of type T, that is
// A transposed; b (R + 2, O) float32: g s B, then g, then the bias. A warp has ROWS rows; lane l
// takes columns 8 l .. 8 l + 7 of every 256, so codes, scales and x are read in whole lines. For h
// the warps of a block share out the columns, eight ranks at a time. Everything is summed in
// float32.
//
// Bytes: packed W once; x from L1; A (2 I R) from L2 once per block. Operations per weight: about 4
// to unpack, 1 per token. Hopper: bound by latency, hence many warps with few rows and unrolled
// loops: UNROLL strips of all rows are in flight at once.
const int O = b_shape[1], I = x_shape[x_ndim - 1];
const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
const int first = (blockIdx.x * WARPS + warp) * ROWS;
const bool wide = rows_aligned(x, I), wide_a = rows_aligned(a, I);

__shared__ float h[R][N], parts[WARPS][8][N];
for (int r = 0; r < R; r += 8) {
  float dot[8][N] = {};
  for (int column = (warp * 32 + lane) * 8; column < I; column += WARPS * 256) {
    float v[N][8];
#pragma unroll
    for (int t = 0; t < N; t++) load8(x + t * I + column, wide, I - column, v[t]);
#pragma unroll
    for (int q = 0; q < 8; q++) {
      float ar[8];
      load8(a + min(r + q, R - 1) * I + column, wide_a, I - column, ar);
#pragma unroll
      for (int t = 0; t < N; t++)
#pragma unroll
        for (int k = 0; k < 8; k++) dot[q][t] = fmaf(v[t][k], ar[k], dot[q][t]);
    }
  }
#pragma unroll
  for (int q = 0; q < 8; q++)
#pragma unroll
    for (int t = 0; t < N; t++) {
      const float sum = warp_sum(dot[q][t]);
      if (lane == 0) parts[warp][q][t] = sum;
    }
  __syncthreads();
  for (int p = threadIdx.x; p < 8 * N; p += WARPS * 32) {
    float sum = 0.0f;
    for (int k = 0; k < WARPS; k++) sum += parts[k][p / N][p % N];
    if (r + p / N < R) h[r + p / N][p % N] = sum;
  }
  __syncthreads();
}

float sum[ROWS][N] = {};
#pragma unroll UNROLL
for (int column = lane * 8; column < I; column += 256) {
  float w[ROWS][8];
#pragma unroll
  for (int j = 0; j < ROWS; j++)
    load_weights(weight, scales, biases, min(first + j, O - 1), column, I, w[j]);
#pragma unroll
  for (int t = 0; t < N; t++) {
    float v[8];
    load8(x + t * I + column, wide, I - column, v);
#pragma unroll
    for (int j = 0; j < ROWS; j++)
#pragma unroll
      for (int k = 0; k < 8; k++) sum[j][t] = fmaf(w[j][k], v[k], sum[j][t]);
  }
}

float mine = 0.0f;  // lane j N + t finishes row j of token t
#pragma unroll
for (int j = 0; j < ROWS; j++)
#pragma unroll
  for (int t = 0; t < N; t++) {
    const float all = warp_sum(sum[j][t]);
    if (lane == j * N + t) mine = all;
  }
const int row = first + lane / N, t = lane % N;
if (lane < ROWS * N && row < O) {
  mine = fmaf(mine, b[R * O + row], b[(R + 1) * O + row]);
  for (int r = 0; r < R; r++) mine = fmaf(h[r][t], b[r * O + row], mine);
  out[t * O + row] = static_cast<T>(mine);
}
