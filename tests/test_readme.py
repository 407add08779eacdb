"""README's commands, run as written: the first two by .ci/run, the others here."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT


def blocks() -> list[str]:
    """README's ```sh blocks, in order."""
    text = (ROOT / "README.md").read_text()
    return re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_readme_is_short_and_begins_with_a_command():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 200 and "```sh" in lines[:14]
    main_job, tests = blocks()[0].splitlines()
    assert main_job.endswith("python train.py") and tests.endswith("-m pytest")


def test_commands_do_what_readme_says(tmp_path):
    for name in ("quant.py", "dora.py", "comm.py", "train.py", "fuse.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tests" / "tiny", tmp_path / "tests" / "tiny")
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    shown = ""
    for command in ["python train.py", *blocks()[1:]]:
        command = command.replace(".venv/bin/python", "python")
        path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path}
        done = subprocess.run(
            ["bash", "-ec", command], cwd=tmp_path, env=env, text=True, capture_output=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        shown += done.stdout
    before, after = (float(x) for x in re.findall(r"validation loss ([\d.]+)", shown)[:2])
    assert after < before / 4
    assert re.search(r"after: .* -> 'Arr, the .* be in the .*, matey!'", shown)
    assert "Arr, the red ball be in the garden, matey!" in shown  # the fused model's own answer


@pytest.mark.slow
def test_wheel_runs_from_any_folder(tmp_path):
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", env], check=True)
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(
        ".git", ".venv", "__pycache__", "build", "*.egg-info", ".gpu_pack"
    )
    shutil.copytree(ROOT, source, ignore=ignore)
    pip = [env / "bin" / "pip", "install", "-q"]
    wheel = [env / "bin" / "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, source]
    subprocess.run(wheel, check=True)
    subprocess.run([*pip, next(tmp_path.glob("mlx_dora-*.whl"))], check=True)
    python, elsewhere = env / "bin" / "python", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for words in (
        ["train", "--iters", "2", "--sample-tokens", "0"],
        ["fuse", "adapters/adapters.safetensors"],
        ["quant", "generate", "fused_model", "--prompt", "Ana"],
        ["dora", "info", "adapters"],
    ):
        done = subprocess.run([python, "-m", *words], cwd=elsewhere, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
