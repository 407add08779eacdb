"""fuse.py: what it writes behaves as the live adapter did, and nothing is left of what fails."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import (
    CHATML,
    PACKINGS,
    ROOT,
    refused,
    run_cli,
    tiny_config,
    tiny_tokenizer,
    write_model,
)
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

import dora
import fuse
import quant

TOKENS = mx.array([[5, 100, 200, 7, 31, 299], [1, 2, 3, 4, 5, 6]])
KEYS = ["q_proj", "mlp.*", "lm_head"]
MIXED = {
    "model.layers.0.self_attn.q_proj": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "model.layers.1.mlp.up_proj": {"group_size": 64, "bits": 3, "mode": "affine"},
    "model.layers.1.mlp.gate_proj": False,
    "model.layers.1.mlp.down_proj": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}
EXTRA = {
    "chat_template.jinja": CHATML.encode(),
    "generation_config.json": b'{ "eos_token_id": [2,7],  "temperature": 0.5 }\n',
    "special_tokens_map.json": b'{"eos_token": "</s>"}',
}


def name_of(packing):
    return "-".join(map(str, packing.values())) if isinstance(packing, dict) else None


def apart(got, want) -> float:
    got, want = (np.array(a.astype(mx.float32), np.float64) for a in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def train_on(base: Path, folder: Path, scale=7.5, kind="dora", keys=KEYS, seed=19) -> Path:
    """An adapter of rank 4 on `base` that is far from a no-op."""
    model, _, config = quant.load(str(base))
    mx.random.seed(seed)
    dora.adapt(model, 4, scale, 0.5, keys, kind=kind)
    for layer in dora.adapted(model).values():
        layer.lora_b = mx.random.normal(layer.lora_b.shape) / 16
        if kind == "dora":
            layer.m = layer.m * mx.random.uniform(0.7, 1.5, layer.m.shape)
    folder.mkdir(parents=True)
    dora.save_adapter(folder, model, str(base), config)
    return folder / "adapters.safetensors"


def logits(path, adapter=None) -> mx.array:
    model, _, config = quant.load(str(path))
    if adapter:
        dora.load_adapter(model, adapter, config)
    return model(TOKENS)


def weights(path) -> dict[str, mx.array]:
    return mx.load(str(path / "model.safetensors"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def mixed_model(folder: Path) -> Path:
    """Four packings and a dense layer in one model."""
    config = tiny_config() | {"quantization": {"group_size": 32, "bits": 4, "mode": "affine"}}
    mx.random.seed(0)
    model = quant.Model(quant.Spec.read(config))
    default = dict(config["quantization"])
    nn.quantize(
        model, class_predicate=lambda p, m: hasattr(m, "to_quantized") and MIXED.get(p, default)
    )
    config["quantization"] |= MIXED
    folder.mkdir()
    files = quant.Tokenizer(tiny_tokenizer() | EXTRA, config)
    quant.save(folder, dict(tree_flatten(model.parameters())), config, files)
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    return mixed_model(folder / "model"), train_on(folder / "model", folder / "adapter")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A 4-bit base and an adapter on it."""
    folder = tmp_path_factory.mktemp("small")
    base = write_model(folder / "model", packing=PACKINGS[4])
    return base, train_on(base, folder / "adapter")


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    """Enough for models of this size."""
    monkeypatch.setattr(fuse, "ROWS", 3)
    monkeypatch.setattr(fuse, "LENGTH", 64)


# --- What is written ------------------------------------------------------------------------------


EVERY = [*((p, "dora") for p in (None, *PACKINGS)), (None, "lora"), (PACKINGS[5], "lora")]


@pytest.mark.parametrize("packing, kind", EVERY, ids=name_of)
def test_fused_models_behave_as_the_live_adapter(packing, kind, tmp_path):
    """Dense: to float32 rounding. Packed: within a few times what packing loses of the weights.
    In mlx-lm as here. No flags are needed: rank, scale and base are in the file."""
    base = write_model(tmp_path / "base", packing=packing)
    adapter = train_on(base, tmp_path / "adapter", kind=kind)
    live, before = logits(base, adapter), logits(base)
    assert apart(live, before) > 0.1
    fuse.fuse([str(adapter)], save_path=str(tmp_path / "dense"), dequantize=True)
    assert apart(logits(tmp_path / "dense"), live) < 1e-5
    written = weights(tmp_path / "dense")
    source = {p: m for p, m in quant.load(str(base))[0].named_modules() if "weight" in m}
    assert set(written) == {f"{p}.weight" for p in source}
    assert {a.dtype for a in written.values()} == {mx.float32}
    fuse.fuse([str(adapter)], save_path=str(tmp_path / "fused"))
    fused, config = load_model(tmp_path / "fused")
    assert apart(fused(TOKENS), logits(tmp_path / "fused")) < 1e-5
    assert config.get("quantization") == packing
    if packing:
        pairs = [
            (dora.dense(dora.tensors(m), dora.packing(m), mx.float32), written[f"{p}.weight"])
            for p, m in fused.named_modules()
            if "scales" in m
        ]
        loss = max(apart(*pair) for pair in pairs)
        assert 1e-3 < loss and apart(logits(tmp_path / "fused"), live) < 4 * loss
    else:
        assert apart(logits(tmp_path / "fused"), live) < 1e-5


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("packing", [None, PACKINGS[5], PACKINGS[-3], PACKINGS[-1]], ids=name_of)
def test_half_precision_models_keep_their_dtype(packing, dtype, tmp_path):
    """Modes whose scales are integers included: the model's dtype counts, not theirs."""
    base = write_model(tmp_path / "base", packing=packing, dtype=dtype)
    adapter = train_on(base, tmp_path / "adapter")
    live = logits(base, adapter)
    for name, flags in (("a", {}), ("b", {"dequantize": True}), ("c", {"bits": 8})):
        fuse.fuse([str(adapter)], save_path=str(tmp_path / name), **flags)
        found = {a.dtype for a in weights(tmp_path / name).values()}
        assert found - {mx.uint32, mx.uint8} == {dtype}
        assert (mx.uint8 in found) == (bool(packing) and "fp4" in packing["mode"] and name != "b")
        got = logits(tmp_path / name)
        assert got.dtype == dtype
        if name == "b":
            assert apart(got, live) < (3e-2 if dtype == mx.bfloat16 else 4e-3)


