"""Limits of --padding-free, where samples of BERT are the documents of one sequence."""

from __future__ import annotations

import torch

from megatron.errors import InputError
from megatron.training.config import RunConfig


def check_padding_free(config: RunConfig) -> None:
    """Check that attention within samples costs no more than their padding, which a mask of all pairs would.

    Raises:
        InputError: it has only such masks on the run's device.
    """
    device = config.training.device
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if not (config.data.padding_free and on_gpu):
        return
    if config.model.attention_dropout > 0:
        raise InputError(
            f"--padding-free: on a GPU, attention within samples has no --attention-dropout "
            f"({config.model.attention_dropout}); use --attention-dropout 0, or leave out --padding-free"
        )
    if config.ops.ops_backend in ("plain", "apex") or not config.ops.torch_compile:
        raise InputError(
            "--padding-free: attention within samples needs compiled layers on a GPU; leave out --padding-free, "
            "--no-torch-compile and --ops-backend plain or apex"
        )
    if config.parallel.context_parallel_size > 1:
        raise InputError(
            "--padding-free: with --context-parallel-size, attention within samples is for CPUs only; leave one out"
        )
