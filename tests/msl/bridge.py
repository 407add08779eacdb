"""Stand in for mx.fast.metal_kernel, with the text and the launch that MLX itself decides on.

MLX records a custom Metal kernel in its graph without needing Metal, as long as nothing evaluates
it. `mx.export_function` with a callback walks such a graph and hands out the state of each
primitive; that of CustomKernel holds the generated source, the grid and the threadgroup.
"""

import contextlib
import dataclasses
import re

import mlx.core as mx
import numpy as np

from .build import DEFAULT, Options, compile_kernel
from .launch import Buffer, Result, run_kernel

_REAL_METAL_KERNEL = mx.fast.metal_kernel


@dataclasses.dataclass(frozen=True)
class Launch:
    """What MLX would send to the GPU."""

    name: str  # of the kernel function; holds the template's arguments, mangled
    source: str  # header, signature and body
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    uses: list[tuple[bool, bool, bool]]  # for each input: passes its _shape, _strides, _ndim
    contiguous: bool  # ensure_row_contiguous

    @property
    def template(self) -> str | None:
        """The template's arguments as MLX instantiates it: "float, 4"."""
        name = re.escape(self.name)
        found = re.search(rf"decltype\({name}<(.*)>\) {name}<", self.source)
        return found.group(1) if found else None


def trace(kernel, inputs: list[mx.array], **call) -> Launch:
    """The launch that `kernel(inputs=inputs, **call)` stands for; `kernel` is MLX's own."""
    states = []

    def record(state: dict) -> None:
        if state.get("type") == "primitive" and state.get("name") == "CustomKernel":
            states.append(state["arguments"])

    def function(*arrays):
        return kernel(inputs=list(arrays), stream=mx.gpu, **call)

    mx.export_function(record, function, *inputs)
    (state,) = states
    return Launch(
        name=state[0],
        source=state[1],
        grid=tuple(state[2:5]),
        threadgroup=tuple(state[5:8]),
        uses=state[8],
        contiguous=state[9],
    )


# ---- arrays ----------------------------------------------------------------------------


