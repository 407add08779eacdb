// What a kernel calls in runtime.cpp. `line` is where in the kernel the call stands.
#pragma once
#include <stdint.h>

// The values that the lanes of a SIMD-group handed in at one SIMD operation.
struct msl_exchange_t {
  const unsigned char* slots;  // 64 bytes for each of 32 lanes
  uint32_t mask;               // the lanes that took part
  uint32_t lane;               // the one that asks
  uint32_t rotation;           // picks the order in which a reduction adds up
};

extern "C" {
// Waits until the other lanes arrive at the same operation.
msl_exchange_t msl_exchange(const void* value, uint32_t size, const char* operation, int line);
// flags: 1 orders device memory, 2 threadgroup memory
void msl_simdgroup_barrier(int flags, int line);
void msl_threadgroup_barrier(int flags, int line);
// Announces an atomic access, which races with other accesses but not with atomic ones.
void msl_atomic(uintptr_t address, uint32_t size, int reads, int writes, int line);
// x, off by up to `ulps` units in the last place; the same for the same x.
float msl_noise(float x, int ulps);
}
