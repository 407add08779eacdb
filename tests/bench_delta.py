"""The gated delta rule: `quant.gated_delta` in chunks beside MLX's own mx.fast.gated_delta_update.

    python tests/bench_delta.py [--tokens 512] [--loop false]

Qwen 3.5's heads (16 for keys, 32 for values, of 128), forward, and forward with backward for all
inputs. MLX 0.32's gradient goes position by position and takes memory for each; --loop false
leaves that row out where it does not fit.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import mlx.core as mx

import quant


def inputs(tokens: int) -> list[mx.array]:
    mx.random.seed(0)
    q, k, v = (mx.random.normal((1, tokens, heads, 128)) for heads in (16, 16, 32))
    q, k = (a / mx.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    decay = -mx.random.uniform(0, 0.2, (1, tokens, 32))
    return [q, k, v, decay, mx.random.uniform(0, 1, (1, tokens, 32))]


def by_position(q, k, v, decay, beta):
    return mx.fast.gated_delta_update(q, k, v, mx.exp(decay), beta)[0]


def bench(tokens: int = 512, loop: bool = True, runs: int = 3) -> None:
    given = inputs(tokens)
    sides = {f"chunks of {n}": lambda *a, n=n: quant.gated_delta(*a, chunk=n)[0] for n in (64, 128)}
    sides = ({"mx.fast": by_position} if loop else {}) | sides
    print(f"{tokens} tokens, {mx.default_device()}, mlx {mx.__version__}")
    print("| | forward ms | with backward ms | peak GB | error | of gradients |")
    print("|---|---|---|---|---|---|")
    exact = None
    for name, function in sides.items():
        both = mx.value_and_grad(lambda *a, f=function: mx.square(f(*a)).sum(), (0, 1, 2, 3, 4))
        ms = []
        for run in (function, both):
            times = []
            for _ in range(runs):
                mx.clear_cache()
                mx.reset_peak_memory()
                start = time.perf_counter()
                found = run(*given)
                mx.eval(found)
                times.append((time.perf_counter() - start) * 1e3)
            ms.append(f"{sorted(times)[runs // 2]:.1f}")
        peak, found = mx.get_peak_memory() / 1e9, [function(*given), *found[1]]
        exact = exact or found
        apart = [
            (mx.linalg.norm(a - b) / mx.linalg.norm(b)).item()
            for a, b in zip(found, exact, strict=True)
        ]
        print(f"| {name} | {' | '.join(ms)} | {peak:.2f} | {apart[0]:.1e} | {max(apart[1:]):.1e} |")


if __name__ == "__main__":
    quant.cli(bench)
