"""Loss, training, checkpoints and the command line of train.py; see test_data.py for its data."""

import functools
import inspect
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from conftest import (
    PACKINGS,
    ROOT,
    refused,
    run_cli,
    tiny_config,
    write_model,
    write_rows,
)
from mlx.utils import tree_flatten
from test_families import family

import comm
import dora
import quant
import train

WORDS = "the quick brown fox jumps over the lazy dog and runs off".split()
TEXTS = [{"text": " ".join(WORDS[i % 5 : i % 5 + 2 + i])} for i in range(10)]
PROMPTS = [{"prompt": t, "completion": c} for t, c in zip(WORDS, WORDS[::-1], strict=True)]
PLOT = train.Log.plot
REFUSED = (quant.UserError, dora.UserError)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(train.Log, "plot", lambda self: None)  # a second each; has its own test


@pytest.fixture
def with_compile(monkeypatch):
    """Compiled steps, which a GPU has and the CPU would go without."""
    monkeypatch.setattr(
        train, "compiled", lambda state: functools.partial(mx.compile, inputs=state, outputs=state)
    )


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return write_rows(folder, train=TEXTS, valid=TEXTS[:3], test=TEXTS[3:5])


def go(model, data, out, **flags) -> Path:
    """A short run; the folder it leaves."""
    short = dict(iters=3, rank=4, scale=2.0, learning_rate=1e-3, steps_per_report=1)
    train.train(model=str(model), data=str(data), adapter_path=str(out), **short | flags)
    return out


def weights(folder: Path) -> dict[str, mx.array]:
    return mx.load(str(folder / "adapters.safetensors"))


def content(folder: Path) -> bytes:
    return (folder / "adapters.safetensors").read_bytes()


def log(out: Path, key: str) -> dict[int, float]:
    """{iteration: value} of a key of log.jsonl."""
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {e["iteration"]: e[key] for e in entries if key in e}


