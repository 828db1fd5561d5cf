"""Layers of two kinds in one model: with and without a sliding window, with and without RoPE.

A window (arXiv 2004.05150 section 3.1) bounds the keys of a query, and so what attention costs and what generation
stores. --window-attn-skip-freq leaves some layers without it, --no-rope-freq leaves some without RoPE (arXiv
2501.18795), and --rotary-base-local gives those with a window another base, as in Gemma 3 (arXiv 2503.19786).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor, nn

from megatron.errors import InputError
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.moe_config import layer_pattern
from megatron.model.transformer import LayerInputs, Transformer, TransformerLayer
from megatron.ops.rotary import rotary_angles
from megatron.parallel.stages import Chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatternInputs(LayerInputs):
    """Inputs that differ from layer to layer.

    Attributes:
        by_layer: the inputs of each layer, by number.
    """

    by_layer: Mapping[int, LayerInputs]


class PatternTransformer(Transformer):
    """A transformer whose layers have their own masks and RoPE angles. Each is computed once for all layers."""

    def __init__(self, config: ModelConfig, context: ModelContext, chunk: Chunk) -> None:
        super().__init__(config, context, chunk)
        self.context, self.config = context, config
        windows, rope = config.windows, has_rope(config)
        self.kinds = {layer: (windows[layer], rope[layer]) for layer in map(int, self.layers)}
        for layer in self.layers.values():
            layer.register_forward_pre_hook(_choose_inputs)

    def forward(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        by_window = {window: self.within(window, inputs) for window, _ in self.kinds.values()}
        by_kind = {
            kind: by_window[kind[0]] if kind[1] else dataclasses.replace(by_window[kind[0]], rotary=None)
            for kind in set(self.kinds.values())
        }
        by_layer = {layer: by_kind[kind] for layer, kind in self.kinds.items()}
        return super().forward(x_sbh, PatternInputs(by_layer=by_layer))

    def within(self, window: int | None, inputs: LayerInputs) -> LayerInputs:
        """The inputs of layers with a window."""
        if window is None:
            return inputs
        base, positions, spec, cache = (
            self.config.rotary_base_local,
            inputs.position_ids_bs,
            inputs.mask_spec,
            inputs.cache,
        )
        if base is not None and positions is not None:
            # --use-rope-scaling does not apply to a base of their own.
            rotary = rotary_angles(positions, self.config.rotary_channels, base)
            inputs = dataclasses.replace(inputs, rotary=rotary)
        if cache is not None:
            mask_bst = cache.window_mask_bst
            mask_bnst = None if mask_bst is None else mask_bst.unsqueeze(1)
            return dataclasses.replace(inputs, mask_bnst=mask_bnst, causal=cache.window_causal)
        assert spec is not None
        if window >= spec.length - 1:
            return inputs
        mask = self.context.ops.make_mask(dataclasses.replace(spec, window=window))
        return dataclasses.replace(inputs, mask_bnst=mask)


def _choose_inputs(layer: nn.Module, arguments: tuple[Tensor, LayerInputs]) -> tuple[Tensor, LayerInputs]:
    """Forward pre-hook of a layer, which gets its own inputs."""
    x_sbh, inputs = arguments
    assert isinstance(layer, TransformerLayer) and isinstance(inputs, PatternInputs)
    return x_sbh, inputs.by_layer[layer.layer]


def has_rope(config: ModelConfig) -> list[bool]:
    """For each layer, true if RoPE rotates its queries and keys.

    Raises:
        InputError: --no-rope-freq has an impossible value, or the model has no RoPE to leave out.
    """
    frequency, layers = config.no_rope_freq, config.num_layers
    if frequency is None:
        return [config.position_embedding_type == "rope"] * layers
    for allowed, needed in (
        (config.position_embedding_type == "rope", "--position-embedding-type rope"),
        (not config.multi_latent_attention, "attention without --multi-latent-attention"),
    ):
        if not allowed:
            raise InputError(f"--no-rope-freq: {frequency} needs {needed}")
    skipped = layer_pattern("--no-rope-freq", frequency, layers, lambda n, i: (i + 1) % n == 0)
    return [not skips for skips in skipped]


def check_layers(config: ModelConfig, task: str) -> None:
    """Check the flags of this module before a run starts.

    Raises:
        InputError: they have impossible values, or the task or other flags exclude them.
    """
    has_rope(config)
    for name in "rotary_interleaved use_rope_scaling rotary_base rotary_base_local rotary_percent".split():
        value = getattr(config, name)
        if value != getattr(ModelConfig, name) and config.position_embedding_type != "rope":
            given = f"--{name.replace('_', '-')}" + ("" if isinstance(value, bool) else f": {value}")
            raise InputError(f"{given} needs --position-embedding-type rope; add it or leave the flag out")
    if config.window_size is not None and set(config.windows) == {None}:
        frequency = config.window_attn_skip_freq
        raise InputError(
            f"--window-attn-skip-freq: {frequency} gives no layer a window; drop it and --window-size"
        )
    for name in ("window_size", "no_rope_freq", "final_logit_softcapping"):
        value, flag = getattr(config, name), f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if task != "GPT":
            raise InputError(f"{flag}: {value} is for GPT, not {task}; leave it out")
        if config.mtp_num_layers and name != "final_logit_softcapping":
            raise InputError(f"{flag}: {value} excludes --mtp-num-layers; drop one")


# By the flag that chooses them, as in `megatron.model.variants.VARIANTS`.
VARIANTS: dict[str, dict[type, type]] = {
    "window_size": {Transformer: PatternTransformer},
    "no_rope_freq": {Transformer: PatternTransformer},
}
