"""train.py: fine-tune a language model with DoRA, LoRA or in full.

    python train.py                                       the tiny model that ships with this suite
    python train.py --model mlx-community/Qwen3-8B-4bit --data my_data --iters 600
    python train.py --config run.yaml --learning-rate 2e-5          flags win over the file
    python train.py ... --resume                          go on from the newest checkpoint
    python train.py ... --nodes hosts.json                on several machines, started over ssh
    python train.py ... --plan                            what it would take, and whether that fits

The loss of a step is the sum over all trained tokens of its examples, divided by their number, so
padding, the split into micro-batches and ranks do not change it. An iteration is one optimizer
update on `--grad-accumulation-steps` micro-batches of `--batch-size` examples; schedules count
updates.

On W machines each micro-batch is split: rank r takes every W-th example from its r-th. Gradients
of summed losses, the loss and the token count are summed over ranks while backward goes on
(`comm.Overlap`) and divided once, so the step is the same up to rounding whatever W is, and the
weights stay bit-identical on all ranks, which is checked at every report. Rank 0 alone reads
checkpoints and writes files; it sends what it read to the rest. When a rank fails, all end within
comm.py's deadlines (COMM_SILENCE, COMM_DEADLINE: seconds), and with `--max-restarts` the job begins
again at its newest checkpoint.

Which examples make a batch is a function of (seed, step) alone: examples are shuffled, sorted by
padded length, cut into batches, and the batches permuted, anew every epoch. The last, short batch
is filled up with empty rows, so every example is seen. Lengths are padded to about four sizes per
octave, so few shapes reach the compiler. Dropout's masks are a function of (seed, step, rank).
Resuming needs no more than the step: weights and moments come from the checkpoint, and the run goes
on bit for bit as if it had not stopped.

With `--packing` rows are made of several examples, best fit: attention, positions and recurrent
states begin anew at each (`quant.Packed`), so the loss is that of the examples apart. With
`--grad-checkpoint` backward computes the chosen layers again from their inputs. `--plan` counts
what backward keeps, from the config alone (`memory`).

The head never sees masked tokens, and its logits exist for some hundred tokens at a time: forward
computes the gradient with respect to the last hidden state too (`head_product`), backward only
scales it.

What a run leaves in --adapter-path:

    adapters.safetensors  adapter_config.json      the newest weights; mlx-lm loads the folder
    checkpoints/0000100/                           the same, with state.safetensors and state.json
    best/                                          the weights of the lowest validation loss
    log.jsonl  loss.svg                            what was reported (svg needs matplotlib)
"""

import bisect
import datetime
import difflib
import functools
import hashlib
import inspect
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

import comm
import dora
import quant
from quant import UserError

OPTIMIZERS = {
    "adam": functools.partial(optim.Adam, bias_correction=True),
    "adamw": functools.partial(optim.AdamW, bias_correction=True),
    "sgd": optim.SGD,
    "lion": optim.Lion,
    "muon": optim.Muon,
    "adafactor": functools.partial(optim.Adafactor, relative_step=False, scale_parameter=False),
}
LOGITS = 1 << 25  # how many logits exist at a time
TINY = Path(__file__).parent / "tests" / "tiny"
if not TINY.exists():  # installed from a wheel
    TINY = Path(sys.prefix) / "share" / "mlx-dora" / "tiny"


# --- Data -----------------------------------------------------------------------------------------


def read_split(folder: Path, split: str) -> list[tuple[str, dict]]:
    """Rows of `<split>.jsonl` as (file:line, row); [] if there is no such file. UTF-8, BOM
    tolerated.
    """
    path, rows = folder / f"{split}.jsonl", []
    if not path.exists():
        return rows
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    for number, line in enumerate(content.split(b"\n"), 1):
        where = f"{path}:{number}"
        try:
            if not line.strip():
                continue
            row = json.loads(line.decode("utf-8"))
            if b"\\u" in line:  # may hold half of a surrogate pair, which is no text
                json.dumps(row, ensure_ascii=False).encode()
        except UnicodeDecodeError as error:
            byte = line[error.start]
            raise UserError(f"{where}: not UTF-8, byte 0x{byte:02x} at {error.start}") from None
        except ValueError as error:
            raise UserError(f"{where}: not JSON: {error}") from None
        rows.append((where, check_row(where, row)))
    return rows


