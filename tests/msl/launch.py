"""Run a compiled kernel over a grid, and say what it did wrong.

The buffers are copied into one arena with 64 KiB of poison between them. In check mode the runtime
watches every access; in fast mode the arena is compared afterwards, and a changed byte outside the
outputs is a finding.
"""

import ctypes
import dataclasses
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np

from .build import DEFAULT, Kernel, Options

MAX_THREADS = 1024  # of a threadgroup
MAX_THREADGROUP_MEMORY = 32768  # bytes
GAP = 1 << 16  # bytes of poison around each buffer
POISON = 0xFF  # a NaN in every floating format, -1 in every integer one
ALIGNMENT = 16  # of a Metal buffer, at least
MAX_FINDINGS = 64
STACK_KB = {"fast": 64, "check": 128, "asan": 128}

# numbered as `enum Kind` in runtime.cpp
KINDS = (
    "out-of-bounds",
    "race",  # between SIMD-groups of one threadgroup
    "simd-race",  # between lanes of one SIMD-group, which need not run in lockstep
    "cross-threadgroup-race",
    "uninitialised",
    "divergence",
    "undefined",
    "unwritten",
    "canary",
)


@dataclasses.dataclass
class Finding:
    """One thing that a kernel did wrong, at one place of its source."""

    kind: str  # of KINDS, or "launch" or "threadgroup-memory"
    what: str
    line: int = 0  # of the MSL text that MLX generated; 0 if unknown
    text: str = ""  # that line
    other_line: int = 0  # of the access that it collides with
    other_text: str = ""
    count: int = 1
    threadgroup: tuple[int, int, int] = (0, 0, 0)  # of its first occurrence
    thread: int = 0

    def __str__(self) -> str:
        where = f" at line {self.line}: `{self.text}`" if self.line else ""
        other = f"; other access at line {self.other_line}: `{self.other_text}`"
        return (
            f"[{self.kind}] {self.what}{where}{other if self.other_line else ''}"
            f"; threadgroup {self.threadgroup}, {self.count} times"
        )


class KernelError(Exception):
    """A run had findings; they are in `findings`."""

    def __init__(self, findings: list[Finding]):
        self.findings = findings
        super().__init__("\n".join(map(str, findings)))


@dataclasses.dataclass
class Buffer:
    """An argument of a kernel, in the order of [[buffer(n)]]."""

    name: str
    array: np.ndarray  # copied in; the shape and type of what comes out
    output: bool = False
    initialised: bool = True  # else the contents are poison
    offset: int = 0  # bytes from the array's start to where the kernel's pointer points


@dataclasses.dataclass
class Result:
    outputs: list[np.ndarray] = dataclasses.field(repr=False)
    findings: list[Finding]
    threadgroup_memory: int  # bytes
    switches: int  # of fibers
    accesses: int  # that were checked
    compile_seconds: float
    run_seconds: float


# ---- what runtime.cpp takes and gives ----------------------------------------------------


def _structure(name: str, /, **fields) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_Buffer = _structure(
    "msl_buffer",
    base=ctypes.c_void_p,
    size=ctypes.c_uint64,
    name=ctypes.c_char_p,
    output=ctypes.c_uint32,
    initialised=ctypes.c_uint32,
)
_Options = _structure(
    "msl_options",
    order=ctypes.c_uint32,
    seed=ctypes.c_uint32,
    round=ctypes.c_uint32,
    strict=ctypes.c_uint32,
    ftz=ctypes.c_uint32,
    stack_kb=ctypes.c_uint32,
    max_findings=ctypes.c_uint32,
)
_Finding = _structure(
    "msl_finding",
    kind=ctypes.c_uint32,
    count=ctypes.c_uint32,
    threadgroup=ctypes.c_uint32 * 3,
    thread=ctypes.c_uint32,
    pc=ctypes.c_uint64,
    other_pc=ctypes.c_uint64,
    line=ctypes.c_uint32,
    what=ctypes.c_char * 252,
)
_Stats = _structure(
    "msl_stats",
    switches=ctypes.c_uint64,
    accesses=ctypes.c_uint64,
    threadgroup_memory=ctypes.c_uint64,
    load_address=ctypes.c_uint64,
)
_Triple = ctypes.c_uint32 * 3


# ---- the arena -------------------------------------------------------------------------


class _Arena:
    """The buffers of one run, in poisoned memory."""

    def __init__(self, buffers: list[Buffer]):
        self.buffers = buffers
        # the least that a pointer may point to is one byte, even if there is nothing to read
        sizes = [max(1, b.array.nbytes) for b in buffers]
        self.bytes = np.full(sum(sizes) + (GAP + ALIGNMENT) * (len(sizes) + 1), POISON, np.uint8)
        self.address = self.bytes.ctypes.data
        self.starts = []
        position = GAP
        for buffer, size in zip(buffers, sizes, strict=True):
            position += -(self.address + position) % ALIGNMENT
            self.starts.append(position)
            if buffer.initialised:
                raw = np.ascontiguousarray(buffer.array).reshape(-1).view(np.uint8)
                self.bytes[position : position + raw.size] = raw
            position += size + GAP
        self.before = self.bytes.copy()

    def pointers(self):
        """What the kernel gets: a pointer for each buffer."""
        values = [
            self.address + start + b.offset
            for b, start in zip(self.buffers, self.starts, strict=True)
        ]
        return (ctypes.c_void_p * max(1, len(values)))(*values)

    def regions(self):
        """What the checker knows: where each buffer lies."""
        values = [
            _Buffer(self.address + start, b.array.nbytes, b.name.encode(), b.output, b.initialised)
            for b, start in zip(self.buffers, self.starts, strict=True)
        ]
        return (_Buffer * max(1, len(values)))(*values)

    def outputs(self) -> list[np.ndarray]:
        return [
            self.bytes[start : start + b.array.nbytes].view(b.array.dtype).reshape(b.array.shape)
            for b, start in zip(self.buffers, self.starts, strict=True)
            if b.output
        ]

    def stray_write(self) -> Finding | None:
        """The first byte that changed outside the outputs."""
        changed = self.bytes != self.before
        for buffer, start in zip(self.buffers, self.starts, strict=True):
            if buffer.output:
                changed[start : start + buffer.array.nbytes] = False
        if not changed.any():
            return None
        at = int(changed.argmax())
        distance = [
            max(start - at, at - start - b.array.nbytes, 0)
            for b, start in zip(self.buffers, self.starts, strict=True)
        ]
        nearest = int(np.argmin(distance))
        buffer, offset = self.buffers[nearest], at - self.starts[nearest]
        size = buffer.array.nbytes
        what = f"write outside the outputs, at byte {offset} of {buffer.name} ({size} bytes)"
        return Finding("canary", what)


