"""Damage the files that commands read, and classify what the commands then do."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard
from nvidia import checkpoint_of, weights
from torch_dist import common_state, in_stacks, write

from attack.commands import Command, Ended
from attack.damage import DAMAGES

LIMIT = 120.0  # seconds for a command; undamaged, each takes a few
FAILURES = ("silent", "traceback", "memory", "hang", "crash", "unclear")
TIMES = ("seconds per iteration", "tokens per second", "TFLOP/s per device", "mfu", "hfu")
TOKENIZER = "--tokenizer-type GPT2BPETokenizer --vocab-file tok/vocab.json --merge-file tok/merges.txt"
BPE = "tools/train_tokenizer.py --input text.jsonl --type bpe --vocab-size 400 --output tok"
WORDPIECE = "tools/train_tokenizer.py --input text.jsonl --type wordpiece --vocab-size 200 --output words"
PREPROCESS = "tools/preprocess_data.py --output-prefix out --workers 1"
ENCODE = f"{PREPROCESS} --append-eod {TOKENIZER}"
CORPUS = (
    f"tools/preprocess_data.py --input text.jsonl --output-prefix corpus --append-eod --workers 1 {TOKENIZER}"
)
SHAPE = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16"
MODEL = f"{SHAPE} --micro-batch-size 2 --train-iters 6 --lr 1e-3 --device cpu --num-workers 0"
TRAIN = (
    f"pretrain_gpt.py {MODEL} --data-path corpus_text_document --data-cache-path cache {TOKENIZER} --save run "
    "--load run --save-interval 2 --log-interval 1 --eval-iters 1 --eval-interval 2 --metrics-path run/metrics.jsonl"
)
CONVERT = "tools/convert_checkpoint.py --from"
SETTINGS = """\
num-layers: 1
hidden-size: 16
num-attention-heads: 2
seq-length: 16
micro-batch-size: 2
train-iters: 2
lr: 1.0e-3
mock-data: true
tokenizer-type: NullTokenizer
vocab-size: 50
device: cpu
num-workers: 0
adam-beta1: 0.9
log-interval: 1
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """Files, and the command that reads them.

    Attributes:
        files: glob patterns of the files to damage.
        result: glob patterns of the files that the command writes; none for its stdout.
        sealed: the files have checksums, so that no damage may change the result.
    """

    files: str
    command: str
    result: str = ""
    sealed: bool = False


WEIGHTS = "out/iter_*/*.safetensors"
TRAINED = "run/metrics.jsonl run/iter_0000006/*.safetensors"
SAVED = "run/iter_0000004"
GENERATE = "tools/generate_text.py --load run --device cpu --out-seq-length 8 --greedy"
EVALUATE = "tools/evaluate.py --load run --device cpu --output-path out.json"
OTHER_TOKENIZER = f"{PREPROCESS} --input text.jsonl --tokenizer-type"
CASES = {
    "native checkpoint": Case(f"{SAVED}/*.* {SAVED}/tokenizer/*", TRAIN, TRAINED, sealed=True),
    "manifest": Case(f"{SAVED}/*.json", f"{GENERATE} --prompt abc", sealed=True),
    "manifest of a conversion": Case(
        f"{SAVED}/*.json", f"{CONVERT} native --to megatron --load run --save out", "out/**/*.pt", sealed=True
    ),
    "tracker": Case("run/latest_checkpointed_iteration.txt", TRAIN, TRAINED),
    "metrics": Case("run/metrics.jsonl", TRAIN, "run/iter_0000006/*.safetensors", sealed=True),
    "index cache": Case("cache/*.npy", TRAIN, TRAINED, sealed=True),
    "token files": Case("corpus_text_document.*", TRAIN, TRAINED),
    "token files, inspected": Case("corpus_text_document.*", "tools/inspect_data.py corpus_text_document"),
    "token files, merged": Case(
        "parts/*", "tools/merge_datasets.py --input parts --output-prefix out", "out.*"
    ),
    "BPE files": Case("tok/vocab.json tok/merges.txt", f"{ENCODE} --input text.jsonl", "out_*"),
    "tokenizer.json": Case(
        "tok/tokenizer*.json", f"{OTHER_TOKENIZER} HuggingFaceTokenizer --tokenizer-model tok", "out_*"
    ),
    "WordPiece file": Case(
        "words/vocab.txt",
        f"{OTHER_TOKENIZER} BertWordPieceLowerCase --vocab-file words/vocab.txt --split-sentences",
        "out_*",
    ),
    "Hugging Face model": Case("hf/*", f"{CONVERT} huggingface --to native --load hf --save out", WEIGHTS),
    "Megatron-LM checkpoint": Case(
        "theirs/*.txt theirs/*/*/*",
        f"{CONVERT} megatron --to native --load theirs --save out {TOKENIZER}",
        WEIGHTS,
    ),
    "torch_dist checkpoint": Case(
        "dist/*.txt dist/*/* dist/*/.metadata",
        f"{CONVERT} megatron --to native --load dist --save out --tokenizer-type NullTokenizer --vocab-size 99",
        WEIGHTS,
    ),
    "settings file": Case(
        "settings.yaml",
        "pretrain_gpt.py --config settings.yaml --train-iters 2 --metrics-path out.jsonl",
        "out.jsonl",
    ),
    "JSON lines": Case("text.jsonl", f"{ENCODE} --input text.jsonl", "out_*"),
    "plain text": Case("text.txt", f"{ENCODE} --input text.txt", "out_*"),
    "gzip": Case("text.jsonl.gz", f"{ENCODE} --input text.jsonl.gz", "out_*", sealed=True),
    "zstd": Case("text.jsonl.zst", f"{ENCODE} --input text.jsonl.zst", "out_*", sealed=True),
    "perplexity": Case("text.txt", f"{EVALUATE} --task PPL --valid-data text.txt", "out.json"),
    "LAMBADA": Case("text.jsonl", f"{EVALUATE} --task LAMBADA --valid-data text.jsonl", "out.json"),
    "prompts": Case("prompts.txt", f"{GENERATE} --sample-input-file prompts.txt"),
    "tokenizer corpus": Case(
        "text.jsonl text.txt",
        "tools/train_tokenizer.py --input text.jsonl text.txt --type bpe --vocab-size 400 --output out",
        "out/*",
    ),
}


