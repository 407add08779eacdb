"""Rows, encoding, masks and batches of train.py."""

import json
import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from conftest import CHATML, ROOT, tiny_tokenizer, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

import quant
import train
from quant import UserError

BOS, EOS, MARK = 1, 2, 4
QWEN3 = (  # shows the thinking of the last reply only
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% set words = m.content %}{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{% set words = words.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + words + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PHI3 = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
PLAIN = (  # nothing special between the turns
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PLAIN_THINKING = QWEN3.replace("<|im_start|>", "# ").replace("<|im_end|>", "")
TRIMMED = CHATML.replace("m['content']", "m['content'] | trim")
STARTED = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<unk>\n")
CALLS = (  # a call opens with a special token of its own
    "{% if tools %}{{ 'tools ' + tools | tojson + '\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}{% if m.tool_calls %}"
    "{{ '<unk>' + m.tool_calls[0].function.name + '()' }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system role here') }}{% elif (m.role == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '[' + m.role + ']' + m.content }}{% endfor %}"
)


def tokenizer(template=None, **settings) -> quant.Tokenizer:
    return quant.Tokenizer(tiny_tokenizer(template=template, **settings), {"eos_token_id": EOS})


def turns(*words: str | dict) -> list[dict]:
    """Turns that alternate between user and assistant, beginning with the user."""
    roles = ("user", "assistant")
    return [
        w if isinstance(w, dict) else {"role": roles[i % 2], "content": w}
        for i, w in enumerate(words)
    ]


def said(tok, row: dict, mask=True) -> list[str]:
    """The trained stretches of a row as text."""
    ids, trained = train.encode(row, tok, mask)
    assert len(ids) == len(trained)
    edges = np.flatnonzero(np.diff([0, *trained, 0])).reshape(-1, 2)
    return [tok.decode(ids[a:b], special=True) for a, b in edges]


# --- Rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"text": ""},
        {"text": "Grüße \u2028 日本"},
        {"prompt": "a", "completion": "b", "id": 7},
        {"messages": turns("a", "b"), "tools": []},
    ],
)
def test_every_row_kind_is_read_with_its_line(tmp_path, row):
    write_rows(tmp_path, train=["", row, row])
    found = train.read_data(str(tmp_path))
    assert found["train"] == [(f"{tmp_path}/train.jsonl:{n}", row) for n in (2, 3)]
    assert found["valid"] == found["test"] == []


@pytest.mark.parametrize(
    "line, said",
    [
        ('{"txt": "a"}', 'no "text", "messages" or "prompt"+"completion"; found keys: [\'txt\']'),
        ('{"text": "a"', "not JSON"),
        ('{"text": "\\ud800"}', "surrogates not allowed"),
        ("[1]", "got a list, wanted an object"),
        ('{"text": 5}', '"text" is a int, wanted text'),
        ('{"prompt": "a"}', "found keys: ['prompt']"),
        ('{"prompt": "a", "completion": ["b"]}', '"completion" is a list, wanted text'),
        ('{"messages": []}', '"messages" is empty'),
        ('{"messages": "a"}', '"messages" must be a list of objects with a "role"'),
        ('{"messages": [{"content": "a"}]}', '"messages" must be a list'),
    ],
)
def test_bad_row_is_refused_with_file_and_line(tmp_path, line, said):
    write_rows(tmp_path, train=[{"text": "good"}], valid=[{"text": "good"}, "", line])
    with pytest.raises(UserError) as caught:
        train.read_data(str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path}/valid.jsonl:3: ")
    assert said in str(caught.value)


def test_latin_1_is_refused_with_the_byte_and_its_place(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(UserError, match=r"train.jsonl:2: not UTF-8, byte 0xe9 at 13"):
        train.read_data(str(tmp_path))


def test_byte_order_mark_and_windows_line_ends_are_tolerated(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}')
    rows = train.read_data(str(tmp_path))["train"]
    assert [row["text"] for _, row in rows] == ["a", "b"]


@pytest.mark.parametrize("valid", [{}, {"valid": []}, {"valid": ["", "  "]}])
def test_validation_rows_are_optional(tmp_path, valid):
    write_rows(tmp_path, train=[{"text": "a"}], **valid)
    assert train.read_data(str(tmp_path))["valid"] == []


@pytest.mark.parametrize(
    "splits, said", [({"valid": []}, "no train.jsonl"), ({"train": ["", ""]}, "no rows")]
)
def test_nothing_to_train_on_is_refused(tmp_path, splits, said):
    write_rows(tmp_path, **splits)
    with pytest.raises(UserError, match=said):
        train.read_data(str(tmp_path))


def test_neither_folder_nor_hub_id_is_refused():
    with pytest.raises(UserError, match="no/such/folder: no such folder or file, and not a hub id"):
        train.read_data("no/such/folder")


def test_hub_dataset_is_read_from_its_cache_and_the_locale_does_not_matter(tmp_path):
    repo = tmp_path / "hub" / "datasets--org--name"
    write_rows(repo / "snapshots" / "abc", valid=[])
    text = '{"text": "Grüße"}\n'
    (repo / "snapshots" / "abc" / "train.jsonl").write_bytes(text.encode())
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    code = "import train; print(ascii(train.read_data('org/name')['train'][0][1]))"
    code += "\ntry: train.read_data('org/other')\nexcept train.UserError as e: print(e)"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        text=True,
        capture_output=True,
    )
    found, missing = done.stdout.splitlines()
    assert found == ascii({"text": "Grüße"})
    assert missing.startswith("org/other: no such folder, and the hub did not give it")


# --- Encoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a", "a</s>", "<s>a", "<s>a</s>"])
@pytest.mark.parametrize("bos", [True, False])
def test_text_has_bos_once_where_the_tokenizer_adds_it_and_eos_once(bos, text):
    ids, trained = train.encode({"text": text}, tokenizer(bos=bos), True)
    assert ids.count(BOS) == (bos or text.startswith("<s>")) and ids.count(EOS) == 1
    assert ids[-1] == EOS and all(trained)
    assert BOS not in ids or ids[0] == BOS


@pytest.mark.parametrize("mask", [True, False, "last"])
def test_completion_without_template_ends_in_one_trained_eos(mask):
    tok = tokenizer(bos=True, add_eos_token=True)
    ids, trained = train.encode({"prompt": "ab", "completion": "cde"}, tok, mask)
    assert tok.decode(ids, special=True) == "<s>abcde</s>"
    assert sum(trained) == (4 if mask else 7) and trained[-1]


def test_prompt_and_completion_become_turns_where_there_is_a_template():
    tok, row = tokenizer(CHATML), {"prompt": "A", "completion": "B"}
    assert said(tok, row) == ["B<|im_end|>"]
    as_turns = {"messages": turns("A", "B")}
    assert train.encode(row, tok, True) == train.encode(as_turns, tok, True)


def test_rendered_chat_gets_no_second_bos():
    tok = tokenizer(STRICT, bos=True)
    ids, _ = train.encode({"messages": turns("A", "B")}, tok, False)
    assert ids[0] == BOS and ids.count(BOS) == 1


@pytest.mark.parametrize(
    "words, roles",
    [
        ([{"role": "system", "content": "S"}, *turns("A", "B")], "system/user/assistant"),
        (turns("A", {"role": "user", "content": "A"}, {"role": "assistant"}), "user/user"),
    ],
)
def test_roles_that_the_template_refuses_are_named_with_the_line(words, roles):
    rows = [("f:1", {"messages": turns("A", "B")}), ("f:2", {"messages": words})]
    with pytest.raises(UserError, match=f"^f:2: the chat template refuses {roles}.*role"):
        train.Examples(rows, tokenizer(STRICT), True, 64)


def test_chat_rows_without_a_template_are_refused_with_the_line():
    with pytest.raises(UserError, match="^f:1: this model has no chat template; use plain text"):
        train.Examples([("f:1", {"messages": turns("A", "B")})], tokenizer(), True, 64)


# --- Masks ----------------------------------------------------------------------------------------

THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize(
    "template, words, wanted",
    [
        (CHATML, turns("A", "B", "C", "D"), ["B<|im_end|>", "D<|im_end|>"]),
        (CHATML, turns("B", "B", "B", "B"), ["B<|im_end|>", "B<|im_end|>"]),
        (CHATML, turns("A", "", "C", "D"), ["<|im_end|>", "D<|im_end|>"]),
        (CHATML, turns("A", "  B\n", "C", "D  "), ["  B\n<|im_end|>", "D  <|im_end|>"]),
        (CHATML, turns("A", "x<|im_start|>y", "C"), ["x<|im_start|>y<|im_end|>"]),
        (TRIMMED, turns("A", "  B\n", "C", "D  "), ["B<|im_end|>", "D<|im_end|>"]),
        (PHI3, turns("A", "B", "C", "D"), ["B<|im_end|>", "D<|im_end|>"]),
        (PLAIN, turns("A", "B", "C", "D"), [" B\n", " D\n"]),
        (QWEN3, turns("A", "B", "C", "D"), ["B<|im_end|>", "D<|im_end|>"]),
        (
            QWEN3,
            turns("A", THOUGHT + "B", "C", THOUGHT + "D"),
            ["B<|im_end|>", THOUGHT + "D<|im_end|>"],
        ),
        (  # the words of the first reply, thinking and all, are shown in the second alone
            QWEN3,
            turns("A", THOUGHT + "B", "C", THOUGHT + "B"),
            ["B<|im_end|>", THOUGHT + "B<|im_end|>"],
        ),
        (
            PLAIN_THINKING,
            turns("A", THOUGHT + "B", "C", THOUGHT + "D"),
            ["B\n", THOUGHT + "D\n"],
        ),
        (STARTED, turns("A", "<unk>\nhm", "C", "<b>D"), ["hm<|im_end|>", "<b>D<|im_end|>"]),
    ],
)
def test_exactly_the_words_of_the_assistant_and_the_end_of_turn_are_trained(
    template, words, wanted
):
    tok = tokenizer(template)
    assert said(tok, {"messages": words}, True) == wanted
    assert said(tok, {"messages": words}, "last") == wanted[-1:]
    whole = tok.chat(words)
    assert said(tok, {"messages": words}, False) == [whole]


def test_the_first_trained_token_is_the_first_generated_one():
    tok, words = tokenizer(CHATML), turns("A", "B", "C", "D")
    ids, trained = train.encode({"messages": words}, tok, "last")
    prompt = tok.encode(tok.chat(words[:3], reply=True), special=False)
    first = trained.index(True)
    assert ids[:first] == prompt and tok.decode(ids[first : first + 1]) == "D"


def test_words_merged_with_the_header_are_trained():
    """ "assistant: " and "yes" are " yes" together: one token, of which the header has a part."""
    core = json.loads(tiny_tokenizer(template=PLAIN)["tokenizer.json"])
    core["model"]["vocab"]["\u0120y"] = 261
    core["model"]["merges"] = [["\u0120", "y"]]
    files = tiny_tokenizer(template=PLAIN.replace("}assistant:{", "}assistant: {"))
    tok = quant.Tokenizer(files | {"tokenizer.json": json.dumps(core).encode()}, {})
    assert said(tok, {"messages": turns("A", "yes")}) == [" yes\n"]


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}


