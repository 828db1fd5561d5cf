r"""Pretrain GPT. scripts/pretrain_gpt.sh is a complete example, from text to a trained model. The shortest command is

    python pretrain_gpt.py --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --lr 1e-3 \
        --micro-batch-size 8 --train-iters 100 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000

Use torchrun in place of python to start several processes; the parallel flags say how they split the work.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from megatron import plugin_flags  # noqa: F401 (registers the flags of plug-ins)
from megatron.arguments import parse_run_config
from megatron.cli import run_command
from megatron.training.config import RunConfig
from megatron.training.task import Task

# Importing torch takes seconds, so modules that need it are imported after the command line has been read.
if TYPE_CHECKING:
    from torch import Tensor

    from megatron.data.dataset import Dataset
    from megatron.data.gpt_dataset import GPTBatch
    from megatron.model.context import ModelContext
    from megatron.model.gpt import GPTModel
    from megatron.parallel.random import DropoutKey
    from megatron.parallel.stages import Chunk
    from megatron.tokenizer import Tokenizer


def build_model(config: RunConfig, context: ModelContext, chunk: Chunk | None) -> GPTModel:
    from megatron.model.gpt import GPTModel

    return GPTModel(config.model, context, chunk)


def build_datasets(
    config: RunConfig, tokenizer: Tokenizer, samples: tuple[int, int, int]
) -> dict[str, Dataset]:
    from megatron.data.gpt_dataset import build_gpt_datasets

    return build_gpt_datasets(
        config.data,
        samples=samples,
        seed=config.training.seed,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.special_ids.get("eod"),
    )


def loss_denominators(batch: GPTBatch) -> Tensor:
    return batch.loss_mask.sum().unsqueeze(0)


def num_logits(batch: GPTBatch) -> int:
    return batch.seq_length


def forward(model: GPTModel, batch: GPTBatch, hidden: Tensor | None, key: DropoutKey | None) -> Tensor:
    out = model(
        batch.tokens,
        batch.position_ids,
        hidden_sbh=hidden,
        labels_bs=batch.labels,
        loss_grad_bs=None if batch.loss_grad is None else batch.loss_mask * batch.loss_grad,
        document_ids_bs=batch.document_ids,
        dropout_key=key,
        sequence_grad=batch.sequence_grad,
    )
    return (out * batch.loss_mask).sum().unsqueeze(0) if model.output_layer is not None else out


DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}

GPT = Task(
    name="GPT",
    loss_names=("lm loss",),
    build_model=build_model,
    build_datasets=build_datasets,
    loss_denominators=loss_denominators,
    num_logits=num_logits,
    forward=forward,
    causal=True,
    is_static=True,
)


def main() -> int:
    config = parse_run_config(sys.argv[1:], description=__doc__, defaults=DEFAULTS)
    from megatron import plugins

    return plugins.run(config, GPT)


if __name__ == "__main__":
    run_command(main)