def listing(folder: Path) -> dict:
    """Every file below a folder with its content."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def examples(data, tokenizer, mask=False) -> train.Examples:
    return train.Examples(train.read_data(str(data))["train"], tokenizer, mask, 2048)


def perturbed(model):
    for layer in dora.adapted(model).values():
        layer.lora_b = 0.05 * mx.random.normal(layer.lora_b.shape)
        if layer.kind == "dora":
            layer.m = layer.m * mx.random.uniform(0.8, 1.2, layer.m.shape)
    return model


# --- Loss -----------------------------------------------------------------------------------------


def plain_loss(model, tokens, places, weights):
    logits = model(tokens[:, :-1]).astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, tokens[:, 1:]).reshape(-1)
    return (losses[places] * weights).sum()


CAPPED = {"model_type": "gemma2", "final_logit_softcapping": 1.5, "tie_word_embeddings": True}
HEADS = {
    "dense": ({}, None, None),
    "tied": ({"tie_word_embeddings": True}, None, None),
    "packed": ({}, PACKINGS[4], None),
    "packed and tied": ({"tie_word_embeddings": True}, PACKINGS[9], None),
    "mxfp4": ({}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}, None),
    "adapted": ({}, PACKINGS[4], ["q_proj", "lm_head"]),
    "adapted and tied": (
        {"tie_word_embeddings": True},
        PACKINGS[4],
        ["q_proj", "embed_tokens"],
    ),
    "capped": (CAPPED, PACKINGS[4], None),
    "capped and adapted": (CAPPED, None, ["q_proj", "embed_tokens"]),
    "scaled": ({"model_type": "granite", "logits_scaling": 3.0}, None, None),
    "full": ({}, None, "full"),
    "full and tied": ({"tie_word_embeddings": True}, None, "full"),
}


def ready(tmp_path, head: str, dtype=mx.float32):
    """(model under training with a head of that sort, the first batch of three rows)."""
    changes, packing, keys = HEADS[head]
    folder = write_model(tmp_path / "model", tiny_config(**changes), packing, dtype)
    model, tokenizer, _ = quant.load(str(folder))
    if keys == "full":
        model.unfreeze()
    else:
        dora.adapt(model, 3, 2.0, keys=keys)
        perturbed(model)
    model.train()
    rows = [("f", r) for r in PROMPTS[:3]]
    return model, train.Examples(rows, tokenizer, True, 64).batch(np.arange(3), 4)


def distance(got, want) -> float:
    """Relative difference of two trees of gradients in the 2-norm."""
    got, want = (dict(tree_flatten(t)) for t in (got, want))
    assert got.keys() == want.keys()
    got, want = (mx.concatenate([t[k].reshape(-1) for k in want]) for t in (got, want))
    return (mx.linalg.norm(got.astype(mx.float32) - want) / mx.linalg.norm(want)).item()


@pytest.mark.parametrize("chunk", [1 << 25, 1000])
@pytest.mark.parametrize("head", HEADS)
def test_loss_and_gradients_equal_those_of_the_plain_loss(tmp_path, monkeypatch, head, chunk):
    model, batch = ready(tmp_path, head)
    monkeypatch.setattr(train, "LOGITS", chunk)
    loss, grads = nn.value_and_grad(model, train.loss_sum)(model, *batch)
    want, wanted = nn.value_and_grad(model, plain_loss)(model, *batch)
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert distance(grads, wanted) < 1e-5


@pytest.mark.parametrize("head", ["dense", "packed", "packed and tied"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_is_at_most_twice_as_far_from_float32_as_the_plain_loss(
    tmp_path, dtype, head
):
    model, batch = ready(tmp_path, head, dtype)
    found = [nn.value_and_grad(model, f)(model, *batch) for f in (train.loss_sum, plain_loss)]
    quant.cast(model, mx.float32)
    exact, wanted = nn.value_and_grad(model, plain_loss)(model, *batch)
    (ours, our_grads), (theirs, their_grads) = found
    assert ours.dtype == mx.float32
    assert abs(ours - exact).item() <= 2 * abs(theirs - exact).item() + 1e-3 * exact.item()
    assert distance(our_grads, wanted) <= 2 * distance(their_grads, wanted)


def test_loss_equals_float64_and_survives_extreme_logits(tmp_path):
    model, (tokens, places, w) = ready(tmp_path, "dense")
    for size in (1.0, 1e4):
        model.lm_head.weight = model.lm_head.weight * size
        h = np.array(model.hidden(tokens[:, :-1]), np.float64).reshape(-1, 128)[np.array(places)]
        logits = h @ np.array(model.lm_head.weight, np.float64).T
        top = logits.max(axis=1)
        lse = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
        targets = np.array(tokens[:, 1:]).reshape(-1)[np.array(places)]
        exact = ((lse - logits[np.arange(len(h)), targets]) * np.array(w)).sum()
        loss, grads = nn.value_and_grad(model, train.loss_sum)(model, tokens, places, w)
        assert loss.item() == pytest.approx(exact, rel=1e-5)
        assert all(mx.isfinite(g).all().item() for _, g in tree_flatten(grads))


def test_padding_and_idle_places_do_not_change_the_loss(tmp_path):
    model, (tokens, places, w) = ready(tmp_path, "packed")
    kept = [int(p) for p, x in zip(places.tolist(), w.tolist(), strict=True) if x]
    T, wider = tokens.shape[1] - 1, mx.pad(tokens, [(0, 2), (0, 9)], constant_values=7)
    moved = mx.array([p // T * (T + 9) + p % T for p in kept] + [0, 3])
    base = train.loss_sum(model, tokens, places, w).item()
    ones = mx.array([1.0] * len(kept) + [0.0, 0.0])
    assert train.loss_sum(model, wider, moved, ones).item() == pytest.approx(base, rel=1e-5)
    assert train.loss_sum(model, tokens, places, w * 0).item() == 0


def test_loss_is_that_of_mlx_lm_times_the_tokens(tmp_path, dense):
    from mlx_lm.tuner.trainer import default_loss

    model, tokenizer, _ = quant.load(str(dense))
    data = examples(write_rows(tmp_path, train=PROMPTS), tokenizer, True)
    rows = data.order(4, 0)[0]
    tokens, places, w = data.batch(rows, 4)
    # its mask goes from the first trained token to the last, counted from the second token
    spans = [(int(data.trained[r].argmax()), len(data.ids[r]) - 1) for r in rows]
    mean, count = default_loss(model, tokens, mx.array(spans))
    assert count.item() == w.sum().item()
    loss = train.loss_sum(model, tokens, places, w)
    assert loss.item() == pytest.approx((mean * count).item(), rel=1e-5)


# --- Steps ----------------------------------------------------------------------------------------

REFERENCE = {  # constructor and tolerance: Adam makes much of gradients that are all rounding
    "sgd": (optim.SGD, 2e-6),
    "adam": (lambda rate: optim.Adam(rate, bias_correction=True), 1e-4),
}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("optimizer", REFERENCE)
@pytest.mark.parametrize("steps", ["plain", pytest.param("compiled", marks=pytest.mark.slow)])
def test_run_equals_a_plain_loop(tmp_path, packed, data, request, steps, optimizer, accumulation):
    if steps == "compiled":
        request.getfixturevalue("with_compile")
    flags = {"optimizer": optimizer, "learning_rate": 1e-2, "grad_accumulation_steps": accumulation}
    out = go(packed, data, tmp_path / "out", iters=4, dropout=0.0, seed=5, **flags)
    model, tokenizer, _ = quant.load(str(packed), "float32")
    mx.random.seed(5)
    dora.adapt(model, 4, 2.0)
    model.train()
    make, tolerance = REFERENCE[optimizer]
    rows, method, losses = examples(data, tokenizer), make(1e-2), {}
    order = [r for epoch in range(4) for r in rows.order(4, 5, epoch)]
    for step in range(4):
        batches = [rows.batch(r, 4) for r in order[step * accumulation :][:accumulation]]
        count = sum(w.sum() for *_, w in batches)

        def mean(model, batches=batches, count=count):
            return sum(plain_loss(model, *b) for b in batches) / count

        loss, grads = nn.value_and_grad(model, mean)(model)
        method.update(model, grads)
        mx.eval(model.parameters(), method.state)
        losses[step + 1] = loss.item()
    assert log(out, "train_loss") == pytest.approx(losses, rel=1e-5)
    got, want = weights(out), dict(tree_flatten(model.trainable_parameters()))
    assert got.keys() == want.keys()
    for key, value in want.items():
        np.testing.assert_allclose(got[key], value, atol=tolerance, err_msg=key)


def test_accumulation_equals_one_big_batch(tmp_path, dense):
    rows = [{"text": "x" * n} for n in (1, 29, 2, 30, 3, 25, 4, 9)]
    folder = write_rows(tmp_path / "data", train=rows)
    flags = {"optimizer": "sgd", "learning_rate": 0.1, "iters": 2}
    big = go(dense, folder, tmp_path / "big", batch_size=8, **flags)
    small = go(dense, folder, tmp_path / "s", batch_size=2, grad_accumulation_steps=4, **flags)
    assert log(big, "trained_tokens") == log(small, "trained_tokens") == {1: 103, 2: 206}
    assert log(big, "train_loss") == pytest.approx(log(small, "train_loss"), rel=1e-5)
    for key, value in weights(big).items():
        np.testing.assert_allclose(weights(small)[key], value, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("kind", ["dora", "lora"])
@pytest.mark.parametrize("optimizer", train.OPTIMIZERS)
def test_first_update_moves_every_adapter_and_all_files_are_float32(
    tmp_path, packed, data, optimizer, kind
):
    flags = {"optimizer": optimizer, "train_type": kind, "iters": 1, "grad_clip": 1.0}
    after = weights(go(packed, data, tmp_path / "one", **flags))
    before = weights(go(packed, data, tmp_path / "none", **flags | {"iters": 0}))
    assert {a.dtype for a in after.values()} == {mx.float32} and before.keys() == after.keys()
    leaves = {"lora_a", "lora_b", "m"} if kind == "dora" else {"lora_a", "lora_b"}
    assert {k.split(".")[-1] for k in after} == leaves and len(after) == 14 * len(leaves)
    for key, value in after.items():
        assert mx.isfinite(value).all().item()
        moved = mx.abs(value - before[key]).max().item()
        assert moved > 0 or key.endswith("lora_a"), key


def test_repeated_batch_is_learnt(tmp_path, packed):
    folder = write_rows(tmp_path / "data", train=TEXTS[:4])
    losses = log(go(packed, folder, tmp_path / "out", iters=12, learning_rate=5e-3), "train_loss")
    assert losses[12] < 0.8 * losses[1]


def test_norm_of_the_gradients_is_clipped(tmp_path, dense, data):
    """With SGD the first update is the clipped gradient times the rate."""
    flags = {"optimizer": "sgd", "learning_rate": 1.0, "iters": 1, "train_type": "lora"}
    before = weights(go(dense, data, tmp_path / "none", **flags | {"iters": 0}))
    for clip in (0.01, 0.5):
        after = weights(go(dense, data, tmp_path / str(clip), grad_clip=clip, **flags))
        moved = sum(mx.square(after[k] - before[k]).sum().item() for k in after)
        assert math.sqrt(moved) == pytest.approx(clip, rel=1e-3)


@pytest.mark.parametrize("kind, dropout", [("dora", 0.0), ("full", 0.0), ("dora", 0.5)])
def test_checkpointed_gradients_are_the_same(tmp_path, dense, data, kind, dropout):
    flags = dict(train_type=kind, dropout=dropout)
    plain = go(dense, data, tmp_path / "a", **flags)
    saving = go(dense, data, tmp_path / "b", grad_checkpoint=True, **flags)
    assert log(plain, "train_loss") == pytest.approx(log(saving, "train_loss"), rel=1e-5)
    for key, value in weights(plain).items():
        np.testing.assert_allclose(weights(saving)[key], value, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("name", ["packed", "delta"])
def test_packed_examples_train_as_unpacked_ones_do(tmp_path, packed, data, name, capsys):
    """All rows in one batch, so that both see the same in each step."""
    if name == "delta":
        packed = family(tmp_path / "model", "qwen3_5")
    flags = dict(batch_size=10, iters=3, val_batches=0)
    plain = go(packed, data, tmp_path / "a", **flags)
    rows = go(packed, data, tmp_path / "b", packing=True, max_seq_length=120, **flags)
    assert "10 train in 3 packed" in capsys.readouterr().out
    assert log(plain, "trained_tokens") == log(rows, "trained_tokens")
    assert log(plain, "train_loss") == pytest.approx(log(rows, "train_loss"), rel=1e-5)
    for key, value in weights(plain).items():
        np.testing.assert_allclose(weights(rows)[key], value, atol=2e-5, err_msg=key)


def test_compiled_packed_checkpointed_steps_are_the_plain_ones(packed, data, with_compile):
    """With windows, and layers of which one is checkpointed."""
    losses = []
    for packing in (False, True):
        mx.random.seed(0)
        model, tokenizer, _ = quant.load(str(packed))
        for block in model.layers:
            block.self_attn.window = 9
        dora.adapt(model, 4, 2.0, 0.0, keys=["q_proj"])
        perturbed(model).train()
        model.checkpoint = train.checkpointed_layers(packing and [1], 2)
        run = train.Run(model, optim.SGD(0.1), None)
        run.compile()
        found = examples(data, tokenizer)
        found.packing, found.longest = packing, 120
        rows = found.order(10, None)
        assert len(rows) == 1
        losses.append([run.advance([found.batch(rows[0], 10)], 0.1)[0] for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][0] != losses[0][2]


@pytest.mark.parametrize(
    "choice, wanted",
    [(True, {0, 1, 2}), (False, set()), (0, set()), (2, {0, 1}), ([2, 0], {0, 2}), (3, {0, 1, 2})],
)
def test_checkpointed_layers_are_chosen(choice, wanted):
    assert train.checkpointed_layers(choice, 3) == wanted


@pytest.mark.parametrize("choice", [4, -1, [3], [0, -2]])
def test_layers_that_are_not_there_cannot_be_checkpointed(choice):
    with pytest.raises(
        quant.UserError, match="--grad-checkpoint: got .*, wanted true, a number up to 3"
    ):
        train.checkpointed_layers(choice, 3)


def test_dropout_repeats_with_the_seed(tmp_path, packed, data):
    flags = {"dropout": 0.3, "steps_per_eval": 2, "save_every": 3}
    a, b = (content(go(packed, data, tmp_path / n, iters=6, **flags)) for n in "ab")
    assert a == b
    assert content(go(packed, data, tmp_path / "c", iters=6, seed=1, **flags)) != a


@pytest.mark.parametrize("dropout, rate, distinct", [(0.3, 0.0, 3), (0.0, 0.0, 1), (0.0, 0.1, 3)])
def test_compiled_steps_on_one_batch_differ_by_dropout_and_by_what_they_learn(
    packed, data, with_compile, dropout, rate, distinct
):
    model, tokenizer, _ = quant.load(str(packed))
    dora.adapt(model, 4, 2.0, dropout, keys=["q_proj"], num_layers=1)
    perturbed(model).train()
    run = train.Run(model, optim.SGD(rate), None)
    run.compile()
    batch = examples(data, tokenizer).batch(np.arange(4), 4)
    losses = [run.advance([batch], rate)[0] for _ in range(3)]
    assert len(set(losses)) == distinct and (rate == 0 or losses == sorted(losses, reverse=True))


def test_dropout_is_off_in_validation(packed, data):
    model, tokenizer, _ = quant.load(str(packed))
    dora.adapt(model, 4, 2.0, 0.5)
    perturbed(model).train()
    run = train.Run(model, optim.SGD(0.0), None)
    losses = {run.evaluate(examples(data, tokenizer), 4, -1) for _ in range(2)}
    assert len(losses) == 1 and model.training and next(iter(dora.adapted(model).values())).training


def test_validation_loss_is_the_mean_over_all_trained_tokens(packed, data):
    model, tokenizer, _ = quant.load(str(packed))
    run, rows = train.Run(model, optim.SGD(0.0), None), examples(data, tokenizer)
    total = count = 0
    for ids in rows.ids:
        logits = model(mx.array(ids[None, :-1]))[0]
        total += nn.losses.cross_entropy(logits, mx.array(ids[1:])).sum().item()
        count += len(ids) - 1
    assert run.evaluate(rows, 4, -1) == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("kind", ["dora", "lora"])
@pytest.mark.parametrize("keys", [None, ["k_proj", "v_proj"], ["q_proj"]])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_activations_keep_the_dtype_of_the_model(tmp_path, dtype, keys, kind):
    model = quant.load(str(write_model(tmp_path / "m", packing=PACKINGS[4], dtype=dtype)))[0]
    dora.adapt(model, 4, 2.0, 0.1, keys=keys, kind=kind)
    for training in (True, False):
        perturbed(model).train(training)
        h = model.model.embed_tokens(mx.array([[5, 6, 7]]))
        for layer in model.layers:
            h = layer(h, "causal")
            assert h.dtype == dtype
        assert model(mx.array([[5, 6, 7]])).dtype == dtype


def test_half_precision_adapters_train_in_float32(tmp_path, data):
    model = write_model(tmp_path / "m", packing=PACKINGS[4], dtype=mx.bfloat16)
    out = go(model, data, tmp_path / "out", dtype="bfloat16", learning_rate=1e-6, iters=2)
    fresh = go(model, data, tmp_path / "none", dtype="bfloat16", iters=0)
    moved = {k for k, v in weights(out).items() if mx.any(v != weights(fresh)[k]).item()}
    assert moved == weights(out).keys()  # an update of 1e-6 is not rounded away
    assert {a.dtype for a in weights(out).values()} == {mx.float32}


def test_full_training_of_half_precision_weights_is_in_float32_and_resumes_exactly(tmp_path, data):
    model = write_model(tmp_path / "m", dtype=mx.bfloat16)
    flags = {"train_type": "full", "dtype": "bfloat16", "learning_rate": 1e-6, "save_every": 2}
    out = go(model, data, tmp_path / "out", iters=4, **flags)
    first = str(out / "checkpoints" / "0000002")
    again = go(model, data, tmp_path / "again", iters=4, resume=first, **flags)
    assert content(out) == content(again)
    base, _, config = quant.load(str(model))
    names = dict(tree_flatten(base.parameters()))
    assert weights(out).keys() == names.keys()
    assert all(mx.any(v != names[k]).item() for k, v in weights(out).items() if "proj" in k)
    dora.load_adapter(base, str(out), config)
    assert base.lm_head.weight.dtype == mx.bfloat16


def test_full_training_of_the_last_layer_leaves_the_rest(tmp_path, dense, data):
    out = go(dense, data, tmp_path / "out", train_type="full", num_layers=1)
    assert {k.rpartition(".layers.")[2][:2] for k in weights(out)} == {"1."}
    refusal = "changes 9 layers, --keys and --num-layers choose"
    with pytest.raises(REFUSED, match=refusal):
        go(dense, data, out, train_type="full", num_layers=2, iters=4, resume=True)


def test_full_training_of_a_packed_model_is_refused(tmp_path, packed, data):
    with pytest.raises(REFUSED, match="is packed; full fine-tuning needs dense weights"):
        go(packed, data, tmp_path / "out", train_type="full")
    assert not (tmp_path / "out").exists()


def test_keys_that_match_nothing_are_refused_with_what_there_is(tmp_path, packed, data):
    with pytest.raises(REFUSED, match="keys: qkv_proj match nothing.*self_attn.q_proj"):
        go(packed, data, tmp_path / "out", keys=["qkv_proj", "o_proj"])
    assert not (tmp_path / "out").exists()


def test_every_row_is_seen_with_five_rows_and_batches_of_four(tmp_path, dense):
    """Each row has a token of its own; the embedding of what no row holds does not move."""
    rows = [{"text": c * 3} for c in "vwxyz"]
    folder = write_rows(tmp_path / "data", train=rows)
    flags = {"train_type": "full", "optimizer": "sgd", "iters": 2}  # one epoch
    out = go(dense, folder, tmp_path / "out", **flags)
    fresh = go(dense, folder, tmp_path / "none", **flags | {"iters": 0})
    key = "model.embed_tokens.weight"
    moved = np.flatnonzero(np.abs(np.array(weights(out)[key] - weights(fresh)[key])).sum(axis=1))
    _, tokenizer, _ = quant.load(str(dense))
    assert {tokenizer.encode(c)[0] for c in "vwxyz"} == set(moved.tolist())
    assert log(out, "trained_tokens")[2] == 15


@pytest.mark.parametrize("valid", [None, [], TEXTS[:1]])
def test_validation_is_optional_and_may_be_smaller_than_a_batch(tmp_path, dense, valid):
    splits = {"train": TEXTS} | ({} if valid is None else {"valid": valid})
    out = go(dense, write_rows(tmp_path / "data", **splits), tmp_path / "out", steps_per_eval=2)
    assert list(log(out, "val_loss")) == ([0, 2, 3] if valid else [])
    assert (out / "best").exists() == bool(valid)


def test_fewer_rows_than_the_batch_are_refused_with_both_numbers(tmp_path, dense):
    folder = write_rows(tmp_path / "data", train=TEXTS[:2])
    with pytest.raises(REFUSED, match="2 usable rows, fewer than --batch-size 4"):
        go(dense, folder, tmp_path / "out")


# --- Schedule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, schedule, wanted",
    [
        (0, "cosine", 0.0),
        (50, "cosine", 5e-6),
        (100, "cosine", 1e-5),
        (600, "cosine", 5.5e-6),
        (1100, "cosine", 1e-6),
        (5000, "cosine", 1e-6),
        (0, "linear", 0.0),
        (100, "linear", 1e-5),
        (350, "linear", 7.75e-6),
        (1100, "linear", 1e-6),
        (99, "constant", 9.9e-6),
        (100, "constant", 1e-5),
        (1100, "constant", 1e-5),
    ],
)
def test_rate_of_an_update(step, schedule, wanted):
    assert train.learning_rate(step, 1e-5, 1100, schedule, 100, 1e-6) == pytest.approx(wanted)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_logged_rate_is_the_one_used_and_counts_updates(tmp_path, dense, data, accumulation):
    """With sign descent (Lion without momentum) an update of `m` is as large as the rate."""
    flags = {"lr_schedule": "cosine", "warmup": 2, "min_lr": 1e-3, "learning_rate": 1e-2}
    flags |= {"iters": 5}
    flags |= {"optimizer": "lion", "optimizer_config": {"betas": [0.0, 0.0]}, "save_every": 1}
    flags |= {"grad_accumulation_steps": accumulation, "batch_size": 1}
    out = go(dense, data, tmp_path / "out", **flags)
    wanted = [train.learning_rate(n, 1e-2, 5, "cosine", 2, 1e-3) for n in range(5)]
    assert list(log(out, "learning_rate").values()) == pytest.approx(wanted)
    states = [weights(p) for p in sorted((out / "checkpoints").iterdir())]
    key = "model.layers.0.self_attn.q_proj.m"
    for rate, a, b in zip(wanted[1:], states, states[1:], strict=False):
        np.testing.assert_allclose(mx.abs(a[key] - b[key]), rate, rtol=1e-3)


# --- Checkpoints ----------------------------------------------------------------------------------

RESUMED = {
    "dora, dropout, accumulation, cosine, mid-epoch": dict(
        dropout=0.2, grad_accumulation_steps=2, lr_schedule="cosine", warmup=2, min_lr=1e-5
    ),
    "lora, adamw": dict(train_type="lora", optimizer="adamw"),
    "full, adam": dict(train_type="full"),
    "muon": dict(optimizer="muon"),
    "adafactor": dict(optimizer="adafactor"),
    "sgd with momentum, clipped": dict(
        optimizer="sgd", optimizer_config={"momentum": 0.9}, grad_clip=0.1
    ),
}


@pytest.mark.parametrize("flags", RESUMED.values(), ids=RESUMED)
def test_resumed_run_ends_with_the_bytes_of_one_that_never_stopped(tmp_path, dense, data, flags):
    flags = flags | {"iters": 7, "save_every": 4, "steps_per_eval": 2}
    whole = go(dense, data, tmp_path / "whole", **flags)
    first = whole / "checkpoints" / "0000004"
    mx.random.seed(99)
    again = go(dense, data, tmp_path / "again", resume=str(first), **flags)
    assert content(again) == content(whole) != content(first)
    for key in ("train_loss", "learning_rate", "trained_tokens", "val_loss"):
        later = {k: v for k, v in log(whole, key).items() if k > 4}
        assert later and log(again, key) == later
    states = [mx.load(str(o / "checkpoints/0000007/state.safetensors")) for o in (again, whole)]
    assert states[0].keys() == states[1].keys()
    assert all(mx.array_equal(a, states[1][k]).item() for k, a in states[0].items())


def start(model, data, out, **flags) -> subprocess.Popen:
    flags = {"rank": 4, "scale": 2.0, "save_every": 1, "steps_per_report": 1} | flags
    words = [f"--{k}={v}" for k, v in flags.items()]
    command = [sys.executable, str(ROOT / "train.py"), f"--model={model}", f"--data={data}"]
    command += [f"--adapter-path={out}", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def test_killed_and_interrupted_runs_end_with_the_bytes_of_one_that_never_stopped(
    tmp_path, packed, data
):
    flags = {"iters": 20, "dropout": 0.1, "learning_rate": 1e-3, "seed": 7, "save_every": 1}
    out = tmp_path / "out"
    killed = start(packed, data, out, **flags)
    wait_for(out / "checkpoints" / "0000003", killed)
    killed.kill()
    killed.communicate()
    stopped = start(packed, data, out, resume=True, **flags)
    wait_for(out / "checkpoints" / "0000008", stopped)
    stopped.send_signal(signal.SIGINT)
    text, errors = stopped.communicate(timeout=60)
    reached = train.Checkpoints(out, "", {}).newest()
    assert stopped.returncode == 130 and "stopping after this step" in errors
    assert f"stopped at step {int(reached.name)}, saved; --resume goes on" in text
    assert "resuming from" in text and 8 <= int(reached.name) < 20
    assert content(out) == content(reached)
    go(packed, data, out, resume=True, **flags)
    whole = go(packed, data, tmp_path / "whole", **flags)
    assert content(out) == content(whole)
    assert log(out, "train_loss") == log(whole, "train_loss")  # every step once, in order
    assert list(log(out, "train_loss")) == list(range(1, 21))
    assert len(list((out / "checkpoints").iterdir())) == 20


SAVING = """
import sys, train, quant, dora, mlx.optimizers as optim
from pathlib import Path
model, _, config = quant.load(sys.argv[1])
dora.adapt(model, 4, 2.0)
run = train.Run(model, optim.Adam(1e-3), None)
files = train.Checkpoints(Path(sys.argv[2]), "base", config)
while True:
    run.step += 1
    files.save(run, {})
    files.save_best(run)
