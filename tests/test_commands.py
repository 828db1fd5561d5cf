"""The commands in README.md and docs/: each parses, and the tutorial's run from top to bottom.

A block that needs something else than this repository has a comment before it: `<!-- needs a cluster -->` or
`<!-- not run: reason -->`. Commands of this repository in such a block are parsed all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import free_port

from megatron.__main__ import COMMANDS
from megatron.arguments import parse_run_config, run_parser
from megatron.cli import Parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- (needs a cluster|not run: [^>]+) -->\n)?^```bash\n(.*?)^```$", re.M | re.S)
TORCHRUN_FLAGS = {"--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--max-restarts"}
# Scripts that pass their flags to pretrain_gpt.py or pretrain_bert.py.
LAUNCHER = re.compile(r"scripts/pretrain_(gpt|bert)(_[\w.]+)?\.sh")


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of a page: its words, without comment and placeholders, and the mark of its block."""

    page: str
    line: int
    words: tuple[str, ...]
    mark: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def commands(page: Path) -> Iterator[Command]:
    """Yield the commands of a page's bash blocks."""
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        line = text[: block.start(2)].count("\n") + 1
        for piece in re.split(r"(?<!\\)\n", block[2]):
            words = tuple(word for word in shlex.split(piece, comments=True) if word not in ("...", "\n"))
            if words:
                yield Command(page.name, line, words, block[1])
            line += piece.count("\n") + 1


ALL = [command for page in PAGES for command in commands(page)]


class Parsed(Exception):
    """Raised when the command line of a command is parsed."""


def program(words: tuple[str, ...]) -> tuple[str, list[str]] | None:
    """The module of a command of this repository, and its flags; None for another program."""
    rest = [word for i, word in enumerate(words) if "=" not in word or any("=" not in w for w in words[:i])]
    if rest[0] == "torchrun":
        del rest[0]
        while rest[0] in TORCHRUN_FLAGS:
            del rest[:2]
        rest.insert(0, "python")
    if rest[0] in ("bash", "sbatch"):
        scripts = [i for i, word in enumerate(rest) if LAUNCHER.fullmatch(word)]
        if scripts:
            assert (ROOT / rest[scripts[0]]).is_file(), rest[scripts[0]]
            return f"megatron.pretrain_{LAUNCHER.fullmatch(rest[scripts[0]])[1]}", rest[scripts[0] + 1 :]
        return None
    if rest[0] == "megatron" and rest[1] in COMMANDS:
        return COMMANDS[rest[1]][0], rest[2:]
    if rest[0] != "python":
        return None
    if rest[1] == "-m":
        return (rest[2], rest[3:]) if rest[2].startswith("examples.") else None
    if (ROOT / rest[1]).is_file():
        name = Path(rest[1]).stem
        modules = [module for module, _ in COMMANDS.values() if module.endswith(f".{name}")]
        return (modules[0] if modules else rest[1], rest[2:])
    return None


