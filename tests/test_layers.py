"""DoRA and LoRA on embeddings, tied heads and experts: each against float64, mlx-lm, itself."""

import importlib
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import PACKINGS, tiny_config
from mlx.utils import tree_flatten
from test_families import TINY, TOKENS, apart, family, ours, theirs

import dora
import fuse
import quant

E, O, I, V, R, S = 5, 48, 64, 90, 4, 2.0
HOW = [None, (32, 4, "affine"), (32, 4, "mxfp4"), (32, 8, "mxfp8"), (16, 4, "nvfp4")]
IDS = mx.array([[3, 0, 89], [3, 41, 7]])
EXPERTS = mx.array([0, 0, 2, 3, 3, 3, 1])


def switch(how=None, dtype=mx.float32) -> nn.Module:
    layer = quant.SwitchLinear(I, O, E)
    layer.weight = layer.weight.astype(dtype)
    return layer.to_quantized(*how) if how else layer


def embedding(how=None, dtype=mx.float32) -> nn.Module:
    layer = quant.Embedding(V, I)
    layer.weight = layer.weight.astype(dtype)
    return layer.to_quantized(*how) if how else layer


def adapted(layer: nn.Module, kind="dora", dropout=0.0, fresh=False) -> dora.AdaptedLinear:
    mx.random.seed(7)
    new = dora.adapter_for(layer)(layer, R, S, dropout, kind)
    if not fresh:
        new.lora_b = mx.random.normal(new.lora_b.shape) / 8
        if kind == "dora":
            new.m = new.m * mx.random.uniform(0.5, 2.0, new.m.shape)
    return new


def weight(layer: nn.Module) -> np.ndarray:
    """The base's W in float64, without dora.py."""
    if "scales" not in layer:
        return np.array(layer.weight.astype(mx.float32), np.float64)
    how = dict(group_size=layer.group_size, bits=layer.bits, mode=layer.mode, dtype=mx.float32)
    W = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **how)
    return np.array(W, np.float64)


def exact(layer) -> tuple[np.ndarray, np.ndarray]:
    """(adapted weight, g ⊙ it) in float64; rows are outputs, or tokens."""
    A, B = (np.array(layer[k], np.float64) for k in ("lora_a", "lora_b"))
    low_rank = B @ A if A.ndim == 3 else A @ B
    W = weight(layer.linear) + S * low_rank
    if layer.kind == "lora":
        return W, W
    n = np.linalg.norm(W, axis=-1)
    return W, W * (np.array(layer.m, np.float64) / n)[..., None]


def uses(kind: str) -> dict:
    """name -> (layer of it, how it is called, the same from W in float64)."""
    x = mx.random.normal((len(EXPERTS), 1, I), key=mx.random.key(1))
    h = mx.random.normal((2, 3, I), key=mx.random.key(2))
    x64, h64 = (np.array(a, np.float64) for a in (x, h))
    at = np.array(EXPERTS)
    return {
        "experts": (switch, lambda f: f(x, EXPERTS), lambda W: x64 @ W[at].swapaxes(-1, -2)),
        "lookup": (embedding, lambda f: f(IDS), lambda W: W[np.array(IDS)]),
        "head": (embedding, lambda f: f.as_linear(h), lambda W: h64 @ W.T),
    }[kind]


KINDS = ["experts", "lookup", "head"]


@pytest.mark.parametrize("adapter", ["dora", "lora"])
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("use", KINDS)
def test_outputs_are_those_of_the_adapted_weight_in_float64(use, how, adapter):
    make, call, wanted = uses(use)
    layer = adapted(make(how), adapter)
    for training in (True, False):
        got = call(layer.train(training))
        limit = 2e-6 if got.dtype == mx.float32 else 4e-3  # MLX looks float formats up in bfloat16
        assert apart(got, mx.array(wanted(exact(layer)[1]))) < limit


