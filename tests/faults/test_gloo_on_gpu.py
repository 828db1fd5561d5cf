"""Runs on GPUs that gloo lacks a collective for do not start."""

from __future__ import annotations

import pytest
import torch

from megatron.arguments import parse_run_config
from megatron.errors import InputError
from megatron.faults import gloo_on_gpu
from megatron.faults.gloo_on_gpu import check_gloo_on_gpu
from megatron.parallel.mesh import Axis

FLAGS = """
    --num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 10
""".split()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size"),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "--sequence-parallel"),
        ("--use-distributed-optimizer", "--use-distributed-optimizer"),
        ("--tensor-model-parallel-size 2", None),
    ],
)
def test_the_flag_is_named(monkeypatch: pytest.MonkeyPatch, flags: str, named: str | None) -> None:
    def check(backend: str, device: str) -> None:
        monkeypatch.setattr(gloo_on_gpu, "choose_device", lambda _: torch.device(device))
        words = [*FLAGS, *flags.split(), "--distributed-backend", backend]
        check_gloo_on_gpu(parse_run_config(words, description="", defaults={}), Axis())

    check("gloo", "cpu")
    check("nccl", "cuda")
    if named is None:
        check("gloo", "cuda")
        return
    with pytest.raises(InputError, match=f"gloo on GPUs does not support {named}; use nccl$"):
        check("gloo", "cuda")
