"""quant.py against float64 numpy, against mlx-lm, and against what people's folders look like."""

import functools
import json
import math
import os
import platform
import shutil
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import CHATML, FAMILIES, PACKINGS, tiny_config, tiny_tokenizer, write_model
from mlx.utils import tree_flatten

import quant

TOKENS = [5, 17, 250, 3, 99, 99, 41]
HALF = [mx.bfloat16, mx.float16]
LIMIT = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}


def label(packing: dict | None) -> str:
    return "{mode}{bits}g{group_size}".format(**packing) if packing else "dense"


# --- References -----------------------------------------------------------------------------------


def plain_weights(folder) -> dict:
    """The tensors of a saved folder in float64, packed ones dequantized, without quant.py."""
    loaded = {}
    for file in folder.glob("*.safetensors"):
        loaded |= mx.load(str(file))
    how = json.loads((folder / "config.json").read_text()).get("quantization", {})
    default, plain = {k: v for k, v in how.items() if not isinstance(v, dict | bool)}, {}
    for name, array in loaded.items():
        path, _, leaf = name.rpartition(".")
        if leaf in ("scales", "biases"):
            continue
        if leaf == "weight" and f"{path}.scales" in loaded:
            packed = [array, loaded[f"{path}.scales"], loaded.get(f"{path}.biases")]
            array = mx.dequantize(*packed, **how.get(path, default))
        plain[name] = np.array(array.astype(mx.float32), np.float64)
    return plain


def turned(x, positions, frequencies):
    """x (T, heads, d): halves a, b become (a cos - b sin, b cos + a sin)."""
    angle = np.multiply.outer(np.asarray(positions, np.float64), frequencies)[:, None]
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def reference(config: dict, w: dict, tokens: list, windows=None) -> np.ndarray:
    """The decoder in float64 with an explicit mask per layer: logits (T, V) of one sequence."""
    T, layers = len(tokens), config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    shared = heads // config.get("num_key_value_heads", heads)
    d = config.get("head_dim") or config["hidden_size"] // heads
    frequencies = 1 / config["rope_theta"] ** (np.arange(0, d, 2) / d)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def normed(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[name]

    ago = np.arange(T)[:, None] - np.arange(T)[None]
    h = w["model.embed_tokens.weight"][tokens]
    for i in range(layers):
        name = f"model.layers.{i}"
        x = normed(h, f"{name}.input_layernorm.weight")
        q, k, v = (linear(x, f"{name}.self_attn.{p}_proj").reshape(T, -1, d) for p in "qkv")
        if config["model_type"] == "qwen3":
            q = normed(q, f"{name}.self_attn.q_norm.weight")
            k = normed(k, f"{name}.self_attn.k_norm.weight")
        q, k = (turned(a, range(T), frequencies) for a in (q, k))
        k, v = (np.repeat(a, shared, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(d)
        window = (windows or [None] * layers)[i]
        scores[:, (ago < 0) | (ago >= (window or T))] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", p, v).reshape(T, -1)
        h = h + linear(mixed, f"{name}.self_attn.o_proj")
        x = normed(h, f"{name}.post_attention_layernorm.weight")
        gate = linear(x, f"{name}.mlp.gate_proj")
        inner = gate / (1 + np.exp(-gate)) * linear(x, f"{name}.mlp.up_proj")
        h = h + linear(inner, f"{name}.mlp.down_proj")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return normed(h, "model.norm.weight") @ head.T


def float32(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def ours(folder, tokens=TOKENS) -> np.ndarray:
    return float32(quant.load(str(folder))[0](mx.array([tokens]))[0])


def theirs(folder, tokens=TOKENS, dtype=None) -> np.ndarray | None:
    """mlx-lm's logits; None if they are not of `dtype`."""
    from mlx_lm.utils import load_model

    logits = load_model(folder)[0](mx.array([tokens]))[0]
    return float32(logits) if dtype is None or dtype == logits.dtype else None


def apart(got, wanted) -> float:
    """Relative error in the 2-norm."""
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def agree(folder, dtype=mx.float32, windows=None) -> None:
    """Ours equals float64 and mlx-lm in float32; in half precision it is as near as mlx-lm is.

    mlx-lm goes on in float32 where a packed embedding in one of the float formats meets float16
    norms; then there is only a limit.
    """
    config = json.loads((folder / "config.json").read_text())
    exact = reference(config, plain_weights(folder), TOKENS, windows)
    mine, other = ours(folder), theirs(folder, dtype=dtype)
    assert apart(mine, exact) < LIMIT[dtype]
    if other is not None and dtype == mx.float32:
        assert apart(mine, other) < LIMIT[dtype]
    elif other is not None:
        assert apart(mine, exact) <= 2 * apart(other, exact)


def edit(folder, config=None, weights=None) -> None:
    """Changes a saved folder: `config` keys (None removes), `weights(dict)` in place."""
    if config:
        old = json.loads((folder / "config.json").read_text())
        new = {k: v for k, v in (old | config).items() if v is not None}
        (folder / "config.json").write_text(json.dumps(new))
    if weights:
        file = folder / "model.safetensors"
        arrays = mx.load(str(file))
        mx.eval(arrays)
        weights(arrays)
        mx.save_safetensors(str(file), arrays, {"format": "mlx"})


def refuses(folder, *said: str) -> str:
    with pytest.raises(quant.UserError) as error:
        quant.load(str(folder))
    for text in said:
        assert text in str(error.value), f"{text!r} not in {str(error.value)!r}"
    return str(error.value)


# --- Logits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, *HALF], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_logits_equal_the_reference_and_mlx_lm(tmp_path, family, dtype):
    agree(write_model(tmp_path / "m", tiny_config(family), dtype=dtype), dtype)


@pytest.mark.parametrize("packing", PACKINGS, ids=label)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_equal_the_reference_and_mlx_lm(tmp_path, family, packing):
    agree(write_model(tmp_path / "m", tiny_config(family), packing))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("packing", [PACKINGS[i] for i in (2, 5, -3, -1)], ids=label)
def test_packed_half_precision_is_as_near_float64_as_mlx_lm(tmp_path, packing, dtype):
    agree(write_model(tmp_path / "m", tiny_config("qwen2"), packing, dtype), dtype)


@pytest.mark.parametrize("packing", [None, PACKINGS[4], PACKINGS[-1]], ids=label)
@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True, "attention_bias": True}),
        ("mistral", {"head_dim": 48}),
        ("llama", {"num_key_value_heads": None}),
        ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 3}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("llama", {"rope_theta": 500000.0, "rms_norm_eps": 1e-3}),
    ],
    ids=str,
)
def test_config_options_change_the_model_as_they_say(tmp_path, family, changes, packing):
    agree(write_model(tmp_path / "m", tiny_config(family, **changes), packing))


def test_qwen3_may_have_attention_biases(tmp_path):  # Hugging Face's has, mlx-lm's has not
    config = tiny_config("qwen3", attention_bias=True)
    folder = write_model(tmp_path / "m", config)
    weights = plain_weights(folder)
    assert "model.layers.0.self_attn.o_proj.bias" in weights
    assert apart(ours(folder), reference(config, weights, TOKENS)) < 1e-5


MIXED = {
    "model.layers.0.self_attn.q_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "model.layers.1.mlp.down_proj": {"group_size": 64, "bits": 8, "mode": "affine"},
    "model.layers.1.self_attn.v_proj": {"group_size": 128, "bits": 3, "mode": "affine"},
    "model.layers.1.self_attn.o_proj": False,
    "lm_head": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}


def write_mixed(folder, default, overrides, **changes):
    """A model packed as `default` except where `overrides` says otherwise."""
    config = tiny_config("qwen2", **changes)
    mx.random.seed(3)
    model = quant.Model(quant.Spec.read(config))

    def how(path, module):
        return hasattr(module, "to_quantized") and overrides.get(path, default)

    nn.quantize(model, class_predicate=how)
    folder.mkdir(parents=True)
    config["quantization"] = default | overrides
    weights = dict(tree_flatten(model.parameters()))
    quant.save(folder, weights, config, quant.Tokenizer(tiny_tokenizer(), config))
    return folder


@pytest.mark.parametrize("default", [PACKINGS[4], PACKINGS[-3], PACKINGS[-1]], ids=label)
def test_layers_packed_each_in_its_own_way(tmp_path, default):
    folder = write_mixed(tmp_path / "m", default, MIXED)
    agree(folder)
    model = quant.load(str(folder))[0]
    layer = model.layers[1].self_attn
    assert (model.lm_head.mode, layer.v_proj.bits, layer.v_proj.group_size) == ("nvfp4", 3, 128)
    assert "scales" not in layer.o_proj


def test_an_override_without_a_mode_is_affine(tmp_path):
    path = "model.layers.0.self_attn.k_proj"
    affine = {path: {"group_size": 64, "bits": 6}}
    folder = write_mixed(tmp_path / "m", PACKINGS[-3], affine)
    assert quant.load(str(folder))[0].layers[0].self_attn.k_proj.mode == "affine"
    agree(folder)


def test_an_override_of_true_means_the_default(tmp_path):
    folder = write_mixed(tmp_path / "m", PACKINGS[-3], {})
    edit(folder, {"quantization": PACKINGS[-3] | {"lm_head": True}})
    assert quant.load(str(folder))[0].lm_head.mode == "mxfp4"


def test_a_batch_is_its_rows_and_one_token_its_own_sequence(packed):
    model = quant.load(str(packed))[0]
    rows = mx.array([TOKENS, TOKENS[::-1]])
    both = model(rows)
    for row, got in zip(rows, both, strict=True):
        assert apart(float32(model(row[None])[0]), float32(got)) < 1e-5
    assert apart(float32(model(rows[:, :1])), float32(both[:, :1])) < 1e-5
    assert mx.array_equal(model.head(model.hidden(rows)), both)


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16", "float32"])
def test_load_converts_to_the_dtype_asked_for(tmp_path, dtype):
    folder = write_model(tmp_path / "m", packing=PACKINGS[4], dtype=mx.bfloat16)
    logits = quant.load(str(folder), dtype)[0](mx.array([TOKENS]))
    assert logits.dtype == quant.DTYPES[dtype or "bfloat16"]
    assert apart(float32(logits[0]), theirs(folder)) < 0.05


