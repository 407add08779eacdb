"""comm.py: collectives between the ranks of one job, overlapped with backward, that never hang.

    python comm.py launch --nodes hosts.json -- python script.py    one rank per host, over ssh
    python comm.py check --nodes hosts.json                         hosts, versions, ports, links
    python comm.py bench --ranks 2                                  all-reduce against the link

One file, no other file of the suite needed. Every rank calls the same operations in the same order:

    import comm
    with comm.connect() as job:          # rank and addresses from the environment
        x = job.all_reduce(x)            # the sum over ranks, the same bits on each
        job.barrier()

The ring (backend "tcp"). Rank r sends to r + 1 over one TCP connection per address of the hostfile
(a trunk; several cables add up) and receives from r - 1. An all-reduce is a reduce-scatter and an
all-gather in chunks: each rank sends 2 (W - 1) / W of the bytes, whatever W is. Each trunk has a
thread that sends and one that receives and adds, on blocking sockets; numpy adds in place, straight
in the memory of the array. The order of additions depends on an element's place alone, so sums are
the same bits on every rank and in every run. bfloat16 and float16 travel as they are, are added in
float32 and rounded once per hop; integers are exact.

MLX's own backends ("jaccl", "nccl", "mpi", "ring") stand behind the same interface. What they run
cannot be interrupted, so a rank enters it only when all ranks have called the same operation.

What goes wrong is noticed and named. Whatever the backend, each rank keeps a control connection to
rank 0, over which both sides beat. Rank 0 decides who is at fault and tells the others, so that all
end with the same `CommError(rank, host, reason)`:

    a process ends                its connections close: at once
    stopped, hung, cut off        no beat for `silence` seconds
    alive, but does not call      an operation waits for `deadline` seconds
    another operation, dtype,     the header that precedes each operation: at once, with what
    size or order                 each side had
    an exception in `with job:`   told to all: at once

After that every call fails at once; `close` always returns, and no thread or socket is left.

Who may join. Each connection begins with an exchange of nonces and HMACs over a secret of the job,
the world size, the rank and what the connection is for. Strangers, other jobs and other versions
are turned away and change nothing. Payload is neither encrypted nor signed: a trusted network.
"""

import atexit
import collections
import concurrent.futures
import contextlib
import difflib
import errno
import faulthandler
import functools
import hashlib
import hmac
import inspect
import json
import math
import os
import queue
import secrets
import selectors
import shlex
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
import traceback
import types
import typing
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

VERSION = 1  # of what travels
CHUNK = 1 << 18  # bytes, half as many of 16-bit types; measured best from 64 KB to 1 MB
SMALL = 1 << 14  # bytes per rank and trunk below which one trunk takes it all
PORT = 32323  # of the first rank's first address
DTYPES = "float32 bfloat16 float16 int8 uint8 int16 uint16 int32 uint32 int64 uint64".split()
OPERATIONS = "all_reduce reduce_scatter all_gather broadcast".split()
BACKENDS = "auto tcp jaccl nccl mpi ring".split()


# --- Command line ---------------------------------------------------------------------------------
# The same text stands in every leaf, so that each can be copied alone; a test keeps them equal.


class UserError(Exception):
    """Something the user can put right: shown as one line, exit status 2."""


def coerce(name: str, text: str, wanted: object) -> object:
    """Turns the text of a flag into the type its annotation names; a union is tried from left to
    right.
    """
    for kind in typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,):
        low = text.lower()
        if kind is bool and low in ("true", "false"):
            return low == "true"
        if kind is types.NoneType and low == "none":
            return None
        if kind is str:
            return text
        if typing.get_origin(kind) is list:
            (item,) = typing.get_args(kind)
            parts = [part.strip(" '\"") for part in text.strip("[]()").split(",")]
            return [coerce(name, part, item) for part in parts if part]
        if kind in (int, float, dict):
            try:
                value = json.loads(text) if kind is dict else kind(text)
                if isinstance(value, kind) and (kind is not float or math.isfinite(value)):
                    return value
            except ValueError:
                pass
    wanted = getattr(wanted, "__name__", None) or str(wanted)
    raise UserError(f"--{name.replace('_', '-')}: got {text!r}, wanted {wanted}")


def parse(function: typing.Callable, argv: list[str]) -> dict:
    """Maps argv to keyword arguments of `function`, or raises UserError before anything has run."""
    signature, hints = inspect.signature(function).parameters, typing.get_type_hints(function)
    names, values, words = list(signature), {}, list(argv)
    free = [n for n in names if signature[n].kind is not inspect.Parameter.KEYWORD_ONLY]
    while words:
        word = words.pop(0)
        if word == "--" and "command" in names:
            values["command"] = words
            break
        if not word.startswith("--"):
            name = next((n for n in free if n not in values or hints[n] == list[str]), None)
            if name is None:
                raise UserError(
                    f"unexpected argument {word!r}; flags: --{', --'.join(names).replace('_', '-')}"
                )
            if hints[name] == list[str]:  # a last argument takes all the words there are
                values.setdefault(name, []).append(word)
            else:
                values[name] = coerce(name, word, hints[name])
            continue
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.5)
            hint = f"did you mean --{near[0]}?" if near else f"flags: --{', --'.join(names)}"
            raise UserError(f"unknown flag {word.partition('=')[0]}; {hint.replace('_', '-')}")
        if not equals:
            switch = hints[name] is bool
            follows = bool(words) and not words[0].startswith("--")
            if follows and (not switch or words[0].lower() in ("true", "false")):
                text = words.pop(0)
            elif switch or bool in typing.get_args(hints[name]):
                text = "true"
            else:
                raise UserError(f"--{name.replace('_', '-')} needs a value")
        values[name] = coerce(name, text, hints[name])
    for n, p in signature.items():
        if p.default is inspect.Parameter.empty and n not in values:
            raise UserError(f"missing {n.upper()}; try --help")
    return values


def show_help(function: typing.Callable) -> None:
    """Prints the docstring and every flag with its default."""
    print(inspect.cleandoc(function.__doc__ or ""), "\n\nFlags:")
    for name, p in inspect.signature(function).parameters.items():
        default = "required" if p.default is inspect.Parameter.empty else repr(p.default)
        print(f"  --{name.replace('_', '-'):<26} {default}")


def cli(commands: object, expand: typing.Callable | None = None, errors: tuple = ()) -> None:
    """Runs a function, or one of a dict of functions, from the command line through Fire.

    Fire calls the function first and complains about unknown flags afterwards, so flags are
    checked and coerced here before. `expand(function, flags) -> flags` may add flags from
    elsewhere. UserError, OSError and `errors` become one line on stderr and exit status 2;
    anything else keeps its traceback.
    """
    argv = sys.argv[1:]
    try:
        function = commands
        if isinstance(commands, dict):
            name = argv.pop(0) if argv and not argv[0].startswith("-") else None
            if name not in commands:
                print(inspect.cleandoc(sys.modules["__main__"].__doc__))
                if name is None and ("--help" in argv or "-h" in argv):
                    return
                raise UserError(f"got command {name!r}, wanted one of: {', '.join(commands)}")
            function = commands[name]
        own = argv[: argv.index("--")] if "--" in argv else argv
        if "--help" in own or "-h" in own:
            return show_help(function)
        flags = parse(function, argv)
        flags = expand(function, flags) if expand else flags
        import fire

        fire.Fire(function, command=[f"--{k}={v!r}" for k, v in flags.items()])
    except BrokenPipeError:
        os._exit(141)
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, OSError, RuntimeError, *errors) as error:
        unknown = isinstance(error, RuntimeError) and not isinstance(error, errors)
        if unknown and "Unable to write" not in str(error):
            raise
        full = "no space left on the disk: " if unknown else ""
        print(f"{Path(sys.argv[0]).name}: error: {full}{error}", file=sys.stderr)
        sys.exit(2)


# --- Errors ---------------------------------------------------------------------------------------


class CommError(RuntimeError):
    """A rank failed, or ranks disagree. All ranks of the job raise the same one.

    Attributes:
        rank: whose fault it is. host: its address. reason: what happened.
    """

    def __init__(self, rank: int, host: str, reason: str):
        super().__init__(f"rank {rank} ({host}): {reason}")
        self.rank, self.host, self.reason = rank, host, reason


# --- Joining --------------------------------------------------------------------------------------

# magic, version, world, rank, purpose (a trunk, or CONTROL, or MESSAGES), job, nonce
HELLO = struct.Struct("!8sHHHH16s16s")
MAGIC = b"mlx-dora"
CONTROL, MESSAGES = 0xFFFF, 0xFFFE
REFUSALS = (
    "ok",
    "not a rank of this suite",
    "another version of comm.py",
    "another job, hostfile or backend",
    "wrong secret",
)


def _mac(secret: bytes, *parts: bytes) -> bytes:
    return hmac.new(secret, b"|".join(parts), hashlib.sha256).digest()


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (part := sock.recv(size - len(data))):
            raise ConnectionError("connection closed")
        data += part
    return data


def _greet(sock: socket.socket, hello: bytes, secret: bytes) -> None:
    """The connecting side: proves it knows the secret, and that the other side does."""
    sock.sendall(hello)
    answer = _exactly(sock, 49)  # code, nonce, mac
    if answer[0]:
        why = REFUSALS[min(answer[0], len(REFUSALS) - 1)]
        raise PermissionError(f"turned this rank away: {why}")
    nonce, mac = answer[1:17], answer[17:]
    if not hmac.compare_digest(mac, _mac(secret, b"accepts", hello, nonce)):
        sock.sendall(bytes(32))  # so that the other side knows why, too
        raise PermissionError("is not of this job: wrong secret")
    sock.sendall(_mac(secret, b"connects", hello, nonce))
    if _exactly(sock, 1) != b"\0":
        raise PermissionError(f"turned this rank away: {REFUSALS[4]}")


def _admit(sock: socket.socket, world: int, job: bytes, secret: bytes) -> tuple[int, int]:
    """The accepting side: (rank, purpose) of who connects. PermissionError for anyone else."""
    hello = _exactly(sock, HELLO.size)
    magic, version, their_world, rank, purpose, their_job, _ = HELLO.unpack(hello)
    code = 0
    if magic != MAGIC:
        code = 1
    elif version != VERSION:
        code = 2
    elif their_job != job or their_world != world or rank >= world:
        code = 3
    nonce = os.urandom(16)
    sock.sendall(bytes([code]) + nonce + _mac(secret, b"accepts", hello, nonce))
    if not code:
        proof = _exactly(sock, 32)
        good = hmac.compare_digest(proof, _mac(secret, b"connects", hello, nonce))
        sock.sendall(b"\0" if good else b"\4")
        code = 0 if good else 4
    if code:
        raise PermissionError(REFUSALS[code])
    return rank, purpose


# --- The job --------------------------------------------------------------------------------------

# sequence, operation, root, dtype, bucket, bytes
HEADER = struct.Struct("!QBHBIQ")


def _described(rank: int, header: bytes) -> str:
    sequence, kind, root, dtype, bucket, size = HEADER.unpack(header)
    if kind >= len(OPERATIONS) or dtype >= len(DTYPES):
        return f"rank {rank} sent garbage"
    where = f"operation {sequence}, bucket {bucket}, root {root}"
    return f"rank {rank} called {OPERATIONS[kind]} of {size} bytes of {DTYPES[dtype]} ({where})"


