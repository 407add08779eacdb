// Memory checking: a shadow cell for every byte of the buffers and of the threadgroup memory says
// who wrote and read it last, and in which epoch. A barrier that orders a space starts its next
// epoch; two accesses of different threads to one byte, one of them a write, in the same epoch, are
// a race, whatever order they happened to run in.
//
// The kernel was compiled with -fsanitize=thread,undefined. The functions that such code calls are
// defined at the end, so that no sanitizer's own runtime is needed.
#pragma once

struct Access {
  uint64_t pc;
  uint32_t threadgroup;
  uint32_t epoch;            // of the threadgroup
  uint32_t simdgroup_epoch;  // of its SIMD-group
  uint16_t thread;
  uint8_t simdgroup;
  uint8_t lane;
};

struct Cell {
  Access write;  // the last one
  Access read;
  uint32_t readers;       // SIMD-groups that read in read.epoch, a bit each
  uint32_t reader_lanes;  // lanes of read.simdgroup that read in read.simdgroup_epoch
  bool initialised;
  bool written;
  bool was_read;
  bool atomic;       // the last write was
  bool read_widely;  // by several threadgroups
};

struct Region {
  char* base;
  uint64_t size;
  Space space;
  const char* name;
  Cell* cells;

  bool holds(const char* p, uint32_t bytes) const { return p >= base && p + bytes <= base + size; }
  int64_t distance(const char* p) const { return p < base ? base - p : p - (base + size) + 1; }
};

static std::vector<Region> regions;  // the buffers in order, then the threadgroup memory

static void watch(const msl_buffer* buffers, int count) {
  for (int i = 0; i < count; i++) {
    const msl_buffer& b = buffers[i];
    Cell* cells = (Cell*)calloc(b.size + 1, sizeof(Cell));
    regions.push_back({b.base, b.size, DEVICE, b.name, cells});
    for (uint64_t k = 0; k < b.size; k++) cells[k].initialised = b.initialised;
  }
  size_t bytes = msl_tg_end - __start_msl_tg;
  Cell* cells = (Cell*)calloc(bytes + 1, sizeof(Cell));
  regions.push_back({__start_msl_tg, bytes, THREADGROUP, "threadgroup memory", cells});
}

static void unwatch() {
  for (Region& region : regions) free(region.cells);
  regions.clear();
}

static void forget_threadgroup_memory() {
  Region& region = regions.back();
  memset((void*)region.cells, 0, region.size * sizeof(Cell));
}

static void look_for_unwritten(const msl_buffer* buffers, int count) {
  for (int i = 0; i < count; i++) {
    if (!buffers[i].output) continue;
    uint64_t missing = 0, first = 0;
    for (uint64_t k = regions[i].size; k-- > 0;) {
      if (regions[i].cells[k].initialised) continue;
      missing++;
      first = k;
    }
    if (missing)
      report(UNWRITTEN, 0, 0, 0, "%llu bytes of output %s never written, the first at byte %llu",
             (unsigned long long)missing, regions[i].name, (unsigned long long)first);
  }
}

// ---- one access -----------------------------------------------------------------------

// What kind of race `now` makes with the earlier write of a byte; -1 if none.
static int race_with_write(const Cell& cell, const Access& now, Space space) {
  const Access& then = cell.write;
  if (space == DEVICE && then.threadgroup != now.threadgroup) return CROSS_THREADGROUP_RACE;
  if (then.epoch != now.epoch) return -1;
  if (then.simdgroup != now.simdgroup) return RACE;
  bool ordered = then.lane == now.lane || then.simdgroup_epoch != now.simdgroup_epoch;
  return ordered ? -1 : SIMD_RACE;
}

// The same for a write `now` and the earlier reads.
static int race_with_reads(const Cell& cell, const Access& now, Space space) {
  const Access& then = cell.read;
  if (space == DEVICE && (cell.read_widely || then.threadgroup != now.threadgroup))
    return CROSS_THREADGROUP_RACE;
  if (then.epoch != now.epoch) return -1;
  if (cell.readers & ~(1u << now.simdgroup)) return RACE;
  bool ordered = then.simdgroup_epoch != now.simdgroup_epoch;
  return !ordered && (cell.reader_lanes & ~(1u << now.lane)) ? SIMD_RACE : -1;
}

