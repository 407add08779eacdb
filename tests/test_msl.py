"""Does the harness that runs Metal kernels on the CPU (tests/msl) compute and complain rightly?

Four kinds of evidence: the semantics of MSL against numpy; kernels that MLX and mlx-lm publish,
against their references; wrong kernels, each of which must be reported by its kind and its line;
and what MLX itself makes of a kernel's signature. The wrong kernels mark their guilty lines with
`//! kind`.
"""

import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import msl
import numpy as np
import pytest
from msl import build, translate

SKIP = msl.skip_reason()
pytestmark = pytest.mark.skipif(bool(SKIP), reason=SKIP or "")

FAST = msl.Options()
CHECK = msl.Options(mode="check")
EVERY_WAY = {
    "fast": FAST,
    "reversed": msl.Options(order="reversed"),
    "shuffled": msl.Options(order="shuffled", seed=7),
    "round": msl.Options(schedule="round"),
    "round-shuffled": msl.Options(schedule="round", order="shuffled", seed=3),
    "contract": msl.Options(contract=True),
    "ftz": msl.Options(ftz=True),
    "fast_math": msl.Options(fast_math=True, fast_ulps=4),
    "check": CHECK,
    "check-reversed": msl.Options(mode="check", order="reversed"),
    "check-round": msl.Options(mode="check", schedule="round", order="shuffled"),
}
F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
DTYPES = {"float32": F32, "float16": F16, "bfloat16": BF16}
RNG = np.random.default_rng(0)
NORMAL = RNG.normal(size=64).astype(np.float32)


def run(
    body,
    inputs,
    outputs,
    *,
    grid,
    group,
    options=CHECK,
    template=None,
    init_value=None,
    name="test",
    **kernel,
):
    """The outputs of a kernel; `outputs` is {name: (shape, dtype)}, `grid` and `group` one size."""
    made = msl.EmulatedKernel(
        name=name, input_names=list(inputs), output_names=list(outputs), source=body, **kernel
    )
    three = [(n, 1, 1) if isinstance(n, int) else n for n in (grid, group)]
    return made(
        inputs=list(inputs.values()),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
        grid=three[0],
        threadgroup=three[1],
        template=template,
        init_value=init_value,
        options=options,
    )


def float64(array) -> np.ndarray:
    if isinstance(array, mx.array):
        array = np.array(array.astype(F32))
    return np.asarray(array, np.float64)


def error(got, want) -> float:
    """The largest difference, relative to the largest value wanted."""
    got, want = float64(got), float64(want)
    assert got.shape == want.shape and not np.isnan(got).any()
    return np.abs(got - want).max() / max(np.abs(want).max(), 1e-9)


# ---- translation ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source, wanted",
    [
        ("x = 1.5 + 1e-3 + .5 + 2. + 7;", "x = 1.5f + 1e-3f + .5f + 2.f + 7;"),
        ("1.0f 3.0h 2.5bf 0x10 0x1p3 1u", "1.0f half(3.0f) bfloat(2.5f) 0x10 0x1p3f 1u"),
        ("#define HALF 0.5 // 0.5", "#define HALF 0.5f // 0.5"),
        ("#include <metal_math>", "#include <metal_stdlib>"),
        ("// 1.5 float4(x)", "// 1.5 float4(x)"),
        ("uint i [[thread_index_in_simdgroup]]", "uint i "),
        ("a[b[0]] = c[d[1]]", "a[b[0]] = c[d[1]]"),
        ("{ threadgroup float s[32]; }", "{ MSL_TG_STORAGE threadgroup float s[32]; }"),
        ("{ threadgroup vec<T, 2> s[4]; }", "{ MSL_TG_STORAGE threadgroup vec<T, 2> s[4]; }"),
        ("{ threadgroup float* p = s; }", "{ threadgroup float* p = s; }"),
        ("void f(threadgroup float* p)", "void f(threadgroup float* p)"),
        ("void f(device T x[4])", "void f(device T *x)"),
        ("float4(a, 1.0)", "msl_make<float, 4>(a, 1.0f)"),
        ("vec<T, 2>(a)", "msl_make<T, 2>(a)"),
        ("float4 v = w;", "float4 v = w;"),
        ("a < b; c > (d)", "a < b; c > (d)"),
    ],
)
def test_rewrite(source, wanted):
    assert translate.rewrite(source) == wanted


def test_rewrite_keeps_the_lines():
    source = "uint i [[\n thread_index\n]]\n/* 1.0\n */ #\nfloat4(\n1.0)"
    assert translate.rewrite(source).count("\n") == source.count("\n")


@pytest.mark.parametrize(
    "source, lines",
    [
        ("inline float f(const thread float* p) { return *p; }", []),
        ("inline float f(const float* p) { return *p; }", [1]),
        ("template <class T>\nvoid g(thread T& a,\n T& b) { b = a; }", [2]),
        ("void f(constant T& a) { a * a; }", []),
        ("void f(float a = 2 * 3) { }", []),
        ("void f(device int* p) {\n float* q = 0; }", [2]),
        ("void f(device int* p) {\n thread const\n float* q = 0; float r = a * b; }", []),
        ("if (a * b) { } else if (c & d) { }", []),
        ("inline float f(float* p /* device */) { return *p; }", [1]),
    ],
)
def test_lint_wants_address_spaces(source, lines):
    assert [line for line, _ in translate.lint(source)] == lines


def test_an_unknown_attribute_is_named():
    source = "void k(uint i [[thread_position_in_universe]]) {}"
    with pytest.raises(msl.CompileError, match="thread_position_in_universe"):
        translate.entry_function(translate.parse_signature(source, "k"), "k")


# ---- what MLX makes of a kernel --------------------------------------------------------------


def signature(body, inputs, outputs, **kernel):
    call = {
        key: kernel.pop(key)
        for key in ("template", "init_value", "grid", "threadgroup")
        if key in kernel
    }
    made = msl.EmulatedKernel(
        name="sig", input_names=list(inputs), output_names=list(outputs), source=body, **kernel
    )
    launch = made.launch(
        inputs=list(inputs.values()),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
        **{"grid": (8, 1, 1), "threadgroup": (4, 1, 1), **call},
    )
    return launch, translate.parse_signature(launch.source, launch.name)


def test_arguments_come_in_the_order_of_inputs_facts_outputs_attributes():
    body = "out[thread_position_in_grid.x] = b_strides[0] + a_shape[1] + b_ndim + a[0] + b[0];"
    inputs = {"a": mx.zeros((3, 4)), "b": mx.zeros((8,), mx.int32)}
    launch, parameters = signature(body, inputs, {"out": ((8,), F32)})
    assert [(p.name, p.buffer) for p in parameters] == [
        ("a", 0),
        ("a_shape", 1),
        ("b", 2),
        ("b_strides", 3),
        ("b_ndim", 4),
        ("out", 5),
        ("thread_position_in_grid", None),
    ]
    assert parameters[3].type == "const constant int64_t*"
    assert launch.uses == [(True, False, False), (False, True, True)]
    assert launch.grid == (8, 1, 1) and launch.threadgroup == (4, 1, 1) and launch.contiguous


def test_small_inputs_are_constant_and_scalars_are_references():
    inputs = {"big": mx.zeros((8,)), "small": mx.zeros((7,)), "scalar": mx.array(2.0)}
    _, parameters = signature("out[0] = big[0] + small[0] + scalar;", inputs, {"out": ((1,), F32)})
    assert [p.type for p in parameters] == [
        "const device float*",
        "const constant float*",
        "const constant float&",
        "device float*",
    ]


def test_attributes_are_found_as_substrings():
    body = "// thread_index_in_simdgroup is not used\nout[0] = x[0];"
    _, parameters = signature(body, {"x": mx.zeros((8,))}, {"out": ((1,), F32)})
    assert [p.attribute for p in parameters][2:] == ["thread_index_in_simdgroup"]


def test_template_arguments_of_all_kinds():
    body = "out[0] = FLAG ? T(N) : T(x[0]);"
    template = [("T", BF16), ("N", -3), ("FLAG", True)]
    inputs, outputs = {"x": mx.zeros((8,))}, {"out": ((1,), BF16)}
    launch, _ = signature(body, inputs, outputs, template=template)
    assert launch.template == "bfloat16_t, -3, 1"
    (out,) = run(body, inputs, outputs, grid=1, group=1, template=template)
    assert out.item() == -3


