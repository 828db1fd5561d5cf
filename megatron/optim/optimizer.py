"""Clip, check and step on flat memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.optim.buffer import ParamBuffer
from megatron.optim.config import OptimizerConfig
from megatron.optim.layout import Bucket, ParamGroup
from megatron.optim.norms import model_norm, model_sum
from megatron.optim.scaler import LossScaler
from megatron.optim.shard import MatrixShard, Shard
from megatron.optim.spec import StepInputs
from megatron.optim.step_skipper import StepSkipper
from megatron.parallel.mesh import Axis
from megatron.parallel.slices import Block, overlap


class Optimizer:
    """Steps the master weights of a `ParamBuffer`, each group by its own optimizer.

    Nothing in a step makes the host wait for the device: the device itself decides whether a step is skipped.

    Attributes:
        grads: gradients of the local shard of each bucket.
        state: what the optimizers keep, by name: a tensor for the local shard of each bucket, which is empty where the
            bucket's optimizer keeps no such thing.
        step_skipper: decides which steps are skipped.
        scaler: scales the loss, in fp16.
    """

    def __init__(self, buffer: ParamBuffer, config: OptimizerConfig) -> None:
        self.buffer = buffer
        self.max_norm = config.clip_grad or math.inf
        self.count_zeros = config.log_num_zeros_in_grad
        device = buffer.params.device
        self.step_skipper = StepSkipper(config, device)
        self.scaler = LossScaler(config, device) if buffer.params.dtype == torch.float16 else None
        self.grads = buffer.local_shards(buffer.grads)
        self.step_count = torch.zeros((), device=device)
        names = dict.fromkeys(name for bucket in buffer.buckets for name in bucket.group.optimizer.state)
        self.state: dict[str, list[Tensor]] = {name: [] for name in names}
        self.groups: dict[ParamGroup, list[Shard]] = {bucket.group: [] for bucket in buffer.buckets}
        for bucket, weight, grad in zip(buffer.buckets, buffer.masters, self.grads, strict=True):
            kept = bucket.group.optimizer.state_dtypes
            for name, pieces in self.state.items():
                pieces.append(
                    torch.zeros(len(weight) if name in kept else 0, dtype=kept.get(name), device=device)
                )
            state = {name: self.state[name][-1] for name in kept}
            shard = Shard(weight, grad, state)
            whole = bucket.group.optimizer.whole_matrices
            self.groups[bucket.group] += _matrices(shard, bucket, buffer.mesh.tp) if whole else [shard]

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
        return 1.0 if self.scaler is None else self.scaler.scale

    @torch.no_grad()
    def step(self, *, lr: float, weight_decay: float, loss: Tensor | None = None) -> dict[str, Tensor]:
        """Clip the gradients, update master weights and parameters, and clear the gradients.

        `loss` is that of the global batch; only `--spike-skip` needs it.

        Returns:
            Scalars on the device, of the whole model: "grad norm", the norm before clipping; "skipped", 1 if nothing
            was updated; with `--log-num-zeros-in-grad` also "num zeros", the number of gradient elements that are
            zero; in fp16 also "overflow", 1 if the gradient is not finite and a smaller loss scale may help, and "loss
            scale", that of the next step.
        """
        buffer, loss_scale = self.buffer, self.loss_scale
        grad_norm = model_norm(self.grads, buffer.buckets, buffer.mesh) / loss_scale
        excused = None if self.scaler is None else self.scaler.can_decrease()
        skipped = self.step_skipper.decide(grad_norm, loss, excused)
        stats = {"grad norm": grad_norm, "skipped": skipped}
        if self.scaler is not None and excused is not None:
            overflow = ~grad_norm.isfinite()
            self.scaler.update(overflow, hold=self.step_skipper.halted.bool())
            stats |= {"overflow": (overflow & excused).float(), "loss scale": self.scaler.scale}
        if self.count_zeros:
            nonzero = model_sum(self.grads, buffer.buckets, buffer.mesh, torch.count_nonzero)
            stats["num zeros"] = (buffer.num_elements - nonzero).float()
        grad_scale = None
        if self.scaler is not None or self.max_norm < math.inf:
            grad_scale = loss_scale * ((grad_norm + 1e-6) / self.max_norm).clamp(min=1.0)
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
        buffer.sync_params()
        buffer.grads.zero_()
        return stats


def _matrices(shard: Shard, bucket: Bucket, tp: Axis) -> list[MatrixShard]:
    """The matrices that the local shard of a bucket consists of, as views of its tensors."""
    found = []
    for param in bucket.flat_params:
        if overlap((param.start, param.end), bucket.shard) is None:
            continue
        spec, begin, end = param.shard_spec, param.start - bucket.shard[0], param.end - bucket.shard[0]
        blocks = list(spec.blocks())
        counted = [
            (both, both.translated(local, place))
            for rows in param.counted()
            for local, place in blocks
            if (both := local.intersect(Block(rows, (0, spec.row))))
        ]
        weight, grad, *state = (
            flat[begin:end].view(spec.local_shape)
            for flat in (shard.weight, shard.grad, *shard.state.values())
        )
        kept = dict(zip(shard.state, state, strict=True))
        found.append(MatrixShard(weight, grad, kept, spec.shape, tp, blocks, counted))
    return found
