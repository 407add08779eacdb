// Runs one kernel over a grid on the calling thread: one fiber for each GPU thread, one threadgroup
// at a time. Fibers switch at SIMD operations and barriers only, so that everything between two of
// these happens as if at once, in an order that the options choose.
//
// With -DMSL_CHECK the kernel's loads and stores call back into check.h.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "fiber.h"
#include "msl/runtime.h"
#include "msl/thread.h"

// ---- what launch.py passes and takes; its ctypes structures mirror these --------------

extern "C" {
struct msl_buffer {
  char* base;
  uint64_t size;
  const char* name;
  uint32_t output;
  uint32_t initialised;
};
struct msl_options {
  uint32_t order;  // of `enum Order`
  uint32_t seed;
  uint32_t round;   // SIMD-groups advance one SIMD operation at a time, in turn
  uint32_t strict;  // divergence ends the run
  uint32_t ftz;
  uint32_t stack_kb;
  uint32_t max_findings;
};
struct msl_finding {
  uint32_t kind;  // of `enum Kind`
  uint32_t count;
  uint32_t threadgroup[3];
  uint32_t thread;
  uint64_t pc;  // 0 if `line` is known, or no line is to blame
  uint64_t other_pc;
  uint32_t line;
  char what[252];
};
struct msl_stats {
  uint64_t switches;
  uint64_t accesses;
  uint64_t threadgroup_memory;
  uint64_t load_address;
};
}
enum Order { NATURAL, REVERSED, SHUFFLED };
enum Kind {
  OUT_OF_BOUNDS,
  RACE,
  SIMD_RACE,
  CROSS_THREADGROUP_RACE,
  UNINITIALISED,
  DIVERGENCE,
  UNDEFINED,
  UNWRITTEN,
  CANARY
};

// ---- what the linker and the generated code bring -------------------------------------

extern "C" void msl_entry(void** buffers, const msl_thread* thread);
// The kernel's threadgroup variables lie in the section msl_tg. This object is linked last, so its
// variable follows them: it marks their end, and takes overruns that nothing else would notice.
extern "C" char __start_msl_tg[] __attribute__((visibility("hidden")));
extern "C" __attribute__((used, visibility("hidden"), aligned(1),
                          section("msl_tg"))) char msl_tg_end[65536] = {1};
extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));  // of this library
extern "C" char _end[] __attribute__((visibility("hidden")));

static const unsigned char POISON = 0xff;  // a NaN in every floating format
static const uint32_t LANES = 32, SLOT = 64;
static const size_t GUARD = 4096;  // an inaccessible page below each stack

// ---- state ----------------------------------------------------------------------------

enum State : uint8_t { READY, AT_SIMD_OPERATION, AT_SIMDGROUP_BARRIER, AT_BARRIER, ENDED };

struct Fiber {
  void* stack;  // the stack pointer while another fiber runs
  char* low;    // the stack's bounds
  char* high;
  msl_thread thread;
  State state;
  const char* operation;  // what it waits at, and where
  int line;
  int flags;
  uint8_t parity;  // which slots it writes next
};

// Memory that a barrier may order; the bit of mem_flags for each is 1 << space.
enum Space { DEVICE, THREADGROUP, SPACES };

struct Simdgroup {
  uint32_t first;  // fiber
  uint32_t size;
  uint32_t mask;           // of the lanes at the last SIMD operation
  uint32_t epoch[SPACES];  // how many of its own barriers have ordered a space
  // Two sets, used in turn: a lane may hand in its next value before others have read this one.
  alignas(64) unsigned char slots[2][LANES * SLOT];
};

struct Shape {  // of a launch
  uint32_t grid[3];
  uint32_t group[3];   // threads of a threadgroup
  uint32_t groups[3];  // threadgroups
};

static msl_options options;
static void** kernel_buffers;
static std::vector<Fiber> fibers;  // of the threadgroup that runs
static std::vector<Simdgroup> simdgroups;
static Fiber* current;  // null while the scheduler runs
static void* scheduler_stack;
static bool aborting;
static uint32_t epoch[SPACES];   // how many threadgroup barriers have ordered a space
static uint32_t threadgroup_id;  // unique within the launch, from 1
static uint32_t threadgroup_position[3];
static std::vector<msl_finding> findings;
static uint64_t random_state, switches, accesses;

