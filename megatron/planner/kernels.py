"""Time of the parts of a model on one device, with their communication.

Names: b microbatch size, s sequence length, h hidden size, t tensor-parallel size, n tokens of a microbatch (b s).
"""

from __future__ import annotations

import dataclasses
import functools
import math

from megatron.model.flops import attention_linears
from megatron.planner.attention_costs import AttentionCosts
from megatron.planner.costs import Cost, ForwardBackward
from megatron.planner.routing import Routing, busiest

NORM, NORM_BACKWARD = 2, 3  # accesses of an element by a norm in forward and in backward
# Accesses (forward, backward). Embedding: two tables are read, added and dropped out; backward adds to two.
EMBEDDING = (6, 9)
# Rows that each expert has a multiple of on a CPU in bf16, and multiples of an expert from which on they are padded, as
# in megatron/ops/cpu/linear.py and megatron/model/moe/experts.py.
EXPERT_ROWS, MIN_MULTIPLES = 16, 4
# Accesses of a score for scores, choice and losses; it is fp32, and these are in elements of bf16.
SCORES = (2 * 12, 2 * 8)


@dataclasses.dataclass(frozen=True)
class Kernels(AttentionCosts):
    """Times of the parts of a job's model on one process of a layout."""

    chunks: dict[tuple[int, int, bool, bool], ForwardBackward] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    parts: dict[str, tuple[float, float, float]] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

    @functools.cached_property
    def layer(self) -> ForwardBackward:
        """One dense transformer layer, with its recomputation in backward."""
        return self._with_recomputation(self._attention_block + self.mlp(self.job.model.ffn_hidden_size))

    @functools.cached_property
    def expert_layer(self) -> ForwardBackward:
        """One transformer layer with experts, with its recomputation in backward."""
        model, routed = self.job.model, self.routed
        layer = self._attention_block + routed
        if model.moe_shared_expert_intermediate_size is not None:
            layer += self.mlp(model.moe_shared_expert_intermediate_size)
        layer = self._with_recomputation(layer, experts=True)
        again = routed.forward if model.moe_layer_recompute else Cost()
        return dataclasses.replace(layer, backward=layer.backward + again)

    def _with_recomputation(self, layer: ForwardBackward, *, experts: bool = False) -> ForwardBackward:
        again = self.recomputed(layer.forward, experts=experts)
        return dataclasses.replace(layer, backward=layer.backward + again)

    @functools.cached_property
    def _attention_block(self) -> ForwardBackward:
        """Attention, and the residual stream around it and the MLP."""
        model = self.job.model
        heads = model.num_attention_heads * (model.kv_channels + model.value_channels) / 2
        n = self.tokens
        rotated = (model.num_attention_heads / self.layout.tensor) * model.kv_channels
        if model.multi_latent_attention:
            rotated += (
                model.num_attention_heads / self.layout.tensor * (model.kv_channels + model.value_channels)
            )
        else:
            rotated += model.kv_heads_per_rank(self.layout.tensor) * model.kv_channels
        rope = model.position_embedding_type == "rope"
        again = self.program.module_recompute and self.layout.recompute != "full"
        norms_again = (0, 2 * NORM if again else 0)
        norms_after = (2 * NORM, 2 * NORM_BACKWARD) if model.sandwich_norm else (0, 0)
        normed = model.qk_layernorm and not model.multi_latent_attention
        return (
            self.elementwise(n * rotated, self.program.rotary if rope else (0, 0))
            + self.elementwise(n * rotated, self.program.qk_norm if normed else (0, 0))
            + self.projections
            + self.attention
            + self.context_parallel
            + self.elementwise(self.local_tokens * model.hidden_size, self.program.residual)
            + self.elementwise(self.local_tokens * model.hidden_size, norms_again)
            + self.elementwise(self.local_tokens * model.hidden_size, norms_after)
            + self.elementwise(self.tokens * heads / self.layout.tensor, self.program.heads)
        )

    def mlp(self, ffn_hidden_size: int) -> ForwardBackward:
        """A dense MLP that tensor-parallel ranks share."""
        model, n, ffn = self.job.model, self.tokens, ffn_hidden_size / self.layout.tensor
        fc1 = ffn * (2 if model.gated else 1)
        column_parallel = self.layer_linear(n, model.hidden_size, fc1)
        return (
            column_parallel
            + self.layer_linear(n, ffn, model.hidden_size)
            + self.elementwise(n * (fc1 + ffn) / 2, self.program.mlp)
            + self.row_parallel
            + self.column_parallel(column_parallel)
        )

    @property
    def routed(self) -> ForwardBackward:
        """Router and experts of one layer on the rank whose experts have the most rows, for which the others wait.

        Without sequence parallelism each tensor-parallel rank routes a part of the sequence, and gathers the outputs.
        """
        model, layout = self.job.model, self.layout
        assert model.num_experts is not None and model.moe_ffn_hidden_size is not None
        h, tokens, rows = model.hidden_size, self.tokens / layout.tensor, self.rows
        ffn = model.moe_ffn_hidden_size / layout.expert_tensor
        fc1 = ffn * (2 if model.gated else 1)
        other_ranks = layout.expert * layout.expert_tensor > 1
        again = self.program.module_recompute and layout.recompute != "full"
        return (
            self.linear(tokens, h, model.num_experts).whole
            + self.elementwise(tokens * model.num_experts, SCORES)
            + self.experts
            + self.elementwise(rows * (fc1 + ffn) / 2, self.program.mlp)
            + self.elementwise(rows * ffn, self.program.weighted)
            + self.elementwise(rows * h, self.program.rows)
            + self.elementwise(rows * h, self.program.regrouped if other_ranks else (0, 0))
            + self.elementwise(rows * (fc1 + ffn) / 2, (0, self.program.mlp[0] if again else 0))
            + self.expert_parallel(rows)
            + self.tensor_parallel(plain=(1, 1), sequence_parallel=(0, 0))
        )

    @property
    def rows(self) -> float:
        """Rows of the experts of the busiest rank."""
        tokens = self.tokens / self.layout.tensor
        return tokens * self.job.model.moe_router_topk * self.layout.expert_tensor * self.busiest

    def padding_rows(self, rows: float) -> float:
        """Mean rows of zeros of each expert of a rank with so many rows: on a CPU in bf16 they fill multiples."""
        model, device = self.job.model, self.cluster.device
        local = (model.num_experts or 0) / self.layout.expert
        pads = device.is_cpu and device.element == 2 and rows >= MIN_MULTIPLES * EXPERT_ROWS * local
        return (EXPERT_ROWS - 1) / 2 if pads else 0.0

    @property
    def busiest(self) -> float:
        """Rows of the busiest rank over the mean. The ranks that divide the experts route the tokens of all of them."""
        model, layout = self.job.model, self.layout
        if self.program.round_robin:
            return 1.0
        tokens = self.tokens / layout.tensor * layout.expert * layout.expert_tensor
        return busiest(tokens, model.moe_router_topk, model.num_experts or 1, layout.expert)

    @property
    def experts(self) -> ForwardBackward:
        """Products of the experts of the busiest rank: grouped ones, or one after the other."""
        model, layout = self.job.model, self.layout
        ffn = (model.moe_ffn_hidden_size or 0) / layout.expert_tensor
        local = (model.num_experts or 0) / layout.expert
        fc1, rows = ffn * (2 if model.gated else 1), self.rows / local + self.padding_rows(self.rows)
        batch, times = (local, 1.0) if model.moe_grouped_gemm else (1.0, local)
        # An expert is chosen by each token with a small probability, so the variance of its rows is about their number.
        random = model.num_experts != model.moe_router_topk and not self.program.round_robin
        spread = math.sqrt(rows) if random else 0.0
        linear = functools.partial(
            self.layer_linear, batch=batch, cast=self.program.expert_cast, spread=spread
        )
        products = linear(rows, model.hidden_size, fc1) + linear(rows, ffn, model.hidden_size)
        # Grouped products for weight gradients do not wait in a split backward pass.
        products = products.whole if model.moe_grouped_gemm else products
        return products * (times / self.cluster.efficiency.expert)

    def expert_parallel(self, rows: float) -> ForwardBackward:
        """Communication of rows to their experts and back; backward returns the gradients.

        All-to-alls also bring the numbers of rows and, in fp32, the router's weights.
        """
        model, layout, cluster = self.job.model, self.layout, self.cluster
        group, width = layout.expert_group(cluster), model.hidden_size * cluster.device.element
        ahead = back = 0.0
        if model.moe_token_dispatcher_type == "allgather":
            seconds = cluster.all_gather(self.tokens / layout.tensor * group.size * width, group)
        else:
            if self.program.expert_copies_once:
                copies = self.tokens / layout.tensor * width
                seconds = cluster.dispatch(
                    copies, Routing.of(model, round_robin=self.program.round_robin), group
                )
                seconds *= self.busiest
            else:
                seconds = cluster.all_to_all(rows * width, group)
                back = cluster.all_to_all(rows * 4, group)
                ahead = back + cluster.all_to_all(8 * (model.num_experts or 0) * layout.expert_tensor, group)
        exposed = 1 - self.program.expert_overlap
        return ForwardBackward(
            Cost(expert_parallel=exposed * (2 * seconds + ahead)),
            Cost(expert_parallel=exposed * (2 * seconds + back)),
        )

    @property
    def projections(self) -> ForwardBackward:
        """Linear layers of attention, and their communication."""
        model, t = self.job.model, self.layout.tensor
        *before, (inputs, h, _) = attention_linears(model, t)
        total = self.layer_linear(self.tokens, inputs / t, h) + self.row_parallel
        again = model.multi_latent_attention and self.program.latent_recompute
        columns = []  # column-parallel layers
        for inputs, outputs, split in before:
            rows = self.tokens if split else self.local_tokens
            linear = self.layer_linear(rows, inputs, outputs / t if split else outputs)
            total += linear
            if split:
                columns.append(linear)
            if again and split and self.layout.recompute != "full":
                total += ForwardBackward(Cost(), linear.forward)
        queries = model.q_lora_rank if model.multi_latent_attention else None
        total += self.column_parallel(columns[0], width=queries)
        if model.multi_latent_attention:  # the latent of keys and values is not gathered again
            width = model.kv_lora_rank + model.qk_pos_emb_head_dim
            total += self.tensor_parallel(
                plain=(0, 2), sequence_parallel=(1, 0), scatters=(0, 1), width=width
            )
        return total

    @property
    def row_parallel(self) -> ForwardBackward:
        """Communication of a row-parallel layer's output and of its gradient."""
        return self.tensor_parallel(plain=(2, 0), sequence_parallel=(0, 1), scatters=(1, 0))

    def column_parallel(self, products: ForwardBackward, width: int | None = None) -> ForwardBackward:
        """Communication of a column-parallel layer's input, [s, b, width], and of its gradient.

        Backward gathers the input again beside the product for the input's gradient, and reduces that gradient beside
        the product for the weight's, unless a split backward pass runs that product later. This overlap is counted on
        CPUs only, where it was measured.
        """
        gathers = functools.partial(self.tensor_parallel, plain=(0, 0), sequence_parallel=(1, 1))
        reduces = functools.partial(
            self.tensor_parallel, plain=(0, 2), sequence_parallel=(0, 0), scatters=(0, 1)
        )
        whole = gathers(width=width) + reduces(width=width)
        if not self.cluster.device.is_cpu or self.layout.tensor == 1:
            return whole
        inputs = products.backward.matmul - products.weights
        weights = 0.0 if self.layout.splits_backward else products.weights
        backward = 0.0
        for communication, compute in ((gathers, inputs), (reduces, weights)):
            seconds, latency = (communication(width=x).backward.tensor_parallel for x in (width, 0))
            backward += self.cluster.exposed(seconds, latency, compute)
        return ForwardBackward(whole.forward, Cost(tensor_parallel=backward))

    def recomputed(self, layer: Cost, *, experts: bool = False) -> Cost:
        """Part of the forward cost of a layer, dense or with `experts`, that backward repeats.

        Fused attention keeps no scores, except on a CPU: there selective recomputation is what the program makes of it.
        """
        if self.layout.recompute == "selective":
            keeps_scores = not self.program.fused_attention or self.cluster.device.is_cpu
            return self.attention.forward if keeps_scores else layer * self.program.selective
        return layer + self._not_recomputed(experts) * -1 if self.layout.recompute == "full" else Cost()

    def _not_recomputed(self, experts: bool) -> Cost:
        """Part of the forward cost of a layer that full recomputation leaves out."""
        model, t, kept = self.job.model, self.layout.tensor, Cost()
        if self.program.stops_recomputing and experts:  # the last product's share, and the way back
            kept += self.experts.forward * (1 / (3 if model.gated else 2))
            kept += self.expert_parallel(self.rows).forward * 0.5
        elif self.program.stops_recomputing:
            kept += self.layer_linear(self.tokens, model.ffn_hidden_size / t, model.hidden_size).forward
            kept += self.tensor_parallel(plain=(2, 0), sequence_parallel=(0, 0), scatters=(1, 0)).forward
        if self.program.keeps_queries:
            (inputs, outputs, _), _ = attention_linears(model, t)
            kept += self.layer_linear(self.tokens, inputs, outputs / t).forward
        return kept

    def tensor_parallel(
        self,
        plain: tuple[int, int],
        sequence_parallel: tuple[int, int],
        scatters: tuple[int, int] = (0, 0),
        width: int | None = None,
    ) -> ForwardBackward:
        """Communication of tensor parallelism over [s, b, width], whose width is by default h.

        Args:
            plain: halves of all-reduces in forward and in backward.
            sequence_parallel, scatters: all-gathers and reduce-scatters with sequence parallelism, which gathers the
                input of a product again in backward (2205.05198 section 4.2.2).
        """
        width = self.job.model.hidden_size if width is None else width
        size = self.tokens * width * self.cluster.device.element
        cluster, group = self.cluster, self.layout.tensor_group(self.cluster)
        halves = (number * cluster.all_reduce(size, group) / 2 for number in plain)
        if self.layout.sequence_parallel:
            gather, scatter = cluster.all_gather(size, group), cluster.reduce_scatter(size, group)
            counts = zip(sequence_parallel, scatters, strict=True)
            halves = (gathers * gather + reduces * scatter for gathers, reduces in counts)
        exposed = 1 - self.program.tensor_overlap
        forward, backward = (Cost(tensor_parallel=exposed * seconds) for seconds in halves)
        return ForwardBackward(forward, backward)

    @functools.cached_property
    def embedding(self) -> ForwardBackward:
        """Embedding on the first stage: lookup, and the sum over tensor-parallel ranks."""
        lookup = self.elementwise(self.local_tokens * self.job.model.hidden_size, EMBEDDING)
        return lookup + self.row_parallel

    @functools.cached_property
    def head(self) -> ForwardBackward:
        """Output layer and fp32 cross entropy on the last stage."""
        model, n = self.job.model, self.tokens
        columns = self.job.padded_vocab_size(self.layout.tensor) / self.layout.tensor
        head = self.linear(n, model.hidden_size, columns).whole + self.elementwise(
            n * columns, self.program.logits
        )
        # A program that computes the gradients with the losses does not gather the input again.
        again = 0 if self.program.chunked_logits else 1
        return head + self.tensor_parallel(plain=(0, 2), sequence_parallel=(1, again), scatters=(0, 1))

    def layers(self, dense: int, experts: int) -> ForwardBackward:
        """So many layers of each kind on one microbatch. A GPU waits for its host if it is faster."""
        layers = self.layer * dense
        if experts:
            layers += self.expert_layer * experts
        each = self.program.host
        if self.layout.pipeline > 1 and self.program.pipeline_host is not None:
            each = self.program.pipeline_host
        host, program = dense * each[0] + experts * each[1], self.program
        if host == program.synchronous == program.starved == 0:
            return layers
        # Recomputation starts the kernels of forward again.
        forward, backward = (1 / 3, 2 / 3) if self.layout.recompute != "full" else (1 / 3, 1.0)
        waits = (dense + experts) * program.synchronous / (forward + backward)
        ahead, back = waits * forward, waits * backward
        if experts:
            ahead += experts * program.starved * self.expert_layer.forward.total
            back += experts * program.starved * self.expert_layer.backward.total
        return layers + ForwardBackward(
            Cost(host=max(ahead, forward * host - layers.forward.total)),
            Cost(host=max(back, backward * host - layers.backward.total)),
        )

    @functools.cached_property
    def end(self) -> ForwardBackward:
        """Output layer and loss, also those of multi-token prediction."""
        depths = self.job.model.mtp_num_layers
        return self.head * (1 + depths) + self.joining * depths

    @property
    def joining(self) -> ForwardBackward:
        """Embedding and joining projection of a depth of multi-token prediction."""
        h = self.job.model.hidden_size
        return self.embedding + self.linear(self.local_tokens, 2 * h, h)

    def chunk(self, dense: int, experts: int, *, first: bool, last: bool) -> ForwardBackward:
        """A model chunk on one microbatch; the `first` has the embedding, the `last` the head."""
        key = dense, experts, first, last
        if key not in self.chunks:
            self.chunks[key] = self._chunk(dense, experts, first, last)
        return self.chunks[key]

    def chunk_seconds(
        self, dense: int, experts: int, *, first: bool, last: bool
    ) -> tuple[float, float, float]:
        """Seconds of `chunk` forward, backward, and of its weight gradients, with less arithmetic for the search."""
        program = self.program
        if any(program.host) or program.pipeline_host or program.synchronous or program.starved:
            chunk = self.chunk(dense, experts, first=first, last=last)
            return chunk.forward.total, chunk.backward.total, chunk.weights
        forward = backward = weights = 0.0
        for number, part in (
            (dense, "layer"),
            (experts, "expert_layer"),
            (first, "embedding"),
            (last, "end"),
        ):
            if number:
                ahead, back, late = self._seconds(part)
                forward, backward = forward + number * ahead, backward + number * back
                weights += number * late
        return forward, backward, weights

    def _seconds(self, part: str) -> tuple[float, float, float]:
        """Seconds of a property forward, backward, and of the latter's weight gradients."""
        if part not in self.parts:
            cost: ForwardBackward = getattr(self, part)
            self.parts[part] = cost.forward.total, cost.backward.total, cost.weights
        return self.parts[part]

    def _chunk(self, dense: int, experts: int, first: bool, last: bool) -> ForwardBackward:
        chunk = self.layers(dense, experts)
        if first:
            chunk += self.embedding
        if last:
            chunk += self.end
        return chunk
