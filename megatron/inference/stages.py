"""A GPT whose layers are divided over the processes of a mesh, as one function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.model.gpt import GPTModel
from megatron.parallel.collectives import all_gather
from megatron.parallel.mesh import Mesh
from megatron.parallel.pipeline import Transfers


class Stages:
    """The GPT of which each process of a mesh holds a part. All processes of a replica must make the same calls; a
    stage that has sent its output is free for the next call, so that calls whose results are not waited for overlap."""

    def __init__(self, model: GPTModel, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh
        self.config, self.vocab_size = model.config, model.vocab_size
        self.dtype = next(model.parameters()).dtype
        self.is_last = mesh.pp.rank == mesh.pp.size - 1
        self.transfers = Transfers(mesh, scatter_gather=False)

    @torch.inference_mode()
    def __call__(self, tokens_bs: Tensor, position_ids_bs: Tensor, **arguments: Any) -> Tensor | None:
        """What `GPTModel.forward` gives on the last stage, None on the others, which may not have sent all yet
        (`transfers.finish`). With tensor parallelism logits are those of this process's part of the vocabulary."""
        pp, hidden_sbh = self.mesh.pp, None
        if pp.rank > 0:
            shape = (tokens_bs.shape[1], tokens_bs.shape[0], self.config.hidden_size)
            dtype = torch.float32 if self.config.fp32_residual_connection else self.dtype
            hidden_sbh = self.transfers.receive(shape, dtype, pp.rank - 1)()
        out = self.model(tokens_bs, position_ids_bs, hidden_sbh=hidden_sbh, **arguments)
        if self.is_last:
            return out
        self.transfers.send(out, pp.rank + 1)
        return None

    def whole_vocabulary(self, logits_nv: Tensor) -> Tensor:
        """Logits [n, v] of all tokens, in fp32, from those of each tensor-parallel process."""
        logits_nv = logits_nv.float()
        if self.mesh.tp.size > 1:  # what is gathered is joined along the first dimension
            logits_nv = all_gather(logits_nv.t().contiguous(), self.mesh.tp).t()
        return logits_nv[:, : self.vocab_size]
