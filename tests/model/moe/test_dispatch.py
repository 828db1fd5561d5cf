"""Rows of tokens find their experts and return, on one rank and over expert-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_distributed
from models import CPU, config_of
from torch import Tensor

from megatron.data.zigzag import Zigzag
from megatron.model.context import ModelContext
from megatron.model.moe import layer
from megatron.model.moe.dispatch import Rows, all_sorted_rows, by_all_gather, by_all_to_all, sorted_rows
from megatron.model.moe.experts import Experts
from megatron.model.moe.layer import dropped_copies
from megatron.ops.backend import PLAIN, Ops
from megatron.parallel.mesh import ALONE, Axis, init_mesh

TOKENS, HIDDEN, WIDTH, EXPERTS, TOPK = 24, 32, 8, 8, 3
FLAGS = f"--swiglu --disable-bias-linear --num-experts {EXPERTS} --moe-ffn-hidden-size {WIDTH}"
NO_CAPACITY, PADDED = None, TOKENS


def inputs() -> dict[str, Tensor]:
    """Tokens, weights and indices of their experts, weights of all experts, and the gradient of the output, fp64.

    Some copies are dropped. No token of the first quarter chooses an expert of the first half, and no token at all
    chooses expert 5.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scores = normal(TOKENS, EXPERTS)
    scores[: TOKENS // 4, : EXPERTS // 2] = -9
    scores[:, 5] = -10
    indices = scores.topk(TOPK, dim=1).indices
    indices[torch.rand(TOKENS, TOPK, generator=generator) < 0.1] = EXPERTS
    return {
        "x": normal(TOKENS, HIDDEN),
        "weights": normal(TOKENS, TOPK),
        "indices": indices,
        "weight1": normal(EXPERTS, 2 * WIDTH, HIDDEN),
        "weight2": normal(EXPERTS, WIDTH, HIDDEN),
        "grad": normal(TOKENS, HIDDEN),
    }


def expected() -> dict[str, Tensor]:
    """Output and gradients, one token and expert at a time."""
    values = inputs()
    x, weights, w1, w2 = leaves = [
        values[name].requires_grad_() for name in ("x", "weights", "weight1", "weight2")
    ]
    rows = []
    for token in range(TOKENS):
        row = torch.zeros(HIDDEN, dtype=torch.float64)
        for k, expert in enumerate(values["indices"][token].tolist()):
            if expert < EXPERTS:
                gate, up = (w1[expert] @ x[token]).chunk(2)
                row = row + weights[token, k] * (F.silu(gate) * up) @ w2[expert]
        rows.append(row)
    out = torch.stack(rows)
    grads = torch.autograd.grad(out, leaves, values["grad"])
    return {"out": out.detach()} | dict(zip(("x", "weights", "weight1", "weight2"), grads, strict=True))


def dispatched(flags: str, gathers: bool, capacity: int | None, ops: Ops = PLAIN) -> dict[str, list]:
    """Parts of this rank of output and gradients; the tokens are divided among the ranks."""
    config = config_of(f"{FLAGS} {flags}")
    with init_mesh(config.parallel, CPU) as mesh:
        sizes = {"vocab_size": 60, "padded_vocab_size": 64}
        context = ModelContext.on_mesh(mesh, config.model, config.parallel, ops=ops, **sizes)
        experts, axis, values = Experts(config.model, context).double(), context.expert, inputs()
        with torch.no_grad():
            for weight, whole in ((experts.weight1, "weight1"), (experts.weight2, "weight2")):
                rows = values[whole].flatten(0, 1)
                weight.copy_(torch.cat([rows[slice(*part)] for part in weight.shard_spec.ranges]))
        x, weights, indices, grad = (
            values[name].chunk(axis.size)[axis.rank] for name in ("x", "weights", "indices", "grad")
        )
        x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        if gathers:
            out = by_all_gather(x, weights, indices, experts, axis, capacity)
        else:
            arguments = experts, axis, context.expert_tp, capacity, True
            out = by_all_to_all(x, weights, indices, *arguments, lambda: None)
        leaves = [x, weights, experts.weight1, experts.weight2]
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        names = ("out", "x", "weights", "weight1", "weight2")
        ranges = {name: getattr(experts, name).shard_spec.ranges for name in names[3:]}
        return {name: value.tolist() for name, value in zip(names, found, strict=True)} | {"ranges": [ranges]}


def assert_dispatched(processes: int, flags: str, gathers: bool, capacity: int | None) -> None:
    whole, results = expected(), run_distributed(dispatched, processes, flags, gathers, capacity)
    for name in ("out", "x", "weights"):
        found = torch.tensor([row for result in results for row in result[name]], dtype=torch.float64)
        torch.testing.assert_close(found, whole[name], rtol=1e-12, atol=1e-12)
    for result in results:
        for name, ranges in result["ranges"][0].items():
            rows = whole[name].flatten(0, 1)
            part = torch.cat([rows[slice(*range_)] for range_ in ranges])
            found = torch.tensor(result[name], dtype=torch.float64)
            torch.testing.assert_close(found, part, rtol=1e-12, atol=1e-12)


EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"


@pytest.mark.parametrize("capacity", [NO_CAPACITY, PADDED])
@pytest.mark.parametrize("gathers", [False, True], ids=["all-to-all", "all-gather"])
@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (2, f"{EP} 2"),
        pytest.param(2, f"{ETP} 2", marks=pytest.mark.slow),
        pytest.param(4, f"{EP} 4", marks=pytest.mark.slow),
        pytest.param(4, f"{EP} 2 {ETP} 2", marks=pytest.mark.slow),
        pytest.param(4, f"--tensor-model-parallel-size 2 {EP} 4 {ETP} 1", marks=pytest.mark.slow),
    ],
)
def test_ranks_compute_what_one_does(processes: int, flags: str, gathers: bool, capacity: int | None) -> None:
    assert_dispatched(processes, flags, gathers, capacity)


