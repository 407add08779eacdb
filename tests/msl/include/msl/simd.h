// Barriers and SIMD-group functions. Each hands its value to the runtime, waits there for the other
// lanes, and then picks what it returns out of the values of all.
#pragma once

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
METAL_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) | uint(b));
}

// The last parameter of everything that waits: the line of the caller.
#define MSL_LINE int line = __builtin_LINE()

METAL_FUNC void threadgroup_barrier(mem_flags flags, MSL_LINE) {
  msl_threadgroup_barrier((int)flags, line);
}
METAL_FUNC void simdgroup_barrier(mem_flags flags, MSL_LINE) {
  msl_simdgroup_barrier((int)flags, line);
}

namespace msl_detail {
template <class T>
METAL_FUNC msl_exchange_t exchange(T x, const char* operation, int line) {
  static_assert(sizeof(T) <= 64, "value too large for the slot of a lane");
  return msl_exchange(&x, sizeof(T), operation, line);
}
METAL_FUNC bool takes_part(const msl_exchange_t& e, uint lane) {
  return lane < 32 && ((e.mask >> lane) & 1);
}
template <class T>
METAL_FUNC T slot(const msl_exchange_t& e, uint lane) {
  T value;
  __builtin_memcpy(&value, e.slots + 64 * lane, sizeof(T));
  return value;
}
// The value of a lane. MSL leaves it open what a lane that does not take part gives: poison here.
template <class T>
METAL_FUNC T pick(const msl_exchange_t& e, uint lane) {
  if (takes_part(e, lane)) return slot<T>(e, lane);
  T value;
  __builtin_memset(&value, 0xff, sizeof(T));
  return value;
}
// Combines the values in a tree. MSL leaves its shape open; without rotation, lane i meets i + 16,
// then i + 8, ... The rotation is that of the five bits of i, so that with 1 it meets i + 1 first.
// (Adding a constant to i would change nothing: the same lanes would meet at each level.)
template <class T, class F>
METAL_FUNC T fold(const msl_exchange_t& e, F combine) {
  T value[32];
  bool there[32];
  for (uint i = 0; i < 32; i++) {
    uint lane = ((i << e.rotation) | (i >> (5 - e.rotation))) % 32;
    there[i] = takes_part(e, lane);
    if (there[i]) value[i] = slot<T>(e, lane);
  }
  for (uint half_width = 16; half_width; half_width /= 2) {
    for (uint i = 0; i < half_width; i++) {
      if (!there[i + half_width]) continue;
      T other = value[i + half_width];
      value[i] = there[i] ? combine(value[i], other) : other;
      there[i] = true;
    }
  }
  return value[0];
}
// Combines the values of lanes first .. end - 1 one after the other.
template <class T, class F>
METAL_FUNC T accumulate(const msl_exchange_t& e, uint first, uint end, T start, F combine) {
  for (uint lane = first; lane < end; lane++)
    if (takes_part(e, lane)) start = combine(start, slot<T>(e, lane));
  return start;
}
// There are no overloads for bfloat; MLX adds them.
template <class T>
using simd_type = enable_if_t<!is_same_v<T, bfloat>>;
}  // namespace msl_detail

