"""Flags of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""

from __future__ import annotations

import dataclasses

from megatron.errors import InputError
from megatron.flags import Config, flag, flag_name

# Other fields of the model that latent attention fixes, with the value that it needs.
NEEDED = {
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "group_query_attention": False,
    "add_qkv_bias": False,
    "add_attention_bias": False,
    "qk_layernorm_all_heads": False,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(Config):
    """Widths of multi-head latent attention. They need --multi-latent-attention."""

    multi_latent_attention: bool = flag(
        False, "attention whose keys and values come from a narrow latent; --qk-layernorm normalizes latents"
    )
    q_lora_rank: int | None = flag(
        None, "latent attention: width of the queries' latent (default: queries have none)", low=1
    )
    kv_lora_rank: int = flag(32, "latent attention: width of the latent of keys and values", low=1)
    qk_head_dim: int = flag(128, "latent attention: channels of a query or key head without RoPE", low=1)
    qk_pos_emb_head_dim: int = flag(
        64, "latent attention: further channels with RoPE, which all heads share in the key", low=2
    )
    v_head_dim: int = flag(128, "latent attention: channels of a value head", low=1)
    mscale: float = flag(
        1.0,
        "latent attention with yarn: multiplies cosine and sine by m(--mscale) / m(--mscale-all-dim), with "
        "m(x) = 1 + 0.1 x ln(--rope-scaling-factor)",
        low=0,
    )
    mscale_all_dim: float = flag(
        0.0, "latent attention with yarn: multiplies attention scores by m(--mscale-all-dim)²", low=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        fields = dataclasses.fields(self)  # of the whole model
        values = {field.name: getattr(self, field.name) for field in fields}
        if not self.multi_latent_attention:
            for field in dataclasses.fields(LatentAttentionConfig):
                if values[field.name] != field.default:
                    raise InputError(
                        f"{flag_name(field)}: {values[field.name]} needs --multi-latent-attention"
                    )
            return
        for field in fields:
            name, value, needed = flag_name(field), values[field.name], NEEDED.get(field.name)
            if needed is False and value:
                raise InputError(f"{name} and --multi-latent-attention exclude each other; drop one")
            if needed and value != needed:
                raise InputError(f"--multi-latent-attention needs {name} {needed}, not {value}")
        plain, rotated = self.qk_head_dim, self.qk_pos_emb_head_dim
        if rotated % 2:
            raise InputError(f"--qk-pos-emb-head-dim: {rotated} is odd, but RoPE rotates channels in pairs")
        if values["kv_channels"] not in (None, plain + rotated):
            raise InputError(
                f"--kv-channels: {values['kv_channels']} is not --qk-head-dim {plain} plus --qk-pos-emb-head-dim "
                f"{rotated}; leave it out"
            )
        object.__setattr__(self, "kv_channels", plain + rotated)
        yarn = values["use_rope_scaling"] and values["rope_scaling_type"] == "yarn"
        if not yarn and (self.mscale, self.mscale_all_dim) != (1.0, 0.0):
            raise InputError(
                f"--mscale {self.mscale} and --mscale-all-dim {self.mscale_all_dim} need --use-rope-scaling and "
                "--rope-scaling-type yarn"
            )
        if values["rope_scaling_attention_factor"] is not None and self.mscale != 1.0:
            raise InputError(
                f"--mscale {self.mscale} and --rope-scaling-attention-factor exclude each other; drop one"
            )
