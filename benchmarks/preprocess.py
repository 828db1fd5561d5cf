r"""Compare the throughput of tools/preprocess_data.py with libraries that encode the same text in memory on all cores.

Each round runs every case once, so all of them run under the same load of the machine. The time of the tool is that of
the whole command, from its start to the files on disk. The time of the libraries is that of encoding only.

    python benchmarks/preprocess.py corpus.txt --megabytes 100 --vocab-file vocab.json --merge-file merges.txt \
        --bert-vocab-file vocab.txt
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.preprocessing.documents import documents, read_batches
from megatron.preprocessing.encoder import Encode
from megatron.preprocessing.workers import available_cores
from megatron.tokenizer.bert import BertWordPieceTokenizer
from megatron.tokenizer.gpt2 import GPT2BPETokenizer, tiktoken_encoder

DOCUMENT_CHARACTERS = 4000  # approximate length of a web page
SLOW_DIVISOR = 4  # slow cases encode this fraction of the text, 1 / SLOW_DIVISOR


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    megabytes: float = flag(100.0, "size of the text to encode; the file is repeated or cut", above=0)
    rounds: int = flag(3, "measured rounds", low=1)
    vocab_file: str = flag(None, "GPT-2 vocab.json", metavar="FILE", required=True)
    merge_file: str = flag(None, "GPT-2 merges.txt", metavar="FILE", required=True)
    bert_vocab_file: str = flag(None, "BERT vocab.txt, uncased", metavar="FILE", required=True)
    output: str = flag(
        str(ROOT / "benchmarks/results/preprocess.json"), "file to write the results to", metavar="FILE"
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__)
    parser.add_argument(
        "text", metavar="TEXT_FILE", help="plain text with paragraphs separated by blank lines"
    )
    add_flags(parser, BenchmarkConfig, "benchmark")
    args = vars(parser.parse_args(argv))
    config = make_config(BenchmarkConfig, args)
    load_average = round(os.getloadavg()[0], 1)
    texts = make_texts(args["text"], config.megabytes)
    with tempfile.TemporaryDirectory() as folder:
        speeds = run_rounds(make_cases(config, texts, Path(folder)), config.rounds)
    results = {
        "commit": git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else ""),
        "command": " ".join(["python benchmarks/preprocess.py", *argv]),
        "machine": machine_info() | {"load average before": load_average},
        "MB/s": speeds,
        "ratios": ratios(speeds),
    }
    for name, ratio in results["ratios"].items():
        print(f"{name}: {ratio:.2f}")
    Path(config.output).parent.mkdir(parents=True, exist_ok=True)
    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def make_texts(path: str, megabytes: float) -> list[str]:
    """Build documents of about DOCUMENT_CHARACTERS from the paragraphs of a file, repeated as needed."""
    batches = read_batches([path], ["text"], "blank-lines")
    found = (documents(batch, ["text"])[0] for batch in batches)
    paragraphs = [document.texts[0] for document in itertools.chain.from_iterable(found)]
    if not paragraphs:
        raise InputError(f"{path}: contains no text")
    source = itertools.cycle(paragraphs)
    texts: list[str] = []
    size = 0
    while size < megabytes * 1e6:
        text = next(source)
        while len(text) < DOCUMENT_CHARACTERS:
            text += "\n\n" + next(source)
        texts.append(text)
        size += len(text.encode())
    return texts


def make_cases(config: BenchmarkConfig, texts: list[str], folder: Path) -> dict[str, Callable[[], float]]:
    """Return the cases by name: functions that run once and return MB/s."""
    part = texts[: max(1, len(texts) // SLOW_DIVISOR)]
    for name, content in (("all.jsonl", texts), ("part.jsonl", part)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in content)
        (folder / name).write_text(lines, encoding="utf-8")

    def tool(name: str, *flags: str) -> None:
        command = [sys.executable, str(ROOT / "tools/preprocess_data.py"), "--input", str(folder / name)]
        command += ["--output-prefix", str(folder / "out"), *flags]
        subprocess.run(command, check=True, capture_output=True)

    gpt2 = GPT2BPETokenizer(config.vocab_file, config.merge_file)
    tiktoken = tiktoken_encoder(gpt2)
    bert = BertWordPieceTokenizer(config.bert_vocab_file, lowercase=True)
    gpt2_flags = ["--vocab-file", config.vocab_file, "--merge-file", config.merge_file, "--append-eod"]
    gpt2_flags += ["--tokenizer-type", "GPT2BPETokenizer"]
    bert_flags = ["--vocab-file", config.bert_vocab_file, "--tokenizer-type", "BertWordPieceLowerCase"]
    return {
        "GPT-2 tool": lambda: throughput(texts, lambda: tool("all.jsonl", *gpt2_flags)),
        "GPT-2 tiktoken": lambda: throughput(texts, lambda: encode_with_threads(tiktoken, texts)),
        "GPT-2 encode_batch": lambda: throughput(part, lambda: gpt2._bpe.encode_batch(part)),
        "BERT tool": lambda: throughput(part, lambda: tool("part.jsonl", *bert_flags)),
        "BERT encode_batch": lambda: throughput(part, lambda: bert._wordpiece.encode_batch(part)),
    }


def encode_with_threads(encode: Encode, texts: list[str]) -> None:
    with ThreadPoolExecutor(available_cores()) as pool:
        for _ in pool.map(encode, [texts[i : i + 64] for i in range(0, len(texts), 64)]):
            pass


def throughput(texts: list[str], run: Callable[[], object]) -> float:
    """Run `run` and return the throughput in MB of `texts` per second."""
    start = time.perf_counter()
    run()
    return sum(len(text.encode()) for text in texts) / 1e6 / (time.perf_counter() - start)


def run_rounds(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(1, rounds + 1):
        for name, run in runs.items():
            speeds[name].append(round(run(), 2))
            print(f"round {number}  {name:20} {speeds[name][-1]:6.1f} MB/s", flush=True)
    return speeds


def ratios(speeds: dict[str, list[float]]) -> dict[str, float]:
    """Return the throughput of the tool relative to the libraries, medians over the rounds."""
    return {
        f"{model} tool / {library}": round(
            statistics.median(map(operator.truediv, speeds[f"{model} tool"], speeds[f"{model} {library}"])), 2
        )
        for model, library in (("GPT-2", "tiktoken"), ("GPT-2", "encode_batch"), ("BERT", "encode_batch"))
    }


def machine_info() -> dict[str, object]:
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": available_cores(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("tokenizers", "tiktoken", "numpy")},
    }


def git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    run_command(main)