#define MSL_REDUCE(name, expression)                                         \
  template <class T, class = msl_detail::simd_type<T>>                       \
  METAL_FUNC T name(T x, MSL_LINE) {                                         \
    msl_exchange_t e = msl_detail::exchange(x, #name, line);                 \
    return msl_detail::fold<T>(e, [](T a, T b) -> T { return expression; }); \
  }
MSL_REDUCE(simd_sum, a + b)
MSL_REDUCE(simd_product, (a * b))
MSL_REDUCE(simd_min, min(a, b))
MSL_REDUCE(simd_max, max(a, b))
MSL_REDUCE(simd_and, (a & b))
MSL_REDUCE(simd_or, a | b)
MSL_REDUCE(simd_xor, a ^ b)

#define MSL_SCAN(name, start, expression, inclusive)                               \
  template <class T, class = msl_detail::simd_type<T>>                             \
  METAL_FUNC T name(T x, MSL_LINE) {                                               \
    msl_exchange_t e = msl_detail::exchange(x, #name, line);                       \
    auto combine = [](T a, T b) -> T { return expression; };                       \
    return msl_detail::accumulate<T>(e, 0, e.lane + inclusive, T(start), combine); \
  }
MSL_SCAN(simd_prefix_inclusive_sum, 0, a + b, 1)
MSL_SCAN(simd_prefix_exclusive_sum, 0, a + b, 0)
MSL_SCAN(simd_prefix_inclusive_product, 1, (a * b), 1)
MSL_SCAN(simd_prefix_exclusive_product, 1, (a * b), 0)

// `source` is the lane to read from, in terms of `lane`, the caller's, and k, the argument.
#define MSL_PERMUTE(name, source)                            \
  template <class T, class = msl_detail::simd_type<T>>       \
  METAL_FUNC T name(T x, ushort k, MSL_LINE) {               \
    msl_exchange_t e = msl_detail::exchange(x, #name, line); \
    uint lane = e.lane;                                      \
    (void)lane;                                              \
    return msl_detail::pick<T>(e, source);                   \
  }
MSL_PERMUTE(simd_broadcast, k)
MSL_PERMUTE(simd_shuffle, k)
MSL_PERMUTE(simd_shuffle_xor, lane ^ k)
MSL_PERMUTE(simd_shuffle_rotate_up, (lane - k) % 32)
MSL_PERMUTE(simd_shuffle_rotate_down, (lane + k) % 32)
// a lane without a source keeps its own value
MSL_PERMUTE(simd_shuffle_up, lane < k ? lane : lane - k)
MSL_PERMUTE(simd_shuffle_down, lane + k < 32 ? lane + k : lane)
MSL_PERMUTE(quad_broadcast, lane / 4 * 4 + k)
MSL_PERMUTE(quad_shuffle, lane / 4 * 4 + k)
MSL_PERMUTE(quad_shuffle_xor, lane ^ k)

template <class T, class = msl_detail::simd_type<T>>
METAL_FUNC T simd_shuffle_and_fill_up(T x, T fill, ushort k, MSL_LINE) {
  msl_exchange_t e = msl_detail::exchange(x, __func__, line);
  msl_exchange_t f = msl_detail::exchange(fill, __func__, line);
  bool inside = e.lane >= k;
  return inside ? msl_detail::pick<T>(e, e.lane - k) : msl_detail::pick<T>(f, 32 + e.lane - k);
}
template <class T, class = msl_detail::simd_type<T>>
METAL_FUNC T simd_shuffle_and_fill_down(T x, T fill, ushort k, MSL_LINE) {
  msl_exchange_t e = msl_detail::exchange(x, __func__, line);
  msl_exchange_t f = msl_detail::exchange(fill, __func__, line);
  bool inside = e.lane + k < 32;
  return inside ? msl_detail::pick<T>(e, e.lane + k) : msl_detail::pick<T>(f, e.lane + k - 32);
}
template <class T, class = msl_detail::simd_type<T>>
METAL_FUNC T simd_broadcast_first(T x, MSL_LINE) {
  msl_exchange_t e = msl_detail::exchange(x, __func__, line);
  return msl_detail::pick<T>(e, ctz(e.mask));
}

#define MSL_QUAD(name, expression)                                                      \
  template <class T, class = msl_detail::simd_type<T>>                                  \
  METAL_FUNC T name(T x, MSL_LINE) {                                                    \
    msl_exchange_t e = msl_detail::exchange(x, #name, line);                            \
    auto combine = [](T a, T b) -> T { return expression; };                            \
    uint first = e.lane / 4 * 4;                                                        \
    while (!msl_detail::takes_part(e, first)) first++;                                  \
    T start = msl_detail::slot<T>(e, first);                                            \
    return msl_detail::accumulate<T>(e, first + 1, e.lane / 4 * 4 + 4, start, combine); \
  }
MSL_QUAD(quad_sum, a + b)
MSL_QUAD(quad_max, max(a, b))
MSL_QUAD(quad_min, min(a, b))

struct simd_vote {
  typedef ulong vote_t;
  vote_t lanes;
  simd_vote(vote_t x) : lanes(x) {}
  explicit operator vote_t() const { return lanes; }
  bool all() const { return lanes == 0xffffffff; }
  bool any() const { return lanes != 0; }
};
namespace msl_detail {
METAL_FUNC uint votes(bool x, const char* operation, int line, uint& mask) {
  msl_exchange_t e = exchange(x, operation, line);
  mask = e.mask;
  uint lanes = 0;
  for (uint lane = 0; lane < 32; lane++)
    if (takes_part(e, lane) && slot<bool>(e, lane)) lanes |= 1u << lane;
  return lanes;
}
}  // namespace msl_detail
METAL_FUNC simd_vote simd_ballot(bool x, MSL_LINE) {
  uint mask;
  return simd_vote(msl_detail::votes(x, __func__, line, mask));
}
METAL_FUNC bool simd_any(bool x, MSL_LINE) {
  uint mask;
  return msl_detail::votes(x, __func__, line, mask) != 0;
}
METAL_FUNC bool simd_all(bool x, MSL_LINE) {
  uint mask;
  uint lanes = msl_detail::votes(x, __func__, line, mask);
  return lanes == mask;
}
METAL_FUNC bool simd_is_first(MSL_LINE) {
  msl_exchange_t e = msl_detail::exchange(true, __func__, line);
  return e.lane == ctz(e.mask);
}
METAL_FUNC simd_vote simd_active_threads_mask(MSL_LINE) {
  return simd_vote(msl_detail::exchange(true, __func__, line).mask);
}

}  // namespace metal
