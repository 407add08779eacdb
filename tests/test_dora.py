"""dora.py against float64, against mlx-lm, and against what goes wrong with adapters elsewhere.

mlx-lm is the oracle where it is right: its DoRALinear cannot be built on 3-, 5- and 6-bit bases
(it derives the input width by integer division), so those are held to float64 alone.
"""

import functools
import json
import math

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from conftest import PACKINGS, refused, run_cli, tiny_config, write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models import llama
from mlx_lm.tuner import utils as tuner
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.utils import load_model

import dora
import quant

HOWS = [None, *(tuple(p.values()) for p in PACKINGS)]
DTYPES = (mx.float32, mx.bfloat16, mx.float16)
GRADS = ("out", "dx", "da", "db", "dm")
TOKENS = mx.array([[5, 100, 200, 7, 31, 299], [1, 2, 3, 4, 5, 6]])
ATTENTION = ("q_proj", "k_proj", "v_proj")


def name_of(value):
    if isinstance(value, mx.Dtype):
        return str(value).rpartition(".")[2]
    return "dense" if value is None else "-".join(map(str, value)) if type(value) is tuple else None


def numbers(a) -> np.ndarray:
    return np.array(a.astype(mx.float32), np.float64)


def apart(got, want) -> float:
    """Relative distance in the 2-norm."""
    got, want = (numbers(a) if isinstance(a, mx.array) else a for a in (got, want))
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-300))


def base_layer(how=None, dtype=mx.float32, O=33, I=128, bias=False) -> nn.Module:
    linear = nn.Linear(I, O, bias=bias)
    linear.weight = mx.random.normal((O, I)) / 8
    linear.set_dtype(dtype)
    return nn.QuantizedLinear.from_linear(linear, *how) if how else linear


def perturb(model: nn.Module) -> None:
    """A fresh adapter changes nothing, so nothing can be learnt from it."""
    for layer in dora.adapted(model).values():
        layer.lora_b = mx.random.normal(layer.lora_b.shape) / 16
        if "m" in layer:
            layer.m = layer.m * mx.random.uniform(0.5, 2.0, layer.m.shape)


def make(linear, R=4, scale=2.0, dropout=0.0, kind="dora") -> dora.AdaptedLinear:
    layer = dora.AdaptedLinear(linear, R, scale, dropout, kind)
    perturb(layer)
    return layer


def dequantized(linear) -> mx.array:
    """The weight in float32, not by dora.py."""
    if "scales" not in linear:
        return linear.weight.astype(mx.float32)
    rest = [linear.scales] if linear.get("biases") is None else [linear.scales, linear.biases]
    rest = [r if r.dtype == mx.uint8 else r.astype(mx.float32) for r in rest]
    how = dict(group_size=linear.group_size, bits=linear.bits, mode=linear.mode)
    return mx.dequantize(linear.weight, *rest, **how, dtype=mx.float32)


def exact(layer, x, cotangent) -> dict[str, np.ndarray]:
    """Output and gradients in float64 by the paper's formula, n held constant."""
    W, A, B, x, c = map(
        numbers, (dequantized(layer.linear), layer.lora_a, layer.lora_b, x, cotangent)
    )
    s, bias = layer.scale, numbers(layer.linear.bias) if "bias" in layer.linear else 0
    V = W + s * (A @ B).T
    m = n = np.ones(len(W))
    if layer.kind == "dora":
        m, n = numbers(layer.m), np.linalg.norm(V, axis=1)
    u, du = x @ V.T, c * (m / n)
    found = {"out": u * (m / n) + bias, "dx": du @ V, "da": s * x.T @ (du @ B.T)}
    return found | {"db": s * (x @ A).T @ du, "dm": (c * u).sum(0) / n}


def plain(layer, dense, x, A, B, m):
    """The textbook layer in x's dtype throughout, through MLX's own packed product or without."""
    linear, how = layer.linear, dora.packing(layer.linear)
    W, A, B, m = (a.astype(x.dtype) for a in (linear.weight, A, B, m))
    if how:
        packed = [linear[k] for k in ("weight", "scales", "biases") if linear.get(k) is not None]
        how = dict(zip(("group_size", "bits", "mode"), how, strict=True))
        W = mx.dequantize(*packed, **how, dtype=x.dtype)
    y = x @ W.T if dense else mx.quantized_matmul(x, *packed, transpose=True, **how)
    n = mx.stop_gradient(mx.linalg.norm(W + (layer.scale * B.T) @ A.T, axis=1))
    out = (m / n) * (y.astype(x.dtype) + layer.scale * ((x @ A) @ B))
    return out + layer.linear.bias.astype(x.dtype) if "bias" in layer.linear else out


def pull(f, layer, x, cotangent) -> dict[str, mx.array]:
    """Output of f(x, A, B[, m]) and its gradients; the layer gets its own arrays back."""
    leaves = [k for k in dora.LEAVES if k in layer]
    primals = [x, *(layer[k] for k in leaves)]
    (out,), grads = mx.vjp(f, primals, [cotangent])
    layer.update(dict(zip(leaves, primals[1:], strict=True)))
    return dict(zip(GRADS, [out, *grads], strict=False))  # LoRA has no dm


def through(layer):
    def f(x, *leaves):
        layer.update(dict(zip(dora.LEAVES, leaves, strict=False)))
        return layer(x)

    return f


@pytest.fixture
def route(monkeypatch):
    """Forces the dense or the packed product."""
    return lambda dense: monkeypatch.setattr(dora, "dense_pays", lambda tokens, dtype: dense)


def tiny(how=None, dtype=mx.float32, seed=0, **changes) -> quant.Model:
    mx.random.seed(seed)
    model = quant.Model(quant.Spec.read(tiny_config(**changes)))
    model.set_dtype(dtype)
    if how:
        nn.quantize(model, **dict(zip(("group_size", "bits", "mode"), how, strict=True)))
    return model.eval()


