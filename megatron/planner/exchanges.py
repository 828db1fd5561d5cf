"""Communication among replicas in a step: gradients, parameters, and tied embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from megatron.planner.cluster import Cluster, Group
from megatron.planner.costs import ForwardBackward
from megatron.planner.layout import Job, Layout
from megatron.planner.parameters import end_parameters, stage_expert_parameters, stage_parameters
from megatron.planner.programs import Program

# Memory accesses per element of a ring reduce-scatter or all-gather: it arrives and is read; then it is added to
# another one, which is read, or stored.
RING_ACCESSES = 3


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Communication among replicas in a step. Times are in seconds.

    Attributes:
        name: in words.
        seconds: on the links.
        hidden: part of it beside computation.
        exposed: what it adds to the step: the rest, and what the hidden part takes from computation.
        beside: the pass, forward or backward, beside which it runs for each microbatch; None at the end of the step.
    """

    name: str
    seconds: float
    hidden: float
    exposed: float
    beside: str | None = None


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas of a stage.

    Attributes:
        stage: the one with the most parameters.
        layers: cost of its layers on one microbatch.
        microbatches: number in a step.
    """

    job: Job
    layout: Layout
    cluster: Cluster
    program: Program
    stage: int
    layers: ForwardBackward
    microbatches: int

    def exchanges(self) -> list[Exchange]:
        """Communication among replicas, and between the stages that hold the embedding."""
        layout = self.layout
        if layout.replicas == 1:
            exchanges = []
        elif layout.sharded_parameters:
            exchanges = self._sharded_parameters()
        elif layout.sharded_gradients:
            exchanges = [*self._sharded_gradients(), self._parameter_gather()]
        else:
            exchanges = [
                *self._reduction(),
                *([self._parameter_gather()] if layout.distributed_optimizer else []),
            ]
        tied = self._tied()
        return [*exchanges, Exchange("tied embeddings", tied, 0.0, tied)] if tied else exchanges

    @property
    def parameters(self) -> float:
        return stage_parameters(self.job, self.layout, self.stage)

    def _messages(self, element: float, *, whole: bool = False) -> Iterator[tuple[float, Group]]:
        """Yield the bytes of the dense parameters and of the experts, with `element` bytes each, and their groups.

        These are the groups of ranks that shard them; if `whole`, of all that hold the same ones.
        """
        layout, cluster = self.layout, self.cluster
        experts = stage_expert_parameters(self.job, layout, self.stage)
        dense = (self.parameters - experts) * element
        yield dense, layout.data_group(cluster) if whole else layout.shard_group(cluster)
        if experts:
            group = layout.expert_data_group(cluster) if whole else layout.expert_shard_group(cluster)
            yield experts * element, group

    def _by_layer(self, collective: Callable[[float, Group], float], element: float) -> float:
        """Seconds of a collective of each layer of the stage, over the ranks that shard its parameters."""
        layers = self.layout.layers(self.job)[self.stage]
        numbers = max(1, sum(map(sum, layers))), max(1, sum(experts for _, experts in layers))
        messages = zip(self._messages(element), numbers, strict=False)  # without experts there is one message
        return sum(number * collective(size / number, group) for (size, group), number in messages)

    def _reduce_scatter(self) -> float:
        """Seconds of reduce-scatters of the gradients of a stage, layer by layer."""
        return self._by_layer(self.cluster.reduce_scatter, self._reduced)

    def _over_instances(self) -> list[Exchange]:
        """The sum of the shards' gradients over the instances, which nothing hides."""
        layout, cluster = self.layout, self.cluster
        if layout.instances == 1:
            return []
        dense, *experts = (size for size, _ in self._messages(self._reduced))
        seconds = cluster.all_reduce(dense / layout.shards, layout.instance_group(cluster))
        for size in experts:
            seconds += cluster.all_reduce(size / layout.expert_shards, layout.expert_instance_group(cluster))
        return [Exchange("gradient reduction over instances", seconds, 0.0, seconds)]

    def _reduction(self) -> list[Exchange]:
        """Reduction of gradients after the last microbatch by processes that hold all of them."""
        layout, cluster = self.layout, self.cluster
        scattered = layout.distributed_optimizer and not self.program.whole_gradients
        exchange = cluster.reduce_scatter if scattered else cluster.all_reduce
        whole = not layout.distributed_optimizer
        seconds = sum(exchange(*message) for message in self._messages(self._reduced, whole=whole))
        hidden, exposed = (
            self._overlapped(seconds) if layout.overlap_grad_reduce and seconds else (0.0, seconds)
        )
        return [Exchange("gradient reduction", seconds, hidden, exposed), *self._over_instances()]

    def _parameter_gather(self) -> Exchange:
        """The updated parameters, once a step.

        Beside forward but for the first layer's parameters, and what the gather takes from the SMs.
        """
        element = self.cluster.device.element
        seconds = sum(self.cluster.all_gather(*message) for message in self._messages(element))
        overlaps = self.layout.overlap_param_gather and self.program.parameter_overlap
        hidden = seconds - self._left(seconds, self.layers.forward.total) if overlaps else 0.0
        return Exchange(
            "parameter gather", seconds, hidden, seconds - (1 - self.cluster.efficiency.beside) * hidden
        )

    def _sharded_gradients(self) -> list[Exchange]:
        """Gradients that each microbatch reduces, layer by layer, beside the backward pass of the layer before."""
        seconds = self._reduce_scatter()
        overlapped = self.layers.backward.total if self.layout.overlap_grad_reduce else 0.0
        return [
            self._beside(
                "gradient reduction", "backward", seconds + self._added, overlapped, self._ring_memory
            ),
            *self._over_instances(),
        ]

    def _sharded_parameters(self) -> list[Exchange]:
        """Exchanges of ranks that hold parts of the parameters.

        Each layer is gathered in forward and again in backward, and its gradients are reduced, for each microbatch,
        beside the computation of the layers before if these overlap.
        """
        gather = self._by_layer(self.cluster.all_gather, self.cluster.device.element)
        reduce = self._reduce_scatter() + self._added
        ahead = self.layers.forward.total if self.layout.overlap_param_gather else 0.0
        back = self.layers.backward.total if self.layout.overlap_grad_reduce else 0.0
        name = "parameter gather and gradient reduction"
        return [
            self._beside("parameter gather", "forward", gather, ahead),
            self._beside(name, "backward", gather + reduce, back, self._ring_memory),
            *self._over_instances(),
        ]

    @property
    def _added(self) -> float:
        """Seconds in which the gradients of a microbatch are set to zero, and their sums are added to the shards."""
        accesses = (1 + 3 / self.layout.shards) * self.program.gradient * self.parameters
        return accesses / (self.cluster.device.bandwidth * self.cluster.efficiency.stream)

    def _beside(self, name: str, kind: str, seconds: float, compute: float, memory: float = 0.0) -> Exchange:
        """An exchange of each microbatch beside so many seconds of computation.

        Args:
            memory: seconds of memory bandwidth that it takes from that computation if it is hidden whole.
        """
        hidden, m = min(seconds, compute), self.microbatches
        exposed = seconds - hidden + self._taken(memory, seconds) * hidden
        return Exchange(name, m * seconds, m * hidden, m * exposed, kind)

    def _taken(self, memory: float, seconds: float) -> float:
        """Share of a second of computation that a second of communication beside it takes, on SMs and in memory."""
        return min(1.0, self.cluster.efficiency.beside + (memory / seconds if seconds else 0.0))

    @property
    def _ring_memory(self) -> float:
        """Seconds of memory bandwidth of a reduce-scatter of the stage's gradients."""
        bandwidth = self.cluster.device.bandwidth * self.cluster.efficiency.stream
        return RING_ACCESSES * self._reduced * self.parameters / bandwidth

    def _tied(self) -> float:
        """Seconds of the reduction of the embedding table that the first and the last stage hold."""
        job, layout, cluster = self.job, self.layout, self.cluster
        copied = job.model.mtp_num_layers or not job.model.untie_embeddings_and_output_weights
        if layout.pipeline == 1 or layout.v_shaped or not copied:
            return 0.0
        table = job.padded_vocab_size(layout.tensor) / layout.tensor * job.model.hidden_size
        ends = cluster.group(2, layout.processes - layout.processes // layout.pipeline)
        return cluster.all_reduce(self._reduced * table, ends)

    @property
    def _reduced(self) -> int:
        """Bytes of an element of a gradient on the links."""
        return self.program.reduced or self.program.gradient

    def _left(self, exchange: float, passes: float) -> float:
        """Seconds of an exchange of all chunks that are left after the passes beside it, `passes` for a microbatch.

        With several chunks the interleaved schedule ends with the backward passes of as many microbatches as there are
        stages of one chunk after the other (2104.04473 section 2.2), and a chunk's exchange runs beside those of the
        next ones, too; with forward passes and their parameters it is the reverse.
        """
        layout = self.layout
        chunks = layout.chunks if layout.schedule_name == "interleaved" else 1
        each = min(layout.pipeline, self.microbatches)
        of_last_chunk = (exchange - passes) / chunks
        of_all_chunks = exchange - passes * ((chunks - 1) * each + 1) / chunks
        return max(0.0, of_last_chunk, of_all_chunks)

    def _overlapped(self, reduce: float) -> tuple[float, float]:
        """Seconds of a reduction beside the last backward of each chunk, and those that it adds to the step.

        The embedding's gradient is complete only when backward ends. The rest is hidden on the links but not in memory
        bandwidth, which backward uses at the same time, nor on the SMs.
        """
        layout = self.layout
        last = end_parameters(self.job, layout.tensor, first=True, last=False) / self.parameters
        hidden = (1 - last) * reduce - self._left((1 - last) * reduce, self.layers.backward.total)
        halves = 1 if layout.distributed_optimizer else 2
        return hidden, reduce - hidden + self._taken(halves * self._ring_memory, reduce) * hidden