"""


def test_a_kill_at_any_moment_leaves_whole_files(tmp_path, packed):
    rng = np.random.default_rng(0)
    for n in range(8):
        out = tmp_path / str(n)
        arguments = [sys.executable, "-c", SAVING, str(packed), str(out)]
        process = subprocess.Popen(arguments, cwd=ROOT)
        wait_for(out / "best", process)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.wait()
        files = train.Checkpoints(out, "", {})
        newest = files.newest()
        assert newest == files.all()[-1]  # half a checkpoint is never seen under its name
        model, _, config = quant.load(str(packed))
        for folder in (newest, out):
            dora.remove(model)
            dora.load_adapter(model, str(folder), config)
        assert len(mx.load(str(newest / "state.safetensors"))) > 40
        assert json.loads((newest / "state.json").read_text())["step"] == int(newest.name)
        assert (out / "best").exists() or (out / ".best.old").exists()


def test_best_is_put_back_after_a_kill_between_the_renamings(tmp_path):
    old, best = tmp_path / ".best.old", tmp_path / "best"
    old.mkdir()
    (old / "file").write_text("old")

    def fail(folder):
        raise OSError("full")

    with pytest.raises(OSError):
        train.write_folder(best, fail)
    assert listing(tmp_path) == {best / "file": b"old"}


@pytest.mark.parametrize("file", ["adapters.safetensors", "state.safetensors", "state.json"])
@pytest.mark.parametrize("harm", ["cut", "gone", "empty"])
def test_damaged_newest_checkpoint_falls_back_to_the_one_before(
    tmp_path, dense, data, capsys, file, harm
):
    flags = {"iters": 4, "save_every": 2}
    out = go(dense, data, tmp_path / "out", **flags)
    whole, path = content(out), out / "checkpoints" / "0000004" / file
    kept = {"cut": path.read_bytes()[:-9], "empty": b"", "gone": None}[harm]
    path.unlink() if kept is None else path.write_bytes(kept)
    go(dense, data, out, resume=True, **flags)
    text = capsys.readouterr()
    assert f"{path.parent} cannot be resumed: " in text.err and "trying the one before" in text.err
    assert f"resuming from {out / 'checkpoints' / '0000002'} at step 2" in text.out
    assert content(out) == content(path.parent) == whole


def test_log_cut_in_the_middle_of_a_line_does_not_stop_a_resume(tmp_path, dense, data):
    out = go(dense, data, tmp_path / "out", iters=3)
    with (out / "log.jsonl").open("a") as file:
        file.write('{"iteration": 4, "train_lo')
    go(dense, data, out, iters=5, resume=True)
    assert list(log(out, "train_loss")) == [1, 2, 3, 4, 5]


def test_old_checkpoints_stay_and_the_last_two_can_resume(tmp_path, dense, data):
    out = go(dense, data, tmp_path / "out", iters=5, save_every=1)
    folders = sorted((out / "checkpoints").iterdir())
    assert [p.name for p in folders] == [f"{n:07d}" for n in range(1, 6)]
    assert [(p / "state.json").exists() for p in folders] == [False] * 3 + [True] * 2
    assert len({content(p) for p in folders}) == 5 and content(folders[-1]) == content(out)


def test_going_on_from_an_earlier_checkpoint_makes_that_the_run(tmp_path, dense, data):
    out = go(dense, data, tmp_path / "out", iters=6, save_every=2)
    first = out / "checkpoints" / "0000004"
    go(dense, data, out, iters=5, learning_rate=1e-2, resume=str(first))
    assert train.Checkpoints(out, "", {}).newest().name == "0000005"
    assert (out / "checkpoints" / "0000006" / "adapters.safetensors").exists()


def test_best_weights_are_kept_where_more_training_makes_them_worse(tmp_path, dense):
    rows, others = [{"text": "abcd" * 3}] * 4, [{"text": "abcd" * 3 + "efgh" * 4}] * 2
    folder = write_rows(tmp_path / "data", train=rows, valid=others)
    flags = {"iters": 24, "steps_per_eval": 1, "learning_rate": 5e-3, "rank": 2}
    out = go(dense, folder, tmp_path / "out", **flags)
    losses = log(out, "val_loss")
    best = min(losses, key=losses.get)
    assert 0 < best < 24
    model, tokenizer, config = quant.load(str(dense))
    valid = train.Examples(train.read_data(str(folder))["valid"], tokenizer, False, 2048)
    for place, wanted in ((out / "best", losses[best]), (out, losses[24])):
        dora.remove(model)
        dora.load_adapter(model, str(place), config)
        found = train.Run(model, optim.SGD(0.0), None).evaluate(valid, 4, -1)
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"rank": 5}, ("has rank 4, not 5", "--rank 4")),
        ({"scale": 3.0}, ("has scale 2.0, not 3.0", "--scale 2.0")),
        ({"train_type": "lora"}, ("has kind dora, not lora", "--train-type dora")),
        ({"train_type": "full"}, ("has kind dora, not full",)),
        ({"keys": ["q_proj"]}, ("changes 14 layers", "choose 2", "layers.0.mlp.down_proj")),
        ({"num_layers": 1}, ("changes 14 layers", "choose 7")),
        ({"batch_size": 2}, ("batch_size 4, now it is 2",)),
        ({"grad_accumulation_steps": 2}, ("grad_accumulation_steps 1, now it is 2",)),
        ({"seed": 1}, ("seed 0, now it is 1",)),
        ({"optimizer": "sgd"}, ("optimizer adam, now it is sgd",)),
        ({"max_seq_length": 9}, ("max_seq_length 2048, now it is 9",)),
        ({"data": TEXTS[:6]}, ("rows 10, now it is 6", "--resume")),
        ({"data": TEXTS[:9] + [{"text": "other"}]}, ("was made with data", "now it is")),
        ({"data": None}, ("missing: no such folder or file",)),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_resume_with_something_else_is_refused_and_touches_nothing(
    tmp_path_factory, tmp_path, run_of_two, dense, data, change, said
):
    before = listing(run_of_two)
    if "data" in change:
        rows = change.pop("data")
        data = write_rows(tmp_path / "data", train=rows) if rows else "missing"
    with pytest.raises(REFUSED) as caught:
        go(dense, data, run_of_two, iters=4, resume=True, **change)
    assert all(text in str(caught.value) for text in said), caught.value
    assert listing(run_of_two) == before


@pytest.fixture(scope="session")
def run_of_two(tmp_path_factory, dense, data) -> Path:
    return go(dense, data, tmp_path_factory.mktemp("run") / "out", iters=2)


@pytest.mark.parametrize("resume", [False, "itself", "other"])
def test_starting_over_a_run_is_refused_and_touches_nothing(
    tmp_path, run_of_two, dense, data, resume
):
    before = listing(run_of_two)
    source = run_of_two / "adapters.safetensors" if resume == "itself" else False
    if resume == "other":
        source = go(dense, data, tmp_path / "other", iters=2) / "checkpoints" / "0000002"
    with pytest.raises(REFUSED, match="holds a run; --resume goes on with it, --adapter-path"):
        go(dense, data, run_of_two, resume=str(source) if source else False)
    assert listing(run_of_two) == before


def test_leftovers_of_a_first_save_do_not_count_as_a_run(tmp_path, dense, data):
    (tmp_path / "out" / "checkpoints" / ".0000001.tmp").mkdir(parents=True)
    assert content(go(dense, data, tmp_path / "out"))


@pytest.mark.parametrize("form", ["file", "folder", "peft"])
def test_warm_start_takes_the_weights_and_begins_anew(tmp_path, run_of_two, dense, data, form):
    source = run_of_two / "adapters.safetensors" if form == "file" else tmp_path / "alone"
    if form == "folder":
        source.mkdir()
        for name in ("adapters.safetensors", "adapter_config.json"):
            (source / name).write_bytes((run_of_two / name).read_bytes())
    elif form == "peft":
        source.mkdir()
        dora.save_peft(source, *dora.read_adapter(str(run_of_two)))
    out = go(dense, data, tmp_path / "out", iters=0, resume=str(source), dropout=0.1)
    for key, value in weights(run_of_two).items():
        np.testing.assert_array_equal(weights(out)[key], value)
    assert list(log(out, "val_loss")) == [0]
    assert log(out, "val_loss")[0] == pytest.approx(log(run_of_two, "val_loss")[2], rel=1e-5)


def test_adapter_of_another_base_is_refused(tmp_path, run_of_two, data):
    other = write_model(tmp_path / "other", seed=1)
    with pytest.raises(REFUSED, match="weights of .* differ from the base it was trained on"):
        go(other, data, tmp_path / "out", resume=str(run_of_two / "adapters.safetensors"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("resume", [True, "nowhere", "nowhere/adapters.safetensors"])
def test_resume_of_nothing_is_refused(tmp_path, dense, data, resume):
    with pytest.raises(REFUSED, match="--resume.*: no (whole checkpoint|such checkpoint)"):
        go(dense, data, tmp_path / "out", resume=resume)
    assert not (tmp_path / "out").exists()


# --- Non-finite numbers ---------------------------------------------------------------------------


def nothing_but_numbers(out: Path) -> bool:
    files = list(out.rglob("*.safetensors"))
    return bool(files) and all(
        mx.isfinite(a).all().item()
        for f in files
        for a in mx.load(str(f)).values()
        if a.dtype == mx.float32
    )


@pytest.mark.parametrize(
    "rate, every, step, reason", [(1e39, 2, 1, "not finite"), (1e25, 10, 2, "loss")]
)
def test_weights_that_overflow_stop_the_run_and_are_not_saved(
    tmp_path, dense, data, rate, every, step, reason
):
    out = go(dense, data, tmp_path / "out", iters=1, save_every=1)
    done = out / "checkpoints" / "0000001"
    with pytest.raises(REFUSED, match=f"^step {step + 1}: .*{reason}") as caught:
        go(dense, data, out, learning_rate=rate, save_every=every, iters=9, resume=True)
    assert f"{data}/train.jsonl:" in str(caught.value)
    assert f"Last good checkpoint: {done}." in str(caught.value)
    assert nothing_but_numbers(out) and train.Checkpoints(out, "", {}).newest() == done


@pytest.fixture(scope="session")
def overflowing(tmp_path_factory) -> Path:
    """A model made for bfloat16: its activations pass 65504."""
    folder = write_model(tmp_path_factory.mktemp("models") / "big", dtype=mx.bfloat16)
    file = folder / "model.safetensors"
    tensors = mx.load(str(file))
    tensors = {k: v * 3000 if "down_proj" in k or "up_proj" in k else v for k, v in tensors.items()}
    mx.save_safetensors(str(file), tensors, {"format": "mlx"})
    return folder


def test_float16_overflow_stops_with_step_and_rows_and_bfloat16_trains(tmp_path, overflowing, data):
    done = run_cli(
        "train",
        *("--model", overflowing, "--data", data, "--dtype", "float16"),
        cwd=tmp_path,
    )
    refused(done, "step 1: loss nan", "train.jsonl:", "checkpoint: none yet", "--dtype float32")
    assert not list(tmp_path.rglob("checkpoints/*"))
    assert nothing_but_numbers(go(overflowing, data, tmp_path / "out", dtype="bfloat16"))


# --- Reporting ------------------------------------------------------------------------------------


def test_log_has_the_keys_of_mlx_lm(tmp_path, dense, data):
    from mlx_lm.tuner import trainer

    seen = {"train": set(), "val": set()}

    class Callback:
        def on_train_loss_report(self, info):
            seen["train"] |= set(info)

        def on_val_loss_report(self, info):
            seen["val"] |= set(info)

    model, tokenizer, _ = quant.load(str(dense))
    dora.adapt(model, 2, 2.0)
    rows = [(list(map(int, ids)), 0) for ids in examples(data, tokenizer).ids]
    arguments = trainer.TrainingArgs(iters=2, adapter_file=str(tmp_path / "a.safetensors"))
    trainer.train(model, optim.Adam(1e-3), rows, rows, arguments, training_callback=Callback())
    out = go(dense, data, tmp_path / "out")
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    ours = {kind: {frozenset(e) for e in entries if f"{kind}_loss" in e} for kind in seen}
    assert ours["val"] == {frozenset(seen["val"])}
    assert ours["train"] == {frozenset(seen["train"] | {"cache_memory"})}


def test_reported_loss_is_the_mean_over_the_tokens_since_the_last_report(tmp_path, dense, data):
    flags = {"optimizer": "sgd", "iters": 5}
    each = go(dense, data, tmp_path / "each", **flags)
    some = go(dense, data, tmp_path / "some", steps_per_report=3, **flags)
    losses, totals = log(each, "train_loss"), {0: 0} | log(each, "trained_tokens")
    assert list(log(some, "train_loss")) == [3, 5]
    for first, last in ((1, 3), (4, 5)):
        parts = [(losses[i], totals[i] - totals[i - 1]) for i in range(first, last + 1)]
        mean = sum(a * n for a, n in parts) / sum(n for _, n in parts)
        assert log(some, "train_loss")[last] == pytest.approx(mean, rel=1e-5)
    assert log(some, "trained_tokens")[5] == totals[5]


@pytest.mark.parametrize("iters", [0, 2])
def test_curve_is_drawn_where_matplotlib_is_and_not_missed_where_not(
    tmp_path, dense, data, monkeypatch, iters
):
    monkeypatch.setattr(train.Log, "plot", PLOT)
    out = go(dense, data, tmp_path / "out", iters=iters)
    assert "<svg" in (out / "loss.svg").read_text()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not (go(dense, data, tmp_path / "bare", iters=iters) / "loss.svg").exists()


def test_test_loss_and_samples_are_shown(tmp_path, packed, capsys):
    folder = write_rows(tmp_path / "data", train=PROMPTS, test=PROMPTS[:2])
    out = go(packed, folder, tmp_path / "out", test=True, sample_tokens=3, mask_prompt=True)
    text = capsys.readouterr().out
    model, tokenizer, config = quant.load(str(packed))
    dora.load_adapter(model, str(out), config)
    rows = train.Examples(train.read_data(str(folder))["test"], tokenizer, True, 2048)
    loss = train.Run(model, optim.SGD(0.0), None).evaluate(rows, 4, -1)
    assert f"test loss {loss:.4f}, perplexity {math.exp(loss):.3f}" in text
    assert "before: 'the' -> " in text and "after: 'the' -> " in text


def test_signal_handlers_are_put_back(tmp_path, dense, data):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    go(dense, data, tmp_path / "out", iters=1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# --- Settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"iters": -1}, "--iters: got -1, wanted at least 0"),
        ({"batch_size": 0}, "--batch-size: got 0, wanted at least 1"),
        ({"learning_rate": math.nan}, "--learning-rate: got nan"),
        ({"learning_rate": math.inf}, "--learning-rate: got inf"),
        ({"grad_clip": -1.0}, "--grad-clip: got -1.0, wanted at least 0"),
        ({"seed": -1}, "--seed: got -1, wanted at least 0"),
        ({"scale": math.nan}, "--scale: got nan"),
        ({"dropout": 1.0}, "--dropout: got 1.0, wanted at least 0 and below 1"),
        ({"max_seq_length": 1}, "--max-seq-length: got 1, wanted at least 2"),
        ({"train_type": "qlora"}, "--train-type: got 'qlora', wanted one of ('dora'"),
        ({"fine_tune_type": "x"}, "--train-type: got 'x'"),
        ({"optimizer": "adan"}, "--optimizer: got 'adan', wanted one of ('adam'"),
        ({"optimizer_config": {"beta": 1}}, "--optimizer-config for adam: got {'beta': 1}"),
        ({"lr_schedule": "step"}, "--lr-schedule: got 'step'"),
        ({"mask_prompt": "first"}, "--mask-prompt: got 'first', wanted one of (True, False"),
        ({"dtype": "int4"}, "--dtype: got 'int4'"),
        ({"num_layers": 3}, "num_layers: got 3"),
        ({"num_layers": 3, "train_type": "full"}, "--num-layers: got 3, the model has 2"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_values_that_cannot_be_right_are_refused_before_anything_is_written(
    tmp_path, dense, data, flags, said
):
    with pytest.raises(REFUSED) as caught:
        go(dense, data, tmp_path / "out", **flags)
    assert said in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("below", ["", "out", "out/adapters"])
def test_folder_that_cannot_be_written_is_refused(tmp_path, dense, data, below):
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(REFUSED, match="--adapter-path .*: cannot be written: Not a directory"):
        go(dense, data, file / below)
    assert listing(tmp_path) == {file: b"kept"}


def configured(path: Path, text: str, *words: str) -> dict:
    path.write_text(text)
    return train.with_config(train.train, quant.parse(train.train, ["--config", str(path), *words]))


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    text = "model: a\niters: 7\nlearning-rate: 2e-5\nkeys: [q_proj, v_proj]\nresume: null\n"
    found = configured(tmp_path / "c.yaml", text + "mask_prompt: true\nseed: 3\n", "--iters", "9")
    assert found.pop("config") == str(tmp_path / "c.yaml")
    assert found == {
        **{"model": "a", "iters": 9, "learning_rate": 2e-5, "keys": ["q_proj", "v_proj"]},
        **{"mask_prompt": True, "seed": 3},
    }


def test_file_of_mlx_lm_is_understood(tmp_path):
    text = """