def test_shape_strides_and_ndim_hold_what_a_view_has():
    body = """
        uint i = thread_position_in_grid.x;
        long at = (i / x_shape[1]) * x_strides[0] + (i % x_shape[1]) * x_strides[1];
        out[i] = x[at] + 100 * x_ndim;
        if (i < 2) { strides[i] = x_strides[i]; }
    """
    base = mx.arange(60).reshape(6, 10)
    views = {
        (20, 2): base[::2, 1:9:2],
        (1, 10): base.T[2:5],
        (-10, -3): base[::-1, ::-3],
        (0, 1): mx.broadcast_to(base[1:2], (3, 10)),
    }
    for strides, x in views.items():
        out, seen = run(
            body,
            {"x": x},
            {"out": (x.shape, mx.int32), "strides": ((2,), mx.int64)},
            grid=x.size,
            group=x.size,
            ensure_row_contiguous=False,
        )
        assert np.array_equal(np.array(out), np.array(x) + 200) and tuple(seen.tolist()) == strides


def test_a_view_is_copied_when_rows_must_be_contiguous():
    x = mx.arange(60).reshape(6, 10).T[2:5]
    body = "uint i = thread_position_in_grid.x; out[i] = x[i];"
    (out,) = run(body, {"x": x}, {"out": (x.shape, mx.int32)}, grid=x.size, group=32)
    assert np.array_equal(np.array(out), np.array(x))


def test_inputs_of_every_size_and_type():
    body = "out[0] = a + b[2] + float(c[1]) + float(d) + float(e[8]);"
    inputs = {
        "a": mx.array(0.5),
        "b": mx.array([1.0, 2.0, 3.0]),
        "c": mx.array(np.array([1, 2**40], np.uint64)),
        "d": mx.array(3.0, BF16),
        "e": mx.arange(9).astype(mx.uint8),
    }
    (out,) = run(body, inputs, {"out": ((1,), F32)}, grid=1, group=1)
    assert out.item() == np.float32(0.5 + 3 + 2**40 + 3 + 8)


def test_python_numbers_and_empty_inputs():
    body = "out[thread_position_in_grid.x] = s + x_shape[0];"
    inputs = {"s": 2.5, "x": mx.zeros((0, 3))}
    (out,) = run(body, inputs, {"out": ((2,), F32)}, grid=2, group=2)
    assert np.array_equal(np.array(out), [2.5, 2.5])


def test_init_value_fills_every_output():
    body = "if (thread_position_in_grid.x == 1) { a[1] += 1; b[1] += 1; }"
    outputs = {"a": ((3,), F32), "b": ((2,), mx.int32)}
    a, b = run(body, {"x": mx.zeros((8,))}, outputs, grid=2, group=2, init_value=5)
    assert np.array_equal(np.array(a), [5, 6, 5]) and np.array_equal(np.array(b), [5, 6])


def test_a_header_with_helpers():
    header = """
        template <typename T, int N>
        inline T sum(const thread T* v) {
            T s = 0;
            for (int i = 0; i < N; i++) { s += v[i]; }
            return s;
        }
        constant float WEIGHTS[3] = {1.0, 10.0, 100.0};
    """
    body = """
        float v[3];
        for (int i = 0; i < 3; i++) { v[i] = x[i] * WEIGHTS[i]; }
        out[0] = sum<float, 3>(v);
    """
    (out,) = run(body, {"x": mx.arange(8.0)}, {"out": ((1,), F32)}, grid=1, group=1, header=header)
    assert out.item() == 210


# ---- semantics -------------------------------------------------------------------------------


def halves(dtype):
    x = mx.array(RNG.normal(size=4096).astype(np.float16)).astype(dtype)
    y = mx.array(RNG.normal(size=4096).astype(np.float16)).astype(dtype)
    return {"x": x, "y": y}


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_operation_of_a_narrow_type_is_rounded(dtype):
    body = """
        uint i = thread_position_in_grid.x;
        T p = x[i], q = y[i];
        a[i] = p * q + p;
        b[i] = p / q - q;
        c[i] = static_cast<T>(float(p) * float(q) + float(p));
    """
    inputs = halves(dtype)
    outputs = {n: ((4096,), dtype) for n in "abc"}
    a, b, c = run(body, inputs, outputs, grid=4096, group=64, template=[("T", dtype)])
    x, y = inputs.values()
    assert mx.array_equal(a, x * y + x) and mx.array_equal(b, x / y - y)
    wide = x.astype(F32) * y.astype(F32) + x.astype(F32)
    assert mx.array_equal(c, wide.astype(dtype)) and not mx.array_equal(a, c)


