"""A GPT split over the pipeline and tensor-parallel ranks of a mesh, called as one function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.model.gpt import GPTModel
from megatron.parallel.collectives import all_gather
from megatron.parallel.mesh import Mesh
from megatron.parallel.pipeline import PipelineStage, run_schedule
from megatron.parallel.schedules import forward_only, with_transfers
from megatron.parallel.transfers import Transfers


class InferenceStage(PipelineStage):
    """One forward pass of this process's layers.

    Attributes:
        output: logits or losses, on the last stage.
    """

    def __init__(self, model: GPTModel, hidden_dtype: torch.dtype, *inputs: Tensor, **arguments: Any) -> None:
        super().__init__(hidden_dtype)
        self.model, self.inputs_bs, self.arguments = model, inputs, arguments
        self.output: Tensor | None = None

    def recv_shape(self, microbatch: int) -> tuple[int, int, int]:
        samples, length = self.inputs_bs[0].shape
        return length, samples, self.model.config.hidden_size

    def compute(self, chunk: int, microbatch: int, x: Tensor | None) -> Tensor:
        out = self.model(*self.inputs_bs, hidden_sbh=x, **self.arguments)
        if self.model.output_layer is not None:
            self.output = out
        return out


class Stages:
    """The stages of a GPT, of which each process holds one.

    All processes of a replica must make the same calls. A stage that has sent its output is free for the next call, so
    calls whose results are not waited for overlap.
    """

    def __init__(self, model: GPTModel, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh
        self.config, self.vocab_size = model.config, model.context.vocab_size
        self.dtype = next(model.parameters()).dtype
        self.hidden_dtype = torch.float32 if model.config.fp32_residual_connection else self.dtype
        self.is_last = mesh.pp.rank == mesh.pp.size - 1
        self.actions = with_transfers(forward_only(mesh.pp.size, 1, 1), mesh.pp.size)[mesh.pp.rank]
        self.transfers = Transfers(mesh, scatter_gather=False)

    @torch.inference_mode()
    def __call__(self, tokens_bs: Tensor, position_ids_bs: Tensor, **arguments: Any) -> Tensor | None:
        """Run `GPTModel.forward`. Returns its output on the last stage, None on the others, whose sends may still be
        under way (`transfers.finish`). With tensor parallelism logits are those of this rank's part of the vocabulary.
        """
        stage = InferenceStage(self.model, self.hidden_dtype, tokens_bs, position_ids_bs, **arguments)
        run_schedule(stage, self.actions, self.transfers)
        return stage.output

    def whole_vocabulary(self, logits_nv: Tensor) -> Tensor:
        """Gather logits [n, v] over the tensor-parallel ranks, in fp32."""
        logits_nv = logits_nv.float()
        if self.mesh.tp.size > 1:  # all_gather joins along the first dimension
            logits_nv = all_gather(logits_nv.t().contiguous(), self.mesh.tp).t()
        return logits_nv[:, : self.vocab_size]
