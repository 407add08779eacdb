"""Launching: ranks here and over a real sshd, what they print, how they end, what they leave."""

import getpass
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import ROOT, refused, run_cli

import comm

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="needs Linux: /proc and 127.0.0.2"
)
SSHD = "/usr/sbin/sshd"
ODD = ["a b", "it's", '"q"', "$HOME `id` \\ !", "two\nlines", "", "--", "é*?#;&|"]
IMPATIENT = """
import functools, sys, comm
comm.run = functools.partial(comm.run, grace=float(sys.argv.pop(1)))
comm.cli({"launch": comm.launch})
"""
PREAMBLE = """
import json, os, signal, subprocess, sys, time
rank, here = int(os.environ["MLX_RANK"]), os.path.dirname(os.path.abspath(__file__))
def tell(name, what=""):
    with open(f"{here}/{name}{rank}.part", "w") as file:
        file.write(json.dumps(what))
    os.rename(file.name, f"{here}/{name}{rank}")
"""


# --- Helpers --------------------------------------------------------------------------------------


def free_port(count: int = 24) -> int:
    """The first of so many ports that nobody listens on, below those the system gives out."""
    while True:
        first = random.randrange(10000, 32768 - count)
        try:
            for port in range(first, first + count):
                with socket.socket() as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    sock.bind(("", port))
            return first
        except OSError:
            continue


def until(condition, seconds: float = 20.0):
    """Waits until the condition holds; its value, or its last one when the time is up."""
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return value


def processes(name: str) -> dict[int, bytes]:
    """What /proc/<pid>/<name> says of every process that lets itself be read."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found[int(folder.name)] = (folder / name).read_bytes()
        except OSError:
            pass
    return found


def marked(*marks: str) -> dict[int, str]:
    """Command lines of all living processes that have one of the marks in their environment."""
    environments, words = processes("environ"), processes("cmdline")
    pids = [p for p, env in environments.items() if any(mark.encode() in env for mark in marks)]
    return {p: words.get(p, b"").replace(b"\0", b" ").decode(errors="replace") for p in pids}


def end(pids) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass


def host(ssh: str, k: int, **more) -> dict:
    return {"ssh": ssh, "ips": [f"127.0.0.{k}"], **more}


class Job:
    """A launcher under way. All that it starts here or over ssh has a mark in its environment."""

    def __init__(self, words: list, mark: str, env: dict, cwd: Path):
        self.mark, self.out, self.err = mark, tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdout=self.out,
            stderr=self.err,
            stdin=subprocess.PIPE,
            env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | env,
            cwd=cwd,
            start_new_session=True,
        )

    @property
    def stdout(self) -> bytes:
        return os.pread(self.out.fileno(), 1 << 24, 0)

    @property
    def stderr(self) -> str:
        return os.pread(self.err.fileno(), 1 << 24, 0).decode(errors="replace")

    def signal(self, which: int) -> None:
        """As a terminal does: to the launcher's whole process group."""
        os.killpg(self.process.pid, which)

    def status(self, seconds: float = 30.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still runs after {seconds} s: {self.stdout[-500:]} {self.stderr[-2000:]}")

    def left(self, seconds: float = 15.0) -> dict[int, str]:
        """Processes of the job that are still there after so many seconds."""
        until(lambda: not marked(self.mark), seconds)
        return marked(self.mark)

    def clear(self) -> None:
        while self.process.poll() is None or marked(self.mark):
            end([self.process.pid, *marked(self.mark)])
            time.sleep(0.05)
        self.out.close()
        self.err.close()


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    """An sshd on a free loopback port: the environment in which comm.py reaches it.

    Names: node1, node2, ...; locked (key unknown there), closed (nobody listens), nowhere.
    """
    missing = [tool for tool in (SSHD, "ssh-keygen", "ssh") if not shutil.which(tool)]
    if missing:
        pytest.skip(f"needs OpenSSH: no {', '.join(missing)}")
    folder, port, closed = tmp_path_factory.mktemp("ssh"), free_port(1), free_port(1)
    for key in ("host", "user", "wrong"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key, "-f", folder / key]
        subprocess.run(words, check=True)
    known = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {known}")
    mark = uuid.uuid4().hex
    (folder / "sshd_config").write_text(f"""
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 100
SetEnv COMM_TEST_SSHD={mark}
""")
    (folder / "config").write_text(f"""
Host closed
    Port {closed}
Host nowhere
    HostName nowhere.invalid
Host locked
    IdentityFile {folder}/wrong
Host node*
    IdentityFile {folder}/user
Host *
    HostName 127.0.0.1
    Port {port}
    User {getpass.getuser()}
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    LogLevel ERROR
""")
    if os.geteuid() == 0:  # sshd wants it then; left there, for others may run these tests, too
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    tested = subprocess.run(
        [SSHD, "-t", "-f", folder / "sshd_config"], capture_output=True, text=True
    )
    if tested.returncode:
        pytest.skip(f"sshd does not start here: {tested.stderr.strip()}")
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)

    def answers():
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    env = {"COMM_SSH": f"ssh -F '{folder}/config'", "COMM_TEST_SSHD": mark}
    try:
        assert until(answers), (folder / "log").read_text()
        words = ["ssh", "-F", folder / "config", "-o", "BatchMode=yes", "node1", "true"]
        tried = subprocess.run(words, capture_output=True, text=True, timeout=30)
        if tried.returncode:
            log = (folder / "log").read_text()
            pytest.skip(f"sshd does not let this user in: {tried.stderr.strip()}; {log[-500:]}")
        yield env
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture
def start(tmp_path, sshd):
    """start(hosts, *command): a Job; hosts are entries of a hostfile, or a number of ranks here.

    Over ssh all have the mark of the sshd, so only one job at a time may use it.
    """
    jobs = []

    def start(hosts, *command, words=("launch",), grace=None, port=None, mine=sshd):
        mark, port = uuid.uuid4().hex, port or free_port()
        if isinstance(hosts, int):
            flags = [f"--ranks={hosts}"]
        else:
            shared = {"COMM_TEST_MARK": mark, "PYTHONPATH": str(ROOT)}
            hosts = [{**h, "env": {**shared, **h.get("env", {})}} for h in hosts]
            (tmp_path / f"hosts{port}.json").write_text(json.dumps(hosts))
            flags = ["--nodes", tmp_path / f"hosts{port}.json"]
        program = [ROOT / "comm.py"]
        if grace is not None:
            (tmp_path / "impatient.py").write_text(IMPATIENT)
            program = [tmp_path / "impatient.py", grace]
        # whoever starts something under sshd has its mark from there, whoever starts it here this
        env = {"COMM_TEST_MARK": mark, "PYTHONPATH": str(ROOT), "COMM_SSH": mine["COMM_SSH"]}
        tail = ["--", *command] if command else []
        words = [*program, *words, *flags, f"--port={port}", *tail]
        jobs.append(Job(words, mark, env, tmp_path))
        return jobs[-1]

    yield start
    for job in jobs:
        job.clear()
    end(marked(sshd["COMM_TEST_SSHD"]))


