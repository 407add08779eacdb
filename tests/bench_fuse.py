"""What each way of fusing leaves of a fine-tune, on a real 4-bit model.

    python tests/bench_fuse.py FOLDER          FOLDER as tests/smollm.py makes it; made if missing

A DoRA adapter is trained on docstrings (kept in FOLDER/adapter), then fused by mlx-lm and by
fuse.py in every way. All are compared with the unfused model by validation loss and by KL
divergence per token on test.jsonl, which nothing here has trained or calibrated on, and on prose
of another kind (this repository's README), where a fused model should be what the unfused is.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import mlx.core as mx
import numpy as np
import smollm

import dora
import quant
import train

ROOT = Path(__file__).parent.parent
WAYS = {
    "mlx-lm": None,
    "--rounding nearest": ["--rounding", "nearest"],
    "(default)": [],
    "(default), calibrated on other text": ["--data", "documentation"],
    "--bits 8": ["--bits", "8"],
    "--dequantize": ["--dequantize"],
    "--to lora": ["--to", "lora"],
}


def rows(folder: Path, tokenizer) -> dict[str, list]:
    """Held-out rows of the task, and other prose: lists of (tokens, trained)."""
    split = train.read_data(f"{folder}/data")["test"]
    text = (ROOT / "README.md").read_text()
    prose = [("", {"text": text[i : i + 1500]}) for i in range(0, len(text), 1500)]
    coded = {"task": split, "prose": prose}
    return {k: [train.encode(r, tokenizer, False) for _, r in v] for k, v in coded.items()}


def logits(model, coded: list) -> list:
    """(log-probabilities, targets) of the trained tokens of each row."""
    found = []
    for ids, trained in coded:
        z = model(mx.array([ids[:-1]]))[0].astype(mx.float32)
        at = mx.array(np.flatnonzero(trained[1:]))
        z = (z - mx.logsumexp(z, axis=-1, keepdims=True))[at]
        targets = mx.array(ids[1:])[at]
        mx.eval(z, targets)
        found.append((z, targets))
    return found


def against(live: list, other: list) -> tuple[float, float]:
    """(loss, KL of `other` from `live`) per token."""
    total, count = np.zeros(2), 0
    for (p, targets), (q, _) in zip(live, other, strict=True):
        loss = -mx.take_along_axis(q, targets[:, None], -1).sum()
        total += [loss.item(), (mx.exp(p) * (p - q)).sum().item()]
        count += len(targets)
    return tuple(total / count)


def bench(folder: str, iters: int = 60) -> None:
    root = Path(folder)
    base, data = smollm.prepare(folder)
    adapter = root / "adapter"
    if not (adapter / "adapters.safetensors").exists():
        flags = ["--iters", str(iters), "--batch-size", "4", "--max-seq-length", "129"]
        flags += ["--learning-rate", "2e-4", "--mask-prompt", "--adapter-path", str(adapter)]
        command = [sys.executable, ROOT / "train.py", "--model", base, "--data", data, *flags]
        subprocess.run(command, check=True)
    model, tokenizer, config = quant.load(str(base), "float32")
    coded = rows(root, tokenizer)
    before = {k: logits(model, v) for k, v in coded.items()}
    dora.load_adapter(model, str(adapter), config)
    live = {k: logits(model, v) for k, v in coded.items()}
    print("| | task: loss | KL from unfused | prose: loss | KL | seconds | MB |")
    print("|---|---|---|---|---|---|---|")

    def row(name, found, seconds="", size=""):
        cells = [f"{x:.4f}" for k in live for x in against(live[k], found[k])]
        print("|", " | ".join([name, *cells, seconds, size]), "|", flush=True)

    row("base", before)
    row("unfused", live)
    for name, flags in WAYS.items():
        out = root / "fused"
        shutil.rmtree(out, ignore_errors=True)
        if flags is None:
            where = ["--model", base, "--adapter-path", adapter, "--save-path", out]
            command = [sys.executable, "-m", "mlx_lm", "fuse", *where]
        else:
            flags = [f if f != "documentation" else prose_only(root) for f in flags]
            flags += [] if "--data" in flags else ["--data", data]
            where = [adapter, "--model", base, "--save-path", out]
            command = [sys.executable, ROOT / "fuse.py", *where, *flags]
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        model, _, config = quant.load(str(out), "float32")
        if (out / "adapters").exists():
            dora.load_adapter(model, str(out / "adapters"), config)
        size = sum(f.stat().st_size for f in out.rglob("*.safetensors")) / 1e6
        found = {k: logits(model, v) for k, v in coded.items()}
        row(name, found, f"{seconds:.0f}", f"{size:.0f}")


def prose_only(root: Path) -> Path:
    """fuse.py's own text, as data."""
    import json

    import fuse

    folder = root / "documentation"
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": text}) + "\n" for text in fuse.documentation()]
    (folder / "train.jsonl").write_text("".join(lines))
    return folder


if __name__ == "__main__":
    quant.cli(bench)
