"""The GPU kernels of dora.py (kernels/), without a GPU.

The Metal text is run on the CPU by tests/msl, exactly as MLX would hand it to Apple's compiler, and
held to float64 NumPy; its check mode says what is out of bounds, raced for or never written. The
CUDA text is compiled by NVRTC, as MLX would call it, and no more than that: what runs it is
`dora.py check` on a GPU.

The oracle is independent of dora.py and of mx.dequantize: `weight64` decodes packed weights from
the definition of the formats. A result may be off by one rounding to its type, and beyond that by
float32's own summation (`SUMS`). Edited kernels (`MUTANTS`) show that all this can fail.
"""

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import msl
import numpy as np
import pytest
from conftest import ROOT

import dora
import quant

SKIP = msl.skip_reason()
metal = pytest.mark.skipif(bool(SKIP), reason=SKIP or "")

F32, F16, BF16 = DTYPES = (mx.float32, mx.float16, mx.bfloat16)
AFFINE = [(g, b, "affine") for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128)]
MXFP4, MXFP8, NVFP4 = MODES = [(32, 4, "mxfp4"), (32, 8, "mxfp8"), (16, 4, "nvfp4")]
ONE_OF_EACH = [*((32, b, "affine") for b in (2, 3, 4, 5, 6, 8)), *MODES, None]
AFFINE4 = (32, 4, "affine")
SUMS = 4e-7  # of the sum of the terms' magnitudes: what float32 sums may be off by
ROUNDING = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}
SCHEDULES = {
    f"{schedule}-{order}": dict(schedule=schedule, order=order, seed=5)
    for schedule in ("deep", "round")
    for order in ("natural", "reversed", "shuffled")
}
CHECKED = {f"check-{name}": {"mode": "check"} | options for name, options in SCHEDULES.items()}
READINGS = {  # of the arithmetic
    "ftz": dict(ftz=True),
    "contract": dict(contract=True),
    "fast-math": dict(fast_math=True, fast_ulps=4),
}


def name_of(value):
    if isinstance(value, mx.Dtype):
        return str(value).rpartition(".")[2]
    return "dense" if value is None else "-".join(map(str, value)) if type(value) is tuple else None


@pytest.fixture(autouse=True)
def seeded():
    mx.random.seed(0)


@pytest.fixture(scope="module", autouse=True)
def second_core(request):
    """Most of the time is clang's, and its results are kept on disk: for a whole run of this file,
    a second process compiles what comes later (`ahead`)."""
    quick = [i for i in request.session.items if i.get_closest_marker("slow") is None]
    if SKIP or sum(i.path.samefile(__file__) for i in quick) < 100 or os.cpu_count() < 2:
        yield
        return
    code = "import test_kernels; test_kernels.ahead()"
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=ROOT / "tests", stderr=subprocess.DEVNULL)
    yield
    process.kill()
    process.wait()


def ahead() -> None:
    for case in reversed(COVERING):
        with on_metal():
            check_layer(case)
    for how in ONE_OF_EACH:
        with on_metal(mode="check"):
            exact_results(how)
    for mutant in MUTANTS:
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(msl.KernelError):
            with on_metal(edited(mutant, Path(folder)), mode="check"):
                PROBES[mutant.probe]()


def forget() -> None:
    """Whatever dora.py caches, emulated kernels among it."""
    for value in vars(dora).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@contextlib.contextmanager
def language(name: str | None, folder: Path | None = None):
    """dora.py taking the device for one of this language, with the kernels of `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dora, "language", lambda: name)
        if folder:
            patch.setattr(dora, "kernel_folder", lambda: folder)
        forget()
        try:
            yield patch
        finally:
            forget()


@contextlib.contextmanager
def on_metal(folder: Path | None = None, **options):
    """Metal kernels run on the CPU; yields a list that receives the harness's results."""
    with language("metal", folder), msl.emulate(msl.Options(**options)) as runs:
        yield runs


# --- The oracle -----------------------------------------------------------------------------------


def numbers(a) -> np.ndarray:
    return np.array(a.astype(F32), np.float64) if isinstance(a, mx.array) else np.float64(a)


def e4m3(codes) -> np.ndarray:
    exponent, fraction = codes >> 3 & 15, codes & 7
    value = np.where(exponent, (8 + fraction) * 2.0 ** (exponent - 10.0), fraction * 2.0**-9)
    value = np.where(codes & 127 == 127, np.nan, value)
    return np.where(codes & 128, -value, value)


def e8m0(codes) -> np.ndarray:
    return np.where(codes == 255, np.nan, 2.0 ** (codes - 127.0))


def weight64(linear: nn.Module) -> np.ndarray:
    """The weight (O, I), by the definition of its packing."""
    if "scales" not in linear:
        return numbers(linear.weight)
    group, bits, mode = dora.packing(linear)
    raw = np.array(linear.weight).view(np.uint8)
    raw = np.unpackbits(raw, axis=1, bitorder="little").reshape(len(raw), -1, bits)
    codes = raw.astype(np.int64) @ (1 << np.arange(bits))  # (O, I)
    spread = functools.partial(np.repeat, repeats=group, axis=1)
    if mode == "affine":
        return codes * spread(numbers(linear.scales)) + spread(numbers(linear.biases))
    small = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = e4m3(codes) if bits == 8 else np.where(codes & 8, -1, 1) * small[codes & 7]
    scales = np.array(linear.scales, np.int64)
    return values * spread(e4m3(scales) if mode == "nvfp4" else e8m0(scales))


def apart(got, want) -> float:
    """Relative distance in the 2-norm."""
    got, want = numbers(got), numbers(want)
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-300))


def excess(got: mx.array, want: np.ndarray, terms: np.ndarray) -> float:
    """How far `got` is from `want` beyond one rounding to its type, relative to `terms`, the sum
    of the magnitudes."""
    assert got.shape == want.shape == terms.shape
    tiny = 2.0**-25 if got.dtype == F16 else 0  # half of its smallest denormal
    off = np.abs(numbers(got) - want) - ROUNDING[got.dtype] * np.abs(want) - tiny
    return float((off / terms).max())  # NaN stays NaN


# --- The kernels, one at a time -------------------------------------------------------------------


def make_linear(how, dtype, O: int, I: int, bias: bool = False) -> nn.Module:
    linear = nn.Linear(I, O, bias=bias)
    linear.weight = mx.random.normal((O, I)) / 4
    if bias:
        linear.bias = mx.random.normal((O,))
    linear.set_dtype(dtype)
    return nn.QuantizedLinear.from_linear(linear, *how) if how else linear


def norm_error(linear: nn.Module, R: int) -> float:
    """The largest relative error of a row norm."""
    O, I = linear.weight.shape[0], dora.width(linear)
    A, B = mx.random.normal((I, R)), mx.random.normal((R, O)) / 4
    got = dora.norm_kernel(dora.tensors(linear), dora.packing(linear), A, B)
    assert got.dtype == F32 and got.shape == (O,)
    want = np.linalg.norm(weight64(linear) + (numbers(A) @ numbers(B)).T, axis=1)
    return float(np.abs(numbers(got) / want - 1).max())


def decode(linear: nn.Module, x: mx.array, a: mx.array, b: mx.array) -> mx.array:
    """The kernel by itself: a (I, R) in x's dtype, b (R + 2, O)."""
    shape, how = (*x.shape[:-1], linear.weight.shape[0]), dora.packing(linear)
    run = dora.decode_kernel("metal", how, x.dtype, shape, a.shape[1])
    return run(x, a, b, *dora.tensors(linear))


