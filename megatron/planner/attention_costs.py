"""Time of attention in a layer, with that of context parallelism.

Names: q and kv elements of a rank's queries, and of its keys and values.
"""

from __future__ import annotations

import dataclasses
import functools

from megatron.model.flops import attended_pairs
from megatron.planner.costs import Cost, ForwardBackward
from megatron.planner.operations import Operations

# Fused attention computes scores in square blocks of this side, those on the diagonal in full.
ATTENTION_BLOCK = 128
# Share of the peak that attention's products reach without a fused kernel if rows of a head are not a multiple of 8
# elements, which tensor cores load at once. With 13,824 channels on A100, 128 heads of 108 take 147.41 s where 64 heads
# of 216 take 103.51 s (bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md, "Another round of
# NHEADS"): 10.5 TFLOP/s, half of what the GPU does without tensor cores.
UNALIGNED_HEADS = 0.034
# Heads exchanged for positions: rows by their rank, joined, and the positions of the sequence in order, each a copy.
HEAD_EXCHANGE = (6, 6)
# Accesses for an element of the output in backward: its product with the gradient (2), another output with this product
# (4), and a copy of it where attention expects it (3). Counted by hand.
OUTPUT_PRODUCT = (0, 9)
# Part of a rank's queries, and of another rank's keys, that meet in causal attention: all queries and half of the keys
# if the other rank is before it in the zigzag, otherwise half of the queries and all keys.
MET = 3 / 4


@dataclasses.dataclass(frozen=True)
class AttentionCosts(Operations):
    """Times of attention on one process of a layout."""

    @functools.cached_property
    def attention(self) -> ForwardBackward:
        """Scores and weighted sums of one layer. Ranks of context parallelism have equal parts of the causal square."""
        model, s, ranks = self.job.model, self.job.seq_length, self.layout.context
        heads = self.layout.micro_batch_size * model.num_attention_heads / self.layout.tensor
        d, width = model.kv_channels, model.value_channels
        if self.program.fused_attention:
            # The causal mask leaves half of the square. Backward recomputes the scores: five products for forward's
            # two.
            device, efficiency = self.cluster.device, self.cluster.efficiency
            scores = s * (s + min(s, ATTENTION_BLOCK)) / 2 / ranks
            # A window leaves fewer. Every layer counts as the mean of all.
            pairs = attended_pairs(model, s, causal=True)
            scores *= sum(pairs) / (len(pairs) * s * (s + 1) / 2)
            forward = 2 * heads * scores * (d + width) / (device.peak * efficiency.attention)
            if ranks > 1 and self.layout.context_exchange != "a2a":  # which has whole sequences
                forward /= efficiency.context
            backward = 2.5 * forward / efficiency.attention_backward
            return ForwardBackward(
                Cost(matmul=forward + efficiency.launch), Cost(matmul=backward + efficiency.launch)
            )
        qk = self._of_heads(heads, d, (s / ranks, s, d))
        pv = self._of_heads(heads, width, (s / ranks, width, s))
        # Backward: the gradient of the scores, and three sums over the sequence for queries, keys and values.
        products = ForwardBackward(Cost(matmul=qk + pv), Cost(matmul=qk + 3 * pv))
        return products + self.elementwise(heads * s * s / ranks, self.program.scores)

    def _of_heads(self, heads: float, row: float, shape: tuple[float, float, float]) -> float:
        """Seconds of a product [m, k] x [k, n] for each of `heads`, whose rows have `row` elements."""
        m, n, k = shape
        if row % 8 and self.cluster.device.sms > 1:
            return 2 * heads * m * n * k / (UNALIGNED_HEADS * self.cluster.device.peak)
        return self.matmul(m, n, k, heads, aligned=self.aligned(row))

    @functools.cached_property
    def context_parallel(self) -> ForwardBackward:
        """Communication of one layer's attention between context-parallel ranks.

        In a ring a rank sends a part of the keys and values on while it computes with it; in backward the gradients
        follow them. Gathered keys and values come before attention, in backward too, and a reduce-scatter sums their
        gradients in fp32. An exchange of heads for positions moves queries, keys, values and outputs, and in
        backward an fp32 number of each head and query.
        """
        layout, model, cluster = self.layout, self.job.model, self.cluster
        steps = layout.context - 1
        if not steps:
            return ForwardBackward(Cost(), Cost())
        heads = model.num_attention_heads / layout.tensor
        groups = heads if model.multi_latent_attention else model.kv_heads_per_rank(layout.tensor)
        element, group = cluster.device.element, layout.context_group(cluster)
        size = self.tokens * groups * (model.kv_channels + model.value_channels) * element
        if layout.context_exchange == "a2a":
            queries, outputs = (
                self.tokens * heads * width * element for width in (model.kv_channels, model.value_channels)
            )
            products = 4 * self.tokens * heads  # of outputs and their gradients
            forward, backward = (
                Cost(context_parallel=cluster.all_to_all(queries + size, group) + seconds)
                for seconds in (cluster.all_to_all(x, group) for x in (outputs, outputs + products))
            )
            exchange = ForwardBackward(forward, backward)
            exchange += self.elementwise((queries + size + outputs) / element, HEAD_EXCHANGE)
            return exchange + self.elementwise(outputs / element, OUTPUT_PRODUCT)
        joins = self._joins(self.tokens * heads * model.value_channels, size / element)
        if layout.context_exchange == "all_gather":
            whole = layout.context * size
            gather = cluster.all_gather(whole, group)
            reduce = cluster.reduce_scatter(4 / element * whole, group)
            return joins + ForwardBackward(
                Cost(context_parallel=gather), Cost(context_parallel=gather + reduce)
            )
        keys, sums, empty = (cluster.shift(x, group) for x in (size, 4 / element * size, 0))
        attention = self.attention
        ahead = steps * cluster.exposed(keys, empty, attention.forward.total / layout.context)
        back = steps * cluster.exposed(keys + sums, 2 * empty, attention.backward.total / layout.context)
        back += sums  # of gradients, in fp32, which return to the rank of the keys
        return joins + ForwardBackward(Cost(context_parallel=ahead), Cost(context_parallel=back))

    def _joins(self, q: float, kv: float) -> ForwardBackward:
        """Copies and sums around the kernels of a rank that meets the keys of one rank after the other.

        Keys and values are put together; the outputs and the gradients of the parts are summed in fp32, and converted
        if that is not their precision.
        """
        if not self.program.ring_joins:
            return ForwardBackward(Cost(), Cost())
        ranks, element = self.layout.context, self.cluster.device.element
        total = 4 / element  # accesses of an element in fp32
        converted = 1 + total if element < 4 else 0.0
        parts = 1 + MET * (ranks - 1)
        forward = 2 * kv + q * (converted * (parts + 1) + 3 * total * (parts - 1))
        backward = 2 * kv + q * (total + (1 + 2 * total) * parts + converted)
        backward += kv * (ranks * total + (1 + 2 * total) * parts + converted)
        if self.layout.context_exchange != "all_gather":  # which has a reduce-scatter for this
            backward += 3 * total * kv * (ranks - 1)
        return self.elementwise(1.0, (forward, backward))
