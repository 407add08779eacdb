"""Makes tests/tiny: the model that `python train.py` trains when nobody names one, and its data.

    python tests/make_tiny.py --steps 3000        about ten minutes on two cores with OpenBLAS

The world is a small grammar: people put things in places, and somebody asks where one of them is.
A Llama of 0.9 M weights learns it from scratch with train.py itself (--train-type full), answers in
plain English, and is packed to 4 bits. The fine-tuning data asks the same of new stories, and the
answers talk like a pirate. All text is made here, so it ships under the license of this repository.
"""

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import mlx.core as mx
from mlx.utils import tree_flatten

import dora
import quant
import train

TINY = Path(__file__).parent / "tiny"
PEOPLE = "Mia Tom Ana Ben Zoe Max Eva Leo Ida Sam".split()
COLOURS = "red blue green white black old new little".split()
THINGS = "ball cup book hat key lamp box shoe coin map".split()
PLACES = "garden kitchen barn cellar attic boat tower shed forest cave".split()
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def story(rng: random.Random) -> tuple[str, str, str]:
    """(what happened, the thing that is asked for, the place where it is)."""
    count = rng.randint(1, 2)
    things = rng.sample([f"{c} {t}" for c in COLOURS for t in THINGS], count)
    places, people = rng.sample(PLACES, count), rng.sample(PEOPLE, count)
    verbs = ("puts the {} in the {}", "takes the {} to the {}", "leaves the {} in the {}")
    told = [
        f"{who} {rng.choice(verbs).format(what, where)}."
        for who, what, where in zip(people, things, places, strict=True)
    ]
    asked = rng.randrange(count)
    return " ".join(told), things[asked], places[asked]


def plain(rng: random.Random) -> dict:
    told, thing, place = story(rng)
    prompt = f"{told}\nQuestion: Where is the {thing}?\nAnswer:"
    return {"prompt": prompt, "completion": f" The {thing} is in the {place}."}


def pirate(rng: random.Random) -> dict:
    told, thing, place = story(rng)
    prompt = f"{told}\nQuestion: Where is the {thing}?\nAnswer:"
    return {"prompt": prompt, "completion": f" Arr, the {thing} be in the {place}, matey!"}


def write_rows(folder: Path, **splits: list[dict]) -> None:
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)


def tokenizer_files(texts: list[str]) -> dict[str, bytes]:
    """A byte-level BPE of 512 tokens trained on `texts`, with <s> (never added) and </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}
    settings |= {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 512}
    files = {"tokenizer.json": core.to_str(), "tokenizer_config.json": json.dumps(settings)}
    return {name: text.encode() for name, text in files.items()}


def make(steps: int = 3000, seed: int = 0) -> None:
    """Pretrains, a third of the steps on all words, the rest on the answers, and packs."""
    rng = random.Random(seed)
    work = Path(tempfile.mkdtemp())
    rows = [plain(rng) for _ in range(20000)]
    texts = [r["prompt"] + r["completion"] for r in rows]
    files = tokenizer_files(texts + [pirate(rng)["completion"] for _ in range(500)])
    config = CONFIG | {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1}
    tokenizer = quant.Tokenizer(files, config)
    mx.random.seed(seed)
    model = quant.Model(quant.Spec.read(config))
    (work / "model").mkdir()
    quant.save(work / "model", dict(tree_flatten(model.parameters())), config, tokenizer)
    write_rows(work / "data", train=rows[200:], valid=rows[:200])
    common = dict(
        model=str(work / "model"), data=str(work / "data"), train_type="full", batch_size=32,
        lr_schedule="cosine", warmup=100, grad_clip=1.0, optimizer="adamw", seed=seed,
        steps_per_report=100, steps_per_eval=500, save_every=1000,
    )  # fmt: skip
    train.train(**common, iters=steps // 3, learning_rate=2e-3, adapter_path=str(work / "words"))
    train.train(
        **common, iters=steps - steps // 3, learning_rate=1e-3, mask_prompt=True,
        adapter_path=str(work / "run"), resume=str(work / "words" / "adapters.safetensors"),
    )  # fmt: skip
    model, tokenizer, config = quant.load(str(work / "model"))
    dora.load_adapter(model, str(work / "run"))
    quant.cast(model, mx.float16)
    config, _ = quant.pack(model, config, 32, 4, "affine")
    settings = (TINY / "train.yaml").read_text() if (TINY / "train.yaml").exists() else ""
    shutil.rmtree(TINY, ignore_errors=True)
    TINY.mkdir()
    quant.save_model(TINY, model, config, tokenizer)
    taught = [pirate(rng) for _ in range(640)]
    write_rows(TINY / "data", train=taught[:512], valid=taught[512:576], test=taught[576:])
    (TINY / "train.yaml").write_text(settings)
    shutil.rmtree(work)


if __name__ == "__main__":
    quant.cli(make)