@pytest.fixture
def script(tmp_path):
    """script(text): a file with it, after lines that import, name the rank and define `tell`."""

    def script(text):
        path = tmp_path / "script.py"
        path.write_text(PREAMBLE + text)
        return path

    return script


@pytest.fixture
def told(tmp_path):
    """told(name, rank): what a rank's `tell` has said, waiting for it."""

    def told(name, rank=0):
        path = tmp_path / f"{name}{rank}"
        assert until(path.exists), f"rank {rank} has not said {name}"
        return json.loads(path.read_text())

    return told


@pytest.fixture
def wrapped(tmp_path):
    """wrapped(lines, site): a python that begins with lines of sh, and with `site` in Python."""

    def wrapped(lines="", site="", flags=""):
        folder = tmp_path / f"python {uuid.uuid4().hex[:6]}"
        folder.mkdir()
        if site:
            (folder / "sitecustomize.py").write_text(site)
            lines += f"\nexport PYTHONPATH='{folder}:{ROOT}'"
        path = folder / "python"
        path.write_text(f"#!/bin/sh\n{lines}\nexec '{sys.executable}' {flags} \"$@\"\n")
        path.chmod(0o755)
        return str(path)

    return wrapped


def lines_with(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(w in line for w in words)]


# --- What the ranks are given, and what is shown --------------------------------------------------


def test_ranks_here_and_over_ssh_sum_and_have_their_hosts_python_folder_and_environment(
    start, script, told, wrapped, tmp_path
):
    path = script("""
import comm, numpy as np
with comm.connect() as job:
    total = job.all_reduce(np.full(1001, 10**job.rank, np.int64))
print(f"rank {job.rank} of {job.size}: {total.min()} {total.max()} {job.backend}")
tell("saw", [os.getcwd(), os.environ.get("FLAVOUR"), os.environ.get("SPICE"), comm.__file__])
""")
    (tmp_path / "over there").mkdir()
    other = host("node2", 2, python=wrapped("export FLAVOUR=lemon"), cwd=f"{tmp_path}/over there")
    third = host("node3", 3, env={"SPICE": "a 'b' $c"})
    job = start([host("127.0.0.1", 1), other, third], "python", path)
    assert job.status() == 0, job.stderr
    theirs = re.compile(r"\[rank \d node\d\] [^\n]*\n")
    assert theirs.sub("", job.stdout.decode()) == "rank 0 of 3: 111 111 tcp\n" and not job.stderr
    assert sorted(theirs.findall(job.stdout.decode())) == [
        f"[rank {r} node{r + 1}] rank {r} of 3: 111 111 tcp\n" for r in (1, 2)
    ]
    file = str(ROOT / "comm.py")
    assert told("saw", 0) == [str(tmp_path), None, None, file]
    assert told("saw", 1) == [str(tmp_path / "over there"), "lemon", None, file]
    assert told("saw", 2) == [str(tmp_path), None, "a 'b' $c", file]


RAW = b"0 %\r50 %\r100 %\n\xff\x00\xfe\n\n  \tlast, without an end"


@pytest.mark.parametrize("first", ["127.0.0.1", "node1"])
def test_rank_0s_output_comes_byte_for_byte_and_others_by_lines_with_their_name(
    start, script, first
):
    path = script(f"""
raw = {RAW!r}
if rank == 0:
    for k in range(0, len(raw), 5):
        os.write(1, raw[k:k + 5]); os.write(2, raw[::-1][k:k + 5]); time.sleep(0.01)
else:
    os.write(1, b"one\\n\\ntw"); os.write(2, b"bad\\n"); os.write(1, b"o\\nlast")
""")
    job = start([host(first, 1), host("node2", 2)], "python", path)
    assert job.status() == 0
    theirs = re.compile(rb"\[rank 1 node2\] [^\n]*\n")
    assert theirs.sub(b"", job.stdout) == RAW
    assert theirs.sub(b"", job.stderr.encode("utf-8", "replace")) == RAW[::-1].decode(
        errors="replace"
    ).encode("utf-8", "replace")
    name = b"[rank 1 node2] "
    assert theirs.findall(job.stdout) == [name + s + b"\n" for s in (b"one", b"", b"two", b"last")]
    assert theirs.findall(job.stderr.encode()) == [name + b"bad\n"]


@pytest.mark.parametrize("first", ["127.0.0.1", "node1"])
def test_progress_is_seen_while_the_rank_runs(start, script, tmp_path, first):
    """Even what Python would keep back because its output is no terminal."""
    path = script("""
print("step 1", "\\rstep 2")
while not os.path.exists(f"{here}/go"): time.sleep(0.05)
""")
    job = start([host(first, 1), host("node2", 2)], "python", path)
    seen = until(lambda: b"step 1 \rstep 2\n" in job.stdout, 10.0)
    (tmp_path / "go").touch()
    assert job.status() == 0 and seen, "shown only when the rank had ended"