class Handle:
    """An operation under way. `begun` and `ended` are time.monotonic() seconds."""

    def __init__(self, parts: int, result: typing.Callable):
        self.begun, self.ended = time.monotonic(), None
        self._left, self._result, self._error = parts, result, None
        self._lock, self._done = threading.Lock(), threading.Event()
        if not parts:
            self._finish()

    def wait(self):
        """What the operation returns, once this rank's part in it is done.

        Raises:
            CommError: the operation failed. It ends by itself: the job has deadlines.
        """
        self._done.wait()
        if self._error:
            raise self._error
        return self._result()

    def done(self) -> bool:
        return self._done.is_set()

    def _finish(self, error: Exception | None = None) -> None:
        with self._lock:
            self._left -= 1
            if not self._done.is_set() and (error or self._left <= 0):
                self._error, self.ended = error, time.monotonic()
                self._done.set()


# control messages: kind, rank, two numbers, length of the text that follows
MESSAGE = struct.Struct("!BHQQH")
ALIVE, READY, GO, ACCUSED, FAILED, LEFT, CALLED, PROCEED = range(8)


class _Peer:
    """What is known of a rank at the other end of a control connection."""

    def __init__(self, rank: int, sock: socket.socket | None):
        self.rank, self.sock, self.buffer = rank, sock, b""
        self.heard = self.moved = time.monotonic()
        self.begun = self.progress = 0  # operations begun; a number that grows as they get on
        self.busy = self.ready = self.left = False


