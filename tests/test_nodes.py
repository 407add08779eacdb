"""Training by several ranks: the same numbers as one, and what is left when something goes wrong.

Ranks are processes on this machine. Each has a folder of its own as its working directory, so what
a rank writes can be told from what another writes. A rank's `python` may be a script that runs
train.py with a few lines of Python before (a hook), which record what it does or break it.
"""

import contextlib
import getpass
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import CHATML, PACKINGS, ROOT, tiny_config, tiny_tokenizer, write_model, write_rows

import train

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="needs Linux: /proc and 127.0.0.2"
)
FAILED = 3  # exit status of a rank that ends because of another
QUICK = {"COMM_CONNECT": "30", "COMM_SILENCE": "3", "COMM_DEADLINE": "20"}
HOOKED = """
import hashlib, json, os, signal, sys, time
sys.path.insert(0, {root!r})
import mlx.core as mx, numpy as np
import comm, dora, quant, train
rank, here = int(os.environ.get("MLX_RANK", "0")), {folder!r}
{hook}
sys.argv[0] = "train.py"
quant.cli(train.train, train.with_config, (dora.UserError, comm.UserError))
"""
RECORD = """
name = "record"
def note(**facts):
    with open(f"{here}/{name}{rank}.jsonl", "a") as file:
        file.write(json.dumps(facts) + "\\n")
def bits(run):
    return hashlib.sha256(b"".join(np.array(w).tobytes() for _, w in run.flat())).hexdigest()
def wrap(owner, method, after):
    real = getattr(owner, method)
    def wrapper(self, *words, **more):
        out = real(self, *words, **more)
        after(self, out, *words, **more)
        return out
    setattr(owner, method, wrapper)
def advanced(run, out, batches, *rest):
    mine = sum(int(w.sum().item()) for *_, w in batches)
    note(step=run.step, bits=bits(run), mine=mine, loss=out[0], tokens=out[1])
def parted(run, out, rows, size):
    note(rows=rows.tolist(), mine=out[0].tolist(), training=run.model.training, at=run.step)
wrap(train.Run, "compile", lambda run, out: note(step=run.step, bits=bits(run)))
wrap(train.Run, "advance", advanced)
wrap(train.Run, "part", parted)
wrap(train.Run, "evaluate", lambda run, out, *rest: note(loss=out, evaluated=run.step))
wrap(comm.Overlap, "__call__", lambda self, out, grads, *sums: note(own=sums[0].item()))
"""
# Other ranks would begin with other adapters than rank 0, if it were not for what they are sent.
OTHER_START = """
if rank:
    start = train.adapt
    def adapt(*words):
        mx.random.seed(1000 + rank)
        start(*words)
    train.adapt = adapt
"""
# Tiny models fill one bucket of the usual size; these make a dozen of them.
BUCKETS = "comm.Overlap.__init__.__defaults__ = (20000, 5000, None)\n"
SERIES = """
with open(f"{here}/plan.json") as file:
    plan = json.load(file)
for k, (name, flags) in enumerate(plan["runs"].items()):
    ports = [[[f"127.0.0.1:{plan['port'] + k * plan['ranks'] + r}"]] for r in range(plan["ranks"])]
    with open(f"{here}/addresses {k} {rank}", "w") as file:
        json.dump([host for (host,) in ports], file)
    os.environ["COMM_HOSTFILE"] = file.name
    train.train(**flags, adapter_path=name)
sys.exit()
"""
AT_STEP = """
begin_step = train.Run.random_seed  # called first by every update
def at_step(run):
    step = run.step
    {what}
    return begin_step(run)
train.Run.random_seed = at_step
"""
GATE = AT_STEP.format(
    what="""
    if step == 10:
        open(f"{here}/waits{rank}", "w").close()
        while not os.path.exists(f"{here}/go"): time.sleep(0.02)"""
)
SLOWER = AT_STEP.format(what="time.sleep(0.03)")
IMPATIENT = """
import functools
comm.run = functools.partial(comm.run, grace=1.0)
"""


# --- Helpers --------------------------------------------------------------------------------------


def free_port(count: int = 12) -> int:
    """The first of so many ports that nobody listens on, below those the system gives out."""
    while True:
        first = random.randrange(10000, 32768 - count)
        if all(map(port_is_free, range(first, first + count))):
            return first


def port_is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError:
            return False
    return True


def until(condition, seconds: float = 60.0):
    """Waits until the condition holds; its value, or its last one when the time is up."""
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return value


