"""Choice of the activations that compiled layers save for backward.

torch saves the fewest bytes from which backward can be computed, with few operations. Of x + y it saves y if x is saved
anyway, and a backward kernel that needs the sum reads both. Where a norm reads the sum, this costs a kernel more.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

aten, prims = torch.ops.aten, torch.ops.prims
# From the input of a norm to its reduction.
ON_THE_WAY = (prims.convert_element_type.default, aten.pow.Tensor_Scalar)
REDUCTIONS = (aten.var_mean.correction, aten.mean.dim)


class SaveNormInputs(CustomGraphPass):
    """Save the sums of the residual stream that norms read. Runs on a graph of forward and backward."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            is_sum = node.target is aten.add.Tensor and all(isinstance(x, fx.Node) for x in node.args)
            if is_sum and any(_reads(user) for user in node.users):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> bytes:
        """Key in the caches of compiled code."""
        return get_hash_for_files((__file__,))


def _reads(node: fx.Node) -> bool:
    """True of a norm's reduction, or of what leads to one."""
    return node.target in REDUCTIONS or (node.target in ON_THE_WAY and any(map(_reads, node.users)))
