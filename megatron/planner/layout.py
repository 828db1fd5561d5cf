"""A parallel layout: sizes of the axes, division of the layers, schedule and sharding."""

from __future__ import annotations

import dataclasses
import functools

from megatron.parallel.schedules import Schedule, one_forward_one_backward
from megatron.planner.cluster import Cluster, Group
from megatron.planner.division import (
    Parts,
    automatic,
    distinct_stages,
    division_flags,
    equal_work,
    even_sizes,
    make_parts,
    stage_layers,
)
from megatron.planner.job import Job
from megatron.variants.named_schedules import NAMED, SPLIT_BACKWARD, V_SHAPES


@dataclasses.dataclass(frozen=True)
class Layout:
    """The parallel layout of a job. Flags of the same names are described in docs/parallelism.md.

    Attributes:
        tensor, context, pipeline, data: processes on each axis.
        expert, expert_tensor: groups of ranks that divide the experts of a stage, and ranks that share an expert.
        chunks: model chunks on each stage.
        pipeline_schedule: name of the schedule; None for 1f1b, or interleaved with several chunks.
        in_flight: microbatches that a stage may hold with the schedule auto; None for the number of stages.
        balanced: stages of equal work (--pipeline-model-parallel-layout auto), not of equal numbers of layers.
        division: layers of each part of the model, first to last; None for equal numbers.
        recompute: "none", "selective" (attention) or "full" (whole layers).
        recompute_layers: with "full", consecutive layers of a chunk that are recomputed at a time.
        overlap_grad_reduce, overlap_param_gather: gradients are reduced beside backward, and updated parameters
            gathered beside the next forward pass.
        sharded_gradients: ranks hold a part of the gradients, and reduce those of a layer after each microbatch
            (ZeRO-2).
        sharded_parameters: ranks hold a part of the parameters and gradients, too, and gather a layer when they need it
            (FSDP, ZeRO-3).
        instances: groups of replicas that each hold the whole optimizer state, and whatever else is sharded (hybrid
            sharding).
        context_exchange: --cp-comm-type: "p2p", "all_gather" or "a2a".
        offload_optimizer: optimizer state and master weights are in host memory.
        offload_layers: first layers of each chunk whose activations go to host memory; None for all but the model's
            last.
        post_validation: stages update their weights before the norm of all gradients is known.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    chunks: int = 1
    pipeline_schedule: str | None = None
    in_flight: int | None = None
    balanced: bool = False
    division: tuple[int, ...] | None = None
    micro_batch_size: int = 1
    recompute: str = "none"
    recompute_layers: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = True
    scatter_gather: bool = True
    sharded_gradients: bool = False
    sharded_parameters: bool = False
    instances: int = 1
    context_exchange: str = "p2p"
    offload_optimizer: bool = False
    offload_layers: int | None = 0
    post_validation: bool = False

    @property
    def gathers_parameters(self) -> bool:
        """True if replicas update parts of the parameters, which the others gather."""
        return self.distributed_optimizer or self.sharded_gradients or self.sharded_parameters

    @property
    def processes(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def replicas(self) -> int:
        """Processes that hold, or with sharding divide, the same parameters: the data and the context axis."""
        return self.data * self.context

    @property
    def shards(self) -> int:
        """Processes that divide the optimizer state of the same parameters."""
        return self.replicas // self.instances

    @property
    def uses_host(self) -> bool:
        """True if optimizer state or activations are in host memory."""
        return self.offload_optimizer or self.offload_layers != 0

    @property
    def schedule_name(self) -> str:
        return self.pipeline_schedule or ("interleaved" if self.chunks > 1 else "1f1b")

    @property
    def v_shaped(self) -> bool:
        """True if the second of two chunks comes back from the last stage to the first."""
        return self.chunks > 1 and self.schedule_name in V_SHAPES

    @property
    def splits_backward(self) -> bool:
        return self.pipeline > 1 and self.schedule_name in SPLIT_BACKWARD

    def schedule(self, job: Job) -> Schedule:
        """The function that makes the passes of each stage; the same object for equal layouts."""
        if self.schedule_name != "auto":
            return NAMED.get(self.schedule_name, one_forward_one_backward)
        parts = self.divided(job)
        return automatic(job, parts, self.tensor, self.recompute == "full", self.in_flight)

    def microbatches(self, job: Job) -> int:
        """Number of microbatches of a replica in a step."""
        return job.global_batch_size // (self.data * self.micro_batch_size)

    def tokens(self, job: Job) -> float:
        """Tokens of a microbatch on a process of a context-parallel group."""
        return self.micro_batch_size * job.seq_length / self.context

    @functools.cached_property
    def parts(self) -> Parts:
        """Division of the layers among stages and chunks."""
        return make_parts(self.pipeline, self.chunks, self.v_shaped, self.division)

    def divided(self, job: Job) -> Parts:
        """`parts`, with the layers of each if stages have equal work."""
        if self.balanced:
            return equal_work(job, self.parts, self.tensor, self.recompute == "full")
        return self.parts

    def distinct_stages(self, job: Job) -> tuple[int, ...]:
        """Stages that differ in layers, ends or microbatches in flight.

        With 1F1B and the interleaved schedule these are the first, the last, and of the others the first with each
        number of layers with experts: others have the layers of one of these and fewer microbatches.
        """
        if self.balanced or self.division or self.schedule_name not in ("1f1b", "interleaved"):
            return tuple(range(self.pipeline))
        return distinct_stages(job, self.parts)

    def layers(self, job: Job) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Dense layers and those with experts of each chunk, by stage; multi-token prediction adds to the last part."""
        return stage_layers(job, self.divided(job))

    def is_first(self, stage: int, chunk: int) -> bool:
        """True for the chunk with the embedding."""
        return stage == chunk == 0

    def is_last(self, stage: int, chunk: int) -> bool:
        """True for the chunk with the output layer."""
        return chunk == self.chunks - 1 and stage == (0 if self.v_shaped else self.pipeline - 1)

    @property
    def last_stage(self) -> int:
        """The stage with the output layer."""
        return 0 if self.v_shaped else self.pipeline - 1

    def splits_layers(self, job: Job) -> bool:
        """Return True if equal numbers of layers are possible: `even_sizes`."""
        return even_sizes(job, self.parts) is not None

    def shard_group(self, cluster: Cluster) -> Group:
        """Processes that divide the optimizer state of the same parameters, except those of experts: neighbors."""
        return cluster.group(self.shards, self.tensor)

    def instance_group(self, cluster: Cluster) -> Group:
        """Processes that hold the same shard."""
        return cluster.group(self.instances, self.tensor * self.shards)

    def tensor_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.tensor, 1)

    def context_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.context, self.tensor)

    def data_group(self, cluster: Cluster) -> Group:
        """Processes that reduce the gradients of the same parameters, except those of experts."""
        return cluster.group(self.replicas, self.tensor)

    def pipeline_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.pipeline, self.replicas * self.tensor)

    @property
    def expert_data(self) -> int:
        """Processes that hold the same part of the experts."""
        return self.replicas * self.tensor // (self.expert * self.expert_tensor)

    def expert_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.expert * self.expert_tensor, 1)

    @property
    def expert_shards(self) -> int:
        """Processes that divide the optimizer state of the same part of the experts."""
        return max(1, self.expert_data // self.instances)

    def expert_data_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.expert_data, self.expert * self.expert_tensor)

    def expert_shard_group(self, cluster: Cluster) -> Group:
        return cluster.group(self.expert_shards, self.expert * self.expert_tensor)

    def expert_instance_group(self, cluster: Cluster) -> Group:
        ranks = self.expert * self.expert_tensor * self.expert_shards
        return cluster.group(self.expert_data // self.expert_shards, ranks)

    def flags(self, job: Job) -> list[str]:
        """Flags of pretrain_gpt.py for this layout."""
        flags = [f"--tensor-model-parallel-size {self.tensor}"] if self.tensor > 1 else []
        if self.sequence_parallel:
            flags.append("--sequence-parallel")
        if self.context > 1:
            flags.append(f"--context-parallel-size {self.context}")
        if self.context_exchange != "p2p":
            flags.append(f"--cp-comm-type {self.context_exchange}")
        if self.pipeline > 1:
            flags.append(f"--pipeline-model-parallel-size {self.pipeline}")
            flags += ["--no-scatter-gather-tensors-in-pipeline"] * (not self.scatter_gather)
        flags += self._layer_flags(job)
        if job.model.num_experts is not None:
            flags.append(f"--expert-model-parallel-size {self.expert}")
            flags.append(f"--expert-tensor-parallel-size {self.expert_tensor}")
        if self.sharded_parameters:
            flags.append("--data-parallel-sharding-strategy optim_grads_params")
        elif self.sharded_gradients:
            flags.append("--data-parallel-sharding-strategy optim_grads")
        elif self.distributed_optimizer:
            flags.append("--use-distributed-optimizer")
        if self.instances > 1:
            flags.append(f"--num-distributed-optimizer-instances {self.instances}")
        if self.overlap_grad_reduce:
            flags.append("--overlap-grad-reduce")
        if self.overlap_param_gather and self.gathers_parameters:
            flags.append("--overlap-param-gather")
        if self.recompute != "none":
            flags.append(f"--recompute-granularity {self.recompute}")
        if self.recompute == "full" and self.recompute_layers > 1:
            flags.append(f"--recompute-num-layers {self.recompute_layers}")
        flags += self._host_flags()
        flags += ["--enable-optimizer-post-validation"] * self.post_validation
        flags += [
            f"--micro-batch-size {self.micro_batch_size}",
            f"--global-batch-size {job.global_batch_size}",
        ]
        return flags

    def _host_flags(self) -> list[str]:
        """Flags of offload to host memory."""
        flags = ["--cpu-offload-optimizer"] * self.offload_optimizer
        if self.offload_layers != 0:
            flags.append("--cpu-offload-activations")
        if self.offload_layers:
            flags.append(f"--cpu-offload-activations-num-layers {self.offload_layers}")
        return flags

    def _layer_flags(self, job: Job) -> list[str]:
        """Flags that divide the layers among stages and chunks, and the schedule."""
        flags = (
            ["--pipeline-model-parallel-layout auto"] if self.balanced else division_flags(job, self.parts)
        )
        if self.pipeline > 1 and self.schedule_name not in ("1f1b", "interleaved"):
            flags.append(f"--pipeline-schedule {self.schedule_name}")
        elif self.balanced and self.chunks > 1:
            flags.append("--pipeline-schedule interleaved")
        if self.in_flight is not None:
            flags.append(f"--pipeline-microbatches-in-flight {self.in_flight}")
        return flags

    def __str__(self) -> str:
        parts = [
            f"T{self.tensor}" + f" C{self.context}" * (self.context > 1) + f" P{self.pipeline} D{self.data}"
        ]
        if self.expert * self.expert_tensor > 1:
            parts[0] += f" E{self.expert}" + f"T{self.expert_tensor}" * (self.expert_tensor > 1)
        if self.chunks > 1:
            parts.append(f"V{self.chunks}")
        if self.pipeline > 1 and self.schedule_name not in ("1f1b", "interleaved"):
            parts.append(self.schedule_name)
        parts += ["stages of equal work"] * self.balanced
        parts += ["uneven stages"] * (self.division is not None)
        parts.append(f"microbatch {self.micro_batch_size}")
        parts += ["sequence parallel"] * self.sequence_parallel
        if self.sharded_parameters:
            parts.append("sharded parameters")
        elif self.sharded_gradients:
            parts.append("sharded gradients")
        else:
            parts += ["distributed optimizer"] * self.distributed_optimizer
        if self.instances > 1:
            parts.append(f"{self.instances} instances")
        if self.recompute != "none":
            several = self.recompute == "full" and self.recompute_layers > 1
            parts.append(
                f"{self.recompute} recomputation" + f" of {self.recompute_layers} layers at a time" * several
            )
        parts += ["optimizer in host memory"] * self.offload_optimizer
        if self.offload_layers != 0:
            layers = "all layers" if self.offload_layers is None else f"{self.offload_layers} layers"
            parts.append(f"activations of {layers} in host memory")
        parts += ["post-validation"] * self.post_validation
        return ", ".join(parts)
