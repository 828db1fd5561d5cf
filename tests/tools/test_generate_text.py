"""tools/generate_text.py with a barely trained model."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
import torch
from checkpoints import edit_state

from megatron import plugins
from megatron.arguments import parse_run_config
from megatron.commands.generate_text import main
from megatron.errors import InputError
from megatron.inference import terminal
from megatron.inference.batching import Batcher
from megatron.inference.config import InferenceConfig
from megatron.inference.load import load_gpt
from megatron.parallel.mesh import Mesh
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.tokenizer.config import TokenizerConfig

CPU = torch.device("cpu")

TINY = """
    --device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 300 --num-workers 0
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2
    --train-iters 1 --lr 1e-2 --eval-iters 0
""".split()


@pytest.fixture
def run(pretrain, tmp_path: Path) -> Path:
    """Checkpoint folder of a run."""
    pretrain(*TINY, "--save", tmp_path / "run")
    return tmp_path / "run"


def test_a_full_context_is_noted(run: Path, capsys) -> None:
    capsys.readouterr()
    words = ["--load", str(run), "--prompt", "1 2 3", "--greedy"]
    main([*words, "--out-seq-length", "14"])
    full = capsys.readouterr()
    assert full.err == ("note: stopped after 13 tokens: the 16-token context is full\n")
    assert len(full.out.split()) == 16
    main([*words, "--out-seq-length", "13"])
    asked = capsys.readouterr()
    assert asked.err == "" and asked.out == full.out


def damage(run: Path, **fields: object) -> Path:
    return edit_state(run / "iter_0000001", **fields)


@pytest.mark.parametrize("wrong", [None, "384", True, 3.5, -1, 10**30])
@pytest.mark.parametrize("name", ["vocab_size", "padded_vocab_size"])
def test_a_damaged_vocabulary_size_is_one_line(run: Path, name: str, wrong: object) -> None:
    path = damage(run, **{name: wrong})
    with pytest.raises(InputError, match=f"^{re.escape(f'{path}: {name!r} is missing or wrong: {wrong}')}$"):
        load_gpt(InferenceConfig(load=str(run)), TokenizerConfig(), Mesh(device=CPU))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": None}, "--num-layers is required"),
        ({"hidden_size": "16"}, "--hidden-size: '16' is not a"),
    ],
)
def test_a_damaged_architecture_is_one_line(run: Path, fields: dict, message: str) -> None:
    path = run / "iter_0000001" / "state.json"
    saved = json.loads(path.read_text())["config"]
    damage(run, config=saved | {"model": saved["model"] | fields})
    with pytest.raises(InputError, match=re.escape(f"{path}: {message}")):
        load_gpt(InferenceConfig(load=str(run)), TokenizerConfig(), Mesh(device=CPU))


def test_sizes_are_checked_against_the_files_before_allocating(run: Path, capsys) -> None:
    argv = ["--load", str(run), "--prompt", "1 2", "--greedy", "--out-seq-length", "5"]
    main(argv)
    expected = capsys.readouterr().out
    # The files omit the rows of vocabulary padding, and this model does not need them.
    path = damage(run, padded_vocab_size=10**15)
    main(argv)
    assert capsys.readouterr().out == expected

    saved = json.loads(path.read_text())["config"]
    damage(run, config=saved | {"model": saved["model"] | {"hidden_size": 10**6}})
    with pytest.raises(InputError, match=r"word_embeddings\.weight has shape \(301, 16\), but the model has"):
        load_gpt(InferenceConfig(load=str(run)), TokenizerConfig(), Mesh(device=CPU))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint folder of a run with a longer context."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    argv = [*TINY, "--seq-length", "64", "--max-position-embeddings", "64", "--init-method-std", "0.5"]
    with contextlib.redirect_stdout(io.StringIO()):
        plugins.run(parse_run_config([*argv, "--save", str(folder)], description="", defaults=DEFAULTS), GPT)
    return folder


def write(path: Path, lines: list[str]) -> str:
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_of_a_file_keep_their_order(trained: Path, tmp_path: Path, capsys) -> None:
    """A completion does not depend on the other prompts, nor on where an earlier attempt stopped."""
    prompts = ["1 2 3", "4", "5 6 7 8 9 10 11 12", "13 14", "15"]
    lines = write(tmp_path / "prompts.txt", prompts)
    out = tmp_path / "out.jsonl"
    argv = ["--load", str(trained), "--sample-input-file", lines, "--out-seq-length", "20", "--top-k", "50"]
    main([*argv, "--sample-output-file", str(out), "--max-batch-size", "2", "--num-samples", "2"])
    found = records(out)
    assert [record["prompt"] for record in found] == [prompt for prompt in prompts for _ in range(2)]
    assert all(len(r["text"].split()) == 20 and r["finish_reason"] == "length" for r in found)
    assert len({record["text"] for record in found}) == 10

    whole = out.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1, len(whole)):
        out.write_bytes(whole[:size])
        main([*argv, "--sample-output-file", str(out), "--num-samples", "2"])
        assert out.read_bytes() == whole
        if size == len(whole):
            assert capsys.readouterr().err == f"note: {out} has 10 of 10 texts already\n"
        capsys.readouterr()
    write(tmp_path / "prompts.txt", prompts[::-1])
    with pytest.raises(
        InputError, match=r"out\.jsonl, line 1: is from another prompt, checkpoint or settings"
    ):
        main([*argv, "--sample-output-file", str(out), "--num-samples", "2"])

    main(["--load", str(trained), "--prompt", "1 2 3", "--out-seq-length", "20", "--top-k", "50"])
    assert capsys.readouterr().out.split() == ["1", "2", "3", *found[0]["text"].split()]


def test_each_text_is_written_at_once(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses only texts that it has not finished."""
    out, written = tmp_path / "out.jsonl", []

    class Bar(contextlib.nullcontext):
        def __init__(self, **_: object) -> None:
            super().__init__(self)

        def update(self) -> None:
            written.append(len(records(out)))

    monkeypatch.setattr(terminal, "tqdm", Bar)
    lines = write(tmp_path / "prompts.txt", ["1", "2", "3"])
    main(["--load", str(trained), "--sample-input-file", lines, "--sample-output-file", str(out)])
    assert written == [1, 2, 3]


