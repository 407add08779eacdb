// Sums over tokens for the gradient of the magnitude:  p_so = sum_t c_to y_to, t in chunk s.
//
// Replaces: both (T, O) matrices as float32, their product, its sum: 12 bytes moved per element
// where reading the two takes 4 (bf16). The chunks' sums are added afterwards, in a fixed order.
//
// Layout: c, y (T, O) of type T; p (chunks, O) float32. A threadgroup is 8 SIMD-groups on the same
// 256 columns and TOKENS tokens; a lane has 8 columns. Bytes: c and y once. Apple GPUs: 8 KB of
// threadgroup memory and few registers, so four threadgroups share a core.
const int L = c_shape[0], O = c_shape[1];
const int lane = int(thread_index_in_simdgroup), group = int(simdgroup_index_in_threadgroup);
const int first = int(threadgroup_position_in_grid.x) * 256, column = first + lane * 8;
const int chunk = int(threadgroup_position_in_grid.y);
const int begin = chunk * TOKENS, end = min(begin + TOKENS, L);
threadgroup float sums[8 * 256];
float total[8];
for (int k = 0; k < 8; k++) total[k] = 0.0f;
if (column < O) {
  for (int t = begin + group; t < end; t += 8) {
    float u[8], v[8];
    load8(c + size_t(t) * O + column, O - column, u);
    load8(y + size_t(t) * O + column, O - column, v);
    for (int k = 0; k < 8; k++) total[k] = fma(u[k], v[k], total[k]);
  }
}
for (int k = 0; k < 8; k++) sums[group * 256 + lane * 8 + k] = total[k];
threadgroup_barrier(mem_flags::mem_threadgroup);
const int mine = int(thread_position_in_threadgroup.x);
if (first + mine < O) {
  float sum = 0.0f;
  for (int k = 0; k < 8; k++) sum += sums[k * 256 + mine];
  p[size_t(chunk) * O + first + mine] = sum;
}