# --- The layer: values and gradients --------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("how", HOWS, ids=name_of)
@pytest.mark.parametrize("dense_route", [True, False], ids=["dense-route", "packed-route"])
def test_forward_and_gradients_match_float64(how, dtype, dense_route, route):
    """At most twice the error of the textbook layer in the same dtype, in training and in
    evaluation; a bias and a 3-D input come along. One token has few numbers: several draws of it,
    lest the ratio be noise."""
    if how is None and not dense_route:
        pytest.skip("a dense weight has one route")
    route(dense_route)
    mx.random.seed(1)
    for O, I, R, shape, bias, draws in ((33, 128, 8, (1,), True, 4), (97, 192, 1, (2, 19), 0, 1)):
        I = 256 if how and I % how[0] else I
        errors = {}
        for _ in range(draws):
            layer = make(base_layer(how, dtype, O, I, bias), R)
            x, c = (mx.random.normal((*shape, d)).astype(dtype) for d in (I, O))
            flat, c2 = x.reshape(-1, I), c.reshape(-1, O)
            want = exact(layer, flat, c2)
            naive = pull(functools.partial(plain, layer, dense_route), layer, flat, c2)
            for training in (True, False):
                layer.train(training)
                got = pull(through(layer), layer, x, c)
                assert got["out"].dtype == got["dx"].dtype == dtype and got["out"].shape == c.shape
                for key in GRADS:
                    pair = (apart(got[key].reshape(want[key].shape), want[key]),)
                    pair += (apart(naive[key], want[key]),)
                    errors.setdefault((key, training), []).append(pair)
        for which, pairs in errors.items():
            ours, theirs = np.sqrt(np.square(pairs).mean(0))
            assert ours <= 2 * theirs + (2e-6 if dtype == mx.float32 else 0), (*which, O)


@pytest.mark.parametrize("tokens", [1, 3, 4, 40])
@pytest.mark.parametrize("how", HOWS, ids=name_of)
@pytest.mark.parametrize("kind", dora.KINDS)
def test_float32_matches_mlx_lm(kind, how, tokens):
    if how and how[1] in (3, 5, 6) and kind == "dora":
        pytest.skip("mlx-lm gets the input width of 3-, 5- and 6-bit bases wrong")
    mx.random.seed(2)
    layer = make(base_layer(how, bias=True, I=256), 3, kind=kind)
    theirs = (DoRALinear if kind == "dora" else LoRALinear).from_base(layer.linear, 3, 0.0, 2.0)
    x, c = mx.random.normal((tokens, 256)), mx.random.normal((tokens, 33))
    want = pull(through(theirs), layer, x, c)
    for training in (True, False):
        layer.train(training)
        got = pull(through(layer), layer, x, c)
        assert len(got) == (5 if kind == "dora" else 4)
        for key, value in got.items():
            assert apart(value, want[key]) < 1e-5, (key, training)


@pytest.mark.parametrize("how", [None, (32, 3, "affine"), (16, 4, "nvfp4")], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_lora_matches_float64(how, dtype):
    mx.random.seed(3)
    layer = make(base_layer(how, dtype, 97, 192, True), 5, kind="lora")
    x, c = (mx.random.normal((37, d)).astype(dtype) for d in (192, 97))
    want, got = exact(layer, x, c), pull(through(layer), layer, x, c)
    limit = {mx.float32: 2e-6, mx.bfloat16: 8e-3, mx.float16: 1e-3}[dtype]
    assert "m" not in layer
    for key, value in got.items():
        assert apart(value, want[key]) < limit, key


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_magnitude_gradient_matches_central_differences(bias):
    """n does not depend on m, so plain differences apply, at a perturbed m."""
    mx.random.seed(4)
    layer = make(base_layer((32, 4, "affine"), bias=bias))
    x, c = mx.random.normal((7, 128)), mx.random.normal((7, 33))
    dm = numbers(pull(through(layer), layer, x, c)["dm"])
    m = layer.m
    for o in (0, 17, 32):
        step, sides = np.zeros(33), []
        step[o] = 1e-3
        for sign in (1, -1):
            layer.m = m + sign * mx.array(step, mx.float32)
            sides.append((exact(layer, x, c)["out"] * numbers(c)).sum())
        measured = (sides[0] - sides[1]) / 2e-3
        layer.m = m
        assert dm[o] == pytest.approx(measured, rel=1e-3)


def test_scale_enters_the_product_and_the_norm():
    """Doubling s equals doubling B, in everything; and changes the direction."""
    mx.random.seed(5)
    layer = make(base_layer(), scale=1.0)
    x = mx.random.normal((5, 128))
    before, layer.scale = layer(x), 4.0
    after, layer.scale, layer.lora_b = layer(x), 1.0, layer.lora_b * 4
    assert apart(layer(x), after) < 1e-6 < 0.1 < apart(before, after)


def test_alpha_over_rank_is_given_as_scale():
    """A and B all ones, rank 8, alpha 16: the LoRA adds 2 (x A B), live and fused."""
    layer = make(base_layer(), 8, scale=16 / 8, kind="lora")
    layer.lora_a, layer.lora_b = mx.ones((128, 8)), mx.ones((8, 33))
    x = mx.random.normal((5, 128))
    want = layer.linear(x) + 2 * 8 * x.sum(-1, keepdims=True)
    assert apart(layer(x), want) < 1e-5 and apart(layer.fuse()(x), want) < 1e-5


# --- A fresh layer, and what it is made of --------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("how", [HOWS[0], HOWS[5], *HOWS[-3:]], ids=name_of)
def test_fresh_adapters_leave_every_logit_as_it_is_and_remove_restores_the_base(how, dtype):
    model = tiny(how, dtype)
    base = model(TOKENS)
    dora.adapt(model)
    for training in (True, False):
        assert mx.array_equal(model.train(training)(TOKENS), base)
    assert all(layer.m.dtype == mx.float32 for layer in dora.adapted(model).values())
    perturb(model)
    assert apart(model(TOKENS), base) > 1e-2
    dora.remove(model)
    assert not dora.adapted(model) and mx.array_equal(model(TOKENS), base)


def test_magnitudes_are_the_row_norms_of_the_wrapped_weight():
    linear = nn.Linear(64, 32, bias=False)
    linear.weight = linear.weight / mx.linalg.norm(linear.weight, axis=1, keepdims=True)
    linear.weight = linear.weight * mx.arange(1, 33)[:, None]
    layer = make(linear)
    fresh = dora.AdaptedLinear(linear, 4, 1.0, 0.0, "dora")
    assert np.allclose(fresh.m, np.arange(1, 33), rtol=1e-6) and fresh.m.shape == (32,)
    assert layer.lora_a.shape == (64, 4) and layer.lora_b.shape == (4, 32)


def test_squares_of_a_half_precision_row_do_not_overflow():
    linear = nn.Linear(4096, 3, bias=False)
    linear.weight = mx.full((3, 4096), 6.0, mx.float16)
    layer = dora.AdaptedLinear(linear, 1, 1.0, 0.0, "dora")
    assert layer.m.tolist() == [384.0] * 3
    assert layer(mx.ones((1, 4096), mx.float16)).tolist() == [[24576.0] * 3]


@pytest.mark.parametrize("how", HOWS[1:], ids=name_of)
def test_norms_are_those_of_the_packed_values(how):
    linear = base_layer(how, mx.bfloat16, 5000, 128)  # more rows than one chunk
    want = np.linalg.norm(numbers(dequantized(linear)), axis=1)
    got = np.sqrt(numbers(dora.square_norms(linear)))
    assert np.abs(got / want - 1).max() < 1e-6


@pytest.mark.parametrize("how", [None, (64, 4, "affine")], ids=name_of)
def test_factored_norm_matches_float64(how):
    mx.random.seed(6)
    layer = make(base_layer(how))
    V = numbers(dequantized(layer.linear)) + 2 * (numbers(layer.lora_a) @ numbers(layer.lora_b)).T
    _, wa = dora.product(mx.zeros((1, 128)), dora.tensors(layer.linear), how, layer.lora_a)
    assert apart(layer.norm(wa), np.linalg.norm(V, axis=1)) < 1e-6


def test_norm_of_a_row_that_the_adapter_cancels_stays_positive():
    """W = -s BᵀAᵀ + a little: float32 cannot tell the rest, the clamp keeps it from NaN."""
    mx.random.seed(7)
    layer = make(base_layer(), 1, scale=1.0)
    layer.linear.weight = -layer.lora_b.T @ layer.lora_a.T * (1 + 1e-6)
    layer = dora.AdaptedLinear(layer.linear, 1, 1.0, 0.0, "dora").update(
        {"lora_a": layer.lora_a, "lora_b": layer.lora_b}
    )
    x, c = mx.random.normal((6, 128)), mx.random.normal((6, 33))
    for value in pull(through(layer), layer, x, c).values():
        assert mx.isfinite(value).all().item()
    n = layer.norm(layer.lora_a.T @ layer.linear.weight.T)
    assert mx.all(n >= 0.9e-3 * layer.m).item()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("how", [None, (32, 4, "affine"), (32, 4, "mxfp4")], ids=name_of)
def test_rows_of_zeros_give_no_nan(how, training):
    linear = base_layer()
    linear.weight[::3] = 0
    linear = nn.QuantizedLinear.from_linear(linear, *how) if how else linear
    layer = dora.AdaptedLinear(linear, 4, 2.0, 0.0, "dora").train(training)
    for _ in range(2):
        x, c = mx.random.normal((6, 128)), mx.random.normal((6, 33))
        for key, value in pull(through(layer), layer, x, c).items():
            assert mx.isfinite(value).all().item(), key
        assert mx.isfinite(layer.fused_weight()).all().item()
        layer.lora_b = mx.random.normal(layer.lora_b.shape)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=name_of)
