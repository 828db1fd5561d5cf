"""The two ends of a language model: from ids to vectors, and from vectors to logits over the vocabulary.

Shapes in names: s sequence, b batch, h hidden, v vocabulary. With tensor parallelism v counts this process's part.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron.model.config import ModelConfig
from megatron.model.layers import TensorParallel, VocabParallelEmbedding, column_linear, vocabulary_table
from megatron.model.transformer import input_init
from megatron.ops.cross_entropy import cross_entropy
from megatron.ops.embedding import embedding
from megatron.parallel.collectives import share
from megatron.parallel.parameters import normal, parameter, zeros
from megatron.parallel.random import DropoutKey, dropout
from megatron.parallel.slices import GlobalSlice

WORD_TABLE = "embedding.word_embeddings.weight"


class Embedding(nn.Module):
    """Word embeddings, learned positions and token types where the model has them, and dropout."""

    def __init__(
        self,
        config: ModelConfig,
        padded_vocab_size: int,
        *,
        real: int,
        tp: TensorParallel,
        tied: str | None,
        token_types: int = 0,
    ) -> None:
        super().__init__()
        self.tp, self.dropout, self.fp32 = tp, config.hidden_dropout, config.fp32_residual_connection
        init = normal(config.init_method_std)
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size, config.hidden_size, real=real, init=init, tp=tp, tied=tied
        )
        learned = config.position_embedding_type == "learned_absolute"
        self.position_embeddings = Table(config.max_position_embeddings, config, tp) if learned else None
        self.tokentype_embeddings = Table(token_types, config, tp) if token_types else None

    def forward(
        self,
        tokens_bs: Tensor,
        position_ids_bs: Tensor,
        dropout_key: DropoutKey,
        types_bs: Tensor | None = None,
    ) -> Tensor:
        """[s, b, h], or with sequence parallelism this process's part along s; the residual stream's first values."""
        x_sbh = self.word_embeddings(tokens_bs.t())
        if self.position_embeddings is not None:
            x_sbh = x_sbh + self.position_embeddings(position_ids_bs.t())
        if self.tokentype_embeddings is not None:
            x_sbh = x_sbh + self.tokentype_embeddings(types_bs.t())
        x_sbh = dropout(x_sbh, self.dropout, dropout_key, "embedding", self.tp.stream)
        return x_sbh.float() if self.fp32 else x_sbh


class Table(nn.Module):
    """A row for every position, or for every type of token, which every process holds."""

    def __init__(self, rows: int, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weight = parameter(tp.replicated(rows, config.hidden_size), normal(config.init_method_std))

    def forward(self, ids_sb: Tensor) -> Tensor:
        if self.tp.sequence:
            ids_sb = share(ids_sb, self.tp.axis)
        return embedding(ids_sb, self.weight)


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
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.tp, self.real, self.weight = tp, real, None
        if config.untie_embeddings_and_output_weights:
            # Not by the padded size, which depends on the layout.
            init, tied = input_init(config, vocab_size), None
        else:
            init, tied = normal(config.init_method_std), WORD_TABLE
        if tied is None or not first:
            self.weight = vocabulary_table(
                padded_vocab_size, config.hidden_size, real=real, init=init, tp=tp, tied=tied
            )

        place = GlobalSlice((padded_vocab_size,), 0, (tp.part(padded_vocab_size),), real=real)
        self.bias = parameter(place, zeros) if bias else None

    def forward(self, x_sbh: Tensor, word_table: Tensor | None) -> Tensor:
        """Logits [s, b, v]; `word_table` is used where the layer has no table."""
        return column_linear(x_sbh, word_table if self.weight is None else self.weight, self.bias, self.tp)

    def losses(self, x_sbh: Tensor, word_table: Tensor | None, labels_sb: Tensor) -> Tensor:
        """Cross entropy of every position in fp32, [s, b]."""
        ops, axis = self.tp.ops, self.tp.axis
        if ops.projected_loss is None:
            return cross_entropy(self(x_sbh, word_table), labels_sb, vocab_size=self.real, axis=axis)
        return ops.projected_loss(
            x_sbh,
            word_table if self.weight is None else self.weight,
            self.bias,
            labels_sb,
            vocab_size=self.real,
            axis=axis,
            sequence=self.tp.sequence,
        )