@pytest.mark.parametrize("how", HOW[:2], ids=str)
@pytest.mark.parametrize("use", KINDS)
def test_gradients_are_those_of_the_formula_with_the_norm_held(use, how):
    """By differences in float64 of sum(c ⊙ out), with n as it is now (paper, 4.3)."""
    make, call, wanted = uses(use)
    layer = adapted(make(how))
    c = mx.random.normal(call(layer).shape, key=mx.random.key(4))
    grads = dict(tree_flatten(nn.value_and_grad(layer, lambda f: (call(f) * c).sum())(layer)[1]))
    assert set(grads) == {"lora_a", "lora_b", "m"}
    n = np.linalg.norm(exact(layer)[0], axis=-1)
    leaves = {k: np.array(layer[k], np.float64) for k in grads}
    W, c64 = weight(layer.linear), np.array(c, np.float64)

    def value(lora_a, lora_b, m):
        low_rank = lora_b @ lora_a if lora_a.ndim == 3 else lora_a @ lora_b
        return (wanted((W + S * low_rank) * (m / n)[..., None]) * c64).sum()

    random = np.random.RandomState(0)
    for key, grad in grads.items():
        direction = random.standard_normal(grad.shape)
        either = [value(**leaves | {key: leaves[key] + e * direction}) for e in (1e-5, -1e-5)]
        found = (np.array(grad, np.float64) * direction).sum()
        assert found == pytest.approx((either[0] - either[1]) / 2e-5, rel=1e-4), key


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("use", KINDS)
def test_a_fresh_adapter_changes_nothing_and_keeps_the_dtype(use, how, dtype):
    make, call, _ = uses(use)
    base = make(how, dtype)
    layer = adapted(base, fresh=True)
    if use == "lookup":
        got, want = call(layer), call(base)
    else:
        inputs = mx.random.normal((7, 1, I), key=mx.random.key(1)).astype(dtype)
        got, want = (
            f(inputs, EXPERTS) if use == "experts" else f.as_linear(inputs) for f in (layer, base)
        )
    assert got.dtype == want.dtype and apart(got, want) < {mx.float32: 1e-6}.get(dtype, 4e-3)


@pytest.mark.parametrize("kind", ["dora", "lora"])
def test_dense_layers_equal_those_of_mlx_lm(kind):
    """It has no DoRA of experts, and no DoRA of packed embeddings."""
    from mlx_lm.models.switch_layers import SwitchLinear
    from mlx_lm.tuner.dora import DoRAEmbedding
    from mlx_lm.tuner.lora import LoRAEmbedding, LoRASwitchLinear

    mine = adapted(embedding(), kind)
    other = {"dora": DoRAEmbedding, "lora": LoRAEmbedding}[kind].from_base(mine.linear, R, scale=S)
    for leaf in dora.LEAVES:
        if leaf in mine:
            other[leaf] = mine[leaf]
    h = mx.random.normal((2, 3, I))
    assert apart(mine(IDS), other(IDS)) < 1e-6
    assert apart(mine.as_linear(h), other.as_linear(h)) < 1e-6
    if kind == "lora":
        base = SwitchLinear(I, O, E, bias=True)
        base.bias = mx.random.normal(base.bias.shape)
        mine, other = adapted(base, kind), LoRASwitchLinear.from_base(base, R, scale=S)
        other.lora_a, other.lora_b = mine.lora_a, mine.lora_b
        x = mx.random.normal((len(EXPERTS), 1, I))
        assert apart(mine(x, EXPERTS), other(x, EXPERTS)) < 1e-6


def test_a_bias_of_experts_is_not_scaled():
    from mlx_lm.models.switch_layers import SwitchLinear

    base = SwitchLinear(I, O, E, bias=True)
    base.bias = mx.random.normal(base.bias.shape)
    layer = adapted(base)
    x = mx.random.normal((len(EXPERTS), 1, I))
    W, at = exact(layer)[1], np.array(EXPERTS)
    wanted = np.array(x, np.float64) @ W[at].swapaxes(-1, -2) + np.array(base.bias)[at][:, None]
    assert apart(layer(x, EXPERTS), mx.array(wanted)) < 2e-6


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("use", KINDS)
def test_fused_layers_are_plain_and_hold_the_adapted_weight(use, how):
    make, call, wanted = uses(use)
    layer = adapted(make(how))
    new = layer.fuse()
    assert "lora_a" not in new and ("scales" in new) == bool(how)
    if how is None:
        assert apart(call(new), mx.array(wanted(exact(layer)[1]))) < 2e-6
    else:
        W = mx.quantize(mx.array(exact(layer)[1].astype(np.float32)), how[0], how[1], mode=how[2])
        plain = mx.dequantize(*W, group_size=how[0], bits=how[1], mode=how[2], dtype=mx.float32)
        assert apart(call(new), mx.array(wanted(np.array(plain, np.float64)))) < 1e-2