def decode_want(linear, x, a, b) -> tuple[np.ndarray, np.ndarray]:
    """g (x Wᵀ) + h gsB + bias in float64 for the h = x A that the kernel gets; its terms' sum."""
    W, h, x, b = weight64(linear), numbers(x @ a), numbers(x), numbers(b)
    want = (x @ W.T) * b[-2] + h @ b[:-2] + b[-1]
    return want, np.abs(x) @ np.abs(W).T * np.abs(b[-2]) + np.abs(h) @ np.abs(b[:-2]) + abs(b[-1])


def decode_error(linear: nn.Module, R: int, shape: tuple, dtype=F32) -> float:
    O, I = linear.weight.shape[0], dora.width(linear)
    x, a = (mx.random.normal(s).astype(dtype) for s in ((*shape, I), (I, R)))
    b = mx.random.normal((R + 2, O))
    got = decode(linear, x, a, b)
    assert got.dtype == dtype
    return excess(got, *decode_want(linear, x, a, b))


def column_dot_error(L: int, O: int, dtype=F32) -> float:
    c, y = (mx.random.normal((L, O)).astype(dtype) for _ in "cy")
    got = dora.column_dot(c, y)
    assert got.dtype == F32
    c, y = numbers(c), numbers(y)
    return excess(got, (c * y).sum(0), np.abs(c * y).sum(0))


@metal
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("L, O", [(8, 8), (131, 300), (127, 33), (256, 256), (300, 1025)])
def test_column_dot(dtype, L, O):
    with on_metal() as runs:
        assert column_dot_error(L, O, dtype) < SUMS
        assert len(runs) == 1
        assert dora.column_dot(mx.ones((7, O)), mx.ones((7, O))).tolist() == [7] * O
        assert len(runs) == 1, "fewer than 8 rows are not for the kernel"


# --- Layers over packings, dtypes, ranks and shapes -----------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    how: tuple | None
    dtype: mx.Dtype
    R: int
    O: int
    I: int
    kind: str
    bias: bool
    shape: tuple  # of x, but for its last dimension

    def __str__(self):
        size = f"R{self.R}-{self.O}x{self.I}-{'x'.join(map(str, self.shape)) or 'vector'}"
        tail = f"{size}-{self.kind}{'-bias' if self.bias else ''}"
        return f"{name_of(self.how)}-{name_of(self.dtype)}-{tail}"


def turn(values, i: int):
    return values[i % len(values)]


SHAPES = [(), (2, 1), (3,), (2, 2), (5,), (2, 3), (1, 7), (8,), (1,), (2, 1, 1), (4, 2), (1, 1)]