def test_a_completion_appears_as_it_is_generated(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, step, seen = io.BytesIO(), Batcher.step, []

    def recorded(self: Batcher) -> list:
        seen.append(raw.getvalue().decode())
        return step(self)

    monkeypatch.setattr(Batcher, "step", recorded)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw))
    main(["--load", str(trained), "--prompt", "1 2", "--greedy", "--out-seq-length", "5"])
    assert [len(text.split()) for text in seen] == [0, 3, 4, 5, 6]


def test_log_probabilities(trained: Path, tmp_path: Path) -> None:
    lines = write(tmp_path / "prompts.jsonl", ['{"prompt": "1 2"}', '{"text": "3"}'])
    out = tmp_path / "out.jsonl"
    argv = ["--load", str(trained), "--sample-input-file", lines, "--sample-output-file", str(out)]
    main([*argv, "--greedy", "--logprobs", "2", "--out-seq-length", "4"])
    for record in records(out):
        assert "".join(token["text"] for token in record["tokens"]) == record["text"]
        for token in record["tokens"]:
            assert token["logprob"] == token["top"][0]["logprob"] >= token["top"][1]["logprob"]
            assert (token["id"], token["text"]) == (token["top"][0]["id"], token["top"][0]["text"])


def test_beams(trained: Path, capsys) -> None:
    argv = ["--load", str(trained), "--prompt", "1 2", "--out-seq-length", "6"]
    texts = []
    for more in (["--greedy"], ["--beam-width", "1"], ["--beam-width", "4"]):
        main([*argv, *more])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[2].startswith("1 2 ")


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Make `input` return or raise these in turn, then signal end of file."""
    coming = iter(lines)

    def type_line(prompt: str) -> str:
        line = next(coming, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", type_line)


def test_a_conversation(trained: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier turns are the context of later ones; Ctrl-C ends a completion, not the program."""
    type_lines(monkeypatch, "1 2", "3", "/new", "1 2", KeyboardInterrupt, "x", "4")
    main(["--load", str(trained), "--greedy", "--out-seq-length", "5"])
    captured = capsys.readouterr()
    answers = captured.out.splitlines()
    assert "'x'" in captured.err and len(captured.err.splitlines()) == 1
    first, second, again, _, last = answers[:5]
    assert first == again and len(first.split()) == len(second.split()) == 5 and last

    def interrupt(self: Batcher) -> list:
        raise KeyboardInterrupt

    monkeypatch.setattr(Batcher, "step", interrupt)
    type_lines(monkeypatch, "1 2", "3")
    main(["--load", str(trained), "--greedy"])
    assert capsys.readouterr().out == "\n\n"


