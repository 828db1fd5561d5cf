r"""Pretrain GPT. scripts/pretrain_gpt.sh is a whole example, from text to a trained model; the least to start with is

    python pretrain_gpt.py --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --lr 1e-3 \
        --micro-batch-size 8 --train-iters 100 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000

torchrun in place of python starts several processes; the parallel flags say how they share the work.
"""

from __future__ import annotations

import sys

from torch import Tensor

from megatron.arguments import parse_run_config, run_command
from megatron.data.build import Dataset, build_gpt_datasets, by_name
from megatron.data.loader import Batch
from megatron.model.gpt import GPTModel
from megatron.parallel.random import DropoutKey
from megatron.tokenizer import Tokenizer
from megatron.training.config import RunConfig
from megatron.training.pretrain import pretrain
from megatron.training.task import Part, Task


def build_model(config: RunConfig, part: Part) -> GPTModel:
    return GPTModel(
        config.model,
        vocab_size=part.vocab_size,
        padded_vocab_size=part.padded_vocab_size,
        chunk=part.chunk,
        tp=part.tp,
        recompute=part.recompute,
    )


def build_datasets(
    config: RunConfig, tokenizer: Tokenizer, samples: tuple[int, int, int]
) -> dict[str, Dataset]:
    datasets = build_gpt_datasets(
        config.data,
        samples=samples,
        seed=config.training.seed,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.special_ids.get("eod"),
    )
    return by_name(datasets)


def count(batch: Batch) -> Tensor:
    return batch["loss_mask"].sum().unsqueeze(0)


def vocab_positions(batch: Batch) -> int:
    return batch["labels"].shape[1]


def forward(model: GPTModel, batch: Batch, hidden: Tensor | None, dropout_key: DropoutKey) -> Tensor:
    out = model(
        batch["tokens"],
        batch["position_ids"],
        hidden_sbh=hidden,
        labels_bs=batch["labels"],
        document_ids_bs=batch.get("document_ids"),
        dropout_key=dropout_key,
    )
    return (out * batch["loss_mask"]).sum().unsqueeze(0) if model.output_layer is not None else out


DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}

GPT = Task(
    name="GPT",
    loss_names=("lm loss",),
    build_model=build_model,
    build_datasets=build_datasets,
    count=count,
    vocab_positions=vocab_positions,
    forward=forward,
    causal=True,
    is_static=True,
)


def main() -> int:
    return pretrain(parse_run_config(sys.argv[1:], description=__doc__, defaults=DEFAULTS), GPT)


if __name__ == "__main__":
    run_command(main)
