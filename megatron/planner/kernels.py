"""How long the parts of a model take on one device: matrix products, operations on elements, tensor parallelism.

Names: b microbatch, s sequence, h hidden, t tensor-parallel processes; n tokens of a microbatch, b s.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job, Layout, Moves, Program

# Tiles of the output that large products are cut into, and the length along the inner dimension that filling the
# pipeline and writing a tile cost. After NVIDIA's guide "Matrix Multiplication Background", which has the first
# tile and shows speed growing with the inner dimension; the length is assumed, and predictions hardly depend on it
# (docs/scaling.md).
TILES, FILL = ((256, 128), (128, 256)), 128
# Fused attention computes scores in squares of so many queries and keys, and those on the diagonal whole.
BLOCK = 128
# Two tables are read, added and dropped out; backward adds to two. Cross entropy turns logits to fp32, finds the
# largest, the exponentials and their sum; backward scales them and turns them back.
EMBEDDING, ENTROPY = (6, 9), (10, 8)


@dataclasses.dataclass(frozen=True)
class Spent:
    """Seconds, by what they are spent on.

    Attributes:
        products: matrix products.
        elements: operations that move elements through memory.
        tensor: communication of tensor parallelism.
    """

    products: float = 0.0
    elements: float = 0.0
    tensor: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.elements + self.tensor

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.products + other.products, self.elements + other.elements, self.tensor + other.tensor
        )

    def __mul__(self, times: float) -> Spent:
        return Spent(self.products * times, self.elements * times, self.tensor * times)


@dataclasses.dataclass(frozen=True)
class Both:
    """Forward and backward."""

    forward: Spent
    backward: Spent

    def __add__(self, other: Both) -> Both:
        return Both(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: float) -> Both:
        return Both(self.forward * times, self.backward * times)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Times of the parts of a job's model on one process of a layout."""

    job: Job
    layout: Layout
    cluster: Cluster
    program: Program

    def product(self, m: float, n: float, k: float, batch: float = 1) -> float:
        """Seconds of `batch` products of [m, k] and [k, n].

        Tiles are computed in waves, one on each processor, and the last wave may be all but empty; of the shapes of
        tiles that with the least loss is taken. Small inner dimensions are bound by memory.
        """
        device, reached = self.cluster.device, self.cluster.reached
        work = 2 * batch * m * n * k / (device.peak * reached.product)
        if device.sms > 1:
            waves = min(
                math.ceil(batch * math.ceil(m / x) * math.ceil(n / y) / device.sms) * x * y for x, y in TILES
            )
            work *= waves * device.sms / (batch * m * n) * (1 + FILL / k)
        moved = device.element * batch * (m * k + k * n + m * n) / (device.bandwidth * reached.memory)
        return max(work, moved) + reached.launch

    def linear(self, tokens: float, inputs: float, outputs: float) -> Both:
        """A layer with weight [outputs, inputs]; backward multiplies for the input's gradient and the weight's."""
        forward = self.product(tokens, outputs, inputs)
        backward = self.product(tokens, inputs, outputs) + self.product(outputs, inputs, tokens)
        return Both(Spent(products=forward), Spent(products=backward))

    def moved(self, elements: float, moves: Moves) -> Both:
        """Operations that pass so many elements between memory and processor so often."""
        speed = self.cluster.device.bandwidth * self.cluster.reached.memory / self.cluster.device.element
        return Both(*(Spent(elements=elements * times / speed) for times in moves))

    @property
    def tokens(self) -> int:
        return self.layout.micro_batch_size * self.job.seq_length

    @property
    def local_tokens(self) -> float:
        """Of the residual stream, which sequence parallelism divides."""
        return self.tokens / (self.layout.tensor if self.layout.sequence_parallel else 1)

    @functools.cached_property
    def attention(self) -> Both:
        """Scores and weighted sums of one layer."""
        model, s = self.job.model, self.job.seq_length
        heads = self.layout.micro_batch_size * model.num_attention_heads / self.layout.tensor
        d = model.kv_channels
        if self.program.fused_attention:
            # Half the square under the mask. Backward recomputes the scores: five products for forward's two.
            device = self.cluster.device
            scored = s * (s + min(s, BLOCK)) / 2
            forward = 4 * heads * scored * d / (device.peak * self.cluster.reached.attention)
            launch = self.cluster.reached.launch
            return Both(Spent(products=forward + launch), Spent(products=2.5 * forward + launch))
        scores, sums = self.product(s, s, d, heads), self.product(s, d, s, heads)
        # Backward: of the scores' gradient and of three sums over the sequence, for queries, keys and values.
        products = Both(Spent(products=scores + sums), Spent(products=scores + 3 * sums))
        return products + self.moved(heads * s * s, self.program.scores)

    @functools.cached_property
    def layer(self) -> Both:
        """One transformer layer, with what is recomputed in backward."""
        model, t, n = self.job.model, self.layout.tensor, self.tokens
        h, heads = model.hidden_size, model.num_attention_heads * model.kv_channels
        keys = 2 * max(model.num_query_groups, t) * model.kv_channels
        middle = model.ffn_hidden_size / t
        fc1 = middle * (2 if model.swiglu else 1)
        parts = (
            self.linear(n, h, (heads + keys) / t)
            + self.attention
            + self.linear(n, heads / t, h)
            + self.linear(n, h, fc1)
            + self.linear(n, middle, h)
            + self.moved(self.local_tokens * h, self.program.stream)
            + self.moved(n * heads / t, self.program.heads)
            + self.moved(n * (fc1 + middle) / 2, self.program.middle)
            + self.exchanged(whole=(2, 2), divided=(2, 3)) * 2
        )
        if self.layout.recompute == "full":
            return Both(parts.forward, parts.backward + parts.forward)
        if self.layout.recompute == "selective":
            return Both(parts.forward, parts.backward + self.attention.forward)
        return parts

    def exchanged(self, whole: tuple[int, int], divided: tuple[int, int]) -> Both:
        """Communication of tensor parallelism, in gathers or scatters of [s, b, h] forward and backward: an all-reduce
        is two. `divided` is that with sequence parallelism (2205.05198 section 4.2.2), which gathers a product's input
        once more in backward."""
        size = self.tokens * self.job.model.hidden_size * self.cluster.device.element
        seconds = self.cluster.all_gather(size, self.layout.tensor_group(self.cluster))
        forward, backward = divided if self.layout.sequence_parallel else whole
        return Both(Spent(tensor=forward * seconds), Spent(tensor=backward * seconds))

    @functools.cached_property
    def embedding(self) -> Both:
        """The first stage's: tables are read, and their parts put together."""
        moved = self.moved(self.local_tokens * self.job.model.hidden_size, EMBEDDING)
        return moved + self.exchanged(whole=(2, 0), divided=(1, 1))

    @functools.cached_property
    def head(self) -> Both:
        """The last stage's: projection to the vocabulary and cross entropy in fp32."""
        model, n = self.job.model, self.tokens
        columns = self.job.padded_vocab_size(self.layout.tensor) / self.layout.tensor
        found = self.linear(n, model.hidden_size, columns) + self.moved(n * columns, ENTROPY)
        if n * columns * self.cluster.device.element > self.program.kept_logits:
            again = Spent(products=self.product(n, columns, model.hidden_size))
            found += Both(Spent(), again)
        return found + self.exchanged(whole=(0, 2), divided=(1, 2))

    def chunk(self, *, first: bool, last: bool) -> Both:
        """A chunk of layers and one microbatch."""
        found = self.layer * self.layout.layers_per_chunk(self.job)
        if first:
            found += self.embedding
        if last:
            found += self.head
        return found