def test_half_and_bfloat_to_float_for_all_patterns():
    body = """
        uint i = thread_position_in_grid.x;
        a[i] = float(as_type<half>(ushort(x[i])));
        b[i] = float(as_type<bfloat>(ushort(x[i])));
    """
    x = np.arange(65536, dtype=np.uint16)
    outputs = {n: ((65536,), F32) for n in "ab"}
    a, b = run(body, {"x": mx.array(x)}, outputs, grid=65536, group=256, options=FAST)
    bits = (x.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(np.array(a), x.view(np.float16).astype(np.float32), equal_nan=True)
    assert np.array_equal(np.array(b), bits, equal_nan=True)


def test_float_to_half_and_bfloat_rounds_to_nearest_even():
    x = RNG.integers(0, 2**32, 1 << 16, dtype=np.uint64).astype(np.uint32)
    x[: 1 << 14] = (x[: 1 << 14] & 0xFFFF0000) | 0x8000  # ties for bfloat
    x = x.view(np.float32)
    x[np.isnan(x)] = 1
    body = "uint i = thread_position_in_grid.x; a[i] = half(x[i]); b[i] = bfloat(x[i]);"
    outputs = {"a": (x.shape, F16), "b": (x.shape, BF16)}
    a, b = run(body, {"x": mx.array(x)}, outputs, grid=x.size, group=256, options=FAST)
    with np.errstate(over="ignore"):
        assert np.array_equal(np.array(a), x.astype(np.float16))
    assert mx.array_equal(b, mx.array(x).astype(BF16))


def test_literals_are_floats():
    body = "out[0] = 0.1 + 0.2; out[1] = 1e-30 * 1e-10; out[2] = 3.0h * 1.1h; out[3] = sizeof(1.0);"
    (out,) = run(body, {"x": mx.zeros((8,))}, {"out": ((4,), F32)}, grid=1, group=1)
    f, h = np.float32, np.float16
    want = [f(0.1) + f(0.2), f(1e-30) * f(1e-10), h(3) * h(1.1), 4]
    assert np.array_equal(np.array(out), np.array(want, np.float32))


def test_attributes_at_the_edges_of_the_grid():
    body = """
        uint3 p = thread_position_in_grid;
        uint i = 8 * ((p.z * threads_per_grid.y + p.y) * threads_per_grid.x + p.x);
        out[i] = threads_per_threadgroup.x;
        out[i + 1] = threads_per_threadgroup.y;
        out[i + 2] = thread_index_in_threadgroup;
        out[i + 3] = 100 * simdgroup_index_in_threadgroup + thread_index_in_simdgroup;
        out[i + 4] = 10 * threadgroup_position_in_grid.x + threadgroup_position_in_grid.y;
        out[i + 5] = 10 * threadgroups_per_grid.x + threadgroups_per_grid.y;
        out[i + 6] = dispatch_threads_per_threadgroup.x;
        out[i + 7] = thread_position_in_threadgroup.x + 100 * simdgroups_per_threadgroup;
    """
    outputs = {"out": ((5, 70, 8), mx.int32)}
    (out,) = run(body, {"x": mx.zeros((8,))}, outputs, grid=(70, 5, 1), group=(16, 4, 1))
    assert out[0, 0].tolist() == [16, 4, 0, 0, 0, 52, 16, 200]
    assert out[3, 69].tolist() == [6, 4, 23, 23, 40, 52, 16, 105]
    assert out[4, 69].tolist() == [6, 1, 5, 5, 41, 52, 16, 105]


def test_a_threadgroup_is_no_larger_than_the_grid():
    body = """
        out[thread_position_in_grid.x] = threads_per_threadgroup.x;
        if (thread_position_in_grid.x == 0) { size[0] = dispatch_threads_per_threadgroup.x; }
    """
    outputs = {"out": ((24,), mx.int32), "size": ((1,), mx.int32)}
    out, size = run(body, {"x": mx.zeros((8,))}, outputs, grid=24, group=256)
    assert out.tolist() == [24] * 24 and size.item() == 24


SIMD = {
    "simd_shuffle_xor(v, 5)": lambda x, l: x[:, l ^ 5],
    "simd_shuffle_up(v, 3)": lambda x, l: x[:, np.where(l < 3, l, l - 3)],
    "simd_shuffle_down(v, 3)": lambda x, l: x[:, np.where(l > 28, l, l + 3)],
    "simd_shuffle_rotate_down(v, 3)": lambda x, l: np.roll(x, -3, 1),
    "simd_shuffle_and_fill_down(v, -1.0f, 2)": lambda x, l: np.where(l < 30, np.roll(x, -2, 1), -1),
    "simd_shuffle(v, ushort(31 - l))": lambda x, l: x[:, ::-1],
    "simd_broadcast(v, 7)": lambda x, l: x[:, [7] * 32],
    "simd_broadcast_first(v)": lambda x, l: x[:, [0] * 32],
    "simd_sum(v)": lambda x, l: x.sum(1, keepdims=True),
    "simd_product(v)": lambda x, l: x.prod(1, keepdims=True),
    "simd_max(v)": lambda x, l: x.max(1, keepdims=True),
    "simd_min(v)": lambda x, l: x.min(1, keepdims=True),
    "simd_prefix_exclusive_sum(v)": lambda x, l: x.cumsum(1) - x,
    "simd_prefix_inclusive_sum(v)": lambda x, l: x.cumsum(1),
    "quad_sum(v)": lambda x, l: np.repeat(x.reshape(2, 8, 4).sum(2), 4, 1),
    "quad_max(v)": lambda x, l: np.repeat(x.reshape(2, 8, 4).max(2), 4, 1),
    "float(simd_any(v > 1.5))": lambda x, l: (x > 1.5).any(1, keepdims=True),
    "float(simd_all(v > -9))": lambda x, l: np.ones((2, 1)),
    "float(ulong(simd_ballot(v > 0)) & 255)": lambda x, l: ((x[:, :8] > 0) << np.arange(8)).sum(
        1, keepdims=True
    ),
    "float(simd_is_first())": lambda x, l: (l == 0)[None],
}


@pytest.mark.parametrize("options", [CHECK, EVERY_WAY["shuffled"]], ids=["check", "shuffled"])
def test_simd_functions(options):
    lines = [f"o{i}[g] = {call};" for i, call in enumerate(SIMD)]
    body = "uint g = thread_position_in_grid.x, l = thread_index_in_simdgroup; float v = x[g];"
    outputs = {f"o{i}": ((2, 32), F32) for i in range(len(SIMD))}
    body = "\n".join([body, *lines])
    outs = run(body, {"x": mx.array(NORMAL)}, outputs, grid=64, group=64, options=options)
    x, lanes = NORMAL.reshape(2, 32), np.arange(32)
    for (call, want), out in zip(SIMD.items(), outs, strict=True):
        wanted = np.broadcast_to(want(x, lanes), (2, 32)).astype(np.float32)
        assert np.allclose(np.array(out), wanted, rtol=1e-5, atol=1e-5), call


@pytest.mark.parametrize("name, dtype", DTYPES.items())
def test_simd_functions_of_narrow_types_and_partial_groups(name, dtype):
    body = """
        uint i = thread_position_in_grid.x;
        a[i] = simd_max(x[i]);
        b[i] = simd_shuffle_down(x[i], 1);
        c[i] = simd_sum(x[i]);
    """
    x = mx.array(NORMAL[:44]).astype(dtype)
    outputs = {n: ((44,), dtype) for n in "abc"}
    a, b, c = (float64(o) for o in run(body, {"x": x}, outputs, grid=44, group=44))
    x = float64(x)
    assert (a[:32] == x[:32].max()).all() and (a[32:] == x[32:].max()).all()
    assert (b[:31] == x[1:32]).all() and b[31] == x[31]
    assert (b[32:43] == x[33:]).all() and np.isnan(b[43])  # lane 12 takes no part
    # reduction trees of 32 and 12 lanes, rounded to dtype at most at each of 5 levels
    tolerance = {"float32": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}[name]
    assert np.allclose(c[:32], x[:32].sum(), atol=8 * tolerance)
    assert np.allclose(c[32:], x[32:].sum(), atol=8 * tolerance)


def test_vectors():
    body = """
        uint i = thread_position_in_grid.x;
        float4 v = ((const device float4*)x)[i];
        half4 h = half4(v);
        float2 s = v.xy + v.zw;
        uint4 u = as_type<uint4>(v);
        out[i] = dot(v, float4(1, 2, 3, 4)) + s.x + float(h.w) + float4(s, 1.0, 2.0).z;
        out[i] += all(as_type<float4>(u) == v) ? 10 : 0;
        float3 t = metal::float3(1.0);
        v.x = t.y;
        ((device float4*)two)[i] = metal::fma(v, vec<float, 4>(2), v.wzyx);
        three[i] = metal::max(v, float4(0.5)).z + abs(v).w + clamp(v.y, -0.5f, 0.5f);
    """
    outputs = {"out": ((16,), F32), "two": ((16, 4), F32), "three": ((16,), F32)}
    out, two, three = run(body, {"x": mx.array(NORMAL)}, outputs, grid=16, group=16)
    v = NORMAL.reshape(16, 4)
    w = v.copy()
    w[:, 0] = 1
    want = v @ [1, 2, 3, 4] + v[:, 0] + v[:, 2] + v[:, 3].astype(np.float16) + 1 + 10
    assert np.allclose(np.array(out), want, atol=1e-5)
    assert np.allclose(np.array(two), w * 2 + w[:, ::-1], atol=1e-6)
    want = np.maximum(v[:, 2], 0.5) + np.abs(v[:, 3]) + np.clip(v[:, 1], -0.5, 0.5)
    assert np.allclose(np.array(three), want, atol=1e-6)


def test_scalar_functions():
    body = """
        float v = x[thread_position_in_grid.x];
        device float* o = out + 12 * thread_position_in_grid.x;
        o[0] = metal::precise::sqrt(metal::abs(v));
        o[1] = metal::fast::exp(v) - metal::precise::exp(v);
        o[2] = metal::isnan(v / 0.0f * 0.0f) + 2 * metal::isinf(1.0f / 0.0f);
        o[3] = metal::rsqrt(v * v);
        o[4] = metal::round(v * 10) + metal::trunc(v * 10) + metal::rint(0.5f);
        o[5] = metal::select(1.0f, 2.0f, v > 0);
        o[6] = metal::popcount(7u) + metal::clz(1u) + metal::ctz(8u) + metal::mulhi(1u << 31, 6u);
        o[7] = metal::extract_bits(0xabcdu, 4u, 8u) + metal::rotate(1u, 33u);
        o[8] = metal::sign(v) + metal::mix(1.0f, 3.0f, 0.5f) + metal::saturate(7.0f);
        o[9] = metal::numeric_limits<int>::max() == 2147483647 ? metal::fract(2.25) : 0;
        o[10] = float(metal::numeric_limits<half>::max()) + float(metal::max(half(1), half(2)));
        o[11] = metal::pow(2.0f, 3.0f) + metal::fmod(7.0f, 4.0f) + metal::atan2(0.0f, 1.0f);
    """
    (out,) = run(body, {"x": mx.array(NORMAL)}, {"out": ((64, 12), F32)}, grid=64, group=64)
    out, v = np.array(out), NORMAL
    assert np.allclose(out[:, 0], np.sqrt(np.abs(v))) and (out[:, 1] == 0).all()
    assert (out[:, 2] == 3).all() and np.allclose(out[:, 3], 1 / np.abs(v))
    assert np.allclose(out[:, 4], np.round(v * 10) + np.trunc(v * 10), atol=1e-5)
    assert np.array_equal(out[:, 5], np.where(v > 0, 2, 1))
    assert (out[:, 6] == 3 + 31 + 3 + 3).all() and (out[:, 7] == 0xBC + 2).all()
    assert np.array_equal(out[:, 8], np.sign(v) + 3)
    assert (out[:, 9:] == [0.25, 65506, 11]).all()


def test_integers_and_bits():
    body = """
        uint i = thread_position_in_grid.x;
        const device uchar* bytes = (const device uchar*)x;
        a[i] = bytes[4 * i + 1];
        b[i] = ulong(x[i]) * x[i];
        c[i] = as_type<float>(x[i]);
        d[i] = int(x[i]) >> 4;
    """
    x = RNG.integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32)
    outputs = {"a": mx.uint8, "b": mx.uint64, "c": F32, "d": mx.int32}
    outputs = {name: ((64,), dtype) for name, dtype in outputs.items()}
    a, b, c, d = map(np.array, run(body, {"x": mx.array(x)}, outputs, grid=64, group=64))
    assert np.array_equal(a, x.view(np.uint8)[1::4]) and np.array_equal(b, x.astype(np.uint64) ** 2)
    assert np.array_equal(c.view(np.uint32), x) and np.array_equal(d, x.view(np.int32) >> 4)