def test_every_layer_is_packed_as_it_was(mixed, tmp_path):
    base, adapter = mixed
    fuse.fuse([str(adapter)], save_path=str(tmp_path / "fused"))
    before, after = (
        json.loads((f / "config.json").read_text()) for f in (base, tmp_path / "fused")
    )
    assert before == after and after["quantization"] == after["quantization_config"]
    assert {k: a.shape for k, a in weights(base).items()} == {
        k: a.shape for k, a in weights(tmp_path / "fused").items()
    }
    fuse.fuse([str(adapter)], save_path=str(tmp_path / "dense"), dequantize=True)
    assert apart(logits(tmp_path / "dense"), logits(base, adapter)) < 1e-5
    assert "quant" not in (tmp_path / "dense" / "config.json").read_text()
    # what no adapter was on is byte for byte the base's
    old, new = weights(base), weights(tmp_path / "fused")
    changed = {k.rpartition(".")[0] for k in old if not mx.array_equal(old[k], new[k])}
    assert changed == {k.rpartition(".")[0] for k in mx.load(str(adapter))}


def test_bits_and_group_size_repack_the_adapted_layers_and_the_config_says_so(mixed, tmp_path):
    base, adapter = mixed
    fuse.fuse([str(adapter)], save_path=str(tmp_path / "fused"), bits=8, group_size=64)
    config = json.loads((tmp_path / "fused" / "config.json").read_text())["quantization"]
    names = {k.rpartition(".")[0] for k in mx.load(str(adapter))}
    assert {k for k, v in config.items() if isinstance(v, dict)} == names
    for path, how in config.items():
        if path in names:
            assert how == {"group_size": 64, "bits": 8, "mode": "affine"}
    got = logits(tmp_path / "fused")
    assert apart(got, logits(base, adapter)) < 0.05
    theirs, _ = load_model(tmp_path / "fused")
    assert apart(theirs(TOKENS), got) < 1e-5


def test_a_dense_base_is_packed_when_asked(dense, tmp_path):
    adapter = train_on(dense, tmp_path / "adapter")
    fuse.fuse([str(adapter)], save_path=str(tmp_path / "fused"), bits=4)
    config = json.loads((tmp_path / "fused" / "config.json").read_text())["quantization"]
    assert config == {"group_size": 64, "bits": 4, "mode": "affine"}
    full, size = ((f / "model.safetensors").stat().st_size for f in (dense, tmp_path / "fused"))
    assert size < full / 5
    names = {k.rpartition(".")[0] for k in weights(tmp_path / "fused") if k.endswith(".scales")}
    assert len(names) == 2 * 7 + 2
    assert apart(logits(tmp_path / "fused"), logits(dense, adapter)) < 0.5


def test_a_second_fuse_is_byte_identical_and_dropout_plays_no_part(small, tmp_path):
    base, adapter = small
    for name in "ab":
        fuse.fuse([str(adapter)], save_path=str(tmp_path / name))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert dora.read_adapter(str(adapter))[1]["dropout"] == 0.5


def test_tokenizer_template_and_generation_files_are_kept_byte_for_byte(mixed, tmp_path):
    base, adapter = mixed
    fuse.fuse([str(adapter.parent)], save_path=str(tmp_path / "fused"))
    old, new = contents(base), contents(tmp_path / "fused")
    assert set(old) | {"fuse_report.json"} == set(new) and set(EXTRA) < set(new)
    for name in set(old) - {"model.safetensors", "config.json"}:
        assert old[name] == new[name]
    assert quant.load(str(tmp_path / "fused"))[1].eos_ids == {2, 7}