def test_every_layers_output_keeps_the_dtype(tmp_path):
    folder = write_model(tmp_path / "m", tiny_config("qwen3"), PACKINGS[4], mx.bfloat16)
    model = quant.load(str(folder))[0]
    h = model.model.embed_tokens(mx.array([TOKENS]))
    for layer in model.layers:
        h = layer(h, "causal")
        assert h.dtype == mx.bfloat16


def test_checkpointing_gives_the_same_gradients(dense):
    model = quant.load(str(dense))[0]
    model.unfreeze()
    model.train()
    tokens = mx.array([TOKENS])

    def total():
        return nn.losses.cross_entropy(model(tokens), tokens).sum()

    def gradients(checkpoint):
        model.checkpoint = range(99 * checkpoint)
        value, grads = nn.value_and_grad(model, total)()
        return {"loss": value} | dict(tree_flatten(grads))

    plain, saved = gradients(False), gradients(True)
    assert plain.keys() == saved.keys() and len(plain) == 1 + len(tree_flatten(model.parameters()))
    for name, grad in plain.items():
        assert mx.abs(grad).max() > 0, name
        assert apart(float32(saved[name]), float32(grad)) < 1e-5, name
    cache = model.make_cache()  # and with a cache, both ways keep it
    model(tokens[:, :3], cache)
    assert cache[0].offset == 3


# --- RoPE -----------------------------------------------------------------------------------------

D, THETA, LONGEST = 64, 10000.0, 4096
SHORT = [1 + i / 100 for i in range(D // 2)]
LONG = [2 + i for i in range(D // 2)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
ROPES = [
    {},
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 8192},
    {"rope_type": "llama3", **LLAMA3, "factor": 32.0, "original_max_position_embeddings": 512},
    YARN,
    {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    {**YARN, "attention_factor": 1.25},
    {**YARN, "truncate": False},
    {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 1024,
    },
    {
        "rope_type": "longrope",
        "factor": 3.0,
        "short_factor": SHORT,
        "long_factor": LONG,
        "attention_factor": 1.5,
    },
]
ROPE_IDS = [f"{i}-{r.get('rope_type', 'none')}" for i, r in enumerate(ROPES)]


def pair_turns(rope: dict, length: int) -> tuple[list, float]:
    """Radians per position for each pair, one pair at a time, and what q and k are scaled by."""
    kind, factor = rope.get("rope_type", "default"), rope.get("factor")
    original = rope.get("original_max_position_embeddings", LONGEST)
    speeds, scale = [], 1.0
    for i in range(D // 2):
        speed = THETA ** (-2 * i / D)
        if kind == "linear":
            speed /= factor
        elif kind == "dynamic":
            n = max(length, LONGEST)
            grown = THETA * (factor * n / LONGEST - (factor - 1)) ** (D / (D - 2))
            speed = grown ** (-2 * i / D)
        elif kind == "llama3":
            wave = 2 * math.pi / speed
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wave > original / low:
                speed /= factor
            elif wave > original / high:
                smooth = (original / wave - low) / (high - low)
                speed = (1 - smooth) * speed / factor + smooth * speed
        elif kind == "yarn":
            # the pair index, as a real number, that makes `turns` turns over the original context
            first, last = (
                D * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(THETA))
                for turns in (rope.get("beta_fast", 32), rope.get("beta_slow", 1))
            )
            if rope.get("truncate", True):
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, D - 1)
            ramp = min(max((i - first) / (last - first), 0), 1)
            speed = ramp * speed / factor + (1 - ramp) * speed
            grow = 0.1 * math.log(factor)
            over, under = rope.get("mscale", 1), rope.get("mscale_all_dim", 0)
            scale = (over * grow + 1) / (under * grow + 1)
            scale = rope.get("attention_factor", scale)
        elif kind == "longrope":
            speed /= (LONG if length > original else SHORT)[i]
            ratio = factor or LONGEST / original
            scale = math.sqrt(1 + math.log(ratio) / math.log(original))
            scale = rope.get("attention_factor", scale)
        speeds.append(speed)
    return speeds, scale


def rope_of(scaling: dict | None, **changes) -> quant.RoPE:
    changes = {"head_dim": D, "max_position_embeddings": LONGEST} | changes
    config = tiny_config(rope_scaling=scaling, **changes)
    return quant.RoPE(quant.Spec.read(config).rope, LONGEST)


@pytest.mark.parametrize("position", [0, 1, 8191, 40000])
@pytest.mark.parametrize("rope", ROPES, ids=ROPE_IDS)
def test_rope_turns_pairs_as_the_papers_say(rope, position):
    x = np.random.default_rng(0).normal(size=(1, 3, 2, D))  # (B, heads, T, D)
    got = rope_of(rope or None)(mx.array(x.astype(np.float32)), offset=position)
    speeds, scale = pair_turns(rope, position + 2)
    wanted = turned(x[0].swapaxes(0, 1) * scale, [position, position + 1], speeds)
    # an angle of p radians in float32 is p * 2^-24 off, and its factors likewise
    error = np.abs(np.array(got[0]).swapaxes(0, 1) - wanted).max()
    assert error < 4e-6 + 5e-7 * position


# mlx-lm's longrope always takes the long factors, also within the original context, and ignores a
# given attention_factor; its yarn ignores attention_factor and truncate
SHARED = [r for r in ROPES if not {"attention_factor", "truncate"} & r.keys()]


@pytest.mark.parametrize("position", [0, 1, 8191, 40000])
@pytest.mark.parametrize("rope", SHARED, ids=lambda r: ROPE_IDS[ROPES.index(r)])
def test_rope_agrees_with_mlx_lm_where_it_has_the_same_formula(rope, position):
    from mlx_lm.models.rope_utils import initialize_rope

    if rope.get("rope_type") == "longrope":
        position += 1024
    other = initialize_rope(D, THETA, False, rope or None, LONGEST)
    x = mx.random.normal((1, 3, 1, D), key=mx.random.key(1))
    got, wanted = rope_of(rope or None)(x, offset=position), other(x, offset=position)
    assert mx.abs(got - wanted).max().item() < 4e-6 + 5e-7 * position


@pytest.mark.parametrize("rope", ROPES[2:], ids=ROPE_IDS[2:])
def test_rope_is_read_under_every_spelling(rope):
    kind = rope["rope_type"]
    named = {k: v for k, v in rope.items() if k != "rope_type"}
    spec = quant.Spec.read(tiny_config(rope_scaling=rope, rope_theta=5e4)).rope
    old = tiny_config(rope_scaling={**named, "type": kind}, rope_theta=5e4)
    new = tiny_config(rope_parameters={**rope, "rope_theta": 5e4}, rope_theta=None)
    for config in (old, new):
        read = quant.Spec.read(config).rope
        assert {k: v for k, v in read.items() if k != "type"} == spec


def test_longrope_finds_the_original_context_beside_the_scaling():
    scaling = {k: v for k, v in ROPES[-2].items() if k != "original_max_position_embeddings"}
    beside = rope_of(scaling, original_max_position_embeddings=1024)
    x = mx.random.normal((1, 3, 1, D))
    assert mx.array_equal(beside(x, offset=2000), rope_of(ROPES[-2])(x, offset=2000))
    assert not mx.allclose(beside(x, offset=2000), rope_of(scaling)(x, offset=2000), atol=1e-2)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"rope_scaling": {"rope_type": "foo", "factor": 2.0}}, ["'foo'", "yarn", "longrope"]),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, ["'mrope'"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["'linear'", "factor"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["'llama3'", "low_freq_factor"]),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}},
            ["'longrope'", "short_factor"],
        ),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'"]),
        ({"model_type": "mamba"}, ["'mamba'", "llama, mistral, mixtral, olmo2, phi3, qwen2"]),
        ({"hidden_size": None}, ["lacks hidden_size"]),
        ({"layer_types": ["linear_attention"] * 2}, ["linear_attention"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "1", "2"]),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_done_is_refused_by_name(dense, tmp_path, changes, said):
    folder = tmp_path / "m"
    copy(dense, folder)
    edit(folder, changes)
    refuses(folder, *said)


