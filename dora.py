"""dora.py: DoRA and LoRA for linear layers, experts and embeddings of MLX models, dense or packed.

One file, no other file of the suite needed: copy it (with `kernels/`) into another repo. It works
on this suite's models and on mlx-lm's and mlx-vlm's, because it looks at what a layer holds
(`weight`, `scales`, `bits`).

    import dora
    dora.adapt(model, rank=8, kind="dora")  # in place; trainable_parameters() is the adapter
    dora.save_adapter(folder, model, base="org/model", config=config)
    dora.load_adapter(model, "adapters/adapters.safetensors", config)

DoRA (Liu et al. 2024, arXiv:2402.09353) learns direction and magnitude of each row of W (O, I)
apart:

    y   = x Wᵀ + s (x A) B                      A (I, R), B (R, O), s a plain factor
    n_o = ‖W_o + s Bᵀ_o Aᵀ‖₂                    row norm, float32, no gradient through it (4.3)
    out = (m / n) ⊙ y + bias                    m (O,), at first ‖W_o‖: a fresh layer is a no-op

What the textbook does on a packed W: dequantize it, build W + s(AB)ᵀ, norm its rows, on every
forward, and keep both dense matrices for backward. What this file does is chosen by `route`:

- CUDA, training: one kernel norms the rows (kernels/norm), one writes g ⊙ (W + sBᵀAᵀ) densely for
  the moment of a product (kernels/adapted), forward and again backward. Nothing else of size
  (O, I) or (T, O) is made; m's gradient comes from the output (kernels/column_dot).
- GPUs, generating: one kernel per layer (kernels/decode).
- Otherwise x Wᵀ by one dense copy for the moment of a product or by the packed product, whichever
  is faster, then the low-rank part and g; without kernels the norm comes from O·R operations.

Experts (E, O, I) have an adapter each, and their norms come from products of size (E, O, R). An
embedding (V, D) is a linear layer D -> V whose rows are looked up; as a tied head it is one.

DORA_KERNELS=0 in the environment switches the kernels off.

    python dora.py info adapters/adapters.safetensors
    python dora.py check                        every packing against float64 on this device
    python dora.py bench                        base, this layer and the textbook's, in turns
"""

import copy
import difflib
import functools
import hashlib
import inspect
import json
import math
import operator
import os
import re
import sys
import time
import types
import typing
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

KINDS = ("dora", "lora")
LEAVES = ("lora_a", "lora_b", "m")
FORMAT, VERSION = "mlx-dora adapter", 1
QUANTITIES = ("out", "dx", "da", "db", "dm", "eval", "norm")


# --- Command line ---------------------------------------------------------------------------------
# The same text stands in every leaf, so that each can be copied alone; a test keeps them equal.


class UserError(Exception):
    """Something the user can put right: shown as one line, exit status 2."""


def coerce(name: str, text: str, wanted: object) -> object:
    """Turns the text of a flag into the type its annotation names; a union is tried from left to
    right.
    """
    for kind in typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,):
        low = text.lower()
        if kind is bool and low in ("true", "false"):
            return low == "true"
        if kind is types.NoneType and low == "none":
            return None
        if kind is str:
            return text
        if typing.get_origin(kind) is list:
            (item,) = typing.get_args(kind)
            parts = [part.strip(" '\"") for part in text.strip("[]()").split(",")]
            return [coerce(name, part, item) for part in parts if part]
        if kind in (int, float, dict):
            try:
                value = json.loads(text) if kind is dict else kind(text)
                if isinstance(value, kind) and (kind is not float or math.isfinite(value)):
                    return value
            except ValueError:
                pass
    wanted = getattr(wanted, "__name__", None) or str(wanted)
    raise UserError(f"--{name.replace('_', '-')}: got {text!r}, wanted {wanted}")


def parse(function: typing.Callable, argv: list[str]) -> dict:
    """Maps argv to keyword arguments of `function`, or raises UserError before anything has run."""
    signature, hints = inspect.signature(function).parameters, typing.get_type_hints(function)
    names, values, words = list(signature), {}, list(argv)
    free = [n for n in names if signature[n].kind is not inspect.Parameter.KEYWORD_ONLY]
    while words:
        word = words.pop(0)
        if word == "--" and "command" in names:
            values["command"] = words
            break
        if not word.startswith("--"):
            name = next((n for n in free if n not in values or hints[n] == list[str]), None)
            if name is None:
                raise UserError(
                    f"unexpected argument {word!r}; flags: --{', --'.join(names).replace('_', '-')}"
                )
            if hints[name] == list[str]:  # a last argument takes all the words there are
                values.setdefault(name, []).append(word)
            else:
                values[name] = coerce(name, word, hints[name])
            continue
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.5)
            hint = f"did you mean --{near[0]}?" if near else f"flags: --{', --'.join(names)}"
            raise UserError(f"unknown flag {word.partition('=')[0]}; {hint.replace('_', '-')}")
        if not equals:
            switch = hints[name] is bool
            follows = bool(words) and not words[0].startswith("--")
            if follows and (not switch or words[0].lower() in ("true", "false")):
                text = words.pop(0)
            elif switch or bool in typing.get_args(hints[name]):
                text = "true"
            else:
                raise UserError(f"--{name.replace('_', '-')} needs a value")
        values[name] = coerce(name, text, hints[name])
    for n, p in signature.items():
        if p.default is inspect.Parameter.empty and n not in values:
            raise UserError(f"missing {n.upper()}; try --help")
    return values


def show_help(function: typing.Callable) -> None:
    """Prints the docstring and every flag with its default."""
    print(inspect.cleandoc(function.__doc__ or ""), "\n\nFlags:")
    for name, p in inspect.signature(function).parameters.items():
        default = "required" if p.default is inspect.Parameter.empty else repr(p.default)
        print(f"  --{name.replace('_', '-'):<26} {default}")


def cli(commands: object, expand: typing.Callable | None = None, errors: tuple = ()) -> None:
    """Runs a function, or one of a dict of functions, from the command line through Fire.

    Fire calls the function first and complains about unknown flags afterwards, so flags are
    checked and coerced here before. `expand(function, flags) -> flags` may add flags from
    elsewhere. UserError, OSError and `errors` become one line on stderr and exit status 2;
    anything else keeps its traceback.
    """
    argv = sys.argv[1:]
    try:
        function = commands
        if isinstance(commands, dict):
            name = argv.pop(0) if argv and not argv[0].startswith("-") else None
            if name not in commands:
                print(inspect.cleandoc(sys.modules["__main__"].__doc__))
                if name is None and ("--help" in argv or "-h" in argv):
                    return
                raise UserError(f"got command {name!r}, wanted one of: {', '.join(commands)}")
            function = commands[name]
        own = argv[: argv.index("--")] if "--" in argv else argv
        if "--help" in own or "-h" in own:
            return show_help(function)
        flags = parse(function, argv)
        flags = expand(function, flags) if expand else flags
        import fire

        fire.Fire(function, command=[f"--{k}={v!r}" for k, v in flags.items()])
    except BrokenPipeError:
        os._exit(141)
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, OSError, RuntimeError, *errors) as error:
        unknown = isinstance(error, RuntimeError) and not isinstance(error, errors)
        if unknown and "Unable to write" not in str(error):
            raise
        full = "no space left on the disk: " if unknown else ""
        print(f"{Path(sys.argv[0]).name}: error: {full}{error}", file=sys.stderr)
        sys.exit(2)


# --- The product with a frozen weight -------------------------------------------------------------


def packing(layer: nn.Module) -> tuple[int, int, str] | None:
    """(group size, bits, mode) of a packed layer, None for a dense one."""
    if "scales" not in layer:
        return None
    return layer.group_size, layer.bits, getattr(layer, "mode", "affine")


def tensors(layer: nn.Module) -> list[mx.array]:
    """weight, then scales and biases where the layer is packed (mx modes have no biases)."""
    return [layer[k] for k in ("weight", "scales", "biases") if layer.get(k) is not None]


def width(layer: nn.Module) -> int:
    """Inputs of a layer; from the scales, since 3-, 5- and 6-bit codes do not divide 32."""
    how = packing(layer)
    return layer.scales.shape[-1] * how[0] if how else layer.weight.shape[-1]


def dense(packed: list[mx.array], how: tuple | None, dtype: mx.Dtype) -> mx.array:
    """The weight (O, I) in `dtype`."""
    if how is None:
        return packed[0].astype(dtype)
    if dtype == mx.float32 and len(packed) == 3:  # unrounded; half precision rounds W once more
        packed = [packed[0], *(p.astype(dtype) for p in packed[1:])]
    if mx.default_device().type == mx.DeviceType.cpu and len(packed) == 3 and how[1] in (4, 8):
        return unpack(*packed, bits=how[1]).astype(dtype)
    return mx.dequantize(*packed, group_size=how[0], bits=how[1], mode=how[2], dtype=dtype)


def unpack(weight: mx.array, scales: mx.array, biases: mx.array, bits: int) -> mx.array:
    """Affine dequantization from plain array operations, bit for bit mx.dequantize's in float32.

    The CPU backend's own decodes one code at a time: twice as slow at 4 bits, 2.6 times at 8.
    """
    codes = weight.view(mx.uint8)
    if bits == 4:
        codes = mx.stack([codes & 15, codes >> 4], axis=-1)
    codes = codes.reshape(*scales.shape, -1)  # (O, I / group, group)
    return (codes * scales[..., None] + biases[..., None]).reshape(scales.shape[0], -1)


