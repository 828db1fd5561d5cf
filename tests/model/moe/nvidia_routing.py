"""Make `nvidia_routing.json`: what NVIDIA's functions return for random router logits. In a checkout of Megatron-LM run

    PYTHONPATH=. python .../tests/model/moe/nvidia_routing.py .../tests/model/moe/nvidia_routing.json

with torch and triton; the file in this folder is from commit d98e8a64ddf3.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
import torch

CASES, TOKENS = 200, 4


def draw(seed: int) -> dict[str, Any]:
    """Settings of a case, as arguments of NVIDIA's functions."""
    rng = random.Random(seed)
    experts = rng.choice((4, 8, 16))
    topk = rng.choice([k for k in (1, 2, 3, 4, 6) if k < experts])
    sigmoid = rng.random() < 0.5
    case: dict[str, Any] = {
        "experts": experts,
        "topk": topk,
        "score_function": "sigmoid" if sigmoid else "softmax",
        "use_pre_softmax": not sigmoid and (topk == 1 or rng.random() < 0.5),
        "scaling_factor": rng.choice((None, 2.5)),
        "bias": sigmoid and rng.random() < 0.5,
        "num_groups": None,
        "group_topk": None,
        "capacity_factor": rng.choice((0.5, 1.0, 1.5)),
    }
    fitting = [
        (groups, n)
        for groups in (2, 4)
        for n in (1, 2)
        if n < groups and topk % n == 0 and topk // n <= experts // groups
    ]
    if fitting and rng.random() < 0.5:
        case["num_groups"], case["group_topk"] = rng.choice(fitting)
    return case


def inputs(seed: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [tokens, experts] and bias [experts], fp32."""
    rng = np.random.RandomState(seed)  # the same numbers in every version of numpy
    return rng.randn(TOKENS, experts).astype(np.float32), rng.randn(experts).astype(np.float32) / 4


def answers(seed: int) -> dict[str, Any]:
    from megatron.core.transformer.moe import moe_utils as nvidia

    case = draw(seed)
    experts, topk = case["experts"], case["topk"]
    logits, bias = (torch.from_numpy(x) for x in inputs(seed, experts))
    logits.requires_grad_()
    routing = {
        name: case[name]
        for name in ("score_function", "use_pre_softmax", "scaling_factor", "num_groups", "group_topk")
    }
    routing["expert_bias"] = bias if case["bias"] else None
    probs, indices = nvidia.topk_routing_with_score_function(logits, topk, dense_output=True, **routing)
    sparse, routing_map = nvidia.topk_routing_with_score_function(logits.detach(), topk, **routing)
    capacity = case["capacity_factor"]
    _, kept = nvidia.apply_router_token_dropping(sparse, routing_map, topk, capacity, "probs")
    aux_map, scores = nvidia.compute_routing_scores_for_aux_loss(logits, topk, case["score_function"])
    aux = nvidia.switch_load_balancing_loss_func(scores, aux_map.sum(0), TOKENS, topk, experts, 1.0)
    z = nvidia.z_loss_func(logits, 1.0)
    tokens = torch.arange(TOKENS, dtype=torch.float32).unsqueeze(1)
    order, *_ = nvidia.permute(tokens, routing_map, num_out_tokens=TOKENS * topk)
    return {
        **case,
        "indices": indices.tolist(),
        "probs": rounded(probs),
        "kept": kept.int().tolist(),
        "aux": rounded(aux),
        "aux_grad": rounded(torch.autograd.grad(aux, logits)[0]),
        "z": rounded(z),
        "z_grad": rounded(torch.autograd.grad(z, logits)[0]),
        "permuted": order.flatten().int().tolist(),
    }


def rounded(x: torch.Tensor) -> Any:
    """Numbers with six digits."""
    return np.vectorize(lambda value: float(f"{value:.6g}"))(x.detach().numpy()).tolist()


if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(answers(seed)) for seed in range(CASES)) + "\n]\n")
