"""Every family as a tiny random model, against mlx-lm and float64."""

import gc
import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import CHATML, PACKINGS, tiny_config, tiny_tokenizer, write_model
from mlx.utils import tree_flatten

import dora
import quant
import train

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
    config = tiny_config(name, **TINY.get(name, {}) | changes)
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
        model.checkpoint = range(99 * checkpoint)
        grads = nn.value_and_grad(model, lambda m: (m(tokens) * cotangent).sum())(model)[1]
        found.append({k.removeprefix("language_model."): g for k, g in tree_flatten(grads)})
    assert found[0].keys() == found[1].keys()
    for key, grad in found[0].items():
        assert apart(grad, found[1][key]) < 2e-4, key


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_examples_are_what_each_is_alone(folders, monkeypatch, name, checkpoint):
    """Logits, and gradients of every weight; scores for 64 positions at a time."""
    monkeypatch.setattr(quant, "SCORES", 1)
    lengths = [[37, 70, 1, 48], [5, 63, 64, 24]]
    random = np.random.RandomState(2)
    rows = [[random.randint(5, 300, n) for n in row] for row in lengths]
    tokens = mx.array(np.stack([np.concatenate(row) for row in rows]))
    starts = np.stack([np.repeat(np.cumsum([0, *row[:-1]]), row) for row in lengths])
    packed = quant.Packed(mx.array(starts), 70)
    model = ours(folders(name))
    cotangent = mx.random.normal((*tokens.shape, 300), key=mx.random.key(3))

    def alone(model):
        rows_of = [
            mx.concatenate([model(mx.array(ids[None])) for ids in row], axis=1) for row in rows
        ]
        return mx.concatenate(rows_of)

    def together(model):
        return model.head(model.hidden(tokens, packed=packed))

    assert apart(together(model), alone(model)) < 1e-5
    model.unfreeze()
    model.train()
    model.checkpoint = range(99 * checkpoint)
    wanted, got = (
        dict(tree_flatten(nn.value_and_grad(model, lambda m: (f(m) * cotangent).sum())(model)[1]))  # noqa: B023
        for f in (alone, together)
    )
    assert got.keys() == wanted.keys()
    for key in wanted:
        assert apart(got[key], wanted[key]) < (1e-3 if "linear_attn" in key else 1e-4), key


# --- Generating and training ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", *FAMILIES])
def test_prompts_of_any_length_together_are_answered_as_each_alone(tmp_path, name):
    folder = family(tmp_path / "m", name, **({"sliding_window": 8} if name == "mistral" else {}))
    model, random = ours(folder), np.random.RandomState(2)
    prompts = [random.randint(5, 300, n).tolist() for n in (3, 40, 11, 1, 40)]
    alone = [list(quant.stream(model, p, set(), 12)) for p in prompts]
    assert quant.answers(model, prompts, set(), 12) == alone
    stop = alone[1][4]
    ended = [list(quant.stream(model, p, {stop}, 12)) for p in prompts]
    assert quant.answers(model, prompts, {stop}, 12) == ended != alone


@pytest.mark.parametrize("name", FAMILIES)
def test_a_long_prompt_in_pieces_is_the_whole_prompt(folders, name):
    model = ours(folders(name))
    whole = model(TOKENS)[:, -1]
    assert apart(quant.prefill(model, TOKENS, model.make_cache(), chunk=32), whole) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_the_trainers_loss_is_that_of_the_logits(folders, name):
    """Soft caps and scaled logits included."""
    model = ours(folders(name))
    places = mx.array([0, 5, 88, 89 + 7])
    weights = mx.array([1.0, 0.0, 2.0, 1.0])
    targets = TOKENS[:, 1:].reshape(-1)[places]
    logits = model(TOKENS[:, :-1]).reshape(-1, 300)[places]
    wanted = (nn.losses.cross_entropy(logits, targets) * weights).sum().item()
    assert train.loss_sum(model, TOKENS, places, weights).item() == pytest.approx(wanted, rel=1e-5)


# --- Files ----------------------------------------------------------------------------------------