model: a
train: true
fine_tune_type: dora
optimizer: adamw
optimizer_config: {adamw: {weight_decay: 0.1}, adam: {}}
num_layers: 16
test_batches: 100
resume_adapter_file: b.safetensors
lora_parameters: {keys: [self_attn.q_proj], rank: 8, scale: 20, dropout: 0.0}
lr_schedule: {name: cosine_decay, warmup: 100, warmup_init: 0, arguments: [1e-5, 1000, 1e-7]}
"""
    found = configured(tmp_path / "c.yaml", text)
    del found["config"]
    wanted = {"model": "a", "fine_tune_type": "dora", "optimizer": "adamw", "num_layers": 16}
    wanted |= {"optimizer_config": {"weight_decay": 0.1}, "resume": "b.safetensors"}
    wanted |= {"keys": ["self_attn.q_proj"], "rank": 8, "scale": 20.0, "dropout": 0.0}
    wanted |= {"lr_schedule": "cosine", "learning_rate": 1e-5, "warmup": 100, "min_lr": 1e-7}
    assert found == wanted
    linear = "model: a\nlr_schedule: {name: linear_schedule, arguments: [1e-4, 0.00001, 50]}"
    found = configured(tmp_path / "c.yaml", linear)
    keys = ("lr_schedule", "learning_rate", "min_lr", "warmup")
    assert [found[k] for k in keys] == ["linear", 1e-4, 1e-5, 0]


@pytest.mark.parametrize(
    "text, said",
    [
        ("batchsize: 4", "unknown key 'batchsize'; did you mean 'batch_size'?"),
        ("3: 4", "unknown key '3'"),
        ("lora_parameters: {rnk: 4}", "unknown key 'rnk'; did you mean 'rank'?"),
        ("lora_parameters: [4]", "lora_parameters: got [4], wanted keys and values"),
        ("iters: abc", "--iters: got 'abc', wanted int"),
        ("iters: [1, 2]", "--iters: got '1,2', wanted int"),
        ("[1, 2]", "wanted keys and values, got a list"),
        ("a: [", "not YAML or JSON"),
        ("lr_schedule: {name: step_decay, arguments: [1, 2, 3]}", "wanted cosine_decay or"),
        ("lr_schedule: {name: cosine_decay}", "wanted cosine_decay or"),
        ("lr_schedule: {name: linear_schedule, arguments: [1, 2]}", "wanted cosine_decay or"),
        ("lr_schedule: {name: cosine_decay, arguments: [a, 2]}", "wanted cosine_decay or"),
        ("lr_schedule: {name: cosine_decay, arguments: 1e-5}", "wanted cosine_decay or"),
        (
            "lr_schedule: {name: cosine_decay, arguments: [1, 2], warmup_init: 0.1}",
            "wanted cosine_decay or",
        ),
    ],
)
def test_bad_file_is_refused(tmp_path, text, said):
    with pytest.raises(REFUSED) as caught:
        configured(tmp_path / "c.yaml", text)
    assert said in str(caught.value)


@pytest.mark.parametrize("value, tokens", [("true", 57), ("false", 330), ("last", 57)])
def test_mask_by_flag_and_by_file_trains_on_the_same_tokens(tmp_path, packed, value, tokens):
    folder, path = write_rows(tmp_path / "data", train=PROMPTS), tmp_path / "c.yaml"
    path.write_text(f"mask_prompt: {value}\nbatch_size: 12\n")
    common = ["--model", str(packed), "--data", str(folder), "--iters", "1"]
    counts = []
    for words in (["--config", str(path)], [f"--mask-prompt={value}", "--batch-size=12"]):
        out = tmp_path / words[0]
        flags = quant.parse(train.train, [*common, *words, "--adapter-path", str(out)])
        train.train(**train.with_config(train.train, flags))
        counts.append(log(out, "trained_tokens")[1])
    assert counts == [tokens, tokens]


# --- The command line -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def broken(tmp_path_factory, dense) -> dict[str, Path]:
    """Model folders that cannot be used, and one that other weights came from."""
    root, found = tmp_path_factory.mktemp("broken"), {}
    found["another"] = write_model(root / "another", seed=1)
    for name in ("no config", "truncated", "unknown type"):
        found[name] = root / name
        shutil.copytree(dense, found[name])
    (found["no config"] / "config.json").unlink()
    file = found["truncated"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    (found["unknown type"] / "config.json").write_text(json.dumps(tiny_config("mamba")))
    return found


BAD = {
    "misspelt flag, before anything is loaded": (
        {"model": "nowhere", "data": "nowhere", "learning-rat": 1},
        ("unknown flag --learning-rat; did you mean --learning-rate?",),
    ),
    "word for a number": ({"iters": "abc"}, ("--iters: got 'abc', wanted int",)),
    "missing model": ({"model": "missing"}, ("missing: no such folder",)),
    "no config": ({"model": "no config"}, ("no config.json in it",)),
    "truncated": ({"model": "truncated"}, ("model.safetensors",)),
    "unknown type": ({"model": "unknown type"}, ("mamba",)),
    "missing data": ({"data": "missing"}, ("missing: no such folder",)),
    "bad row": ({"data": "bad"}, ('train.jsonl:2: no "text"', "found keys: ['txt']")),
    "not UTF-8": ({"data": "latin"}, ("train.jsonl:1: not UTF-8, byte 0xe9",)),
    "folder below a file": ({"adapter-path": "file/out"}, ("file/out: cannot be written",)),
    "misspelt key": ({"config": "c.yaml"}, ("unknown key 'iter'; did you mean 'iters'?",)),
    "other base": (
        {"model": "another", "resume": "other"},
        ("the weights of", "differ from the base"),
    ),
    "no fitting layer": ({"keys": "qkv_proj"}, ("qkv_proj match nothing", "self_attn.q_proj")),
}


@pytest.mark.parametrize("flags, said", BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_exit_2_and_changes_no_file(
    tmp_path, packed, broken, data, run_of_two, flags, said
):
    write_rows(tmp_path / "bad", train=[{"text": "a"}, {"txt": "a"}])
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "train.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    (tmp_path / "file").write_text("")
    (tmp_path / "c.yaml").write_text("iter: 3")
    (tmp_path / "other").symlink_to(run_of_two / "checkpoints" / "0000002")
    flags = {"model": packed, "data": data, "iters": 1, "rank": 4, "scale": 2.0} | flags
    flags["model"] = broken.get(flags["model"], flags["model"])
    before = listing(tmp_path)
    done = run_cli("train", *(f"--{k}={v}" for k, v in flags.items()), cwd=tmp_path)
    refused(done, *said)
    assert listing(tmp_path) == before and not (tmp_path / "adapters").exists()


def test_command_line_trains_under_the_c_locale(tmp_path, packed):
    write_rows(tmp_path / "data", train=[])
    rows = "".join(f'{{"text": "Grüße {n}"}}\n' for n in range(4))
    (tmp_path / "data" / "train.jsonl").write_bytes(rows.encode())
    (tmp_path / "c.yaml").write_bytes(f"model: {packed}\nadapter_path: Größe\n".encode())
    words = ["--config", "c.yaml", "--data=data", "--iters=1", "--sample-tokens=2"]
    done = run_cli("train", *words, cwd=tmp_path, env={"LC_ALL": "C"})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "Größe" / "adapters.safetensors").exists()


def test_full_disk_is_one_line_and_leaves_a_run_that_resumes(tmp_path, packed, data):
    """A file system of one megabyte holds three checkpoints or four."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    try:
        run = start(packed, data, disk / "out", iters=99)
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 2 and "Traceback" not in errors, errors
        assert "no space left" in errors.lower()
        newest = train.Checkpoints(disk / "out", "", {}).newest()
        assert int(newest.name) >= 2 and nothing_but_numbers(disk / "out")
        assert not [p for p in disk.rglob(".*")]
        shutil.copytree(disk / "out", tmp_path / "out")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    step = int(newest.name)
    whole = go(packed, data, tmp_path / "whole", iters=step + 2, learning_rate=1e-5)
    go(packed, data, tmp_path / "out", iters=step + 2, learning_rate=1e-5, resume=True)
    assert content(whole) == content(tmp_path / "out")