def test_the_secret_is_in_no_command_line_and_its_file_is_private_and_goes(
    start, script, told, tmp_path
):
    path = script("""
file = os.environ["COMM_SECRET_FILE"]
with open(file) as text:
    modes = [os.stat(p).st_mode & 0o777 for p in (file, os.path.dirname(file))]
    tell("secret", [file, text.read(), *modes])
while not os.path.exists(f"{here}/go"): time.sleep(0.05)
""")
    job = start([host("127.0.0.1", 1), host("node2", 2)], "python", path)
    found = [told("secret", r) for r in (0, 1)]
    (a, secret, *modes), (b, other, *others) = found
    assert secret == other and len(secret) >= 32 and a != b
    shown = [text for name in ("cmdline", "environ") for text in processes(name).values()]
    assert len(shown) > 6 and not [text for text in shown if secret.encode() in text]
    (tmp_path / "go").touch()
    assert job.status() == 0, job.stderr
    assert secret not in job.stderr + job.stdout.decode()
    assert not Path(a).parent.exists() and not Path(b).parent.exists()
    assert modes == others == [0o600, 0o700]


def test_words_and_environment_arrive_unchanged_and_standard_input_is_empty(start, script, told):
    path = script('tell("got", [sys.argv[1:], os.environ["ODD"], sys.stdin.read()])')
    odd = {"ODD": "".join(ODD)}
    hosts = [host("127.0.0.1", 1, env=odd), host("node2", 2, env=odd)]
    job = start(hosts, "python", path, *ODD)
    job.process.stdin.write(b"not for the ranks\n")
    job.process.stdin.flush()
    assert job.status() == 0, job.stderr
    for rank in (0, 1):
        assert told("got", rank) == [ODD, odd["ODD"], ""]


def test_any_program_runs_and_flags_after_two_dashes_are_its_own(start):
    job = start(2, "echo", "--help", "-h", "--ranks", "7")
    assert job.status() == 0, job.stderr
    words = b"--help -h --ranks 7\n"
    assert sorted(job.stdout.splitlines(True)) == [words, b"[rank 1 127.0.0.1] " + words]


def test_mlxs_variables_are_set_for_scripts_that_use_its_ring(start, script):
    path = script("""
import mlx.core as mx
group = mx.distributed.init(strict=True, backend="ring")
total = mx.distributed.all_sum(mx.array([10**group.rank()]), group=group, stream=mx.cpu)
print(group.size(), total.item())
""")
    job = start([host("127.0.0.1", 1), host("node2", 2)], "python", path)
    assert job.status() == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [b"2 11", b"[rank 1 node2] 2 11"]


@pytest.mark.parametrize(
    "ranks, mine, hosts_own, seen, nccl",
    [
        (2, "5,3", {}, ["5", "3"], True),  # a GPU for each
        (3, "5,3", {}, ["5,3"] * 3, False),  # too few: they share, and NCCL would refuse
        (1, "5,3", {}, ["5,3"], True),
        (2, "5,3", {"CUDA_VISIBLE_DEVICES": "7"}, ["7", "7"], True),  # who says it, means it
    ],
)
def test_ranks_of_one_host_get_a_gpu_each(
    start, script, told, monkeypatch, ranks, mine, hosts_own, seen, nccl
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mine)
    path = script("""
tell("got", [os.environ.get(k) for k in ("CUDA_VISIBLE_DEVICES", "NCCL_HOST_IP")])
""")
    hosts = [host("127.0.0.1", k + 1, env=hosts_own) for k in range(ranks)]
    job = start(hosts, "python", path)
    assert job.status() == 0, job.stderr
    assert [told("got", rank)[0] for rank in range(ranks)] == seen
    assert [told("got", rank)[1] is not None for rank in range(ranks)] == [nccl] * ranks


def test_a_warning_for_the_variable_that_can_wedge_a_gpu_and_the_launcher_never_sets_it(
    start, script
):
    path = script("""
import comm
with comm.connect() as job: pass
print(os.environ.get("MLX_METAL_FAST_SYNCH"))
""")
    fast = {"MLX_METAL_FAST_SYNCH": "1"}
    for hosts, count in (
        ([host("127.0.0.1", 1)], 0),
        ([host("127.0.0.1", k, env=fast) for k in (1, 2)], 1),
    ):
        job = start(hosts, "python", path)
        assert job.status() == 0, job.stderr
        text = job.stdout.decode() + job.stderr
        assert len(lines_with(text, "warning", "MLX_METAL_FAST_SYNCH")) == count
        assert ("None\n" in text) == (not count)


# --- Exit status ----------------------------------------------------------------------------------

WHERE = pytest.mark.parametrize("where", ["127.0.0.1", "node2"])
MOSTLY_THERE = pytest.mark.parametrize(
    "where", ["node2", pytest.param("127.0.0.1", marks=pytest.mark.slow)]
)


@WHERE
def test_all_well_is_0_and_silent(start, where):
    job = start([host("127.0.0.1", 1), host(where, 2)], "true")
    assert (job.status(), job.stdout, job.stderr) == (0, b"", "")


