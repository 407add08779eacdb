"""The communicator on networks of a known speed, beside MLX's own ring in the same run.

    python tests/bench_comm.py links           all_reduce against 2 (N - 1) / N bytes / bandwidth
    python tests/bench_comm.py overlap         steps whose compute is simulated
    python tests/bench_comm.py faults --count 100

Machines are network namespaces (Linux, root, iproute2), joined by one bridge for each trunk; `tbf`
limits what each sends. Frames are of 1500 bytes, so headers leave 0.957 of a link to the payload.
CPU seconds are those of all ranks together, per GB that is reduced. "TCP alone" is what this
machine does with the same bytes when nothing is summed: both ways at once, one thread for each.
"""

import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import mlx.core as mx
import numpy as np

import comm

PREFIX = "mlxdora"
LIMITS = {"1gbit": 125e6, "10gbit": 1250e6}  # bytes per second


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


@contextlib.contextmanager
def machines(count: int, trunks: int, rate: str):
    """Namespaces mlxdora0 ... whose trunk k has the address 10.77.k.rank+1."""
    down(count)
    try:
        sh(f"ip netns add {PREFIX}hub")
        for k in range(trunks):
            sh(f"ip -n {PREFIX}hub link add br{k} type bridge")
            sh(f"ip -n {PREFIX}hub link set br{k} up")
        for r in range(count):
            name = f"{PREFIX}{r}"
            sh(f"ip netns add {name}")
            sh(f"ip -n {name} link set lo up")
            for k in range(trunks):
                hub = f"{PREFIX}hub"
                sh(f"ip -n {name} link add eth{k} type veth peer name p{r}x{k} netns {hub}")
                sh(f"ip -n {name} addr add 10.77.{k}.{r + 1}/24 dev eth{k}")
                sh(f"ip -n {name} link set eth{k} up")
                sh(f"ip -n {hub} link set p{r}x{k} master br{k}")
                sh(f"ip -n {hub} link set p{r}x{k} up")
                burst = int(LIMITS[rate] * 0.002)  # shorter: more timers than there is CPU
                limit = f"rate {rate} burst {burst} limit {8 * burst}"
                sh(f"ip netns exec {name} tc qdisc add dev eth{k} root tbf {limit}")
        yield
    finally:
        down(count)


def down(count: int) -> None:
    for name in [*range(count), "hub"]:
        subprocess.run(["ip", "netns", "del", f"{PREFIX}{name}"], capture_output=True)


def ranks(
    count: int, trunks: int, side: str, *words: str, seconds: float = 300, hung: list = ()
) -> list[dict | None]:
    """This file's command `words` as the ranks of a job, one in each namespace; what they print.

    None for a rank that had not ended after so many seconds; those of `hung` are killed when all
    others have ended.
    """
    ports = iter(range(20000, 30000))
    hosts = [[f"10.77.{k}.{r + 1}:{next(ports)}" for k in range(trunks)] for r in range(count)]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(hosts))
        file.flush()
        processes = []
        for r in range(count):
            env = os.environ | {"MLX_RANK": str(r), "MLX_HOSTFILE": file.name}
            enter = ["ip", "netns", "exec", f"{PREFIX}{r}"]
            command = [*enter, sys.executable, __file__, *words, side]
            pipe = subprocess.PIPE
            processes.append(subprocess.Popen(command, env=env, stdout=pipe, text=True))
        said, end = [None] * count, time.monotonic() + seconds
        for r in sorted(range(count), key=lambda r: r in hung):
            if r in hung:
                processes[r].kill()
            try:
                text = processes[r].communicate(timeout=max(0.1, end - time.monotonic()))[0]
                said[r] = json.loads(text) if text else None
            except subprocess.TimeoutExpired:
                processes[r].kill()
    return said


