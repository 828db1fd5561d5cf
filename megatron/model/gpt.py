"""GPT: embeddings, causal transformer, output layer over the vocabulary.

Shapes in names: s sequence, b batch, h hidden, v vocabulary, t keys. With tensor parallelism v counts this process's
part of the vocabulary; with sequence parallelism the s of `hidden_sbh` counts its part of the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.model.config import ModelConfig
from megatron.model.layers import TensorParallel, VocabParallelEmbedding, column_linear, vocabulary_table
from megatron.model.transformer import Context, KVCache, Transformer, input_init
from megatron.ops.attention import causal_mask, document_mask
from megatron.ops.cross_entropy import cross_entropy
from megatron.ops.embedding import embedding
from megatron.ops.rotary import rotary_angles
from megatron.parallel.collectives import share
from megatron.parallel.parameters import normal, parameter
from megatron.parallel.random import DropoutKey, dropout
from megatron.parallel.recompute import Recompute
from megatron.parallel.stages import Chunk

WORD_TABLE = "embedding.word_embeddings.weight"


class Embedding(nn.Module):
    """Word embeddings, learned positions where the model has them, and dropout."""

    def __init__(
        self, config: ModelConfig, padded_vocab_size: int, *, real: int, tp: TensorParallel, tied: str | None
    ) -> None:
        super().__init__()
        self.tp, self.dropout = tp, config.hidden_dropout
        init = normal(config.init_method_std)
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size, config.hidden_size, real=real, init=init, tp=tp, tied=tied
        )
        learned = config.position_embedding_type == "learned_absolute"
        self.position_embeddings = PositionTable(config, tp) if learned else None

    def forward(self, tokens_bs: Tensor, position_ids_bs: Tensor, dropout_key: DropoutKey) -> Tensor:
        x_sbh = self.word_embeddings(tokens_bs.t())
        if self.position_embeddings is not None:
            x_sbh = x_sbh + self.position_embeddings(position_ids_bs.t())
        return dropout(x_sbh, self.dropout, dropout_key, "embedding", self.tp.stream)


class PositionTable(nn.Module):
    """A row for every position."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        place = tp.replicated(config.max_position_embeddings, config.hidden_size)
        self.weight = parameter(place, normal(config.init_method_std))

    def forward(self, position_ids_sb: Tensor) -> Tensor:
        if self.tp.sequence:
            position_ids_sb = share(position_ids_sb, self.tp.axis)
        return embedding(position_ids_sb, self.weight)


class OutputLayer(nn.Module):
    """The projection to the vocabulary, by a table of its own or by the word embeddings.

    The last of several stages has no word embeddings, and so holds a copy of their table.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        padded_vocab_size: int,
        *,
        first: bool,
        real: int,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.tp, self.weight = tp, None
        if config.untie_embeddings_and_output_weights:
            # Not by the padded size, which depends on the layout.
            init, tied = input_init(config, vocab_size), None
        else:
            init, tied = normal(config.init_method_std), WORD_TABLE
        if tied is None or not first:
            self.weight = vocabulary_table(
                padded_vocab_size, config.hidden_size, real=real, init=init, tp=tp, tied=tied
            )

    def forward(self, x_sbh: Tensor, word_table: Tensor | None) -> Tensor:
        """Logits [s, b, v]; `word_table` is used where the layer has no table."""
        return column_linear(x_sbh, word_table if self.weight is None else self.weight, None, self.tp)


class GPTModel(nn.Module):
    """A decoder-only language model: GPT-2 by default, Llama's shape by flags; or one chunk of its layers.

    Parameters are named as in Megatron core: `embedding.word_embeddings.weight`,
    `decoder.layers.0.self_attention.linear_qkv.weight`, ..., `output_layer.weight`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        chunk: Chunk | None = None,
        tp: TensorParallel | None = None,
        recompute: Recompute | None = None,
    ) -> None:
        """`vocab_size` counts the tokenizer's ids; the weights have `padded_vocab_size` rows."""
        super().__init__()
        chunk = chunk or Chunk(range(config.num_layers))
        self.tp = tp = tp or TensorParallel()
        self.config = config
        self.vocab_size = vocab_size
        # Rows of the tables that take part in the model.
        self.real = real = vocab_size if config.mask_padded_vocab else padded_vocab_size
        tied = None if config.untie_embeddings_and_output_weights or chunk.last else WORD_TABLE
        self.embedding = (
            Embedding(config, padded_vocab_size, real=real, tp=tp, tied=tied) if chunk.first else None
        )
        self.decoder = Transformer(
            config, chunk.layers, last=chunk.last, tp=tp, recompute=recompute or Recompute()
        )
        self.output_layer = (
            OutputLayer(config, vocab_size, padded_vocab_size, first=chunk.first, real=real, tp=tp)
            if chunk.last
            else None
        )

    def forward(
        self,
        tokens_bs: Tensor,
        position_ids_bs: Tensor,
        *,
        hidden_sbh: Tensor | None = None,
        labels_bs: Tensor | None = None,
        document_ids_bs: Tensor | None = None,
        cache: KVCache | None = None,
        dropout_key: DropoutKey = None,
    ) -> Tensor:
        """Logits [b, s, v], or with labels the loss of every position in fp32, [b, s].

        Args:
            hidden_sbh: what the chunk before gives; every chunk but the last gives its own in place of logits.
            document_ids_bs: if given, positions attend only within their own document.
            cache: if given, the tokens follow on the positions it holds.
            dropout_key: what dropout is drawn by; None drops nothing.
        """
        context = self._context(tokens_bs, position_ids_bs, document_ids_bs, cache, dropout_key)
        if self.embedding is not None:
            hidden_sbh = self.embedding(tokens_bs, position_ids_bs, dropout_key)
        hidden_sbh = self.decoder(hidden_sbh, context)
        if cache is not None:
            cache.position += tokens_bs.shape[1]
        if self.output_layer is None:
            return hidden_sbh
        table = None if self.embedding is None else self.embedding.word_embeddings.weight
        logits_sbv = self.output_layer(hidden_sbh, table)
        if labels_bs is None:
            return logits_sbv[..., : self.real].transpose(0, 1)
        return cross_entropy(logits_sbv, labels_bs.t(), vocab_size=self.real, axis=self.tp.axis).t()

    def _context(
        self,
        tokens_bs: Tensor,
        position_ids_bs: Tensor,
        document_ids_bs: Tensor | None,
        cache: KVCache | None,
        dropout_key: DropoutKey,
    ) -> Context:
        context = Context(cache=cache, dropout_key=dropout_key)
        if self.config.position_embedding_type == "rope":
            context.rotary = rotary_angles(
                position_ids_bs, self.config.rotary_channels, self.config.rotary_base
            )
        if document_ids_bs is not None:
            context.mask_bst = document_mask(document_ids_bs)
        elif cache is not None and cache.position > 0:
            s = tokens_bs.shape[1]
            context.mask_bst = causal_mask(s, cache.position + s, tokens_bs.device)
        return context


def position_ids(start: int, batch: int, length: int, device: torch.device) -> Tensor:
    """[b, s]: start, start + 1, ... in every row."""
    return torch.arange(start, start + length, device=device).expand(batch, length)
