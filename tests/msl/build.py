"""Compile a kernel with clang into a shared library that the runtime can launch.

The translation unit is `include/metal_stdlib`, MLX's own utils.h as the installed wheel has it,
the rewritten kernel, and an entry function. There are three modes:

    fast    -O2. Memory is not watched, so a wild store can end the Python process.
    check   ThreadSanitizer's instrumentation, with this harness's runtime behind it instead of the
            sanitizer's: each load and store calls a function that knows the threadgroup, the lane
            and the last barrier. UBSan's checks report to the same runtime.
    asan    AddressSanitizer, for overruns of a thread's own arrays, which the other two cannot see
            through a pointer. Python must have been started with `asan_environment()`.

Instrumented modes take two steps. clang type-checks the kernel with its address spaces and emits
LLVM IR before any pass; then `addrspace(n)` is deleted from that text, because the sanitizers'
passes skip pointers outside address space 0, and the result is instrumented and compiled.

Environment: MSL_CLANG names the compiler, MSL_CACHE the folder of compiled kernels.
"""

import ctypes
import dataclasses
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx

from . import translate
from .translate import HERE, CompileError

OLDEST_CLANG, NEWEST_CLANG = 17, 24
INSTALL = "apt-get install --no-install-recommends clang-19"
MLX_INCLUDE = Path(mx.__file__).resolve().parent / "include"
INCLUDE = [HERE / "include", MLX_INCLUDE]


@dataclasses.dataclass(frozen=True)
class Options:
    """How to compile and run a kernel.

    The schedule "deep" runs each SIMD-group on to its next threadgroup barrier before the next one
    starts, which hurts a kernel that relies on luck; "round" lets SIMD-groups advance one SIMD
    operation at a time, in turn. The order is that of lanes, SIMD-groups and threadgroups; it also
    picks the tree in which simd_sum and its like add up.
    """

    mode: str = "fast"  # fast, check or asan
    schedule: str = "deep"  # deep or round
    order: str = "natural"  # natural, reversed or shuffled
    seed: int = 1  # of the shuffled order
    strict: bool = True  # a divergent SIMD operation or barrier ends the run
    ftz: bool = False  # flush denormals to zero, as a GPU may
    contract: bool = False  # a * b + c may become fma (fast mode only)
    fast_math: bool = False  # unqualified functions are those of metal::fast
    fast_ulps: int = 0  # noise of up to so many units in the last place in metal::fast
    lint: bool = True  # refuse pointers that name no address space
    defines: tuple[str, ...] = ()  # further compiler flags, "-DNAME=1"
    ignore: tuple[str, ...] = ()  # kinds of finding that do not raise

    def __post_init__(self):
        for name, values in (
            ("mode", ("fast", "check", "asan")),
            ("schedule", ("deep", "round")),
            ("order", ("natural", "reversed", "shuffled")),
        ):
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r}; it is one of {values}")