def check_row(where: str, row: object) -> dict:
    """A row has `text`, `prompt` and `completion`, or `messages` (with `tools`, if any)."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: got a {type(row).__name__}, wanted an object")
    if "messages" in row:
        turns = row["messages"]
        if not isinstance(turns, list) or not all(
            isinstance(t, dict) and "role" in t for t in turns
        ):
            raise UserError(f'{where}: "messages" must be a list of objects with a "role"')
        if not turns:
            raise UserError(f'{where}: "messages" is empty')
        return row
    keys = ["prompt", "completion"] if "prompt" in row else ["text"]
    if missing := [k for k in keys if not isinstance(row.get(k), str)]:
        if row.get(missing[0]) is not None:
            got = type(row[missing[0]]).__name__
            raise UserError(f'{where}: "{missing[0]}" is a {got}, wanted text')
        raise UserError(
            f'{where}: no "text", "messages" or "prompt"+"completion"; found keys: {list(row)}'
        )
    return row


def read_data(data: str) -> dict[str, list]:
    """{"train": rows, "valid": rows, "test": rows} of a folder or a hub dataset id."""
    folder = Path(data).expanduser()
    if not folder.exists():
        folder = quant.hub(data, ["*.jsonl"], "dataset")
    if not (folder / "train.jsonl").exists():
        raise UserError(f"{data}: no train.jsonl in it")
    rows = {split: read_split(folder, split) for split in ("train", "valid", "test")}
    if not rows["train"]:
        raise UserError(f"{folder / 'train.jsonl'}: no rows in it")
    return rows


def encode(row: dict, tokenizer: quant.Tokenizer, mask: bool | str) -> tuple[list[int], list[bool]]:
    """(token ids, which of them are trained on) of one row.

    `text` and plain completions end in exactly one EOS, which is always trained on. Prompt and
    completion become a user and an assistant turn where the model has a chat template. With
    `mask`, only what the assistant says is trained: every turn up to and with its end-of-turn
    token, or with "last" the last turn only.
    """
    if "messages" in row or ("prompt" in row and tokenizer.template is not None):
        turns = row.get("messages") or [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
        return encode_chat(turns, row.get("tools"), tokenizer, mask)
    ids, prompt = tokenizer.encode(row.get("prompt", row.get("text"))), 0
    if "prompt" in row:
        while ids and ids[-1] == tokenizer.eos_id:  # some tokenizers add it, here too early
            ids.pop()
        prompt = len(ids) if mask else 0
        ids += tokenizer.encode(row["completion"], special=False)
    if tokenizer.eos_id is not None and ids[-1:] != [tokenizer.eos_id]:
        ids.append(tokenizer.eos_id)
    return ids, [i >= prompt for i in range(len(ids))]


def encode_chat(
    turns: list[dict], tools, tokenizer, mask: bool | str
) -> tuple[list[int], list[bool]]:
    """`encode` for a conversation. The rendered text has its own BOS, so none is added."""
    text = tokenizer.chat(turns, tools)
    encoding = tokenizer.core.encode(text, add_special_tokens=False)
    ids, offsets = encoding.ids, encoding.offsets
    if not mask:
        return ids, [True] * len(ids)
    special = {i for i, t in tokenizer.core.get_added_tokens_decoder().items() if t.special}
    said = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    trained = [False] * len(ids)
    for i in said[-1:] if mask == "last" else said:
        first, words_end, limit = assistant_span(turns, i, tools, tokenizer, text, encoding)
        inside = [n for n in range(first, len(ids)) if offsets[n][1] <= limit]
        ends = [n for n in inside if ids[n] in special and offsets[n][0] >= words_end]
        if ends:  # the end of the turn; calls may have special tokens of their own before it
            inside = range(first, ends[-1 if turns[i].get("tool_calls") else 0] + 1)
        for n in inside:
            trained[n] = True
    return ids, trained


def assistant_span(turns, i: int, tools, tokenizer, text: str, encoding) -> tuple[int, int, int]:
    """(first token that turn i generates, where in the rendered text its words end, where the turn
    ends).

    The first token is the one behind what the template shows when asked for a reply. Templates may
    show a turn differently once others follow: they drop its thinking (Qwen3), or something behind
    the last turn (Phi-3). So the end is where its own rendering and the whole one stop agreeing.
    """
    common = os.path.commonprefix
    header = tokenizer.chat(turns[:i], tools, reply=True)
    before = tokenizer.chat(turns[:i], tools) if i else ""
    if len(common([header, text])) < len(common([header, before])):
        raise UserError(
            f"the chat template shows the turns before turn {i + 1} differently once it follows; "
            "its words cannot be told apart: use --mask-prompt last, or false"
        )
    asked = tokenizer.core.encode(header, add_special_tokens=False).ids
    first = len(common([asked, encoding.ids]))
    start = encoding.offsets[first][0] if first < len(encoding.ids) else len(text)
    through = tokenizer.chat(turns[: i + 1], tools)
    limit = len(common([through, text]))
    if limit < len(through):  # the turn's rest may agree where its beginning was dropped
        rests = (
            len(through) - k
            for k in range(start, len(through))
            if text.startswith(through[k:], start)
        )
        limit = max(limit, start + next(rests, 0))
    words = turns[i].get("content")
    words = words.strip() if isinstance(words, str) else ""
    found = text.find(words, start, limit) if words else -1
    return first, found + len(words) if found >= 0 else start, limit


class Examples:
    """A tokenized split: `ids` and `trained` per row, cut at `max_seq_length`, and their
    batches. With `packing` several rows share one, of at most `max_seq_length` tokens together.
    """

    def __init__(
        self, rows: list, tokenizer, mask: bool | str, max_seq_length: int, packing: bool = False
    ):
        self.packing, self.longest = packing, max_seq_length
        self.ids, self.trained, self.where, cut, empty = [], [], [], 0, 0
        for where, row in rows:
            try:
                ids, trained = encode(row, tokenizer, mask)
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
            cut += len(ids) > max_seq_length
            ids, trained = ids[:max_seq_length], trained[:max_seq_length]
            if not any(trained[1:]):
                empty += 1
                continue
            self.ids.append(np.array(ids, np.int32))
            self.trained.append(np.array(trained))
            self.where.append(where)
        name = Path(rows[0][0].rpartition(":")[0]).name if rows else ""
        if cut:
            print(f"{name}: {cut} of {len(rows)} rows cut at --max-seq-length {max_seq_length}")
        if empty:
            print(f"{name}: {empty} of {len(rows)} rows left out, nothing in them to train on")
        self.sizes = buckets(max_seq_length)
        self.padded = np.array([self.fit(len(i)) for i in self.ids])

    def __len__(self) -> int:
        return len(self.ids)

    def order(self, batch_size: int, seed: int | None, epoch: int = 0) -> list:
        """Rows of every batch of an epoch, or with packing lists of rows; without a seed, in one
        fixed order.
        """
        rng = np.random.default_rng([seed or 0, epoch])
        rows = np.arange(len(self)) if seed is None else rng.permutation(len(self))
        rows = rows[np.argsort(self.padded[rows], kind="stable")]
        if self.packing:  # the longest first, but for what padding makes the same
            rows = best_fit(rows[::-1], [len(ids) for ids in self.ids], self.longest)
        batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        return [batches[i] for i in rng.permutation(len(batches))] if seed is not None else batches

    def batch(self, rows, batch_size: int) -> tuple:
        """tokens (B, T + 1), and of the trained ones: places (N,) in the flat (B T), weights (N,)
        0 or 1; with packing, also what `quant.Packed` takes: starts (B, T) and the longest.

        N is rounded up to a quarter of B T, with weight 0 on what fills it up.
        """
        rows = [np.atleast_1d(together) for together in rows]
        lengths = [[len(self.ids[r]) for r in together] for together in rows]
        T = self.fit(max(map(sum, lengths), default=0))
        tokens, trained = np.zeros((batch_size, T + 1), np.int32), np.zeros((batch_size, T), bool)
        starts = np.zeros((batch_size, T + 1), np.int32)
        for b, together in enumerate(rows):
            at = 0
            for row in together:
                n = len(self.ids[row])
                tokens[b, at : at + n] = self.ids[row]
                trained[b, at : at + n - 1] = self.trained[row][1:]
                starts[b, at:] = at
                at += n
            starts[b, at:] = at
        places = np.flatnonzero(trained)
        quarter = -(-trained.size // 4)
        N = min(max(-(-len(places) // quarter), 1) * quarter, trained.size)
        weights = (np.arange(N) < len(places)).astype(np.float32)
        places = np.pad(places, (0, N - len(places))).astype(np.int32)
        found = mx.array(tokens), mx.array(places), mx.array(weights)
        if not self.packing:
            return found
        return *found, mx.array(starts[:, :T]), self.fit(max(map(max, lengths), default=0))

    def fit(self, length: int) -> int:
        """The padded number of positions for so many tokens, of which the last needs none."""
        return int(self.sizes[np.searchsorted(self.sizes, max(length - 1, 1))])

    def digest(self) -> str:
        """Hash of all tokens, to tell at a resume whether the data is the same."""
        found = hashlib.sha256()
        for ids, trained in zip(self.ids, self.trained, strict=True):
            found.update(ids.tobytes() + trained.tobytes() + b"|")
        return found.hexdigest()[:16]


def best_fit(rows: np.ndarray, lengths: list[int], room: int) -> list[np.ndarray]:
    """Rows in groups of at most `room` tokens: one after the other, each goes where the least is
    left over.
    """
    groups, left = [], []  # left: (tokens that still fit, group), sorted
    for row in rows:
        at = bisect.bisect_left(left, (lengths[row], -1))
        free, group = left.pop(at) if at < len(left) else (room, len(groups))
        if group == len(groups):
            groups.append([])
        groups[group].append(row)
        bisect.insort(left, (free - lengths[row], group))
    return [np.array(group) for group in groups]


def buckets(longest: int) -> np.ndarray:
    """Padded lengths up to `longest`: multiples of 32 to 256, then four per octave."""
    sizes = [32]
    while sizes[-1] < longest - 1:
        sizes.append(sizes[-1] + max(32, 1 << (sizes[-1].bit_length() - 3)))
    return np.array(sizes[:-1] + [max(longest - 1, 1)] if sizes[-1] > longest - 1 else sizes)


# --- Loss -----------------------------------------------------------------------------------------


@functools.cache
def head_product(how: tuple | None, scaling: float, cap: float | None) -> Callable:
    """`f(h (N, D), targets (N,), weights (N,), head tensors) -> weighted sum of cross-entropies`,
    in chunks.

    One pass makes the loss and its gradient with respect to h while the logits of a chunk exist,
    so they never exist all at once and the head is unpacked once. The head itself gets no gradient.
    `scaling` and `cap` are `quant.Model.finish`'s.
    """

    @mx.custom_function
    def run(h, targets, weights, *head):
        W, V = dora.dense(head, how, h.dtype), head[0].shape[0]  # (V, D)
        total, grads, chunk = mx.array(0.0), [], max(LOGITS // V, 1)
        for i in range(0, h.shape[0], chunk):
            t, w = targets[i : i + chunk, None], weights[i : i + chunk, None]
            part = h[i : i + chunk]
            if grads:  # one after the other, or all chunks' logits would exist at once
                part = mx.depends(part, [grads[-1], total])
            logits = (part @ W.T).astype(mx.float32)
            if scaling != 1:
                logits = logits / scaling
            if cap:
                bent = mx.tanh(logits / cap)
                logits = cap * bent
            top = logits.max(axis=-1, keepdims=True)
            p = quant.exp(logits - top)
            mass = p.sum(axis=-1, keepdims=True)
            losses = top + mx.log(mass) - mx.take_along_axis(logits, t, axis=-1)
            total = total + (w * losses).sum()
            p = p * (w / mass)
            p = mx.put_along_axis(p, t, mx.take_along_axis(p, t, axis=-1) - w, axis=-1)
            p = p / scaling if scaling != 1 else p
            p = p * (1 - mx.square(bent)) if cap else p
            grads.append(p.astype(h.dtype) @ W)
        return total, mx.concatenate(grads)

    @run.vjp
    def run_vjp(primals, cotangents, outputs):
        dh = (cotangents[0] * outputs[1]).astype(primals[0].dtype)
        return dh, *(mx.zeros_like(p) for p in primals[1:])

    return run


def live_head_loss(model: nn.Module, head: nn.Module, h, targets, weights) -> mx.array:
    """What `head_product` returns, for a head that is adapted or trained itself: chunk by chunk
    with the gradients of its parameters.
    """
    names, leaves = zip(*tree_flatten(head.trainable_parameters()), strict=True)

    def chunk_loss(h, targets, weights, *leaves):
        head.update(tree_unflatten(list(zip(names, leaves, strict=True))))
        logits = model.head(h).astype(mx.float32)
        return (nn.losses.cross_entropy(logits, targets) * weights).sum()

    @mx.custom_function
    def run(h, targets, weights, *leaves):
        chunk = max(LOGITS // model.spec.vocab_size, 1)
        step = mx.value_and_grad(chunk_loss, [0, *range(3, 3 + len(leaves))])
        total, rows, sums = mx.array(0.0), [], [mx.zeros_like(a) for a in leaves]
        for i in range(0, h.shape[0], chunk):
            part = [a[i : i + chunk] for a in (h, targets, weights)]
            if rows:  # as in `head_product`
                part = mx.depends(part, [rows[-1], total, *sums])
            value, (dh, *grads) = step(*part, *leaves)
            total = total + value
            rows.append(dh)
            sums = [a + b for a, b in zip(sums, grads, strict=True)]
        return total, mx.concatenate(rows), *sums

    @run.vjp
    def run_vjp(primals, cotangents, outputs):
        dh, *grads = ((cotangents[0] * a).astype(a.dtype) for a in outputs[1:])
        return dh, *(mx.zeros_like(p) for p in primals[1:3]), *grads

    loss = run(h, targets, weights, *leaves)[0]
    head.update(tree_unflatten(list(zip(names, leaves, strict=True))))  # tracing has left its own
    return loss


def loss_sum(
    model: nn.Module, tokens: mx.array, places: mx.array, weights: mx.array, *packed
) -> mx.array:
    """Summed cross-entropy (float32) of the tokens at `places`; see `Examples.batch` for shapes."""
    h = model.hidden(tokens[:, :-1], packed=quant.Packed(*packed) if packed else None)
    h, targets = h.reshape(-1, h.shape[-1])[places], tokens[:, 1:].reshape(-1)[places]
    head = model.model.embed_tokens if model.spec.tie_word_embeddings else model.lm_head
    if isinstance(head, dora.AdaptedLinear) or head.trainable_parameters():
        return live_head_loss(model, head, h, targets, weights)
    finish = model.spec.logits_scaling, model.spec.final_logit_softcapping
    run = head_product(dora.packing(head), *finish)
    return run(h, targets, weights, *dora.tensors(head))[0]


def learning_rate(
    step: int, peak: float, iters: int, schedule: str, warmup: int, minimum: float
) -> float:
    """The rate of update `step` (from 0): linear from 0 to `peak` over `warmup` updates, then the
    schedule.

    constant: peak; linear and cosine: from peak at `warmup` to `minimum` at `iters`.
    """
    if step < warmup:
        return peak * step / warmup
    done = min((step - warmup) / max(iters - warmup, 1), 1.0)
    if schedule == "linear":
        return peak + (minimum - peak) * done
    if schedule == "cosine":
        return minimum + (peak - minimum) * (1 + math.cos(math.pi * done)) / 2
    return peak


# --- The run --------------------------------------------------------------------------------------


def compiled(state: list) -> Callable:
    """mx.compile over `state` on a GPU. On the CPU it would run a C++ compiler and gain nothing."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return lambda step: step
    return functools.partial(mx.compile, inputs=state, outputs=state)


