"""Decoding and training speed at real models' shapes, random weights, against mlx-lm in one run.

    python tests/bench_shapes.py qwen3-8b --rows 4 --length 1024
    python tests/bench_shapes.py qwen3-0.6b
    python tests/bench_shapes.py qwen3-8b --rows 1 --length 4096 --checkpoint
    python tests/bench_shapes.py features      what each way to save memory gives and costs, at 8B

Base affine 4-bit, group 64, bfloat16; adapters on all linear layers, R = 8, scale 20, Adam. Each
side in a process of its own; medians, after three steps (training) or five tokens (decoding) to
warm up. Decoding generates one token at a time from a prompt of 8, the adapter unfused;
`pipelined` lets the next token be computed while the last is read. Weights are random, so losses
only show that both sides train alike.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

import dora
import quant
import train

QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
SHAPES = {
    "qwen3-8b": QWEN3
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": QWEN3
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
}


def build(shape: str, side: str, kind: str):
    """The model of one side with fresh adapters (none for kind "base")."""
    mx.random.seed(0)
    if side == "ours":
        model = quant.Model(quant.Spec.read(SHAPES[shape]))
    else:
        from mlx_lm.models import qwen3

        model = qwen3.Model(qwen3.ModelArgs.from_dict(SHAPES[shape]))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 64, 4)
    mx.eval(model.parameters())
    model.freeze()
    if side == "ours" and kind != "base":
        dora.adapt(model, 8, 20.0, kind=kind)
    elif kind != "base":
        from mlx_lm.tuner.utils import linear_to_lora_layers

        settings = {"rank": 8, "scale": 20.0, "dropout": 0.0}
        linear_to_lora_layers(model, len(model.layers), settings, use_dora=kind == "dora")
    mx.eval(model.parameters())
    return model


def decode(model, side: str, count: int = 40) -> tuple[float, float]:
    """(tokens/s one at a time, pipelined)."""
    model.eval()
    if side == "ours":
        cache = model.make_cache()
    else:
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(model)

    def following(tokens):
        return mx.argmax(model(tokens, cache=cache)[:, -1:], axis=-1)

    token, times = following(mx.array([[1, 2, 3, 4, 5, 6, 7, 8]])), []
    for _ in range(count):
        start = time.perf_counter()
        token = following(token)
        mx.eval(token)
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(count):
        new = following(token)
        mx.async_eval(new)
        token.item()
        token = new
    mx.eval(token)
    return 1 / statistics.median(times[5:]), count / (time.perf_counter() - start)


def steps(
    model, side: str, rows: int, length: int, checkpoint: bool, count: int = 10, packed: tuple = ()
):
    """Yields (loss, seconds) of `count` training steps."""
    mx.random.seed(1)
    if side == "ours":
        model.checkpoint = train.checkpointed_layers(checkpoint, len(model.layers))
        run = train.Run(model, optim.Adam(1e-5), None)
        model.train()
        run.compile()
    else:
        from mlx_lm.tuner.trainer import default_loss, grad_checkpoint

        if checkpoint:
            grad_checkpoint(model.layers[0])
        optimizer, value_and_grad = optim.Adam(1e-5), nn.value_and_grad(model, default_loss)
        model.train()
        state = [model.state, optimizer.state]

        def step(tokens, lengths):
            (loss, _), grads = value_and_grad(model, tokens, lengths)
            optimizer.update(model, grads)
            return loss

        step = mx.compile(step, inputs=state, outputs=state)
    places, weights = mx.arange(rows * length), mx.ones((rows * length,))
    for _ in range(count):
        tokens = mx.random.randint(0, 1000, (rows, length + 1))
        mx.eval(tokens, places, weights)
        start = time.perf_counter()
        if side == "ours":
            total, tokens_seen, *_ = run.advance([(tokens, places, weights, *packed)], 1e-5)
            loss = total / tokens_seen
        else:
            loss = step(tokens, mx.array([[0, length + 1]] * rows))
            mx.eval(state, loss)
            loss = loss.item()
        yield loss, time.perf_counter() - start


def one(shape: str, side: str, kind: str, rows: int, length: int, checkpoint: bool = False) -> None:
    """One side in this process; prints its figures as JSON."""
    if side == "ours":
        train.limit_memory()
    model, found = build(shape, side, kind), {}
    if not checkpoint:
        found["decode"] = decode(model, side)
    if kind != "base":
        found |= figures(model, side, rows, length, checkpoint)
    print(json.dumps(found))


def figures(model, side: str, rows: int, length: int, checkpoint: bool, packed: tuple = ()) -> dict:
    mx.clear_cache()
    mx.reset_peak_memory()
    ran = steps(model, side, rows, length, checkpoint, packed=packed)
    losses, seconds = zip(*ran, strict=True)
    found = {"train": rows * length / statistics.median(seconds[3:])}
    return found | {"loss": losses[-1], "peak": mx.get_peak_memory() / 1e9}


def feature(
    before: str, checkpoint: bool = False, rows: int = 4, length: int = 1024, each: int = 0
):
    """Training at 8B after `before`, Python; with `each`, rows hold examples of so many tokens."""
    if "MLX_MAX_MB_PER_BUFFER" not in os.environ:
        train.limit_memory()
    exec(before, globals())
    model, packed = build("qwen3-8b", "ours", "dora"), ()
    if each:
        starts = mx.repeat(mx.arange(length)[None] // each * each, rows, axis=0)
        packed = (starts, each)
    print(json.dumps(figures(model, "ours", rows, length, checkpoint, packed)))


def features() -> None:
    """Prints what each feature gives and costs: 8B, 4 x 1024, DoRA."""
    whole = "quant.gated_unit = lambda *a: [lambda g, u: g * mx.sigmoid(g) * u] * 2"
    flat = "quant.fused_backward = lambda q: False; quant.SCORES = 1 << 40"
    cases = {
        "as it is": "''",
        "checkpointing": "'', True",
        "MLX's command buffers (1000 MB)": "''",
        "loss in one piece": "'train.LOGITS = 1 << 40'",
        "backward of swiglu by MLX": repr(whole),
        "attention in chunks": "'quant.fused_backward = lambda q: False'",
        "attention's scores all at once": repr(flat),
        "16 x 256": "'', False, 16, 256",
        "16 examples of 256 in 4 packed rows": "'', each=256",
    }
    print("| qwen3-8b, DoRA, 4 x 1024 | training, tokens/s | peak GB |")
    print("|---|---|---|", flush=True)
    for name, call in cases.items():
        more = {"MLX_MAX_MB_PER_BUFFER": "1000"} if "buffers" in name else {}
        found = in_process(f"b.feature({call})", more)
        text = f"{found['train']:.0f} | {found['peak']:.1f}" if "train" in found else "failed |"
        print(f"| {name} | {text} |", flush=True)


def in_process(call: str, more: dict | None = None) -> dict:
    """What a call prints as JSON in a process of its own, or {"error": its last line}."""
    command = [sys.executable, "-c", f"import bench_shapes as b; {call}"]
    where = dict(cwd=Path(__file__).parent, env=os.environ | (more or {}))
    done = subprocess.run(command, text=True, capture_output=True, **where)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"error": said[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def bench(
    shape: str,
    rows: int = 4,
    length: int = 1024,
    kinds: str = "dora,base,lora",
    rounds: int = 1,
    checkpoint: bool = False,
) -> None:
    """Prints the table for a shape: the sides take turns, and give the medians of all rounds."""
    if shape == "features":
        return features()
    if shape not in SHAPES:
        raise quant.UserError(f"got {shape!r}, wanted features or one of {', '.join(SHAPES)}")
    where = f"{mx.default_device()}, mlx {mx.__version__}"
    how = ", checkpointing" if checkpoint else ""
    print(f"{shape}, {where}, training {rows} x {length} tokens{how}, {rounds} rounds")
    print("| | decode, tokens/s (pipelined) | training, tokens/s | peak GB | loss |")
    print("|---|---|---|---|---|", flush=True)
    for kind in kinds.split(","):
        found = {"ours": [], "mlx-lm": []}
        for side in list(found) * rounds:
            call = f"b.one({shape!r}, {side!r}, {kind!r}, {rows}, {length}, {checkpoint})"
            found[side].append(in_process(call))
        for side, figures in found.items():
            if failed := [f["error"] for f in figures if "error" in f]:
                print(f"| {side} {kind} | failed: {failed[0]} | | | |", flush=True)
                continue
            decoding, training = "|", "| | |"
            if not checkpoint:
                alone, piped = (middle([f["decode"][i] for f in figures], 1) for i in (0, 1))
                decoding = f"{alone} ({piped}) |"
            if kind != "base":
                speed, peak = middle([f["train"] for f in figures]), figures[0]["peak"]
                training = f"{speed} | {peak:.1f} | {figures[0]['loss']:.4f} |"
            print(f"| {side} {kind} | {decoding} {training}", flush=True)


def middle(figures: list[float], digits: int = 0) -> str:
    """The median, with the lowest and highest if there are several."""
    text = f"{statistics.median(figures):.{digits}f}"
    ends = f" [{min(figures):.{digits}f} to {max(figures):.{digits}f}]"
    return text + (ends if len(figures) > 1 else "")


if __name__ == "__main__":
    quant.cli(bench)