def as_hugging_face(name: str, weights: dict) -> dict:
    """The checkpoint's own layout: an expert at a time, or the Qwen 3.5 way."""
    found = {}
    for key, a in weights.items():
        where, _, rest = key.partition(".switch_mlp.")
        if rest and name == "qwen3_5_moe":
            if "up_proj" in rest:
                gate = weights[f"{where}.switch_mlp.gate_proj.weight"]
                found[f"{where}.experts.gate_up_proj"] = mx.concatenate([gate, a], axis=1)
            elif "down_proj" in rest:
                found[f"{where}.experts.down_proj"] = a
        elif rest:
            part = rest.split(".")[0]
            part = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}.get(part, part)
            part = part if name == "mixtral" else rest.split(".")[0]
            found |= {f"{where}.experts.{e}.{part}.weight": a[e] for e in range(len(a))}
        elif "conv1d" in key:
            found[key] = a.moveaxis(1, 2)
        elif name.startswith("qwen3_5") and "norm" in key and "linear_attn" not in key:
            found[key] = a - 1
        else:
            found[key] = a
    return found


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
def test_checkpoints_of_hugging_face_load_as_in_mlx_lm(tmp_path, capsys, name):
    folder = family(tmp_path / "m", name)
    wanted = ours(folder)(TOKENS)
    file = folder / "model.safetensors"
    weights = mx.load(str(file))
    mx.eval(weights, wanted)
    weights = as_hugging_face(name, weights)
    config = json.loads((folder / "config.json").read_text())
    if name.startswith("qwen3_5"):
        weights = {
            k.replace("model.", "model.language_model.", 1) if k.startswith("model.") else k: a
            for k, a in weights.items()
        }
        weights |= {"model.visual.patch_embed.proj.weight": mx.zeros((4, 4))}
        weights |= {"mtp.fc.weight": mx.zeros((4, 4))}
        text = {**config, "model_type": f"{name}_text"}
        config = {"model_type": name, "text_config": text, "vision_config": {"depth": 1}}
        (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(file), weights, {"format": "pt"})
    assert apart(ours(folder)(TOKENS), wanted) < 1e-5
    said = capsys.readouterr().err
    if name.startswith("qwen3_5"):
        assert "ignoring 2 tensors" in said and "model.visual" in said and "mtp.fc" in said
    assert apart(theirs(folder)(TOKENS), wanted) < 2e-5
    quant.convert(str(folder), str(tmp_path / "out"))
    assert mx.array_equal(ours(tmp_path / "out")(TOKENS), ours(folder)(TOKENS))
    assert apart(theirs(tmp_path / "out")(TOKENS), wanted) < 2e-5