def attack(number: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run one attack and describe its outcome. `folder` holds the undamaged files, in `whole`."""
    name = list(CASES)[number % len(CASES)]
    case, rng, copy = CASES[name], random.Random(f"{seed} {number}"), folder / "copy"
    expected = _expected(name, folder)
    _copy(folder, copy)
    target = rng.choice(_matching(copy, case.files))
    damage = rng.choice(DAMAGES)
    damage(target, rng)
    ended = Command(case.command, copy, folder / "log").end(LIMIT)
    outcome = ended.failure() or ("refused" if ended.status else "harmless")
    if outcome == "harmless" and _result(case, copy, ended) != expected:
        outcome = "silent" if case.sealed else "changed"
    row = {"number": number, "attack": f"{name}: {damage.__name__} {target.relative_to(copy)}"}
    row |= {
        "outcome": outcome,
        "status": ended.status,
        "memory": ended.memory >> 20,
        "says": ended.last_line(),
    }
    return row | {"stderr": ended.stderr[-5000:]} if outcome in FAILURES else row


def _expected(name: str, folder: Path) -> dict[str, str]:
    """The result with undamaged files, from the first call on in a file."""
    path = folder / f"{name}.json"
    if not path.exists():
        _copy(folder, folder / "copy")
        ended = Command(CASES[name].command, folder / "copy", folder / "log").end(LIMIT)
        assert ended.status == 0, f"{name}: fails without damage: {ended.stderr}"
        path.write_text(json.dumps(_result(CASES[name], folder / "copy", ended)), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def _copy(folder: Path, copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "whole", copy)


def _matching(folder: Path, patterns: str) -> list[Path]:
    found = {path for pattern in patterns.split() for path in folder.glob(pattern)}
    return sorted(path for path in found if path.is_file() and path.stat().st_size)


def _result(case: Case, folder: Path, ended: Ended) -> dict[str, str]:
    """A digest of each file that the command wrote, or of its stdout."""
    contents = {str(path.relative_to(folder)): _content(path) for path in _matching(folder, case.result)}
    contents = contents or {"stdout": ended.stdout.encode()}
    return {name: hashlib.blake2b(content).hexdigest() for name, content in contents.items()}


def _content(path: Path) -> bytes:
    """The content of a file, for metrics without times."""
    return json.dumps(metrics(path)).encode() if path.suffix == ".jsonl" else path.read_bytes()


def metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, without times."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def prepare(folder: Path) -> None:
    """Write the undamaged files to `folder`/whole."""
    # Imported before the processes are forked.
    for module in ("transformers.models.gpt2.modeling_gpt2", "tokenizers", "sentencepiece"):
        importlib.import_module(module)
    whole = folder / "whole"
    whole.mkdir()
    texts = list(_texts())
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (whole / "text.jsonl").write_bytes(lines)
    (whole / "text.txt").write_text("\n\n".join(texts[:8]) + "\n", encoding="utf-8")
    (whole / "prompts.txt").write_text("\n".join(text[:20] for text in texts[:3]) + "\n", encoding="utf-8")
    (whole / "text.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (whole / "text.jsonl.zst").write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(lines))
    (whole / "settings.yaml").write_text(SETTINGS, encoding="utf-8")
    for words in (
        BPE,
        WORDPIECE,
        CORPUS,
        f"{TRAIN} --exit-interval 4",
        f"{CONVERT} native --to huggingface --load run --save hf",
        f"{CONVERT} native --to megatron --load run --save theirs",
    ):
        ended = Command(words, whole, folder / "log").end(LIMIT)
        assert ended.status == 0, f"{words}: {ended.stderr}"
    (whole / "parts").mkdir()
    for suffix in (".bin", ".idx"):
        for part in "ab":
            shutil.copyfile(whole / f"corpus_text_document{suffix}", whole / "parts" / f"{part}{suffix}")
    checkpoint = checkpoint_of(folder)
    write(whole / "dist" / "iter_0000012", in_stacks(weights(checkpoint)), common_state(checkpoint, {}))


def _texts() -> Iterator[str]:
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefgh", k=rng.randrange(2, 9))) for _ in range(200)]
    for _ in range(60):
        yield " ".join(" ".join(rng.choices(words, k=9)).capitalize() + "." for _ in range(6))
