// One to eight tokens through an adapted layer:  out = g (x W^T) + h gsB + bias, after h = x A.
//
// Replaces: the packed product, h B, their sum, the magnitude and the bias: four passes over (N, O)
// and as many launches.
//
// Layout: x (..., I), N rows of type T; weight (O, I) packed or dense; h (N, R) of type T; b (R + 2, O)
// float32: g s B, then g, then the bias. A SIMD-group has ROWS rows; lane l takes columns
// 8 l .. 8 l + 7 of every 256, so codes, scales and x are read in whole lines. Everything is summed
// in float32.
//
// Bytes: packed W once; x from L1. Operations per weight: about 4 to unpack, 1 per token. Apple
// GPUs: SIMD-groups share nothing, so a threadgroup is only a unit of scheduling (8 of them, 256
// threads) and no threadgroup memory limits how many a core keeps. h is computed before: were every
// threadgroup to read A for itself, that would be as many bytes as W where caches are small.
const int O = b_shape[1], I = x_shape[x_ndim - 1];
const int lane = int(thread_index_in_simdgroup);
const int first =
    (int(threadgroup_position_in_grid.x) * WARPS + int(simdgroup_index_in_threadgroup)) * ROWS;
float sum[ROWS][N];
for (int j = 0; j < ROWS; j++)
  for (int t = 0; t < N; t++) sum[j][t] = 0.0f;
for (int column = lane * 8; column < I; column += 256) {
  float w[ROWS][8];
  for (int j = 0; j < ROWS; j++)
    load_weights<MODE>(weight, scales, biases, min(first + j, O - 1), column, I, w[j]);
  for (int t = 0; t < N; t++) {
    float v[8];
    load8(x + size_t(t) * I + column, I - column, v);
    for (int j = 0; j < ROWS; j++)
      for (int k = 0; k < 8; k++) sum[j][t] = fma(w[j][k], v[k], sum[j][t]);
  }
}

float mine = 0.0f;  // lane j N + t finishes row j of token t
for (int j = 0; j < ROWS; j++)
  for (int t = 0; t < N; t++) {
    const float all = simd_sum(sum[j][t]);
    mine = lane == j * N + t ? all : mine;
  }
const int row = first + lane / N, t = lane % N;
if (lane < ROWS * N && row < O) {
  mine = fma(mine, b[R * O + row], b[(R + 1) * O + row]);
  for (int r = 0; r < R; r++) mine = fma(static_cast<float>(h[t * R + r]), b[r * O + row], mine);
  out[t * O + row] = static_cast<T>(mine);
}