static uint32_t random_number() {  // xorshift
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)(random_state >> 16);
}

// Puts `items` in the next order that the options ask for.
template <class T>
static void reorder(std::vector<T>& items) {
  if (options.order == REVERSED) std::sort(items.rbegin(), items.rend());
  if (options.order != SHUFFLED) return;
  for (size_t i = items.size(); i > 1; i--) std::swap(items[i - 1], items[random_number() % i]);
}

static std::vector<uint32_t> numbers(size_t n) {
  std::vector<uint32_t> result(n);
  for (size_t i = 0; i < n; i++) result[i] = (uint32_t)i;
  return result;
}

static Simdgroup& simdgroup_of(const Fiber* fiber) {
  return simdgroups[fiber->thread.simdgroup_index_in_threadgroup];
}

static void leave() {  // the current fiber, for the scheduler
  switches++;
  msl_switch(&current->stack, scheduler_stack);
}

// Records a finding, or counts it if it is known. Where it happened is `line` if that is not 0,
// else the line of the code address `pc`.
__attribute__((format(printf, 5, 6))) static void report(Kind kind, uint64_t pc, uint64_t other_pc,
                                                         int line, const char* format, ...) {
  msl_finding found{};
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(found.what, sizeof found.what, format, arguments);
  va_end(arguments);
  for (msl_finding& known : findings) {
    bool same = known.kind == kind && known.pc == pc && known.other_pc == other_pc;
    same = same && known.line == (uint32_t)line;
    if (same && (pc || line || !strcmp(known.what, found.what))) {
      known.count++;
      return;
    }
  }
  if (findings.size() >= options.max_findings) return;
  found.kind = kind;
  found.count = 1;
  memcpy(found.threadgroup, threadgroup_position, sizeof found.threadgroup);
  found.thread = current ? current->thread.thread_index_in_threadgroup : 0;
  found.pc = pc;
  found.other_pc = other_pc;
  found.line = line;
  findings.push_back(found);
}

static void give_up() {  // from within a fiber
  aborting = true;
  current->state = ENDED;
  leave();
  abort();  // it is never resumed
}

// ---- calls from the kernel ------------------------------------------------------------

extern "C" msl_exchange_t msl_exchange(const void* value, uint32_t size, const char* operation,
                                       int line) {
  Fiber* fiber = current;
  Simdgroup& group = simdgroup_of(fiber);
  uint32_t lane = fiber->thread.thread_index_in_simdgroup;
  fiber->parity ^= 1;
  unsigned char* slots = group.slots[fiber->parity];
  memcpy(slots + SLOT * lane, value, size);
  fiber->state = AT_SIMD_OPERATION;
  fiber->operation = operation;
  fiber->line = line;
  leave();
  const uint32_t rotation[] = {0, 1, 1 + options.seed % 4};  // for each order, of five bits
  return {slots, group.mask, lane, rotation[options.order]};
}

static void wait_at(State state, const char* operation, int flags, int line) {
  current->state = state;
  current->operation = operation;
  current->line = line;
  current->flags = flags;
  leave();
}
extern "C" void msl_simdgroup_barrier(int flags, int line) {
  wait_at(AT_SIMDGROUP_BARRIER, "simdgroup_barrier", flags, line);
}
extern "C" void msl_threadgroup_barrier(int flags, int line) {
  wait_at(AT_BARRIER, "threadgroup_barrier", flags, line);
}

extern "C" float msl_noise(float x, int ulps) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t exponent = bits & 0x7f800000;
  if (exponent == 0 || exponent == 0x7f800000) return x;  // zero, denormal, infinite or NaN
  uint32_t hash = bits * 2654435761u ^ (bits >> 15);
  bits += (int)(hash % (2 * ulps + 1)) - ulps;
  memcpy(&x, &bits, 4);
  return x;
}