static void look_for_race(const Region& region, const Cell& cell, const Access& now, bool write,
                          bool atomic, int line) {
  bool compare = cell.written && !(cell.atomic && atomic);
  int kind = compare ? race_with_write(cell, now, region.space) : -1;
  const Access* then = &cell.write;
  const char* how = write ? "write after an unordered write" : "read after an unordered write";
  if (kind < 0 && write && cell.was_read) {  // plainly: atomic reads are not noted
    kind = race_with_reads(cell, now, region.space);
    then = &cell.read;
    how = "write after an unordered read";
  }
  if (kind >= 0)
    report((Kind)kind, now.pc, then->pc, line, "%s: %s, thread %u and thread %u", region.name, how,
           now.thread, then->thread);
}

static void note_read(Cell& cell, const Access& now) {
  Access& then = cell.read;
  bool other_threadgroup = cell.was_read && then.threadgroup != now.threadgroup;
  if (other_threadgroup) cell.read_widely = true;
  if (!cell.was_read || other_threadgroup || then.epoch != now.epoch) {
    cell.readers = 0;
    cell.reader_lanes = 0;
  }
  if (then.simdgroup != now.simdgroup || then.simdgroup_epoch != now.simdgroup_epoch)
    cell.reader_lanes = 0;
  cell.readers |= 1u << now.simdgroup;
  cell.reader_lanes |= 1u << now.lane;
  cell.read = now;
  cell.was_read = true;
}

static void note_write(Cell& cell, const Access& now, bool atomic) {
  cell.write = now;
  cell.written = true;
  cell.initialised = true;
  cell.atomic = atomic;
}

static void out_of_bounds(const char* p, uint32_t bytes, bool write, uint64_t pc, int line) {
  const Region* nearest = &regions[0];
  for (const Region& region : regions)
    if (region.size && region.distance(p) < nearest->distance(p)) nearest = &region;
  report(OUT_OF_BOUNDS, pc, 0, line, "%s of %u bytes at byte %lld of %s (%llu bytes)",
         write ? "write" : "read", bytes, (long long)(p - nearest->base), nearest->name,
         (unsigned long long)nearest->size);
  give_up();
}

// Memory that needs no watching: the thread's own stack, the slots that the SIMD functions read,
// and what the library holds besides threadgroup variables, which are the kernel's constant tables.
static bool is_private(const char* p, bool write) {
  if (p >= current->low && p < current->high) return true;
  const char* slots = (const char*)simdgroups.data();
  if (p >= slots && p < (const char*)(simdgroups.data() + simdgroups.size())) return true;
  bool ours = p >= __ehdr_start && p < _end;
  bool shared = p >= __start_msl_tg && p < msl_tg_end + sizeof msl_tg_end;
  return ours && !shared && !write;
}

static void check(uintptr_t address, uint32_t bytes, bool write, bool atomic, uint64_t pc,
                  int line) {
  if (!current || aborting) return;
  const char* p = (const char*)address;
  if (is_private(p, write)) return;
  accesses++;
  for (Region& region : regions) {
    if (!region.holds(p, bytes)) continue;
    const msl_thread& t = current->thread;
    Access now;
    now.pc = pc;
    now.threadgroup = threadgroup_id;
    now.epoch = epoch[region.space];
    now.simdgroup_epoch = simdgroup_of(current).epoch[region.space];
    now.thread = t.thread_index_in_threadgroup;
    now.simdgroup = t.simdgroup_index_in_threadgroup;
    now.lane = t.thread_index_in_simdgroup;
    for (Cell* cell = region.cells + (p - region.base); bytes-- > 0; cell++) {
      if (!write && !cell->initialised)
        report(UNINITIALISED, pc, 0, line, "read of %s, where nothing was written", region.name);
      look_for_race(region, *cell, now, write, atomic, line);
      if (write)
        note_write(*cell, now, atomic);
      else if (!atomic)
        note_read(*cell, now);
    }
    return;
  }
  out_of_bounds(p, bytes, write, pc, line);
}

#define MSL_CALLER ((uint64_t)__builtin_return_address(0))

extern "C" void msl_atomic(uintptr_t address, uint32_t size, int reads, int writes, int line) {
  if (reads) check(address, size, false, true, MSL_CALLER, line);
  if (writes) check(address, size, true, true, MSL_CALLER, line);
}

