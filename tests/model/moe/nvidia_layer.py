"""Make `nvidia_layer.safetensors`: outputs and gradients of NVIDIA's MoELayer. In a checkout of Megatron-LM run

    PYTHONPATH=. python .../tests/model/moe/nvidia_layer.py .../tests/model/moe/nvidia_layer.safetensors

with torch and triton, on a CPU; the file in this folder is from commit d98e8a64ddf3.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HIDDEN, FFN, SHARED, EXPERTS = 16, 12, 20, 8
# Settings by names that both programs have.
CASES: dict[str, dict[str, Any]] = {
    "softmax": {"moe_router_topk": 2},
    "sigmoid and groups": {
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": SHARED,
    },
    "gated shared expert": {
        "moe_router_topk": 3,
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": SHARED,
        "moe_shared_expert_gate": True,
    },
}


def run_case(fields: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Weights, input, output and gradients of a layer of SequentialMLP."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=FFN,
        moe_ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="allgather",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        **fields,
    )
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm")
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = spec.submodules.mlp(config=config, pg_collection=groups, is_mtp_layer=False, name=None)
    layer.set_layer_number(1)
    torch.manual_seed(seed)
    for p in layer.parameters():
        p.data.normal_(std=0.3)
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.normal_(std=0.1)
    x, grad = torch.randn(6, 2, HIDDEN, requires_grad=True), torch.randn(6, 2, HIDDEN)
    y, _ = layer(x)
    (y * grad).sum().backward()
    assert x.grad is not None
    found = {"input": x.detach(), "output gradient": grad, "output": y.detach(), "input gradient": x.grad}
    found |= {f"weight/{k}": v for k, v in layer.state_dict().items() if isinstance(v, torch.Tensor)}
    return found | {f"gradient/{name}": p.grad for name, p in layer.named_parameters()}


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    torch.cuda.current_device = lambda: torch.device("cpu")  # where the router puts its bias
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    tensors = {
        f"{name}/{key}": x.clone().contiguous()
        for seed, (name, fields) in enumerate(CASES.items())
        for key, x in run_case(fields, seed).items()
    }
    save_file(tensors, sys.argv[1])
