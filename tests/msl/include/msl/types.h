// Type traits, vectors and numeric limits.
#pragma once

namespace metal {

// ---- traits ---------------------------------------------------------------------------

template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class U>
struct conditional {
  typedef T type;
};
template <class T, class U>
struct conditional<false, T, U> {
  typedef U type;
};
template <bool B, class T, class U>
using conditional_t = typename conditional<B, T, U>::type;

template <class T, class U>
struct is_same : false_type {};
template <class T>
struct is_same<T, T> : true_type {};
template <class T, class U>
constexpr bool is_same_v = is_same<T, U>::value;

template <class From, class To>
struct is_convertible : bool_constant<__is_convertible(From, To)> {};
template <class From, class To>
constexpr bool is_convertible_v = __is_convertible(From, To);

// remove_x<Q T>::type is T: a qualifier or a declarator taken off
#define MSL_REMOVE(name, ...) \
  template <class T>          \
  struct name {               \
    typedef T type;           \
  };                          \
  __VA_ARGS__                 \
  template <class T>          \
  using name##_t = typename name<T>::type;
#define MSL_REMOVES(name, from) \
  template <class T>            \
  struct name<from> {           \
    typedef T type;             \
  };

MSL_REMOVE(remove_const, MSL_REMOVES(remove_const, const T))
MSL_REMOVE(remove_volatile, MSL_REMOVES(remove_volatile, volatile T))
MSL_REMOVE(remove_pointer, MSL_REMOVES(remove_pointer, T*))
MSL_REMOVE(remove_reference, MSL_REMOVES(remove_reference, T&) MSL_REMOVES(remove_reference, T&&))
#ifdef MSL_NO_ADDRESS_SPACES
MSL_REMOVE(remove_addrspace, )
#else
MSL_REMOVE(remove_addrspace,
           MSL_REMOVES(remove_addrspace, device T) MSL_REMOVES(remove_addrspace, constant T)
               MSL_REMOVES(remove_addrspace, threadgroup T))
#endif
template <class T>
using remove_cv_t = remove_volatile_t<remove_const_t<T>>;

namespace msl_detail {
template <class T, class... U>
constexpr bool is_one_of = (is_same_v<remove_cv_t<T>, U> || ...);
}

template <class T>
constexpr bool is_integral_v =
    msl_detail::is_one_of<T, bool, char, signed char, uchar, short, ushort, int, uint, long, ulong,
                          long long, unsigned long long>;
template <class T>
constexpr bool is_floating_point_v = msl_detail::is_one_of<T, float, half, bfloat>;
template <class T>
constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T>
constexpr bool is_signed_v = is_floating_point_v<T> || (is_integral_v<T> && T(-1) < T(0));
template <class T>
constexpr bool is_unsigned_v = is_integral_v<T> && !is_signed_v<T>;
template <class T>
struct is_integral : bool_constant<is_integral_v<T>> {};
template <class T>
struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T>
struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
template <class T>
struct is_signed : bool_constant<is_signed_v<T>> {};
template <class T>
struct is_unsigned : bool_constant<is_unsigned_v<T>> {};
template <class T>
T&& declval();

// ---- vectors --------------------------------------------------------------------------

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

namespace msl_detail {
template <class T>
struct vector_of {
  static constexpr int size = 0;
  typedef T element;
};
template <class T, int N>
struct vector_of<vec<T, N>> {
  static constexpr int size = N;
  typedef T element;
};
}  // namespace msl_detail
template <class T>
constexpr bool is_vector_v = msl_detail::vector_of<T>::size != 0;

template <class T, class U>
METAL_FUNC T as_type(U x) {
  static_assert(sizeof(T) == sizeof(U), "as_type: sizes differ");
  return __builtin_bit_cast(T, x);
}

namespace msl_detail {
// f of each element, or pair of elements
template <class T, int N, class F>
METAL_FUNC vec<T, N> map(vec<T, N> x, F f) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = f(T(x[i]));
  return r;
}
template <class T, int N, class F>
METAL_FUNC vec<T, N> map(vec<T, N> x, vec<T, N> y, F f) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = f(T(x[i]), T(y[i]));
  return r;
}

// writes the elements of `from`, a scalar or a vector, to v[i], v[i + 1], ...
template <class V, class A>
METAL_FUNC void append(V& v, int& i, A from) {
  typedef typename vector_of<V>::element T;
  if constexpr (is_vector_v<A>) {
    for (int k = 0; k < vector_of<A>::size; k++) v[i++] = static_cast<T>(from[k]);
  } else {
    v[i++] = static_cast<T>(from);
  }
}
template <class A>
constexpr int width = is_vector_v<A> ? vector_of<A>::size : 1;
}  // namespace msl_detail

// What T4(a, b, ...) in a kernel becomes: one scalar fills the vector, else the components of all
// arguments must be as many as it has.
template <class T, int N, class... A>
METAL_FUNC vec<T, N> msl_make(A... arguments) {
  constexpr int components = (0 + ... + msl_detail::width<A>);
  vec<T, N> r = (vec<T, N>)(T(0));
  int i = 0;
  if constexpr (sizeof...(A) == 1 && components == 1) {
    while (i < N) (msl_detail::append(r, i, arguments), ...);
  } else if constexpr (sizeof...(A) > 0) {
    static_assert(components == N, "wrong number of vector components");
    (msl_detail::append(r, i, arguments), ...);
  }
  return r;
}

// ---- numeric limits -------------------------------------------------------------------

template <class T>
struct numeric_limits {
  static constexpr bool is_integer = true;
  static constexpr bool is_signed = is_signed_v<T>;
  static constexpr int digits = 8 * sizeof(T) - is_signed;
  static constexpr T max() {
    // 2^digits - 1, without overflow on the way
    return is_signed ? T((((T(1) << (digits - 1)) - 1) << 1) + 1) : T(~T(0));
  }
  static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
};
#define MSL_LIMITS(T, MAX, MIN, EPSILON, DIGITS)                     \
  template <>                                                        \
  struct numeric_limits<T> {                                         \
    static constexpr bool is_integer = false;                        \
    static constexpr bool is_signed = true;                          \
    static constexpr int digits = DIGITS;                            \
    static constexpr T max() { return (T)MAX; }                      \
    static constexpr T lowest() { return (T) - MAX; }                \
    static constexpr T min() { return (T)MIN; }                      \
    static constexpr T epsilon() { return (T)EPSILON; }              \
    static constexpr T infinity() { return (T)__builtin_inff(); }    \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); } \
  };
MSL_LIMITS(float, 3.40282346638528859812e+38f, 1.17549435082228750797e-38f, 0x1p-23f, 24)
MSL_LIMITS(half, 65504.0f, 0x1p-14f, 0x1p-10f, 11)
MSL_LIMITS(bfloat, 3.38953138925153547590e+38f, 1.17549435082228750797e-38f, 0x1p-7f, 8)

}  // namespace metal

#define MSL_VECTORS(T)           \
  typedef metal::vec<T, 2> T##2; \
  typedef metal::vec<T, 3> T##3; \
  typedef metal::vec<T, 4> T##4; \
  namespace metal {              \
  using ::T##2;                  \
  using ::T##3;                  \
  using ::T##4;                  \
  }
MSL_VECTORS(float)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(bool)
