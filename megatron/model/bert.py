"""BERT: embedding with token types, bidirectional transformer, masked-language-model head, sentence-order head.

Shapes in names: s sequence, b batch, h hidden, v vocabulary, t keys, p masked positions. With tensor parallelism v
counts this rank's part of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.data.zigzag import Zigzag
from megatron.errors import InputError
from megatron.model.bert_config import check_bert
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.language_model import LanguageModel
from megatron.model.mlp import input_init
from megatron.model.transformer import LayerInputs, Norm, Transformer
from megatron.model.variants import variant
from megatron.model.vocabulary import OutputLayer
from megatron.ops.attention import MaskSpec
from megatron.ops.embedding import embedding
from megatron.parallel.collectives import gather_sequence
from megatron.parallel.parameters import parameter, zeros
from megatron.parallel.random import DropoutKey, dropout
from megatron.parallel.stages import Chunk


class Linear(nn.Module):
    """x Wᵀ + b with W [outputs, h], which every tensor-parallel rank holds whole."""

    def __init__(self, config: ModelConfig, context: ModelContext, outputs: int) -> None:
        super().__init__()
        self.weight = parameter(context.replicated(outputs, config.hidden_size), input_init(config, outputs))
        self.bias = parameter(context.replicated(outputs), zeros)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class LMHead(nn.Module):
    """Dense layer, GELU and norm before the output layer."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.ops = context.ops
        # As in Megatron-LM, --bias-gelu-fusion does not apply here.
        self.activation = "gelu_tanh" if config.openai_gelu else "gelu"
        self.dense = Linear(config, context, config.hidden_size)
        self.layer_norm = variant(Norm, config)(config, context)

    def forward(self, x_pbh: Tensor) -> Tensor:
        return self.layer_norm(self.ops.activation(self.dense(x_pbh), self.activation))


class Pooler(nn.Module):
    """tanh of a dense layer on first positions, [b, h] to [b, h]."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.dense = Linear(config, context, config.hidden_size)

    def forward(self, x_bh: Tensor) -> Tensor:
        return torch.tanh(self.dense(x_bh))


class Bert(LanguageModel):
    """The bidirectional transformer of arXiv 1909.08053 section 3 without heads, or one chunk of its layers.

    Parameters are named as in Megatron core: `embedding.tokentype_embeddings.weight`,
    `encoder.layers.0.self_attention.linear_qkv.weight`, ...
    """

    def __init__(
        self,
        config: ModelConfig,
        context: ModelContext,
        chunk: Chunk | None,
        *,
        token_types: bool,
        output_layer: bool,
    ) -> None:
        super().__init__(config, context, chunk, output_layer=output_layer, token_types=2 * token_types)
        if variant(Transformer, config) is not Transformer:
            raise InputError(
                "--position-embedding-type alibi, --window-size and --no-rope-freq are for causal attention, not BERT"
            )
        check_bert(config)
        self.encoder = Transformer(config, context, self.chunk)
        # `encode` ends in an all-gather: the heads read few positions, which every rank has.
        self.head_context = dataclasses.replace(context, sequence_parallel=False)

    def encode(
        self,
        tokens_bs: Tensor,
        padding_mask_bs: Tensor | None,
        types_bs: Tensor,
        hidden_sbh: Tensor | None,
        dropout_key: DropoutKey | None,
        *,
        position_ids_bs: Tensor | None = None,
        document_ids_bs: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after this chunk's layers, [s, b, h]; with sequence parallelism this rank's part of s, but all
        of it after the last chunk.

        Args:
            padding_mask_bs: 1 for tokens, 0 for padding, which nothing attends to; None without padding.
            types_bs: 0 for the first sentence, 1 for the second.
            hidden_sbh: output of the chunk before, unless this is the first.
            dropout_key: None drops nothing.
            position_ids_bs: by default 0 for the first token of each row, 1 for the next, ...
            document_ids_bs: if given, positions attend only within their own document, and there is no padding mask.
        """
        cp, device = self.context.cp, tokens_bs.device
        length = tokens_bs.shape[1] * cp.size
        mask: Any = None if padding_mask_bs is None else padding_mask_bs.bool()[:, None, None]
        if cp.size > 1 or document_ids_bs is not None:  # with cp the keys are on other ranks
            spec = MaskSpec(
                length=length,
                causal=False,
                document_ids_bs=document_ids_bs,
                padding_mask_bs=padding_mask_bs,
                device=device,
            )
            mask = self.context.ops.make_mask(spec)
        if position_ids_bs is None:
            positions_s = Zigzag(length, cp.size).shard(torch.arange(length, device=device), 0, cp.rank)
            position_ids_bs = positions_s.expand_as(tokens_bs)
        rotary = self.rotary(position_ids_bs)
        inputs = LayerInputs(rotary=rotary, mask_bnst=mask, causal=False, dropout_key=dropout_key)
        hidden_sbh = self.transform(self.encoder, tokens_bs, position_ids_bs, inputs, hidden_sbh, types_bs)
        if self.chunk.last and self.context.sequence_parallel:
            hidden_sbh = gather_sequence(hidden_sbh, self.context.tp)
        return hidden_sbh

    def pooled_head(self, outputs: int) -> tuple[Pooler | None, Linear | None]:
        """Pooler and a linear head on it, if this is the last chunk."""
        if not self.chunk.last:
            return None, None
        return Pooler(self.config, self.head_context), Linear(self.config, self.head_context, outputs)


