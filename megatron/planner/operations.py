"""Time of single operations on one device: matrix products and element-wise operations."""

from __future__ import annotations

import dataclasses
import functools
import math

from megatron.planner.cluster import Cluster
from megatron.planner.costs import Cost, ForwardBackward
from megatron.planner.layout import Job, Layout
from megatron.planner.programs import Accesses, Program
from megatron.planner.routing import mean_tiles

# Output tiles of large matrix products, and the overhead of filling the pipeline and writing a tile, in elements of the
# inner dimension. NVIDIA's guide "Matrix Multiplication Background" has the first tile and shows the speed growing
# with the inner dimension. The overhead is assumed; predictions hardly depend on it (docs/scaling.md).
TILES, TILE_OVERHEAD = ((256, 128), (128, 256)), 128
# Share of a product's speed that is left if rows of its operands are not a multiple of so many elements. Tensor cores
# load 8 elements at once and on A100 do best with 64 (NVIDIA's "Matrix Multiplication Background", section 3).
ALIGNMENT = ((8, 0.25), (32, 0.8))


@dataclasses.dataclass(frozen=True)
class Operations:
    """Times of the operations of a job's model on one process of a layout."""

    job: Job
    layout: Layout
    cluster: Cluster
    program: Program

    def matmul(
        self,
        m: float,
        n: float,
        k: float,
        batch: float = 1,
        *,
        aligned: float = 1,
        fp8: bool = False,
        spread: float = 0.0,
    ) -> float:
        """Seconds of `batch` products of [m, k] and [k, n], which are in FP8 if `fp8`.

        Tiles run in waves over the SMs and the last wave may be nearly empty; the tile shape with the smaller loss is
        used. Products with a small inner dimension are bound by memory bandwidth. On a CPU the time of moving operands
        and result is added, since a core does not load and compute at once; they are streamed, as in a copy. `aligned`
        is the share of the speed that the operands' rows leave. `spread` is the standard deviation of `m` among the
        products, each of which has tiles of its own.
        """
        device, efficiency = self.cluster.device, self.cluster.efficiency
        peak, element = (device.fp8, 1) if fp8 else (device.peak, device.element)
        assert peak is not None  # the command has checked it
        share = efficiency.matmul * (efficiency.fp8 if fp8 else 1)
        compute = 2 * batch * m * n * k / (peak * share * aligned)
        if device.sms > 1:
            area = min(
                math.ceil(batch * mean_tiles(m, x, spread) * math.ceil(n / y) / device.sms) * x * y
                for x, y in TILES
            )
            compute *= area * device.sms / (batch * m * n) * (1 + TILE_OVERHEAD / k)
        size = batch * (element * (m * k + k * n) + device.element * m * n)
        if device.is_cpu:
            return compute + size / (device.bandwidth * efficiency.stream) + efficiency.launch
        return max(compute, size / (device.bandwidth * efficiency.memory)) + efficiency.launch

    def aligned(self, *rows: float) -> float:
        """Share of a product's speed that rows of so many elements leave."""
        if self.cluster.device.sms == 1:
            return 1.0
        return min(
            (share for multiple, share in ALIGNMENT if any(row % multiple for row in rows)), default=1.0
        )

    def linear(
        self,
        tokens: float,
        inputs: float,
        outputs: float,
        batch: float = 1,
        *,
        fp8: bool = False,
        spread: float = 0.0,
    ) -> ForwardBackward:
        """A layer with weight [outputs, inputs]; backward computes the gradients of the input and of the weight.

        `batch` such layers are computed in one grouped product, and `spread` is the standard deviation of their tokens.
        """
        matmul = functools.partial(self.matmul, batch=batch, aligned=self.aligned(inputs, outputs), fp8=fp8)
        weights = matmul(outputs, inputs, tokens)
        backward = matmul(tokens, inputs, outputs, spread=spread) + weights
        forward = matmul(tokens, outputs, inputs, spread=spread)
        return ForwardBackward(Cost(matmul=forward), Cost(matmul=backward), weights)

    def layer_linear(
        self,
        tokens: float,
        inputs: float,
        outputs: float,
        batch: float = 1,
        *,
        cast: float | None = None,
        spread: float = 0.0,
    ) -> ForwardBackward:
        """`linear` within a transformer layer. With --fp8-format each of its three products casts both operands."""
        if self.job.fp8_format is None:
            return self.linear(tokens, inputs, outputs, batch, spread=spread)
        cast = self.program.fp8_cast if cast is None else cast
        weights = 0 if self.program.fp8_weights_kept else inputs * outputs
        casts = self.elementwise(tokens * inputs + weights, (cast, cast))
        casts += self.elementwise(tokens * outputs, (0, 2 * cast))
        return self.linear(tokens, inputs, outputs, batch, fp8=True, spread=spread) + casts * batch

    def elementwise(self, elements: float, accesses: Accesses) -> ForwardBackward:
        """Operations that read and write each of `elements` as often as `accesses` says."""
        device = self.cluster.device
        speed = device.bandwidth * self.cluster.efficiency.memory / device.element
        forward, backward = (Cost(elementwise=elements * times / speed) for times in accesses)
        return ForwardBackward(forward, backward)

    @property
    def tokens(self) -> float:
        return self.layout.tokens(self.job)

    @property
    def local_tokens(self) -> float:
        """Tokens of the residual stream on this process; sequence parallelism divides them."""
        return self.tokens / (self.layout.tensor if self.layout.sequence_parallel else 1)