@pytest.mark.parametrize("keys", [None, ["lm_head"]])
def test_the_memory_of_the_loss_does_not_grow_with_the_tokens(monkeypatch, keys):
    """16 times the tokens: all the logits would be 0.8 GB."""
    monkeypatch.setattr(train, "LOGITS", 1 << 22)
    config = tiny_config(vocab_size=100_000, num_hidden_layers=1, intermediate_size=32)
    model = quant.Model(quant.Spec.read(config))
    model.freeze()
    dora.adapt(model, 4, 2.0, keys=keys)
    model.train()
    found = []
    for rows in (1, 16):
        tokens = mx.random.randint(0, 1000, (rows, 129))
        places, weights = mx.arange(rows * 128), mx.ones((rows * 128,))
        mx.eval(model.parameters(), tokens, places, weights)
        mx.clear_cache()
        mx.reset_peak_memory()
        mx.eval(nn.value_and_grad(model, train.loss_sum)(model, tokens, places, weights))
        found.append(mx.get_peak_memory())
    assert found[1] - found[0] < 0.25e9, found


# --- The plan -------------------------------------------------------------------------------------


def planned(capsys, **flags) -> tuple[int, str]:
    """(exit status, what is printed) of `train.py --plan`."""
    with pytest.raises(SystemExit) as ended:
        train.train(plan=True, **flags)
    return ended.value.code, capsys.readouterr().out


