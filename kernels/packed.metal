// Reading frozen weights, dense or packed, eight neighbours of a row at a time, as float32. This text
// stands before every kernel, after the constants BITS, GROUP, MODE and R and the type T of x.
//
// A row of I weights with BITS-bit codes is I * BITS / 8 bytes, lowest bits first, and I / GROUP
// scales. MODE 0 is affine (w = code * scale + bias), 1 mxfp (scale 2^(s - 127)), 2 nvfp4 (scale
// E4M3), 3 dense. Codes of 4 bits in modes 1 and 2 are E2M1, of 8 bits E4M3. Eight codes are BITS
// bytes for every BITS and never cross a group, so `column` is a multiple of 8 throughout.

inline float e2m1(uint code) {  // through half: denormals are exact there
  const float value = float(as_type<half>(ushort((code & 7u) << 9))) * 16384.0f;
  return (code & 8u) != 0u ? -value : value;
}

inline float e4m3(uint code) {
  float value = float(as_type<half>(ushort((code & 127u) << 7))) * 256.0f;
  value = (code & 127u) == 127u ? as_type<float>(0x7FC00000u) : value;
  return (code & 128u) != 0u ? -value : value;
}

template <int bits>
inline ulong eight_codes(const device uchar* at) {
  if (bits == 4) return *reinterpret_cast<const device uint*>(at);
  ulong codes = 0;
#pragma unroll
  for (int k = 0; k < bits; k++) codes |= ulong(at[k]) << (8 * k);
  return codes;
}

// x[0..8) as float32, zeros from `valid` on.
template <typename X>
inline void load8(const device X* x, int valid, thread float* v) {
  if (valid >= 8) {
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = static_cast<float>(x[k]);
  } else {
    for (int k = 0; k < 8; k++) v[k] = k < valid ? static_cast<float>(x[k]) : 0.0f;
  }
}

// Columns [column, column + 8) of `row` of the weight (O, I).
template <int mode, typename W, typename S, typename Z>
inline void load_weights(
    const device W* weight, const device S* scales, const device Z* biases, int row, int column,
    int I, thread float* w) {
  if constexpr (mode == 3) {
    load8(weight + size_t(row) * I + column, I - column, w);
  } else {
    const size_t eighth = size_t(row) * (I / 8) + column / 8, group = eighth / (GROUP / 8);
    const ulong codes =
        eight_codes<BITS>(reinterpret_cast<const device uchar*>(weight) + eighth * BITS);
    float scale, bias = 0.0f;
    if constexpr (mode == 0) {
      scale = static_cast<float>(scales[group]);
      bias = static_cast<float>(biases[group]);
    } else if constexpr (mode == 1) {
      const uint e = uint(scales[group]);
      scale = as_type<float>(e == 0u ? 0x400000u : e == 255u ? 0x7FC00000u : e << 23);
    } else {
      scale = e4m3(uint(scales[group]));
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const uint code = uint(codes >> (k * BITS)) & ((1u << BITS) - 1u);
      if constexpr (mode == 0) {
        w[k] = fma(float(code), scale, bias);
      } else {
        w[k] = (BITS == 4 ? e2m1(code) : e4m3(code)) * scale;
      }
    }
  }
}
