"""What a plan expects against the peak that is measured, by configuration.

    python tests/bench_memory.py                  all that suit this device
    python tests/bench_memory.py qwen3-8b         those of one shape

Random weights, 4-bit group 64 (full fine-tuning: dense), R = 8 on all linear layers, Adam. Each
configuration in a process of its own: three steps, the peak of the last two.
"""

import inspect
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import mlx.core as mx
import mlx.nn as nn
from bench_shapes import SHAPES

import dora
import quant
import train

LLAMA = {"model_type": "llama", "rope_theta": 1e4, "max_position_embeddings": 8192}
SMALL = {
    "smollm2-135m": LLAMA
    | dict(hidden_size=576, num_hidden_layers=30, intermediate_size=1536, vocab_size=49152)
    | dict(num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    "llama-wide": LLAMA
    | dict(hidden_size=1024, num_hidden_layers=8, intermediate_size=4096, vocab_size=32000)
    | dict(num_attention_heads=16, num_key_value_heads=16),
    "qwen3-moe": SHAPES["qwen3-0.6b"]
    | dict(model_type="qwen3_moe", num_hidden_layers=6, num_experts=16, num_experts_per_tok=4)
    | dict(moe_intermediate_size=512, vocab_size=32000),
    "qwen3.5": SHAPES["qwen3-0.6b"]
    | dict(model_type="qwen3_5", num_hidden_layers=8, vocab_size=32000, head_dim=128)
    | dict(linear_num_value_heads=16, linear_num_key_heads=8)
    | dict(linear_key_head_dim=128, linear_value_head_dim=128)
    | dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
}
CASES = {  # on the CPU, on a GPU: (shape, kind, rows, length, checkpointed)
    "cpu": [
        ("smollm2-135m", "dora", 2, 128, False),
        ("smollm2-135m", "dora", 4, 512, False),
        ("smollm2-135m", "dora", 4, 512, True),
        ("smollm2-135m", "lora", 2, 512, False),
        ("smollm2-135m", "full", 2, 256, False),
        ("llama-wide", "dora", 1, 1024, False),
        ("llama-wide", "dora", 1, 2048, True),
        ("llama-wide", "full", 1, 512, True),
        ("qwen3-moe", "dora", 1, 512, False),
        ("qwen3.5", "dora", 1, 512, False),
    ],
    "gpu": [
        ("qwen3-0.6b", "dora", 4, 1024, False),
        ("qwen3-0.6b", "dora", 1, 8192, True),
        ("qwen3-0.6b", "full", 4, 1024, False),
        ("qwen3-8b", "dora", 4, 1024, False),
        ("qwen3-8b", "dora", 4, 1024, True),
        ("qwen3-8b", "dora", 1, 17408, True),
        ("qwen3-8b", "lora", 4, 1024, False),
    ],
}


def one(shape: str, kind: str, rows: int, length: int, checkpointed: bool) -> None:
    train.limit_memory()
    mx.random.seed(0)
    model = quant.Model(quant.Spec.read((SHAPES | SMALL)[shape]))
    model.set_dtype(mx.bfloat16 if quant.on_gpu() and kind != "full" else mx.float32)
    settings = inspect.signature(train.train).parameters.values()
    s = {p.name: p.default for p in settings} | {"grad_checkpoint": checkpointed}
    s |= {"train_type": kind}
    if kind == "full":
        model.unfreeze()
    else:
        nn.quantize(model, 64, 4)
        model.freeze()
    parts = train.memory(model, s, rows, length)
    if kind != "full":
        dora.adapt(model, 8, 20.0, kind=kind)
    model.checkpoint = train.checkpointed_layers(checkpointed, len(model.layers))
    run = train.Run(model, train.make_optimizer(s), None)
    mx.eval(model.parameters(), run.optimizer.state)
    model.train()
    run.compile()
    places, weights = mx.arange(rows * length), mx.ones((rows * length,))
    for step in range(3):
        if step == 1:
            mx.reset_peak_memory()
        tokens = mx.random.randint(0, 1000, (rows, length + 1))
        run.advance([(tokens, places, weights)], 1e-5)
    print(json.dumps([parts, mx.get_peak_memory()]))


def bench(*shapes: str) -> None:
    cases = CASES["gpu" if quant.on_gpu() else "cpu"]
    print(f"{mx.default_device()}, mlx {mx.__version__}")
    print("| shape | kind | rows x length | checkpointed | planned GB | measured | ratio | parts |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for shape, kind, rows, length, checkpointed in cases:
        if shapes and shape not in shapes:
            continue
        call = f"b.one({shape!r}, {kind!r}, {rows}, {length}, {checkpointed})"
        command = [sys.executable, "-c", f"import bench_memory as b; {call}"]
        done = subprocess.run(command, cwd=Path(__file__).parent, text=True, capture_output=True)
        if done.returncode:
            raise SystemExit(f"{shape} {kind}: {done.stderr}")
        parts, peak = json.loads(done.stdout.splitlines()[-1])
        planned = sum(parts.values())
        shown = ", ".join(f"{k} {v / 1e9:.2f}" for k, v in parts.items() if v > 5e6)
        row = f"| {shape} | {kind} | {rows} x {length} | {'yes' if checkpointed else 'no'} "
        row += f"| {planned / 1e9:.2f} | {peak / 1e9:.2f} | {planned / peak:.2f} | {shown} |"
        print(row, flush=True)


if __name__ == "__main__":
    bench(*sys.argv[1:])