DEFAULT = Options()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel."""

    library: ctypes.CDLL
    path: Path
    source: list[str]  # lines of the MSL text, for findings
    warnings: str
    seconds: float


# ---- the compiler ----------------------------------------------------------------------


@functools.cache
def clang() -> str:
    """The path of clang++; MSL_CLANG wins, else the newest one on PATH.

    Raises:
        CompileError: there is none of version 17 or later.
    """
    wanted = os.environ.get("MSL_CLANG")
    versions = [f"clang++-{v}" for v in range(NEWEST_CLANG, OLDEST_CLANG - 1, -1)]
    for name in [wanted] if wanted else [*versions, "clang++"]:
        path = shutil.which(name)
        version = _run([path, "-dumpversion"]).stdout if path else ""
        if re.match(r"\d+", version) and int(version.split(".")[0]) >= OLDEST_CLANG:
            return path
    what = f"MSL_CLANG={wanted} is not clang" if wanted else "no clang++ on PATH"
    raise CompileError(f"{what} of version {OLDEST_CLANG} or later; install one: {INSTALL}")


def unavailable() -> str | None:
    """Why kernels cannot be run here, in one line; None if they can."""
    return _other_machine() or _no_clang()


def skip_reason() -> str | None:
    """Why tests of kernels should be skipped here. Where CI is set, a missing compiler is no
    reason: the tests must fail then, and not pass untested."""
    return _other_machine() or (None if "CI" in os.environ else _no_clang())


def _other_machine() -> str | None:
    machine = platform.machine()
    if sys.platform == "linux" and machine in ("x86_64", "aarch64"):
        return None
    return f"kernels are emulated on Linux x86_64 and aarch64, not on {sys.platform} {machine}"


def _no_clang() -> str | None:
    try:
        clang()
    except CompileError as error:
        return str(error)
    return None


def asan_environment() -> dict[str, str]:
    """os.environ with libasan preloaded, for a subprocess that runs kernels in asan mode.

    Raises:
        CompileError: there is no libasan; gcc brings it (Debian: libgcc-12-dev and later).
    """
    compiler = shutil.which("gcc") or clang()
    library = Path(_run([compiler, "-print-file-name=libasan.so"]).stdout.strip())
    if not library.is_absolute():
        raise CompileError("no libasan.so; install one: apt-get install gcc (or libgcc-12-dev)")
    # a Python process leaves memory behind at its end; 99 tells a report from other failures
    options = "detect_leaks=0:detect_odr_violation=0:abort_on_error=0:exitcode=99"
    return os.environ | {"LD_PRELOAD": str(library.resolve()), "ASAN_OPTIONS": options}


def _run(command: list, **keywords) -> subprocess.CompletedProcess:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **keywords)


def _compile(command: list, folder: Path, source: list[str]) -> str:
    """Run a compiler; its warnings.

    Raises:
        CompileError: with clang's errors, each followed by the line of the kernel that it means.
    """
    done = _run(command, cwd=folder)
    # MSL has no implicit conversion from float to bfloat; clang has one and warns
    loses = r"loses floating-point precision: .*\bto '(?:\w+ )?(?:bfloat\w*|__bf16)'"
    wrong = [line for line in done.stderr.splitlines() if re.search(loses, line)]
    if done.returncode or wrong:
        lines = wrong if not done.returncode else done.stderr.splitlines()
        raise CompileError("\n".join(_with_text(line, source) for line in lines))
    return done.stderr


def _with_text(message: str, source: list[str]) -> str:
    place = re.match(r"kernel\.metal:(\d+):", message)
    text = source[int(place.group(1)) - 1].strip() if place else ""
    return f"{message}\n    {text}" if text else message


# ---- flags -----------------------------------------------------------------------------


@functools.cache
def _cpu_flags() -> tuple[str, ...]:
    """Conversions to half and fma in hardware, where there are."""
    info = Path("/proc/cpuinfo").read_text()
    return tuple(f"-m{flag}" for flag in ("f16c", "fma") if re.search(rf"\b{flag}\b", info))


def _flags(options: Options) -> list[str]:
    return [
        "-std=gnu++17",
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-exceptions",
        "-fno-rtti",
        "-fno-math-errno",
        "-fno-threadsafe-statics",
        f"-ffp-contract={'fast' if options.contract else 'off'}",
        # half and bfloat round after every operation
        *("-Xclang", "-ffloat16-excess-precision=none"),
        *("-Xclang", "-fbfloat16-excess-precision=none"),
        # what a thread reads before it writes is not zero
        "-ftrivial-auto-var-init=pattern",
        "-Wimplicit-float-conversion",
        "-Wno-implicit-int-float-conversion",
        "-Werror=return-type",
        "-Werror=uninitialized",
        *(f"-Wno-{w}" for w in ("unused", "unknown-attributes", "unknown-pragmas")),
        *(f"-Wno-{w}" for w in ("macro-redefined", "pass-failed", "c++20-extensions")),
        "-fno-caret-diagnostics",
        *_cpu_flags(),
        f"-I{HERE / 'include'}",
        f"-DMSL_FAST_ULPS={options.fast_ulps}",
        f"-DMSL_FAST_MATH={int(options.fast_math)}",
        *options.defines,
    ]


_SANITIZERS = {
    "check": ["-fsanitize=thread,undefined", "-fno-sanitize=vptr,function,null,object-size"],
    "asan": ["-fsanitize=address"],
}
_INSTRUMENT = {
    "check": ["-fsanitize=thread", "-mllvm", "-tsan-instrument-read-before-write", "-O0"],
    "asan": ["-fsanitize=address", "-O1"],
}


# ---- from source to library ------------------------------------------------------------


def compile_kernel(
    source: str,
    name: str,
    template: str | None = None,
    options: Options = DEFAULT,
    prelude: str | None = None,
) -> Kernel:
    """Compile the kernel function `name` of the MSL text `source`.

    Args:
        template: the arguments of the kernel's template, "float, 4", if it is one.
        prelude: MSL text in front of it; MLX's utils.h if None.

    Raises:
        CompileError: the kernel does not compile, or there is no clang.
    """
    start = time.perf_counter()
    if options.mode == "asan" and not hasattr(ctypes.CDLL(None), "__asan_init"):
        raise CompileError("asan mode: start Python with env=msl.asan_environment()")
    lines = source.splitlines()
    if options.lint:
        for number, complaint in translate.lint(source):
            text = lines[number - 1].strip()
            raise CompileError(f"kernel.metal:{number}: {complaint}\n    {text}")
    unit = _translation_unit(source, name, template, prelude)
    path = _cached(unit, options, lines)
    return Kernel(
        library=_load(path),
        path=path,
        source=lines,
        warnings=path.with_suffix(".log").read_text(),
        seconds=time.perf_counter() - start,
    )


@functools.cache
def _mlx_prelude() -> str:
    return translate.rewrite(translate.flatten("mlx/backend/metal/kernels/utils.h", roots=INCLUDE))


def _translation_unit(source: str, name: str, template: str | None, prelude: str | None) -> str:
    # MLX ends a template's text with an explicit instantiation; the entry function is ours
    body = re.sub(r"^template\s*\[\[host_name[^\n]*$", "", source, flags=re.M)
    call = name if template is None else f"{name}<{template}>"
    return "\n".join(
        [
            "#include <metal_stdlib>",
            _mlx_prelude() if prelude is None else translate.rewrite(prelude),
            '#line 1 "kernel.metal"',
            translate.rewrite(body),
            '#line 1 "entry"',
            translate.entry_function(translate.parse_signature(source, name), call),
        ]
    )


@functools.cache
def _harness_sources() -> bytes:
    """What every compiled kernel depends on besides its own text."""
    files = sorted(p for p in [*HERE.rglob("*.h"), *HERE.rglob("*.cpp")] if p.is_file())
    files += [HERE / "include/metal_stdlib", HERE / "build.py"]
    return b"".join(path.read_bytes() for path in files) + clang().encode()


@functools.cache
def _cache() -> Path:
    """MSL_CACHE, or a folder of one's own under the temporary one."""
    default = Path(tempfile.gettempdir()) / f"msl-cache-{os.getuid()}"
    folder = Path(os.environ.get("MSL_CACHE") or default).resolve()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():  # it holds code that will run here
        raise CompileError(f"{folder} belongs to another user; set MSL_CACHE to a folder of yours")
    return folder


