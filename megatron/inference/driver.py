"""Load a model on all processes of a run, and drive it from the first one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TypeVar

from megatron.errors import InputError
from megatron.inference.config import InferenceConfig
from megatron.inference.load import build_gpt, find_any_checkpoint
from megatron.inference.predictor import Predictor
from megatron.parallel.mesh import choose_device, init_mesh
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.config import TokenizerConfig

T = TypeVar("T")


def driver(
    config: InferenceConfig, tokenizer: TokenizerConfig, work: Callable[[Predictor, Tokenizer], T]
) -> T | None:
    """Load a model on all processes and call `work` on the first; the others serve as its workers.

    Returns:
        The result of `work`; None on the other processes.

    Raises:
        InputError: see `load_gpt`; or there are more processes than a replica of the model has.
    """
    with init_mesh(config.parallel, choose_device(config.device)) as mesh:
        if mesh.dp.size > 1:
            raise InputError(
                f"{mesh.world.size} processes, but --tensor-model-parallel-size {mesh.tp.size} times "
                f"--pipeline-model-parallel-size {mesh.pp.size} is {mesh.tp.size * mesh.pp.size}; start that many"
            )
        checkpoint = find_any_checkpoint(config, tokenizer, mesh)
        model, loaded_tokenizer = build_gpt(checkpoint, config, tokenizer, mesh)
        predictor = Predictor([model], mesh, origin=str(checkpoint.folder.resolve()))
        if not mesh.is_first:
            # Ctrl-C reaches all processes; the first one decides what it ends.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            predictor.worker()
            return None
        with predictor.driving():
            return work(predictor, loaded_tokenizer)