#ifdef MSL_CHECK
#include "check.h"
#else
extern "C" void msl_atomic(uintptr_t, uint32_t, int, int, int) {}
#endif

// Conversions that the libgcc of GCC 12 and older lacks. A bfloat is the upper half of a float.
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint16_t high = bits >> 16;
  bool nan = (bits & 0x7fffffff) > 0x7f800000;
  uint16_t rounded = nan ? high | 0x40 : (bits + 0x7fff + (high & 1)) >> 16;  // to nearest, even
  __bf16 result;
  memcpy(&result, &rounded, 2);
  return result;
}
extern "C" __attribute__((weak)) __bf16 __truncdfbf2(double x) {
  float near = (float)x;
  uint32_t bits;
  memcpy(&bits, &near, 4);
  bool finite = near == near && (bits & 0x7f800000) != 0x7f800000;
  if ((double)near != x && finite) {  // round to odd, so that the second rounding is exact
    bool away = x > 0 ? (double)near > x : (double)near < x;
    bits = (away ? bits - 1 : bits) | 1;
    memcpy(&near, &bits, 4);
  }
  return __truncsfbf2(near);
}

// ---- scheduling one threadgroup -------------------------------------------------------

static void fiber_main() {
  msl_entry(kernel_buffers, &current->thread);
  current->state = ENDED;
  leave();
  abort();  // it is never resumed
}

static void resume(Fiber& fiber) {
  current = &fiber;
  msl_switch(&scheduler_stack, fiber.stack);
  current = nullptr;
}

static void advance_epochs(uint32_t (&epochs)[SPACES], int flags) {
  for (int space = 0; space < SPACES; space++) epochs[space] += (flags >> space) & 1;
}

// What lanes wait for each other at: an operation on one line.
static bool same_place(const Fiber& a, const Fiber& b) {
  return a.line == b.line && !strcmp(a.operation, b.operation);
}

// Reports divergence, on behalf of a fiber that waits for the others in vain. False if that ends
// the run.
template <class... Arguments>
static bool tolerate(Fiber& fiber, const char* format, Arguments... arguments) {
  current = &fiber;
  report(DIVERGENCE, 0, 0, fiber.line, format, arguments...);
  current = nullptr;
  if (options.strict) aborting = true;
  return !aborting;
}

// Lets each lane that is ready run to its next stop.
static void run_lanes(Simdgroup& group, std::vector<uint32_t>& order) {
  reorder(order);
  for (uint32_t lane : order) {
    Fiber& fiber = fibers[group.first + lane];
    if (fiber.state == READY) resume(fiber);
    if (aborting) return;
  }
}

// Releases the lanes that wait at one SIMD operation or simdgroup_barrier. False if there are none:
// each lane is at a threadgroup barrier or has ended.
static bool release_lanes(Simdgroup& group) {
  Fiber* first = nullptr;
  Fiber* astray = nullptr;
  uint32_t live = 0, here = 0;
  for (uint32_t lane = 0; lane < group.size; lane++) {
    Fiber& fiber = fibers[group.first + lane];
    if (fiber.state == ENDED) continue;
    live |= 1u << lane;
    if (!first && fiber.state != AT_BARRIER) first = &fiber;
  }
  if (!first) return false;
  for (uint32_t lane = 0; lane < group.size; lane++) {
    Fiber& fiber = fibers[group.first + lane];
    if (fiber.state == ENDED) continue;
    if (same_place(fiber, *first))
      here |= 1u << lane;
    else
      astray = &fiber;
  }
  if (astray && !tolerate(*first, "lanes %08x are at %s, others (%08x) at %s in line %d", here,
                          first->operation, live & ~here, astray->operation, astray->line))
    return false;
  group.mask = here;
  if (first->state == AT_SIMDGROUP_BARRIER) advance_epochs(group.epoch, first->flags);
  for (uint32_t lane = 0; lane < group.size; lane++)
    if ((here >> lane) & 1) fibers[group.first + lane].state = READY;
  return true;
}