def test_atomic_outputs():
    body = """
        uint i = thread_position_in_grid.x;
        atomic_fetch_add_explicit(&out[i % 3], x[i], memory_order_relaxed);
        atomic_fetch_max_explicit(&top[0], x[i], memory_order_relaxed);
    """
    outputs = {"out": ((3,), F32), "top": ((1,), F32)}
    inputs = {"x": mx.arange(100.0)}
    out, top = run(body, inputs, outputs, grid=100, group=32, init_value=0, atomic_outputs=True)
    assert out.tolist() == [sum(range(k, 100, 3)) for k in range(3)] and top.item() == 99


def test_threadgroup_atomics():
    body = """
        threadgroup atomic_uint count[4];
        uint i = thread_index_in_threadgroup;
        if (i < 4) { atomic_store_explicit(&count[i], 0u, memory_order_relaxed); }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&count[i % 4], 1u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (i < 4) { out[i] = atomic_load_explicit(&count[i], memory_order_relaxed); }
    """
    outputs = {"out": ((4,), mx.uint32)}
    (out,) = run(body, {"x": mx.zeros((8,))}, outputs, grid=128, group=128)
    assert out.tolist() == [32] * 4


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_simdgroup_matrix(dtype):
    body = """
        simdgroup_matrix<T, 8, 8> a, b;
        simdgroup_matrix<float, 8, 8> c = simdgroup_matrix<float, 8, 8>(0.5f);
        simdgroup_load(a, A, 8);
        simdgroup_load(b, B, 8, 0, true);
        simdgroup_multiply_accumulate(c, a, b, c);
        threadgroup float s[64];
        simdgroup_store(c, s, 8);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = thread_index_in_simdgroup; i < 64; i += 32) { out[i] = s[i]; }
    """
    a, b = (mx.array(RNG.normal(size=(8, 8)).astype(np.float32)).astype(dtype) for _ in "ab")
    template, outputs = [("T", dtype)], {"out": ((8, 8), F32)}
    (out,) = run(body, {"A": a, "B": b}, outputs, grid=32, group=32, template=template)
    assert error(out, float64(a) @ float64(b).T + 0.5 * np.eye(8)) < 1e-5


# ---- options and schedules -----------------------------------------------------------------------

# where each of 96 threads comes in the order of execution, before and after a SIMD operation
TICKETS = """
    uint i = thread_position_in_grid.x;
    first[i] = atomic_fetch_add_explicit(&clock[0], 1u, memory_order_relaxed);
    simd_sum(1);
    second[i] = atomic_fetch_add_explicit(&clock[0], 1u, memory_order_relaxed);
"""


def tickets(**options):
    body = TICKETS.replace("first[i] = ", "atomic_store_explicit(&first[i], ")
    body = body.replace("second[i] = ", "atomic_store_explicit(&second[i], ")
    body = body.replace("relaxed);\n", "relaxed), memory_order_relaxed);\n")
    outputs = {n: ((size,), mx.uint32) for n, size in (("clock", 1), ("first", 96), ("second", 96))}
    _, first, second = run(
        body,
        {"x": mx.zeros((8,))},
        outputs,
        grid=96,
        group=64,
        options=msl.Options(**options),
        init_value=0,
        atomic_outputs=True,
    )
    return np.array(first).reshape(3, 32), np.array(second).reshape(3, 32)


def test_deep_runs_a_simdgroup_on_and_round_takes_turns():
    lanes = np.arange(32)
    starts = np.array([[0], [64], [128]])
    first, second = tickets(schedule="deep")
    assert np.array_equal(first, starts + lanes) and np.array_equal(second, first + 32)
    first, second = tickets(schedule="round")
    assert np.array_equal(first, [[0], [32], [128]] + lanes)
    assert np.array_equal(second, [[64], [96], [160]] + lanes)


def test_reversed_and_shuffled_orders():
    first, second = tickets(order="reversed")
    # the last threadgroup has one SIMD-group
    assert np.array_equal(first, np.array([[128], [64], [0]]) + np.arange(32)[::-1])
    assert np.array_equal(second, first + 32)
    seeds = [np.concatenate(tickets(order="shuffled", seed=s)) for s in (1, 1, 2)]
    assert np.array_equal(seeds[0], seeds[1]) and not np.array_equal(seeds[0], seeds[2])
    for order in seeds:
        assert sorted(order.ravel().tolist()) == list(range(192))
        assert not np.array_equal(order[0], np.sort(order[0]))


def test_orders_change_how_a_sum_adds_up():
    body = "out[thread_position_in_grid.x] = simd_sum(x[thread_position_in_grid.x]);"
    x = RNG.normal(size=(32, 32)).astype(np.float32)
    sums = {}
    for name in ("fast", "reversed", "shuffled"):
        inputs, outputs = {"x": mx.array(x)}, {"out": ((32, 32), F32)}
        (out,) = run(body, inputs, outputs, grid=1024, group=32, options=EVERY_WAY[name])
        assert error(out[:, 0], float64(x).sum(1)) < 1e-6
        sums[name] = np.array(out).tobytes()
    assert len(set(sums.values())) == 3


def test_contract_ftz_and_fast_functions():
    body = """
        uint i = thread_position_in_grid.x;
        fused[i] = x[i] * x[i] + -y[i];
        tiny[i] = x[i] * 1e-20f * 1e-20f;
        quick[i] = metal::fast::exp(x[i]);
        exact[i] = metal::precise::exp(x[i]);
        plain[i] = metal::exp(x[i]);
    """
    inputs = {"x": mx.array(NORMAL), "y": mx.array(NORMAL * NORMAL)}
    outputs = {n: ((64,), F32) for n in ("fused", "tiny", "quick", "exact", "plain")}

    def go(**options):
        given = msl.Options(**options)
        return [np.array(o) for o in run(body, inputs, outputs, grid=64, group=64, options=given)]

    fused, tiny, quick, exact, plain = go()
    assert (fused == 0).all() and (tiny != 0).all()
    assert np.array_equal(quick, exact) and np.array_equal(plain, exact)
    assert (go(contract=True)[0] != 0).any() and (go(ftz=True)[1] == 0).all()
    *_, quick, exact_too, plain = go(fast_ulps=4)
    ulps = np.abs(quick.view(np.int32).astype(np.int64) - exact.view(np.int32))
    assert 0 < ulps.max() <= 4
    assert np.array_equal(exact_too, exact) and np.array_equal(plain, exact)
    *_, quick, exact_too, plain = go(fast_ulps=4, fast_math=True)
    assert np.array_equal(plain, quick) and np.array_equal(exact_too, exact)


def test_compile_options_of_mlx_turn_fast_math_on():
    body = "out[thread_position_in_grid.x] = metal::exp(x[thread_position_in_grid.x]);"
    made = [
        run(
            body,
            {"x": mx.array(NORMAL)},
            {"out": ((64,), F32)},
            grid=64,
            group=64,
            options=msl.Options(fast_ulps=4),
            **more,
        )[0]
        for more in ({}, {"compile_options": {"math_mode": "fast"}})
    ]
    assert not mx.array_equal(*made)


def test_options_are_checked():
    with pytest.raises(ValueError, match="mode='chekc'"):
        msl.Options(mode="chekc")


# ---- standing in for MLX -----------------------------------------------------------------------


def square_kernel():
    return mx.fast.metal_kernel(
        name="square",
        input_names=["x"],
        output_names=["out"],
        source="uint i = thread_position_in_grid.x; out[i] = x[i] * x[i];",
    )


def call(kernel, x):
    return kernel(
        inputs=[x],
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
        grid=(x.size, 1, 1),
        threadgroup=(32, 1, 1),
    )[0]


def test_emulate_replaces_and_restores():
    real = mx.fast.metal_kernel, mx.metal.is_available
    with msl.emulate(CHECK) as outer:
        assert mx.metal.is_available()
        kernel = square_kernel()
        with msl.emulate() as inner:
            call(kernel, mx.arange(8.0))
        call(kernel, mx.arange(8.0))
        call(kernel, mx.arange(8.0))
    assert (mx.fast.metal_kernel, mx.metal.is_available) == real
    assert [r.accesses for r in inner] == [0] and [r.accesses for r in outer] == [24, 24]
    assert call(kernel, mx.arange(8.0)).tolist() == [i * i for i in range(8)]


