"""The main job on a real pretrained model, SmolLM2-135M-Instruct, on the command line."""

import json
import re

import mlx.core as mx
import pytest
import smollm
from conftest import ROOT, run_cli

import dora
import quant

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return smollm.prepare(str(tmp_path_factory.mktemp("smollm")))


@pytest.fixture(scope="module")
def trained(real, tmp_path_factory):
    """Twenty steps of DoRA on docstrings: (adapter folder, what train.py printed)."""
    model, data = real
    out = tmp_path_factory.mktemp("run") / "adapters"
    flags = "--iters 20 --batch-size 2 --max-seq-length 129 --learning-rate 1e-4 --val-batches -1"
    where = ["--model", model, "--data", data, "--adapter-path", out]
    done = run_cli("train", *where, *flags.split(), "--test", timeout=1500)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def ask(*words) -> str:
    done = run_cli("quant", "generate", *words, "--max-tokens", 24)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_knows_paris(real):
    assert "Paris" in ask(real[0], "--prompt", "What is the capital of France?")


def test_gguf_is_run_and_converted_alike(real):
    model, _, config = quant.load(str(real[0]))
    source, _, _ = quant.load(str(smollm.gguf(real[0].parent)))
    tokens = mx.array([[1, 4093, 198, 1780, 314, 260, 3575]])
    assert mx.array_equal(model(tokens), source(tokens))
    head = {"group_size": 32, "bits": 8, "mode": "affine"}
    assert config["quantization"]["model.embed_tokens"] == head


def test_mlx_lm_gives_the_same_logits(real):
    from mlx_lm import load

    theirs, tokenizer = load(str(real[0]))
    ours, mine, _ = quant.load(str(real[0]), "float32")
    quant.cast(theirs, mx.float32)
    turns = [{"role": "user", "content": "What is the capital of France? 12345, don't   know."}]
    ids = mine.encode(mine.chat(turns, reply=True), special=False)
    assert ids == tokenizer.apply_chat_template(turns, add_generation_prompt=True)
    a, b = ours(mx.array([ids])), theirs(mx.array([ids]))
    assert mx.abs(a - b).max() < 2e-3 * mx.abs(b).max()


def test_docstrings_are_learnt(trained):
    losses = [float(x) for x in re.findall(r"validation loss ([\d.]+)", trained[1])]
    assert 4.0 < losses[0] < 5.0 and losses[-1] < 3.0, losses
    log = [json.loads(line) for line in (trained[0] / "log.jsonl").read_text().splitlines()]
    assert log[-1]["iteration"] == 20


def test_fused_and_unfused_agree(real, trained, tmp_path):
    fused = tmp_path / "fused"
    flags = ["--save-path", fused, "--dequantize"]
    assert run_cli("fuse", trained[0] / "adapters.safetensors", *flags).returncode == 0
    live, tokenizer, config = quant.load(str(real[0]), "float32")
    dora.load_adapter(live, str(trained[0]), config)
    merged, _, _ = quant.load(str(fused), "float32")
    ids = mx.array([tokenizer.encode("Describe json.dumps in Python.")])
    a, b = live(ids), merged(ids)
    assert mx.abs(a - b).max() < 0.02 * mx.abs(a).max()
    prompt = ["--prompt", "Describe json.dumps in Python."]
    assert ask(real[0], "--adapter", trained[0], *prompt) == ask(fused, *prompt)


def test_the_fused_model_says_the_same_in_mlx_lm(real, trained, tmp_path):
    """Packed as its base, by the default way; greedy, in float32 on both sides."""
    from mlx_lm import generate, load

    fused = tmp_path / "fused"
    done = run_cli("fuse", trained[0], "--data", real[1], "--save-path", fused)
    assert done.returncode == 0, done.stderr
    theirs, tokenizer = load(str(fused))
    quant.cast(theirs, mx.float32)
    ours, mine, _ = quant.load(str(fused), "float32")
    for question in ("Describe json.dumps in Python.", "What is the capital of France?"):
        turns = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True)
        assert ids == quant.prompt_ids(mine, question)
        said = generate(theirs, tokenizer, ids, max_tokens=32)
        assert said == mine.decode(list(quant.stream(ours, ids, mine.eos_ids, 32)))
        assert len(said) > 5


def test_packed_fuse_keeps_what_was_learnt(real, trained, tmp_path):
    fused, empty = tmp_path / "fused", tmp_path / "none"
    done = run_cli("fuse", trained[0] / "adapters.safetensors", "--save-path", fused, "--bits", 8)
    assert done.returncode == 0, done.stderr
    flags = "--iters 0 --val-batches -1 --batch-size 2 --max-seq-length 129"
    found = run_cli(
        "train", "--model", fused, "--data", real[1], "--adapter-path", empty, *flags.split()
    )
    loss = float(re.search(r"validation loss ([\d.]+)", found.stdout)[1])
    last = float(re.findall(r"validation loss ([\d.]+)", trained[1])[-1])
    assert abs(loss - last) < 0.05


def test_both_sides_of_the_benchmark_train_alike(real):
    """The command of README's table, shortened; timings are its business, not this test's."""
    import subprocess
    import sys

    command = [sys.executable, ROOT / "tests" / "bench_train.py", real[0].parent]
    done = subprocess.run(
        [*command, "--steps", "5", "--rounds", "1"], text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    losses = [
        re.findall(r"\d+\.\d{4}", line) for line in done.stdout.splitlines() if "dora |" in line
    ]
    assert len(losses) == 2
    for ours, theirs in zip(*losses, strict=True):
        assert abs(float(ours) - float(theirs)) < 0.02