class BertModel(Bert):
    """BERT for pretraining: predicts masked words and the order of two sentences.

    The heads' parameters are `lm_head.dense.weight`, `output_layer.bias`, `pooler.dense.weight`,
    `binary_head.weight`, ...
    """

    def __init__(
        self, config: ModelConfig, context: ModelContext, chunk: Chunk | None = None, *, binary_head: bool
    ) -> None:
        """`binary_head`: add token types and the sentence-order head."""
        super().__init__(config, context, chunk, token_types=binary_head, output_layer=True)
        self.lm_head: LMHead | None = None
        self.output_layer: OutputLayer | None = None
        if self.chunk.last:
            self.lm_head = LMHead(config, self.head_context)
            self.output_layer = OutputLayer(
                config, self.head_context, first=self.chunk.first or self.chunk.v_shaped, bias=True
            )
        self.pooler, self.binary_head = self.pooled_head(2) if binary_head else (None, None)

    def forward(
        self,
        tokens_bs: Tensor,
        padding_mask_bs: Tensor | None,
        types_bs: Tensor,
        *,
        hidden_sbh: Tensor | None = None,
        positions_bp: Tensor | None = None,
        labels_bp: Tensor | None = None,
        loss_grad_bp: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        position_ids_bs: Tensor | None = None,
        document_ids_bs: Tensor | None = None,
        first_tokens_bd: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Logits of the two heads, [b, p, v] and [b, 2]; with labels, the former's losses in fp32, [b, p], instead.
        Without a binary head the second is None. A chunk that is not the last returns its hidden states.

        Args:
            positions_bp: masked positions, which alone are projected to the vocabulary; by default all, so p is s.
            loss_grad_bp: gradient of each of these losses, if it is known.
            first_tokens_bd: positions of the first tokens of d documents, each of which has an order, so that the
                second result is [b d, 2]; by default the first of each row.

        The other arguments are those of `encode`.
        """
        hidden_sbh = self.encode(
            tokens_bs,
            padding_mask_bs,
            types_bs,
            hidden_sbh,
            dropout_key,
            position_ids_bs=position_ids_bs,
            document_ids_bs=document_ids_bs,
        )
        if self.output_layer is None or self.lm_head is None:
            return hidden_sbh
        masked_pbh = hidden_sbh if positions_bp is None else at_positions(hidden_sbh, positions_bp)
        masked_pbh = self.lm_head(masked_pbh)
        order_b2 = None
        if self.binary_head is not None and self.pooler is not None:
            first_bh = hidden_sbh[0]
            if first_tokens_bd is not None:
                first_bh = at_positions(hidden_sbh, first_tokens_bd).transpose(0, 1).flatten(0, 1)
            order_b2 = self.binary_head(self.pooler(first_bh))
        if labels_bp is not None:
            return self.output_layer(masked_pbh, self.word_table, labels_bp, loss_grad_bp), order_b2
        logits_pbv = self.output_layer(masked_pbh, self.word_table)
        return logits_pbv[..., : self.num_valid_rows].transpose(0, 1), order_b2


class BertClassifier(Bert):
    """BERT with a head that scores whole sequences, for fine-tuning (arXiv 1810.04805 section 4.1).

    The head's parameters are `pooler.dense.weight`, `classification_head.weight`, ...
    """

    def __init__(
        self, config: ModelConfig, context: ModelContext, chunk: Chunk | None = None, *, scores: int
    ) -> None:
        """`scores` per sequence: one for each class, or a single one to rank sequences by."""
        super().__init__(config, context, chunk, token_types=True, output_layer=False)
        self.pooler, self.classification_head = self.pooled_head(scores)

    def forward(
        self,
        tokens_bs: Tensor,
        padding_mask_bs: Tensor | None,
        types_bs: Tensor,
        *,
        hidden_sbh: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Tensor:
        """[b, scores], or the hidden states of a chunk that is not the last. The arguments are those of `encode`."""
        hidden_sbh = self.encode(tokens_bs, padding_mask_bs, types_bs, hidden_sbh, dropout_key)
        if self.classification_head is None or self.pooler is None:
            return hidden_sbh
        pooled_bh = dropout(self.pooler(hidden_sbh[0]), self.config.hidden_dropout, dropout_key, "pooled")
        return self.classification_head(pooled_bh)


def at_positions(x_sbh: Tensor, positions_bp: Tensor) -> Tensor:
    """The rows of each sample at its positions, [p, b, h]."""
    samples = x_sbh.shape[1]
    rows_pb = positions_bp.t() * samples + torch.arange(samples, device=x_sbh.device)
    return embedding(rows_pb, x_sbh.flatten(0, 1))