def test_tool_calls_are_trained_whole_and_tool_replies_are_not():
    words = turns("A", CALL, {"role": "tool", "content": "7"}, "B")
    row = {"messages": words, "tools": [{"type": "function", "function": {"name": "f"}}]}
    tok = tokenizer(CALLS)
    assert said(tok, row) == ["<unk>f()<|im_end|>", "B<|im_end|>"]
    assert '"name": "f"' in said(tok, row, False)[0]
    assert said(tok, row, "last") == ["B<|im_end|>"]


def test_a_template_that_changes_earlier_turns_is_refused_rather_than_guessed():
    numbered = "{{ messages | length }}" + CHATML
    tok, row = tokenizer(numbered), {"messages": turns("A", "B", "C", "D")}
    with pytest.raises(UserError, match="f:1: .*shows the turns before turn 2 differently"):
        train.Examples([("f:1", row)], tok, True, 99)
    assert said(tok, row, False)


# --- Examples and batches -------------------------------------------------------------------------


def examples(lengths, mask=False, longest=2048) -> train.Examples:
    """Text rows of so many tokens each, EOS included."""
    rows = [(f"f:{i}", {"text": "x" * (n - 1)}) for i, n in enumerate(lengths, 1)]
    return train.Examples(rows, tokenizer(), mask, longest)


