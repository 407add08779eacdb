// Stand-in for MLX's header of this name: what utils.h needs of it. Its member functions are
// qualified with address spaces, which clang's C++ does not parse, so complex kernels are out of
// scope.
#pragma once
#include <metal_stdlib>
#include "mlx/backend/metal/kernels/bf16.h"

using namespace metal;

template <typename T>
struct complex_t {
  T real;
  T imag;
  constexpr complex_t(T r = T(0), T i = T(0)) : real(r), imag(i) {}
};
using complex64_t = complex_t<float>;
using complex32_t = complex_t<half>;

template <typename T>
constexpr bool is_complex_v = false;
template <typename T>
constexpr bool is_complex_v<complex_t<T>> = true;