def test_plan_is_from_config_and_tokenizer(tmp_path, capsys):
    """No weights are there, and what it says of a run is what that run has."""
    bare, root = tmp_path / "bare", tmp_path / "run"
    shutil.copytree(train.TINY, bare, ignore=shutil.ignore_patterns("*.safetensors", "data"))
    status, said = planned(capsys, model=str(bare), adapter_path=str(root))
    assert status == 0 and not root.exists()
    model, _, config = quant.load(str(train.TINY), "auto")
    outline, _, _ = quant.outline(str(bare), "auto")
    shapes = [
        [(k, a.shape, a.dtype) for k, a in tree_flatten(m.parameters())] for m in (outline, model)
    ]
    assert shapes[0] == shapes[1]
    s = defaults()
    trained, paths, parts = train.standing(outline, s)
    train.adapt(model, config, s, None)
    run = train.Run(model, train.make_optimizer(s), None)
    real = {k: a.shape for k, a in run.flat()}
    assert {k: a.shape for k, a in trained.items()} == real
    state = sum(a.nbytes for _, a in tree_flatten(run.optimizer.state))
    assert parts["optimizer"] == state
    count = sum(a.size for _, a in run.flat())
    assert f"{count / 1e6:.3f} M weights to train ({4 * count / 1e6:.1f} MB)" in said
    rows = train.read_data(str(train.TINY / "data"))["train"]
    examples = train.Examples(rows, quant.Tokenizer.from_folder(bare, config), False, 2048)
    steps = len(examples) // 4
    assert (
        f"{len(examples)} rows, {sum(map(len, examples.ids))} tokens per epoch: {steps} steps"
        in said
    )


