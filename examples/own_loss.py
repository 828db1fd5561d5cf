"""A loss of your own: cross entropy with smoothed labels, and a penalty on large logits.

python -m examples.own_loss [flags of pretrain_gpt.py]
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.api import GPT, Chunk, GPTBatch, InputError, ModelContext, RunConfig, main


def build_model(config: RunConfig, context: ModelContext, chunk: Chunk | None) -> nn.Module:
    """Build a GPT. Refuse tensor parallelism, which splits the logits over the ranks."""
    if config.parallel.tensor_model_parallel_size > 1:
        raise InputError("--tensor-model-parallel-size: this loss needs whole logits; use 1")
    return GPT.build_model(config, context, chunk)


def forward(model: nn.Module, batch: GPTBatch, hidden: Tensor | None, dropout_key: object) -> Tensor:
    """Return the sums of both terms over the batch, or the hidden states for the next pipeline stage."""
    logits_bsv = model(
        batch.tokens,
        batch.position_ids,
        hidden_sbh=hidden,
        document_ids_bs=batch.document_ids,  # for --reset-attention-mask
        dropout_key=dropout_key,
        sequence_grad=batch.sequence_grad,  # for the auxiliary losses of experts
    )
    if model.output_layer is None:
        return logits_bsv
    logits_nv, weights_n = logits_bsv.flatten(0, 1).float(), batch.loss_mask.flatten()
    losses_n = F.cross_entropy(logits_nv, batch.labels.flatten(), label_smoothing=0.1, reduction="none")
    penalty_n = 1e-4 * logits_nv.logsumexp(-1).square()
    return torch.stack([(losses_n * weights_n).sum(), (penalty_n * weights_n).sum()])


def denominators(batch: GPTBatch) -> Tensor:
    """Return the numbers that the sums are divided by, after both are added up over the whole global batch."""
    return batch.loss_mask.sum().repeat(2)


TASK = dataclasses.replace(
    GPT,
    loss_names=("smoothed loss", "z loss"),
    loss_denominators=denominators,
    build_model=build_model,
    forward=forward,
    metric=GPT.losses,  # evaluations report the usual loss, which other runs can be compared with
)
MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
DATA = {"tokenizer_type": "NullTokenizer", "vocab_size": 256, "mock_data": True, "micro_batch_size": 8}

if __name__ == "__main__":
    main(TASK, description=__doc__, defaults=MODEL | DATA | {"lr": 3e-3, "train_iters": 100})