def copy(source, target):
    target.mkdir(parents=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


# --- Sliding windows and the cache ----------------------------------------------------------------

SLIDING = [
    ("mistral", {"sliding_window": 5}, [5, 5, 5]),
    ("mistral", {"sliding_window": 1}, [1, 1, 1]),
    ("mistral", {"sliding_window": 0}, [None] * 3),
    ("mistral", {"sliding_window": 20}, [20] * 3),
    ("qwen2", {"sliding_window": 4, "use_sliding_window": False}, [None] * 3),
    (
        "qwen2",
        {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
        [None, 4, 4],
    ),
    ("qwen2", {"sliding_window": 4, "use_sliding_window": True}, [None] * 3),  # from layer 28 on
    (
        "qwen3",
        {
            "sliding_window": 3,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        [3, None, 3],
    ),
    (
        "qwen3",
        {
            "sliding_window": 3,
            "use_sliding_window": False,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        [None] * 3,
    ),
    (
        "llama",
        {
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        [None, 6, None],
    ),
]
THIRTEEN = [5, 17, 250, 3, 99, 99, 41, 7, 8, 120, 66, 4, 200]


@pytest.mark.parametrize("family, changes, windows", SLIDING, ids=str)
def test_windows_equal_a_masked_reference_cached_or_not(tmp_path, family, changes, windows):
    config = tiny_config(family, num_hidden_layers=3, **changes)
    folder = write_model(tmp_path / "m", config)
    exact = reference(config, plain_weights(folder), THIRTEEN, windows)
    model = quant.load(str(folder))[0]
    tokens = mx.array([THIRTEEN])
    assert apart(float32(model(tokens)[0]), exact) < 1e-5
    for pieces in ([1] * 13, [3, 4, 1, 5], [7, 1, 1, 4], [13], [1, 12]):
        cache, out = model.make_cache(), []
        for piece in np.split(np.array(THIRTEEN), np.cumsum(pieces)[:-1]):
            out.append(model(mx.array(piece[None]), cache))
        assert apart(float32(mx.concatenate(out, axis=1)[0]), exact) < 1e-5, pieces
    if family == "llama":
        assert apart(theirs(folder, THIRTEEN), exact) < 1e-5


def test_a_window_bounds_what_the_cache_keeps():
    cache = quant.KVCache(window=4)
    for _ in range(30):
        keys, _ = cache.update_and_fetch(mx.ones((1, 2, 1, 8)), mx.ones((1, 2, 1, 8)))
    assert keys.shape[2] == cache.keys.shape[2] == 4 and cache.offset == 30


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 7}], ids=str)
def test_a_long_prompt_prefilled_in_chunks_continues_as_if_whole(tmp_path, changes):
    config = tiny_config("mistral", max_position_embeddings=2048, **changes)
    model = quant.load(str(write_model(tmp_path / "m", config)))[0]
    ids = np.random.default_rng(0).integers(5, 300, 1100).tolist()
    got = list(quant.stream(model, ids, set(), 6))
    whole = model(mx.array([ids + got]))[0].argmax(-1).tolist()
    assert got == whole[1099:-1] and len(set(got)) > 1


# --- What a folder may have wrong -----------------------------------------------------------------


def test_tensors_that_do_not_fit_are_all_listed_with_both_shapes(dense, tmp_path):
    folder = copy(dense, tmp_path / "m")

    def damage(w):
        w["model.layers.7.extra.weight"] = mx.zeros((3, 5))
        del w["model.layers.1.mlp.up_proj.weight"]
        w["model.norm.weight"] = mx.zeros((64,))
        w["lm_head.weight"] = mx.zeros((300, 128), mx.uint8)

    edit(folder, weights=damage)
    text = refuses(
        folder,
        "4 tensors",
        "model.layers.7.extra.weight: not a parameter of this model, (3, 5)",
        "model.layers.1.mlp.up_proj.weight: missing, wanted (256, 128)",
        "model.norm.weight: got (64,), wanted (128,)",
        "lm_head.weight: got mlx.core.uint8, wanted mlx.core.float32",
    )
    assert len(text.splitlines()) == 5


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("config.json", None, ["no config.json"]),
        ("config.json", b'{"model_type": ', ["config.json", "not valid JSON"]),
        ("config.json", b"[1, 2]", ["config.json", "got a JSON list"]),
        ("config.json", b"\xff\xfe\x00", ["config.json", "not valid JSON"]),
        ("model.safetensors", None, ["no *.safetensors"]),
        ("model.safetensors", b"", ["model.safetensors", "damaged or cut short"]),
        ("model.safetensors", b"x" * 500, ["model.safetensors", "damaged or cut short"]),
        ("model.safetensors.index.json", b"{", ["index.json", "not valid JSON"]),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
            ["model-00001-of-00002.safetensors", "not there"],
        ),
        ("tokenizer.json", None, ["no tokenizer.json"]),
        ("tokenizer.json", b'{"model": {"type": "Nonsense"}}', ["not a tokenizer"]),
        ("tokenizer.json", b"\xff", ["not a tokenizer"]),
        ("tokenizer_config.json", b"{,}", ["tokenizer_config.json", "not valid JSON"]),
        ("generation_config.json", b"7", ["generation_config.json", "got a JSON int"]),
    ],
    ids=str,
)
def test_a_missing_or_broken_file_is_named(dense, tmp_path, name, content, said):
    folder = copy(dense, tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_bytes(content)
    refuses(folder, *said)


@pytest.mark.parametrize("cut", [1, 1000, 300_000])
def test_a_truncated_weight_file_is_found_at_load(dense, tmp_path, cut):
    folder = copy(dense, tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    refuses(folder, "model.safetensors", "damaged or cut short")


def test_an_index_without_a_map_and_foreign_weight_files_do_not_matter(dense, tmp_path):
    folder = copy(dense, tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text("{}")
    mx.save_safetensors(str(folder / "consolidated.safetensors"), {"tok.weight": mx.ones((2, 2))})
    assert apart(ours(folder), ours(dense)) == 0


@pytest.mark.parametrize("path", ["no/such/folder", "nowhere", "../x", "/x/y", "no.gguf", "a/"])
def test_a_path_that_is_nothing_is_refused_without_asking_the_hub(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refuses(path, path, "no such")


def test_a_file_that_is_no_gguf_is_refused(dense):
    refuses(dense / "config.json", "got a file", ".gguf")


def test_an_unknown_dtype_is_refused(dense):
    with pytest.raises(quant.UserError, match="'float8'.*bfloat16"):
        quant.load(str(dense), "float8")


@pytest.mark.parametrize(
    "method, said",
    [
        ({"quant_method": "awq", "bits": 4}, ["'awq'", "original or an MLX conversion"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, ["'gptq'"]),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["'bitsandbytes'"]),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            ["'compressed-tensors'", "float-quantized"],
        ),
        ({"quant_method": "fp8"}, ["'fp8'"]),
    ],
    ids=str,
)
def test_another_tools_packing_is_named_with_its_format(dense, tmp_path, method, said):
    folder = copy(dense, tmp_path / "m")
    edit(folder, {"quantization_config": method})
    refuses(folder, *said)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": None},
        {"quantization": None},
        {},
        {"quantization_config": {"quant_method": "mlx", **PACKINGS[4]}},
    ],
    ids=["quantization", "quantization_config", "both", "both, one with a method"],
)
def test_quantization_is_read_under_either_key(packed, tmp_path, changes):
    folder = copy(packed, tmp_path / "m")
    edit(folder, changes)
    assert apart(ours(folder), ours(packed)) == 0
    assert quant.load(str(folder))[2]["quantization"]["bits"] == 4


def test_a_null_quantization_is_no_quantization(packed, dense, tmp_path):
    folder = copy(packed, tmp_path / "m")
    text = json.loads((folder / "config.json").read_text()) | {"quantization": None}
    (folder / "config.json").write_text(json.dumps(text))
    assert apart(ours(folder), ours(packed)) == 0
    folder = copy(dense, tmp_path / "d")
    text = json.loads((folder / "config.json").read_text()) | {"quantization": None}
    (folder / "config.json").write_text(json.dumps(text))
    assert "quantization" not in quant.load(str(folder))[2]


LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "packing, said",
    [
        (PACKINGS[4] | {LAYER: {"group_size": 32, "bits": 8}}, [f"{LAYER}.weight", "(128, 32)"]),
        (PACKINGS[4] | {LAYER: {"group_size": 32, "bits": 7}}, [LAYER, "bits got 7", "8)"]),
        (PACKINGS[4] | {LAYER: {"group_size": 48, "bits": 4}}, [LAYER, "group size got 48"]),
        (PACKINGS[4] | {LAYER: {"mode": "fp5"}}, [LAYER, "'fp5'", "mxfp8"]),
        (PACKINGS[4] | {LAYER: {"mode": "mxfp4", "bits": 8}}, [LAYER, "bits got 8", "mxfp4"]),
        (PACKINGS[4] | {LAYER: PACKINGS[-3]}, [f"{LAYER}.biases: not a parameter"]),
        (PACKINGS[4] | {LAYER: False}, [LAYER, "packed but"]),
        ({**PACKINGS[4], "bits": "4"}, ["bits got 4"]),
        (None, ["is packed but config.json has no `quantization`"]),
    ],
    ids=str,
)
def test_packing_that_is_not_what_the_file_has_is_refused(packed, tmp_path, packing, said):
    folder = copy(packed, tmp_path / "m")
    edit(folder, {"quantization": packing, "quantization_config": None})
    refuses(folder, *said)


def test_a_group_that_does_not_divide_the_width_is_refused(tmp_path):
    folder = write_model(tmp_path / "m", tiny_config(hidden_size=96), PACKINGS[4])
    edit(folder, {"quantization": {"group_size": 64, "bits": 4}})
    refuses(folder, "group size 64 does not divide its width 96")


def other_keys_of_an_override(packing):
    return packing | {"comment": "x", LAYER: packing | {"note": 1}}


def test_unknown_keys_in_the_quantization_are_no_trouble(packed, tmp_path):
    folder = copy(packed, tmp_path / "m")
    edit(folder, {"quantization": other_keys_of_an_override(PACKINGS[4])})
    assert apart(ours(folder), ours(packed)) == 0


@pytest.mark.parametrize("packing", [None, PACKINGS[4]], ids=label)
@pytest.mark.parametrize(
    "flag, head, outcome",
    [
        (True, None, "tied"),
        (True, "same", "tied"),
        (True, "other", "differs from the embedding"),
        (False, None, "tie_word_embeddings is false"),
        (False, "other", "untied"),
        (False, "same", "untied"),
        (None, None, "tied"),
        (None, "other", "untied"),
    ],
    ids=str,
)
def test_tied_flag_and_head_tensor_agree_or_are_refused(tmp_path, flag, head, outcome, packing):
    folder = write_model(tmp_path / "m", packing=packing)

    def change(w):
        for name in [k for k in w if k.startswith("lm_head.")]:
            if head == "same":
                w[name] = w[name.replace("lm_head", "model.embed_tokens")]
            elif head is None:
                del w[name]

    edit(folder, weights=change)
    wanted = None if outcome not in ("tied", "untied") else plain_weights(folder)
    edit(folder, {"tie_word_embeddings": flag})
    if wanted is None:
        refuses(folder, outcome)
        return
    model, _, config = quant.load(str(folder))
    assert ("lm_head" in model) == (outcome == "untied")
    assert config["tie_word_embeddings"] == (outcome == "tied")
    assert apart(ours(folder), reference(tiny_config(), wanted, TOKENS)) < 1e-5


@pytest.mark.parametrize("vision", [0, 2])
@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_the_text_model_is_taken_out_of_a_multimodal_folder(tmp_path, capsys, prefix, vision):
    plain = write_mixed(tmp_path / "plain", PACKINGS[4], MIXED)
    folder = copy(plain, tmp_path / "m")
    short = prefix.removesuffix("language_model.")

    def rename(name):  # language_model.model.layers, model.language_model.layers; both are in use
        if short and name.startswith("lm_head"):
            return name
        return prefix + (name.removeprefix("model.") if short else name)

    def wrap(w):
        for name in list(w):
            w[rename(name)] = w.pop(name)
        for i in range(vision):
            w[f"vision_tower.blocks.{i}.weight"] = mx.ones((2, 2))

    edit(folder, weights=wrap)
    text = json.loads((plain / "config.json").read_text())
    packing = {rename(k) if "." in k or k == "lm_head" else k: v for k, v in MIXED.items()}
    text.pop("quantization_config")
    text.pop("quantization")
    whole = {"model_type": "llava", "text_config": text, "vision_config": {"depth": 2}}
    whole["quantization"] = PACKINGS[4] | packing
    (folder / "config.json").write_text(json.dumps(whole))
    assert apart(ours(folder), ours(plain)) == 0
    said = capsys.readouterr().err
    assert ("ignoring 2 tensors" in said and "vision_tower.blocks.1.weight" in said) == bool(vision)


