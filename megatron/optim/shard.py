"""The tensors that an optimizer's step works on."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from megatron.optim.spec import StepInputs


@dataclasses.dataclass(frozen=True)
class Shard:
    """Tensors of what one process updates: a flat piece of parameters, unless the optimizer divides it further.

    Attributes:
        weight: fp32, updated in place.
        grad: fp32, summed over the global batch. A step may overwrite it.
        state: what the optimizer keeps, by name; of the weight's shape.
    """

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]

    def scaled_grad(self, inputs: StepInputs) -> Tensor:
        """Divide the gradient by `inputs.grad_scale`, in place; it becomes zero where `inputs.found_inf` is 1."""
        if inputs.grad_scale is not None:
            self.grad.div_(inputs.grad_scale)
        return self.grad.masked_fill_(inputs.found_inf.bool(), 0.0)
