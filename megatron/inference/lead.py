"""A model on all processes of a run, for work that the first of them does."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TypeVar

from megatron.flags import InputError
from megatron.inference.config import InferenceConfig
from megatron.inference.load import build_gpt, find_any_checkpoint
from megatron.inference.predictor import Predictor
from megatron.parallel.mesh import choose_device, init_mesh
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.config import TokenizerConfig

T = TypeVar("T")


def lead(
    config: InferenceConfig, tokenizer: TokenizerConfig, work: Callable[[Predictor, Tokenizer], T]
) -> T | None:
    """Load a model on all processes, and on the first one do `work` with it, while the others compute their parts.

    Returns:
        What `work` gives; None on the other processes.

    Raises:
        InputError: as of `load_gpt`, or there are more processes than one copy of the model takes.
    """
    with init_mesh(config.parallel, choose_device(config.device)) as mesh:
        if mesh.dp.size > 1:
            raise InputError(
                f"{mesh.world.size} processes were started, and --tensor-model-parallel-size {mesh.tp.size} times "
                f"--pipeline-model-parallel-size {mesh.pp.size} takes {mesh.tp.size * mesh.pp.size}; start as many"
            )
        checkpoint = find_any_checkpoint(config, tokenizer, mesh)
        model, chosen = build_gpt(checkpoint, config, tokenizer, mesh)
        predictor = Predictor(model, mesh, origin=str(checkpoint.folder.resolve()))
        if not mesh.is_first:
            # Ctrl-C reaches all; what it ends is for the first one to say.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return predictor.follow()
        with predictor.leading():
            return work(predictor, chosen)