def marked(*marks: str) -> dict[int, str]:
    """Environments of all living processes that have each of these in theirs."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if all(mark.encode() in environment for mark in marks):
            found[int(folder.name)] = environment.replace(b"\0", b" ").decode(errors="replace")
    return found


def shell(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def hooked(folder: Path, name: str, hook: str) -> str:
    """A python for a hostfile that runs `hook` before train.py."""
    file = folder / f"{name}.py"
    file.write_text(HOOKED.format(root=str(ROOT), folder=str(folder), hook=hook))
    mine = f"case \"$1\" in *train.py) shift; exec '{sys.executable}' '{file}' \"$@\";; esac"
    return shell(folder / name, f"{mine}\nexec '{sys.executable}' \"$@\"")


def words_of(flags: dict) -> list[str]:
    return [f"--{k.replace('_', '-')}={v}" for k, v in flags.items()]


class Job:
    """`python train.py --nodes` under way; all its processes have a mark in their environment."""

    def __init__(self, folder: Path, command: list, env: dict, ports: range = range(0)):
        self.folder, self.mark, self.ports = folder, uuid.uuid4().hex, ports
        (folder / "site").mkdir(exist_ok=True)
        (folder / "site" / "matplotlib.py").write_text("raise ImportError('takes a second')\n")
        drop = ("PYTHONUNBUFFERED", "MLX_RANK", "MLX_HOSTFILE")
        kept = {k: v for k, v in os.environ.items() if k not in drop}
        own = {"COMM_TEST_MARK": self.mark, "PYTHONPATH": str(folder / "site")}
        own["OPENBLAS_NUM_THREADS"] = "1"  # ranks share the cores
        self.files = [open(folder / f"{s} {self.mark}", "wb") for s in ("stdout", "stderr")]
        self.process = subprocess.Popen(
            [str(word) for word in command],
            cwd=folder,
            env=kept | own | env,
            stdin=subprocess.DEVNULL,
            stdout=self.files[0],
            stderr=self.files[1],
            start_new_session=True,
        )

    @property
    def stdout(self) -> str:
        return Path(self.files[0].name).read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return Path(self.files[1].name).read_text(errors="replace")

    def status(self, seconds: float = 120.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still runs after {seconds} s: {self.stdout[-900:]} {self.stderr[-2000:]}")

    def pid(self, rank: int, seconds: float = 60.0) -> int | None:
        """The process of a rank, once it runs; not what the launcher asks hosts before that."""

        def found():
            running = marked(self.mark, f"MLX_RANK={rank}").items()
            return [pid for pid, env in running if "COMM_PROBE=" not in env]

        until(lambda: found() or self.process.poll() is not None, seconds)
        return next(iter(found()), None)

    def good(self) -> "Job":
        """Ended well, and other ranks than the first said nothing."""
        assert self.status() == 0, self.stderr[-3000:]
        assert "[rank" not in self.stdout and not self.stderr, self.stderr
        self.nothing_left()
        return self

    def failed(self, *said: str, status: int | None = None) -> "Job":
        """Ended with an error that all of `said` is in one line of; nothing is left."""
        got = self.status()
        assert got not in (0, 130) and status in (None, got), (got, self.stderr[-3000:])
        lines = [line for line in self.stderr.splitlines() if all(s in line for s in said)]
        assert lines, f"{said} not in one line of {self.stderr[-3000:]}"
        self.nothing_left()
        return self

    def nothing_left(self) -> None:
        until(lambda: not marked(self.mark), 20.0)
        assert not marked(self.mark)
        assert all(map(port_is_free, self.ports))

    def lines(self, *words: str) -> list[str]:
        return [t for t in self.stderr.splitlines() if all(w in t for w in words)]

    def clear(self) -> None:
        while pids := {*marked(self.mark), *([] if self.process.poll() is not None else [0])}:
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid or self.process.pid, signal.SIGKILL)
            time.sleep(0.02)
        for file in self.files:
            file.close()


@contextlib.contextmanager
def jobs_in(folder: Path, common: dict):
    """start(flags...): a Job of so many ranks in `folder`; each rank has host<rank> there as its
    working directory.

    hooks: {rank: text, "launcher": text}; hosts: {rank: changes to its entry of the hostfile};
    command: what is run with the flags, instead of train.py with a hostfile.
    """
    started = []

    def start(ranks=2, hooks=None, hosts=None, env=QUICK, where=folder, command=None, **flags):
        if command:
            words = words_of(common | {"adapter_path": "out"} | flags)
            started.append(Job(where, [*command, *words], env))
            return started[-1]
        hooks, port, entries = hooks or {}, free_port(), []
        for r in range(ranks):
            (where / f"host{r}").mkdir(parents=True, exist_ok=True)
            entry = {"ssh": "127.0.0.1", "ips": [f"127.0.0.{r + 1}"], "cwd": f"{where}/host{r}"}
            if r in hooks:
                entry["python"] = hooked(where, f"python{r}", hooks[r])
            entries.append(entry | (hosts or {}).get(r, {}))
        (where / "hosts.json").write_text(json.dumps(entries))
        python = sys.executable
        if "launcher" in hooks:
            python = hooked(where, "launcher", hooks["launcher"])
        flags = common | {"adapter_path": "out", "nodes": where / "hosts.json"} | flags
        words = words_of(flags | {"port": port})
        command = [python, ROOT / "train.py", *words]
        started.append(Job(where, command, env, range(port, port + ranks)))
        return started[-1]

    start.jobs = started
    try:
        yield start
    finally:
        for job in started:
            job.clear()


def content(folder: Path) -> bytes:
    return (folder / "adapters.safetensors").read_bytes()


def log(folder: Path, key: str) -> dict[int, float]:
    """{iteration: value} of a key of log.jsonl."""
    whole = [t for t in (folder / "log.jsonl").read_text().splitlines(True) if t.endswith("}\n")]
    return {e["iteration"]: e[key] for e in map(json.loads, whole) if key in e}


def reached(folder: Path) -> int:
    """The last step that a run has reported."""
    return max(log(folder, "train_loss"), default=0) if (folder / "log.jsonl").exists() else 0


def records(folder: Path, name: str, rank: int) -> list[dict]:
    """What RECORD noted of a run on a rank."""
    return list(map(json.loads, (folder / f"{name}{rank}.jsonl").read_text().splitlines()))


def moved(folder: Path, base: dict[str, mx.array]) -> np.ndarray:
    """How far the trained weights are from `base`, as one vector."""
    got = mx.load(str(folder / "adapters.safetensors"))
    assert got.keys() == base.keys()
    return np.concatenate([np.array(got[k] - base[k]).ravel() for k in sorted(base)])


def apart(got: Path, want: Path, start: Path) -> float:
    """Difference of two trained adapters, relative to how far the second has come from `start`."""
    base = mx.load(str(start / "adapters.safetensors"))
    a, b = moved(got, base), moved(want, base)
    assert np.linalg.norm(b) > 0
    return np.linalg.norm(a - b) / np.linalg.norm(b)


# --- Models, data, and the run that nothing disturbs ----------------------------------------------


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """25 rows; with batches of 12 the last one leaves something to do for one rank alone."""
    rng = random.Random(0)
    words = "arr the old map be in a cave near some tall ship".split()

    def text(longest):
        return " ".join(rng.choices(words, k=rng.randint(1, longest)))

    return [{"prompt": text(6), "completion": text(16 if n % 3 else 2)} for n in range(25)]


@pytest.fixture(scope="module")
def place(tmp_path_factory, rows) -> Path:
    """A folder with models (packed, dense) and data: rows of very different lengths, and the same
    row again and again.
    """
    place = tmp_path_factory.mktemp("nodes")
    files = tiny_tokenizer(template=CHATML)
    small = dict(hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1)
    write_model(place / "packed", tiny_config(**small), PACKINGS[4], files=files)
    small["tie_word_embeddings"] = True
    write_model(place / "dense", tiny_config(**small), files=files)
    write_rows(place / "data", train=rows, valid=rows[3:6], test=rows[6:11])
    write_rows(place / "same", train=rows[1:2] * 24)
    return place


@pytest.fixture(scope="module")
def common(place) -> dict:
    """Flags of the run that faults disturb: 40 steps, a checkpoint every fourth."""
    return dict(
        model=place / "packed", data=place / "data", iters=40, batch_size=12, rank=4, scale=2.0,
        learning_rate=1e-3, mask_prompt="true", max_seq_length=256, steps_per_report=1,
        steps_per_eval=20, save_every=4, dropout=0.1, seed=7,
    )  # fmt: skip


@pytest.fixture
def start(tmp_path, common):
    with jobs_in(tmp_path, common) as start:
        yield start


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, common) -> Path:
    """The folder of two ranks that trained without any trouble."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with jobs_in(folder, common) as start:
        job = start().good()
        assert "step 40/40: loss" in job.stdout
    return folder


