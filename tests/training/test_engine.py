"""One step on several processes, looked at from inside."""

from __future__ import annotations

import numpy as np
import torch
from distributed import run_distributed
from models import CPU, config_of, engine_of

from megatron.parallel.mesh import init_mesh
from megatron.training.layout import describe_layout


def batches(count: int):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        tokens = torch.randint(60, (2, 17), generator=generator)
        yield {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": torch.ones(2, 16),
            "position_ids": torch.arange(16).expand(2, 16),
        }


def tables(flags: str) -> list[np.ndarray]:
    """The tables with a row for every id that this process holds after three steps."""
    config = config_of(flags)
    with init_mesh(config.parallel, CPU) as mesh:
        engine = engine_of(mesh, config)
        for step in range(3):
            engine.train_step(
                batches(2), num_microbatches=2, consumed_samples=4 * step, lr=1e-2, weight_decay=0.1
            )
        engine.buffer.finish_gathers()
        parameters = [item for chunk in engine.chunks for item in chunk.named_parameters()]
        names = ("embedding.word_embeddings.weight", "output_layer.weight")
        return [p.detach().float().numpy() for name, p in parameters if name in names]


def test_tied_embeddings_stay_equal_bit_for_bit() -> None:
    for processes, flags in (
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--pipeline-model-parallel-size 2 --bf16 --num-layers-per-virtual-pipeline-stage 1"),
        (
            8,
            "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --use-distributed-optimizer "
            "--overlap-param-gather",
        ),
    ):
        held = run_distributed(tables, processes, flags)
        half = processes // 2
        for first, last in zip(held[:half], held[half:], strict=True):
            assert len(first) == len(last) == 1
            np.testing.assert_array_equal(first[0], last[0])


def layout(flags: str) -> str:
    config = config_of(flags)
    with init_mesh(config.parallel, CPU) as mesh:
        return describe_layout(engine_of(mesh, config))


def test_the_table_of_a_layout() -> None:
    """The paper's count, 12 L h² (1 + 13 / 12h + (V + s) / 12 L h), and the final norm's 2 h which it leaves out."""
    flags = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer"
    table = run_distributed(layout, 4, flags)[0]
    parameters = 4 * (12 * 32**2 + 13 * 32) + (60 + 16) * 32 + 2 * 32
    first, last = (4 * (12 * 32**2 + 13 * 32) // 2 + extra for extra in ((64 + 16) * 32, 64 * 32 + 2 * 32))
    assert table.splitlines()[:4] == [
        "  layout      tensor 1 x data 2 x pipeline 2 = 4 processes; distributed optimizer; interleaved schedule",
        f"  stage 0     ranks 0-1; layers 0, 2; {first:,} parameters on each rank",
        f"  stage 1     ranks 2-3; layers 1, 3; {last:,} parameters on each rank",
        f"  parameters  {parameters:,} in all, each counted once, without what pads the vocabulary",
    ]


def dropped(sequence: str) -> list[np.ndarray]:
    """Where dropout of the embedding, and of attention, left zeros in a tensor of ones."""
    from megatron.model.layers import TensorParallel
    from megatron.parallel.random import dropout

    flags = f"--tensor-model-parallel-size 2 {sequence}"
    config = config_of(flags)
    with init_mesh(config.parallel, CPU) as mesh:
        tp = TensorParallel(mesh.tp, bool(sequence))
        between = dropout(torch.ones(1000), 0.5, (1, 2), 3, "mlp", tp.stream)
        inside = dropout(torch.ones(1000), 0.5, (1, 2), 3, "attention", tp.axis.rank)
        return [between.numpy(), inside.numpy()]


def test_dropout_differs_where_processes_hold_parts_and_is_equal_elsewhere() -> None:
    (between, inside), (other_between, other_inside) = run_distributed(dropped, 2, "")
    assert (between == other_between).all()
    assert 400 < (inside != other_inside).sum() < 600
    (between, _), (other_between, _) = run_distributed(dropped, 2, "--sequence-parallel")
    assert 400 < (between != other_between).sum() < 600
