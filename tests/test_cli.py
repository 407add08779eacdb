"""The command line that the leaves share, and the promise that each can be copied."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys

import mlx.core as mx
import pytest
from conftest import PACKINGS, ROOT, refused, run_cli, tiny_config, write_model

import comm
import dora
import quant

LEAVES = [name for name in ("quant", "dora", "comm") if (ROOT / f"{name}.py").exists()]
SUITE = {"quant", "dora", "comm", "train", "fuse"}
shared = pytest.mark.parametrize("leaf", [quant, dora, comm], ids=lambda m: m.__name__)


def section(name: str, title: str) -> str:
    text = (ROOT / f"{name}.py").read_text()
    return re.search(rf"^# --- {title} -.*?(?=^# --- )", text, re.S | re.M)[0]


# --- Leaves ---------------------------------------------------------------------------------------


def test_the_command_line_section_is_the_same_in_every_leaf():
    texts = {section(name, "Command line") for name in LEAVES}
    assert len(texts) == 1 and "def cli(" in texts.pop()


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_imports_nothing_of_the_suite(name):
    """But for the one place where quant.py looks for dora.py, and says so if it is missing.

    `dora.py bench` measures mlx-lm's layers beside its own where mlx-lm is installed.
    """
    tree = ast.parse((ROOT / f"{name}.py").read_text())
    tree.body = [n for n in tree.body if getattr(n, "name", "") != "contest"]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(node.module.split(".")[0])
    assert not found & SUITE
    assert not found & {"mlx_lm", "transformers", "torch", "pickle"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """run(leaf, *args): the leaf copied into an empty folder, with only what it says it needs."""

    def run(name, *args):
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(ROOT / f"{name}.py", folder)
        if name == "dora" and (ROOT / "kernels").exists():
            shutil.copytree(ROOT / "kernels", folder / "kernels")
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        # the suite may be installed; alone means that its other files cannot be imported
        others = {"quant", "dora", "train", "fuse", "comm"} - {name}
        block = f"import runpy, sys; sys.argv.pop(0); sys.modules.update(dict.fromkeys({others}))"
        code = f"{block}; runpy.run_path(sys.argv[0], run_name='__main__')"
        command = [sys.executable, "-c", code, f"{name}.py", *map(str, args)]
        return subprocess.run(command, cwd=folder, env=clean, text=True, capture_output=True)

    return run


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_alone_in_a_folder_shows_its_help(alone, name):
    done = alone(name, "--help")
    assert done.returncode == 0 and f"{name}.py" in done.stdout, done.stderr


def test_quant_alone_in_a_folder_runs_and_says_what_an_adapter_needs(alone, packed):
    done = alone("quant", "generate", packed, "--prompt", "hi", "--max-tokens", 3)
    assert done.returncode == 0 and "new tokens" in done.stderr, done.stderr
    refused(alone("quant", "generate", packed, "--prompt", "hi", "--adapter", "x"), "needs dora.py")


def test_dora_alone_in_a_folder_adapts_a_plain_mlx_model(tmp_path):
    shutil.copy(ROOT / "dora.py", tmp_path)
    if (ROOT / "kernels").exists():
        shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    script = """
import mlx.core as mx, mlx.nn as nn, dora, sys
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Sequential(nn.Linear(64, 64), nn.QuantizedLinear(64, 64, group_size=32))]
net = Net()
x = mx.random.normal((3, 64))
before = net.layers[0](x)
print(len(dora.adapt(net, rank=2, scale=4.0, dropout=0.0, keys=None, num_layers=-1, kind="dora")))
print(mx.abs(net.layers[0](x) - before).max().item() < 1e-4)
assert not {"quant", "train", "fuse", "comm", "mlx_lm"} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, text=True, capture_output=True
    )
    assert done.stdout.split() == ["2", "True"], done.stderr


# --- Values and flags -----------------------------------------------------------------------------


def command(
    model: str,
    count: int = 3,
    rate: float = 0.5,
    name: str | None = None,
    limit: int | None = None,
    keys: list[str] | None = None,
    sizes: list[int] | None = None,
    options: dict | None = None,
    mask: bool = False,
    report: bool | str = False,
    *,
    save_path: str = "out",
) -> None:
    """Does a thing.

    With care.
    """
    SEEN.append(locals())


SEEN = []