def defaults(**changes) -> dict:
    """train.py's settings where no flag is given."""
    return {p.name: p.default for p in inspect.signature(train.train).parameters.values()} | changes


def test_plan_against_a_real_step():
    call = "import bench_memory as b; b.one('smollm2-135m', 'dora', 2, 128, False)"
    where = dict(cwd=ROOT / "tests", text=True, capture_output=True, check=True)
    done = subprocess.run([sys.executable, "-c", call], **where)
    parts, peak = json.loads(done.stdout.splitlines()[-1])
    assert 0.85 < sum(parts.values()) / peak < 1.15


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_plan_names_a_flag_that_makes_it_fit(share, capsys, monkeypatch):
    model, _, _ = quant.outline(str(train.TINY), "auto")
    need = sum(train.memory(model, defaults(), 4, 64).values())
    monkeypatch.setattr(comm, "memory", lambda: int(need * share))
    status, said = planned(capsys)
    assert status == 1 and "does not fit here" in said
    last = said.splitlines()[-1]
    if share == 0.2:
        assert "no batch is small enough" in last and "a model of fewer bits" in last
        return
    flags = quant.parse(train.train, last.partition(" would")[0].split())
    assert planned(capsys, **flags)[0] == 0


def test_plan_of_several_hosts(tmp_path, capsys):
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": "localhost", "ips": ["127.0.0.1"]}] * 2))
    status, said = planned(capsys, nodes=str(hosts))
    assert status == 0 and "2 x 64 tokens on each of 2 ranks" in said
    assert f"fits localhost, with {comm.memory() / 1e9:.1f} GB" in said
    with pytest.raises(quant.UserError, match="2 ranks do not divide"):
        train.train(plan=True, nodes=str(hosts), batch_size=3)
    with pytest.raises(quant.UserError, match="512 usable rows, fewer than --batch-size 513"):
        train.train(plan=True, batch_size=513)