@pytest.mark.parametrize("use", KINDS)
def test_dropout_is_of_the_low_rank_part_in_training_only(use):
    make, call, _ = uses(use)
    layer, fresh = adapted(make(), dropout=0.5), adapted(make(), dropout=0.5, fresh=True)
    assert not mx.array_equal(call(layer.train()), call(layer))
    assert mx.array_equal(call(layer.eval()), call(layer))
    assert mx.array_equal(call(fresh.train()), call(fresh))


# --- In models ------------------------------------------------------------------------------------


def perturbed(model: nn.Module, **how) -> list[str]:
    mx.random.seed(3)
    paths = dora.adapt(model, R, S, **how)
    for layer in dora.adapted(model).values():
        layer.lora_b = mx.random.normal(layer.lora_b.shape) / 16
    return paths


def test_experts_are_adapted_without_a_key_and_routers_only_by_name(tmp_path):
    model = ours(family(tmp_path / "m", "qwen3_5_moe"))
    paths = dora.adapt(model)
    names = {p.split(".", 3)[3] for p in paths}
    assert {"mlp.switch_mlp.up_proj", "mlp.shared_expert.up_proj", "linear_attn.in_proj_z"} <= names
    assert not any(n.endswith("gate") or "conv" in n or "norm" in n for n in names)
    dora.remove(model)
    assert dora.adapt(model, keys=["mlp.gate"], num_layers=1) == ["model.layers.3.mlp.gate"]