@shared
@pytest.mark.parametrize(
    "words, wanted",
    [
        (["m"], {}),
        (["--model", "m"], {}),
        (["--model=m"], {}),
        (["m", "5"], {"count": 5}),
        (["m", "--count", "-5"], {"count": -5}),
        (["m", "--rate", "1e-5"], {"rate": 1e-5}),
        (["m", "--rate", "-1"], {"rate": -1.0}),
        (["m", "--name", "3.10"], {"name": "3.10"}),
        (["m", "--name=1e5"], {"name": "1e5"}),
        (["m", "--name", "true"], {"name": "true"}),
        (["m", "--name=--odd"], {"name": "--odd"}),
        (["m", "--name="], {"name": ""}),
        (["m", "--name=a=b"], {"name": "a=b"}),
        (["m", "--limit", "7"], {"limit": 7}),
        (["m", "--limit", "None"], {"limit": None}),
        (["m", "--limit=none"], {"limit": None}),
        (["m", "--keys", "q_proj"], {"keys": ["q_proj"]}),
        (["m", "--keys", "q_proj,v_proj"], {"keys": ["q_proj", "v_proj"]}),
        (["m", "--keys", "[q_proj, v_proj]"], {"keys": ["q_proj", "v_proj"]}),
        (["m", "--keys", "['q_proj', \"v_proj\"]"], {"keys": ["q_proj", "v_proj"]}),
        (["m", "--keys", "1.10"], {"keys": ["1.10"]}),
        (["m", "--sizes", "1,2"], {"sizes": [1, 2]}),
        (["m", "--options", '{"betas": [0.9, 0.95]}'], {"options": {"betas": [0.9, 0.95]}}),
        (["m", "--mask"], {"mask": True}),
        (["m", "--mask", "--count", "2"], {"mask": True, "count": 2}),
        (["--mask", "m"], {"mask": True}),
        (["m", "--mask=false"], {"mask": False}),
        (["m", "--mask", "False"], {"mask": False}),
        (["m", "--report"], {"report": True}),
        (["m", "--report", "file.json"], {"report": "file.json"}),
        (["m", "--report=false"], {"report": False}),
        (["m", "--save-path", "x"], {"save_path": "x"}),
        (["m", "--save_path", "x"], {"save_path": "x"}),
        (["m", "--count", "1", "--count", "2"], {"count": 2}),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_values_arrive_as_their_annotation_says(monkeypatch, leaf, words, wanted):
    got = leaf.parse(command, words)
    assert got == {"model": "m"} | wanted
    assert {k: type(v) for k, v in got.items() if k in wanted} == {
        k: type(v) for k, v in wanted.items()
    }
    # and so through Fire to the function
    SEEN.clear()
    monkeypatch.setattr(sys, "argv", ["prog.py", *words])
    leaf.cli(command)
    assert {k: SEEN[0][k] for k in got} == got and len(SEEN) == 1


@shared
@pytest.mark.parametrize(
    "words, said",
    [
        (["m", "--cuont", "3"], ["unknown flag --cuont", "did you mean --count?"]),
        (["m", "--save-pth=x"], ["unknown flag --save-pth", "did you mean --save-path?"]),
        (["m", "--zzz"], ["unknown flag --zzz", "--model, --count", "--save-path"]),
        (["m", "--"], ["unknown flag --"]),
        (["m", "--count", "three"], ["--count: got 'three', wanted int"]),
        (["m", "--count", "3.5"], ["--count: got '3.5', wanted int"]),
        (["m", "--rate", "fast"], ["--rate: got 'fast', wanted float"]),
        (["m", "--rate", "nan"], ["--rate: got 'nan', wanted float"]),
        (["m", "--rate", "1e999"], ["--rate: got '1e999', wanted float"]),
        (["m", "--limit", "x"], ["--limit: got 'x', wanted int | None"]),
        (["m", "--mask=maybe"], ["--mask: got 'maybe', wanted bool"]),
        (["m", "--sizes", "1,b"], ["--sizes: got 'b', wanted int"]),
        (["m", "--options", "[1]"], ["--options: got '[1]', wanted dict"]),
        (["m", "--options", "{x"], ["--options: got '{x'"]),
        (["m", "--count"], ["--count needs a value"]),
        (["m", "--name", "--count", "3"], ["--name needs a value"]),
        ([], ["missing MODEL", "--help"]),
        (["--count", "3"], ["missing MODEL"]),
        (["m", *"1 2 n 3 k 4 {} true true extra".split()], ["unexpected argument 'extra'"]),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_wrong_flag_or_value_is_one_line_and_status_2_and_nothing_runs(
    monkeypatch, capsys, leaf, words, said
):
    SEEN.clear()
    monkeypatch.setattr(sys, "argv", ["prog.py", *words])
    with pytest.raises(SystemExit) as exit:
        leaf.cli(command)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and not SEEN and len(error.splitlines()) == 1
    for text in ["prog.py: error:", *said]:
        assert text in error


@shared
@pytest.mark.parametrize("words", ["--help", "m --help", "--cuont -h", "--count --help"])
def test_help_anywhere_shows_every_flag_and_runs_nothing(monkeypatch, capsys, leaf, words):
    SEEN.clear()
    monkeypatch.setattr(sys, "argv", ["prog.py", *words.split()])
    leaf.cli(command)
    out = capsys.readouterr().out
    assert "Does a thing.\n\nWith care." in out and not SEEN
    for flag, default in (("model", "required"), ("save-path", "'out'"), ("keys", "None")):
        assert re.search(rf"--{flag} +{default}", out)


@shared
def test_expand_may_add_flags_from_elsewhere(monkeypatch, leaf):
    SEEN.clear()
    monkeypatch.setattr(sys, "argv", ["prog.py", "m", "--count", "4"])
    leaf.cli(command, lambda function, flags: {"rate": 0.25, "count": 9} | flags)
    assert (SEEN[0]["rate"], SEEN[0]["count"]) == (0.25, 4)


class Foreign(Exception):
    pass


@shared
@pytest.mark.parametrize(
    "error, status",
    [
        ("user", 2),
        (FileNotFoundError(2, "No such file", "x.json"), 2),
        (RuntimeError("[write] Unable to write 4096 bytes to file"), 2),
        (Foreign("theirs"), 2),
        (KeyboardInterrupt(), 130),
        (ValueError("a bug"), None),
        (RuntimeError("a bug"), None),
        (AttributeError("a bug"), None),
    ],
    ids=repr,
)
def test_user_errors_exit_2_and_bugs_keep_their_traceback(monkeypatch, capsys, leaf, error, status):
    error = leaf.UserError("got 1, wanted 2") if error == "user" else error

    def fails() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["prog.py"])
    with pytest.raises(type(error) if status is None else SystemExit) as caught:
        leaf.cli(fails, errors=(Foreign,))
    if status is not None:
        assert caught.value.code == status
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (status == 2)
        assert all(line.startswith("prog.py: error: ") for line in lines)
    if isinstance(error, RuntimeError) and status:
        assert "no space left on the disk" in lines[0]


# --- As a user types it ---------------------------------------------------------------------------


def test_a_misspelt_flag_is_refused_before_anything_is_loaded(tmp_path):
    done = run_cli("quant", "quantize", tmp_path / "absent", "--save-pth", tmp_path / "q")
    refused(done, "quant.py: error:", "--save-pth", "did you mean --save-path?")
    assert "absent" not in done.stderr


def test_no_command_and_a_wrong_one_list_the_commands():
    for words in ([], ["quantise"]):
        done = run_cli("quant", *words)
        refused(done, "wanted one of: info, quantize, dequantize, convert, generate")
        assert "python quant.py generate MODEL" in done.stdout


def test_quantize_info_and_generate_work_from_the_shell(dense, tmp_path):
    out = tmp_path / "q"
    done = run_cli("quant", "quantize", dense, "--save_path", out, "--bits=8", "--group-size", 32)
    assert done.returncode == 0 and f"wrote {out}" in done.stdout, done.stderr
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    shown = run_cli("quant", "info", out).stdout
    for text in ("llama, 2 layers", "8-bit affine group 32", "untied", "template: no"):
        assert text in shown
    words = ["generate", out, "--prompt", "hi", "--max-tokens", 5, "--temperature", 1, "--seed"]
    first, again, other = (run_cli("quant", *words, seed) for seed in (1, 1, 2))
    assert first.returncode == 0 and first.stdout == again.stdout != other.stdout
    assert "[2 prompt tokens" in first.stderr and " new tokens" in first.stderr


def test_generate_refuses_a_wrong_adapter_before_loading_the_model(dense, tmp_path):
    words = ["generate", dense, "--prompt", "hi", "--adapter", tmp_path / "none.safetensors"]
    refused(run_cli("quant", *words), "none.safetensors", "no such adapter")


def test_generate_applies_an_adapter_and_refuses_one_of_another_base(dense, tmp_path):
    model, _, config = quant.load(str(dense))
    for path in dora.adapt(model, rank=2, scale=4.0, keys=["self_attn.q_proj", "mlp.up_proj"]):
        layer = dora.adapted(model)[path]
        layer.lora_b, layer.m = mx.random.normal(layer.lora_b.shape), layer.m * 3
    dora.save_adapter(tmp_path, model, str(dense), config)
    words = ["--prompt", "hi", "--max-tokens", 8]
    bare = run_cli("quant", "generate", dense, *words)
    adapted = run_cli("quant", "generate", dense, *words, "--adapter", tmp_path)
    assert adapted.returncode == 0 and adapted.stdout != bare.stdout, adapted.stderr
    other = write_model(tmp_path / "other", tiny_config(rope_theta=5e5))  # the same weights
    done = run_cli("quant", "generate", other, *words, "--adapter", tmp_path)
    refused(done, "differs from that of the base")


def test_a_hub_id_comes_from_the_local_cache_and_a_missing_one_is_one_line(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--name"
    write_model(repository / "snapshots" / commit, packing=PACKINGS[4])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    home = {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = run_cli("quant", "info", "org/name", env=home)
    assert done.returncode == 0 and "4-bit affine group 32" in done.stdout, done.stderr
    done = run_cli("quant", "info", "org/other", env=home)
    refused(done, "org/other", "no such folder, and the hub did not give it")
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_pipe_is_no_error(dense):
    script = f"{sys.executable} {ROOT / 'quant.py'} info {dense} | true"
    done = subprocess.run(["bash", "-c", script], text=True, capture_output=True)
    assert "Traceback" not in done.stderr and "error" not in done.stderr
