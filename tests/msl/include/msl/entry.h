// How the generated entry function turns untyped buffers and 32-bit thread attributes into the
// arguments of a kernel: argument I of the function type F says what it wants.
#pragma once

namespace metal {
namespace msl_detail {

template <int I, class First, class... Rest>
struct nth {
  typedef typename nth<I - 1, Rest...>::type type;
};
template <class First, class... Rest>
struct nth<0, First, Rest...> {
  typedef First type;
};
template <class F, int I>
struct argument;
template <class... P, int I>
struct argument<void (*)(P...), I> {
  typedef typename nth<I, P...>::type type;
};
template <class F, int I>
using argument_t = typename argument<F, I>::type;

template <class P>
struct bind {
  static_assert(sizeof(P) < 0, "a [[buffer(n)]] parameter is a pointer or a reference");
};
template <class T>
struct bind<T*> {
  static T* get(void* p) { return (T*)(uintptr_t)p; }
};
template <class T>
struct bind<T&> {
  static T& get(void* p) { return *(T*)(uintptr_t)p; }
};
template <class F, int I>
inline argument_t<F, I> buffer(void* p) {
  return bind<argument_t<F, I>>::get(p);
}

// The attributes lie in the runtime's memory, which a kernel may not touch otherwise.
#define MSL_UNWATCHED inline __attribute__((no_sanitize("thread")))

template <class T>
MSL_UNWATCHED T convert(uint value) {
  return (T)value;
}
template <class T>
MSL_UNWATCHED T convert(const uint (&value)[3]) {
  if constexpr (is_vector_v<T>) {
    T r;
    for (int i = 0; i < vector_of<T>::size; i++) r[i] = value[i];
    return r;
  } else {
    return (T)value[0];
  }
}
template <class F, int I, class V>
MSL_UNWATCHED argument_t<F, I> attribute(const V& value) {
  return convert<argument_t<F, I>>(value);
}

}  // namespace msl_detail
}  // namespace metal
