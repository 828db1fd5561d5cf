"""The run as the layers of a model see it."""

from __future__ import annotations

import dataclasses

from megatron.model.config import ModelConfig
from megatron.ops.backend import PLAIN, Ops
from megatron.parallel.config import ParallelConfig
from megatron.parallel.mesh import ALONE, Axis, Mesh, join
from megatron.parallel.recompute import NO_RECOMPUTE, Recompute
from megatron.parallel.slices import GlobalSlice, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelContext:
    """Everything a model is built from besides its config and its chunk of layers.

    Attributes:
        vocab_size: token ids of the tokenizer.
        padded_vocab_size: rows of the word embeddings; those from `vocab_size` on are padding.
        tp: tensor-parallel ranks, which split every layer.
        cp: context-parallel ranks, which divide each sequence.
        tp_cp: those of `tp` and `cp` together.
        kv: the ranks of `tp` that hold the same key and value heads, if the query groups are fewer than the ranks.
        expert: ranks that divide the experts, each expert among `expert_tp` of them.
        sequence_parallel: the activations between split layers are split too, along the sequence over `tp`.
        ops: the implementation of each hot operation.
        recompute: the activations that backward recomputes.
    """

    vocab_size: int
    padded_vocab_size: int
    tp: Axis = ALONE
    cp: Axis = ALONE
    tp_cp: Axis = ALONE
    kv: Axis = ALONE
    expert: Axis = ALONE
    expert_tp: int = 1
    sequence_parallel: bool = False
    ops: Ops = PLAIN
    recompute: Recompute = NO_RECOMPUTE

    @classmethod
    def on_mesh(
        cls,
        mesh: Mesh,
        model: ModelConfig,
        parallel: ParallelConfig,
        *,
        vocab_size: int,
        padded_vocab_size: int,
        ops: Ops,
    ) -> ModelContext:
        """Context of a run. Every process must take part."""
        copies = max(mesh.tp.size // model.num_query_groups, 1)
        begin = mesh.tp.rank // copies * copies
        neighbors = mesh.tp.ranks[begin : begin + copies]  # with the same keys and values
        ignored = parallel.recompute_granularity == "selective" and not ops.recomputes_attention
        return cls(
            vocab_size=vocab_size,
            padded_vocab_size=padded_vocab_size,
            tp=mesh.tp,
            cp=mesh.cp,
            tp_cp=mesh.tp_cp,
            kv=mesh.tp if copies == mesh.tp.size else join(neighbors, mesh.tp.name, mesh),
            expert=mesh.expert,
            expert_tp=parallel.expert_tp,
            sequence_parallel=parallel.sequence_parallel,
            ops=ops,
            recompute=NO_RECOMPUTE if ignored else Recompute.from_config(parallel, mesh.tp),
        )

    def replicated(self, *shape: int) -> GlobalSlice:
        """Shard spec of a parameter that every rank of `tp` holds whole and applies between split layers.

        With sequence parallelism each rank applies it to its part of the sequence, so its gradient is a partial sum.
        """
        return whole(*shape, replicas=self.tp, partial=self.sequence_parallel)

    @property
    def dropout_parts(self) -> tuple[int, Axis]:
        """Rank that enters the dropout key between split layers, the same on ranks of `tp` that hold the same
        activations, and the axis that divides the positions of one mask."""
        return (self.sequence_parts.rank, ALONE) if self.sequence_parallel else (0, self.cp)

    @property
    def sequence_parts(self) -> Axis:
        """Ranks that hold the parts of a sequence where `tp` divides it too."""
        return self.tp if self.cp.size == 1 else self.tp_cp
