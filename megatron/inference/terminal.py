"""Generation for people and files: one prompt, many, or a conversation."""

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

from megatron.flags import Config, InputError, flag
from megatron.inference.batching import Batcher, Growth, Request
from megatron.inference.beam import BeamConfig, beam_search
from megatron.inference.predictor import Predictor, check_prompt
from megatron.inference.sampling import SamplingConfig
from megatron.inference.text import TextStream
from megatron.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """What is continued; with neither a prompt nor a file, what you type."""

    prompt: str | None = flag(None, "text to continue")
    sample_input_file: str | None = flag(
        None,
        "a prompt on each line that is not blank; of a file that ends in .jsonl the string under 'prompt' or 'text'",
        metavar="FILE",
    )
    sample_output_file: str | None = flag(
        None,
        "write JSON lines here; what a run that was stopped has written is kept, and continued",
        metavar="FILE",
    )
    num_samples: int = flag(1, "texts for each prompt", low=1)
    stop: tuple[str, ...] | None = flag(None, "strings that end the text, and are not part of it", nargs="+")
    logprobs: int | None = flag(
        None,
        "in JSON, tell each token's log-probability, and so many of the most probable ones",
        low=0,
        high=1000,
    )
    max_batch_size: int = flag(32, "texts that grow side by side", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None and self.sample_input_file is not None:
            raise InputError("give --prompt or --sample-input-file, and not both")
        if any(not text for text in self.stop or ()):
            raise InputError("--stop: a string is empty; leave it out")
        if self.logprobs is not None and not self.writes_json:
            raise InputError(
                "--logprobs is told in JSON: add --sample-input-file, --sample-output-file or --num-samples"
            )

    @property
    def writes_json(self) -> bool:
        """Whether what comes out are JSON lines, in place of text that appears as it is made."""
        return self.num_samples > 1 or bool(self.sample_input_file or self.sample_output_file)


def run(
    config: TextConfig,
    sampling: SamplingConfig,
    beam: BeamConfig,
    predictor: Predictor,
    tokenizer: Tokenizer,
) -> None:
    """Do what the flags say.

    Raises:
        InputError: a prompt is empty, too long or no text, or a file cannot be read or written.
    """
    writer = _Writer(config, sampling, beam, predictor, tokenizer)
    if config.writes_json:
        writer.write_all()
    elif config.prompt is not None:
        with _naming("--prompt"):
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
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{text[:40]!r} is not UTF-8 text") from None
        return self.tokenizer.tokenize(text)

    def reserve(self, rows: int, tokens: int) -> None:
        """Make room for texts of so many tokens, and those that follow on them."""
        flag = "--beam-width, " if self.beam.beam_width else "--max-batch-size, " if rows > 1 else ""
        longest = tokens + self.sampling.out_seq_length
        with _naming(f"{flag}--out-seq-length"):
            self.predictor.reserve(self.beam.beam_width or rows, min(self.predictor.context, longest))

    def stream(self, tokens: list[int], sampling: SamplingConfig, begin: str = "") -> tuple[str, bool]:
        """Continue a prompt on the screen, after `begin`; gives the text, and whether it came to its end rather than to
        Ctrl-C."""
        self.reserve(1, len(tokens))
        if self.beam.beam_width:
            text, _ = self.best_text(tokens)
            print(begin + text)
            return text, True
        batcher = Batcher(self.predictor, self.tokenizer)
        growth = batcher.add(self.request(tokens, sampling))
        sys.stdout.write(begin)
        whole, finished = "", False
        with contextlib.suppress(KeyboardInterrupt):
            while growth.reason is None:
                for _, text in batcher.step():
                    sys.stdout.write(text)
                    sys.stdout.flush()
                    whole += text
            finished = True
        print()
        if growth.reason == "length" and len(growth.new) < sampling.out_seq_length:
            print(
                f"note: ended after {len(growth.new)} of {sampling.out_seq_length} tokens: with the prompt's "
                f"{len(tokens)} they fill the {self.predictor.context} that the model sees",
                file=sys.stderr,
            )
        return whole, finished

    def request(self, tokens: list[int], sampling: SamplingConfig) -> Request:
        return Request(
            prompt=tokens,
            sampling=sampling,
            stops=self.config.stop or (),
            alternatives=self.config.logprobs,
        )

    def seeded(self, number: int) -> SamplingConfig:
        """The settings of a text by its number: each has the seed after that of the one before."""
        return dataclasses.replace(self.sampling, seed=(self.sampling.seed + number) % 2**32)

    def best_text(self, tokens: list[int]) -> tuple[str, float]:
        """What beam search finds, and its score."""
        best = beam_search(
            self.predictor,
            tokens,
            self.beam,
            length=self.sampling.out_seq_length,
            eod=self.tokenizer.special_ids.get("eod"),
        )[0]
        stream, text = TextStream(self.tokenizer, tokens, self.config.stop or ()), ""
        for token in best.tokens:
            text += stream.add(token)
            if stream.stopped:
                break
        return text + stream.finish(), best.score

    def converse(self) -> None:
        """Continue what is typed, time after time, all that was said before it being its context."""
        with contextlib.suppress(ImportError):  # which lets a terminal edit lines, and is not on every system
            import readline  # noqa: F401
        if sys.stdin.isatty():
            print("Type a text to be continued. Ctrl-C stops the continuation, /new forgets, Ctrl-D ends.")
        # torchrun ends all at Ctrl-C, and waits for that.
        alone = self.predictor.mesh.world.size == 1
        said, turn = "", 0
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
                if line == "/new":
                    said = ""
                    continue
                context = said + line
                text, finished = self.stream(self._newest(self.tokens(context)), self.seeded(turn))
                said, turn = f"{context}{text}\n", turn + 1
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

    def _newest(self, tokens: list[int]) -> list[int]:
        """The end of a context, as much of it as leaves room for an answer."""
        room = max(self.predictor.context - self.sampling.out_seq_length, self.predictor.context // 2)
        if len(tokens) > room:
            print(f"note: the first {len(tokens) - room} tokens are forgotten", file=sys.stderr)
        return tokens[-room:]

    def write_all(self) -> None:
        """Continue all prompts, and write JSON lines in their order."""
        prompts, samples = list(_prompts(self.config)), self.config.num_samples
        texts = [text for _, text in prompts for _ in range(samples)]
        made_by = self._made_by()
        with _open_output(self.config.sample_output_file, texts, made_by) as (output, done):
            if done:
                print(
                    f"note: {output.name} has {done} of the {len(texts)} texts already, which are kept",
                    file=sys.stderr,
                )
            if done == len(texts):
                return
            tokens = []
            for place, text in prompts:
                with _naming(place):
                    tokens.append(self.tokens(text))
                    check_prompt(tokens[-1], self.predictor.context)
            self.reserve(min(self.config.max_batch_size, len(texts) - done), max(map(len, tokens)))
            jobs = [_Job(texts[i], tokens[i // samples], i) for i in range(done, len(texts))]
            records = self._best(jobs) if self.beam.beam_width else self._grown(jobs)
            with tqdm(total=len(texts), initial=done, unit="text", disable=None) as progress:
                for record in records:
                    output.write(json.dumps(record | {"made_by": made_by}, ensure_ascii=False) + "\n")
                    output.flush()
                    progress.update()

    def _made_by(self) -> str:
        """A fingerprint of what decides on the texts of prompts, so that a file never mixes two."""
        told = (self.config.stop, self.config.logprobs, self.config.num_samples, self.sampling, self.beam)
        model = (self.predictor.origin, self.predictor.stages.dtype, str(self.tokenizer))
        return hashlib.blake2b(repr((told, model)).encode(), digest_size=6).hexdigest()

    def _best(self, jobs: list[_Job]) -> Iterator[dict[str, Any]]:
        for job in jobs:
            text, score = self.best_text(job.tokens)
            yield {"prompt": job.prompt, "text": text, "score": score}

    def _grown(self, jobs: list[_Job]) -> Iterator[dict[str, Any]]:
        batcher, coming = Batcher(self.predictor, self.tokenizer), iter(jobs)
        started: collections.deque[tuple[_Job, Growth]] = collections.deque()
        texts: dict[Growth, str] = {}
        while True:
            # Those further on would take memory while they wait.
            for job in itertools.islice(coming, self.predictor.rows - len(batcher.waiting)):
                growth = batcher.add(self.request(job.tokens, self.seeded(job.number)))
                started.append((job, growth))
                texts[growth] = ""
            if not started:
                return
            for growth, text in batcher.step():
                texts[growth] += text
            while started and started[0][1].reason is not None:
                job, growth = started.popleft()
                record = {"prompt": job.prompt, "text": texts.pop(growth), "finish_reason": growth.reason}
                yield record | ({} if self.config.logprobs is None else {"tokens": self._tokens(growth)})

    def _tokens(self, growth: Growth) -> list[dict[str, Any]]:
        def told(token: int, logprob: float) -> dict[str, Any]:
            return {"id": token, "text": self.tokenizer.detokenize([token]), "logprob": logprob}

        # The score of an end of document is last, and has no token.
        pairs = zip(growth.new, growth.scores, strict=False)
        return [
            {**told(token, score.logprob), "top": [told(*pair) for pair in score.alternatives]}
            for token, score in pairs
        ]


class _Job(NamedTuple):
    """A text that is to be made: its prompt, the prompt's tokens, and its number among all texts."""

    prompt: str
    tokens: list[int]
    number: int


@contextlib.contextmanager
def _naming(place: str) -> Iterator[None]:
    """A block whose `InputError` is about a flag or a line."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def _prompts(config: TextConfig) -> Iterator[tuple[str, str]]:
    """Where each prompt stands, and the prompt."""
    if config.sample_input_file is None:
        if config.prompt is None:
            raise InputError("give --prompt or --sample-input-file, as texts are to be written as JSON")
        yield "--prompt", config.prompt
        return
    path = Path(config.sample_input_file)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"--sample-input-file: {path} cannot be read ({error.strerror})") from None
    if not any(line.strip() for line in lines):
        raise InputError(f"--sample-input-file: {path} is empty")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            text = line.decode("utf-8")
            yield place, _prompt_of(json.loads(text)) if path.suffix == ".jsonl" else text
        except UnicodeDecodeError:
            raise InputError(f"{place}: is not UTF-8 text") from None
        except (ValueError, RecursionError):
            raise InputError(f"{place}: is no JSON object with a text under 'prompt' or 'text'") from None


def _prompt_of(value: Any) -> str:
    text = value.get("prompt", value.get("text")) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ValueError
    return text


@contextlib.contextmanager
def _open_output(name: str | None, prompts: list[str], made_by: str) -> Iterator[tuple[TextIO, int]]:
    """Where JSON lines are written, and how many of them are there already, of the same prompts and `made_by`."""
    if name is None:
        yield sys.stdout, 0
        return
    path, done, size = Path(name), 0, 0
    try:
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith(b"\n"):
                break  # a run was stopped in it
            if done == len(prompts) or _identity(line) != (prompts[done], made_by):
                raise InputError(
                    f"--sample-output-file: {path}, line {done + 1}: is of another prompt, checkpoint or settings, and "
                    "so no part of this run; name another file"
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