def _cached(unit: str, options: Options, source: list[str]) -> Path:
    """The library of `unit`, built unless the cache has it."""
    parts = (unit, _flags(options), options.mode, MLX_INCLUDE)
    key = hashlib.sha256(repr(parts).encode() + _harness_sources()).hexdigest()[:24]
    library = _cache() / f"kernel-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as temporary:
            folder = Path(temporary)
            (folder / "unit.cpp").write_text(unit)
            warnings = _object(folder, options, source)
            link = ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,nodelete", "unit.o"]
            runtime = _runtime(options.mode == "check")
            # the runtime last: its own variable marks the end of the threadgroup memory
            _compile([clang(), *link, runtime, "-lm", "-o", "unit.so"], folder, source)
            library.with_suffix(".log").write_text(warnings)
            os.replace(folder / "unit.so", library)
    return library


def _object(folder: Path, options: Options, source: list[str]) -> str:
    """Compile unit.cpp to unit.o as the mode asks; the warnings."""
    flags = _flags(options)
    if options.mode == "fast":
        # a kernel may load a vector from where its elements are aligned, and x86 would trap
        fast = ["-O2", "-fmax-type-align=1", "-c", "unit.cpp", "-o", "unit.o"]
        return _compile([clang(), *flags, *fast], folder, source)
    emit = [
        "-O1",
        "-gline-tables-only",
        "-gdwarf-4",  # of version 5, addr2line (2.40) takes the wrong file names
        "-S",
        "-emit-llvm",
        "-Xclang",
        "-disable-llvm-passes",
    ]
    command = [clang(), *flags, *_SANITIZERS[options.mode], *emit, "unit.cpp", "-o", "typed.ll"]
    warnings = _compile(command, folder, source)
    flat = _drop_address_spaces((folder / "typed.ll").read_text())
    (folder / "flat.ll").write_text(flat)
    instrument = [*_cpu_flags(), "-fPIC", *_INSTRUMENT[options.mode], "-Wno-override-module"]
    _compile([clang(), *instrument, "-c", "flat.ll", "-o", "unit.o"], folder, source)
    return warnings


def _drop_address_spaces(ir: str) -> str:
    """LLVM IR with every pointer in address space 0."""
    ir = re.sub(r"\s?addrspace\([123]\)", "", ir)
    # an intrinsic carries the address spaces of its pointers in its name
    ir = re.sub(r"@llvm\.[\w.]+", lambda m: re.sub(r"\.p[123](?=\.|$)", ".p0", m.group()), ir)
    ir = re.sub(r"= addrspacecast ptr (\S+) to ptr", r"= bitcast ptr \1 to ptr", ir)
    ir = re.sub(r"addrspacecast \(ptr (\S+) to ptr\)", r"\1", ir)
    lines, declared = [], set()
    for line in ir.splitlines():
        name = re.search(r"@[\w.$\"]+", line) if line.startswith("declare") else None
        if name and name.group() in declared:
            continue  # two declarations that differed in their address spaces only
        if name:
            declared.add(name.group())
        lines.append(line)
    return "\n".join(lines) + "\n"


@functools.cache
def _runtime(check: bool) -> Path:
    """The object file of runtime.cpp."""
    key = hashlib.sha256(_harness_sources()).hexdigest()[:16]
    path = _cache() / f"runtime-{key}{'-check' if check else ''}.o"
    if not path.exists():
        temporary = path.with_suffix(f".{os.getpid()}")
        command = [clang(), "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden"]
        command += ["-DMSL_CHECK"] if check else []
        command += [f"-I{HERE / 'include'}", "-c", HERE / "runtime.cpp", "-o", temporary]
        _compile(command, HERE, [])
        os.replace(temporary, path)
    return path


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    library.msl_run.restype = ctypes.c_int
    return library
