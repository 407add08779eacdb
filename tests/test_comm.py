"""The communicator: exact sums, strangers turned away, faults named, overlap, hostfiles.

Ranks are processes of this machine that wait for a function's name and arguments and answer with
what it returns. Whole numbers are compared with zero tolerance. No test measures speed: times are
those after which something counts as hung.
"""

import contextlib
import faulthandler
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from multiprocessing import forkserver
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map, tree_unflatten

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import comm

LINUX = sys.platform == "linux"
FORK = "forkserver" if LINUX else "spawn"  # a fork of a process that has used Metal is lost
STARTING, GIVEN = threading.Lock(), set()
FLOATS = ("float32", "bfloat16", "float16")
KINDS = [
    (d, lib) for d in comm.DTYPES for lib in ("numpy", "mlx") if (d, lib) != (FLOATS[1], "numpy")
]
QUICK = {"connect": 20.0, "silence": 3.0, "deadline": 60.0}
MPIRUN = shutil.which("mpirun")
LIBMPI = next((str(p) for p in Path("/usr/lib").glob("*/libmpi.so.40")), None)


# --- Ranks ----------------------------------------------------------------------------------------


class Me:
    """What a function that runs as a rank is given: its place in the job, and the job itself."""

    def __init__(self, rank: int, addresses: list, backend: str, options: dict, env: dict):
        self.rank, self.addresses, self.backend = rank, addresses, backend
        self.options, self.joined, self.notes = options, None, {}
        os.environ.update(env)

    def join(self, **changes) -> comm.Communicator:
        changes = {"secret": b"of this job", "job": "test"} | self.options | changes
        place = changes.pop("rank", self.rank), changes.pop("addresses", self.addresses)
        if self.backend == "tcp":
            return comm.Ring(*place, **changes)
        return comm.Native(self.backend, *place, **changes)

    @property
    def job(self) -> comm.Communicator:
        """Joined when first asked for."""
        if self.joined is None:
            self.joined = self.join()
        return self.joined


def serve(pipe, *place) -> None:
    """The main function of a rank's process."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    me = Me(*place)
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            try:
                answer = True, function(me, *arguments)
            except BaseException:
                answer = False, traceback.format_exc()
            pipe.send(answer)


class Group:
    """Processes that are the ranks of one job, or of a part of it.

    Args:
        W: the job's ranks. trunks: addresses of each, 127.0.0.1 and so on.
        ranks: which of them there are; all by default.
        options: of the Communicator, for all of them.
    """

    def __init__(self, W, trunks=1, backend="tcp", ranks=None, folder=None, **options):
        self.addresses = places(W, trunks)
        self.ranks = list(range(W) if ranks is None else ranks)
        env = {}
        if backend == "ring":
            theirs = Path(folder, f"{os.urandom(4).hex()}.json")
            theirs.write_text(json.dumps([[f"{h}:{p}" for h, p in a] for a in places(W)]))
            env["MLX_HOSTFILE"] = str(theirs)
        with STARTING:
            context = starter()
        self.pipes, self.processes = {}, {}
        for rank in self.ranks:
            self.pipes[rank], theirs = context.Pipe()
            own = env | {"MLX_RANK": str(rank)} if env else {}
            place = theirs, rank, self.addresses, backend, QUICK | options, own
            self.processes[rank] = context.Process(target=serve, args=place, daemon=True)
            self.processes[rank].start()
            theirs.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def begin(self, function, *arguments, ranks=None) -> None:
        for rank in self.ranks if ranks is None else ranks:
            self.pipes[rank].send((function, arguments))

    def end(self, seconds=60.0, ranks=None) -> list:
        """What the ranks returned, in their order. It is a failure if one raises, dies or hangs."""
        end, out, asked = time.monotonic() + seconds, [], self.ranks if ranks is None else ranks
        for rank in asked:
            if not self.pipes[rank].poll(max(0.0, end - time.monotonic())):
                for process in self.processes.values():
                    with contextlib.suppress(OSError):
                        os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.5)
                raise AssertionError(f"rank {rank} gave no answer in {seconds} s: stacks on stderr")
            try:
                out.append(self.pipes[rank].recv())
            except (EOFError, OSError):
                self.processes[rank].join(1.0)
                out.append((False, f"it died: {self.processes[rank].exitcode}"))
        said = [f"rank {r}: {text}" for r, (good, text) in zip(asked, out, strict=True) if not good]
        assert not said, "\n".join(said)
        return [value for _, value in out]

    def call(self, function, *arguments, seconds=60.0, ranks=None) -> list:
        self.begin(function, *arguments, ranks=ranks)
        return self.end(seconds, ranks)

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
        for pipe in self.pipes.values():
            pipe.close()
        for process in self.processes.values():
            process.join(10.0)


@functools.cache
def starter():
    """Where processes come from: on Linux copies of one that has imported this file already."""
    context = multiprocessing.get_context(FORK)
    if LINUX:
        with pytest.MonkeyPatch.context() as patch:
            here = os.pathsep.join([str(HERE), str(HERE.parent)])
            patch.setenv("PYTHONPATH", here, prepend=os.pathsep)
            context.set_forkserver_preload([__name__])
            forkserver.ensure_running()
    return context


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below those the system gives out by itself; none twice."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(10000, 32000)
        with STARTING, socket.socket() as sock, contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", port))
            found += [port] if port not in GIVEN else []
            GIVEN.add(port)
    return found


def places(W: int, trunks: int = 1) -> list[list[tuple[str, int]]]:
    ports = iter(free_ports(W * trunks))
    return [[(f"127.0.0.{k + 1}", next(ports)) for k in range(trunks)] for _ in range(W)]


def ranks(W, function, *arguments, seconds=60.0, **how) -> list:
    """What `function(me, *arguments)` returns on each rank of a job of its own."""
    with Group(W, **how) as group:
        return group.call(function, *arguments, seconds=seconds)


def together(work, *cases) -> list:
    """work(case) for all cases at once, for those that mostly wait; the first failure is raised."""
    out: dict = {}

    def one(index, case):
        try:
            out[index] = work(case), None
        except BaseException as error:
            out[index] = None, error

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(cases)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, case in enumerate(cases):
        if out[index][1]:
            raise AssertionError(f"{case}: {out[index][1]}") from out[index][1]
    return [out[i][0] for i in range(len(cases))]


def failure(action, *arguments) -> dict | None:
    """How an action ends in CommError, and after how many seconds; None if it does not."""
    begin = time.monotonic()
    try:
        action(*arguments)
    except comm.CommError as e:
        seconds = time.monotonic() - begin
        return {"rank": e.rank, "host": e.host, "reason": e.reason, "seconds": seconds}
    return None


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def comm_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("comm")]


def left_over(me) -> list[str]:
    """The communicator's threads that go on, after a moment to end in."""
    end = time.monotonic() + 5.0
    excused = {"comm_serve"} if me.backend != "tcp" else set()  # in native code, which has no end
    while (names := set(comm_threads()) - excused) and time.monotonic() < end:
        time.sleep(0.02)
    return sorted(names)


# --- Exactness ------------------------------------------------------------------------------------


