"""fuse.py: merge an adapter into its base model, and tell how much of it survived.

    python fuse.py adapters/adapters.safetensors

needs nothing else: base model, rank and scale come from the file. What is written is a plain model
folder that quant.py, train.py and mlx-lm load. Every adapted row is W' = g ⊙ W + s g ⊙ (AB)ᵀ with
g = m/n (1 for LoRA), formed in float32 from the packed W.

Packing W' anew buries a small update: rounding to 4 bits moves the weights by some 8%. Two things
keep it. The base's own grid times g, stored in the scales' dtype, holds g ⊙ W almost exactly, so
that only the low-rank part needs other codes (a new grid where that part is larger than what the
grid would lose). And codes are chosen one input after another, each making up for the error of
those before it as the layer's inputs see it: GPTQ in its LDLQ form (Frantar et al. 2022,
arXiv:2210.17323; Chee et al. 2023, arXiv:2307.13304), with H = Σ x xᵀ of the unfused model on a few
rows of text, and with weight on the update's own directions (see `feedback`).

The model passes through block by block, as three streams of hidden states: the base, the base with
the adapter, and what is being written. So memory holds one block and one shard, and at the end the
three are compared by loss and by KL divergence. Both, and what became of each layer, are in
fuse_report.json.
"""

import importlib
import inspect
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

import dora
import quant
import train
from quant import UserError

WAYS = "model", "lora", "peft"
ROWS, LENGTH = 16, 512  # of text to calibrate on, and as many to compare on
DAMPING = 0.01  # of H's mean diagonal, added to it
FP4 = [s * x for s in (1, -1) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]  # by code, E2M1
EMPHASIS = 10.0  # of the directions of the update; 1 measures worse, 100 the same


def fuse(
    adapters: list[str],
    *,
    model: str | None = None,
    save_path: str = "fused_model",
    to: str = "model",
    bits: int | None = None,
    group_size: int | None = None,
    dequantize: bool = False,
    rounding: str = "gptq",
    weights: list[float] | None = None,
    data: str | None = None,
    force: bool = False,
) -> None:
    """Merges adapters (files, or the folders they lie in) into their base; writes a model folder.

    --model        another copy of the base than the file names
    --to           model; lora: the base scaled by g, with a LoRA adapter beside it that makes it
                   the adapted model, for engines that know LoRA only; peft: the adapter alone, as
                   a folder for PEFT
    --bits, --group-size
                   how to pack the adapted layers (affine), if not as the base
    --dequantize   write dense weights
    --rounding     gptq, or nearest: faster, and further from the unfused model
    --weights      how much of each adapter: 0.7,0.3
    --data         rows to measure and calibrate on, as train.py takes them; if not given, those
                   the adapter was trained on, or else Python's own documentation
    --force        merge even if the weights are not those the adapter was trained on
    """
    if dequantize and (bits or group_size):
        raise UserError("--dequantize and --bits or --group-size exclude each other")
    if to not in WAYS or rounding not in ("gptq", "nearest"):
        got = f"--to {to}, --rounding {rounding}"
        raise UserError(f"got {got}; wanted {', '.join(WAYS)}, and gptq or nearest")
    if to != "model" and (dequantize or bits or group_size):
        raise UserError(f"--to {to} leaves the packing as it is: no --dequantize, --bits")
    if bits or group_size:
        quant.check_packing(group_size, bits, "affine")
    shares = [1.0] * len(adapters) if weights is None else weights
    if len(shares) != len(adapters):
        raise UserError(f"--weights: got {len(shares)} for {len(adapters)} adapters")
    read = [dora.read_adapter(a) for a in adapters]
    if to == "peft":
        return to_peft(adapters, read, save_path)
    base = model or read[0][1]["base"]
    if not base:
        raise UserError(f"{adapters[0]} does not name its base model; give --model")
    if others := {s["base"] for _, s in read} - {"", read[0][1]["base"]}:
        raise UserError(f"{', '.join(others)} is the base of another of these than of the first")
    with quant.Output(save_path) as folder:
        loaded, tokenizer, config = quant.load(base)
        if any(settings["kind"] == "full" for _, settings in read):
            whole(loaded, adapters, read, to)
            config = packed(loaded, config, dequantize, bits, group_size)
            quant.save_model(folder, loaded, config, tokenizer)
        else:
            rows = sample(data, read[0][1].get("data"), tokenizer)
            how = dict(to=to, bits=bits, group_size=group_size, dequantize=dequantize)
            merge = Merge(loaded, config, base, rounding=rounding, **how)
            for path, (tensors, settings), share in zip(adapters, read, shares, strict=True):
                merge.add(path, tensors, settings, share, force)
            report = merge.run(quant.Shards(folder), tokenizer, rows)
            report = {"base": base, "adapters": dict(zip(adapters, shares, strict=True))} | report
            (folder / "fuse_report.json").write_text(json.dumps(report, indent=2))
            config = merge.config
            tell(report, "quantization" in config)
    print(f"wrote {Path(save_path)}: {base} with {', '.join(adapters)}")
    if "quantization" in config and config["model_type"] in ("mistral", *quant.GGUF_ARCHITECTURES):
        gguf = f"python quant.py convert {save_path} --save-path FILE.gguf"
        print(f"packed as MLX packs; for llama.cpp: {gguf}")