class Run:
    """Model, optimizer and their compiled steps, with what a checkpoint must hold."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        clip: float | None,
        reduce: comm.Overlap | None = None,
        seed: int = 0,
    ):
        reduce = reduce or comm.Overlap(comm.Ring(0, [[("127.0.0.1", 0)]]))
        self.model, self.optimizer, self.clip, self.seed = model, optimizer, clip, seed
        self.reduce, self.job = reduce, reduce.job
        self.step, self.tokens, self.best = 0, 0, math.inf
        self.busy = 0.0  # seconds this rank computed before it could only wait
        self.optimizer.init(model.trainable_parameters())

    def compile(self) -> None:
        """Compiles the steps around the present state; call it once all of the state is in
        place.
        """
        value_and_grad = nn.value_and_grad(self.model, loss_sum)
        # outputs too: tracing leaves tracers in the model
        state = [self.model.state, mx.random.state]

        @compiled(state)
        def gradients(*batch):
            loss, grads = value_and_grad(self.model, *batch)
            return loss, tree_map(lambda g: g.astype(mx.float32), grads)

        both = [self.model.state, self.optimizer.state]

        @compiled(both)
        def update(grads, count):
            grads = tree_map(lambda g: g / count, grads)
            norm = mx.sqrt(sum(mx.square(g).sum() for _, g in tree_flatten(grads)))
            if self.clip:
                scale = mx.minimum(1.0, self.clip / (norm + 1e-6))
                grads = tree_map(lambda g: g * scale, grads)
            self.optimizer.update(self.model, grads)
            return norm

        self.gradients, self.update = gradients, update

    def advance(
        self, batches: list[tuple], rate: float, stop: bool = False
    ) -> tuple[float, int, float, bool]:
        """One update from this rank's micro-batches: of all ranks together the summed loss, the
        trained tokens, the gradient norm, and whether any of them wants to stop.
        """
        began = time.monotonic()
        mx.random.seed(self.random_seed())
        total, count, grads = mx.array(0.0), mx.array(0.0), None
        for i, batch in enumerate(batches):
            self.draw_masks()
            loss, new = self.gradients(*batch)
            grads = new if grads is None else tree_map(mx.add, grads, new)
            total, count = total + loss, count + batch[2].sum()
            if i < len(batches) - 1:
                mx.eval(total, count, grads)
        grads, (total, count, stops) = self.reduce(grads, total, count, mx.array(float(stop)))
        mx.eval(total, count, grads)
        self.busy += self.reduce.ready - began
        self.optimizer.learning_rate = mx.array(rate)
        norm = self.update(grads, count)
        del grads, new  # whose memory the update can then take
        mx.eval(self.model.trainable_parameters(), self.optimizer.state, norm)
        self.step, self.tokens = self.step + 1, self.tokens + int(count.item())
        return total.item(), int(count.item()), norm.item(), stops.item() > 0

    def random_seed(self) -> int:
        """Of this step on this rank: dropout's masks need not be remembered to resume."""
        numbers = np.random.SeedSequence([self.seed, self.step, self.job.rank])
        return int(numbers.generate_state(1, np.uint64)[0])

    def draw_masks(self) -> None:
        """Gives every dropout the key of its next mask: checkpointed layers need it twice."""
        drops = [m for m in self.model.modules() if isinstance(m, dora.Dropout) and m._p_1 < 1]
        if drops:
            keys = mx.random.randint(0, 2**31 - 1, (len(drops), 2)).astype(mx.uint32)
            for drop, key in zip(drops, keys, strict=True):
                drop._key = key

    def share(self) -> None:
        """Gives all ranks what rank 0 has: weights, moments and place."""
        weights, state = self.model.trainable_parameters(), self.optimizer.state
        facts = np.array([self.step, self.tokens], np.int64), np.array([self.best], np.float32)
        self.step, self.tokens = map(int, self.job.broadcast(facts[0]))
        self.best = float(self.job.broadcast(facts[1])[0])
        trees = []
        for tree in (weights, state):  # a loaded state is in another order than a fresh one
            shared = {
                k: self.job.broadcast(mx.contiguous(a)) for k, a in sorted(tree_flatten(tree))
            }
            trees.append(tree_unflatten(list(shared.items())))
        self.model.update(trees[0])
        self.optimizer.state = trees[1]

    def check_ranks(self, steps: int) -> str | None:
        """Ends the run if ranks hold different weights; says which rank is late, if one is."""
        bits = [w.view(mx.uint8).astype(mx.uint32) for _, w in self.flat()]
        sums = mx.stack([(b * (mx.arange(b.size) % 251 + 1).reshape(b.shape)).sum() for b in bits])
        digest = hashlib.sha256(np.array(sums).tobytes()).digest()[:8]
        mine = np.frombuffer(digest, np.int64).copy()
        everyone = self.job.all_gather(mine)
        if len(set(everyone.tolist())) > 1:
            usual = max(everyone.tolist(), key=everyone.tolist().count)
            odd = next(r for r, d in reversed(list(enumerate(everyone))) if d != usual)
            raise Common(
                f"step {self.step}: rank {odd} ({self.job.host(odd)}) holds other weights than the "
                "rest; the last checkpoint may be wrong too"
            )
        seconds = self.job.all_gather(np.array([self.busy / steps], np.float32))
        self.busy = 0.0
        slow, rest = int(seconds.argmax()), float(np.median(seconds))
        if self.job.size == 2:
            rest = float(seconds.min())
        if seconds[slow] < 1.25 * rest or seconds[slow] < rest + 0.05:
            return None
        where = f"rank {slow} ({self.job.host(slow)})"
        return f"{where} computes {seconds[slow]:.2f} s per step, the rest {rest:.2f} s"

    def flat(self) -> list[tuple[str, mx.array]]:
        return tree_flatten(self.model.trainable_parameters())

    def finite(self) -> bool:
        """Whether every trained weight is a number."""
        return mx.stack([mx.isfinite(w).all() for _, w in self.flat()]).all().item()

    def evaluate(self, examples: Examples, batch_size: int, batches: int) -> float:
        """Token-weighted mean loss over `batches` batches (-1: all) and all ranks, no dropout."""
        self.model.eval()
        rows = examples.order(batch_size, None)
        if 0 <= batches < len(rows):  # spread over the lengths, which the order is sorted by
            rows = [rows[i * len(rows) // batches] for i in range(batches)]
        sums = np.zeros(2)
        for batch in rows:
            batch = examples.batch(*self.part(batch, batch_size))
            loss, n = loss_sum(self.model, *batch), batch[2].sum()
            mx.eval(loss, n)
            sums += loss.item(), n.item()
        self.model.train()
        everyone = self.job.all_gather(sums.view(np.int64)).view(np.float64)  # exact, in order
        total, count = everyone.reshape(-1, 2).sum(axis=0)
        return float(total / count)

    def part(self, rows, batch_size: int) -> tuple:
        """This rank's rows of a batch, and how many there may be."""
        return rows[self.job.rank :: self.job.size], batch_size // self.job.size


# --- Checkpoints ----------------------------------------------------------------------------------


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` fill a folder that then appears whole under its name, replacing what was
    there.
    """
    temporary, old = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))
    if old.exists() and not folder.exists():  # killed between the two renamings below
        old.rename(folder)
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        for file in temporary.iterdir():
            quant.sync(file)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    quant.sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


class Checkpoints:
    """The files of a run below `root`, and what is needed to write adapters: base id and config."""

    def __init__(self, root: Path, base: str, config: dict, data: str | None = None):
        self.root, self.base, self.config, self.data = root, base, config, data

    def save_weights(self, folder: Path, model: nn.Module) -> None:
        dora.save_adapter(folder, model, self.base, self.config, self.data)

    def save(self, run: Run, settings: dict) -> Path:
        """Writes checkpoints/<step>, then makes its weights the run's newest; older state is
        thinned out.
        """
        folder = self.root / "checkpoints" / f"{run.step:07d}"

        def write(temporary: Path) -> None:
            self.save_weights(temporary, run.model)
            state = {f"optimizer.{k}": v for k, v in tree_flatten(run.optimizer.state)}
            mx.save_safetensors(str(temporary / "state.safetensors"), state)
            facts = {"step": run.step, "tokens": run.tokens, "best": run.best}
            facts["mlx"] = mx.__version__
            (temporary / "state.json").write_text(json.dumps({**facts, **settings}, indent=2))

        write_folder(folder, write)
        for name in ("adapters.safetensors", "adapter_config.json"):
            temporary = self.root / f".{name}.tmp"
            try:
                shutil.copyfile(folder / name, temporary)
                quant.sync(temporary)
                temporary.replace(self.root / name)
            finally:
                temporary.unlink(missing_ok=True)
        # every checkpoint keeps its weights; this one and the one before it can resume, later ones
        # are of a run that was left for an earlier step
        before = [p for p in self.all() if p.name < folder.name]
        for other in set(self.all()) - {folder, *before[-1:]}:
            for name in ("state.json", "state.safetensors"):
                (other / name).unlink(missing_ok=True)
        return folder

    def save_best(self, run: Run) -> None:
        write_folder(self.root / "best", lambda folder: self.save_weights(folder, run.model))

    def all(self) -> list[Path]:
        return sorted(p for p in (self.root / "checkpoints").glob("[0-9]*") if p.is_dir())

    def newest(self) -> Path:
        """The newest checkpoint that is whole; damaged ones are named and passed over."""
        for folder in reversed(self.all()):
            if (problem := damage(folder)) is None:
                return folder
            print(f"{folder} cannot be resumed: {problem}; trying the one before", file=sys.stderr)
        raise UserError(f"--resume: no whole checkpoint in {self.root / 'checkpoints'}")


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    from safetensors import SafetensorError, safe_open

    try:
        json.loads((folder / "state.json").read_text())
        for name in ("adapters.safetensors", "state.safetensors"):
            with safe_open(str(folder / name), "np"):
                pass
    except FileNotFoundError as error:
        return f"no {Path(error.filename).name}" if error.filename else str(error)
    except (ValueError, SafetensorError) as error:
        return f"damaged ({error})"
    return None


def restore(run: Run, folder: Path, settings: dict) -> None:
    """Puts a checkpoint's state into `run`, if it was made with the same data and settings."""
    facts = json.loads((folder / "state.json").read_text())
    for key, now in settings.items():
        if facts.get(key) != now:
            raise UserError(
                f"--resume: {folder} was made with {key} {facts.get(key)}, now it is {now}; "
                f"to start anew from its weights: --resume {folder / 'adapters.safetensors'}"
            )
    state = mx.load(str(folder / "state.safetensors"))
    run.optimizer.state = tree_unflatten([(k.partition(".")[2], v) for k, v in state.items()])
    run.step, run.tokens, run.best = facts["step"], facts["tokens"], facts["best"]


# --- Reporting ------------------------------------------------------------------------------------


class Log:
    """Progress on the terminal, log.jsonl with mlx-lm's keys, loss.svg; no files without root."""

    def __init__(self, root: Path | None, iters: int, step: int):
        from tqdm import tqdm

        self.iters, self.path, self.entries = iters, root and root / "log.jsonl", []
        hidden = not (root and (sys.stderr.isatty() or "COMM_TTY" in os.environ))
        self.bar = tqdm(total=iters, initial=step, disable=hidden, unit="step", dynamic_ncols=True)
        if root is None:
            return
        root.mkdir(parents=True, exist_ok=True)
        if step and self.path.exists():  # what was logged beyond the checkpoint happens again
            whole = [t for t in self.path.read_text().splitlines(True) if t.endswith("}\n")]
            self.entries = [e for e in map(json.loads, whole) if e["iteration"] <= step]
        temporary = self.path.with_name(".log.jsonl.tmp")
        temporary.write_text("".join(json.dumps(e) + "\n" for e in self.entries))
        temporary.replace(self.path)

    def write(self, entry: dict, text: str) -> None:
        self.entries.append(entry)
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        self.say(text)

    def progress(self, loss: float, speed: float) -> None:
        peak = mx.get_peak_memory() / 1e9
        self.bar.set_postfix_str(f"loss {loss:.3f}, {speed:.0f} tokens/s, peak {peak:.2f} GB")
        self.bar.update()

    def say(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def train(self, step, loss, rate, seconds, steps, tokens, total) -> None:
        peak, left = mx.get_peak_memory() / 1e9, (self.iters - step) * seconds / steps
        entry = {"iteration": step, "train_loss": loss, "learning_rate": rate}
        entry |= {"iterations_per_second": steps / seconds, "tokens_per_second": tokens / seconds}
        entry |= {"trained_tokens": total, "peak_memory": peak}
        entry["cache_memory"] = mx.get_cache_memory() / 1e9
        eta = datetime.timedelta(seconds=round(left))
        speed = f"{tokens / seconds:.0f} tokens/s, peak {peak:.2f} GB, {eta} left"
        self.write(entry, f"step {step}/{self.iters}: loss {loss:.4f}, rate {rate:.2e}, {speed}")

    def valid(self, step: int, loss: float, seconds: float) -> None:
        entry = {"iteration": step, "val_loss": loss, "val_time": seconds}
        self.write(entry, f"step {step}/{self.iters}: validation loss {loss:.4f}")

    def plot(self) -> None:
        """loss.svg beside the log, where matplotlib is installed."""
        if not (self.entries and self.path):
            return
        try:
            import matplotlib
        except ImportError:
            return
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4))
        for key, label in (("train_loss", "training"), ("val_loss", "validation")):
            points = [(e["iteration"], e[key]) for e in self.entries if key in e]
            if points:
                axes.plot(*zip(*points, strict=True), marker=".", label=label)
        axes.set(xlabel="step", ylabel="loss per token")
        axes.legend()
        figure.savefig(self.path.with_name("loss.svg"), bbox_inches="tight")
        plt.close(figure)


# --- The command ----------------------------------------------------------------------------------


def train(
    model: str = str(TINY),
    data: str = str(TINY / "data"),
    train_type: str = "dora",
    iters: int = 1000,
    batch_size: int = 4,
    learning_rate: float = 1e-5,
    num_layers: int = -1,
    rank: int = 8,
    scale: float = 20.0,
    dropout: float = 0.0,
    keys: list[str] | None = None,
    optimizer: str = "adam",
    optimizer_config: dict | None = None,
    lr_schedule: str = "constant",
    warmup: int = 0,
    min_lr: float = 0.0,
    grad_accumulation_steps: int = 1,
    grad_clip: float | None = None,
    max_seq_length: int = 2048,
    val_batches: int = 25,
    steps_per_report: int = 10,
    steps_per_eval: int = 200,
    save_every: int = 100,
    mask_prompt: bool | str = False,
    grad_checkpoint: bool | int | list[int] = False,
    packing: bool = False,
    seed: int = 0,
    adapter_path: str = "adapters",
    resume: bool | str = False,
    test: bool = False,
    sample_tokens: int = 0,
    dtype: str = "auto",
    config: str | None = None,
    fine_tune_type: str | None = None,
    nodes: str | None = None,
    backend: str = "auto",
    port: int = comm.PORT,
    overlap: bool = True,
    timeline: str | None = None,
    max_restarts: int = 0,
    plan: bool = False,
) -> None:
    """Fine-tunes a model on {train,valid,test}.jsonl and writes an adapter.

    Without flags it trains the tiny model that ships with the suite. Rows have "text", "prompt" and
    "completion", or "messages" (and "tools"). What a flag means where its name does not say:

    --train-type        dora, lora, or full (a dense model's own weights); also --fine-tune-type
    --iters             optimizer updates, of --grad-accumulation-steps x --batch-size examples each
    --num-layers        how many blocks to adapt, from the last; -1 for all
    --scale             s in W + s (AB)T, multiplied directly; PEFT's alpha / rank
    --keys              which linear layers: q_proj,v_proj or globs; all of them if not given
    --optimizer         adam, adamw, sgd, lion, muon, adafactor
    --optimizer-config  its own settings: '{"weight_decay": 0.1}'
    --lr-schedule       constant, linear or cosine: from the peak after --warmup to --min-lr
    --mask-prompt       train on the assistant's words only: true for all turns, or last
    --grad-checkpoint   keep only the layers' inputs and compute the rest again in backward: true
                        for all layers, a number for so many, or which: 0,1,2
    --packing           short examples share a row of up to --max-seq-length tokens; each sees
                        itself alone, so the loss is the same
    --resume            the newest checkpoint (auto: if there is one), a checkpoint folder, or an
                        adapter's weights alone
    --test              evaluate on test.jsonl at the end
    --sample-tokens     show a reply of so many tokens before and after
    --config            YAML or JSON with any of these flags; those on the command line win
    --nodes             a hostfile (MLX's format): one rank per host, over ssh; --batch-size and
                        everything else counts all of them together
    --backend           auto, tcp, jaccl, nccl, mpi or ring; see comm.py
    --overlap           sum gradients while backward goes on; false for comparison
    --timeline          a file for chrome://tracing: compute, wait and transfer per bucket
    --max-restarts      with --nodes: how often to go on from the newest checkpoint after a failure
    --plan              trains nothing: the memory that these flags will take, by part, from the
                        config and the tokenizer alone; exit status 1 if it is more than there is
    """
    settings = dict(locals())
    check_settings(settings)
    limit_memory()
    if plan:
        sys.exit(show_plan(settings))
    if nodes and "MLX_RANK" not in os.environ:
        sys.exit(launch(settings))
    try:
        with comm.connect(backend) as job:
            if job.rank:
                sys.stdout = open(os.devnull, "w")
            met = None
            try:
                asked = fit(settings, job)
            except Common as error:
                met = error
                job.barrier()  # all have met it
            except UserError as error:
                time.sleep(0.5 if job.rank else 0.0)  # of what all ranks meet, rank 0 speaks
                if job.error and job.error.reason == str(error):
                    sys.exit(2)
                raise
    except comm.CommError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(FAILED)
    if met:
        if job.rank:
            sys.exit(2)
        raise met
    if asked:
        sys.exit(130)


class Common(UserError):
    """Something that every rank meets at the same place: rank 0 says it, and all leave in peace."""


FAILED = 3  # exit status of a rank that ends because of another


def launch(s: dict) -> int:
    """Runs this file on all hosts, again after a failure if asked; the exit status."""
    backend, hosts = comm.read_hosts(s["nodes"])
    backend = backend if s["backend"] == "auto" else s["backend"]
    if wrong := comm.inspect_hosts(hosts, backend, s["port"], lambda _: None):
        raise UserError("; ".join(wrong))
    for left in reversed(range(s["max_restarts"] + 1)):
        argv = ["python", str(Path(__file__).resolve()), *words(s)]
        ended = comm.run(hosts, argv, backend, s["port"])
        status = comm.verdict(hosts, sorted(ended, key=lambda e: e.status == FAILED))
        if status in (0, 130) or not left or any(e.status == 2 and not e.made for e in ended):
            return status
        print(f"starting again from the newest checkpoint ({left} more)", file=sys.stderr)
        s["resume"] = "auto"


def words(s: dict) -> list[str]:
    """The flags of the ranks' command: what differs from the defaults."""
    out = []
    for name, p in inspect.signature(train).parameters.items():
        value = s[name]
        if name in ("nodes", "max_restarts", "config", "plan") or (
            value == p.default and name != "model"
        ):
            continue
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        text = json.dumps(value) if isinstance(value, dict) else text
        out.append(f"--{name.replace('_', '-')}={text}")
    return out


def fit(s: dict, job: comm.Communicator) -> bool:
    """`train` on one rank: everything is checked and read before a step is taken. Whether it was
    stopped.
    """
    first = job.rank == 0
    method, rows = make_optimizer(s), read_data(s["data"])
    if s["batch_size"] % job.size:
        raise Common(f"--batch-size: got {s['batch_size']}, which {job.size} ranks do not divide")
    root = source = None
    if first:
        root = prepare_folder(Path(s["adapter_path"]).expanduser())
        source = find_resume(root, s["resume"])
    model, tokenizer, config = quant.load(s["model"], s["dtype"])
    mx.random.seed(s["seed"])
    adapt(model, config, s, source)
    cut = s["mask_prompt"], s["max_seq_length"]
    packs = {"train": s["packing"]}
    splits = {k: Examples(r, tokenizer, *cut, packs.get(k, False)) for k, r in rows.items()}
    check_enough(splits["train"], s)
    exact = resumable(s, splits["train"])
    compare(job, s, exact, splits, model, config)
    with comm.Overlap(job, timeline=s["timeline"], **({} if s["overlap"] else OFF)) as reduce:
        run = Run(model, method, s["grad_clip"], reduce, s["seed"])
        if source and source.is_dir():
            restore(run, source, exact)
            print(f"resuming from {source} at step {run.step}")
        elif source:
            print(f"starting from the weights of {source}; step, optimizer and data begin anew")
        run.share()
        describe(run, s, splits)
        model.checkpoint = checkpointed_layers(s["grad_checkpoint"], len(model.layers))
        mx.reset_peak_memory()
        model.train()
        run.compile()
        files = Checkpoints(root, s["model"], config, s["data"])
        log = Log(root, s["iters"], run.step)
        prompt = sample_prompt(rows) if s["sample_tokens"] and first else None
        if prompt and run.step == 0:
            show_sample("before", model, tokenizer, prompt, s["sample_tokens"])
        stop = Stop(quiet=not first)
        try:
            asked = loop(run, s, splits, files, log, exact, stop)
        finally:
            log.bar.close()
            stop.restore()
    log.plot()
    if asked:
        print(f"stopped at step {run.step}, saved; --resume goes on from there")
        return True
    if prompt:
        show_sample("after", model, tokenizer, prompt, s["sample_tokens"])
    if s["test"] and len(splits["test"]):
        loss = run.evaluate(splits["test"], s["batch_size"], -1)
        print(f"test loss {loss:.4f}, perplexity {math.exp(min(loss, 700)):.3f}")
    if first:
        print(f"wrote {root / 'adapters.safetensors'}")
    return False


OFF = {"bucket_bytes": 0}  # of comm.Overlap


def compare(job, s: dict, exact: dict, splits: dict, model: nn.Module, config: dict) -> None:
    """Ends the run if a rank has other data, another model or other settings than rank 0."""
    names = "iters learning_rate lr_schedule warmup min_lr rank scale dropout keys num_layers"
    more = "mask_prompt val_batches steps_per_report steps_per_eval save_every grad_clip test"
    facts = exact | {name: s[name] for name in f"{names} {more}".split()}
    facts |= {f"{k} rows": len(e) for k, e in splits.items()}
    facts |= {"validation data": splits["valid"].digest(), "test data": splits["test"].digest()}
    facts |= {"model config": dora.fingerprint(config), "MLX": mx.__version__}
    some = [m for _, m in model.named_modules() if "weight" in m and m.weight.ndim == 2][::7]
    facts["model weights"] = np.round(dora.sketch(some), 5).tolist()
    everyone = gather(job, json.dumps(facts))
    for rank, theirs in enumerate(map(json.loads, everyone)):
        for key, value in json.loads(everyone[0]).items():
            if theirs[key] != value:
                who = f"rank {rank} ({job.host(rank)}) has {key} {theirs[key]}"
                raise Common(f"{who}, rank 0 has {value}; make them the same")


def gather(job: comm.Communicator, text: str) -> list[str]:
    """The texts of all ranks."""
    data = np.frombuffer(text.encode(), np.uint8)
    longest = int(job.all_gather(np.array([data.size], np.int64)).max())
    block = np.full((1, longest), ord(" "), np.uint8)
    block[0, : data.size] = data
    return [row.tobytes().decode() for row in job.all_gather(block)]


def loop(run: Run, s: dict, splits: dict, files: Checkpoints, log: Log, exact: dict, stop) -> None:
    """Steps until --iters or Ctrl-C, with validation, reports and checkpoints on the way."""
    batches = micro_batches(splits["train"], s, run.step)
    schedule = [s[k] for k in ("learning_rate", "iters", "lr_schedule", "warmup", "min_lr")]
    loss = tokens = steps = seconds = 0
    first = run.job.rank == 0
    saved = run.step if first and (files.root / "adapters.safetensors").exists() else None
    if run.step == 0:
        validate(run, s, splits, files, log)
    asked = False
    while run.step < s["iters"] and not asked:
        began = time.perf_counter()
        rows = [next(batches) for _ in range(s["grad_accumulation_steps"])]
        rate = learning_rate(run.step, *schedule)
        built = [splits["train"].batch(*run.part(r, s["batch_size"])) for r in rows]
        part, count, norm, asked = run.advance(built, rate, stop.asked)
        last = run.step == s["iters"] or asked
        finite = run.finite() if last or run.step % s["save_every"] == 0 else True
        if not (math.isfinite(part) and math.isfinite(norm) and finite):
            where = ", ".join(splits["train"].where[i] for r in rows for i in np.hstack(r))
            good = files.all() if first else []
            raise Common(
                f"step {run.step}: loss {part / count}, gradient norm {norm}"
                f"{'' if finite else ', weights not finite'}; stopped. Rows: {where}. "
                f"Last good checkpoint: {(good or ['none yet'])[-1]}. Try a lower "
                "--learning-rate, --grad-clip 1 or --dtype float32."
            )
        loss, tokens, steps = loss + part, tokens + count, steps + 1
        seconds += time.perf_counter() - began
        log.progress(part / count, tokens / seconds)
        if run.step % s["steps_per_report"] == 0 or last:
            log.train(run.step, loss / tokens, rate, seconds, steps, tokens, run.tokens)
            if late := run.check_ranks(steps):
                log.say(late)
            loss = tokens = steps = seconds = 0
        if run.step % s["steps_per_eval"] == 0 or run.step == s["iters"]:
            validate(run, s, splits, files, log)
        if first and run.step % s["save_every"] == 0:
            files.save(run, exact)
            saved = run.step
    if first and saved != run.step:
        files.save(run, exact)
    run.job.barrier()  # all fail if that did
    return asked


def validate(run: Run, s: dict, splits: dict, files: Checkpoints, log: Log) -> None:
    """Validation loss, and the best weights so far; nothing without validation rows."""
    if not len(splits["valid"]) or not s["val_batches"]:
        return
    began = time.perf_counter()
    loss = run.evaluate(splits["valid"], s["batch_size"], s["val_batches"])
    log.valid(run.step, loss, time.perf_counter() - began)
    if loss < run.best:
        run.best = loss
        if run.job.rank == 0:
            files.save_best(run)


def micro_batches(examples: Examples, s: dict, step: int) -> Iterator[list]:
    """Rows of batch after batch, beginning at the one that `step` begins with."""
    first, epoch = step * s["grad_accumulation_steps"], 0
    while True:
        order = examples.order(s["batch_size"], s["seed"], epoch)
        yield from order[first:]
        first, epoch = max(first - len(order), 0), epoch + 1


class Stop:
    """Ctrl-C or SIGTERM: the first asks the loop to end after this step, the second ends at
    once.
    """

    def __init__(self, quiet: bool = False):
        self.asked, self.quiet = False, quiet
        self.before = {n: signal.signal(n, self) for n in (signal.SIGINT, signal.SIGTERM)}

    def restore(self) -> None:
        for name, handler in self.before.items():
            signal.signal(name, handler)

    def __call__(self, number, _):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if not self.quiet:
            print("\nstopping after this step; once more to stop at once", file=sys.stderr)


def check_settings(s: dict) -> None:
    """Values that cannot be right, before anything is read."""
    s["train_type"] = s["fine_tune_type"] or s["train_type"]
    choices = {
        "train_type": ("dora", "lora", "full"),
        "optimizer": tuple(OPTIMIZERS),
        "lr_schedule": ("constant", "linear", "cosine"),
        "mask_prompt": (True, False, "last"),
    }
    for name, wanted in choices.items():
        if s[name] not in wanted:
            raise UserError(f"--{name.replace('_', '-')}: got {s[name]!r}, wanted one of {wanted}")
    one = "batch_size rank grad_accumulation_steps steps_per_report steps_per_eval save_every"
    none = "iters learning_rate warmup min_lr grad_clip sample_tokens seed"
    at_least = dict.fromkeys(one.split(), 1) | dict.fromkeys(none.split(), 0)
    at_least |= {"max_seq_length": 2, "val_batches": -1}
    for name, least in at_least.items():
        value = least if s[name] is None else s[name]
        if not least <= value < math.inf:
            raise UserError(f"--{name.replace('_', '-')}: got {value}, wanted at least {least}")
    if not math.isfinite(s["scale"]):
        raise UserError(f"--scale: got {s['scale']}, wanted a finite number")
    if not 0 <= s["dropout"] < 1:
        raise UserError(f"--dropout: got {s['dropout']}, wanted at least 0 and below 1")


def check_enough(examples: Examples, s: dict) -> None:
    """Whether there are rows for one batch."""
    if len(examples) < s["batch_size"]:
        few = f"{len(examples)} usable rows, fewer than --batch-size {s['batch_size']}"
        raise UserError(f"{s['data']}: {few}")


def make_optimizer(s: dict) -> optim.Optimizer:
    given = s["optimizer_config"] or {}
    try:
        return OPTIMIZERS[s["optimizer"]](s["learning_rate"], **given)
    except (TypeError, ValueError) as error:
        raise UserError(f"--optimizer-config for {s['optimizer']}: got {given}: {error}") from None


def prepare_folder(root: Path) -> Path:
    """The run's folder, which can be written."""
    there = next(p for p in (root, *root.absolute().parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=there):  # leaves nothing behind if the run fails to start
            pass
    except OSError as error:
        raise UserError(f"--adapter-path {root}: cannot be written: {error.strerror}") from None
    return root


def find_resume(root: Path, resume: bool | str) -> Path | None:
    """A whole checkpoint's folder, an adapter file to take weights from, or None; a run that `root`
    holds may only be gone on with.
    """
    files, source = Checkpoints(root, "", {}), None
    if resume is True or (resume == "auto" and files.all()):
        return files.newest()
    if resume and resume != "auto":
        source = Path(resume).expanduser()
        if (source / "checkpoints").is_dir():
            source = Checkpoints(source, "", {}).newest()
        elif (source / "state.json").exists():
            if problem := damage(source):
                raise UserError(f"--resume {source}: {problem}")
        else:
            source = dora.adapter_file(source)
        if not source.exists():
            raise UserError(f"--resume {resume}: no such checkpoint or adapter file")
    held = files.all() or (root / "adapters.safetensors").exists()
    goes_on = source and source.is_dir() and source.resolve() in [p.resolve() for p in files.all()]
    if held and not goes_on:
        raise UserError(
            f"{root} holds a run; --resume goes on with it, --adapter-path NAME starts another"
        )
    return source


def adapt(model: nn.Module, config: dict, s: dict, source: Path | None) -> None:
    """Makes the model trainable as --train-type says, from fresh adapters or those of `source`."""
    if s["train_type"] == "full":
        unfreeze(model, config, s)
        wanted = [name for name, _ in tree_flatten(model.trainable_parameters())]
    elif source is None:
        given = (s["rank"], s["scale"], s["dropout"], s["keys"], s["num_layers"], s["train_type"])
        wanted = dora.adapt(model, *given)
    else:
        wanted, _ = dora.choose(model, s["keys"], s["num_layers"])
    if source:
        take_weights(model, config, s, source, wanted)
    if layers := dora.adapted(model):
        kinds = sorted({n.split(".")[-1] for n in layers})
        print(f"adapting {len(layers)} layers: {', '.join(kinds)}")


def take_weights(model, config: dict, s: dict, source: Path, wanted: list[str]) -> None:
    """Loads `source`, which must be what the flags describe."""
    weights, has = dora.read_adapter(str(source))
    for key, name in (("kind", "train_type"), ("rank", "rank"), ("scale", "scale")):
        if has[key] not in (None, s[name]):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{source} has {key} {has[key]}, not {s[name]}; give {flag} {has[key]}")
    dora.load_adapter(model, str(source), config, here=s["model"])
    layers = dora.adapted(model)
    if odd := sorted(set(layers or weights) ^ set(wanted)):
        raise UserError(
            f"{source} changes {len(layers or weights)} layers, --keys and --num-layers choose "
            f"{len(wanted)}; not in both: {', '.join(odd[:3])}"
        )
    for layer in layers.values():
        layer.rate, layer.dropout = s["dropout"], dora.Dropout(s["dropout"])


def unfreeze(model: nn.Module, config: dict, s: dict) -> None:
    """Makes the weights themselves trainable, in float32: a half-precision weight is coarser than
    an update at the usual rates, which would round away.
    """
    if "quantization" in config:
        raise UserError(
            f"{s['model']} is packed; full fine-tuning needs dense weights: quant.py dequantize"
        )
    if not -1 <= s["num_layers"] <= len(model.layers) or s["num_layers"] == 0:
        raise UserError(f"--num-layers: got {s['num_layers']}, the model has {len(model.layers)}")
    for part in [model] if s["num_layers"] == -1 else model.layers[-s["num_layers"] :]:
        part.unfreeze()
        quant.cast(part, mx.float32)


def checkpointed_layers(choice: bool | int | list[int], layers: int) -> frozenset:
    """What --grad-checkpoint chooses: all or none, so many, or those it lists."""
    count = layers * choice if isinstance(choice, bool) else choice
    chosen = choice if isinstance(choice, list) else range(count) if count >= 0 else [choice]
    if odd := sorted(set(chosen) - set(range(layers))):
        wanted = f"true, a number up to {layers}, or layers from 0 to {layers - 1}"
        raise UserError(f"--grad-checkpoint: got {choice}, wanted {wanted}; no layer {odd[0]}")
    return frozenset(chosen)


def resumable(s: dict, examples: Examples) -> dict:
    """The settings that a resumed run must share with the one it goes on from."""
    names = "train_type batch_size grad_accumulation_steps seed optimizer max_seq_length packing"
    return {n: s[n] for n in names.split()} | {"rows": len(examples), "data": examples.digest()}


def describe(run: Run, s: dict, splits: dict) -> None:
    """What is about to be trained, in three lines."""
    trainable = sum(a.size for _, a in tree_flatten(run.model.trainable_parameters()))
    total, _ = quant.size_of(run.model)
    share = f"{trainable / 1e6:.3f} M of {total / 1e6:.1f} M weights ({trainable / total:.2%})"
    print("training {0}: {train_type}, rank {rank}, scale {scale}, seed {seed}".format(share, **s))
    if not trainable:
        raise UserError("nothing to train")
    packed = ""
    if splits["train"].packing:
        packed = f" in {sum(map(len, splits['train'].order(1, s['seed'])))} packed"
    shown = {k: f"{len(e)} {k}" for k, e in splits.items() if len(e)}
    rows = ", ".join((shown | {"train": shown["train"] + packed}).values())
    targets = sum(int(t[1:].sum()) for t in splits["train"].trained)
    print(f"rows: {rows}; {targets} tokens to learn per epoch; mask-prompt {s['mask_prompt']}")
    how = f"{s['iters']} steps of {s['batch_size']} x {s['grad_accumulation_steps']} rows"
    print("{0}, {optimizer}, {lr_schedule} rate {learning_rate}, warmup {warmup}".format(how, **s))


# --- The plan -------------------------------------------------------------------------------------


def show_plan(s: dict) -> int:
    """Prints what the run will take, and what would make it fit where it does not; 1 then."""
    ranks, room = 1, {"here": comm.memory()}
    if s["nodes"]:
        _, hosts = comm.read_hosts(s["nodes"])
        ranks = len(hosts)
        found = dict(zip((h.ssh for h in hosts), comm.ask_hosts(hosts, s["port"]), strict=True))
        if lost := [f"{host}: {why}" for host, why in found.items() if isinstance(why, str)]:
            raise UserError("; ".join(lost))
        room = {host: answer["memory"] for host, answer in found.items()}
    if s["batch_size"] % ranks:
        raise UserError(f"--batch-size: got {s['batch_size']}, which {ranks} ranks do not divide")
    rows = read_data(s["data"])["train"]
    model, tokenizer, config = quant.outline(s["model"], s["dtype"])
    if s["train_type"] == "full":
        unfreeze(model, config, s)
    examples = Examples(rows, tokenizer, s["mask_prompt"], s["max_seq_length"], s["packing"])
    check_enough(examples, s)
    order = examples.order(1, s["seed"])
    length = max(examples.fit(sum(len(examples.ids[r]) for r in np.hstack(b))) for b in order)
    trained, _, _ = standing(model, s)
    count, tokens = sum(a.size for a in trained.values()), sum(map(len, examples.ids))
    size = sum(a.nbytes for a in trained.values())
    steps = max(len(order) / s["batch_size"] / s["grad_accumulation_steps"], 1)
    size = f"{count / 1e6:.3f} M weights to train ({size / 1e6:.1f} MB)"
    print(f"{s['model']}: {s['train_type']}, {size}")
    each = f"{steps:.0f} steps of {tokens / steps:.0f}"
    print(f"{len(examples)} rows, {tokens} tokens per epoch: {each}")
    least, share = min(room.values()), s["batch_size"] // ranks
    parts = memory(model, s, share, length, ranks)
    need = sum(parts.values())
    where = f" on each of {ranks} ranks" if ranks > 1 else ""
    print(f"memory of a step with the longest rows, {share} x {length} tokens{where}:")
    for name, value in (parts | {"together": need}).items():
        if value:
            print(f"  {name:14}{value / 1e9:9.3f} GB")
    for host, there in room.items():
        verdict = "fits" if need <= there else "does not fit"
        print(f"{verdict} {host}, with {there / 1e9:.1f} GB")
    if need <= least:
        return 0
    print(remedy(model, s, share, length, ranks, least))
    return 1


def remedy(model: quant.Model, s: dict, share: int, length: int, ranks: int, room: int) -> str:
    """The flags, the mildest first, that make a step fit in `room` bytes."""
    tries, flags, now, rows = [], "", s, share
    if s["grad_checkpoint"] is not True:
        now, flags = s | {"grad_checkpoint": True}, "--grad-checkpoint"
        tries.append((flags, now, rows, length))
    while rows > 1:
        rows = max(d for d in range(1, rows) if rows % d == 0)
        steps = s["grad_accumulation_steps"] * share // rows
        both = f"--batch-size {rows * ranks} --grad-accumulation-steps {steps}"
        tries.append((f"{flags} {both}".strip(), now, rows, length))
    flags = tries[-1][0] if tries else ""
    while length > 256:
        length = length // 2 // 32 * 32
        tries.append((f"{flags} --max-seq-length {length}".strip(), now, rows, length))
    least = math.inf
    for flags, settings, rows, length in tries:
        least = sum(memory(model, settings, rows, length, ranks).values())
        if least <= room:
            return f"{flags} would make it fit: {least / 1e9:.2f} GB"
    other = "--train-type dora" if s["train_type"] == "full" else "a model of fewer bits or weights"
    return f"no batch is small enough ({least / 1e9:.2f} GB at the least); take {other}"


def memory(model: quant.Model, s: dict, rows: int, length: int, ranks: int = 1) -> dict[str, float]:
    """Bytes that a step of `rows` x `length` tokens on one rank takes at its peak, by part.

    `model` may be an outline without weights and is not adapted yet. What backward keeps is counted
    (`kept`); what MLX has computed and not yet freed is in no graph, and its size is from
    measurements, as is the share of a gradient's own arrays (tests/bench_memory.py).
    """
    spec, gpu, tokens = model.spec, quant.on_gpu(), rows * length
    D, V, blocks = spec.hidden_size, spec.vocab_size, dora.block_prefixes(model)
    trained, paths, parts = standing(model, s)
    item = model.model.norm.weight.dtype.size
    doras = set(paths) if s["train_type"] == "dora" else set()
    keeps = [kept(model, i, b, doras, item) * tokens for i, b in enumerate(blocks)]
    first = 0  # no gradient goes further down
    if not any("embed_tokens" in p for p in trained):
        first = next(i for i, b in enumerate(blocks) if any(p.startswith(f"{b}.") for p in trained))
    again = checkpointed_layers(s["grad_checkpoint"], len(blocks))
    between, largest = D * tokens * item, max([0, *(keeps[i] for i in again if i >= first)])
    live = sum(between if i in again else keeps[i] for i in range(first, len(blocks)))
    # the loss: one dense head, some arrays as large as the logits of a chunk
    head = "model.embed_tokens" if spec.tie_word_embeddings else "lm_head"
    trains_head = any(p.startswith(f"{head}.") for p in trained)
    chunk = min(max(LOGITS // V, 1), tokens) * V
    dense = dict(model.named_modules())[head].weight.dtype == mx.uint32
    logits = V * D * (8 if trains_head else item * dense)
    logits += chunk * (item + 16 if gpu else 4 * min(7.5, 2 + 3 * tokens * V / chunk))
    # backward through one block: gradients of its widest arrays
    wide = (spec.intermediate_size or spec.shared_expert_intermediate_size) * tokens * item
    if any(spec.sparse):
        wide += spec.moe_intermediate_size * spec.num_experts_per_tok * tokens * item
    grads = sum(4 * a.size for a in trained.values())
    widest = max(4 * a.size for a in trained.values())

    def in_flight(array: float) -> float:  # ten command buffers, each of one array at least
        return 10 * max((200 if mx.cuda.is_available() else 50) << 20, array) if gpu else 0.0

    phases = [
        {
            "activations": live + 4 * between,
            "logits": logits,
            "in flight": in_flight(4 * V * D * trains_head),
        },
        {
            "activations": live + largest + (3 * wide + 2 * between if gpu else 0),
            "in flight": in_flight(wide) if gpu else (24 if again else 12) * wide,
        },
        {
            "gradients": grads,
            "communication": grads * (ranks > 1),
            "in flight": in_flight(widest) if gpu else 0.6 * grads,
        },
    ]
    names = ("activations", "logits", "gradients", "communication", "in flight")
    peak = max(phases, key=lambda phase: sum(phase.values()))
    return parts | {name: peak.get(name, 0.0) for name in names}


def standing(model: quant.Model, s: dict) -> tuple[dict, list[str], dict]:
    """{name: trained array}, the adapted layers' paths, and the bytes that are there throughout."""
    layers, paths = dict(model.named_modules()), []
    if s["train_type"] == "full":
        trained = dict(tree_flatten(model.trainable_parameters()))
    else:
        paths, _ = dora.choose(model, s["keys"], s["num_layers"])
        if wrong := [why for p in paths if (why := dora.refuse(p, layers[p]))]:
            raise UserError("; ".join(wrong[:4]))
        leaves = dora.LEAVES[: 3 if s["train_type"] == "dora" else 2]
        shapes = {p: dora.adapter_for(layers[p]).shapes(layers[p], s["rank"]) for p in paths}
        trained = {f"{p}.{n}": mx.zeros(found[n]) for p, found in shapes.items() for n in leaves}
    if not trained:
        raise UserError("nothing to train")
    optimizer = make_optimizer(s)
    optimizer.init(tree_unflatten(list(trained.items())))
    adapters = sum(a.nbytes for a in trained.values()) if paths else 0
    norms = sum(a.nbytes for n, a in trained.items() if n.endswith(".m"))  # of the base's rows
    parts = {"weights": quant.size_of(model)[1], "adapters": adapters + norms}
    parts["optimizer"] = sum(a.nbytes for _, a in tree_flatten(optimizer.state))
    return trained, paths, parts


def kept(model: quant.Model, i: int, path: str, doras: set, item: int) -> float:
    """Bytes per token that backward through block i keeps of its forward pass: what gradients
    multiply, each array once. DoRA keeps every adapted layer's output, for the magnitudes.
    """
    spec, block = model.spec, model.layers[i]
    D = spec.hidden_size

    def out(name: str, width: int) -> int:
        return width * (f"{path}.{name}" in doras)

    n = (2 + len(block.before)) * D
    if block.delta:
        heads, dk, dv = spec.linear_num_value_heads, *block.linear_attn.dims
        keys, values = block.linear_attn.widths
        n += (
            5 * (2 * keys + values) + 3 * values + out("linear_attn.in_proj_qkv", 2 * keys + values)
        )
        states = dk * dv / 64 + 6 * (64 + dk) + 8 * dv  # in chunks of 64, in float32
        n += heads * states * 4 / item + max(len(block.after) and D, out("linear_attn.out_proj", D))
    else:
        wide, narrow = block.self_attn.widths
        q, k = (out(f"self_attn.{p}_proj", w) for p, w in (("q", wide), ("k", narrow)))
        if "q_norm" in block.self_attn:
            q, k = wide, narrow
        fused = item == 2 and mx.cuda.is_available() and not block.window  # cuDNN's layout
        n += q + k + 2 * narrow + (2 if fused else 3) * wide
        n += out("self_attn.qkv_proj", wide + narrow) + 3 * wide * spec.attention_gate
        n += max(len(block.after) and D, out("self_attn.o_proj", D))
    inner, part = spec.intermediate_size, block.experts_in
    if spec.sparse[i]:
        wide, k = spec.moe_intermediate_size, spec.num_experts_per_tok
        n += k * (2 * D + 3 * wide)
        ends = (("gate_proj", wide), ("up_proj", wide), ("down_proj", D))
        n += sum(out(f"{part}.switch_mlp.{p}", w) for p, w in ends) * k * (1 + 4 / item)
        inner, part = spec.shared_expert_intermediate_size, f"{part}.shared_expert"
    n += 3 * inner  # gate and up, in one array or two
    n += max(len(block.after) and D, out(f"{part}.down_proj", D)) if inner else 0
    return n * item


def limit_memory() -> None:
    """Bounds the allocator's cache, which would else grow with every new shape; wires memory on
    Metal. To be called before anything is computed: CUDA's limit is read once.

    What is computed but not yet freed is MLX's eleven command buffers at most. On Metal they end at
    50 MB, on an H100 and later at 1000: here at 200, which took no time (tests/RESULTS.md).
    """
    mx.set_cache_limit(2 << 30)
    if mx.cuda.is_available():
        os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "200")
    if mx.metal.is_available():
        mx.set_wired_limit(mx.device_info()["max_recommended_working_set_size"])


def sample_prompt(rows: dict) -> dict | None:
    """The first row with a prompt, of the validation set if there is one."""
    for split in ("valid", "train"):
        for _, row in rows[split]:
            if "prompt" in row or row.get("messages", [{}])[-1].get("role") == "assistant":
                return row
    return None


def show_sample(when: str, model, tokenizer, row: dict, count: int) -> None:
    """Prints the model's greedy reply to a row's prompt."""
    if "prompt" in row:
        ids, shown = quant.prompt_ids(tokenizer, row["prompt"]), row["prompt"]
    else:
        turns = row["messages"][:-1]
        ids = tokenizer.encode(tokenizer.chat(turns, row.get("tools"), reply=True), special=False)
        shown = turns[-1].get("content", "") if turns else ""
    training = model.training
    model.eval()
    reply = tokenizer.decode(list(quant.stream(model, ids, tokenizer.eos_ids, count)))
    model.train(training)
    print(f"{when}: {shown!r} -> {reply.strip()!r}")


def with_config(function: Callable, flags: dict) -> dict:
    """Adds what --config's file says, or the tiny model's own file where nothing names a model."""
    path = flags.get("config")
    if path is None and "model" not in flags:
        path = str(TINY / "train.yaml")
    if path is None:
        return flags
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise UserError(f"--config {path}: no such file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(
            f"--config {path}: not YAML or JSON: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(found, dict):
        raise UserError(f"--config {path}: wanted keys and values, got a {type(found).__name__}")
    found = {str(k).replace("-", "_"): v for k, v in found.items()}
    found = from_mlx_lm(found)
    names = list(inspect.signature(function).parameters)
    words = []
    for key, value in found.items():
        if key not in names or key == "config":
            near = difflib.get_close_matches(key, names, 1, 0.5)
            raise UserError(
                f"--config {path}: unknown key {key!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        if value is not None:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            text = ",".join(map(str, value)) if isinstance(value, list) else text
            words.append(f"--{key}={text}")
    return {**quant.parse(function, words), **flags}


def from_mlx_lm(found: dict) -> dict:
    """mlx-lm's nested spellings (lora_parameters, lr_schedule, optimizer_config) as flags."""
    # a run always trains, tests on all of test.jsonl and bounds the cache
    ignored = ("train", "test_batches", "clear_cache_threshold")
    found = {k: v for k, v in found.items() if k not in ignored}
    for key in ("lora_parameters", "optimizer_config"):
        if not isinstance(found.get(key), dict | None):
            raise UserError(f"{key}: got {found[key]!r}, wanted keys and values")
    nested = found.pop("lora_parameters", None) or {}
    found |= {str(k): v for k, v in nested.items()}
    if file := found.pop("resume_adapter_file", None):
        found["resume"] = file
    if isinstance(schedule := found.get("lr_schedule"), dict):
        given = dict(schedule)
        name = {"cosine_decay": "cosine", "linear_schedule": "linear"}.get(given.pop("name", None))
        try:  # cosine_decay has peak, steps, end; linear_schedule has peak, end, steps
            peak, *rest = map(float, given.pop("arguments", []))
            steps, end = rest[::-1] if name == "linear" else [*rest, 0.0][:2]
            warmup = int(given.pop("warmup", 0))
            given = {k: v for k, v in given.items() if (k, v) != ("warmup_init", 0)}
        except (TypeError, ValueError):
            name = None
        if name is None or given:
            raise UserError(
                f"lr_schedule: got {schedule}, wanted cosine_decay or linear_schedule with their "
                "arguments, and a warmup, which begins at 0"
            )
        found |= {"lr_schedule": name, "learning_rate": peak, "warmup": warmup, "min_lr": end}
        if str(found.get("iters")) != f"{steps + warmup:.0f}":
            print(f"lr_schedule: reaches {end} at the last of --iters, not after {steps:.0f} steps")
    if isinstance(nested := found.get("optimizer_config"), dict) and set(nested) <= set(OPTIMIZERS):
        found["optimizer_config"] = nested.get(found.get("optimizer", "adam"))
    return found


if __name__ == "__main__":
    quant.cli(train, with_config, (dora.UserError, comm.UserError))
