"""Zero-shot tasks: samples, scored tokens and reported values.

WIKITEXT103 and LAMBADA are the tasks of Megatron-LM (tasks/zeroshot_gpt), used in arXiv 1909.08053 section 5.3. PPL is
the perplexity of any text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.errors import InputError
from megatron.evaluation.config import EvalTasksConfig, ZeroShotConfig
from megatron.evaluation.wikitext import detokenize
from megatron.evaluation.windows import spans
from megatron.files import read_file as read_limited
from megatron.tokenizer import Tokenizer

Results = dict[str, float]


class Sample(NamedTuple):
    """Tokens [n] in int32; the last `scored` are predicted, each from those before it."""

    tokens: np.ndarray
    scored: int


@dataclass(frozen=True, kw_only=True)
class ZeroShotTask:
    """A task and its data.

    Attributes:
        length: context length; a sample has at most one token more.
        samples: the longest first, so that samples of a batch have similar lengths and out-of-memory errors come at
            once.
        greedy: count the samples whose scored tokens are all the most probable ones; otherwise sum the losses of
            scored tokens.
        count: denominator of the mean: number of samples, or of scored tokens.
        results: converts the sum over all samples to the reported values.
        form: format of the log line.
        notes: warnings about the data.
    """

    name: str
    length: int
    samples: list[Sample]
    greedy: bool
    results: Callable[[float], Results]
    form: str
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.samples.sort(key=lambda sample: len(sample.tokens), reverse=True)

    @property
    def count(self) -> int:
        return len(self.samples) if self.greedy else sum(sample.scored for sample in self.samples)

    def line(self, results: Results, at: str = "") -> str:
        """Return the log line, in Megatron-LM's format."""
        return f" validation results on {self.name}{at} | {self.form.format_map(results)}"


@dataclass(frozen=True)
class DataFile:
    """The path and contents of a file."""

    path: Path
    data: bytes

    def identity(self) -> dict[str, Any]:
        """Return the file's path, size and checksum, which saved results record."""
        digest = hashlib.sha256(self.data).hexdigest()
        return {"file": str(self.path.absolute()), "bytes": len(self.data), "sha256": digest}

    def text(self) -> str:
        """Decode the file; raises `InputError` if it is not UTF-8, or has no words."""
        text = self._decode(self.data, 1)
        if not text.split():
            raise InputError(f"{self.path}: has no words")
        return text

    def records(self) -> Iterator[tuple[str, str]]:
        """Yield the location (FILE:LINE) and the text of each line's JSON object.

        Raises:
            InputError: a line is not such an object; names it.
        """
        for number, line in enumerate(self.data.removesuffix(b"\n").split(b"\n"), 1):
            place = f"{self.path}:{number}"
            try:
                record = json.loads(self._decode(line, number))
            except InputError:
                raise
            except (ValueError, RecursionError) as error:
                raise InputError(f"{place}: is not JSON ({error})") from None
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise InputError(f"{place}: is not a JSON object with a string 'text'")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InputError(f"{place}: its 'text' has an unpaired surrogate") from None
            yield place, text

    def _decode(self, data: bytes, first_line: int) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            line = first_line + data.count(b"\n", 0, error.start)
            raise InputError(f"{self.path}:{line}: is not UTF-8 ({error.reason})") from None


def read_file(path: str, flag: str) -> DataFile:
    """Read the file that `flag` names.

    Raises:
        InputError: it cannot be read, is larger than `megatron.files.MAX_BYTES`, or is empty.
    """
    try:
        data = read_limited(path)
    except OSError as error:
        raise InputError(f"{flag}: {path} cannot be read ({error.strerror})") from None
    if not data.strip():
        raise InputError(f"{flag}: {path} is empty")
    return DataFile(Path(path), data)


def make_task(
    name: str,
    files: Sequence[DataFile],
    tokenizer: Tokenizer,
    config: ZeroShotConfig | EvalTasksConfig,
    *,
    length: int,
) -> ZeroShotTask:
    """Create a task from its files.

    Args:
        length: context length in tokens.

    Raises:
        InputError: a file does not fit the task (names file and line), or windows would leave gaps.
    """
    if name == "LAMBADA":
        return _lambada(files, tokenizer, length, strict=config.strict_lambada)
    stride = config.stride(length)
    if stride > length:
        raise InputError(
            f"--overlapping-eval: a stride of {stride} tokens exceeds the window, --seq-length {length}"
        )
    return (_wikitext if name == "WIKITEXT103" else _ppl)(files, tokenizer, length, stride)


