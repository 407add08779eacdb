"""Every family as a tiny random model, against mlx-lm and float64."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import PACKINGS, tiny_config, write_model
from mlx.utils import tree_flatten

import quant

MOE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
DELTA = dict(
    num_hidden_layers=4,
    full_attention_interval=4,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
    rope_parameters={
        "rope_type": "default",
        "mrope_section": [1, 1, 2],
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
    },
)
GEMMA = dict(hidden_size=64, head_dim=32, query_pre_attn_scalar=24, tie_word_embeddings=True)
TINY = {  # what a family has beside tiny_config
    "mixtral": dict(num_local_experts=6, num_experts_per_tok=2),
    "qwen3_moe": dict(head_dim=32, decoder_sparse_step=1, mlp_only_layers=[1], **MOE),
    "qwen3_5": dict(head_dim=32, **DELTA),
    "qwen3_5_moe": dict(head_dim=32, shared_expert_intermediate_size=32, **DELTA, **MOE),
    "gemma2": GEMMA | dict(attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3_text": GEMMA
    | dict(sliding_window=8, sliding_window_pattern=2, rope_local_base_freq=1e3),
    "phi3": dict(partial_rotary_factor=0.5),
    "olmo2": {},
    "granite": dict(
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_scaling=2.0,
        attention_bias=False,
        mlp_bias=False,
    ),
    "smollm3": dict(num_hidden_layers=4, no_rope_layers=[1, 1, 0, 1]),
}
FAMILIES = list(TINY)
TOKENS = mx.array(np.random.RandomState(0).randint(5, 300, (2, 90)))


def family(folder, name: str, packing=None, dtype=mx.float32, **changes):
    """A folder whose norms are not all ones, so that it matters where they stand."""
    config = tiny_config(name, **TINY[name] | changes)
    write_model(folder, config, packing, dtype=dtype)
    weights = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    random = np.random.RandomState(1)
    for key, array in weights.items():
        if "norm" in key:
            noise = mx.array(random.uniform(-0.5, 0.5, array.shape).astype(np.float32))
            weights[key] = (array + noise).astype(array.dtype)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("families"), {}

    def folder(name, packing=None):
        key = f"{name}-{packing}"
        if key not in made:
            made[key] = family(root / str(len(made)), name, packing)
        return made[key]

    return folder


def ours(folder):
    return quant.load(str(folder))[0]


def theirs(folder):
    from mlx_lm.utils import load_model

    return load_model(folder)[0]


def apart(got, wanted) -> float:
    got, wanted = (np.array(a.astype(mx.float32), np.float64) for a in (got, wanted))
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


# --- Against mlx-lm -------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [None, PACKINGS[4], PACKINGS[-3]], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_mlx_lm(folders, name, packing):
    folder = folders(name, packing)
    tokens = TOKENS[:, :8] if name in ("gemma2", "phi3") else TOKENS  # windows: only we have them
    model = ours(folder)
    mine = model(tokens)
    rounded = name == "olmo2" and packing and packing["mode"] == "mxfp4"  # mlx-lm's embedding does
    assert apart(mine, theirs(folder)(tokens)) < (1e-2 if rounded else 2e-5)
    quant.unpack(model, mx.float32)
    assert apart(mine, model(tokens)) < 2e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_decoding_is_what_the_whole_sequence_gives(folders, name):
    model = ours(folders(name))
    whole, cache, parts = model(TOKENS), model.make_cache(), []
    begin = 0
    for length in (33, 1, 1, 1, 24, 1, 1, 28):
        parts.append(model(TOKENS[:, begin : begin + length], cache))
        begin += length
    assert begin == TOKENS.shape[1]
    assert apart(mx.concatenate(parts, axis=1), whole) < 1e-5


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_mlx_lm(folders, name, checkpoint):
    """Of every weight, summed over one cotangent."""
    folder, tokens = folders(name), TOKENS[:, :8]
    cotangent = mx.random.normal((*tokens.shape, 300), key=mx.random.key(3))
    found = []
    for model in (ours(folder), theirs(folder)):
        model.unfreeze()
        model.train()
        model.checkpoint = checkpoint
        grads = nn.value_and_grad(model, lambda m: (m(tokens) * cotangent).sum())(model)[1]
        found.append({k.removeprefix("language_model."): g for k, g in tree_flatten(grads)})
    assert found[0].keys() == found[1].keys()
    for key, grad in found[0].items():
        assert apart(grad, found[1][key]) < 2e-4, key