def dense_pays(tokens: int, dtype: mx.Dtype) -> bool:
    """Whether x Wᵀ for this many tokens is faster through a transient dense copy of a packed W.

    Measured: Metal's packed product wins throughout; CUDA's loses from some 256 tokens on (H200,
    4096 x 4096, 4-bit); the CPU backend's from 4 tokens on in float32, always in half precision.
    """
    if mx.default_device().type == mx.DeviceType.cpu:
        return tokens >= 4 or dtype != mx.float32
    return tokens >= 256 and not mx.metal.is_available()


@functools.cache
def transient_product(how: tuple | None) -> Callable:
    """`f(x (T, I), a (I, R), weight, ...) -> x Wᵀ (T, O), aᵀ Wᵀ (R, O)` with W dense for a moment.

    Both products share one dense copy. Backward (for x alone) makes W again, from arrays that
    depend on the cotangent: otherwise mx.compile merges it with the forward's and keeps it in
    between.
    """

    @mx.custom_function
    def product(x, a, *packed):
        W = dense(packed, how, x.dtype)
        return x @ W.T, a.T.astype(x.dtype) @ W.T

    @product.vjp
    def product_vjp(primals, cotangents, _):
        x, a, *packed = primals
        W = dense(mx.depends(packed, [cotangents[0]]), how, x.dtype)
        return cotangents[0] @ W, *(mx.zeros_like(p) for p in (a, *packed))

    return product


def product(x: mx.array, packed: list[mx.array], how: tuple | None, a: mx.array) -> tuple:
    """x (T, I) and a (I, R) against one frozen weight: x Wᵀ (T, O), aᵀ Wᵀ (R, O) in float32."""
    if how is None or dense_pays(x.shape[0], x.dtype):
        y, wa = transient_product(how)(x, a, *packed)
        return y, wa.astype(mx.float32)
    kw = dict(transpose=True, group_size=how[0], bits=how[1], mode=how[2])
    frozen = [mx.stop_gradient(p) for p in packed]
    y = mx.quantized_matmul(x, *frozen, **kw).astype(x.dtype)
    return y, mx.quantized_matmul(a.T, *frozen, **kw).astype(mx.float32)


@mx.custom_function
def rescale(u: mx.array, g: mx.array) -> mx.array:
    """g (O,) ⊙ u (T, O) in u's dtype, formed in float32; so is the sum over tokens for g.

    Backward needs the output, which the next layer keeps anyway, and not u: half the memory.
    Where g is exactly 0 its gradient is taken to be 0.
    """
    return (u * g).astype(u.dtype)


@rescale.vjp
def _rescale_vjp(primals, cotangent, out):
    u, g = primals
    return (cotangent * g).astype(u.dtype), quotient(column_dot(cotangent, out), g)


def quotient(a: mx.array, b: mx.array) -> mx.array:
    """a / b, 0 where b is 0: what a row that is all zeros, or a zero magnitude, gets."""
    zero = b == 0
    return mx.where(zero, 0, a / mx.where(zero, 1, b))


def gathered_product(x: mx.array, W: mx.array, experts: mx.array, in_order: bool) -> mx.array:
    """x (..., 1, I) by its expert's W (E, O, I) -> (..., 1, O), in x's dtype."""
    dtype = mx.float32 if mx.default_device().type == mx.DeviceType.cpu else x.dtype  # all it can
    how = dict(rhs_indices=experts, sorted_indices=in_order)
    return mx.gather_mm(x.astype(dtype), W.astype(dtype).swapaxes(-1, -2), **how).astype(x.dtype)


def square_norms(layer: nn.Module, chunk: int = 4096) -> mx.array:
    """‖W_o‖² (O,), or (E, O) of E experts, in float32, a few rows dense at a time."""
    how, parts = packing(layer), []
    flat = [t.reshape(-1, t.shape[-1]) for t in tensors(layer)]
    for i in range(0, len(flat[0]), chunk):
        W = dense([t[i : i + chunk] for t in flat], how, mx.float32)
        parts.append(mx.square(W).sum(axis=1))
        mx.eval(parts[-1])
    return mx.concatenate(parts).reshape(layer.weight.shape[:-1])


# --- Kernels --------------------------------------------------------------------------------------

