"""Check that gloo has the collectives that a run on GPUs needs."""

from __future__ import annotations

from megatron.errors import InputError
from megatron.parallel.mesh import Axis, choose_device
from megatron.training.config import RunConfig


def check_gloo_on_gpu(config: RunConfig, _: Axis) -> None:
    """Check that the flags need no collectives that gloo lacks for GPU tensors: it reduces them only.

    Raises:
        InputError: names the flag.
    """
    parallel = config.parallel
    if parallel.distributed_backend != "gloo" or choose_device(config.training.device).type != "cuda":
        return
    needs = {
        "--pipeline-model-parallel-size": parallel.pipeline_model_parallel_size > 1,
        "--sequence-parallel": parallel.sequence_parallel,
        "--use-distributed-optimizer": parallel.use_distributed_optimizer,
        "--distribute-saved-activations": parallel.distribute_saved_activations,
    }
    for name, given in needs.items():
        if given:
            raise InputError(f"--distributed-backend: gloo on GPUs does not support {name}; use nccl")