def _wikitext(files: Sequence[DataFile], tokenizer: Tokenizer, length: int, stride: int) -> ZeroShotTask:
    samples: list[Sample] = []
    scored = original = 0
    for file in files:
        text = file.text()
        # Published figures split at single spaces only, so that the words around a line break count as one.
        words = len(text.strip().split(" "))
        tokens = tokenizer.tokenize(detokenize(text))
        if min(len(tokens), words) < 2:
            raise InputError(
                f"{file.path}: has {len(tokens)} tokens and {words} words; WIKITEXT103 needs two of each, because the "
                "first is not scored"
            )
        samples += _windows(tokens, length, stride, fill=False)
        scored, original = scored + len(tokens) - 1, original + words - 1
    ratio = scored / original

    def results(loss: float) -> Results:
        mean = loss / scored
        return {
            "avg loss": mean,
            "ppl": math.exp(min(mean, 20.0)),  # Megatron-LM's limit
            "adjusted ppl": math.exp(min(mean * ratio, 20.0)),
            "token ratio": ratio,
        }

    form = (
        "avg loss: {avg loss:.4E} | ppl: {ppl:.4E} | adjusted ppl: {adjusted ppl:.4E} | "
        "token ratio: {token ratio} |"
    )
    return ZeroShotTask(
        name="WIKITEXT103", length=length, samples=samples, greedy=False, results=results, form=form
    )


def _ppl(files: Sequence[DataFile], tokenizer: Tokenizer, length: int, stride: int) -> ZeroShotTask:
    samples: list[Sample] = []
    scored = words = size = 0
    for file in files:
        text = file.text()
        tokens = tokenizer.tokenize(text)
        # Like lm_eval's rolling log-likelihood, score all tokens; the first follows an end-of-document token.
        samples += _windows([tokenizer.eod, *tokens], length, stride, fill=True)
        scored, words, size = scored + len(tokens), words + len(text.split()), size + len(file.data)

    def results(loss: float) -> Results:
        return {
            "avg loss": loss / scored,
            "ppl": _exp(loss / scored),
            "word ppl": _exp(loss / words),
            "bits per byte": loss / math.log(2) / size,
        }

    form = (
        "avg loss: {avg loss:.4E} | ppl: {ppl:.4E} | word ppl: {word ppl:.4E} | "
        "bits per byte: {bits per byte:.4f} |"
    )
    return ZeroShotTask(name="PPL", length=length, samples=samples, greedy=False, results=results, form=form)


def _exp(x: float) -> float:
    # Without spaces, as in Chinese, a word is long and its perplexity may overflow.
    return math.inf if x > 709 else math.exp(x)


def _windows(tokens: list[int], length: int, stride: int, *, fill: bool) -> Iterator[Sample]:
    stream = np.array(tokens, np.int32)
    for begin, first, end in spans(len(tokens) - 1, length=length, stride=stride, fill=fill):
        yield Sample(stream[begin:end], end - first)


def _lambada(files: Sequence[DataFile], tokenizer: Tokenizer, length: int, *, strict: bool) -> ZeroShotTask:
    places, texts = zip(*(record for file in files for record in file.records()), strict=True)
    if strict:
        # Tokenize the last word separately, with the space before it.
        lasts = [(text.split() or [""])[-1] for text in texts]
        befores = [text[: text.rfind(last)].strip() for text, last in zip(texts, lasts, strict=True)]
        contexts = tokenizer.tokenize_batch(befores)
        targets = tokenizer.tokenize_batch([f" {last}" for last in lasts])
    else:
        tokens = tokenizer.tokenize_batch(texts)
        contexts, targets = [row[:-1] for row in tokens], [row[-1:] for row in tokens]
    samples: list[Sample] = []
    truncated = 0
    for place, context, target in zip(places, contexts, targets, strict=True):
        if not context:
            raise InputError(f"{place}: its 'text' has no context before the tokens to predict")
        if len(target) > length:
            raise InputError(
                f"{place}: its last word has {len(target)} tokens, more than --seq-length {length}"
            )
        whole = [*context, *target]
        truncated += len(whole) > length + 1
        # The last token is a target only.
        samples.append(Sample(np.array(whole[-length - 1 :], np.int32), len(target)))
    notes = [
        f"LAMBADA: {truncated} of {len(samples)} texts are longer than the context of {length} tokens and lose their "
        "beginning"
    ]
    return ZeroShotTask(
        name="LAMBADA",
        length=length,
        samples=samples,
        greedy=True,
        results=lambda correct: {
            "number correct": correct,
            "total examples": len(samples),
            "avg accuracy": correct / len(samples),
        },
        form="number correct: {number correct:.4E} | total examples: {total examples:.4E} | "
        "avg accuracy: {avg accuracy:.4E}",
        notes=notes if truncated else [],
    )