# --- Quantize, dequantize, convert ----------------------------------------------------------------


def names_in(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("packing", PACKINGS, ids=label)
def test_quantize_then_dequantize_rounds_each_weight_once(dense, tmp_path, packing):
    quant.quantize(str(dense), str(tmp_path / "q"), **packing)
    quant.dequantize(str(tmp_path / "q"), str(tmp_path / "d"))
    before, after = (mx.load(str(f / "model.safetensors")) for f in (dense, tmp_path / "d"))
    assert before.keys() == after.keys()
    for name, array in before.items():
        if array.ndim == 2:
            packed = mx.quantize(array, **packing)
            array = mx.dequantize(*packed, **packing, dtype=mx.float32)
        assert mx.array_equal(after[name], array), name
    assert apart(ours(tmp_path / "d"), ours(tmp_path / "q")) < 1e-5
    assert apart(theirs(tmp_path / "q"), ours(tmp_path / "q")) < 1e-5
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert "quantization" not in config and "quantization_config" not in config


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_dequantize_keeps_biases_and_the_models_dtype(tmp_path, dtype):
    folder = write_model(tmp_path / "m", tiny_config("qwen2"), PACKINGS[5], dtype)
    quant.dequantize(str(folder), str(tmp_path / "d"))
    weights = mx.load(str(tmp_path / "d" / "model.safetensors"))
    assert {a.dtype for a in weights.values()} == {dtype}
    assert not [k for k in weights if k.endswith((".scales", ".biases"))]
    assert mx.abs(weights["model.layers.0.self_attn.q_proj.bias"]).max() > 0
    assert apart(ours(tmp_path / "d"), ours(folder)) < 0.03


@pytest.mark.parametrize("packing", [PACKINGS[i] for i in (5, 4, -1)], ids=label)
def test_layers_the_group_does_not_divide_stay_dense_and_reload(tmp_path, capsys, packing):
    config = tiny_config("qwen3", intermediate_size=100, tie_word_embeddings=True)
    folder = write_model(tmp_path / "m", config)
    quant.quantize(str(folder), str(tmp_path / "q"), **packing)
    said = capsys.readouterr().out
    model, _, config = quant.load(str(tmp_path / "q"))
    for i, layer in enumerate(model.layers):
        name = f"model.layers.{i}.mlp.down_proj"
        assert name in said and config["quantization"][name] is False
        assert "scales" not in layer.mlp.down_proj and "scales" in layer.mlp.up_proj
    agree(tmp_path / "q")
    quant.dequantize(str(tmp_path / "q"), str(tmp_path / "d"))
    assert apart(ours(tmp_path / "d"), ours(tmp_path / "q")) < 1e-5


def test_a_tiny_router_stays_dense_when_packing():
    class WithRouter(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.wide = quant.Linear(4, 4), quant.Linear(64, 8)

    model = WithRouter()
    config, skipped = quant.pack(model, {"a": 1}, 64, 4, "affine")
    assert skipped == ["router"] and "scales" in model.wide and "scales" not in model.router
    assert config["quantization"] == PACKINGS[5] | {"router": False}


def test_a_group_that_divides_nothing_is_refused_with_the_widths(tmp_path):
    config = tiny_config(hidden_size=40, intermediate_size=20)
    folder = write_model(tmp_path / "m", config)
    with pytest.raises(quant.UserError, match=r"group size 64 divides no layer.*\[20, 40\]"):
        quant.quantize(str(folder), str(tmp_path / "q"))
    assert names_in(tmp_path) == ["m"]


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"bits": 7}, "bits got 7"),
        ({"bits": 8, "mode": "mxfp4"}, "bits got 8"),
        ({"group_size": 16}, "group size got 16"),
        ({"group_size": 32, "mode": "nvfp4"}, "group size got 32"),
        ({"mode": "int4"}, "'int4'.*affine, mxfp4"),
    ],
    ids=str,
)
def test_a_packing_that_does_not_exist_is_refused_before_loading(tmp_path, asked, said):
    with pytest.raises(quant.UserError, match=said):
        quant.quantize(str(tmp_path / "absent"), str(tmp_path / "q"), **asked)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("mode", quant.MODES)
def test_each_mode_has_its_default_bits_and_group(mode):
    group, bits = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}[mode]
    wanted = {"group_size": group, "bits": bits, "mode": mode}
    assert quant.check_packing(mode=mode) == wanted


def test_packing_twice_and_unpacking_a_dense_model_are_refused(dense, packed, tmp_path):
    with pytest.raises(quant.UserError, match="packed already"):
        quant.quantize(str(packed), str(tmp_path / "q"))
    with pytest.raises(quant.UserError, match="is not packed"):
        quant.dequantize(str(dense), str(tmp_path / "q"))
    assert names_in(tmp_path) == []


def test_convert_keeps_every_tensor_bit_for_bit(tmp_path):
    folder = write_mixed(tmp_path / "m", PACKINGS[4], MIXED)
    quant.convert(str(folder), str(tmp_path / "c"))
    before, after = (mx.load(str(f / "model.safetensors")) for f in (folder, tmp_path / "c"))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(after[k], v) and after[k].dtype == v.dtype for k, v in before.items())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    agree(tmp_path / "c")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_convert_to_a_dtype_loads_in_mlx_lm(packed, tmp_path, dtype):
    quant.convert(str(packed), str(tmp_path / "c"), dtype)
    weights = mx.load(str(tmp_path / "c" / "model.safetensors"))
    assert {a.dtype for a in weights.values()} == {quant.DTYPES[dtype], mx.uint32}
    agree(tmp_path / "c", quant.DTYPES[dtype])


# --- Saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [None, PACKINGS[4]], ids=label)
def test_a_large_model_is_saved_in_shards_that_mlx_lm_loads(tmp_path, monkeypatch, packing):
    folder = write_model(tmp_path / "m", packing=packing)
    limit = 60_000 if packing else 150_000
    monkeypatch.setattr(quant, "SHARD_BYTES", limit)
    quant.convert(str(folder), str(tmp_path / "c"))
    shards = sorted((tmp_path / "c").glob("*.safetensors"))
    assert len(shards) > 2 and "model.safetensors" not in names_in(tmp_path / "c")
    total, found = 0, {}
    for n, file in enumerate(shards, 1):
        assert file.name == f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        arrays = mx.load(str(file))
        size = sum(a.nbytes for a in arrays.values())
        assert size <= limit or len(arrays) == 1
        total, found = total + size, found | dict.fromkeys(arrays, file.name)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": total}, "weight_map": found}
    assert apart(ours(tmp_path / "c"), ours(folder)) == 0
    assert apart(theirs(tmp_path / "c"), ours(folder)) < 1e-5
    shards[1].unlink()
    refuses(tmp_path / "c", shards[1].name, "not there")


