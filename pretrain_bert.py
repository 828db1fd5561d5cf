r"""Pretrain BERT. scripts/pretrain_bert.sh is a whole example, from text to a trained model; the least to start with is

    python pretrain_bert.py --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --lr 1e-3 \
        --micro-batch-size 8 --train-iters 100 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000

torchrun in place of python starts several processes; the parallel flags say how they share the work.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.arguments import parse_run_config, run_command
from megatron.data.build import Dataset, build_bert_datasets, by_name
from megatron.data.loader import Batch
from megatron.model.bert import BertModel
from megatron.parallel.random import DropoutKey
from megatron.tokenizer import Tokenizer
from megatron.training.config import RunConfig
from megatron.training.pretrain import pretrain
from megatron.training.task import Part, Task


def build_model(config: RunConfig, part: Part) -> BertModel:
    return BertModel(
        config.model,
        binary_head=config.data.bert_binary_head,
        vocab_size=part.vocab_size,
        padded_vocab_size=part.padded_vocab_size,
        chunk=part.chunk,
        tp=part.tp,
        recompute=part.recompute,
    )


def build_datasets(
    config: RunConfig, tokenizer: Tokenizer, samples: tuple[int, int, int]
) -> dict[str, Dataset]:
    datasets = build_bert_datasets(
        config.data,
        samples=samples,
        seed=config.training.seed,
        tokenizer=tokenizer,
        length_multiple=config.parallel.length_multiple,
    )
    return by_name(datasets)


def count_words(batch: Batch) -> Tensor:
    return batch["loss_mask"].sum().unsqueeze(0)


def count_words_and_pairs(batch: Batch) -> Tensor:
    return torch.cat((count_words(batch), batch["loss_mask"].new_full((1,), len(batch["text"]))))


def vocab_positions(batch: Batch) -> int:
    return batch["labels"].shape[1]


def forward(model: BertModel, batch: Batch, hidden: Tensor | None, dropout_key: DropoutKey) -> Tensor:
    out = model(
        batch["text"],
        batch.get("padding_mask"),
        batch["types"],
        hidden_sbh=hidden,
        positions_bp=batch["positions"],
        labels_bp=batch["labels"],
        dropout_key=dropout_key,
    )
    if model.output_layer is None:
        return out
    losses_bp, order_b2 = out
    sums = [(losses_bp * batch["loss_mask"]).sum()]
    if order_b2 is not None:
        sums.append(F.cross_entropy(order_b2.float(), batch["is_random"], reduction="sum"))
    return torch.stack(sums)


DEFAULTS = {"tokenizer_type": "BertWordPieceLowerCase"}


def bert(*, binary_head: bool) -> Task:
    """The task with or without the loss of the order of two sentences."""
    return Task(
        name="BERT" if binary_head else "BERT --bert-no-binary-head",
        loss_names=("lm loss", "sop loss") if binary_head else ("lm loss",),
        build_model=build_model,
        build_datasets=build_datasets,
        count=count_words_and_pairs if binary_head else count_words,
        vocab_positions=vocab_positions,
        forward=forward,
    )


def main() -> int:
    config = parse_run_config(sys.argv[1:], description=__doc__, defaults=DEFAULTS)
    return pretrain(config, bert(binary_head=config.data.bert_binary_head))


if __name__ == "__main__":
    run_command(main)
