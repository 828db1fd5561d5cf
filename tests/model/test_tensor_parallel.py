"""Collectives of tensor parallelism, against the papers; vocabulary-parallel cross entropy, against torch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from distributed import run_distributed
from models import CPU, flat, position_ids
from torch.distributed.tensor.debug import CommDebugMode

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.ops.linear_cross_entropy import LinearCrossEntropy
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import init_mesh


def count_collectives(counts: dict) -> dict[str, int]:
    """Number of collectives by a name that is the same in all versions of torch."""
    names = {"allreduce": "all-reduce", "allgather": "all-gather", "reduce_scatter": "reduce-scatter"}
    found: dict[str, int] = {}
    for operator, number in counts.items():
        name = next(ours for theirs, ours in names.items() if theirs in str(operator))
        found[name] = found.get(name, 0) + number
    return found


def all_collectives() -> list[tuple[dict[str, int], dict[str, int]]]:
    """`collectives` of one layer and of three, without and with sequence parallelism."""
    return [collectives(layers, sequence) for sequence in (False, True) for layers in (1, 3)]


@pytest.fixture(scope="module")
def counted() -> list[tuple[dict[str, int], dict[str, int]]]:
    return run_distributed(all_collectives, 2)[0]


def collectives(layers: int, sequence: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of a forward and of a backward pass."""
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=sequence)
    config = ModelConfig(num_layers=layers, hidden_size=16, num_attention_heads=2, max_position_embeddings=8)
    with init_mesh(parallel, CPU) as mesh:
        context = ModelContext(vocab_size=60, padded_vocab_size=64, tp=mesh.tp, sequence_parallel=sequence)
        model = GPTModel(config, context)
        flat(model, mesh=mesh, config=parallel).initialize(1)
        tokens = torch.arange(8).unsqueeze(0)
        with CommDebugMode() as forward:
            grad = torch.full((1, 8), 1 / 8)
            losses = model(tokens, position_ids(0, 1, 8, CPU), labels_bs=tokens, loss_grad_bs=grad)
        with CommDebugMode() as backward:
            losses.mean().backward()
        return count_collectives(forward.get_comm_counts()), count_collectives(backward.get_comm_counts())


@pytest.mark.parametrize("sequence", [False, True])
def test_collectives_of_a_layer(counted: list, sequence: bool) -> None:
    """Two all-reduces in forward and two in backward (1909.08053 figure 4).

    With sequence parallelism each becomes an all-gather and a reduce-scatter, and backward gathers the inputs of the
    two column-parallel layers again (2205.05198 section 4.2).
    """
    per_layer = []
    one, three = counted[2:] if sequence else counted[:2]
    for few, many in zip(one, three, strict=True):
        per_layer.append(
            {name: (many[name] - few.get(name, 0)) // 2 for name in many if many[name] != few[name]}
        )
    forward, backward = per_layer
    if sequence:
        assert forward == {"all-gather": 2, "reduce-scatter": 2}
        assert backward == {"all-gather": 2 + 2, "reduce-scatter": 2}
        # Outside the layers: embedding; output layer and loss, whose gradients forward computes.
        assert one[0] == {"all-gather": 2 + 1, "reduce-scatter": 2 + 1 + 1, "all-reduce": 2}
        assert one[1] == {"all-gather": 4 + 1, "reduce-scatter": 2}
    else:
        assert forward == backward == {"all-reduce": 2}
        assert one[0] == {"all-reduce": 2 + 1 + 2 + 1}
        assert one[1] == {"all-reduce": 2}


# With padded columns, and ranks that hold only padding.
VOCABULARIES = (40, 33, 12)


def losses_and_gradients() -> list[tuple[np.ndarray, np.ndarray]]:
    """Losses and gradients of the logits, of each vocabulary without and with the losses' gradients told to forward."""
    found = []
    with init_mesh(ParallelConfig(tensor_model_parallel_size=4), CPU) as mesh:
        for vocab_size, known in itertools.product(VOCABULARIES, (False, True)):
            logits, labels, weights = example(vocab_size)
            # With this output layer its input is the logits. A chunk has two rows.
            eye = torch.eye(40).chunk(4)[mesh.tp.rank]
            loss = LinearCrossEntropy(chunk_bytes=2 * eye.nbytes // 40)
            x = logits.clone().requires_grad_()
            layout = {"axis": mesh.tp, "sequence_parallel": False}
            told = weights if known else None
            losses = loss(x, eye, None, labels, told, vocab_size=vocab_size, **layout)
            (losses * weights).sum().backward()
            found.append((losses.detach().numpy(), x.grad.numpy()))
    return found


def example(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 5 * torch.randn(7, 3, 40, generator=generator)
    logits[..., vocab_size:] = 1e4  # logits of padding have no effect
    labels = torch.randint(vocab_size, (7, 3), generator=generator)
    return logits, labels, torch.rand(7, 3, generator=generator)


def test_cross_entropy_equals_torch() -> None:
    processes = run_distributed(losses_and_gradients, 4)
    cases = itertools.product(VOCABULARIES, (False, True))
    for (vocab_size, _), results in zip(cases, zip(*processes, strict=True), strict=True):
        logits, labels, weights = example(vocab_size)
        logits.requires_grad_()
        expected = torch.nn.functional.cross_entropy(
            logits[..., :vocab_size].permute(0, 2, 1), labels, reduction="none"
        )
        (expected * weights).sum().backward()
        for losses, gradient in results:
            torch.testing.assert_close(torch.from_numpy(losses), expected.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(torch.from_numpy(gradient), logits.grad, rtol=1e-5, atol=1e-6)