def test_doubled_magnitudes_double_the_dense_weight(dense, tmp_path):
    model, _, config = quant.load(str(dense))
    dora.adapt(model, keys=["up_proj"])
    for layer in dora.adapted(model).values():
        layer.m = layer.m * 2
    dora.save_adapter(tmp_path, model, str(dense), config)
    fuse.fuse([str(tmp_path)], save_path=str(tmp_path / "fused"))
    old, new = weights(dense), weights(tmp_path / "fused")
    for name, array in old.items():
        assert apart(new[name], array * (2 if "up_proj" in name else 1)) < 1e-7


def test_alpha_over_rank_reaches_the_fused_weight(dense, tmp_path):
    """A and B all ones, rank 4, alpha 8: every weight grows by alpha / rank x rank = 8."""
    adapter = train_on(dense, tmp_path / "adapter", scale=8 / 4, kind="lora", keys=["lm_head"])
    ones = {k: mx.ones(a.shape) for k, a in mx.load(str(adapter)).items()}
    mx.save_safetensors(str(adapter), ones, mx.load(str(adapter), return_metadata=True)[1])
    fuse.fuse([str(adapter)], save_path=str(tmp_path / "fused"))
    old, new = weights(dense)["lm_head.weight"], weights(tmp_path / "fused")["lm_head.weight"]
    assert apart(new, old + 8) < 1e-6


def test_full_fine_tuning_fuses(dense, tmp_path):
    model, _, config = quant.load(str(dense))
    model.layers[1].unfreeze()
    model.layers[1].apply(lambda a: a + 0.1)
    dora.save_adapter(tmp_path, model, str(dense), config)
    fuse.fuse([str(tmp_path)], save_path=str(tmp_path / "fused"))
    assert mx.array_equal(logits(tmp_path / "fused"), model(TOKENS))
    assert not mx.array_equal(logits(dense), model(TOKENS))
    fuse.fuse([str(tmp_path)], save_path=str(tmp_path / "packed"), bits=8)
    assert apart(logits(tmp_path / "packed"), model(TOKENS)) < 0.05


def test_adapters_that_mlx_lm_wrote_fuse_with_the_model_named(small, tmp_path):
    """No metadata in the file: adapter_config.json beside it says rank and scale."""
    base, adapter = small
    bare = tmp_path / "bare"
    bare.mkdir()
    mx.save_safetensors(str(bare / "adapters.safetensors"), mx.load(str(adapter)))
    said = json.loads((adapter.parent / "adapter_config.json").read_text())
    del said["model"]
    (bare / "adapter_config.json").write_text(json.dumps(said))
    with pytest.raises(quant.UserError, match="does not name its base model; give --model"):
        fuse.fuse([str(bare)], save_path=str(tmp_path / "fused"))
    fuse.fuse([str(bare)], model=str(base), save_path=str(tmp_path / "fused"))
    fuse.fuse([str(adapter)], save_path=str(tmp_path / "other"))
    found = [contents(tmp_path / name) for name in ("fused", "other")]
    reports = [json.loads(f.pop("fuse_report.json")) for f in found]
    assert found[0] == found[1] and reports[0]["layers"] == reports[1]["layers"]


def test_the_config_may_name_its_packing_in_either_dialect(small, tmp_path):
    base, adapter = small
    live = logits(base, adapter)
    fuse.fuse([str(adapter)], save_path=str(tmp_path / "plain"))
    for name in ("quantization", "quantization_config"):
        copy = tmp_path / name
        shutil.copytree(base, copy)
        config = json.loads((base / "config.json").read_text())
        del config[name]
        (copy / "config.json").write_text(json.dumps(config))
        assert mx.array_equal(logits(copy, adapter), live)
        fuse.fuse([str(adapter)], model=str(copy), save_path=str(tmp_path / f"fused-{name}"))
        got, want = (contents(tmp_path / f) for f in (f"fused-{name}", "plain"))
        assert got["model.safetensors"] == want["model.safetensors"]
        assert "quantization" in json.loads(got["config.json"])
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    config.pop("quantization", None)
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(quant.UserError, match="packed by 'awq'"):
        fuse.fuse([str(adapter)], model=str(copy), save_path=str(tmp_path / "no"))


# --- How much of it is left, and other ways to take it along -------------------------------------


def report(folder: Path) -> dict:
    return json.loads((folder / "fuse_report.json").read_text())


def slight(base: Path, folder: Path, kind="dora", seed=3) -> Path:
    """An adapter whose update is a tenth of what rounding to 4 bits moves."""
    model, _, config = quant.load(str(base))
    mx.random.seed(seed)
    dora.adapt(model, 4, 2.0, kind=kind)
    for layer in dora.adapted(model).values():
        W = dora.dense(dora.tensors(layer.linear), dora.packing(layer.linear), mx.float32)
        B = mx.random.normal(layer.lora_b.shape)
        size = mx.linalg.norm(layer.lora_a @ B) * 2.0
        layer.lora_b = B * (0.01 * mx.linalg.norm(W) / size)
        if kind == "dora":
            layer.m = layer.m * mx.random.uniform(0.97, 1.03, layer.m.shape)
    folder.mkdir()
    dora.save_adapter(folder, model, str(base), config)
    return folder