def cases(hows: list, start: int = 0) -> list[Case]:
    """One case for each packing; everything else in turns that do not keep step with each other."""
    found = []
    for i, how in enumerate(hows, start):
        group = how and max(how[0], 32)  # mx.quantize wants O * I to be a multiple of 32 for nvfp4
        I = group * turn((3, 5, 1, 7), i) if how else turn((77, 301, 259), i)
        dtype, kind = turn(DTYPES, i + i // 3), turn(dora.KINDS, i // 4)
        R, O = turn((1, 8, 13, 64), i), turn((33, 8, 100, 37, 16), i)
        found.append(Case(how, dtype, R, O, I, kind, bool(i // 3 % 2), turn(SHAPES, i)))
    return found


COVERING = [
    *cases([*AFFINE, *MODES, None, None, None]),
    Case((64, 4, "affine"), BF16, 8, 2053, 1216, "dora", True, (2,)),  # SETS = 2; columns in turns
    Case((64, 4, "affine"), F16, 8, 8, 2368, "dora", True, (5,)),  # two strips for some lanes
    Case((32, 4, "mxfp4"), F32, 13, 2048, 32, "dora", False, (8,)),
]
PRODUCT = [
    c for s in range(4) for c in cases([*AFFINE, *MODES, None], 31 * s + 1) if c not in COVERING
]


def make_layer(case: Case) -> dora.AdaptedLinear:
    linear = make_linear(case.how, case.dtype, case.O, case.I, case.bias)
    layer = dora.AdaptedLinear(linear, case.R, 2.0, 0.0, case.kind)
    layer.lora_b = mx.random.normal(layer.lora_b.shape) / 8
    if case.kind == "dora":
        layer.m = layer.m * mx.random.uniform(0.5, 2.0, layer.m.shape)
    return layer.eval()


def layer64(layer: dora.AdaptedLinear) -> tuple[np.ndarray, ...]:
    """W + s(AB)ᵀ, its row norms, g, the bias."""
    s, A, B = layer.scale, numbers(layer.lora_a), numbers(layer.lora_b)
    V = weight64(layer.linear) + s * (A @ B).T
    n, bias = np.linalg.norm(V, axis=1), np.zeros(len(V))
    if "bias" in layer.linear:
        bias = numbers(layer.linear.bias)
    return V, n, numbers(layer.m) / n if layer.kind == "dora" else np.ones(len(V)), bias


def textbook(layer: dora.AdaptedLinear, x: mx.array) -> mx.array:
    """`dora.naive` and the bias, in x's dtype."""
    W = dora.dense(dora.tensors(layer.linear), dora.packing(layer.linear), x.dtype)
    A, B, s = layer.lora_a, layer.lora_b, layer.scale
    if layer.kind == "dora":
        out = dora.naive(x, W, A, B, layer.m, s)
    else:
        out = x @ W.T + s * ((x @ A.astype(x.dtype)) @ B.astype(x.dtype))
    return out + layer.linear.bias.astype(x.dtype) if "bias" in layer.linear else out


def check_layer(case: Case) -> None:
    """Norm and decode of a layer of this case against float64, and against the textbook."""
    layer, errors = make_layer(case), []
    V, n, g, bias = layer64(layer)
    if case.kind == "dora":
        got = layer.norm()
        assert got.dtype == F32 and np.abs(numbers(got) / n - 1).max() < SUMS, "norm"
    for _ in range(4 if case.O < 100 else 1):  # few outputs: several draws, lest the ratio be noise
        x = mx.random.normal((*case.shape, case.I)).astype(case.dtype)
        assert dora.route(layer, x.size // case.I, case.dtype) == "decode"
        out = layer(x)
        assert out.dtype == case.dtype and out.shape == (*case.shape, case.O)
        b = np.concatenate([layer.scale * numbers(layer.lora_b) * g, [g, bias]])
        a = layer.lora_a.astype(case.dtype)
        assert excess(out, *decode_want(layer.linear, x, a, b)) < SUMS, "decode"
        want = (numbers(x) @ V.T) * g + bias
        errors.append((apart(out, want), apart(textbook(layer, x), want)))
    ours, theirs = np.sqrt(np.square(errors).mean(0))
    assert ours <= 2 * theirs + (1e-6 if case.dtype == F32 else 0), "decode, against the textbook"


@metal
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_layers(case):
    with on_metal() as runs:
        check_layer(case)
        assert len(runs) > (case.kind == "dora")


@metal
@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCT, ids=str)
def test_layers_over_more_of_the_product(case):
    with on_metal():
        check_layer(case)


def test_the_cases_cover_what_they_should():
    for field, wanted in (
        ("how", {*AFFINE, *MODES, None}),
        ("dtype", set(DTYPES)),
        ("R", {1, 8, 13, 64}),
        ("kind", set(dora.KINDS)),
        ("bias", {True, False}),
    ):
        assert {getattr(c, field) for c in COVERING} == wanted, field
    assert {int(np.prod(c.shape)) for c in COVERING} == set(range(1, 9))
    for a, b in itertools.combinations(("dtype", "R", "kind", "bias"), 2):
        pairs = {(getattr(c, a), getattr(c, b)) for c in PRODUCT}
        assert len(pairs) == len({p for p, _ in pairs}) * len({q for _, q in pairs}), (a, b)


@metal
@pytest.mark.parametrize("how", [AFFINE4, None], ids=name_of)
def test_norm_of_rank_256(how):
    with on_metal():
        assert norm_error(make_linear(how, BF16, 45, 96), 256) < SUMS


@metal
@pytest.mark.parametrize("how, stored, dtype", [(AFFINE4, F32, BF16), (None, BF16, F32)])
def test_scales_and_weights_of_another_type_than_the_activations(how, stored, dtype):
    with on_metal():
        assert decode_error(make_linear(how, stored, 37, 96), 8, (3,), dtype) < SUMS


@metal
@pytest.mark.parametrize("how", MODES, ids=name_of)
def test_every_code_and_every_scale_comes_out_exactly(how):
    """One-hot tokens read single weights, over all codes times all scales."""
    group, bits, _ = how
    linear = make_linear(how, F32, 256, 2 * group)
    codes = (np.arange(256)[:, None] * 5 + np.arange(8)) % (1 << bits)
    bit = codes[:, :, None] >> np.arange(bits) & 1
    raw = np.zeros((256, 2 * group * bits // 8), np.uint8)
    raw[:, :bits] = np.packbits(bit.reshape(256, -1).astype(np.uint8), axis=1, bitorder="little")
    linear.weight = mx.array(raw.view(np.uint32))
    scale = np.full((256, 2), 56, np.uint8)
    scale[:, 0] = np.arange(256)
    linear.scales = mx.array(scale)
    b = mx.array(np.repeat([[0.0], [1.0], [0.0]], 256, axis=1).astype(np.float32))
    with on_metal():
        got = np.array(decode(linear, mx.eye(8, 2 * group), mx.zeros((2 * group, 1)), b))
    with np.errstate(over="ignore"):
        want = weight64(linear)[:, :8].T.astype(np.float32)
    bad = ~np.isfinite(want).all(0)  # 0 times NaN or Inf: all of that row
    assert np.array_equal(~np.isfinite(got).all(0), bad) and not np.isfinite(got[:, bad]).any()
    assert np.array_equal(got[:, ~bad], want[:, ~bad])
    assert np.isnan(want[:, 255]).all() and 0 < bad.sum() < 30


# --- Every schedule, every reading of the arithmetic, and the checker -----------------------------


def integers(low: int, high: int, *shape) -> np.ndarray:
    return np.array(mx.random.randint(low, high + 1, shape))


def exact_linear(how: tuple | None, O: int) -> nn.Module:
    """Weights whose sums and squares float32 holds exactly, so that no order matters."""
    I = 77 if how is None else 3 * how[0]
    linear = make_linear(how, F32, O, I)
    if how is None:
        linear.weight = mx.array(integers(-6, 6, O, I).astype(np.float32))
        return linear
    _, bits, mode = how
    codes = integers(0, (1 << min(bits, 4)) - 1, O, I)  # 5 bits and more: sums would not be exact
    codes = 48 + codes if mode == "mxfp8" else codes << bits - min(bits, 4)  # 48 is 0.5
    raw = np.packbits((codes[..., None] >> np.arange(bits) & 1).reshape(O, -1), 1, "little")
    linear.weight = mx.array(raw.astype(np.uint8).view(np.uint32))
    if mode == "affine":
        unit = 2.0 ** (min(bits, 4) - bits)
        linear.scales = mx.array(unit * 2.0 ** integers(-1, 0, O, 3)).astype(F32)
        linear.biases = mx.array(integers(-8, 0, O, 3)).astype(F32)
    else:
        one = (56, 48) if mode == "nvfp4" else (127, 126)  # 1 and 0.5
        linear.scales = mx.array(np.where(integers(0, 1, O, I // how[0]), *one).astype(np.uint8))
    return linear


def exact_results(how: tuple | None) -> list[tuple[mx.array, mx.array]]:
    """(got, want) of norm, decode and, at 4 bits, column_dot, on numbers kept exactly."""
    mx.random.seed(0)
    O, R, tokens = 38, 3, 2 + ONE_OF_EACH.index(how) % 6
    linear = exact_linear(how, O)
    W, I = weight64(linear), dora.width(linear)
    A, B, x = (mx.array(integers(-1, 1, *s)).astype(F32) for s in ((I, R), (R, O), (tokens, I)))
    b = mx.concatenate([B, mx.array(2.0 ** integers(-1, 1, 1, O)), mx.ones((1, O))]).astype(F32)
    n = dora.norm_kernel(dora.tensors(linear), how, A, B)
    square = np.square(W + (numbers(A) @ numbers(B)).T).sum(1)
    want = decode_want(linear, x, A, b)[0]
    for value in (square, want):
        assert np.array_equal(value, value.astype(np.float32)), "this test's numbers are not exact"
    found = [(n, mx.sqrt(mx.array(square.astype(np.float32))))]
    found.append((decode(linear, x, A, b), mx.array(want.astype(np.float32))))
    if how == AFFINE4:
        c, y = (mx.array(integers(-9, 9, 150, 261)).astype(BF16) for _ in "cy")
        want = (numbers(c) * numbers(y)).sum(0)
        found.append((dora.column_dot(c, y), mx.array(want.astype(np.float32))))
    return found


@metal
@pytest.mark.parametrize("how", ONE_OF_EACH, ids=name_of)
def test_bit_equal_in_every_way_and_clean(how):
    """Numbers that float32 holds exactly: no schedule, no order, no fma may change a bit; and the
    checker has nothing to say. Each reading of the arithmetic is a compilation: for two only."""
    for way, options in (CHECKED | (READINGS if how in (AFFINE4, NVFP4) else {})).items():
        with on_metal(**options) as runs:
            names = ("norm", "decode", "column_dot")
            for name, (got, want) in zip(names, exact_results(how), strict=False):
                assert mx.array_equal(got, want).item(), (name, way)
            assert way not in CHECKED or all(r.accesses > 0 for r in runs)


@metal
@pytest.mark.parametrize("O, how, tokens", [(2050, AFFINE4, 1), (9, (64, 4, "affine"), 8)])
def test_the_other_block_shapes_are_clean(O, how, tokens):
    """SETS = 2 from 2048 rows on; one token, and eight, whose lanes are all taken."""
    for way in ("check-deep-natural", "check-round-shuffled"):
        with on_metal(**CHECKED[way]):
            linear = make_linear(how, F32, O, how[0])
            assert norm_error(linear, 2) < SUMS
            assert decode_error(linear, 2, (tokens,)) < SUMS


@metal
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("how", [*AFFINE, *MODES, None], ids=name_of)
def test_clean_over_every_packing_and_type(how, dtype):
    with on_metal(mode="check", order="shuffled"):
        linear = make_linear(how, dtype, 19, 3 * max(how[0], 32) if how else 77, True)
        assert norm_error(linear, 5) < SUMS
        assert decode_error(linear, 5, (3,), dtype) < SUMS
        assert column_dot_error(130, 257, dtype) < SUMS


@metal
def test_random_numbers_keep_within_limits_in_every_way():
    """The kernels that the test above has compiled already: rank 3, four tokens."""
    for way, options in (SCHEDULES | READINGS).items():
        with on_metal(**options):
            mx.random.seed(3)
            linear = make_linear(AFFINE4, F32, 37, 320)
            assert norm_error(linear, 3) < SUMS, way
            assert decode_error(linear, 3, (4,)) < SUMS, way
            assert column_dot_error(140, 40, BF16) < SUMS, way


@metal
@pytest.mark.parametrize("how", [AFFINE4, None], ids=name_of)
def test_rows_that_begin_anywhere_in_memory(how):
    """Slices of larger arrays: MLX copies what is not contiguous; Metal's text assumes no
    alignment."""
    with on_metal(mode="check"):
        linear = make_linear(how, F32, 40, 96 if how else 77)
        for key in ("weight", "scales", "biases"):
            if key in linear:
                linear[key] = linear[key][3:24]
        x = mx.random.normal((9, dora.width(linear) + 1))[1:4, 1:]
        a, b = mx.random.normal((x.shape[1], 16))[:, ::2], mx.random.normal((10, 42))[:, ::2]
        assert excess(decode(linear, x, a, b), *decode_want(linear, x, a, b)) < SUMS
        assert norm_error(linear, 8) < SUMS


# --- Wrong kernels are caught ---------------------------------------------------------------------

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    probe: str  # of PROBES
    file: str
    old: str
    new: str
    caught: str  # a kind of finding, or "numbers"
    which: int = 0  # of the places where `old` stands


PROBES = {
    "norm": lambda: norm_error(make_linear(AFFINE4, F32, 13, 96), 8),
    "norm-wide": lambda: norm_error(make_linear(AFFINE4, F32, 9, 2368), 8),
    "norm-nvfp4": lambda: norm_error(make_linear(NVFP4, F32, 14, 48), 8),
    "norm-dense": lambda: norm_error(make_linear(None, F32, 13, 77), 8),
    "decode": lambda: decode_error(make_linear(AFFINE4, F32, 13, 320), 8, (3,)),
    "decode-6-bit": lambda: decode_error(make_linear((32, 6, "affine"), F32, 13, 96), 8, (3,)),
    "decode-dense": lambda: decode_error(make_linear(None, F32, 13, 77), 8, (3,)),
    "column_dot": lambda: column_dot_error(150, 300),
}
MUTANTS = [
    Mutant("no barrier after staging sB", "norm-wide", "norm", BARRIER, "", "race"),
    Mutant("no barrier before sums", "norm", "norm", BARRIER, "", "race", 1),
    Mutant("no barrier before sums", "column_dot", "column_dot", BARRIER, "", "race"),
    Mutant("one strip too many", "norm", "norm", "column < I", "column <= I", "out-of-bounds"),
    Mutant("one strip too many", "decode", "decode", "column < I", "column <= I", "out-of-bounds"),
    Mutant("a column too many", "norm-dense", "packed", "k < valid", "k <= valid", "out-of-bounds"),
    Mutant("no end of a row", "decode-dense", "packed", "valid >= 8", "valid > 4", "out-of-bounds"),
    Mutant("tokens left out", "column_dot", "column_dot", "t += 8", "t += 9", "numbers"),
    Mutant(
        "no guard of the row", "norm", "norm", " && first + lane < O", "", "out-of-bounds"
    ),
    Mutant("no guard of the row", "decode", "decode", " && row < O", "", "out-of-bounds"),
    Mutant(
        "no guard of the row", "column_dot", "column_dot", "if (first + mine < O)", "",
        "out-of-bounds",
    ),
    Mutant(
        "no clamp of the row", "norm", "norm", "min(first + j, O - 1)", "first + j",
        "out-of-bounds",
    ),
    Mutant(
        "no clamp of the row", "decode", "decode", "min(first + j, O - 1)", "first + j",
        "out-of-bounds",
    ),
    Mutant(
        "tokens beyond L", "column_dot", "column_dot", "min(begin + TOKENS, L)", "begin + TOKENS",
        "out-of-bounds",
    ),
    Mutant("wrong group", "decode", "packed", "(GROUP / 8)", "(GROUP / 4)", "numbers"),
    Mutant("wrong group", "norm-nvfp4", "packed", "(GROUP / 8)", "(GROUP / 4)", "numbers"),
    Mutant(
        "wrong row's codes", "norm", "packed", "eighth * BITS", "(eighth ^ 1) * BITS", "numbers"
    ),
    Mutant("a byte of the codes lost", "decode-6-bit", "packed", "k < bits", "k < bits - 1",
           "numbers"),
    Mutant("no bias of a group", "norm", "packed", "scale, bias);", "scale, 0.0f);", "numbers"),
    Mutant("no bias of the layer", "decode", "decode", "b[(R + 1) * O + row]", "0.0f", "numbers"),
    Mutant("no magnitude", "decode", "decode", "fma(mine, b[R * O + row],", "fma(mine, 1.0f,",
           "numbers"),
    Mutant(
        "lanes mixed up", "decode", "decode", "lane == j * N + t", "lane == t * ROWS + j", "numbers"
    ),
    Mutant(
        "row and token mixed up", "decode", "decode", "first + lane / N, t = lane % N",
        "first + lane % ROWS, t = lane / ROWS % N", "numbers",
    ),
    Mutant("h of another token", "decode", "decode", "h[t * R + r]", "h[r]", "numbers"),
    Mutant(
        "sums in half", "decode", "decode", "sum[j][t] = fma(w[j][k], v[k], sum[j][t])",
        "sum[j][t] = float(half(fma(w[j][k], v[k], sum[j][t])))", "numbers",
    ),
    Mutant(
        "sums in half", "norm", "norm", "total[j] = fma(w[j][k], w[j][k], total[j])",
        "total[j] = float(half(fma(w[j][k], w[j][k], total[j])))", "numbers",
    ),
    Mutant("a strip not added", "norm-wide", "norm", "k < STRIPS", "k < STRIPS - 1", "numbers"),
    Mutant(
        "sums without a value", "norm", "norm", "if (lane == 0) sums", "if (group == 0) sums",
        "uninitialised",
    ),
    Mutant("scales in half", "norm", "packed", "scale = static_cast<float>(scales[group])",
           "scale = float(half(scales[group]))", "numbers"),
]  # fmt: skip


def edited(mutant: Mutant, folder: Path) -> Path:
    """A copy of kernels/ with one edit."""
    folder = Path(shutil.copytree(ROOT / "kernels", folder / "kernels"))
    path = folder / f"{mutant.file}.metal"
    text = path.read_text()
    # of code only: a comment may say the same
    places = [m.start() for m in re.finditer(re.escape(mutant.old), text)]
    places = [p for p in places if "//" not in text[text.rfind("\n", 0, p) + 1 : p]]
    assert len(places) > mutant.which, f"{path.name} no longer has {mutant.old!r}: renew MUTANTS"
    at = places[mutant.which]
    path.write_text(text[:at] + mutant.new + text[at + len(mutant.old) :])
    return folder


@metal
@pytest.mark.parametrize("probe", PROBES)
def test_probes_find_nothing_in_the_kernels_as_they_are(probe):
    with on_metal(mode="check"):
        assert PROBES[probe]() < SUMS


@metal
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.probe}: {m.name}")
def test_wrong_kernels_are_caught(mutant, tmp_path):
    with on_metal(edited(mutant, tmp_path), mode="check"):
        try:
            error, kinds = PROBES[mutant.probe](), set()
        except msl.KernelError as found:
            error, kinds = 0.0, {f.kind for f in found.findings}
    if mutant.caught == "numbers":
        assert not kinds, f"expected wrong numbers, got {kinds}"
        assert not error < 10 * SUMS, f"error {error:.1e} is hardly above the limit {SUMS}"
    else:
        assert mutant.caught in kinds, f"expected {mutant.caught}, got {kinds}, error {error:.1e}"


OVERRUN = Mutant("past a thread's array", "norm", "norm", "k < 8", "k < 9", "asan", 1)


def run_asan(folder: str) -> None:
    """Probes in asan mode: in a Python with libasan, see below."""
    with on_metal(Path(folder), mode="asan"):
        for name in ("norm", "norm-nvfp4", "decode-6-bit", "decode-dense", "column_dot"):
            assert PROBES[name]() < SUMS, name
    print("clean")


@metal
@pytest.mark.parametrize("wrong", [False, True], ids=["as they are", "overrun"])
def test_asan(wrong, tmp_path):
    folder = edited(OVERRUN, tmp_path) if wrong else ROOT / "kernels"
    code = "import sys; import test_kernels; test_kernels.run_asan(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=ROOT / "tests",
        env=msl.asan_environment(),
        capture_output=True,
        text=True,
    )
    if wrong:
        assert done.returncode == 99 and "stack-buffer-overflow" in done.stderr, done.stderr[-2000:]
    else:
        assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-2000:]


@metal
@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "kernels").glob("*.metal")))
def test_lint(name):
    """Pointers name their address space; so do all that the other tests compile."""
    assert msl.lint((ROOT / "kernels" / f"{name}.metal").read_text()) == []


# --- NaN, Inf, zeros ------------------------------------------------------------------------------


def put(array: mx.array, where: tuple, value) -> mx.array:
    changed = mx.array(array)
    changed[where] = value
    return changed


def poison(layer: dora.AdaptedLinear, x: mx.array, where: str, value: float) -> mx.array:
    """Puts `value` into one place of x or of one of the layer's arrays; returns x."""
    linear = layer.linear
    if where == "x":
        return put(x, (1, 5), value)
    if where in ("scales", "biases", "weight"):
        linear[where] = put(linear[where], (7, 1), value)
    elif where == "last row":
        key = "scales" if "scales" in linear else "weight"
        linear[key] = put(linear[key], (-1, -1), value)
    elif where == "bias":
        linear.bias = put(linear.bias, (7,), value)
    elif where == "m":
        layer.m = put(layer.m, (7,), value)
    else:
        layer[where] = put(layer[where], (2, 1) if where == "lora_a" else (1, 7), value)
    return x


PLACES = [(AFFINE4, w) for w in ("x", "scales", "biases", "last row", "lora_a", "lora_b", "m")]
PLACES += [(None, "weight"), (None, "last row"), (None, "bias")]


@metal
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("how, where", PLACES, ids=name_of)
def test_what_is_not_finite_reaches_its_outputs_and_no_others(how, where, value):
    with on_metal():
        layer = make_layer(Case(how, F32, 8, 13, 96 if how else 77, "dora", True, (3,)))
        x = poison(layer, mx.random.normal((3, dora.width(layer.linear))), where, value)
        layer.eval()
        with np.errstate(invalid="ignore"):
            V, n, g, bias = layer64(layer)
            want = (numbers(x) @ V.T) * g + bias
        got, got_n = numbers(layer(x)), numbers(layer.norm())
    assert np.array_equal(np.isfinite(got_n), np.isfinite(n)), "norm"
    assert np.array_equal(np.isfinite(got), np.isfinite(want)), "out"
    if np.isnan(value):
        assert np.array_equal(np.isnan(got), np.isnan(want)) and np.isnan(got).any()
        assert np.array_equal(np.isnan(got_n), np.isnan(n))


@metal
@pytest.mark.parametrize("how", [MXFP4, MXFP8, NVFP4], ids=name_of)
def test_nan_codes_of_packed_weights(how):
    """E8M0's 255, E4M3's 127 and 255: of a scale, and of a weight."""
    with on_metal():
        linear = make_linear(how, F32, 13, 96)
        linear.scales = put(linear.scales, (3, 1), 127 if how == NVFP4 else 255)
        linear.scales = put(linear.scales, (12, 0), 255)
        if how == MXFP8:
            raw = np.array(linear.weight).view(np.uint8)
            raw[6, 33], raw[8, 2] = 127, 255
            linear.weight = mx.array(raw.view(np.uint32))
        A, b = mx.random.normal((96, 4)), mx.random.normal((6, 13))
        n = numbers(dora.norm_kernel(dora.tensors(linear), how, A, b[:4]))
        out = numbers(decode(linear, mx.random.normal((3, 96)), A, b))
    rows = [3, 6, 8, 12] if how == MXFP8 else [3, 12]
    assert np.flatnonzero(np.isnan(n)).tolist() == rows
    assert np.flatnonzero(np.isnan(out).any(0)).tolist() == rows and np.isnan(out[:, rows]).all()


def zero_rows(how) -> dora.AdaptedLinear:
    """Every third row of W and of B is zero; with a bias."""
    layer = make_layer(Case(how, F32, 4, 13, 96, "dora", True, (3,)))
    linear = layer.linear
    for key in ("scales", "biases") if how == AFFINE4 else ("weight",):
        linear[key] = put(linear[key], slice(None, None, 3), 0)
    layer = dora.AdaptedLinear(linear, 4, 2.0, 0.0, "dora")
    layer.lora_b = put(mx.random.normal((4, 13)), (slice(None), slice(None, None, 3)), 0)
    return layer


@metal
@pytest.mark.parametrize("tokens", [1, 3, 12])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("how", [AFFINE4, None], ids=name_of)
def test_rows_of_zeros_give_the_bias_and_no_nan(how, training, tokens):
    with on_metal():
        layer = zero_rows(how).train(training)
        assert numbers(layer.norm())[::3].tolist() == [0] * 5
        x, c = mx.random.normal((tokens, 96)), mx.random.normal((tokens, 13))
        out = layer(x)
        assert mx.array_equal(out[:, ::3], mx.broadcast_to(layer.linear.bias[::3], (tokens, 5)))
        assert mx.isfinite(out).all().item()
        if tokens > 1:
            for key, value in pull(layer, x, c).items():
                assert mx.isfinite(value).all().item(), key
            assert not mx.any(pull(layer, x, c)["dm"][::3]).item()


# --- Cancellation ---------------------------------------------------------------------------------


@metal
@pytest.mark.parametrize("O", [48, 2048])
def test_norm_where_the_adapter_cancels_the_weight(O):
    """B solved for s BᵀAᵀ = -W on every other row, W being of rank 8 and 1e-4 of noise."""
    I, R, s = 512, 8, 2.0
    rng = np.random.default_rng(0)
    A, B = rng.uniform(-1, 1, (I, R)) / np.sqrt(I), rng.normal(size=(R, O))
    W = (A @ B).T + 1e-4 * rng.normal(size=(O, I))
    B = np.where(np.arange(O) % 2, -np.linalg.lstsq(A, W.T, rcond=None)[0] / s, B)
    linear = nn.Linear(I, O, bias=False)
    linear.weight = mx.array(W.astype(np.float32))
    layer = dora.AdaptedLinear(linear, R, s, 0.0, "dora")
    layer.lora_a, layer.lora_b = (mx.array(a.astype(np.float32)) for a in (A, B))
    want = layer64(layer)[1]
    assert np.median(want[1::2] / want[::2]) < 1e-2, "nothing cancels here"
    factored = numbers(layer.norm())
    with on_metal() as runs:
        got = numbers(layer.norm())
        assert len(runs) == 1
    assert np.abs(got / want - 1).max() < 1e-5
    assert np.abs(factored[1::2] / want[1::2] - 1).max() > 1e-2
    assert np.abs(factored[::2] / want[::2] - 1).max() < 1e-5


# --- Whole layers ---------------------------------------------------------------------------------

GRADS = ("out", "dx", "da", "db", "dm")


def pull(layer, x, cotangent) -> dict[str, mx.array]:
    """Output of the layer and its gradients; the layer gets its own arrays back."""
    leaves = [k for k in dora.LEAVES if k in layer]
    primals = [x, *(layer[k] for k in leaves)]

    def f(x, *arrays):
        layer.update(dict(zip(leaves, arrays, strict=True)))
        return layer(x)

    try:
        (out,), grads = mx.vjp(f, primals, [cotangent])
    finally:
        layer.update(dict(zip(leaves, primals[1:], strict=True)))
    return dict(zip(GRADS, [out, *grads], strict=False))  # LoRA has no dm


def exact(layer, x, cotangent, masked=None) -> dict[str, np.ndarray]:
    """`pull` in float64, n held constant; `masked` is what dropout leaves of x."""
    (_, n, g, bias), W = layer64(layer), weight64(layer.linear)
    x, c, A, B, s = *map(numbers, (x, cotangent, layer.lora_a, layer.lora_b)), layer.scale
    xd = x if masked is None else numbers(masked)
    kept = np.divide(xd, x, out=np.zeros_like(x), where=x != 0)
    u, du = x @ W.T + s * (xd @ A) @ B, c * g
    found = {"out": u * g + bias, "dx": du @ W + kept * (s * (du @ B.T) @ A.T)}
    found |= {"da": s * xd.T @ (du @ B.T), "db": s * (xd @ A).T @ du}
    return found | ({"dm": (c * u).sum(0) / n} if layer.kind == "dora" else {})


LAYERS = [
    Case(AFFINE4, F32, 8, 33, 96, "dora", True, ()),
    Case((64, 6, "affine"), F16, 4, 40, 128, "lora", False, ()),
    Case(None, BF16, 3, 33, 77, "dora", True, ()),
]
CLOSE = {F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}


@metal
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_evaluation_takes_the_kernel_up_to_8_tokens(case):
    layer = make_layer(case)
    inputs = [mx.random.normal((*s, case.I)).astype(case.dtype) for s in ((1,), (8,), (9,), (3, 4))]
    plain = [layer(x) for x in inputs]
    layer.eval()
    with on_metal() as runs:
        for x, want in zip(inputs, plain, strict=True):
            tokens, before = x.size // case.I, len(runs)
            assert dora.route(layer, tokens, case.dtype) == ("decode" if tokens <= 8 else "product")
            first, second = layer(x), layer(x)
            assert first.dtype == want.dtype and mx.array_equal(first, second).item()
            assert apart(first, want) < CLOSE[case.dtype]
            norms = int(case.kind == "dora" and before == 0)  # once and for all
            assert len(runs) - before == norms + (2 if tokens <= 8 else 0)
        assert dora.route(layer, 8, mx.float64) == "product"


@metal
@pytest.mark.parametrize("kind", ["dora", "lora"])
@pytest.mark.parametrize("how", [None, AFFINE4, MXFP8, NVFP4], ids=name_of)
def test_a_tied_head_takes_the_kernels_of_a_linear_layer(how, kind):
    """Its A and B are the embedding adapter's, turned: norms, outputs, gradients."""
    base = quant.Embedding(45, 64)
    layer = dora.AdaptedEmbedding(base.to_quantized(*how) if how else base, 4, 2.0, 0.0, kind)
    layer.lora_b = mx.random.normal(layer.lora_b.shape) / 8
    x = mx.random.normal((3, 64))

    def loss(layer, x):
        return mx.square(layer.as_linear(x)).sum()

    plain, wanted = layer.as_linear(x), nn.value_and_grad(layer, loss)(layer, x)[1]
    mx.eval(plain, wanted)
    with on_metal() as runs:
        assert apart(layer.as_linear(x), plain) < CLOSE[F32]
        found = nn.value_and_grad(layer, loss)(layer, x)[1]
        for leaf in ("lora_a", "lora_b", *(["m"] if kind == "dora" else [])):
            assert apart(found[leaf], wanted[leaf]) < 1e-5
        assert bool(runs) == (kind == "dora")  # the norm
        before = len(runs)
        assert apart(layer.eval().as_linear(x), plain) < CLOSE[F32]
        assert len(runs) > before


@metal
@pytest.mark.parametrize("shape", [(2,), (2, 4)], ids=str)
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_evaluation_is_differentiable_beyond_one_token(case, shape):
    layer = make_layer(case)
    x, c = (mx.random.normal((*shape, d)).astype(case.dtype) for d in (case.I, case.O))
    plain = pull(layer, x, c)
    layer.eval()
    with on_metal() as runs:
        got = pull(layer, x, c)
        assert len(runs) >= 1 and list(got) == list(plain)
    for key, value in got.items():
        assert value.dtype == plain[key].dtype and value.shape == plain[key].shape
        assert apart(value, plain[key]) < CLOSE[case.dtype], key


@metal
@pytest.mark.parametrize("shape", [(1,), (1, 1), (4, 1), ()], ids=str)
def test_sequences_of_one_token_have_no_gradient(shape):
    layer = make_layer(LAYERS[0])
    with on_metal():
        layer(mx.zeros((*shape, 96)))
        with pytest.raises(ValueError, match="Not implemented"):
            pull(layer, mx.zeros((*shape, 96)), mx.zeros((*shape, 33)))


@metal
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_training_takes_norm_and_column_dot_from_kernels(case, tokens):
    layer = make_layer(case).train()
    x, c = (mx.random.normal((tokens, d)).astype(case.dtype) for d in (case.I, case.O))
    want, plain = exact(layer, x, c), pull(layer, x, c)
    with on_metal() as runs:
        assert dora.route(layer, tokens, case.dtype) == "product"
        got = pull(layer, x, c)
        wanted = 0 if case.kind == "lora" else 2 if tokens >= 8 else 1
        assert len(runs) == wanted, "norm, and column_dot from 8 tokens on"
    for key, value in want.items():
        limit = 1.2 * apart(plain[key], value) + (1e-6 if case.dtype == F32 else 0)
        assert apart(got[key], value) < limit, key


@metal
@pytest.mark.parametrize("case", [LAYERS[0], LAYERS[1]], ids=str)
def test_training_with_dropout_has_its_norm_from_the_kernel(case):
    case = dataclasses.replace(case, dtype=F32)
    layer = make_layer(case).train()
    layer.rate, layer.dropout = 0.4, nn.Dropout(0.4)
    x, c = mx.random.normal((20, case.I)), mx.random.normal((20, case.O))
    mx.random.seed(9)
    masked = layer.dropout(x)
    assert 0.2 < (masked == 0).mean().item() < 0.6
    with on_metal() as runs:
        mx.random.seed(9)
        got = pull(layer, x, c)
        assert len(runs) == (2 if case.kind == "dora" else 0)
    for key, value in exact(layer, x, c, masked).items():
        assert apart(got[key], value) < 2e-6, key


def replace_linear(key):
    def change(layer):
        layer.linear[key] = layer.linear[key] * 2

    return change


CHANGES = {
    "lora_a": lambda layer: setattr(layer, "lora_a", layer.lora_a * 2),
    "lora_b": lambda layer: setattr(layer, "lora_b", layer.lora_b * 2),
    "m": lambda layer: setattr(layer, "m", layer.m * 2),
    "scale": lambda layer: setattr(layer, "scale", 5.0),
    "scales": replace_linear("scales"),
    "biases": replace_linear("biases"),
    "bias": replace_linear("bias"),
    "bias by setattr": lambda layer: setattr(layer.linear, "bias", layer.linear.bias + 1),
    "update": lambda layer: layer.update({"lora_b": layer.lora_b * 2, "m": layer.m * 3}),
    "update of linear": lambda layer: layer.update(
        {"linear": {"scales": layer.linear.scales * 2, "bias": layer.linear.bias * 2}}
    ),
    "m in place": lambda layer: layer.__setattr__("m", layer.m.__imul__(2)),
}


@metal
@pytest.mark.parametrize("change", CHANGES)
def test_constants_are_dropped_when_what_they_came_from_is_replaced(change):
    layer = make_layer(LAYERS[0])
    inputs = [mx.random.normal((n, 96)) for n in (1, 3, 12)]
    with on_metal():
        before = [layer(x) for x in inputs]
        CHANGES[change](layer)
        after = [layer(x) for x in inputs]
    _, n, g, bias = layer64(layer)
    for x, old, new in zip(inputs, before, after, strict=True):
        want = (numbers(x) @ layer64(layer)[0].T) * g + bias
        assert apart(new, want) < 1e-6 < 1e-2 < apart(old, want), x.shape


@metal
def test_training_drops_the_constants():
    layer, x = make_layer(LAYERS[0]), mx.random.normal((3, 96))
    with on_metal() as runs:
        layer(x)
        assert len(runs) == 2 and layer._cache is not None  # norm, decode
        layer(x)
        assert len(runs) == 3
        layer.train()
        assert layer._cache is None
        layer(x)
        assert len(runs) == 4 and layer._cache is None  # norm
        layer.eval()
        layer(x)
        assert len(runs) == 6


@metal
def test_what_the_kernels_do_not_take():
    """Few rows or columns, a rank beyond 256 (64 for decode): plain operations."""
    for O, I, R, taken, way in (
        (7, 64, 4, False, "product"),
        (64, 7, 4, False, "product"),
        (8, 8, 4, True, "decode"),
        (64, 64, 64, True, "decode"),
        (64, 64, 65, True, "product"),
        (64, 64, 256, True, "product"),
        (64, 64, 257, False, "product"),
    ):
        layer = make_layer(Case(None, F32, R, O, I, "dora", True, ()))
        x = mx.random.normal((2, I))
        with on_metal() as runs:
            assert dora.kernels_take(layer) is taken and dora.route(layer, 2, F32) == way
            got = layer(x)
            assert len(runs) == taken + (way == "decode")
        V, _, g, bias = layer64(layer)
        assert apart(got, (numbers(x) @ V.T) * g + bias) < 1e-6, (O, I, R)


@pytest.mark.parametrize("case", LAYERS, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_what_surrounds_the_adapted_kernel(case, training):
    """CUDA's route beyond 8 tokens and its backward, with plain operations for the kernels."""

    def adapted(packed, how, A, sB, g, dtype):
        W = dora.dense(list(packed), how, F32)
        return (g[:, None] * (W + sB.T @ A.T)).astype(dtype)

    def norm(packed, how, A, sB):
        return mx.linalg.norm(dora.dense(packed, how, F32) + sB.T @ A.T, axis=1)

    layer = make_layer(case).train(training)
    x, c = (mx.random.normal((20, d)).astype(case.dtype) for d in (case.I, case.O))
    plain = pull(layer, x, c)
    layer.eval().train(training)
    with language("cu") as patch:
        patch.setattr(dora, "adapted_kernel", adapted)
        patch.setattr(dora, "norm_kernel", norm)
        patch.setattr(dora, "column_dot", lambda c, y: (c.astype(F32) * y.astype(F32)).sum(0))
        assert dora.route(layer, 20, case.dtype) == "adapted"
        got = pull(layer, x, c)
        layer.rate = 0.1
        assert dora.route(layer, 20, case.dtype) == ("product" if training else "adapted")
    for key, value in exact(layer, x, c).items():
        limit = 2 * apart(plain[key], value) + (1e-6 if case.dtype == F32 else 0)
        assert apart(got[key], value) < limit, key


@metal
def test_a_whole_model_generates_the_same_tokens():
    model, tokenizer, _ = quant.load(str(ROOT / "tests" / "tiny"), dtype="float32")
    dora.adapt(model, rank=4, kind="dora", num_layers=1)
    for layer in dora.adapted(model).values():
        layer.lora_b = mx.random.normal(layer.lora_b.shape) / 16
        layer.m = layer.m * mx.random.uniform(0.8, 1.25, layer.m.shape)
    long, short = tokenizer.encode("The kernels are run on the CPU here, by"), [5, 60, 7]
    assert len(short) <= 8 < len(long)

    def generate():
        model.eval()
        return [list(quant.stream(model, ids, set(), 4)) for ids in (long, short)]

    plain = generate()
    with on_metal() as runs:
        assert generate() == plain
        # norm; the short prompt; three tokens of each prompt that follow the first
        assert len(runs) == (1 + 1 + 2 * 3) * len(dora.adapted(model))
    model.eval()  # no emulated kernel stays behind


# --- The switch, and the file alone ---------------------------------------------------------------

DEVICE = """
import sys
import mlx.core as mx
sys.prefix = sys.path[0]  # no installed copy
mx.default_device = lambda: mx.gpu
mx.metal.is_available = lambda: {metal}
import dora
print(dora.language(), dora.kernel_folder() is not None)
mx.default_device = lambda: mx.cpu
import mlx.nn as nn
layer = dora.AdaptedLinear(nn.Linear(16, 16), 2, 1.0, 0.0, "dora").eval()
assert dora.language() is None and dora.route(layer, 1, mx.float32) == "product"
assert layer(mx.ones((1, 16))).shape == (1, 16)
"""


@pytest.mark.parametrize(
    "setting, copied, metal_there, wanted",
    [
        (None, True, True, "metal True"),
        ("1", True, False, "cu True"),
        ("0", True, True, "None True"),
        ("0", True, False, "None True"),
        (None, False, True, "None False"),
    ],
)
def test_the_switch_and_the_file_alone(setting, copied, metal_there, wanted, tmp_path):
    shutil.copy(ROOT / "dora.py", tmp_path)
    if copied:
        shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    env = {k: v for k, v in os.environ.items() if k != "DORA_KERNELS"}
    env |= {"PYTHONPATH": str(tmp_path)} | ({"DORA_KERNELS": setting} if setting else {})
    (tmp_path / "run.py").write_text(DEVICE.format(metal=metal_there))
    done = subprocess.run(
        [sys.executable, "run.py"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.stdout.strip() == wanted, done.stderr


def test_the_switch_in_the_module(monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    for there, name in ((True, "metal"), (False, "cu")):
        monkeypatch.setattr(mx.metal, "is_available", lambda there=there: there)
        monkeypatch.setattr(dora, "KERNELS", True)
        assert dora.language() == name
        monkeypatch.setattr(dora, "KERNELS", False)
        assert dora.language() is None


def test_files():
    """Stems pair up but for `adapted`; every file is ASCII, and every kernel's head says how its
    arrays lie, what it replaces and what bytes it moves."""
    folder = ROOT / "kernels"
    stems = {lang: {p.stem for p in folder.glob(f"*.{lang}")} for lang in ("metal", "cu")}
    assert stems["cu"] - stems["metal"] == {"adapted"} and stems["metal"] <= stems["cu"]
    assert {p.suffix for p in folder.iterdir()} == {".metal", ".cu"}
    for path in folder.iterdir():
        text = path.read_bytes().decode("ascii")
        assert max(map(len, text.splitlines())) <= 104, path.name
        head = "".join(itertools.takewhile(lambda t: t.startswith("//"), text.splitlines(True)))
        for word in ("Replaces:", "Layout:", "Bytes:") if path.stem != "packed" else ("MODE 0",):
            assert word in head, f"{path.name}: its head has no {word!r}"


# --- CUDA: the text compiles ----------------------------------------------------------------------

CUDA_HEADER = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef unsigned int uint32_t;
typedef unsigned char uint8_t;
namespace mlx::core::cu {
struct Shape { int values[10]; __device__ int operator[](int i) const { return values[i]; } };
}
"""  # of mlx/backend/cuda/device/utils.cuh, what the kernels use
CUDA_NAMES = {mx.uint32: "uint32_t", mx.uint8: "uint8_t", **dora.C_TYPES["cu"]}


class CudaText:
    """Stands in for mx.fast.cuda_kernel: keeps the text that MLX would compile, returns zeros.

    The signature is made as mlx/backend/cuda/custom_kernel.cpp (0.32) makes it.
    """

    def __init__(self):
        self.texts = {}

    def __call__(self, name, input_names, output_names, source, header):
        def run(inputs, output_shapes, output_dtypes, grid, threadgroup):
            arguments = []
            for key, array in zip(input_names, inputs, strict=True):
                arguments.append(f"const {CUDA_NAMES[array.dtype]}* {key}")
                if f"{key}_shape" in source:
                    arguments.append(f"const __grid_constant__ Shape {key}_shape")
                assert f"{key}_strides" not in source
                if f"{key}_ndim" in source:
                    arguments.append(f"const __grid_constant__ int {key}_ndim")
            for key, dtype in zip(output_names, output_dtypes, strict=True):
                arguments.append(f"{CUDA_NAMES[dtype]}* {key}")
            assert grid[0] % threadgroup[0] == 0, (grid, threadgroup)
            signature = f"__global__ void custom_kernel_{name}(\n" + ",\n".join(arguments) + ") {\n"
            kernel = f"namespace mlx::core::cu {{\n{signature}{source}\n}}\n}}\n"
            self.texts[name] = CUDA_HEADER + header + kernel
            return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

        return run


@functools.cache
def nvrtc() -> tuple[ctypes.CDLL, Path] | str:
    """NVIDIA's runtime compiler and its headers, from PyPI's wheels or CUDA_HOME; or why not."""
    spec = importlib.util.find_spec("nvidia")
    homes = [Path(p, "cu13") for p in (spec and spec.submodule_search_locations) or ()]
    if "CUDA_HOME" in os.environ:
        homes.insert(0, Path(os.environ["CUDA_HOME"]))
    for home in homes:
        libraries = sorted([*home.glob("lib/libnvrtc.so.*"), *home.glob("lib64/libnvrtc.so.*")])
        if libraries and (home / "include" / "cuda_fp16.h").exists():
            for helper in libraries[-1].parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(helper), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(libraries[-1])), home / "include"
    return "no NVRTC: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt"


def compile_cuda(text: str, architecture: str) -> str:
    """What the compiler and ptxas have to say; fails where it does not compile."""
    if isinstance(nvrtc(), str):
        pytest.skip(nvrtc())
    library, include = nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"k.cu", 0, None, None)
    flags = [f"--gpu-architecture={architecture}", f"--include-path={include}"]
    flags += ["--device-as-default-execution-space", "--ptxas-options=-v"]
    flags += ["--diag-suppress=177"]  # constants that a kernel does not use
    array = (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags))
    status = library.nvrtcCompileProgram(program, len(flags), array)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    said = log.value.decode()
    assert status == 0, f"{architecture}:\n{said}"
    assert "warning" not in said, f"{architecture}:\n{said}"
    return said


def cuda_texts(how, dtype, R: int, tokens: tuple, O: int = 64) -> dict[str, str]:
    """{name: text} of every CUDA kernel of a layer, as the layer itself asks for them."""
    recorder = CudaText()
    with language("cu") as patch:
        patch.setattr(mx.fast, "cuda_kernel", recorder, raising=False)
        layer = make_layer(Case(how, dtype, R, O, 2 * how[0] if how else 64, "dora", True, ()))
        for n in tokens:
            layer(mx.zeros((n, dora.width(layer.linear)), dtype))
        layer.train()
        pull(layer, *(mx.zeros((9, d), dtype) for d in (dora.width(layer.linear), O)))
        layer.eval()
    return recorder.texts


NEW, OLD = "sm_90a", "sm_80"  # MLX asks for the former on Hopper
CUDA_DEFAULT = [
    (NEW, AFFINE4, BF16, 8, (1, 4)),
    (NEW, NVFP4, F16, 13, (3,)),
    (OLD, None, F32, 64, (2,)),
]
CUDA_SLOW = [
    (arch, how, turn(DTYPES, i + j), turn((1, 8, 13, 64), i + j), (1 + (i + j) % 4, 1 + i % 3))
    for j, arch in enumerate((NEW, OLD))
    for i, how in enumerate([*AFFINE, *MODES, None])
]


@pytest.mark.parametrize(
    "architecture, how, dtype, R, tokens",
    CUDA_DEFAULT + [pytest.param(*p, marks=pytest.mark.slow) for p in CUDA_SLOW],
    ids=name_of,
)
def test_cuda_text_compiles(architecture, how, dtype, R, tokens):
    texts = cuda_texts(how, dtype, R, tokens)
    assert {n.partition("_")[0] for n in texts} == {"norm", "decode", "adapted", "column"}
    for text in texts.values():
        said = compile_cuda(text, architecture)
        shared = [int(n) for n in re.findall(r"(\d+) bytes smem", said)]
        assert max(shared, default=0) <= 48 * 1024


@pytest.mark.parametrize("O", [64, 2048])
@pytest.mark.parametrize("architecture", [NEW, pytest.param(OLD, marks=pytest.mark.slow)])
def test_cuda_kernels_stay_in_registers(architecture, O):
    """4 bits, R = 8, bf16: two blocks of 256 threads per SM, nothing spilled."""
    for name, text in cuda_texts((64, 4, "affine"), BF16, 8, (), O).items():
        said = compile_cuda(text, architecture)
        (registers,) = map(int, re.findall(r"Used (\d+) registers", said))
        assert set(re.findall(r"(\d+) bytes (?:stack|spill)", said)) == {"0"}, f"{name}: {said}"
        assert registers <= 128, f"{name}: {registers} registers"