// Runs a SIMD-group until each lane is at a threadgroup barrier or has ended, or with `round` to
// its next SIMD operation. True if it can go on before the next threadgroup barrier.
static bool run_simdgroup(Simdgroup& group) {
  std::vector<uint32_t> order = numbers(group.size);
  for (;;) {
    run_lanes(group, order);
    if (aborting || !release_lanes(group)) return false;
    if (options.round) return true;
  }
}

// Releases the threads that wait at a threadgroup barrier. False if there are none.
static bool release_barrier() {
  Fiber* first = nullptr;
  uint32_t here = 0, elsewhere = 0, ended = 0;
  for (Fiber& fiber : fibers) {
    if (fiber.state == ENDED) {
      ended++;
      continue;
    }
    if (!first) first = &fiber;
    (fiber.line == first->line ? here : elsewhere)++;
  }
  if (!first) return false;
  if ((ended || elsewhere) &&
      !tolerate(*first, "barrier reached by %u of %zu threads; %u ended, %u are at another one",
                here, fibers.size(), ended, elsewhere))
    return false;
  advance_epochs(epoch, first->flags);
  for (Fiber& fiber : fibers)
    if (fiber.state == AT_BARRIER) fiber.state = READY;
  return true;
}

static void run_threadgroup() {
  std::vector<uint32_t> order = numbers(simdgroups.size());
  do {
    bool unfinished = true;
    while (unfinished && !aborting) {
      unfinished = false;
      reorder(order);
      for (uint32_t i : order) {
        unfinished |= run_simdgroup(simdgroups[i]);
        if (aborting) return;
      }
    }
  } while (!aborting && release_barrier());
}

// ---- setting up -----------------------------------------------------------------------

// The stacks of a threadgroup, each above a guard page.
class Stacks {
 public:
  Stacks(size_t count, size_t bytes) : bytes(bytes), total(count * (bytes + GUARD)) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    memory = (char*)mmap(nullptr, total, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) return;
    for (size_t i = 0; i < count; i++) mprotect(low(i) - GUARD, GUARD, PROT_NONE);
  }
  // Two mappings for each thread: the system allows some 65,000, so they are not kept.
  ~Stacks() {
    if (valid()) munmap(memory, total);
  }
  bool valid() const { return memory != MAP_FAILED; }
  char* low(size_t i) const { return memory + i * (bytes + GUARD) + GUARD; }
  const size_t bytes;

 private:
  size_t total;
  char* memory;
};

static size_t threadgroup_bytes() { return msl_tg_end - __start_msl_tg; }

