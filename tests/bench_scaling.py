"""Weak scaling of `train.py --nodes` on one machine: each rank a process, with a GPU of its own if
there are enough, at a real model's shapes and random weights.

    python tests/bench_scaling.py                                  one and two ranks, tcp
    python tests/bench_scaling.py --shape qwen3-8b --ranks 2 --kinds dora --backend nccl

Each rank trains rows of 1024 tokens: DoRA (R = 8, all linear layers) on affine 4-bit, group 64, or
the whole model in bfloat16 with float32 weights and Adam. Speed is the median over steps after the
third; `hidden` is the share of the transfers' time that passed while backward still computed, from
the timeline. The timelines are kept in --out.
"""

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import mlx.core as mx
import mlx.nn as nn
from bench_shapes import SHAPES
from mlx.utils import tree_flatten

import quant

HERE = Path(__file__).parent
SKIP = 3  # steps that compile and allocate


def make_model(folder: Path, shape: str, packed: bool) -> None:
    """Random weights behind the tiny model's tokenizer, and data of more tokens than are used."""
    mx.random.seed(0)
    model, config = quant.Model(quant.Spec.read(SHAPES[shape])), dict(SHAPES[shape])
    model.set_dtype(mx.bfloat16)
    if packed:
        nn.quantize(model, 64, 4)
        config["quantization"] = {"group_size": 64, "bits": 4, "mode": "affine"}
    folder.mkdir()
    _, tokenizer, _ = quant.load(str(HERE / "tiny"))
    quant.save(folder, dict(tree_flatten(model.parameters())), config, tokenizer)
    rng = random.Random(0)
    rows = [{"text": " ".join(str(rng.randrange(10**6)) for _ in range(600))} for _ in range(256)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def hidden(timeline: Path) -> tuple[float, float]:
    """(share of the transfers that was hidden, seconds they took together), each a median."""
    steps = []
    for event in json.loads(timeline.read_text())["traceEvents"]:
        if event.get("name") == "wait":
            steps.append([])  # the buckets of a step follow
        elif event["ph"] == "X":
            steps[-1].append((event["name"].split()[0], event["ts"], event["ts"] + event["dur"]))
    found = []
    for step in steps[SKIP:]:
        computed = max(end for name, _, end in step if name == "compute")
        busy = late = free = 0.0
        for _, begin, end in sorted(e for e in step if e[0] == "transfer"):
            begin, free = max(begin, free), end  # asked for while another was on its way
            busy += end - begin
            late += max(0.0, end - max(begin, computed))
        found.append((1 - late / busy, busy / 1e6))
    return tuple(map(statistics.median, zip(*found, strict=True)))


def run(model: Path, kind: str, ranks: int, rows: int, steps: int, overlap: bool, backend: str):
    """(tokens/s, peak GB of rank 0, timeline) of a job of this many ranks on this machine."""
    folder = Path(tempfile.mkdtemp(dir=model.parent))
    hosts = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]} for _ in range(ranks)]
    (folder / "hosts.json").write_text(json.dumps(hosts))
    flags = {"model": model, "data": model, "train-type": kind, "batch-size": rows * ranks}
    flags |= {"iters": steps, "steps-per-report": 1, "max-seq-length": 1024, "val-batches": 0}
    flags |= {"overlap": overlap, "adapter-path": folder / "adapters"}
    if ranks > 1:
        timeline = folder / "timeline.json"
        flags |= {"nodes": folder / "hosts.json", "backend": backend, "timeline": timeline}
    command = [sys.executable, HERE.parent / "train.py", *(f"--{k}={v}" for k, v in flags.items())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    log = [json.loads(line) for line in (folder / "adapters" / "log.jsonl").open()]
    log = [entry for entry in log if "tokens_per_second" in entry][SKIP:]
    speed = statistics.median(entry["tokens_per_second"] for entry in log)
    shutil.rmtree(folder / "adapters")
    return speed, max(e["peak_memory"] for e in log), timeline if ranks > 1 else None


def bench(
    *,
    shape: str = "qwen3-0.6b",
    kinds: str = "full,dora",
    ranks: int = 2,
    backend: str = "tcp",
    rows: int = 4,
    steps: int = 13,
    out: str | None = None,
) -> None:
    """Prints the table; `ranks` of them against one, overlap off and on."""
    where = f"{mx.default_device()}, mlx {mx.__version__}"
    print(f"{shape}, {where}, {backend}, {rows} x 1024 tokens a rank")
    print("| kind | ranks | overlap | tokens/s | times one | step s | transfer s | hidden | GB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in kinds.split(","):
        with tempfile.TemporaryDirectory() as place:
            model = Path(place) / "model"
            make_model(model, shape, packed=kind != "full")
            one, peak, _ = run(model, kind, 1, rows, steps, True, backend)
            step = rows * 1024 / one
            print(f"| {kind} | 1 | | {one:.0f} | | {step:.3f} | | | {peak:.1f} |", flush=True)
            for overlap in (False, True):
                speed, peak, timeline = run(model, kind, ranks, rows, steps, overlap, backend)
                share, transfer = hidden(timeline)
                step = ranks * rows * 1024 / speed
                cells = [kind, ranks, overlap, f"{speed:.0f}", f"{speed / one:.2f}"]
                cells += [f"{step:.3f}", f"{transfer:.3f}", f"{share:.2f}", f"{peak:.1f}"]
                print("|", " | ".join(map(str, cells)), "|", flush=True)
                if out:
                    Path(out).mkdir(parents=True, exist_ok=True)
                    shutil.copy(timeline, Path(out) / f"{kind}-overlap-{overlap}.json".lower())


if __name__ == "__main__":
    quant.cli(bench)