def test_gradients_need_a_custom_function():
    with msl.emulate(CHECK):
        kernel = square_kernel()

        @mx.custom_function
        def square(x):
            return call(kernel, x)

        @square.vjp
        def square_vjp(x, cotangent, _):
            return 2 * x * cotangent

        x = mx.array(NORMAL)
        want = 8 * x
        assert mx.allclose(mx.grad(lambda z: square(2 * z).sum())(x), want)
        assert mx.allclose(mx.grad(lambda z: mx.checkpoint(square)(2 * z).sum())(x), want)
        with pytest.raises(ValueError, match="Not implemented for CustomKernel"):
            mx.eval(mx.grad(lambda z: call(kernel, z).sum())(x))


def test_a_missing_compiler_is_said_in_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(
        msl.CompileError, match="^no clang.*install one: apt-get install.*clang-19$"
    ):
        build.clang.__wrapped__()
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("MSL_CLANG", "true")
    with pytest.raises(msl.CompileError, match="^MSL_CLANG=true is not clang"):
        build.clang.__wrapped__()


def test_tests_are_skipped_without_a_compiler_but_not_in_ci(monkeypatch):
    monkeypatch.setattr(build, "clang", build.clang.__wrapped__)
    monkeypatch.setenv("MSL_CLANG", "true")
    monkeypatch.delenv("CI", raising=False)
    assert "apt-get install" in msl.skip_reason() == msl.unavailable()
    monkeypatch.setenv("CI", "true")
    assert msl.skip_reason() is None and msl.unavailable()
    monkeypatch.setattr(build.sys, "platform", "darwin")
    assert "not on darwin" in msl.skip_reason()


# ---- wrong kernels -----------------------------------------------------------------------------

SUM = """
    threadgroup float part[32];
    float s = simd_sum(x[g]);
    if (thread_index_in_simdgroup == 0) {
        part[simdgroup_index_in_threadgroup] = s;  WRITE
    }
    BARRIER
    float t = 0;
    for (uint k = 0; k < simdgroups_per_threadgroup; k++) {
        t += part[k];  READ
    }
    out[g] = t;
"""


def sum_with(barrier, write="", read=""):
    return SUM.replace("BARRIER", barrier).replace("WRITE", write).replace("READ", read)


IDS = "uint g = thread_position_in_grid.x, i = thread_index_in_threadgroup;\n"
RACES = {
    "no barrier": sum_with("", "//! race", "//! race //! simd-race //! uninitialised"),
    "mem_none": sum_with("threadgroup_barrier(mem_flags::mem_none);", "", "//! race //! simd-race"),
    "mem_device": sum_with(
        "threadgroup_barrier(mem_flags::mem_device);", "", "//! race //! simd-race"
    ),
    "simdgroup_barrier": sum_with(
        "simdgroup_barrier(mem_flags::mem_threadgroup);", "//! race", "//! race //! uninitialised"
    ),
    "reuse without a barrier": """
        threadgroup float part[64];
        part[i] = x[g];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float a = part[63 - i];  //! race
        part[i] = a + 1;  //! race
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[g] = part[63 - i];
    """,
    "lockstep": """
        threadgroup float part[64];
        part[i] = x[g];  //! simd-race
        out[g] = part[i ^ 1];  //! simd-race //! uninitialised
    """,
    "lockstep with the wrong flag": """
        threadgroup float part[64];
        part[i] = x[g];
        simdgroup_barrier(mem_flags::mem_device);
        out[g] = part[i ^ 1];  //! simd-race
    """,
    "device memory without mem_device": """
        out[g] = x[g];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[g ^ 63] = 1;  //! race
    """,
    "two threadgroups write": """
        out[g] = 0;
        out[i] = x[g];  //! cross-threadgroup-race
    """,
    "a threadgroup reads what another wrote": """
        out[g] = x[g];
        if (g == 255) {
            out[g] = out[0];  //! cross-threadgroup-race
        }
    """,
    "a plain read of an atomic's target": """
        threadgroup atomic_uint count[1];
        if (i == 0) { atomic_store_explicit(&count[0], 0u, memory_order_relaxed); }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&count[0], 1u, memory_order_relaxed);  //! race //! simd-race
        out[g] = ((threadgroup uint*)count)[0];
    """,
}
MEMORY = {
    "read past the end": "out[g] = x[g + 1];  //! out-of-bounds",
    "read before the start": "out[g] = x[int(g) - 1];  //! out-of-bounds",
    "write past the end": "out[g + 1] = x[g];  //! out-of-bounds",
    "write to an input": """
        device float* p = (device float*)x;
        out[g] = 0;
        p[g + 256] = 1;  //! out-of-bounds
    """,
    "past threadgroup memory": """
        threadgroup float part[64];
        part[i] = x[g];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[g] = part[i + 1];  //! undefined //! out-of-bounds
    """,
    "past a threadgroup array": """
        threadgroup float part[32];
        part[i] = x[g];  //! undefined //! out-of-bounds
        out[g] = 0;
    """,
    "past a local array": """
        float v[4];
        for (int k = 0; k <= 4; k++) {
            v[k] = x[k];  //! undefined
        }
        out[g] = v[0];
    """,
    "threadgroup memory never written": """
        threadgroup float part[64];
        if (i < 32) { part[i] = x[i]; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[g] = part[i];  //! uninitialised
    """,
    "threadgroup memory of the last threadgroup": """
        threadgroup float part[64];
        if (g < 64) { part[i] = x[i]; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[g] = part[i];  //! uninitialised
    """,
    "an output read before it is written": "out[g] += x[g];  //! uninitialised",
    "shift by 32": "uint b = 32 + (g & 1);\nout[g] = uint(x[g]) >> b;  //! undefined",
    "int overflow": "int b = 2147483647 - int(g == 0) + 1;  //! undefined\nout[g] = b;",
    "division by zero": "int b = g - 3;\nout[g] = 7 / b;  //! undefined",
    "float out of int's range": "out[g] = int(x[g] * 1e20f);  //! undefined",
    "misaligned": """
        const device uint4* p = (const device uint4*)(x + 1);
        uint4 v = p[0];  //! undefined
        out[g] = v.x & 1;
    """,
}
DIVERGENCE = {
    "simd operations": """
        float s = 0;
        if (thread_index_in_simdgroup < 7) {
            s = simd_sum(x[g]);  //! divergence
        } else {
            s = simd_max(x[g]);
        }
        out[g] = s;
    """,
    "simd operation against a barrier": """
        float s = 0;
        if (i < 7) {
            s = simd_sum(x[g]);  //! divergence
        } else {
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        out[g] = s;
    """,
    "barrier for some": """
        if (i < 32) {
            threadgroup_barrier(mem_flags::mem_threadgroup);  //! divergence
        }
        out[g] = x[g];
    """,
    "barrier after a return": """
        if (g >= 250) {
            out[g] = 0;
            return;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);  //! divergence
        out[g] = x[g];
    """,
    "two barriers": """
        if (i < 32) {
            threadgroup_barrier(mem_flags::mem_threadgroup);  //! divergence
        } else {
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        out[g] = x[g];
    """,
}


def on_256(body, options=CHECK, **more):
    """`body` on 256 floats in threadgroups of 64."""
    given = {"x": more.pop("x", mx.arange(256.0))}
    outputs = {"out": ((more.pop("size", 256),), more.pop("dtype", F32))}
    return run(body, given, outputs, grid=256, group=64, options=options, **more)[0]


def findings(body, options=CHECK, **more):
    with pytest.raises(msl.KernelError) as caught:
        on_256(body, options, **more)
    return caught.value.findings


def marked(source):
    """(kind, line) of every mark in `source`."""
    lines = [line.strip() for line in source.splitlines()]
    return {(kind, line) for line in lines for kind in re.findall(r"//! ([\w-]+)", line)}


@pytest.mark.parametrize("name", [*RACES, *MEMORY, *DIVERGENCE])
def test_check_names_the_defect_and_its_line(name):
    source = {**RACES, **MEMORY, **DIVERGENCE}[name]
    found = {(f.kind, f.text) for f in findings(IDS + source)}
    assert found == marked(source)


@pytest.mark.parametrize("name, options", EVERY_WAY.items(), ids=EVERY_WAY)
def test_a_correct_kernel_passes_in_every_mode(name, options):
    body = sum_with("threadgroup_barrier(mem_flags::mem_threadgroup);")
    out = on_256(IDS + body, options)
    assert np.array_equal(np.array(out).reshape(4, 64)[:, 0], [2016, 6112, 10208, 14304])


def test_a_race_names_both_lines_and_where():
    body = IDS + sum_with("threadgroup_barrier(mem_flags::mem_none);")
    (race,) = [f for f in findings(body) if f.kind == "race"]
    assert race.text == "t += part[k];"
    assert race.other_text == "part[simdgroup_index_in_threadgroup] = s;"
    assert race.other_line < race.line and race.threadgroup == (0, 0, 0) and race.count > 1
    assert "threadgroup memory: read after an unordered write" in str(race)


