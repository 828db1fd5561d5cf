"""A weight that differs between replicas is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from models import CPU, FLAGS, config_of, engine_of
from optim.test_buffer import make, start_gathers

from megatron.errors import TransientFault
from megatron.faults import replicas
from megatron.faults.replicas import check_replicas, checksum
from megatron.parallel.mesh import init_mesh


def flip_and_check(flags: str, rank: int, name: str, element: int) -> list[str]:
    """Messages of the check before and after one bit of a weight is flipped on one rank."""
    config = config_of(flags)
    with init_mesh(config.parallel, CPU) as mesh:
        engine = engine_of(mesh, config)
        messages = []
        for flip in (False, True):
            if flip and mesh.world.rank == rank:
                entry = next(entry for entry in engine.buffer.flat_params if entry.name == name)
                bits = entry.view(engine.buffer.params).view(-1)[element:].view(torch.int16)
                bits[0] ^= 1
            try:
                check_replicas(engine.buffer)
                messages.append("")
            except TransientFault as fault:
                messages.append(str(fault))
        return messages


@pytest.mark.parametrize(
    ("processes", "flags", "rank", "name", "where"),
    [
        (
            3,
            "--bf16",
            1,
            "decoder.layers.2.mlp.linear_fc1.weight",
            "rank 1 of the data-parallel ranks [0, 1, 2]",
        ),
        (
            2,
            "--use-distributed-optimizer",
            0,
            "decoder.final_layernorm.bias",
            "rank 0, 1 of the data-parallel",
        ),
        (
            2,
            "--tensor-model-parallel-size 2",
            1,
            "decoder.layers.0.input_layernorm.weight",
            "of the tensor-parallel",
        ),
        (
            2,
            "--tensor-model-parallel-size 2 --group-query-attention --num-query-groups 1",
            1,
            "decoder.layers.3.self_attention.linear_qkv.weight",
            "of the tensor-parallel",
        ),
        (
            2,
            "--pipeline-model-parallel-size 2",
            1,
            "embedding.word_embeddings.weight",
            "of the pipeline ranks [0, 1]",
        ),
    ],
)
def test_rank_and_parameter_are_named(processes: int, flags: str, rank: int, name: str, where: str) -> None:
    element = -3 if "groups" in flags else 40 if name.endswith("weight") and "norm" not in name else 5
    for before, after in run_distributed(flip_and_check, processes, flags, rank, name, element):
        assert before == ""
        assert f"{name} on {where}" in after or (where in after and f"{name} on rank 0, 1 " in after), after


def test_when_a_run_compares_replicas(pretrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[object] = []
    monkeypatch.setattr(replicas, "check_replicas", compared.append)
    flags = [*FLAGS.split(), "--train-iters", 5, "--eval-iters", 0, "--num-workers", 0]
    interval, save = ["--check-weight-replicas-interval", 2], ["--save", tmp_path, "--save-interval", 3]
    for more, times in (
        (interval, 2),
        ([*interval, *save], 2 + 2),
        ([], 0),
    ):  # saved after iterations 3 and 5
        compared.clear()
        pretrain(*flags, *more)
        assert len(compared) == times


def test_the_check_waits_for_all_parameters() -> None:
    _, buffer = make(use_distributed_optimizer=True, overlap_param_gather=True)
    start_gathers(buffer)
    check_replicas(buffer)
    assert not buffer.gather.pending


def test_checksum_covers_every_bit_and_the_order() -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    sums = {int(checksum(values))}
    for i in range(0, 3000, 101):
        for bit in (0, 13, 31):
            changed = values.clone()
            changed.view(torch.int32)[i] ^= torch.tensor(
                1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32
            )
            sums.add(int(checksum(changed)))
    assert len(sums) == 1 + 30 * 3
    assert int(checksum(values.flip(0))) not in sums