def parse(module: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse the flags of a command, and do nothing else."""
    if module.startswith("megatron.pretrain_"):
        # Some blocks show a part of the flags, so it is not checked that the required ones are there.
        defaults = importlib.import_module(module).DEFAULTS
        run_parser("", defaults).parse_args(flags, argparse.Namespace(notices=[], refusals=[]))
        return
    parse_args = Parser.parse_args

    def parse_only(self: Parser, args: Any = None, namespace: Any = None) -> None:
        parse_args(self, flags, namespace)
        raise Parsed

    monkeypatch.setattr(Parser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [module, *flags])
    with pytest.raises(Parsed):
        if module.endswith(".py"):
            runpy.run_path(str(ROOT / module), run_name="__main__")
        else:
            importlib.import_module(module).main()


@pytest.mark.parametrize("command", ALL, ids=str)
def test_command_parses(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    found = program(command.words)
    if found is None:
        # The test scripts are what CI runs; curl asks the server of the tutorial, which runs below.
        is_test = any(word in ("scripts/test.sh", ".ci/run") for word in command.words)
        known = command.mark or is_test or (command.page, command.words[0]) == ("tutorial.md", "curl")
        assert known, f"{command} is no program of this repository; mark its block (see this file)"
        return
    module, flags = found
    if "--" in flags:
        # The command line of a run follows, which the planner and the verification parse themselves.
        words = flags[flags.index("--") + 1 :]
        run = program(("python", *words) if words[0].endswith(".py") else tuple(words))
        assert run is not None, command
        parse(*run, monkeypatch)
        flags = flags[: flags.index("--")]
    if module.startswith("examples."):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
        module, defaults = "megatron.pretrain_gpt", {"tokenizer_type": "NullTokenizer"}
        flags = [
            *"--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 1".split(),
            *flags,
        ]
        size = ["--micro-batch-size", "1"] + (["--train-iters", "1"] if "--train-iters" not in flags else [])
        parse_run_config([*flags, *size], description="", defaults=defaults)
        return
    parse(module, flags, monkeypatch)


def test_the_marks_are_spelled_right() -> None:
    """A comment right before a block of commands is a mark."""
    for page in PAGES:
        for comment in re.findall(r"^<!-- (.*) -->\n```bash", page.read_text(encoding="utf-8"), re.M):
            assert comment == "needs a cluster" or comment.startswith("not run: "), f"{page.name}: {comment}"


def surroundings(folder: Path) -> dict[str, Any]:
    """Arguments of a process that runs commands of a page in `folder`, which has the programs of the checkout."""
    for name in ("tools", "examples", "megatron", "pretrain_gpt.py"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"cwd": folder, "env": os.environ | {"PATH": path, "PYTHONPATH": str(folder)}}


def run_block(block: str, folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["bash", "-ec", block], capture_output=True, text=True, **surroundings(folder))
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    return done


def unmarked_blocks(page: Path) -> list[str]:
    """The bash blocks of a page that have no mark."""
    return [block[2] for block in BLOCK.finditer(page.read_text(encoding="utf-8")) if block[1] is None]


# Sizes of the tutorial that this test reduces.
REDUCED = {
    "--megabytes 4": "--megabytes 0.3",
    "--vocab-size 4096": "--vocab-size 512",
    "README.md": "short.txt",
}
REDUCED |= {"--train-iters 200": "--train-iters 12", "--train-iters 250": "--train-iters 14"}
REDUCED |= {"--train-iters 50": "--train-iters 4", "--eval-interval 100": "--eval-interval 6"}
REDUCED |= {"--log-interval 10": "--log-interval 1", "--hidden-size 128": "--hidden-size 32"}
REDUCED |= {"--lr-warmup-iters 20": "--lr-warmup-iters 2"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_tutorial_runs(tmp_path: Path) -> None:
    """Runs every block of the tutorial in one folder, in order, with less data and fewer iterations."""
    (tmp_path / "short.txt").write_text((ROOT / "README.md").read_text(encoding="utf-8")[:8000])
    port, missing, server = free_port(), set(REDUCED), None
    out = []
    try:
        for block in unmarked_blocks(ROOT / "docs" / "tutorial.md"):
            for long, short in REDUCED.items():
                if long in block:
                    missing.discard(long)
                    block = block.replace(long, short)
            block = block.replace("8000", str(port))
            if "tools/serve.py" in block:
                server = subprocess.Popen(["bash", "-ec", f"exec {block}"], **surroundings(tmp_path))
                wait_for_server(port, server)
                continue
            out.append(run_block(block, tmp_path).stdout)
    finally:
        if server is not None:
            server.send_signal(signal.SIGINT)
            server.wait(30)
    assert not missing, f"not in the tutorial: {missing}"
    assert (tmp_path / "my" / "run" / "report.html").is_file()
    first = float(re.search(r"^\S+ +1/\d+  loss (\S+)", "".join(out), re.M)[1])
    assert first == pytest.approx(6.24, abs=0.3)  # the logarithm of the vocabulary, as the tutorial says
    (answer,) = [text for text in out if text.startswith("{")]
    assert json.loads(answer)["choices"][0]["text"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_gpu_to_many_runs(tmp_path: Path) -> None:
    """Runs the page's commands in order. Each layout has the losses that the page promises: those of one process."""
    blocks = unmarked_blocks(ROOT / "docs" / "many-gpus.md")
    losses = []
    for block in blocks[:5]:
        done = run_block(block, tmp_path)
        losses.append([float(text) for text in re.findall(r"^\S+ +\d+/\d+  loss (\S+)", done.stdout, re.M)])
    assert [len(values) for values in losses] == [4, 4, 4, 4, 2]
    for other in losses[1:4]:
        assert other == pytest.approx(losses[0], rel=1e-3)
    assert losses[4][-1] < losses[0][-1]


# The corpora of pages whose commands begin with one, small enough for a test.
CORPORA = """
python tools/make_corpus.py --output my/corpus.jsonl --megabytes 0.3
python tools/train_tokenizer.py --input my/corpus.jsonl --type bpe --vocab-size 512 --output my/tokenizer
for name in corpus books; do
    python tools/preprocess_data.py --input my/corpus.jsonl --output-prefix my/$name --append-eod \\
        --tokenizer my/tokenizer
done
"""
# A first stage for the page's second one.
FIRST_STAGE = """
python pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 16 \\
    --train-iters 30 --lr 5e-3 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \\
    --untie-embeddings-and-output-weights --eval-iters 0 --data-path my/corpus_text_document --save my/short \\
    --attention-dropout 0 --hidden-dropout 0
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_extending_a_trained_model_runs(tmp_path: Path) -> None:
    """Runs the section's commands with a model trained on 32 positions in place of 128, and its export."""
    text = (ROOT / "docs" / "long-context.md").read_text(encoding="utf-8")
    section = text[text.index("## Extending a trained model") :].partition("\n## ")[0]
    train, evaluate = (block[2] for block in BLOCK.finditer(section))
    small = {"--seq-length 512": "--seq-length 128", "original-length 128": "original-length 32"}
    for long, short in {**small, "--train-iters 50": "--train-iters 8"}.items():
        assert long in train
        train = train.replace(long, short)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "book.txt").write_text((ROOT / "README.md").read_text(encoding="utf-8")[:3000])
    run_block(CORPORA + FIRST_STAGE, tmp_path)
    out = run_block(train, tmp_path).stdout
    assert "note: RoPE differs from that of my/short/iter_0000030: --use-rope-scaling" in out
    assert "checkpoint trained on" not in out  # the given original length is right
    assert "65 to       128 tokens of context: loss" in run_block(evaluate, tmp_path).stdout
    resume = (
        train.replace("--finetune ", "")
        .replace("my/short", "my/long")
        .replace("--train-iters 8", "--train-iters 9")
    )
    assert (
        "training: iterations 9 to 9 of 16 samples, resumed from my/long"
        in run_block(resume, tmp_path).stdout
    )
    convert = "python tools/convert_checkpoint.py --from native --to huggingface --load my/long --save my/hf"
    run_block(convert, tmp_path)
    assert json.loads((tmp_path / "my" / "hf" / "config.json").read_text())["max_position_embeddings"] == 128


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_mixture_from_the_first_step_to_a_text(tmp_path: Path) -> None:
    """Runs the section's commands with a smaller model and fewer iterations."""
    (block,) = unmarked_blocks(ROOT / "docs" / "moe.md")
    small = {"--hidden-size 128": "--hidden-size 32", "--moe-ffn-hidden-size 128": "--moe-ffn-hidden-size 32"}
    small |= {"--train-iters 100": "--train-iters 4", "--train-iters 200": "--train-iters 6"}
    for long, short in {**small, "--log-interval 10": "--log-interval 1", "README.md": "short.txt"}.items():
        assert long in block
        block = block.replace(long, short)
    (tmp_path / "short.txt").write_text((ROOT / "README.md").read_text(encoding="utf-8")[:3000])
    run_block(CORPORA, tmp_path)
    out = run_block(block, tmp_path).stdout
    assert "training: iterations 5 to 6 of 8 samples, resumed from my/mixture" in out
    assert "The first thing" in out
    config = json.loads((tmp_path / "my" / "exported" / "config.json").read_text())
    assert config["model_type"] == "mixtral" and config["num_local_experts"] == 8


def wait_for_server(port: int, server: subprocess.Popen) -> None:
    for _ in range(600):
        assert server.poll() is None
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server did not start")