def test_a_race_that_shows_in_one_order_only_is_found_in_both():
    # natural order: the writer comes first and the result is right
    body = (
        IDS
        + """
        threadgroup float part[1];
        if (i == 0) { part[0] = x[g]; }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        out[g] = part[0];
    """
    )
    assert {f.kind for f in findings(body)} == {"race"}
    assert {f.kind for f in findings(body, EVERY_WAY["check-reversed"])} >= {"race"}
    right = np.repeat(np.arange(0, 256, 64), 64)
    assert np.array_equal(np.array(on_256(body, FAST)), right)
    wrong = np.array(on_256(body, EVERY_WAY["reversed"]))
    assert np.isnan(wrong.reshape(4, 64)[:, 32:]).all()  # and poison is what it reads


def test_divergence_without_strict_goes_on():
    options = msl.Options(mode="check", strict=False, ignore=("divergence",))
    body = IDS + DIVERGENCE["simd operations"]
    out = np.array(on_256(body, options)).reshape(8, 32)
    x = np.arange(256.0).reshape(8, 32)
    assert np.array_equal(out[:, 0], x[:, :7].sum(1)) and np.array_equal(out[:, 7], x[:, 31])


def test_divergence_says_who_is_where():
    (found,) = findings(IDS + DIVERGENCE["simd operations"])
    assert re.search(r"lanes 0000007f are at simd_sum, others \(ffffff80\) at simd_max", found.what)


def test_an_output_not_written():
    (found,) = findings("uint g = thread_position_in_grid.x; if (g != 5) { out[g] = x[g]; }")
    assert found.kind == "unwritten" and "4 bytes of output out" in found.what
    assert "at byte 20" in found.what


def test_each_unwritten_output_is_named():
    with pytest.raises(msl.KernelError) as caught:
        outputs = {"a": ((8,), F32), "b": ((8,), F32)}
        run("if (false) { a[0] = b[0] = x[0]; }", {"x": mx.zeros((8,))}, outputs, grid=1, group=1)
    assert [f.what.split()[4] for f in caught.value.findings] == ["a", "b"]


def test_an_atomic_on_an_uninitialised_output():
    body = "atomic_fetch_add_explicit(&out[0], 1.0f, memory_order_relaxed);  //! uninitialised"
    assert {(f.kind, f.text) for f in findings(body, size=1, atomic_outputs=True)} == marked(body)


def test_an_inactive_lane_gives_poison():
    body = IDS + "if (i >= 16) { out[g] = 0; return; }\nout[g] = simd_shuffle(x[g], 20);"
    out = np.array(on_256(body)).reshape(4, 64)
    assert np.isnan(out[:, :16]).all() and (out[:, 16:] == 0).all()


def test_fast_mode_finds_stray_writes_afterwards():
    (found,) = findings("uint g = thread_position_in_grid.x; out[g + 1] = x[g];", FAST)
    assert found.kind == "canary" and "byte 1024 of out (1024 bytes)" in found.what
    (found,) = findings(IDS + "((device float*)x)[3] = 1; out[g] = 0;", FAST)
    assert found.kind == "canary" and "of x (1024 bytes)" in found.what
    body = IDS + "threadgroup float p[32]; p[i] = x[i]; out[g] = p[i];"
    (found,) = findings(body, FAST)
    assert (
        found.kind == "canary" and "past the end of threadgroup memory, at byte 128" in found.what
    )


def test_limits_of_a_threadgroup():
    body = IDS + "threadgroup float p[N]; p[i] = x[i]; out[g] = p[i];"
    on_256(body, FAST, template=[("N", 8192)])
    (found,) = findings(body, FAST, template=[("N", 8193)])
    assert found.kind == "threadgroup-memory" and "32772 bytes" in found.what
    with pytest.raises(msl.KernelError, match="1025 threads.* 1024"):
        run("out[0] = 1;", {"x": mx.zeros((8,))}, {"out": ((1,), F32)}, grid=2048, group=1025)