static uint32_t ceil_divide(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

static uint32_t volume(const uint32_t (&size)[3]) { return size[0] * size[1] * size[2]; }

static void place(const uint32_t (&size)[3], uint32_t index, uint32_t (&position)[3]) {
  position[0] = index % size[0];
  position[1] = index / size[0] % size[1];
  position[2] = index / size[0] / size[1];
}

// The attributes of thread `index` of the current threadgroup, whose size is `size`.
static void set_attributes(msl_thread& t, const Shape& shape, const uint32_t (&size)[3],
                           uint32_t index) {
  memset(&t, 0, sizeof t);
  place(size, index, t.thread_position_in_threadgroup);
  for (int k = 0; k < 3; k++) {
    uint32_t first = threadgroup_position[k] * shape.group[k];
    t.thread_position_in_grid[k] = first + t.thread_position_in_threadgroup[k];
    t.threadgroup_position_in_grid[k] = threadgroup_position[k];
    t.threads_per_threadgroup[k] = size[k];
    t.dispatch_threads_per_threadgroup[k] = shape.group[k];
    t.threads_per_grid[k] = t.grid_size[k] = shape.grid[k];
    t.threadgroups_per_grid[k] = shape.groups[k];
  }
  t.thread_index_in_threadgroup = index;
  t.thread_index_in_simdgroup = index % LANES;
  t.simdgroup_index_in_threadgroup = index / LANES;
  t.thread_index_in_quadgroup = index % 4;
  t.quadgroup_index_in_threadgroup = index / 4;
  t.simdgroups_per_threadgroup = ceil_divide(volume(size), LANES);
  t.dispatch_simdgroups_per_threadgroup = ceil_divide(volume(shape.group), LANES);
  t.quadgroups_per_threadgroup = ceil_divide(volume(size), 4);
  t.dispatch_quadgroups_per_threadgroup = ceil_divide(volume(shape.group), 4);
  t.threads_per_simdgroup = t.thread_execution_width = LANES;
}

// Makes the fibers of threadgroup number `index`, ready to start.
static void start_threadgroup(const Shape& shape, uint32_t index, const Stacks& stacks) {
  threadgroup_id = index + 1;
  place(shape.groups, index, threadgroup_position);
  advance_epochs(epoch, ~0);
  memset(__start_msl_tg, POISON, threadgroup_bytes());
  uint32_t size[3];  // smaller at the edges of the grid
  for (int k = 0; k < 3; k++) {
    uint32_t left = shape.grid[k] - threadgroup_position[k] * shape.group[k];
    size[k] = std::min(shape.group[k], left);
  }
  uint32_t threads = volume(size);
  simdgroups.resize(ceil_divide(threads, LANES));
  for (uint32_t i = 0; i < simdgroups.size(); i++) {
    simdgroups[i].first = LANES * i;
    simdgroups[i].size = std::min(LANES, threads - LANES * i);
    advance_epochs(simdgroups[i].epoch, ~0);
  }
  fibers.resize(threads);
  for (uint32_t i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    set_attributes(fiber.thread, shape, size, i);
    fiber.low = stacks.low(i);
    fiber.high = fiber.low + stacks.bytes;
    fiber.stack = new_stack(fiber.high, fiber_main);
    fiber.state = READY;
    fiber.parity = 0;
  }
}

static void look_past_threadgroup_memory() {
  size_t i = 0;
  while (i < sizeof msl_tg_end && (unsigned char)msl_tg_end[i] == POISON) i++;
  if (i == sizeof msl_tg_end) return;
  report(CANARY, 0, 0, 0, "write past the end of threadgroup memory, at byte %zu",
         threadgroup_bytes() + i);
}

static Shape shape_of(const uint32_t* grid, const uint32_t* group) {
  Shape shape;
  for (int k = 0; k < 3; k++) {
    shape.grid[k] = grid[k];
    shape.group[k] = std::min(group[k], grid[k]);  // as MLX launches
    shape.groups[k] = ceil_divide(shape.grid[k], shape.group[k]);
  }
  return shape;
}

static void reset(const msl_options& asked, void** buffers) {
  options = asked;
  kernel_buffers = buffers;
  findings.clear();
  random_state = 0x9e3779b97f4a7c15ull ^ (options.seed * 0xbf58476d1ce4e5b9ull);
  aborting = false;
  switches = accesses = 0;
  memset(msl_tg_end, POISON, sizeof msl_tg_end);
}

// Runs the kernel. Returns the number of findings, or -1 if there is no memory for the stacks.
extern "C" __attribute__((visibility("default"))) int msl_run(
    void** pointers, const msl_buffer* buffers, int count, const uint32_t* grid,
    const uint32_t* group, const msl_options* asked, msl_finding* found, msl_stats* stats) {
  reset(*asked, pointers);
  Shape shape = shape_of(grid, group);
  Stacks stacks(volume(shape.group), options.stack_kb * 1024);
  if (!stacks.valid()) return -1;
#ifdef MSL_CHECK
  watch(buffers, count);
#endif
  std::vector<uint32_t> order = numbers(volume(shape.groups));
  reorder(order);
  {
    FlushDenormals flush(options.ftz);
    for (uint32_t index : order) {
      start_threadgroup(shape, index, stacks);
#ifdef MSL_CHECK
      forget_threadgroup_memory();
#endif
      run_threadgroup();
      if (aborting) break;
    }
  }
  memset(threadgroup_position, 0, sizeof threadgroup_position);
  look_past_threadgroup_memory();
#ifdef MSL_CHECK
  if (!aborting) look_for_unwritten(buffers, count);
  unwatch();
#endif
  *stats = {switches, accesses, threadgroup_bytes(), (uint64_t)__ehdr_start};
  std::copy(findings.begin(), findings.end(), found);
  return (int)findings.size();
}