def test_cut_and_empty_rows_are_counted_once_and_the_rest_kept(capsys):
    rows = [{"prompt": "p" * n, "completion": "c" * 9} for n in (3, 12, 30, 40)] + [{"text": ""}]
    found = train.Examples(
        [(f"d/train.jsonl:{i}", r) for i, r in enumerate(rows)], tokenizer(), True, 20
    )
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "train.jsonl: 3 of 5 rows cut at --max-seq-length 20",
        "train.jsonl: 3 of 5 rows left out, nothing in them to train on",
    ]
    assert [len(i) for i in found.ids] == [13, 20]
    assert found.where == ["d/train.jsonl:0", "d/train.jsonl:1"]


def test_eos_counts_once_per_row_where_it_is_also_the_padding():
    data = examples([3, 9, 40])
    tokens, places, weights = data.batch(np.arange(3), 4)
    targets = np.array(tokens[:, 1:].reshape(-1)[places])[np.array(weights) == 1]
    assert (targets == EOS).sum() == 3 and len(targets) == 2 + 8 + 39
    assert tokens.shape == (4, 1 + data.padded.max())


def test_places_and_weights_are_the_trained_targets_of_each_row():
    rows = [("f", {"prompt": "p" * n, "completion": "abcd"}) for n in (1, 6, 3)]
    data = train.Examples(rows, tokenizer(), True, 64)
    tokens, places, weights = data.batch(np.array([2, 0]), 3)
    chosen = np.array(places)[np.array(weights) == 1]
    T = tokens.shape[1] - 1
    assert [(p // T, p % T) for p in chosen] == [
        *((0, n) for n in range(2, 7)),
        *((1, n) for n in range(0, 5)),
    ]


@pytest.mark.parametrize("rows, batch", [(5, 4), (4, 4), (7, 2), (1, 1), (9, 8)])
def test_every_row_comes_once_in_every_epoch(rows, batch):
    data = examples([3 + 40 * (i % 3) for i in range(rows)])
    epochs = -(-rows // batch)
    flow = train.micro_batches(
        data, {"batch_size": batch, "seed": 3, "grad_accumulation_steps": 1}, 0
    )
    for _ in range(3):
        seen = np.concatenate([next(flow) for _ in range(epochs)])
        assert sorted(seen) == list(range(rows))


def test_order_is_a_function_of_seed_and_epoch_and_differs_between_them():
    data = examples([3 + i % 60 for i in range(40)])

    def order(seed, epoch):
        return [tuple(b) for b in data.order(4, seed, epoch)]

    assert order(0, 1) == order(0, 1)
    different = [order(s, e) for s in (0, 1) for e in (0, 1)]
    assert all(a != b for i, a in enumerate(different) for b in different[:i])
    assert {frozenset(b) for b in order(0, 0)} != {frozenset(b) for b in order(0, 1)}
    assert order(None, 0) == order(None, 1)


@pytest.mark.parametrize("step, accumulation", [(1, 1), (4, 3), (31, 2)])
def test_batches_after_a_step_are_those_that_would_have_followed(step, accumulation):
    data, s = examples([5] * 7), {"batch_size": 2, "seed": 0}
    s["grad_accumulation_steps"] = accumulation
    whole, later = train.micro_batches(data, s, 0), train.micro_batches(data, s, step)
    for _ in range(step * accumulation):
        next(whole)
    for _ in range(9):
        np.testing.assert_array_equal(next(whole), next(later))


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 20000))
def test_padded_lengths_are_few_and_waste_little(longest):
    sizes = train.buckets(longest)
    assert (np.diff(sizes) > 0).all() and sizes[-1] == max(longest - 1, 1)
    assert len(sizes) <= 32 or longest > 2**13
    below = np.concatenate([[0], sizes[:-1]])
    assert all(sizes - below <= np.maximum(32, np.ceil(below / 4)))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(2, 90), min_size=1, max_size=9), st.integers(1, 4), st.integers(2, 70))