class Communicator:
    """The ranks of one job; `connect` makes one. Operations are called in the same order by all.

    Arrays are numpy arrays or mx.arrays, contiguous, of a dtype in `DTYPES`, and nobody else's
    until the operation is done. What is returned is of the same kind; with backend "tcp" it is x
    itself, changed in place, where the shape stays the same.

    Args:
        rank: of this process, from 0.
        addresses: for each rank the (host, port) it listens on, one per trunk, the same number
            for all ranks.
        secret: of the job, the same bytes on all ranks; nobody without it can join.
        job: name of the job; another name on the same ports is turned away.
        connect: seconds until all ranks must have joined.
        silence: seconds without a sign of life after which a rank counts as gone.
        deadline: seconds that an operation waits without getting on.
        listener: a socket that listens already, instead of on the first address.

    Raises:
        CommError: a rank did not join, or is of another job.
    """

    backend = "none"

    def __init__(
        self,
        rank: int,
        addresses: list[list[tuple[str, int]]],
        secret: bytes = b"",
        job: str = "",
        connect: float = 60.0,
        silence: float = 15.0,
        deadline: float = 300.0,
        listener: socket.socket | None = None,
    ):
        self.rank, self.size, self.addresses = rank, len(addresses), addresses
        self.next, self.previous = (rank + 1) % self.size, (rank - 1) % self.size
        self.patience, self.silence, self.deadline = connect, silence, deadline
        self.error: CommError | None = None
        self._secret = secret
        self._job = hashlib.sha256(f"{self.backend} {job}".encode()).digest()[:16]
        self._begun = self._progress = 0
        self._order, self._changed = threading.Lock(), threading.Condition()
        self._telling, self._talking = threading.RLock(), threading.Lock()
        self._pending: list[Handle] = []
        self._arrived: dict[tuple[int, int], socket.socket] = {}
        self._sockets: list[socket.socket] = []
        self._ports: list[socket.socket] = []  # of them, those that outlive a failure
        self._lines: dict[int, socket.socket] = {}
        self._threads: list[threading.Thread] = []
        self._peers: dict[int, _Peer] = {}
        self._accusations: dict[tuple[int, int], str] = {}  # (who accuses, whom): why
        self._turned_away: collections.Counter = collections.Counter()
        self._left: set[int] = set()
        self._called: dict[int, dict[int, bytes]] = {}
        self._proceed = 0
        self._me = _Peer(rank, None)
        self._closing = self._joined = False
        if self.size > 1:
            self._selector = selectors.DefaultSelector()
            atexit.register(self.close)
            try:
                self._join(listener)
            except BaseException:
                self.close()
                raise

    def __enter__(self):
        return self

    def __exit__(self, kind, value, _):
        fine = kind in (None, CommError) or (kind is SystemExit and not value.code)
        if not fine and self.size > 1:
            name = "" if kind.__name__ == "UserError" else f"{kind.__name__}: "
            self.fail(f"{name}{value}" if str(value) else kind.__name__)
        self.close()

    def host(self, rank: int) -> str:
        return self.addresses[rank][0][0]

    def fail(self, reason: str) -> None:
        """Ends the job: every call of every rank raises CommError(this rank, reason)."""
        self._verdict(self.rank, reason)

    # --- joining

    def _join(self, listener: socket.socket | None) -> None:
        self._end = time.monotonic() + self.patience
        listeners = [listener] if listener else map(self._listen, self.addresses[self.rank])
        for sock in listeners:
            sock.setblocking(False)  # who has knocked may be gone before he is let in
            self._selector.register(self._keep(sock), selectors.EVENT_READ)
            self._ports.append(sock)
        self._wake, waker = socket.socketpair()
        self._sockets += [self._wake, waker]
        self._ports += [self._wake, waker]
        self._selector.register(waker, selectors.EVENT_READ, waker)
        self._start(self._watch)
        if self.rank:
            self._add_peer(0, self._reach(0, CONTROL))
        self._open()
        if self.rank:
            self._tell(0, READY)
            self._wait(lambda: self._joined, self._end + self.silence)
        else:  # a second later than the rest, who may know more
            self._wait(lambda: not self._absent(), self._end + 1.0)
            if not self._absent():
                self._tell_all(GO)
                self._joined = True
        if not self._joined:
            self._fail_joining(0 if self.rank else self._absent()[0])
        self._enter()

    def _open(self) -> None:
        """Prepares the backend, while the others do."""

    def _enter(self) -> None:
        """Goes on with it when all are there."""

    def _absent(self) -> list[int]:
        there = {r for r, peer in self._peers.items() if peer.ready}
        return [r for r in range(1, self.size) if r not in there]

    def _fail_joining(self, rank: int, why: str = "did not join") -> None:
        """Raises, with rank 0's word on it if there is one: it may know of strangers."""
        why = f"{why} within {self.patience:g} s{self._strangers()}"
        if self._peers:
            self._accuse(rank, why)
        raise self._verdict(rank, why)

    def _strangers(self) -> str:
        who = ", ".join(f"{host} ({why})" for host, why in self._turned_away)
        return f"; rank {self.rank} turned away {who}" if who else ""

    def _wait(self, condition, end: float) -> None:
        """Until the condition holds or the time has come; raises if the job has failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: condition() or self.error, min(max(0.0, end - time.monotonic()), 1e6)
            )
        if self.error:
            raise self.error

    def _start(self, function, *arguments) -> None:
        def run():
            try:
                function(*arguments)
            except Exception as error:  # nobody else would hear of it
                if not self._closing:
                    traceback.print_exc()
                    self.fail(f"internal error: {error!r}")

        thread = threading.Thread(target=run, daemon=True, name=f"comm{function.__name__}")
        with self._changed:
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
            thread.start()

    def _listen(self, address: tuple[str, int]) -> socket.socket:
        patience = time.monotonic() + 3.0  # a job that has just ended may still hold the port
        while True:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            listener = socket.socket(family)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address)
                listener.listen(64)
                return listener
            except OSError as error:
                listener.close()
                if error.errno != errno.EADDRINUSE or time.monotonic() > patience:
                    why = f"cannot listen on {address[0]} port {address[1]}: {error.strerror}"
                    raise self._verdict(self.rank, why) from None
                time.sleep(0.1)

    def _keep(self, sock: socket.socket) -> socket.socket:
        with self._changed:
            self._sockets.append(sock)
        return sock

    def _reach(self, rank: int, purpose: int) -> socket.socket:
        """A connection to another rank, tried again until it is there or the time is up."""
        trunk = 0 if purpose in (CONTROL, MESSAGES) else purpose
        host, port = self.addresses[rank][trunk]
        hello = HELLO.pack(MAGIC, VERSION, self.size, self.rank, purpose, self._job, os.urandom(16))
        while True:
            left = self._end - time.monotonic()
            try:
                sock = socket.create_connection((host, port), max(0.1, min(left, 5.0)))
                try:
                    _greet(sock, hello, self._secret)
                    self._settle(sock)
                    return self._keep(sock)
                except BaseException:
                    sock.close()
                    raise
            except PermissionError as error:
                raise self._verdict(rank, str(error)) from None
            except OSError as error:
                if self.error:
                    raise self.error from None
                if left <= 0:
                    why = error.strerror or error
                    why = f"no answer at {host} port {port} for rank {self.rank} ({why})"
                    self._fail_joining(rank, why)
                time.sleep(0.05)

    @staticmethod
    def _settle(sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _receive_guest(self, sock: socket.socket, host: str) -> None:
        """Admits whoever proves to be of this job, in a thread of its own: nobody holds it up."""
        try:
            sock.settimeout(5.0)
            rank, purpose = _admit(sock, self.size, self._job, self._secret)
            self._settle(sock)
        except OSError as error:
            if isinstance(error, PermissionError):
                self._turned_away[host, str(error)] += 1
            with self._changed:
                self._sockets.remove(sock)
            return sock.close()
        if purpose == CONTROL and self.rank == 0:
            return self._add_peer(rank, sock)
        with self._changed:
            if purpose == CONTROL or self._arrived.setdefault((rank, purpose), sock) is not sock:
                sock.close()  # a second process of a rank that is here
            self._changed.notify_all()

    # --- who is alive

    def _add_peer(self, rank: int, sock: socket.socket) -> None:
        with self._changed:
            if rank in self._peers:  # one that was here before, and is not taken back
                return sock.close()
            self._peers[rank] = peer = _Peer(rank, sock)
            self._selector.register(sock, selectors.EVENT_READ, peer)
            self._changed.notify_all()

    def _tell(self, rank: int, kind: int, about: int = 0, a=0, b=0, text: bytes = b"") -> None:
        """Sends a control message; that it cannot be sent is noticed by the reading side."""
        text = text[:60000]
        try:
            with self._telling:
                self._peers[rank].sock.sendall(MESSAGE.pack(kind, about, a, b, len(text)) + text)
        except (OSError, KeyError):
            pass

    def _tell_all(self, kind: int, about: int = 0, a=0, b=0, text: bytes = b"") -> None:
        for rank in list(self._peers):
            self._tell(rank, kind, about, a, b, text)

    def _watch(self) -> None:
        """Listens, beats, and watches the clock."""
        pause, beaten, accused = min(1.0, self.silence / 5), 0.0, None
        while not self._closing:
            for key, _ in self._selector.select(min(pause, 0.2)):
                if isinstance(key.data, _Peer):
                    self._hear(key.data)
                elif key.data:
                    key.data.recv(4096)
                else:
                    try:
                        sock, address = key.fileobj.accept()
                    except OSError:
                        continue
                    self._start(self._receive_guest, self._keep(sock), address[0])
            now = time.monotonic()
            if self._accusations and not self.error:  # a second one tells who is the odd one out
                accused = accused or now
                if len(self._accusations) > 1 or self.size == 2 or now - accused > 2.0:
                    self._decide()
            if not self.error:
                self._check_silence(now)
            if now - beaten > pause:
                beaten = now
                busy = any(not h.done() for h in self._pending)
                self._tell_all(ALIVE, busy, self._begun, self._progress)
                judges = self.rank == 0 or self._peers and self._peers[0].left
                if judges and self._joined and not self.error:
                    self._judge(now, busy)

    def _check_silence(self, now: float) -> None:
        peers = [p for p in self._peers.values() if not p.left]
        silent = [p for p in peers if now - p.heard > self.silence]
        if silent:
            why = f"no sign of life for {self.silence:g} s: stopped, hung or cut off"
            quiet = [p for p in peers if now - p.heard > self.silence / 2]
            if len(quiet) == len(peers) > 1:
                self._verdict(self.rank, "cut off: no sign of life from any other rank")
            else:
                self._verdict(silent[0].rank, why)

    def _hear(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(peer.sock)
            gone, peer.left = not peer.left, True
            if gone and not self._closing:
                self._verdict(peer.rank, "its process has ended (connection closed)")
            return _shut(peer.sock)
        peer.heard, peer.buffer = time.monotonic(), peer.buffer + data
        while len(peer.buffer) >= MESSAGE.size:
            kind, about, a, b, length = MESSAGE.unpack_from(peer.buffer)
            if len(peer.buffer) < MESSAGE.size + length:
                break
            text = peer.buffer[MESSAGE.size : MESSAGE.size + length]
            peer.buffer = peer.buffer[MESSAGE.size + length :]
            self._obey(peer, kind, about, a, b, text)

    def _obey(self, peer: _Peer, kind: int, about: int, a: int, b: int, text: bytes) -> None:
        if kind == ALIVE:
            self._note(peer, bool(about), a, b)
        elif kind == READY:
            peer.ready = True
        elif kind == GO:
            self._joined = True
        elif kind == ACCUSED:
            self._accusations.setdefault((peer.rank, about), text.decode())
        elif kind == FAILED:
            self._verdict(about, text.decode())
        elif kind == LEFT:
            self._left.add(about)
            if about == peer.rank:
                peer.left = True
                if self.rank == 0:
                    self._tell_all(LEFT, about)
        elif kind == CALLED:
            self._agree(peer.rank, a, text)
        elif kind == PROCEED:
            self._proceed = a
        with self._changed:
            self._changed.notify_all()

    @staticmethod
    def _note(peer: _Peer, busy: bool, begun: int, progress: int) -> None:
        if not busy or (begun, progress) != (peer.begun, peer.progress):
            peer.moved = time.monotonic()
        peer.busy, peer.begun, peer.progress = busy, begun, progress

    def _judge(self, now: float, busy: bool) -> None:
        """Rank 0, or each by itself if that has left: blames whoever keeps an operation waiting
        for longer than the deadline.
        """
        self._note(self._me, busy, self._begun, self._progress)
        ranks = [self._me, *(p for p in self._peers.values() if not p.left)]
        stuck = [p for p in ranks if p.busy and now - p.moved > self.deadline]
        if not stuck:
            return
        last, first = min(ranks, key=lambda p: p.begun), max(stuck, key=lambda p: p.begun)
        if last.begun < first.begun:
            why = f"has not called operation {last.begun + 1}, which rank {first.rank} has waited "
            self._verdict(last.rank, why + f"for {self.deadline:g} s")
        else:
            starved = min(stuck, key=lambda p: p.progress).rank
            why = f"nothing from it reached rank {starved} for {self.deadline:g} s, though both "
            why += "are alive: the link between them may be broken"
            self._verdict((starved - 1) % self.size, why)

    # --- who is to blame

    def _accuse(self, rank: int, why: str) -> None:
        """Tells rank 0, which decides (see `_decide`); if nothing comes from it, this rank does."""
        if self.rank == 0:
            self._accusations.setdefault((0, rank), why)
            self._wake_up()
        else:
            self._tell(0, ACCUSED, rank, text=why.encode())
        with self._changed:
            self._changed.wait_for(lambda: self.error or self._closing, 3.0)
        if not self._closing:
            self._verdict(rank, why)

    def _wake_up(self) -> None:
        try:
            self._wake.send(b"!")
        except OSError:
            pass

    def _decide(self) -> None:
        """Rank 0: of neighbours that contradict each other, blames the one that two complain of.

        The odd one out complains of its predecessor, and its successor of it; of two, the first.
        """
        said = dict(self._accusations)
        involved = collections.Counter(r for pair in said for r in pair)
        culprit = max((accused for _, accused in said), key=lambda r: involved[r])
        by, why = next((by, why) for (by, r), why in said.items() if r == culprit)
        self._verdict(culprit, why + ("" if self._joined or not by else self._strangers()))

    def _suspect(self, peer: int, why: str) -> None:
        """A connection has broken. Who is the cause is known best at rank 0: waits for its word."""
        with self._changed:
            told = self._changed.wait_for(lambda: self.error or self._closing or self._left, 1.0)
        if told and not self._left:
            return
        self._accuse(min(self._left, default=peer), "has left the job" if self._left else why)

    def _agree(self, rank: int, sequence: int, header: bytes) -> None:
        """Rank 0, for MLX's backends: when all have called the same, tells all to go on."""
        calls = self._called.setdefault(sequence, {})
        calls[rank] = header
        if len(calls) < self.size:
            return
        del self._called[sequence]
        usual = collections.Counter(calls.values()).most_common(1)[0][0]
        odd = [r for r in reversed(range(self.size)) if calls[r] != usual]
        if odd:
            other = next(r for r in calls if calls[r] == usual)
            what = (_described(r, calls[r]) for r in (other, odd[0]))
            self._verdict(odd[0], "the ranks disagree: " + ", ".join(what))
            return
        self._tell_all(PROCEED, a=sequence)
        with self._changed:
            self._proceed = sequence
            self._changed.notify_all()

    def _verdict(self, rank: int, reason: str) -> CommError:
        """The job has failed: every call of every rank raises this from now on."""
        with self._telling:  # so that `close`, which it wakes, says LEFT after FAILED
            with self._changed:
                if self.error:
                    return self.error
                self.error = CommError(rank, self.host(rank), reason)
                pending, self._pending = self._pending, []
                self._changed.notify_all()
            self._tell_all(FAILED, rank, text=reason.encode())
        if rank != self.rank and "COMM_SECRET_FILE" in os.environ:
            with contextlib.suppress(OSError):
                Path(os.environ["COMM_SECRET_FILE"]).with_name("other").touch()  # see `agent`
        for handle in pending:
            handle._finish(self.error)
        watched = [*self._ports, *(p.sock for p in self._peers.values())]
        for sock in list(self._sockets):
            if sock not in watched:
                _shut(sock)
        return self.error

    def close(self) -> None:
        """Leaves the job. Returns within seconds whatever the others do; may be called twice."""
        with self._changed:
            if self._closing or self.size == 1:
                return
            self._closing = True
            self._changed.notify_all()
        atexit.unregister(self.close)
        self._tell_all(LEFT, self.rank)
        self.error = self.error or CommError(self.rank, self.host(self.rank), "has left the job")
        for handle in self._pending:
            handle._finish(self.error)
        self._stop()
        if hasattr(self, "_wake"):
            self._wake_up()
        control = [p.sock for p in self._peers.values()]
        for sock in list(self._sockets):
            _shut(sock, socket.SHUT_WR if sock in control else socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5.0)
        # what is unread when a socket closes becomes a reset, which may overtake our last word
        end = time.monotonic() + 1.0
        for sock in control:
            try:
                while (left := end - time.monotonic()) > 0:
                    sock.settimeout(left)
                    if not sock.recv(65536):
                        break
            except OSError:
                pass
        for sock in self._sockets:
            sock.close()
        self._selector.close()

    def _stop(self) -> None:
        """Tells the backend's threads to end."""

    # --- operations

    def all_reduce(self, x, bucket: int = 0):
        """The sum of x over all ranks. `bucket` is any number that is the same on all ranks."""
        return self.all_reduce_async(x, bucket).wait()

    def all_reduce_async(self, x, bucket: int = 0) -> Handle:
        """Begins an all_reduce; several may be under way, begun in the same order by all ranks."""
        return self._begin("all_reduce", x, bucket=bucket)

    def reduce_scatter(self, x):
        """x (W * n, ...) -> (n, ...): this rank's part of the sum over ranks. x is overwritten."""
        if not x.shape or x.shape[0] % self.size:
            raise ValueError(f"got shape {x.shape}, wanted a first axis that {self.size} divides")
        return self._begin("reduce_scatter", x).wait()

    def all_gather(self, x):
        """x (n, ...) -> (W * n, ...): the ranks' arrays, one after the other."""
        return self._begin("all_gather", x).wait()

    def broadcast(self, x, root: int = 0):
        """Rank `root`'s x."""
        if not 0 <= root < self.size:
            raise ValueError(f"got root {root}, wanted one of 0 to {self.size - 1}")
        return self._begin("broadcast", x, root=root).wait()

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.all_reduce(np.ones(1, np.int32))

    def _begin(self, kind: str, x, root: int = 0, bucket: int = 0) -> Handle:
        flat, code = _flat(x)
        if self.size == 1:
            return Handle(0, lambda: x)
        with self._order:
            with self._changed:
                if self.error:
                    raise self.error
                self._begun += 1
                self._pending = [h for h in self._pending if not h.done()]
            numbers = self._begun, OPERATIONS.index(kind), root, code, bucket, flat.nbytes
            handle = self._launch(kind, x, flat, root, HEADER.pack(*numbers))
            with self._changed:
                self._pending.append(handle)
                failed = self.error
        if failed:  # between the two locks
            handle._finish(failed)
        return handle

    def _launch(self, kind: str, x, flat: np.ndarray, root: int, header: bytes) -> Handle:
        raise NotImplementedError

    def send(self, x, to: int) -> None:
        """Sends x to one rank, which must `recv` an array of the same dtype and size."""
        flat, code = _flat(x)
        sock = self._line(to, outgoing=True)
        header = HEADER.pack(0, 0, to, code, 0, flat.nbytes)
        self._talk(to, sock, lambda: (sock.sendall(header), sock.sendall(memoryview(flat))))

    def recv(self, x, source: int):
        """Fills x, in place, with what `source` sends; returns it."""
        flat, code = _flat(x)
        sock = self._line(source, outgoing=False)
        wanted = HEADER.pack(0, 0, self.rank, code, 0, flat.nbytes)
        got = self._talk(source, sock, lambda: _exactly(sock, HEADER.size))
        if got != wanted:
            *_, dtype, _, size = HEADER.unpack(got)
            mine = f"{flat.nbytes} bytes of {DTYPES[code]}"
            why = f"sent {size} bytes of {DTYPES[dtype]}, rank {self.rank} wanted {mine}"
            raise self._verdict(source, why)
        self._talk(source, sock, lambda: _fill(sock, memoryview(flat).cast("B")))
        return x

    def _line(self, rank: int, outgoing: bool) -> socket.socket:
        """The connection for messages to or from a rank, made when first needed by the sender."""
        if self.error:
            raise self.error
        if not 0 <= rank < self.size or rank == self.rank:
            raise ValueError(f"got rank {rank}, wanted another one of 0 to {self.size - 1}")
        if outgoing:
            with self._talking:
                if rank not in self._lines:
                    self._end = time.monotonic() + self.patience
                    self._lines[rank] = self._reach(rank, MESSAGES)
            return self._lines[rank]
        self._wait(lambda: (rank, MESSAGES) in self._arrived, time.monotonic() + self.deadline)
        if (rank, MESSAGES) not in self._arrived:
            raise self._verdict(rank, f"has sent nothing for {self.deadline:g} s")
        return self._arrived[rank, MESSAGES]

    def _talk(self, rank: int, sock: socket.socket, action):
        sock.settimeout(self.deadline)
        try:
            return action()
        except TimeoutError:
            raise self._verdict(rank, f"sends nothing for {self.deadline:g} s") from None
        except OSError as error:
            self._suspect(rank, f"connection lost ({error})")
            raise self.error from None


