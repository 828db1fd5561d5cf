"""Key/value cache of generation.

Shapes in names: b batch, s new tokens, t all tokens, g key/value heads (groups) of this rank, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.model.config import ModelConfig
from megatron.parallel.mesh import Axis


class KVCache:
    """Preallocated keys and values of several sequences, for the layers and heads of this rank.

    The memory has shape [layers, 2, rows, g, length, d]. With latent attention it is [layers, 1, rows, 1, length, c],
    where c is the width of the latent and of the key that the heads share.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[int],
        tp: Axis,
        *,
        rows: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate `length` positions for each of `rows` sequences, in each of the `layers` by number."""
        self.index = {layer: i for i, layer in enumerate(layers)}
        parts, groups, width = 2, config.kv_heads_per_rank(tp.size), config.kv_channels
        if config.multi_latent_attention:
            parts, groups, width = 1, 1, config.kv_lora_rank + config.qk_pos_emb_head_dim
        shape = (len(layers), parts, rows, groups, length, width)
        # Masked positions have weight zero, but 0 x NaN is NaN, so the cache starts at zero.
        self.memory = torch.zeros(shape, dtype=dtype, device=device)

    def rows(self, first: int, starts: Sequence[int], length: int) -> CacheRows:
        """The sequences from row `first` on. The i-th is about to get `length` tokens from position `starts[i]` on."""
        return CacheRows(self, first, starts, length)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of the rows `sources` to the rows `targets`, all at once."""
        self.memory[:, :, list(targets), :, :length] = self.memory[:, :, list(sources), :, :length]


class CacheRows:
    """Rows of a cache with room for their new tokens.

    Attributes:
        position_ids_bs: positions of the new tokens.
        mask_bst: true where a new token may attend to a key; None where `causal` says it all.
        causal: without a mask, a new token attends to no later key.
    """

    def __init__(self, cache: KVCache, first: int, starts: Sequence[int], length: int) -> None:
        end = max(starts) + length
        self.index = cache.index
        self.memory = cache.memory[:, :, first : first + len(starts), :, :end]
        # The new positions as a slice, if they are the same in all rows.
        self.new = slice(starts[0], end) if len(set(starts)) == 1 else None
        device = cache.memory.device
        self.position_ids_bs = torch.tensor(starts, device=device).unsqueeze(1) + torch.arange(
            length, device=device
        )
        self.rows_b1 = torch.arange(len(starts), device=device).unsqueeze(1)
        self.causal = self.new is not None and starts[0] == 0
        self.mask_bst: Tensor | None = None
        # A single token at the same position in all rows attends to every key.
        if not self.causal and not (self.new is not None and length == 1):
            self.mask_bst = self.position_ids_bs.unsqueeze(2) >= torch.arange(end, device=device)

    def extend(self, layer: int, *new_bgsd: Tensor) -> tuple[Tensor, ...]:
        """Store a layer's tensors of new tokens, and return those of all tokens of the rows, each [b, g, t, d]."""
        stored = tuple(self.memory[self.index[layer]])
        for memory, new in zip(stored, new_bgsd, strict=True):
            if self.new is not None:
                memory[:, :, self.new] = new
            else:
                memory[self.rows_b1, :, self.position_ids_bs] = new.transpose(1, 2).to(memory.dtype)
        return stored