@pytest.mark.parametrize(
    ("capacity", "ops"), [(NO_CAPACITY, PLAIN), (PADDED, PLAIN), (NO_CAPACITY, Ops(expert_rows=2))]
)
def test_one_rank_computes_the_formula(capacity: int | None, ops: Ops) -> None:
    whole, result = expected(), dispatched("", False, capacity, ops)
    for name, values in whole.items():
        found = torch.tensor(result[name], dtype=torch.float64)
        torch.testing.assert_close(found, values.view_as(found), rtol=1e-12, atol=1e-12)


def taken(rows: Rows) -> list[list[float]]:
    return rows.take(torch.tensor([[10.0], [20.0], [30.0]])).squeeze(1).tolist()


def test_rows_are_sorted_by_expert_and_token() -> None:
    key = torch.tensor([1, 0, 0, 1, 2, 1])  # two copies each of three tokens; 2 has no place
    rows, sizes = sorted_rows(key, 2, 2)
    assert sizes == [2, 3] and taken(rows) == [10, 20, 10, 20, 30]
    assert rows.add(torch.tensor([[1.0], [2], [4], [8], [16]])).squeeze(1).tolist() == [5, 10, 16]


def test_rows_whose_numbers_stay_on_the_device() -> None:
    key = torch.tensor([1, 0, 0, 1, 3, 1])
    (rows, sizes), (found, on_device) = sorted_rows(key, 4, 2), all_sorted_rows(key, 4, 2)
    assert on_device.tolist() == sizes and taken(found) == taken(rows)
    x = torch.randn(6, 1)
    assert torch.equal(found.add(x), rows.add(x))


def test_rows_are_padded_to_the_capacity() -> None:
    rows, sizes = sorted_rows(torch.tensor([1, 0, 0, 1, 2, 1]), 2, 2, capacity=4)
    assert sizes == [4, 4] and taken(rows) == [10, 20, 0, 0, 10, 20, 30, 0]
    assert rows.take_copies(torch.arange(1.0, 7).view(3, 2)).tolist() == [2, 3, 0, 0, 1, 4, 6, 0]
    values = torch.tensor([[1.0], [2], [100], [100], [4], [8], [16], [100]])
    assert rows.add(values).squeeze(1).tolist() == [5, 10, 16]


def test_as_many_rows_as_copies_with_a_dropped_one() -> None:
    rows, sizes = sorted_rows(torch.tensor([1, 0, 0, 1, 2, 1]), 2, 2, capacity=3)
    assert sizes == [3, 3] and taken(rows) == [10, 20, 0, 10, 20, 30]
    assert rows.add(torch.tensor([[1.0], [2], [100], [4], [8], [16]])).squeeze(1).tolist() == [5, 10, 16]