def to_numpy(array: mx.array) -> np.ndarray:
    """A view of `array` with its strides; bfloat16, which numpy lacks, as its bits."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def from_numpy(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """The inverse of to_numpy."""
    return mx.array(array).view(dtype) if dtype == mx.bfloat16 else mx.array(array)


def _arrays(inputs: list) -> list[mx.array]:
    """Numbers as arrays; arrays as they are, since a copy of a view would be contiguous."""
    return [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]


def _input_buffers(name: str, array: mx.array, uses: tuple, contiguous: bool) -> list[Buffer]:
    """The buffers that MLX binds for an input: the data, then what the body asks for of
    `<name>_shape`, `<name>_strides` and `<name>_ndim`; a 0-d input has none of these."""
    data = to_numpy(array)
    if contiguous or data.size == 0:
        data = np.ascontiguousarray(data).reshape(data.shape)
    shape, item = data.shape, data.itemsize
    strides = [stride // item for stride in data.strides]
    buffers = [_window(name, data)]
    if data.ndim > 0:
        facts = (("_shape", shape, np.int32), ("_strides", strides, np.int64))
        facts += (("_ndim", [data.ndim], np.int32),)
        for used, (suffix, values, dtype) in zip(uses, facts, strict=True):
            if used:
                buffers.append(Buffer(name + suffix, np.array(values, dtype)))
    return buffers


def _window(name: str, data: np.ndarray) -> Buffer:
    """All memory from the lowest to the highest element of `data`, which may be a view."""
    if data.size == 0:
        return Buffer(name, data)
    lowest = data[tuple(slice(None, None, -1 if s < 0 else 1) for s in data.strides)]
    last = sum((n - 1) * abs(s) for n, s in zip(data.shape, data.strides, strict=True))
    first = sum((1 - n) * min(s, 0) for n, s in zip(data.shape, data.strides, strict=True))
    size = 1 + last // data.itemsize
    memory = np.lib.stride_tricks.as_strided(lowest, (size,), (data.itemsize,))
    return Buffer(name, memory.copy(), offset=first)


def _output_buffer(name: str, shape: tuple, dtype: mx.Dtype, init_value) -> Buffer:
    filled = to_numpy(mx.full(tuple(shape), 0 if init_value is None else init_value, dtype))
    return Buffer(name, filled, output=True, initialised=init_value is not None)


# ---- the stand-in ----------------------------------------------------------------------


@dataclasses.dataclass
class _Settings:
    options: Options = DEFAULT
    runs: list[Result] | None = None


_settings = _Settings()


class EmulatedKernel:
    """What mx.fast.metal_kernel returns, running on the CPU. Same arguments; a call takes
    `options` besides, which default to those of the `emulate()` around it."""

    def __init__(self, name, input_names, output_names, source, **keywords):
        self.input_names = list(input_names)
        self.output_names = list(output_names)
        self.math_mode = (keywords.get("compile_options") or {}).get("math_mode", "safe")
        self.real = _REAL_METAL_KERNEL(
            name=name,
            input_names=input_names,
            output_names=output_names,
            source=source,
            **keywords,
        )

    def launch(self, *, inputs, **call) -> Launch:
        """What MLX makes of such a call, without running it."""
        return trace(self.real, _arrays(inputs), **call)

    def __call__(self, *, inputs, stream=None, options: Options | None = None, **call):
        options = self._with_math_mode(options or _settings.options)

        @mx.custom_function
        def run(*arrays):
            return self._run(list(arrays), options, **call)

        @run.vjp
        def no_vjp(*_):  # as MLX has it, and not a gradient of zero
            raise ValueError("[Primitive::vjp] Not implemented for CustomKernel.")

        return run(*_arrays(inputs))

    def _run(self, arrays, options, *, output_shapes, output_dtypes, init_value=None, **call):
        launch = trace(
            self.real,
            arrays,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            init_value=init_value,
            **call,
        )
        kernel = compile_kernel(launch.source, launch.name, launch.template, options)
        buffers = []
        for name, array, uses in zip(self.input_names, arrays, launch.uses, strict=True):
            buffers += _input_buffers(name, array, uses, launch.contiguous)
        for output in zip(self.output_names, output_shapes, output_dtypes, strict=True):
            buffers.append(_output_buffer(*output, init_value))
        result = run_kernel(kernel, buffers, launch.grid, launch.threadgroup, options)
        if _settings.runs is not None:
            _settings.runs.append(result)
        return [from_numpy(o, d) for o, d in zip(result.outputs, output_dtypes, strict=True)]

    def _with_math_mode(self, options: Options) -> Options:
        """MLX's compile option of that name sets flags of Apple's compiler."""
        if self.math_mode == "safe":
            return options
        defines = ("-D__FAST_MATH__=1",) if self.math_mode == "fast" else ()
        return dataclasses.replace(
            options, fast_math=True, contract=True, defines=options.defines + defines
        )


@contextlib.contextmanager
def emulate(options: Options = DEFAULT):
    """Within it, mx.fast.metal_kernel makes kernels for the CPU and mx.metal.is_available() holds.

    Kernels made inside may be called later, too; each call takes the options of the `emulate()`
    around the call. Yields a list that receives the Result of every run.
    """
    global _settings
    names = ((mx.fast, "metal_kernel", EmulatedKernel), (mx.metal, "is_available", lambda: True))
    old = [getattr(module, name) for module, name, _ in names]
    outer, _settings = _settings, _Settings(options, [])
    for module, name, value in names:
        setattr(module, name, value)
    try:
        yield _settings.runs
    finally:
        _settings = outer
        for (module, name, _), value in zip(names, old, strict=True):
            setattr(module, name, value)