# ---- running ---------------------------------------------------------------------------


def run_kernel(
    kernel: Kernel,
    buffers: list[Buffer],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    options: Options = DEFAULT,
) -> Result:
    """Run `kernel` over `grid` threads in groups of `threadgroup`.

    Raises:
        KernelError: there are findings of a kind that `options.ignore` does not name.
    """
    start = time.perf_counter()
    _check_launch(grid, threadgroup)
    arena = _Arena(buffers)
    raw, stats = (_Finding * MAX_FINDINGS)(), _Stats()
    count = kernel.library.msl_run(
        arena.pointers(),
        arena.regions(),
        len(buffers),
        _Triple(*grid),
        _Triple(*threadgroup),
        ctypes.byref(_settings(options)),
        raw,
        ctypes.byref(stats),
    )
    if count < 0:
        raise MemoryError("no memory for the stacks of a threadgroup")
    findings = _findings(kernel, raw[:count], stats.load_address)
    stray = arena.stray_write() if options.mode != "check" else None
    findings += [stray] if stray else []
    if stats.threadgroup_memory > MAX_THREADGROUP_MEMORY:
        what = f"{stats.threadgroup_memory} bytes of threadgroup memory"
        what += f"; the most is {MAX_THREADGROUP_MEMORY}"
        findings.append(Finding("threadgroup-memory", what))
    bad = [finding for finding in findings if finding.kind not in options.ignore]
    if bad:
        raise KernelError(bad)
    return Result(
        outputs=[array.copy() for array in arena.outputs()],
        findings=findings,
        threadgroup_memory=stats.threadgroup_memory,
        switches=stats.switches,
        accesses=stats.accesses,
        compile_seconds=kernel.seconds,
        run_seconds=time.perf_counter() - start,
    )


def _settings(options: Options) -> ctypes.Structure:
    return _Options(
        order=("natural", "reversed", "shuffled").index(options.order),
        seed=options.seed,
        round=options.schedule == "round",
        strict=options.strict,
        ftz=options.ftz,
        stack_kb=STACK_KB[options.mode],
        max_findings=MAX_FINDINGS,
    )


def _check_launch(grid: tuple, threadgroup: tuple) -> None:
    threads = int(np.prod(threadgroup))
    if threads > MAX_THREADS:
        what = f"threadgroup of {threads} threads {threadgroup}; the most is {MAX_THREADS}"
        raise KernelError([Finding("launch", what)])
    if min(*grid, *threadgroup) < 1:
        raise KernelError([Finding("launch", f"empty grid {grid} or threadgroup {threadgroup}")])


def _findings(kernel: Kernel, raw: list, load_address: int) -> list[Finding]:
    """The runtime's findings with their lines; those of one line and kind become one."""
    addresses = {pc - load_address for f in raw for pc in (f.pc, f.other_pc) if pc}
    lines = _lines(kernel.path, sorted(addresses))
    merged = {}
    for f in raw:
        line = f.line or lines.get(f.pc - load_address, 0)
        other = lines.get(f.other_pc - load_address, 0)
        finding = Finding(
            kind=KINDS[f.kind],
            what=f.what.decode(errors="replace"),
            line=line,
            text=_text(kernel, line),
            other_line=other,
            other_text=_text(kernel, other),
            count=f.count,
            threadgroup=tuple(f.threadgroup),
            thread=f.thread,
        )
        key = (finding.kind, line, other, re.sub(r"\d+", "#", finding.what))
        if key in merged:
            merged[key].count += finding.count
        else:
            merged[key] = finding
    return list(merged.values())


def _text(kernel: Kernel, line: int) -> str:
    return kernel.source[line - 1].strip() if 0 < line <= len(kernel.source) else ""


def _lines(library: Path, addresses: list[int]) -> dict[int, int]:
    """The kernel's line for each address, which is that of the instruction after a call."""
    tool = shutil.which("addr2line")  # of binutils, as is the linker that clang needs
    if not addresses or not tool:
        return {}
    command = [tool, "-a", "-i", "-e", str(library), *(hex(a - 1) for a in addresses)]
    text = subprocess.run(command, capture_output=True, text=True).stdout
    lines, address = {}, 0
    for row in text.splitlines():
        if row.startswith("0x"):
            address = int(row, 16) + 1
            continue
        # inlined calls come innermost first; the first one in the kernel's own text is the place
        place = re.match(r".*kernel\.metal:(\d+)", row)
        if place:
            lines.setdefault(address, int(place.group(1)))
    return lines