@pytest.mark.slow
def test_memory_stays_flat_over_random_lengths(tmp_path):
    """300 steps: no peak after the first of the longest batches is above the one it made."""
    random, words = np.random.RandomState(0), "some words of no use to anyone at all ".split()
    rows = [{"text": " ".join(random.choice(words, random.randint(5, 400)))} for _ in range(600)]
    write_rows(tmp_path / "data", train=rows)
    flags = dict(
        model=str(train.TINY), data=str(tmp_path / "data"), adapter_path=str(tmp_path / "a")
    )
    train.train(**flags, iters=300, steps_per_report=1, max_seq_length=512, batch_size=4)
    log = [json.loads(line) for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()]
    peaks = [entry["peak_memory"] for entry in log if "peak_memory" in entry]
    rows = train.read_data(str(tmp_path / "data"))["train"]
    _, tokenizer, _ = quant.outline(str(train.TINY))
    examples = train.Examples(rows, tokenizer, False, 512)
    order = [b for epoch in (0, 1) for b in examples.order(4, 0, epoch)]
    shapes = [examples.batch(b, 4)[0].size for b in order[:300]]
    first = shapes.index(max(shapes))
    assert len(peaks) == 300 and first < 290, "the longest came too late to say anything"
    assert len(set(shapes)) > 5
    assert peaks[-1] <= 1.03 * peaks[first]
    assert max(entry["cache_memory"] for entry in log if "cache_memory" in entry) <= 2.15