def rank_links(side: str) -> None:
    """Seconds of each all_reduce and CPU seconds of this rank, by megabytes and dtype."""
    if side == "ours":
        job = comm.connect("tcp")

        def reduce(x):
            job.all_reduce(x)
    elif side == "tcp":
        return rank_tcp()
    else:
        group = mx.distributed.init(strict=True, backend="ring")

        def reduce(x):
            mx.eval(mx.distributed.all_sum(x, group=group, stream=mx.cpu))

    out = {}
    for dtype in ("float32", "bfloat16"):
        for size in (1, 8, 64):
            x = mx.zeros(size * 10**6 // getattr(mx, dtype).size, getattr(mx, dtype))
            mx.eval(x)
            times, count = [], {1: 60, 8: 12, 64: 4}[size]
            for i in range(count + 2):
                if i == 2:
                    cpu = time.process_time()
                begin = time.monotonic()
                reduce(x)
                times.append(time.monotonic() - begin)
            cpu = (time.process_time() - cpu) / count / (size / 1e3)
            out[f"{size} {dtype}"] = statistics.median(times[2:]), cpu
    print(json.dumps(out))


def rank_tcp(count: int = 200, size: int = 1 << 20) -> None:
    """Streams as much as all_reduces of `count` times `size` bytes would, as fast as it goes."""
    with comm.connect("tcp") as job:
        out, into = job._line(job.next, True), job._line(job.previous, False)
        data, buffer = bytes(comm.CHUNK), memoryview(bytearray(comm.CHUNK))
        chunks = 2 * (job.size - 1) * count * size // job.size // comm.CHUNK

        def send():
            for _ in range(chunks):
                out.sendall(data)

        job.barrier()
        sender, begin, cpu = threading.Thread(target=send), time.monotonic(), time.process_time()
        sender.start()
        for _ in range(chunks):
            comm._fill(into, buffer)
        sender.join()
        took = (time.monotonic() - begin) / count / size * 1e6, time.process_time() - cpu
        job.barrier()
    print(json.dumps({"1 TCP alone": (took[0], took[1] / count / size * 1e9)}))


def links(*, rates: list[str] = tuple(LIMITS)) -> None:
    print(
        "| ranks | trunks | link | MB, dtype | ours: of limit, CPU s/GB | MLX's ring | CPU ratio |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for count, trunks, rate in (
        (2, 1, "1gbit"),
        (4, 1, "1gbit"),
        (2, 2, "1gbit"),
        (2, 1, "10gbit"),
        (4, 1, "10gbit"),
    ):
        if rate not in rates:
            continue
        with machines(count, trunks, rate):
            alone = ranks(count, trunks, "tcp", "rank-links") if trunks == 1 else ()
            sides = [ranks(count, trunks, s, "rank-links") for s in ("ours", "mlx")]
        for row in [[alone], sides] if alone else [sides]:
            for key in row[0][0]:
                cells, cpus = [], []
                for said in row:
                    seconds = statistics.median(rank[key][0] for rank in said)
                    cpus.append(sum(rank[key][1] for rank in said))
                    best = 2 * (count - 1) / count * float(key.split()[0]) * 1e6 / LIMITS[rate]
                    cells.append(f"{best / seconds:.3f}, {cpus[-1]:.2f}")
                cells += [f"{cpus[1] / cpus[0]:.1f}"] if len(cpus) == 2 else ["", ""]
                cells = [str(count), str(trunks), rate, key.replace("1 TCP", "TCP"), *cells]
                print("|", " | ".join(cells), "|", flush=True)


def rank_overlap(side: str) -> None:
    with comm.connect("tcp") as job:
        if not (transfer := float(os.environ.get("TRANSFER", 0))):
            transfer = comm.simulate(job, 0.0, 16, 16 << 20)["transfer"]
            transfer = float(job.all_reduce(np.array([transfer], np.float32))[0]) / job.size
        took = {
            str(ratio): comm.simulate(job, transfer / ratio, 16, 16 << 20)
            for ratio in (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
        }
    print(json.dumps(took))


def overlap() -> None:
    """Sixteen buckets of 1 MiB, backward simulated by sleeps: transfer / compute 0.25 to 1.5.

    With two trunks the compute is that of one trunk's rows, so the last column compares with one.
    """
    print(
        "| ranks | trunks | one trunk's transfer / compute | compute ms | transfer | one bucket |"
        " one after the other | step | of the limit | one trunk, one after the other / step |"
    )
    print("|---" * 10 + "|", flush=True)
    for count in (2, 4):
        single = {}
        for trunks in (1, 2):
            if single:
                os.environ["TRANSFER"] = str(single["1.0"]["compute"])
            with machines(count, trunks, "1gbit"):
                said = ranks(count, trunks, "ours", "rank-overlap")[0]
            os.environ.pop("TRANSFER", None)
            single = single or said
            for ratio, took in said.items():
                limit = max(took["compute"], took["transfer"]) + took["bucket"]
                cells = [str(count), str(trunks), ratio, *(f"{1e3 * t:.1f}" for t in took.values())]
                cells += [f"{took['step'] / limit:.3f}"]
                cells += [f"{single[ratio]['apart'] / took['step']:.2f}"]
                print("|", " | ".join(cells), "|", flush=True)


FATAL = "kill stop cut-link exits raises size dtype order bucket silent".split()
HARMLESS = "garbage stranger wrong-secret second-job slow".split()


def trouble(job: comm.Communicator, fault: dict, plan: dict) -> None:
    """What the victim does to itself, or to others."""
    kind, me = fault["kind"], job.rank
    host, port = job.addresses[fault["target"]][0]
    if kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    elif kind == "cut-link":
        sh("ip link set eth0 down")
    elif kind == "exits":
        os._exit(0)
    elif kind == "raises":
        raise ZeroDivisionError("on purpose")
    elif kind == "size":
        job.all_reduce(np.ones(plan["size"] + 1, np.float32))
    elif kind == "dtype":
        job.all_reduce(np.ones(plan["size"], np.int32))
    elif kind == "order":
        job.all_gather(np.ones(plan["size"], np.float32))
    elif kind == "bucket":
        job.all_reduce(np.ones(plan["size"], np.float32), bucket=7)
    elif kind == "silent":
        time.sleep(60.0)
    elif kind == "slow":
        time.sleep(1.0)
    elif kind == "garbage":
        for _ in range(5):
            with socket.create_connection((host, port)) as sock:
                sock.sendall(random.randbytes(random.randrange(1, 3000)))
    elif kind == "stranger":
        sock = socket.create_connection((host, port))  # says nothing, and stays
        threading.Timer(20.0, sock.close).start()
    elif kind == "wrong-secret":
        numbers = comm.MAGIC, comm.VERSION, job.size, (me + 1) % job.size, 0, job._job, bytes(16)
        with socket.create_connection((host, port)) as sock:
            try:
                comm._greet(sock, comm.HELLO.pack(*numbers), b"a guess")
            except PermissionError:
                return
        raise AssertionError("was let in")


def rank_faults(side: str) -> None:
    """Sums until the end or an error; says which, and how long after the fault."""
    plan = json.loads(os.environ["FAULT"])
    said, fault = {"wrong": 0, "named": None}, plan["fault"]
    random.seed(plan["seed"])
    try:
        with comm.connect("tcp", silence=2.0, deadline=4.0, connect=20.0) as job:
            for i in range(plan["rounds"]):
                if i == fault["at"]:
                    said["at"] = time.monotonic()
                    if job.rank == fault["victim"]:
                        trouble(job, fault, plan)
                x = np.full(plan["size"], i % 100 + job.rank, np.float32)
                want = job.size * (i % 100) + job.size * (job.size - 1) // 2
                said["wrong"] += not (job.all_reduce(x) == want).all()
                time.sleep(0.002)
    except comm.CommError as error:
        said |= {"named": error.rank, "reason": error.reason}
    except ZeroDivisionError:
        pass
    if "at" in said:
        said["seconds"] = time.monotonic() - said.pop("at")
    said["threads"] = [t.name for t in threading.enumerate() if t.name.startswith("comm")]
    print(json.dumps(said), flush=True)
    os._exit(0)


def faults(*, count: int = 100, seed: int = 0) -> None:
    """Random faults in jobs of 2 to 4 ranks; no beat for 2 s or no progress for 4 s is an end."""
    rng, rows = random.Random(seed), {}
    for trial in range(count):
        kinds = FATAL + HARMLESS
        kind, many = kinds[trial % len(kinds)], rng.choice([2, 3, 4])
        fault = {"kind": kind, "victim": rng.randrange(many), "at": rng.randrange(5, 60)}
        fault["target"] = rng.randrange(many)
        plan = {"fault": fault, "seed": trial, "size": rng.choice([1, 1000, 200000])}
        plan["rounds"] = 4000 if kind == "second-job" else 100
        os.environ["FAULT"] = json.dumps(plan)
        with machines(many, 1, "10gbit"):
            second = None
            if kind == "second-job":
                second = threading.Timer(1.5, intrude, (many, second_said := []))
                second.start()
            said = ranks(many, 1, "ours", "rank-faults", seconds=40, hung=[fault["victim"]])
            if second:
                second.join()
        others = [s for r, s in enumerate(said) if r != fault["victim"] or kind in HARMLESS]
        row = rows.setdefault(kind, dict(jobs=0, hung=0, wrong=0, misnamed=0, left=0, slowest=0.0))
        row["jobs"] += 1
        for s in others:
            row["hung"] += s is None
            s = s or {"wrong": 0, "named": "hung", "threads": []}
            row["wrong"] += s["wrong"]
            right = [fault["victim"]] if kind in FATAL else [None]
            if kind in ("size", "dtype", "order", "bucket") and many == 2:
                right = [0, 1]  # who is wrong is anybody's guess
            row["misnamed"] += s["named"] not in right
            row["left"] += len(s["threads"])
            row["slowest"] = max(row["slowest"], s.get("seconds", 0.0) if kind in FATAL else 0.0)
            if s["named"] not in right:
                print(f"trial {trial} {plan}: {s}", file=sys.stderr)
        if second and not all("cannot listen" in line for line in second_said):
            row["misnamed"] += 1
            print(f"trial {trial}: the second job said {second_said}", file=sys.stderr)
    print(
        "| fault | jobs | hung | wrong sums | wrong rank named | threads left | slowest notice, s |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind, row in rows.items():
        cells = [str(v) for v in list(row.values())[:-1]] + [f"{row['slowest']:.2f}"]
        print("|", " | ".join([kind, *cells]), "|")


def intrude(many: int, said: list) -> None:
    """A second job on the same ports, in the same places."""
    for s in ranks(many, 1, "ours", "rank-faults", seconds=40):
        said.append(s["reason"] if s and s["named"] is not None else f"went on: {s}")


if __name__ == "__main__":
    commands = {"links": links, "overlap": overlap, "faults": faults}
    own = {"rank-links": rank_links, "rank-overlap": rank_overlap, "rank-faults": rank_faults}
    comm.cli(commands | own)
