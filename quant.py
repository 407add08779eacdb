"""quant.py: load, quantize, convert, save and run a language model on MLX.

One file, no other file of the suite needed. What it replaces: a library of a hundred model files.
Here one decoder is written once and configured from the model's own config.json:

    tokens (B, T) -> embed (B, T, D) -> N x [norm, mixer, norm, gated MLP] -> norm
    -> logits (B, T, V)

A mixer is attention or, in Qwen 3.5, mostly a gated delta net; an MLP may be many, of which a
router chooses some. Families differ in data only (`FAMILIES`): where norms stand, which
projections carry a bias or are one, which layers see a sliding window, which RoPE they use if any,
soft caps and multipliers. Parameter paths are mlx-lm's, Hugging Face's but for experts, which are
stacked (E, O, I): checkpoints of both load unchanged and what is saved here loads in mlx-lm.

Packed weights. A packed matrix W (O, I) is `weight` (O, I·bits/32) uint32 with `scales` and, in
affine mode, `biases` (O, I/group): W = scale·code + bias. Other modes (mxfp4, mxfp8, nvfp4) have
8-bit float scales and no biases. `x Wᵀ` is taken straight from the packed form for few tokens, and
through a dense copy that lives only during the product for many, where the device is faster so
(`dense_pays`). Backward makes the dense copy again instead of keeping it: a resident copy would
cost what packing saved.

    python quant.py info MODEL
    python quant.py generate MODEL --prompt "What is the capital of France?"
    python quant.py generate MODEL --prompts FILE      many at once
    python quant.py quantize MODEL --save-path out --bits 4
    python quant.py dequantize MODEL --save-path out
    python quant.py convert FILE.gguf --save-path out
    python quant.py convert MODEL --save-path FILE.gguf --outtype q8_0

MODEL is a folder, a Hugging Face hub id or a .gguf file.
"""

import dataclasses
import difflib
import functools
import inspect
import json
import math
import os
import shutil
import sys
import time
import types
import typing
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_map_with_path, tree_unflatten

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
FLOATS = set(DTYPES.values())
TIED = "gemma", "smollm3"  # families whose head is the embedding where the config does not say
MODES = {  # mode -> allowed bits, allowed group sizes, default (group size, bits)
    "affine": ((2, 3, 4, 5, 6, 8), (32, 64, 128), (64, 4)),
    "mxfp4": ((4,), (32,), (32, 4)),
    "mxfp8": ((8,), (32,), (32, 8)),
    "nvfp4": ((4,), (16,), (16, 4)),
}
SHARD_BYTES = 5 << 30
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


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


# --- Products with packed weights -----------------------------------------------------------------


def dense_pays(tokens: int, dtype: mx.Dtype) -> bool:
    """Whether x Wᵀ for this many tokens is faster through a transient dense copy of a packed W.

    Measured: Metal's packed product wins throughout; CUDA's loses from some 256 tokens on (H200,
    4096 x 4096, 4-bit); the CPU backend's loses from 4 tokens on in float32 and always in half
    precision.
    """
    if mx.default_device().type == mx.DeviceType.cpu:
        return tokens >= 4 or dtype != mx.float32
    return tokens >= 256 and not mx.metal.is_available()


@functools.cache
def transient_product(group_size: int, bits: int, mode: str) -> typing.Callable:
    """`f(x, weight, scales[, biases]) -> x Wᵀ` whose dense W lives in neither direction longer
    than its product.

    In backward W must depend on the cotangent: otherwise mx.compile merges it with the forward's
    and keeps the dense matrix from one to the other.
    """

    def dense(x, packed):
        return mx.dequantize(
            *packed, group_size=group_size, bits=bits, mode=mode, dtype=x.dtype
        )  # (O, I)

    @mx.custom_function
    def product(x, *packed):
        return x @ dense(x, packed).T

    @product.vjp
    def product_vjp(primals, cotangent, _):
        x, *packed = primals
        later = mx.depends(packed, [cotangent])
        return cotangent @ dense(x, later), *(mx.zeros_like(p) for p in packed)

    return product