def test_a_missing_expert_is_named(tmp_path):
    folder = family(tmp_path / "m", "mixtral")
    weights = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    weights = as_hugging_face("mixtral", weights)
    del weights["model.layers.0.block_sparse_moe.experts.4.w2.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(quant.UserError, match="0.*down_proj.*1 of 6 experts missing, 4 first"):
        quant.load(str(folder))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_5_moe", "gemma2", "phi3"])
def test_quantize_leaves_routers_dense_and_mlx_lm_loads_it(tmp_path, capsys, name):
    folder = family(tmp_path / "m", name)
    quant.quantize(str(folder), str(tmp_path / "out"), 4, 32)
    model = ours(tmp_path / "out")
    assert apart(model(TOKENS[:, :8]), theirs(tmp_path / "out")(TOKENS[:, :8])) < 2e-5
    packed = {p.rpartition(".")[2] for p, m in model.named_modules() if "scales" in m}
    assert "gate" not in packed and "down_proj" in packed and "embed_tokens" in packed
    quant.dequantize(str(tmp_path / "out"), str(tmp_path / "back"))
    assert apart(ours(tmp_path / "back")(TOKENS), model(TOKENS)) < 2e-5


REFUSED = {
    "latent attention": ("llama", {"kv_lora_rank": 512}, "latent attention .MLA., kv_lora_rank"),
    "both ways": ("gemma3_text", {"use_bidirectional_attention": True}, "what follows, use_bidir"),
    "rope": ("gemma2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 for gemma2"),
    "activation": ("qwen3_moe", {"hidden_act": "relu2"}, "hidden_act 'relu2'"),
    "layers": ("llama", {"layer_types": ["mamba"] * 2}, "layer_types: mamba"),
    "no MLP": ("llama", {"intermediate_size": None}, "config.json lacks intermediate_size"),
    "no choice": ("qwen3_moe", {"num_experts_per_tok": None}, "lacks num_experts_per_tok"),
    "no heads": ("qwen3_5", {"linear_key_head_dim": None}, "lacks linear_key_head_dim"),
    "family": ("deepseek_v3", {}, "model_type 'deepseek_v3'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case):
    name, changes, said = REFUSED[case]
    with pytest.raises(quant.UserError, match=said):
        quant.Spec.read(tiny_config(name, **TINY.get(name, {}) | changes))


def test_what_a_config_leaves_out_is_the_familys_own():
    """Gemma 3's multimodal config.json says little of its text model."""
    said = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    said |= {"intermediate_size": 10240, "sliding_window": 1024}
    said |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    spec = quant.Spec.read(said)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (8, 4, 256)
    assert spec.windows[:7] == (1024,) * 5 + (None, 1024) and spec.vocab_size == 262208
    far, near = spec.ropes[5], spec.ropes[0]
    assert (far["rope_type"], far["factor"], far["rope_theta"]) == ("linear", 8.0, 1e6)
    assert (near["rope_type"], near["rope_theta"]) == ("default", 1e4)
    new = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    new["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    again = quant.Spec.read({**said, "rope_scaling": None, "rope_parameters": new})
    keys = "rope_type", "rope_theta", "dims"
    for one, other in zip(spec.ropes, again.ropes, strict=True):
        assert [one[k] for k in keys] == [other[k] for k in keys]


def test_experts_packed_each_in_its_own_way(tmp_path):
    folder = family(tmp_path / "m", "qwen3_moe")
    model, tokenizer, config = quant.load(str(folder))
    default = {"group_size": 32, "bits": 4, "mode": "affine"}
    path = "model.layers.0.mlp.switch_mlp.down_proj"
    mixed = {path: {"group_size": 32, "bits": 8, "mode": "mxfp8"}, "model.layers.0.mlp.gate": False}
    nn.quantize(
        model, class_predicate=lambda p, m: hasattr(m, "to_quantized") and mixed.get(p, default)
    )
    (tmp_path / "out").mkdir()
    weights = dict(tree_flatten(model.parameters()))
    quant.save(tmp_path / "out", weights, config | {"quantization": default | mixed}, tokenizer)
    mine = ours(tmp_path / "out")
    layers = dict(mine.named_modules())
    assert layers[path].mode == "mxfp8" and "scales" not in layers["model.layers.0.mlp.gate"]
    assert apart(mine(TOKENS), theirs(tmp_path / "out")(TOKENS)) < 2e-5


@pytest.mark.parametrize("T", [8, 63, 64, 150])
def test_the_delta_rule_in_chunks_is_that_of_each_position(T):
    """Outputs, the last state and all gradients, from a state onward."""
    random = np.random.RandomState(T)
    q, k, v, state = (
        mx.array(random.standard_normal(s).astype(np.float32))
        for s in ((2, T, 2, 16), (2, T, 2, 16), (2, T, 4, 24), (2, 4, 24, 16))
    )
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    decay, beta = (
        mx.array(random.uniform(*r, (2, T, 4)).astype(np.float32)) for r in ((-1, 0), (0, 1))
    )
    given = [q, k, v, decay, beta, state]
    shapes = (2, T, 4, 24), (2, 4, 24, 16)
    cotangents = [mx.array(random.standard_normal(s).astype(np.float32)) for s in shapes]

    def position(q, k, v, decay, beta, state):
        return mx.fast.gated_delta_update(q, k, v, mx.exp(decay), beta, state)

    def chunks(*given):
        return quant.gated_delta(*given, chunk=32)

    found = [mx.vjp(f, given, cotangents) for f in (chunks, position)]
    for got, wanted in zip(*(outs + grads for outs, grads in found), strict=True):
        assert apart(got, wanted) < 2e-5


def test_the_same_key_again_and_again_does_no_harm():
    """Where powers of the system would cancel: T ones below the diagonal."""
    q = k = mx.ones((1, 256, 1, 4)) / 2
    v = mx.random.normal((1, 256, 1, 4), key=mx.random.key(0))
    none, all_of_it = mx.zeros((1, 256, 1)), mx.ones((1, 256, 1))
    out, state = quant.gated_delta(q, k, v, none, all_of_it)
    assert apart(out, v) < 1e-5  # each value replaces the one before
    assert apart(state[0, 0] @ k[0, 0, 0], v[0, -1, 0]) < 1e-5


def test_null_means_without_and_absence_the_familys_own():
    config = tiny_config("gemma2", **TINY["gemma2"])
    without = dict.fromkeys(("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"))
    bare = {k: v for k, v in config.items() if k not in without}
    spec, own = quant.Spec.read(bare | without), quant.Spec.read(bare)
    caps = "attn_logit_softcapping", "final_logit_softcapping"
    assert not any(spec.windows) and [getattr(spec, k) for k in caps] == [None, None]
    assert own.windows == (4096, None) and [getattr(own, k) for k in caps] == [50.0, 30.0]
    assert quant.Spec.read(tiny_config("granite")).attention_scale == 1.0
    assert not quant.Spec.read(
        tiny_config("qwen3_moe", **MOE | {"norm_topk_prob": None})
    ).norm_topk_prob


TURNS = (  # of Gemma's kind: <s>, another name for the assistant, no system turn
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('no system turn') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}"
    "{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, TURNS], ids=["chatml", "turns"])
@pytest.mark.parametrize("name", FAMILIES)
def test_chats_are_the_tokens_that_mlx_lm_makes_of_them(tmp_path, name, template):
    from mlx_lm import load

    files = tiny_tokenizer(template=template)
    write_model(tmp_path / "m", tiny_config(name, **TINY[name]), files=files)
    mine, other = quant.load(str(tmp_path / "m"))[1], load(str(tmp_path / "m"))[1]
    turns = [{"role": r, "content": f" {r} says: 1 + 1? "} for r in ("user", "assistant", "user")]
    for reply in (True, False):
        ids = mine.encode(mine.chat(turns, reply=reply), special=False)
        assert ids == other.apply_chat_template(turns, add_generation_prompt=reply)
    if template == TURNS:
        with pytest.raises(quant.UserError, match="refuses system/user: no system turn"):
            mine.chat([{"role": "system", "content": "x"}, turns[0]])


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("name", ["llama", "qwen3", *FAMILIES])
def test_plan_counts_what_backward_keeps(name, kind):
    """`train.kept` against what is allocated after forward while a gradient waits."""
    config, tokens = tiny_config(name, **TINY.get(name, {})), 1024
    model = quant.Model(quant.Spec.read(config))
    model.freeze()
    paths, _ = dora.choose(model, None, -1)
    doras = set(paths) if kind == "dora" else set()
    blocks = dora.block_prefixes(model)
    planned = sum(train.kept(model, i, b, doras, 4) for i, b in enumerate(blocks))
    planned += 4 * 4 * model.spec.hidden_size  # the last norm, and what the loss keeps
    dora.adapt(model, 2, 2.0, kind=kind)
    model.train()
    batch = mx.random.randint(0, 300, (4, tokens // 4 + 1)), mx.arange(tokens), mx.ones((tokens,))
    mx.eval(model.parameters(), batch)
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    loss, grads = nn.value_and_grad(model, train.loss_sum)(model, *batch)
    mx.eval(loss)
    mx.synchronize()
    found = (mx.get_active_memory() - before) / tokens
    assert 0.95 < planned / found < 1.12
    del grads
