"""Parameters, gradients and fp32 master weights of a model in flat memory.

Every parameter is a view into one tensor, so is its gradient, so is its master copy. Gradients are reduced,
their norm is taken and the optimizer steps in single calls on that memory.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

# Each parameter begins on a boundary of 64 elements, which is what matrix kernels want of an address.
ALIGNMENT = 64
# Elements that `norm` sums at once.
PIECE = 1 << 16


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a parameter lies in the flat tensors."""

    start: int
    shape: torch.Size

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of one of the flat tensors, in its own shape."""
        return flat[self.start : self.start + self.shape.numel()].view(self.shape)


class ParamBuffer:
    """Flat storage of one model.

    Attributes:
        params: [size], in the dtype that the model computes in.
        grads: [size] fp32; backward adds to it.
        master: [size] fp32; `params` itself when the model computes in fp32.
        places: where each parameter lies, by its name.
        num_elements: elements of all parameters; the flat tensors are a little longer, for alignment.
        decayed: the first elements, those of the parameters that weight decay applies to (matrices and
            embeddings; not biases and scales of normalisations).
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
        """Move the parameters of `model` into flat memory. Their values are undefined until `initialize`."""
        named = sorted(model.named_parameters(), key=lambda item: item[1].dim() < 2)
        self.parameters = dict(named)
        self.places: dict[str, Place] = {}
        self.decayed = end = 0
        for name, p in named:
            self.places[name] = Place(end, p.shape)
            end += -(-p.numel() // ALIGNMENT) * ALIGNMENT
            if p.dim() >= 2:
                self.decayed = end
        self.num_elements = sum(p.numel() for _, p in named)
        self.params = torch.zeros(end, dtype=dtype, device=device)
        self.grads = torch.zeros(end, dtype=torch.float32, device=device)
        fp32 = dtype == torch.float32
        self.master = self.params if fp32 else torch.zeros(end, dtype=torch.float32, device=device)
        for name, p in named:
            p.data = self.places[name].view(self.params)
            grad = self.places[name].view(self.grads)
            if fp32:
                p.grad = grad
            else:
                p.register_post_accumulate_grad_hook(_add_to(grad))

    def initialize(self, seed: int) -> None:
        """Give every parameter the initial values that (seed, name) stand for."""
        for name, p in self.parameters.items():
            p.init(self.places[name].view(self.master), seed, name)
        self.copy_master_to_params()

    def copy_master_to_params(self) -> None:
        """Round the master weights to the dtype of the model."""
        if self.master is not self.params:
            self.params.copy_(self.master)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """The views of a flat tensor that belong to each parameter, by name."""
        return {name: place.view(flat) for name, place in self.places.items()}


def norm(flat: Tensor) -> Tensor:
    """L2 norm of a flat tensor, a scalar. Taken of pieces first: one long sum in fp32 loses percents on a CPU."""
    whole = flat.numel() // PIECE * PIECE
    pieces = torch.linalg.vector_norm(flat[:whole].view(-1, PIECE), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:]).unsqueeze(0)
    return torch.linalg.vector_norm(torch.cat((pieces, rest)))


def _add_to(grad: Tensor):
    def accumulate(p: Tensor) -> None:
        grad.add_(p.grad)
        p.grad = None

    return accumulate