@pytest.mark.parametrize("how", [None, (64, 4, "affine")], ids=name_of)
@pytest.mark.parametrize("keys", [["k_proj", "v_proj"], ["q_proj"], ["q_proj", "v_proj"], None])
def test_half_precision_stays_half_precision(keys, how, dtype):
    """In every adapted layer and the logits, forward and backward, for any subset of q, k, v."""
    model, seen = tiny(how, dtype), set()
    dora.adapt(model, keys=keys)
    perturb(model)

    class Watch(dora.AdaptedLinear):
        def __call__(self, x):
            out = super().__call__(x)
            seen.add((x.dtype, out.dtype))
            return out

    for layer in dora.adapted(model).values():
        layer.__class__ = Watch
    for training in (True, False):
        model.train(training)
        assert model(TOKENS).dtype == dtype
    model.train()
    f = nn.value_and_grad(model, lambda t: model(t).astype(mx.float32).square().mean())
    loss, grads = f(TOKENS)
    assert seen == {(dtype, dtype)}
    for name, g in tree_flatten(grads):
        assert g.dtype == mx.float32 and mx.isfinite(g).all().item() and mx.any(g != 0).item(), name


# --- Dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [(64, 4, "affine"), (32, 8, "mxfp8")], ids=name_of)
def test_dropout_is_the_same_over_packed_and_dense_weights(how, route):
    mx.random.seed(8)
    packed = make(base_layer(how), dropout=0.5)
    linear = nn.Linear(128, 33, bias=False)
    linear.weight = dequantized(packed.linear)
    unpacked = make(linear, dropout=0.5)
    unpacked.update({k: packed[k] for k in dora.LEAVES})
    x, c = mx.random.normal((6, 128)), mx.random.normal((6, 33))
    for dense_route in (True, False):
        route(dense_route)
        found = []
        for layer in (packed, unpacked):
            mx.random.seed(9)
            found.append(pull(through(layer), layer, x, c))
        for key in GRADS:
            assert apart(found[0][key], found[1][key]) < 1e-5
        assert apart(found[0]["out"], packed.eval()(x)) > 1e-2
        packed.train()


def test_dropout_acts_on_the_low_rank_input_only_and_not_in_evaluation():
    mx.random.seed(10)
    layer = make(base_layer(bias=True), dropout=0.5)
    x = mx.random.normal((6, 128))
    mx.random.seed(11)
    got = layer(x)
    mx.random.seed(11)
    kept = layer.dropout(x)
    W, s = layer.linear.weight, layer.scale
    n = mx.linalg.norm(W + s * (layer.lora_a @ layer.lora_b).T, axis=1)
    u = x @ W.T + s * (kept @ layer.lora_a) @ layer.lora_b
    assert apart(got, layer.m / n * u + layer.linear.bias) < 1e-6
    assert apart(layer(x), got) > 1e-2  # another mask
    quiet = make(base_layer(bias=True), dropout=0.0)
    quiet.linear.update(layer.linear.parameters())
    quiet.update({k: layer[k] for k in dora.LEAVES})
    layer.eval()
    assert mx.array_equal(layer(x), layer(x))
    quiet._square = layer._square
    assert mx.array_equal(layer(x), quiet.eval()(x)) and apart(layer(x), quiet.train()(x)) < 1e-6


def test_magnitude_gradient_is_that_of_the_masked_output():
    mx.random.seed(12)
    layer = make(base_layer((64, 4, "affine")), dropout=0.5)
    x, c = mx.random.normal((6, 128)), mx.random.normal((6, 33))

    def loss(m):
        mx.random.seed(13)
        layer.m = m
        return (layer(x) * c).sum()

    m, step = layer.m, mx.zeros(33)
    dm = mx.grad(loss)(m)
    step[20] = 0.5  # the loss is linear in m: a large step has no error but rounding
    assert (loss(m + step) - loss(m - step)).item() == pytest.approx(dm[20].item(), rel=1e-3)


def test_dropout_masks_differ_between_compiled_steps():
    layer = make(base_layer(), dropout=0.5)
    state = [layer.state, mx.random.state]
    step = mx.compile(lambda x: layer(x), inputs=state, outputs=state)
    x = mx.ones((4, 128))
    mx.random.seed(14)
    first, second = step(x), step(x)
    mx.random.seed(14)
    assert not mx.array_equal(first, second) and mx.array_equal(first, step(x))


# --- The cache of evaluation ----------------------------------------------------------------------

