"""Pretrain GPT. `python pretrain_gpt.py --help` lists the flags; `scripts/pretrain_gpt.sh` is a whole example."""

from __future__ import annotations

import sys

from torch import Tensor

from megatron.arguments import parse_run_config, run_command
from megatron.data.build import build_gpt_datasets
from megatron.model.gpt import GPTModel
from megatron.tokenizer import Tokenizer
from megatron.training.config import RunConfig
from megatron.training.pretrain import pretrain
from megatron.training.task import Batch, Task


def build_model(config: RunConfig, vocab_size: int, padded_vocab_size: int) -> GPTModel:
    return GPTModel(config.model, vocab_size=vocab_size, padded_vocab_size=padded_vocab_size)


def build_datasets(config: RunConfig, tokenizer: Tokenizer, samples: tuple[int, int, int]) -> tuple:
    return build_gpt_datasets(
        config.data,
        samples=samples,
        seed=config.training.seed,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.special_ids.get("eod"),
    )


def count(batch: Batch) -> Tensor:
    return batch["loss_mask"].sum().unsqueeze(0)


def loss(model: GPTModel, batch: Batch) -> Tensor:
    losses_bs = model(
        batch["tokens"],
        batch["position_ids"],
        labels_bs=batch["labels"],
        document_ids_bs=batch.get("document_ids"),
    )
    return (losses_bs * batch["loss_mask"]).sum().unsqueeze(0)


DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}

GPT = Task(
    name="GPT",
    loss_names=("lm loss",),
    build_model=build_model,
    build_datasets=build_datasets,
    count=count,
    loss=loss,
)


def main() -> int:
    return pretrain(parse_run_config(sys.argv[1:], description=__doc__, defaults=DEFAULTS), GPT)


if __name__ == "__main__":
    run_command(main)