def test_rows_of_each_expert_are_padded_to_a_multiple() -> None:
    rows, sizes = sorted_rows(torch.tensor([1, 3, 3, 1, 4, 1]), 4, 2, multiple=2)
    assert sizes == [0, 4, 0, 2] and taken(rows) == [10, 20, 30, 0, 10, 20]
    values = torch.tensor([[1.0], [2], [4], [100], [8], [16]])
    assert rows.add(values).squeeze(1).tolist() == [9, 18, 4]


def test_taking_and_adding_are_transposes() -> None:
    """In their gradients too, dropped copies and padding included."""
    key = torch.tensor([0, 3, 1, 1, 2, 3, 0, 3])
    x, y = (torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (4, 9))
    for capacity, multiple, length in ((None, 1, 5), (2, 1, 6), (3, 1, 9), (None, 3, 9)):
        rows, _ = sorted_rows(key, 3, 2, capacity=capacity, multiple=multiple)
        assert torch.autograd.gradcheck(rows.take, (x,)) and torch.autograd.gradcheck(rows.add, (y[:length],))
        torch.testing.assert_close((rows.take(x) * y[:length]).sum(), (x * rows.add(y[:length])).sum())


@pytest.mark.parametrize(
    ("policy", "dropped"), [("probs", [True, False, False]), ("position", [False, False, True])]
)
def test_copies_beyond_the_capacity_are_dropped(policy: str, dropped: list[bool]) -> None:
    weights = torch.tensor([[0.1], [0.3], [0.2]])
    found = find_dropped(weights, policy)
    assert found == dropped


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_weights_that_are_not_a_number_count(policy: str) -> None:
    """An expert never takes more than its capacity, so that such a step reaches the check of its loss."""
    assert find_dropped(torch.full((3, 1), torch.nan), policy).count(False) == 2


def test_of_equal_weights_the_first_tokens_are_kept() -> None:
    assert find_dropped(torch.full((3, 1), 0.5), "probs") == [False, False, True]
    assert find_dropped(torch.tensor([[0.2], [0.5], [0.2]]), "probs") == [False, False, True]


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("documents", [False, True])
def test_ranks_that_divide_a_sequence_drop_the_same_copies(
    documents: bool, cp: int, tp: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has a chunk from either half of the sequence, or of each half of it with documents."""
    length, config = 32, capacity_config(policy)
    zigzag = Zigzag.of(length, cp, documents=documents)
    weights = torch.randint(1, 4, (length, 1)) / 4
    indices = torch.randint(config.num_experts, (length, 1))
    whole = dropped_copies(weights, indices, (length, 1), 3, config, ALONE, ALONE)
    assert 0 < whole.sum() < length
    used = torch.full((length, 1, config.num_experts), -1.0)
    used.squeeze(1).scatter_(1, indices, weights)
    # Context-parallel ranks one after the other, and within each its tensor-parallel ones.
    gathered = torch.cat([zigzag.shard(used, 0, rank) for rank in range(cp)])
    monkeypatch.setattr(layer, "all_gather", lambda x, axis: gathered)
    for rank in range(cp * tp):
        of_rank, s = Axis(rank // tp, cp), length // (cp * tp)
        part = slice(rank % tp * s, rank % tp * s + s)
        mine = [zigzag.shard(x, 0, of_rank.rank)[part] for x in (weights, indices, whole)]
        found = dropped_copies(*mine[:2], (s, 1), 3, config, Axis(rank, cp * tp), of_rank, documents)
        assert torch.equal(found, mine[2])


def capacity_config(policy: str) -> Any:
    return config_of(
        f"{FLAGS} --moe-router-topk 1 --moe-router-pre-softmax --moe-expert-capacity-factor 1 "
        f"--moe-token-drop-policy {policy}"
    ).model


def find_dropped(weights: Tensor, policy: str) -> list[bool]:
    """For three tokens of a sequence that choose one expert, which takes two."""
    config = capacity_config(policy)
    indices = torch.zeros(3, 1, dtype=torch.int64)
    return dropped_copies(weights, indices, (3, 1), 2, config, ALONE, ALONE).flatten().tolist()