def test_a_conversation_longer_than_the_context(
    trained: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, *["1 2 3"] * 6)
    main(["--load", str(trained), "--out-seq-length", "20", "--greedy", "--seed", str(2**32 - 1)])
    captured = capsys.readouterr()
    assert [len(line.split()) for line in captured.out.splitlines()] == [20] * 6
    assert captured.err.splitlines() == [
        f"note: context too long, dropped the first {n} tokens" for n in (5, 28, 51, 74)
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--prompt 1 --sample-input-file x", "--prompt and --sample-input-file exclude each other"),
        ("--sample-input-file absent", "--sample-input-file: absent cannot be read"),
        ("--sample-input-file /dev/zero", "--sample-input-file: /dev/zero cannot be read (larger than"),
        ("--num-samples 2", "JSON output needs --prompt or --sample-input-file"),
        ("--prompt 1 --logprobs 2", "--logprobs needs JSON output"),
        ("--prompt 1 --stop  ", "--stop"),
        ("--prompt 1 --temperature -1", "--temperature: -1"),
        ("--prompt 1 --beam-width 2 --top-k 3", "--top-k has no effect with --beam-width"),
        ("--prompt 1 --beam-width 2 --num-samples 3", "--num-samples has no effect with --beam-width"),
        (
            "--prompt 1 --beam-width 99999999999999",
            "--beam-width, --out-seq-length: not enough cpu memory",
        ),
        ("--prompt \udcff", "--prompt: '\\udcff' is not UTF-8 text"),
        ("--prompt 1 --length-penalty 2", "--length-penalty needs --beam-width"),
        ("--prompt abc", "--prompt: 'abc'"),
    ],
)
def test_bad_input_is_one_line(trained: Path, flags: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}") as error:
        main(["--load", str(trained), *flags.split(" ")])
    assert "\n" not in str(error.value)


def test_an_empty_prompt_begins_a_document(run: Path, capsys, tmp_path: Path) -> None:
    """It continues the end-of-document token, whose id the null tokenizer reads and writes as text."""

    def generate(*words: str) -> str:
        capsys.readouterr()
        main(["--load", str(run), "--greedy", "--out-seq-length", "5", *words])
        return capsys.readouterr().out

    empty, eod = (generate("--prompt", prompt) for prompt in ("", "300"))
    assert len(empty.split()) == 5 and "300" + empty == eod
    (tmp_path / "a.jsonl").write_text('{"prompt": ""}')
    (record,) = generate("--sample-input-file", str(tmp_path / "a.jsonl")).splitlines()
    assert json.loads(record)["text"].split() == empty.split()


def test_bad_prompts_of_a_file_are_named(trained: Path, tmp_path: Path) -> None:
    long = " ".join(["1"] * 64)
    for name, content, message in [
        ("a.txt", b"1\n\xff\n", "a.txt, line 2: is not UTF-8 text"),
        ("a.jsonl", b'{"prompt": "1"}\n[1]\n', "a.jsonl, line 2: is not a JSON object with a string"),
        ("a.jsonl", b"{", "a.jsonl, line 1: is not a JSON object with a string"),
        ("b.jsonl", b'{"prompt": "1 \\ud800"}', r"b.jsonl, line 1: '1 \ud800' is not UTF-8 text"),
        ("b.txt", b"1\nx\n", "b.txt, line 2: 'x' is not a token id"),
        ("b.txt", b"", "b.txt is empty"),
        (
            "b.txt",
            b"1\n" + long.encode() + b"\n",
            "the prompt has 64 tokens and leaves no room in the context of 64",
        ),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=re.escape(message)):
            main(["--load", str(trained), "--sample-input-file", str(tmp_path / name)])