def test_a_slight_update_survives_four_bits(small, tmp_path):
    """Rounding to the nearest changes the update by a fifth, under noise twice its size. GPTQ on
    the base's grid, with weight on the update's directions, leaves it as it is."""
    adapter = slight(small[0], tmp_path / "adapter")
    for rounding in ("gptq", "nearest"):
        fuse.fuse([str(adapter)], save_path=str(tmp_path / rounding), rounding=rounding)
    ours, plain = (report(tmp_path / name)["overall"] for name in ("gptq", "nearest"))
    for where in ("weights", "outputs"):
        assert abs(ours[where]["kept"] - 1) < 0.05 < abs(plain[where]["kept"] - 1)


@pytest.mark.parametrize("packing", PACKINGS[-3:], ids=name_of)
def test_codes_of_float_formats_make_up_for_each_other_too(packing, tmp_path):
    """Their scales cannot hold g, so the grid is new; what the inputs see of the update is kept
    far better all the same."""
    base = write_model(tmp_path / "base", packing=packing)
    adapter = slight(base, tmp_path / "adapter")
    for rounding in ("gptq", "nearest"):
        fuse.fuse([str(adapter)], save_path=str(tmp_path / rounding), rounding=rounding)
    ours, plain = (report(tmp_path / name)["overall"]["outputs"] for name in ("gptq", "nearest"))
    assert ours["kept"] > 0.6 and plain["kept"] < 0.4
    assert ours["cosine"] > 2 * plain["cosine"]


@pytest.mark.parametrize("dequantize", [True, False])
def test_the_report_is_of_what_was_written(small, tmp_path, dequantize):
    """Dense: everything is kept. The losses are those of the folders, and of the live adapter."""
    base, adapter = small
    fuse.fuse([str(adapter)], save_path=str(tmp_path / "fused"), dequantize=dequantize)
    found = report(tmp_path / "fused")
    assert set(found["layers"]) == {k.rpartition(".")[0] for k in mx.load(str(adapter))}
    if dequantize:
        assert found["overall"]["error"] < 1e-6 and found["text"]["kl"]["fused"] < 1e-6
        for each in (found["overall"], *found["layers"].values()):
            for where in ("weights", "outputs"):
                assert each[where] == pytest.approx({"kept": 1.0, "cosine": 1.0}, abs=1e-4)
    rows = fuse.sample(None, None, quant.load(str(base))[1])[2]
    for name, folder in (("base", base), ("unfused", base), ("fused", tmp_path / "fused")):
        model, total, count = quant.load(str(folder))[0], 0.0, 0
        if name == "unfused":
            dora.load_adapter(model, str(adapter))
        for row in rows:
            at = np.flatnonzero(row.trained)
            losses = nn.losses.cross_entropy(model(row.tokens[:, :-1])[0], row.tokens[0, 1:])
            total, count = total + np.array(losses)[at].sum(), count + len(at)
        assert found["text"]["loss"][name] == pytest.approx(total / count, rel=1e-5)


def test_a_small_change_survives_in_bfloat16(tmp_path):
    """Formed in float32 and rounded once: every weight is what float64 says."""
    base = write_model(tmp_path / "base", dtype=mx.bfloat16)
    adapter = train_on(base, tmp_path / "adapter", scale=1.0, kind="lora", keys=["up_proj"])
    tensors, meta = mx.load(str(adapter), return_metadata=True)
    even = {k: mx.full(a.shape, 5e-6 if "lora_a" in k else 1.0) for k, a in tensors.items()}
    mx.save_safetensors(str(adapter), even, meta)
    fuse.fuse([str(adapter)], save_path=str(tmp_path / "fused"))
    name = "model.layers.0.mlp.up_proj.weight"
    wanted = np.array(weights(base)[name].astype(mx.float32), np.float64) + 4 * np.float32(5e-6)
    wanted = mx.array(wanted.astype(np.float32)).astype(mx.bfloat16)
    assert mx.array_equal(weights(tmp_path / "fused")[name], wanted)
    assert not mx.array_equal(weights(base)[name], wanted)


def test_an_adapter_that_changes_nothing_is_said_and_leaves_the_base(dense, tmp_path, capsys):
    model, _, config = quant.load(str(dense))
    dora.adapt(model)
    dora.save_adapter(tmp_path, model, str(dense), config)
    fuse.fuse([str(tmp_path)], save_path=str(tmp_path / "fused"))
    assert "changes nothing" in capsys.readouterr().err
    assert apart(logits(tmp_path / "fused"), logits(dense)) < 1e-6


def test_too_little_left_is_a_warning_that_names_the_way_out(tmp_path, capsys):
    base = write_model(tmp_path / "base", packing=PACKINGS[0])
    adapter = slight(base, tmp_path / "adapter")
    fuse.fuse([str(adapter)], save_path=str(tmp_path / "fused"), rounding="nearest")
    assert "--bits 8, --dequantize or --to lora" in capsys.readouterr().err
    fuse.fuse([str(adapter)], save_path=str(tmp_path / "dense"), dequantize=True)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("packing", [None, PACKINGS[5], PACKINGS[8], PACKINGS[10]], ids=name_of)
