"""Faults that `benchmarks/verify.py` puts into the program, by replacing a piece of one function's source."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A replacement in the source of a function.

    Attributes:
        run: key of `RUNS` in verify_runs.py, the layout to verify.
        target: the function, as module:name.
        old, new: the text to replace, which occurs once, and its replacement.
        module: regular expression of the kind of tensor and the module or parameter that a right finding names.
        kind: regular expression of the kind of fault that a right finding names.
        like: report of a similar fault in another program (shared/reference/silent-bugs.jsonl).
        everywhere: also acts in one process, so that the reference has the fault too.
        ranks: those that a right finding names.
    """

    name: str
    run: str
    target: str
    old: str
    new: str
    module: str
    kind: str
    like: str = ""
    everywhere: bool = False
    ranks: tuple[int, ...] = (0, 1)

    def put_into(self, root: Path) -> None:
        """Put the fault into the checkout `root`.

        Raises:
            ValueError: the text to replace does not occur once in the function.
        """
        module, _, names = self.target.partition(":")
        path = root / f"{module.replace('.', '/')}.py"
        source = path.read_text(encoding="utf-8")
        found: ast.AST = ast.parse(source)
        for name in names.split("."):
            found = next(node for node in getattr(found, "body", ()) if getattr(node, "name", None) == name)
        lines = source.splitlines(keepends=True)
        begin, end = getattr(found, "lineno", 1) - 1, getattr(found, "end_lineno", 1)
        function = "".join(lines[begin:end])
        if function.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: the text occurs {function.count(self.old)} times in {self.target}"
            )
        lines[begin:end] = function.replace(self.old, self.new)
        path.write_text("".join(lines), encoding="utf-8")


REDUCER, NORMS = "megatron.optim.grad_reducer:GradReducer", "megatron.optim.norms"
LAYERS = "megatron.model.layers"
ENGINE, LOAD = "megatron.training.engine:Engine", "megatron.checkpoint.load"
BUFFER = "megatron.optim.buffer:ParamBuffer"
# For `forward` of a task: replaces the weights of the predictions.
_OTHER_MASK = "    import dataclasses\n    batch = dataclasses.replace(batch, loss_mask={})\n    out = model("
_SUM = "missing sum|one rank's part"
# The two steps of `ParamBuffer.sync_params` for a bucket.
_COPY = (
    "if not self.is_fp32 and not self.buckets[index].group.optimizer.on_host:\n"
    "                shard.copy_(master)"
)
_GATHER = (
    "if self.param_memory.sharded[index]:\n                self.gather.free(index)\n"
    "            else:\n                self.gather.start(index)"
)

