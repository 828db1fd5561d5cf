"""BERT: embeddings with token types, bidirectional transformer, masked-language-model head, sentence-order head.

Shapes in names: s sequence, b batch, h hidden, v vocabulary, t keys. With tensor parallelism v counts this process's
part of the vocabulary; with sequence parallelism the s of `hidden_sbh` counts its part of the sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.config import ModelConfig
from megatron.model.layers import TensorParallel
from megatron.model.transformer import Context, Norm, Transformer, input_init
from megatron.model.vocabulary import WORD_TABLE, Embedding, OutputLayer
from megatron.ops.activation import gelu
from megatron.ops.cross_entropy import cross_entropy
from megatron.ops.rotary import rotary_angles
from megatron.parallel.collectives import reduce_from
from megatron.parallel.parameters import parameter, zeros
from megatron.parallel.random import DropoutKey
from megatron.parallel.recompute import Recompute
from megatron.parallel.slices import GlobalSlice, whole
from megatron.parallel.stages import Chunk


class Linear(nn.Module):
    """x Wᵀ + b, with W [outputs, inputs] whole on every process."""

    def __init__(self, config: ModelConfig, outputs: int, matrix: GlobalSlice, vector: GlobalSlice) -> None:
        super().__init__()
        self.weight = parameter(matrix, input_init(config, outputs))
        self.bias = parameter(vector, zeros)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class LMHead(nn.Module):
    """What BERT's output layer reads: a layer, GELU and a normalisation, position by position."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        h = config.hidden_size
        self.tanh = (
            config.openai_gelu
        )  # NVIDIA's fused kernel, whose tanh form the layers take, is not used here
        self.dense = Linear(config, h, tp.replicated(h, h), tp.replicated(h))
        self.layer_norm = Norm(config, tp.replicated(h))

    def forward(self, x_sbh: Tensor) -> Tensor:
        return self.layer_norm(gelu(self.dense(x_sbh), tanh=self.tanh))


class Pooler(nn.Module):
    """A vector for the whole sequence, from its first position."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        h = config.hidden_size
        self.dense = Linear(config, h, whole(h, h), whole(h))

    def forward(self, x_sbh: Tensor) -> Tensor:
        """[s, b, h], or its part along s, to [b, h]."""
        first_bh = x_sbh[0]
        if self.tp.sequence:  # the first process has it, and the others have other positions
            first_bh = reduce_from(first_bh * (self.tp.axis.rank == 0), self.tp.axis)
        return torch.tanh(self.dense(first_bh))


class BertModel(nn.Module):
    """The bidirectional model of arXiv 1909.08053 section 3, or one chunk of its layers.

    Parameters are named as in Megatron core: `embedding.tokentype_embeddings.weight`,
    `encoder.layers.0.self_attention.linear_qkv.weight`, ..., `lm_head.dense.weight`, `output_layer.bias`,
    `pooler.dense.weight`, `binary_head.weight`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        binary_head: bool,
        vocab_size: int,
        padded_vocab_size: int,
        chunk: Chunk | None = None,
        tp: TensorParallel | None = None,
        recompute: Recompute | None = None,
    ) -> None:
        """`vocab_size` counts the tokenizer's ids; the weights have `padded_vocab_size` rows. With `binary_head` there
        are token types, and a head that tells the order of two sentences."""
        super().__init__()
        chunk = chunk or Chunk(range(config.num_layers))
        self.tp = tp = tp or TensorParallel()
        self.config = config
        # Rows of the tables that take part in the model.
        self.real = real = vocab_size if config.mask_padded_vocab else padded_vocab_size
        self.embedding = self.lm_head = self.output_layer = self.pooler = self.binary_head = None
        if chunk.first:
            types = 2 if binary_head else 0
            tied = None if config.untie_embeddings_and_output_weights or chunk.last else WORD_TABLE
            self.embedding = Embedding(
                config, padded_vocab_size, real=real, tp=tp, tied=tied, token_types=types
            )
        self.encoder = Transformer(
            config, chunk.layers, last=chunk.last, tp=tp, recompute=recompute or Recompute()
        )
        if chunk.last:
            self.lm_head = LMHead(config, tp)
            self.output_layer = OutputLayer(
                config, vocab_size, padded_vocab_size, first=chunk.first, real=real, tp=tp, bias=True
            )
        if chunk.last and binary_head:
            self.pooler = Pooler(config, tp)
            self.binary_head = Linear(config, 2, whole(2, config.hidden_size), whole(2))

    def forward(
        self,
        tokens_bs: Tensor,
        padding_mask_bs: Tensor,
        types_bs: Tensor,
        *,
        hidden_sbh: Tensor | None = None,
        labels_bs: Tensor | None = None,
        dropout_key: DropoutKey = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Logits of the two heads, [b, s, v] and [b, 2]; with labels, in place of the former the loss of every
        position in fp32, [b, s]. Without the binary head the latter is None.

        Args:
            padding_mask_bs: 1 for tokens, 0 for padding, which nothing attends to.
            types_bs: 0 for the first sentence, 1 for the second.
            hidden_sbh: what the chunk before gives; every chunk but the last gives its own in place of logits.
            dropout_key: what dropout is drawn by; None drops nothing.
        """
        context = Context(mask_bst=padding_mask_bs.bool().unsqueeze(1), dropout_key=dropout_key)
        position_ids_bs = torch.arange(tokens_bs.shape[1], device=tokens_bs.device).expand_as(tokens_bs)
        if self.config.position_embedding_type == "rope":
            context.rotary = rotary_angles(
                position_ids_bs,
                self.config.rotary_channels,
                self.config.rotary_base,
                self.config.rope_scaling_factor if self.config.use_rope_scaling else None,
            )
        if self.embedding is not None:
            hidden_sbh = self.embedding(tokens_bs, position_ids_bs, dropout_key, types_bs)
        hidden_sbh = self.encoder(hidden_sbh, context)
        if self.output_layer is None:
            return hidden_sbh
        table = None if self.embedding is None else self.embedding.word_embeddings.weight
        logits_sbv = self.output_layer(self.lm_head(hidden_sbh), table)
        order_b2 = None if self.binary_head is None else self.binary_head(self.pooler(hidden_sbh))
        if labels_bs is None:
            return logits_sbv[..., : self.real].transpose(0, 1), order_b2
        losses_sb = cross_entropy(logits_sbv, labels_bs.t(), vocab_size=self.real, axis=self.tp.axis)
        return losses_sb.t(), order_b2