@pytest.mark.parametrize(
    "code, status, said, rank, where",
    [
        ("sys.exit(7)", 7, "exit status 7", 0, "127.0.0.1"),
        ("sys.exit(7)", 7, "exit status 7", 1, "node2"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL", 0, "node2"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL", 1, "127.0.0.1"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by SIGSEGV", 1, "node2"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_host_and_gives_the_exit_status(
    start, script, code, status, said, rank, where
):
    path = script(f"if rank == {rank}: {code}")
    hosts = [host("127.0.0.1", 1), host("127.0.0.1", 3)]
    hosts.insert(rank, host(where, 2))
    job = start(hosts, "python", path)
    assert job.status() == status
    assert lines_with(job.stderr, f"rank {rank} ({where}): {said}"), job.stderr
    assert len(re.findall(r"^rank \d \(", job.stderr, re.M)) == 1, job.stderr


@pytest.mark.parametrize(
    "code, status, where",
    [
        ("sys.exit(7)", 7, "node2"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "127.0.0.1"),
        pytest.param("sys.exit(7)", 7, "127.0.0.1", marks=pytest.mark.slow),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", 137, "node2", marks=pytest.mark.slow),
    ],
)
def test_the_exit_status_is_of_the_rank_at_fault_not_of_those_that_heard_of_it(
    start, script, code, status, where
):
    path = script(f"""
import comm, numpy as np
with comm.connect() as job:
    for step in range(1000):
        job.all_reduce(np.ones(1000, np.float32))
        if step == 5 and rank == 1: {code}
        time.sleep(0.01)
""")
    job = start([host("127.0.0.1", 1), host(where, 2), host("127.0.0.1", 3)], "python", path)
    got = job.status(60)
    for rank in (0, 2):
        assert lines_with(job.stderr, "CommError: rank 1 (127.0.0.2): "), job.stderr
        assert lines_with(job.stderr, f"rank {rank} (127.0.0.1): exit status 1")
    assert lines_with(job.stderr, f"rank 1 ({where}): "), job.stderr
    assert got == status, job.stderr
    assert not job.left()


def test_a_rank_whose_private_folder_is_gone_still_hears_who_is_at_fault(start, script):
    path = script("""
import comm, numpy as np, shutil
with comm.connect() as job:
    job.barrier()
    shutil.rmtree(os.path.dirname(os.environ["COMM_SECRET_FILE"]))
    job.barrier()
    if rank == 1: sys.exit(7)
    job.barrier()
""")
    job = start([host("127.0.0.1", k) for k in (1, 2, 3)], "python", path)
    assert job.status() in (1, 7)
    assert len(lines_with(job.stderr, "comm.CommError: rank 1 (127.0.0.2): ")) == 2, job.stderr
    for rank, status in enumerate((1, 7, 1)):
        assert lines_with(job.stderr, f"rank {rank} (127.0.0.1): exit status {status}"), job.stderr


@MOSTLY_THERE
def test_a_stopped_rank_is_not_waited_for(start, script, where):
    path = script("""
import comm, numpy as np
with comm.connect(silence=1.0) as job:
    for step in range(1000):
        job.all_reduce(np.ones(10, np.float32))
        if step == 5 and rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
""")
    job = start([host("127.0.0.1", 1), host(where, 2)], "python", path, grace=1.0)
    assert job.status(30) not in (0, None)
    assert lines_with(job.stderr, "rank 1 (127.0.0.2): no sign of life for 1 s"), job.stderr
    assert lines_with(job.stderr, f"rank 1 ({where}): ", "the launcher ended it"), job.stderr
    assert not job.left()


@pytest.mark.parametrize("first", ["127.0.0.1", "node1"])
def test_what_a_host_lacks_is_named_with_the_host(start, first):
    command = ["sh", "-c", 'exec "$0" $MINE', sys.executable]
    no_script, nothing = {"MINE": "/no/such/script.py"}, "/no/such/thing"
    hosts = [
        host(first, 1, cwd=nothing),
        host("127.0.0.1", 2, cwd=nothing),
        host("node3", 3, cwd=nothing),
        host("node4", 4, python=nothing),
        host("127.0.0.1", 5, env=no_script),
        host("node6", 6, env=no_script),
    ]
    job = start(hosts, *command)
    assert job.status() in (2, 127) and "Traceback" not in job.stderr, job.stderr
    for rank, entry in enumerate(hosts):
        name = entry["ssh"]
        thing = entry.get("env", entry).get("MINE", nothing)
        before = f"[rank {rank} {name}] " if rank else ""
        said = [line for line in lines_with(job.stderr, thing) if line.startswith(before)]
        assert said, (rank, job.stderr)
        assert lines_with(job.stderr, f"rank {rank} ({name}): exit status "), job.stderr


def test_a_program_or_python_that_is_not_there_is_named_with_the_host(start):
    job = start([host("127.0.0.1", 1), host("node2", 2)], "only-elsewhere")
    assert job.status() in (2, 127) and "Traceback" not in job.stderr, job.stderr
    assert len(lines_with(job.stderr, "cannot start only-elsewhere")) == 2
    for name in ("rank 0 (127.0.0.1): ", "rank 1 (node2): "):
        assert lines_with(job.stderr, name), job.stderr
    hosts = [host("node1", 1), host("127.0.0.1", 2, python="/no/such/thing")]
    job = start(hosts, "python", "-c", "pass")
    assert job.status() in (2, 127) and "Traceback" not in job.stderr, job.stderr
    assert lines_with(job.stderr, "rank 1 ", "127.0.0.1"), job.stderr
    assert lines_with(job.stderr, "/no/such/thing"), job.stderr


UNREACHED = {
    "locked": "Permission denied",
    "closed": "Connection refused",
    "nowhere": "nowhere.invalid",
}


def test_hosts_that_ssh_does_not_reach_are_named_and_the_others_ended(start, script):
    path = script("time.sleep(1000)")
    hosts = [host("127.0.0.1", 1), host("node2", 2)]
    hosts += [host(name, 3 + k) for k, name in enumerate(UNREACHED)]
    job = start(hosts, "python", path, grace=1.0)
    assert job.status() == 255 and "Traceback" not in job.stderr, job.stderr
    for rank, (name, said) in enumerate(UNREACHED.items(), 2):
        assert lines_with(job.stderr, f"[rank {rank} {name}] ", said), job.stderr
        assert lines_with(job.stderr, f"rank {rank} ({name}): ", "ssh failed"), job.stderr
    assert not job.left()


@pytest.mark.parametrize(
    "name",
    ["closed", *(pytest.param(n, marks=pytest.mark.slow) for n in ("locked", "nowhere"))],
)
def test_a_first_host_that_ssh_does_not_reach_is_named(start, name):
    job = start([host(name, 1), host("127.0.0.1", 2)], "true")
    assert job.status() == 255 and "Traceback" not in job.stderr, job.stderr
    assert lines_with(job.stderr, UNREACHED[name])
    assert lines_with(job.stderr, f"rank 0 ({name}): ", "ssh failed"), job.stderr


def test_a_program_for_ssh_that_is_not_there_is_one_line(start):
    job = start([host("127.0.0.1", 1), host("node2", 2)], "true", mine={"COMM_SSH": "no-such-ssh"})
    assert job.status() == 2 and len(job.stderr.splitlines()) == 1
    assert "error:" in job.stderr and "no-such-ssh" in job.stderr


# --- Nothing is left ------------------------------------------------------------------------------

FAMILY = """
tell("folder", os.path.dirname(os.environ["COMM_SECRET_FILE"])), tell("pid", os.getpid())
children = [subprocess.Popen(["sleep", "1000"]), subprocess.Popen(["sh", "-c", "sleep 1001; true"])]
"""
STUBBORN = """
    for which in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(which, signal.SIG_IGN)
"""
WAIT = """
tell("ready")
while not os.path.exists(f"{here}/go{rank}"): time.sleep(0.05)
"""
HOSTS = [host("127.0.0.1", 1), host("node2", 2), host("127.0.0.1", 3), host("node4", 4)]


def nothing_left(job, sshd, told, ranks=range(2)) -> None:
    left = until(lambda: not marked(job.mark, sshd["COMM_TEST_SSHD"]), 15.0)
    assert left, marked(job.mark, sshd["COMM_TEST_SSHD"])
    assert not [r for r in ranks if Path(told("folder", r)).exists()]


@pytest.mark.parametrize(
    "how, grace",
    [
        ("ends", 1.0),
        ("fails", 1.0),
        ("INT INT", 1.0),
        ("TERM", 1.0),
        ("KILL", 1.0),
        pytest.param("HUP", 1.0, marks=pytest.mark.slow),
        pytest.param("KILL", None, marks=pytest.mark.slow),
        pytest.param("fails", None, marks=pytest.mark.slow),
    ],
)
def test_however_it_ends_no_process_and_no_folder_is_left(
    start, script, told, sshd, tmp_path, how, grace
):
    """Each rank has children and grandchildren; ranks 2 and 3 ignore what asks them to end."""
    path = script(f"if rank > 1:{STUBBORN}{FAMILY}{WAIT}")
    job = start(HOSTS, "python", path, grace=grace)
    for rank in range(4):
        told("ready", rank)
    running = marked(job.mark, sshd["COMM_TEST_SSHD"])
    assert sum("sleep 1000" in words for words in running.values()) == 4
    if how == "ends":
        for rank in range(4):
            (tmp_path / f"go{rank}").touch()
        assert job.status() == 0, job.stderr
    elif how == "fails":
        os.kill(told("pid", 1), signal.SIGKILL)
        assert job.status(40) == 137
        assert lines_with(job.stderr, "rank 1 (node2): killed by SIGKILL")
        for name in ("rank 0 (127.0.0.1): ", "rank 2 (127.0.0.1): ", "rank 3 (node4): "):
            assert lines_with(job.stderr, name, "launcher ended it"), job.stderr
    else:
        for name in how.split():
            job.signal(signal.Signals[f"SIG{name}"])
            time.sleep(0.3)
        wanted = 130 if "INT" in how else -signal.Signals[f"SIG{how}"]
        assert job.status() == wanted, job.stderr
    nothing_left(job, sshd, told, range(4))


def test_the_first_ctrl_c_lets_ranks_finish_and_the_second_does_not(
    start, script, told, sshd, tmp_path
):
    path = script(
        FAMILY
        + """
try:
    tell("ready"); time.sleep(1000)
except KeyboardInterrupt:
    tell("saving")
    while not os.path.exists(f"{here}/go"): time.sleep(0.05)
    tell("saved"); print("saved", flush=True)
"""
    )
    job = start(HOSTS[:2], "python", path, grace=1.0)
    told("ready", 0), told("ready", 1)
    job.signal(signal.SIGINT)
    told("saving", 0), told("saving", 1)
    time.sleep(1.5)  # longer than the grace after a failure
    assert job.process.poll() is None
    (tmp_path / "go").touch()
    assert job.status() == 130
    told("saved", 0), told("saved", 1)
    assert sorted(job.stdout.splitlines()) == [b"[rank 1 node2] saved", b"saved"]
    assert "Traceback" not in job.stderr
    nothing_left(job, sshd, told)
    for name in ("go", "ready0", "ready1", "saving0", "saving1", "saved0", "saved1"):
        (tmp_path / name).unlink()
    job = start(HOSTS[:2], "python", path, grace=1.0)
    told("ready", 0), told("ready", 1)
    job.signal(signal.SIGINT)
    told("saving", 0), told("saving", 1)
    job.signal(signal.SIGINT)
    assert job.status() == 130 and not list(tmp_path.glob("saved*"))
    nothing_left(job, sshd, told)


def test_a_lost_connection_ends_the_rank_there_and_is_named(start, script, told, sshd):
    job = start(HOSTS[:2], "python", script(FAMILY + WAIT), grace=1.0)
    told("ready", 0), told("ready", 1)
    (agent,) = [p for p, w in marked(sshd["COMM_TEST_SSHD"]).items() if "readline" in w]
    session = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    assert "sshd" in Path(f"/proc/{session}/cmdline").read_text()
    os.kill(session, signal.SIGKILL)
    assert job.status() == 255
    assert lines_with(job.stderr, "rank 1 (node2): ", "connection was lost"), job.stderr
    nothing_left(job, sshd, told)


@MOSTLY_THERE
def test_a_daemon_that_a_rank_leaves_does_not_hold_up_the_launcher(start, script, where):
    """Its standard output is still the rank's, which ssh would wait for."""
    path = script("""
print("begun", flush=True)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
""")
    job = start([host("127.0.0.1", 1), host(where, 2)], "python", path)
    assert job.status(20) == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [f"[rank 1 {where}] begun".encode(), b"begun"]


@WHERE
def test_a_daemon_that_a_rank_leaves_is_ended(start, script, told, sshd, where):
    """A process in a session of its own: Linux tells whose it was."""
    path = script(
        FAMILY
        + """
orphan = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.DEVNULL)
"""
    )
    job = start([host("127.0.0.1", 1), host(where, 2)], "python", path)
    assert job.status(20) == 0, job.stderr
    nothing_left(job, sshd, told)


def test_a_reader_that_goes_away_ends_the_job(tmp_path, script, sshd):
    """python comm.py launch ... | head -1"""
    path = script("while True: print('x' * 1000)")
    mark = uuid.uuid4().hex
    line = f"'{sys.executable}' '{ROOT}/comm.py' launch --port={free_port()} -- python '{path}'"
    words = ["bash", "-o", "pipefail", "-c", f"{line} | head -n 1"]
    env = {**os.environ, "COMM_TEST_MARK": mark}
    job = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        _, err = job.communicate(timeout=30)
        assert job.returncode not in (0, None) and b"Traceback" not in err, err[-2000:]
        assert until(lambda: not marked(mark)), marked(mark)
    finally:
        end(marked(mark))


def test_a_reader_that_is_slow_misses_nothing(sshd):
    """python comm.py launch ... | less: pipes hold what is left when the rank has long ended."""
    line = f"'{sys.executable}' '{ROOT}/comm.py' launch --ranks=1 --port={free_port()} -- seq 30000"
    words = ["bash", "-o", "pipefail", "-c", f"{line} | (sleep 6; wc -l)"]
    done = subprocess.run(words, capture_output=True, timeout=60)
    assert done.returncode == 0 and int(done.stdout) == 30000, done.stderr


# --- check ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_check_here_runs_our_ring_and_mlxs(ranks):
    done = run_cli("comm", "check", f"--ranks={ranks}", f"--port={free_port(220)}", timeout=90)
    assert done.returncode == 0, done.stderr
    assert f"MLX {mx.__version__}" in done.stdout
    for backend in ("tcp", "ring"):
        assert f"backend {backend}: all operations right on {ranks} ranks" in done.stdout
    assert len(re.findall(r"rank \d \(.*\) to rank \d: \d+ us", done.stdout)) == 2 * ranks
    assert len(re.findall(r"all at once: \d+ MB/s", done.stdout)) == 2


def checked(start, hosts, *flags, port=None) -> tuple[int, str, list[str]]:
    """Exit status, standard output, and what FAILED."""
    job = start(hosts, words=("check", *flags), port=port)
    status = job.status(60)
    lines = [line for line in job.stderr.splitlines() if line.startswith("FAILED ")]
    assert "Traceback" not in job.stderr, job.stderr
    return status, job.stdout.decode(), lines


def test_check_of_good_hosts_prints_versions_and_links(start):
    status, out, failed = checked(start, [host("127.0.0.1", 1), host("node2", 2)])
    assert status == 0 and not failed
    for rank, name in enumerate(("127.0.0.1", "node2")):
        assert lines_with(out, f"rank {rank} ({name}): Python ", f"MLX {mx.__version__}")
        assert lines_with(out, f"rank {rank} (127.0.0.{rank + 1}) to rank {1 - rank}: ", "us")
    assert "backend tcp: all operations right on 2 ranks" in out and "MB/s" in out


OTHER_MLX = """
import importlib.metadata as m
real = m.version
m.version = lambda name: "0.1.2" if name == "mlx" else real(name)
"""
OTHER_FILE = f"""
import builtins, io
real = builtins.open
def other(file, *words, **more):
    if str(file) == {str(ROOT / "comm.py")!r}: return io.BytesIO(b"another")
    return real(file, *words, **more)
builtins.open = other
"""
NO_FILE = OTHER_FILE.replace('return io.BytesIO(b"another")', "raise FileNotFoundError(file)")


def test_check_names_each_host_with_what_is_wrong_there_and_reports_the_others(start, wrapped):
    bare, file = wrapped("unset PYTHONPATH", flags="-S"), ROOT / "comm.py"
    wrong = [
        ({"python": wrapped(site=OTHER_MLX)}, ["mlx 0.1.2, but rank 0 has", "make them the same"]),
        ({"python": wrapped(site=OTHER_FILE)}, ["comm.py ", "but rank 0 has", "the same"]),
        ({"python": wrapped(site=NO_FILE)}, [f"no {file}", "copy it there"]),
        ({"python": bare}, [f"{bare} has no mlx", "pip install mlx"]),
        ({"ips": ["192.0.2.9"]}, ["cannot listen on 192.0.2.9", "assign", "ips"]),
        ({"python": "/no/such/thing"}, ["/no/such/thing"]),
        ({"cwd": "/no/such/thing"}, ["/no/such/thing"]),
    ]
    hosts = [host("127.0.0.1", 1), host("node2", 2)]
    hosts += [host(f"node{k}", k) | changes for k, (changes, _) in enumerate(wrong, 3)]
    hosts += [host("127.0.0.1", 60, **wrong[-2][0]), host("127.0.0.1", 61, **wrong[-1][0])]
    hosts += [host(name, 50 + k) for k, name in enumerate(UNREACHED)]
    hosts += [host("127.0.0.1", 70), host("node71", 71)]
    status, out, failed = checked(start, hosts)
    assert status == 1
    wanted = [words for _, words in wrong] + [["/no/such/thing"]] * 2
    wanted += [[said, f"try: ssh {name}"] for name, said in UNREACHED.items()]
    assert len(failed) == len(wanted), failed
    for rank, (line, words) in enumerate(zip(failed, wanted, strict=True), 2):
        assert line.startswith(f"FAILED rank {rank} ({hosts[rank]['ssh']}): "), line
        assert not [w for w in words if w not in line], line
    for rank in (0, 1, len(hosts) - 2, len(hosts) - 1):
        assert lines_with(out, f"rank {rank} ({hosts[rank]['ssh']}): Python ", "MLX")


def test_check_names_a_port_that_is_taken(start):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = free_port()
        taken.bind(("127.0.0.2", port + 1))
        taken.listen()
        hosts = [host("127.0.0.1", 1), host("node2", 2), host("node3", 3)]
        status, out, failed = checked(start, hosts, port=port)
    assert status == 1 and len(failed) == 1 and len(lines_with(out, "Python")) == 3
    said = f"rank 1 (node2): cannot listen on 127.0.0.2 port {port + 1}: "
    assert said in failed[0] and "already in use" in failed[0] and "--port" in failed[0]


def test_check_blames_only_the_first_host_if_it_alone_has_no_mlx(start, wrapped):
    python = wrapped("unset PYTHONPATH", flags="-S")
    status, out, failed = checked(start, [host("node1", 1, python=python), host("node2", 2)])
    assert status == 1 and "rank 1 (node2): Python" in out
    assert len(failed) == 1 and "rank 0 (node1): " in failed[0] and "no mlx" in failed[0]


def listing(folder: Path, *devices: str) -> dict[str, str]:
    """An environment whose `ibv_devices` lists these."""
    rows = "".join(f"    {d:<16}\t000000000000000{k}\n" for k, d in enumerate(devices))
    head = "    device          \t   node GUID\n    ------          \t----------------\n"
    folder.mkdir(exist_ok=True)
    (folder / "list").write_text(head + rows)
    (folder / "ibv_devices").write_text(f"#!/bin/sh\ncat '{folder}/list'\n")
    (folder / "ibv_devices").chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_check_compares_rdma_devices_with_the_hostfile(start, tmp_path):
    full, part = listing(tmp_path / "a", "rdma_en2", "rdma_en3"), listing(tmp_path / "b", "other")
    first = host("127.0.0.1", 1, rdma=[None, "rdma_en2"], env=full)
    good = host("node2", 2, rdma=[["rdma_en2", "rdma_en3"], None], env=full)
    status, out, failed = checked(start, [first, good], "--backend", "tcp")
    assert status == 0 and not failed
    assert lines_with(out, "rank 1 (node2): ", "RDMA rdma_en2, rdma_en3")
    status, out, failed = checked(start, [first, good | {"env": part}], "--backend", "tcp")
    assert status == 1 and len(failed) == 2
    for device, line in zip(("rdma_en2", "rdma_en3"), failed, strict=True):
        assert f"rank 1 (node2): no RDMA device {device} (there: other)" in line
        assert "backend tcp" in line
    assert lines_with(out, "rank 0 (127.0.0.1): ", "RDMA rdma_en2")


def test_jaccl_without_rdma_devices_is_refused_by_name(start, script, tmp_path):
    bare = {"PATH": "/usr/bin:/bin"}
    hosts = [host("127.0.0.1", 1, env=bare), host("node2", 2, env=bare)]
    status, out, failed = checked(start, hosts, "--backend", "jaccl")
    assert status == 1 and len(failed) == 2
    for rank, line in enumerate(failed):
        assert f"rank {rank} (" in line and "jaccl" in line and "rdma" in line
    hosts = [h | {"rdma": [None, "en1"][:: 1 - 2 * k]} for k, h in enumerate(hosts)]
    status, out, failed = checked(start, hosts, "--backend", "jaccl")
    assert status == 1 and len(failed) == 2 and all("no RDMA device en1" in f for f in failed)
    # without asking first: an end, not a crash
    path = script("""
import comm
try:
    comm.connect(connect=3.0)
except (comm.CommError, comm.UserError) as error:
    sys.exit(f"refused: {error}")
""")
    job = start(hosts, "python", path, words=("launch", "--backend", "jaccl"))
    assert job.status(40) in (1, 2), job.stderr
    assert len(lines_with(job.stderr, "refused: ", "jaccl")) == 2, job.stderr


def one_line(monkeypatch, capsys, words: list, said: list[str]) -> None:
    """comm.py with these words says one line, which has all of `said`, and exits with 2."""
    monkeypatch.setattr(sys, "argv", ["comm.py", *map(str, words)])
    commands = {"launch": comm.launch, "check": comm.check, "bench": comm.bench}
    with pytest.raises(SystemExit) as exit:
        comm.cli(commands, errors=(comm.CommError,))
    error = capsys.readouterr().err
    assert exit.value.code == 2 and len(error.splitlines()) == 1, error
    for text in ["comm.py: error:", *said]:
        assert text in error


@pytest.mark.parametrize(
    "text, said",
    [
        (None, ["hosts.json", "No such file"]),
        ("[{,}]", ["hosts.json: not JSON"]),
        ("[]", ["hosts.json", "no hosts"]),
        ('[{"ssh": "a"}]', ["hosts.json: hosts[0].ips"]),
        ('[{"ssh": "a", "ips": ["127.0.0.1"], "pyhton": "x"}]', ["did you mean 'python'?"]),
    ],
)
@pytest.mark.parametrize("command", ["check", "bench", "launch"])
def test_a_bad_hostfile_is_one_line_before_anything_starts(
    monkeypatch, capsys, tmp_path, text, said, command
):
    if text is not None:
        (tmp_path / "hosts.json").write_text(text)
    tail = ["--", "touch", tmp_path / "started"] if command == "launch" else []
    words = [command, "--nodes", tmp_path / "hosts.json", *tail]
    one_line(monkeypatch, capsys, words, said)
    assert not (tmp_path / "started").exists()


# --- bench, flags ---------------------------------------------------------------------------------


def rows_of(out: str, backend: str, sizes: list[float]) -> None:
    """The table of `bench` is well formed."""
    first, link, head, *rows = out.splitlines()
    assert first == f"2 ranks, backend {backend}, 1 trunks, float32;"
    assert re.fullmatch(r"link: \d+ MB/s", link) and head.split()[0] == "MB"
    numbers = [list(map(float, row.split())) for row in rows]
    assert [row[0] for row in numbers] == sizes
    for _, middle, fastest, slowest, *rest in numbers:
        assert 0 < fastest <= middle <= slowest and len(rest) == 3 and min(rest) >= 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tcp", "ring"])
def test_bench_prints_a_row_for_each_size(backend):
    words = ["--ranks", 2, "--megabytes", "0.1,1", "--backend", backend, "--port", free_port()]
    done = run_cli("comm", "bench", *words, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    rows_of(done.stdout, backend, [0.1, 1.0])


@pytest.mark.slow
def test_bench_over_ssh(start):
    hosts = [host("node1", 1), host("node2", 2)]
    job = start(hosts, words=("bench", "--megabytes", "0.5", "--backend", "ring"))
    assert job.status(60) == 0 and not job.stderr, job.stderr
    rows_of(job.stdout.decode(), "ring", [0.5])


@pytest.mark.parametrize("backend", ["tcp", pytest.param("ring", marks=pytest.mark.slow)])
def test_bench_of_overlap_prints_a_step_and_its_limit(backend):
    words = ["--simulate-compute", 20, "--layers", 4, "--bytes", 400000, "--backend", backend]
    done = run_cli("comm", "bench", "--ranks=2", *words, f"--port={free_port()}", timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    first, times, ratio = done.stdout.splitlines()
    assert first.startswith(f"2 ranks, 4 buckets, 400000 bytes, backend {backend}")
    times = dict(part.rsplit(" ", 1) for part in times.split(", "))
    assert list(times) == ["compute", "transfer", "bucket", "apart", "step"]
    assert times["compute"] == "20.0"
    assert float(times["step"]) >= 20.0 and float(ratio.rpartition(" ")[2]) > 0


@pytest.mark.parametrize(
    "words, said",
    [
        (["bench", "--megabyte", "1"], ["--megabyte;", "did you mean --megabytes?"]),
        (["bench", "--ranks", "two"], ["--ranks: got 'two'"]),
        (["bench", "--dtype", "float64", "--ranks=1"], ["--dtype", "float64", "float32"]),
        (["bench", "--backend", "tpc"], ["tpc", "tcp"]),
        (["check", "--node", "x"], ["did you mean --nodes?"]),
        (["check", "--backend", "tpc"], ["tpc", "tcp"]),
        (["launch"], ["missing COMMAND"]),
        (["launch", "--ranks", "2", "--"], ["nothing to run"]),
        (["launch", "--rnaks", "2", "--", "true"], ["did you mean --ranks?"]),
        (["launch", "--backend", "tpc", "--", "touch", "started"], ["tpc", "tcp"]),
        (["launch", "--ranks", "0", "--", "touch", "started"], ["ranks", "0"]),
        (["launch", "--port", "65535", "--", "touch", "started"], ["port", "65535"]),
        (["launch", "--port", "0", "--", "touch", "started"], ["port"]),
    ],
    ids=" ".join,
)
def test_what_is_wrong_on_the_command_line_is_one_line_and_nothing_starts(
    monkeypatch, capsys, tmp_path, words, said
):
    monkeypatch.chdir(tmp_path)
    one_line(monkeypatch, capsys, words, said)
    assert not list(tmp_path.iterdir())


def test_no_command_and_a_wrong_one_list_the_commands(tmp_path):
    for words in ([], ["lanch", "--", "touch", "started"]):
        done = run_cli("comm", *words, cwd=tmp_path)
        refused(done, "wanted one of: launch, check, bench")
        assert "launch --nodes hosts.json" in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["launch --help", "bench --help --zzz", "check -h", "--help"])
def test_help_does_nothing_else(tmp_path, words):
    tail = ["--", "touch", "started"] if words.startswith("launch") else []
    done = run_cli("comm", *words.split(), *tail, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr and not list(tmp_path.iterdir())
    assert "--nodes" in done.stdout


# --- Alone ----------------------------------------------------------------------------------------

EXAMPLE = """
import comm, mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, mlx.utils
with comm.connect() as job, comm.Overlap(job) as reduce:
    mx.random.seed(0)
    model, optimizer = nn.Linear(3, 1), optim.SGD(0.1)
    x = mx.random.normal((64, 3))[job.rank :: job.size]
    grad = nn.value_and_grad(model, lambda x, y: ((model(x) - y) ** 2).sum())
    for step in range(60):
        loss, grads = grad(x, x.sum(axis=1, keepdims=True))
        grads, (loss, rows) = reduce(grads, loss, mx.array(len(x)))
        optimizer.update(model, mlx.utils.tree_map(lambda g: g / rows, grads))
print(job.rank, comm.__file__, rows.item(), (loss / rows).item() < 1e-4, model.weight.tolist())
"""


def test_comm_alone_in_a_folder_runs_its_bench_and_a_data_parallel_example(tmp_path):
    alone, block, away = (tmp_path / name for name in ("alone", "block", "away"))
    for folder in (alone, block, away):
        folder.mkdir()
    shutil.copy(ROOT / "comm.py", alone)
    # the suite may be installed; alone means that its other files cannot be imported
    names = ("quant", "dora", "train", "fuse")
    block_them = f"import sys; sys.modules.update(dict.fromkeys({names}))"
    (block / "sitecustomize.py").write_text(block_them)
    env = {k: v for k, v in os.environ.items() if not k.startswith("COMM_")}
    env["PYTHONPATH"] = str(block)
    run = [sys.executable, str(alone / "comm.py")]
    words = ["bench", "--ranks=2", "--megabytes=0.1,1", f"--port={free_port()}"]
    done = subprocess.run(
        [*run, *words], cwd=away, env=env, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    rows_of(done.stdout, "tcp", [0.1, 1.0])
    (alone / "example.py").write_text(EXAMPLE)
    words = ["launch", f"--port={free_port()}", "--", "python", str(alone / "example.py")]
    done = subprocess.run(
        [*run, *words], cwd=away, env=env, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line.removeprefix("[rank 1 127.0.0.1] ") for line in done.stdout.splitlines())
    ranks, files, *same = zip(*(line.split(maxsplit=4) for line in lines), strict=True)
    assert ranks == ("0", "1") and set(files) == {str(alone / "comm.py")}
    assert all(a == b for a, b in same) and same[:2] == [("64.0",) * 2, ("True",) * 2]
    assert not list(away.iterdir())
