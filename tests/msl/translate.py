"""Turn Metal Shading Language (MSL) text into C++ that clang parses, line for line.

MSL is C++14 with address spaces, attributes in odd places, vector types and 32-bit floating
literals. Most of that exists in clang under another spelling, which `include/metal_stdlib`
supplies as macros and templates (`device` is `__attribute__((address_space(1)))`, and so on). What
a macro cannot reach is rewritten here, token by token. No line is added or removed, so that clang's
errors and the checker's findings carry the line of the text that MLX generated:

    MSL                              C++
    1.5            3.0h              1.5f             half(3.0f)         there is no double
    uint i [[thread_...]]            uint i                              read by parse_signature
    threadgroup float x[8];          MSL_TG_STORAGE threadgroup float x[8];
    device T x[N]  (a parameter)     device T *x                         arrays decay
    float4(a, b)   vec<T, 2>(a)      msl_make<float, 4>(a, b)  ...       clang has no such call
    #include <metal_math>            #include <metal_stdlib>             one header holds all
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ADDRESS_SPACES = ("device", "constant", "threadgroup", "thread")
SCALARS = (
    "float half bfloat int uint short ushort char uchar long ulong bool "
    "float16_t bfloat16_t int8_t uint8_t int16_t uint16_t int32_t uint32_t int64_t uint64_t"
).split()


class CompileError(Exception):
    """The kernel is not valid MSL as far as this harness can tell, or clang is missing."""


# ---- tokens ----------------------------------------------------------------------------


@dataclass
class Token:
    kind: str  # space (comments too), directive, string, number, name or op
    text: str


_TOKEN = re.compile(
    r"""(?P<space>\s+ | //[^\n]* | /\*.*?\*/ | \\\n)
      | (?P<directive>(?<![^\n])[ \t]*\#(?:\\\n|[^\n])*)
      | (?P<string>"(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*')
      | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<op>::|->|&&|\|\||<<|>=|<=|==|!=|\+\+|--|.)""",  # `>>` stays two: it closes templates
    re.S | re.X,
)
_FLOAT = re.compile(
    r"(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)? | \d+[eE][+-]?\d+ | 0[xX][\da-fA-F.]+[pP][+-]?\d+", re.X
)
_VECTOR = re.compile(
    r"(?:packed_)?(float|half|bfloat|int|uint|short|ushort|char|uchar|long|ulong|bool)([234])"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ATTRIBUTE = re.compile(r"\[\[\s*(.*?)\s*\]\]", re.S)


def tokenize(source: str) -> list[Token]:
    """All of `source` as tokens; joining their texts gives it back."""
    return [Token(m.lastgroup, m.group()) for m in _TOKEN.finditer(source)]


def _next(tokens: list[Token], i: int) -> int:
    """The index of the first token after `i` that is not space."""
    i += 1
    while i < len(tokens) and tokens[i].kind == "space":
        i += 1
    return i


def _text(tokens: list[Token], i: int) -> str:
    return tokens[i].text if i < len(tokens) else ""


def _close(tokens: list[Token], i: int) -> int | None:
    """The index of the bracket that closes the one at `i`; None if it was no bracket after all."""
    pairs = {"(": ")", "[": "]", "{": "}", "<": ">"}
    opening, closing = tokens[i].text, pairs[tokens[i].text]
    depth = 0
    while i is not None and i < len(tokens):
        text = tokens[i].text
        if text == opening:
            depth += 1
        elif text == closing:
            depth -= 1
            if depth == 0:
                return i
        elif opening == "<" and text in ("(", "["):
            i = _close(tokens, i)  # a `>` in there is a comparison
        elif opening == "<" and text in (";", "{"):
            return None  # it was "less than"
        i = None if i is None else i + 1
    return None


# ---- rewriting -------------------------------------------------------------------------


def rewrite(source: str) -> str:
    """`source` with every construct of the table above spelled for clang."""
    tokens = tokenize(source)
    for token in tokens:
        if token.kind == "number":
            token.text = _literal(token.text)
        elif token.kind == "directive":
            token.text = _directive(token.text)
    _drop_attributes(tokens)
    _mark_storage(tokens)
    _decay_parameters(tokens)
    _name_constructors(tokens)
    return "".join(token.text for token in tokens)


def _literal(text: str) -> str:
    """Unsuffixed floating literals are floats in MSL; `h` makes a half, `bf` a bfloat."""
    match = _FLOAT.match(text)
    if not match:
        return text
    kind = {"": "float", "h": "half", "bf": "bfloat"}.get(text[match.end() :].lower())
    if kind is None:
        return text
    return match.group() + "f" if kind == "float" else f"{kind}({match.group()}f)"


def _directive(text: str) -> str:
    """Metal's headers are one file here; the literals of a macro are rewritten as elsewhere."""
    text = re.sub(r"<metal_\w+>", "<metal_stdlib>", text)
    if not re.match(r"\s*#\s*define\b", text):
        return text
    before, _, after = text.partition("#")
    tokens = tokenize(after)
    return f"{before}#" + "".join(
        _literal(t.text) if t.kind == "number" else t.text for t in tokens
    )


def _drop_attributes(tokens: list[Token]) -> None:
    """Remove every [[...]], keeping its line breaks."""
    i = 0
    while i < len(tokens) - 1:
        if tokens[i].text == "[" and tokens[i + 1].text == "[":
            end = _close(tokens, i)
            if end is None:
                raise CompileError("[[ without ]]")
            lines = sum(token.text.count("\n") for token in tokens[i : end + 1])
            tokens[i : end + 1] = [Token("space", "\n" * lines)]
        i += 1


def _declared(tokens: list[Token], i: int) -> tuple[int | None, int]:
    """What the qualifier at `i` declares: the index of the last name in a run of names, `::` and
    template arguments (None if there is none), and the index of the token that ends the run."""
    name, i = None, _next(tokens, i)
    while i < len(tokens):
        if tokens[i].text == "<":
            end = _close(tokens, i)
            if end is None:
                return None, i
            i = end
        elif tokens[i].kind == "name":
            name = i
        elif tokens[i].text != "::":
            break
        i = _next(tokens, i)
    return name, i


def _mark_storage(tokens: list[Token]) -> None:
    """`threadgroup T x[...]` in a body is storage shared by the threads; `threadgroup T* p` is
    a thread's own pointer, and its declaration stops at the `*`."""
    depth = 0
    for i, token in enumerate(tokens):
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        if token.kind == "name" and token.text == "threadgroup" and depth == 0:
            name, end = _declared(tokens, i)
            if name is not None and _text(tokens, end) in ("[", ";", ",", "="):
                token.text = "MSL_TG_STORAGE threadgroup"


def _decay_parameters(tokens: list[Token]) -> None:
    """`device T x[N]` in a parameter list becomes `device T *x`, as C++ itself would have it, but
    with the address space on what is pointed to."""
    depth, i = 0, 0
    while i < len(tokens):
        text = tokens[i].text
        depth += {"(": 1, ")": -1}.get(text, 0)
        if depth > 0 and text in ("device", "constant", "threadgroup"):
            name, end = _declared(tokens, i)
            if name is not None and _text(tokens, end) == "[":
                del tokens[end : (_close(tokens, end) or end) + 1]
                tokens[name].text = "*" + tokens[name].text
        i += 1


def _name_constructors(tokens: list[Token]) -> None:
    """`float4(...)` and `vec<T, N>(...)` become calls of the template msl_make."""
    for i, token in enumerate(tokens):
        if token.kind != "name":
            continue
        match, after = _VECTOR.fullmatch(token.text), _next(tokens, i)
        if match and _text(tokens, after) == "(":
            token.text = f"msl_make<{match.group(1)}, {match.group(2)}>"
        elif token.text == "vec" and _text(tokens, after) == "<":
            end = _close(tokens, after)
            if end is not None and _text(tokens, _next(tokens, end)) == "(":
                token.text = "msl_make"


# ---- the kernel's signature --------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel function: `type name [[attribute]]`."""

    type: str
    name: str
    attribute: str

    @property
    def buffer(self) -> int | None:
        """The n of [[buffer(n)]]; None for a thread attribute."""
        match = re.fullmatch(r"buffer\s*\(\s*(\d+)\s*\)", self.attribute)
        return int(match.group(1)) if match else None


def _blank(pattern: re.Pattern, source: str) -> str:
    """`source` with each match turned into spaces, so that positions and lines stay."""
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), source)