def whole(dtype: str, shape, *seed: int) -> np.ndarray:
    """Whole numbers, float32 for floats, small enough that their sum over ranks is exact."""
    draw = np.random.default_rng(seed)
    if dtype in FLOATS:
        return draw.integers(-8, 8, shape, endpoint=True).astype(np.float32)
    info = np.iinfo(dtype)
    return draw.integers(info.min // 8, info.max // 8, shape, dtype, endpoint=True)


def made(values: np.ndarray, dtype: str, library: str):
    if library == "numpy":
        return np.array(values, dtype)
    x = mx.array(values).astype(getattr(mx, dtype))
    mx.eval(x)
    return x


def plain(x) -> np.ndarray:
    return np.array(x.astype(mx.float32)) if getattr(x, "dtype", 0) == mx.bfloat16 else np.array(x)


def place_of(x) -> int:
    """Where an array's memory is."""
    kind = np.uint8 if isinstance(x, np.ndarray) else np.uint16 if x.itemsize == 2 else None
    if isinstance(x, np.ndarray):
        return x.__array_interface__["data"][0]
    return np.frombuffer(x, kind or np.uint8).__array_interface__["data"][0] if x.size else 0


def same(got, want: np.ndarray, what: str) -> None:
    """Equal in shape and, to the last bit of it, value; and of the kind it must be."""
    got = plain(got)
    assert got.shape == want.shape, f"{what}: got shape {got.shape}, wanted {want.shape}"
    if not np.array_equal(got, want):
        where = np.argwhere(got != want)
        first = tuple(where[0])
        differ = f"{len(where)} of {want.size} differ, first at {first}"
        raise AssertionError(f"{what}: {differ}: got {got[first]}, wanted {want[first]}")


def everything(me, dtype: str, shape: tuple, library: str, seed: int = 0) -> int:
    """All operations on data of which each rank can work out all others'; how many were done."""
    job, W, r = me.job, me.job.size, me.rank
    data = [whole(dtype, (W, *shape), seed, k) for k in range(W)]
    what = f"{dtype} {shape} {library} {W} ranks"

    def mine(values):
        return made(values, dtype, library)

    def is_ours(x, got, before):
        if me.backend == "tcp" or library == "numpy":
            assert got is x, f"{what}: returned another object"
            assert not before or place_of(x) == before, f"{what}: moved in memory"
        assert type(got) is type(x) and got.dtype == x.dtype, f"{what}: {type(got)} {got.dtype}"

    x = mine(data[r][0])
    before, view = place_of(x), x if library == "numpy" else None
    got = job.all_reduce(x, bucket=seed)
    is_ours(x, got, before)
    total = sum(d[0] for d in data[1:]) + data[0][0] if W > 1 else data[0][0]
    total = np.asarray(total, data[0].dtype)
    same(got, total, f"all_reduce {what}")
    if me.backend == "tcp" and view is not None:
        same(view, total, f"all_reduce in place {what}")
    rows = [d.reshape(W * shape[0], *shape[1:]) if shape else d for d in data]
    part = rows[0].shape[0] // W
    want = np.asarray(sum(rows[1:]) + rows[0] if W > 1 else rows[0], rows[0].dtype)
    want = want[r * part : (r + 1) * part]
    got = job.reduce_scatter(mine(rows[r]))
    assert type(got) is type(x) and got.dtype == x.dtype, what
    same(got, want, f"reduce_scatter {what}")
    x = mine(data[r][0])
    got = job.all_gather(x)
    assert type(got) is type(x) and got.dtype == x.dtype, what
    gathered = np.concatenate([d[0] if shape else d[:1] for d in data])
    same(got, gathered, f"all_gather {what}")
    same(x, data[r][0], f"all_gather's own x {what}")
    for root in range(W):
        x = mine(data[r][root])
        before = place_of(x)
        got = job.broadcast(x, root)
        is_ours(x, got, before)
        same(got, data[root][root], f"broadcast from {root} {what}")
    return 3 + W


def many_sizes(me, sizes: list, kinds=KINDS) -> int:
    done = 0
    for (dtype, library), n in itertools.product(kinds, sizes):
        done += everything(me, dtype, (n,), library, n)
    me.job.barrier()
    return done


def letters(me, sizes=(0, 1, 1023, 70001)) -> int:
    """send and recv between all pairs, one after the other; then all round the ring at once."""
    job, W, r = me.job, me.job.size, me.rank
    pairs = [(a, b) for a in range(W) for b in range(W) if a != b]
    for (a, b), n, (dtype, library) in itertools.product(pairs, sizes, KINDS[::5]):
        values = whole(dtype, n, a, b, n)
        if r == a:
            job.send(made(values, dtype, library), b)
        elif r == b:
            x = made(np.zeros(n), dtype, library)
            assert job.recv(x, a) is x
            same(x, values, f"{n} {dtype} from {a} to {b}")
    if W > 1:
        big, into = whole("int32", 400_000, r), np.zeros(400_000, np.int32)
        sender = threading.Thread(target=job.send, args=(big, job.next))
        sender.start()
        handle = job.all_reduce_async(np.ones(100_000, np.float32))  # meanwhile, something else
        job.recv(into, job.previous)
        sender.join()
        same(into, whole("int32", 400_000, job.previous), "round the ring")
        same(handle.wait(), np.full(100_000, W, np.float32), "all_reduce beside it")
    return len(pairs)


def barriers(me, rounds: int = 6) -> list[tuple[float, float]]:
    """When this rank came to each barrier, and when it left; each time another one is late."""
    times = []
    for k in range(rounds):
        time.sleep(0.05 * ((me.rank + k) % me.job.size))
        begin = time.monotonic()
        me.job.barrier()
        times.append((begin, time.monotonic()))
    return times


def several(me) -> None:
    """Thirty operations under way at once, waited for from the last to the first."""
    job, W, draw = me.job, me.job.size, random.Random(5)
    todo = []
    for k in range(30):
        (dtype, library), n = draw.choice(KINDS), draw.choice([0, 1, 5, 1000, 40_001, 200_001])
        x = made(whole(dtype, n, k, me.rank), dtype, library)
        total = sum(whole(dtype, n, k, j) for j in range(1, W)) + whole(dtype, n, k, 0)
        todo.append((job.all_reduce_async(x, bucket=k), x, np.asarray(total)))
    for handle, x, total in reversed(todo):
        got = handle.wait()
        assert handle.done() and handle.begun <= handle.ended
        assert got is x or me.backend != "tcp"
        same(got, total.astype(plain(x).dtype), "one of several")
    assert todo[0][0].wait() is todo[0][0].wait()


@pytest.mark.parametrize("W, trunks", [(1, 1), (2, 1), (3, 2), (4, 1), (5, 3)])
def test_every_operation_dtype_and_size_is_exact(W, trunks):
    few = sorted({0, 1, W - 1, W, W + 1, 1023})
    with Group(W, trunks) as group:
        assert group.call(many_sizes, few)[0] == len(KINDS) * len(few) * (3 + W)
        # more than a chunk for each rank, not a multiple; shared out over the trunks
        group.call(
            many_sizes, [250_007], [("float32", "mlx"), ("bfloat16", "mlx"), ("int64", "numpy")]
        )
        group.call(letters)
        group.call(several)


@pytest.mark.slow
@pytest.mark.parametrize("W, trunks", [*itertools.product((1, 2, 3, 4, 5), (1, 2, 3))])
def test_every_operation_at_all_widths(W, trunks):
    edge = comm.CHUNK // 4 * W  # float32: exactly a chunk for each rank
    small = comm.SMALL * W * trunks // 4
    with Group(W, trunks) as group:
        group.call(many_sizes, sorted({0, 1, W - 1, W, W + 1, 7, 1023}))
        group.call(many_sizes, [edge - 1, edge, edge + 1, small - 1, small], [("float32", "mlx")])
        group.call(many_sizes, [300_007], seconds=120)
        group.call(letters)
        group.call(several)


@pytest.mark.slow
@pytest.mark.parametrize("W, trunks", [(2, 1), (3, 2), (5, 3)])
def test_64_megabytes(W, trunks):
    with Group(W, trunks) as group:
        for dtype, library in [("float32", "mlx"), ("bfloat16", "mlx"), ("int8", "numpy")]:
            n = (64 << 20) // np.dtype("uint16" if dtype == "bfloat16" else dtype).itemsize
            group.call(large, dtype, library, n, seconds=120)


def large(me, dtype: str, library: str, n: int) -> None:
    """Small numbers in a pattern with an odd period, so that the whole sum is cheap to know."""
    pattern = np.arange(n) % 13
    kind = np.float32 if dtype in FLOATS else dtype
    x = made((pattern - 6 + me.rank).astype(kind), dtype, library)
    W = me.job.size
    same(me.job.all_reduce(x), ((pattern - 6) * W + W * (W - 1) // 2).astype(kind), "64 MB")


@pytest.mark.parametrize("W", [2, 4])
def test_a_barrier_holds_everyone_until_the_last_has_come(W):
    rounds = list(zip(*ranks(W, barriers), strict=True))
    for k, times in enumerate(rounds):
        last, first = max(begin for begin, _ in times), min(end for _, end in times)
        assert last <= first, f"barrier {k}: one left {last - first:.3f} s before another came"


@settings(max_examples=60, deadline=None)
@given(st.data())
def check_shapes(group, data):
    W = len(group.ranks)
    dtype, library = data.draw(st.sampled_from(KINDS))
    shape = data.draw(st.lists(st.integers(0, 40), max_size=3).map(tuple))
    group.call(everything, dtype, shape, library, data.draw(st.integers(0, 1 << 31)))
    assert W == len(group.addresses)


def test_shapes_and_dtypes_that_hypothesis_draws():
    with Group(3, 2) as group:
        check_shapes(group)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 rounded once to dtype, by MLX, which has its own code for it."""
    return np.array(mx.array(x.astype(np.float32)).astype(getattr(mx, dtype)).astype(mx.float32))


def random_sum(me, dtype: str, n: int, spread: float) -> tuple:
    """(hash of the sum's bytes, the sum as float32) of floats that round at each addition."""
    x = mx.array(random_floats(n, me.rank, spread)).astype(getattr(mx, dtype))
    got = me.job.all_reduce(x)
    view = np.frombuffer(got, np.uint8)
    return hashlib.sha256(view.tobytes()).hexdigest(), plain(got) if me.rank == 0 else None


def random_floats(n: int, rank: int, spread: float) -> np.ndarray:
    draw = np.random.default_rng([n, rank])
    return (draw.standard_normal(n) * np.exp(spread * draw.standard_normal(n))).astype(np.float32)


@pytest.mark.parametrize("W, trunks", [(2, 1), (3, 1), (5, 2)])
def test_halves_are_rounded_once_per_hop_and_all_sums_are_the_same_bits(W, trunks):
    n = 300_001
    cases = [(dtype, n, spread) for dtype in FLOATS for spread in (0.0, 1.0)]
    runs = []
    for _ in range(2):
        with Group(W, trunks) as group:
            runs.append([group.call(random_sum, *case) for case in cases])
    for (dtype, n, spread), *both in zip(cases, *runs, strict=True):
        assert len({said[0] for run in both for said in run}) == 1, f"{dtype}: sums differ in bits"
        unit = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
        tiny = 2.0**-24 if dtype == "float16" else 2.0**-126
        parts = np.stack([rounded(random_floats(n, k, spread), dtype) for k in range(W)])
        got, exact = both[0][0][1].astype(np.float64), parts.sum(0, dtype=np.float64)
        bound = (W - 1) * 1.001 * unit * np.abs(parts).sum(0, dtype=np.float64) + tiny
        worst = (np.abs(got - exact) / bound).max()
        assert worst <= 1, f"{dtype}: {worst:.2f} of one rounding per hop"
        # element by element it is one of the W orders round the ring, each sum rounded once
        fits = np.zeros(n, bool)
        for first in range(W):
            total = parts[first]
            for k in range(1, W):
                total = rounded(total + parts[(first + k) % W], dtype)
            fits |= total == both[0][0][1]
        assert fits.all(), f"{dtype}: {(~fits).sum()} of {n} are no sum rounded once per hop"


def special_values(me) -> None:
    job, W, r = me.job, me.job.size, me.rank
    for dtype in FLOATS:
        kind = getattr(mx, dtype)
        x = mx.array([np.nan, np.inf, -np.inf, r + 1.0] * 5).astype(kind)
        x = mx.where(mx.arange(20) < (20 if r == 0 else 0), x, mx.ones(20, kind)).astype(kind)
        got = plain(job.all_reduce(x)).reshape(5, 4)
        assert np.isnan(got[:, 0]).all(), f"NaN in {dtype}: {got}"
        assert np.isposinf(got[:, 1]).all() and np.isneginf(got[:, 2]).all(), f"{dtype}: {got}"
        same(got[:, 3], np.full(5, W, np.float32), dtype)
        x = mx.array([np.inf if r == 0 else -np.inf] * 3).astype(kind)
        assert np.isnan(plain(job.all_reduce(x))).all(), f"inf - inf in {dtype}"
        top = float(mx.finfo(kind).max)
        got = plain(job.all_reduce(mx.array([top, -top]).astype(kind)))
        assert got[0] == np.inf and got[1] == -np.inf, f"overflow in {dtype}: {got}"
        got = plain(job.all_reduce(mx.array([-0.0]).astype(kind)))
        assert got[0] == 0 and np.signbit(got[0]), f"-0.0 summed in {dtype}"
    # every number there is in half precision plus one other is what MLX makes of it
    for dtype in FLOATS[1:]:
        bits = mx.arange(1 << 16).astype(mx.uint16).view(getattr(mx, dtype))
        for other in (0.0, 1.0, -3.0e-5, 0.007, 1e30 if dtype == "bfloat16" else 6e4):
            other = mx.full(bits.shape, other).astype(bits.dtype)
            want = (bits.astype(mx.float32) + other.astype(mx.float32)).astype(bits.dtype)
            want = want if r < 2 else None
            mine = [bits, other][r] if r < 2 else mx.full(bits.shape, -0.0).astype(bits.dtype)
            got = job.all_reduce(mx.array(mine))
            if want is not None:
                got, want = plain(got), plain(want)
                where = ~((got == want) | (np.isnan(got) & np.isnan(want)))
                assert not where.any(), f"{dtype}: {where.sum()} wrong, {np.argwhere(where)[:3]}"
    for dtype in comm.DTYPES[3:]:  # integers wrap round (Open MPI's int8 does not)
        top = np.iinfo(dtype).max
        want = np.array([[top, top - k] for k in range(W)], dtype).sum(0, dtype=dtype)
        same(job.all_reduce(np.array([top, top - r], dtype)), want, f"overflow of {dtype}")
    # broadcast and the rest move bits: NaN's payload, signalling ones, minus zero
    for words, kind in ((np.uint32, np.float32), (np.uint16, np.float16)):
        odd = [1 << 31, 0x7F800001, 0xFFC12345, 0x7FC00001, 1, 0x80000001]
        odd = odd if words is np.uint32 else [0x8000, 0x7C01, 0xFE42, 0x7E01, 1, 0x8001]
        bits = np.array(odd * 7, words)
        for root in range(W):
            x = (bits if r == root else np.zeros_like(bits)).view(kind)
            assert (job.broadcast(x, root).view(words) == bits).all(), f"{kind} from {root}"
            x = (bits if r == root else np.zeros_like(bits)).view(kind)
            y = job.broadcast(mx.array(bits).view(mx.float32 if kind == np.float32 else mx.float16))
            assert (np.frombuffer(y, words) == bits).all(), f"mx {kind} from {root}"
        gathered = job.all_gather(bits.view(kind)).view(words)
        assert (gathered.reshape(W, -1) == bits).all()


@pytest.mark.parametrize("W", [2, 3])
def test_nan_infinity_minus_zero_and_every_half(W):
    ranks(W, special_values)


def strict_sums(me) -> None:
    warnings.simplefilter("error")
    for dtype in FLOATS:
        top = mx.finfo(getattr(mx, dtype)).max
        me.job.all_reduce(
            mx.array([top, np.inf if me.rank else -np.inf]).astype(getattr(mx, dtype))
        )


def test_sums_that_overflow_warn_nobody():
    ranks(2, strict_sums)


def wrong_arrays(me) -> list[str]:
    """What is refused before anything is sent: the job goes on."""
    job, W, said = me.job, me.job.size, []
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    wrong = [
        lambda: job.all_reduce(np.zeros((4, 4), np.float32).T[:, :2]),
        lambda: job.all_reduce(frozen),
        lambda: job.all_reduce(np.zeros(3, np.float64)),
        lambda: job.all_reduce(mx.zeros(3, mx.complex64)),
        lambda: job.all_reduce(mx.zeros(3, mx.bool_)),
        lambda: job.all_reduce(mx.zeros((4, 6)).T),
        lambda: job.reduce_scatter(np.zeros(W + 1, np.float32)),
        lambda: job.reduce_scatter(np.zeros((), np.float32)),
        lambda: job.broadcast(np.zeros(3, np.float32), W),
        lambda: job.broadcast(np.zeros(3, np.float32), -1),
        lambda: job.send(np.zeros(3, np.float32), me.rank),
        lambda: job.recv(np.zeros(3, np.float32), W),
    ]
    for k, call in enumerate(wrong):
        try:
            call()
            said.append(f"{k}: no error")
        except ValueError as error:
            said += [] if re.search("wanted|not contiguous", str(error)) else [f"{k}: {error}"]
        except Exception as error:
            said.append(f"{k}: {error!r}")
    same(job.all_reduce(np.ones(3, np.float32)), np.full(3, W, np.float32), "afterwards")
    return said


def test_arrays_that_cannot_be_sent_are_refused_and_the_job_goes_on():
    assert ranks(2, wrong_arrays) == [[], []]


def alone(me) -> None:
    with me.job as job:
        x = mx.arange(4.0)
        assert job.all_reduce(x) is x and job.broadcast(x) is x and job.reduce_scatter(x) is x
        assert job.all_gather(x) is x and job.all_reduce_async(x).done()
        job.barrier()
        assert not comm_threads()
    job.close()


def test_one_rank_needs_nobody():
    ranks(1, alone)


# --- MLX's backends behind the same interface -----------------------------------------------------

THOROUGH = [pytest.param(W, True, marks=pytest.mark.slow) for W in (2, 3, 4)]


def interface(me, thorough: bool) -> str:
    """What every backend must do; integers that MLX's CPU can sum, all operations, handles."""
    W = me.job.size
    if thorough:
        many_sizes(me, sorted({0, 1, W - 1, W, W + 1, 1023, 70_001}))
    many_sizes(me, [0, 7], KINDS if thorough else KINDS[::2])
    many_sizes(me, [W - 1, 70_001], [("float32", "mlx"), ("bfloat16", "mlx"), ("int64", "numpy")])
    letters(me, (0, 1, 1023))
    several(me)
    barriers(me, 3)
    for dtype in FLOATS:
        me.job.all_reduce(mx.array([np.nan, 1.0]).astype(getattr(mx, dtype)))
    bits = np.array([1 << 31, 0x7F800001, 0xFFC12345, 1], np.uint32)
    for root in range(me.job.size):
        x = (bits if me.rank == root else np.zeros_like(bits)).view(np.float32)
        assert (me.job.broadcast(x, root).view(np.uint32) == bits).all()
    overlapped(me, (0, 1 << 12))
    return me.job.backend


@pytest.mark.parametrize("W, thorough", [(3, False), *THOROUGH])
def test_the_same_interface_on_mlx_ring(W, thorough, tmp_path):
    said = ranks(W, interface, thorough, backend="ring", folder=tmp_path, seconds=200)
    assert said == ["ring"] * W


def mpi_rank(folder: str, thorough: bool) -> None:
    """A rank that mpirun has started."""
    sys.path.insert(0, str(HERE))
    me = Me(0, [], "mpi", {}, {})
    with comm.connect("mpi", **QUICK) as me.joined:
        me.rank = me.job.rank
        try:
            said = interface(me, thorough)
        except BaseException:
            said = traceback.format_exc()
            raise
        finally:
            Path(folder, f"{me.rank}.json").write_text(json.dumps(said))


def mpi(W: int, code: str, seconds: float = 120) -> subprocess.CompletedProcess:
    roots = {f"OMPI_ALLOW_RUN_AS_ROOT{x}": "1" for x in ("", "_CONFIRM")}
    path = os.pathsep.join([str(HERE), str(HERE.parent)])
    env = os.environ | roots | {"MLX_MPI_LIBNAME": "libmpi.so.40", "PYTHONPATH": path}
    command = [MPIRUN, "--oversubscribe", "-n", str(W), sys.executable, "-c", code]
    return subprocess.run(command, env=env, timeout=seconds, capture_output=True, text=True)


@pytest.mark.skipif(not (MPIRUN and LIBMPI), reason="needs mpirun and libmpi.so.40 (openmpi-bin)")
@pytest.mark.parametrize("W, thorough", [(2, False), *THOROUGH])
def test_the_same_interface_on_mpi(W, thorough, tmp_path):
    done = mpi(W, f"import test_comm; test_comm.mpi_rank({str(tmp_path)!r}, {thorough})")
    said = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert said == ["mpi"] * W, done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]


# --- Overlap --------------------------------------------------------------------------------------


def tree_of(seed: int, rank: int) -> dict:
    """Lazy leaves of three dtypes with names, lists and depth; some empty, one transposed."""
    draw, dtypes = random.Random(seed), (mx.float32, mx.bfloat16, mx.float16)

    def leaf(k):
        shape = tuple(draw.choice([0, 1, 3, 17, 64]) for _ in range(draw.choice([0, 1, 2, 2])))
        values = whole("float32", shape, seed, rank, k)
        array = mx.array(values).astype(draw.choice(dtypes)) + 0
        return array.T if draw.random() < 0.3 else array

    layers = [{"w": leaf(10 * i), "b": leaf(10 * i + 1)} for i in range(draw.randint(1, 7))]
    return {"layers": layers, "head": leaf(99), "none": {}}


def overlapped(me, sizes, seeds=(1, 2, 3)) -> None:
    """Sums of trees against sums worked out alone; the job's other operations in between."""
    job, W = me.job, me.job.size
    for size in sizes:
        with comm.Overlap(job, size, max(1, size // 8)) as reduce:
            for seed in seeds:
                tokens = mx.array(3 * me.rank + seed, mx.int32)
                loss = mx.array(0.5 * me.rank)
                own = tree_of(seed, me.rank)
                grads, (loss, tokens) = reduce(own, loss, tokens)
                for (name, x), (_, y) in zip(
                    tree_flatten(own), tree_flatten(tree_of(seed, me.rank)), strict=True
                ):
                    same(x, plain(y), f"{name}, which is the caller's")
                want = [tree_flatten(tree_of(seed, k)) for k in range(W)]
                got = tree_flatten(grads)
                assert [name for name, _ in got] == [name for name, _ in want[0]]
                for (name, x), *parts in zip(got, *want, strict=True):
                    assert x.dtype == parts[0][1].dtype
                    total = sum(plain(p).astype(np.float32) for _, p in parts)
                    same(x, np.asarray(total, plain(x).dtype), f"{name} {size} {seed}")
                assert loss.item() == 0.25 * W * (W - 1)
                assert tokens.item() == 3 * W * (W - 1) // 2 + W * seed
                assert set(grads) == {"layers", "head"} | ({"none"} & set(grads))
            assert reduce({}) == ({}, ())
            empty, (n,) = reduce({}, mx.array(1))
            assert empty == {} and n.item() == W
            none = reduce({"a": mx.zeros((0, 3)), "b": [mx.zeros(0, mx.float16)]})[0]
            assert none["a"].shape == (0, 3) and none["b"][0].dtype == mx.float16
            same(job.all_reduce(np.ones(2, np.int32)), np.full(2, W, np.int32), "in between")


def many_trees(me, steps: int) -> None:
    with comm.Overlap(me.job, 2000, 100) as reduce:
        for step in range(steps):
            got, _ = reduce(tree_of(1000 + step, me.rank))
            parts = [tree_of(1000 + step, k) for k in range(me.job.size)]
            want = tree_map(lambda *p: sum(x.astype(mx.float32) for x in p), *parts)
            for (name, x), (_, total) in zip(tree_flatten(got), tree_flatten(want), strict=True):
                same(x.astype(mx.float32), np.array(total), f"{name} in step {step}")


@pytest.mark.parametrize("W", [1, 2, 3])
def test_overlap_sums_mixed_trees_in_buckets_of_any_size(W):
    with Group(W, 2) as group:
        group.call(overlapped, (0, 1, 100, 5000, 8 << 20))


def test_overlap_two_hundred_steps_of_varied_shapes():
    ranks(2, many_trees, 200)


class Small(nn.Module):
    """A model with a norm, a bias, a weight used twice and one that is frozen."""

    def __init__(self):
        super().__init__()
        mx.random.seed(3)
        self.embed = nn.Embedding(50, 24)
        self.blocks = [nn.Linear(24, 24) for _ in range(4)]
        self.norm, self.frozen = nn.RMSNorm(24), nn.Linear(24, 24)
        self.frozen.freeze()

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + nn.gelu(block(self.norm(x)))
        return self.embed.as_linear(x + self.frozen(x))


def summed_loss(model, tokens, mask):
    losses = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    return (losses * mask).sum(), mask.sum()


def batch_of(rows: range) -> tuple[mx.array, mx.array]:
    """Rows of a data set: tokens (rows, 9), and which of them count, more in some than others."""
    picks = [np.random.default_rng(i) for i in rows]
    tokens = np.stack([d.integers(0, 50, 9) for d in picks])
    mask = np.stack([np.arange(8) < d.integers(1, 9) for d in picks])
    return mx.array(tokens), mx.array(mask.astype(np.float32))


def trained(me, bucket_bytes: int, compiled: bool, micro: int, steps: int = 3) -> str:
    """Steps on this rank's rows against the same on all rows alone; a hash of the parameters."""
    W, r, rows = me.job.size, me.rank, 4
    models = [Small(), Small()]
    steppers = []
    for model in models:
        value_and_grad = nn.value_and_grad(model, summed_loss)
        state = model.state
        if compiled:
            value_and_grad = _compiled(value_and_grad, model, state)
        steppers.append(value_and_grad)
    with comm.Overlap(me.job, bucket_bytes, bucket_bytes // 8) as reduce:
        for step in range(steps):
            total, sums = None, [mx.array(0.0), mx.array(0.0)]
            for k in range(micro):
                first = ((step * micro + k) * W + r) * rows
                (loss, tokens), grads = steppers[0](
                    models[0], *batch_of(range(first, first + rows))
                )
                total = grads if total is None else tree_map(mx.add, total, grads)
                sums = [sums[0] + loss, sums[1] + tokens]
            grads, (loss, tokens) = reduce(total, *sums)
            span = range(step * micro * W * rows, (step + 1) * micro * W * rows)
            (loss_alone, tokens_alone), alone = steppers[1](models[1], *batch_of(span))
            assert tokens.item() == tokens_alone.item()
            assert abs(loss.item() / loss_alone.item() - 1) < 1e-5
            for (name, x), (_, y) in zip(tree_flatten(grads), tree_flatten(alone), strict=True):
                error, size = mx.abs(x - y).max().item(), mx.abs(y).max().item()
                assert error <= 1e-5 * size + 1e-6, f"step {step}, {name}: off by {error} of {size}"
            for model, by in ((models[0], (grads, tokens)), (models[1], (alone, tokens_alone))):
                rate = 0.5 / by[1].item()
                params = dict(tree_flatten(model.trainable_parameters()))
                moved = [(n, params[n] - rate * g) for n, g in tree_flatten(by[0])]
                model.update(tree_unflatten(moved))
                mx.eval(model.parameters())
    leaves = [np.array(x).tobytes() for _, x in tree_flatten(models[0].parameters())]
    return hashlib.sha256(b"".join(leaves)).hexdigest()


def _compiled(value_and_grad, model, state):
    inner = mx.compile(lambda *batch: value_and_grad(model, *batch), inputs=state, outputs=state)
    return lambda _, *batch: inner(*batch)


@pytest.mark.parametrize("bucket_bytes", [0, 3000, 8 << 20])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_with_overlap_is_training_on_the_whole_batch(compiled, bucket_bytes):
    with Group(2) as group:
        for micro in (1, 3):
            hashes = group.call(trained, bucket_bytes, compiled, micro)
            assert len(set(hashes)) == 1, "ranks have drifted apart"


def test_the_tree_comes_back_as_it_was():
    ranks(2, odd_trees)


def odd_trees(me) -> None:
    """Names with dots and of digits, empty parts, tuples: the same structure and names."""
    x, y = mx.array([1.0, 2.0]), mx.array([[3], [4]], mx.float16)
    for tree in (
        {"a.b": x, "a": {"c": y}},
        {"7": x, "1": y},
        {"layers": [{}, {"w": x}, {}], "none": {}},
        [x, (y, [x])],
        x,
    ):
        with comm.Overlap(me.job) as reduce:
            got, _ = reduce(tree)
        assert shape_of(got) == shape_of(tree), f"{tree} came back as {got}"


def shape_of(tree):
    if isinstance(tree, dict):
        return {name: shape_of(part) for name, part in tree.items()}
    return (
        [shape_of(p) for p in tree] if isinstance(tree, (list, tuple)) else (tree.shape, tree.dtype)
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([mx.float32, mx.bfloat16, mx.float16]), st.integers(0, 50))),
    st.integers(0, 400),
    st.integers(1, 400),
)
def test_buckets_go_from_the_last_leaf_to_the_first_one_dtype_each(kinds, limit, first):
    reduce = comm.Overlap(comm.Ring(0, [[("127.0.0.1", 0)]]), limit, first)
    leaves = [(f"leaf {i}", mx.zeros(n, dtype)) for i, (dtype, n) in enumerate(kinds)]
    plan = reduce.plan(leaves)
    assert sorted(i for bucket in plan for i in bucket) == list(range(len(leaves)))
    for bucket in plan:
        assert len({kinds[i][0] for i in bucket}) == 1
        assert bucket == sorted(bucket, reverse=True)
    for dtype in {dtype for dtype, _ in kinds}:
        order = [i for bucket in plan for i in bucket if kinds[i][0] == dtype]
        assert order == sorted(order, reverse=True), f"{plan}: not from the last to the first"
    if not limit:
        assert len(plan) == len({dtype for dtype, _ in kinds})
    many = [sum(leaves[i][1].nbytes for i in bucket) for bucket in plan]
    for bucket, size in zip(plan, many, strict=True):
        assert not limit or size - leaves[bucket[-1]][1].nbytes < limit, "closed too late"
    full = [size for size in many if limit and size >= limit]
    if limit and many and many[0] >= min(first, limit):  # closed by its size, not by the end
        assert many[0] - leaves[plan[0][-1]][1].nbytes < min(first, limit), "first one too large"
    rest = len(many) - len(full)
    assert not limit or rest <= 1 + len({dtype for dtype, _ in kinds}), "closed too early"
    assert reduce.plan(list(leaves)) is plan, "the same leaves are planned once"


def timed(me, path: str) -> None:
    with comm.Overlap(me.job, 4000, 500, timeline=path) as reduce:
        for step in range(3):
            reduce(tree_of(50 + step, me.rank), mx.array(1.0))


def test_the_timeline_is_a_chrome_trace_with_three_rows(tmp_path):
    ranks(2, timed, str(tmp_path / "trace.json"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace.1.json", "trace.json"]
    for rank, name in enumerate(("trace.json", "trace.1.json")):
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert rows == {0: "main", 1: "backward", 2: "network"}
        assert {e["pid"] for e in events} == {rank}
        spans = [e for e in events if e["ph"] == "X"]
        assert {e["tid"] for e in spans} == {0, 1, 2} and {e["ph"] for e in events} == {"X", "M"}
        assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans), spans
        assert sum(e["name"] == "wait" for e in spans) == 3
        for e in spans:
            assert e["tid"] == 0 or e["args"]["bytes"] >= 0
        numbers = [e["name"] for e in spans if e["tid"] == 2]
        assert len(numbers) == len([e for e in spans if e["tid"] == 1]) >= 6


def overlap_breaks(me, faulty: int, how: str) -> dict:
    """Steps until a rank fails between two of them, or in one; what the others are told."""
    job, said = me.job, {}
    with comm.Overlap(job, 4000, 500) as reduce:
        for step in range(1000):
            if step == 4 and me.rank == faulty:
                if how == "raises":
                    job.fail("out of data")
                elif how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                else:  # another tree
                    said = failure(reduce, {"layers": mx.zeros(123)})
                    break
            if said := failure(reduce, tree_of(step % 5, me.rank)):
                break
        again = failure(reduce, tree_of(1, me.rank))
        assert again and again["seconds"] < 0.5 and again["reason"] == said["reason"]
    assert "comm_overlap" not in comm_threads(), "its thread goes on after close"
    job.close()
    assert not left_over(me)
    return said


@pytest.mark.parametrize("how", ["raises", "killed", "differs"])
def test_overlap_passes_a_failure_on_and_its_thread_ends(how):
    with Group(3) as group:
        others = [0, 2] if how == "killed" else [0, 1, 2]
        group.begin(overlap_breaks, 1, how)
        for said in group.end(30, others):
            assert said["rank"] == 1
            wanted = {"raises": "out of data", "killed": "its process has ended"}
            assert wanted.get(how, "the ranks disagree: ") in said["reason"]


# --- Who may join ---------------------------------------------------------------------------------


def try_to_join(me, *, delay: float = 0.0, version: int | None = None, rounds: int = 0, **changes):
    """Joins, sums, and leaves; or how it failed, and after how long."""
    time.sleep(delay * me.rank)
    comm.VERSION = version or comm.VERSION
    files, begin = open_files(), time.monotonic()
    if backend := changes.pop("backend", None):
        me.backend = backend
    try:
        job = me.join(**changes)
    except comm.CommError as e:
        seconds = time.monotonic() - begin
        said = {"rank": e.rank, "host": e.host, "reason": e.reason, "seconds": seconds}
        assert not left_over(me) and open_files() == files, "something is left"
        return said
    for _ in range(rounds):
        job.all_reduce(np.ones(10, np.float32))
    total = job.all_reduce(np.array([1 << job.rank]))[0]
    job.close()
    assert not left_over(me) and open_files() == files, "something is left"
    return int(total)


STRANGERS = {
    "secret": ({"secret": b"another"}, "wrong secret"),
    "job": ({"job": "another"}, "another job, hostfile or backend"),
    "version": ({"version": 99}, "another version of comm.py"),
    "world": ({"world": 4}, "another job, hostfile or backend"),
    "backend": ({"backend": "mpi"}, "another job, hostfile or backend"),
}


def join_with_stranger(case: tuple[str, int]) -> None:
    """The others come first, so that the odd one meets them, whoever of them speaks first."""
    kind, odd = case
    changes, why = STRANGERS[kind]
    with Group(3, connect=2.0) as group:
        changes = dict(changes)
        if changes.pop("world", None):
            changes["addresses"] = group.addresses + places(1)
        group.begin(try_to_join, ranks=[r for r in range(3) if r != odd])
        time.sleep(0.7)
        group.pipes[odd].send((call_with, (try_to_join, changes)))
        said = group.end(30)
    for rank, mine in enumerate(said):
        assert mine["seconds"] < 9 and "\n" not in mine["reason"], said
        assert mine["rank"] == odd or rank == odd, f"{case}, rank {rank}: {said}"
    # a third one may have met neither of the two, and know only that one is missing
    assert why in said[odd]["reason"], f"{case}: {said}"
    assert any(why in said[r]["reason"] for r in range(3) if r != odd), f"{case}: {said}"
    assert odd == 0 or why in said[0]["reason"], f"{case}: {said}"


def call_with(me, function, changes: dict):
    return function(me, **changes)


def test_a_rank_of_another_job_is_turned_away_and_named():
    together(join_with_stranger, *((kind, odd) for kind in STRANGERS for odd in range(3)))


def digest(job: str = "test") -> bytes:
    return hashlib.sha256(f"tcp {job}".encode()).digest()[:16]


def hello(rank: int, purpose: int, world: int, job: bytes | None = None) -> bytes:
    job = digest() if job is None else job
    nonce = os.urandom(16)
    return comm.HELLO.pack(comm.MAGIC, comm.VERSION, world, rank, purpose, job, nonce)


def poke(address, *parts: bytes, seconds: float = 8.0) -> bytes:
    """Sends bytes to a port; all that comes back until it hangs up."""
    got = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        with socket.create_connection(address, seconds) as sock:
            for part in parts:
                sock.sendall(part)
            while more := sock.recv(4096):
                got += more
    return got


def garbage(draw: random.Random, world: int) -> list[bytes]:
    """Parts to send: from noise to all of a hello with a wrong proof."""
    noise = draw.randbytes(draw.choice([0, 1, 7, 61, 62, 63, 200, 5000, 1 << 20]))
    purpose = draw.choice([0, 1, comm.CONTROL, comm.MESSAGES, 77])
    right = hello(draw.randrange(world), purpose, world)
    flipped = bytearray(right)
    flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    return draw.choice(
        [
            [noise],
            [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
            [comm.MAGIC + noise],
            [right[: draw.randrange(len(right))]],
            [right, draw.randbytes(32)],
            [right, noise],
            [bytes(flipped), draw.randbytes(32)],
            [hello(draw.randrange(65536), purpose, draw.randrange(65536)), noise],
            [hello(0, purpose, world, draw.randbytes(16)), noise],
            [b"\0" * 4096],
            [right, right, right],
        ]
    )


def sums_for(me, seconds: float, leak: bool = False) -> tuple[int, int, int]:
    """Checked sums for so long; how many, and open files at first and at the end."""
    job, W, end, count = me.job, me.job.size, time.monotonic() + seconds, 0
    begun = open_files()
    while not job.broadcast(np.array([time.monotonic() > end]).astype(np.uint8))[0]:
        n = 1 + 9973 * (count % 7)
        got = job.all_reduce(whole("float32", n, count, me.rank))
        same(got, sum(whole("float32", n, count, k) for k in range(W)), f"sum {count}")
        count += 1
    patience = time.monotonic() + 7.0  # strangers that say nothing are given five seconds
    while leak and open_files() > begun and time.monotonic() < patience:
        time.sleep(0.1)
    job.barrier()
    return count, begun, open_files()


def throw(address, world: int, seed: int, stop: threading.Event, silent: list) -> None:
    draw = random.Random(seed)
    while not stop.is_set():
        if draw.random() < 0.1 and len(silent) < 20:
            with contextlib.suppress(OSError):
                silent.append(socket.create_connection(address, 1.0))
        else:
            poke(address, *garbage(draw, world), seconds=draw.choice([0.01, 0.1, 0.3]))
        stop.wait(0.02)


def test_garbage_before_during_and_after_joining_changes_nothing():
    stop, silent = threading.Event(), []
    with Group(3, 2) as group:
        ports = [a for host in group.addresses for a in host]
        throwers = [
            threading.Thread(target=throw, args=(a, 3, k, stop, silent))
            for k, a in enumerate(ports)
        ]
        for thread in throwers:
            thread.start()
        try:
            time.sleep(0.3)
            group.begin(sums_for, 2.0, True)
            time.sleep(3.0)
        finally:
            stop.set()
        for end in [*throwers, *silent]:
            end.join() if isinstance(end, threading.Thread) else end.close()
        for count, before, after in group.end(60):
            assert count > 10
            # strangers that were there at first may have gone; none has stayed
            assert after <= before, f"{before} files open, then {after}"


@pytest.mark.parametrize("seconds", [0.5, pytest.param(7.0, marks=pytest.mark.slow)])
def test_a_client_that_says_nothing_holds_nobody_up(seconds):
    with Group(3) as group, contextlib.ExitStack() as stack:
        group.begin(sums_for, seconds, ranks=[0])
        for _ in range(20):
            while True:
                try:
                    sock = socket.create_connection(group.addresses[0][0], 1.0)
                    break
                except OSError:
                    time.sleep(0.02)
            stack.enter_context(sock)
        begin = time.monotonic()
        group.begin(sums_for, seconds, ranks=[1, 2])
        for count, before, after in group.end(30):
            assert count > 5 and after <= before
        assert time.monotonic() - begin < seconds + 4.0, "waited for the silent ones"
        if seconds > 5:  # by now they have been given up
            sock.settimeout(1.0)
            assert sock.recv(1) == b""


class Tap:
    """Passes a port's connections on to another one and keeps what was said."""

    def __init__(self, target):
        self.target, self.heard = target, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                threading.Thread(target=self.relay, args=(sock,), daemon=True).start()

    def relay(self, sock) -> None:
        try:
            onward = socket.create_connection(self.target, 5.0)
        except OSError:
            return sock.close()
        onward.settimeout(None)
        heard = bytearray()
        self.heard.append(heard)

        def pump(source, sink, keep):
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    if keep is not None:
                        keep += data
                    sink.sendall(data)
            for end in (source, sink):
                comm._shut(end)

        threading.Thread(target=pump, args=(onward, sock, None), daemon=True).start()
        pump(sock, onward, heard)


def test_a_recorded_handshake_is_worth_nothing():
    with Group(2) as group:
        tap = Tap(group.addresses[0][0])
        seen = [[tap.address], group.addresses[1]]
        group.pipes[1].send((call_with, (sums_through, {"addresses": seen})))
        group.begin(sums_for, 1.0, ranks=[0])
        time.sleep(0.5)
        size = comm.HELLO.size + 32
        records = [bytes(h[:size]) for h in tap.heard if len(h) >= size]
        assert len(records) >= 2, "control and trunk"
        for record in records:  # while the one who made it is connected
            answer = poke(group.addresses[0][0], record)
            assert len(answer) == 50 and answer[0] == 0 and answer[49] == 4, answer
            answer = poke(group.addresses[0][0], record, b"\4" * 500)
            assert answer[49:50] in (b"\4", b""), answer
        group.end(30)
    with Group(2) as group:  # and in the next job of the same name and secret
        group.begin(sums_for, 0.6)
        for record in records:
            for _ in range(40):
                if answer := poke(group.addresses[0][0], record):
                    break
                time.sleep(0.05)
            assert answer[49] == 4
        group.end(30)
    tap.listener.close()


def sums_through(me, addresses: list) -> tuple:
    me.addresses = addresses
    return sums_for(me, 1.0)


def claim(address, rank: int, purpose: int, world: int) -> socket.socket:
    """A connection of somebody who knows the secret and says that it is `rank`."""
    sock = socket.create_connection(address, 5.0)
    comm._greet(sock, hello(rank, purpose, world), b"of this job")
    return sock


def claims_of_others(purpose: int) -> None:
    """To each rank come connections of all others once more; half of them end at once."""
    with Group(3) as group:
        group.begin(sums_for, 1.5)
        time.sleep(0.6)
        pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
        for left, (a, b) in [*enumerate(pairs), *enumerate(pairs, 1)]:
            with contextlib.suppress(OSError):  # it may be turned away
                sock = claim(group.addresses[a][0], b, purpose, 3)
                sock.sendall(b"\xff" * 1000)
                if left % 2:
                    sock.close()
        for count, _, _ in group.end(30):
            assert count > 5


def test_a_second_process_of_a_connected_rank_changes_nothing():
    together(claims_of_others, comm.CONTROL, 0, 1)


def test_a_rank_started_twice_is_told_and_the_first_goes_on():
    with Group(2) as group, Group(2, ranks=[1], connect=3.0) as other:
        group.begin(sums_for, 1.8)
        time.sleep(0.7)
        other.pipes[1].send((call_with, (started_twice, {"addresses": group.addresses})))
        (said,) = other.end(30)
        assert said is not None and said["rank"] in (0, 1), said
        assert [count > 5 for count, _, _ in group.end(30)] == [True, True]


def started_twice(me, addresses: list) -> dict | None:
    me.addresses = [addresses[0], places(1)[0]]
    return failure(me.join)


def test_a_taken_port_is_named():
    with Group(3, connect=4.0) as group:
        with socket.create_server(group.addresses[1][0]):
            said = group.call(try_to_join, seconds=30)
    port = group.addresses[1][0][1]
    assert said[1]["rank"] == 1 and said[1]["seconds"] < 8
    assert said[1]["reason"].startswith(f"cannot listen on 127.0.0.1 port {port}: "), said[1]
    for k in (0, 2):
        assert said[k]["rank"] == 1 and said[k]["seconds"] < 12, said[k]


def test_ranks_started_seconds_apart_join_in_any_order():
    with Group(3) as first, Group(3) as second:
        first.begin(try_to_join, ranks=[0])
        second.begin(try_to_join, ranks=[2])
        time.sleep(0.6)
        first.begin(try_to_join, ranks=[1])
        second.begin(try_to_join, ranks=[1])
        time.sleep(1.1)
        first.begin(try_to_join, ranks=[2])
        second.begin(try_to_join, ranks=[0])
        assert first.end(30) == second.end(30) == [7, 7, 7]


def join_without(case: tuple[int, int]) -> None:
    W, missing = case
    with Group(W, ranks=[r for r in range(W) if r != missing], connect=1.5) as group:
        for said in group.call(try_to_join, seconds=30):
            assert said["rank"] == missing and said["seconds"] < 1.5 + 6, (case, said)
            assert "within 1.5 s" in said["reason"], said


def test_a_rank_that_never_starts_is_named_by_all():
    together(join_without, (2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 3))


def join_with_wrong_address(case: tuple[int, int]) -> None:
    odd, of = case
    with Group(3, connect=1.5) as group:
        addresses = [list(host) for host in group.addresses]
        wrong = places(1)[0][0]
        addresses[of] = [wrong]
        group.pipes[odd].send((call_with, (try_to_join, {"addresses": addresses})))
        group.begin(try_to_join, ranks=[r for r in range(3) if r != odd])
        said = group.end(30)
    where = f"no answer at 127.0.0.1 port {wrong[1]} for rank {odd} "
    for rank, mine in enumerate(said):
        assert mine["seconds"] < 9, said
        if of or rank == odd:
            assert mine["rank"] == of and mine["reason"].startswith(where), (case, said)
        else:  # one that cannot reach rank 0 can tell nobody
            assert mine["rank"] == odd and "did not join" in mine["reason"], (case, said)


def test_one_wrong_address_is_named_with_the_pair():
    together(join_with_wrong_address, (0, 1), (1, 2), (2, 0))


# --- What goes wrong under way --------------------------------------------------------------------


def soon(which: int) -> None:
    """A signal to this process a moment later, in the middle of an operation."""
    threading.Timer(0.03, os.kill, (os.getpid(), which)).start()


def swapped(job, x) -> None:
    handles = job.all_reduce_async(x, bucket=8), job.all_reduce_async(np.array(x), bucket=7)
    for handle in handles:
        handle.wait()


def in_order(job, x) -> None:
    handles = job.all_reduce_async(x, bucket=7), job.all_reduce_async(np.array(x), bucket=8)
    for handle in handles:
        handle.wait()


def sleepy(job, x) -> None:
    end = time.monotonic() + 30.0
    while job.error is None and time.monotonic() < end:
        time.sleep(0.05)
    job.barrier()


def usual(job, x) -> None:
    job.all_reduce(x, bucket=3)


def raising(job, x) -> None:
    raise ValueError("the data ran out at row 17")


# what the faulty rank does, what the others do meanwhile, and what all are told of it
FAULTS = {
    "killed": (lambda job, x: soon(signal.SIGKILL), usual, ["its process has ended"]),
    "exits": (
        lambda job, x: threading.Timer(0.03, os._exit, (3,)).start(),
        usual,
        ["its process has ended"],
    ),
    "stopped": (lambda job, x: soon(signal.SIGSTOP), usual, ["no sign of life for 3 s"]),
    "raises": (raising, usual, ["ValueError: the data ran out at row 17"]),
    "leaves": (lambda job, x: job.close(), usual, ["has left the job"]),
    "sleeps": (sleepy, usual, ["has not called operation", "for 1.5 s"]),
    "size": (
        lambda job, x: usual(job, x[:-1]),
        usual,
        ["of 199996 bytes of float32", "of 200000 bytes of float32"],
    ),
    "dtype": (
        lambda job, x: usual(job, x.view(np.int32)),
        usual,
        ["200000 bytes of int32", "200000 bytes of float32"],
    ),
    "operation": (
        lambda job, x: job.broadcast(x),
        usual,
        ["called broadcast", "called all_reduce"],
    ),
    "order": (swapped, in_order, ["bucket 8", "bucket 7"]),
    "root": (
        lambda job, x: job.broadcast(x, 1),
        lambda job, x: job.broadcast(x, 0),
        ["root 1", "root 0"],
    ),
}
SILENT = ("killed", "exits", "stopped")
DIFFER = ("size", "dtype", "operation", "order", "root")
SWIFT = ("killed", "exits", "raises", *DIFFER)


def suffer(me, kind: str, faulty: int) -> dict:
    """Good rounds, then the fault, and how this rank comes out of it."""
    files, wrong = open_files(), []
    fault, others, _ = FAULTS[kind]
    job, x, error = me.job, np.ones(50_000, np.float32), None
    begin = time.monotonic()
    try:
        with job:
            for turn in range(100_000):
                if turn == 5 and me.rank == faulty:
                    fault(job, x)
                    usual(job, x)
                elif turn >= 5 and kind not in SILENT:
                    others(job, x)
                else:
                    usual(job, x)
                if time.monotonic() > begin + 40:
                    break
    except (comm.CommError, ValueError) as e:
        error = e
        if isinstance(e, ValueError):
            error = job.error
    wrong += after_failure(me, error, x)
    begin = time.monotonic()
    job.close()
    if time.monotonic() - begin > 8:
        wrong.append(f"close took {time.monotonic() - begin:.1f} s")
    if threads := left_over(me):
        wrong.append(f"threads are left: {threads}")
    if me.backend == "tcp" and open_files() != files:
        wrong.append(f"{open_files() - files} files or sockets are left")
    return {"rank": error and error.rank, "reason": error and error.reason, "wrong": wrong}


def after_failure(me, error, x) -> list[str]:
    """Every call fails at once, with the same error."""
    job, wrong = me.job, []
    peer = (me.rank + 1) % job.size
    calls = {
        "all_reduce": (job.all_reduce, x),
        "all_reduce_async": (job.all_reduce_async, x),
        "reduce_scatter": (job.reduce_scatter, np.ones(12 * job.size, np.float32)),
        "all_gather": (job.all_gather, x),
        "broadcast": (job.broadcast, x),
        "barrier": (job.barrier,),
        "send": (job.send, x, peer),
        "recv": (job.recv, x, peer),
    }
    for name, (call, *arguments) in calls.items():
        again = failure(call, *arguments)
        if again is None:
            wrong.append(f"{name} afterwards raised nothing")
        elif again["seconds"] > 0.5 or (again["rank"], again["reason"]) != (
            error.rank,
            error.reason,
        ):
            wrong.append(f"{name} afterwards: {again}")
    return wrong


def one_fault(case: tuple, **how) -> None:
    kind, W, faulty = case
    options = {"silence": 3.0, "deadline": 1.5 if kind == "sleeps" else 20.0}
    with Group(W, **options, **how) as group:
        group.begin(suffer, kind, faulty)
        there = [r for r in range(W) if kind not in SILENT or r != faulty]
        said = group.end(60, there)
    blamed = set(range(W)) if kind in DIFFER and W == 2 else {faulty}
    for rank, mine in zip(there, said, strict=True):
        if kind == "leaves" and rank == faulty:
            assert mine["reason"] == "has left the job" and not mine["wrong"], mine
            continue
        assert not mine["wrong"], f"{case}, rank {rank}: {mine}"
        assert mine["rank"] in blamed, f"{case}, rank {rank} blames: {mine}"
        for text in FAULTS[kind][2]:
            assert text in mine["reason"], f"{case}, rank {rank}: {mine}"
    assert len({mine["reason"] for mine in said}) == 1, f"{case}: not the same error: {said}"
    assert len({mine["rank"] for mine in said}) == 1, f"{case}: not the same rank: {said}"


@pytest.mark.parametrize("kinds", [("stopped", "sleeps", "leaves"), *((k,) for k in SWIFT)])
def test_a_fault_ends_every_call_of_every_rank_with_the_same_error(kinds):
    places = (3, 0), (3, 1), (3, 2), (2, 0), (2, 1)
    together(one_fault, *((kind, *place) for kind in kinds for place in places))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_among_four_ranks_with_two_trunks(kind):
    together(lambda case: one_fault(case, trunks=2), *((kind, 4, faulty) for faulty in range(4)))


@pytest.mark.parametrize("kind, W, faulty", [("killed", 3, 0), ("stopped", 2, 1), ("size", 3, 1)])
def test_a_fault_ends_every_rank_of_mlx_ring(kind, W, faulty, tmp_path):
    one_fault((kind, W, faulty), backend="ring", folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_any_fault_ends_every_rank_of_mlx_ring(kind, tmp_path):
    for case in ((kind, 2, 0), *((kind, 3, faulty) for faulty in range(3))):
        one_fault(case, backend="ring", folder=tmp_path)


def letter_fault(me, how: str) -> dict | None:
    """Rank 0 waits for rank 1's array, which is of another size, or dtype, or never comes."""
    x = np.zeros(100, np.float32)
    failure(me.job.barrier)
    if me.rank == 0:
        said = failure(me.job.recv, x, 1)
    elif me.rank == 1:
        other = {"size": x[:50], "dtype": x.view(np.int32)}
        said = failure(me.job.send, other[how], 0) if how in other else None
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        said = failure(sleepy, me.job, x)
    else:
        said = failure(me.job.barrier)
    me.job.close()
    assert not left_over(me)
    return said


def test_letters_that_do_not_fit_or_never_come():
    def work(how):
        with Group(3, deadline=1.5) as group:
            group.begin(letter_fault, how)
            for said in group.end(40, [0, 2] if how == "killed" else None):
                assert said["rank"] == 1, (how, said)
                if how in ("size", "dtype"):
                    text = {"size": "sent 200 bytes of float32", "dtype": "sent 400 bytes of int32"}
                    assert text[how] in said["reason"], said
                    assert "rank 0 wanted 400 bytes of float32" in said["reason"], said

    together(work, "size", "dtype", "never", "killed")


SURVIVOR = """
import os, signal, sys, time
sys.path.insert(0, ROOT)
import comm, mlx.core as mx
job = comm.connect(BACKEND, silence=3.0)
x = mx.ones(100000)
for step in range(100000):
    x = job.all_reduce(mx.ones(100000))
    if step == 20 and job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("backend", ["tcp", "ring"])
def test_a_script_that_does_not_catch_the_error_ends_by_itself(backend, tmp_path):
    files = []
    for name in ("ours", "theirs"):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps([[f"{h}:{p}" for h, p in a] for a in places(3)]))
    code = SURVIVOR.replace("ROOT", repr(str(HERE.parent))).replace("BACKEND", repr(backend))
    env = os.environ | {"COMM_HOSTFILE": str(files[0]), "MLX_HOSTFILE": str(files[1])}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=env | {"MLX_RANK": str(r)}, stderr=subprocess.PIPE
        )
        for r in range(3)
    ]
    try:
        said = [process.communicate(timeout=40)[1].decode() for process in started]
    finally:
        for process in started:
            process.kill()
    assert started[1].returncode == -signal.SIGKILL
    for r in (0, 2):
        assert started[r].returncode == 1, f"rank {r}: {started[r].returncode} {said[r]}"
        assert "CommError: rank 1 (127.0.0.1): its process has ended" in said[r], said[r]


# --- Hostfiles ------------------------------------------------------------------------------------


def entry(ip: str = "127.0.0.1", **more) -> dict:
    return {"ssh": ip, "ips": [ip], **more}


def refuse_hosts(tmp_path, data, *said: str) -> str:
    path = tmp_path / "hosts.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(comm.UserError) as error:
        comm.read_hosts(str(path))
    text = str(error.value)
    for part in (str(path), *said):
        assert part in text, f"{part!r} not in {text!r}"
    assert "\n" not in text
    return text


TWO = [entry("127.0.0.1"), entry("127.0.0.2")]


@pytest.mark.parametrize(
    "data, said",
    [
        ("{not json", ["not JSON", "line 1 column 2"]),
        ("", ["not JSON"]),
        ('[{"ssh": "a",\n "ips": [}]', ["not JSON", "line 2"]),
        ([], ["got no hosts", '[{"ssh": ..., "ips": [...]}, ...]']),
        ({}, ["got no hosts"]),
        ({"hosts": []}, ["got no hosts"]),
        ({"hosts": "a"}, ["got no hosts"]),
        ("3", ["got no hosts"]),
        ("null", ["got no hosts"]),
        (["a", "b"], ["hosts[0]", "got 'a'"]),
        ([entry(), None], ["hosts[1]", "got None"]),
        ([entry(), {"ips": ["127.0.0.1"]}], ["hosts[1].ssh", "got None", "wanted a host name"]),
        ([entry(), {"ssh": 3, "ips": ["127.0.0.1"]}], ["hosts[1].ssh", "got 3"]),
        ([entry(), {"ssh": "", "ips": ["127.0.0.1"]}], ["hosts[1].ssh", "got ''"]),
        ([{"ssh": "-oProxyCommand=x", "ips": ["127.0.0.1"]}], ["hosts[0].ssh", "-oProxyCommand"]),
        ([entry(), {"ssh": "far.example"}], ["hosts[1].ips", "wanted a list of addresses"]),
        ([entry(), {"ssh": "far.example", "ips": []}], ["hosts[1].ips", "got []"]),
        ([entry(), {"ssh": "b", "ips": "127.0.0.1"}], ["hosts[1].ips", "got '127.0.0.1'"]),
        ([entry(), {"ssh": "b", "ips": [7]}], ["hosts[1].ips", "got [7]"]),
        ([entry(), {"ssh": "b", "ips": [None]}], ["hosts[1].ips", "[None]"]),
        (
            [entry(), {"ssh": "b", "ips": ["no-such-host.invalid"]}],
            ["hosts[1].ips", "'no-such-host.invalid' resolves to nothing"],
        ),
        ([entry(), {"ssh": "b", "ips": ["a..b"]}], ["hosts[1].ips", "'a..b' resolves to nothing"]),
        ([entry(), {"ssh": "b", "ips": [""]}], ["hosts[1].ips", "''"]),
        ([entry(ibs=[])], ["hosts[0]", "unknown key 'ibs'", "did you mean 'ips'?"]),
        ([entry(), entry("127.0.0.2", rmda=[])], ["hosts[1]", "'rmda'", "did you mean 'rdma'?"]),
        ([entry(zzzzz=1)], ["hosts[0]", "'zzzzz'", "ssh, ips, rdma, python, cwd, env"]),
        ({"host": TWO}, ["unknown key 'host'", "did you mean 'hosts'?"]),
        ([entry(rdma=[None]), TWO[1] | {"rdma": [None]}], ["hosts[0].rdma", "wanted 2 entries"]),
        ([entry(rdma=["a", None]), TWO[1]], ["hosts[0].rdma[0]", "got 'a'", "wanted null"]),
        (
            [entry(rdma=[None, "a"]), TWO[1] | {"rdma": ["a", "b"]}],
            ["hosts[1].rdma[1]", "got 'b'", "wanted null"],
        ),
        ([entry(rdma="a"), TWO[1]], ["hosts[0].rdma", "got 'a'"]),
        ([entry(rdma={"a": 1}), TWO[1]], ["hosts[0].rdma"]),
        (
            [{"ssh": "a", "ips": ["127.0.0.2"]}, {"ssh": "b", "ips": ["127.0.0.2"]}],
            ["hosts[1].ips", "127.0.0.2 is listed twice", "hosts[0] has it"],
        ),
        ([{"ssh": "a", "ips": ["127.0.0.2"] * 2}], ["hosts[0].ips", "127.0.0.2 is listed twice"]),
        (
            [entry(), {"ssh": "b", "ips": ["127.0.0.2", "127.0.0.3"]}],
            ["hosts[1].ips", "got 2 addresses, wanted 1 as in hosts[0]"],
        ),
        ([entry(python=3)], ["hosts[0].python", "got 3", "wanted a path"]),
        ([entry(), entry(cwd=["a"])], ["hosts[1].cwd", "got ['a']"]),
        ([entry(env=["A=1"])], ["hosts[0].env", '{"NAME": "value"}']),
        ([entry(env={"A": 1})], ["hosts[0].env", "{'A': 1}"]),
        ({"backend": "tpc", "hosts": TWO}, ["backend: got 'tpc'", "tcp, jaccl, nccl, mpi, ring"]),
        ({"backend": 3, "hosts": TWO}, ["backend: got 3"]),
        ({"backend": ["tcp"], "hosts": TWO}, ["backend: got ['tcp']"]),
        ({"envs": ["A"], "hosts": TWO}, ["envs: got ['A']", "NAME=value"]),
        ({"envs": {"A": "1"}, "hosts": TWO}, ["envs: got {'A': '1'}"]),
        ({"envs": [1], "hosts": TWO}, ["envs: got [1]"]),
    ],
    ids=lambda value: None,
)
def test_a_hostfile_is_refused_with_its_entry_and_field(tmp_path, data, said):
    refuse_hosts(tmp_path, data, *said)


def test_a_hostfile_that_is_no_text_or_not_there(tmp_path):
    path = tmp_path / "hosts.json"
    with pytest.raises((comm.UserError, OSError), match="hosts.json"):
        comm.read_hosts(str(path))
    path.write_bytes(b"\xff\xfe[]")
    with pytest.raises(comm.UserError, match="hosts.json"):
        comm.read_hosts(str(path))


def test_both_forms_of_mlx_and_what_a_host_has_of_its_own(tmp_path):
    path = tmp_path / "hosts.json"
    own = {"python": "/opt/py", "cwd": "/srv", "env": {"A": "host", "C": "3"}}
    hosts = [
        {"ssh": "a", "ips": ["127.0.0.1"], "rdma": [None, "rdma_en2"]},
        {"ssh": "b", "ips": ["127.0.0.2"], "rdma": [["rdma_en2", "rdma_en3"], None], **own},
    ]
    path.write_text(json.dumps(hosts))
    backend, plain_hosts = comm.read_hosts(str(path))
    assert backend == "auto" and [h.ssh for h in plain_hosts] == ["a", "b"]
    assert plain_hosts[0].rdma == [None, "rdma_en2"] and plain_hosts[0].env == {}
    assert plain_hosts[0].python == sys.executable and plain_hosts[0].cwd == os.getcwd()
    assert plain_hosts[1][3:] == ("/opt/py", "/srv", {"A": "host", "C": "3"})
    path.write_text(json.dumps({"backend": "ring", "envs": ["A=all", "B=x=y"], "hosts": hosts}))
    backend, full = comm.read_hosts(str(path))
    assert backend == "ring"
    assert full[0].env == {"A": "all", "B": "x=y"}
    assert full[1].env == {"A": "host", "B": "x=y", "C": "3"}
    # MLX's own entries for this machine leave the addresses out; several ranks on one host share
    path.write_text(json.dumps([{"ssh": "127.0.0.1"}, {"ssh": "127.0.0.1", "ips": []}]))
    assert [h.ips for h in comm.read_hosts(str(path))[1]] == [["127.0.0.1"]] * 2
    path.write_text(json.dumps({"hosts": hosts, "backend": None}))
    assert comm.read_hosts(str(path))[0] == "auto"


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.sampled_from(["", "127.0.0.1", "x", "ssh"]),
        lambda part: (
            st.lists(part, max_size=3)
            | st.dictionaries(
                st.sampled_from(["ssh", "ips", "rdma", "env", "hosts", "backend", "envs", "cwd"]),
                part,
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_hostfile_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(data).replace('"x"', '"no-such-host.invalid"'))
    try:
        backend, hosts = comm.read_hosts(str(path))
    except comm.UserError as error:
        assert str(path) in str(error)
    else:
        assert backend in comm.BACKENDS and all(h.ips and h.ssh for h in hosts)


# --- From the environment -------------------------------------------------------------------------

JOB = ("MLX_RANK", "MLX_HOSTFILE", "COMM_HOSTFILE", "COMM_BACKEND", "MLX_METAL_FAST_SYNCH")


def connected(me, env: dict, backend: str = "auto") -> tuple:
    """What connect() makes of these variables: (name of the error, text) or (backend, sum)."""
    for name in JOB:
        os.environ.pop(name, None)
    os.environ.update(env)
    try:
        with comm.connect(backend, **me.options) as job:
            return job.backend, job.size, float(job.all_reduce(mx.array([job.rank + 1.0])).item())
    except Exception as error:
        return type(error).__name__, str(error)


def test_alone_connect_makes_a_job_of_one():
    assert ranks(1, connected, {}) == [("tcp", 1, 1.0)]
    assert ranks(1, connected, {}, "tcp") == [("tcp", 1, 1.0)]


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "MLX_RANK is set, but neither MLX_HOSTFILE nor COMM_HOSTFILE"),
        ("", "wanted"),
        ("{", "wanted"),
        ("3", "wanted"),
        ("null", "wanted"),
        ("[]", "hostfile of 0 ranks"),
        ("[[]]", "addresses for each rank"),
        ("[[], []]", "addresses for each rank"),
        ('["127.0.0.1:10"]', "wanted"),
        ('[["127.0.0.1"]]', "wanted"),
        ('[["127.0.0.1:x"]]', "wanted"),
        ('[["127.0.0.1:99999"], ["127.0.0.1:10"]]', "wanted"),
        ('[["127.0.0.1:10"], ["127.0.0.1:-1"]]', "wanted"),
        ("[[3]]", "wanted"),
        ('{"a": ["127.0.0.1:1"]}', "wanted"),
        ('[["127.0.0.1:10", "127.0.0.2:11"], ["127.0.0.1:12"]]', "as many addresses for each rank"),
    ],
)
def test_a_malformed_file_of_addresses(tmp_path, text, said):
    path = tmp_path / "ring.json"
    env = {"MLX_RANK": "0"}
    if text is not None:
        path.write_text(text)
        env["MLX_HOSTFILE"] = str(path)
    kind, why, *_ = ranks(1, connected, env, connect=1.0)[0]
    assert kind == "UserError" and said in why, (kind, why)
    assert text is None or str(path) in why, why


@pytest.mark.parametrize("rank", ["2", "-1", "7", "x", "1.0"])
def test_a_rank_out_of_range(tmp_path, rank):
    path = tmp_path / "ring.json"
    path.write_text('[["127.0.0.1:10"], ["127.0.0.1:11"]]')
    ((kind, why),) = ranks(1, connected, {"MLX_RANK": rank, "MLX_HOSTFILE": str(path)})
    assert kind == "UserError" and rank in why, (kind, why)


def test_a_backend_that_there_is_not():
    for env, word in (({}, "tpc"), ({"COMM_BACKEND": "tpc"}, "auto")):
        ((kind, why),) = ranks(1, connected, env, word)
        assert kind == "UserError" and "got backend 'tpc', wanted one of auto, tcp, " in why, why


def test_fast_synch_is_warned_of_and_never_set(tmp_path):
    path = tmp_path / "ring.json"
    path.write_text(json.dumps([[f"127.0.0.1:{free_ports(1)[0]}"]]))
    code = "import os, comm; comm.connect(); print(os.environ.get('MLX_METAL_FAST_SYNCH'))"
    for value in ("1", None):
        env = os.environ | {"MLX_RANK": "0", "MLX_HOSTFILE": str(path)}
        env |= {"MLX_METAL_FAST_SYNCH": value} if value else {}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=HERE.parent, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        said = done.stdout + done.stderr
        assert ("warning: MLX_METAL_FAST_SYNCH is set" in said) == bool(value), said
        assert done.stdout.splitlines()[-1] == str(value)


def test_connect_joins_by_hostfile_and_secret(tmp_path):
    path, secret = tmp_path / "ring.json", tmp_path / "secret"
    path.write_text(json.dumps([[f"{h}:{p}" for h, p in a] for a in places(2, 2)]))
    secret.write_text("0123")
    env = {"COMM_HOSTFILE": str(path), "COMM_SECRET_FILE": str(secret)}
    with Group(2) as group:
        for r in range(2):
            group.pipes[r].send((call_with, (connected, {"env": env | {"MLX_RANK": str(r)}})))
        assert group.end(30) == [("tcp", 2, 3.0)] * 2


SCRIPT = """
import sys
sys.path.insert(0, ROOT)
import comm, mlx.core as mx
with comm.connect() as job:
    x = job.all_reduce(mx.full((1000,), job.rank + 1.0))
    name = f"{job.rank} of {job.size} {job.backend} {x[0].item()} {x[999].item()}"
    open(OUT + "/" + name, "w").close()
"""


def test_mlx_launch_starts_scripts_that_use_our_ring(tmp_path):
    launcher = Path(sys.executable).parent / "mlx.launch"
    if not launcher.exists():
        pytest.skip("no mlx.launch beside this Python")
    script, folder = tmp_path / "script.py", tmp_path / "out"
    folder.mkdir()
    script.write_text(
        SCRIPT.replace("ROOT", repr(str(HERE.parent))).replace("OUT", repr(str(folder)))
    )
    port = free_ports(1)[0]
    command = [launcher, "-n", "3", "--backend", "ring", "--starting-port", str(port)]
    command += [sys.executable, script]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True)
    found = sorted(path.name for path in folder.iterdir())
    assert found == [f"{r} of 3 tcp 6.0 6.0" for r in range(3)], done.stdout + done.stderr


# --- Soak -----------------------------------------------------------------------------------------


def resident() -> float:
    """MB of memory this process has."""
    if LINUX:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def soak(me, count: int) -> tuple:
    job, W, r, draw = me.job, me.job.size, me.rank, random.Random(me.rank)
    marks = []
    for k in range(count):
        if k in (count // 4, count - 1):
            marks.append((resident(), open_files(), threading.active_count()))
        if draw.random() < 0.02:
            time.sleep(draw.random() * 0.01)
        n = 1 + (k * 37) % 1500
        dtype, library = KINDS[k % len(KINDS)]
        x = made(np.full(n, (k + r) % 9), dtype, library)
        total = sum((k + j) % 9 for j in range(W))
        got = plain(job.all_reduce(x, bucket=k % 5))
        assert got.shape == (n,) and (got == total).all(), f"operation {k}: {got}, not {total}"
    return marks


@pytest.mark.slow
def test_a_soak_of_twenty_thousand_sums_leaves_memory_flat():
    for first, last in ranks(4, soak, 20_000, seconds=200):
        assert last[0] - first[0] < 20, f"memory grew from {first[0]:.0f} to {last[0]:.0f} MB"
        assert last[1:] == first[1:], "files or threads have grown"
