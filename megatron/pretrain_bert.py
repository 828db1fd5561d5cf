r"""Pretrain BERT. scripts/pretrain_bert.sh is a complete example, from text to a trained model. The shortest command is

    python pretrain_bert.py --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --lr 1e-3 \
        --micro-batch-size 8 --train-iters 100 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000

Use torchrun in place of python to start several processes; the parallel flags say how they split the work.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from megatron import plugin_flags  # noqa: F401 (registers the flags of plug-ins)
from megatron.arguments import parse_run_config
from megatron.cli import run_command
from megatron.model.bert_config import check_bert
from megatron.parallel.padding import length_multiple
from megatron.training.config import RunConfig
from megatron.training.task import Task

# Importing torch takes seconds, so modules that need it are imported after the command line has been read.
if TYPE_CHECKING:
    from torch import Tensor

    from megatron.data.bert_dataset import BertBatch
    from megatron.data.dataset import Dataset
    from megatron.model.bert import BertModel
    from megatron.model.context import ModelContext
    from megatron.parallel.random import DropoutKey
    from megatron.parallel.stages import Chunk
    from megatron.tokenizer import Tokenizer


def build_model(config: RunConfig, context: ModelContext, chunk: Chunk | None) -> BertModel:
    from megatron.model.bert import BertModel

    return BertModel(config.model, context, chunk, binary_head=config.data.bert_binary_head)


def build_datasets(
    config: RunConfig, tokenizer: Tokenizer, samples: tuple[int, int, int]
) -> dict[str, Dataset]:
    from megatron.data.bert_dataset import build_bert_datasets

    return build_bert_datasets(
        config.data,
        samples=samples,
        seed=config.training.seed,
        tokenizer=tokenizer,
        length_multiple=length_multiple(config.parallel),
    )


def count_words(batch: BertBatch) -> Tensor:
    return batch.loss_mask.sum().unsqueeze(0)


def count_words_and_pairs(batch: BertBatch) -> Tensor:
    import torch

    pairs = batch.loss_mask.new_full((1,), len(batch.is_random))
    return torch.cat((count_words(batch), pairs if batch.pair_mask is None else batch.pair_mask.sum()[None]))


def num_logits(batch: BertBatch) -> int:
    return batch.labels.shape[1]


def forward(
    model: BertModel, batch: BertBatch, hidden: Tensor | None, dropout_key: DropoutKey | None
) -> Tensor:
    import torch
    import torch.nn.functional as F

    out = model(
        batch.tokens,
        batch.padding_mask,
        batch.tokentype_ids,
        hidden_sbh=hidden,
        positions_bp=batch.positions,
        labels_bp=batch.labels,
        loss_grad_bp=None if batch.loss_grad is None else batch.loss_mask * batch.loss_grad[0],
        dropout_key=dropout_key,
        position_ids_bs=batch.position_ids,
        document_ids_bs=batch.document_ids,
        first_tokens_bd=batch.first_tokens,
    )
    if model.output_layer is None:
        return out
    losses_bp, order_b2 = out
    sums = [(losses_bp * batch.loss_mask).sum()]
    if order_b2 is not None:
        reduction = "sum" if batch.pair_mask is None else "none"
        order_loss = F.cross_entropy(order_b2.float(), batch.is_random, reduction=reduction)
        sums.append(order_loss if batch.pair_mask is None else (order_loss * batch.pair_mask).sum())
    return torch.stack(sums)


DEFAULTS = {"tokenizer_type": "BertWordPieceLowerCase"}


def bert(*, binary_head: bool) -> Task:
    """The task with or without the loss of the order of two sentences."""
    return Task(
        name="BERT" if binary_head else "BERT --bert-no-binary-head",
        loss_names=("lm loss", "sop loss") if binary_head else ("lm loss",),
        build_model=build_model,
        build_datasets=build_datasets,
        loss_denominators=count_words_and_pairs if binary_head else count_words,
        num_logits=num_logits,
        forward=forward,
    )


def main() -> int:
    config = parse_run_config(sys.argv[1:], description=__doc__, defaults=DEFAULTS)
    check_bert(config.model)
    from megatron import plugins

    return plugins.run(config, bert(binary_head=config.data.bert_binary_head))


if __name__ == "__main__":
    run_command(main)
