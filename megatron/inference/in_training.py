"""Sample texts from the model that a run trains."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.errors import InputError
from megatron.inference.batching import Batcher, Request, generate
from megatron.inference.config import SampleTextsConfig
from megatron.inference.load import inference_ops
from megatron.inference.predictor import Predictor, check_prompt, run_worker
from megatron.inference.prompts import read_prompts
from megatron.inference.sampling import SamplingConfig
from megatron.model.gpt import GPTModel
from megatron.optim.buffer import ParamBuffer
from megatron.parallel.collectives import raise_on_all_ranks
from megatron.parallel.mesh import ALONE, Axis, Mesh
from megatron.parallel.parameters import master
from megatron.parallel.recompute import NO_RECOMPUTE
from megatron.reports.reports import Reports
from megatron.tokenizer import Tokenizer
from megatron.training.engine import Engine
from megatron.training.loop import Hook, Trainer

# Settings of every sample; the seed is the run's, so that samples differ between iterations by the weights alone.
TOKENS, TEMPERATURE, TOP_P = 64, 0.8, 0.95
# Texts generated at once.
MAX_ROWS = 32
# Name of the output layer's weight.
OUTPUT = "output_layer.weight"


class SampleTexts(Hook):
    """Continue the prompts of --sample-prompts every --sample-interval iterations, and report the texts.

    Sampling has random generators of its own and leaves training as it is. The first replica generates, in the layout
    that it is trained in.
    """

    def __init__(self, reports: Reports) -> None:
        """`reports` hands the texts to writers."""
        self.reports = reports

    @contextmanager
    def during_run(self, trainer: Trainer) -> Iterator[None]:
        flags, mesh = trainer.config.plugin(SampleTextsConfig), trainer.mesh
        self.interval, self.requests = flags.sample_interval, list[tuple[str, Request]]()
        if flags.sample_prompts is not None:
            if trainer.task.name != "GPT":
                raise InputError(f"--sample-interval needs a GPT, and this run trains {trainer.task.name}")
            # Too little memory for whole parameters ends the run here, and not at the first samples.
            with whole_params(trainer.engine.buffer):
                self.predictor = make_predictor(trainer.engine)
            with raise_on_all_ranks(mesh.world, InputError):
                if mesh.is_first:
                    seed, context = trainer.config.training.seed, self.predictor.context
                    path = Path(flags.sample_prompts)
                    self.requests = make_requests(path, trainer.tokenizer, seed=seed, context=context)
        yield

    def after_step(self, trainer: Trainer) -> None:
        if not trainer.is_due(self.interval):
            return
        with trainer.clock.paused(), trainer.engine.phases("sample"):
            trainer.engine.optimizer.finish()
            with whole_params(trainer.engine.buffer):
                if trainer.mesh.dp_cp.rank == 0:
                    if trainer.mesh.is_first:
                        self._sample(trainer)
                    else:
                        run_worker([self.predictor])
                    self.predictor.cache = None  # its memory is training's until the next samples

    def _sample(self, trainer: Trainer) -> None:
        iteration = trainer.state.iteration
        requests = [request for _, request in self.requests]
        longest = max(len(request.prompt) for request in requests)
        with self.predictor.driving():
            try:
                length = min(longest + TOKENS, self.predictor.context)
                self.predictor.reserve(min(len(requests), MAX_ROWS), length)
                texts = generate(Batcher(self.predictor, trainer.tokenizer), requests)
            except InputError as error:  # too little memory, or weights that are not finite
                trainer.log(f"warning: no samples at iteration {iteration}: {error}")
                return
        for number, ((prompt, _), text) in enumerate(zip(self.requests, texts, strict=True), 1):
            prompt_json, text_json = (json.dumps(part, ensure_ascii=False) for part in (prompt, text))
            trainer.log(f" sample {number} at iteration {iteration} | {prompt_json} | {text_json}")
            self.reports.writers.text(f"sample {number}", prompt + text, iteration)


@contextmanager
def whole_params(buffer: ParamBuffer) -> Iterator[None]:
    """Context with the values of the last step in all parameters, sharded ones too. Every process must take part."""
    for index in range(len(buffer.buckets)):
        buffer.gather.start_whole(index)
    buffer.gather.finish()
    yield
    for index in range(len(buffer.buckets)):
        buffer.gather.free(index)


def make_requests(path: Path, tokenizer: Tokenizer, *, seed: int, context: int) -> list[tuple[str, Request]]:
    """Read the prompts of a file, each with the request that continues it.

    Raises:
        InputError: a prompt is malformed, or leaves no room for a token in the context.
    """
    requests = []
    for number, (location, prompt) in enumerate(read_prompts("--sample-prompts", path)):
        try:
            tokens = tokenizer.tokenize(prompt)
            check_prompt(tokens, context)
        except InputError as error:
            raise InputError(f"--sample-prompts: {location}: {error}") from None
        sampling = SamplingConfig(
            out_seq_length=TOKENS, temperature=TEMPERATURE, top_p=TOP_P, seed=(seed + number) % 2**32
        )
        requests.append((prompt, Request(prompt=tokens, sampling=sampling)))
    return requests


def make_predictor(engine: Engine) -> Predictor:
    """Make a predictor of the weights in training, in the layout of one replica. Every process must take part.

    Its modules share the memory of those in training, and have neither sequence parallelism nor recomputation: a step
    of generation has one position.
    """
    trained = engine.model
    context = dataclasses.replace(
        trained.context,
        cp=ALONE,
        tp_cp=trained.context.tp,
        sequence_parallel=False,
        recompute=NO_RECOMPUTE,
        ops=inference_ops(engine.dtype, engine.mesh.device),
    )
    chunks = []
    for module, layers in zip(trained.modules, trained.chunks, strict=True):
        # With the padding's logits, which are cut off once they are gathered, and without dropped tokens.
        config = dataclasses.replace(
            engine.config.model,
            mask_padded_vocab=False,
            moe_expert_capacity_factor=None,
            moe_pad_expert_input_to_capacity=False,
        )
        with torch.device("meta"):
            chunk = GPTModel(config, context, layers)
        chunk.load_state_dict(gpt_tensors(module, chunk), assign=True)
        chunks.append(chunk.requires_grad_(False))
    mesh = replica_mesh(engine.mesh)
    return Predictor(chunks, mesh, commands=mesh.world)


def gpt_tensors(trained: nn.Module, chunk: GPTModel) -> dict[str, Tensor]:
    """Tensors of a chunk in training that the same chunk of a plain GPT has, by name."""
    tensors = trained.state_dict()
    # With multi-token prediction the last stage has the tied table there.
    tensors.setdefault(OUTPUT, tensors.get("mtp.word_embeddings.weight"))
    for name, p in trained.named_parameters():
        if name.endswith("router.expert_bias"):  # the router reads it in fp32
            tensors[name] = master(p)
    return {name: tensors[name] for name in chunk.state_dict()}


def replica_mesh(mesh: Mesh) -> Mesh:
    """The mesh of this process's replica, without the others. Every process must take part.

    Only the first replica has a group for its commands: it generates.
    """
    pp, replicas, tp = mesh.pp.size, mesh.dp_cp.size, mesh.tp.size
    if pp * tp == 1:
        return dataclasses.replace(mesh, world=ALONE, dp=ALONE, cp=ALONE, dp_cp=ALONE)
    layout = torch.arange(pp * replicas * tp).view(pp, replicas, tp)
    group = dist.new_group(layout[:, 0].flatten().tolist(), mesh.timeout, "gloo")
    ranks = tuple(layout[:, mesh.dp_cp.rank].flatten().tolist())
    world = Axis(ranks.index(mesh.world.rank), len(ranks), group, "replica", ranks, mesh.heartbeat)
    return dataclasses.replace(mesh, world=world, dp=ALONE, cp=ALONE, dp_cp=ALONE)
