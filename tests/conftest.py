"""What the tests share: tiny random models as folders, and the command line as a user runs it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import quant  # noqa: E402

# what a shell starts in the background ignores Ctrl-C, and so would all that tests start
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PACKINGS = [
    *({"group_size": g, "bits": b, "mode": "affine"} for b in (2, 3, 4, 5, 6, 8) for g in (32, 64)),
    {"group_size": 128, "bits": 4, "mode": "affine"},
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    {"group_size": 16, "bits": 4, "mode": "nvfp4"},
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_config(family: str = "llama", **changes) -> dict:
    """Hidden 128, MLP 256, 2 layers, 4 heads, 2 for keys and values, vocabulary 300, untied."""
    config = {
        "model_type": family,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    if family == "qwen3":
        config["head_dim"] = 32
    return {k: v for k, v in (config | changes).items() if v is not None}


def tiny_tokenizer(bos: bool = False, template: str | None = None, **settings) -> dict[str, bytes]:
    """Files of a byte-level tokenizer of 261 ids: <s> 1, </s> 2, ChatML's marks 3, 4, bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    vocab = {t: i for i, t in enumerate([*special, *alphabet])}
    core = Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    if bos:
        core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"chat_template": template} if template else {}
    files = {
        "tokenizer.json": core.to_str(),
        "tokenizer_config.json": json.dumps(config | settings),
    }
    return {k: v.encode() for k, v in files.items()}


def write_model(
    folder: Path, config: dict | None = None, packing=None, dtype=mx.float32, seed=0, files=None
) -> Path:
    """A random model of `config` in `folder`, packed as `packing` says, with a tokenizer."""
    config = dict(config or tiny_config())
    mx.random.seed(seed)
    model = quant.Model(quant.Spec.read(config))
    # nothing at its special value: norms off one, biases off zero
    noisy = tree_map(lambda a: a + 0.05 * mx.random.normal(a.shape), model.parameters())
    model.update(noisy)
    model.set_dtype(dtype)
    if packing:
        nn.quantize(model, **packing)
        config["quantization"] = dict(packing)
    folder.mkdir(parents=True)
    tokenizer = quant.Tokenizer(files or tiny_tokenizer(), config)
    quant.save(folder, dict(tree_flatten(model.parameters())), config, tokenizer)
    return folder


def write_rows(folder: Path, **splits: list) -> Path:
    """<split>.jsonl for each of `splits`; a row is a dict, or a text written as it stands."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
        (folder / f"{split}.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def run_cli(module: str, *args, cwd=None, env=None, timeout=300) -> subprocess.CompletedProcess:
    """`python <module>.py args...` as a user types it; stdout and stderr as text."""
    command = [sys.executable, str(ROOT / f"{module}.py"), *map(str, args)]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        timeout=timeout,
        text=True,
        capture_output=True,
    )


def refused(done: subprocess.CompletedProcess, *said: str) -> None:
    """Exit 2 and one clear line on stderr that has every text of `said`; no traceback."""
    assert done.returncode == 2, done.stderr[-2000:]
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1 and "Traceback" not in done.stderr, done.stderr[-2000:]
    for text in said:
        assert text in done.stderr, f"{text!r} not in {done.stderr!r}"


@pytest.fixture(scope="session")
def dense(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "dense")


@pytest.fixture(scope="session")
def packed(tmp_path_factory) -> Path:
    """4-bit, group 32, with a ChatML template."""
    files = tiny_tokenizer(template=CHATML)
    return write_model(
        tmp_path_factory.mktemp("models") / "packed", packing=PACKINGS[4], files=files
    )


QUICK = {  # of tests that start processes and wait for what becomes of them; the rest are `network`
    "test_comm": "exact dtype barrier hypothesis halves nan overflow refused one_rank overlap",
    "test_launch": "all_well bad_hostfile command_line help_does",
    "test_nodes": "same_steps_as_one have_not_in_common",
}


def pytest_collection_modifyitems(items):
    for item in items:
        quick = any(word in item.name for word in QUICK.get(item.path.stem, "").split())
        slow = "slow" in item.keywords or "mlx" in item.name
        if item.path.stem in QUICK and (slow or not quick):
            item.add_marker("network")
