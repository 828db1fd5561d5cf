"""Make the checkpoints in this folder: mixtures of experts that Megatron-LM saves, and their logits.

In a checkout of Megatron-LM run

    PYTHONPATH=. python .../tests/interop/nvidia_moe/make.py

with torch and triton, on a CPU; the files are from commit d98e8a64ddf3.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

FOLDER = Path(__file__).resolve().parent
LENGTH, VOCAB = 16, 64


def write(name: str, layers: list[int], single: bool) -> None:
    """Save a model, with a tensor for each expert if `single`."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=20,
        moe_ffn_hidden_size=12,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_shared_expert_intermediate_size=8,
        moe_layer_freq=1 if all(layers) else layers,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="allgather",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        hidden_dropout=0,
        attention_dropout=0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
    )
    if all(layers):
        spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm")
    else:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    torch.manual_seed(1)
    for p in model.parameters():
        p.data.normal_(std=0.3)
    for key, buffer in model.named_buffers():
        if key.endswith("expert_bias"):
            buffer.normal_(std=0.1)
    tokens = torch.randint(VOCAB, (2, LENGTH))
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    with torch.no_grad():
        logits = model(tokens, torch.arange(LENGTH).expand(2, LENGTH), mask)
    save_file({"tokens": tokens, "logits": logits.contiguous()}, FOLDER / f"{name}.safetensors")
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"singleton_local_shards": single, "dp_cp_group": group})
    os.chdir(FOLDER)  # the files hold the path as given
    Path(name).mkdir()
    dist_checkpointing.save({k: v for k, v in state.items() if "_extra_state" not in k}, name)


if __name__ == "__main__":
    import megatron.core.tensor_parallel.random as random
    from megatron.core import parallel_state

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    # Parts of it expect a GPU.
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    write("stacked", [1, 1], single=False)
    write("single", [0, 1], single=True)