@pytest.fixture
def out(tmp_path) -> Path:
    """Where rank 0 writes."""
    return tmp_path / "host0" / "out"


@pytest.fixture
def goes_on(start, out, undisturbed):
    """goes_on(): after a failure, --resume ends with the weights of the undisturbed run."""

    def goes_on():
        start(resume="auto").good()
        assert content(out) == content(undisturbed / "host0" / "out")
        assert log(out, "train_loss") == log(undisturbed / "host0" / "out", "train_loss")

    return goes_on


# --- Exactness ------------------------------------------------------------------------------------


FULL = dict(train_type="full", learning_rate=0.05)
RUNS = {
    "dora": dict(test=True),
    "dora, 3": dict(grad_accumulation_steps=3),
    "dora, 3, late": dict(grad_accumulation_steps=3, overlap=False),
    "lora, checkpointed": dict(train_type="lora", grad_checkpoint=True),
    "full": FULL,
    "full, 3": dict(**FULL, grad_accumulation_steps=3, grad_checkpoint=True),
    "full, late": dict(**FULL, overlap=False),
    "adam": dict(optimizer="adam", optimizer_config={}, learning_rate=1e-3, grad_clip=0.1),
    "dropout": dict(dropout=0.3, val_batches=0),
    "dropout again": dict(dropout=0.3, val_batches=0),
}
RANKS = (1, 2, 3, 4)
EXACT = ("dora", "dora, 3", "lora, checkpointed", "full", "full, 3", "adam")


def series_flags(place: Path, name: str) -> dict:
    flags = dict(
        model=str(place / ("dense" if "full" in name else "packed")),
        data=str(place / ("same" if "dropout" in name else "data")), iters=4, batch_size=12, rank=4,
        scale=2.0, learning_rate=0.1, optimizer="sgd", optimizer_config={"momentum": 0.9},
        mask_prompt=True, max_seq_length=256, steps_per_report=1, steps_per_eval=3, save_every=5,
    )  # fmt: skip
    return flags | RUNS[name]


@pytest.fixture(scope="module")
def series(tmp_path_factory, place, common):
    """series(W): the folder in which W ranks have done all of RUNS, one after another."""
    done = {}

    def series(W: int) -> Path:
        if W not in done:
            folder = tmp_path_factory.mktemp("series")
            port = free_port(W * len(RUNS))
            runs = {name: series_flags(place, name) for name in RUNS}
            (folder / "plan.json").write_text(json.dumps(dict(runs=runs, port=port, ranks=W)))
            hook = OTHER_START + BUCKETS + RECORD + SERIES
            with jobs_in(folder, common) as start:
                start(W, hooks=dict.fromkeys(range(W), hook)).good()
            done[W] = folder
        return done[W]

    return series


def steps_of(folder: Path, name: str, rank: int, key: str) -> list:
    return [r[key] for r in records(folder, name, rank) if "step" in r and key in r]


@pytest.mark.parametrize("W", RANKS[1:])
@pytest.mark.parametrize("name", EXACT)
def test_several_ranks_take_the_same_steps_as_one(series, place, tmp_path, name, W):
    one, many = series(1), series(W)
    for key, tolerance in (("train_loss", 1e-5), ("val_loss", 1e-5), ("trained_tokens", 0)):
        got, want = (log(f / "host0" / name, key) for f in (many, one))
        assert got.keys() == want.keys() and len(want) >= 3
        assert list(got.values()) == pytest.approx(list(want.values()), rel=tolerance, abs=0)
    losses = list(log(one / "host0" / name, "train_loss").values())
    assert losses[-1] < losses[0] - 0.01  # or the weights that are compared have hardly moved
    begun = tmp_path / "begun"
    flags = series_flags(place, name) | dict(iters=0, adapter_path=str(begun), test=False)
    train.train(**flags)
    error = apart(many / "host0" / name, one / "host0" / name, begun)
    print(name, W, error)
    assert error < 1e-5
    # ranks trained on different numbers of tokens, the last one sometimes on none
    mine = [steps_of(many, name, r, "mine") for r in range(W)]
    assert all(len(set(step)) > 1 for step in zip(*mine, strict=True))
    assert [sum(step) for step in zip(*mine, strict=True)] == steps_of(one, name, 0, "mine")
    if "3" not in name:
        assert 0 in mine[-1]