KERNELS = os.environ.get("DORA_KERNELS", "1") != "0"  # the switch: 0 for plain MLX throughout
C_MODES = {"affine": 0, "mxfp4": 1, "mxfp8": 1, "nvfp4": 2, None: 3}
C_TYPES = {
    "metal": {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t"},
    "cu": {mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"},
}


@functools.cache
def kernel_folder() -> Path | None:
    """kernels/ beside this file, or where an installed wheel has it; None if it was not copied."""
    folders = Path(__file__).with_name("kernels"), Path(sys.prefix, "share/mlx-dora/kernels")
    return next((f for f in folders if f.is_dir()), None)


def language() -> str | None:
    """What the kernels for the default device are written in: "metal", "cu", or None."""
    if not KERNELS or kernel_folder() is None or mx.default_device() != mx.gpu:
        return None
    return "metal" if mx.metal.is_available() else "cu"


def kernels_take(layer: nn.Module) -> bool:
    """Whether this device has kernels and they take a layer of this shape."""
    (I, R), O = layer.factors()[0].shape, layer.linear.weight.shape[0]
    return language() is not None and min(I, O) >= 8 and R <= 256


def route(layer: nn.Module, tokens: int, dtype: mx.Dtype) -> str:
    """Which way a layer's forward goes. This is the whole choice:

    decode    one kernel for everything; evaluation of few tokens on a GPU: 8, CUDA 4
    adapted   a kernel writes the dense adapted weight, then one product with it; CUDA, training
              and more tokens (H200, 4096 x 4096, 8 tokens: 32 us, by decode 52, packed 56)
    product   x Wᵀ, then the low-rank part and the magnitude: all else, that is the CPU, Metal
              beyond 8 tokens, dropout, and what `kernels_take` refuses

    The norm comes from its kernel wherever there are kernels.
    """
    if not kernels_take(layer) or dtype not in C_TYPES["cu"]:
        return "product"
    few = 4 if language() == "cu" else 8
    if not layer.training and tokens <= few and layer.lora_b.shape[0] <= 64:
        return "decode"
    dropped = layer.training and layer.rate
    return "adapted" if language() == "cu" and not dropped else "product"


def text_of(name: str, lang: str) -> str:
    """A kernel's text without comments and indentation: MLX copies and hashes it at every call."""
    lines = (kernel_folder() / f"{name}.{lang}").read_text().splitlines()
    return "\n".join(t for line in lines if (t := line.partition("//")[0].strip()))


@functools.cache
def kernel(
    lang: str, name: str, how: tuple | None, dtype: mx.Dtype, inputs: str, output: str, **constants
) -> Callable:
    """kernels/<name>.<lang> for one packing, dtype and set of constants.

    `inputs` are names in order; W stands for the weight and what comes with it. Constants are
    text before the kernel, not template arguments, which MLX would parse at every call.
    """
    group, bits, mode = how or (16, 16, None)
    constants |= {"GROUP": group, "BITS": bits, "MODE": C_MODES[mode]}
    space = "constant constexpr" if lang == "metal" else "constexpr"
    header = "".join(f"{space} int {k} = {v};\n" for k, v in constants.items())
    header += f"using T = {C_TYPES[lang][dtype]};\n" + text_of("packed", lang)
    held = ["weight", "scales", "biases"][: 1 if how is None else 3 if mode == "affine" else 2]
    names = [n for word in inputs.split() for n in (held if word == "W" else [word])]
    lacking = {"scales", "biases"} - set(held) if "W" in inputs else ()  # named, never read
    source = "".join(f"auto {k} = weight;\n" for k in sorted(lacking)) + text_of(name, lang)
    unique = "_".join([name, str(mode), str(dtype)[9:], *(f"{k}{v}" for k, v in constants.items())])
    make = mx.fast.metal_kernel if lang == "metal" else mx.fast.cuda_kernel
    return make(
        name=unique.lower(),
        input_names=names,
        output_names=[output],
        source=source,
        header=header,
    )


def rows_kernel(name: str, inputs: str, output: str, packed, how, arrays, shape, dtype) -> mx.array:
    """A kernel that takes whole rows of the weight; see the headers of norm and adapted."""
    (R, O), lang = arrays[1].shape, language()
    tile = 8 if lang == "cu" else 4
    sets, strips = (2, 4) if O >= 2048 else (1, 8)
    constants = {"R": R, "TILE": tile, "SETS": sets, "STRIPS": strips}
    run = kernel(lang, name, how, dtype, inputs, output, **constants)
    return run(
        inputs=[*packed, *arrays],
        output_shapes=[shape],
        output_dtypes=[dtype],
        grid=(-(-O // (tile * sets)) * 256, 1, 1),
        threadgroup=(256, 1, 1),
    )[0]


def norm_kernel(packed, how: tuple | None, A: mx.array, sB: mx.array) -> mx.array:
    """‖W_o + sBᵀ_o Aᵀ‖₂ (O,) in float32, A (I, R), sB (R, O) float32; no gradient."""
    return rows_kernel("norm", "W a b", "n", packed, how, [A.T, sB], sB.shape[1:], mx.float32)


def adapted_kernel(packed, how, A: mx.array, sB: mx.array, g: mx.array, dtype) -> mx.array:
    """g ⊙ (W + sBᵀAᵀ) (O, I), dense in `dtype`."""
    shape = sB.shape[1], A.shape[0]
    return rows_kernel("adapted", "W a b g", "out", packed, how, [A.T, sB, g], shape, dtype)


def column_dot(c: mx.array, y: mx.array) -> mx.array:
    """Σ_t c ⊙ y (O,) of two (T, O), in float32."""
    (L, O), lang = c.shape, language()
    if lang is None or min(L, O) < 8 or c.dtype != y.dtype or c.dtype not in C_TYPES[lang]:
        return (c.astype(mx.float32) * y.astype(mx.float32)).sum(axis=0)
    chunks = -(-L // 128)
    run = kernel(lang, "column_dot", None, c.dtype, "c y", "p", TOKENS=128, R=1)
    (p,) = run(
        inputs=[c, y],
        output_shapes=[(chunks, O)],
        output_dtypes=[mx.float32],
        grid=(-(-O // 256) * 256, chunks, 1),
        threadgroup=(256, 1, 1),
    )
    return p.sum(axis=0)


@functools.cache
def adapted_product(how: tuple | None, kind: str) -> Callable:
    """`f(x (T, I), A, sB, m, n, weight, ...) -> out (T, O)` through one dense adapted weight.

    With W' = g ⊙ (W + sBᵀAᵀ) and g = m / n, or 1 for LoRA, which has no m and n:  out = x W'ᵀ,
    dx = c W',  dA = xᵀ (c (g sB)ᵀ),  dsB = g ⊙ (hᵀ c) for h = x A,  dm = Σ_t c ⊙ out / m. No pass
    over (T, O) beside the products. Backward writes W' again, from arrays that depend on the
    cotangent (see `transient_product`).
    """
    magnitude = 2 if kind == "dora" else 0

    def weight(x, A, sB, *rest):
        g = quotient(*rest[:2]) if magnitude else mx.ones(sB.shape[1:])
        return adapted_kernel(rest[magnitude:], how, A, sB, g, x.dtype), g

    @mx.custom_function
    def product(x, *rest):
        return x @ weight(x, *rest)[0].T

    @product.vjp
    def product_vjp(primals, c, out):
        x, A, sB, *rest = primals
        W, g = weight(x, A, sB, *rest[:magnitude], *mx.depends(rest[magnitude:], [c]))
        dA = (x.T @ (c @ (sB * g).T.astype(c.dtype))).astype(A.dtype)
        dsB = ((x @ A.astype(x.dtype)).T @ c).astype(mx.float32) * g
        frozen = [mx.zeros_like(r) for r in rest]
        if magnitude:
            frozen[0] = quotient(column_dot(c, out), rest[0])
        return c @ W, dA, dsB, *frozen

    return product


@functools.cache
def decode_kernel(lang: str, how: tuple | None, dtype: mx.Dtype, shape: tuple, R: int) -> Callable:
    """`f(x (..., I), a, b (R + 2, O), weight, ...) -> out of `shape` (..., O)`, see kernels/decode.

    a is A in x's dtype, transposed (R, I) for CUDA, where the kernel computes x A; b holds the
    rows g sB, g and bias. No gradient: to be differentiable would cost a token more time than the
    kernel takes.
    """
    N, O = math.prod(shape[:-1]), shape[-1]
    inside = lang == "cu"
    warps, rows, unroll = 8, 4 if N > 4 else 2, 2
    if inside and N == 1:  # measured on an H200
        warps, rows, unroll = (16, 1, 8) if O < 8192 else (8, 4, 2)
    constants = {"R": R, "N": N, "ROWS": rows, "WARPS": warps, "UNROLL": unroll}
    run = kernel(lang, "decode", how, dtype, f"x W {'a' if inside else 'h'} b", "out", **constants)
    threads = 32 * warps
    launch = {"grid": (-(-O // (warps * rows)) * threads, 1, 1), "threadgroup": (threads, 1, 1)}
    launch |= {"output_shapes": [shape], "output_dtypes": [dtype]}

    def decode(x, a, b, *packed):
        return run(inputs=[x, *packed, a if inside else x @ a, b], **launch)[0]

    return mx.compile(decode) if inside else decode  # to call it again costs half as much


@functools.cache
def decode_product(run: Callable, how: tuple | None, kind: str) -> Callable:
    """`f(x, a, b, A, sB, m, n, weight, ...)`: `decode_kernel`, the gradient by plain operations."""
    weight = 7 if kind == "dora" else 5  # where it begins

    @mx.custom_function
    def decode(x, a, b, *rest):
        return run(x, a, b, *rest[weight - 3 :])

    @decode.vjp
    def decode_vjp(primals, c, _):
        x, a, b, *adapter = primals[:weight]
        packed, (x2, c2) = primals[weight:], (t.reshape(-1, t.shape[-1]) for t in (x, c))
        plain = functools.partial(plain_product, how, kind)
        _, (dx, *d) = mx.vjp(lambda *p: plain(*p, *packed), [x2, *adapter], [c2])
        zeros = [mx.zeros_like(p) for p in (a, b, *packed)]
        return dx.reshape(x.shape), *zeros[:2], *d, *zeros[2:]

    return decode


def plain_product(how: tuple | None, kind: str, x, A, sB, *rest) -> mx.array:
    """What `adapted_product` computes, from plain operations; n is taken as given."""
    packed = list(rest[2:] if kind == "dora" else rest)
    y = product(x, packed, how, mx.stop_gradient(A))[0]
    y = mx.addmm(y, x @ A.astype(x.dtype), sB.astype(x.dtype))
    return rescale(y, quotient(*rest[:2])) if kind == "dora" else y


# --- The layer ------------------------------------------------------------------------------------


class Dropout(nn.Dropout):
    """mlx.nn's; where `_key` is set, its mask is that key's, however often it is computed."""

    def __init__(self, p: float):
        super().__init__(p)
        self._key = None

    def __call__(self, x):
        if self._p_1 == 1 or not self.training:
            return x
        return x * mx.random.bernoulli(self._p_1, x.shape, self._key) * (1 / self._p_1)


class AdaptedLinear(nn.Module):
    """A frozen linear layer, dense or packed, under a DoRA or LoRA adapter.

    x (..., I) -> (..., O) in x's dtype; everything float32 stays inside. Parameter names and
    shapes are mlx-lm's: lora_a (I, R), lora_b (R, O), m (O,), all float32; the frozen layer is
    `linear`. Magnitude and norm belong to outputs: `m` has one entry per row of W (O, I). A row
    whose norm is 0 outputs 0; a magnitude of exactly 0 gets no gradient.

    Dropout acts on the input of the low-rank branch only, in training only, for dense and packed
    alike; the norm is of the undropped weight, and m's gradient is that of the masked output.

    In evaluation n is constant: it is computed once, and what the kernel for few tokens reads is
    prepared once. These are dropped when training resumes and not used once any of the arrays they
    came from has been replaced. `route` chooses how the product is computed.
    """

    def __init__(self, linear: nn.Module, rank: int, scale: float, dropout: float, kind: str):
        super().__init__()
        self.linear = linear
        self.scale, self.kind = float(scale), kind
        self.rate, self.dropout = dropout, Dropout(dropout)
        shapes, bound = self.shapes(linear, rank), 1 / math.sqrt(width(linear))
        self.lora_a = mx.random.uniform(-bound, bound, shapes["lora_a"])
        self.lora_b = mx.zeros(shapes["lora_b"])
        if kind == "dora":
            self._square = square_norms(linear)  # ‖W_o‖², frozen
            self.m = mx.sqrt(self._square)
        self._drop_cache()
        linear.freeze()

    @staticmethod
    def shapes(linear: nn.Module, R: int) -> dict[str, tuple]:
        I, O = width(linear), linear.weight.shape[0]
        return {"lora_a": (I, R), "lora_b": (R, O), "m": (O,)}

    def factors(self) -> tuple[mx.array, mx.array]:
        """A (I, R) and B (R, O), so that the low-rank part of W (O, I) is s (A B)ᵀ."""
        return self.lora_a, self.lora_b

    def _drop_cache(self):
        object.__setattr__(self, "_cache", None)  # not in the module's state, nor mx.compile's

    def _set_training_mode(self, mode: bool):
        super()._set_training_mode(mode)
        self._drop_cache()

    def __setattr__(self, name, value):  # `layer.m *= 2` changes the array in place, and lands here
        super().__setattr__(name, value)
        if name != "_training":
            self._drop_cache()

    def norm(self, wa: mx.array | None = None) -> mx.array:
        """n (O,) = ‖W_o + s Bᵀ_o Aᵀ‖₂, float32, without gradient.

        By the kernel where there is one, else factored, from aᵀWᵀ (R, O):
        n² = ‖W_o‖² + 2s Σ_k (WA)_ok B_ko + s² Σ_kl B_ko (AᵀA)_kl B_lo. That cancels where sBᵀAᵀ is
        near -W; float32 has nothing to say below 1e-6 of the terms, so it is kept from falling
        below that.
        """
        A, B = map(mx.stop_gradient, self.factors())
        sB = B * self.scale
        packed, how = tensors(self.linear), packing(self.linear)
        if kernels_take(self):
            return norm_kernel([mx.stop_gradient(p) for p in packed], how, A, sB)
        if wa is None:
            _, wa = product(mx.zeros((1, A.shape[0])), packed, how, A)
        low_rank = (sB * ((A.T @ A) @ sB)).sum(axis=0)
        total = self._square + 2 * (mx.stop_gradient(wa) * sB).sum(axis=0) + low_rank
        return mx.sqrt(mx.maximum(total, 1e-6 * (self._square + low_rank)))

    def __call__(self, x: mx.array) -> mx.array:
        fixed = {} if self._training else self._constants()
        if decode := fixed and fixed.get((x.shape, x.dtype)):
            return decode(x)
        way = route(self, x.size // x.shape[-1], x.dtype)
        if way == "decode":
            fixed[x.shape, x.dtype] = decode = self._decoder(x.shape, x.dtype, fixed)
            return decode(x)
        shape, x = x.shape, x.reshape(-1, x.shape[-1])  # (T, I)
        (A, B), how = self.factors(), packing(self.linear)
        sB, packed, magnitude = B * self.scale, tensors(self.linear), []
        if way == "product":
            y, wa = product(x, packed, how, mx.stop_gradient(A))
            y = mx.addmm(y, self.dropout(x) @ A.astype(x.dtype), sB.astype(x.dtype))
            if self.kind == "dora":
                y = rescale(y, quotient(self.m, fixed["n"] if fixed else self.norm(wa)))
        else:
            if self.kind == "dora":
                magnitude = [self.m, fixed["n"] if fixed else self.norm()]
            y = adapted_product(how, self.kind)(x, A, sB, *magnitude, *packed)
        if "bias" in self.linear:
            y = y + self.linear.bias.astype(y.dtype)
        return y.reshape(*shape[:-1], -1)

    def _constants(self) -> dict:
        """What evaluation computes once: n, and, by (shape, dtype) of x, `_decoder`."""
        source = [*self.values(), *self["linear"].values()]
        if self._cache and all(map(operator.is_, source, self._cache[0])):
            return self._cache[1]
        fixed = {"n": self.norm() if self.kind == "dora" else None}
        object.__setattr__(self, "_cache", (source, fixed))
        return fixed

    def _decoder(self, shape: tuple, dtype: mx.Dtype, fixed: dict) -> Callable:
        """x of this shape -> (..., O) by the kernel for few tokens, bias included."""
        linear, lang, (A, B) = self.linear, language(), self.factors()
        (R, O), packed = B.shape, tensors(linear)
        sB, magnitude, g = B * self.scale, [], mx.ones((O,))
        if self.kind == "dora":
            magnitude = [self.m, fixed["n"]]
            g = quotient(*magnitude)
        bias = linear.bias.astype(mx.float32) if "bias" in linear else mx.zeros((O,))
        b = mx.concatenate([sB * g, g[None], bias[None]])
        a = A.astype(dtype)
        a = mx.contiguous(a.T) if lang == "cu" else a
        how = packing(linear)
        run = decode_kernel(lang, how, dtype, (*shape[:-1], O), R)
        if shape[-2:-1] in ((), (1,)):
            return lambda x: run(x, a, b, *packed)
        differentiable = decode_product(run, how, self.kind)
        return lambda x: differentiable(x, a, b, A, sB, *magnitude, *packed)

    def fused_weight(self) -> mx.array:
        """g ⊙ (W + s BᵀAᵀ) (O, I) in float32, with the norm of the very rows it scales."""
        W, (A, B) = dense(tensors(self.linear), packing(self.linear), mx.float32), self.factors()
        W = W + (B.T * self.scale) @ A.T
        if self.kind == "dora":
            n = mx.linalg.norm(W, axis=1, keepdims=True)
            W = W * (self.m[:, None] / mx.maximum(n, 1e-30))
        return W

    def plain(self, W: mx.array, how: tuple | None) -> nn.Module:
        """A layer of the base's class that holds W (float32), dense or packed."""
        layer = nn.Linear(1, 1, bias="bias" in self.linear)
        layer.weight = W
        return layer if how is None else nn.QuantizedLinear.from_linear(layer, *how)

    def fuse(
        self,
        dequantize: bool = False,
        bits: int | None = None,
        group_size: int | None = None,
        dtype: mx.Dtype = mx.bfloat16,
    ) -> nn.Module:
        """The adapter merged into a plain nn.Linear, or nn.QuantizedLinear packed like the base.

        `dequantize` leaves it dense; `bits` and `group_size` pack it (affine) whatever the base
        was. Floats are stored in the base's type, or in `dtype` where its scales are no floats.
        """
        W, how, base = self.fused_weight(), packing(self.linear), self.linear
        own = base.weight.dtype if how is None else base.scales.dtype
        storage = dtype if own == mx.uint8 else own
        if bits or group_size:
            same = how and how[2] == "affine"
            old = how[:2] if same else (64, 4)
            how = (group_size or old[0], bits or old[1], "affine")
        if how is None or dequantize:
            layer = self.plain(W.astype(storage), None)
        elif W.shape[-1] % how[0]:
            raise UserError(f"a group size of {how[0]} does not divide the width of {W.shape}")
        else:
            layer = self.plain(W, how)
            if how[2] == "affine":
                layer.scales = layer.scales.astype(storage)
                layer.biases = layer.biases.astype(storage)
        if "bias" in base:
            layer.bias = base.bias
        return layer


class AdaptedEmbedding(AdaptedLinear):
    """An embedding, W (V, D), under an adapter: tokens (...) -> (..., D), and as the tied head.

    lora_a (V, R), lora_b (R, D) and m (V,) are mlx-lm's. As a lookup, the norm is that of the rows
    looked up; as the head it is a linear layer D -> V whose A is lora_bᵀ and whose B is lora_aᵀ.
    """

    @staticmethod
    def shapes(linear: nn.Module, R: int) -> dict[str, tuple]:
        V, D = linear.weight.shape[0], width(linear)
        return {"lora_a": (V, R), "lora_b": (R, D), "m": (V,)}

    def factors(self) -> tuple[mx.array, mx.array]:
        return self.lora_b.T, self.lora_a.T

    def __call__(self, tokens: mx.array) -> mx.array:
        rows = self.linear(tokens)
        low_rank = self.lora_a[tokens] @ (self.lora_b * self.scale)
        out = rows.astype(mx.float32) + self.dropout(low_rank)
        if self.kind == "dora":
            adapted = mx.stop_gradient(rows.astype(mx.float32) + low_rank)
            n = mx.linalg.norm(adapted, axis=-1)
            out = out * quotient(self.m[tokens], n)[..., None]
        return out.astype(rows.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return super().__call__(x)

    def plain(self, W: mx.array, how: tuple | None) -> nn.Module:
        layer = nn.Embedding(1, 1)
        layer.weight = W
        return layer if how is None else nn.QuantizedEmbedding.from_embedding(layer, *how)


class AdaptedSwitchLinear(AdaptedLinear):
    """Linear layers of E experts, W (E, O, I), each under an adapter of its own.

    x (..., 1, I) and the experts (...) of each -> (..., 1, O), as mlx-lm's and quant.py's
    SwitchLinear. lora_a (E, R, I), lora_b (E, O, R), as mlx-lm has them, and m (E, O). Nothing
    dense of size (E, O, I) is made of a packed W; the norms come from products of size (E, O, R).
    """

    @staticmethod
    def shapes(linear: nn.Module, R: int) -> dict[str, tuple]:
        (E, O, _), I = linear.weight.shape, width(linear)
        return {"lora_a": (E, R, I), "lora_b": (E, O, R), "m": (E, O)}

    def norm(self) -> mx.array:
        """n (E, O), float32, without gradient: factored, see `AdaptedLinear.norm`."""
        a, sB = mx.stop_gradient(self.lora_a), mx.stop_gradient(self.lora_b) * self.scale
        packed, how = [mx.stop_gradient(t) for t in tensors(self.linear)], packing(self.linear)
        if how is None:
            wa = packed[0].astype(mx.float32) @ a.swapaxes(-1, -2)  # (E, O, R)
        else:
            how = dict(zip(("group_size", "bits", "mode"), how, strict=True))
            wa = mx.quantized_matmul(a, *packed, transpose=True, **how).swapaxes(-1, -2)
        low_rank = ((sB @ (a @ a.swapaxes(-1, -2))) * sB).sum(axis=-1)
        total = self._square + 2 * (wa.astype(mx.float32) * sB).sum(axis=-1) + low_rank
        return mx.sqrt(mx.maximum(total, 1e-6 * (self._square + low_rank)))

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        bias, base = self.linear.get("bias"), self.linear
        y = base(x, indices, sorted_indices=sorted_indices)
        if bias is not None:  # it is not to be scaled
            y = y - bias[indices][..., None, :]
        low_rank = self.dropout(x)
        for factor in (self.lora_a, self.lora_b * self.scale):
            low_rank = gathered_product(low_rank, factor, indices, sorted_indices)
        y = y + low_rank
        if self.kind == "dora":
            n = self.norm() if self._training else self._constants()["n"]
            y = (y * quotient(self.m, n)[indices][..., None, :]).astype(x.dtype)
        return y if bias is None else y + bias[indices][..., None, :].astype(y.dtype)

    def fused_weight(self) -> mx.array:
        """All the experts' g ⊙ (W + s B A) (E, O, I) in float32."""
        W = mx.stack(
            [
                dense([t[e] for t in tensors(self.linear)], packing(self.linear), mx.float32)
                for e in range(len(self.lora_a))
            ]
        )
        W = W + (self.lora_b * self.scale) @ self.lora_a
        if self.kind == "dora":
            n = mx.linalg.norm(W, axis=-1, keepdims=True)
            W = W * (self.m[..., None] / mx.maximum(n, 1e-30))
        return W

    def plain(self, W: mx.array, how: tuple | None) -> nn.Module:
        layer = copy.copy(self.linear)  # of a class this file need not know
        if how is not None and "scales" in layer:
            layer.group_size, layer.bits, layer.mode = how
            layer.weight, layer.scales, *biases = mx.quantize(W, how[0], how[1], mode=how[2])
            layer.biases = biases[0] if biases else None
            return layer
        if how is not None:
            layer.weight = W
            return layer.to_quantized(*how)
        if "scales" in layer:
            raise UserError(f"{type(layer).__name__} cannot be made dense alone; use fuse.py")
        layer.weight = W
        return layer


# --- Adapting a model -----------------------------------------------------------------------------


ROUTERS = ".gate", ".shared_expert_gate"  # are adapted only when they are named


def adapter_for(layer: nn.Module) -> type[AdaptedLinear] | None:
    """Decided by what a layer holds, not by its class: a weight (O, I), (V, D) or (E, O, I)."""
    if "weight" not in layer:
        return None
    if layer.weight.ndim == 2:
        return AdaptedEmbedding if hasattr(layer, "as_linear") else AdaptedLinear
    return AdaptedSwitchLinear if hasattr(layer, "num_experts") else None


def refuse(path: str, layer: nn.Module) -> str | None:
    """Why a layer cannot be adapted, or None. A probe tells what its forward returns."""
    name = type(layer).__name__
    if isinstance(layer, AdaptedLinear) or "lora_a" in layer:
        return f"{path} has an adapter already; remove or fuse it first"
    if (kind := adapter_for(layer)) is None:
        return f"{path} ({name}) is no linear layer, embedding or layer of experts"
    if odd := set(layer) - {"weight", "scales", "biases", "bias"}:
        return f"{path} ({name}) holds {', '.join(sorted(odd))} beside its weight"
    dtype = layer.weight.dtype if packing(layer) is None else mx.float32
    one, wanted = mx.zeros((1,), mx.int32), (1, layer.weight.shape[-2])
    if kind is AdaptedEmbedding:
        out, wanted = layer(one), (1, width(layer))
    elif kind is AdaptedSwitchLinear:
        out, wanted = layer(mx.zeros((1, 1, width(layer)), dtype), one), (1, *wanted)
    else:
        out = layer(mx.zeros((1, width(layer)), dtype))
    if not isinstance(out, mx.array) or out.shape != wanted:
        got = f"shape {out.shape}" if isinstance(out, mx.array) else type(out).__name__
        return f"{path} ({name}) returns {got}, wanted one array {wanted}"
    return None


def block_prefixes(model: nn.Module) -> list[str]:
    """Paths of `model.layers`, in order, wherever in the model they live."""
    where = {id(m): path for path, m in model.named_modules()}
    return [where[id(layer)] for layer in model.layers]


def choose(model: nn.Module, keys: list[str] | None, num_layers: int) -> tuple[list, list]:
    """(paths to adapt, keys as mlx-lm spells them) for the last `num_layers` blocks, -1 for all.

    A key is a layer's name (`q_proj`), its path in a block (`self_attn.q_proj`), a full path
    outside the blocks (`lm_head`, `embed_tokens`), or a glob of any of these. Without keys: every
    linear layer of the blocks, experts too, but no router.

    Raises:
        UserError: a key that matches nothing, with what does exist.
    """
    blocks = block_prefixes(model)
    if num_layers not in (-1, *range(1, len(blocks) + 1)):
        raise UserError(f"num_layers: got {num_layers}, wanted -1 for all or 1 to {len(blocks)}")
    inside, outside, linear = {}, {}, set()
    for path, module in model.named_modules():
        holder = next((b for b in blocks if path.startswith(b + ".")), None)
        if "weight" in module and module.weight.ndim >= 2 or isinstance(module, AdaptedLinear):
            relative = path[len(holder) + 1 :] if holder else path
            (inside if holder else outside)[path] = relative
            kind = None if path.endswith(ROUTERS) else adapter_for(module)
            if holder and kind not in (None, AdaptedEmbedding):
                linear.add(relative)
    chosen = set(blocks[-num_layers:] if num_layers > 0 else blocks)
    candidates = {p: r for p, r in inside.items() if p[: -len(r) - 1] in chosen} | outside
    if keys is None:
        paths = [p for p, r in candidates.items() if p in inside and r in linear]
        return paths, sorted({candidates[p] for p in paths})

    def matches(key, relative):
        return fnmatchcase(relative, key) or fnmatchcase(relative, f"*.{key}")

    if lost := [k for k in keys if not any(matches(k, r) for r in candidates.values())]:
        have = ", ".join(sorted(set(candidates.values())))
        raise UserError(f"keys: {', '.join(lost)} match nothing in this model; it has: {have}")
    paths = [p for p, r in candidates.items() if any(matches(k, r) for k in keys)]
    return paths, sorted({candidates[p] for p in paths})


def adapt(
    model: nn.Module,
    rank: int = 8,
    scale: float = 20.0,
    dropout: float = 0.0,
    keys: list[str] | None = None,
    num_layers: int = -1,
    kind: str = "dora",
) -> list[str]:
    """Puts fresh adapters on a model's linear layers in place, all else frozen; returns their
    paths.

    Args:
        rank: R of lora_a (I, R) and lora_b (R, O).
        scale: s in W + s (AB)ᵀ, multiplied directly; PEFT's lora_alpha / r.
        keys: see `choose`.
        num_layers: how many blocks, from the last; -1 for all.
        kind: "dora" or "lora".

    Raises:
        UserError: nothing matches, or a layer cannot be adapted; the model is then untouched.
    """
    paths, _ = choose(model, keys, num_layers)
    wrap(model, paths, rank, scale, dropout, kind)
    return paths


def wrap(model: nn.Module, paths: list[str], rank, scale, dropout, kind) -> None:
    """Replaces the layers at `paths` by adapted ones; checks all of them before it changes any.

    `rank` and `scale` are one number each, or {path: number}.
    """
    if kind not in KINDS:
        raise UserError(f"kind: got {kind!r}, wanted {' or '.join(KINDS)}")
    ranks, scales = (v if isinstance(v, dict) else dict.fromkeys(paths, v) for v in (rank, scale))
    if paths and min(ranks.values()) < 1:
        raise UserError(f"rank: got {min(ranks.values())}, wanted at least 1")
    if not 0 <= dropout < 1:
        raise UserError(f"dropout: got {dropout}, wanted 0 <= dropout < 1")
    layers = dict(model.named_modules())
    if problems := [why for p in paths if (why := refuse(p, layers[p]))]:
        raise UserError("; ".join(problems[:4]))
    if not paths:
        raise UserError("no linear layer to adapt in this model")
    model.freeze()
    new = {p: adapter_for(layers[p])(layers[p], ranks[p], scales[p], dropout, kind) for p in paths}
    for path, layer in new.items():
        put(model, path, layer.train(model.training))


def put(model: nn.Module, path: str, layer: nn.Module) -> None:
    """Makes `layer` the module at `path`, whether a module, a list or a dict holds it."""
    *parents, name = path.split(".")
    for part in parents:
        model = model[int(part) if isinstance(model, list) else part]
    model[int(name) if isinstance(model, list) else name] = layer


def adapted(model: nn.Module) -> dict[str, AdaptedLinear]:
    return {p: m for p, m in model.named_modules() if isinstance(m, AdaptedLinear)}


def remove(model: nn.Module) -> None:
    """Puts the base layers back: the model's outputs are the base's again, exactly."""
    for path, layer in adapted(model).items():
        put(model, path, layer.linear)


# --- Adapter files --------------------------------------------------------------------------------


def fingerprint(config: dict) -> str:
    """Hash of what a config.json says of shapes: the same for every packing and dtype."""
    kept = (
        "model_type hidden_size num_hidden_layers intermediate_size num_attention_heads vocab_size "
        "num_key_value_heads head_dim rope_theta"
    ).split()
    found = [[k, v] for k in kept if (v := config.get(k)) is not None]
    text = json.dumps([[k, float(v) if isinstance(v, int) else v] for k, v in found])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sketch(layers: Iterable[nn.Module]) -> np.ndarray:
    """W[:4] v of each layer for a fixed random v: (layers, 4) float32 that tell two bases apart.

    The same weights packed differently give nearly the same numbers, other weights give others.
    """
    found = []
    for layer in layers:
        layer = getattr(layer, "linear", layer)
        parts = (t[0] if t.ndim == 3 else t for t in tensors(layer))  # of the first expert
        W = dense([t[:4] for t in parts], packing(layer), mx.float32)
        v = np.random.RandomState(0).standard_normal(W.shape[1]).astype(np.float32)
        found.append(np.pad(np.array(W @ mx.array(v)), (0, 4 - W.shape[0])))
    return np.stack(found)


def save_adapter(
    folder: Path,
    model: nn.Module,
    base: str = "",
    config: dict | None = None,
    data: str | None = None,
) -> None:
    """Writes adapters.safetensors (see `read_adapter`) and mlx-lm's adapter_config.json.

    Without adapted layers it writes whatever is trainable, as kind "full". `base` and `data` say
    what it was trained on, for those that come after.
    """
    layers = dict(sorted(adapted(model).items()))
    weights = {f"{p}.{k}": m[k] for p, m in layers.items() for k in LEAVES if k in m}
    weights = weights or dict(tree_flatten(model.trainable_parameters()))
    kind, parameters, more = "full", {"rank": None, "scale": None}, {"data": data}
    scales = {p: m.scale for p, m in layers.items()}
    for layer in layers.values():
        kind, parameters["dropout"] = layer.kind, layer.rate
    parameters["rank"] = common(rank_of(m.lora_a) for m in layers.values())
    parameters["scale"] = common(scales.values())
    if layers:
        numbers = np.round(sketch(layers.values()).astype(np.float64), 7)
        more["sketch"] = numbers.tolist()
        more["packing"] = [packing(m.linear) for m in layers.values()]
        if parameters["scale"] is None:
            more["scales"] = scales
    write_adapter(folder, model, weights, kind, parameters, base, config, more)


def write_adapter(
    folder: Path,
    model: nn.Module,
    weights: dict[str, mx.array],
    kind: str,
    parameters: dict,
    base: str = "",
    config: dict | None = None,
    more: dict | None = None,
) -> None:
    """`save_adapter` for tensors that are not on the model.

    `parameters` are rank, scale and dropout; `more` is metadata.
    """
    blocks, paths = block_prefixes(model), {n.rpartition(".")[0] for n in weights}

    def relative(path):
        return next((path[len(b) + 1 :] for b in blocks if path.startswith(b + ".")), path)

    parameters = {"dropout": 0.0, "keys": None} | parameters
    if kind != "full":
        parameters["keys"] = sorted({relative(p) for p in paths})
    first = [i for i, b in enumerate(blocks) if any(n.startswith(b + ".") for n in weights)]
    num_layers = len(blocks) - min(first, default=0)
    metadata = {"format": FORMAT, "version": str(VERSION), "base": str(base), "kind": kind}
    metadata |= {k: json.dumps(v) for k, v in (parameters | (more or {})).items()}
    metadata["num_layers"] = str(num_layers)
    metadata["fingerprint"] = fingerprint(config) if config else ""
    mx.save_safetensors(str(Path(folder) / "adapters.safetensors"), weights, metadata)
    settings = {"fine_tune_type": kind, "num_layers": num_layers, "model": str(base)}
    if kind != "full":
        settings["lora_parameters"] = parameters
    (Path(folder) / "adapter_config.json").write_text(json.dumps(settings, indent=2))


def common(values):
    """What all of them are, or None where they differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def adapter_file(path: str | Path) -> Path:
    """The file that `path` means: itself, or the one of this name or of PEFT's in the folder."""
    file = Path(path).expanduser()
    if file.is_dir():
        both = file / "adapters.safetensors", file / PEFT_FILE
        file = both[1] if both[1].exists() and not both[0].exists() else both[0]
    return file


def read_adapter(path: str) -> tuple[dict[str, mx.array], dict]:
    """Tensors and settings of an adapter file, or of the adapters.safetensors in a folder.

    The file's own metadata is enough; without it (files of mlx-lm and PEFT) adapter_config.json
    beside it is needed. Settings: kind, rank, scale, dropout, keys, num_layers, base, and, from
    metadata, fingerprint, packing, sketch, data. Where layers differ in rank or scale those are
    None; "scales" has the latter by layer.

    Raises:
        UserError: missing, damaged, of another format version, or not what its settings say.
    """
    from safetensors import SafetensorError, safe_open

    file = adapter_file(path)
    if not file.is_file():
        raise UserError(f"{path}: no such adapter; wanted an adapters.safetensors or its folder")
    try:
        with safe_open(str(file), "np") as opened:
            meta = opened.metadata() or {}
        weights = mx.load(str(file), format="safetensors")
    except (SafetensorError, RuntimeError) as error:
        raise UserError(f"{file}: damaged or cut short: {error}") from None
    if meta.get("format") == FORMAT:
        if meta.get("version") != str(VERSION):
            got = meta.get("version")
            raise UserError(f"{file}: adapter format version {got}, this program reads {VERSION}")
        try:
            settings = {k: meta[k] for k in ("base", "kind", "fingerprint")}
            wanted = ("rank", "scale", "dropout", "keys", "num_layers")
            more = ("packing", "sketch", "scales", "data")
            for key in (*wanted, *(k for k in more if k in meta)):
                settings[key] = json.loads(meta[key])
        except (KeyError, ValueError) as error:
            raise UserError(f"{file}: its metadata is damaged: {error!r}") from None
        if settings["kind"] not in (*KINDS, "full"):
            raise UserError(f"{file}: kind {settings['kind']!r}, wanted dora or lora, or full")
    else:
        beside = file.parent / "adapter_config.json"
        if not beside.exists():
            raise UserError(f"{file}: no mlx-dora metadata in it, no adapter_config.json beside it")
        try:
            config = dict(json.loads(beside.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise UserError(f"{beside}: wanted one JSON object: {error}") from None
        if "peft_type" in config:
            weights, settings = from_peft(file, weights, config)
        else:
            settings = mlx_lm_settings(beside, config)
    check_tensors(file, weights, settings)
    return weights, settings


def mlx_lm_settings(beside: Path, config: dict) -> dict:
    """Settings from the adapter_config.json that mlx-lm writes beside the weights."""
    kind, given = config.get("fine_tune_type", "lora"), config.get("lora_parameters")
    if kind not in (*KINDS, "full"):
        raise UserError(f"{beside}: fine_tune_type {kind!r}, wanted {' or '.join(KINDS)}, or full")
    given = {"scale": None} if kind == "full" else given
    if not isinstance(given, dict) or "scale" not in given:
        got = sorted(config)
        raise UserError(f"{beside}: wanted lora_parameters with rank and scale; got {got}")
    settings = {"kind": kind, "base": config.get("model", ""), "dropout": given.get("dropout", 0.0)}
    settings |= {k: given.get(k) for k in ("rank", "scale", "keys")}
    return settings | {"num_layers": config.get("num_layers")}


def rank_of(lora_a: mx.array) -> int:
    """R of lora_a (I, R), or (E, R, I) of experts."""
    return lora_a.shape[1]


def check_tensors(file: Path, weights: dict, settings: dict) -> None:
    """Every layer has what its kind needs, finite, and of the rank that the settings say."""
    if settings["kind"] == "full" and weights:
        return
    wanted = set(LEAVES) if settings["kind"] == "dora" else set(LEAVES) - {"m"}
    layers, problems = {}, []
    for name, array in weights.items():
        path, _, leaf = name.rpartition(".")
        layers.setdefault(path, {})[leaf] = array
    for path, leaves in layers.items():
        if missing := wanted - set(leaves):
            problems.append(f"{path} lacks {', '.join(sorted(missing))}")
        elif extra := set(leaves) - wanted:
            problems.append(f"{path} has {', '.join(sorted(extra))}")
        elif {a.ndim + (k == "m") for k, a in leaves.items()} not in ({2}, {3}):
            shapes = ", ".join(f"{k} {a.shape}" for k, a in leaves.items())
            problems.append(f"{path} is not of a linear layer: {shapes}")
        elif settings["rank"] not in (None, rank_of(leaves["lora_a"])):
            problems.append(f"{path} has rank {rank_of(leaves['lora_a'])}, not {settings['rank']}")
        elif odd := [k for k, a in leaves.items() if not mx.isfinite(a).all().item()]:
            problems.append(f"{path}.{odd[0]} is not finite")
    if problems or not layers:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"{file}: its settings say {settings['kind']} of rank {settings['rank']}, but "
            + ("it holds no tensors" if not layers else "; ".join(problems[:3]) + more)
        )


def load_adapter(
    model: nn.Module,
    path: str,
    config: dict | None = None,
    force: bool = False,
    here: str = "this model",
) -> dict:
    """Puts the adapter at `path` on `model`, called `here` in messages; returns its settings.

    The file's tensors say which layers. With `config` (the model's), and the fingerprint and
    sketch the file has, the base is checked: other weights are an error unless `force`, another
    packing of the same weights a warning.
    """
    weights, settings = read_adapter(path)
    if settings["kind"] == "full":
        return load_full(model, path, weights, settings)
    paths = matching(model, path, weights)
    if "sketch" in settings and not force:
        if said := check_base(dict(model.named_modules()), path, paths, settings, config, here):
            print(said, file=sys.stderr)
    ranks = {p: rank_of(weights[f"{p}.lora_a"]) for p in paths}
    scale = settings.get("scales") or settings["scale"]
    wrap(model, paths, ranks, scale, settings["dropout"], settings["kind"])
    new = dict(model.named_modules())
    for name, array in weights.items():
        p, _, leaf = name.rpartition(".")
        setattr(new[p], leaf, array.astype(mx.float32))
    model.eval()
    if all(changes_nothing(new[p]) for p in paths):
        print(f"{path}: every lora_b is zero: this adapter changes nothing", file=sys.stderr)
    return settings


def matching(model: nn.Module, path: str, weights: dict[str, mx.array]) -> list[str]:
    """The layers that an adapter's tensors are of, in order; UserError if this model has others."""
    layers = dict(model.named_modules())
    paths = sorted({name.rpartition(".")[0] for name in weights})
    if lost := [p for p in paths if p not in layers]:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise UserError(f"{path}: for another model: this one has no {', '.join(lost[:3])}{more}")
    problems = []
    for p in paths:
        if why := refuse(p, layers[p]):
            raise UserError(f"{path}: {why}")
        shapes = adapter_for(layers[p]).shapes(layers[p], rank_of(weights[f"{p}.lora_a"]))
        for leaf, shape in shapes.items():
            if (array := weights.get(f"{p}.{leaf}")) is not None and array.shape != shape:
                problems.append(f"  {p}.{leaf}: got {array.shape}, wanted {shape}")
    if problems:
        raise UserError(f"{path}: for another model, shapes differ:\n" + "\n".join(problems))
    return paths


PEFT_FILE, PEFT_PREFIX = "adapter_model.safetensors", "base_model.model."
MOVES_BASE = "pissa", "olora", "corda", "loftq"
PEFT_LEAVES = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "m"}


def from_peft(file: Path, weights: dict, config: dict) -> tuple[dict[str, mx.array], dict]:
    """PEFT's tensors and adapter_config.json as ours.

    There A is (R, I) and B (O, R), and the scale is alpha / R, or alpha / √R with use_rslora; both
    may differ by layer (rank_pattern, alpha_pattern: regular expressions of the end of a path).

    Raises:
        UserError: names the setting or tensor that has no counterpart here.
    """
    fine = {"peft_type": "LORA", "bias": "none", "fan_in_fan_out": False, "lora_bias": False}
    fine |= dict.fromkeys(("modules_to_save", "layer_replication", "megatron_config"))
    fine |= dict.fromkeys(("target_parameters", "trainable_token_indices", "exclude_modules"))
    fine |= dict.fromkeys(("alora_invocation_tokens", "use_qalora", "use_bdlora"), False)
    for key, value in fine.items():
        if config.get(key, value) not in (value, None, [], {}):
            raise UserError(f"{file}: PEFT's {key} = {config[key]!r} has no counterpart here")
    moved = str(config.get("init_lora_weights")).lower().startswith(MOVES_BASE)
    if moved:  # such an adapter is of a base that PEFT has changed as well
        got = config["init_lora_weights"]
        raise UserError(f"{file}: init_lora_weights {got!r}: have PEFT save it as plain LoRA first")
    found, scales = {}, {}
    for name, array in weights.items():
        if name.endswith(".base_layer.weight"):
            continue  # an adapted head's own weight, which PEFT saves along
        parts = name.removeprefix(PEFT_PREFIX).split(".")
        at = next((i for i, part in enumerate(parts) if part in PEFT_LEAVES), None)
        if not name.startswith(PEFT_PREFIX) or not at or parts[at + 1 :] not in ([], ["weight"]):
            raise UserError(f"{file}: tensor {name} is not of a linear layer's LoRA or DoRA")
        leaf = PEFT_LEAVES[parts[at]]
        found[".".join([*parts[:at], leaf])] = array if leaf == "m" else array.T
    for name, array in found.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "lora_a":
            R = array.shape[-1]
            wanted = peft_pattern(config.get("rank_pattern"), path, config.get("r"))
            if wanted != R:
                raise UserError(f"{file}: {path} has rank {R}, adapter_config.json says {wanted}")
            alpha = peft_pattern(config.get("alpha_pattern"), path, config.get("lora_alpha"))
            if not isinstance(alpha, int | float):
                raise UserError(f"{file}: lora_alpha of {path}: got {alpha!r}, wanted a number")
            scales[path] = alpha / (math.sqrt(R) if config.get("use_rslora") else R)
    ranks = (a.shape[-1] for n, a in found.items() if n.endswith(".lora_a"))
    settings = {"kind": "dora" if config.get("use_dora") else "lora", "keys": None}
    settings |= {"base": config.get("base_model_name_or_path") or "", "rank": common(ranks)}
    settings |= {"scale": common(scales.values()), "dropout": config.get("lora_dropout") or 0.0}
    return found, settings | {"scales": scales, "num_layers": None, "fingerprint": ""}


def peft_pattern(pattern: dict | None, path: str, otherwise):
    """What rank_pattern or alpha_pattern says of a path."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return otherwise


def save_peft(folder: Path, weights: dict[str, mx.array], settings: dict) -> None:
    """Writes an adapter, as `read_adapter` returns it, as a folder that PEFT loads."""
    paths = sorted({n.rpartition(".")[0] for n in weights})
    if settings["kind"] == "full":
        raise UserError("an adapter of kind full holds whole weights; PEFT has no form for it")
    odd = [p for p in paths if weights[f"{p}.lora_a"].ndim == 3 or p.endswith("embed_tokens")]
    if odd:
        raise UserError(f"--to peft is for linear layers; {odd[0]} is an embedding or of experts")
    ranks = {p: weights[f"{p}.lora_a"].shape[-1] for p in paths}
    scales = settings.get("scales") or dict.fromkeys(paths, settings["scale"])
    alphas = {p: peft_alpha(scales[p], ranks[p]) for p in paths}
    R, alpha = (max(d.values(), key=list(d.values()).count) for d in (ranks, alphas))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": settings["base"] or None,
        "r": R,
        "lora_alpha": alpha,
        "lora_dropout": settings["dropout"],
        "use_dora": settings["kind"] == "dora",
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": paths,
        "rank_pattern": {p: r for p, r in ranks.items() if r != R},
        "alpha_pattern": {p: a for p, a in alphas.items() if a != alpha},
    }
    back = {v: k for k, v in PEFT_LEAVES.items()}
    tensors = {}
    for name, array in weights.items():
        path, _, leaf = name.rpartition(".")
        end = "" if leaf == "m" else ".weight"
        array = array if leaf == "m" else mx.contiguous(array.T)
        tensors[f"{PEFT_PREFIX}{path}.{back[leaf]}{end}"] = array
    mx.save_safetensors(str(Path(folder) / PEFT_FILE), tensors, {"format": "pt"})
    (Path(folder) / "adapter_config.json").write_text(json.dumps(config, indent=2))


def peft_alpha(scale: float, rank: int) -> float:
    """The alpha whose quotient by the rank is exactly this scale."""
    alpha = scale * rank
    near = (alpha, math.nextafter(alpha, math.inf), math.nextafter(alpha, -math.inf))
    alpha = next((a for a in near if a / rank == scale), alpha)
    return int(alpha) if alpha == int(alpha) else alpha


def changes_nothing(layer: AdaptedLinear) -> bool:
    """Whether the low-rank part is zero and the magnitudes are the base's own."""
    fresh = layer.kind == "lora" or mx.allclose(layer.m, mx.sqrt(layer._square), 1e-5).item()
    return fresh and not mx.any(layer.lora_b).item()


def load_full(model: nn.Module, path: str, weights: dict, settings: dict) -> dict:
    """Puts fully fine-tuned weights in place of the model's own."""
    mine = dict(tree_flatten(model.parameters()))
    problems = [
        f"  {k}: got {a.shape}, wanted {mine[k].shape if k in mine else 'no such parameter'}"
        for k, a in weights.items()
        if k not in mine or mine[k].shape != a.shape
    ]
    if problems:
        raise UserError(f"{path}: for another model:\n" + "\n".join(problems))
    model.update(tree_unflatten([(k, a.astype(mine[k].dtype)) for k, a in weights.items()]))
    return settings


def check_base(
    layers: dict, path: str, paths: list[str], settings: dict, config: dict | None, here: str
) -> str | None:
    """Compares the base an adapter was trained on with the one at hand; returns a warning or None.

    Args:
        layers: of the base by path; all of them, or some.
        paths: all layers of the adapter, in order, as `matching` gives them.
        here: what to call the one at hand.

    Raises:
        UserError: other weights, or another config. The same packed differently is a warning.
    """
    base = f"the base it was trained on ({settings['base'] or 'unnamed'})"
    if config and settings["fingerprint"] not in ("", fingerprint(config)):
        raise UserError(f"{path}: config.json of {here} differs from that of {base}")
    then, how = np.array(settings["sketch"], np.float32), settings["packing"]
    if len(then) != len(paths):
        raise UserError(f"{path}: its metadata describes {len(then)} layers, it has {len(paths)}")
    there = [i for i, p in enumerate(paths) if p in layers]
    now, then = sketch(layers[paths[i]] for i in there), then[there]
    apart = float(np.linalg.norm(now - then) / max(np.linalg.norm(then), 1e-30))
    same = all(list(packing(layers[paths[i]]) or ()) == (how[i] or []) for i in there)
    if apart > 0.5 or (same and apart > 1e-3):
        raise UserError(
            f"{path}: the weights of {here} differ from {base} by {apart:.1%}; use that base, or "
            "force it"
        )
    if apart > 1e-3:
        return f"{path}: warning: {here} is {base} packed differently ({apart:.1%} apart)"


# --- Commands -------------------------------------------------------------------------------------


def info(adapter: str) -> None:
    """Prints what an adapter file holds."""
    weights, settings = read_adapter(adapter)
    count = sum(a.size for a in weights.values())
    paths = list(dict.fromkeys(name.rpartition(".")[0] for name in weights))
    full, low_rank = "full weights", "{kind} of rank {rank}, scale {scale}, dropout {dropout}"
    print((full if settings["kind"] == "full" else low_rank).format(**settings))
    print(f"base    {settings['base'] or 'not named'}")
    print(f"layers  {len(paths)}: {', '.join(sorted({p.split('.')[-1] for p in paths}))}")
    print(f"weights {count / 1e6:.3f} M, {sum(a.nbytes for a in weights.values()) / 1e6:.1f} MB")
    if settings["kind"] != "full":
        largest = max(mx.abs(a).max().item() for n, a in weights.items() if n.endswith("lora_b"))
        zero = "" if largest else ": the low-rank part changes nothing"
        print(f"largest lora_b entry {largest:.3g}{zero}")


def reference(x, W, A, B, m, s, cotangent) -> dict[str, np.ndarray]:
    """Output and gradients in float64 NumPy, by the paper's formula, n held constant."""
    x, W, A, B, m, c = (
        np.array(a.astype(mx.float32), np.float64) for a in (x, W, A, B, m, cotangent)
    )
    adapted = W + s * (A @ B).T
    n = np.linalg.norm(adapted, axis=1)
    u, du = x @ adapted.T, c * (m / n)
    grads = {"dx": du @ adapted, "da": s * x.T @ (du @ B.T), "db": s * (x @ A).T @ du}
    return {"out": u * (m / n), **grads, "dm": (c * u).sum(0) / n, "norm": n}


def naive(x, W, A, B, m, s):
    """The textbook layer in x's dtype throughout: dense W, dense W + s (AB)ᵀ, its row norms."""
    A, B, m = (a.astype(x.dtype) for a in (A, B, m))
    n = mx.stop_gradient(mx.linalg.norm(W + (s * B.T) @ A.T, axis=1))
    return (m / n) * (x @ W.T + s * ((x @ A) @ B))


def check_case(how: tuple | None, dtype: mx.Dtype, tokens: int, R: int, O=387, I=640) -> tuple:
    """(routes in training and evaluation, {quantity: (error of the layer, of `naive`)}); errors
    against float64, relative in the 2-norm. Sizes are off every kernel's tile.
    """
    linear = nn.Linear(I, O, bias=False)
    linear.weight = (mx.random.normal((O, I)) / 16).astype(dtype)
    linear = nn.QuantizedLinear.from_linear(linear, *how) if how else linear
    layer = AdaptedLinear(linear, R, 2.0, 0.0, "dora")
    layer.lora_b = mx.random.normal((R, O)) / 16
    layer.m = layer.m * mx.random.uniform(0.5, 2.0, (O,))
    x, cotangent = (mx.random.normal((tokens, d)).astype(dtype) for d in (I, O))
    W = dense(tensors(linear), how, mx.float32)
    exact = reference(x, W, layer.lora_a, layer.lora_b, layer.m, layer.scale, cotangent)

    def fast(x, A, B, m):
        layer.update({"lora_a": A, "lora_b": B, "m": m})
        return layer(x)

    primals = [x, layer.lora_a, layer.lora_b, layer.m]
    Wd = W.astype(dtype)
    found = []
    for f in (fast, lambda x, A, B, m: naive(x, Wd, A, B, m, layer.scale)):
        (out,), grads = mx.vjp(f, primals, [cotangent])
        found.append(dict(zip(("out", "dx", "da", "db", "dm"), [out, *grads], strict=True)))
    layer.update(dict(zip(("lora_a", "lora_b", "m"), primals[1:], strict=True)))
    routes = [route(layer, tokens, dtype)]
    layer.eval()
    routes.append(route(layer, tokens, dtype))
    found[0]["eval"], found[1]["eval"], exact["eval"] = layer(x), found[1]["out"], exact["out"]
    found[0]["norm"] = layer.norm()
    found[1]["norm"] = mx.linalg.norm(W + 2.0 * (layer.lora_a @ layer.lora_b).T, axis=1)

    def error(got, want):
        got = np.array(got.astype(mx.float32), np.float64)
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))

    return routes, {k: (error(found[0][k], v), error(found[1][k], v)) for k, v in exact.items()}


def cancelled_norm(R: int = 8, O: int = 64, I: int = 512) -> tuple[float, float]:
    """Errors of `norm` and of the dense float32 norm where sBᵀAᵀ = -W but for one part in 10⁴."""
    linear = nn.Linear(I, O, bias=False)
    A, B = mx.random.normal((I, R)), mx.random.normal((R, O))
    linear.weight = -2.0 * (A @ B).T + mx.random.normal((O, I)) * 1e-4
    layer = AdaptedLinear(linear, R, 2.0, 0.0, "dora")
    layer.lora_a, layer.lora_b = A, B
    W, A64, B64 = (np.array(t, np.float64) for t in (linear.weight, A, B))
    exact = np.linalg.norm(W + 2.0 * (A64 @ B64).T, axis=1)
    plain = mx.linalg.norm(linear.weight + 2.0 * (B.T @ A.T), axis=1)
    return tuple(float(np.abs(np.array(n) / exact - 1).max()) for n in (layer.norm(), plain))


def check(only: str = "*", seed: int = 0) -> None:
    """Every packing, dtype and path on this device against float64; exit 1 if one fails.

    `only` is a glob over the names of the packings, such as "affine 4b*": on CUDA the first run
    compiles for some seconds each. A figure is the relative error in the 2-norm; it may be twice
    that of the textbook layer in the same dtype, and 3e-6 more in float32 and for the norm, where
    both are down to the order of summation. `path` is `route`'s choice in training and evaluation;
    DORA_KERNELS=0 checks the paths without kernels.
    """
    mx.random.seed(seed)
    affine = [(g, b, "affine") for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128)]
    modes = [None, *affine, (32, 4, "mxfp4"), (32, 8, "mxfp8"), (16, 4, "nvfp4")]
    kernels = {"cu": "CUDA", "metal": "Metal", None: "none"}[language()]
    print(f"{mx.default_device()}, mlx {mx.__version__}, kernels: {kernels}")
    heads = "".join(f"{k:>18}" for k in QUANTITIES)
    print(f"{'packing':<16}{'dtype':<9}{'tokens':>6}{'R':>4}  {'path':<17}{heads}")
    failed, ranks = 0, (1, 8, 13, 64)
    for i, how in enumerate(modes):
        name = "dense" if how is None else f"{how[2]} {how[1]}b g{how[0]}"
        if not fnmatchcase(name, only):
            continue
        for j, dtype in enumerate((mx.float32, mx.bfloat16, mx.float16)):
            R = ranks[(i + j) % 4]
            for tokens in (4, 256) if R == 1 else (1, 4, 256):  # of rank 1 dA would be one number
                routes, errors = check_case(how, dtype, tokens, R)
                row = ""
                for key in QUANTITIES:
                    ours, theirs = errors[key]
                    floor = 3e-6 if dtype == mx.float32 or key == "norm" else 0
                    bad = not ours <= 2 * theirs + floor
                    failed += bad
                    row += f"{ours:>9.1e}/{theirs:.1e}{'!' if bad else ' '}"
                path = "/".join(routes)
                print(
                    f"{name:<16}{str(dtype)[9:]:<9}{tokens:>6}{R:>4}  {path:<17}{row}", flush=True
                )
    ours, theirs = cancelled_norm()
    bad = language() is not None and not ours <= 2 * theirs + 1e-6
    said = "!" if bad else "" if language() else "  (the factored norm, which cannot do better)"
    print(f"norm where the adapter cancels the weight {ours:.1e}/{theirs:.1e}{said}")
    failed += bad
    print(f"{failed} failed; error of the layer / of the textbook layer")
    sys.exit(1 if failed else 0)


QWEN3_8B = {(4096, 4096): 2, (1024, 4096): 2, (12288, 4096): 2, (4096, 12288): 1}  # (O, I): count


def bench(rank: int = 8, bits: int = 4, dtype: str = "bfloat16", tokens: int = 4096) -> None:
    """Times the linear layers of a Qwen3-8B block: base, DoRA here and, if installed, mlx-lm's.

    Milliseconds for the seven layers together, group size 64. Evaluation of 1 and of 8 tokens and
    the row norms alone: twenty calls in one graph, as layers follow each other in a model.
    Training: forward and backward of `tokens` tokens, compiled. Medians of 9 after 3 to warm up,
    in turns, so that a busy machine slows all alike.
    """
    kind = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}.get(dtype)
    if kind is None:
        raise UserError(f"--dtype: got {dtype!r}, wanted float32, float16 or bfloat16")
    total = {}
    for (O, I), count in QWEN3_8B.items():
        for column, calls, functions in contest(O, I, rank, bits, kind, tokens):
            for side, ms in timed(functions).items():
                total[side, column] = total.get((side, column), 0.0) + count * ms / calls
        mx.clear_cache()
    columns = list(dict.fromkeys(c for _, c in total))
    print(f"{bits}-bit, rank {rank}, {dtype}, {mx.default_device()}, mlx {mx.__version__}")
    print("| ms | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for side in dict.fromkeys(s for s, _ in total):
        cells = (f"{total[side, c]:.3f}" if (side, c) in total else "" for c in columns)
        print(f"| {side} | " + " | ".join(cells) + " |")


def contest(O: int, I: int, rank: int, bits: int, dtype: mx.Dtype, tokens: int):
    """Yields (column of `bench`, calls per run, {side: function to time}) for one layer."""
    linear = nn.Linear(I, O, bias=False)
    linear.weight = linear.weight.astype(dtype)
    linear = nn.QuantizedLinear.from_linear(linear, 64, bits).freeze()
    ours = AdaptedLinear(linear, rank, 20.0, 0.0, "dora")
    ours.lora_b = mx.random.normal(ours.lora_b.shape) / 1000
    sides = {"base": linear, "DoRA, here": ours}
    try:
        from mlx_lm.tuner.dora import DoRALinear
        from mlx_lm.tuner.lora import LoRALinear

        for kind, layer in (("DoRA", DoRALinear), ("LoRA", LoRALinear)):
            sides[f"{kind}, mlx-lm"] = layer.from_base(linear, r=rank, scale=20.0)
    except ImportError:
        print("mlx-lm is not installed: without its layers", file=sys.stderr)
    xs = {n: mx.random.normal((1, n, I)).astype(dtype) for n in (1, 8, tokens)}
    mx.eval(xs, [side.eval().parameters() for side in sides.values()])
    for n, name in ((1, "1 token"), (8, "8 tokens")):
        calls = {k: lambda f=f, x=xs[n]: [f(x) for _ in range(20)] for k, f in sides.items()}
        yield name, 20, calls
    yield "norm", 20, {"DoRA, here": lambda: [ours.norm() for _ in range(20)]}
    steps = {k: training_step(side.train(), xs[tokens]) for k, side in sides.items()}
    yield "training", 1, steps


def training_step(layer: nn.Module, x: mx.array) -> Callable:
    """A compiled forward and backward of sum(layer(x)) in x and the trainable parameters."""
    names, leaves = zip(*tree_flatten(layer.parameters()), strict=True)

    def loss(x, *leaves):
        layer.update(tree_unflatten(list(zip(names, leaves, strict=True))))
        return layer(x).sum()

    wanted = [0, *(i + 1 for i, name in enumerate(names) if name in LEAVES)]
    step = mx.compile(mx.value_and_grad(loss, wanted))
    return lambda: step(x, *leaves)


def timed(functions: dict[str, Callable]) -> dict[str, float]:
    """Median milliseconds of each function, run in turns."""
    times = {k: [] for k in functions}
    for n in range(12):
        for k, f in functions.items():
            start = time.perf_counter()
            mx.eval(f())
            if n >= 3:
                times[k].append((time.perf_counter() - start) * 1e3)
    return {k: sorted(t)[len(t) // 2] for k, t in times.items()}


if __name__ == "__main__":
    cli({f.__name__: f for f in (info, check, bench)})