def test_a_saved_config_has_quantization_under_both_keys(packed):
    config = json.loads((packed / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"] == PACKINGS[4]


def test_a_failing_save_leaves_nothing_behind(dense, tmp_path):
    with pytest.raises(ZeroDivisionError), quant.Output(str(tmp_path / "out")) as folder:
        (folder / "model.safetensors").write_bytes(b"half")
        assert folder.parent == tmp_path and folder.name != "out"
        raise ZeroDivisionError
    assert names_in(tmp_path) == []
    with pytest.raises(OSError), quant.Output(str(tmp_path / "out")) as folder:
        (folder / "config.json").write_text("{}")
        (tmp_path / "out").mkdir()  # someone else was faster
        (tmp_path / "out" / "theirs").write_text("kept")
    assert names_in(tmp_path) == ["out"] and names_in(tmp_path / "out") == ["theirs"]


@pytest.mark.parametrize("target", ["there", "there/", ".", "..", "file", "/"])
def test_an_existing_target_is_refused_before_anything_is_loaded(tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(quant.UserError, match="exists"):
        quant.convert(str(tmp_path / "absent"), target)
    assert names_in(tmp_path) == ["file", "there"] and names_in(tmp_path / "there") == []


def test_a_target_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    for target in ("file/out", "file/a/out"):
        with pytest.raises(quant.UserError, match="cannot be written"):
            quant.convert(str(tmp_path / "absent"), str(tmp_path / target))
    assert names_in(tmp_path) == ["file"]


def test_missing_parents_of_the_target_are_made(packed, tmp_path):
    quant.convert(str(packed), str(tmp_path / "a" / "b" / "out"))
    assert apart(ours(tmp_path / "a" / "b" / "out"), ours(packed)) == 0


def test_a_full_disk_is_one_line_and_leaves_nothing(dense, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("mount is not permitted here")
    except FileNotFoundError:
        pytest.skip("no mount command here")
    try:
        done = subprocess.run(
            [sys.executable, quant.__file__, "convert", str(dense), "--save-path", disk / "out"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and "space left on" in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert names_in(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- GGUF -----------------------------------------------------------------------------------------

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    path, _, leaf = name.rpartition(".")
    if not path.startswith("model.layers."):
        return f"{GGUF_NAMES[path]}.{leaf}"
    _, _, i, kind = path.split(".", 3)
    return f"blk.{i}.{GGUF_NAMES[kind]}.{leaf}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """A head's rows a0..an b0..bn as llama.cpp stores them: a0 b0 a1 b1 ..."""
    out = np.empty_like(rows)
    d = len(rows) // heads
    for h in range(heads):
        for i in range(d // 2):
            out[h * d + 2 * i] = rows[h * d + i]
            out[h * d + 2 * i + 1] = rows[h * d + d // 2 + i]
    return out


BYTES = [f"<0x{i:02X}>" for i in range(256)]
PIECES = ["<unk>", "<s>", "</s>", *BYTES, *"▁abcdefghijklmnopqrstuvwxyz.,\n"]
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES + [f"<pad{i}>" for i in range(300 - len(PIECES))],
    "tokenizer.ggml.scores": [-float(i) for i in range(300)],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 41,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def write_gguf(file, family="llama", kinds=None, extra=None, meta=None, drop=(), **changes):
    """A GGUF file of a random model. `kinds(name)` -> a ggml type's name for a matrix.

    Returns the model's config and its weights in float64, rounded as the file stores them.
    """
    gguf = pytest.importorskip("gguf")
    config = tiny_config(family, **changes)
    mx.random.seed(11)
    model = quant.Model(quant.Spec.read(config))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer, stored = gguf.GGUFWriter(str(file), {"mistral": "llama"}.get(family, family)), {}
    arch = "llama" if family in ("llama", "mistral") else family
    for name, array in tree_flatten(model.parameters()):
        array = np.array(array + 0.05 * mx.random.normal(array.shape))
        kind = gguf.GGMLQuantizationType[kinds(name) if kinds and array.ndim == 2 else "F32"]
        as_stored = array
        if arch == "llama" and name.split(".")[-2] in heads:
            as_stored = interleaved(array, heads[name.split(".")[-2]])
        raw = gguf.quants.quantize(as_stored, kind)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
        once = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        stored[name] = once.astype(np.float64)
    values = {
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.attention.key_length": config.get("head_dim"),
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.rope.freq_base": config["rope_theta"],
        **SPM,
        **(meta or {}),
    }
    for key, value in values.items():
        if value is None or key in drop:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, np.array(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, stored


def mixture(name: str) -> str:
    """As llama.cpp mixes them: the embedding, head and some matrices wider than the others."""
    if name.startswith(("model.embed", "lm_head")):
        return "Q8_0"
    return {"v_proj": "Q4_1", "down_proj": "F16"}.get(name.split(".")[-2], "Q4_0")


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0", "mixed"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_logits_equal_the_model_before_llama_cpp_permuted_it(tmp_path, family, kind):
    kinds = mixture if kind == "mixed" else lambda name: kind
    config, stored = write_gguf(tmp_path / "m.gguf", family, kinds)
    model, _, read = quant.load(str(tmp_path / "m.gguf"), "float32")
    exact = reference(config, stored, TOKENS)
    # norms and qkv biases become float16 beside half-precision scales, and so do Q8_0's biases
    limit = 1e-5 if kind == "F32" else 2e-3
    assert apart(float32(model(mx.array([TOKENS]))[0]), exact) < limit
    for key in ("hidden_size", "num_key_value_heads", "rope_theta", "vocab_size"):
        assert read[key] == config[key]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_codes_are_moved_and_not_requantized(tmp_path, kind):
    write_gguf(tmp_path / "m.gguf", "llama", lambda name: kind)
    raw = mx.load(str(tmp_path / "m.gguf"), return_metadata=True)[0]
    model = quant.load(str(tmp_path / "m.gguf"))[0]
    for name, heads in (("q", 4), ("k", 2)):
        layer = model.layers[1].self_attn[f"{name}_proj"]
        for leaf in ("weight", "scales", "biases"):
            was = np.array(raw[f"blk.1.attn_{name}.{leaf}"])
            assert np.array_equal(interleaved(np.array(layer[leaf]), heads), was)
            assert not np.array_equal(np.array(layer[leaf]), was)
    assert mx.array_equal(model.layers[1].self_attn.v_proj.weight, raw["blk.1.attn_v.weight"])
    assert mx.array_equal(model.layers[0].mlp.up_proj.scales, raw["blk.0.ffn_up.scales"])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_converted_gguf_loads_in_mlx_lm(tmp_path, family):
    write_gguf(tmp_path / "m.gguf", family, mixture)
    quant.convert(str(tmp_path / "m.gguf"), str(tmp_path / "c"))
    packing = json.loads((tmp_path / "c" / "config.json").read_text())["quantization"]
    assert packing["bits"] == 4 and packing["lm_head"]["bits"] == 8
    agree(tmp_path / "c", mx.float16)
    assert apart(ours(tmp_path / "c"), ours(tmp_path / "m.gguf")) == 0


def test_a_gguf_without_a_head_is_tied(tmp_path):
    config, stored = write_gguf(tmp_path / "m.gguf", tie_word_embeddings=True)
    assert apart(ours(tmp_path / "m.gguf"), reference(config, stored, TOKENS)) < 1e-5
    assert quant.load(str(tmp_path / "m.gguf"))[2]["tie_word_embeddings"] is True


def test_mlx_s_own_gguf_writer_is_read(tmp_path, dense):
    model = quant.load(str(dense))[0]
    heads = {"q_proj": 4, "k_proj": 2}
    arrays = {}
    for name, array in tree_flatten(model.parameters()):
        if (part := name.split(".")[-2]) in heads:
            array = mx.array(interleaved(np.array(array), heads[part]))
        arrays[gguf_name(name)] = array
    meta = {"general.architecture": "llama", "llama.embedding_length": mx.array(128)}
    numbers = {"block_count": 2, "feed_forward_length": 256, "context_length": 512}
    numbers |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    meta |= {f"llama.{k}": mx.array(v) for k, v in numbers.items()}
    meta["llama.attention.layer_norm_rms_epsilon"] = mx.array(1e-5)
    texts = ("tokenizer.ggml.model", "tokenizer.ggml.tokens")
    meta |= {k: v if k in texts else mx.array(v) for k, v in SPM.items()}
    mx.save_gguf(str(tmp_path / "m.gguf"), arrays, meta)
    assert apart(ours(tmp_path / "m.gguf"), ours(dense)) < 1e-6


@pytest.mark.parametrize(
    "meta, wanted",
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, ROPES[2]),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 1024,
            },
            YARN,
        ),
    ],
    ids=str,
)
def test_gguf_rope_scaling_reaches_the_config(tmp_path, meta, wanted):
    write_gguf(tmp_path / "m.gguf", meta={f"llama.{k}": v for k, v in meta.items()})
    assert quant.load(str(tmp_path / "m.gguf"))[2].get("rope_scaling") == wanted


def test_gguf_rope_factors_of_llama_3_are_recognised_and_others_refused(tmp_path):
    llama3 = ROPES[4]
    factors = THETA ** (-np.arange(0, 32, 2) / 32)
    with_scaling = []
    for speed in factors:
        wave = 2 * math.pi / speed
        smooth = np.clip((8192 / wave - 1) / 3, 0, 1)
        with_scaling.append(1 / ((1 - smooth) / 8 + smooth))
    assert min(with_scaling) == 1 and max(with_scaling) == 8
    write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": with_scaling})
    rope = quant.load(str(tmp_path / "m.gguf"))[2]["rope_scaling"]
    assert {k: rope[k] for k in llama3} == llama3
    write_gguf(tmp_path / "n.gguf", extra={"rope_freqs.weight": np.linspace(1, 8, 16)})
    refuses(tmp_path / "n.gguf", "rope_freqs are not Llama 3's")


def test_a_gguf_with_a_window_is_a_mistral(tmp_path):
    config, stored = write_gguf(
        tmp_path / "m.gguf", "mistral", meta={"llama.attention.sliding_window": 3}
    )
    exact = reference(config, stored, TOKENS, [3, 3])
    assert apart(ours(tmp_path / "m.gguf"), exact) < 1e-5


@pytest.mark.parametrize(
    "how, said",
    [
        ({"meta": {"general.architecture": "mamba"}}, ["'mamba'", "llama, qwen2, qwen3"]),
        ({"extra": {"blk.0.ffn_gate_inp.weight": np.ones((4, 128))}}, ["mixture-of-experts"]),
        ({"extra": {"blk.0.attn_sinks.weight": np.ones(4)}}, ["blk.0.attn_sinks.weight (4,)"]),
        ({"drop": ["llama.block_count"]}, ["lacks", "num_hidden_layers"]),
        ({"drop": ["tokenizer.ggml.tokens"]}, ["lacks", "tokenizer.ggml.tokens"]),
        ({"meta": {"tokenizer.ggml.model": "bert"}}, ["tokenizer model 'bert'"]),
        (
            {"meta": {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken"}},
            ["pre-tokenizer 'tekken'", "qwen2"],
        ),
        ({"meta": {"llama.rope.scaling.type": "longrope"}}, ["'longrope'"]),
        (
            {"family": "qwen2", "meta": {"qwen2.attention.sliding_window": 8}},
            ["sliding windows", "qwen2"],
        ),
    ],
    ids=str,
)
def test_a_gguf_that_cannot_be_done_is_refused_by_name(tmp_path, how, said):
    write_gguf(tmp_path / "m.gguf", **how)
    refuses(tmp_path / "m.gguf", "m.gguf", *said)


def test_a_damaged_gguf_is_refused(tmp_path):
    (tmp_path / "junk.gguf").write_bytes(b"junk" * 100)
    refuses(tmp_path / "junk.gguf", "not a readable GGUF file")
    write_gguf(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-5000])
    refuses(tmp_path / "cut.gguf", "not a readable GGUF file")


def to_gguf(folder, file, outtype="f32"):
    quant.convert(str(folder), str(file), outtype=outtype)
    return file


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_gguf_is_the_model_in_each_outtype(tmp_path, family, outtype):
    gguf = pytest.importorskip("gguf")
    changes = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen2": {}}.get(family, {})
    tied = family == "qwen3"
    config = tiny_config(family, tie_word_embeddings=tied, **changes)
    folder = write_model(tmp_path / "m", config, PACKINGS[4] if family == "mistral" else None)
    file = to_gguf(folder, tmp_path / "m.gguf", outtype)
    weights, heads = plain_weights(folder), {"q_proj": 4, "k_proj": 2}
    tensors = {t.name: t for t in gguf.GGUFReader(str(file)).tensors}
    assert len(tensors) == len(weights)
    for name, wanted in weights.items():
        if family in ("llama", "mistral") and (part := name.split(".")[-2]) in heads:
            wanted = interleaved(wanted, heads[part])
        kind = outtype.upper() if wanted.ndim > 1 else "F32"
        tensor, kind = tensors[gguf_name(name)], gguf.GGMLQuantizationType[kind]
        assert tensor.tensor_type == kind, name
        exact = gguf.quants.quantize(wanted.astype(np.float32), kind)
        got = gguf.quants.dequantize(tensor.data, kind)
        np.testing.assert_array_equal(got, gguf.quants.dequantize(exact, kind), name)
    # and read again it is the same model: Q8_0 rounds as its tensors do, the rest hardly
    limit = {"f32": 1e-5, "f16": 2e-3, "bf16": 3e-2, "q8_0": 3e-2}[outtype]
    assert apart(ours(file), ours(folder)) < limit
    before, after = quant.load(str(folder)), quant.load(str(file))
    for key in ("tie_word_embeddings", "head_dim", "rope", "max_position_embeddings"):
        assert getattr(after[0].spec, key) == getattr(before[0].spec, key), key


TEXT = "I'm 1234 x=[5];\n\n  \u00e9\U0001f642 <|im_start|>user\nhi<|im_end|> \t"


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "gpt-2"])
def test_a_written_gguf_keeps_byte_level_tokens_template_and_marks(tmp_path, pre, bos):
    gguf = pytest.importorskip("gguf")
    files = tiny_tokenizer(template=CHATML, add_bos_token=bos)
    core = json.loads(files["tokenizer.json"])
    pairs = [["1", "2"], ["12", "3"], ["123", "4"], ["m", "a"], ["I", "'"], ["I'", "m"], ["x", "="]]
    core["model"]["merges"] = pairs
    core["model"]["vocab"] |= {a + b: 261 + i for i, (a, b) in enumerate(pairs)}
    regex = quant.GGUF_SPLITS[pre]
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    first = {"type": "Digits", "individual_digits": True} if regex is None else split
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    last["use_regex"] = not regex
    parts = [last] if regex == "" else [first, last]
    core["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    core["normalizer"] = {"type": "NFC"} if pre == "qwen2" else None
    core["model"]["ignore_merges"] = pre == "llama-bpe"
    files["tokenizer.json"] = json.dumps(core).encode()
    folder = write_model(tmp_path / "m", files=files)
    file = to_gguf(folder, tmp_path / "m.gguf")
    said = {k: f.contents() for k, f in gguf.GGUFReader(str(file)).fields.items()}
    assert said["tokenizer.ggml.pre"] == pre
    assert said["tokenizer.ggml.token_type"][1:5] == [3] * 4
    assert said["tokenizer.ggml.token_type"][299] == 5 and len(said["tokenizer.ggml.tokens"]) == 300
    before, after = (quant.load(str(f))[1] for f in (folder, file))
    assert after.encode(TEXT) == before.encode(TEXT) and (before.encode(TEXT)[0] == 1) == bos
    assert after.template == before.template and after.eos_ids == before.eos_ids


@pytest.mark.parametrize("prefix", [True, False])
def test_a_written_gguf_keeps_sentencepiece_tokens(tmp_path, prefix):
    pieces = {"tokenizer.ggml.tokens": [*PIECES, "ab", "abc", "\u2581ab", "bc"]}
    pieces["tokenizer.ggml.tokens"] += [f"<pad{i}>" for i in range(300 - len(PIECES) - 4)]
    meta = pieces | {"tokenizer.ggml.add_space_prefix": prefix}
    write_gguf(tmp_path / "a.gguf", meta=meta)
    quant.convert(str(tmp_path / "a.gguf"), str(tmp_path / "m"))
    file = to_gguf(tmp_path / "m", tmp_path / "m.gguf")
    before, after = (quant.load(str(f))[1] for f in (tmp_path / "a.gguf", file))
    for text in ("abc ab cab, abcab\n", " ab\u00e9", "bcbc <s> abc"):
        assert after.encode(text) == before.encode(text)
    assert apart(ours(file), ours(tmp_path / "a.gguf")) == 0


@pytest.mark.parametrize("rope", [*ROPES[2:5], *ROPES[6:8]], ids=str)
def test_a_written_gguf_keeps_the_rope_or_refuses_it(tmp_path, rope):
    folder = write_model(tmp_path / "m", tiny_config(rope_scaling=rope, head_dim=64))
    if rope["rope_type"] == "dynamic" or "beta_fast" in rope:
        with pytest.raises(quant.UserError, match="RoPE is not supported.*factor"):
            to_gguf(folder, tmp_path / "m.gguf")
    else:
        file = to_gguf(folder, tmp_path / "m.gguf")
        assert apart(ours(file), ours(folder)) < 1e-5


@pytest.mark.parametrize("window, warned", [(3, True), (512, False)])
def test_a_written_gguf_keeps_a_window_that_llama_cpp_ignores(tmp_path, capsys, window, warned):
    folder = write_model(tmp_path / "m", tiny_config("mistral", sliding_window=window))
    file = to_gguf(folder, tmp_path / "m.gguf")
    assert apart(ours(file), ours(folder)) < 1e-5
    assert ("after 3 tokens" in capsys.readouterr().err) == warned


LLAMA_CPP = """
import {getLlama} from "node-llama-cpp";
const llama = await getLlama({gpu: false, build: "never"});
for (const path of process.argv.slice(2)) {
  const model = await llama.loadModel({modelPath: path});
  const context = await model.createContext({contextSize: 256, threads: 2});
  const out = [], text = model.tokenize("The capital of France is", false);
  for await (const token of context.getSequence().evaluate(text, {temperature: 0})) {
    out.push(token);
    if (out.length >= 20) break;
  }
  console.log(JSON.stringify(out));
}
process.exit(0);
"""


@pytest.mark.slow
def test_llama_cpp_goes_on_as_we_do(tmp_path):
    """Every family, with biases and scaled RoPE, through llama.cpp itself (node-llama-cpp)."""
    if not (npm := shutil.which("npm")):
        pytest.skip("needs npm, for node-llama-cpp")
    install = [npm, "install", "--silent", "--omit=optional", "--ignore-scripts"]
    machine = platform.machine().replace("x86_64", "x64").replace("aarch64", "arm64")
    system = {"darwin": "mac-arm64-metal"}.get(sys.platform, f"linux-{machine}")
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    subprocess.run(["npm", "init", "-y"], cwd=tmp_path, env=env, check=True, capture_output=True)
    for words in ([*install, "node-llama-cpp@3"], [*install, f"@node-llama-cpp/{system}@3"]):
        if subprocess.run(words, cwd=tmp_path, env=env).returncode:
            pytest.skip("node-llama-cpp cannot be installed here")
    files = tiny_tokenizer()
    core = json.loads(files["tokenizer.json"])
    core["model"] |= {"merges": [["i", "s"]], "vocab": core["model"]["vocab"] | {"is": 261}}
    files["tokenizer.json"] = json.dumps(core).encode()
    llama3 = {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 128}
    changes = {
        "llama": {"attention_bias": True, "mlp_bias": True, "rope_scaling": llama3},
        "qwen2": {"rope_scaling": {**YARN, "original_max_position_embeddings": 128}},
        "qwen3": {"tie_word_embeddings": True},
    }
    wanted, paths = [], []
    for family in FAMILIES:
        config = tiny_config(family, **changes.get(family, {}))
        folder = write_model(tmp_path / family, config, files=files, seed=7)
        paths.append(to_gguf(folder, tmp_path / f"{family}.gguf"))
        model, tokenizer, _ = quant.load(str(folder))
        ids = tokenizer.encode("The capital of France is", special=False)
        wanted.append(list(quant.stream(model, ids, {2}, 20)))
    (tmp_path / "go.mjs").write_text(LLAMA_CPP)
    words = ["node", "go.mjs", *map(str, paths)]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()[-len(FAMILIES) :]] == wanted


def test_what_gguf_cannot_hold_is_refused_by_name_and_leaves_nothing(tmp_path, monkeypatch, dense):
    def refused(folder, said, outtype="f16"):
        with pytest.raises(quant.UserError, match=said):
            to_gguf(folder, tmp_path / "out.gguf", outtype)
        assert not [f for f in tmp_path.iterdir() if "out" in f.name]

    refused(dense, "--outtype: got 'q4_k', wanted f32", "q4_k")
    core = json.loads(tiny_tokenizer()["tokenizer.json"])
    core["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Punctuation", "behavior": "Isolated"}, core["pre_tokenizer"]]}  # fmt: skip
    files = tiny_tokenizer() | {"tokenizer.json": json.dumps(core).encode()}
    refused(write_model(tmp_path / "split", files=files), "no name for how this tokenizer")
    config = tiny_config("qwen2", sliding_window=4, use_sliding_window=True, max_window_layers=1)
    refused(write_model(tmp_path / "window", config), "differ in windows")
    large = write_model(tmp_path / "large")
    weights = mx.load(str(large / "model.safetensors"))
    weights["lm_head.weight"][3, 3] = 1e5
    mx.save_safetensors(str(large / "model.safetensors"), weights, {"format": "mlx"})
    refused(large, "output.weight has values beyond float16; use --outtype bf16")
    (tmp_path / "taken.gguf").write_text("mine")
    with pytest.raises(quant.UserError, match="exists"):
        to_gguf(dense, tmp_path / "taken.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(dense, "pip install gguf")


def rebuilt(meta: dict) -> quant.Tokenizer:
    """The tokenizer that quant.py builds from GGUF metadata."""
    return quant.gguf_tokenizer(meta, {"max_position_embeddings": 512}, "m.gguf")


TEXTS = ["hello world", "Hello's  12345 x\n\n y", " lead", "tab\tend ", "naïve 你好 🙂", "a<|x|>b"]
SPLITS = {  # how llama.cpp's kinds cut `we'll pay 12345  now!!\n`
    "llama-bpe": ["we", "'ll", " pay", " ", "123", "45", " ", " now", "!!\n"],
    "qwen2": ["we", "'ll", " pay", " ", "1", "2", "3", "4", "5", " ", " now", "!!\n"],
    "smollm": ["we", "'ll", " pay", " ", "1", "2", "3", "4", "5", " ", " now", "!!", "\n"],
    "gpt-2": ["we", "'ll", " pay", " 12345", " ", " now", "!!", "\n"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_a_gpt2_type_gguf_tokenizer_encodes_like_the_one_it_came_from(pre):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["hello world we'll pay now naïve lead tabs 1234"] * 3, trainer)
    model = json.loads(core.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    specials = ["<|bos|>", "<|eos|>", "<|x|>"]
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + specials,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3, 4],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
        "tokenizer.chat_template": CHATML,
    }
    got = rebuilt(meta)
    pieces = [p for p, _ in got.core.pre_tokenizer.pre_tokenize_str("we'll pay 12345  now!!\n")]
    readable = [p.replace("Ġ", " ").replace("Ċ", "\n") for p in pieces]
    assert readable == SPLITS[pre]
    if pre == "gpt-2":  # the reference's own way to cut
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens([AddedToken(t, normalized=False) for t in specials[:2]])
        core.add_tokens([AddedToken(specials[2], normalized=False)])
        for text in TEXTS:
            assert got.encode(text) == core.encode(text).ids
    for text in TEXTS:
        ids = got.encode(text)
        assert got.decode(ids) == text  # a user-defined token is text, so it stays
        assert (ids[:1] == [len(tokens)]) == (pre == "llama-bpe")  # llama.cpp adds BOS for it
    assert (got.bos_id, got.eos_ids) == (len(tokens), {len(tokens) + 1})
    assert got.template == CHATML and got.encode("<|eos|>", special=False) == [len(tokens) + 1]


def merged_by_score(text: str, scores: dict) -> list[str]:
    """SentencePiece: join the neighbours whose union scores best until none is a piece."""
    pieces = list(text.replace(" ", "▁"))
    while True:
        joined = [a + b for a, b in zip(pieces, pieces[1:], strict=False)]
        pairs = [(-scores[piece], i) for i, piece in enumerate(joined) if piece in scores]
        if not pairs:
            break
        i = min(pairs)[1]
        pieces[i : i + 2] = [joined[i]]
    out = []
    for piece in pieces:
        out += [piece] if piece in scores else [f"<0x{b:02X}>" for b in piece.encode()]
    return out


def test_a_sentencepiece_type_gguf_tokenizer_encodes_by_score():
    words = ["he", "ll", "hell", "hello", "▁he", "▁hello", "▁w", "or", "ld", "▁wor", "▁world", "▁▁"]
    words += ["lo", "el", "ello", "▁h", "ab", "aba", "bab", "abab"]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *"▁abdehlorw", *words]
    rng = np.random.default_rng(4)
    scores = dict(zip(words, (-rng.permutation(len(words)) - 1.0).tolist(), strict=True))
    full = {t: scores.get(t, -1000.0 - i) for i, t in enumerate(tokens)}
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": list(full.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    got = rebuilt(meta)
    spelled = {t: s for t, s in full.items() if t not in tokens[:259]}
    texts = ["hello world", "  hello", "ababab", "babab hell", "你 hello🙂", "helloworld ab a"]
    texts += ["".join(rng.choice(list("abdehlorw "), 12)) for _ in range(40)]
    for text in texts:
        wanted = [tokens.index(p) for p in merged_by_score("▁" + text, spelled)]
        assert got.encode(text, special=False) == wanted, text
        assert got.encode(text) == [1, *wanted]
        assert got.decode(wanted) == text
    meta["tokenizer.ggml.add_bos_token"] = False
    meta["tokenizer.ggml.add_space_prefix"] = False
    bare = rebuilt(meta)
    for text in texts:
        wanted = [tokens.index(p) for p in merged_by_score(text, spelled)]
        assert bare.encode(text) == wanted and bare.decode(wanted) == text


# --- Tokenizer ------------------------------------------------------------------------------------


def tokenizer(config=None, generation=None, files=None, **how) -> quant.Tokenizer:
    made = tiny_tokenizer(**how) | (files or {})
    if generation is not None:
        made["generation_config.json"] = json.dumps(generation).encode()
    return quant.Tokenizer(made, config or {})


@pytest.mark.parametrize("text", ["ab", "<s>ab", "<s><s>ab", ""])
@pytest.mark.parametrize("adds", [None, True, False])
@pytest.mark.parametrize("bos", [True, False], ids=["processor", "no processor"])
def test_bos_comes_once_or_as_written(bos, adds, text):
    settings = {} if adds is None else {"add_bos_token": adds}
    t = tokenizer(bos=bos, **settings)
    begins = (bos and adds is not False) or bool(adds) or text.startswith("<s>")
    letters = t.encode(text.replace("<s>", ""), special=False)
    assert t.encode(text) == [1] * begins + letters
    assert t.encode(text, special=False) == [1] * text.count("<s>") + letters


def test_eos_is_added_where_asked_once_and_only_if_there_is_one():
    assert tokenizer(add_eos_token=True).encode("a")[-1] == 2
    assert tokenizer(add_eos_token=True).encode("a</s>").count(2) == 1
    assert tokenizer(add_eos_token=True).encode("a", special=False)[-1] != 2
    without = tokenizer(add_eos_token=True, eos_token=None)
    assert without.eos_id is None and None not in without.encode("a")


@pytest.mark.parametrize(
    "settings, config, generation, eos, stops",
    [
        ({}, {}, None, 2, {2}),
        ({}, {"eos_token_id": 7}, None, 2, {2, 7}),
        ({}, {"eos_token_id": [2, 7]}, None, 2, {2, 7}),
        ({}, {"eos_token_id": 7}, {"eos_token_id": [8, 9]}, 2, {2, 8, 9}),
        ({}, {"eos_token_id": 7}, {"eos_token_id": None}, 2, {2, 7}),
        ({}, {"eos_token_id": 7}, {"temperature": 1.0}, 2, {2, 7}),
        ({"eos_token": None}, {"eos_token_id": [7, 8]}, None, 7, {7, 8}),
        ({"eos_token": None}, {}, {"eos_token_id": 0}, 0, {0}),
        ({"eos_token": {"content": "<|im_end|>", "lstrip": False}}, {}, None, 4, {4}),
        ({"eos_token": None}, {}, None, None, set()),
    ],
    ids=str,
)
def test_eos_ids_come_from_tokenizer_config_and_generation_config(
    settings, config, generation, eos, stops
):
    t = tokenizer(config, generation, **settings)
    assert (t.eos_id, t.eos_ids) == (eos, stops)


TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
OTHER = "{{ messages[0].content }}"


@pytest.mark.parametrize(
    "files, settings",
    [
        ({"chat_template.jinja": CHATML.encode()}, {}),
        ({"chat_template.jinja": CHATML.encode()}, {"chat_template": OTHER}),
        ({}, {"chat_template": CHATML}),
        (
            {},
            {
                "chat_template": [
                    {"name": "tool_use", "template": OTHER},
                    {"name": "default", "template": CHATML},
                ]
            },
        ),
        ({"chat_template.json": json.dumps({"chat_template": CHATML}).encode()}, {}),
        ({"chat_template.json": json.dumps({"chat_template": {"default": CHATML}}).encode()}, {}),
    ],
    ids=["jinja file", "jinja file first", "text", "named list", "json file", "named dict"],
)
def test_the_chat_template_is_found_in_every_place(files, settings):
    t = tokenizer(files=files, **settings)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    assert t.chat(TURNS) == text
    assert t.chat(TURNS, reply=True) == text + "<|im_start|>assistant\n"
    assert quant.prompt_ids(t, "hi")[0] == 3 and quant.prompt_ids(t, "hi", raw=True)[0] != 3


def test_a_folder_with_a_jinja_file_keeps_it_through_convert(packed, tmp_path):
    folder = copy(packed, tmp_path / "m")
    (folder / "chat_template.jinja").write_text(CHATML + "{# é #}")
    quant.convert(str(folder), str(tmp_path / "c"))
    assert quant.load(str(tmp_path / "c"))[1].template.endswith("{# é #}")


def test_without_a_template_chat_is_refused_and_a_prompt_goes_as_text():
    t = tokenizer(chat_template=[{"name": "tool_use", "template": OTHER}])
    with pytest.raises(quant.UserError, match="no chat template"):
        t.chat(TURNS)
    assert quant.prompt_ids(t, "hi") == t.encode("hi")


@pytest.mark.parametrize(
    "template, said",
    [
        ("{{ raise_exception('roles must alternate') }}", "user/assistant: roles must alternate"),
        ("{{ messages.append(1) }}", "unsafe|not allowed|immutable"),
        ("{% set _ = messages[0].update({'role': 'x'}) %}", "unsafe|not allowed|immutable"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.__class__.__base__ }}", "unsafe"),
        ("{{ raise_exception.__globals__.json }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[0].content + 1 }}", "refuses user/assistant"),
        ("{{ missing.name }}", "undefined"),
        ("{% if %}", "does not compile"),
        ("{% nonsense %}", "does not compile"),
    ],
)
def test_a_template_can_do_no_harm_and_its_errors_are_the_users(template, said):
    t = tokenizer(template=template)
    before = json.dumps(TURNS)
    with pytest.raises(quant.UserError, match=said):
        t.chat(TURNS)
    assert json.dumps(TURNS) == before


@pytest.mark.parametrize(
    "template, text",
    [
        (
            "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}|{% endfor %}",
            "user|assistant|",
        ),
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hi"}'),
        (
            "{{ {'b': 'é', 'a': 1} | tojson(separators=(',', ':'), sort_keys=True) }}",
            '{"a":1,"b":"é"}',
        ),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
        ("{{ tools is none }}{{ strftime_now('%%') }}", "True%"),
        ("{% if true %}\n  x\n{% endif %}\ny", "  x\ny"),
    ],
)
def test_templates_get_the_helpers_they_expect(template, text):
    assert tokenizer(template=template).chat(TURNS) == text


def test_missing_jinja2_is_said_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(quant.UserError, match=r"pip install 'mlx-dora\[chat\]'"):
        tokenizer(template="{{ 'never compiled before' }}").chat(TURNS)


def test_streamed_text_never_shows_half_a_character():
    t = tokenizer()
    text = "naïve 你好\n  🙂🙂 end\n\n é"
    ids = t.encode(text)  # one token per byte
    assert len(ids) == len(text.encode())
    pieces = list(quant.text_pieces(t, iter(ids)))
    assert "".join(pieces) == text and not any("\ufffd" in p for p in pieces) and len(pieces) > 10
    assert "".join(quant.text_pieces(t, iter(ids[:-1]))) == text[:-1] + "\ufffd"
    assert list(quant.text_pieces(t, iter([]))) == []


def test_streamed_text_keeps_spaces_at_the_beginning_of_lines():
    t = rebuilt(SPM)
    text = "if a.\n   b,\n\n  c\n 🙂"
    ids = t.encode(text, special=False)
    assert "".join(quant.text_pieces(t, iter(ids))) == text


# --- Sampling -------------------------------------------------------------------------------------

LOGITS = mx.log(mx.array([[0.05, 0.4, 0.1, 0.25, 0.2]]))


def test_temperature_zero_takes_the_likeliest():
    logits = mx.random.normal((64, 300))
    assert mx.array_equal(quant.sample(logits, 0.0, 0.5), mx.argmax(logits, -1))


@pytest.mark.parametrize(
    "temperature, top_p, kept",
    [
        (1.0, 1.0, {0, 1, 2, 3, 4}),
        (1.0, 0.8, {1, 3, 4}),
        (1.0, 0.3, {1}),
        (1.0, 0.96, {0, 1, 2, 3, 4}),
        (2.0, 0.6, {1, 3, 4}),
        (0.5, 0.85, {1, 3, 4}),
    ],
)
def test_sampling_draws_from_the_nucleus_in_proportion(temperature, top_p, kept):
    mx.random.seed(5)
    N = 20000
    drawn = np.array(quant.sample(mx.repeat(LOGITS, N, 0), temperature, top_p))
    p = np.exp(np.array(LOGITS[0], np.float64) / temperature)
    p[[i for i in range(5) if i not in kept]] = 0
    p /= p.sum()
    counts = np.bincount(drawn, minlength=5) / N
    # five standard deviations of a binomial share
    assert np.all(np.abs(counts - p) <= 5 * np.sqrt(p * (1 - p) / N)), counts


def test_a_seed_gives_the_same_tokens_again(packed):
    model = quant.load(str(packed))[0]

    def run(seed):
        mx.random.seed(seed)
        return list(quant.stream(model, TOKENS, set(), 12, temperature=1.0, top_p=0.9))

    assert run(1) == run(1) != run(2)


def test_generation_ends_at_a_stop_id_and_at_the_limit(packed):
    model = quant.load(str(packed))[0]
    ids = list(quant.stream(model, TOKENS, set(), 8))
    assert len(ids) == 8 and len(set(ids)) > 1
    stop = next(i for i in ids if i != ids[0])
    assert list(quant.stream(model, TOKENS, {stop}, 8)) == ids[: ids.index(stop)]
    assert [len(list(quant.stream(model, TOKENS, set(), n))) for n in (0, 1, 2)] == [0, 1, 2]


@pytest.mark.parametrize(
    "ids, temperature, top_p, said",
    [
        ([], 0.0, 1.0, "no tokens"),
        ([1], -1.0, 1.0, "temperature -1.0"),
        ([1], 1.0, 0.0, "top_p 0.0"),
        ([1], 1.0, 1.5, "top_p 1.5"),
        ([1], math.nan, 1.0, "temperature nan"),
    ],
)
def test_a_request_that_cannot_be_sampled_is_refused(packed, ids, temperature, top_p, said):
    model = quant.load(str(packed))[0]
    with pytest.raises(quant.UserError, match=said):
        list(quant.stream(model, ids, set(), 4, temperature, top_p))


def test_size_counts_weights_unpacked_and_bytes_as_stored(dense, packed):
    (count, nbytes), (same, fewer) = (quant.size_of(quant.load(str(f))[0]) for f in (dense, packed))
    assert count == same and nbytes == 4 * count
    weights = mx.load(str(packed / "model.safetensors"))
    assert fewer == sum(a.nbytes for a in weights.values()) < nbytes / 4


# --- Products with packed weights -----------------------------------------------------------------


def packed_layer(packing, I=256, O=48, bias=False, dtype=mx.float32):
    mx.random.seed(9)
    linear = quant.Linear(I, O, bias=bias)
    if bias:
        linear.bias = mx.random.normal((O,))
    linear.set_dtype(dtype)
    layer = linear.to_quantized(**packing)
    W = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **packing)
    return layer, np.array(W.astype(mx.float32), np.float64)


@pytest.mark.parametrize("route", [True, False], ids=["transient", "packed"])
@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize("packing", PACKINGS, ids=label)
def test_packed_product_and_its_gradient_equal_float64(monkeypatch, packing, T, route):
    monkeypatch.setattr(quant, "dense_pays", lambda tokens, dtype: route)
    layer, W = packed_layer(packing, bias=True)
    x, c = mx.random.normal((2, T, 256)), mx.random.normal((2, T, 48))
    (y,), (g,) = mx.vjp(layer, [x], [c])
    x, c = np.array(x, np.float64), np.array(c, np.float64)
    assert apart(float32(y), x @ W.T + np.array(layer.bias, np.float64)) < 1e-5
    assert apart(float32(g), c @ W) < 1e-5


@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("packing", [PACKINGS[4], PACKINGS[-1]], ids=label)
def test_half_precision_product_is_as_near_as_the_plain_one(packing, dtype, T):
    layer, _ = packed_layer(packing, dtype=dtype)
    parts = (layer.weight, layer.scales, layer.get("biases"))
    W = mx.dequantize(*parts, **packing, dtype=mx.float32)
    x, c = (mx.random.normal(s).astype(dtype) for s in ((T, 256), (T, 48)))
    (y,), (g,) = mx.vjp(layer, [x], [c])
    assert y.dtype == g.dtype == dtype
    plain = mx.dequantize(*parts, **packing, dtype=dtype)
    exact = [np.array(a.astype(mx.float32), np.float64) for a in (x, c, W)]
    for got, naive, wanted in (
        (y, x @ plain.T, exact[0] @ exact[2].T),
        (g, c @ plain, exact[1] @ exact[2]),
    ):
        assert apart(float32(got), wanted) <= 2 * apart(float32(naive), wanted)


def test_the_embedding_as_a_head_takes_the_same_product(monkeypatch):
    embedding = quant.Embedding(40, 128).to_quantized(32, 4)
    parts = (embedding.weight, embedding.scales, embedding.biases)
    W = mx.dequantize(*parts, group_size=32, bits=4)
    x = mx.random.normal((2, 9, 128))
    for route in (True, False):
        monkeypatch.setattr(quant, "dense_pays", lambda tokens, dtype, route=route: route)
        assert apart(float32(embedding.as_linear(x)), float32(x @ W.T)) < 1e-5


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("packing", [PACKINGS[4], PACKINGS[-3]], ids=label)
def test_no_dense_copy_lives_from_forward_to_backward(monkeypatch, packing, compiled):
    monkeypatch.setattr(quant, "dense_pays", lambda tokens, dtype: True)
    N, width = 48, 256
    layers = [packed_layer(packing, width, width)[0] for _ in range(N)]
    x = mx.random.normal((4, width))
    mx.eval(x, [layer.parameters() for layer in layers])

    def transient(x):
        return functools.reduce(lambda h, layer: mx.tanh(layer(h)), layers, x).sum()

    def keeps(x):  # what automatic differentiation makes of it
        def step(h, layer):
            parts = (layer.weight, layer.scales, layer.get("biases"))
            return mx.tanh(h @ mx.dequantize(*parts, **packing, dtype=h.dtype).T)

        return functools.reduce(step, layers, x).sum()

    def peak(function):
        run = mx.grad(function)
        run = mx.compile(run) if compiled else run
        mx.eval(run(x))
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        grad = run(x)
        mx.eval(grad)
        return mx.get_peak_memory() - before, grad

    (lean, grad), (fat, wanted) = peak(transient), peak(keeps)
    dense = width * width * 4
    assert apart(float32(grad), float32(wanted)) < 1e-5
    assert fat > 0.9 * N * dense, "the comparison keeps nothing: this test proves nothing"
    # a backend that runs ahead has some in flight at a time, however many layers there are
    assert lean < fat / 3, f"{lean / dense:.1f} dense matrices alive at once, of {N} layers"


def test_dense_pays_by_number_of_tokens_and_dtype():
    if mx.default_device() != mx.Device(mx.cpu):
        pytest.skip("the measured thresholds of the CPU backend")
    few = [quant.dense_pays(n, mx.float32) for n in (1, 3, 4, 500)]
    assert few == [False, False, True, True]
    assert quant.dense_pays(1, mx.bfloat16)


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_gated_unit(name):
    """Values and gradients against mlx.nn's own, beyond where e^-x ends, and in half precision."""
    theirs = nn.silu if name == "swiglu" else nn.gelu_approx
    unit = getattr(quant, name)
    gate = mx.concatenate([mx.random.normal((500,)) * 3, mx.array([-300.0, -45.0, 0.0, 45.0, 3e4])])
    up, c = mx.random.normal(gate.shape), mx.random.normal(gate.shape)
    for dtype, tolerance in ((mx.float32, 1e-5), (mx.bfloat16, 0.02), (mx.float16, 3e-3)):
        args = [a.astype(dtype) for a in (gate, up)]
        exact = [a.astype(mx.float32) for a in args]
        out, grads = mx.vjp(unit, args, [c.astype(dtype)])
        want, wanted = mx.vjp(lambda g, u: theirs(g) * u, exact, [c.astype(dtype)])
        assert [a.dtype for a in (*out, *grads)] == [dtype] * 3
        for a, b in zip((*out, *grads), (*want, *wanted), strict=True):
            assert mx.allclose(a.astype(mx.float32), b, tolerance, tolerance), (name, dtype)


def test_gated_unit_keeps_its_arguments_only():
    def kept(unit) -> float:
        """What backward will need beside the arguments, in arrays of their size."""
        gate, up = mx.random.normal((512, 1024)), mx.random.normal((512, 1024))
        mx.eval(gate, up)
        mx.synchronize()
        before = mx.get_active_memory()
        out, grads = mx.value_and_grad(lambda g, u: mx.square(unit(g, u)).sum(), (0, 1))(gate, up)
        mx.eval(out)
        mx.synchronize()
        return (mx.get_active_memory() - before) / gate.nbytes

    assert 0.9 < kept(quant.swiglu) < 1.1  # its output, for the square
    assert 0.9 < kept(quant.geglu) < 1.1
    assert kept(lambda g, u: g * mx.sigmoid(g) * u) > 1.9, "nothing was measured"
