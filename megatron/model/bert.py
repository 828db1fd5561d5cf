"""BERT: embeddings with token types, bidirectional transformer, masked-language-model head, sentence-order head.

Shapes in names: s sequence, b batch, h hidden, v vocabulary, t keys, p positions that are guessed. With tensor
parallelism v counts this process's part of the vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.config import ModelConfig
from megatron.model.layers import TensorParallel
from megatron.model.transformer import Context, Norm, Transformer, input_init
from megatron.model.vocabulary import WORD_TABLE, Embedding, OutputLayer
from megatron.ops.backend import Ops
from megatron.ops.embedding import embedding
from megatron.ops.rotary import rotary_angles
from megatron.parallel.collectives import gather_sequence
from megatron.parallel.parameters import parameter, zeros
from megatron.parallel.random import DropoutKey, dropout
from megatron.parallel.recompute import Recompute
from megatron.parallel.slices import whole
from megatron.parallel.stages import Chunk


class Linear(nn.Module):
    """x Wᵀ + b from the hidden size, with W [outputs, h] whole on every process."""

    def __init__(self, config: ModelConfig, outputs: int) -> None:
        super().__init__()
        self.weight = parameter(whole(outputs, config.hidden_size), input_init(config, outputs))
        self.bias = parameter(whole(outputs), zeros)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class LMHead(nn.Module):
    """What BERT's output layer reads: a layer, GELU and a normalisation, position by position."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        # NVIDIA's fused kernel, whose tanh form the layers take, is not used here.
        self.tanh = config.openai_gelu
        self.dense = Linear(config, config.hidden_size)
        self.layer_norm = Norm(config, whole(config.hidden_size), ops)

    def forward(self, x_pbh: Tensor) -> Tensor:
        return self.layer_norm(self.ops.gelu(self.dense(x_pbh), tanh=self.tanh))


class Pooler(nn.Module):
    """A vector for the whole sequence, from its first position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = Linear(config, config.hidden_size)

    def forward(self, x_sbh: Tensor) -> Tensor:
        """[s, b, h] to [b, h]."""
        return torch.tanh(self.dense(x_sbh[0]))


class Bert(nn.Module):
    """The bidirectional transformer of arXiv 1909.08053 section 3 without its heads, or one chunk of its layers.

    Parameters are named as in Megatron core: `embedding.tokentype_embeddings.weight`,
    `encoder.layers.0.self_attention.linear_qkv.weight`, ...
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        token_types: bool,
        output_layer: bool,
        vocab_size: int,
        padded_vocab_size: int,
        chunk: Chunk | None = None,
        tp: TensorParallel | None = None,
        recompute: Recompute | None = None,
    ) -> None:
        """`vocab_size` counts the tokenizer's ids; the weights have `padded_vocab_size` rows. With `output_layer` the
        last chunk ends in a projection to the vocabulary."""
        super().__init__()
        self.chunk = chunk = chunk or Chunk(range(config.num_layers))
        self.tp = tp = tp or TensorParallel()
        # The heads work on few positions, which every process has.
        self.head_tp = dataclasses.replace(tp, sequence=False)
        self.config = config
        # Rows of the tables that take part in the model.
        self.real = vocab_size if config.mask_padded_vocab else padded_vocab_size
        self.embedding = None
        if chunk.first:
            types = 2 if token_types else 0
            copied = output_layer and not (config.untie_embeddings_and_output_weights or chunk.last)
            self.embedding = Embedding(
                config,
                padded_vocab_size,
                real=self.real,
                tp=tp,
                tied=WORD_TABLE if copied else None,
                token_types=types,
            )
        self.encoder = Transformer(
            config, chunk.layers, last=chunk.last, tp=tp, recompute=recompute or Recompute()
        )

    def hidden(
        self,
        tokens_bs: Tensor,
        padding_mask_bs: Tensor | None,
        types_bs: Tensor,
        hidden_sbh: Tensor | None,
        dropout_key: DropoutKey,
    ) -> Tensor:
        """What the layers give, [s, b, h]; with sequence parallelism its part along s, but after the last layer all.

        Args:
            padding_mask_bs: 1 for tokens, 0 for padding, which nothing attends to; None if there is none.
            types_bs: 0 for the first sentence, 1 for the second.
            hidden_sbh: what the chunk before gives, if there is one.
            dropout_key: what dropout is drawn by; None drops nothing.
        """
        mask_bst = None if padding_mask_bs is None else padding_mask_bs.bool().unsqueeze(1)
        context = Context(mask_bst=mask_bst, causal=False, dropout_key=dropout_key)
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
        if self.chunk.last and self.tp.sequence:
            hidden_sbh = gather_sequence(hidden_sbh, self.tp.axis)
        return hidden_sbh


