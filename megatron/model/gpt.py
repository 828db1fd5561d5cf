"""GPT: embeddings, causal transformer, output layer over the vocabulary.

Shapes in names: s sequence, b batch, h hidden, v vocabulary, t keys. With tensor parallelism v counts this process's
part of the vocabulary; with sequence parallelism the s of `hidden_sbh` counts its part of the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.model.config import ModelConfig
from megatron.model.layers import TensorParallel
from megatron.model.transformer import CacheRows, Context, Transformer
from megatron.model.vocabulary import WORD_TABLE, Embedding, OutputLayer
from megatron.ops.attention import document_mask
from megatron.ops.rotary import rotary_angles
from megatron.parallel.collectives import gather_sequence
from megatron.parallel.random import DropoutKey
from megatron.parallel.recompute import Recompute
from megatron.parallel.stages import Chunk


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
        cache: CacheRows | None = None,
        wanted: tuple[Tensor, Tensor] | None = None,
        dropout_key: DropoutKey = None,
    ) -> Tensor:
        """Logits [b, s, v], or of `wanted` positions alone [n, v], or with labels the loss of every position in fp32,
        [b, s].

        Args:
            hidden_sbh: what the chunk before gives; every chunk but the last gives its own in place of logits.
            document_ids_bs: if given, positions attend only within their own document.
            cache: if given, the tokens follow on those that it holds; their positions are `cache.position_ids_bs`.
            wanted: rows [n] and positions [n] of the tokens whose logits are computed.
            dropout_key: what dropout is drawn by; None drops nothing.
        """
        context = self._context(tokens_bs, position_ids_bs, document_ids_bs, cache, dropout_key)
        if self.embedding is not None:
            hidden_sbh = self.embedding(tokens_bs, position_ids_bs, dropout_key)
        hidden_sbh = self.decoder(hidden_sbh, context)
        if self.output_layer is None:
            return hidden_sbh
        table = None if self.embedding is None else self.embedding.word_embeddings.weight
        if wanted is not None:
            if self.tp.sequence:
                hidden_sbh = gather_sequence(hidden_sbh, self.tp.axis)
            rows, positions = wanted
            hidden_1nh = hidden_sbh[positions, rows].unsqueeze(0)
            # Which gathers again, along a sequence of 1.
            return self.output_layer(hidden_1nh, table)[0, :, : self.real]
        if labels_bs is None:
            return self.output_layer(hidden_sbh, table)[..., : self.real].transpose(0, 1)
        return self.output_layer.losses(hidden_sbh, table, labels_bs.t()).t()

    def _context(
        self,
        tokens_bs: Tensor,
        position_ids_bs: Tensor,
        document_ids_bs: Tensor | None,
        cache: CacheRows | None,
        dropout_key: DropoutKey,
    ) -> Context:
        context = Context(cache=cache, dropout_key=dropout_key)
        if self.config.position_embedding_type == "rope":
            context.rotary = rotary_angles(
                position_ids_bs,
                self.config.rotary_channels,
                self.config.rotary_base,
                self.config.rope_scaling_factor if self.config.use_rope_scaling else None,
            )
        if document_ids_bs is not None:
            context.mask_bst = document_mask(document_ids_bs)
        elif cache is not None:
            context.mask_bst, context.causal = cache.mask_bst, cache.causal
        return context


def position_ids(start: int, batch: int, length: int, device: torch.device) -> Tensor:
    """[b, s]: start, start + 1, ... in every row."""
    return torch.arange(start, start + length, device=device).expand(batch, length)
