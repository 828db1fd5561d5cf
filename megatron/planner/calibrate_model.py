"""Small GPTs that a calibration runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.ops.backend import Ops
from megatron.optim.buffer import ParamBuffer
from megatron.optim.config import OptimizerConfig
from megatron.optim.layout import lay_out
from megatron.optim.optimizer import param_groups
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Mesh
from megatron.planner.layout import Job

VOCAB_SIZE = 1024


def make_job(layers: int, hidden: int, heads: int, length: int, **more: Any) -> Job:
    """A GPT, with `more` fields of its config, and one sample for it."""
    sizes: dict[str, Any] = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    model = ModelConfig(**sizes, max_position_embeddings=length, **more)
    return Job(model, length, VOCAB_SIZE, global_batch_size=1)


MIXTURE: dict[str, Any] = {
    "add_bias_linear": False,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 2048,
    "moe_grouped_gemm": True,
}
# A rank's part of such a model with two tensor-parallel ranks.
NARROW: dict[str, Any] = {"kv_channels": 64, "ffn_hidden_size": 1024}
# Each model's time depends more on its constant than the other models' times do. Products have several sizes, since no
# constant suits them all. For attention, only the kernels of one layer run.
JOBS = {
    "matmul": (make_job(2, 512, 8, 256), make_job(1, 1024, 16, 256), make_job(2, 512, 4, 256, **NARROW)),
    "accumulate": (make_job(2, 512, 8, 64), make_job(1, 1024, 16, 64)),
    "attention": (make_job(1, 512, 8, 256), make_job(1, 512, 8, 512)),
    "launch": (make_job(2, 64, 1, 16),),
    "expert": (make_job(1, 768, 12, 256, **MIXTURE),),
}
# Forward passes of this model run between measured collectives. One takes some milliseconds, as does the computation
# between two collectives of a model that is trained on CPUs.
BESIDE = make_job(1, 256, 4, 64)
# Another model, to compare the result with.
CHECKED = make_job(4, 768, 12, 128)
OPTIMIZED = JOBS["matmul"][1]  # the model whose optimizer is timed


def build_model(job: Job, ops: Ops, device: torch.device, dtype: torch.dtype) -> tuple[GPTModel, ParamBuffer]:
    """The model of a job with initial parameters."""
    with torch.device("meta"):
        context = ModelContext(vocab_size=job.vocab_size, padded_vocab_size=job.vocab_size, ops=ops)
        model = GPTModel(job.model, context)
    parallel, mesh = ParallelConfig(), Mesh(device=device)
    groups = param_groups(OptimizerConfig(lr=1e-4), mesh)
    buckets = lay_out([model], groups, bucket_size=parallel.ddp_bucket_size)
    buffer = ParamBuffer([model], buckets, mesh, parallel, dtype=dtype)
    buffer.initialize(0)
    return model, buffer


def forward(model: GPTModel, tokens: Tensor) -> Tensor:
    """Run a microbatch forward and return its losses."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    return model(tokens, positions, labels_bs=tokens)


def microbatch(model: GPTModel, tokens: Tensor) -> None:
    """Run a microbatch forward and backward."""
    forward(model, tokens).sum().backward()


def checked(measured: float, predicted: float) -> str:
    """A line that compares a microbatch of a GPT with the prediction from what was measured."""
    return (
        f"check: forward and backward of a small GPT took {1e3 * measured:.3g} ms, predicted "
        f"{1e3 * predicted:.3g} ms ({predicted / measured - 1:+.0%})"
    )
