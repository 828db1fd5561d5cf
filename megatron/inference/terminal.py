"""Generation for people and files: one prompt, many, or a conversation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from megatron.flags import Config, InputError, flag
from megatron.inference.batching import Batcher, Growth, Request
from megatron.inference.beam import BeamConfig, beam_search
from megatron.inference.predictor import Predictor
from megatron.inference.sampling import SamplingConfig
from megatron.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """What is continued; with neither a prompt nor a file, what you type."""

    prompt: str | None = flag(None, "text to continue")
    sample_input_file: str | None = flag(
        None,
        "a prompt on each line; of a file that ends in .jsonl the string under 'prompt' or 'text'",
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
        InputError: a prompt is empty or too long, or a file cannot be read or written.
    """
    writer = _Writer(config, sampling, beam, predictor, tokenizer)
    if config.writes_json:
        writer.write_all()
    elif config.prompt is not None:
        if not writer.stream(config.prompt, sampling, shows_prompt=True)[1]:
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

    def stream(self, prompt: str, sampling: SamplingConfig, *, shows_prompt: bool) -> tuple[str, bool]:
        """Continue a prompt on the screen; gives the text, and whether it came to its end rather than to Ctrl-C."""
        tokens = self.tokenizer.tokenize(prompt)
        self.predictor.reserve(
            self.beam.beam_width or 1,
            min(self.predictor.context, max(len(tokens), 1) + sampling.out_seq_length),
        )
        if self.beam.beam_width:
            text, shown = self.best_text(tokens)[0], prompt if shows_prompt else ""
            print(shown + text)
            return text, True
        batcher = Batcher(self.predictor, self.tokenizer)
        try:
            growth = batcher.add(self.request(tokens, sampling))
        except InputError as error:
            raise InputError(f"--prompt: {error}") from None
        whole, finished = "", False
        with contextlib.suppress(KeyboardInterrupt):
            while growth.reason is None:
                for _, text in batcher.step():
                    sys.stdout.write(prompt + text if shows_prompt and not whole else text)
                    sys.stdout.flush()
                    shows_prompt, whole = False, whole + text
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

    def best_text(self, tokens: list[int]) -> tuple[str, float]:
        """What beam search finds, and its score."""
        if not tokens:
            raise InputError("--prompt: is empty; give at least one token to begin with")
        best = beam_search(
            self.predictor,
            tokens,
            self.beam,
            length=self.sampling.out_seq_length,
            eod=self.tokenizer.special_ids.get("eod"),
        )[0]
        before = self.tokenizer.detokenize(tokens)
        text = self.tokenizer.detokenize([*tokens, *best.tokens])[len(before) :]
        ends = [at for stop in self.config.stop or () if (at := text.find(stop)) >= 0]
        return text[: min(ends, default=len(text))], best.score

    def converse(self) -> None:
        """Continue what is typed, time after time, all that was said before it being its context."""
        with contextlib.suppress(ImportError):  # which lets a terminal edit lines, and is not on every system
            import readline  # noqa: F401
        if sys.stdin.isatty():
            print("Type a text to be continued. Ctrl-C stops the continuation, /new forgets, Ctrl-D ends.")
        said, turn = "", 0
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                return
            if line == "/new":
                said = ""
                continue
            sampling = dataclasses.replace(self.sampling, seed=self.sampling.seed + turn)
            try:
                context = self._shortened(said + line)
                text, _ = self.stream(context, sampling, shows_prompt=False)
            except InputError as error:
                print(f"error: {error}", file=sys.stderr)
                continue
            said, turn = f"{context}{text}\n", turn + 1

    def _shortened(self, text: str) -> str:
        """The end of a text, as much of it as leaves room for an answer."""
        room = max(self.predictor.context - self.sampling.out_seq_length, self.predictor.context // 2)
        tokens = self.tokenizer.tokenize(text)
        if len(tokens) <= room:
            return text
        print(f"note: the first {len(tokens) - room} tokens are forgotten", file=sys.stderr)
        return self.tokenizer.detokenize(tokens[-room:]).lstrip("\ufffd")

    def write_all(self) -> None:
        """Continue all prompts, and write JSON lines in their order."""
        prompts = list(_prompts(self.config))
        jobs = [
            (prompt, i * self.config.num_samples + j)
            for i, prompt in enumerate(prompts)
            for j in range(self.config.num_samples)
        ]
        with _open_output(self.config.sample_output_file, [prompt for prompt, _ in jobs]) as (output, done):
            tokens = [self.tokenizer.tokenize(prompt) for prompt, _ in jobs[done:]]
            if not tokens:
                return
            longest = min(self.predictor.context, max(map(len, tokens)) + self.sampling.out_seq_length)
            rows = self.beam.beam_width or min(self.config.max_batch_size, len(tokens))
            self.predictor.reserve(rows, longest)
            with tqdm(total=len(jobs), initial=done, unit="text", disable=None) as progress:
                for record in self._records(jobs[done:], tokens):
                    output.write(json.dumps(record, ensure_ascii=False) + "\n")
                    output.flush()
                    progress.update()

    def _records(self, jobs: list[tuple[str, int]], tokens: list[list[int]]) -> Iterator[dict[str, Any]]:
        if self.beam.beam_width:
            for (prompt, _), ids in zip(jobs, tokens, strict=True):
                text, score = self.best_text(ids)
                yield {"prompt": prompt, "text": text, "score": score}
            return
        batcher, growths = Batcher(self.predictor, self.tokenizer), []
        for (prompt, number), ids in zip(jobs, tokens, strict=True):
            sampling = dataclasses.replace(self.sampling, seed=self.sampling.seed + number)
            try:
                growths.append(batcher.add(self.request(ids, sampling)))
            except InputError as error:
                raise InputError(f"{prompt[:40]!r}: {error}") from None
        texts = dict.fromkeys(growths, "")
        for (prompt, _), growth in zip(jobs, growths, strict=True):
            while growth.reason is None:
                for grown, text in batcher.step():
                    texts[grown] += text
            record = {"prompt": prompt, "text": texts.pop(growth), "finish_reason": growth.reason}
            yield record | ({} if self.config.logprobs is None else {"tokens": self._tokens(growth)})

    def _tokens(self, growth: Growth) -> list[dict[str, Any]]:
        def told(token: int, logprob: float) -> dict[str, Any]:
            return {"id": token, "text": self.tokenizer.detokenize([token]), "logprob": logprob}

        return [
            {**told(token, score.logprob), "top": [told(*pair) for pair in score.alternatives]}
            for token, score in zip(
                growth.new, growth.scores, strict=False
            )  # that of an end of document is last
        ]


def _prompts(config: TextConfig) -> Iterator[str]:
    if config.sample_input_file is None:
        if config.prompt is None:
            raise InputError("give --prompt or --sample-input-file, as texts are to be written as JSON")
        yield config.prompt
        return
    path = Path(config.sample_input_file)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"--sample-input-file: {path} cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8")
            yield _prompt_of(json.loads(text)) if path.suffix == ".jsonl" else text
        except UnicodeDecodeError:
            raise InputError(f"{path}, line {number}: is not UTF-8 text") from None
        except (ValueError, RecursionError):
            raise InputError(
                f"{path}, line {number}: is no JSON object with a text under 'prompt' or 'text'"
            ) from None


def _prompt_of(value: Any) -> str:
    text = value.get("prompt", value.get("text")) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ValueError
    return text


@contextlib.contextmanager
def _open_output(name: str | None, prompts: list[str]) -> Iterator[tuple[TextIO, int]]:
    """Where JSON lines are written, and how many of them are there already."""
    if name is None:
        yield sys.stdout, 0
        return
    path, done, size = Path(name), 0, 0
    try:
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith(b"\n"):
                break  # a run was stopped in it
            if done == len(prompts) or _record_prompt(line) != prompts[done]:
                raise InputError(
                    f"--sample-output-file: {path}, line {done + 1}: is not what these prompts give; name another file"
                )
            done, size = done + 1, size + len(line)
        with path.open("a", encoding="utf-8") as file:
            file.truncate(size)
            yield file, done
    except OSError as error:
        raise InputError(f"--sample-output-file: {path}: {error.strerror}") from None


def _record_prompt(line: bytes) -> str | None:
    try:
        return json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        return None
