"""Model class for lm-evaluation-harness: `lm_eval.simple_evaluate(model=MegatronLM("my/run"), tasks=[...])`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from megatron.errors import InputError
from megatron.evaluation.score import Pair, score, windows
from megatron.inference.batching import Batcher, Request, generate
from megatron.inference.config import InferenceConfig
from megatron.inference.load import load_gpt
from megatron.inference.predictor import Predictor
from megatron.inference.sampling import SamplingConfig
from megatron.parallel.mesh import Mesh, choose_device
from megatron.tokenizer.config import TokenizerConfig

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable, make_table
except ImportError:
    raise InputError("lm-evaluation-harness is not installed: pip install lm_eval==0.4.13") from None

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

# Default of lm_eval's own models, for tasks without max_gen_toks.
MAX_GEN_TOKS = 256


class MegatronLM(TemplateLM):
    """A GPT on one device, from a native checkpoint or a Hugging Face directory.

    Texts are tokenized and cut into windows as by lm_eval's `hf` model. Log-probabilities are computed in fp32 for any
    dtype of the weights.
    """

    def __init__(
        self,
        load: str,
        *,
        batch_size: int = 1,
        device: str = "auto",
        add_bos_token: bool = False,
        tokenizer: TokenizerConfig | None = None,
        seed: int = SamplingConfig.seed,
    ) -> None:
        """
        Args:
            batch_size: texts per forward pass.
            device: auto, cpu or cuda.
            add_bos_token: begin every text with the tokenizer's beginning-of-sequence token.
            tokenizer: replaces the tokenizer saved with the checkpoint.
            seed: for tasks that sample.

        Raises:
            InputError: there is no such checkpoint, it holds no GPT, or the tokenizer does not fit or lacks a token.
        """
        super().__init__()
        self.load = load
        self.batch_size = batch_size
        self.seed = seed
        self._device = choose_device(device)
        self.model, self.tokenizer = load_gpt(
            InferenceConfig(load=load), tokenizer or TokenizerConfig(), Mesh(device=self._device)
        )
        self.bos = self.tokenizer.bos if add_bos_token else None

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The token before the first one of a text, so that this one is scored too."""
        return self.eot_token_id if self.bos is None else self.bos

    def get_model_info(self) -> dict[str, Any]:
        """Description of the model in lm_eval's results."""
        parameters = list(self.model.parameters())
        return {
            "load": self.load,
            "model_num_parameters": sum(p.numel() for p in parameters),
            "model_dtype": str(parameters[0].dtype),
            "add_bos_token": self.bos is not None,
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        tokens = self.tokenizer.tokenize(string)
        if self.bos is None or add_special_tokens is False or tokens[:1] == [self.bos]:
            return tokens
        return [self.bos, *tokens]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        longest = self.model.config.max_position_embeddings
        for (_, text), _, continuation in requests:
            if not 0 < len(continuation) <= longest:
                raise InputError(
                    f"--tasks: cannot score {text[:40]!r}: it adds {len(continuation)} tokens to its context, and "
                    f"must add 1 to {longest}"
                )
        # A context of spaces only has no tokens: lm_eval moves the spaces to the continuation.
        pairs = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        answers = self._score(pairs, "loglikelihood", disable_tqdm)
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _score(self, pairs: list[Pair], desc: str, disable_tqdm: bool) -> list[tuple[float, bool]]:
        with tqdm(total=len(pairs), desc=desc, disable=disable_tqdm) as progress:
            scores = score(self.model, pairs, batch_size=self.batch_size, advance=progress.update)
        return [(s.logprob, s.is_greedy) for s in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        longest = self.model.config.max_position_embeddings
        pairs = [
            list(windows(self.tok_encode(text), self.prefix_token_id, longest))
            for (text,) in (request.args for request in requests)
        ]
        answers = iter(self._score([w for ws in pairs for w in ws], "loglikelihood_rolling", disable_tqdm))
        sums = [sum(next(answers)[0] for _ in ws) for ws in pairs]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        longest = self.model.config.max_position_embeddings
        by_settings: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            by_settings.setdefault(repr(request.args[1]), []).append(i)
        texts: dict[int, str] = {}
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm) as progress:
            for indices in by_settings.values():
                config, until = sampling(requests[indices[0]].args[1], self.seed, longest)
                prompts = {i: self.tok_encode(requests[i].args[0]) or [self.prefix_token_id] for i in indices}
                for i, text in self._continue(prompts, config, until, progress.update).items():
                    texts[i] = text
        for i, text in texts.items():
            self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return [texts[i] for i in range(len(requests))]

    def _continue(
        self,
        prompts: dict[int, list[int]],
        config: SamplingConfig,
        until: list[str],
        advance: Callable[[], object],
    ) -> dict[int, str]:
        """Generate continuations of prompts; a prompt that leaves too little room loses its beginning.

        Samples depend on the seed and on the prompt's index, not on the other prompts of its batch.
        """
        room = self.model.config.max_position_embeddings - config.out_seq_length
        # The longest first, so that out-of-memory errors come at once.
        order = sorted(prompts, key=lambda i: len(prompts[i]), reverse=True)
        requests = [
            Request(
                prompt=prompts[i][-room:],
                sampling=dataclasses.replace(config, seed=config.seed + i),
                stops=until,
            )
            for i in order
        ]
        length = len(requests[0].prompt) + config.out_seq_length
        rows = min(self.batch_size, len(order))
        predictor = Predictor([self.model], Mesh(device=self._device))
        predictor.reserve(rows, length)
        texts = generate(Batcher(predictor, self.tokenizer), requests, lambda _: advance())
        return dict(zip(order, texts, strict=True))


def sampling(generation_kwargs: dict[str, Any], seed: int, longest: int) -> tuple[SamplingConfig, list[str]]:
    """Convert a task's `generation_kwargs` to a sampling configuration and stop strings.

    Args:
        longest: the model's context length.

    Raises:
        InputError: they have an unsupported setting, or an invalid value.
    """
    given: dict[str, Any] = dict(normalize_gen_kwargs(generation_kwargs, MAX_GEN_TOKS))
    until = [stop for stop in given.pop("until") if stop]
    new, greedy = given.pop("max_gen_toks"), not given.pop("do_sample")
    if new >= longest:
        raise InputError(
            f"--tasks: max_gen_toks {new} leaves no room for a prompt in the model's context of {longest} tokens; set "
            "a smaller value in the task's generation_kwargs"
        )
    if greedy:
        given.pop("temperature", None)
    unknown = given.keys() - {"temperature", "top_k", "top_p"}
    if unknown:
        name = min(unknown)
        raise InputError(
            f"--tasks: generation_kwargs has {name} {given[name]!r}; supported are until, max_gen_toks, do_sample, "
            "temperature, top_k and top_p"
        )
    return SamplingConfig(out_seq_length=new, greedy=greedy, seed=seed, **given), until


def run_tasks(
    model: MegatronLM, names: list[str], include_path: Path | None, limit: float | None
) -> tuple[dict[str, Any], str]:
    """Run the lm_eval tasks with these names or patterns.

    Args:
        include_path: a directory with further tasks.
        limit: number of samples of each task, or a fraction of them; None takes all.

    Returns:
        lm_eval's results with JSON-serializable values, and as a table.

    Raises:
        InputError: there is no such task, or its data is not available.
    """
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    tasks = {name: manager.match_tasks([name]) for name in names}
    missing = [name for name, found in tasks.items() if not found]
    if missing:
        where = "" if include_path is None else f", nor in {include_path}"
        raise InputError(f"--tasks: {', '.join(missing)}: no such task in lm_eval{where}")
    matched = sorted({task for found in tasks.values() for task in found})
    try:
        results = lm_eval.simple_evaluate(
            model=model,
            tasks=matched,
            task_manager=manager,
            limit=limit,
            log_samples=False,
            # The model exists already; lm_eval records these in the results.
            batch_size=model.batch_size,
            device=str(model.device),
        )
    except OSError as error:  # from the datasets library
        raise InputError(f"--tasks: the data is not available: {str(error).splitlines()[0]}") from error
    table = make_table(results)
    if results.get("groups"):
        table += "\n" + make_table(results, "groups")
    return json.loads(json.dumps(results, default=handle_non_serializable)), table