REJECTED = {
    "device to thread pointer": ("thread float* p = x; out[0] = p[0];", "device"),
    "threadgroup to device": ("threadgroup float s[4]; out[0] = f(s);", "no matching function"),
    "device pointer to a constant input": (
        "const device float* p = few; out[0] = p[0];",
        "constant",
    ),
    "write to an input": ("x[0] = 1;", "read-only|const"),
    "float to bfloat": ("float v = x[0]; narrow[0] = v * 2.0f;", "precision"),
    "max of float and half": ("half h = 1; out[0] = max(x[0], h);", "no matching function|ambig"),
    "double": ("double d = x[0]; out[0] = d;", "poisoned"),
    "unknown attribute": ("out[thread_id_in_grid.x] = 0;", "undeclared"),
    "no return": ("out[0] = g(x[0]);", "return"),
    "unqualified pointer": ("float v[2] = {1, 2};\nfloat* p = v;\nout[0] = p[0];", "address space"),
    "misspelled function": ("out[0] = metal::exq(x[0]);", "no member named 'exq'"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_does_not_compile(name):
    body, message = REJECTED[name]
    header = "inline float f(const device float* p) { return p[0]; }\n"
    if name == "no return":
        header += "inline float g(float a) { }\n"
    inputs = {"x": mx.zeros((8,)), "few": mx.zeros((4,))}
    outputs = {"out": ((8,), F32), "narrow": ((8,), BF16)}
    with pytest.raises(msl.CompileError, match=message) as caught:
        run(body, inputs, outputs, grid=1, group=1, header=header)
    guilty = header.splitlines()[1] if name == "no return" else body.splitlines()[-1]
    guilty = "float* p = v;" if name == "unqualified pointer" else guilty
    assert re.search(r"kernel\.metal:\d+:", str(caught.value)) and guilty in str(caught.value)


def test_a_struct_is_copied_between_address_spaces_without_them_only():
    header = "struct Pair { float a, b; };\n"
    body = IDS + "Pair p = ((const device Pair*)x)[g / 2];\nout[g] = p.a + p.b;"
    with pytest.raises(msl.CompileError, match="address space"):
        on_256(body, FAST, header=header)
    without = msl.Options(mode="check", defines=("-DMSL_NO_ADDRESS_SPACES",))
    out = np.array(on_256(body, without, header=header))
    assert np.array_equal(out[::2], np.arange(0, 256.0, 2) * 2 + 1)


# ---- AddressSanitizer ----------------------------------------------------------------------------

ASAN = """
import sys
sys.path.insert(0, {tests!r})
import mlx.core as mx, msl
kernel = msl.EmulatedKernel(
    name="a", input_names=["x"], output_names=["out"],
    header="inline float get(const thread float* v, int i) {{ return v[i]; }}",
    source="float v[4] = {{1, 2, 3, 4}}; out[thread_position_in_grid.x] = get(v, int(x[0]));",
)
for index in {indices}:
    out = kernel(inputs=[mx.full((8,), index)], output_shapes=[(64,)], output_dtypes=[mx.float32],
                 grid=(64, 1, 1), threadgroup=(32, 1, 1), options=msl.Options(mode="asan"))[0]
    print("value", out[0].item(), flush=True)
"""


def test_asan_sees_an_overrun_through_a_pointer():
    try:
        environment = msl.asan_environment()
    except msl.CompileError as missing:
        pytest.skip(str(missing))  # libasan.so comes with gcc (Debian: libgcc-12-dev)
    tests = str(Path(__file__).parent)

    def go(indices):
        code = ASAN.format(tests=tests, indices=indices)
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )

    clean = go("(0.0, 3.0)")
    assert clean.returncode == 0 and clean.stdout == "value 1.0\nvalue 4.0\n", clean.stderr
    overrun = go("(3.0, 4.0)")
    assert overrun.returncode == 99 and overrun.stdout == "value 4.0\n", overrun.stderr
    assert "stack-buffer-overflow" in overrun.stderr and "get(" in overrun.stderr


def test_asan_without_libasan_is_refused():
    with pytest.raises(msl.CompileError, match="asan_environment"):
        on_256("out[thread_position_in_grid.x] = 0;", msl.Options(mode="asan"))


# ---- MLX's own kernels ---------------------------------------------------------------------------

KERNELS = "mlx/backend/metal/kernels/"
TYPE_NAMES = {F32: "float", F16: "half", BF16: "bfloat"}


@functools.cache
def quantized_source():
    names = ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
    text = translate.flatten(*(KERNELS + n for n in names), roots=build.INCLUDE)
    # One statement copies a struct between address spaces, which clang's C++ cannot.
    copy = (
        r"\*\(\(threadgroup ReadVector\*\)\(&dst\[(.*?)\]\)\) =\s*"
        r"\*\(\(const device ReadVector\*\)\(&src\[(.*?)\]\)\);"
    )
    loop = r"for (int q_ = 0; q_ < vec_size; q_++) dst[\1 + q_] = src[\2 + q_];"
    text, count = re.subn(copy, loop, text)
    assert count == 1
    return text


def given(**arrays):
    return [
        msl.Buffer(name, a if isinstance(a, np.ndarray) else msl.to_numpy(a))
        for name, a in arrays.items()
    ]


def wanted(**likes):
    """Buffers for outputs of the size and type of `likes`."""
    return [msl.Buffer(b.name, b.array, True, False) for b in given(**likes)]


class Quantized:
    """MLX's quantized kernels on one random matrix; N, K of it."""

    def __init__(self, dtype, bits, options, N=40, K=512, group=64):
        mx.random.seed(bits)
        self.dtype, self.bits, self.group, self.N, self.K = dtype, bits, group, N, K
        self.options = options
        self.weight = (mx.random.normal((N, K)) * 0.1).astype(dtype)
        packed = mx.quantize(self.weight, group_size=group, bits=bits)
        self.packed = dict(zip(("w", "scales", "biases"), packed, strict=True))
        self.dense = mx.dequantize(*packed, group_size=group, bits=bits)

    def run(self, name, buffers, grid, group, flags=""):
        """The outputs of MLX's kernel `name`, as numpy has them."""
        template = f"{TYPE_NAMES[self.dtype]}, {self.group}, {self.bits}{flags}"
        kernel = msl.compile_kernel(quantized_source(), name, template, self.options, prelude="")
        return msl.run_kernel(kernel, buffers, grid, group, self.options).outputs

    def dequantize(self):
        values = 8 if self.bits in (3, 5) else 4 if self.bits == 6 else 8 // self.bits
        grid = (self.N * self.K // values, 1, 1)
        words = np.array(self.packed["w"]).view(np.uint8)
        buffers = [*given(**{**self.packed, "w": words}), *wanted(out=self.dense)]
        (out,) = self.run("affine_dequantize", buffers, grid, (256, 1, 1))
        return msl.from_numpy(out, self.dtype)

    def quantize(self):
        grid = (self.N * self.K // (self.group // 32), 1, 1)
        words = np.array(self.packed["w"]).view(np.uint8)
        buffers = [*given(x=self.weight), *wanted(**{**self.packed, "w": words})]
        return self.run("affine_quantize", buffers, grid, (256, 1, 1))

    def multiply(self, name, x, sizes, grid, group, flags):
        """The error of one of MLX's products of x with the packed matrix."""
        no_batch = {  # the shapes and strides of batches
            **{n: np.zeros(1, np.int32) for n in ("x_ndim", "x_shape")},
            "x_strides": np.zeros(1, np.int64),
            **{n: np.zeros(1, np.int32) for n in ("w_ndim", "w_shape")},
            **{n: np.zeros(1, np.int64) for n in ("w_strides", "s_strides", "b_strides")},
        }
        sizes = {n: np.array([size], np.int32) for n, size in sizes.items()}
        out = mx.zeros((x.shape[0], self.N), self.dtype)
        buffers = [*given(**self.packed, x=x), *wanted(out=out), *given(**sizes, **no_batch)]
        (out,) = self.run(name, buffers, grid, group, flags)
        return error(msl.from_numpy(out, self.dtype), float64(x) @ float64(self.dense).T)


QUANTIZED = [(F32, 4, CHECK)]
QUANTIZED_SLOW = [
    (dtype, bits, options)
    for dtype in DTYPES.values()
    for bits in (2, 3, 4, 5, 6, 8)
    for options in (FAST, CHECK)
    if (dtype, bits, options) not in QUANTIZED
]
ALL_QUANTIZED = QUANTIZED + [pytest.param(*q, marks=pytest.mark.slow) for q in QUANTIZED_SLOW]
TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 1.6e-2}


@pytest.mark.parametrize("dtype, bits, options", ALL_QUANTIZED)
def test_affine_dequantize_is_bit_equal(dtype, bits, options):
    case = Quantized(dtype, bits, options)
    assert mx.array_equal(case.dequantize(), case.dense)


@pytest.mark.parametrize(
    "bits", [pytest.param(b, marks=pytest.mark.slow) for b in (2, 3, 4, 5, 6, 8)]
)
def test_affine_quantize_is_bit_equal_in_float32(bits):
    case = Quantized(F32, bits, FAST)
    words, scales, biases = case.quantize()
    assert np.array_equal(words, np.array(case.packed["w"]).view(np.uint8))
    assert np.array_equal(scales, np.array(case.packed["scales"]))
    assert np.array_equal(biases, np.array(case.packed["biases"]))


@pytest.mark.parametrize("dtype, bits, options", ALL_QUANTIZED)
def test_quantized_matrix_vector_product(dtype, bits, options):
    case = Quantized(dtype, bits, options)
    x = (mx.random.normal((2, case.K)) * 0.3).astype(dtype)
    sizes = {"K": case.K, "N": case.N}
    grid = (64, 2 * -(-case.N // 8), 1)
    got = case.multiply("affine_qmv_fast", x, sizes, grid, (32, 2, 1), ", false")
    assert got < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype, bits, options", ALL_QUANTIZED)
def test_quantized_matrix_product(dtype, bits, options):
    case = Quantized(dtype, bits, options)
    x = (mx.random.normal((24, case.K)) * 0.3).astype(dtype)
    sizes = {"K": case.K, "N": case.N, "M": 24}
    grid = (32 * -(-case.N // 32), 2, 2)
    got = case.multiply("affine_qmm_t", x, sizes, grid, (32, 2, 2), ", false, false")
    assert got < TOLERANCE[dtype]


# ---- mlx-lm's kernels ----------------------------------------------------------------------------


@functools.cache
def published(name, *replacements):
    """A fresh copy of the module `name` with emulated kernels, and replacements in its text."""
    pytest.importorskip("mlx_lm")
    original = importlib.import_module(name)
    text = Path(original.__file__).read_text()
    for old, new, count in replacements:
        assert text.count(old) == count, f"{name} has changed: {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    module = types.ModuleType(name)
    module.__package__ = name.rpartition(".")[0]
    with msl.emulate():
        exec(compile(text, original.__file__, "exec"), module.__dict__)
    return module


def normal(*shape, dtype=F32, scale=1.0):
    return (mx.random.normal(shape) * scale).astype(dtype)


def rms(x, eps):
    x = x.astype(F32)
    return x * mx.rsqrt(mx.mean(x**2, -1, keepdims=True) + eps)


def rope(x):
    turned = mx.fast.rope(x.swapaxes(1, 2), 64, traditional=True, base=10000.0, scale=1.0, offset=3)
    return turned.swapaxes(1, 2)


def qk_norm(dtype):
    module = published("mlx_lm.kernels.qk_norm")
    x = normal(5, 2 * 6 * 96, dtype=dtype)
    sizes = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 96}
    q, k = module.qk_norm(x, **sizes, eps=1e-5, query_scale=0.3)
    heads = rms(x.reshape(5, -1, 96)[:, :6], 1e-5)
    return max(error(q, heads[:, :4] * 0.3), error(k, heads[:, 4:]))


def qk_norm_rope(dtype):
    module = published("mlx_lm.kernels.qk_norm_rope")
    x = normal(2, 7, 2 * 6 * 64, dtype=dtype)
    sizes = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 64}
    q, k = module.qk_norm_rope(x, **sizes, eps=1e-5, query_scale=0.3, rope_base=10000.0, offset=3)
    heads = rms(x.reshape(2, 7, -1, 64)[:, :, :6], 1e-5)
    return max(error(q, rope(heads[:, :, :4] * 0.3)), error(k, rope(heads[:, :, 4:])))


def rms_norm_sigmoid_gate(dtype):
    module = published("mlx_lm.kernels.rms_norm_sigmoid_gate")
    x = normal(2, 6, 3, 80, dtype=dtype).swapaxes(1, 2)  # a view
    gate = normal(2, 6, 3 * 80, dtype=dtype)
    out = module.rms_norm_sigmoid_gate(x, gate, eps=1e-5)
    want = rms(x, 1e-5).swapaxes(1, 2).reshape(2, 6, -1) * mx.sigmoid(gate.astype(F32))
    return error(out, want)


def expert_routing(dtype):
    module = published("mlx_lm.kernels.expert_routing")
    logits, bias = normal(9, 70, dtype=dtype), normal(70) * 0.1
    how = {"top_k": 4, "multiplier": 1.0, "score_eps": 1e-9, "route_scale": 2.0}
    indices, weights = module.expert_routing(logits, bias, **how)
    scores = mx.sigmoid(logits.astype(F32))
    best = mx.argsort(-(scores + bias), axis=-1)[:, :4]
    assert np.array_equal(np.array(indices), np.array(best))
    chosen = mx.take_along_axis(scores, best, -1)
    return error(weights, chosen / chosen.sum(-1, keepdims=True) * 2.0)


def norm_add_norm(dtype):
    module = published("mlx_lm.kernels.norm_add_norm")
    branch, stream = normal(3, 520, dtype=dtype), normal(3, 520)
    alpha, beta, weight = normal(520), normal(520), normal(520)
    norm = nn.RMSNorm(520)
    norm.weight = normal(520)
    how = {"alpha": alpha, "beta": beta, "post_weight": weight, "post_eps": 1e-5}
    new_stream, normed = module.norm_add_norm(branch, stream, **how, next_norm=norm)
    scaled = (weight.astype(dtype).astype(F32) * branch.astype(F32)).astype(dtype)
    want = alpha * stream + beta * rms(scaled, 1e-5).astype(dtype).astype(F32)
    return max(error(new_stream, want), error(normed, rms(want, norm.eps) * norm.weight))


def post_expert_norm_combine(dtype):
    module = published("mlx_lm.kernels.post_expert_norm_combine")
    experts, weight = normal(3, 4, 520, dtype=dtype), normal(520)
    share = mx.softmax(normal(3, 4), -1)
    out = module.post_expert_norm_combine(experts, share, norm_weight=weight, eps=1e-5)
    return error(out, (rms(experts.astype(F32) * weight, 1e-5) * share[..., None]).sum(1))


def gated_delta(dtype):
    module = published("mlx_lm.models.gated_delta")
    B, T, Hk, Hv, Dk, Dv = 1, 5, 2, 4, 128, 16
    q, k = (normal(B, T, Hk, Dk, dtype=dtype, scale=0.1) for _ in "qk")
    v = normal(B, T, Hv, Dv, dtype=dtype, scale=0.1)
    g, beta = mx.sigmoid(normal(B, T, Hv)), mx.sigmoid(normal(B, T, Hv)).astype(dtype)
    state = normal(B, Hv, Dv, Dk)
    inputs = (q, k, v, g, beta, state)
    want = module.gated_delta_ops(*(x.astype(F32) for x in inputs))
    variants = ("gated_delta_kernel", "gated_delta_kernel_unpacked", "gated_delta_kernel_xtree")
    return max(
        error(got, wanted)
        for variant in variants
        for got, wanted in zip(getattr(module, variant)(*inputs), want, strict=True)
    )


def ssm(dtype):
    module = published("mlx_lm.models.ssm")
    H, D, S, G = 4, 16, 64, 2
    x, b, c = (normal(1, 1, *size, dtype=dtype) for size in ((H, D), (G, S), (G, S)))
    inputs = (x, normal(H), b, c, normal(H), normal(1, 1, H), normal(H), normal(1, H, D, S))
    got = module.ssm_update_kernel(*inputs, (0.001, 100.0))
    want = module.ssm_attn(*(z.astype(F32) for z in inputs))
    return max(error(g, w) for g, w in zip(got, want, strict=True))


def wkv7(dtype):
    module = published("mlx_lm.models.rwkv7")
    B, T, H, D = 1, 4, 2, 64
    inputs = [normal(B, T, H, D, dtype=dtype, scale=0.3) for _ in range(6)]
    start = state = normal(B, H, D, D)
    y, last = module.wkv7_kernel(*inputs, start)
    rows = []
    for t in range(T):
        row, state = module._wkv7_step_ops(*(z[:, t].astype(F32) for z in inputs), state)
        rows.append(row.reshape(B, H, D))
    return max(error(y.reshape(B, T, H, D), mx.stack(rows, 1)), error(last, state))


PUBLISHED = (
    qk_norm,
    qk_norm_rope,
    rms_norm_sigmoid_gate,
    expert_routing,
    norm_add_norm,
    post_expert_norm_combine,
    gated_delta,
    ssm,
    wkv7,
)
PUBLISHED_DEFAULT = [
    (rms_norm_sigmoid_gate, "bfloat16", "check"),
    (expert_routing, "float32", "check"),
    (norm_add_norm, "float16", "check"),
    (norm_add_norm, "float16", "shuffled"),
]
PUBLISHED_SLOW = [
    (kernel, dtype, way)
    for kernel in PUBLISHED
    for dtype in DTYPES
    for way in ("fast", "shuffled", "check")
    if (kernel, dtype, way) not in PUBLISHED_DEFAULT
]


@pytest.mark.parametrize(
    "kernel, dtype, way",
    PUBLISHED_DEFAULT + [pytest.param(*p, marks=pytest.mark.slow) for p in PUBLISHED_SLOW],
)
def test_published_kernels_are_right_and_clean(kernel, dtype, way):
    mx.random.seed(3)
    with msl.emulate(EVERY_WAY[way]):
        assert kernel(DTYPES[dtype]) < {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]


# ---- a published race ----------------------------------------------------------------------------

METAL_THERE = ("from ..utils import can_run_metal", "can_run_metal = lambda: True", 1)
SECOND_MAX = (
    "        max_q = simd_max(max_q);\n        max_p = simd_max(max_p);\n\n        // Share"
)
SYNC = "        threadgroup_barrier(mem_flags::mem_threadgroup);\n"
BARRIERS = (
    # between the last read of the maxima and the sums that take their place
    (SECOND_MAX, SECOND_MAX.replace("\n\n", f"\n{SYNC}\n"), 4),
    ("barrier(mem_flags::mem_none)", "barrier(mem_flags::mem_threadgroup)", None),
)


def losses(fixed: bool):
    changes = (METAL_THERE,)
    if fixed:
        path = Path(importlib.util.find_spec("mlx_lm.tuner.losses").origin)
        changes += tuple((a, b, n or path.read_text().count(a)) for a, b, n in BARRIERS)
    return published("mlx_lm.tuner.losses", *changes)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def divergences(module, V=5003):
    """Errors of KL, JS and their gradients against float64."""
    rng = np.random.default_rng(0)
    q, p = (mx.array(rng.normal(size=(2, V)).astype(np.float32) * 2) for _ in "qp")
    lq, lp = log_softmax(float64(q)), log_softmax(float64(p))
    lm = np.logaddexp(lq, lp) - np.log(2)
    kl_qm = (np.exp(lq) * (lq - lm)).sum(-1)
    js = 0.5 * ((np.exp(lp) * (lp - lm)).sum(-1) + kl_qm)
    pairs = (
        (module.kl_div_loss(q, p), (np.exp(lp) * (lp - lq)).sum(-1)),
        (module.js_div_loss(q, p), js),
        (mx.grad(lambda q: module.kl_div_loss(q, p).sum())(q), np.exp(lq) - np.exp(lp)),
        (
            mx.grad(lambda q: module.js_div_loss(q, p).sum())(q),
            0.5 * np.exp(lq) * (lq - lm - kl_qm[:, None]),
        ),
    )
    return [error(got, want) for got, want in pairs]


def test_check_finds_the_race_in_a_published_loss():
    with msl.emulate(CHECK), pytest.raises(msl.KernelError) as caught:
        divergences(losses(fixed=False))
    races = [f for f in caught.value.findings if f.kind == "race"]
    lines = {(f.text, f.other_text) for f in races}
    sums = "shared[simd_group_id * 2 + 0] = sum_exp_q;"
    assert (sums, "max_q = shared[simd_lane_id * 2 + 0];") in lines
    # and the barrier that orders nothing
    assert ("kl = shared[simd_lane_id];", "shared[simd_group_id] = kl;") in lines


def test_the_race_is_invisible_to_luck_and_visible_to_the_deep_schedule():
    with msl.emulate(msl.Options(schedule="round")):
        assert max(divergences(losses(fixed=False))) < 1e-5
    with msl.emulate(msl.Options(schedule="deep")):
        assert min(divergences(losses(fixed=False))) > 1e-3


@pytest.mark.parametrize("way", ["check", pytest.param("shuffled", marks=pytest.mark.slow)])
def test_with_its_barriers_the_published_loss_is_clean(way):
    with msl.emulate(EVERY_WAY[way]):
        assert max(divergences(losses(fixed=True))) < 1e-5
