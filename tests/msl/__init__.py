"""Run the text of Metal kernels on the CPU of a Linux machine, and find out what is wrong with it.

A kernel written for `mx.fast.metal_kernel` runs on Apple's GPUs only, and even there nothing tells
a race from good luck. Here the same text, exactly as MLX would hand it to Apple's compiler, is
compiled by clang as C++ and run with a GPU's semantics:

    import msl

    with msl.emulate(msl.Options(mode="check")) as runs:  # mx.fast.metal_kernel is replaced
        kernel = mx.fast.metal_kernel(name="square", input_names=["x"], output_names=["out"],
            source="uint i = thread_position_in_grid.x; out[i] = x[i] * x[i];")
        (y,) = kernel(inputs=[x], output_shapes=[x.shape], output_dtypes=[x.dtype],
            grid=(x.size, 1, 1), threadgroup=(256, 1, 1))

What does not compile raises CompileError, what goes wrong while it runs raises KernelError; both
show the line of the kernel. `runs` collects a Result for each launch. CHECK FIRST: in the mode
"fast", the default, a wild store can end the Python process, as can a division of integers by zero.

The signature is MLX's own. `mx.export_function` with a callback walks a graph that was recorded but
not evaluated, and hands out the state of each primitive. For a custom kernel that is its whole
generated source, the grid, the threadgroup, and which inputs pass their shape and strides. So the
order of arguments, `constant` for inputs of fewer than 8 elements, references for 0-d ones,
attributes found by substring, `atomic<T>` outputs and the template's instantiation are not imitated
here but MLX's, byte for byte (bridge.py).

The pipeline. translate.py respells what clang's C++ cannot parse, line for line, and checks that
pointers name an address space. build.py puts MLX's utils.h from the installed wheel in front and
calls clang, which tells address spaces apart as MSL does; include/ holds <metal_stdlib>. launch.py
copies the buffers into poisoned memory, runs the kernel and words the findings. runtime.cpp gives
each GPU thread a fiber and runs one threadgroup at a time; check.h watches every access.

Execution. Fibers switch at SIMD operations and barriers. A SIMD operation joins all lanes of its
SIMD-group that have not ended, which must be at the same operation of the same line. The schedule
is "deep", where each SIMD-group runs on to its next threadgroup barrier before the next one starts,
or "round", where they take turns at each SIMD operation; the order of lanes, SIMD-groups and
threadgroups is natural, reversed or shuffled. A correct kernel gives the same results in all of
them, up to the order of a reduction.

What is found, by kind:

    out-of-bounds           any access outside a buffer or the threadgroup memory        check
    race                    between SIMD-groups: no barrier, or one with wrong flags     check
    simd-race               between lanes of one SIMD-group, which need not be in step   check
    cross-threadgroup-race  threadgroups that touch one element                          check
    uninitialised           a read of what nothing has written                           check
    unwritten               bytes of an output that no thread wrote                      check
    undefined               shifts, overflow, conversions, alignment, array bounds       check
    divergence              lanes at different SIMD operations, or barriers              every mode
    canary                  bytes that changed outside the outputs                       fast, asan
    threadgroup-memory      more than 32 KiB                                             every mode
    launch                  more than 1024 threads in a threadgroup                      every mode

Overruns of a thread's own arrays through a pointer are left: for these there is the mode "asan",
which needs a Python that was started with `asan_environment()` and ends the process with a report.
Threadgroup memory and the output's bytes start as NaN, and variables without a value as a pattern.

Limits. Not modelled: textures, samplers, function constants and pointers, argument buffers,
`[[threadgroup(n)]]` arguments, tensors, quad operations but for sums, extrema and shuffles, complex
numbers. Copying a struct between address spaces, member functions qualified with one, and
threadgroup variables of class type do not compile; Options(defines=("-DMSL_NO_ADDRESS_SPACES",))
gives up the distinction for such a kernel. An overrun from one threadgroup array into the next one
shows only if the index's type is an array's, or as a race. A threadgroup's own stores to device
memory are ordered by its barriers as MSL has it, nothing is concurrent, and atomics never contend.
Emulated kernels must see values, so mx.compile and mx.vmap refuse them; mx.grad with
mx.custom_function and mx.checkpoint work. A conversion of half to bfloat is refused here and fine
there; taken here and perhaps refused there: an exact literal or an int as a bfloat, lambdas,
recursion, C++17, comparisons of vectors. A kernel that never ends hangs, and check mode keeps 64
bytes for each byte of a buffer. A GPU differs in the accuracy of its functions (`fast_ulps`), the
order of reductions, contraction to fma (`contract`), denormals (`ftz`), and in registers, occupancy
and speed, of which nothing is said here. No run here proves that Apple's compiler accepts a kernel.

It takes clang 17 or later and binutils: `apt-get install --no-install-recommends clang-19`.
"""

from .bridge import EmulatedKernel, Launch, emulate, from_numpy, to_numpy, trace
from .build import (
    CompileError,
    Options,
    asan_environment,
    compile_kernel,
    skip_reason,
    unavailable,
)
from .launch import Buffer, Finding, KernelError, Result, run_kernel
from .translate import flatten, lint

__all__ = [
    "Buffer",
    "CompileError",
    "EmulatedKernel",
    "Finding",
    "KernelError",
    "Launch",
    "Options",
    "Result",
    "asan_environment",
    "compile_kernel",
    "emulate",
    "flatten",
    "from_numpy",
    "lint",
    "run_kernel",
    "skip_reason",
    "to_numpy",
    "trace",
    "unavailable",
]
