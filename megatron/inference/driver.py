"""Load models on all processes of a run, and drive them from the first one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import TypeVar

from megatron.errors import InputError
from megatron.inference.config import InferenceConfig
from megatron.inference.load import build_gpt, find_any_checkpoint
from megatron.inference.predictor import NO_TIMEOUT, Predictor, run_worker
from megatron.parallel.apart import world_apart
from megatron.parallel.mesh import choose_device, init_mesh
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.config import TokenizerConfig

T = TypeVar("T")


def driver(
    config: InferenceConfig, tokenizer: TokenizerConfig, work: Callable[[Predictor, Tokenizer], T]
) -> T | None:
    """Load a model and call `work`, as `drive_all` does."""
    return drive_all([config], tokenizer, lambda models: work(*models[0]))


def drive_all(
    configs: Sequence[InferenceConfig],
    tokenizer: TokenizerConfig,
    work: Callable[[list[tuple[Predictor, Tokenizer]]], T],
) -> T | None:
    """Load models on all processes and call `work` on the first; the others serve as its workers.

    Args:
        configs: of the models, with the same layout.

    Returns:
        The result of `work`; None on the other processes.

    Raises:
        InputError: see `load_gpt`; or there are more processes than a replica of the model has.
    """
    config = configs[0]
    with init_mesh(config.parallel, choose_device(config.device)) as mesh:
        if mesh.dp.size > 1:
            raise InputError(
                f"{mesh.world.size} processes, but --tensor-model-parallel-size {mesh.tp.size} times "
                f"--pipeline-model-parallel-size {mesh.pp.size} is {mesh.tp.size * mesh.pp.size}; start that many"
            )
        models, commands = list[tuple[Predictor, Tokenizer]](), world_apart(mesh.world, NO_TIMEOUT)
        for index, config in enumerate(configs):
            checkpoint = find_any_checkpoint(config, tokenizer, mesh)
            model, loaded = build_gpt(checkpoint, config, tokenizer, mesh)
            origin = str(checkpoint.folder.resolve())
            models.append((Predictor([model], mesh, origin=origin, commands=commands, index=index), loaded))
        predictors = [predictor for predictor, _ in models]
        if not mesh.is_first:
            # Ctrl-C reaches all processes; the first one decides what it ends.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            run_worker(predictors)
            return None
        with predictors[0].driving():
            return work(models)
