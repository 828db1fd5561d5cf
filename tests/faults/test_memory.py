from __future__ import annotations

import pytest
import torch

from megatron.arguments import parse_run_config
from megatron.errors import InputError
from megatron.faults.memory import memory_errors_explained
from megatron.pretrain_gpt import DEFAULTS

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --micro-batch-size 4 --lr 1 "
    "--train-iters 1 --mock-data --device cpu"
)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: no memory")]
)
def test_too_little_memory_names_the_flags_to_lower(error: RuntimeError) -> None:
    config = parse_run_config(FLAGS.split(), description="", defaults=DEFAULTS)
    with (
        pytest.raises(
            InputError, match=r"^cpu has too little memory .* --micro-batch-size 4, --seq-length 16 or"
        ),
        memory_errors_explained(config),
    ):
        raise error


def test_other_errors_stay_as_they_are() -> None:
    config = parse_run_config(FLAGS.split(), description="", defaults=DEFAULTS)
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), memory_errors_explained(config):
        raise RuntimeError("shapes differ")