@pytest.mark.parametrize("kind", ["dora", "lora"])
def test_a_lora_adapter_beside_the_scaled_base_is_the_same_model(packing, kind, tmp_path):
    """Here and in mlx-lm. Codes are the base's own."""
    base = write_model(tmp_path / "base", packing=packing)
    adapter = train_on(base, tmp_path / "adapter", kind=kind)
    fuse.fuse([str(adapter)], save_path=str(tmp_path / "fused"), to="lora")
    old, new = weights(base), weights(tmp_path / "fused")
    if packing:
        assert all(mx.array_equal(a, new[k]) for k, a in old.items() if k.endswith("weight"))
    live, beside = logits(base, adapter), tmp_path / "fused" / "adapters"
    assert dora.read_adapter(str(beside))[1]["kind"] == "lora"
    assert apart(logits(tmp_path / "fused", str(beside)), live) < 1e-5
    theirs, _ = load_model(tmp_path / "fused")
    theirs = load_adapters(theirs, str(beside))
    theirs.eval()
    assert apart(theirs(TOKENS), live) < 1e-5


def test_scales_that_cannot_hold_g_are_refused(mixed, tmp_path):
    base, adapter = mixed
    with pytest.raises(quant.UserError, match="--to lora: the scales of .* cannot hold g"):
        fuse.fuse([str(adapter)], save_path=str(tmp_path / "fused"), to="lora")
    assert not (tmp_path / "fused").exists()


def test_several_adapters_add_up_by_their_weights(dense, tmp_path):
    """DoRA and LoRA, on different layers: W + Σ w (W' - W)."""
    one = train_on(dense, tmp_path / "one", keys=["q_proj", "up_proj"])
    two = train_on(dense, tmp_path / "two", kind="lora", keys=["up_proj", "lm_head"], seed=20)
    made = {}
    for name, which, shares in (
        ("a", [one], None),
        ("b", [two], None),
        ("both", [one, two], [0.7, -0.3]),
        ("first", [one, two], [1.0, 0.0]),
    ):
        flags = dict(save_path=str(tmp_path / name), weights=shares)
        fuse.fuse([str(w) for w in which], **flags)
        made[name] = weights(tmp_path / name)
    for name, W in weights(dense).items():
        wanted = W + 0.7 * (made["a"][name] - W) - 0.3 * (made["b"][name] - W)
        assert apart(made["both"][name], wanted) < 1e-6
        assert apart(made["first"][name], made["a"][name]) < 1e-6


def test_memory_holds_a_block_at_a_time(tmp_path, monkeypatch):
    config = tiny_config(hidden_size=256, intermediate_size=1024, num_hidden_layers=24)
    base = write_model(tmp_path / "base", config)
    adapter = slight(base, tmp_path / "adapter")
    monkeypatch.setattr(quant, "SHARD_BYTES", 4 << 20)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    fuse.fuse([str(adapter)], save_path=str(tmp_path / "fused"))
    whole = sum(f.stat().st_size for f in base.glob("*.safetensors"))
    assert whole > 90e6 and mx.get_peak_memory() - before < 0.5 * whole
    assert apart(logits(tmp_path / "fused"), logits(base, str(adapter))) < 1e-5


# --- PEFT -----------------------------------------------------------------------------------------


def peft_folder(folder: Path, tensors: dict, **config) -> Path:
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def peft_tensors(base: Path, rank=4, dora_too=False, key="mlp.up_proj") -> dict[str, mx.array]:
    mx.random.seed(5)
    found = {}
    for i in range(2):
        path = f"model.layers.{i}.{key}"
        O, I = weights(base)[f"{path}.weight"].shape
        name = f"base_model.model.{path}"
        found[f"{name}.lora_A.weight"] = mx.random.normal((rank, I)) / 16
        found[f"{name}.lora_B.weight"] = mx.random.normal((O, rank)) / 16
        if dora_too:
            found[f"{name}.lora_magnitude_vector"] = mx.random.uniform(0.5, 2.0, (O,))
    return found


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_that_peft_wrote_fuse(dense, tmp_path, use_dora, rslora):
    tensors = peft_tensors(dense, dora_too=use_dora)
    adapter = peft_folder(tmp_path / "peft", tensors, use_dora=use_dora, use_rslora=rslora)
    fuse.fuse([str(adapter)], model=str(dense), save_path=str(tmp_path / "fused"))
    old, new = weights(dense), weights(tmp_path / "fused")
    for i in range(2):
        name = f"model.layers.{i}.mlp.up_proj"
        A, B = (np.array(tensors[f"base_model.model.{name}.lora_{k}.weight"]) for k in "AB")
        wanted = np.array(old[f"{name}.weight"]) + 8 / (2 if rslora else 4) * (B @ A)
        if use_dora:
            m = np.array(tensors[f"base_model.model.{name}.lora_magnitude_vector"])
            wanted *= (m / np.linalg.norm(wanted, axis=1))[:, None]
        assert apart(new[f"{name}.weight"], mx.array(wanted)) < 1e-6


