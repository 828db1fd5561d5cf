"""A model and its batch."""

from __future__ import annotations

import dataclasses
import functools

from megatron.model.config import ModelConfig
from megatron.model.flops import flops_per_sample
from megatron.tokenizer import padded_vocab_size


@dataclasses.dataclass(frozen=True)
class Job:
    """A GPT, its global batch, and the --fp8-format of its layers.

    Attributes:
        vocab_size: size before padding.
        vocab_divisor: --make-vocab-size-divisible-by, by which it is padded.
    """

    model: ModelConfig
    seq_length: int
    vocab_size: int
    global_batch_size: int
    fp8_format: str | None = None
    vocab_divisor: int = 128

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Hash, kept since jobs are keys of caches: a model's config has a hundred fields."""
        others = self.seq_length, self.vocab_size, self.global_batch_size, self.fp8_format, self.vocab_divisor
        return hash((self.model, *others))

    @functools.cached_property
    def has_experts(self) -> tuple[bool, ...]:
        """True for each layer whose MLP is a mixture of experts."""
        return tuple(self.model.expert_layers(self.model.num_layers))

    def padded_vocab_size(self, tensor: int) -> int:
        """Rows of the embedding table."""
        return padded_vocab_size(self.vocab_size, self.vocab_divisor, tensor)

    def residual_element(self, element: int) -> int:
        """Bytes of an element of the residual stream, if other activations have `element` bytes."""
        return 4 if self.model.fp32_residual_connection else element

    def flops(self, *, recompute: str = "none") -> float:
        """FLOPs of a step by 2104.04473 section 5.1; "full" recomputation adds a second forward pass of the layers."""
        sizes = {"seq_length": self.seq_length, "padded_vocab_size": self.vocab_size}
        model = flops_per_sample(self.model, num_logits=self.seq_length, **sizes)
        if recompute == "full":
            model += flops_per_sample(self.model, num_logits=0, **sizes) / 3
        return self.global_batch_size * model
