"""Small models for tests."""

from __future__ import annotations

import torch
from torch import nn

import megatron.plugins  # noqa: F401 (registers schedules, layouts, synthetic data and step rules)
from megatron.arguments import parse_run_config
from megatron.optim.buffer import ParamBuffer
from megatron.optim.config import OptimizerConfig
from megatron.optim.layout import lay_out
from megatron.optim.optimizer import param_groups
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import Mesh
from megatron.pretrain_gpt import DEFAULTS, GPT
from megatron.training.build import build_engine
from megatron.training.config import RunConfig
from megatron.training.engine import Engine

CPU = torch.device("cpu")
FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 59 --num-layers 4 --hidden-size 32
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 20 --lr 2e-3 --device cpu
"""


def flat(
    model: nn.Module,
    dtype: torch.dtype = torch.float32,
    *,
    mesh: Mesh | None = None,
    config: ParallelConfig | None = None,
    optimizer: OptimizerConfig | None = None,
) -> ParamBuffer:
    """Allocate the parameters of a model in flat memory, uninitialized; without `mesh` for a single process."""
    mesh, config = mesh or Mesh(device=CPU), config or ParallelConfig()
    optimizer = optimizer or OptimizerConfig(lr=1.0)
    groups = param_groups(optimizer, mesh, sharding=config.data_parallel_sharding_strategy)
    buckets = lay_out([model], groups, bucket_size=config.ddp_bucket_size)
    return ParamBuffer([model], buckets, mesh, config, dtype=dtype)


def config_of(flags: str) -> RunConfig:
    """Parse the configuration of a small model with additional flags."""
    return parse_run_config(f"{FLAGS} {flags}".split(), description="", defaults=DEFAULTS)


def engine_of(mesh: Mesh, config: RunConfig) -> Engine:
    """Build an engine with initialized weights."""
    engine = build_engine(config, GPT, mesh, vocab_size=60, padded_vocab_size=64)
    engine.buffer.initialize(1)
    return engine


def position_ids(start: int, batch: int, length: int, device: torch.device) -> torch.Tensor:
    """[b, s]: start, start + 1, ... in every row."""
    return torch.arange(start, start + length, device=device).expand(batch, length)