def to_peft(adapters: list[str], read: list, save_path: str) -> None:
    if len(read) > 1:
        raise UserError(f"--to peft: got {len(read)} adapters, wanted one")
    with quant.Output(save_path) as folder:
        dora.save_peft(folder, *read[0])
    print(f"wrote {Path(save_path)}: {adapters[0]} for PEFT")


def whole(model, adapters: list[str], read: list, to: str) -> None:
    """Puts fully fine-tuned weights in place of the base's."""
    if len(read) > 1 or to != "model":
        raise UserError("weights that were trained in full cannot be combined with others")
    dora.load_full(model, adapters[0], *read[0])


def packed(model, config: dict, dequantize: bool, bits: int | None, group_size: int | None) -> dict:
    if dequantize and "quantization" in config:
        quant.unpack(model, model.model.norm.weight.dtype)
        return quant.unpacked_config(config)
    if bits or group_size:
        return quant.pack(model, config, group_size, bits, "affine")[0]
    return config


# --- Text -----------------------------------------------------------------------------------------


class Row(NamedTuple):
    """tokens (1, T + 1), and which of them are the fine-tune's to answer, (T,)."""

    tokens: mx.array
    trained: np.ndarray


def sample(data: str | None, trained_on: str | None, tokenizer) -> tuple[str, list, list]:
    """(name, rows to calibrate on, rows to compare on)."""
    if not data and trained_on and Path(trained_on).is_dir():
        data = trained_on
    if data:
        splits = train.read_data(data)
        first, second = splits["train"], splits["valid"]
        if not second:
            first, second = first[::2], first[1::2]
    else:
        texts = [("", {"text": text}) for text in documentation()]
        first, second = texts[::2], texts[1::2]
    found = []
    for rows in (first, second):
        spread = rows[:: max(1, len(rows) // ROWS)][:ROWS]
        coded = (train.encode(row, tokenizer, False) for _, row in spread)
        rows = [(ids[: LENGTH + 1], trained[1 : LENGTH + 1]) for ids, trained in coded]
        found.append([Row(mx.array([i]), np.array(t)) for i, t in rows if any(t)])
    name = data or "Python's documentation"
    if not all(found):
        raise UserError(f"{name}: too little text in it to measure on; give another --data")
    return name, *found


def documentation() -> list[str]:
    """Prose that every Python has: what its modules say of themselves and of what is in them."""
    texts = []
    for name in "argparse collections datetime json pathlib random subprocess threading".split():
        module = importlib.import_module(name)
        found = {inspect.getdoc(value) for value in vars(module).values() if callable(value)}
        texts += [text for text in sorted(found - {None}) if len(text) > 400]
    return texts


# --- One layer ------------------------------------------------------------------------------------


class Part(NamedTuple):
    """One adapter's tensors for one layer, and how much of it is wanted."""

    leaves: dict[str, mx.array]
    scale: float
    share: float


def effect(W: mx.array, parts: list[Part]) -> tuple[mx.array, mx.array, mx.array]:
    """g (O, 1), A (I, R) and B (R, O) so that the adapted weight is g ⊙ W + (A B)ᵀ, W (O, I)."""
    g, left, right = mx.ones((W.shape[0], 1)), [], []
    for leaves, scale, share in parts:
        A, B, factor = leaves["lora_a"], leaves["lora_b"] * scale, mx.ones((W.shape[0], 1))
        if "m" in leaves:
            n = mx.linalg.norm(W + (A @ B).T, axis=1, keepdims=True)
            factor = leaves["m"][:, None] / mx.maximum(n, 1e-30)
        g = g + share * (factor - 1)
        left.append(A)
        right.append(share * B * factor.T)
    return g, mx.concatenate(left, axis=1), mx.concatenate(right, axis=0)


def feedback(H: mx.array, A: mx.array) -> mx.array:
    """U (I, I), strictly upper: what an error in one input is worth in the following ones.

    Errors e of a row count as e H' eᵀ, where H' = (U + 1) D (U + 1)ᵀ is H and, as heavy as
    EMPHASIS times that, the directions H A and A: along them an error looks to the model like a
    change of the update itself, x A B, and adds up over layers, where others average out. A alone
    does so for inputs that are not like those of H.
    """
    H, A = np.array(H, np.float64), np.array(A, np.float64)
    seen = H @ A
    sides = [a / max(np.linalg.norm(a), 1e-30) for a in (seen, A)]
    V = np.linalg.qr(np.concatenate(sides, axis=1))[0]
    H += EMPHASIS * np.trace(H) / V.shape[1] * (V @ V.T)
    damping = DAMPING * max(float(np.mean(np.diag(H))), 1e-12)
    while True:
        try:
            L = np.linalg.cholesky(H[::-1, ::-1] + damping * np.eye(len(H)))
            break
        except np.linalg.LinAlgError:
            damping *= 10
    R = L[::-1, ::-1]
    return mx.array((R / np.diag(R) - np.eye(len(R))).astype(np.float32))


def rounded(W: mx.array, how: tuple, scales, biases, U: mx.array) -> mx.array:
    """W (O, I) as codes on the grid of scales and biases (O, I / group), packed (O, I bits / 32).

    Every input's codes make up for the errors of those before it, by U; see `feedback`. In NumPy:
    on a GPU each of these many short steps would wait for a launch.
    """
    group, bits, mode = how
    wanted, U, (s, b, values) = np.array(W.T, order="C"), np.array(U), grid(how, scales, biases)
    codes, errors = np.empty(wanted.shape, np.uint8), wanted.copy()
    order = np.argsort(values).astype(np.uint8)  # what is no number comes last, and is never chosen
    middles = (values[order][1:] + values[order][:-1]) / 2

    def run(begin: int, end: int) -> None:
        """Rounds these inputs, when `wanted` makes up for all that come before them."""
        if end - begin == 1:
            at = begin // group
            x = (wanted[begin] - b[at]) / s[at]
            if mode == "affine":
                q = np.clip(np.rint(x), 0, 2**bits - 1).astype(np.uint8)
            else:
                q = order[np.searchsorted(middles, x)]
            errors[begin] -= values[q] * s[at] + b[at]
            codes[begin] = q
        else:
            half = (begin + end) // 2
            run(begin, half)
            wanted[half:end] += U[begin:half, half:end].T @ errors[begin:half]
            run(half, end)

    run(0, len(wanted))
    # MLX's packing is one stream of bits per row
    stream = np.unpackbits(codes.T[..., None], axis=-1, count=bits, bitorder="little")
    stream = stream.reshape(codes.shape[1], -1)
    return mx.array(np.packbits(stream, axis=-1, bitorder="little").view("<u4"))


def grid(how: tuple, scales, biases) -> tuple[np.ndarray, ...]:
    """Scales and biases (I / group, O), and what each code is where the scale is 1 (2^bits,)."""
    group, bits, mode = how
    if mode == "affine":
        values = mx.arange(2**bits)
    else:
        power = mx.power(2.0, scales.astype(mx.float32) - 127)
        scales = mx.from_fp8(scales, mx.float32) if mode == "nvfp4" else power
        biases = mx.zeros_like(scales)
        values = mx.from_fp8(mx.arange(256, dtype=mx.uint8)) if bits == 8 else mx.array(FP4)
    s, b, values = (np.array(a.astype(mx.float32).T, order="C") for a in (scales, biases, values))
    return np.where(s == 0, 1, s), b, values


def sums(new: mx.array, wanted: mx.array, old: mx.array, H: mx.array) -> np.ndarray:
    """What `ratios` needs of one layer; that of several is their sum. Each (O, I), H (I, I)."""
    made, change, error = new - old, wanted - old, new - wanted
    seen, pairs = change @ H, [(wanted, wanted), (error, error), (change, change)]
    pairs += [(made, change), (made, made), (change, seen), (made, seen), (made, made @ H)]
    return np.array([(a * b).sum().item() for a, b in pairs])


def ratios(found: np.ndarray) -> dict[str, float]:
    """What became of the wanted change.

    "update" and "error" are its size and the error's, relative to the weights. "kept" is the
    projection of the change that was made on the wanted one, 1 if all of it is there, and "cosine"
    the cosine of the two: of the weights, and of what they make of the layer's inputs.
    """
    size, error, change, *both = found
    whole, out = max(size, 1e-30), {}
    out["update"], out["error"] = math.sqrt(change / whole), math.sqrt(error / whole)
    for name, (on, made, wanted) in {
        "weights": (both[0], both[1], change),
        "outputs": (both[3], both[4], both[2]),
    }.items():
        cosine = on / math.sqrt(made * wanted) if made * wanted > 0 else float(not wanted)
        out[name] = {"kept": on / wanted if wanted else 1.0, "cosine": cosine}
    return out


def separate(layer: nn.Module, leaves: dict[str, mx.array]) -> list[dict[str, mx.array]]:
    """An adapter's tensors as those of linear layers, A (I, R), B (R, O), m (O,): one for each
    expert, or one. An embedding (V, D) is a linear layer D -> V.
    """
    kind = dora.adapter_for(layer)
    if kind is dora.AdaptedLinear:
        return [leaves]
    turned = {k: a if k == "m" else a.swapaxes(-1, -2) for k, a in leaves.items()}
    if kind is dora.AdaptedEmbedding:
        return [turned | {"lora_a": turned["lora_b"], "lora_b": turned["lora_a"]}]
    return [{k: a[e] for k, a in turned.items()} for e in range(len(leaves["lora_a"]))]


class Probe(nn.Module):
    """Stands for a layer while the unfused model runs: dense, and sums H over what comes in."""

    def __init__(self, weight: mx.array, bias: mx.array | None):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.H = mx.zeros((*weight.shape[:-2], weight.shape[-1], weight.shape[-1]))
        self.recording = False

    def __call__(self, x: mx.array) -> mx.array:
        if self.recording:
            rows = x.reshape(-1, x.shape[-1]).astype(mx.float32)
            self.H = self.H + rows.T @ rows
        y = x @ self.weight.T.astype(x.dtype)
        return y if self.bias is None else y + self.bias.astype(x.dtype)


class EmbeddingProbe(Probe):
    """Its rows are looked up, each for itself: H is 1."""

    def __init__(self, weight: mx.array):
        super().__init__(weight, None)
        self.H = mx.eye(weight.shape[1])

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.weight[tokens]

    def as_linear(self, x: mx.array) -> mx.array:
        return x @ self.weight.T.astype(x.dtype)


class SwitchProbe(Probe):
    """Experts, with an H of each, over the tokens that come to it."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if self.recording:
            rows, at = x.reshape(-1, x.shape[-1]).astype(mx.float32), np.array(indices).flatten()
            found = []
            for e in range(len(self.H)):
                mine = rows[mx.array(np.flatnonzero(at == e))]
                found.append(self.H[e] + mine.T @ mine)
                mx.eval(found[-1])
            self.H = mx.stack(found)
        return dora.gathered_product(x, self.weight, indices, sorted_indices)


# --- The model ------------------------------------------------------------------------------------


class Merge:
    """Adapters on a base, and the way to write what they make of it."""

    def __init__(self, model, config: dict, name, to: str, bits, group_size, dequantize, rounding):
        self.model, self.config, self.to, self.dequantize = model, config, to, dequantize
        self.name, self.warned = name, set()
        self.bits, self.group_size, self.rounding = bits, group_size, rounding
        self.parts: dict[str, list[list[Part]]] = {}  # by path, for each expert
        self.adapters, self.sums, self.lora = [], {}, {}
        self.stored = {name: a.dtype for name, a in tree_flatten(model.parameters())}
        self.dtype = model.model.norm.weight.dtype
        self.packable: set[str] = set()
        if dequantize:
            self.config = quant.unpacked_config(config)
        elif (bits or group_size) and "quantization" not in config:
            self.config, skipped = quant.pack_config(model, config, group_size, bits, "affine")
            self.packable = {p for p, m in model.named_modules() if hasattr(m, "to_quantized")}
            self.packable -= set(skipped)

    def add(self, path: str, tensors: dict, settings: dict, share: float, force: bool) -> None:
        paths = dora.matching(self.model, path, tensors)
        layers = dict(self.model.named_modules())
        for p in paths:
            how = dora.packing(layers[p])
            if self.to == "lora" and how and how[2] != "affine":
                raise UserError(f"--to lora: the scales of {p} ({how[2]}) cannot hold g")
            if (new := self.target(p, how)) and dora.width(layers[p]) % new[0]:
                wide = dora.width(layers[p])
                raise UserError(f"a group size of {new[0]} does not divide the width {wide} of {p}")
            scale = (settings.get("scales") or {p: settings["scale"]})[p]
            names = {k: f"{p}.{k}" for k in dora.LEAVES}
            leaves = {k: tensors[n].astype(mx.float32) for k, n in names.items() if n in tensors}
            each = separate(layers[p], leaves)
            held = self.parts.setdefault(p, [[] for _ in each])
            for parts, one in zip(held, each, strict=True):
                parts.append(Part(one, scale, share))
        if "sketch" in settings and not force:
            self.adapters.append((path, paths, settings, self.config))

    def run(self, shards: quant.Shards, tokenizer, rows: tuple[str, list, list]) -> dict:
        """Writes the model; returns the report."""
        from tqdm import tqdm

        source, calibrate, compare = rows
        model, stack = self.model, self.model.model
        if mx.default_device().type == mx.DeviceType.cpu:
            quant.cast(model, mx.float32)
        embed = live = stack.embed_tokens
        path = "model.embed_tokens"
        if path in self.parts:
            self.check({path: embed})
            live = self.probe(path, embed)
            new = self.layer(path, embed, live)
        else:
            new = self.rest("model.", "embed_tokens", embed)
        ids = [r.tokens[:, :-1] for r in (*calibrate, *compare)]
        flows = {"unfused": [stack.embed(i, live) for i in ids]}
        for name, embedding in (("base", embed), ("fused", new)):
            flows[name] = [stack.embed(i, embedding) for i in ids[len(calibrate) :]]
        for i, block in enumerate(tqdm(stack.layers, disable=None, unit="block", desc="fusing")):
            prefix = f"model.layers.{i}."
            layers = {prefix + p: m for p, m in block.named_modules() if prefix + p in self.parts}
            self.check(layers)
            advance(block, flows["base"])
            probes = {p: self.probe(p, layer) for p, layer in layers.items()}
            put(block, prefix, probes)
            advance(block, flows["unfused"], probes.values(), len(calibrate))
            put(block, prefix, {p: self.layer(p, layers[p], probes[p]) for p in layers})
            self.rest(prefix, None, block)
            advance(block, flows["fused"])
            self.write(shards, prefix, block)
            stack.layers[i] = nn.Identity()
        heads = self.heads(embed, live, new, flows, calibrate)
        text = self.compare(flows, heads, compare, len(calibrate)) | {"source": source}
        holder = nn.Module()
        holder.embed_tokens, holder.norm = new, stack.norm
        self.write(shards, "model.", holder)
        if not model.spec.tie_word_embeddings:
            holder = nn.Module()
            holder.lm_head = heads["fused"]
            self.write(shards, "", holder)
        shards.close(self.config, tokenizer)
        if self.lora:
            self.write_lora(shards.folder / "adapters")
        layers = {p: ratios(found) for p, found in self.sums.items()}
        return {"overall": ratios(sum(self.sums.values())), "text": text, "layers": layers}

    def check(self, layers: dict) -> None:
        for path, paths, settings, config in self.adapters:
            if any(p in layers for p in paths):
                said = dora.check_base(layers, path, paths, settings, config, self.name)
                if said and path not in self.warned:  # not once more for every block
                    print(said, file=sys.stderr)
                    self.warned.add(path)

    def heads(self, embed, live, new, flows: dict, calibrate: list) -> dict:
        """The three heads, each h (..., D) -> logits."""
        model, stack = self.model, self.model.model
        for flow in flows.values():
            flow[:] = [stack.norm(h) for h in flow]
            mx.eval(flow)
        if model.spec.tie_word_embeddings:
            return {"base": embed.as_linear, "unfused": live.as_linear, "fused": new.as_linear}
        head = model.lm_head
        if "lm_head" not in self.parts:
            return {"base": head, "unfused": head, "fused": self.rest("", "lm_head", head)}
        self.check({"lm_head": head})
        probe = self.probe("lm_head", head)
        probe.recording = True
        for h in flows["unfused"][: len(calibrate)]:
            mx.eval(probe(h[:, :1]), probe.H)
        probe.recording = False
        return {"base": head, "unfused": probe, "fused": self.layer("lm_head", head, probe)}

    def compare(self, flows: dict, heads: dict, rows: list, skip: int) -> dict:
        """Losses of the three, and the KL divergence of base and fused from unfused, per token."""
        flows = flows | {"unfused": flows["unfused"][skip:]}
        total, count = np.zeros(5), 0
        for n, row in enumerate(rows):
            places, targets = np.flatnonzero(row.trained), row.tokens[0, 1:]
            for part in np.array_split(places, -(-len(places) // 256)):
                at, logs = mx.array(part), {}
                for flow, head in heads.items():
                    z = self.model.finish(head(flows[flow][n][0][at])).astype(mx.float32)
                    logs[flow] = z - mx.logsumexp(z, axis=-1, keepdims=True)
                p, right = mx.exp(logs["unfused"]), targets[at][:, None]
                found = [-mx.take_along_axis(z, right, -1).sum() for z in logs.values()]
                for flow in ("base", "fused"):
                    found.append((p * (logs["unfused"] - logs[flow])).sum())
                total, count = total + np.array([f.item() for f in found]), count + len(part)
        base, unfused, fused, kl_base, kl_fused = (total / count).tolist()
        loss = {"base": base, "unfused": unfused, "fused": fused}
        return {"tokens": count, "loss": loss, "kl": {"base": kl_base, "fused": kl_fused}}

    def probe(self, path: str, layer: nn.Module) -> Probe:
        found = []
        for packed, parts in zip(experts(layer), self.parts[path], strict=True):
            W = dora.dense(packed, dora.packing(layer), mx.float32)
            g, A, B = effect(W, parts)
            found.append(g * W + (A @ B).T)
            mx.eval(found[-1])
        kind = dora.adapter_for(layer)
        if kind is dora.AdaptedEmbedding:
            return EmbeddingProbe(*found)
        if kind is dora.AdaptedSwitchLinear:
            return SwitchProbe(mx.stack(found), None)
        return Probe(*found, layer.get("bias"))

    def layer(self, path: str, base: nn.Module, probe: Probe) -> nn.Module:
        """The layer that is written for `base`."""
        how = dora.packing(base)
        target = self.target(path, how)
        name = f"{path}.scales" if how and how[2] == "affine" else f"{path}.weight"
        storage = self.stored[name] if self.stored[name] in quant.FLOATS else self.dtype
        several, found, lora = base.weight.ndim == 3, [], []
        for e, packed in enumerate(experts(base)):
            wanted, H = (probe.weight[e], probe.H[e]) if several else (probe.weight, probe.H)
            W = dora.dense(packed, how, mx.float32)
            g, A, B = effect(W, self.parts[path][e])
            added = (A @ B).T if self.to == "lora" else 0.0
            if target is None:
                new = [(wanted - added).astype(storage)]
            else:
                new = self.packed(packed, how, target, wanted, g, A, B, H, storage)
            got = dora.dense(new, target, mx.float32) + added
            self.sums[path] = self.sums.get(path, 0) + sums(got, wanted, W, H)
            mx.eval(new)
            found.append(new)
            lora.append((A, B))
        if self.to == "lora":
            self.lora[path] = dora.adapter_for(base), lora
        new = {dora.AdaptedEmbedding: quant.Embedding, dora.AdaptedSwitchLinear: quant.SwitchLinear}
        new = new.get(dora.adapter_for(base), quant.Linear)
        if target is None:
            new = new(*[1] * (3 if several else 2))
        else:
            new = new(*[target[0]] * (3 if several else 2)).to_quantized(*target)
        names = ("weight", "scales", "biases")
        for k, arrays in zip(names, zip(*found, strict=True), strict=False):
            new[k] = mx.stack(arrays) if several else arrays[0]
        new.pop("bias", None)
        if "bias" in base:
            new.bias = base.bias
        mx.eval(new.parameters())
        return new

    def packed(self, base: list, how, target: tuple, wanted, g, A, B, H, storage) -> list:
        """`wanted` (O, I) packed as `target` says: weight, scales and, if affine, biases."""
        group, bits, mode = target
        weight, *grid = mx.quantize(wanted, group, bits, mode=mode)
        error = mx.linalg.norm(dora.dense([weight, *grid], target, mx.float32) - wanted)
        small = mx.linalg.norm((A @ B).T) < error and self.rounding == "gptq"
        if mode == "affine":
            if self.to == "lora" or (target == how and small):
                # the base's grid: the update is smaller than what a new one would round away
                grid = [a * g for a in base[1:]]
            grid = [a.astype(storage) for a in grid]
        if self.to == "lora":
            weight = base[0]
        elif self.rounding == "gptq":
            weight = rounded(wanted, target, grid[0], (*grid, None)[1], feedback(H, A))
        return [weight, *grid]

    def target(self, path: str, how: tuple | None) -> tuple | None:
        """(group size, bits, mode) of what is written for a layer packed so; None for dense."""
        if self.dequantize or not (self.bits or self.group_size):
            return None if self.dequantize else how
        if how is None and self.packable and path not in self.packable:
            return None
        old = how if how and how[2] == "affine" else (64, 4)
        new = self.group_size or old[0], self.bits or old[1], "affine"
        if not self.packable:
            names = "group_size", "bits", "mode"
            self.config["quantization"][path] = dict(zip(names, new, strict=True))
        return new

    def rest(self, prefix: str, name: str | None, module: nn.Module) -> nn.Module:
        """Packs or unpacks what has no adapter, as asked; the module, or a new one in its place."""
        if name:
            holder = nn.Module()
            holder[name] = module
            return self.rest(prefix, None, holder)[name]
        if self.dequantize:
            quant.unpack(module, self.dtype)
        elif self.packable:
            default = {k: self.config["quantization"][k] for k in ("group_size", "bits", "mode")}
            nn.quantize(module, **default, class_predicate=self.packs(prefix))
        return module

    def packs(self, prefix: str):
        return lambda p, m: hasattr(m, "to_quantized") and prefix + p in self.packable

    def write(self, shards: quant.Shards, prefix: str, module: nn.Module) -> None:
        """Hands a part of the model over, every float in the type that the base stores it in."""
        weights = {}
        for name, array in tree_flatten(module.parameters()):
            wanted = self.stored.get(prefix + name)
            wanted = wanted if wanted in quant.FLOATS else self.dtype
            whole = array.dtype not in quant.FLOATS
            weights[prefix + name] = array if whole else array.astype(wanted)
        shards.add(weights)

    def write_lora(self, folder: Path) -> None:
        """The low-rank part as a LoRA adapter of one rank, scale 1."""
        R, weights = max(A.shape[1] for _, pairs in self.lora.values() for A, _ in pairs), {}
        for path, (kind, pairs) in self.lora.items():
            more = R - pairs[0][0].shape[1]
            A = mx.stack([mx.pad(a, ((0, 0), (0, more))) for a, _ in pairs])
            B = mx.stack([mx.pad(b, ((0, more), (0, 0))) for _, b in pairs])
            if kind is dora.AdaptedLinear:
                a, b = A[0], B[0]
            elif kind is dora.AdaptedEmbedding:
                a, b = B[0].T, A[0].T
            else:
                a, b = A.swapaxes(1, 2), B.swapaxes(1, 2)
            weights |= {f"{path}.lora_a": mx.contiguous(a), f"{path}.lora_b": mx.contiguous(b)}
        folder.mkdir()
        dora.write_adapter(folder, self.model, weights, "lora", {"rank": R, "scale": 1.0})


def experts(layer: nn.Module) -> list[list[mx.array]]:
    """The tensors of each expert's weight; of a layer that is no expert's, one list."""
    held = dora.tensors(layer)
    return [[t[e] for t in held] for e in range(len(held[0]))] if held[0].ndim == 3 else [held]


def advance(block: nn.Module, flow: list, probes=(), count: int = 0) -> None:
    """Takes the hidden states through the block; the first `count` of them are recorded."""
    for n, h in enumerate(flow):
        for probe in probes:
            probe.recording = n < count
        flow[n] = block(h)
        mx.eval(flow[n], [probe.H for probe in probes])


def put(block: nn.Module, prefix: str, layers: dict[str, nn.Module]) -> None:
    block.update_modules(tree_unflatten([(p.removeprefix(prefix), m) for p, m in layers.items()]))


def tell(report: dict, packed: bool) -> None:
    """The report in a few lines, and a warning where too little is left."""
    every, text = report["overall"], report["text"]
    loss, kl = text["loss"], text["kl"]
    print(
        f"update: {every['update']:.2%} of the weights, error {every['error']:.2%}; kept "
        f"{every['weights']['kept']:.2f} of it in the weights, {every['outputs']['kept']:.2f} in "
        "the layers' outputs\n"
        f"loss on {text['tokens']} tokens of {text['source']}: base {loss['base']:.4f}, "
        f"unfused {loss['unfused']:.4f}, fused {loss['fused']:.4f}; KL from unfused: base "
        f"{kl['base']:.4f}, fused {kl['fused']:.4f}"
    )
    if not every["update"]:
        print("warning: every lora_b is zero: this adapter changes nothing", file=sys.stderr)
    elif kl["fused"] > 0.1 * kl["base"]:
        lost = f"the fused model is {kl['fused'] / kl['base']:.0%} as far from the unfused as the "
        ways = "--bits 8, --dequantize or --to lora" if packed else "--to lora"
        lost += f"base is: more of the update survives {ways}"
        print(f"warning: {lost}", file=sys.stderr)


if __name__ == "__main__":
    quant.cli(fuse, errors=(dora.UserError, train.comm.UserError))