@pytest.mark.parametrize("W", RANKS[1:])
def test_all_ranks_hold_the_same_bits_before_and_after_every_step(series, W):
    for name in RUNS:
        first = steps_of(series(W), name, 0, "bits")
        assert len(first) == len(set(first)) == 5
        for r in range(1, W):
            assert steps_of(series(W), name, r, "bits") == first, f"{name}, rank {r}"


@pytest.mark.parametrize("W", RANKS)
def test_overlap_changes_nothing(series, W):
    """Not a bit by two ranks. Among more, buckets decide in which order a weight is summed."""
    for name, late in (("dora, 3", "dora, 3, late"), ("full", "full, late")):
        a, b = series(W) / "host0" / name, series(W) / "host0" / late
        if W <= 2:
            assert content(a) == content(b)
        for key in ("train_loss", "val_loss"):
            got, want = log(a, key), log(b, key)
            assert got == (want if W <= 2 else pytest.approx(want, rel=1e-6))


@pytest.mark.parametrize("W", RANKS[1:])
def test_ranks_share_the_rows_of_each_batch_between_them(series, W):
    one, many = series(1), series(W)
    for name in ("dora", "dora, 3"):
        want = [r for r in records(one, name, 0) if "rows" in r]
        got = [[r for r in records(many, name, k) if "rows" in r] for k in range(W)]
        assert len(want) > 5 and {r["training"] for r in want} == {True, False}
        for whole, *parts in zip(want, *got, strict=True):
            assert all(p["rows"] == whole["rows"] for p in parts)
            shares = [p["mine"] for p in parts]
            assert sorted(sum(shares, [])) == sorted(whole["rows"])  # all, and none twice
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            assert max(map(len, shares)) <= 12 // W


def test_the_last_evaluation_is_of_all_rows_whatever_the_number_of_ranks(series):
    found = []
    for W in RANKS:
        said = [r["loss"] for r in records(series(W), "dora", W - 1) if "evaluated" in r]
        found.append(said)
    for said in found[1:]:  # at steps 0, 3 and 4 on valid.jsonl, at the end on test.jsonl
        assert len(said) == 4 and said == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("W", RANKS[1:])
def test_dropout_has_other_masks_on_each_rank_and_the_same_in_every_run(series, W):
    """All rows are the same one, so ranks differ in their own loss by dropout alone."""
    folder = series(W)
    own = [[n["own"] for n in records(folder, "dropout", r) if "own" in n] for r in range(W)]
    first, *later = zip(*own, strict=True)
    assert max(first) == min(first)  # B is zero: nothing to drop
    assert len(later) == 3 and all(len(set(step)) == W for step in later)
    for r in range(W):
        assert own[r] == [n["own"] for n in records(folder, "dropout again", r) if "own" in n]
    assert content(folder / "host0" / "dropout") == content(folder / "host0" / "dropout again")


@pytest.mark.parametrize("W", RANKS)
def test_rank_0_alone_writes(series, W):
    for r in range(1, W):
        assert not list((series(W) / f"host{r}").rglob("*"))
    for name in RUNS:
        held = {p.name for p in (series(W) / "host0" / name).iterdir()}
        assert held >= {"adapters.safetensors", "adapter_config.json", "checkpoints", "log.jsonl"}


# --- Backends and launchers -----------------------------------------------------------------------


def same_as(undisturbed: Path, out: Path) -> None:
    assert content(out) == content(undisturbed / "host0" / "out")
    for key in ("train_loss", "val_loss", "trained_tokens"):
        assert log(out, key) == log(undisturbed / "host0" / "out", key)


def test_mlxs_ring_gives_the_same_bits(start, out, undisturbed):
    start(backend="ring", resume="auto").good()  # nothing to resume: a fresh start
    same_as(undisturbed, out)


