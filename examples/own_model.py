"""A model of your own: each position mixes its embedding with the mean of those before it, without attention.

python -m examples.own_model [flags of pretrain_gpt.py]
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.api import GPT, Chunk, GPTBatch, InputError, ModelContext, RunConfig, main, normal, parameter


class MeanOfThePast(nn.Module):
    """A bag-of-words language model in plain PyTorch, but for `parameter`.

    A parameter states its shape in the whole model and its initial values. Memory, gradients, optimizer, checkpoints
    and data parallelism follow from that.
    """

    def __init__(self, rows: int, hidden_size: int, context: ModelContext) -> None:
        super().__init__()
        self.words = parameter(context.replicated(rows, hidden_size), normal(0.02))
        self.own = parameter(context.replicated(hidden_size, hidden_size), normal(0.1))
        self.past = parameter(context.replicated(hidden_size, hidden_size), normal(0.1))

    def forward(self, tokens_bs: Tensor) -> Tensor:
        """Token ids to logits, [b, s, rows]."""
        x_bsh = F.embedding(tokens_bs, self.words)
        count_s1 = torch.arange(1, x_bsh.shape[1] + 1, device=x_bsh.device).unsqueeze(1)
        mean_bsh = x_bsh.cumsum(1) / count_s1
        return torch.tanh(x_bsh @ self.own + mean_bsh @ self.past) @ self.words.t()


def build_model(config: RunConfig, context: ModelContext, chunk: Chunk | None) -> nn.Module:
    """Build the model without values, since this runs on the meta device."""
    if config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size > 1:
        raise InputError(
            "--tensor-model-parallel-size, --pipeline-model-parallel-size: this model is not split"
        )
    return MeanOfThePast(context.padded_vocab_size, config.model.hidden_size, context)


def forward(model: nn.Module, batch: GPTBatch, hidden: Tensor | None, dropout_key: object) -> Tensor:
    """Return the sum of the losses of a batch."""
    losses_bs = F.cross_entropy(model(batch.tokens).transpose(1, 2).float(), batch.labels, reduction="none")
    return (losses_bs * batch.loss_mask).sum().unsqueeze(0)


TASK = dataclasses.replace(GPT, name="mean of the past", build_model=build_model, forward=forward)
MODEL = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 1, "seq_length": 64}
DATA = {"tokenizer_type": "NullTokenizer", "vocab_size": 256, "mock_data": True, "micro_batch_size": 8}

if __name__ == "__main__":
    main(TASK, description=__doc__, defaults=MODEL | DATA | {"lr": 1e-2, "train_iters": 100})
