"""A GPT split over the pipeline and tensor-parallel ranks of a mesh, called as one function."""

from __future__ import annotations

from collections.abc import Sequence
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
    """One forward pass of this process's chunks.

    Attributes:
        output: logits or losses, on the last stage.
    """

    def __init__(
        self, chunks: Sequence[GPTModel], hidden_dtype: torch.dtype, *inputs: Tensor, **arguments: Any
    ) -> None:
        super().__init__(hidden_dtype)
        self.chunks, self.inputs_bs, self.arguments = chunks, inputs, arguments
        self.output: Tensor | None = None

    def recv_shape(self, microbatch: int) -> tuple[int, int, int]:
        samples, length = self.inputs_bs[0].shape
        return length, samples, self.chunks[0].config.hidden_size

    def compute(self, chunk: int, microbatch: int, x: Tensor | None) -> Tensor:
        model = self.chunks[chunk]
        out = model(*self.inputs_bs, hidden_sbh=x, **self.arguments)
        if model.output_layer is not None:
            self.output = out
        return out


class Stages:
    """The stages of a GPT, of which each process holds one, in one chunk or several.

    All processes of a replica must make the same calls. A stage that has sent its output is free for the next call, so
    calls whose results are not waited for overlap.
    """

    def __init__(self, chunks: Sequence[GPTModel], mesh: Mesh) -> None:
        self.chunks, self.mesh = chunks, mesh
        self.config, self.vocab_size = chunks[0].config, chunks[0].context.vocab_size
        self.dtype = next(chunks[0].parameters()).dtype
        self.hidden_dtype = torch.float32 if self.config.fp32_residual_connection else self.dtype
        self.is_last = mesh.pp.rank == mesh.pp.size - 1
        self.actions = with_transfers(forward_only(mesh.pp.size, len(chunks), 1), mesh.pp.size)[mesh.pp.rank]
        self.transfers = Transfers(mesh, scatter_gather=False)

    @torch.inference_mode()
    def __call__(self, tokens_bs: Tensor, position_ids_bs: Tensor, **arguments: Any) -> Tensor | None:
        """Run `GPTModel.forward`. Returns its output on the last stage, None on the others, whose sends may still be
        under way (`transfers.finish`). With tensor parallelism logits are those of this rank's part of the vocabulary.
        """
        stage = InferenceStage(self.chunks, self.hidden_dtype, tokens_bs, position_ids_bs, **arguments)
        run_schedule(stage, self.actions, self.transfers)
        return stage.output

    def whole_vocabulary(self, logits_nv: Tensor) -> Tensor:
        """Gather logits [n, v] over the tensor-parallel ranks, in fp32."""
        logits_nv = logits_nv.float()
        if self.mesh.tp.size > 1:  # all_gather joins along the first dimension
            logits_nv = all_gather(logits_nv.t().contiguous(), self.mesh.tp).t()
        return logits_nv[:, : self.vocab_size]