CHANGES = {
    "train and back": lambda layer: layer.train().update({"m": layer.m * 2}).eval(),
    "assignment": lambda layer: setattr(layer, "lora_a", layer.lora_a * 2),
    "in place": lambda layer: exec("layer.m *= 2"),
    "scale": lambda layer: setattr(layer, "scale", 5.0),
    "update": lambda layer: layer.update({"lora_b": layer.lora_b * 2}),
    "load_weights": lambda layer: layer.load_weights([("m", layer.m * 3)], strict=False),
    "apply": lambda layer: layer.apply(lambda a: a * 2, lambda m, k, v: k in dora.LEAVES),
    "dtype of the adapter": lambda layer: layer.update({"m": layer.m.astype(mx.bfloat16)}),
    "base replaced": lambda layer: layer.linear.update(
        {k: -a for k, a in layer.linear.items() if k in layer.floats}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", [None, (64, 4, "affine"), (64, 8, "affine")], ids=name_of)
def test_evaluation_follows_every_change(how, change):
    mx.random.seed(15)
    layer = make(base_layer(how, bias=True)).eval()
    layer.floats = ("scales", "biases") if how else ("weight",)
    x, c = mx.random.normal((3, 128)), mx.random.normal((3, 33))
    before = layer(x)
    assert apart(before, exact(layer, x, c)["out"]) < 2e-6 and mx.array_equal(layer(x), before)
    CHANGES[change](layer)
    assert apart(layer(x), exact(layer, x, c)["out"]) < 2e-6
    assert apart(layer(x), before) > 1e-4
    assert layer.linear["bias"].size == 33


def test_one_layer_serves_several_dtypes_in_turn():
    mx.random.seed(16)
    layer = make(base_layer((64, 4, "affine"))).eval()
    x, c = mx.random.normal((3, 128)), mx.random.normal((3, 33))
    want = exact(layer, x, c)["out"]
    for dtype, limit in ((mx.float32, 2e-6), (mx.float16, 2e-3), (mx.float32, 2e-6)):
        out = layer(x.astype(dtype))
        assert out.dtype == dtype and apart(out, want) < limit


def test_evaluation_takes_the_norm_once(monkeypatch):
    layer, taken = make(base_layer((64, 4, "affine"))).eval(), []
    norm = dora.AdaptedLinear.norm
    count = lambda self, *a: taken.append(self) or norm(self, *a)  # noqa: E731
    monkeypatch.setattr(dora.AdaptedLinear, "norm", count)
    for dtype in (mx.float32, mx.float16, mx.float32):
        layer(mx.ones((1, 128), dtype))
    assert len(taken) == 1
    layer.m = layer.m * 2
    layer(mx.ones((1, 128)))
    assert len(taken) == 2


@pytest.mark.parametrize("how", [None, (64, 4, "affine"), (32, 4, "mxfp4")], ids=name_of)
def test_evaluation_is_right_inside_and_after_compile_and_grad(how):
    """Tracers must not stay in the cache, and m has its whole gradient in evaluation as well."""
    mx.random.seed(17)
    layer = make(base_layer(how)).eval()
    names = sorted(k for k, _ in tree_flatten(layer.state))
    x, c = mx.random.normal((5, 128)), mx.random.normal((5, 33))
    want = exact(layer, x, c)
    compiled = mx.compile(lambda x: layer(x), inputs=layer.state, outputs=layer.state)
    loose = mx.compile(lambda x: layer(x))
    for _ in range(2):
        f = nn.value_and_grad(layer, lambda x: (layer(x) * c).sum())
        grads = f(x)[1]
        for key, leaf in (("da", "lora_a"), ("db", "lora_b"), ("dm", "m")):
            assert apart(grads[leaf], want[key]) < 5e-6, key
        assert apart(mx.grad(lambda x: (layer(x) * c).sum())(x), want["dx"]) < 5e-6
        for run in (compiled, layer, loose):
            assert apart(run(x), want["out"]) < 5e-6
        layer.m = layer.m * 2
        want = exact(layer, x, c)
        assert apart(compiled(x), want["out"]) < 5e-6 and apart(layer(x), want["out"]) < 5e-6
        loose = mx.compile(lambda x: layer(x))  # it holds the arrays of its own time
    assert sorted(k for k, _ in tree_flatten(layer.state)) == names


def test_a_training_step_and_another_adapter_show_in_evaluation(tmp_path):
    model = tiny((64, 4, "affine"))
    dora.adapt(model, rank=2)
    perturb(model)
    dora.save_adapter(tmp_path, model)
    first = model(TOKENS)
    optimizer = optim.Adam(1e-2)
    f = nn.value_and_grad(model, lambda t: model(t).square().mean())
    for run in (f, mx.compile(f, inputs=model.state, outputs=model.state)):
        before = model.eval()(TOKENS)
        model.train()
        _, grads = run(TOKENS)
        optimizer.update(model, grads)
        assert apart(model.eval()(TOKENS), before) > 1e-3
    dora.remove(model)
    dora.load_adapter(model, tmp_path)
    assert apart(model(TOKENS), first) < 1e-6


# --- Memory ---------------------------------------------------------------------------------------


def peak(how: tuple, layers: int, compiled: bool, T=32, D=1024) -> int:
    """Bytes that a forward and backward through a stack takes above what was there before."""
    bases = [base_layer(how, O=D, I=D) for _ in range(layers)]
    model = nn.Sequential(*(make(b) for b in bases))
    step = nn.value_and_grad(model, lambda x: mx.square(model(x)).sum())
    if compiled:
        step = mx.compile(step, inputs=model.state, outputs=model.state)
    x = mx.random.normal((T, D))
    mx.eval(step(x), model.state)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(step(x))
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("how", [(64, 4, "affine"), (32, 4, "mxfp4")])  # decoded in two ways
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training_memory_grows_by_activations_and_not_by_dense_weights(how, compiled):
    """A dense W has 4 MB and four (T, O) activations 0.5 MB. The first few layers are apart: MLX
    has several dense matrices in flight at once."""
    assert peak(how, 1, compiled) < 4 * 2**22
    growth = (peak(how, 24, compiled) - peak(how, 12, compiled)) / 12
    assert growth < 2**20, f"{growth / 2**20:.2f} MB a layer"


# --- Adapting a model -----------------------------------------------------------------------------


def blocks(*names, layers=(0, 1)):
    return sorted(f"model.layers.{i}.{n}" for i in layers for n in names)


@pytest.mark.parametrize(
    "keys, num_layers, want",
    [
        (["q_proj"], -1, blocks("self_attn.q_proj")),
        (["self_attn.q_proj"], 1, blocks("self_attn.q_proj", layers=[1])),
        (["mlp.*"], 2, blocks("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
        (["*_proj"], 1, None),
        (["q_proj", "lm_head"], 1, [*["lm_head"], *blocks("self_attn.q_proj", layers=[1])]),
        (["lm_head"], -1, ["lm_head"]),
        (None, 1, None),
    ],
)
def test_keys_choose_layers(keys, num_layers, want):
    model = tiny((64, 4, "affine"))
    if want is None:
        inner = [f"self_attn.{n}_proj" for n in "qkvo"]
        inner += [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
        want = blocks(*inner, layers=[1])
    got = dora.adapt(model, keys=keys, num_layers=num_layers)
    assert sorted(got) == sorted(dora.adapted(model)) == sorted(want)
    trainable = {k.rpartition(".")[0] for k, _ in tree_flatten(model.trainable_parameters())}
    assert trainable == set(want)


class Pair(nn.Linear):
    def __call__(self, x):
        return super().__call__(x), x


class Half(nn.Linear):
    def __call__(self, x):
        return super().__call__(x)[..., ::2]


class Extra(nn.Linear):
    def __init__(self, *dims):
        super().__init__(*dims)
        self.gate = mx.ones((1,))


REFUSALS = {
    "no such key": (dict(keys=["q_porj", "v_proj"]), ["q_porj match nothing", "self_attn.q_proj"]),
    "tuple": (dict(keys=["odd"]), ["model.layers.1.mlp.odd (Pair) returns tuple"]),
    "shape": (dict(keys=["half"]), ["mlp.half (Half) returns shape (1, 64)", "wanted"]),
    "held": (dict(keys=["extra"]), ["mlp.extra (Extra) holds gate"]),
    "convolution": (dict(keys=["conv"]), ["mlp.conv (Conv1d) is no linear layer, embedding"]),
    "no blocks": (dict(num_layers=0), ["num_layers: got 0", "1 to 2"]),
    "too many blocks": (dict(num_layers=3), ["num_layers: got 3", "1 to 2"]),
    "below -1": (dict(num_layers=-2), ["num_layers: got -2"]),
    "rank": (dict(rank=0), ["rank: got 0"]),
    "dropout": (dict(dropout=1.0), ["dropout: got 1.0"]),
    "kind": (dict(kind="knid"), ["kind: got 'knid'", "dora or lora"]),
    "outside the model": (dict(keys=["lm_head.weight"]), ["lm_head.weight match nothing"]),
    "no keys": (dict(keys=[]), ["no linear layer"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_layer_and_leave_the_model_alone(case):
    given_, said = REFUSALS[case]
    model = tiny()
    odd = {"odd": Pair(128, 128), "half": Half(128, 128), "extra": Extra(128, 128)}
    model.layers[1].mlp.update_modules({})
    for name, layer in (odd | {"conv": nn.Conv1d(128, 8, 3)}).items():
        model.layers[1].mlp[name] = layer
    model.unfreeze()
    before = [id(m) for _, m in model.named_modules()]
    trainable = len(tree_flatten(model.trainable_parameters()))
    with pytest.raises(dora.UserError) as error:
        dora.adapt(model, **given_)
    assert all(text in str(error.value) for text in said), str(error.value)
    assert [id(m) for _, m in model.named_modules()] == before
    assert len(tree_flatten(model.trainable_parameters())) == trainable


def test_adapted_layers_are_not_adapted_again():
    model = tiny()
    dora.adapt(model, keys=["q_proj"], num_layers=1)
    with pytest.raises(dora.UserError, match="layers.1.self_attn.q_proj has an adapter already"):
        dora.adapt(model, keys=["q_proj"])
    assert len(dora.adapted(model)) == 1
    theirs = llama.Model(llama.ModelArgs.from_dict(tiny_config()))
    tuner.linear_to_lora_layers(theirs, 1, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    with pytest.raises(dora.UserError, match="match nothing|has an adapter already"):
        dora.adapt(theirs, keys=["q_proj"], num_layers=1)


def test_a_tied_head_is_adapted_as_the_embedding_that_it_is():
    model = tiny(tie_word_embeddings=True)
    with pytest.raises(dora.UserError, match="lm_head match nothing .* has: .*embed_tokens"):
        dora.adapt(model, keys=["q_proj", "lm_head"])
    assert dora.adapt(model, keys=["embed_tokens"]) == ["model.embed_tokens"]


def test_adapting_keeps_the_mode_of_the_model():
    """Dropout must not run in a model that is in evaluation."""
    for training in (True, False):
        model = tiny().train(training)
        dora.adapt(model, dropout=0.5)
        perturb(model)
        assert all(m.training == training for m in model.modules())
        assert mx.array_equal(model(TOKENS), model(TOKENS)) != training


def test_layers_inside_lists_and_sequentials_can_be_adapted():
    """Paths such as mlp.layers.0, whose holder is a list."""
    model = tiny()
    model.layers[0].mlp = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128))
    base = model(TOKENS)
    names = dora.adapt(model, keys=["layers.0", "mlp.layers.2"])
    assert sorted(names) == ["model.layers.0.mlp.layers.0", "model.layers.0.mlp.layers.2"]
    assert mx.array_equal(model(TOKENS), base)
    perturb(model)
    assert apart(model(TOKENS), base) > 1e-3
    dora.remove(model)
    assert mx.array_equal(model(TOKENS), base)


def test_a_seed_gives_the_same_adapter_again():
    found = []
    for seed in (3, 3, 4):
        model = tiny()
        mx.random.seed(seed)
        dora.adapt(model, rank=2)
        found.append(dict(tree_flatten(model.trainable_parameters())))
    assert all(mx.array_equal(a, found[1][k]) for k, a in found[0].items())
    assert not any(mx.array_equal(a, found[2][k]) for k, a in found[0].items() if "lora_a" in k)


@pytest.mark.parametrize("how", [None, (64, 4, "affine"), (32, 3, "affine")], ids=name_of)
def test_works_on_mlx_lm_models(how):
    mx.random.seed(18)
    model = llama.Model(llama.ModelArgs.from_dict(tiny_config()))
    if how:
        nn.quantize(model, **dict(zip(("group_size", "bits", "mode"), how, strict=True)))
    base = model(TOKENS)
    dora.adapt(model, rank=3, keys=["self_attn.*", "lm_head"])
    assert apart(model(TOKENS), base) < 2e-6
    perturb(model)
    f = nn.value_and_grad(model, lambda t: model(t).square().mean())
    _, grads = f(TOKENS)
    assert all(mx.any(g != 0).item() for _, g in tree_flatten(grads))
    trained = model(TOKENS)
    assert apart(model.eval()(TOKENS), trained) < 5e-6 < 1e-2 < apart(trained, base)


# --- Adapter files --------------------------------------------------------------------------------


def saved(folder, model, base="org/base", config=None):
    folder.mkdir(exist_ok=True)
    dora.save_adapter(folder, model, base, config or tiny_config())
    return folder / "adapters.safetensors"


def adapted_model(seed=0, how=(64, 4, "affine"), **settings):
    model = tiny(how, seed=seed)
    dora.adapt(model, **{"rank": 4, "scale": 7.5, **settings})
    mx.random.seed(19)
    perturb(model)
    return model


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter file, the model it was saved from, and that model's logits."""
    model = adapted_model(dropout=0.5, keys=["q_proj", "mlp.*", "lm_head"])
    return saved(tmp_path_factory.mktemp("adapter"), model), model.eval()(TOKENS)


def rewrite(file, target, weights=lambda w: w, **meta):
    """A copy of an adapter file with other tensors or metadata (None: without that entry)."""
    tensors, old = mx.load(str(file), return_metadata=True)
    kept = {k: v for k, v in (old | meta).items() if v is not None}
    target.mkdir(exist_ok=True)
    mx.save_safetensors(str(target / "adapters.safetensors"), dict(weights(tensors)), kept)
    return target / "adapters.safetensors"


def test_the_file_alone_is_enough(adapter, tmp_path):
    file, logits = adapter
    alone = rewrite(file, tmp_path)
    _, settings = dora.read_adapter(alone)
    assert settings["kind"] == "dora" and settings["rank"] == 4 and settings["scale"] == 7.5
    assert settings["dropout"] == 0.5 and settings["base"] == "org/base"
    assert settings["num_layers"] == 2 and "self_attn.q_proj" in settings["keys"]
    for path in (alone, tmp_path, str(alone)):
        model = tiny((64, 4, "affine")).train()
        dora.load_adapter(model, path, tiny_config())
        assert not model.training and mx.array_equal(model(TOKENS), model(TOKENS))
        assert mx.array_equal(model(TOKENS), logits)
        layer = model.layers[1].mlp.up_proj
        assert (layer.scale, layer.rate, layer.dropout._p_1) == (7.5, 0.5, 0.5)


@settings(max_examples=25, deadline=None)
@given(
    rank=st.integers(1, 9),
    scale=st.floats(-1e6, 1e6),
    dropout=st.floats(0, 0.99),
    kind=st.sampled_from(dora.KINDS),
    base=st.text(st.characters(exclude_categories=["Cs"])),
    keys=st.sets(st.sampled_from(["q_proj", "v_proj", "mlp.up_proj", "lm_head"]), min_size=1),
    num_layers=st.sampled_from([1, 2]),
)
def test_settings_survive_the_file(tmp_path_factory, base, **given_):
    given_["keys"] = sorted(given_["keys"])
    model, folder = tiny(), tmp_path_factory.mktemp("settings")
    names = dora.adapt(model, **given_)
    file = saved(folder, model, base)
    for path in (file, rewrite(file, folder / "bare", format=None).with_name("x")):
        if path.name == "x":  # mlx-lm's way: the settings beside it, none inside
            path = path.parent
            (path / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
        weights, found = dora.read_adapter(path)
        assert {n.rpartition(".")[0] for n in weights} == set(names)
        want = given_ | {"base": base, "num_layers": found["num_layers"], "keys": found["keys"]}
        assert {k: found[k] for k in want} == want
    blocks_ = any("layers" in n for n in names)
    assert found["num_layers"] == (given_["num_layers"] if blocks_ else 2)


@pytest.mark.parametrize("kind", dora.KINDS)
@pytest.mark.parametrize("how", [None, (32, 4, "affine"), (32, 4, "mxfp4")], ids=name_of)
def test_adapters_go_to_mlx_lm_and_back(kind, how, tmp_path):
    names = ("group_size", "bits", "mode")
    folder = write_model(tmp_path / "model", packing=how and dict(zip(names, how, strict=True)))
    mine, _, config = quant.load(str(folder))
    parameters = {"rank": 3, "scale": 5.0, "dropout": 0.0, "keys": ["self_attn.v_proj", "lm_head"]}
    # written by mlx-lm
    theirs, _ = load_model(folder)
    theirs.freeze()
    tuner.linear_to_lora_layers(theirs, 1, parameters, use_dora=kind == "dora")
    noisy = tree_map(lambda a: a + mx.random.normal(a.shape) / 8, theirs.trainable_parameters())
    theirs.update(noisy)
    (tmp_path / "theirs").mkdir()
    file = str(tmp_path / "theirs" / "adapters.safetensors")
    mx.save_safetensors(file, dict(tree_flatten(theirs.trainable_parameters())))
    said = {"fine_tune_type": kind, "num_layers": 1, "lora_parameters": parameters}
    (tmp_path / "theirs" / "adapter_config.json").write_text(json.dumps(said))
    loaded = dora.load_adapter(mine, tmp_path / "theirs", config)
    assert loaded["kind"] == kind and len(dora.adapted(mine)) == 2
    assert apart(mine(TOKENS), theirs.eval()(TOKENS)) < 1e-5
    # written here
    perturb(mine)
    saved(tmp_path / "mine", mine, str(folder), config)
    theirs, _ = load_model(folder)
    base = theirs(TOKENS)
    theirs = tuner.load_adapters(theirs, str(tmp_path / "mine")).eval()
    assert apart(theirs(TOKENS), mine(TOKENS)) < 1e-5 < 1e-2 < apart(theirs(TOKENS), base)
    replies = []
    for model in (mine, theirs):
        ids = [1, 17, 40]
        for _ in range(8):
            ids.append(model(mx.array([ids]))[0, -1].argmax().item())
        replies.append(ids)
    assert replies[0] == replies[1]


def without(*endings):
    return lambda w: {k: a for k, a in w.items() if not k.endswith(endings)}


def changed(ending, change):
    return lambda w: {k: change(a) if k.endswith(ending) else a for k, a in w.items()}


Q0, BAD = "layers.0.self_attn.q_proj", math.nan
DAMAGED = {
    "no magnitudes": ((without(".m"), {}), ["settings say dora", "lacks m", "more"]),
    "magnitudes in lora": ((dict, {"kind": "lora"}), ["settings say lora", "has m"]),
    "rank": ((dict, {"rank": "8"}), ["of rank 8", "has rank 4, not 8"]),
    "lacks B": ((without(f"{Q0}.lora_b"), {}), [f"{Q0} lacks lora_b"]),
    "empty": ((lambda w: {}, {}), ["holds no tensors"]),
    "odd tensor": ((lambda w: w | {"y.z": w["lm_head.m"]}, {}), ["y lacks"]),
    "version 0": ((dict, {"version": "0"}), ["version 0", "reads 1"]),
    "version 999": ((dict, {"version": "999"}), ["version 999", "reads 1"]),
    "no version": ((dict, {"version": None}), ["version None"]),
    "unknown kind": ((dict, {"kind": "vera"}), ["vera", "dora or lora"]),
    "no kind": ((dict, {"kind": None}), ["metadata", "kind"]),
    "no scale": ((dict, {"scale": None}), ["metadata", "scale"]),
    "rank garbled": ((dict, {"rank": "four"}), ["metadata"]),
    "no metadata": ((dict, {"format": None}), ["no mlx-dora metadata", "adapter_config.json"]),
    "not finite": ((changed(f"{Q0}.m", lambda a: a * BAD), {}), [f"{Q0}.m", "not finite"]),
    "A": ((changed(f"{Q0}.lora_a", lambda a: a[:-1]), {}), ["got (127, 4), wanted (128, 4)"]),
    "B": ((changed(f"{Q0}.lora_b", lambda a: a[:, 1:]), {}), ["got (4, 127), wanted (4, 128)"]),
    "m": ((changed(f"{Q0}.m", lambda a: a[1:]), {}), ["got (127,), wanted (128,)"]),
    "scalar": ((changed(f"{Q0}.lora_a", lambda a: a[0, 0]), {}), [Q0]),
    "other names": ((lambda w: {f"x.{k}": a for k, a in w.items()}, {}), ["another model", "x."]),
    "sketch of other layers": ((without("lm_head.m", "_a", "_b"), {}), ["lacks lora_a"]),
    "fewer layers": (
        (lambda w: {k: a for k, a in w.items() if "lm_head" not in k}, {}),
        ["describes 9 layers, it has 8"],
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_files_that_contradict_themselves_or_the_model_are_refused(case, adapter, tmp_path):
    (weights, meta), said = DAMAGED[case]
    file = rewrite(adapter[0], tmp_path, weights, **meta)
    model = tiny((64, 4, "affine"))
    base = model(TOKENS)
    with pytest.raises(dora.UserError) as error:
        dora.load_adapter(model, file, tiny_config())
    assert all(text in str(error.value) for text in [str(file), *said]), str(error.value)
    assert not dora.adapted(model) and mx.array_equal(model(TOKENS), base)


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, 0.999])
def test_a_file_cut_short_is_refused(adapter, tmp_path, kept):
    whole = adapter[0].read_bytes()
    size = int(len(whole) * kept) if isinstance(kept, float) else kept
    (tmp_path / "adapters.safetensors").write_bytes(whole[:size])
    with pytest.raises(dora.UserError, match="damaged or cut short"):
        dora.read_adapter(tmp_path)


def test_the_name_of_an_adapter_file_does_not_matter(adapter, tmp_path):
    (tmp_path / "step-100.bin").write_bytes(adapter[0].read_bytes())
    assert len(dora.read_adapter(tmp_path / "step-100.bin")[0]) == 27


CONFIGS = {
    "not json": ("{", ["one JSON object"]),
    "a list": ("[1]", ["one JSON object"]),
    "alpha": ('{"lora_parameters": {"rank": 4, "alpha": 16}}', ["rank and scale"]),
    "nothing": ("{}", ["rank and scale"]),
    "foreign": ('{"fine_tune_type": "vera"}', ["'vera'", "dora or lora"]),
    "peft": ('{"peft_type": "LORA", "r": 8, "lora_alpha": 16}', ["not of a linear layer"]),
    "kind": ('{"lora_parameters": {"rank": 4, "scale": 1.0}}', ["settings say lora", "has m"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_settings_beside_the_file_are_checked(case, adapter, tmp_path):
    text, said = CONFIGS[case]
    rewrite(adapter[0], tmp_path, format=None)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(dora.UserError) as error:
        dora.read_adapter(tmp_path)
    assert all(t in str(error.value) for t in said), str(error.value)


@pytest.mark.parametrize("path", ["nope.safetensors", "."])
def test_an_adapter_that_is_not_there_is_an_error(path, tmp_path):
    with pytest.raises(dora.UserError, match="no such adapter"):
        dora.read_adapter(tmp_path / path)


@pytest.mark.parametrize("kind", dora.KINDS)
def test_an_adapter_that_changes_nothing_says_so(kind, tmp_path, capsys):
    model = tiny()
    dora.adapt(model, kind=kind)
    file = saved(tmp_path, model)
    dora.load_adapter(tiny(), file)
    assert "changes nothing" in capsys.readouterr().err
    perturb(model)
    if kind == "dora":
        for layer in dora.adapted(model).values():  # magnitudes alone do change the model
            layer.lora_b = mx.zeros_like(layer.lora_b)
    dora.load_adapter(tiny(), saved(tmp_path, model))
    assert "changes nothing" not in capsys.readouterr().err


# --- The base an adapter belongs to ---------------------------------------------------------------


def test_weights_of_another_seed_are_refused_unless_forced(adapter):
    other = tiny((64, 4, "affine"), seed=1)
    with pytest.raises(
        dora.UserError, match=r"weights of this model differ from the base .*org/base.*force"
    ):
        dora.load_adapter(other, adapter[0], tiny_config())
    assert not dora.adapted(other)
    dora.load_adapter(other, adapter[0], tiny_config(), force=True)
    assert len(dora.adapted(other)) == 9


@pytest.mark.parametrize("how", [(64, 8, "affine"), (32, 8, "mxfp8"), None], ids=name_of)
def test_the_same_weights_packed_otherwise_are_a_warning(how, adapter, capsys):
    dora.load_adapter(tiny(how), adapter[0], tiny_config())
    said = capsys.readouterr().err
    assert "this model is the base it was trained on (org/base) packed differently" in said


def test_the_same_base_is_no_warning_in_another_dtype(adapter, capsys):
    model = tiny((64, 4, "affine"))
    quant.cast(model, mx.float16)
    dora.load_adapter(model, adapter[0], tiny_config())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("how", [None, (64, 4, "affine")], ids=name_of)
def test_a_second_adapter_is_refused_by_the_model_that_the_first_was_fused_into(how, tmp_path):
    model = tiny(how)
    dora.adapt(model, scale=1.0)
    for layer in dora.adapted(model).values():  # a mild one: some per cent of the weights
        layer.lora_b = mx.random.normal(layer.lora_b.shape) / 64
    file = saved(tmp_path, model)
    fused = [(p, layer.fuse()) for p, layer in dora.adapted(model).items()]
    model.update_modules(tree_unflatten(fused))
    with pytest.raises(dora.UserError, match="weights of this model differ from the base"):
        dora.load_adapter(model, file, tiny_config())


def test_another_architecture_is_refused_by_its_config(adapter):
    assert dora.fingerprint(tiny_config(rope_theta=10000)) == dora.fingerprint(tiny_config())
    config = tiny_config(rope_theta=5e5)
    with pytest.raises(
        dora.UserError, match="config.json of this model differs from that of the base"
    ):
        dora.load_adapter(tiny((64, 4, "affine")), adapter[0], config)
    smaller = tiny((64, 4, "affine"), num_hidden_layers=1)
    with pytest.raises(dora.UserError, match="this one has no model.layers.1"):
        dora.load_adapter(smaller, adapter[0])


def test_an_adapter_saved_without_config_loads_with_one(tmp_path):
    dora.save_adapter(tmp_path, adapted_model())
    model = tiny((64, 4, "affine"))
    dora.load_adapter(model, tmp_path, tiny_config())
    assert apart(model(TOKENS), adapted_model().eval()(TOKENS)) < 1e-6


def test_full_weights_are_an_adapter_too(tmp_path):
    model = tiny()
    model.freeze()
    model.layers[1].unfreeze()
    model.layers[1].apply(lambda a: a + 0.1)
    file = saved(tmp_path, model)
    fresh = tiny()
    assert dora.load_adapter(fresh, file, tiny_config())["kind"] == "full"
    assert mx.array_equal(fresh(TOKENS), model(TOKENS))
    done = run_cli("dora", "info", file)
    assert done.returncode == 0 and done.stdout.startswith("full weights"), done.stderr
    with pytest.raises(dora.UserError, match=r"got \(128, 128\), wanted \(128, 16\)"):
        dora.load_adapter(tiny((64, 4, "affine")), file)


# --- Fusing a layer -------------------------------------------------------------------------------


def wanted_weight(layer) -> np.ndarray:
    W, A, B = map(numbers, (dequantized(layer.linear), layer.lora_a, layer.lora_b))
    V = W + layer.scale * (A @ B).T
    if layer.kind == "lora":
        return V
    return V * (numbers(layer.m) / np.linalg.norm(V, axis=1))[:, None]


@pytest.mark.parametrize("kind", dora.KINDS)
@pytest.mark.parametrize("how", HOWS, ids=name_of)
def test_dequantized_fuse_rounds_once(how, kind):
    mx.random.seed(20)
    for dtype, step in ((mx.float32, 2**-22), (mx.bfloat16, 2**-8), (mx.float16, 2**-11)):
        layer = make(base_layer(how, dtype, bias=True), kind=kind)
        fused, want = layer.fuse(dequantize=True, dtype=dtype), wanted_weight(layer)
        assert type(fused) is nn.Linear
        # half a step of its dtype, plus the float32 arithmetic before it
        off = np.abs(numbers(fused.weight) - want)
        assert (off <= step * 1.01 * np.abs(want) + 1e-6 * np.abs(want).max()).all()
        assert mx.array_equal(fused.bias, layer.linear.bias)


@pytest.mark.parametrize("how", HOWS[1:], ids=name_of)
def test_packed_fuse_is_within_half_a_step(how):
    """Half the distance between two codes, but for the outermost, which clip; there, and in the
    floating modes, as near as packing the wanted weight itself comes."""
    mx.random.seed(21)
    layer = make(base_layer(how, bias=True))
    fused, want = layer.fuse(), wanted_weight(layer)
    assert dora.packing(fused) == how and mx.array_equal(fused.bias, layer.linear.bias)
    got = numbers(dequantized(fused))
    if how[2] == "affine":
        groups = got.reshape(-1, how[0])
        edge = (groups == groups.min(1)[:, None]) | (groups == groups.max(1)[:, None])
        step = np.abs(np.repeat(numbers(fused.scales), how[0], axis=1))
        assert (np.abs(got - want) <= 0.501 * step)[~edge.reshape(got.shape)].all()
    again = base_layer()
    again.weight = mx.array(want, mx.float32)
    again = nn.QuantizedLinear.from_linear(again, *how)
    assert apart(got, want) <= 1.01 * apart(dequantized(again), want)


def test_doubled_magnitudes_double_the_weight():
    linear = base_layer()
    layer = dora.AdaptedLinear(linear, 4, 2.0, 0.0, "dora")
    layer.m = layer.m * 2
    assert np.abs(numbers(layer.fuse().weight) / numbers(linear.weight) / 2 - 1).max() < 3e-7


def test_a_small_change_survives_in_bfloat16_as_float64_rounded_once_would():
    mx.random.seed(22)
    layer = make(base_layer(None, mx.bfloat16, 64, 256), 1, scale=1.0, kind="lora")
    layer.linear.weight = (mx.random.normal((64, 256)) * 0.02).astype(mx.bfloat16)
    layer.lora_a, layer.lora_b = mx.full((256, 1), 2e-5), mx.ones((1, 64))
    want = mx.array(wanted_weight(layer), mx.float32).astype(mx.bfloat16)
    got, before = layer.fuse().weight, layer.linear.weight
    assert (got != want).mean().item() < 1e-3
    assert (got != before).mean().item() == pytest.approx((want != before).mean().item(), abs=1e-3)
    assert 0.05 < (got != before).mean().item()


def test_fuse_packs_as_asked():
    layer = make(base_layer(None, mx.bfloat16))
    fused = layer.fuse(bits=8, group_size=32)
    assert dora.packing(fused) == (32, 8, "affine") and fused.scales.dtype == mx.bfloat16
    assert dora.packing(layer.fuse(bits=3)) == (64, 3, "affine")
    packed = make(base_layer((32, 4, "mxfp4")))
    assert dora.packing(packed.fuse(bits=8)) == (64, 8, "affine")
    assert dora.packing(make(base_layer((32, 5, "affine"))).fuse(group_size=64)) == (
        64,
        5,
        "affine",
    )


# --- The command line -----------------------------------------------------------------------------


def test_info_says_what_is_in_a_file(adapter, tmp_path):
    done = run_cli("dora", "info", adapter[0])
    assert done.returncode == 0, done.stderr
    for text in ("dora of rank 4", "scale 7.5", "org/base", "9: ", "lm_head", "largest lora_b"):
        assert text in done.stdout
    refused(run_cli("dora", "info", tmp_path / "nope"), "no such adapter")


def test_a_misspelt_option_is_refused_and_not_absorbed():
    with pytest.raises(dora.UserError, match="unknown flag --adaptor; did you mean --adapter?"):
        dora.parse(dora.info, ["--adaptor", "x"])
    with pytest.raises(TypeError):
        dora.adapt(tiny(), knid="dora")


@pytest.mark.slow
def test_check_passes_on_this_device():
    done = run_cli("dora", "check", timeout=1200)
    assert done.returncode == 0 and "0 failed" in done.stdout, done.stdout
