"""Training speed and peak memory of this suite and of mlx-lm on one model, side by side in one run.

    python tests/bench_train.py FOLDER                 FOLDER as made by tests/smollm.py
    python tests/bench_train.py FOLDER --steps 12 --kinds dora,lora

Both train the same rows in the same order: batches of 2 x 128 tokens of docstrings, all linear
layers, R = 8, float32, Adam, the prompt masked. The sides take turns in processes of their own, so
that each has its own peak memory. Speed is the median over steps, with its spread, in tokens that
go into the model (256 a step), masked or not.
"""

import json
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


def batches(folder: str, steps: int) -> list[tuple]:
    """`steps` batches of full rows: (tokens (2, 129), places, weights, offsets)."""
    _, tokenizer, _ = quant.load(f"{folder}/model")
    rows = train.read_data(f"{folder}/data")["train"]
    examples = train.Examples(rows, tokenizer, True, 129)
    full = [i for i in range(len(examples)) if len(examples.ids[i]) == 129][: 2 * steps]
    if len(full) < 2 * steps:
        raise SystemExit(f"only {len(full)} rows of 129 tokens, wanted {2 * steps}; lower --steps")
    found = []
    for i in range(0, 2 * steps, 2):
        rows = full[i : i + 2]
        offsets = [[int(examples.trained[r].argmax()), 128] for r in rows]
        found.append((*examples.batch(rows, 2), mx.array(offsets)))
    return found


def ours(folder: str, kind: str, steps: int):
    model, _, _ = quant.load(f"{folder}/model", "float32")
    mx.random.seed(0)
    dora.adapt(model, 8, 20.0, kind=kind)
    run = train.Run(model, train.OPTIMIZERS["adam"](1e-4), None)
    model.train()
    run.compile()
    for tokens, places, weights, _ in batches(folder, steps):
        start = time.perf_counter()
        loss, count, *_ = run.advance([(tokens, places, weights)], 1e-4)
        yield loss / count, time.perf_counter() - start


def theirs(folder: str, kind: str, steps: int):
    """mlx-lm's own layers, loss and step (tuner.trainer.train without its printing)."""
    from mlx_lm import load
    from mlx_lm.tuner.trainer import default_loss
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model, _ = load(f"{folder}/model")
    quant.cast(model, mx.float32)
    model.freeze()
    mx.random.seed(0)
    settings = {"rank": 8, "scale": 20.0, "dropout": 0.0}
    linear_to_lora_layers(model, len(model.layers), settings, use_dora=kind == "dora")
    optimizer = optim.Adam(1e-4, bias_correction=True)
    model.train()
    value_and_grad, state = nn.value_and_grad(model, default_loss), [model.state, optimizer.state]

    def step(tokens, lengths):
        (loss, count), grads = value_and_grad(model, tokens, lengths)
        optimizer.update(model, grads)
        return loss, count

    step = mx.compile(step, inputs=state, outputs=state)
    for tokens, _, _, offsets in batches(folder, steps):
        start = time.perf_counter()
        loss, count = step(tokens, offsets)
        mx.eval(state, loss, count)
        yield loss.item(), time.perf_counter() - start


def side(folder: str, name: str, kind: str, steps: int) -> None:
    """Runs one side in this process and prints its figures as JSON."""
    losses, seconds = zip(*(ours if name == "ours" else theirs)(folder, kind, steps), strict=True)
    peak = mx.get_peak_memory() / 1e9
    print(json.dumps({"losses": losses, "seconds": seconds, "peak": peak}))


def bench(folder: str, steps: int = 10, kinds: str = "dora", rounds: int = 2) -> None:
    """Runs both sides in turns, `rounds` times; the first four steps of a process warm up."""
    results, kinds = {}, kinds.split(",")
    for _ in range(rounds):
        for kind in kinds:
            for name in ("ours", "mlx-lm"):
                code = f"import bench_train as b; b.side({folder!r}, {name!r}, {kind!r}, {steps})"
                here = Path(__file__).parent
                done = subprocess.run(
                    [sys.executable, "-c", code], cwd=here, capture_output=True, text=True
                )
                if done.returncode:
                    raise SystemExit(done.stderr)
                results.setdefault((kind, name), []).append(
                    json.loads(done.stdout.splitlines()[-1])
                )
    print("| | tokens/s, median (slowest to fastest) | peak GB | loss of the first and last step |")
    print("|---|---|---|---|")
    median = {}
    for (kind, name), runs in results.items():
        times = sorted(t for run in runs for t in run["seconds"][4:])
        middle = median[kind, name] = 256 / times[len(times) // 2]
        losses = runs[0]["losses"]
        print(
            f"| {name} {kind} | {middle:.1f} ({256 / times[-1]:.1f} to {256 / times[0]:.1f}) "
            f"| {max(run['peak'] for run in runs):.2f} | {losses[0]:.4f}, {losses[-1]:.4f} |"
        )
    for kind in kinds:
        ratio = median[kind, "ours"] / median[kind, "mlx-lm"]
        print(f"{kind}: {ratio:.2f} times mlx-lm")


if __name__ == "__main__":
    quant.cli(bench)
