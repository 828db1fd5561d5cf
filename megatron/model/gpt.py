"""GPT: embeddings, causal transformer, output layer over the vocabulary.

Shapes in names: s sequence, b batch, h hidden, v vocabulary, t keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.config import ModelConfig
from megatron.model.parameters import normal, parameter
from megatron.model.transformer import AttentionContext, KVCache, Transformer, input_init
from megatron.ops.attention import causal_mask, document_mask
from megatron.ops.cross_entropy import cross_entropy
from megatron.ops.embedding import embedding
from megatron.ops.rotary import rotary_angles


class Embedding(nn.Module):
    """Word embeddings, learned positions where the model has them, and dropout."""

    def __init__(self, config: ModelConfig, padded_vocab_size: int) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.word_embeddings = Table(padded_vocab_size, config)
        learned = config.position_embedding_type == "learned_absolute"
        self.position_embeddings = Table(config.max_position_embeddings, config) if learned else None

    def forward(self, tokens_bs: Tensor, position_ids_bs: Tensor) -> Tensor:
        x_sbh = self.word_embeddings(tokens_bs.t())
        if self.position_embeddings is not None:
            x_sbh = x_sbh + self.position_embeddings(position_ids_bs.t())
        return F.dropout(x_sbh, self.dropout, self.training)


class Table(nn.Module):
    """Rows looked up by index."""

    def __init__(self, rows: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = parameter(rows, config.hidden_size, init=normal(config.init_method_std))

    def forward(self, index: Tensor) -> Tensor:
        return embedding(index, self.weight)


class OutputLayer(nn.Module):
    """The projection to the vocabulary, where it does not share the word embeddings."""

    def __init__(self, config: ModelConfig, padded_vocab_size: int) -> None:
        super().__init__()
        self.weight = parameter(padded_vocab_size, config.hidden_size, init=input_init(config))


class GPTModel(nn.Module):
    """A decoder-only language model: GPT-2 by default, Llama's shape by flags.

    Parameters are named as in Megatron core: `embedding.word_embeddings.weight`,
    `decoder.layers.0.self_attention.linear_qkv.weight`, ..., `output_layer.weight`.
    """

    def __init__(self, config: ModelConfig, *, vocab_size: int, padded_vocab_size: int) -> None:
        """`vocab_size` counts the tokenizer's ids; the weights have `padded_vocab_size` rows."""
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.padded_vocab_size = padded_vocab_size
        self.embedding = Embedding(config, padded_vocab_size)
        self.decoder = Transformer(config)
        untied = config.untie_embeddings_and_output_weights
        self.output_layer = OutputLayer(config, padded_vocab_size) if untied else None

    def forward(
        self,
        tokens_bs: Tensor,
        position_ids_bs: Tensor,
        *,
        labels_bs: Tensor | None = None,
        document_ids_bs: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Logits [b, s, v], or with labels the loss of every position in fp32, [b, s].

        Args:
            document_ids_bs: if given, positions attend only within their own document.
            cache: if given, the tokens follow on the positions it holds.
        """
        context = AttentionContext(cache=cache)
        if self.config.position_embedding_type == "rope":
            context.rotary = rotary_angles(
                position_ids_bs, self.config.rotary_channels, self.config.rotary_base
            )
        if document_ids_bs is not None:
            context.mask_bst = document_mask(document_ids_bs)
        elif cache is not None and cache.position > 0:
            s = tokens_bs.shape[1]
            context.mask_bst = causal_mask(s, cache.position + s, tokens_bs.device)

        x_sbh = self.decoder(self.embedding(tokens_bs, position_ids_bs), context)
        if cache is not None:
            cache.position += tokens_bs.shape[1]

        logits_sbv = self.logits(x_sbh)
        if labels_bs is None:
            return logits_sbv.transpose(0, 1)
        return cross_entropy(logits_sbv, labels_bs.t()).t()

    def logits(self, x_sbh: Tensor) -> Tensor:
        """[s, b, v]. The columns that pad the vocabulary are cut off, so that no loss depends on them."""
        table = self.embedding.word_embeddings if self.output_layer is None else self.output_layer
        logits_sbv = F.linear(x_sbh, table.weight)
        if self.config.mask_padded_vocab:
            logits_sbv = logits_sbv[..., : self.vocab_size]
        return logits_sbv


def position_ids(start: int, batch: int, length: int, device: torch.device) -> Tensor:
    """[b, s]: start, start + 1, ... in every row."""
    return torch.arange(start, start + length, device=device).expand(batch, length)
