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
    where c is the width of the latent and of the key that the heads share. Layers with a window have memory of their
    own, whose length is that of the window: position p is stored at p modulo the length, in place of an older one.
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
        windows = {layer: config.windows[layer] for layer in layers}
        whole = [layer for layer in layers if windows[layer] is None]
        windowed = {layer: window for layer, window in windows.items() if window is not None}
        self.index = {layer: i for i, layer in enumerate(whole)}
        self.window_index = {layer: i for i, layer in enumerate(windowed)}
        parts, groups, width = 2, config.kv_heads_per_rank(tp.size), config.kv_channels
        if config.multi_latent_attention:
            parts, groups, width = 1, 1, config.kv_lora_rank + config.qk_pos_emb_head_dim
        shape = (parts, rows, groups)
        window_length = min(length, max(windowed.values(), default=0) + 1)
        # Masked positions have weight zero, but 0 x NaN is NaN, so the cache starts at zero.
        self.memory = torch.zeros(len(whole), *shape, length, width, dtype=dtype, device=device)
        self.window_memory = torch.zeros(
            len(windowed), *shape, window_length, width, dtype=dtype, device=device
        )

    def rows(self, first: int, starts: Sequence[int], lengths: Sequence[int]) -> CacheRows:
        """The sequences from row `first` on. The i-th is about to get `lengths[i]` tokens from position `starts[i]` on,
        and then padding up to the largest of `lengths`."""
        return CacheRows(self, first, starts, lengths)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of the rows `sources` to the rows `targets`, all at once."""
        self.memory[:, :, list(targets), :, :length] = self.memory[:, :, list(sources), :, :length]
        self.window_memory[:, :, list(targets)] = self.window_memory[:, :, list(sources)]

    def clear(self, row: int) -> None:
        """Zero a row."""
        self.memory[:, :, row] = 0
        self.window_memory[:, :, row] = 0


class CacheRows:
    """Rows of a cache with room for their new tokens.

    Attributes:
        position_ids_bs: positions of the new tokens.
        mask_bst: true where a new token may attend to a key; None where `causal` says it all.
        causal: without a mask, a new token attends to no later key.
        window_mask_bst, window_causal: the same for the keys that layers with a window have.
    """

    def __init__(self, cache: KVCache, first: int, starts: Sequence[int], lengths: Sequence[int]) -> None:
        length = max(lengths)
        end = max(starts) + length
        self.index, self.window_index = cache.index, cache.window_index
        self.memory = cache.memory[:, :, first : first + len(starts), :, :end]
        self.window_memory = cache.window_memory[:, :, first : first + len(starts)]
        # The new positions as a slice, if they are the same in all rows.
        self.new = slice(starts[0], end) if len(set(starts)) == 1 else None
        device = cache.memory.device
        self.starts_b1 = torch.tensor(starts, device=device).unsqueeze(1)
        self.lengths_b1 = torch.tensor(lengths, device=device).unsqueeze(1)
        self.position_ids_bs = self.starts_b1 + torch.arange(length, device=device)
        self.rows_b1 = torch.arange(len(starts), device=device).unsqueeze(1)
        self.causal = self.new is not None and starts[0] == 0
        self.mask_bst: Tensor | None = None
        # A single token at the same position in all rows attends to every key.
        if not self.causal and not (self.new is not None and length == 1):
            self.mask_bst = self.position_ids_bs.unsqueeze(2) >= torch.arange(end, device=device)
        self.window_mask_bst: Tensor | None = None
        self.window_causal = self.causal
        if self.window_index:
            self._mask_windows(length, min(starts))

    def extend(self, layer: int, *new_bgsd: Tensor) -> tuple[Tensor, ...]:
        """Store a layer's tensors of new tokens, and return those of all tokens of the rows, each [b, g, t, d].

        A layer with a window returns those that the new tokens may attend to, in the order of `window_mask_bst`.
        """
        if layer in self.window_index:
            memories = tuple(self.window_memory[self.window_index[layer]])
            return tuple(map(self._extend_window, memories, new_bgsd))
        stored = tuple(self.memory[self.index[layer]])
        for memory, new in zip(stored, new_bgsd, strict=True):
            if self.new is not None:
                memory[:, :, self.new] = new
            else:
                memory[self.rows_b1, :, self.position_ids_bs] = new.transpose(1, 2).to(memory.dtype)
        return stored

    def _mask_windows(self, length: int, first_start: int) -> None:
        """Set the mask of the keys that `_extend_window` returns."""
        size = self.window_memory.shape[-2]
        slots = torch.arange(size, device=self.window_memory.device)
        if length == 1:  # the memory has no key out of the window, but may have none yet in some places
            self.window_causal = False
            if first_start < size - 1:
                self.window_mask_bst = (slots <= self.starts_b1).unsqueeze(1)
            return
        keys_bt = self.position_ids_bs
        if not self.causal:
            last_b1 = self.starts_b1 - 1
            keys_bt = torch.cat((last_b1 - (last_b1 - slots) % size, keys_bt), dim=1)
        elif length <= size:
            return
        distance_bst = self.position_ids_bs.unsqueeze(2) - keys_bt.unsqueeze(1)
        self.window_mask_bst = (distance_bst >= 0) & (distance_bst < size) & (keys_bt >= 0).unsqueeze(1)

    def _extend_window(self, memory: Tensor, new_bgsd: Tensor) -> Tensor:
        """Store the last new tokens of each row. Returns the memory after a single token; otherwise the stored tokens,
        if any, and the new ones."""
        new, size = new_bgsd.to(memory.dtype), memory.shape[-2]
        single = new.shape[2] == 1
        keys_bgtd = new if self.causal or single else torch.cat((memory, new), dim=2)
        index = self.position_ids_bs - self.starts_b1
        kept_bs = (index < self.lengths_b1) & (index >= self.lengths_b1 - size)
        rows_n, columns_n = kept_bs.nonzero(as_tuple=True)
        slots_n = self.position_ids_bs[rows_n, columns_n] % size
        memory[rows_n, :, slots_n] = new.transpose(1, 2)[rows_n, columns_n]
        return memory if single else keys_bgtd