def test_a_batch_holds_its_rows_whatever_their_lengths(lengths, batch, longest):
    data = examples(lengths, longest=longest)
    for rows in data.order(batch, 0):
        tokens, places, weights = data.batch(rows, batch)
        assert tokens.shape[0] == batch and tokens.shape[1] - 1 in data.sizes
        kept = np.array(tokens)
        for b, row in enumerate(rows):
            assert list(kept[b, : len(data.ids[row])]) == list(data.ids[row])
        chosen = np.array(places)[np.array(weights) == 1]
        assert len(set(chosen)) == len(chosen) == sum(len(data.ids[r]) - 1 for r in rows)
        assert places.shape == weights.shape and weights.dtype == mx.float32


def test_few_shapes_reach_the_compiled_step():
    rng = np.random.default_rng(0)
    data = examples(rng.integers(2, 2049, 600))

    def shapes(d):
        batches = [r for epoch in range(3) for r in d.order(4, 0, epoch)]
        return {tuple(a.shape for a in d.batch(r, 4)) for r in batches}

    assert len({t for t, *_ in shapes(data)}) <= 20
    assert len(shapes(data)) <= 32
    for trained in data.trained:  # any share of a row may be masked: four sizes for each length
        trained[: rng.integers(0, len(trained) - 1)] = False
    assert len(shapes(data)) <= 4 * len(data.sizes)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(2, 70), min_size=1, max_size=40), st.integers(0, 3))
