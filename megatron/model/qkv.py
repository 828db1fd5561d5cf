"""Rows of the fused query, key and value projection on each tensor-parallel rank."""

from __future__ import annotations

from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.parallel.slices import GlobalSlice


def qkv_slice(config: ModelConfig, context: ModelContext) -> GlobalSlice:
    """Shard spec of the weight [(heads + 2 groups) d, h], whose rows are, group by group, query heads, key head and
    value head.

    With at least as many groups as ranks, each rank holds whole groups. With fewer, the query heads of a rank belong to
    one group, and the rank also holds the group's key and value head, as do the other ranks of `context.kv`. Each of
    them computes the key and value gradients of its own queries, so these are summed over `context.kv`.
    """
    d, tp, kv = config.kv_channels, context.tp, context.kv
    heads, groups = config.num_attention_heads, config.num_query_groups
    group_rows = (heads // groups + 2) * d
    shape = (groups * group_rows, config.hidden_size)
    if groups >= tp.size:
        return GlobalSlice(shape, 0, (tp.local_range(shape[0]),))
    group, queries = tp.rank // kv.size, heads // tp.size * d
    begin = group * group_rows + kv.rank * queries
    end = (group + 1) * group_rows
    return GlobalSlice(
        shape,
        0,
        ((begin, begin + queries), (end - 2 * d, end)),
        shared=((queries, queries + 2 * d),),
        replicas=kv,
        partial=True,
    )
