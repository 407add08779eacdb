// Switching between stacks: the registers that a call must preserve are pushed on the stack that is
// left and popped from the one that is entered.
#pragma once
#include <stdint.h>
#include <string.h>

// Saves the stack pointer in *from and continues at `to`, which an earlier switch or
// new_stack() made.
extern "C" void msl_switch(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size msl_switch,.-msl_switch
)");

// A stack pointer for msl_switch that calls `function`, which must never return.
static void* new_stack(char* top, void (*function)()) {
  void** stack = (void**)((uintptr_t)top & ~15ull);
  *--stack = nullptr;  // where `function` would return to; keeps the stack aligned as after a call
  *--stack = (void*)function;
  for (int i = 0; i < 6; i++) *--stack = nullptr;  // the registers
  return stack;
}

#elif defined(__aarch64__)
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,%function
msl_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size msl_switch,.-msl_switch
)");

// A stack pointer for msl_switch that calls `function`, which must never return.
static void* new_stack(char* top, void (*function)()) {
  char* stack = (char*)((uintptr_t)top & ~15ull) - 160;
  memset(stack, 0, 160);
  ((void**)stack)[11] = (void*)function;  // x30, where `ret` goes
  return stack;
}

#else
#error "no context switch for this architecture"
#endif

// Flushes denormals to zero as long as it lives, if asked to.
class FlushDenormals {
 public:
  explicit FlushDenormals(bool flush) : saved(get()) {
    if (flush) set(saved | FLUSH);
  }
  ~FlushDenormals() { set(saved); }

 private:
#if defined(__x86_64__)
  static const uint64_t FLUSH = 0x8040;  // results (FTZ) and operands (DAZ)
  static uint64_t get() { return __builtin_ia32_stmxcsr(); }
  static void set(uint64_t control) { __builtin_ia32_ldmxcsr((unsigned)control); }
#else
  static const uint64_t FLUSH = 1u << 24;  // FPCR.FZ
  static uint64_t get() {
    uint64_t control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void set(uint64_t control) { asm volatile("msr fpcr, %0" ::"r"(control)); }
#endif
  uint64_t saved;
};