def split_arguments(text: str) -> list[str]:
    """`text` at its top-level commas."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "(<[{") - (char in ")>]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def parse_signature(source: str, name: str) -> list[Parameter]:
    """The parameters of the kernel function `name`, in order."""
    clean = _blank(_COMMENT, source)
    found = re.search(r"\bvoid\s+" + re.escape(name) + r"\s*\(", clean)
    if not found:
        raise CompileError(f"no kernel function `void {name}(...)` in the source")
    tokens = tokenize(clean[found.end() - 1 :])
    end = _close(tokens, 0)
    if end is None:
        raise CompileError(f"the parameter list of {name} has no end")
    return [_parameter(p) for p in split_arguments("".join(t.text for t in tokens[1:end]))]


def _parameter(text: str) -> Parameter:
    attribute = _ATTRIBUTE.search(text)
    declaration = " ".join(_ATTRIBUTE.sub(" ", text).split())
    name = re.search(r"(\w+)\s*(?:\[[^\]]*\])?$", declaration)
    if not name:
        raise CompileError(f"cannot read the parameter `{declaration}`")
    kind = declaration[: name.start(1)].strip()
    return Parameter(kind, name.group(1), attribute.group(1) if attribute else "")


@functools.cache
def thread_attributes() -> frozenset[str]:
    """The attributes that the harness models: the members of struct msl_thread."""
    text = _blank(_COMMENT, (HERE / "include/msl/thread.h").read_text())
    return frozenset(re.findall(r"uint32_t (\w+)", text))


def entry_function(parameters: list[Parameter], call: str) -> str:
    """C++ of `msl_entry`, which the runtime calls once per thread: it hands buffers and thread
    attributes to `call`, each converted to the type of the parameter that takes it."""
    arguments = []
    for i, parameter in enumerate(parameters):
        if parameter.buffer is not None:
            arguments.append(f"metal::msl_detail::buffer<F, {i}>(buffers[{parameter.buffer}])")
        elif parameter.attribute in thread_attributes():
            arguments.append(f"metal::msl_detail::attribute<F, {i}>(t->{parameter.attribute})")
        else:
            raise CompileError(
                f"parameter {parameter.name} has attribute [[{parameter.attribute}]], "
                f"which this harness does not model; it has {sorted(thread_attributes())}"
            )
    return (
        'extern "C" __attribute__((visibility("hidden"), no_sanitize("thread", "undefined")))\n'
        "void msl_entry(void** buffers, const msl_thread* t) {\n"
        f"  typedef decltype(&{call}) F;\n"
        f"  (&{call})({', '.join(arguments)});\n"
        "}\n"
    )


# ---- headers ---------------------------------------------------------------------------


def flatten(*headers: str, roots: list[Path]) -> str:
    """The text of `headers` with their quoted includes expanded once each, as MLX does for the
    kernels that it compiles at run time. The first of `roots` that has a header supplies it."""
    seen = set()

    def expand(header: str) -> str:
        path = next((root / header for root in roots if (root / header).exists()), None)
        if path is None:
            raise CompileError(f"{header} not found in {', '.join(map(str, roots))}")
        if path in seen:
            return ""
        seen.add(path)
        lines = [f'#line 1 "{header}"']
        for number, line in enumerate(path.read_text().splitlines(), 1):
            include = re.match(r'\s*#include\s+"([^"]+)"', line)
            if include:
                lines += [expand(include.group(1)), f'#line {number + 1} "{header}"']
            else:
                lines.append("" if line.strip() == "#pragma once" else line)
        return "\n".join(lines)

    return "\n".join(map(expand, headers))


# ---- lint ------------------------------------------------------------------------------

_FUNCTION = re.compile(
    r"\b(?:void|inline|METAL_FUNC|[\w:>]+)\s+[*&]?(\w+)\s*\(([^(){};]*)\)\s*"
    r"(?:const\s*)?(?:thread\s*)?\{"
)
_QUALIFIER = re.compile(r"\b(?:" + "|".join(ADDRESS_SPACES) + r")\b")


def lint(source: str) -> list[tuple[int, str]]:
    """(line, complaint) for pointers and references without an address space.

    In MSL each must name one; clang takes their absence for `thread`. Looked at are the parameters
    of functions that are defined in `source`, and pointers to scalar types anywhere.
    """
    clean = _blank(_ATTRIBUTE, _blank(_COMMENT, source))
    found = {}
    for function in _FUNCTION.finditer(clean):
        if function.group(1) in ("if", "for", "while", "switch"):
            continue
        line = clean[: function.start()].count("\n") + 1
        for parameter in split_arguments(function.group(2)):
            parameter = parameter.split("=")[0]  # a default value may multiply
            if re.search(r"[*&]", parameter) and not _QUALIFIER.search(parameter):
                text = " ".join(parameter.split())
                found[line, text] = f"parameter `{text}` of {function.group(1)}"
    pointer = re.compile(r"([\w\s:]*)\b((?:" + "|".join(SCALARS) + r")[234]?)\s*\*+\s*(\w*)")
    for match in pointer.finditer(clean):
        if not _QUALIFIER.search(match.group(1)):
            line, text = clean[: match.start(2)].count("\n") + 1, match.group().strip()
            if not any(line == other for other, _ in found):
                found[line, text] = f"pointer `{text}`"
    return [(line, f"{what} needs an address space") for (line, _), what in sorted(found.items())]
