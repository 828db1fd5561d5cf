"""Routing and auxiliary losses equal those of NVIDIA's functions (nvidia_routing.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.model.moe.dispatch import sorted_rows
from megatron.model.moe.layer import dropped_copies, expert_capacity
from megatron.model.moe.router import auxiliary_losses, best, choose_experts
from megatron.model.moe_config import MoEConfig
from megatron.parallel.mesh import ALONE

from .nvidia_routing import inputs

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "nvidia_routing.json").read_text())


def config(case: dict[str, Any], **others: Any) -> MoEConfig:
    return MoEConfig(
        num_experts=case["experts"],
        moe_router_topk=case["topk"],
        moe_router_score_function=case["score_function"],
        moe_router_pre_softmax=case["use_pre_softmax"],
        moe_router_topk_scaling_factor=case["scaling_factor"],
        moe_router_num_groups=case["num_groups"],
        moe_router_group_topk=case["group_topk"],
        **others,
    )


def close(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=6e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(0, len(CASES), 20))
def test_choice_of_experts_and_rows(seed: int) -> None:
    for number, case in enumerate(CASES[seed : seed + 20], seed):
        logits, bias = (torch.from_numpy(x) for x in inputs(number, case["experts"]))
        settings = config(case, moe_expert_capacity_factor=case["capacity_factor"])
        weights, indices = choose_experts(logits, settings, bias if case["bias"] else None)
        assert indices.tolist() == case["indices"], number
        close(weights, case["probs"])
        rows, _ = sorted_rows(indices.flatten(), case["experts"], case["topk"])
        assert (rows.source // rows.copies).tolist() == case["permuted"]
        # NVIDIA's capacity is that of all tokens of a rank; with one sequence it is ours.
        tokens = len(logits)
        capacity = expert_capacity(settings, tokens)
        dropped = dropped_copies(weights, indices, (tokens, 1), capacity, settings, ALONE, ALONE)
        kept = torch.zeros(tokens, case["experts"], dtype=torch.int64).scatter_(1, indices, (~dropped).long())
        assert kept.tolist() == case["kept"], number


@pytest.mark.parametrize("seed", range(0, len(CASES), 20))
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_auxiliary_losses(kind: str, seed: int) -> None:
    """The losses over one sequence and over a global batch that consists of it are the same."""
    for number, case in enumerate(CASES[seed : seed + 20], seed):
        logits = torch.from_numpy(inputs(number, case["experts"])[0]).unsqueeze(1).requires_grad_()
        types = {"moe_router_load_balancing_type": (kind,), "moe_aux_loss_coeff": (0.5,)}
        settings = config(case, moe_z_loss_coeff=0.1, **types)
        _, load = auxiliary_losses(logits, settings, ALONE, torch.zeros(case["experts"]))
        losses, _ = auxiliary_losses(logits, settings, ALONE, load)
        assert [factor for factor, _ in losses.values()] == [0.1, 0.5]
        for name, (_, loss) in losses.items():
            key = "z" if name == "z_loss" else "aux"
            close(loss, case[key])
            close(torch.autograd.grad(loss, logits)[0].squeeze(1), case[f"{key}_grad"])


def test_microbatches_of_any_size_have_the_same_gradients() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 4, 8, dtype=torch.float64).requires_grad_()
    types = {"moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss")}
    settings = MoEConfig(num_experts=8, moe_aux_loss_coeff=(1.0, 1.0), moe_z_loss_coeff=1.0, **types)
    last_load = torch.rand(8, dtype=torch.float64)

    def gradient(size: int) -> Tensor:
        parts = [auxiliary_losses(part, settings, ALONE, last_load)[0] for part in logits.split(size, 1)]
        total = sum(loss for losses in parts for _, loss in losses.values())
        assert isinstance(total, Tensor)
        return torch.autograd.grad(total, logits)[0]

    for size in (1, 2):
        torch.testing.assert_close(gradient(size), gradient(4), rtol=1e-12, atol=1e-15)


def test_of_equal_scores_the_first_are_best() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, 0.0], [3.0, 3.0, 3.0, 3.0]])
    assert best(scores, 2).tolist() == [[1, 2], [0, 1]]
    assert best(torch.zeros(2, 300), 4).tolist() == [[0, 1, 2, 3]] * 2
