// Atomics, relaxed, as MSL has them. Nothing runs concurrently here, so that plain loads and stores
// do; the checker is told that they are atomic.
#pragma once

namespace metal {

enum memory_order { memory_order_relaxed };

// A vector of one: a type of its own, as a class would be, but one that clang takes in any address
// space.
template <class T>
using atomic = T __attribute__((ext_vector_type(1)));
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;

namespace msl_detail {
template <class T>
T value_of(atomic<T>);
template <class P>
using atomic_value = decltype(value_of(*P()));
template <class P>
METAL_FUNC void announce(P p, int reads, int writes, int line) {
  msl_atomic((uintptr_t)p, sizeof(*p), reads, writes, line);
}
}  // namespace msl_detail

// P is a pointer to an atomic in any address space. noinline, so that the instrumentation of the
// kernel that calls it leaves it alone.
#define MSL_ATOMIC __attribute__((noinline, no_sanitize("thread", "undefined")))

template <class P>
MSL_ATOMIC msl_detail::atomic_value<P> atomic_load_explicit(P p, memory_order, MSL_LINE) {
  msl_detail::announce(p, 1, 0, line);
  return (*p)[0];
}
template <class P, class V>
MSL_ATOMIC void atomic_store_explicit(P p, V x, memory_order, MSL_LINE) {
  msl_detail::announce(p, 0, 1, line);
  (*p)[0] = x;
}
// `expression` is the new value, of `old` and x
#define MSL_ATOMIC_UPDATE(name, expression)                                             \
  template <class P, class V>                                                           \
  MSL_ATOMIC msl_detail::atomic_value<P> name(P p, V operand, memory_order, MSL_LINE) { \
    msl_detail::announce(p, 1, 1, line);                                                \
    msl_detail::atomic_value<P> old = (*p)[0];                                          \
    msl_detail::atomic_value<P> x = operand;                                            \
    (*p)[0] = expression;                                                               \
    return old;                                                                         \
  }
MSL_ATOMIC_UPDATE(atomic_exchange_explicit, x)
MSL_ATOMIC_UPDATE(atomic_fetch_add_explicit, old + x)
MSL_ATOMIC_UPDATE(atomic_fetch_sub_explicit, old - x)
MSL_ATOMIC_UPDATE(atomic_fetch_max_explicit, (old < x ? x : old))
MSL_ATOMIC_UPDATE(atomic_fetch_min_explicit, (x < old ? x : old))
MSL_ATOMIC_UPDATE(atomic_fetch_and_explicit, (old & x))
MSL_ATOMIC_UPDATE(atomic_fetch_or_explicit, old | x)
MSL_ATOMIC_UPDATE(atomic_fetch_xor_explicit, old ^ x)

template <class P, class E, class V>
MSL_ATOMIC bool atomic_compare_exchange_weak_explicit(P p, E expected, V x, memory_order,
                                                      memory_order, MSL_LINE) {
  msl_detail::announce(p, 1, 1, line);
  bool same = (*p)[0] == *expected;
  if (same)
    (*p)[0] = x;
  else
    *expected = (*p)[0];
  return same;
}

}  // namespace metal