FAULTS = (
    Fault(
        name="gradients of replicated weights not summed with sequence parallelism",
        run="t2 sequence",
        target=f"{REDUCER}._sum_partial",
        old="if axis.size == 1:",
        new="if True:",
        module="^gradient",
        kind=_SUM,
        like="#1805, #1878, #4054",
    ),
    Fault(
        name="gradients of a shared key and value head not summed",
        run="t2 groups",
        target=f"{REDUCER}._sum_partial",
        old="if axis.size == 1:",
        new="if True:",
        module="gradient of .*(qkv|query_key_value)",
        kind=f"{_SUM}|wrong in",
        like="#1373 (comment)",
    ),
    Fault(
        name="embedding's two copies not summed over stages",
        run="p2",
        target=f"{REDUCER}.finish",
        old="if bucket.tied:",
        new="if False:",
        module="gradient of embedding.word",
        kind=f"{_SUM}|other values",
    ),
    Fault(
        name="gradients not summed over replicas",
        run="d2",
        target=f"{REDUCER}._start_reduce",
        old="[start_all_reduce(grads, axis)]",
        new="[]",
        module="^gradient",
        kind=_SUM,
    ),
    Fault(
        name="gradients summed twice over replicas",
        run="d2",
        target=f"{REDUCER}._end_reduce",
        old="summed = grads[slice(*(i - bucket.start for i in bucket.shard))]",
        new="summed = grads[slice(*(i - bucket.start for i in bucket.shard))].mul_(self.mesh.dp.size)",
        module="^gradient",
        kind="summed twice",
        like="#160285",
    ),
    Fault(
        name="gradients averaged, not summed, over replicas",
        run="d2 distributed",
        target=f"{REDUCER}._start_reduce",
        old="grads = self.memory.whole[index]",
        new="grads = self.memory.whole[index].div_(axis.size)",
        module="^gradient",
        kind="divided by the dp size",
        like="#160285",
    ),
    Fault(
        name="gradient norm counts replicas' shards twice",
        run="d2",
        target=f"{NORMS}:stage_sum",
        old="torch.stack(sums).sum(), *axes",
        new="torch.stack(sums).sum(), axes[0], mesh.dp",
        module="metric of grad norm",
        kind="scaled",
        like="#2318",
    ),
    Fault(
        name="gradient norm of a shard alone",
        run="d2 distributed",
        target=f"{NORMS}:stage_sum",
        old="torch.stack(sums).sum(), *axes",
        new="torch.stack(sums).sum(), axes[0]",
        module="metric of grad norm",
        kind="missing|scaled|other",
    ),
    Fault(
        name="gradient norm without tensor-parallel ranks",
        run="t2",
        target=f"{NORMS}:stage_sum",
        old="torch.stack(sums).sum(), *axes",
        new="torch.stack(sums).sum(), axes[1]",
        module="metric of grad norm",
        kind="missing|scaled|other",
    ),
    Fault(
        name="weights of one rank's tensor-parallel copies counted twice in the norm",
        run="t2",
        target="megatron.optim.layout:FlatParam.counted",
        old="if spec.replicas.rank > 0 else ()",
        new="if False else ()",
        module="metric of grad norm|no rank",
        kind="scaled|other",
    ),
    Fault(
        name="loss divided by local tokens only",
        run="d2",
        target=f"{ENGINE}.next_global_batch",
        old="all_reduce_sum(denominators, self.mesh.dp_cp).clamp(min=1)",
        new="denominators.clamp(min=1)",
        module="metric of loss denominators|activation gradient",
        kind="divided by the dp|missing|summed twice",
        like="#5047",
    ),
    Fault(
        name="loss multiplied by the tensor-parallel size",
        run="t2",
        target="megatron.pretrain_gpt:forward",
        old="    out = model(",
        new=_OTHER_MASK.format("2 * batch.loss_mask"),
        module="^loss",
        kind="scaled by|summed twice",
        like="#673, #906",
    ),
    Fault(
        name="logged loss doubled, gradients right",
        run="d2",
        target="megatron.training.stage:MeanLoss.add",
        old="self.total.add_(share.detach())",
        new="self.total.add_(2 * share.detach())",
        module="metric of",
        kind="summed twice|scaled",
        like="#1420",
    ),
    Fault(
        name="padding columns of the vocabulary in the softmax",
        run="t2",
        target="megatron.ops.linear_cross_entropy:_valid_columns",
        old="def _valid_columns(weight: Tensor, num_valid: int) -> Tensor | None:",
        new="def _valid_columns(weight: Tensor, num_valid: int) -> Tensor | None:\n    return None\n",
        module="loss|activation of output|activation of the model",
        kind=".",
        like="#1754",
    ),
    Fault(
        name="softmax's sum over the local vocabulary",
        run="t2",
        target="megatron.ops.linear_cross_entropy:_Chunks._log_sum",
        old="sums = all_reduce_sum(torch.stack((exp_sum * (local_max - maximum).exp(), picked)), self.axis)",
        new="sums = torch.stack((exp_sum * (local_max - maximum).exp(), picked))",
        module="loss|activation of output|activation of the model",
        kind=".",
    ),
    Fault(
        name="a cached loss mask is edited in every microbatch",
        run="d2",
        target="megatron.pretrain_gpt:forward",
        old="    out = model(",
        new="    forward.calls = getattr(forward, 'calls', -1) + 1\n"
        + _OTHER_MASK.format("(batch.loss_mask.cumsum(1) > forward.calls).float()"),
        module="loss",
        kind=".",
        like="#1298",
        everywhere=True,
    ),
    Fault(
        name="gradient of a column-parallel input not summed",
        run="t2",
        target=f"{LAYERS}:_Linear.backward",
        old="grad_x = reducing.wait()",
        new="reducing.wait(); grad_x = ops.matmul(grad, weight.t(), None)",
        module="activation gradient",
        kind=_SUM,
    ),
    Fault(
        name="sequence-parallel gradient of a weight uses the local part of the input",
        run="t2 sequence",
        target=f"{LAYERS}:_Linear.backward",
        old="gathering.wait()",
        new="gathering.wait().roll(x.shape[0], 0)",
        module="gradient of",
        kind=".",
    ),
    Fault(
        name="output of a row-parallel layer not summed",
        run="t2",
        target="megatron.parallel.collectives:reduce_from",
        old="if axis.size == 1 else",
        new="if True else",
        module="^activation of embedding",
        kind=f"{_SUM}|missing",
    ),
    Fault(
        name="bias added on every rank before the sum",
        run="t2",
        target=f"{LAYERS}:RowParallelLinear.forward",
        old="y + self.context.ops.accumulating(self.bias)[0]",
        new="y + self.bias * self.context.tp.size",
        module=".",
        kind=".",
    ),
    Fault(
        name="embedding keeps rows of other ranks",
        run="t2",
        target="megatron.model.vocabulary:VocabParallelEmbedding.forward",
        old="rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)",
        new="rows",
        module="^activation of embedding",
        kind=".",
    ),
    Fault(
        name="positions of the first part of the sequence on all ranks",
        run="t2 sequence",
        target="megatron.model.vocabulary:ReplicatedEmbedding.forward",
        old="local_shard(ids_sb, self.context.tp)",
        new="ids_sb[: len(ids_sb) // self.context.tp.size]",
        module="^activation of embedding.position",
        kind="wrong slice|wrong in|other",
    ),
    Fault(
        name="dropout keyed by the microbatch's number on the replica",
        run="d2 dropout",
        target=f"{ENGINE}.next_global_batch",
        old="(i * self.mesh.dp.size + self.mesh.dp.rank) * size",
        new="i * size",
        module="^mask|no rank",
        kind="random|stale|no rank",
    ),
    Fault(
        name="dropout keyed by the rank",
        run="d2 dropout",
        target="megatron.parallel.random:DropoutKey.seed_generator",
        old="self.sample, *place, bits=64)",
        new="self.sample, int(__import__('os').environ['RANK']), *place, bits=64)",
        module="^mask",
        kind="random",
        everywhere=True,
    ),
    Fault(
        name="chunks of a stage start from identical weights",
        run="p2 interleaved",
        target=f"{BUFFER}.initialize",
        old="param.shard_spec, seed, param.name)",
        new="param.shard_spec, seed, param.name.replace('.2.', '.0.').replace('.3.', '.1.'))",
        module="^parameter of decoder.layers.[23]",
        kind="random",
        like="CHANGELOG, interleaved",
    ),
    Fault(
        name="weights of all ranks start from the first rank's slice",
        run="t2",
        target="megatron.parallel.random:fill_tiles_",
        old="for local, whole in shard.blocks()",
        new="for local, whole in [(block, block) for block, _ in shard.blocks()]",
        module="^parameter",
        kind="wrong slice|random",
    ),
    Fault(
        name="updated parameters not gathered",
        run="d2 distributed",
        target="megatron.optim.param_gather:ParamGather.start",
        old="if axis.size == 1:",
        new="if True:",
        module="^parameter",
        kind="stale|wrong in",
    ),
    Fault(
        name="weights gathered one step late in bf16",
        run="d2 bf16",
        target=f"{BUFFER}.sync_params",
        old=f"{_COPY}\n            {_GATHER}",
        new=f"{_GATHER}\n            {_COPY}",
        module="^parameter",
        kind="stale|wrong in",
    ),
    Fault(
        name="every replica reads the first replica's samples",
        run="d2",
        target="megatron.data.samplers:sequential",
        old="start + dp_rank * micro_batch_size",
        new="start",
        module="^activation of embedding",
        kind="stale|other",
    ),
    Fault(
        name="half of the learning rate on every rank of two",
        run="d2",
        target="megatron.optim.optimizer:Optimizer.step",
        old="lr=lr,",
        new="lr=lr / 2,",
        module="^update",
        kind="scaled|divided",
    ),
    Fault(
        name="optimizer's moments not loaded",
        run="d2 distributed",
        target=f"{LOAD}:load_into",
        old='state.read_into(part, f"{kind}/{param.name}", param.shard_spec, begin)',
        new="pass",
        module="^state",
        kind="missing",
        like="#8147",
    ),
    Fault(
        name="moments of another shard loaded",
        run="d2 distributed",
        target=f"{LOAD}:load_into",
        old="param.shard_spec, begin)",
        new="param.shard_spec, 0)",
        module="^state",
        kind=".",
        like="#8147",
    ),
    Fault(
        name="optimizer's number of steps not loaded",
        run="d2",
        target=f"{LOAD}:load_into",
        old='optimizer.steps = checkpoint.state["optimizer_steps"]',
        new="pass",
        module="^update",
        kind=".",
    ),
    Fault(
        name="weights stay at their initial values after loading",
        run="d2 distributed",
        target=f"{LOAD}:read_weights",
        old="buffer.param_memory.write(param, values)",
        new="pass",
        module="^parameter",
        kind=".",
        like="#6920",
    ),
)
