"""Twenty steps of training, compared over layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from megatron.data.batch import Batch
from megatron.optim.layout import FlatParam
from megatron.parallel.mesh import Mesh
from megatron.training.engine import Engine
from megatron.verify.assemble import local_index
from megatron.verify.capture import parameter_place

STEPS = 20

# Parts of tensors: name of the parameter, indices in the flat whole tensor, and values.
Parts = list[tuple[str, np.ndarray, np.ndarray]]


def train_engine(
    engine: Engine, mesh: Mesh, batches: Callable[[int], Sequence[Batch]], samples: int
) -> dict[str, Any]:
    """Train a rank. Returns its share of the losses, and its parts of the gradients of each step and of the weights.

    Args:
        batches: the number of a step to the microbatches of all replicas.
        samples: their number of samples.
    """
    losses, grads = [], []
    for step in range(STEPS):
        mine = batches(step)[mesh.dp.rank :: mesh.dp.size]
        batch = engine.next_global_batch(iter(mine), len(mine), step * samples)
        share = engine.forward_backward(batch)
        engine.reduce_gradients()
        losses.append(share.double().numpy() / mesh.tp.size)
        grads.append([part_of(*part) for part in engine.buffer.parts(engine.optimizer.grads)])
        engine.optimizer.step(share, lr=2e-3, weight_decay=0.1)
    engine.buffer.gather.finish()
    weights = [part_of(*part) for part in engine.buffer.held_params()]
    return {"losses": np.array(losses), "gradients": grads, "weights": weights}


def part_of(param: FlatParam, values: Tensor, begin: int) -> tuple[str, np.ndarray, np.ndarray]:
    index, valid = local_index(parameter_place(param.shard_spec, (begin, begin + values.numel())))
    return param.name, index[valid].numpy(), values.detach()[valid].float().numpy()  # a copy


def assert_same_steps(ranks: Sequence[dict[str, Any]], reference: dict[str, Any]) -> None:
    """The losses, gradients and weights of all ranks together are those of one process."""
    losses = sum(rank["losses"] for rank in ranks)
    np.testing.assert_allclose(losses, reference["losses"], rtol=1e-5)
    for step, grads in enumerate(reference["gradients"]):
        assert_equal([rank["gradients"][step] for rank in ranks], grads, 1e-4 if step else 1e-5)
    assert_equal([rank["weights"] for rank in ranks], reference["weights"], 1e-4)


def assert_equal(ranks: list[Parts], reference: Parts, tolerance: float) -> None:
    """The parts of all ranks are those of the whole tensors, relative to the norms of these, and leave nothing out."""
    whole = {name: values for name, _, values in reference}
    missing = {name: np.ones(len(values), dtype=bool) for name, values in whole.items()}
    for name, index, values in (part for parts in ranks for part in parts):
        difference = np.linalg.norm(values - whole[name][index]) / np.linalg.norm(whole[name])
        assert difference < tolerance, f"{name}: {difference}"
        missing[name][index] = False
    assert not any(left.any() for left in missing.values())
