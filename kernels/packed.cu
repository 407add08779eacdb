// Reading frozen weights, dense or packed, eight neighbours of a row at a time, as float32. This text
// stands before every kernel, after the constants BITS, GROUP, MODE and R and the type T of x.
//
// A row of I weights with BITS-bit codes is I * BITS / 8 bytes, lowest bits first, and I / GROUP
// scales. MODE 0 is affine (w = code * scale + bias), 1 mxfp (scale 2^(s - 127)), 2 nvfp4 (scale
// E4M3), 3 dense. Codes of 4 bits in modes 1 and 2 are E2M1, of 8 bits E4M3. Eight codes are BITS
// bytes for every BITS and never cross a group, so `column` is a multiple of 8 throughout.

// An integer below 2^23 as float32, exactly: two operations at full rate, where the conversion
// instruction runs at a quarter of it (Hopper).
__device__ __forceinline__ float whole(unsigned n) {
  return __uint_as_float(0x4B000000u | n) - 8388608.0f;
}

__device__ __forceinline__ float e2m1(unsigned code) {  // through half: denormals are exact there
  float value = __half2float(__ushort_as_half((code & 7u) << 9)) * 16384.0f;
  return code & 8u ? -value : value;
}

__device__ __forceinline__ float e4m3(unsigned code) {
  float value = __half2float(__ushort_as_half((code & 127u) << 7)) * 256.0f;
  value = (code & 127u) == 127u ? __uint_as_float(0x7FC00000u) : value;
  return code & 128u ? -value : value;
}

__device__ __forceinline__ auto eight_codes(const unsigned char* at) {
  if constexpr (BITS == 2) {
    return static_cast<unsigned>(*reinterpret_cast<const unsigned short*>(at));
  } else if constexpr (BITS == 3) {
    return at[0] | at[1] << 8u | at[2] << 16u;
  } else if constexpr (BITS == 4) {
    return *reinterpret_cast<const unsigned*>(at);
  } else if constexpr (BITS == 8) {
    const unsigned* words = reinterpret_cast<const unsigned*>(at);
    return words[0] | static_cast<unsigned long long>(words[1]) << 32;
  } else {
    unsigned long long codes = 0;
#pragma unroll
    for (int k = 0; k < BITS; k++) codes |= static_cast<unsigned long long>(at[k]) << (8 * k);
    return codes;
  }
}

// x[0..8) as float32, zeros from `valid` on; 16 bytes at a time if the address is known to allow.
template <typename T>
__device__ __forceinline__ void load8(const T* x, bool aligned, int valid, float (&v)[8]) {
  if (aligned) {
    alignas(16) T part[8];
#pragma unroll
    for (int k = 0; k < int(sizeof(T)) / 2; k++)
      reinterpret_cast<uint4*>(part)[k] = reinterpret_cast<const uint4*>(x)[k];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = static_cast<float>(part[k]);
  } else {
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = k < valid ? static_cast<float>(x[k]) : 0.0f;
  }
}

// Whether rows of I values from `x` on can be read 16 bytes at a time.
__device__ __forceinline__ bool rows_aligned(const void* x, int I) {
  return I % 8 == 0 && (reinterpret_cast<size_t>(x) & 15) == 0;
}

// Columns [column, column + 8) of `row` of the weight (O, I).
template <typename W, typename S, typename Z>
__device__ __forceinline__ void load_weights(
    const W* weight, const S* scales, const Z* biases, int row, int column, int I,
    float (&w)[8]) {
  if constexpr (MODE == 3) {
    load8(weight + size_t(row) * I + column, rows_aligned(weight, I), I - column, w);
  } else {
    const size_t eighth = size_t(row) * (I / 8) + column / 8, group = eighth / (GROUP / 8);
    auto codes = eight_codes(reinterpret_cast<const unsigned char*>(weight) + eighth * BITS);
    float scale, bias = 0.0f;
    if constexpr (MODE == 0) {
      scale = static_cast<float>(scales[group]);
      bias = static_cast<float>(biases[group]);
    } else if constexpr (MODE == 1) {
      const unsigned e = scales[group];
      scale = __uint_as_float(e == 0 ? 0x400000u : e == 255 ? 0x7FC00000u : e << 23);
    } else {
      scale = e4m3(scales[group]);
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const unsigned code = static_cast<unsigned>(codes >> (k * BITS)) & ((1u << BITS) - 1u);
      if constexpr (MODE == 0) {
        w[k] = fmaf(whole(code), scale, bias);
      } else if constexpr (BITS == 4) {
        w[k] = e2m1(code) * scale;
      } else {
        w[k] = e4m3(code) * scale;
      }
    }
  }
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int k = 16; k > 0; k /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, k);
  return v;
}

// W + s (A B)^T for 8 rows from `first` on and 8 columns: a (R, I) is A transposed, sb (R, stride)
// this block's part of s B. A thread's 8 + 8 values serve 64 multiply-adds.
template <typename W, typename S, typename Z>
__device__ __forceinline__ void adapted_tile(
    const W* weight, const S* scales, const Z* biases, const float* a, const float* sb, int stride,
    int first, int column, int O, int I, bool wide, float (&w)[8][8]) {
#pragma unroll
  for (int j = 0; j < 8; j++)
    load_weights(weight, scales, biases, min(first + j, O - 1), column, I, w[j]);
#pragma unroll 2
  for (int r = 0; r < R; r++) {
    float ar[8];
    load8(a + r * I + column, wide, I - column, ar);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float br = sb[r * stride + j];
#pragma unroll
      for (int k = 0; k < 8; k++) w[j][k] = fmaf(br, ar[k], w[j][k]);
    }
  }
}