class BertModel(Bert):
    """BERT as it is pretrained: masked words are guessed, and the order of two sentences.

    The heads' parameters are `lm_head.dense.weight`, `output_layer.bias`, `pooler.dense.weight`,
    `binary_head.weight`, ...
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
        """With `binary_head` there are token types, and a head that tells the order of two sentences."""
        super().__init__(
            config,
            token_types=binary_head,
            output_layer=True,
            vocab_size=vocab_size,
            padded_vocab_size=padded_vocab_size,
            chunk=chunk,
            tp=tp,
            recompute=recompute,
        )
        self.lm_head = self.output_layer = self.pooler = self.binary_head = None
        if self.chunk.last:
            self.lm_head = LMHead(config, self.tp.ops)
            self.output_layer = OutputLayer(
                config,
                vocab_size,
                padded_vocab_size,
                first=self.chunk.first,
                real=self.real,
                tp=self.head_tp,
                bias=True,
            )
        if self.chunk.last and binary_head:
            self.pooler = Pooler(config)
            self.binary_head = Linear(config, 2)

    def forward(
        self,
        tokens_bs: Tensor,
        padding_mask_bs: Tensor | None,
        types_bs: Tensor,
        *,
        hidden_sbh: Tensor | None = None,
        positions_bp: Tensor | None = None,
        labels_bp: Tensor | None = None,
        dropout_key: DropoutKey = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Logits of the two heads, [b, p, v] and [b, 2]; with labels, in place of the former their loss in fp32,
        [b, p]. Without the binary head the latter is None. Every chunk but the last gives its hidden state alone.

        Args:
            positions_bp: where words are to be guessed (default: at every position, so that p is s). All else is
                spared the projection to the vocabulary, which is the larger part of a small model's work.

        The other arguments are those of `hidden`.
        """
        hidden_sbh = self.hidden(tokens_bs, padding_mask_bs, types_bs, hidden_sbh, dropout_key)
        if self.output_layer is None:
            return hidden_sbh
        table = None if self.embedding is None else self.embedding.word_embeddings.weight
        guessed_pbh = hidden_sbh if positions_bp is None else at_positions(hidden_sbh, positions_bp)
        guessed_pbh = self.lm_head(guessed_pbh)
        order_b2 = None if self.binary_head is None else self.binary_head(self.pooler(hidden_sbh))
        if labels_bp is None:
            return self.output_layer(guessed_pbh, table)[..., : self.real].transpose(0, 1), order_b2
        return self.output_layer.losses(guessed_pbh, table, labels_bp.t()).t(), order_b2


class BertClassifier(Bert):
    """BERT with a head that scores whole sequences, for fine-tuning (arXiv 1810.04805 section 4.1).

    The head's parameters are `pooler.dense.weight`, `classification_head.weight`, ...
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        scores: int,
        vocab_size: int,
        padded_vocab_size: int,
        chunk: Chunk | None = None,
        tp: TensorParallel | None = None,
        recompute: Recompute | None = None,
    ) -> None:
        """`scores` of each sequence: one for every class, or a single one to compare sequences by."""
        super().__init__(
            config,
            token_types=True,
            output_layer=False,
            vocab_size=vocab_size,
            padded_vocab_size=padded_vocab_size,
            chunk=chunk,
            tp=tp,
            recompute=recompute,
        )
        self.pooler = self.classification_head = None
        if self.chunk.last:
            self.pooler = Pooler(config)
            self.classification_head = Linear(config, scores)

    def forward(
        self,
        tokens_bs: Tensor,
        padding_mask_bs: Tensor | None,
        types_bs: Tensor,
        *,
        hidden_sbh: Tensor | None = None,
        dropout_key: DropoutKey = None,
    ) -> Tensor:
        """[b, scores]; of every chunk but the last the hidden state. The arguments are those of `hidden`."""
        hidden_sbh = self.hidden(tokens_bs, padding_mask_bs, types_bs, hidden_sbh, dropout_key)
        if self.classification_head is None:
            return hidden_sbh
        pooled_bh = dropout(self.pooler(hidden_sbh), self.config.hidden_dropout, dropout_key, "pooled")
        return self.classification_head(pooled_bh)


def at_positions(x_sbh: Tensor, positions_bp: Tensor) -> Tensor:
    """The rows of each sample at its positions, [p, b, h]."""
    samples = x_sbh.shape[1]
    rows_pb = positions_bp.t() * samples + torch.arange(samples, device=x_sbh.device)
    return embedding(rows_pb, x_sbh.flatten(0, 1))
