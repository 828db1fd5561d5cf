"""Clip, check and step on flat memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.optim.adam import Adam
from megatron.optim.buffer import ParamBuffer
from megatron.optim.config import OptimizerConfig
from megatron.optim.layout import ParamGroup
from megatron.optim.norms import model_norm, model_sum
from megatron.optim.registry import OPTIMIZERS
from megatron.optim.spec import OptimizerSpec, Shard, StepInputs
from megatron.optim.step_skipper import StepRule, StepSkipper
from megatron.parallel.config import SHARDING_STRATEGIES
from megatron.parallel.mesh import ALONE, Axis, Mesh


def param_groups(
    config: OptimizerConfig, mesh: Mesh, *, sharding: str = "no_shard", first: Sequence[OptimizerSpec] = ()
) -> list[ParamGroup]:
    """Parameter groups of a run, in the order of memory.

    Args:
        sharding: one of `SHARDING_STRATEGIES`.
        first: optimizers of parameters that --optimizer does not update.
    """
    axes = {False: (mesh.tp, mesh.dp_cp), True: (mesh.expert, mesh.expert_dp)}
    level = SHARDING_STRATEGIES.index(sharding)
    chosen = OPTIMIZERS[config.optimizer](config)
    if config.cpu_offload_optimizer:
        from megatron.optim.offload import Offloaded

        chosen = Offloaded(chosen)
    return [
        ParamGroup(
            optimizer=optimizer,
            decays=decays,
            expert_parallel=expert_parallel,
            model_axis=model_axis,
            reduce_axis=replicas,
            shard_axis=shards,
            instance_axis=instances,
            shards_grads=level >= 2 and shards.size > 1,
            shards_params=level >= 3 and shards.size > 1,
        )
        for optimizer in (*first, chosen, Adam(config))
        for decays in (True, False)
        for expert_parallel, (model_axis, replicas) in axes.items()
        # Counts are not summed by autograd, which so cannot tell when they are complete.
        for shards, instances in [_divided(replicas) if level and not optimizer.counts else (ALONE, ALONE)]
    ]


def _divided(replicas: Axis) -> tuple[Axis, Axis]:
    """Ranks that shard what the replicas hold, and those that hold the same shard."""
    shards, instances = replicas.parts or (replicas, ALONE)
    return (shards, instances) if shards.size > 1 else (ALONE, ALONE)


class Optimizer:
    """Steps the master weights of a `ParamBuffer`, each group by its own optimizer.

    Nothing in a step makes the host wait for the device: the device itself decides whether a step is skipped.

    Attributes:
        grads: gradients of the local shard of each bucket.
        state: what the optimizers keep, by name: a tensor for the local shard of each bucket, which is empty where the
            bucket's optimizer keeps no such thing.
        rules: plug-ins that take part in each step.
        step_skipper: decides which steps are skipped.
        on_finish: called first by `finish`, to end a step that a plug-in has not ended.
    """

    def __init__(self, buffer: ParamBuffer, config: OptimizerConfig, rules: Sequence[StepRule] = ()) -> None:
        self.buffer, self.rules = buffer, rules
        self.on_finish: list[Callable[[], object]] = []
        self.max_norm = config.clip_grad or math.inf
        self.count_zeros = config.log_num_zeros_in_grad
        device = buffer.params.device
        self.step_skipper = StepSkipper(rules, device, stops=config.on_non_finite == "stop")
        self.grads = buffer.grad_memory.shards
        self.step_count = torch.zeros((), device=device)
        names = dict.fromkeys(name for bucket in buffer.buckets for name in bucket.group.optimizer.state)
        self.state: dict[str, list[Tensor]] = {name: [] for name in names}
        self.groups: dict[ParamGroup, list[Shard]] = {bucket.group: [] for bucket in buffer.buckets}
        parts = zip(buffer.buckets, buffer.masters, self.grads, buffer.param_memory.shards, strict=True)
        for bucket, weight, grad, param in parts:
            optimizer, kept = bucket.group.optimizer, bucket.group.optimizer.state_dtypes
            for name, pieces in self.state.items():
                size = len(weight) if name in kept else 0
                pieces.append(optimizer.allocate(size, kept.get(name, torch.float32), device))
            shard = Shard(weight, grad, {name: self.state[name][-1] for name in kept}, param=param)
            self.groups[bucket.group] += optimizer.divide(shard, bucket, bucket.group.model_axis)

    @property
    def steps(self) -> int:
        """Steps taken, skipped ones not counted. Waits for the device."""
        return int(self.step_count.item())

    @steps.setter
    def steps(self, value: int) -> None:
        self.step_count.fill_(value)

    @property
    def loss_scale(self) -> Tensor | float:
        """Factor to multiply the loss by before backward; `step` divides the gradients by it."""
        scale: Tensor | float = 1.0
        for rule in self.rules:
            scale = scale * rule.loss_scale
        return scale

    def finish(self) -> None:
        """End the last step: master weights and state get its values, and the host waits for those in its memory.

        Every rank must call it before it reads these, parameters, or the statistics of a step.
        """
        for end_step in self.on_finish:
            end_step()
        for group in self.groups:
            group.optimizer.finish()

    @torch.no_grad()
    def step(self, losses: Tensor | None = None, *, lr: float, weight_decay: float) -> dict[str, Tensor]:
        """Clip the gradients, update master weights and parameters, and clear the gradients.

        Args:
            losses: [terms] this process's share of the global batch's mean losses, for rules that need them.

        Returns:
            Scalars on the device, of the whole model: "grad norm", the norm before clipping; "skipped", 1 if nothing
            was updated; with `--log-num-zeros-in-grad` also "num zeros", the number of gradient elements that are
            zero; and those of rules.
        """
        buffer = self.buffer
        self.prepare()
        grad_scale, stats = self.decide(model_norm(self.grads, buffer.buckets, buffer.mesh), losses)
        if self.count_zeros:
            # Gradients of frozen parameters were set to zero, and do not count.
            parts = zip(self.grads, buffer.buckets, strict=True)
            grads = [g if b.group.optimizer.trains else g.new_ones(1).expand_as(g) for g, b in parts]
            zeros = model_sum(grads, buffer.buckets, buffer.mesh, lambda x: (x == 0).sum())
            stats["num zeros"] = zeros.float()
        self.update(lr=lr, weight_decay=weight_decay, grad_scale=grad_scale, skipped=stats["skipped"])
        buffer.grads.zero_()
        return stats

    def prepare(self) -> None:
        """Change gradients before their norm is taken."""
        for group, shards in self.groups.items():
            group.optimizer.prepare(shards)

    def decide(self, scaled_norm: Tensor, losses: Tensor | None) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Decide how to step, once for each step.

        Args:
            scaled_norm: norm of the gradients, times the loss scale.
            losses: as for `step`.

        Returns:
            The divisor of the gradients, None for 1, and the statistics of the step.
        """
        grad_norm = scaled_norm / self.loss_scale
        grad_scale = self.grad_scale(grad_norm)  # before a rule changes the loss scale
        decision = self.step_skipper.decide(grad_norm, losses)
        return grad_scale, {"grad norm": grad_norm, "skipped": decision.skipped, **decision.stats}

    def grad_scale(self, grad_norm: Tensor) -> Tensor | None:
        """The divisor of gradients whose norm without the loss scale is `grad_norm`; None for 1."""
        if self.max_norm < math.inf or isinstance(self.loss_scale, Tensor):
            return self.loss_scale * ((grad_norm + 1e-6) / self.max_norm).clamp(min=1.0)
        return None

    def update(self, *, lr: float, weight_decay: float, grad_scale: Tensor | None, skipped: Tensor) -> None:
        """Update master weights, state and parameters, unless `skipped`, a scalar, is 1.

        Args:
            grad_scale: divisor of the gradients; None for 1.
        """
        for group, shards in self.groups.items():
            inputs = StepInputs(
                lr=lr,
                weight_decay=weight_decay if group.decays else 0.0,
                steps=self.step_count,
                grad_scale=grad_scale,
                found_inf=skipped,
            )
            group.optimizer.step(shards, inputs)
        self.step_count += 1 - skipped
        self.buffer.sync_params()