def test_packed_rows_hold_every_example_once_and_no_more_than_fits(lengths, seed):
    data = examples(lengths, longest=64)
    data.packing = True
    batches = data.order(3, seed)
    groups = [group for batch in batches for group in batch]
    assert sorted(np.concatenate(groups)) == list(range(len(data)))
    sizes = sorted(sum(len(data.ids[r]) for r in group) for group in groups)
    assert sizes[-1] <= 64 and (len(sizes) < 2 or sizes[0] + sizes[1] > 64)  # no two could be one
    for batch in batches:
        tokens, places, weights, starts, longest = data.batch(batch, 3)
        B, T = starts.shape
        assert tokens.shape == (B, T + 1) == (3, T + 1) and longest <= T
        assert longest >= max(len(data.ids[r]) - 1 for group in batch for r in group)
        tokens, starts, begin = np.array(tokens), np.array(starts), 0
        wanted = []
        for b, group in enumerate(batch):
            begin = 0
            for r in group:
                n = len(data.ids[r])
                assert list(tokens[b, begin : begin + n]) == list(data.ids[r])
                assert (starts[b, begin : begin + n] == begin).all()
                wanted += [b * T + begin + i for i in range(n - 1)]  # not from one to the next
                begin += n
            assert (starts[b, begin:] == begin).all() and not tokens[b, begin:].any()
        assert list(np.array(places)[np.array(weights) == 1]) == wanted


def test_packing_differs_from_epoch_to_epoch_and_saves_what_padding_costs():
    data = examples(np.random.default_rng(0).integers(20, 400, 300), longest=1024)
    plain = sum(np.prod(data.batch(b, 4)[0].shape) for b in data.order(4, 0))
    data.packing = True
    epochs = [data.order(4, 0, epoch) for epoch in range(2)]
    first, second = ({frozenset(group) for b in e for group in b} for e in epochs)
    assert first != second
    total = sum(map(len, data.ids))
    rows = sum(len(b) for b in epochs[0])
    assert total / (rows * 1024) > 0.97
    assert sum(np.prod(data.batch(b, 4)[0].shape) for b in epochs[0]) < plain
