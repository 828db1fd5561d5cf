"""Sums over tokens in the backward pass of compiled layers.

A bias's gradient is the sum of its output's gradient over all tokens. torch's compiler sums blocks of tokens in a
kernel that reads the output's gradient again, and adds up the blocks in another. If the gradient is computed in the
same blocks (`compiled_layer.by_blocks`), the kernel that computes it also sums them.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

aten, prims = torch.ops.aten, torch.ops.prims


class BackwardSums(CustomGraphPass):
    """Sum over tokens in blocks, and add the gradients of all norms of a layer to their `main_grad` at once."""

    def __init__(self, blocks: int) -> None:
        """`blocks`: number of blocks; without effect on sums whose rows it does not divide."""
        self.blocks = blocks

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
            _sum_by_blocks(graph, node, self.blocks)
        _merge_additions(graph)

    def uuid(self) -> bytes:
        """Key in the caches of compiled code."""
        return get_hash_for_files((__file__,), str(self.blocks))


def _sum_by_blocks(graph: fx.Graph, node: fx.Node, count: int) -> None:
    """Let a sum over the rows of a matrix add up sums of `count` blocks, in fp32."""
    x, *more = cast(tuple[fx.Node, Any], node.args)
    shape = x.meta["val"].shape
    # Sums that torch computes with a norm's other gradients have an input of three dimensions.
    if len(shape) != 2 or more != [[0]] or not isinstance(shape[0], int) or shape[0] % count:
        return
    with graph.inserting_before(node):
        blocks = graph.call_function(aten.reshape.default, (x, [count, -1, shape[1]]))
        sums = graph.call_function(aten.sum.dim_IntList, (blocks, [1]), {"dtype": torch.float32})
        total = graph.call_function(aten.sum.dim_IntList, (sums, [0]))
        cast_total = graph.call_function(prims.convert_element_type.default, (total, node.meta["val"].dtype))
    node.replace_all_uses_with(cast_total)
    graph.erase_node(node)


def _merge_additions(graph: fx.Graph) -> None:
    """Replace the additions of lists of gradients by one, in the place of the last."""
    additions = list(graph.find_nodes(op="call_function", target=aten._foreach_add.List))
    totals, gradients = ([x for node in additions for x in cast(list, node.args[i])] for i in (0, 1))
    # A norm that a layer calls twice has a second addition to the first one's result.
    if not additions or any(x.op != "placeholder" for x in totals):
        return
    with graph.inserting_after(additions[-1]):
        merged = graph.call_function(aten._foreach_add.List, (totals, gradients))
    first = 0
    for node in additions:
        for item in list(node.users):
            with graph.inserting_after(merged):
                moved = graph.call_function(operator.getitem, (merged, first + cast(int, item.args[1])))
            item.replace_all_uses_with(moved)
            graph.erase_node(item)
        first += len(cast(list, node.args[0]))
        graph.erase_node(node)
