"""Embedding and output layer of a language model, both split over the vocabulary (arXiv 1909.08053 section 3).

Shapes in names: s sequence, b batch, h hidden, v vocabulary. With tensor parallelism v counts this rank's rows.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.layers import column_linear, reduce_output
from megatron.model.mlp import input_init
from megatron.model.variants import variant
from megatron.ops.embedding import embedding
from megatron.parallel.collectives import local_shard
from megatron.parallel.parameters import normal, parameter, zeros
from megatron.parallel.random import DropoutKey, dropout
from megatron.parallel.slices import GlobalSlice

WORD_TABLE = "embedding.word_embeddings.weight"


def num_valid_rows(config: ModelConfig, context: ModelContext) -> int:
    """Rows of the vocabulary tables that take part in the softmax."""
    return context.vocab_size if config.mask_padded_vocab else context.padded_vocab_size


def vocabulary_slice(config: ModelConfig, context: ModelContext, *row: int) -> GlobalSlice:
    """Shard spec of this rank's rows of a tensor [padded vocabulary, *row]."""
    rows, valid = context.padded_vocab_size, num_valid_rows(config, context)
    return GlobalSlice((rows, *row), 0, (context.tp.local_range(rows),), num_valid_rows=valid)


class Embedding(nn.Module):
    """Word embeddings, plus learned positions and token types if the model has them, and dropout."""

    def __init__(self, config: ModelConfig, context: ModelContext, *, tied: bool, token_types: int) -> None:
        """`tied`: another pipeline stage holds a copy of the word embeddings."""
        super().__init__()
        self.context, self.dropout = context, config.hidden_dropout
        self.fp32 = config.fp32_residual_connection
        self.word_embeddings = variant(VocabParallelEmbedding, config)(config, context, tied=tied)
        learned = config.position_embedding_type == "learned_absolute"
        positions = config.require("max_position_embeddings")[0] if learned else 0
        self.position_embeddings = ReplicatedEmbedding(positions, config, context) if positions else None
        self.tokentype_embeddings = ReplicatedEmbedding(token_types, config, context) if token_types else None

    def forward(
        self,
        tokens_bs: Tensor,
        position_ids_bs: Tensor,
        dropout_key: DropoutKey | None,
        types_bs: Tensor | None = None,
    ) -> Tensor:
        """The residual stream before the first layer, [s, b, h]; with sequence parallelism this rank's part of s."""
        x_sbh = self.word_embeddings(tokens_bs.t())
        if self.position_embeddings is not None:
            x_sbh = x_sbh + self.position_embeddings(position_ids_bs.t())
        if self.tokentype_embeddings is not None:
            assert types_bs is not None
            x_sbh = x_sbh + self.tokentype_embeddings(types_bs.t())
        if self.dropout > 0 and dropout_key is not None:
            parts = self.context.dropout_parts
            x_sbh = self.context.ops.run(dropout, x_sbh, self.dropout, dropout_key, "embedding", *parts)
        return x_sbh.float() if self.fp32 else x_sbh


class VocabParallelEmbedding(nn.Module):
    """Word embeddings [padded vocabulary, h] split by rows over the tensor-parallel axis."""

    def __init__(self, config: ModelConfig, context: ModelContext, *, tied: bool) -> None:
        super().__init__()
        self.context = context
        self.begin, self.end = context.tp.local_range(context.padded_vocab_size)
        self.weight = parameter(
            vocabulary_slice(config, context, config.hidden_size),
            normal(config.init_method_std),
            tied=WORD_TABLE if tied else None,
        )

    def forward(self, ids_sb: Tensor) -> Tensor:
        """[s, b, h], or with sequence parallelism this rank's part of s."""
        if self.context.tp.size == 1:
            return embedding(ids_sb, self.weight)
        elsewhere = (ids_sb < self.begin) | (ids_sb >= self.end)
        rows = embedding((ids_sb - self.begin).masked_fill(elsewhere, 0), self.weight)
        return reduce_output(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.context)


class ReplicatedEmbedding(nn.Module):
    """A table of positions or token types that every tensor-parallel rank holds whole."""

    def __init__(self, rows: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.context = context
        self.weight = parameter(context.replicated(rows, config.hidden_size), normal(config.init_method_std))

    def forward(self, ids_sb: Tensor) -> Tensor:
        if self.context.sequence_parallel:
            ids_sb = local_shard(ids_sb, self.context.tp)
        return embedding(ids_sb, self.weight)


class OutputLayer(nn.Module):
    """Projection to the vocabulary, by a weight of its own or by the word embeddings.

    The last of several pipeline stages has no embedding, so it holds a copy of the tied table.
    """

    def __init__(
        self, config: ModelConfig, context: ModelContext, *, first: bool, bias: bool = False
    ) -> None:
        """`first`: the stage also holds the embedding, whose table can be used."""
        super().__init__()
        self.context, self.num_valid_rows = context, num_valid_rows(config, context)
        self.weight = self.bias = None
        place = vocabulary_slice(config, context, config.hidden_size)
        if config.untie_embeddings_and_output_weights:
            # By the unpadded size, since the padding depends on the layout.
            self.weight = parameter(place, input_init(config, context.vocab_size))
        elif not first:
            self.weight = parameter(place, normal(config.init_method_std), tied=WORD_TABLE)
        if bias:
            self.bias = parameter(vocabulary_slice(config, context), zeros)

    def forward(
        self,
        x_sbh: Tensor,
        word_table: Tensor | None,
        labels_bs: Tensor | None = None,
        grad_bs: Tensor | None = None,
    ) -> Tensor:
        """Logits [s, b, v]; with labels the cross entropy of every position in fp32, [b, s].

        Args:
            word_table: the weight of a layer that has none of its own.
            grad_bs: gradient of each loss, if it is known.
        """
        if labels_bs is None:
            return column_linear(x_sbh, self._table(word_table), self.bias, self.context)
        return self.context.ops.linear_cross_entropy(
            x_sbh,
            self._table(word_table),
            self.bias,
            labels_bs.t(),
            None if grad_bs is None else grad_bs.t(),
            vocab_size=self.num_valid_rows,
            axis=self.context.tp,
            sequence_parallel=self.context.sequence_parallel,
        ).t()

    def _table(self, word_table: Tensor | None) -> Tensor:
        table = word_table if self.weight is None else self.weight
        assert table is not None
        return table
