"""Seconds of computation and communication by kind of work, forward and backward."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds by kind of work.

    Attributes:
        matmul: matrix products.
        elementwise: operations bound by memory bandwidth.
        tensor_parallel: communication of tensor parallelism that nothing hides.
        expert_parallel: that of expert parallelism.
        context_parallel: that of context parallelism.
        host: waiting for the process that starts the kernels.
    """

    matmul: float = 0.0
    elementwise: float = 0.0
    tensor_parallel: float = 0.0
    expert_parallel: float = 0.0
    context_parallel: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.matmul
            + self.elementwise
            + self.tensor_parallel
            + self.expert_parallel
            + self.context_parallel
            + self.host
        )

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.matmul + other.matmul,
            self.elementwise + other.elementwise,
            self.tensor_parallel + other.tensor_parallel,
            self.expert_parallel + other.expert_parallel,
            self.context_parallel + other.context_parallel,
            self.host + other.host,
        )

    def __mul__(self, times: float) -> Cost:
        return Cost(
            self.matmul * times,
            self.elementwise * times,
            self.tensor_parallel * times,
            self.expert_parallel * times,
            self.context_parallel * times,
            self.host * times,
        )


@dataclasses.dataclass(frozen=True)
class ForwardBackward:
    """Costs of the forward and the backward pass.

    Attributes:
        weights: seconds of `backward` that are products for weight gradients, which a split backward pass runs later.
    """

    forward: Cost
    backward: Cost
    weights: float = 0.0

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total

    def __add__(self, other: ForwardBackward) -> ForwardBackward:
        weights = self.weights + other.weights
        return ForwardBackward(self.forward + other.forward, self.backward + other.backward, weights)

    def __mul__(self, times: float) -> ForwardBackward:
        return ForwardBackward(self.forward * times, self.backward * times, self.weights * times)

    @property
    def whole(self) -> ForwardBackward:
        """The same, with a backward pass that is never split."""
        return dataclasses.replace(self, weights=0.0)