@pytest.mark.parametrize("kind", ["dora", "lora"])
@pytest.mark.parametrize("packing", [None, PACKINGS[4]], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_5_moe", "gemma3_text", "phi3"])
def test_adapters_travel_and_fit_the_models_of_mlx_lm(tmp_path, name, packing, kind):
    """Saved, loaded, put on mlx-lm's own modules: the same logits everywhere."""
    folder = family(tmp_path / "m", name, packing)
    config = quant.load(str(folder))[2]
    model, keys = ours(folder), ["*_proj", "embed_tokens", "*switch_mlp*"]
    if "switch_mlp" not in str(model):
        keys.pop()
    before = model(TOKENS)
    perturbed(model, keys=keys, kind=kind)
    live = model.eval()(TOKENS)
    assert apart(live, before) > 0.05
    dora.save_adapter(tmp_path, model, str(folder), config)
    again = ours(folder)
    dora.load_adapter(again, str(tmp_path), config)
    assert mx.array_equal(again(TOKENS), live)
    other = theirs(folder)
    inner = other.language_model if "language_model" in other else other
    dora.load_adapter(inner, str(tmp_path), config)
    assert apart(other.eval()(TOKENS), live) < 2e-5
    if kind == "lora" and name != "qwen3_5_moe":  # whose paths mlx-lm prefixes
        from mlx_lm.tuner.utils import load_adapters

        plain = load_adapters(theirs(folder), str(tmp_path))
        assert apart(plain.eval()(TOKENS), live) < 2e-5


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5", "gemma2"])
def test_training_lowers_the_loss(tmp_path, name):
    import mlx.optimizers as optim

    model = ours(family(tmp_path / "m", name, PACKINGS[4]))
    dora.adapt(model, R, S, keys=None)
    model.train()
    method, tokens = optim.Adam(1e-2), TOKENS[:, :40]

    def loss(model):
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()

    step, losses = nn.value_and_grad(model, loss), []
    for _ in range(8):
        value, grads = step(model)
        method.update(model, grads)
        losses.append(value.item())
    assert losses[-1] < losses[0] - 0.5, losses


def test_no_dense_copy_of_all_experts_is_made():
    """Forward and backward of DoRA on packed experts, whose dense form would be 64 MB."""
    mx.random.seed(0)
    E, O, I = 16, 1024, 1024
    base = quant.QuantizedSwitchLinear(mx.random.normal((E, O, I)), 64, 4, "affine")
    layer = dora.adapter_for(base)(base, R, S, 0.0, "dora")
    experts = mx.sort(mx.random.randint(0, E, (64,)))
    x = mx.random.normal((64, 1, I))
    mx.eval(layer.parameters(), x, experts)
    grad = nn.value_and_grad(layer, lambda f: f(x, experts, sorted_indices=True).sum())
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(grad(layer))
    assert mx.get_peak_memory() - before < E * O * I * 4 / 4


@pytest.mark.parametrize("packing", [None, PACKINGS[10], PACKINGS[-2]], ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe", "gemma2", "granite"])
def test_every_layer_fuses_into_what_the_live_adapter_is(tmp_path, monkeypatch, name, packing):
    """Experts, delta nets, a tied embedding in both its uses: dense and beside a scaled base to
    rounding, in mlx-lm as here; packed as near as packing leaves each weight."""
    monkeypatch.setattr(fuse, "ROWS", 2)
    monkeypatch.setattr(fuse, "LENGTH", 32)
    folder = family(tmp_path / "m", name, packing, tie_word_embeddings=True)
    model, tokens = ours(folder), TOKENS[:, :8]
    before = model(tokens)
    keys = ["q_proj", "down_proj", *(["in_proj_z"] if "5" in name else [])]
    if not packing or packing["mode"] == "affine":  # MLX looks float formats up in bfloat16
        keys.append("embed_tokens")
    paths = perturbed(model, keys=keys)
    live = model.eval()(tokens)
    assert apart(live, before) > 0.05
    dora.save_adapter(tmp_path, model, str(folder), quant.load(str(folder))[2])

    def fused(way, **flags):
        fuse.fuse([str(tmp_path)], save_path=str(tmp_path / way), **flags)
        return ours(tmp_path / way), theirs(tmp_path / way)

    dense, other = fused("dense", dequantize=True)
    assert apart(dense(tokens), live) < 2e-5 and apart(other(tokens), live) < 2e-5
    mine, other = fused("packed")
    assert apart(mine(tokens), other(tokens)) < 2e-5
    layers, wanted = dict(mine.named_modules()), dict(dense.named_modules())
    for path in paths if packing else ():
        W = mx.array(weight(layers[path]).astype(np.float32))
        assert "scales" in layers[path] and 1e-3 < apart(W, wanted[path].weight) < 0.05
    if not packing or packing["mode"] == "affine":
        mine, _ = fused("lora", to="lora")
        dora.load_adapter(mine, str(tmp_path / "lora" / "adapters"))
        assert apart(mine(tokens), live) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "module, name",
    [
        ("gemma3", "gemma3_text"),
        ("qwen3_vl", "qwen3"),
        ("qwen3_vl_moe", "qwen3_moe"),
        ("qwen3_5_moe", "qwen3_5_moe"),
    ],
)
def test_the_text_models_of_mlx_vlm_itself_are_adapted(module, name, packed):
    """pip install --no-deps mlx-vlm"""
    pytest.importorskip("mlx_vlm")
    package = importlib.import_module(f"mlx_vlm.models.{module}")
    config = tiny_config(name, **TINY.get(name, {}))
    config = {"mlp_only_layers": [], "decoder_sparse_step": 1} | config
    if "vl" in module:
        config["rope_scaling"] = {"type": "default", "mrope_section": [4, 6, 6]}
    model = package.LanguageModel(package.TextConfig.from_dict(config))
    vision = SimpleNamespace(spatial_merge_size=2)
    ids = dict(image_token_id=299, video_token_id=298, vision_start_token_id=297)
    model.config = SimpleNamespace(vision_config=vision, **ids)
    if packed:
        nn.quantize(model, 32, 4, class_predicate=lambda p, m: hasattr(m, "to_quantized"))
    tokens = TOKENS[:, :8]
    before = model(tokens).logits
    paths = dora.adapt(model, R, S)
    assert len(paths) > 10 and ("moe" in module) == any("switch_mlp" in p for p in paths)
    assert apart(model(tokens).logits, before) < 1e-5
    for layer in dora.adapted(model).values():
        layer.lora_b = mx.random.normal(layer.lora_b.shape) / 16
    assert apart(model(tokens).logits, before) > 0.05
    model.train()
    grads = nn.value_and_grad(model, lambda m: mx.square(m(tokens).logits).sum())(model)[1]
    found = dict(tree_flatten(grads))
    assert {k.rpartition(".")[0] for k in found} == set(paths)
    assert all(mx.any(g != 0).item() for g in found.values())
