"""Text generation from the command line: one prompt, a file of prompts, or a conversation."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tqdm import tqdm

from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.inference.batching import Batcher, Request, SequenceState, check_finite
from megatron.inference.beam import BeamConfig, beam_search
from megatron.inference.predictor import Predictor, check_prompt
from megatron.inference.prompts import document_start, read_prompts
from megatron.inference.sampling import SamplingConfig
from megatron.inference.text import TextStream, end_tokens
from megatron.inference.token_text import TokenText
from megatron.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """Prompts and output. Without a prompt or a file, prompts are typed."""

    prompt: str | None = flag(None, "text to continue; an empty one begins a document")
    sample_input_file: str | None = flag(
        None,
        "file with a prompt per line; in a .jsonl file the string under 'prompt' or 'text' of each line",
        metavar="FILE",
    )
    sample_output_file: str | None = flag(
        None,
        "write JSON lines to this file; an interrupted run continues it",
        metavar="FILE",
    )
    num_samples: int = flag(1, "texts per prompt", low=1)
    stop: tuple[str, ...] | None = flag(None, "strings that end the text and are not part of it", nargs="+")
    logprobs: int | None = flag(
        None,
        "write each token's log-probability and this many most probable tokens (JSON only)",
        low=0,
        high=1000,
    )
    max_batch_size: int = flag(32, "sequences generated together", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None and self.sample_input_file is not None:
            raise InputError("--prompt and --sample-input-file exclude each other; leave out one of the two")
        if any(not text for text in self.stop or ()):
            raise InputError("--stop: the empty string is not allowed; leave it out")
        if self.logprobs is not None and not self.writes_json:
            raise InputError(
                "--logprobs needs JSON output; add --sample-input-file, --sample-output-file or --num-samples"
            )

    @property
    def writes_json(self) -> bool:
        """True for JSON lines, False for text that is printed as it is generated."""
        return self.num_samples > 1 or bool(self.sample_input_file or self.sample_output_file)


def run(
    config: TextConfig,
    sampling: SamplingConfig,
    beam: BeamConfig,
    predictor: Predictor,
    tokenizer: Tokenizer,
) -> None:
    """Generate as the flags say.

    Raises:
        InputError: a prompt is too long, not UTF-8, or empty without an end-of-document token, or a file cannot be
            read or written.
    """
    writer = _Writer(config, sampling, beam, predictor, tokenizer)
    if config.writes_json:
        writer.write_all()
    elif config.prompt is not None:
        with _input_error_prefix("--prompt"):
            tokens = writer.tokens(config.prompt)
            check_prompt(tokens, predictor.context)
        _, finished = writer.stream(tokens, sampling, begin=config.prompt)
        if not finished:
            raise KeyboardInterrupt
    else:
        writer.converse()


@dataclasses.dataclass
class _Writer:
    config: TextConfig
    sampling: SamplingConfig
    beam: BeamConfig
    predictor: Predictor
    tokenizer: Tokenizer

    def tokens(self, text: str) -> list[int]:
        """Tokens of a prompt; those of an empty one are the end of the document before."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{text[:40]!r} is not UTF-8 text") from None
        return self.tokenizer.tokenize(text) or document_start(self.tokenizer)

    def reserve(self, rows: int, tokens: int) -> None:
        """Reserve the cache for prompts of `tokens` tokens and their continuations."""
        flag = "--beam-width, " if self.beam.beam_width else "--max-batch-size, " if rows > 1 else ""
        longest = tokens + self.sampling.out_seq_length
        with _input_error_prefix(f"{flag}--out-seq-length"):
            self.predictor.reserve(self.beam.beam_width or rows, min(self.predictor.context, longest))

    def stream(self, tokens: list[int], sampling: SamplingConfig, begin: str = "") -> tuple[str, bool]:
        """Print `begin` and the continuation of a prompt as it is generated.

        Returns:
            The text, and False if Ctrl-C stopped it.
        """
        self.reserve(1, len(tokens))
        if self.beam.beam_width:
            text, _ = self.best_text(tokens)
            print(begin + text)
            return text, True
        batcher = Batcher(self.predictor, self.tokenizer)
        sequence = batcher.add(self.request(tokens, sampling))
        sys.stdout.write(begin)
        output, finished = "", False
        with contextlib.suppress(KeyboardInterrupt):
            while sequence.reason is None:
                for _, text in batcher.step():
                    sys.stdout.write(text)
                    sys.stdout.flush()
                    output += text
            check_finite(sequence)
            finished = True
        print()
        if sequence.reason == "length" and len(sequence.new) < sampling.out_seq_length:
            print(
                f"note: stopped after {len(sequence.new)} tokens: the {self.predictor.context}-token context is full",
                file=sys.stderr,
            )
        return output, finished

    def request(self, tokens: list[int], sampling: SamplingConfig) -> Request:
        return Request(
            prompt=tokens,
            sampling=sampling,
            stops=self.config.stop or (),
            top_logprobs=self.config.logprobs,
        )

    def seeded(self, number: int) -> SamplingConfig:
        """Return the sampling settings of a text by its index; each has its own seed."""
        return dataclasses.replace(self.sampling, seed=(self.sampling.seed + number) % 2**32)

    def best_text(self, tokens: list[int]) -> tuple[str, float]:
        """Return the best text of beam search and its score."""
        best = beam_search(
            self.predictor,
            tokens,
            self.beam,
            length=self.sampling.out_seq_length,
            ends=end_tokens(self.tokenizer),
        )[0]
        stream, text = TextStream(self.tokenizer, tokens, self.config.stop or ()), ""
        for token in best.tokens:
            text += stream.add(token)
            if stream.stopped:
                break
        return text + stream.finish(), best.score

    def converse(self) -> None:
        """Continue typed texts; everything before is context."""
        with contextlib.suppress(ImportError):  # line editing, not available on every system
            import readline  # noqa: F401
        if sys.stdin.isatty():
            print(
                "Type a text to continue. Ctrl-C stops the continuation, /new clears the context, Ctrl-D exits."
            )
        # With several processes, torchrun ends all of them at Ctrl-C.
        alone = self.predictor.mesh.world.size == 1
        history, turn = "", 0
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
                if line == "/new":
                    history = ""
                    continue
                context = history + line
                text, finished = self.stream(self._truncated(self.tokens(context)), self.seeded(turn))
                history, turn = f"{context}{text}\n", turn + 1
                if not (finished or alone):
                    raise KeyboardInterrupt
            except EOFError:
                return
            except KeyboardInterrupt:
                print()
                if not alone:
                    raise
            except (InputError, UnicodeDecodeError) as error:
                print(f"error: {error}", file=sys.stderr)

    def _truncated(self, tokens: list[int]) -> list[int]:
        """Drop the beginning of a context that leaves no room for a continuation."""
        room = max(self.predictor.context - self.sampling.out_seq_length, self.predictor.context // 2)
        if len(tokens) > room:
            print(f"note: context too long, dropped the first {len(tokens) - room} tokens", file=sys.stderr)
        return tokens[-room:]

    def write_all(self) -> None:
        """Continue all prompts and write JSON lines in their order."""
        prompts, samples = list(_prompts(self.config)), self.config.num_samples
        texts = [text for _, text in prompts for _ in range(samples)]
        made_by = self._made_by()
        with _open_output(self.config.sample_output_file, texts, made_by) as (output, done):
            if done:
                print(
                    f"note: {output.name} has {done} of {len(texts)} texts already",
                    file=sys.stderr,
                )
            if done == len(texts):
                return
            tokens = []
            for location, text in prompts:
                with _input_error_prefix(location):
                    tokens.append(self.tokens(text))
                    check_prompt(tokens[-1], self.predictor.context)
            self.reserve(min(self.config.max_batch_size, len(texts) - done), max(map(len, tokens)))
            jobs = [_Job(texts[i], tokens[i // samples], i) for i in range(done, len(texts))]
            records = self._search(jobs) if self.beam.beam_width else self._sample(jobs)
            with tqdm(total=len(texts), initial=done, unit="text", disable=None) as progress:
                for record in records:
                    output.write(json.dumps(record | {"made_by": made_by}, ensure_ascii=False) + "\n")
                    output.flush()
                    progress.update()

    def _made_by(self) -> str:
        """Return a fingerprint of model and settings, so that no file mixes two."""
        settings = (self.config.stop, self.config.logprobs, self.config.num_samples, self.sampling, self.beam)
        model = (self.predictor.origin, self.predictor.stages.dtype, str(self.tokenizer))
        return hashlib.blake2b(repr((settings, model)).encode(), digest_size=6).hexdigest()

    def _search(self, jobs: list[_Job]) -> Iterator[dict[str, Any]]:
        for job in jobs:
            text, score = self.best_text(job.tokens)
            yield {"prompt": job.prompt, "text": text, "score": score}

    def _sample(self, jobs: list[_Job]) -> Iterator[dict[str, Any]]:
        batcher, remaining = Batcher(self.predictor, self.tokenizer), iter(jobs)
        started: collections.deque[tuple[_Job, SequenceState]] = collections.deque()
        texts: dict[SequenceState, str] = {}
        while True:
            # Start only as many as there are rows: waiting requests take memory.
            for job in itertools.islice(remaining, self.predictor.rows - len(batcher.waiting)):
                sequence = batcher.add(self.request(job.tokens, self.seeded(job.number)))
                started.append((job, sequence))
                texts[sequence] = ""
            if not started:
                return
            for sequence, text in batcher.step():
                texts[sequence] += text
            while started and started[0][1].reason is not None:
                job, sequence = started.popleft()
                check_finite(sequence)
                record = {"prompt": job.prompt, "text": texts.pop(sequence), "finish_reason": sequence.reason}
                yield record | ({} if self.config.logprobs is None else {"tokens": self._tokens(sequence)})

    def _tokens(self, sequence: SequenceState) -> list[dict[str, Any]]:
        text, entries = TokenText(self.tokenizer, sequence.request.prompt), list[dict[str, Any]]()
        # The token that ends the text has a log-probability, the last one, but is not in `new`.
        for token, logprob in zip(sequence.new, sequence.logprobs, strict=False):
            top = [{"id": i, "text": text.name(i), "logprob": value} for i, value in logprob.top]
            entries.append({"id": token, "text": text.add(token), "logprob": logprob.logprob, "top": top})
        if entries:
            entries[-1]["text"] += text.finish()
        return entries


class _Job(NamedTuple):
    """A text to generate: its prompt, the prompt's tokens, and the text's index."""

    prompt: str
    tokens: list[int]
    number: int


@contextlib.contextmanager
def _input_error_prefix(location: str) -> Iterator[None]:
    """Prefix an `InputError` of the block with a flag or a line."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{location}: {error}") from None


def _prompts(config: TextConfig) -> Iterator[tuple[str, str]]:
    """Yield the location and the text of each prompt."""
    if config.sample_input_file is not None:
        yield from read_prompts("--sample-input-file", Path(config.sample_input_file))
    elif config.prompt is not None:
        yield "--prompt", config.prompt
    else:
        raise InputError("JSON output needs --prompt or --sample-input-file")


@contextlib.contextmanager
def _open_output(name: str | None, prompts: list[str], made_by: str) -> Iterator[tuple[TextIO, int]]:
    """Open the output; yields it and its number of complete lines of these prompts and `made_by`."""
    if name is None:
        yield sys.stdout, 0
        return
    path, done, size = Path(name), 0, 0
    try:
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith(b"\n"):
                break  # an interrupted run left it incomplete
            if done == len(prompts) or _identity(line) != (prompts[done], made_by):
                raise InputError(
                    f"--sample-output-file: {path}, line {done + 1}: is from another prompt, checkpoint or settings; "
                    "choose another file"
                )
            done, size = done + 1, size + len(line)
        with path.open("a", encoding="utf-8") as file:
            file.truncate(size)
            yield file, done
    except OSError as error:
        raise InputError(f"--sample-output-file: {path}: {error.strerror}") from None


def _identity(line: bytes) -> tuple[str, str] | None:
    try:
        record = json.loads(line)
        return record["prompt"], record["made_by"]
    except (ValueError, KeyError, TypeError):
        return None
