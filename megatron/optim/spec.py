"""The interface of an optimizer: its flags, the state that it keeps, and its step on shards of the parameters."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.flags import Config

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepInputs:
    """Inputs of an optimizer's step besides its shards.

    Attributes:
        steps: number of steps before this one, an fp32 scalar.
        grad_scale: divisor of the gradients, a scalar; None for 1.
        found_inf: a scalar; where it is 1, gradients may not be finite, and the step must change nothing.
    """

    lr: float
    weight_decay: float
    steps: Tensor
    grad_scale: Tensor | None
    found_inf: Tensor


@dataclasses.dataclass(frozen=True)
class Shard:
    """Tensors of what one process updates: a flat piece of parameters, unless the optimizer divides it further.

    Attributes:
        weight: fp32, updated in place.
        grad: fp32, summed over the global batch. A step may overwrite it.
        state: what the optimizer keeps, by name; of the weight's shape.
        param: in the dtype that the model computes in; `weight` itself if that is fp32. `on_host` optimizers set it.
    """

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    param: Tensor | None = dataclasses.field(default=None, kw_only=True)

    def scaled_grad(self, inputs: StepInputs) -> Tensor:
        """Divide the gradient by `inputs.grad_scale`, in place; it becomes zero where `inputs.found_inf` is 1."""
        if inputs.grad_scale is not None:
            self.grad.div_(inputs.grad_scale)
        return self.grad.masked_fill_(inputs.found_inf.bool(), 0.0)


class OptimizerSpec(ABC):
    """An optimizer. A new one is a subclass in a file of its own and a line in `registry.OPTIMIZERS`.

    The command line is read without torch, for the sake of time: such a file imports torch within methods.

    Attributes:
        config_class: its flags, each with a default. All optimizers' flags are on the command line.
        state: tensors that are kept beside each weight, by name: their dtype, as torch names it. They have the weight's
            shape, start at zero and are saved in checkpoints under these names.
        on_host: master weights and state are in host memory.
        counts: the gradients are counts, which are summed in fp32 even with --grad-reduce-in-bf16. Each replica updates
            all of these parameters, which the model reads and checkpoints hold in fp32 (`parameters.master`).
        trains: false if the parameters are not trained.
    """

    config_class: ClassVar[type[Config]] = Config
    state: Mapping[str, str]
    on_host: bool = False
    counts: bool = False
    trains: bool = True

    @classmethod  # noqa: B027 (most optimizers need no check)
    def check(cls, config: Any) -> None:
        """Check the optimizer's flags in an `OptimizerConfig`, even if it is not chosen. Raises `InputError`."""

    @abstractmethod
    def __init__(self, config: Any) -> None:
        """Get ready. `config` has the fields of `config_class`."""

    def updates(self, name: str, p: nn.Parameter) -> bool:
        """True if the optimizer updates this parameter; AdamW updates all others."""
        return True

    def arrange(self, buckets: list[Any]) -> list[Any]:
        """Arrange parameters and shards within the optimizer's `Bucket`s, which have equal shards."""
        return buckets

    def divide(self, shard: Shard, bucket: Any, tp: Any) -> Sequence[Any]:
        """Divide the `Shard` of a `Bucket` into shards for `step`; `tp` is the tensor-parallel `Axis`."""
        return [shard]

    def prepare(self, shards: Sequence[Any]) -> None:  # noqa: B027 (most optimizers use gradients as they are)
        """Change gradients before their norm is taken; `shards` are what `divide` returned."""

    @abstractmethod
    def step(self, shards: Sequence[Any], inputs: StepInputs) -> None:
        """Update weights and state of what `divide` returned, in place, without waiting for the device."""

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate zeros, [size], for master weights or state."""
        import torch

        return torch.zeros(size, dtype=dtype, device=device)

    def finish(self) -> None:  # noqa: B027 (most optimizers need no wait)
        """Make the host wait until what is `on_host` has the values of the last step."""

    @property
    def state_dtypes(self) -> dict[str, torch.dtype]:
        """Dtype of each tensor of the state, by name."""
        import torch

        return {name: getattr(torch, dtype) for name, dtype in self.state.items()}
