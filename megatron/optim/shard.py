"""The tensors that an optimizer's step works on."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron.optim.spec import StepInputs
from megatron.parallel.collectives import all_reduce_sum
from megatron.parallel.mesh import Axis
from megatron.parallel.slices import Block


@dataclasses.dataclass(frozen=True)
class Shard:
    """Tensors of what one process updates: a flat piece of parameters, or a matrix (see `MatrixShard`).

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


@dataclasses.dataclass(frozen=True)
class MatrixShard(Shard):
    """A matrix [rows, columns], or the part of it that this tensor-parallel rank holds.

    Attributes:
        shape: of the whole matrix.
        tp: ranks that together hold the matrix. All of them take the step at the same time.
        blocks: the parts of the local tensor and their places in the whole matrix.
        counted: those of `blocks` that no other rank contributes to the whole matrix.
    """

    shape: tuple[int, ...]
    tp: Axis
    blocks: list[tuple[Block, Block]]
    counted: list[tuple[Block, Block]]

    def gather(self, x: Tensor) -> Tensor:
        """Assemble the whole matrix from the part `x` of each tensor-parallel rank."""
        if self.tp.size == 1:
            return x
        whole = x.new_zeros(self.shape)
        for local, place in self.counted:
            whole[place.index] = x[local.index]
        return all_reduce_sum(whole, self.tp)

    def local(self, whole: Tensor) -> Tensor:
        """Take this rank's part of a whole matrix."""
        if self.tp.size == 1:
            return whole
        return torch.cat([whole[place.index] for _, place in self.blocks])