def packed_matmul(x: mx.array, layer: nn.Module) -> mx.array:
    """x (..., I) times the transposed packed weight of `layer` -> (..., O), in x's dtype."""
    W, scales, biases = layer["weight"], layer["scales"], layer.get("biases")
    how = layer.group_size, layer.bits, layer.mode
    if dense_pays(x.size // x.shape[-1], x.dtype):
        packed = [W, scales] if biases is None else [W, scales, biases]
        return transient_product(*how)(x, *packed)
    return mx.quantized_matmul(x, W, scales, biases, True, *how).astype(x.dtype)


class QuantizedLinear(nn.QuantizedLinear):
    """mlx.nn's, with the faster of the two products and no dense copy kept for backward."""

    def __call__(self, x):
        y = packed_matmul(x, self)
        return y + self.bias if "bias" in self else y


class QuantizedEmbedding(nn.QuantizedEmbedding):
    """mlx.nn's, with the faster product where it serves as the head."""

    def as_linear(self, x):
        return packed_matmul(x, self)


class Linear(nn.Linear):
    def to_quantized(self, group_size=None, bits=None, mode="affine", quantize_input=False):
        return QuantizedLinear.from_linear(self, group_size, bits, mode)


class Embedding(nn.Embedding):
    def to_quantized(self, group_size=None, bits=None, mode="affine", quantize_input=False):
        return QuantizedEmbedding.from_embedding(self, group_size, bits, mode)


# --- The decoder ----------------------------------------------------------------------------------

FAMILIES = {  # model_type -> what differs, as defaults for keys that config.json may not have
    "llama": {},
    "mistral": {},
    "mixtral": {
        "experts_in": "block_sparse_moe",
        "softmax_last": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    "qwen2": {"qkv_bias": True, "attention_bias": False, "max_position_embeddings": 32768},
    "qwen3": {"qk_norm": "head", "head_dim": 128, "max_position_embeddings": 32768},
    "qwen3_moe": {
        "qk_norm": "head",
        "head_dim": 128,
        "norm_topk_prob": False,
        "max_position_embeddings": 32768,
    },
    "qwen3_5": {"qk_norm": "head", "attention_gate": True, "partial_rotary_factor": 0.25},
    "gemma2": {
        "norms": "around",
        "norm_offset": True,
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "max_position_embeddings": 8192,
    },
    "gemma3_text": {
        "norms": "around",
        "norm_offset": True,
        "qk_norm": "head",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 4096,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "max_position_embeddings": 131072,
    },
    "phi3": {"fused": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "olmo2": {"norms": "after", "qk_norm": "all", "rms_norm_eps": 1e-5},
    "granite": {"attention_multiplier": 1.0},
    "smollm3": {"no_rope_layer_interval": 4, "rope_theta": 2e6, "max_position_embeddings": 32768},
}
FAMILIES["qwen3_5_moe"] = FAMILIES["qwen3_5"]
ALIASES = {  # Mixtral's, Gemma's and Qwen 3.5's names
    "num_local_experts": "num_experts",
    "hidden_activation": "hidden_act",
    "attn_output_gate": "attention_gate",
}
FOREIGN = {  # config.json's key -> a feature that would change the result
    "kv_lora_rank": "latent attention (MLA)",
    "q_lora_rank": "latent attention (MLA)",
    "use_bidirectional_attention": "attention to what follows",
    "clip_qkv": "clipped projections",
    "n_group": "groups of experts",
    "num_kv_shared_layers": "keys and values shared between layers",
    "hidden_size_per_layer_input": "embeddings of each layer",
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
NULLABLE = "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"  # null: without
LAYERS = "windows", "ropes", "deltas", "sparse"  # of a Spec: one entry per layer


@dataclasses.dataclass
class Spec:
    """What the decoder needs to know, read from a config.json (`Spec.read`)."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    intermediate_size: int = 0
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    norm_offset: bool = False  # norms multiply by 1 + weight
    norms: str = "before"  # of attention and MLP: before, after, or around them
    attention_bias: bool = False
    qkv_bias: bool | None = None
    mlp_bias: bool = False
    fused: bool = False  # qkv_proj and gate_up_proj instead of their parts
    qk_norm: str | None = None  # over each head, or all of them
    attention_gate: bool = False  # q_proj gives a gate beside each query
    attention_scale: float = 0.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    softmax_last: bool = False  # over the chosen experts only
    experts_in: str = "mlp"
    linear_num_value_heads: int = 0
    linear_num_key_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 4
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    rope: dict = dataclasses.field(default_factory=dict)  # rope_type, rope_theta, the type's keys
    windows: tuple = ()  # per layer: None, or how many positions attention looks back
    ropes: tuple = ()  # per layer: like `rope`, or None
    deltas: tuple = ()  # per layer: whether it is a gated delta net
    sparse: tuple = ()  # per layer: whether it has experts

    @classmethod
    def read(cls, config: dict) -> "Spec":
        """Raises UserError for an unknown model_type, activation or RoPE type and missing keys."""
        kind = config.get("model_type")
        if kind not in FAMILIES:
            raise UserError(
                f"unsupported model_type {kind!r}; supported: {', '.join(sorted(FAMILIES))}"
            )
        given = {k: v for k, v in config.items() if v is not None or k in NULLABLE}
        aliases = {new: given[old] for old, new in ALIASES.items() if old in given}
        config = FAMILIES[kind] | given | aliases
        fields = dataclasses.fields(cls)
        needed = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
        if missing := [k for k in needed if k not in config]:
            raise UserError(f"config.json lacks {', '.join(missing)}")
        known = {f.name for f in fields} - {"rope", *LAYERS}
        spec = cls(**{k: v for k, v in config.items() if k in known})
        if (act := spec.hidden_act) not in ACTIVATIONS:
            raise UserError(f"unsupported hidden_act {act!r}; wanted {', '.join(ACTIVATIONS)}")
        spec.hidden_act = ACTIVATIONS[act]
        for key, what in FOREIGN.items():
            if config.get(key):
                raise UserError(f"unsupported: {what}, {key} {config[key]} in config.json")
        spec.num_key_value_heads = spec.num_key_value_heads or spec.num_attention_heads
        spec.head_dim = spec.head_dim or spec.hidden_size // spec.num_attention_heads
        spec.qkv_bias = spec.attention_bias if spec.qkv_bias is None else spec.qkv_bias
        spec.moe_intermediate_size = spec.moe_intermediate_size or spec.intermediate_size
        if kind.startswith("gemma"):
            spec.embedding_multiplier = spec.hidden_size**0.5
        spec.attention_scale = config.get("attention_multiplier") or (
            config.get("query_pre_attn_scalar", spec.head_dim) ** -0.5
        )
        kinds = cls._kinds(config, spec.num_hidden_layers)
        window = config.get("sliding_window")
        spec.windows = tuple(window if k == "sliding_attention" else None for k in kinds)
        spec.deltas = tuple(k == "linear_attention" for k in kinds)
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
        spec.sparse = tuple(
            bool(spec.num_experts) and i not in dense and (i + 1) % step == 0
            for i in range(len(kinds))
        )
        lacking = [] if all(spec.sparse) else ["intermediate_size"]
        lacking += ["num_experts_per_tok"] if any(spec.sparse) else []
        if any(spec.deltas):
            lacking += [name for name in known if name.startswith("linear_")]
        if lacking := sorted(name for name in lacking if not getattr(spec, name)):
            raise UserError(f"config.json lacks {', '.join(lacking)}")
        cls._ropes(spec, config)
        return spec

    @staticmethod
    def _kinds(config: dict, layers: int) -> list[str]:
        """What each layer is: full_attention, sliding_attention or linear_attention."""
        full, sliding, kind = "full_attention", "sliding_attention", config["model_type"]
        window = config.get("sliding_window")
        if kind.startswith(("qwen", "smollm3")) and not config.get("use_sliding_window"):
            window = None
        if kinds := config.get("layer_types"):
            known = {full, sliding} | ({"linear_attention"} if "qwen3_5" in kind else set())
            if odd := set(kinds) - known:
                raise UserError(f"unsupported layer_types: {', '.join(sorted(odd))}")
            if len(kinds) != layers:
                raise UserError(f"layer_types: got {len(kinds)}, wanted num_hidden_layers {layers}")
            return [full if k == sliding and not window else k for k in kinds]
        if kind.startswith("qwen3_5"):
            every = config.get("full_attention_interval", 4)
            return [full if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
        if kind.startswith("gemma"):
            every = 2 if kind == "gemma2" else config.get("sliding_window_pattern", 6)
            return [full if (i + 1) % every == 0 else sliding for i in range(layers)]
        first = 0 if kind in ("mistral", "mixtral", "phi3") else layers
        if kind.startswith(("qwen", "smollm3")):
            first = config.get("max_window_layers", 28)
        return [sliding if window and i >= first else full for i in range(layers)]

    @staticmethod
    def _ropes(spec: "Spec", config: dict) -> None:
        """Fills in `rope` and `ropes`: of global layers, of layers with a window, or none."""
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = config["model_type"]
        local = {"rope_theta": config.get("rope_local_base_freq"), "rope_type": "default"}
        if "full_attention" in given:
            given, local = given["full_attention"], given.get("sliding_attention") or local
        rope = {**given, "rope_theta": given.get("rope_theta") or config.get("rope_theta") or 1e4}
        if original := config.get("original_max_position_embeddings"):  # Phi's place for it
            rope["original_max_position_embeddings"] = original
        named = given.get("rope_type") or given.get("type") or "default"
        rope["rope_type"] = {"su": "longrope"}.get(named, named)
        part = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        if kind.startswith("qwen3_5"):  # of text alone, all three positions are the same
            rope["rope_type"] = "default" if named == "mrope" else named
        elif part != 1 and kind != "phi3":
            raise UserError(f"unsupported partial_rotary_factor {part} for {kind}")
        rope["dims"] = int(spec.head_dim * part)
        spec.rope, count = rope, spec.num_hidden_layers
        with_rope = [True] * count
        if every := config.get("no_rope_layer_interval"):
            listed = config.get("no_rope_layers") or [(i + 1) % every for i in range(count)]
            with_rope = [bool(x) for x in listed]
        local = rope | local if local["rope_theta"] else rope
        spec.ropes = tuple(
            (local if window else rope) if use else None
            for window, use in zip(spec.windows, with_rope, strict=True)
        )


def rope_frequencies(rope: dict, dims: int, max_positions: int) -> tuple:
    """RoPE in float64: (freqs (dims/2,), or a function of the length, and the attention factor).

    Position p turns pair i by p / freqs[i]. Types and formulas as in Hugging Face's
    modeling_rope_utils: default, linear, dynamic (NTK), llama3, yarn (Peng et al. 2023), longrope
    (Ding et al. 2024).

    Raises:
        UserError: on any other type, by name, and when the type's own keys are missing.
    """
    kind, theta = rope["rope_type"], rope["rope_theta"]
    base = theta ** (np.arange(0, dims, 2) / dims)
    try:
        if kind == "default":
            return base, 1.0
        factor = rope.get("factor")
        original = rope.get("original_max_position_embeddings") or max_positions
        if kind == "longrope":
            return _longrope(rope, base, factor, original, max_positions)
        if factor is None:
            raise KeyError("factor")
        if kind == "linear":
            return base * factor, 1.0
        if kind == "dynamic":

            def dynamic(length):
                grown = max(length, original)
                stretch = (factor * grown / original - (factor - 1)) ** (dims / (dims - 2))
                return (theta * stretch) ** (np.arange(0, dims, 2) / dims)

            return dynamic, 1.0
        if kind == "llama3":
            low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
            wave = 2 * np.pi * base
            smooth = (original / wave - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            middle = base / ((1 - smooth) / factor + smooth)
            return np.where(wave > low, base * factor, np.where(wave < high, base, middle)), 1.0
        if kind == "yarn":
            return _yarn(rope, base, factor, original, dims)
    except KeyError as error:
        raise UserError(
            f"rope type {kind!r} needs {error} in rope_scaling; got {sorted(rope)}"
        ) from None
    known = "default, linear, dynamic, llama3, yarn, longrope"
    raise UserError(f"unsupported rope type {kind!r}; supported: {known}")


def _longrope(rope, base, factor, original, max_positions):
    factor = factor or max_positions / original
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = np.array(rope["short_factor"]) * base, np.array(rope["long_factor"]) * base
    attention = rope.get("attention_factor") or default
    return (lambda length: long if length > original else short), attention


def _yarn(rope, base, factor, original, dims):
    def pair_of(rotations):  # the pair that turns this often within the original context
        turns = math.log(original / (rotations * 2 * math.pi))
        return dims * turns / (2 * math.log(rope["rope_theta"]))

    def mscale(weight):
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    low, high = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = (np.arange(dims // 2) - low) / (high - low or 0.001)
    ramp = np.clip(ramp, 0, 1)  # 0: keep, 1: interpolate
    attention = rope.get("attention_factor")
    if attention is None:
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        attention = mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"]) if both else mscale(1.0)
    return 1 / (ramp / (factor * base) + (1 - ramp) / base), attention


class RoPE(nn.Module):
    """Rotary position embedding of x (B, heads, T, dims), rotate-half layout, every scaling."""

    def __init__(self, rope: dict, max_positions: int):
        super().__init__()
        self.dims = dims = rope["dims"]
        freqs, self.factor = rope_frequencies(rope, dims, max_positions)
        self.freqs_at = freqs if callable(freqs) else None
        self._freqs = None if callable(freqs) else mx.array(freqs.astype(np.float32))

    def __call__(self, x, offset: int = 0, packed: "Packed | None" = None):
        freqs = self._freqs
        if self.freqs_at:
            length = packed.longest if packed else offset + x.shape[-2]
            freqs = mx.array(self.freqs_at(length).astype(np.float32))
        if self.factor != 1.0:
            x = x * mx.array(self.factor, x.dtype)
        if packed:
            return self._turned(x, packed.positions()[:, None, :, None] / freqs)
        return mx.fast.rope(
            x, self.dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=freqs
        )

    def _turned(self, x, angles):
        """x by angles (B, 1, T, dims / 2), where mx.fast.rope has no position for each token."""
        half = self.dims // 2
        a, b = x[..., :half].astype(mx.float32), x[..., half : self.dims].astype(mx.float32)
        cos, sin = mx.cos(angles), mx.sin(angles)
        parts = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
        return mx.concatenate([*parts, x[..., self.dims :]], axis=-1)


class Packed:
    """Rows that hold several examples each: where in its row the example of each position begins,
    `starts` (B, T), and how long the longest may be. Nothing crosses from one example to the next.
    """

    def __init__(self, starts: mx.array, longest: int):
        self.starts, self.longest = starts, longest

    def positions(self) -> mx.array:
        """(B, T) within the examples."""
        return mx.arange(self.starts.shape[1]) - self.starts


class KVCache:
    """Keys and values of one layer (B, heads, positions, dims); as many as its window can see."""

    def __init__(self, window: int | None = None, first: mx.array | None = None):
        self.window, self.offset, self.keys, self.values = window, 0, None, None
        self.first = first

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        T, self.offset = keys.shape[2], self.offset + keys.shape[2]
        if self.window:
            if self.keys is not None:
                keep = min(self.window - 1, self.keys.shape[2])
                keys = mx.concatenate([self.keys[:, :, self.keys.shape[2] - keep :], keys], axis=2)
                values = mx.concatenate(
                    [self.values[:, :, self.values.shape[2] - keep :], values], axis=2
                )
            self.keys, self.values = keys, values
            return keys, values
        if self.keys is None or self.offset > self.keys.shape[2]:
            B, H, _, D = keys.shape
            room = mx.zeros((B, H, -(-T // 256) * 256, D), keys.dtype)
            start = self.offset - T
            old = [] if self.keys is None else [self.keys[:, :, :start], self.values[:, :, :start]]
            self.keys = mx.concatenate([*old[:1], room], axis=2)
            self.values = mx.concatenate([*old[1:], room], axis=2)
        self.keys[:, :, self.offset - T : self.offset] = keys
        self.values[:, :, self.offset - T : self.offset] = values
        return self.keys[:, :, : self.offset], self.values[:, :, : self.offset]

    def mask(self, T: int) -> mx.array | str | None:
        seen = min(self.offset, self.window - 1) if self.window else self.offset
        first = None if self.first is None else self.first - (self.offset - seen)
        return attention_mask(T, self.window, seen, first)

    def arrays(self) -> list:
        return [self.keys, self.values]


def attention_mask(
    T: int, window: int | None, seen: int = 0, first: mx.array | None = None
) -> mx.array | str | None:
    """Mask for T new positions after `seen` cached ones: None, "causal", or bool (T, seen + T).

    With `first` (B,), where each row's text begins among these positions: (B, 1, T, seen + T).
    What is before it sees itself alone, so that nothing is empty.
    """
    if first is None and (window is None or seen + T <= window):
        return None if T == 1 else "causal"
    query, key = mx.arange(seen, seen + T)[:, None], mx.arange(seen + T)[None]
    mask = (key <= query) & (key > query - (window or seen + T))
    if first is not None:
        mask = mask & (key >= first[:, None, None, None]) | (key == query)
    return mask


class RMSNorm(nn.RMSNorm):
    """mlx.nn's, or with 1 + weight as Gemma has it."""

    def __init__(self, dims: int, spec: Spec):
        super().__init__(dims, spec.rms_norm_eps)
        self.offset = spec.norm_offset
        if self.offset:
            self.weight = mx.zeros((dims,))

    def __call__(self, x):
        return mx.fast.rms_norm(x, 1 + self.weight if self.offset else self.weight, self.eps)


SCORES = 1 << 26  # how many attention scores exist at a time


class Attention(nn.Module):
    def __init__(self, spec: Spec, rope: RoPE | None, window: int | None):
        super().__init__()
        D, d = spec.hidden_size, spec.head_dim
        self.head_dim, self.scale, self.gated = d, spec.attention_scale, spec.attention_gate
        self.cap, self.whole = spec.attn_logit_softcapping, spec.qk_norm == "all"
        wide, narrow = spec.num_attention_heads * d, spec.num_key_value_heads * d
        self.widths = wide, narrow
        if spec.fused:
            self.qkv_proj = Linear(D, wide + 2 * narrow, bias=spec.qkv_bias)
        else:
            self.q_proj = Linear(D, wide * (2 if self.gated else 1), bias=spec.qkv_bias)
            self.k_proj = Linear(D, narrow, bias=spec.qkv_bias)
            self.v_proj = Linear(D, narrow, bias=spec.qkv_bias)
        self.o_proj = Linear(wide, D, bias=spec.attention_bias)
        if spec.qk_norm:
            self.q_norm = RMSNorm(wide if self.whole else d, spec)
            self.k_norm = RMSNorm(narrow if self.whole else d, spec)
        self.rope, self.window = rope, window

    def __call__(self, x, mask=None, cache: KVCache | None = None, packed: Packed | None = None):
        B, T, _ = x.shape
        if "qkv_proj" in self:
            wide, narrow = self.widths
            q, k, v = mx.split(self.qkv_proj(x), [wide, wide + narrow], axis=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.gated:
            q, gate = mx.split(q.reshape(B, T, -1, 2 * self.head_dim), 2, axis=-1)
        if "q_norm" in self and self.whole:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (a.reshape(B, T, -1, self.head_dim) for a in (q, k, v))
        if "q_norm" in self and not self.whole:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (a.transpose(0, 2, 1, 3) for a in (q, k, v))  # (B, heads, T, head_dim)
        if self.rope is not None:
            offset = cache.offset if cache else 0
            q, k = self.rope(q, offset, packed), self.rope(k, offset, packed)
        if cache is None:
            out = causal_attention(q, k, v, self.scale, self.window, self.cap, packed)
        else:
            k, v = cache.update_and_fetch(k, v)
            if self.cap:
                out = capped_attention(q, k, v, self.scale, self.cap, mask)
            else:
                out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)
        out = out.transpose(0, 2, 1, 3).reshape(B, T, -1)
        return self.o_proj(out * mx.sigmoid(gate.reshape(B, T, -1)) if self.gated else out)


def capped_attention(q, k, v, scale: float, cap: float, mask) -> mx.array:
    """Attention whose scores are cap tanh(score / cap); see mx.fast for shapes and masks."""
    (B, H, T, d), G = q.shape, k.shape[1]
    if isinstance(mask, str):
        mask = mx.tri(T, k.shape[2], k.shape[2] - T, dtype=mx.bool_)
    mask = mask if mask is None or mask.ndim < 4 else mask[:, None]
    p, _ = probabilities(q.reshape(B, G, H // G, T, d), k, scale, cap, mask)
    return (p @ v[:, :, None]).reshape(B, H, T, -1)


def probabilities(q, k, scale: float, cap: float | None, mask) -> tuple[mx.array, mx.array | None]:
    """softmax of the scores of q (B, G, R, C, d) with k (B, G, S, d), in q's dtype, and, where
    they are capped, tanh(score / cap).
    """
    scores, bent = (q * scale) @ k[:, :, None].swapaxes(-1, -2), None
    if cap:
        bent = mx.tanh(scores / cap)
        scores = cap * bent
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return mx.softmax(scores, axis=-1, precise=True), bent


def causal_attention(
    q, k, v, scale: float, window: int | None, cap: float | None, packed: Packed | None = None
) -> mx.array:
    """Attention of every position to itself and to those before it, at most `window` in all and of
    its own example: q (B, H, T, d), k and v (B, G, T, d) -> (B, H, T, d).

    MLX holds all H T^2 scores for backward, but on CUDA for 16-bit types and heads of up to 128;
    and it does not leave out what a window does not see. Here scores exist for some positions at a
    time, and are computed again in backward.
    """
    T, d = q.shape[2:]
    if packed is not None:
        window = min(window or T, packed.longest)
    window = window if window is not None and window < T else None
    special = cap or window or packed is not None
    if not special and fused_backward(q):
        fill = [(0, 0), (0, 0), (0, -T % 128), (0, 0)]  # what its kernel asks for
        q, k, v = (mx.pad(a, fill) if T % 128 else a for a in (q, k, v))
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")
        return out[:, :, :T]
    starts = [] if packed is None else [packed.starts]
    return chunked_attention(scale, window, cap)(q, k, v, *starts)


def fused_backward(q: mx.array) -> bool:
    """Whether mx.fast's attention of such queries goes backward in one kernel: cuDNN's."""
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 128 and q.dtype in (mx.bfloat16, mx.float16)
    return fits and q.shape[2] >= 128 and mx.cuda.is_available() and on_gpu()


def on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


@functools.cache
def chunked_attention(scale: float, window: int | None, cap: float | None) -> typing.Callable:
    """`causal_attention`'s f(q, k, v) and f(q, k, v, starts), in chunks of positions."""

    def chunks(q, k):
        """(first position, end, first key) of each."""
        B, H, T, _ = q.shape
        seen = min(T, 2 * window) if window else T
        size = max(SCORES // (B * H * seen) // 64 * 64, 64)
        size = min(size, -(-window // 64) * 64) if window else size
        for i in range(0, T, size):
            yield i, min(i + size, T), max(0, i + 1 - window) if window else 0

    def mask(i, end, low, starts):
        query, key = mx.arange(i, end)[:, None], mx.arange(low, end)
        seen = key <= query
        seen = seen & (key > query - window) if window and end - low > window else seen
        if starts:  # (B, 1, 1, C, S)
            seen = seen & (key >= starts[0][:, None, None, i:end, None])
        return seen

    def grouped(a, k):  # (B, H, C, d) -> (B, G, R, C, d)
        return a.reshape(a.shape[0], k.shape[1], -1, *a.shape[2:])

    @mx.custom_function
    def run(q, k, v, *starts):
        outs = []
        for i, end, low in chunks(q, k):
            part = q[:, :, i:end]
            if outs:  # one after the other, or all scores would exist at once
                part = mx.depends(part, outs[-1])
            keys, values = k[:, :, low:end], v[:, :, low:end]
            if cap or window or starts:
                seen = mask(i, end, low, starts)
                p, _ = probabilities(grouped(part, k), keys, scale, cap, seen)
                outs.append((p @ values[:, :, None]).reshape(part.shape))
            else:
                outs.append(
                    mx.fast.scaled_dot_product_attention(
                        part, keys, values, scale=scale, mask="causal"
                    )
                )
        return mx.concatenate(outs, axis=2)

    @run.vjp
    def run_vjp(primals, cotangent, out):
        q, k, v, *starts = primals
        dq, dk, dv = [], mx.zeros(k.shape, mx.float32), mx.zeros(v.shape, mx.float32)
        for i, end, low in chunks(q, k):
            part, d = grouped(q[:, :, i:end], k), grouped(cotangent[:, :, i:end], k)
            if dq:
                part = mx.depends(part, [dq[-1], dk, dv])
            keys, values = k[:, :, low:end], v[:, :, low:end]
            p, bent = probabilities(part, keys, scale, cap, mask(i, end, low, starts))
            dp = (d @ values[:, :, None].swapaxes(-1, -2)).astype(mx.float32)
            mean = d.astype(mx.float32) * grouped(out[:, :, i:end], k).astype(mx.float32)
            ds = p.astype(mx.float32) * (dp - mean.sum(axis=-1, keepdims=True))
            ds = ds * (1 - mx.square(bent.astype(mx.float32))) if cap else ds
            ds = ds.astype(q.dtype)
            dq.append((scale * (ds @ keys[:, :, None])).reshape(q[:, :, i:end].shape))
            # the heads of a group share their keys, so they go as rows of one product
            p, ds, part, d = (a.flatten(2, 3) for a in (p, ds, part * scale, d))
            dk[:, :, low:end] += ds.swapaxes(-1, -2) @ part
            dv[:, :, low:end] += p.swapaxes(-1, -2) @ d
        zeros = [mx.zeros_like(a) for a in starts]
        dq = mx.concatenate(dq, axis=2).astype(q.dtype)
        return dq, dk.astype(k.dtype), dv.astype(v.dtype), *zeros

    return run


def exp(x: mx.array) -> mx.array:
    """e^x, below 2^60. The CPU backend's exp takes nearly three times as long as a power."""
    if not on_gpu() and x.dtype == mx.float32:
        return mx.power(2.0, mx.minimum(x * math.log2(math.e), 60.0))
    return mx.exp(x)


def silu(x: mx.array) -> mx.array:
    """x / (1 + e^-x); where `exp` stops growing the result is 0 to float32 anyway."""
    return x / (1 + exp(-x)) if x.dtype == mx.float32 else nn.silu(x)


def swiglu(gate: mx.array, up: mx.array, training: bool = True) -> mx.array:
    """up ⊙ gate σ(gate), with σ(x) = 1 / (1 + e^-x)."""
    return gated_unit(1.0, 0.0, on_gpu())[training](gate, up)


def geglu(gate: mx.array, up: mx.array, training: bool = True) -> mx.array:
    """up ⊙ gelu(gate); GELU by tanh is x σ(2 √(2/π) (x + 0.044715 x³))."""
    a = math.sqrt(8 / math.pi)
    return gated_unit(a, 0.044715 * a, on_gpu())[training](gate, up)


@functools.cache
def gated_unit(a: float, b: float, compiled: bool) -> tuple[typing.Callable, typing.Callable]:
    """`f(gate, up)` = up ⊙ gate σ(a gate + b gate³), in float32 inside, in one kernel if compiled:
    as it is, and for training with its own gradient, which costs a generated token 9 us a layer.

    Backward needs its arguments, which other gradients keep anyway; MLX's own keeps four more
    arrays of their size, and takes 2.4 times as long on the CPU.
    """

    def logistic(x):
        return 1 / (1 + exp(-(a * x + b * x * x * x if b else a * x)))

    def forward(gate, up):
        x = gate.astype(mx.float32)
        return (x * logistic(x) * up).astype(gate.dtype)

    def backward(gate, up, c):
        x, c = gate.astype(mx.float32), c.astype(mx.float32)
        s = logistic(x)
        y = x * s
        slope = y * (1 - s) * (a + 3 * b * x * x if b else a)
        return (c * up * (s + slope)).astype(gate.dtype), (c * y).astype(up.dtype)

    if compiled:
        forward, backward = (mx.compile(f, shapeless=True) for f in (forward, backward))
    run = mx.custom_function(forward)
    run.vjp(lambda primals, c, _: backward(*mx.depends(primals, [c]), c))  # see transient_product
    return forward, run


class MLP(nn.Module):
    def __init__(self, spec: Spec, inner: int | None = None):
        super().__init__()
        D, inner, bias = spec.hidden_size, inner or spec.intermediate_size, spec.mlp_bias
        if spec.fused:
            self.gate_up_proj = Linear(D, 2 * inner, bias=bias)
        else:
            self.gate_proj = Linear(D, inner, bias=bias)
            self.up_proj = Linear(D, inner, bias=bias)
        self.down_proj = Linear(inner, D, bias=bias)
        self.activation = swiglu if spec.hidden_act == "silu" else geglu

    def __call__(self, x):
        if "gate_up_proj" in self:
            gate, up = mx.split(self.gate_up_proj(x), 2, axis=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.activation(gate, up, self.training))


class SwitchLinear(nn.Module):
    """Linear layers of E experts, weight (E, O, I): x (N, 1, I), experts (N,) -> (N, 1, O)."""

    def __init__(self, inputs: int, outputs: int, experts: int):
        super().__init__()
        self.weight = mx.random.normal((experts, outputs, inputs)) * inputs**-0.5

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x, experts, sorted_indices=False):
        dtype = mx.float32 if mx.default_device().type == mx.DeviceType.cpu else x.dtype
        W = self.weight.astype(dtype).swapaxes(-1, -2)  # all that the CPU's product takes
        how = dict(rhs_indices=experts, sorted_indices=sorted_indices)
        return mx.gather_mm(x.astype(dtype), W, **how).astype(x.dtype)

    def to_quantized(self, group_size=None, bits=None, mode="affine", quantize_input=False):
        return QuantizedSwitchLinear(self.weight, group_size, bits, mode)


class QuantizedSwitchLinear(SwitchLinear):
    def __init__(self, weight: mx.array, group_size: int, bits: int, mode: str):
        nn.Module.__init__(self)
        self.group_size, self.bits, self.mode = group_size, bits, mode
        self.weight, self.scales, *biases = mx.quantize(weight, group_size, bits, mode)
        if biases:
            self.biases = biases[0]
        self.freeze()

    def __call__(self, x, experts, sorted_indices=False):
        how = dict(group_size=self.group_size, bits=self.bits, mode=self.mode)
        packed = self.weight, self.scales, self.get("biases")
        more = dict(rhs_indices=experts, transpose=True, sorted_indices=sorted_indices)
        return mx.gather_qmm(x, *packed, **more, **how).astype(x.dtype)


class SwitchGLU(nn.Module):
    """The experts: x (N, D) and experts (N, k) of each token -> (N, k, D)."""

    def __init__(self, spec: Spec):
        super().__init__()
        D, inner, E = spec.hidden_size, spec.moe_intermediate_size, spec.num_experts
        self.gate_proj = SwitchLinear(D, inner, E)
        self.up_proj = SwitchLinear(D, inner, E)
        self.down_proj = SwitchLinear(inner, D, E)
        self.activation = swiglu if spec.hidden_act == "silu" else geglu

    def __call__(self, x, experts):
        N, k = experts.shape
        order = mx.argsort(experts.flatten())
        at, x = experts.flatten()[order], x[order // k][:, None]
        gate, up = (p(x, at, sorted_indices=True) for p in (self.gate_proj, self.up_proj))
        inner = self.activation(gate, up, self.training)
        out = self.down_proj(inner, at, sorted_indices=True)[:, 0]
        return out[mx.argsort(order)].reshape(N, k, -1)


class SparseMLP(nn.Module):
    """Each token goes through the experts that its router finds likeliest, weighted by it."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.k, self.last = spec.num_experts_per_tok, spec.softmax_last
        self.norm = spec.norm_topk_prob
        self.gate = Linear(spec.hidden_size, spec.num_experts, bias=False)
        self.switch_mlp = SwitchGLU(spec)
        if inner := spec.shared_expert_intermediate_size:
            self.shared_expert = MLP(spec, inner)
            self.shared_expert_gate = Linear(spec.hidden_size, 1, bias=False)

    def __call__(self, x):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        scores = self.gate(x).astype(mx.float32)
        scores = scores if self.last else mx.softmax(scores, axis=-1)
        experts = mx.argpartition(-scores, self.k - 1, axis=-1)[:, : self.k]
        experts = mx.stop_gradient(experts)
        scores = mx.take_along_axis(scores, experts, axis=-1)
        if self.last:
            scores = mx.softmax(scores, axis=-1)
        elif self.norm:
            scores = scores / scores.sum(axis=-1, keepdims=True)
        y = (self.switch_mlp(x, experts) * scores[..., None].astype(x.dtype)).sum(axis=-2)
        if "shared_expert" in self:
            y = y + mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return y.reshape(shape)


# --- Gated delta nets -----------------------------------------------------------------------------


class DeltaCache:
    """What a gated delta net remembers: the last inputs of its convolution and its state."""

    def __init__(self, first: mx.array | None = None):
        self.offset, self.first, self.inputs, self.state = 0, first, None, None
        self.filled = 0 if first is None else int(first.max())

    def mask(self, T: int) -> mx.array | None:
        """Which of T new positions are text, (B, T); None if all are."""
        if self.offset >= self.filled:
            return None
        return mx.arange(self.offset, self.offset + T)[None] >= self.first[:, None]

    def arrays(self) -> list:
        return [self.inputs, self.state]


class DeltaNorm(nn.Module):
    """RMSNorm of each head, times silu of the gate."""

    def __init__(self, dims: int, spec: Spec):
        super().__init__()
        self.weight, self.eps = mx.ones((dims,)), spec.rms_norm_eps

    def __call__(self, x, gate):
        y = mx.fast.rms_norm(x, self.weight, self.eps).astype(mx.float32)
        return (y * silu(gate.astype(mx.float32))).astype(x.dtype)


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464)."""

    def __init__(self, spec: Spec):
        super().__init__()
        D, K = spec.hidden_size, spec.linear_conv_kernel_dim
        self.heads = spec.linear_num_key_heads, spec.linear_num_value_heads
        self.dims = spec.linear_key_head_dim, spec.linear_value_head_dim
        keys, values = (h * d for h, d in zip(self.heads, self.dims, strict=True))
        self.widths, channels = (keys, values), 2 * keys + values
        self.conv1d = nn.Conv1d(channels, channels, K, groups=channels, bias=False)
        self.in_proj_qkv = Linear(D, channels, bias=False)
        self.in_proj_z = Linear(D, values, bias=False)
        self.in_proj_b = Linear(D, self.heads[1], bias=False)
        self.in_proj_a = Linear(D, self.heads[1], bias=False)
        self.dt_bias = mx.ones((self.heads[1],))
        self.A_log = mx.log(mx.random.uniform(1e-3, 16, (self.heads[1],)))
        self.norm = DeltaNorm(self.dims[1], spec)
        self.out_proj = Linear(values, D, bias=False)

    def __call__(self, x, mask=None, cache: DeltaCache | None = None, packed: Packed | None = None):
        (B, T, _), (keys, _), (dk, dv) = x.shape, self.widths, self.dims
        mixed = self.in_proj_qkv(x)
        if mask is not None:
            mixed = mx.where(mask[..., None], mixed, 0)
        K = self.conv1d.weight.shape[1]
        if cache is not None and cache.inputs is not None:
            mixed = mx.concatenate([cache.inputs, mixed], axis=1)
        else:
            mixed = mx.pad(mixed, ((0, 0), (K - 1, 0), (0, 0)))
        if cache is not None:
            cache.inputs = mx.contiguous(mixed[:, 1 - K :])
        mixed = self.conv1d(mixed) if packed is None else self._packed_conv(mixed, packed)
        q, k, v = mx.split(silu(mixed), [keys, 2 * keys], axis=-1)
        q, k, v = (a.reshape(B, T, -1, d) for a, d in ((q, dk), (k, dk), (v, dv)))
        q, k = (mx.fast.rms_norm(a, None, 1e-6 / dk) for a in (q, k))  # unit length times sqrt(dk)
        q, k = q / dk, k * dk**-0.5
        beta = mx.sigmoid(self.in_proj_b(x)).astype(mx.float32)
        rate = -mx.exp(self.A_log.astype(mx.float32))
        decay = rate * nn.softplus((self.in_proj_a(x) + self.dt_bias).astype(mx.float32))
        if mask is not None:
            beta, decay = (mx.where(mask[..., None], a, 0) for a in (beta, decay))
        starts = None if packed is None else packed.starts
        out, state = gated_delta(q, k, v, decay, beta, cache.state if cache else None, starts)
        if cache is not None:
            cache.state, cache.offset = state, cache.offset + T
        gate = self.in_proj_z(x).reshape(B, T, -1, dv)
        return self.out_proj(self.norm(out.astype(x.dtype), gate).reshape(B, T, -1))

    def _packed_conv(self, mixed, packed: Packed):
        """conv1d of mixed (B, K - 1 + T, channels), each position within its own example."""
        taps, (_, T), positions = self.conv1d.weight, packed.starts.shape, packed.positions()
        K, total = taps.shape[1], 0
        for j in range(K):
            inside = (positions >= K - 1 - j)[..., None]
            total = total + mx.where(inside, mixed[:, j : j + T], 0) * taps[:, j, 0]
        return total


def gated_delta(
    q, k, v, decay, beta, state=None, starts=None, chunk: int = 64
) -> tuple[mx.array, mx.array]:
    """The gated delta rule: S ← e^decay S, S ← S + beta (v - S k) kᵀ, out = S q, for each position.

    q, k (B, T, Hk, Dk) of unit length (q scaled), v (B, T, Hv, Dv), decay and beta (B, T, Hv);
    -> out (B, T, Hv, Dv) in float32 and the state (B, Hv, Dv, Dk). Many positions go in chunks, as
    products of matrices (the WY form of Yang et al. 2024, arXiv:2406.06484): position by position
    would be thousands of small steps, in backward as well. With starts (B, T), where the example
    of each position begins, every example begins with a state of zeros.
    """
    B, T, H, dv = v.shape
    if state is None:
        state = mx.zeros((B, H, dv, k.shape[-1]), mx.float32)
    if T < 8 and starts is None:
        q, k, v = (a.astype(mx.float32) for a in (q, k, v))
        return tuple(mx.fast.gated_delta_update(q, k, v, mx.exp(decay), beta, state))
    count = -(-T // chunk)

    def chunked(a):  # (B, T, H or fewer, ...) -> (count, B, H, chunk, ...), the end filled up
        a = mx.repeat(a.astype(mx.float32), H // a.shape[2], axis=2)
        a = mx.pad(a, [(0, 0), (0, count * chunk - T)] + [(0, 0)] * (a.ndim - 2))
        a = a.reshape(B, count, chunk, *a.shape[2:])
        return a.transpose(1, 0, 3, 2, *range(4, a.ndim))

    q, k, v, decay, beta = (chunked(a) for a in (q, k, v, decay, beta))
    total = mx.cumsum(decay, axis=-1)  # log of what is left at each position of the chunk's start
    lower = mx.tri(chunk, dtype=mx.bool_)
    enters = leaves = 1.0  # whether a position still has, and will have, the state between chunks
    if starts is not None:
        began = chunked(starts[..., None])
        lower = lower & (began[..., :, None] == began[..., None, :])
        enters = began < mx.arange(count).reshape(-1, 1, 1, 1) * chunk
        leaves = began == began[..., -1:]
    left = mx.exp(mx.where(lower, total[..., :, None] - total[..., None, :], -mx.inf))
    reached = mx.exp(total) * enters
    system = beta[..., None] * (k @ k.swapaxes(-1, -2)) * left * mx.tri(chunk, k=-1)
    solve = unit_lower_inverse(system)
    wanted = solve @ (v * beta[..., None])
    held = solve @ (k * (beta * reached)[..., None])
    kept = k * (mx.exp(total[..., -1:] - total) * leaves)[..., None]
    last = reached[..., -1, None, None]
    new, states, state = delta_scan(wanted, held, kept, last, state)
    inside, reach = (q @ k.swapaxes(-1, -2)) * left, q * reached[..., None]
    out = reach @ states.swapaxes(-1, -2) + inside @ new
    out = out.transpose(1, 0, 3, 2, 4).reshape(B, count * chunk, H, dv)
    return out[:, :T], state


@mx.custom_function
def delta_scan(wanted, held, kept, last, state) -> tuple[mx.array, mx.array, mx.array]:
    """From chunk to chunk: new = wanted - held Sᵀ, S ← last S + newᵀ kept.

    wanted (n, ..., C, Dv), held and kept (n, ..., C, Dk), last (n, ..., 1, 1), state (..., Dv, Dk);
    -> new (n, ..., C, Dv), the states that chunks begin with (n, ..., Dv, Dk), and the last state.
    Backward is written out: MLX's gradient of taking one chunk is as large as all of them.
    """
    news, states = [], []
    for i in range(len(wanted)):
        states.append(state)
        news.append(wanted[i] - held[i] @ state.swapaxes(-1, -2))
        state = last[i] * state + news[-1].swapaxes(-1, -2) @ kept[i]
    return mx.stack(news), mx.stack(states), state


@delta_scan.vjp
def _delta_scan_vjp(primals, cotangents, outputs):
    (_, held, kept, last, _), (new, states, _) = primals, outputs
    dnew, dstates, d = cotangents
    news, after = [], []
    for i in reversed(range(len(held))):
        after.append(d)
        news.append(dnew[i] + kept[i] @ d.swapaxes(-1, -2))
        d = last[i] * d + dstates[i] - news[-1].swapaxes(-1, -2) @ held[i]
    dnew, after = mx.stack(news[::-1]), mx.stack(after[::-1])
    dlast = (after * states).sum(axis=(-1, -2), keepdims=True)
    return dnew, -(dnew @ states), new @ after, dlast, d


@mx.custom_function
def unit_lower_inverse(L: mx.array) -> mx.array:
    """(1 + L)⁻¹ for L (..., C, C) strictly lower, C a power of two; by blocks of twice the size."""
    *batch, C, _ = L.shape
    X = mx.ones((*batch, C, 1, 1), L.dtype)
    size = 1
    while size < C:
        n = C // (2 * size)
        blocks = L.reshape(*batch, n, 2, size, n, 2, size)
        corner = mx.stack([blocks[..., i, 1, :, i, 0, :] for i in range(n)], axis=-3)
        X = X.reshape(*batch, n, 2, size, size)
        A, D = X[..., 0, :, :], X[..., 1, :, :]
        upper = mx.concatenate([A, mx.zeros_like(A)], axis=-1)
        X = mx.concatenate([upper, mx.concatenate([-(D @ corner @ A), D], axis=-1)], axis=-2)
        size *= 2
    return X.reshape(*batch, C, C)


@unit_lower_inverse.vjp
def _unit_lower_inverse_vjp(primals, cotangent, X):
    return (-(X.swapaxes(-1, -2) @ cotangent @ X.swapaxes(-1, -2)),)


NORMS = {  # names of those before the mixer and the MLP, and of those after them
    "before": (("input_layernorm", "post_attention_layernorm"), ()),
    "after": ((), ("post_attention_layernorm", "post_feedforward_layernorm")),
    "around": (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}


class Block(nn.Module):
    def __init__(self, spec: Spec, i: int, ropes: dict):
        super().__init__()
        self.window, self.delta = spec.windows[i], spec.deltas[i]
        self.residual = spec.residual_multiplier
        self.experts_in = spec.experts_in if spec.sparse[i] else "mlp"
        if self.delta:
            self.linear_attn = GatedDeltaNet(spec)
        else:
            self.self_attn = Attention(spec, ropes[i], self.window)
        self[self.experts_in] = SparseMLP(spec) if spec.sparse[i] else MLP(spec)
        self.before, self.after = NORMS[spec.norms]
        for name in (*self.before, *self.after):
            self[name] = RMSNorm(spec.hidden_size, spec)

    def __call__(self, x, mask=None, cache=None, packed: Packed | None = None):
        mix = self.linear_attn if self.delta else self.self_attn
        for n, part in enumerate((lambda y: mix(y, mask, cache, packed), self[self.experts_in])):
            y = part(self[self.before[n]](x) if self.before else x)
            y = self[self.after[n]](y) if self.after else y
            x = x + (y if self.residual == 1 else y * self.residual)
        return x

    def make_cache(self, first: mx.array | None = None) -> KVCache | DeltaCache:
        return DeltaCache(first) if self.delta else KVCache(self.window, first)


class Stack(nn.Module):
    """Everything below the head; exists because parameter paths begin with `model.`"""

    def __init__(self, spec: Spec):
        super().__init__()
        made = {}
        for rope in spec.ropes:
            if rope and str(rope) not in made:
                made[str(rope)] = RoPE(rope, spec.max_position_embeddings)
        ropes = [made.get(str(rope)) for rope in spec.ropes]
        self.multiplier = spec.embedding_multiplier
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = [Block(spec, i, ropes) for i in range(spec.num_hidden_layers)]
        self.norm = RMSNorm(spec.hidden_size, spec)

    def embed(self, tokens: mx.array, embedding: nn.Module | None = None) -> mx.array:
        """tokens (B, T) -> (B, T, D), by this embedding or another in its place."""
        h = (embedding or self.embed_tokens)(tokens).astype(self.norm.weight.dtype)
        return h if self.multiplier == 1 else h * mx.array(self.multiplier, h.dtype)


class Model(nn.Module):
    """The decoder: `model(tokens (B, T), cache=None) -> logits (B, T, V)`.

    `hidden` and `head` are its two halves, so that a loss can go without all the logits. In
    training, of layers in `checkpoint` only the input is kept, and the rest computed again in
    backward.
    """

    def __init__(self, spec: Spec):
        super().__init__()
        self.spec, self.checkpoint = spec, frozenset()
        self.model = Stack(spec)
        if not spec.tie_word_embeddings:
            self.lm_head = Linear(spec.hidden_size, spec.vocab_size, bias=False)

    @property
    def layers(self) -> list:
        return self.model.layers

    def hidden(
        self, tokens: mx.array, cache: list | None = None, packed: Packed | None = None
    ) -> mx.array:
        """tokens (B, T) -> the last layer's normed output (B, T, D)."""
        T, masks = tokens.shape[1], {}
        h = self.model.embed(tokens)
        for i, layer in enumerate(self.layers):
            if cache:
                kind = layer.delta, layer.window
                if kind not in masks:
                    masks[kind] = cache[i].mask(T)
                h = layer(h, masks[kind], cache[i])
            elif self.training and i in self.checkpoint:
                h = checkpointed(layer, h, packed)
            else:
                h = layer(h, packed=packed)
        return self.model.norm(h)

    def head(self, h: mx.array) -> mx.array:
        """h (..., D) -> logits (..., V)."""
        tied = self.spec.tie_word_embeddings
        return self.finish(self.model.embed_tokens.as_linear(h) if tied else self.lm_head(h))

    def finish(self, logits: mx.array) -> mx.array:
        """What some families do to the head's product: scale it, cap it."""
        cap, scaling = self.spec.final_logit_softcapping, self.spec.logits_scaling
        logits = logits if scaling == 1 else logits / scaling
        return cap * mx.tanh(logits / cap) if cap else logits

    def __call__(self, tokens: mx.array, cache: list | None = None) -> mx.array:
        return self.head(self.hidden(tokens, cache))

    def make_cache(self, first: mx.array | None = None) -> list:
        """One cache per layer; `first` (B,): where each row's text begins, what is before it is
        filling.
        """
        return [layer.make_cache(first) for layer in self.layers]


def checkpointed(layer: nn.Module, h: mx.array, packed: Packed | None) -> mx.array:
    """layer(h), computed again in backward. Trainable parameters go in as arguments, else they get
    no gradient. What a layer draws at random it must draw from a key of its own.
    """

    def run(parameters, h):
        layer.update(parameters)
        return layer(h, packed=packed)

    return mx.checkpoint(run)(layer.trainable_parameters(), h)


# --- Loading --------------------------------------------------------------------------------------


def load(path: str, dtype: str | None = None) -> tuple[Model, "Tokenizer", dict]:
    """Loads a model for use.

    Args:
        path: a folder (config.json, *.safetensors, tokenizer files), a hub id, or a .gguf file.
        dtype: None keeps what the file has; a name from `DTYPES` converts; "auto" keeps it on a
            GPU and takes float32 on the CPU, whose half precision is 20 to 50 times slower.

    Returns:
        The model in evaluation mode with lazy weights, the tokenizer, and config.json as a dict.

    Raises:
        UserError: whatever is missing, foreign or does not fit, named with both shapes where there
        are two.
    """
    wanted, folder = wanted_type(dtype), find(path)
    if folder.suffix == ".gguf":
        weights, config, tokenizer = read_gguf(folder)
    else:
        config = read_config(folder)
        weights, tokenizer = read_weights(folder), None
    model, config = build(config, weights, str(path))
    if wanted:
        cast(model, wanted)
    return model, tokenizer or Tokenizer.from_folder(folder, config), config


def outline(path: str, dtype: str | None = None) -> tuple[Model, "Tokenizer", dict]:
    """`load` from the config and the tokenizer alone, all that comes of a hub model: its weights
    have shapes and types, and no values. A .gguf file is loaded.
    """
    wanted, folder = wanted_type(dtype), find(path, weights=False)
    if folder.suffix == ".gguf":
        return load(path, dtype)
    config = read_config(folder)
    if config.get("tie_word_embeddings") is None:
        config["tie_word_embeddings"] = config.get("model_type", "").startswith(TIED)
    model = Model(Spec.read(config))
    cast(model, DTYPES.get(config.get("torch_dtype") or config.get("dtype"), mx.bfloat16))

    def how(name, module):
        if "quantization" not in config or not hasattr(module, "to_quantized"):
            return False
        found = packing_of(config, name)
        return found if found and module.weight.shape[-1] % found["group_size"] == 0 else False

    nn.quantize(model, class_predicate=how)
    if wanted:
        cast(model, wanted)
    model.freeze()
    model.eval()
    return model, Tokenizer.from_folder(folder, config), config


def wanted_type(dtype: str | None) -> mx.Dtype | None:
    """What --dtype means here, see `load`."""
    if dtype == "auto":
        dtype = "float32" if mx.default_device().type == mx.DeviceType.cpu else None
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype: got {dtype!r}, wanted auto, {', '.join(DTYPES)}")
    return DTYPES.get(dtype)


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Converts every floating parameter, scales and biases of packed weights included."""

    def convert(name, a):  # a delta net's A_log is exponentiated twice
        return a if a.dtype not in FLOATS or name.endswith("A_log") else a.astype(dtype)

    model.update(tree_map_with_path(convert, model.parameters()))


def find(path: str, weights: bool = True) -> Path:
    """The local folder or .gguf file that `path` names; a hub id comes through the hub's cache,
    with its weights or without.
    """
    local = Path(path).expanduser()
    if local.is_file() and local.suffix != ".gguf":
        raise UserError(f"{path}: got a file, wanted a folder, a .gguf file or a hub id")
    if local.exists():
        return local
    if local.suffix == ".gguf":
        raise UserError(f"{path}: no such file")
    patterns = ["*.safetensors", "model.safetensors.index.json"] if weights else []
    return hub(path, ["config.json", *TOKENIZER_FILES, *patterns], "model")


def hub(name: str, patterns: list[str], kind: str) -> Path:
    """The local copy of a hub repository's files that match; kind is "model" or "dataset"."""
    parts = str(name).split("/")
    if len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~"):
        raise UserError(f"{name}: no such folder or file, and not a hub id (org/name)")
    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(name, repo_type=kind, allow_patterns=patterns)
        return Path(found)
    except Exception as error:  # its own, and those of whichever HTTP library it uses
        if not isinstance(error, OSError | ValueError) and not type(error).__module__.startswith(
            ("httpx", "httpcore", "requests", "urllib3", "huggingface_hub")
        ):
            raise
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{name}: no such folder, and the hub did not give it: {why}") from None


def read_json(path: Path) -> dict:
    try:
        return json_object(path, path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path.parent}: no {path.name} in it") from None


def json_object(path: Path | str, content: bytes) -> dict:
    try:
        found = json.loads(content)
    except ValueError as error:  # UnicodeDecodeError is one
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: got a JSON {type(found).__name__}, wanted keys and values")
    return found


def read_config(folder: Path) -> dict:
    """config.json with `text_config` flattened and `quantization` checked to be MLX's own."""
    config = read_json(folder / "config.json")
    if isinstance(text := config.get("text_config"), dict):
        config = {**{k: v for k, v in config.items() if k != "text_config"}, **text}
        plain = config.get("model_type", "").removesuffix("_text")
        if plain.startswith("qwen3_5"):  # mlx-lm's name for the text model
            config["model_type"] = plain
    theirs = config.get("quantization_config")
    if not config.get("quantization"):
        config.pop("quantization", None)
    if "quantization" not in config and theirs:
        if method := theirs.get("quant_method"):
            how = f" (format {theirs['format']})" if theirs.get("format") else ""
            raise UserError(
                f"{folder}: packed by {method!r}{how}, which MLX cannot read; "
                "use the original or an MLX conversion"
            )
        config["quantization"] = theirs
    return config


def read_weights(folder: Path) -> dict[str, mx.array]:
    """Every tensor of the folder's *.safetensors, lazily. A truncated file is found here."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    names = read_json(index).get("weight_map") or {} if index.exists() else {}
    files = [folder / n for n in sorted(set(names.values()))]
    files = files or sorted(folder.glob("model*.safetensors")) or [*folder.glob("*.safetensors")]
    if not files:
        raise UserError(f"{folder}: no *.safetensors in it")
    weights = {}
    for file in files:
        if not file.exists():
            raise UserError(f"{file}: named in {index.name} but not there")
        try:
            with safe_open(file, "np"):
                pass
            weights.update(mx.load(str(file)))
        except (SafetensorError, RuntimeError) as error:
            raise UserError(f"{file}: damaged or cut short: {error}") from None
    return weights


def text_weights(weights: dict[str, mx.array]) -> tuple[dict[str, mx.array], list[str]]:
    """A multimodal checkpoint's text tensors under a text model's names, and the others' names."""
    kept, ignored = {}, []
    wrapped = any("language_model." in k for k in weights)
    for name, array in weights.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        plain = name.replace("model.language_model.", "model.").replace("language_model.", "")
        if wrapped and plain == name and not name.startswith("lm_head.") or "mtp." in name:
            ignored.append(name)
        else:
            kept[plain] = array
    return kept, ignored


def build(config: dict, weights: dict[str, mx.array], where: str) -> tuple[Model, dict]:
    """The model for `config` holding `weights`; `where` names the source in errors."""
    weights, ignored = text_weights(weights)
    if ignored:
        some = ", ".join(ignored[:8]) + ", ..." * (len(ignored) > 8)
        said = f"{where}: ignoring {len(ignored)} tensors not of the text model: {some}"
        print(said, file=sys.stderr)
    tied = settle_head(config.get("tie_word_embeddings"), weights, where)
    config = {**config, "tie_word_embeddings": tied}
    spec = Spec.read(config)
    model, weights = Model(spec), arranged(weights, spec)

    def how(path, module):
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        found = packing_of(config, path, f"{where}: {path}", module.weight.shape[-1])
        if not found:
            raise UserError(
                f"{where}: {path} is packed but config.json has no `quantization` that says how"
            )
        return found

    nn.quantize(model, class_predicate=how)
    expected = dict(tree_flatten(model.parameters()))
    problems = [
        f"  {k}: not a parameter of this model, {a.shape}"
        for k, a in weights.items()
        if k not in expected
    ]
    for name, want in expected.items():
        if name not in weights:
            problems.append(f"  {name}: missing, wanted {want.shape}")
        elif weights[name].shape != want.shape:
            problems.append(f"  {name}: got {weights[name].shape}, wanted {want.shape}")
        elif (got := weights[name].dtype) != want.dtype and not {got, want.dtype} <= FLOATS:
            problems.append(f"  {name}: got {got}, wanted {want.dtype}")
    if problems:
        problems.insert(0, f"{where}: {len(problems)} tensors do not fit its config.json:")
        raise UserError("\n".join(problems))
    model.update(tree_unflatten(list(weights.items())))
    model.freeze()
    model.eval()
    return model, config


def packing_of(config: dict, path: str, where: str = "", width: int | None = None) -> dict | None:
    """{group_size, bits, mode} that config.json gives the layer at `path`, None if it is dense."""
    packing = config.get("quantization") or {}
    overrides = {k.replace("language_model.", ""): v for k, v in packing.items()}
    choice = overrides.get(path, True)
    choice = packing if choice is True else choice
    if not choice:
        return None
    keys = {k: choice.get(k) for k in ("group_size", "bits", "mode")}
    return check_packing(**keys, where=where, width=width)


ROUTERS = ".gate", ".shared_expert_gate"
EXPERT_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's names


def arranged(weights: dict[str, mx.array], spec: Spec) -> dict[str, mx.array]:
    """Hugging Face's layout as this file's and mlx-lm's: experts stacked, and what Qwen 3.5 needs.

    Its checkpoints have convolutions as (C, 1, K) and norms without the 1 they multiply by.
    """
    fresh = any(k.endswith("conv1d.weight") and a.shape[-1] != 1 for k, a in weights.items())
    offset = "input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm"
    found, experts = {}, {}
    for name, array in weights.items():
        stem, _, leaf = name.rpartition(".")
        where, _, rest = name.partition(".experts.")
        if name.endswith("conv1d.weight") and array.shape[-1] != 1:
            array = array.moveaxis(2, 1)
        elif fresh and leaf == "weight" and stem.endswith(offset):
            array = array + 1
        if rest in ("gate_up_proj", "down_proj"):  # stacked already
            parts = mx.split(array, 2, axis=-2) if "up" in rest else [array]
            names = ("gate_proj", "up_proj") if "up" in rest else ("down_proj",)
            found |= {
                f"{where}.switch_mlp.{n}.weight": a for n, a in zip(names, parts, strict=True)
            }
        elif rest and rest.count(".") == 2:
            e, part, leaf = rest.split(".")
            key = f"{where}.switch_mlp.{EXPERT_PARTS.get(part, part)}.{leaf}"
            experts.setdefault(key, {})[e] = array
        else:
            found[name] = array
    for key, each in experts.items():
        wanted = [str(e) for e in range(spec.num_experts)]
        if lost := [e for e in wanted if e not in each]:
            raise UserError(f"{key}: {len(lost)} of {len(wanted)} experts missing, {lost[0]} first")
        found[key] = mx.stack([each[e] for e in wanted])
    return found


def settle_head(tied: bool | None, weights: dict[str, mx.array], where: str) -> bool:
    """Whether the head is the embedding, by flag and by file; drops a head that repeats it."""
    head = [k for k in weights if k.startswith("lm_head.")]
    if tied is False and not head:
        raise UserError(f"{where}: tie_word_embeddings is false but there is no lm_head tensor")
    if not tied:
        return not head
    for name in head:
        twin = weights.get(name.replace("lm_head.", "model.embed_tokens."))
        if twin is None or not mx.array_equal(twin, weights[name]):  # other shapes are unequal
            raise UserError(
                f"{where}: tie_word_embeddings is true but {name} differs from the embedding"
            )
        del weights[name]
    return True


def check_packing(group_size=None, bits=None, mode=None, where="", width=None) -> dict:
    """{group_size, bits, mode} with defaults filled in, or UserError with what the mode allows."""
    mode = mode or "affine"
    if mode not in MODES:
        raise UserError(f"{where or '--mode'}: got {mode!r}, wanted one of {', '.join(MODES)}")
    all_bits, groups, (group, few) = MODES[mode]
    group_size, bits = group_size or group, bits or few
    for name, got, allowed in (("bits", bits, all_bits), ("group size", group_size, groups)):
        if got not in allowed:
            raise UserError(
                f"{where or mode}: {name} got {got}, wanted one of {allowed} for {mode}"
            )
    if width is not None and width % group_size:
        raise UserError(f"{where}: group size {group_size} does not divide its width {width}")
    return {"group_size": group_size, "bits": bits, "mode": mode}


# --- Tokenizer ------------------------------------------------------------------------------------


class Tokenizer:
    """A `tokenizers` tokenizer with what the model's files say about BOS, EOS and chat.

    Attributes:
        eos_ids: ids that end a generation; `eos_id` is the one to train on, None if there is none.
        files: file name -> bytes, what a saved model must carry along unchanged.
    """

    def __init__(self, files: dict[str, bytes], config: dict):
        from tokenizers import Tokenizer as Core

        self.files = files
        self.settings, generation = (
            json_object(n, files.get(n, b"{}"))
            for n in ("tokenizer_config.json", "generation_config.json")
        )
        try:
            self.core = Core.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # a bare Exception is what the library raises
            raise UserError(f"tokenizer.json: not a tokenizer: {error}") from None
        self.core.no_padding(), self.core.no_truncation()
        text = {
            k: v["content"] if isinstance(v, dict) else v
            for k, v in self.settings.items()
            if k.endswith("_token")
        }
        self.special = {k: v for k, v in text.items() if isinstance(v, str)}  # bos_token -> "<s>"
        self.bos_id = self.token_id(self.special.get("bos_token"))
        self.eos_id = self.token_id(self.special.get("eos_token"))
        listed = generation.get("eos_token_id")
        listed = config.get("eos_token_id") if listed is None else listed
        listed = listed if isinstance(listed, list) else [] if listed is None else [listed]
        self.eos_id = listed[0] if self.eos_id is None and listed else self.eos_id
        self.eos_ids = set(listed) | ({self.eos_id} - {None})

    @classmethod
    def from_folder(cls, folder: Path, config: dict) -> "Tokenizer":
        files = {n: (folder / n).read_bytes() for n in TOKENIZER_FILES if (folder / n).exists()}
        if "tokenizer.json" not in files:
            raise UserError(f"{folder}: no tokenizer.json in it")
        try:
            return cls(files, config)
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None

    def token_id(self, text: str | None) -> int | None:
        return None if text is None else self.core.token_to_id(text)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; with `special`, BOS and EOS as the model's files say, BOS never twice."""
        adds = self.settings.get("add_bos_token")  # where present it outranks tokenizer.json
        ids = self.core.encode(text, add_special_tokens=special and adds is not False).ids
        if special and self.bos_id is not None:
            while ids[:2] == [self.bos_id] * 2:
                del ids[0]
            if adds and ids[:1] != [self.bos_id]:
                ids.insert(0, self.bos_id)
        if special and self.eos_id is not None and self.settings.get("add_eos_token"):
            ids += [self.eos_id] * (ids[-1:] != [self.eos_id])
        return ids

    def decode(self, ids: list[int], special: bool = False) -> str:
        return self.core.decode(list(ids), skip_special_tokens=not special)

    @property
    def template(self) -> str | None:
        """Source of the chat template: its own file, else tokenizer_config.json's text or list."""
        if file := self.files.get("chat_template.jinja"):
            return file.decode()
        found = self.settings.get("chat_template")
        if found is None and (file := self.files.get("chat_template.json")):
            found = json_object("chat_template.json", file).get("chat_template")
        if isinstance(found, list):
            found = {t["name"]: t["template"] for t in found}
        return found.get("default") if isinstance(found, dict) else found

    def chat(self, messages: list[dict], tools: list | None = None, reply: bool = False) -> str:
        """The conversation as text by the model's template, with the assistant's header at the end
        if `reply`.

        Raises:
            UserError: no template, jinja2 not installed, or the template's own refusal.
        """
        if (source := self.template) is None:
            raise UserError(
                "this model has no chat template; use plain text, or give it a chat_template.jinja"
            )
        template = compile_template(source)
        try:
            return template.render(
                messages=messages, tools=tools, add_generation_prompt=reply, **self.special
            )
        except Exception as error:  # whatever the template or a value in it raises
            roles = "/".join(str(m.get("role")) for m in messages)
            raise UserError(f"the chat template refuses {roles}: {error}") from None


@functools.cache
def compile_template(source: str):
    """A chat template in jinja2's immutable sandbox, with the few helpers that templates expect."""
    try:
        import jinja2
        from jinja2 import ext, sandbox
    except ImportError:
        raise UserError("chat templates need jinja2: pip install 'mlx-dora[chat]'") from None

    class Generation(ext.Extension):  # marks assistant text for some trainers: keep what it holds
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, **how):
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    extensions = [ext.loopcontrols, Generation]
    env = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    env.filters["tojson"] = tojson
    env.globals.update(raise_exception=refuse, strftime_now=time.strftime)
    try:
        return env.from_string(source)
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template does not compile: {error}") from None


# --- GGUF -----------------------------------------------------------------------------------------

GGUF_ARCHITECTURES = "llama", "qwen2", "qwen3"
GGUF_TENSORS = {  # llama.cpp's names below blk.N. -> ours below model.layers.N.
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GGUF_SPLITS = {  # tokenizer.ggml.pre -> regular expression before byte-level BPE; None: digits
    "smollm": None,
    "llama-bpe": WORDS % "{1,3}",
    "llama3": WORDS % "{1,3}",
    "qwen2": WORDS % "",
    "deepseek-r1-qwen": WORDS % "",
    "gpt-2": "",
    "default": "",
}


def read_gguf(path: Path) -> tuple[dict[str, mx.array], dict, Tokenizer]:
    """Weights, config and tokenizer of a GGUF file, Q4_0, Q4_1 and Q8_0 staying packed as they are.

    llama.cpp stores q and k of `llama` models with each head's two RoPE halves interleaved; a row
    of W is a row of its packed form, so undoing it moves packed rows and requantizes nothing.
    """
    try:
        arrays, meta = mx.load(str(path), return_metadata=True)
    except RuntimeError as error:
        raise UserError(f"{path}: not a readable GGUF file: {error}") from None
    meta = {k: v.tolist() if isinstance(v, mx.array) else v for k, v in meta.items()}
    arch = meta.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise UserError(f"{path}: unsupported GGUF architecture {arch!r}; supported: {known}")
    if any(".ffn_gate_exps" in k or ".ffn_gate_inp" in k for k in arrays):
        raise UserError(f"{path}: mixture-of-experts GGUF files are not supported")
    config = gguf_config(meta, arch, arrays.pop("rope_freqs.weight", None), path)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    weights, halves = {}, (mx.float16, mx.bfloat16)
    stored = [a.dtype for k, a in arrays.items() if k.endswith((".scales", "_q.weight"))]
    storage = next((d for d in stored if d in halves), None)
    for name, array in arrays.items():
        stem, _, leaf = name.rpartition(".")
        where, _, kind = stem.rpartition(".")
        ours = GGUF_TENSORS.get(kind) if where else GGUF_TOP.get(kind)
        if ours is None:
            raise UserError(f"{path}: unknown tensor {name} {array.shape}")
        if arch == "llama" and kind in ("attn_q", "attn_k"):
            rows = array.reshape(heads[ours[-6:]], -1, 2, *array.shape[1:])  # (heads, half, 2, ...)
            array = rows.swapaxes(1, 2).reshape(array.shape)
        if storage and array.dtype == mx.float32:  # a wide norm or bias would promote all
            array = array.astype(storage)
        where = where.replace("blk", "model.layers") + "." if where else ""
        weights[f"{where}{ours}.{leaf}"] = array
    if arch == "llama":
        biased = {"attention_bias": "o_proj", "qkv_bias": "q_proj", "mlp_bias": "up_proj"}
        has = {k: any(n.endswith(f"{v}.bias") for n in weights) for k, v in biased.items()}
        config |= {k: True for k, found in has.items() if found}
    if packing := gguf_packing(weights):
        config["quantization"] = packing
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    return weights, config, gguf_tokenizer(meta, config, path)


def gguf_packing(weights: dict[str, mx.array]) -> dict:
    """MLX's `quantization` for tensors in groups of 32: the commonest bits, others as overrides."""
    scales = {k[:-7]: a for k, a in weights.items() if k.endswith(".scales")}
    bits = {k: weights[f"{k}.weight"].shape[-1] // a.shape[-1] for k, a in scales.items()}
    if not bits:
        return {}
    common = max(set(bits.values()), key=list(bits.values()).count)
    how = {b: {"group_size": 32, "bits": b, "mode": "affine"} for b in bits.values()}
    return how[common] | {k: how[b] for k, b in bits.items() if b != common}


def gguf_config(meta: dict, arch: str, factors: mx.array | None, path: Path) -> dict:
    """config.json from GGUF metadata."""

    def get(key, default=None):
        return meta.get(f"{arch}.{key}", default)

    try:
        config = {
            "model_type": arch,
            "hidden_size": get("embedding_length"),
            "num_hidden_layers": get("block_count"),
            "intermediate_size": get("feed_forward_length"),
            "num_attention_heads": get("attention.head_count"),
            "num_key_value_heads": get("attention.head_count_kv", get("attention.head_count")),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": get("context_length"),
            "rope_theta": get("rope.freq_base", 10000.0),
            "vocab_size": len(meta["tokenizer.ggml.tokens"]),
            "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        }
    except KeyError as error:
        raise UserError(f"{path}: GGUF metadata lacks {error}") from None
    if missing := [k for k, v in config.items() if v is None and not k.endswith("token_id")]:
        raise UserError(f"{path}: GGUF metadata lacks what gives {', '.join(missing)}")
    width = config["hidden_size"] // config["num_attention_heads"]
    config["head_dim"] = get("attention.key_length") or width
    if window := get("attention.sliding_window"):
        if arch != "llama":
            raise UserError(f"{path}: sliding windows in {arch} GGUF files are not supported")
        config |= {"model_type": "mistral", "sliding_window": window}
    kind = get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UserError(f"{path}: unsupported rope type {kind!r} in a GGUF file")
    if kind != "none":
        rope = {"rope_type": kind, "factor": get("rope.scaling.factor")}
        original = get("rope.scaling.original_context_length")
        rope |= {"original_max_position_embeddings": original} if original else {}
        config["rope_scaling"] = rope
    if factors is not None:  # Llama 3's scaling, stored as its result; its largest is the factor
        rope = {"rope_type": "llama3", "factor": factors.max().item()}
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 8192, "rope_theta": config["rope_theta"]}
        dims = config["head_dim"]
        wanted, _ = rope_frequencies(rope, dims, 8192)
        base, _ = rope_frequencies({**rope, "rope_type": "default"}, dims, 8192)
        if not np.allclose(wanted / base, np.array(factors), rtol=1e-3):
            raise UserError(
                f"{path}: its rope_freqs are not Llama 3's; convert the original checkpoint instead"
            )
        config["rope_scaling"] = rope
    return {k: v for k, v in config.items() if v is not None}


def gguf_tokenizer(meta: dict, config: dict, path: Path) -> Tokenizer:
    """Rebuilds tokenizer.json and tokenizer_config.json from GGUF metadata."""
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Core

    def get(key, default=None):
        return meta.get(f"tokenizer.ggml.{key}", default)

    tokens, kinds = meta["tokenizer.ggml.tokens"], get("token_type") or []
    vocab = {t: i for i, t in enumerate(tokens)}
    if get("model") == "gpt2":
        pre = get("pre", "default")
        if pre not in GGUF_SPLITS:
            raise UserError(
                f"{path}: unsupported pre-tokenizer {pre!r}; supported: {', '.join(GGUF_SPLITS)}"
            )
        merges = [tuple(m.split(" ", 1)) for m in get("merges", [])]
        core = Core(models.BPE(vocab, merges, ignore_merges=pre.startswith("llama")))
        split = GGUF_SPLITS[pre]
        first = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
        first += [pre_tokenizers.Digits(individual_digits=True)] if split is None else []
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
        core.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
        core.decoder = decoders.ByteLevel()
        if "qwen" in pre:
            core.normalizer = normalizers.NFC()
    elif get("model") == "llama":
        merges = spm_merges(tokens, get("scores"))
        how = dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        core = Core(models.BPE(vocab, merges, **how))
        prefix = [normalizers.Prepend("\u2581")] if get("add_space_prefix", True) else []
        core.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])
        strip = [decoders.Strip(" ", 1, 0)] if prefix else []
        plain = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        core.decoder = decoders.Sequence([*plain, *strip])
    else:
        raise UserError(
            f"{path}: unsupported tokenizer model {get('model')!r}; supported: gpt2, llama"
        )
    added = [
        AddedToken(t, special=k == 3, normalized=False)
        for t, k in zip(tokens, kinds, strict=False)
        if k in (3, 4)
    ]
    core.add_tokens(added)
    core.add_special_tokens([t for t in added if t.special])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (i := get(f"{key}_token_id")) is not None:
            settings[f"{name}_token"] = tokens[i]
    adds = get("model") == "llama" or get("pre") in ("llama-bpe", "llama3")  # llama.cpp's default
    settings["add_bos_token"] = bool(get("add_bos_token", adds))
    settings["add_eos_token"] = bool(get("add_eos_token", False))
    if template := meta.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    settings["model_max_length"] = config["max_position_embeddings"]
    files = {
        "tokenizer.json": core.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False),
    }
    return Tokenizer({k: v.encode() for k, v in files.items()}, config)


def spm_merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """BPE merges of a SentencePiece vocabulary: each piece's splits in two, best-scored first."""
    rank = {t: (-s, i) for i, (t, s) in enumerate(zip(tokens, scores, strict=True))}
    found = []
    for piece in tokens:
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        good = sorted((rank[a], rank[b], a, b) for a, b in splits if a in rank and b in rank)
        found += [(rank[piece], n, a, b) for n, (_, _, a, b) in enumerate(good)]
    return [(a, b) for _, _, a, b in sorted(found)]


PROBE = """I'm I'LL we've don't 1 22 333 4444 55555 3.14, 1,000  two   three\ttab
next\n\n\n x=[1,2];//#$%^ (a)b_c-d e.g. na\u00efve \u65e5\u672c \ud55c\uad6d e\u0301
\u0645\u0631\u062d \u041f\u0440\u0438\u0432\u0435\u0442 \U0001f469\u200d\U0001f680 \n \r\n end """


def write_gguf(file: Path, model: Model, config: dict, tokenizer: Tokenizer, outtype: str) -> None:
    """Writes the model for llama.cpp, by the gguf package; takes the model's arrays from it.

    Matrices become `outtype`: f32, f16, bf16 or q8_0 (f16 where rows are not of blocks of 32);
    norms and biases float32. One tensor at a time is held.

    Raises:
        UserError: something that GGUF or llama.cpp has no form for, by name.
    """
    try:
        import gguf
    except ImportError:
        raise UserError("writing GGUF needs the gguf package: pip install gguf") from None
    if outtype not in ("f32", "f16", "bf16", "q8_0"):
        raise UserError(f"--outtype: got {outtype!r}, wanted f32, f16, bf16 or q8_0")
    types, spec = gguf.GGMLQuantizationType, model.spec
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    meta = gguf_meta(arch, spec, config) | gguf_vocabulary(tokenizer, spec.vocab_size)
    meta["general.file_type"] = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}[outtype]
    unpack(model, mx.float32)
    names = {v: k for k, v in GGUF_TENSORS.items()} | {v: k for k, v in GGUF_TOP.items()}
    heads = {"q_proj": spec.num_attention_heads, "k_proj": spec.num_key_value_heads}
    arrays = {}
    if spec.rope["rope_type"] == "llama3":
        how = spec.head_dim, spec.max_position_embeddings
        scaled = rope_frequencies(spec.rope, *how)[0]
        factors = scaled / rope_frequencies({**spec.rope, "rope_type": "default"}, *how)[0]
        arrays["rope_freqs.weight"] = mx.array(factors.astype(np.float32))
    for name, array in tree_flatten(model.parameters()):
        path, _, leaf = name.rpartition(".")
        if arch == "llama" and (last := path.rpartition(".")[2]) in heads:
            array = array.reshape(heads[last], 2, -1, *array.shape[1:]).swapaxes(1, 2)
            array = array.reshape(-1, *array.shape[3:])
        *where, i = path.split(".")[:3]
        block = f"blk.{i}." if where == ["model", "layers"] else ""
        arrays[f"{block}{names[path.split('.', 3)[3] if block else path]}.{leaf}"] = array
    model.clear()
    writer, kinds = gguf.GGUFWriter(str(file), arch), {}
    for key, value in meta.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            adds = {bool: "bool", int: "uint32", float: "float32", str: "string"}
            getattr(writer, f"add_{adds[type(value)]}")(key, value)
    for name, array in arrays.items():
        kind = types[outtype.upper()] if array.ndim > 1 else types.F32
        if array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = types.F16
        block, size = gguf.GGML_QUANT_SIZES[kind]
        kinds[name] = kind
        dtype = np.dtype(np.float32)
        writer.add_tensor_info(name, array.shape, dtype, array.size // block * size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in list(arrays):
        array = np.array(arrays.pop(name).astype(mx.float32))
        if kinds[name] == types.F16 and np.abs(array).max() > np.finfo(np.float16).max:
            raise UserError(f"{name} has values beyond float16; use --outtype bf16")
        writer.write_tensor_data(gguf.quants.quantize(array, kinds[name]))
    writer.close()


def gguf_meta(arch: str, spec: Spec, config: dict) -> dict:
    """GGUF's metadata of a model, without its tokenizer's."""
    if arch not in GGUF_ARCHITECTURES:
        raise UserError(f"writing GGUF of {arch} models is not supported")
    window = next(iter(set(spec.windows)))
    if len(set(spec.windows)) > 1 or (window and arch != "llama"):
        raise UserError("writing GGUF of a model whose layers differ in windows is not supported")
    if window and window < spec.max_position_embeddings:
        print(
            f"warning: llama.cpp ignores this model's sliding window: after {window} tokens it "
            "attends to more than the model was trained for",
            file=sys.stderr,
        )
    meta = {
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_hidden_layers,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_attention_heads,
        "attention.head_count_kv": spec.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(spec.rms_norm_eps),
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.sliding_window": window,
        "rope.dimension_count": spec.rope["dims"],
        "rope.freq_base": float(spec.rope["rope_theta"]),
        "vocab_size": spec.vocab_size,
    }
    kind, rope = spec.rope["rope_type"], spec.rope
    if kind in ("linear", "yarn"):
        original = rope.get("original_max_position_embeddings")
        meta |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        meta["rope.scaling.original_context_length"] = original
    taken = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}
    taken.add("dims")
    if kind not in ("default", "linear", "yarn", "llama3") or (
        kind == "yarn" and set(rope) - taken
    ):
        raise UserError(f"writing GGUF with this RoPE is not supported: {rope}")
    meta = {f"{arch}.{k}": v for k, v in meta.items() if v is not None}
    name = config.get("_name_or_path") or config["model_type"]
    return meta | {"general.name": name, "general.type": "model", "general.quantization_version": 2}


def gguf_vocabulary(tokenizer: Tokenizer, rows: int) -> dict:
    """GGUF's metadata of a tokenizer, such that `gguf_tokenizer` splits PROBE as it does.

    GGUF has names for a few ways to split text before byte-level BPE, so they are tried.
    """

    def split(tokenizer: Tokenizer) -> tuple:
        core, text = tokenizer.core, PROBE
        text = core.normalizer.normalize_str(text) if core.normalizer else text
        words = core.pre_tokenizer.pre_tokenize_str(text) if core.pre_tokenizer else text
        return [w for w, *_ in words], tokenizer.encode(PROBE)

    data = json.loads(tokenizer.core.to_str())
    vocab = tokenizer.core.get_vocab(with_added_tokens=True)
    if data["model"].get("type") != "BPE" or max(vocab.values()) >= rows:
        raise UserError("writing GGUF of this tokenizer is not supported: it is no BPE, or too big")
    tokens, kinds = [f"[PAD{i}]" for i in range(rows)], [5] * rows  # 5: unused
    for text, i in vocab.items():
        tokens[i], kinds[i] = text, 1
    pieces = bool(data["model"].get("byte_fallback"))
    for name in (f"<0x{byte:02X}>" for byte in range(256)):
        if pieces and name in vocab:
            kinds[vocab[name]] = 6
    for added in data["added_tokens"]:
        kinds[added["id"]] = 3 if added["special"] else 4
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in data["model"]["merges"]]
    bos = tokenizer.encode("a")[:1] == [tokenizer.bos_id]
    meta = {"tokens": tokens, "token_type": kinds, "add_bos_token": bos}
    meta["add_eos_token"] = bool(tokenizer.settings.get("add_eos_token"))
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (i := tokenizer.token_id(tokenizer.special.get(f"{name}_token"))) is not None:
            meta[f"{key}_token_id"] = i
    if "eos_token_id" not in meta and tokenizer.eos_id is not None:
        meta["eos_token_id"] = tokenizer.eos_id
    if pieces:
        first = {a + b: -float(i) for i, (a, b) in reversed(list(enumerate(merges)))}
        meta |= {"model": "llama", "pre": "default"}
        meta["scores"] = [first.get(t, -float(len(merges))) for t in tokens]
        choices = [{"add_space_prefix": True}, {"add_space_prefix": False}]
    else:
        meta |= {"model": "gpt2", "merges": [" ".join(m) for m in merges]}
        choices = [{"pre": name} for name in GGUF_SPLITS]
    wanted = split(tokenizer)
    for choice in choices:
        said = {f"tokenizer.ggml.{k}": v for k, v in (meta | choice).items()}
        if tokenizer.template:
            said["tokenizer.chat_template"] = tokenizer.template
        if split(gguf_tokenizer(said, {"max_position_embeddings": 0}, Path())) == wanted:
            return said
    raise UserError(
        "GGUF has no name for how this tokenizer splits text; known: "
        + ", ".join(["llama (SentencePiece)", *GGUF_SPLITS])
    )


# --- Saving ---------------------------------------------------------------------------------------


class Output:
    """A folder that appears whole or not at all: written beside it, fsynced, renamed.

        with Output("fused_model") as folder: ...

    Of a path that ends in .gguf it is the one file of that name in the folder that appears.

    Raises:
        UserError: at once if the target exists or cannot be written, so that no work is lost later.
    """

    def __init__(self, path: str):
        self.path = Path(path)

    def __enter__(self) -> Path:
        try:
            if self.path.exists():
                raise UserError(f"{self.path} exists; give another --save-path or remove it")
            self.temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
            self.temporary.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror}") from None
        return self.temporary

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None:
                for file in self.temporary.iterdir():
                    sync(file)
                file = self.temporary / self.path.name
                (file if self.path.suffix == ".gguf" else self.temporary).rename(self.path)
                sync(self.path.parent)
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)


def sync(path: Path) -> None:
    """Forces a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Shards:
    """Writes a model folder that this suite and mlx-lm load, as its weights come in.

        shards = Shards(folder)
        shards.add(weights)                  as often as needed; lazy arrays are evaluated here
        shards.close(config, tokenizer)

    At most one shard is held in memory.
    """

    def __init__(self, folder: Path):
        self.folder, self.files, self.total = folder, [], 0
        self.held, self.size = {}, 0

    def add(self, weights: dict[str, mx.array]) -> None:
        """Takes the arrays over: `weights` is empty afterwards."""
        while weights:
            name = next(iter(weights))
            array = weights.pop(name)
            if self.held and self.size + array.nbytes > SHARD_BYTES:
                self._write()
            mx.eval(array)
            self.held[name], self.size = array, self.size + array.nbytes

    def _write(self) -> None:
        file = self.folder / f"shard-{len(self.files)}.safetensors"
        mx.save_safetensors(str(file), self.held, {"format": "mlx"})
        self.files.append((file, list(self.held)))
        self.total, self.held, self.size = self.total + self.size, {}, 0

    def close(self, config: dict, tokenizer: "Tokenizer") -> None:
        self._write()
        count, where = len(self.files), {}
        for n, (file, names) in enumerate(self.files, 1):
            part = f"-{n:05d}-of-{count:05d}" if count > 1 else ""
            file.rename(self.folder / f"model{part}.safetensors")
            where |= dict.fromkeys(names, f"model{part}.safetensors")
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": where}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        if "quantization" in config:  # mlx-lm writes both keys, and other tools look for the second
            config = {**config, "quantization_config": config["quantization"]}
        else:
            config = {k: v for k, v in config.items() if k != "quantization_config"}
        (self.folder / "config.json").write_text(json.dumps(config, indent=2))
        for name, content in tokenizer.files.items():
            (self.folder / name).write_bytes(content)


def save(folder: Path, weights: dict[str, mx.array], config: dict, tokenizer: Tokenizer) -> None:
    """Writes a model folder; `weights` is emptied on the way."""
    shards = Shards(folder)
    shards.add(weights)
    shards.close(config, tokenizer)


def save_model(folder: Path, model: Model, config: dict, tokenizer: Tokenizer) -> None:
    """`save` for a model, which is left without its weights."""
    weights = dict(tree_flatten(model.parameters()))
    model.update(tree_map(lambda a: mx.zeros(()), model.parameters()), strict=False)
    save(folder, weights, config, tokenizer)


def pack(
    model: Model, config: dict, group_size: int, bits: int, mode: str
) -> tuple[dict, list[str]]:
    """Quantizes every layer whose width the group divides, but no router, since to choose other
    experts costs more than its bytes; config lists the layers left as false.
    """
    config, skipped = pack_config(model, config, group_size, bits, mode)
    default = {k: config["quantization"][k] for k in ("group_size", "bits", "mode")}
    layers = {p for p, m in model.named_modules() if hasattr(m, "to_quantized")} - set(skipped)
    nn.quantize(model, **default, class_predicate=lambda p, m: p in layers)
    return config, skipped


def pack_config(model, config: dict, group_size, bits, mode: str) -> tuple[dict, list[str]]:
    """The config of `model` once it is packed, and the layers that stay dense."""
    default = check_packing(group_size, bits, mode)
    layers = {p: m for p, m in model.named_modules() if hasattr(m, "to_quantized")}
    routers = [p for p in layers if p.endswith(ROUTERS)]
    skipped = [p for p, m in layers.items() if m.weight.shape[-1] % default["group_size"]]
    skipped = sorted({*skipped, *routers})
    if len(skipped) == len(layers):
        widths = sorted({m.weight.shape[-1] for m in layers.values()})
        raise UserError(
            f"group size {default['group_size']} divides no layer's width; widths: {widths}"
        )
    return {**config, "quantization": default | dict.fromkeys(skipped, False)}, skipped


def unpack(module: nn.Module, dtype: mx.Dtype) -> None:
    """Replaces packed layers by dense ones."""
    dense = []
    for path, layer in module.named_modules():
        if "scales" not in layer:
            continue
        how = dict(group_size=layer.group_size, bits=layer.bits, mode=layer.mode, dtype=dtype)
        if isinstance(layer, nn.QuantizedEmbedding):
            new = Embedding(1, 1)
        elif isinstance(layer, SwitchLinear):
            new = SwitchLinear(1, 1, 1)
        else:
            new = Linear(1, 1, bias="bias" in layer)
        new.weight = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **how)
        if "bias" in layer:
            new.bias = layer.bias
        dense.append((path, new))
    module.update_modules(tree_unflatten(dense))


def unpacked_config(config: dict) -> dict:
    return {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}


# --- Generating -----------------------------------------------------------------------------------


def sample(logits: mx.array, temperature: float, top_p: float) -> mx.array:
    """logits (B, V) -> ids (B,): the likeliest at temperature 0, else from the nucleus top_p."""
    if temperature == 0:
        return mx.argmax(logits, axis=-1)
    logits = logits.astype(mx.float32) / temperature
    if top_p < 1:
        order = mx.argsort(-logits, axis=-1)
        probs = mx.softmax(mx.take_along_axis(logits, order, -1), axis=-1)
        outside = mx.cumsum(probs, axis=-1) - probs >= top_p  # mass before this token
        drawn = mx.random.categorical(mx.where(outside, -mx.inf, mx.log(probs)))
        return mx.take_along_axis(order, drawn[:, None], -1)[:, 0]
    return mx.random.categorical(logits)


def check_sampling(ids: list[int], temperature: float, top_p: float) -> None:
    if not ids:
        raise UserError("the prompt has no tokens, and this model begins with none of its own")
    if not (temperature >= 0 and 0 < top_p <= 1):
        got = f"temperature {temperature} and top_p {top_p}"
        raise UserError(f"got {got}, wanted temperature >= 0 and 0 < top_p <= 1")


def stream(
    model: Model,
    ids: list[int],
    stop: set[int],
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> typing.Iterator[int]:
    """Yields new token ids; the next is already being computed while the caller handles one.

    Raises:
        UserError: no token to begin with, or a sampling value out of its range.
    """
    check_sampling(ids, temperature, top_p)
    cache = model.make_cache()
    token = sample(prefill(model, mx.array([ids]), cache), temperature, top_p)
    mx.async_eval(token)
    for n in range(max_tokens):
        if n + 1 < max_tokens:
            following = sample(model(token[:, None], cache)[:, -1], temperature, top_p)
            mx.async_eval(following)
        if token.item() in stop:
            return
        yield token.item()
        if n + 1 < max_tokens:
            token = following


def prefill(model: Model, tokens: mx.array, cache: list, chunk: int = 512) -> mx.array:
    """tokens (B, T) into the cache, in pieces so that memory does not grow with T; the logits
    (B, V) of what comes next.
    """
    while tokens.shape[1] > chunk:
        model.hidden(tokens[:, :chunk], cache)
        mx.eval([c.arrays() for c in cache])
        tokens = tokens[:, chunk:]
    return model.head(model.hidden(tokens, cache)[:, -1])


def answers(
    model: Model,
    prompts: list[list[int]],
    stop: set[int],
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> list[list[int]]:
    """The new token ids of each prompt, all prompts going through the model together.

    Shorter prompts are filled up on the left with tokens that nothing sees.

    Raises:
        UserError: as `stream`.
    """
    check_sampling(min(prompts, key=len, default=[]), temperature, top_p)
    longest = max(map(len, prompts))
    first = [longest - len(p) for p in prompts]
    tokens = mx.array([[0] * n + p for n, p in zip(first, prompts, strict=True)])
    cache = model.make_cache(mx.array(first) if any(first) else None)
    token = sample(prefill(model, tokens, cache), temperature, top_p)
    found, going = [[] for _ in prompts], set(range(len(prompts)))
    for n in range(max_tokens):
        mx.async_eval(token)
        if n + 1 < max_tokens:
            following = sample(model(token[:, None], cache)[:, -1], temperature, top_p)
            mx.async_eval(following)
        for i, t in enumerate(token.tolist()):
            if i in going and t in stop:
                going.remove(i)
            elif i in going:
                found[i].append(t)
        if not going:
            break
        token = following
    return found


def text_pieces(tokenizer: Tokenizer, ids: typing.Iterator[int]) -> typing.Iterator[str]:
    """Text as it becomes certain: a piece waits while it ends in half a character."""
    seen, done = [], ""
    for i in ids:
        seen.append(i)
        text = tokenizer.decode(seen)
        if not text.endswith("\ufffd"):
            yield text[len(done) :]
            done = text
            if text.endswith("\n"):  # begin anew at a line's end: decoding stays linear
                # with one token kept, since some decoders drop a space at the beginning
                seen, done = [i], tokenizer.decode([i])
    if seen:
        yield tokenizer.decode(seen)[len(done) :]


def prompt_ids(tokenizer: Tokenizer, prompt: str, raw: bool = False) -> list[int]:
    """A prompt as token ids: one user turn if the model has a chat template, unless `raw`."""
    if raw or tokenizer.template is None:
        return tokenizer.encode(prompt)
    return tokenizer.encode(
        tokenizer.chat([{"role": "user", "content": prompt}], reply=True), special=False
    )


def size_of(model: nn.Module) -> tuple[int, int]:
    """(weights counted unpacked, bytes they take)."""
    count = nbytes = 0
    for _, layer in model.named_modules():
        for name, array in layer.items():
            if isinstance(array, mx.array) and not name.startswith("_"):
                nbytes += array.nbytes
                packed = name == "weight" and "scales" in layer
                if name not in ("scales", "biases"):
                    count += array.size * 32 // layer.bits if packed else array.size
    return count, nbytes


# --- Commands -------------------------------------------------------------------------------------


def info(model: str) -> None:
    """Prints what a model is: family, sizes, packing, tokenizer."""
    loaded, tokenizer, config = load(model)
    spec, (count, nbytes) = loaded.spec, size_of(loaded)
    packing = {
        k: v for k, v in config.get("quantization", {}).items() if not isinstance(v, dict | bool)
    }
    packed = [
        f"{m.bits}-bit {m.mode} group {m.group_size}"
        for _, m in loaded.named_modules()
        if "scales" in m
    ]
    kinds = ", ".join(f"{packed.count(k)} layers {k}" for k in sorted(set(packed)))
    print(
        f"model      {model}: {config['model_type']}, {spec.num_hidden_layers} layers, "
        f"width {spec.hidden_size}"
    )
    print(
        f"attention  {spec.num_attention_heads} heads of {spec.head_dim}, "
        f"{spec.num_key_value_heads} for keys and values"
    )
    print(
        f"context    {spec.max_position_embeddings}, rope {spec.rope['rope_type']}, "
        f"windows: {', '.join(sorted(set(map(str, spec.windows)))).lower()}"
    )
    if deltas := sum(spec.deltas):
        print(f"layers     {deltas} gated delta nets, {len(spec.deltas) - deltas} attention")
    if sparse := sum(spec.sparse):
        shared = ", one shared" if spec.shared_expert_intermediate_size else ""
        chosen = f"{spec.num_experts_per_tok} for a token"
        print(f"experts    {spec.num_experts} in each of {sparse} layers, {chosen}{shared}")
    print(
        f"weights    {count / 1e6:.1f} M, {nbytes / 1e6:.1f} MB, {nbytes * 8 / count:.2f} bits each"
    )
    print(f"packed     {kinds or 'no'}{f'; config {packing}' if packing else ''}")
    print(f"vocabulary {spec.vocab_size}, {'tied' if spec.tie_word_embeddings else 'untied'} head")
    print(
        f"tokenizer  bos {tokenizer.bos_id}, eos {sorted(tokenizer.eos_ids)}, "
        f"chat template: {'yes' if tokenizer.template else 'no'}"
    )


def quantize(
    model: str,
    save_path: str,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
) -> None:
    """Packs a dense model.

    Modes: affine (2, 3, 4, 5, 6, 8 bits, groups of 32, 64, 128), mxfp4, mxfp8, nvfp4.
    """
    check_packing(group_size, bits, mode)
    with Output(save_path) as folder:
        loaded, tokenizer, config = load(model)
        if "quantization" in config:
            raise UserError(
                f"{model} is packed already; dequantize it first, or start from the original"
            )
        config, skipped = pack(loaded, config, group_size, bits, mode)
        if skipped:
            print(
                f"left dense, routers or of a width no multiple of the group: {', '.join(skipped)}"
            )
        save_model(folder, loaded, config, tokenizer)
    print(f"wrote {save_path}")


def dequantize(model: str, save_path: str, dtype: str | None = None) -> None:
    """Unpacks a packed model into dense weights."""
    with Output(save_path) as folder:
        loaded, tokenizer, config = load(model, dtype)
        if "quantization" not in config:
            raise UserError(f"{model} is not packed")
        unpack(loaded, loaded.model.norm.weight.dtype)
        save_model(folder, loaded, unpacked_config(config), tokenizer)
    print(f"wrote {save_path}")


def convert(model: str, save_path: str, dtype: str | None = None, outtype: str = "f16") -> None:
    """Writes a GGUF file, hub model or folder as an MLX folder; packed weights keep their codes.

    To --save-path FILE.gguf it writes llama.cpp's format instead, with matrices as --outtype f32,
    f16, bf16 or q8_0; that needs the gguf package.
    """
    with Output(save_path) as folder:
        loaded, tokenizer, config = load(model, dtype)
        if Path(save_path).suffix == ".gguf":
            write_gguf(folder / Path(save_path).name, loaded, config, tokenizer, outtype)
        else:
            save_model(folder, loaded, config, tokenizer)
    print(f"wrote {save_path}")


def load_adapted(model: str, adapter: str, dtype: str | None) -> tuple[Model, Tokenizer, dict]:
    """`load` with an adapter on top, read first so that a wrong path costs no loading."""
    try:
        dora = __import__("dora")
    except ImportError:
        raise UserError("--adapter needs dora.py beside quant.py") from None
    try:
        dora.read_adapter(adapter)
        loaded, tokenizer, config = load(model, dtype)
        dora.load_adapter(loaded, adapter, config, here=model)
    except dora.UserError as error:
        raise UserError(str(error)) from None
    loaded.eval()
    return loaded, tokenizer, config


def generate(
    model: str,
    prompt: str | None = None,
    prompts: str | None = None,
    adapter: str | None = None,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    raw: bool = False,
    dtype: str = "auto",
) -> None:
    """Answers a prompt, printing text as it comes and tokens/s at the end.

    The prompt is one user turn in the model's chat template where it has one; --raw sends it as
    it stands. --prompts FILE has one on each line, which go through the model together; answers
    come as JSON lines.
    --adapter FILE_OR_FOLDER needs dora.py beside this file.
    """
    if (prompt is None) == (prompts is None):
        raise UserError("give --prompt TEXT, or --prompts FILE with one on each line")
    lines = []
    if prompts is not None:
        lines = [line for line in Path(prompts).read_text().splitlines() if line.strip()]
        if not lines:
            raise UserError(f"{prompts}: no prompt in it")
    loaded, tokenizer, _ = (
        load(model, dtype) if adapter is None else load_adapted(model, adapter, dtype)
    )
    mx.random.seed(seed)
    if lines:
        coded = [prompt_ids(tokenizer, line, raw) for line in lines]
        start = time.perf_counter()
        found = answers(loaded, coded, tokenizer.eos_ids, max_tokens, temperature, top_p)
        took, count = time.perf_counter() - start, sum(map(len, found))
        for line, ids in zip(lines, found, strict=True):
            row = {"prompt": line, "completion": tokenizer.decode(ids)}
            print(json.dumps(row, ensure_ascii=False))
        print(f"[{count} new tokens, {count / took:.1f} tokens/s]", file=sys.stderr)
        return
    ids, count, start, first = prompt_ids(tokenizer, prompt, raw), 0, time.perf_counter(), None

    def counted():
        nonlocal count, first
        for i in stream(loaded, ids, tokenizer.eos_ids, max_tokens, temperature, top_p):
            count, first = count + 1, first or time.perf_counter()
            yield i

    for piece in text_pieces(tokenizer, counted()):
        print(piece, end="", flush=True)
    now = time.perf_counter()
    rate = f"{(count - 1) / (now - first):.1f} tokens/s" if count > 1 else "no rate"
    took = (first or now) - start
    print(
        f"\n[{len(ids)} prompt tokens in {took:.2f} s, {count} new tokens, {rate}, "
        f"peak {mx.get_peak_memory() / 1e9:.2f} GB]",
        file=sys.stderr,
    )


if __name__ == "__main__":
    cli({f.__name__: f for f in (info, quantize, dequantize, convert, generate)})