def _shut(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    try:
        sock.shutdown(how)
    except OSError:
        pass


def _fill(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        if not (got := sock.recv_into(view)):
            raise ConnectionError("connection closed")
        view = view[got:]


def _flat(x) -> tuple[np.ndarray, int]:
    """(the array's own memory as one axis, its dtype's place in DTYPES); bfloat16 as uint16."""
    if isinstance(x, np.ndarray):
        if x.dtype.name not in DTYPES or not (x.flags.c_contiguous and x.flags.writeable):
            raise ValueError(f"got {x.dtype} {x.flags}, wanted a writable contiguous array")
        return x.reshape(-1), DTYPES.index(x.dtype.name)
    name = str(x.dtype).rpartition(".")[2]
    if name not in DTYPES:
        raise ValueError(f"got an array of {name}, wanted one of {', '.join(DTYPES)}")
    kind = np.uint16 if name == "bfloat16" else np.dtype(name)
    mx.eval(x)
    try:
        return np.frombuffer(x, kind) if x.size else np.empty(0, kind), DTYPES.index(name)
    except BufferError:
        raise ValueError("got a view, wanted a contiguous array: mx.contiguous(x)") from None


def _like(x, flat: np.ndarray, shape: tuple):
    """flat as an array of x's kind, dtype and the given shape."""
    if isinstance(x, np.ndarray):
        return flat.reshape(shape)
    out = mx.array(flat)
    return (out.view(mx.bfloat16) if x.dtype == mx.bfloat16 else out).reshape(shape)


# --- The ring -------------------------------------------------------------------------------------


class _Operation(typing.NamedTuple):
    """One collective on one trunk: segments are this trunk's share of each rank's part."""

    header: bytes
    kind: str
    segments: list
    start: int
    wide: bool  # uint16 that are bfloat16
    handle: Handle


class _Trunk:
    """A connection to the next rank and one from the previous, with a thread for each.

    numpy has no bfloat16, and a sum of it takes about as long as receiving does: a third thread
    sums one chunk while the next comes in.
    """

    def __init__(self, ring: "Ring", index: int, out: socket.socket, into: socket.socket):
        self.ring, self.index, self.out, self.into = ring, index, out, into
        self.outgoing, self.operations = queue.SimpleQueue(), queue.SimpleQueue()
        self.sums, self.scratch = queue.SimpleQueue(), queue.SimpleQueue()
        for _ in range(2):
            self.scratch.put(np.empty(CHUNK, np.uint8))
        self.work = [np.empty(CHUNK // 4, np.uint32) for _ in range(3)]

    def guard(self, loop, peer: int) -> None:
        try:
            with np.errstate(all="ignore"):  # sums may overflow; that is the caller's to notice
                loop()
        except OSError as error:
            self.ring._suspect(peer, f"connection lost ({error})")
        finally:
            if loop == self.receive:  # no more will come to be summed
                self.sums.put(None)

    def send(self) -> None:
        while (item := self.outgoing.get()) is not None:
            if type(item) is Handle:
                item._finish()  # all of it has left: the buffer may be used again
            else:
                self.out.sendall(item)

    def sum(self) -> None:
        while (item := self.sums.get()) is not None:
            chunk, buffer, forward = item
            self._add_bfloat16(chunk, buffer[: chunk.nbytes].view(np.uint16))
            if forward:
                self._put(chunk)
            self.scratch.put(buffer)

    def receive(self) -> None:
        while (op := self.operations.get()) is not None:
            self.outgoing.put(op.header)
            steps = getattr(self, "_" + op.kind)(op)
            next(steps)  # what this rank sends of its own accord
            theirs = bytearray(HEADER.size)
            self._fill(memoryview(theirs))
            if theirs != op.header:
                return self.ring._mismatch(bytes(theirs), op.header)
            for _ in steps:
                pass
            self.outgoing.put(op.handle)

    def _fill(self, view: memoryview) -> None:
        while len(view):
            if not (got := self.into.recv_into(view, len(view), socket.MSG_WAITALL)):
                raise ConnectionError("connection closed")
            self.ring._progress += got
            view = view[got:]

    def _chunks(self, array: np.ndarray):
        size = CHUNK // max(array.itemsize, 4)
        return (array[i : i + size] for i in range(0, array.size, size))

    def _put(self, array: np.ndarray) -> None:
        self.outgoing.put(memoryview(array).cast("B"))

    def _all_reduce(self, op: _Operation):
        yield from self._reduce(op, forward_last=True)
        yield from self._gather(op, op.start + 1)

    def _reduce_scatter(self, op: _Operation):
        yield from self._reduce(op, forward_last=False)

    def _all_gather(self, op: _Operation):
        for chunk in self._chunks(op.segments[op.start % self.ring.size]):
            self._put(chunk)
        yield
        yield from self._gather(op, op.start)

    def _reduce(self, op: _Operation, forward_last: bool):
        """Afterwards this rank has the sum of segment start + 1, and has sent it on if asked."""
        W, segments = self.ring.size, op.segments
        for chunk in self._chunks(segments[op.start % W]):
            self._put(chunk)
        yield
        for step in range(W - 1):
            forward = step < W - 2 or forward_last
            for chunk in self._chunks(segments[(op.start - step - 1) % W]):
                buffer = self.scratch.get()
                received = buffer[: chunk.nbytes]
                self._fill(memoryview(received))
                if op.wide:
                    self.sums.put((chunk, buffer, forward))
                    continue
                np.add(chunk, received.view(chunk.dtype), out=chunk)
                self.scratch.put(buffer)
                if forward:
                    self._put(chunk)
        for buffer in [self.scratch.get() for _ in range(2)]:  # both free: all is summed
            self.scratch.put(buffer)

    def _gather(self, op: _Operation, own: int):
        """Passes complete segments round, this rank's own having been sent already."""
        W = self.ring.size
        for step in range(W - 1):
            for chunk in self._chunks(op.segments[(own - step - 1) % W]):
                self._fill(memoryview(chunk).cast("B"))
                if step < W - 2:
                    self._put(chunk)
        yield

    def _broadcast(self, op: _Operation):
        root, (segment,) = op.start, op.segments
        if self.ring.rank == root:
            for chunk in self._chunks(segment):
                self._put(chunk)
        yield
        if self.ring.rank != root:
            for chunk in self._chunks(segment):
                self._fill(memoryview(chunk).cast("B"))
                if self.ring.next != root:
                    self._put(chunk)
        yield

    def _add_bfloat16(self, mine: np.ndarray, theirs: np.ndarray) -> None:
        """mine += theirs, both uint16 bits of bfloat16, in float32, rounded to nearest even."""
        a, b, odd = (w[: mine.size] for w in self.work)
        a[:], b[:] = theirs, mine
        a <<= 16
        b <<= 16
        total = a.view(np.float32)
        np.add(total, b.view(np.float32), out=total)
        np.right_shift(a, 16, out=odd)
        odd &= 1
        odd += 0x7FFF
        a += odd
        a >>= 16
        mine[:] = a


class Ring(Communicator):
    """Our own TCP ring; see the top of this file."""

    backend = "tcp"

    def _open(self) -> None:
        trunks = range(len(self.addresses[0]))
        outs = [self._reach(self.next, k) for k in trunks]
        there = [(self.previous, k) for k in trunks]
        # half a second more: whoever could not reach another knows why
        self._wait(lambda: all(t in self._arrived for t in there), self._end + 0.5)
        ins = [self._arrived.get(t) for t in there]
        if None in ins:
            self._fail_joining(self.previous)
        self._trunks = [_Trunk(self, k, outs[k], ins[k]) for k in trunks]
        for trunk in self._trunks:
            self._start(trunk.guard, trunk.send, self.next)
            self._start(trunk.guard, trunk.receive, self.previous)
            self._start(trunk.guard, trunk.sum, self.rank)

    def _stop(self) -> None:
        for trunk in getattr(self, "_trunks", ()):
            trunk.operations.put(None)
            trunk.outgoing.put(None)

    def _launch(self, kind: str, x, flat: np.ndarray, root: int, header: bytes) -> Handle:
        W, r, shape = self.size, self.rank, tuple(x.shape)
        start, result = r, lambda: x
        if kind == "all_reduce":
            segments = [np.array_split(share, W) for share in self._split(flat, flat.nbytes)]
        elif kind == "broadcast":
            segments, start = [[share] for share in self._split(flat, flat.nbytes)], root
        else:
            gathers = kind == "all_gather"
            rows = np.empty((W, flat.size), flat.dtype) if gathers else flat.reshape(W, -1)
            if gathers:
                rows[r] = flat
            shares = self._split(rows, rows.nbytes)
            segments = [[np.ascontiguousarray(row) for row in share] for share in shares]
            if gathers:
                first, *rest = shape or (1,)

                def result():
                    whole = np.concatenate([np.stack(share) for share in segments], axis=1)
                    return _like(x, whole.reshape(-1), (W * first, *rest))
            else:
                start = r - 1

                def result():
                    mine = np.concatenate([share[r] for share in segments])
                    return _like(x, mine, (shape[0] // W, *shape[1:]))

        handle = Handle(len(segments), result)
        wide = DTYPES[header[11]] == "bfloat16"
        for trunk, share in zip(self._trunks, segments, strict=False):
            trunk.operations.put(_Operation(header, kind, share, start, wide, handle))
        return handle

    def _split(self, array: np.ndarray, size: int) -> list[np.ndarray]:
        """One share per trunk, or one in all where that is too little to be worth it."""
        many = size >= SMALL * self.size * len(self._trunks)
        return np.array_split(array, len(self._trunks) if many else 1, axis=-1)

    def _mismatch(self, theirs: bytes, mine: bytes) -> None:
        what = _described(self.previous, theirs), _described(self.rank, mine)
        self._accuse(self.previous, "the ranks disagree: " + ", ".join(what))


# --- MLX's backends -------------------------------------------------------------------------------


class Native(Communicator):
    """A backend of mx.distributed: called by one thread, on that thread's stream.

    `send` and `recv` go over TCP, and `reduce_scatter` and `broadcast` are made from sums, since
    not every backend has them.
    """

    def __init__(self, backend: str, *arguments, group=None, **options):
        self.backend, self._group = backend, group
        self._work, self._fault = queue.SimpleQueue(), None
        super().__init__(*arguments, **options)

    def _enter(self) -> None:
        # init holds the interpreter, so that no thread of ours can watch it: this one can
        faulthandler.dump_traceback_later(self.patience + self.silence, exit=True)
        try:
            self._start(self._serve)
            self._wait(lambda: self._group or self._fault, math.inf)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if self._fault:
            raise self._verdict(self.rank, self._fault)

    def _stop(self) -> None:
        self._work.put(None)
        if self._proceed < self._begun and self._threads:  # cannot be ended: nobody waits for it
            self._threads = [t for t in self._threads if t.name != "comm_serve"]

    def _serve(self) -> None:
        try:
            group = self._group or mx.distributed.init(strict=True, backend=self.backend)
            if group.size() != self.size:
                raise RuntimeError(f"{group.size()} ranks joined, wanted {self.size}")
        except (RuntimeError, ValueError) as error:
            self._fault = f"backend {self.backend}: {error}"
        with self._changed:
            self._group = None if self._fault else group
            self._changed.notify_all()
        device = mx.gpu if self.backend == "nccl" else mx.cpu
        with mx.stream(mx.new_thread_local_stream(device)):
            while not self._fault and (item := self._work.get()) is not None:
                header, kind, x, root, handle, box = item
                sequence = HEADER.unpack(header)[0]
                with self._changed:
                    self._changed.wait_for(
                        lambda s=sequence: (
                            self._proceed >= s or self.error or self._closing or self._left
                        )
                    )
                if self._proceed < sequence:
                    if self._left:  # whose last operation all have been told to go on with
                        self._verdict(min(self._left), "has left the job")
                    continue  # failed: the handle has been told
                try:
                    box.append(self._run(kind, x, root))
                    self._progress += 1
                    handle._finish()
                except Exception as error:
                    self._suspect(self.rank, f"backend {self.backend}: {error}")

    def _run(self, kind: str, x, root: int):
        y = x if isinstance(x, mx.array) else mx.array(x)
        dtype, shape, W = y.dtype, y.shape, self.size
        if kind == "all_gather":
            y = mx.distributed.all_gather(y, group=self._group)
        elif kind == "broadcast":  # bits travel as integers, so that the sum of x and zeros is x
            bits = y.reshape(-1).view(mx.uint8)
            bits = bits if self.rank == root else mx.zeros_like(bits)
            y = mx.distributed.all_sum(bits, group=self._group) if y.size else bits
            y = y.view(dtype).reshape(shape)
        elif y.size or kind == "reduce_scatter":
            y = mx.distributed.all_sum(y, group=self._group)
            y = y.reshape(W, -1)[self.rank] if kind == "reduce_scatter" else y
            y = y.reshape(shape[0] // W, *shape[1:]) if kind == "reduce_scatter" else y
        mx.eval(y)
        if isinstance(x, mx.array):
            return y
        got = np.array(y)
        if got.shape != x.shape:
            return got
        np.copyto(x, got)
        return x

    def _launch(self, kind: str, x, flat: np.ndarray, root: int, header: bytes) -> Handle:
        box: list = []
        handle = Handle(1, lambda: box[0])
        self._work.put((header, kind, x, root, handle, box))
        if self.rank:
            self._tell(0, CALLED, a=self._begun, text=header)
        else:
            self._agree(0, self._begun, header)
        return handle


# --- Connecting -----------------------------------------------------------------------------------


def connect(backend: str = "auto", **options) -> Communicator:
    """Joins the job that the environment describes; alone, a job of one.

    `launch`, mlx.launch, mpirun and schedulers that set MLX's variables will do: MLX_RANK with
    MLX_HOSTFILE (ring), MLX_IBV_DEVICES and MLX_JACCL_COORDINATOR (jaccl), NCCL_HOST_IP, NCCL_PORT
    and MLX_WORLD_SIZE (nccl), or those of Open MPI.

    Args:
        backend: "tcp" (our ring), "jaccl", "nccl", "mpi", "ring" (MLX's), or "auto": jaccl where
            the hostfile and the machine have it, nccl on CUDA, else tcp.
        options: `connect`, `silence` and `deadline` of Communicator, in seconds; those that are
            not given come from COMM_CONNECT, COMM_SILENCE and COMM_DEADLINE, where set.

    Raises:
        CommError: a rank did not join. UserError: no such backend, or variables that are wrong.
    """
    env = os.environ
    for name in ("connect", "silence", "deadline"):
        if (text := env.get(f"COMM_{name.upper()}")) and name not in options:
            options[name] = coerce(f"COMM_{name.upper()}", text, float)
    if backend == "auto":
        backend = env.get("COMM_BACKEND", "auto")
    if backend not in BACKENDS:
        raise UserError(f"got backend {backend!r}, wanted one of {', '.join(BACKENDS)}")
    chosen = _choose() if backend == "auto" else backend
    rank = env.get("MLX_RANK") or env.get("OMPI_COMM_WORLD_RANK") or env.get("PMI_RANK")
    if rank is None:
        return Ring(0, [[("127.0.0.1", 0)]])
    rank = coerce("the rank of this process", rank, int)
    if env.get("MLX_METAL_FAST_SYNCH") and rank == 0:
        print("warning: MLX_METAL_FAST_SYNCH is set; it can wedge a GPU until reboot: unset it")
    file = env.get("COMM_HOSTFILE") or (env.get("MLX_HOSTFILE") if chosen == "tcp" else None)
    if chosen == "tcp" and not file:
        raise UserError("MLX_RANK is set, but neither MLX_HOSTFILE nor COMM_HOSTFILE")
    if not file:
        return _bootstrap(chosen, options)
    text = Path(file).read_text()
    try:
        addresses = [[_address(a) for a in host] for host in json.loads(text)]
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f'{file}: {error}; wanted [["ip:port", ...] for each rank]') from None
    if not 0 <= rank < len(addresses):
        raise UserError(f"got rank {rank} and a hostfile of {len(addresses)} ranks: {file}")
    if len(set(map(len, addresses))) > 1 or not addresses[0]:
        raise UserError(f"{file}: wanted as many addresses for each rank, at least one")
    secret = Path(env["COMM_SECRET_FILE"]).read_bytes() if "COMM_SECRET_FILE" in env else b""
    arguments = rank, addresses, secret, text
    return Ring(*arguments, **options) if chosen == "tcp" else Native(chosen, *arguments, **options)


def _choose() -> str:
    env, there = os.environ, mx.distributed.is_available
    if "MLX_IBV_DEVICES" in env and "MLX_JACCL_COORDINATOR" in env and there("jaccl"):
        return "jaccl"
    if "NCCL_HOST_IP" in env and mx.cuda.is_available() and there("nccl"):
        return "nccl"
    if "MLX_HOSTFILE" in env or "COMM_HOSTFILE" in env or "MLX_RANK" in env:
        return "tcp"
    return "mpi" if there("mpi") else "tcp"


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not 0 < int(port) < 65536:
        raise ValueError(f"got port {port}")
    return host.strip("[]"), int(port)


def _bootstrap(backend: str, options: dict) -> Communicator:
    """For launchers that tell no addresses: the backend itself carries them, and the secret."""
    done = concurrent.futures.Future()

    def exchange():
        try:
            group = mx.distributed.init(strict=True, backend=backend)
            listener = socket.create_server(("", 0), backlog=64)
            mine = [socket.gethostname(), _own_address(), listener.getsockname()[1]]
            record = json.dumps([*mine, secrets.token_hex(16)]).encode()
            with mx.stream(mx.new_thread_local_stream(mx.gpu if backend == "nccl" else mx.cpu)):
                block = np.frombuffer(record.ljust(512), np.uint8).astype(np.int32)
                everyone = mx.distributed.all_gather(mx.array(block)[None], group=group)
                everyone = np.array(everyone).astype(np.uint8)
            records = [json.loads(row.tobytes()) for row in everyone]
            done.set_result((group, listener, mine[0], records))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=exchange, daemon=True).start()
    seconds = options.get("connect", 60.0)
    try:
        group, listener, me, records = done.result(seconds)
    except concurrent.futures.TimeoutError:
        why = f"backend {backend}: not all ranks joined within {seconds:g} s"
        raise CommError(int(os.environ.get("MLX_RANK", 0)), socket.gethostname(), why) from None
    except (RuntimeError, ValueError) as error:
        raise UserError(f"backend {backend}: {error}") from None
    addresses = [[("127.0.0.1" if name == me else ip, port)] for name, ip, port, _ in records]
    secret = records[0][3].encode()
    arguments = group.rank(), addresses, secret, "bootstrap"
    return Native(backend, *arguments, group=group, listener=listener, **options)


def _own_address() -> str:
    """This machine's address on its default route; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
            return sock.getsockname()[0]
        except OSError:
            return "127.0.0.1"


# --- Overlap --------------------------------------------------------------------------------------


class Overlap:
    """Sums gradients over ranks while backward still computes the rest.

        reduce = comm.Overlap(job)
        loss, grads = value_and_grad(...)            # lazy; compiled or not
        grads, (loss, tokens) = reduce(grads, loss, tokens)

    Backward ends with the first layer, so leaves are taken in reverse, in buckets of one dtype.
    Each bucket is one contiguous array, given to MLX by one async_eval of its own; a second thread
    waits for it and starts its all_reduce, in the same order on all ranks. With accumulation call
    it on the last micro-step only, with the accumulated gradients. Scalars (`sums`) are summed in
    float32 at the end: token counts are exact to 2²⁴.

    Args:
        bucket_bytes: of one bucket; 0 does everything after backward, for comparison.
        first_bytes: of the first one, small so that the link is busy early.
        timeline: a file for `chrome://tracing` or Perfetto, written by `close`.
    """

    def __init__(
        self,
        job: Communicator,
        bucket_bytes: int = 8 << 20,
        first_bytes: int = 1 << 20,
        timeline: str | None = None,
    ):
        self.job, self.bucket_bytes, self.first_bytes = job, bucket_bytes, first_bytes
        self.timeline, self.events = timeline, []
        self.ready = 0.0  # time.monotonic() when the last bucket was computed
        self._buckets, self._plans, self._thread = 0, {}, None
        self._todo, self._begun = queue.SimpleQueue(), queue.SimpleQueue()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __call__(self, grads, *sums: mx.array) -> tuple:
        """(grads, sums), each the sum over all ranks. All of `grads` must be of floats."""
        if self.job.size == 1:
            mx.eval(grads, *sums)
            self.ready = time.monotonic()
            return grads, sums
        leaves = tree_flatten(grads)
        plan = self.plan(leaves)
        if not self.bucket_bytes:
            mx.eval(grads, *sums)
        begin = time.monotonic()
        for bucket in plan:
            parts = [leaves[i][1].reshape(-1) for i in bucket]
            # with something beside it even one leaf is copied: sums are made in place
            self.put(mx.concatenate([*parts, mx.zeros(0, parts[0].dtype)]))
        if sums:
            self.put(mx.stack([s.astype(mx.float32) for s in sums]))
        reduced = self.collect(begin)
        out = [None] * len(leaves)
        for bucket, flat in zip(plan, reduced, strict=False):
            sizes = [leaves[i][1].size for i in bucket]
            parts = mx.split(flat, np.cumsum(sizes)[:-1].tolist())
            for i, part in zip(bucket, parts, strict=True):
                out[i] = part.reshape(leaves[i][1].shape)
        in_order = iter(out)  # not by name: names may hold dots, or be numbers
        return tree_map(lambda _: next(in_order), grads), tuple(reduced[-1]) if sums else ()

    def plan(self, leaves: list[tuple[str, mx.array]]) -> list[list[int]]:
        """Indices of `leaves` per bucket: from the last to the first, one dtype each."""
        key = tuple((name, leaf.shape, leaf.dtype) for name, leaf in leaves)
        if key not in self._plans:
            plan, open_buckets = [], {}
            limit = self.bucket_bytes or math.inf
            for i in reversed(range(len(leaves))):
                leaf = leaves[i][1]
                bucket, size = open_buckets.get(leaf.dtype, ([], 0))
                bucket.append(i)
                size += leaf.nbytes
                open_buckets[leaf.dtype] = bucket, size
                if size >= (
                    min(limit, self.first_bytes) if not plan and self.bucket_bytes else limit
                ):
                    plan.append(open_buckets.pop(leaf.dtype)[0])
            plan += [bucket for bucket, _ in open_buckets.values()]
            self._plans = {key: plan}
        return self._plans[key]

    def put(self, bucket: mx.array) -> None:
        """Hands a lazy, contiguous array over: nobody else may touch it until `collect`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._consume, daemon=True, name="comm_overlap")
            self._thread.start()
        mx.async_eval(bucket)  # one for each: an array is ready when its own call has ended
        self._todo.put((self._buckets, bucket))
        self._buckets += 1

    def collect(self, begin: float | None = None) -> list[mx.array]:
        """The sums of all that was put since the last time, in that order. Raises CommError."""
        many, self._buckets = self._buckets, 0
        waits, out, error = time.monotonic(), [], None
        handles = [self._begun.get() for _ in range(many)]
        for handle, _ in handles:
            try:
                if isinstance(handle, Exception):
                    raise handle
                out.append(handle.wait())
            except Exception as why:
                error = error or why
        if error:
            raise error
        if handles:
            self.ready = handles[-1][0].begun
        if self.timeline:
            self._record("wait", waits, time.monotonic(), 0)
            ready = begin or waits
            for k, (handle, size) in enumerate(handles):
                self._record(f"compute {k}", ready, handle.begun, 1, bytes=size)
                self._record(f"transfer {k}", handle.begun, handle.ended, 2, bytes=size)
                ready = handle.begun
        return out

    def _consume(self) -> None:
        while (item := self._todo.get()) is not None:
            number, bucket = item
            try:
                mx.eval(bucket)
                handle = self.job.all_reduce_async(bucket, number)
            except Exception as error:
                handle = error
            self._begun.put((handle, bucket.nbytes))
            del bucket, item

    def _record(self, name: str, begin: float, end: float, row: int, **args) -> None:
        event = {"name": name, "ph": "X", "pid": self.job.rank, "tid": row, "args": args}
        self.events.append(event | {"ts": begin * 1e6, "dur": (end - begin) * 1e6})

    def close(self) -> None:
        """Ends the thread; writes the timeline: rank 0's as named, rank 3's as name.3.json."""
        if self._thread:
            self._todo.put(None)
            self._thread.join(5.0)
            self._thread = None
        if self.timeline:
            path, r = Path(self.timeline), self.job.rank
            names = enumerate(("main", "backward", "network"))
            rows = [{"name": "thread_name", "tid": t, "args": {"name": n}} for t, n in names]
            rows += [{"name": "process_name", "args": {"name": f"rank {r} ({self.job.host(r)})"}}]
            rows = [{"ph": "M", "pid": r} | row for row in rows]
            path = path.with_suffix(f".{r}{path.suffix}") if r else path
            path.write_text(json.dumps({"traceEvents": rows + self.events}))
            self.timeline = None


# --- The hostfile ---------------------------------------------------------------------------------


class Host(typing.NamedTuple):
    """An entry of the hostfile; `python`, `cwd` and `env` are ours, the rest is MLX's."""

    ssh: str
    ips: list[str]
    rdma: list
    python: str
    cwd: str
    env: dict[str, str]

    @property
    def local(self) -> bool:
        return self.ssh in ("127.0.0.1", "localhost", "::1")


def read_hosts(path: str) -> tuple[str, list[Host]]:
    """(backend or "auto", hosts) of a hostfile in either of MLX's two forms.

    Raises:
        UserError: names the entry and the field.
    """
    try:
        data = json.loads(Path(path).read_text())
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file") from None
    except json.JSONDecodeError as error:
        why = f"{error.msg} at line {error.lineno} column {error.colno}"
        raise UserError(f"{path}: not JSON: {why}") from None
    backend, envs = "auto", []
    if isinstance(data, dict):
        _known(data, ("backend", "envs", "hosts"), path)
        backend, envs, data = data.get("backend") or "auto", data.get("envs", []), data.get("hosts")
    if backend not in BACKENDS:
        raise UserError(f"{path}: backend: got {backend!r}, wanted one of {', '.join(BACKENDS)}")
    if not isinstance(envs, list) or not all(isinstance(e, str) and "=" in e for e in envs):
        raise UserError(f'{path}: envs: got {envs!r}, wanted a list of "NAME=value"')
    if not isinstance(data, list) or not data:
        raise UserError(f'{path}: got no hosts, wanted [{{"ssh": ..., "ips": [...]}}, ...]')
    envs = dict(e.split("=", 1) for e in envs)
    hosts = [
        _host(entry, f"{path}: hosts[{i}]", i, len(data), envs) for i, entry in enumerate(data)
    ]
    seen: dict[str, int] = {}
    for i, host in enumerate(hosts):
        where = f"{path}: hosts[{i}].ips"
        if len(host.ips) != len(hosts[0].ips):
            many = f"got {len(host.ips)} addresses, wanted {len(hosts[0].ips)} as in hosts[0]"
            raise UserError(f"{where}: {many}")
        for ip in host.ips:
            other = seen.setdefault(ip, i)
            if host.ips.count(ip) > 1 or hosts[other].ssh != host.ssh:
                raise UserError(f"{where}: {ip} is listed twice (hosts[{other}] has it)")
    return backend, hosts


def _known(data: dict, names: tuple, where: str) -> None:
    for name in data:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
            raise UserError(f"{where}: unknown key {name!r}; {hint}")


def _host(entry: dict, where: str, index: int, count: int, envs: dict) -> Host:
    if not isinstance(entry, dict):
        raise UserError(f'{where}: got {entry!r}, wanted {{"ssh": ..., "ips": [...]}}')
    _known(entry, Host._fields, where)
    ssh, rdma = entry.get("ssh"), entry.get("rdma") or []
    if not isinstance(ssh, str) or not ssh or ssh.startswith("-"):
        raise UserError(f"{where}.ssh: got {ssh!r}, wanted a host name")
    ips = entry.get("ips") or (["127.0.0.1"] if ssh in ("127.0.0.1", "localhost") else [])
    if not isinstance(ips, list) or not ips or not all(isinstance(ip, str) for ip in ips):
        raise UserError(f"{where}.ips: got {ips!r}, wanted a list of addresses")
    for ip in ips:
        try:
            socket.getaddrinfo(ip, None)
        except (OSError, UnicodeError) as error:
            raise UserError(f"{where}.ips: {ip!r} resolves to nothing ({error})") from None
    if not isinstance(rdma, list) or len(rdma) not in (0, count):
        raise UserError(f"{where}.rdma: got {rdma!r}, wanted {count} entries, one per host")
    if rdma and rdma[index] is not None:
        raise UserError(f"{where}.rdma[{index}]: got {rdma[index]!r}, wanted null: the host itself")
    for name in ("python", "cwd"):
        if not isinstance(entry.get(name, ""), str):
            raise UserError(f"{where}.{name}: got {entry[name]!r}, wanted a path")
    env = entry.get("env") or {}
    if not isinstance(env, dict) or not all(isinstance(v, str) for v in env.values()):
        raise UserError(f'{where}.env: got {env!r}, wanted {{"NAME": "value"}}')
    python, cwd = entry.get("python") or sys.executable, entry.get("cwd") or os.getcwd()
    return Host(ssh, ips, rdma, python, cwd, envs | env)


def local_hosts(ranks: int, trunks: int = 1) -> list[Host]:
    """Ranks on this machine. Several trunks need 127.0.0.2 and so on, which Linux has."""
    ips = [f"127.0.0.{k + 1}" for k in range(trunks)]
    return [Host("127.0.0.1", ips, [], sys.executable, os.getcwd(), {}) for _ in range(ranks)]


# --- Launching ------------------------------------------------------------------------------------


def agent():
    """Runs on each host, its text sent there: starts the rank, and ends it when the launcher goes.

    The first line of its standard input says what to run; then "INT" and "TERM" are passed on to
    the rank and its children. At the end of input, all of them are ended.
    """
    import ctypes
    import json
    import os
    import shutil
    import signal
    import subprocess
    import sys
    import tempfile
    import threading
    import time

    job = json.loads(sys.stdin.readline())
    try:
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # Linux: its orphans become the agent's children
    except (AttributeError, OSError):
        pass
    folder = tempfile.mkdtemp(prefix="comm-")  # private to this user
    env, (place, ranks) = os.environ | job["env"], job["place"]  # among the ranks of this host
    cards = [name[6:] for name in os.listdir("/dev") if name[:6] == "nvidia" and name[6:].isdigit()]
    cards = [c for c in env.get("CUDA_VISIBLE_DEVICES", ",".join(sorted(cards))).split(",") if c]
    if ranks > 1 and "CUDA_VISIBLE_DEVICES" not in job["env"]:
        if len(cards) >= ranks:  # a GPU for each
            env["CUDA_VISIBLE_DEVICES"] = cards[place]
        elif env["COMM_BACKEND"] == "auto":
            del env["NCCL_HOST_IP"]  # it wants a GPU for each
    for name, text in job["files"].items():
        env[name] = os.path.join(folder, name)
        with open(env[name], "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(text)
    try:
        os.chdir(job["cwd"])
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        child = subprocess.Popen(
            job["argv"], env=env, stdin=null, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        print(f"cannot start {job['argv'][0]} in {job['cwd']}: {error}", file=sys.stderr)
        sys.exit(2)

    def end(which):
        try:
            os.killpg(child.pid, which)
        except OSError:
            pass

    def copy(stream, to):  # only the agent holds what ssh waits for, not what the rank leaves
        try:
            while data := os.read(stream.fileno(), 65536):
                writing.add(to)
                os.write(to, data)
                writing.discard(to)
        except OSError:
            writing.discard(to)  # the launcher is gone, and `listen` knows

    def strays():
        for name in os.listdir("/proc") if os.path.exists("/proc/self/stat") else ():
            try:
                with open(f"/proc/{name}/stat") as file:
                    if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                        yield int(name)
            except (OSError, ValueError):
                pass

    def listen():
        for line in sys.stdin:
            end(signal.SIGINT if line.strip() == "INT" else signal.SIGTERM)
        end(signal.SIGTERM)
        try:
            child.wait(job["grace"])
        except subprocess.TimeoutExpired:
            end(signal.SIGKILL)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for which in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(which, lambda *_: end(signal.SIGKILL))
    threading.Thread(target=listen, daemon=True).start()
    writing = set()
    copies = [
        threading.Thread(target=copy, args=copied, daemon=True)
        for copied in ((child.stdout, 1), (child.stderr, 2))
    ]
    for thread in copies:
        thread.start()
    status = child.wait()
    end(signal.SIGKILL)  # whatever it has left behind
    while left := list(strays()):  # and what has left its process group
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    quiet = time.monotonic()
    while any(c.is_alive() for c in copies) and time.monotonic() < quiet + 2.0:
        time.sleep(0.02)  # as long as a slow reader takes, but not for a pipe that others hold
        quiet = time.monotonic() if writing else quiet
    if status and os.path.exists(os.path.join(folder, "other")):
        time.sleep(2.0)  # another rank is at fault: its exit status shall be the first
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(status if status >= 0 else 128 - status)


@functools.cache
def _agent_source() -> str:
    """Read once: by the time of a restart somebody may be editing this file."""
    return inspect.getsource(agent) + "\nagent()\n"


class _Process:
    """A rank: the agent on its host, and threads that relay what it prints."""

    def __init__(self, rank: int, host: Host, job: dict, out: typing.Callable):
        self.rank, self.host = rank, host
        python = sys.executable if host.local else host.python
        command = [python, "-u", "-c", "exec(eval(__import__('sys').stdin.readline()))"]
        if not host.local:
            options = "BatchMode=yes ConnectTimeout=10 ServerAliveInterval=5 ServerAliveCountMax=3"
            ssh = shlex.split(os.environ.get("COMM_SSH", "ssh"))
            options = [word for option in options.split() for word in ("-o", option)]
            command = [*ssh, "-T", *options, "--", host.ssh, shlex.join(command)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self.tell(f"{_agent_source()!r}\n{json.dumps(job)}")
        streams = (self.process.stdout, False), (self.process.stderr, True)
        self.relays = [
            threading.Thread(target=out, args=(self, *stream), daemon=True) for stream in streams
        ]
        for relay in self.relays:
            relay.start()

    def tell(self, line: str) -> None:
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except (OSError, ValueError):
            pass  # it has ended; its status says how

    def hang_up(self) -> None:
        try:
            self.process.stdin.close()
        except OSError:
            pass

    def finish(self, seconds: float) -> int:
        """Exit status, at the latest after so many seconds."""
        self.hang_up()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        quiet = time.monotonic()
        while any(r.is_alive() for r in self.relays) and time.monotonic() < quiet + 2.0:
            time.sleep(0.02)
            quiet = time.monotonic() if PRINTING.locked() else quiet
        return status


def _relay(process: _Process, stream, errors: bool) -> None:
    """Rank 0's output as it is, every other rank's by lines with its name before them, and not
    in the middle of a line of rank 0 that is just being written.
    """
    to = (sys.stderr if errors else sys.stdout).buffer
    name = f"[rank {process.rank} {process.host.ssh}] ".encode()
    read = (
        functools.partial(os.read, stream.fileno(), 65536) if not process.rank else stream.readline
    )
    try:
        while data := read():
            while process.rank and time.monotonic() < OPEN_LINES.get(errors, 0.0):
                time.sleep(0.01)
            with PRINTING:
                to.write(data if not process.rank else name + data.rstrip(b"\n") + b"\n")
                to.flush()
            if not process.rank:
                OPEN_LINES[errors] = 0.0 if data.endswith(b"\n") else time.monotonic() + 0.1
    except BrokenPipeError:
        os._exit(141)  # nobody reads any more; the agents end their ranks


PRINTING = threading.Lock()
OPEN_LINES: dict[bool, float] = {}  # until when the end of a line of rank 0 is waited for
HANDED_ON = ("COMM_CONNECT", "COMM_SILENCE", "COMM_DEADLINE")  # to remote ranks, too


class Ended(typing.NamedTuple):
    """How a rank ended: its exit status, and whether the launcher made it."""

    rank: int
    status: int
    made: bool


def run(
    hosts: list[Host],
    argv: list[str],
    backend: str = "auto",
    port: int = PORT,
    grace: float = 10.0,
    relay: typing.Callable = _relay,
) -> list[Ended]:
    """Runs a command on every host as the ranks of one job; how they ended, in that order.

    argv's first word "python" stands for each host's own. When one rank fails, the rest have
    `grace` seconds to end by themselves; then they are ended. So they are when this process ends,
    however it does. Statuses above 128 are signals; 255 may be ssh's own.
    """
    jobs, processes = _jobs(hosts, argv, backend, port, grace), []
    ended: dict[int, Ended] = {}
    interrupts, doomed = 0, None
    try:
        for rank, host in enumerate(hosts):
            processes.append(_Process(rank, host, jobs[rank], relay))
        while len(ended) < len(hosts):
            try:
                time.sleep(0.05)
                for p in processes:
                    if p.rank not in ended and (status := p.process.poll()) is not None:
                        ended[p.rank] = Ended(p.rank, p.finish(0.0), False)
                        if status:
                            doomed = doomed or time.monotonic() + grace
                if doomed and time.monotonic() > doomed:
                    break
            except KeyboardInterrupt:
                interrupts += 1
                doomed = time.monotonic() + (60.0 if interrupts == 1 else 0.0)
                for p in processes:
                    p.tell("INT")
    finally:
        for p in processes:
            p.hang_up()
        for p in processes:
            if p.rank not in ended:
                ended[p.rank] = Ended(p.rank, p.finish(grace + 5.0), True)
    if interrupts:
        raise KeyboardInterrupt
    return list(ended.values())


def _jobs(hosts: list[Host], argv: list[str], backend: str, port: int, grace: float) -> list[dict]:
    """What each rank is told: command, environment, and files that only its user can read."""
    ports = iter(range(port, 65536))
    ours, theirs = ([[_joined(ip, next(ports)) for ip in h.ips] for h in hosts] for _ in range(2))
    host, extra = hosts[0].ips[0], next(ports)
    files = {"COMM_SECRET_FILE": secrets.token_hex(32), "COMM_HOSTFILE": json.dumps(ours)}
    env = {"PYTHONUNBUFFERED": "1"}  # progress is seen as it is printed
    env |= {k: v for k, v in os.environ.items() if k in HANDED_ON}
    if sys.stderr.isatty():  # progress bars may be drawn: rank 0's output goes there as it is
        env |= {"COMM_TTY": "1", "COLUMNS": str(shutil.get_terminal_size().columns)}
    env |= {"COMM_BACKEND": backend, "NCCL_HOST_IP": host, "NCCL_PORT": str(extra)}
    env["MLX_WORLD_SIZE"] = str(len(hosts))
    files["MLX_HOSTFILE"] = json.dumps(theirs)
    if all(h.rdma for h in hosts):
        files["MLX_IBV_DEVICES"] = json.dumps([h.rdma for h in hosts])
        env["MLX_JACCL_COORDINATOR"] = f"{host}:{extra}"
    jobs, names = [], [h.ssh for h in hosts]
    for rank, h in enumerate(hosts):
        words = [h.python, *argv[1:]] if argv[0] in ("python", "python3") else argv
        own = {"argv": words, "cwd": h.cwd, "files": files, "grace": grace / 2}
        own["place"] = names[:rank].count(h.ssh), names.count(h.ssh)
        jobs.append(own | {"env": env | h.env | {"MLX_RANK": str(rank)}})
    return jobs


def _joined(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def verdict(hosts: list[Host], ended: list[Ended]) -> int:
    """Says on standard error which ranks failed and how; the exit status of the first of them."""
    failed = [e for e in ended if e.status]
    for rank, status, made in failed:
        how = f"exit status {status}"
        if made:
            how = "did not end by itself; the launcher ended it"
        elif status > 128 and status - 128 in signal.valid_signals():
            how = f"killed by {signal.Signals(status - 128).name}"
        elif status == 255 and not hosts[rank].local:
            how = "ssh failed or its connection was lost"
        elif status < 0:
            how = f"its agent was killed by {signal.Signals(-status).name}"
        print(f"rank {rank} ({hosts[rank].ssh}): {how}", file=sys.stderr)
    return next((e.status if e.status > 0 else 128 - e.status for e in failed), 0)


# --- Commands -------------------------------------------------------------------------------------


def _hosts(
    nodes: str | None, ranks: int, trunks: int, backend: str, port: int
) -> tuple[str, list[Host]]:
    theirs, hosts = read_hosts(nodes) if nodes else ("auto", local_hosts(ranks, trunks))
    if backend not in BACKENDS:
        raise UserError(f"--backend: got {backend!r}, wanted one of {', '.join(BACKENDS)}")
    if not hosts or not hosts[0].ips:
        raise UserError(f"--ranks, --trunks: got {ranks} and {trunks}, wanted at least 1")
    last = 65535 - 2 * len(hosts) * len(hosts[0].ips)
    if not 1 <= port <= last:
        raise UserError(f"--port: got {port}, wanted 1 to {last}")
    return theirs if backend == "auto" else backend, hosts


def launch(
    command: list[str],
    *,
    nodes: str | None = None,
    ranks: int = 2,
    backend: str = "auto",
    port: int = PORT,
) -> None:
    """Runs a command on all hosts as the ranks of one job: launch --nodes hosts.json -- python x.py

    Entries named 127.0.0.1 or localhost run here, others over ssh (COMM_SSH may name another
    program, with options). "python" is each host's own, if the hostfile names one. Rank 0's output
    comes as it is, other ranks' by lines with rank and host before them. Ctrl-C is passed on. When
    a rank fails the others have ten seconds to end, and the exit status is that of the first one
    that failed.

    Args:
        command: what follows --.
        nodes: the hostfile, MLX's format; none runs --ranks processes here.
        ranks: processes, without --nodes.
        backend: auto, tcp, jaccl, nccl, mpi or ring; see `connect`.
        port: of the first rank; each address takes the next one.
    """
    if not command:
        raise UserError("nothing to run: launch --nodes hosts.json -- python script.py")
    backend, hosts = _hosts(nodes, ranks, 1, backend, port)
    sys.exit(verdict(hosts, run(hosts, command, backend, port)))


def _self(hosts: list[Host], words: list[str], backend: str, port: int) -> int:
    """This file as the ranks of a job; its exit status."""
    argv = ["python", str(Path(__file__).resolve()), *words]
    return verdict(hosts, run(hosts, argv, backend, port))


def bench(
    *,
    nodes: str | None = None,
    ranks: int = 2,
    trunks: int = 1,
    backend: str = "auto",
    port: int = PORT,
    megabytes: list[float] = (1.0, 8.0, 64.0),
    dtype: str = "float32",
    simulate_compute: float | None = None,
    layers: int = 32,
    bytes: int = 32 << 20,
) -> None:
    """Times all_reduce by size against the link, or the overlap of transfer and compute.

    The link's limit is what one rank sends to the next over plain connections, all at once; an
    all_reduce moves 2 (W - 1) / W times its bytes over each link.

    Args:
        nodes: the hostfile; none runs --ranks processes here, with --trunks connections each.
        megabytes: sizes, such as 1,8,64 (of 10⁶ bytes).
        simulate_compute: milliseconds of a step's backward; each of --layers ends with a bucket.
        bytes: of all buckets together.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype: got {dtype!r}, wanted one of {', '.join(DTYPES)}")
    if "MLX_RANK" not in os.environ:
        backend, hosts = _hosts(nodes, ranks, trunks, backend, port)
        words = ["bench", f"--megabytes={','.join(map(str, megabytes))}", f"--dtype={dtype}"]
        if simulate_compute is not None:
            words += [f"--simulate-compute={simulate_compute}"]
            words += [f"--layers={layers}", f"--bytes={bytes}"]
        sys.exit(_self(hosts, words, backend, port))
    with connect() as job:
        say = print if job.rank == 0 else lambda *_: None
        if simulate_compute is not None:
            took = simulate(job, simulate_compute / 1e3, layers, bytes)
            limit = max(took["compute"], took["transfer"]) + took["bucket"]
            say(f"{job.size} ranks, {layers} buckets, {bytes} bytes, backend {job.backend}; ms:")
            say(", ".join(f"{name} {1e3 * t:.1f}" for name, t in took.items()))
            return say(f"step / (max(compute, transfer) + bucket): {took['step'] / limit:.3f}")
        link = _link(job) * len(job.addresses[0])
        say(f"{job.size} ranks, backend {job.backend}, {len(job.addresses[0])} trunks, {dtype};")
        say(f"link: {link / 1e6:.0f} MB/s")
        say(
            f"{'MB':>8} {'ms':>9} {'fastest':>9} {'slowest':>9} {'MB/s':>7} {'of link':>8} CPU s/GB"
        )
        for size in megabytes:
            times, cpu, count = _time_all_reduce(job, int(size * 1e6), dtype)
            ms = [1e3 * t for t in times]
            rate = 2 * (job.size - 1) / job.size * size * 1e6 / statistics.median(times)
            row = f"{size:8g} {statistics.median(ms):9.2f} {min(ms):9.2f} {max(ms):9.2f}"
            per = cpu / (count * size / 1e3)
            say(f"{row} {rate / 1e6:7.0f} {rate / link:8.2f} {per:8.2f}")


def _time_all_reduce(job: Communicator, size: int, dtype: str) -> tuple[list[float], float, int]:
    """(seconds of each, CPU seconds of all ranks together, how many)."""
    x = mx.zeros(size // getattr(mx, dtype).size, getattr(mx, dtype))
    mx.eval(x)
    for _ in range(2):
        job.all_reduce(x)
    job.barrier()
    times, cpu = [], time.process_time()
    end = time.monotonic() + 2.0
    while True:
        begin = time.monotonic()
        job.all_reduce(x)
        times.append(time.monotonic() - begin)
        enough = len(times) >= 5 and time.monotonic() > end
        if job.broadcast(np.array([enough], np.uint8))[0]:
            break
    spent = job.all_reduce(np.array([1e6 * (time.process_time() - cpu)], np.int64))
    return times, spent[0] / 1e6, len(times)


def _link(job: Communicator, size: int = 32 << 20) -> float:
    """Bytes per second from each rank to the next, all at once; the slowest of them."""
    if job.size == 1:
        return math.inf
    out, into = np.zeros(size, np.uint8), np.empty(size, np.uint8)
    seconds = []
    for _ in range(4):
        job.barrier()
        begin = time.monotonic()
        sender = threading.Thread(target=job.send, args=(out, job.next))
        sender.start()
        job.recv(into, job.previous)
        sender.join()
        seconds.append(time.monotonic() - begin)
    slowest = job.all_gather(np.array([min(seconds[1:])], np.float32)).max()
    return size / float(slowest)


def simulate(job: Communicator, compute: float, layers: int, size: int) -> dict[str, float]:
    """Seconds (medians) of a step that is `layers` sleeps, each followed by a bucket.

    Returns {"compute", "transfer" of all buckets alone, "bucket": of one alone, "apart": transfer
    after all compute, "step"}.
    """
    buckets = [mx.zeros(max(1, size // layers // 4)) for _ in range(layers)]
    mx.eval(buckets)

    def step(seconds: float, chosen: list, apart: bool = False) -> float:
        job.barrier()
        begin = time.monotonic()
        for k, bucket in enumerate(chosen):
            done = seconds * (1 if apart else (k + 1) / layers)
            time.sleep(max(0.0, begin + done - time.monotonic()))
            overlap.put(bucket)
        overlap.collect()
        return time.monotonic() - begin

    with Overlap(job) as overlap:
        step(0.0, buckets)
        many = {
            "transfer": (0.0, buckets),
            "bucket": (0.0, buckets[:1]),
            "apart": (compute, buckets, True),
            "step": (compute, buckets),
        }
        times = {name: [step(*how) for _ in range(7)] for name, how in many.items()}
    return {"compute": compute} | {name: statistics.median(t) for name, t in times.items()}


def probe():
    """Runs on each host, its text sent there: prints what `check` compares."""
    import hashlib
    import importlib.metadata
    import json
    import os
    import platform
    import shutil
    import socket
    import subprocess
    import sys

    ask = json.loads(os.environ["COMM_PROBE"])
    found = {"python": platform.python_version(), "system": platform.platform(), "taken": []}
    for name in ("mlx", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    try:
        with open(ask["file"], "rb") as file:
            found["comm.py"] = hashlib.sha256(file.read()).hexdigest()[:12]
    except OSError:
        found["comm.py"] = None
    for ip, port in ask["addresses"]:
        try:
            with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((ip, port))
        except OSError as error:
            found["taken"].append([ip, port, error.strerror or str(error)])
    tool, found["rdma"] = shutil.which("ibv_devices"), []
    if tool:
        lines = subprocess.run([tool], capture_output=True, text=True).stdout.splitlines()[2:]
        found["rdma"] = [line.split()[0] for line in lines if line.split()]
    found["memory"] = memory()
    sys.stdout.write(json.dumps(found))


def memory() -> int:
    """Bytes that MLX may use here: Metal's working set, the GPU's memory, or all of this machine's.

    Its text runs on other hosts, too.
    """
    import os

    try:
        import mlx.core as mx

        info = mx.device_info()
    except Exception:
        info = {}
    all_of_it = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return info.get("max_recommended_working_set_size") or info.get("total_memory") or all_of_it


def ask_hosts(hosts: list[Host], port: int) -> list[dict | str]:
    """What `probe` finds on each, all asked at once, or in one line why it found nothing."""
    file, heard, said = str(Path(__file__).resolve()), collections.defaultdict(bytes), {}
    ports, asked = iter(range(port, 65536)), []
    for h in hosts:
        ask = {"file": file, "addresses": [[ip, next(ports)] for ip in h.ips]}
        asked.append(h._replace(env=h.env | {"COMM_PROBE": json.dumps(ask)}))

    def keep(process, stream, errors):
        text = stream.read()
        (said if errors else heard)[process.rank] = text

    source = f"{inspect.getsource(memory)}\n{inspect.getsource(probe)}\nprobe()\n"
    ended = run(asked, ["python", "-c", source], port=port, relay=keep)
    status, answers = {e.rank: e.status for e in ended}, []
    for rank, host in enumerate(hosts):
        try:
            answers.append(json.loads(heard[rank]))
        except ValueError:
            why = said.get(rank, b"").decode(errors="replace").strip().splitlines()
            why = why[-1] if why else "no answer"
            fix = f"try: ssh {host.ssh} {host.python} --version" if not host.local else host.python
            answers.append(f"exit status {status[rank]}: {why} ({fix})")
    return answers


def inspect_hosts(hosts: list[Host], backend: str, port: int, say=print) -> list[str]:
    """Asks all hosts at once and says what they have; returns what is wrong, one line each."""
    file, wrong, first = str(Path(__file__).resolve()), [], {}
    for rank, (host, found) in enumerate(zip(hosts, ask_hosts(hosts, port), strict=True)):
        name = f"rank {rank} ({host.ssh})"
        if isinstance(found, str):
            wrong.append(f"{name}: {found}")
            continue
        rdma = ", ".join(found["rdma"]) or "none"
        what = f"Python {found['python']}, MLX {found['mlx']}, RDMA {rdma}, {found['system']}"
        say(f"{name}: {what}, {found['memory'] / 1e9:.0f} GB")
        for ip, at, why in found["taken"]:
            wrong.append(f"{name}: cannot listen on {ip} port {at}: {why} (--port, or fix ips)")
        if found["comm.py"] is None:
            wrong.append(f"{name}: no {file}; copy it there")
        for what in ("mlx", "comm.py"):
            other, value = first.setdefault(what, (rank, found[what])) if found[what] else (0, None)
            if found[what] and found[what] != value:
                other = f"rank {other} has {value}"
                wrong.append(f"{name}: {what} {found[what]}, but {other}; make them the same")
        if found["mlx"] is None:
            wrong.append(f"{name}: {host.python} has no mlx: pip install mlx there")
        if backend == "jaccl" and not host.rdma:
            wrong.append(f"{name}: backend jaccl, but the hostfile has no rdma for it")
        for device in host.rdma:
            for d in [device] if isinstance(device, str) else device or []:
                if d not in found["rdma"]:
                    wrong.append(f"{name}: no RDMA device {d} (there: {rdma}); use backend tcp")
    return wrong


def check(
    *,
    nodes: str | None = None,
    ranks: int = 3,
    backend: str = "auto",
    port: int = PORT,
) -> None:
    """Tests hosts and links before a job: what is wrong and what to do, exit status 1 if anything.

    With --nodes: ssh, Python, MLX and comm.py on each host, free ports, RDMA devices; then, as the
    job would run, every operation with rank-coded data, and latency and bandwidth from each rank
    to the next. Without: the same operations on --ranks processes here, tcp and MLX's ring.
    """
    if "MLX_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        with connect(backend) as job:
            return _check_rank(job)
    theirs, hosts = _hosts(nodes, ranks, 1, backend, port)
    if nodes is None:
        usable = [b for b in BACKENDS[2:] if mx.distributed.is_available(b)]
        print(f"MLX {mx.__version__}; built with {', '.join(usable) or 'no backend'}")
        chosen = ["tcp", "ring"] if backend == "auto" else [backend]
        bad = [
            _self(local_hosts(ranks), ["check"], b, port + 100 * i) for i, b in enumerate(chosen)
        ]
        sys.exit(1 if any(bad) else 0)
    backend = theirs
    wrong = inspect_hosts(hosts, backend, port)
    if not wrong:
        status = _self(hosts, ["check"], backend, port)
        wrong = [f"the job ended with exit status {status}"] if status else []
    for line in wrong:
        print(f"FAILED {line}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


def _check_rank(job: Communicator) -> None:
    W, r, kinds = job.size, job.rank, (mx.float32, mx.bfloat16, mx.float16, mx.int32)
    for dtype in kinds:
        for n in (1, 7, 1023, 10**6):
            coded = [(mx.arange(W * n) % 7 + k).astype(dtype) for k in range(W)]
            total = sum(c.astype(mx.float32) for c in coded).astype(dtype)
            mx.eval(coded, total)
            copy = mx.array(coded[r])
            pairs = {
                "all_gather": (job.all_gather(coded[r]), mx.concatenate(coded)),
                "broadcast": (job.broadcast(mx.array(coded[r]), W - 1), coded[W - 1]),
                "reduce_scatter": (job.reduce_scatter(copy), total[r * n : r * n + n]),
                "all_reduce": (job.all_reduce(mx.array(coded[r])), total),
            }
            for name, (got, want) in pairs.items():
                if got.shape != want.shape or not mx.array_equal(got, want):
                    job.fail(f"{name} of {n} {dtype} gave wrong numbers")
    if W == 1:
        return print("one rank: nothing to check")
    rate, latency = _link(job, 8 << 20), np.zeros(W, np.float32)
    for sender in range(W):
        small, times = np.zeros(1, np.uint8), []
        job.barrier()
        for _ in range(20):
            begin = time.monotonic()
            if r == sender:
                job.send(small, job.next)
                job.recv(small, job.next)
                times.append((time.monotonic() - begin) / 2)
            elif r == (sender + 1) % W:
                job.recv(small, sender)
                job.send(small, sender)
        latency[sender] = statistics.median(times) if times else 0.0
    latency = job.all_reduce(latency)
    if r == 0:
        print(f"backend {job.backend}: all operations right on {W} ranks")
        for k in range(W):
            to = f"rank {k} ({job.host(k)}) to rank {(k + 1) % W}"
            print(f"  {to}: {latency[k] * 1e6:.0f} us")
        print(f"  all at once: {rate / 1e6:.0f} MB/s on the slowest link")
        if rate < 50e6:
            print(f"warning: {rate / 1e6:.0f} MB/s is slow: Wi-Fi? Prefer a cable's addresses")


if __name__ == "__main__":
    cli({"launch": launch, "check": check, "bench": bench}, errors=(CommError,))