def test_mpirun_gives_the_same_bits(start, tmp_path, undisturbed):
    library = "libmpi.so.40"
    found = [p for p in Path("/usr/lib").rglob(library)] + [*Path("/usr/local/lib").glob(library)]
    if not (shutil.which("mpirun") and found):
        pytest.skip(f"needs Open MPI: mpirun and {library}")
    env = {"MLX_MPI_LIBNAME": library, "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    env |= QUICK | {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["mpirun", "-n", 2, "--oversubscribe", sys.executable, ROOT / "train.py"]
    job = start(command=command, env=env)
    assert job.status() == 0, job.stderr
    same_as(undisturbed, tmp_path / "out")
    assert job.stdout.count("step 1/40: loss") == 1 and "error" not in job.stderr
    job.nothing_left()


def test_mlx_launch_gives_the_same_bits(start, tmp_path, undisturbed):
    program = Path(sys.executable).with_name("mlx.launch")
    if not program.exists():
        pytest.skip("needs mlx.launch beside python")
    flags = ["-n", 2, "--backend", "ring", "--starting-port", free_port()]
    command = [program, *flags, "--python", sys.executable, "--", ROOT / "train.py"]
    job = start(command=command)
    assert job.status() == 0, job.stderr
    same_as(undisturbed, tmp_path / "out")
    assert job.stdout.count("step 1/40: loss") == 1 and "error" not in job.stderr
    job.nothing_left()


def test_timeline_of_each_rank_is_a_trace(start, tmp_path, place):
    full = dict(model=place / "dense", train_type="full", dropout=0, timeline="trace.json")
    start(hooks=dict.fromkeys((0, 1), BUCKETS), iters=3, **full).good()
    for r, name in enumerate(("trace.json", "trace.1.json")):
        trace = json.loads((tmp_path / f"host{r}" / name).read_text())["traceEvents"]
        assert {e["pid"] for e in trace} == {r} and {e["ph"] for e in trace} == {"X", "M"}
        called = [e["args"]["name"] for e in trace if e["name"] == "process_name"]
        assert called == [f"rank {r} (127.0.0.{r + 1})"]
        spans = [e for e in trace if e["ph"] == "X"]
        assert all(e["dur"] >= 0 and isinstance(e["tid"], int) for e in spans)
        assert sum(e["name"] == "wait" for e in spans) == 3  # one for each step
        for kind in ("compute", "transfer"):
            numbers = {e["name"] for e in spans if e["name"].startswith(kind)}
            assert numbers == {f"{kind} {k}" for k in range(len(numbers))} and len(numbers) > 5
        sent = sum(e["args"]["bytes"] for e in spans if e["name"].startswith("transfer"))
        weights = mx.load(str(tmp_path / "host0" / "out" / "adapters.safetensors"))
        assert sent == 3 * (sum(w.size for w in weights.values()) + 3) * 4  # and three sums
    assert not [p for p in (tmp_path / "host1").iterdir() if p.name != "trace.1.json"]


# --- Going on -------------------------------------------------------------------------------------


def test_half_a_run_and_resume_is_the_whole_run_bit_for_bit(start, tmp_path, out, undisturbed):
    start(iters=20).good()
    job = start(resume="true").good()
    assert "at step 20" in job.stdout
    same_as(undisturbed, out)
    assert not list((tmp_path / "host1").iterdir())


def alone(common: dict, out: Path, **flags) -> Path:
    """The same run by one rank, in this process."""
    given = {k: str(v) if isinstance(v, Path) else v for k, v in (common | flags).items()}
    train.train(**given | {"mask_prompt": True, "adapter_path": str(out)})
    return out


def test_two_ranks_go_on_from_what_one_has_left(start, tmp_path, out, common):
    """From its checkpoint, and from its weights alone; only rank 0 has the files."""
    whole = alone(common, tmp_path / "begun", iters=8, dropout=0)
    weights_alone, out2 = tmp_path / "weights", tmp_path / "host0" / "out2"
    shutil.copytree(whole, out)
    begun = shutil.copytree(whole, tmp_path / "base")
    (tmp_path / "host0" / "given").mkdir(parents=True)
    for name in ("adapters.safetensors", "adapter_config.json"):
        shutil.copy(begun / name, tmp_path / "host0" / "given")
    source = "given/adapters.safetensors"
    jobs = [start(resume="true", iters=16, dropout=0)]
    jobs[0].good()
    start(resume=source, iters=8, dropout=0, adapter_path="out2").good()
    alone(common, whole, iters=16, dropout=0, resume=True)
    source = str(begun / "adapters.safetensors")
    alone(common, weights_alone, iters=8, dropout=0, resume=source)
    for got, want in ((out, whole), (out2, weights_alone)):
        assert apart(got, want, begun) < 1e-4
        losses = [list(log(f, "train_loss").values()) for f in (got, want)]
        assert len(losses[0]) >= 8 and losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert "at step 8" in jobs[0].stdout


# --- Not even begun -------------------------------------------------------------------------------


def prepare_refusals(where: Path, case: str, rows: list, place: Path) -> tuple[dict, tuple]:
    """(flags, what is said) of a job that must not begin; its files below `where`."""
    bad, text = {"train": rows, "valid": rows[3:6]}, "127.0.0.2"
    if case == "a row fewer":
        bad["train"], text = rows[:-1], f"rank 1 ({text}) has rows 24, rank 0 has 25"
    elif case == "another row":
        bad["train"], text = [*rows[:-1], rows[0]], f"rank 1 ({text}) has data "
    elif case == "another validation row":
        bad["valid"], text = rows[4:7], f"rank 1 ({text}) has validation data "
    elif case == "a row that is none":
        bad["train"] = [*rows[:6], "{nothing", *rows[7:]]
        text = f"rank 1 ({text}): data/train.jsonl:7: not JSON"
    for r in (0, 1):
        split = bad if r else {"train": rows, "valid": rows[3:6]}
        write_rows(where / f"host{r}" / "data", **split)
        shutil.copytree(place / "packed", where / f"host{r}" / "model")
    other = where / "host1" / "model"
    if case == "no data":
        shutil.rmtree(where / "host1" / "data")
        text = f"rank 1 ({text}): data"
    elif case == "other weights":
        shutil.rmtree(other)
        small = json.loads((place / "packed" / "config.json").read_text())
        small.pop("quantization", None)
        files = tiny_tokenizer(template=CHATML)
        write_model(other, small, PACKINGS[4], seed=1, files=files)
        text = f"rank 1 ({text}) has model weights"
    elif case == "other model":
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
        text = f"rank 1 ({text}) has model config"
    flags = {"data": "data", "model": "model", "max_restarts": 2}
    if case == "batch size":
        flags["batch_size"], text = 5, "--batch-size: got 5, which 2 ranks do not divide"
    elif case == "nothing to resume":
        flags["resume"], text = "true", "--resume: no whole checkpoint in out"
    elif case == "a file in the way":
        (where / "host0" / "file").touch()
        flags["adapter_path"], text = "file/out", "--adapter-path file/out: cannot be written"
    return flags, text


OF_ONE_RANK = ("a row that is none", "no data", "nothing to resume", "a file in the way")
REFUSALS = [
    "a row fewer", "another row", "another validation row", "other weights", "other model",
    "batch size", *OF_ONE_RANK,
]  # fmt: skip


@pytest.fixture(scope="module")
def refusals(tmp_path_factory, common, rows, place):
    """{case: (Job, what it must say)}, all under way."""
    folder, jobs = tmp_path_factory.mktemp("refusals"), {}
    with jobs_in(folder, common) as start:
        for case in REFUSALS:
            flags, text = prepare_refusals(folder / case, case, rows, place)
            jobs[case] = start(where=folder / case, **flags), text
        yield jobs


@pytest.mark.parametrize("case", REFUSALS)
def test_what_ranks_have_not_in_common_is_said_before_a_step_is_taken(refusals, case):
    job, text = refusals[case]
    job.failed(text, status=2)
    assert "Traceback" not in job.stderr and "starting again" not in job.stderr
    # what one rank alone has met it says itself, and the other that it ended because of it
    alone = case in OF_ONE_RANK
    assert len(job.lines("error:")) == len(job.lines(text.split("): ")[-1])) == 1 + alone
    assert not list(job.folder.rglob("adapters.safetensors")) and "step " not in job.stdout


@pytest.fixture
def disk(tmp_path):
    """disk(options): rank 0's folder becomes a file system of its own, until the returned function
    is called; skipped where that is not allowed.
    """
    folder, mounted = tmp_path / "host0", []

    def release():
        while mounted:
            copy = shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True)
            subprocess.run(["umount", mounted.pop()], check=True)
            shutil.copytree(copy, folder, dirs_exist_ok=True)

    def disk(options):
        folder.mkdir(exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("may not mount a file system here")
        mounted.append(folder)
        return release

    yield disk
    release()


def test_a_folder_that_rank_0_may_not_write_is_named(start, disk):
    release = disk("size=1m,ro")
    job = start(max_restarts=2).failed("error: --adapter-path out: cannot be written", status=2)
    assert len(job.lines("error:")) == 2 and "starting again" not in job.stderr
    release()


# --- Faults ---------------------------------------------------------------------------------------


def test_a_full_disk_ends_all_without_another_try_and_its_checkpoint_resumes(
    start, disk, out, goes_on
):
    release = disk("size=400k")
    job = start(max_restarts=3).failed("train.py: error: ", "o space left on", status=2)
    assert "starting again" not in job.stderr and "Traceback" not in job.stderr
    assert job.lines("[rank 1 127.0.0.1] train.py: error: rank 0 (127.0.0.1): "), job.stderr
    release()
    assert 4 <= int(train.Checkpoints(out, "", {}).newest().name) < 40
    assert not list(out.rglob(".*"))
    goes_on()


def test_what_fails_at_the_very_last_save_fails_on_all_ranks(start, goes_on):
    hook = """
real = train.Checkpoints.save
def save(self, run, settings):
    if run.step == 40: raise OSError(28, "No space left on device")
    return real(self, run, settings)
train.Checkpoints.save = save
"""
    job = start(hooks={0: hook}).failed("train.py: error: ", "No space left on device", status=2)
    assert job.lines("[rank 1 127.0.0.1] train.py: error: rank 0 (127.0.0.1): ", "No space left")
    assert job.lines(f"rank 1 (127.0.0.1): exit status {FAILED}"), job.stderr
    goes_on()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_ends_all_and_is_named(start, goes_on, rank):
    hook = AT_STEP.format(what="if step == 6: raise ZeroDivisionError('on purpose')")
    job = start(hooks={rank: hook})
    said = f"error: rank {rank} (127.0.0.{rank + 1}): ZeroDivisionError: on purpose"
    job.failed(said, status=1)
    assert len(job.lines("Traceback")) == len(job.lines(said)) == 1, job.stderr
    prefix = "" if rank else "[rank 1 127.0.0.1] "
    assert job.lines(said)[0].startswith(f"{'[rank 1 127.0.0.1] ' if not rank else ''}train.py")
    assert job.lines("Traceback")[0].startswith(prefix if rank else "Traceback")
    goes_on()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_and_ended(start, goes_on, rank):
    hook = AT_STEP.format(what="if step == 10: os.kill(os.getpid(), signal.SIGSTOP)")
    hooks = {"launcher": IMPATIENT, rank: hook}
    job = start(hooks=hooks, env=QUICK | {"COMM_SILENCE": "1.5"})
    job.failed(f"error: rank {rank} (127.0.0.{rank + 1}): no sign of life for 1.5 s")
    assert job.lines(f"rank {rank} (127.0.0.1): ", "the launcher ended it"), job.stderr
    assert "Traceback" not in job.stderr
    goes_on()


@pytest.mark.parametrize("ranks, odd", [(2, 1), (3, 0), (3, 1)])
def test_a_rank_with_other_weights_ends_the_run_and_is_named(start, out, ranks, odd):
    hook = AT_STEP.format(
        what="""if step == 6:
        layer = next(iter(dora.adapted(run.model).values()))
        layer.lora_b = layer.lora_b * (1 + 2**-20)"""
    )
    job = start(ranks, hooks={odd: hook}, max_restarts=2)
    job.failed(f"error: step 7: rank {odd} (127.0.0.{odd + 1}) holds other weights", status=2)
    assert len(job.lines("holds other weights")) == 1 and "Traceback" not in job.stderr
    assert "starting again" not in job.stderr
    assert train.Checkpoints(out, "", {}).newest().name == "0000004"


def kill(job: Job, out: Path, rng: random.Random) -> str:
    """Kills a rank at some moment; what it did."""
    rank = rng.randrange(2)
    pid = job.pid(rank)
    if rng.random() < 0.3:
        wait = rng.uniform(0.0, 1.2)
        what = f"rank {rank} {wait:.3f} s after its start"
    else:
        step, wait = rng.randint(1, 36), rng.uniform(0.0, 0.05)
        until(lambda: reached(out) >= step or job.process.poll() is not None)
        what = f"rank {rank} {wait:.3f} s after step {step}"
    time.sleep(wait)
    try:
        assert f"MLX_RANK={rank}" in marked(job.mark).get(pid, "")
        os.kill(pid, signal.SIGKILL)
    except (AssertionError, OSError):
        return ""
    return what


def survives(start, out: Path, undisturbed: Path, seed: int) -> bool:
    """Whether a rank was killed in time; if so the job has done what it does undisturbed."""
    job = start(hooks=dict.fromkeys((0, 1), SLOWER), max_restarts=2)
    what = kill(job, out, random.Random(seed))
    assert job.status() == 0, f"{what}: {job.stderr[-3000:]}"
    same_as(undisturbed, out)
    job.nothing_left()
    if what:
        rank = what.split()[1]
        assert job.lines(f"rank {rank} (127.0.0.1): killed by SIGKILL"), f"{what}: {job.stderr}"
        assert job.stderr.count("starting again from the newest checkpoint") == 1, what
        assert "Traceback" not in job.stderr, f"{what}: {job.stderr}"
    return bool(what)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_rank_is_replaced_and_the_weights_are_the_same(start, out, undisturbed, seed):
    assert survives(start, out, undisturbed, seed)


@pytest.mark.slow
def test_twenty_kills_at_random_moments(tmp_path, common, undisturbed):
    seed, killed = random.randrange(10**6), 0
    print("seed", seed)
    with jobs_in(tmp_path, common) as start:
        while killed < 20:
            shutil.rmtree(tmp_path / "host0", ignore_errors=True)
            killed += survives(start, tmp_path / "host0" / "out", undisturbed, seed)
            seed += 1


@pytest.mark.slow
def test_ranks_killed_one_after_another_until_no_tries_are_left(start, out, goes_on):
    hook = AT_STEP.format(
        what="if step == int(os.environ['WHEN']): os.kill(os.getpid(), signal.SIGKILL)"
    )
    # the checkpoints are of steps 4, 8, 12: each time it comes to step 10 again
    hosts = {1: {"env": {"WHEN": "10"}}}
    job = start(hooks={1: hook}, hosts=hosts, max_restarts=2)
    job.failed("rank 1 (127.0.0.1): killed by SIGKILL", status=137)
    assert len(job.lines("starting again")) == 2
    assert len(job.lines("error: rank 1 (127.0.0.2): its process has ended")) == 3, job.stderr
    goes_on()


@pytest.mark.slow
@pytest.mark.parametrize("which", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_ranks_do_not_outlive_the_launcher_and_what_they_saved_resumes(start, out, goes_on, which):
    job = start(hooks=dict.fromkeys((0, 1), AT_STEP.format(what="time.sleep(0.1)")))
    assert until(lambda: reached(out) >= 6), job.stderr
    job.process.send_signal(which)
    assert job.status() != 0
    job.nothing_left()
    goes_on()


# --- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["launcher", 0, 1])
def test_ctrl_c_saves_at_the_same_step_on_all_ranks_and_the_rest_follows(
    start, tmp_path, goes_on, who
):
    """To all ranks as a terminal does through the launcher, or to one rank alone."""
    job = start(hooks=dict.fromkeys((0, 1), RECORD + GATE), max_restarts=2)
    for r in (0, 1):
        assert until((tmp_path / f"waits{r}").exists), job.stderr
    if who == "launcher":
        os.killpg(job.process.pid, signal.SIGINT)
    else:
        os.kill(job.pid(who), signal.SIGINT)
    if who != 1:
        assert until(lambda: "stopping after this step" in job.stderr)
    (tmp_path / "go").touch()
    assert job.status() == 130, job.stderr
    job.nothing_left()
    assert "Traceback" not in job.stderr and "starting again" not in job.stderr
    steps = [steps_of(tmp_path, "record", r, "step") for r in (0, 1)]
    assert steps[0] == steps[1] and steps[0][-1] in (11, 12), steps
    assert f"stopped at step {steps[0][-1]}, saved" in job.stdout
    goes_on()


def test_a_second_ctrl_c_ends_at_once(start, tmp_path, goes_on):
    hook = AT_STEP.format(
        what="""
    if step == 10:
        open(f"{here}/waits{rank}", "w").close()
        while True: time.sleep(0.1)"""
    )
    job = start(hooks=dict.fromkeys((0, 1), hook))
    for r in (0, 1):
        assert until((tmp_path / f"waits{r}").exists), job.stderr
    os.killpg(job.process.pid, signal.SIGINT)
    assert until(lambda: "once more to stop at once" in job.stderr)
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(0.5)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.status(30) == 130, job.stderr
    job.nothing_left()
    assert "Traceback" not in job.stderr, job.stderr
    goes_on()


# --- A slow rank ----------------------------------------------------------------------------------


def test_a_slow_rank_is_named_and_ranks_that_are_alike_are_not(start, tmp_path):
    flags = dict(iters=6, steps_per_report=2)
    # alike by so much that what else this machine does is small beside it
    jobs = [
        start(
            ranks,
            hooks=dict.fromkeys(slow, AT_STEP.format(what=f"time.sleep({late})")),
            where=tmp_path / name,
            **flags,
        )
        for name, ranks, slow, late in (
            ("one", 3, (1,), 0.3),
            ("first", 2, (0,), 0.3),
            ("both", 2, (0, 1), 2.0),
        )
    ]
    found = [[t for t in j.good().stdout.splitlines() if "computes" in t] for j in jobs]
    for rank, said in ((1, found[0]), (0, found[1])):
        assert len(said) == 3, said  # at each report
        who = f"rank {rank} (127.0.0.{rank + 1}) computes 0."
        assert all(t.startswith(who) and "s per step, the rest 0." in t for t in said), said
    assert not found[2]


# --- Over ssh -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """An sshd of our own: the environment for a launcher that reaches it as node0, node1, ...;
    locked (a key it does not know), closed (no one listens), nowhere (no such name).
    """
    sshd = "/usr/sbin/sshd"
    if missing := [tool for tool in (sshd, "ssh", "ssh-keygen") if not shutil.which(tool)]:
        pytest.skip(f"needs OpenSSH: no {', '.join(missing)}")
    folder, port, mark = tmp_path_factory.mktemp("ssh"), free_port(1), uuid.uuid4().hex
    for key in ("host", "user", "unknown"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key]
        subprocess.run(make, check=True)
    (folder / "known").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    server = dict(
        ListenAddress=f"127.0.0.1:{port}", HostKey=folder / "host", PidFile="none", UsePAM="no",
        AuthorizedKeysFile=folder / "user.pub", StrictModes="no", PermitRootLogin="yes",
        PasswordAuthentication="no", KbdInteractiveAuthentication="no", MaxStartups="100",
        SetEnv=f"COMM_TEST_SSH={mark}",
    )  # fmt: skip
    (folder / "server").write_text("".join(f"{k} {v}\n" for k, v in server.items()))
    client = dict(
        HostName="127.0.0.1", Port=port, User=getpass.getuser(), IdentitiesOnly="yes",
        IdentityAgent="none", UserKnownHostsFile=folder / "known", LogLevel="ERROR",
        GlobalKnownHostsFile="/dev/null", StrictHostKeyChecking="yes",
    )  # fmt: skip
    own = {
        "closed": f"Port {free_port(1)}",
        "nowhere": "HostName nowhere.invalid",
        "locked": f"IdentityFile {folder / 'unknown'}",
        "node*": f"IdentityFile {folder / 'user'}",
        "*": "\n".join(f"{k} {v}" for k, v in client.items()),
    }
    (folder / "client").write_text("".join(f"Host {k}\n{v}\n" for k, v in own.items()))
    if os.geteuid() == 0:  # an sshd of root wants it, and another may by now: it stays
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([sshd, "-D", "-e", "-f", folder / "server"], stderr=log)
    try:
        connect = ["ssh", "-F", folder / "client", "-o", "BatchMode=yes", "node0", "true"]
        if not until(lambda: not subprocess.run(connect, capture_output=True).returncode, 20.0):
            pytest.skip(f"sshd lets nobody in here: {(folder / 'log').read_text()[-500:]}")
        yield QUICK | {"COMM_SSH": f"ssh -F '{folder}/client'", "COMM_TEST_SSH": mark}
    finally:
        process.terminate()
        process.wait(20)
        for pid in marked(mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def over_ssh(*ranks: int) -> dict:
    """Entries of ranks behind ssh, with the libraries that ranks here have from the environment."""
    names = ("LD_PRELOAD", "OPENBLAS_CORETYPE")
    env = {k: os.environ[k] for k in names if k in os.environ} | {"OPENBLAS_NUM_THREADS": "1"}
    return {r: {"ssh": f"node{r}", "env": env} for r in ranks}


def test_ranks_over_ssh_give_the_same_bits(start, out, undisturbed, ssh):
    start(hosts=over_ssh(0, 1), env=ssh).good()
    same_as(undisturbed, out)
    assert until(lambda: not marked(ssh["COMM_TEST_SSH"]), 20.0)


@pytest.mark.parametrize(
    "name, said",
    [
        ("locked", "Permission denied"),
        ("closed", "Connection refused"),
        ("nowhere", "nowhere.invalid"),
    ],
)
def test_a_host_that_ssh_does_not_reach_is_one_line(start, tmp_path, ssh, name, said):
    job = start(hosts={1: {"ssh": name}}, env=ssh, max_restarts=2)
    job.failed("train.py: error: ", f"rank 1 ({name})", said, status=2)
    assert len(job.stderr.splitlines()) == 1, job.stderr
    assert not list((tmp_path / "host0").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_behind_ssh_is_replaced(start, out, undisturbed, ssh, rank):
    job = start(hooks={rank: SLOWER}, hosts=over_ssh(rank), env=ssh, max_restarts=1)
    assert until(lambda: reached(out) >= 10), job.stderr
    (pid,) = marked(ssh["COMM_TEST_SSH"], f"MLX_RANK={rank}")
    os.kill(pid, signal.SIGKILL)
    assert job.status() == 0, job.stderr
    assert job.lines(f"rank {rank} (node{rank}): killed by SIGKILL"), job.stderr
    same_as(undisturbed, out)
    job.nothing_left()
    assert until(lambda: not marked(ssh["COMM_TEST_SSH"]), 20.0)


# --- A network that breaks ------------------------------------------------------------------------


def ip(*words) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


@pytest.fixture
def machines():
    """Three machines, as namespaces with an address 10.77.0.x each on one bridge; their names."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and iproute2")
    mark = f"tn{os.getpid()}"
    names, hub = [f"{mark}r{r}" for r in range(3)], f"{mark}hub"
    try:
        try:
            ip("netns", "add", hub)
            ip("-n", hub, "link", "add", "name", "bridge0", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"may not make network namespaces here: {error.stderr}")
        ip("-n", hub, "link", "set", "bridge0", "up")
        for r, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            peer = ("type", "veth", "peer", "name", f"port{r}", "netns", hub)
            ip("-n", name, "link", "add", "eth0", *peer)
            ip("-n", name, "addr", "add", f"10.77.0.{r + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", hub, "link", "set", f"port{r}", "master", "bridge0")
            ip("-n", hub, "link", "set", f"port{r}", "up")
        yield names
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.parametrize("cut", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_whose_link_goes_down_is_named_by_all_others(start, tmp_path, machines, cut):
    file = tmp_path / "addresses.json"
    file.write_text(json.dumps([[f"10.77.0.{r + 1}:20000"] for r in range(3)]))
    jobs = []
    for r, name in enumerate(machines):
        env = QUICK | {"MLX_RANK": str(r), "MLX_HOSTFILE": str(file)}
        (tmp_path / f"host{r}").mkdir()
        command = ["ip", "netns", "exec", name, sys.executable, ROOT / "train.py"]
        flags = dict(iters=10**6, adapter_path=tmp_path / f"host{r}" / "out")
        jobs.append(start(command=command, env=env, **flags))
    out = tmp_path / "host0" / "out"
    assert until(lambda: reached(out) >= 10), jobs[0].stderr
    ip("-n", machines[cut], "link", "set", "eth0", "down")
    for r, job in enumerate(jobs):
        assert job.status(60) == FAILED, job.stderr
        assert len(job.lines("error:")) == 1 and "Traceback" not in job.stderr, job.stderr
        if r != cut:
            assert job.lines(f"train.py: error: rank {cut} (10.77.0.{cut + 1}): "), job.stderr
        job.nothing_left()
    assert int(train.Checkpoints(out, "", {}).newest().name) >= 8