// ---- what code compiled with -fsanitize=thread calls ----------------------------------

static void check_aligned(void* p, uint32_t bytes, bool write, uint64_t pc) {
  if (current && !aborting && (uintptr_t)p % bytes) {
    report(UNDEFINED, pc, 0, 0, "undefined behaviour: misaligned access of %u bytes", bytes);
    give_up();
  }
  check((uintptr_t)p, bytes, write, false, pc, 0);
}
static void check_range(const void* p, size_t bytes, bool write, uint64_t pc) {
  if (bytes) check((uintptr_t)p, (uint32_t)bytes, write, false, pc, 0);
}

#define MSL_READ_WRITE(n)                                                          \
  void __tsan_read##n(void* p) { check_aligned(p, n, false, MSL_CALLER); }         \
  void __tsan_write##n(void* p) { check_aligned(p, n, true, MSL_CALLER); }         \
  void __tsan_unaligned_read##n(void* p) { check_range(p, n, false, MSL_CALLER); } \
  void __tsan_unaligned_write##n(void* p) { check_range(p, n, true, MSL_CALLER); } \
  void __tsan_read_write##n(void* p) {                                             \
    check_aligned(p, n, false, MSL_CALLER);                                        \
    check_aligned(p, n, true, MSL_CALLER);                                         \
  }                                                                                \
  void __tsan_unaligned_read_write##n(void* p) {                                   \
    check_range(p, n, false, MSL_CALLER);                                          \
    check_range(p, n, true, MSL_CALLER);                                           \
  }

extern "C" {
MSL_READ_WRITE(1)
MSL_READ_WRITE(2)
MSL_READ_WRITE(4)
MSL_READ_WRITE(8)
MSL_READ_WRITE(16)
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  check_range(from, bytes, false, MSL_CALLER);
  check_range(to, bytes, true, MSL_CALLER);
  return memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  check_range(from, bytes, false, MSL_CALLER);
  check_range(to, bytes, true, MSL_CALLER);
  return memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  check_range(to, bytes, true, MSL_CALLER);
  return memset(to, value, bytes);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// ---- what code compiled with -fsanitize=undefined calls -------------------------------

// The first argument of each handler points to a struct that starts with these.
struct Place {
  const char* file;
  uint32_t line;
  uint32_t column;
};
static void undefined(const Place* place, const char* what) {
  report(UNDEFINED, 0, 0, place->line, "undefined behaviour: %s", what);
}
#define MSL_UNDEFINED(name, text)                                      \
  void __ubsan_handle_##name(Place* place) { undefined(place, text); } \
  void __ubsan_handle_##name##_abort(Place* place) { undefined(place, text); }

// the one that traps on x86, so that the kernel cannot go on
void __ubsan_handle_divrem_overflow(Place* place) {
  undefined(place, "integer division by zero, or its overflow");
  if (current) give_up();
}
MSL_UNDEFINED(shift_out_of_bounds, "shift amount or operand out of range")
MSL_UNDEFINED(add_overflow, "signed overflow in +")
MSL_UNDEFINED(sub_overflow, "signed overflow in -")
MSL_UNDEFINED(mul_overflow, "signed overflow in *")
MSL_UNDEFINED(negate_overflow, "signed overflow in unary -")
MSL_UNDEFINED(out_of_bounds, "index outside the array")
MSL_UNDEFINED(type_mismatch_v1, "misaligned or null pointer")
MSL_UNDEFINED(float_cast_overflow, "float out of the integer's range")
MSL_UNDEFINED(pointer_overflow, "overflow in pointer arithmetic")
MSL_UNDEFINED(load_invalid_value, "invalid bool or enum value")
MSL_UNDEFINED(builtin_unreachable, "code that cannot be reached")
MSL_UNDEFINED(missing_return, "no value returned")
MSL_UNDEFINED(vla_bound_not_positive, "array size not positive")
MSL_UNDEFINED(nonnull_arg, "null argument")
MSL_UNDEFINED(invalid_builtin, "invalid argument of a builtin")
MSL_UNDEFINED(alignment_assumption, "pointer less aligned than assumed")
MSL_UNDEFINED(implicit_conversion, "conversion changes the value")
}