def test_rank_and_alpha_patterns(dense, tmp_path):
    tensors = peft_tensors(dense) | peft_tensors(dense, 2, key="self_attn.q_proj")
    how = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 6}}
    _, settings = dora.read_adapter(str(peft_folder(tmp_path / "peft", tensors, **how)))
    assert settings["rank"] is None and settings["scales"] == {
        "model.layers.0.mlp.up_proj": 2.0,
        "model.layers.1.mlp.up_proj": 2.0,
        "model.layers.0.self_attn.q_proj": 4.0,
        "model.layers.1.self_attn.q_proj": 3.0,
    }


@pytest.mark.parametrize("kind", ["dora", "lora"])
@pytest.mark.parametrize("scale", [7.5, 0.1, 20.0, 1 / 3])
def test_to_peft_and_back_is_bit_for_bit(dense, tmp_path, kind, scale):
    adapter = train_on(dense, tmp_path / "adapter", scale=scale, kind=kind)
    done = run_cli("fuse", adapter, "--to", "peft", "--save-path", tmp_path / "peft")
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["use_dora"] == (kind == "dora") and config["r"] == 4
    (ours, said), (back, read) = (dora.read_adapter(str(p)) for p in (adapter, tmp_path / "peft"))
    assert set(ours) == set(back) and all(mx.array_equal(a, back[k]) for k, a in ours.items())
    assert (read["kind"], read["rank"], read["scale"]) == (kind, 4, said["scale"])
    model, _, config = quant.load(str(dense))
    dora.load_adapter(model, str(tmp_path / "peft"), config)
    (tmp_path / "again").mkdir()
    dora.save_adapter(tmp_path / "again", model, str(dense), config)
    dora.save_peft(tmp_path / "again", *dora.read_adapter(str(tmp_path / "again")))
    name = "adapter_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "peft" / name).read_bytes()


@pytest.fixture
def peft():
    """PEFT itself, on PyTorch: pip install torch peft."""
    pytest.importorskip("torch")
    return pytest.importorskip("peft")


def in_torch(base: Path):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype="float32").eval()


def torch_logits(model) -> mx.array:
    import torch

    with torch.no_grad():
        return mx.array(model(torch.tensor(TOKENS.tolist())).logits.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora", "lora"])
def test_peft_itself_loads_what_is_exported(peft, dense, tmp_path, kind):
    adapter = train_on(dense, tmp_path / "adapter", kind=kind)
    fuse.fuse([str(adapter)], to="peft", save_path=str(tmp_path / "peft"))
    model = peft.PeftModel.from_pretrained(in_torch(dense), tmp_path / "peft")
    live = logits(dense, str(adapter))
    assert apart(logits(dense), live) > 0.1
    assert apart(torch_logits(model), live) < 1e-5
    model.save_pretrained(tmp_path / "again")  # with the head's own weight beside it
    ours, theirs = (dora.read_adapter(str(tmp_path / f)) for f in ("peft", "again"))
    assert all(mx.array_equal(a, theirs[0][k]) for k, a in ours[0].items())
    assert set(ours[0]) == set(theirs[0]) and ours[1]["scales"] == theirs[1]["scales"]


PEFT_WAYS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "patterns": {
        "use_dora": True,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 8},
        "alpha_pattern": {"down_proj": 3},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("way", PEFT_WAYS)
def test_what_peft_itself_wrote_is_the_same_model_here(peft, dense, tmp_path, way):
    import torch

    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = dict(r=4, lora_alpha=6, target_modules=targets, **PEFT_WAYS[way])
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
    model = peft.get_peft_model(in_torch(dense), config).eval()
    model.save_pretrained(tmp_path / "peft")
    live = torch_logits(model)
    assert apart(logits(dense), live) > 0.01
    assert apart(logits(dense, str(tmp_path / "peft")), live) < 1e-5
    fuse.fuse([str(tmp_path / "peft")], model=str(dense), save_path=str(tmp_path / "fused"))
    assert apart(logits(tmp_path / "fused"), live) < 1e-5
    dora.save_peft(tmp_path, *dora.read_adapter(str(tmp_path / "peft")))  # and the way back
    ours, theirs = (
        mx.load(str(f / "adapter_model.safetensors")) for f in (tmp_path, tmp_path / "peft")
    )
    assert set(ours) == set(theirs) and all(mx.array_equal(a, theirs[k]) for k, a in ours.items())
    assert (
        apart(torch_logits(peft.PeftModel.from_pretrained(in_torch(dense), tmp_path)), live) < 1e-5
    )


def test_alpha_is_rank_times_scale(dense, tmp_path):
    adapter = train_on(dense, tmp_path / "adapter", scale=2.0)
    fuse.fuse([str(adapter)], to="peft", save_path=str(tmp_path / "peft"))
    said = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"]) == (4, 8)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "embed_tokens.lora_embedding_A"])
def test_other_tensors_in_a_peft_file_are_refused_by_name(dense, tmp_path, name):
    more = {f"base_model.model.model.{name}": mx.zeros((320, 64))}
    with pytest.raises(dora.UserError, match=name):
        dora.read_adapter(str(peft_folder(tmp_path / "peft", peft_tensors(dense) | more)))


UNMAPPED = {
    "only after its trigger": (dict(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens"),
    "of a base that PEFT changed": (dict(init_lora_weights="pissa_niter_4"), "pissa_niter_4"),
    "bias": (dict(bias="all"), "bias"),
    "modules_to_save": (dict(modules_to_save=["lm_head"]), "modules_to_save"),
    "fan_in_fan_out": (dict(fan_in_fan_out=True), "fan_in_fan_out"),
    "kind": (dict(peft_type="VERA"), "peft_type"),
    "rank": (dict(r=8), "has rank 4, adapter_config.json says 8"),
    "alpha": (dict(lora_alpha="x"), "lora_alpha"),
}


@pytest.mark.parametrize("case", UNMAPPED)
def test_what_peft_has_and_this_has_not_is_refused_by_name(dense, tmp_path, case):
    config, said = UNMAPPED[case]
    adapter = peft_folder(tmp_path / "peft", peft_tensors(dense), **config)
    done = run_cli("fuse", adapter, "--model", dense, "--save-path", tmp_path / "fused")
    refused(done, said)
    assert not (tmp_path / "fused").exists()


# --- What is refused, and what it leaves behind ---------------------------------------------------


def other_base(folder):
    return write_model(folder / "other", packing=PACKINGS[4], seed=1)


def half(folder, adapter):
    cut = folder / "cut" / "adapters.safetensors"
    cut.parent.mkdir()
    cut.write_bytes(adapter.read_bytes()[: adapter.stat().st_size // 2])
    return cut


def nameless(folder, adapter):
    tensors, meta = mx.load(str(adapter), return_metadata=True)
    mx.save_safetensors(str(folder / "a.safetensors"), tensors, meta | {"base": ""})
    return folder / "a.safetensors"


REFUSALS = {
    "another base": (lambda f, a: dict(adapters=a, model=other_base(f)), "weights of .* differ"),
    "cut in half": (lambda f, a: dict(adapters=half(f, a)), "damaged or cut short"),
    "no base named": (lambda f, a: dict(adapters=nameless(f, a)), "give --model"),
    "no such base": (lambda f, a: dict(adapters=a, model=f / "none" / "such"), "no such folder"),
    "group too wide": (lambda f, a: dict(adapters=a, group_size=64, bits=5), "does not divide"),
    "bits": (lambda f, a: dict(adapters=a, bits=7), "bits got 7"),
    "group size": (lambda f, a: dict(adapters=a, group_size=48), "group size got 48"),
    "both": (lambda f, a: dict(adapters=a, bits=4, dequantize=True), "exclude each other"),
    "ways": (lambda f, a: dict(adapters=a, to="gguf"), "--to gguf"),
    "how to round": (lambda f, a: dict(adapters=a, rounding="up"), "--rounding up"),
    "packing and lora": (lambda f, a: dict(adapters=a, to="lora", bits=8), "leaves the packing"),
    "weights": (lambda f, a: dict(adapters=a, weights=[0.5, 0.5]), "got 2 for 1 adapters"),
    "no adapter": (lambda f, a: dict(adapters=f / "nope"), "no such adapter"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_leave_nothing_behind_and_the_base_as_it_was(case, tmp_path):
    config = tiny_config(hidden_size=96, num_attention_heads=3, num_key_value_heads=1)
    base = write_model(tmp_path / "base", config, PACKINGS[4])
    adapter = train_on(base, tmp_path / "adapter")
    flags, said = REFUSALS[case]
    if case == "another base":
        base = write_model(tmp_path / "wide", packing=PACKINGS[4])
        adapter = train_on(base, tmp_path / "wider")
    flags = {k: str(v) if isinstance(v, Path) else v for k, v in flags(tmp_path, adapter).items()}
    flags["adapters"] = [flags["adapters"]]
    before = contents(tmp_path)
    with pytest.raises((quant.UserError, dora.UserError), match=said):
        fuse.fuse(**flags, save_path=str(tmp_path / "fused"))
    assert contents(tmp_path) == before
    assert not [f for f in tmp_path.iterdir() if "fused" in f.name]
    if case == "another base":
        with pytest.raises(dora.UserError, match=f"{flags['model']} differ.*{base}"):
            fuse.fuse(**flags, save_path=str(tmp_path / "fused"))
        fuse.fuse(**flags, save_path=str(tmp_path / "fused"), force=True)
        assert (tmp_path / "fused" / "config.json").exists()


def test_a_second_adapter_is_refused_by_the_model_the_first_was_fused_into(small, tmp_path):
    base, first = small
    second = train_on(base, tmp_path / "second", seed=20)
    fuse.fuse([str(first)], save_path=str(tmp_path / "once"))
    with pytest.raises(
        dora.UserError, match="weights of .* differ from the base it was trained on"
    ):
        fuse.fuse([str(second)], model=str(tmp_path / "once"), save_path=str(tmp_path / "twice"))
    assert not (tmp_path / "twice").exists()


def test_another_packing_of_the_same_base_is_fused_with_a_warning(tmp_path, capsys):
    """Both named: what it was trained on and how far this one is from it."""
    base = write_model(tmp_path / "base", packing=PACKINGS[4])
    finer = write_model(tmp_path / "finer", packing=PACKINGS[10])
    adapter = train_on(base, tmp_path / "adapter")
    fuse.fuse([str(adapter)], model=str(finer), save_path=str(tmp_path / "fused"))
    said = capsys.readouterr().err
    assert said.count("packed differently") == 1 and str(base) in said and str(finer) in said
    assert apart(logits(tmp_path / "fused"), logits(finer, adapter)) < 0.05


@pytest.mark.parametrize("what", ["file", "folder", "base", "read-only"])
def test_an_output_that_cannot_be_written_is_refused_at_once(what, small, tmp_path):
    base, adapter = small
    target, before = tmp_path / "out", contents(base)
    if what == "base":
        target = base
    elif what == "read-only":
        if os.geteuid() == 0:
            target = Path("/proc/out")  # root may write anywhere else
        else:
            tmp_path.chmod(0o500)
    else:
        target.mkdir() if what == "folder" else target.write_text("mine")
    with pytest.raises(quant.UserError, match="exists; give another|cannot be written"):
        fuse.fuse([str(adapter)], model="no-such/model", save_path=str(target))
    assert what != "file" or target.read_text() == "mine"
    assert what != "read-only" or not target.exists()
    assert contents(base) == before
    tmp_path.chmod(0o700)


def test_flags_are_checked_before_anything_runs():
    for argv, said in (
        (["a", "--dequantise"], "did you mean --dequantize?"),
        (["a", "--bits", "four"], "--bits: got 'four', wanted int"),
        ([], "missing ADAPTERS"),
        (["a", "b", "--weights", "0.5,x"], "--weights"),
    ):
        with pytest.raises(quant.UserError) as error:
            quant.parse(fuse.fuse, argv)
        assert said in str(error.value)


# --- As a user runs it ----------------------------------------------------------------------------


def test_the_file_alone_is_enough_on_the_command_line(small, tmp_path):
    base, adapter = small
    alone = tmp_path / "elsewhere" / "mine.safetensors"
    alone.parent.mkdir()
    shutil.copy(adapter, alone)
    done = run_cli("fuse", alone, "--dequantize", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fused_model" in done.stdout and str(base) in done.stdout
    assert apart(logits(tmp_path / "fused_model"), logits(base, adapter)) < 1e-5
    refused(run_cli("fuse", alone, cwd=tmp_path), "fused_model exists")


def test_every_flag_on_the_command_line(small, tmp_path):
    base, adapter = small
    rows = tmp_path / "data"
    rows.mkdir()
    for split in ("train", "valid"):
        (rows / f"{split}.jsonl").write_text('{"text": "a quick brown fox and a lazy dog"}\n' * 4)
    how = ["--model", base, "--bits", 8, "--group-size", 32, "--rounding", "nearest", "--force"]
    out = ["--data", rows, "--weights", "0.5", "--save-path", tmp_path / "fused"]
    done = run_cli("fuse", adapter, *how, *out)
    assert done.returncode == 0, done.stderr
    assert f"tokens of {rows}" in done.stdout
    assert "packed as MLX packs; for llama.cpp: python quant.py convert" in done.stdout
    found = report(tmp_path / "fused")
    assert found["text"]["source"] == str(rows) and found["adapters"] == {str(adapter): 0.5}
    refused(run_cli("fuse", adapter, "--data", "/nope", "--save-path", tmp_path / "no"), "/nope")


def test_an_adapter_that_is_not_there_is_refused_before_the_model_is_read(tmp_path):
    refused(run_cli("fuse", "/nope.safetensors", "--model", "no/such", cwd=tmp_path), "/nope")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("disk", ["full", "file size limit"])
def test_a_full_disk_leaves_nothing_behind(disk, small, tmp_path):
    base, adapter = small
    before, limits = contents(base), resource.getrlimit(resource.RLIMIT_FSIZE)
    target = tmp_path / "small"
    target.mkdir()
    if disk == "full":
        mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "none", str(target)]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("mounting a small file system needs root")
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        done = run_cli("fuse", adapter, "--save-path", target / "fused")
        left = list(target.iterdir())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if disk == "full":
            subprocess.run(["umount", str(target)], check=True)
    refused(done, "no space left")
    assert not left and contents(base) == before


def test_an_interrupted_fuse_leaves_nothing_behind(small, tmp_path):
    """The base holds a pipe that nobody writes to, so the program waits in the midst of it."""
    base, adapter = small
    copy = tmp_path / "base"
    shutil.copytree(base, copy)
    os.mkfifo(copy / "generation_config.json")
    command = [sys.executable, str(ROOT / "fuse.py"), str(adapter), "--model", str(copy)]
    running = subprocess.Popen([*command, "--save-path", str(tmp_path / "fused")])
    handle, deadline = None, time.monotonic() + 60
    while handle is None:
        try:  # possible once the other side reads
            handle = os.open(copy / "generation_config.json", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    assert [f for f in tmp_path.iterdir() if "fused" in f.name]
    time.sleep(0.5)  # Python may miss a signal just before a call that blocks, not in it
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    os.close(handle)
    assert [f.name for f in tmp_path.iterdir()] == ["base"]
