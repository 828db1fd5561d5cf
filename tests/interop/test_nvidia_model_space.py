"""Optimizer state of current Megatron-LM's checkpoints.

torch.distributed.checkpoint writes them here, with the names and shapes of Megatron-LM's source. There is no file that
Megatron-LM itself wrote to compare with.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from nvidia import VOCAB, assert_equal, checkpoint_of, weights
from torch import Tensor
from torch_dist import DISTRIBUTED, LLAMA, TOKENIZER, Shards, common_state, in_stacks, save, write

from megatron.errors import InputError
from megatron.interop.convert import write_native
from megatron.interop.nvidia.names import shard_dim
from megatron.interop.nvidia.read import open_megatron
from megatron.optim.optimizer import Optimizer

# torch warns that there is only one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# Megatron-LM's kinds of state, and the native ones.
ADAM = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
MASTER = {"fp32_param": "master"}


def values_of(tensors: dict[str, Tensor], kinds: dict[str, str]) -> dict[str, dict[str, Tensor]]:
    """State of every kind: random numbers, moments of which are positive."""
    generator = torch.Generator().manual_seed(5)
    return {
        kind: {name: torch.rand(x.shape, generator=generator) for name, x in tensors.items()}
        for kind in kinds
    }


def flattened(name: str, tensor: Tensor, ranks: int, swiglu: bool) -> Tensor:
    """Flatten the shards of a tensor on each tensor-parallel rank: [shards of dimension 0, ..., elements of a shard].

    With SwiGLU both halves of the first linear layer are sharded.
    """
    grid = [1] * tensor.dim()
    dim = shard_dim(name)
    if dim is not None:
        grid[dim] = 2 * ranks if swiglu and ".linear_fc1." in name else ranks
    shards = [tensor] if dim is None else tensor.chunk(grid[dim], dim)
    return torch.stack([shard.reshape(-1) for shard in shards]).view(*grid, -1)


# State of Megatron-LM's other optimizers in the state that all ranks share.
WITH_STATE = {"state": {"common_step": torch.tensor(12.0)}, "param_groups": [{"lr": 1e-3}]}
OPTIMIZERS = {
    "chained": {0: DISTRIBUTED, 1: DISTRIBUTED},
    "fp32": WITH_STATE,
    "half": {"optimizer": WITH_STATE, "grad_scaler": {}},
}


def written(
    folder: Path, form: str, *, bf16: bool = True, ranks: int = 2, **fields: Any
) -> tuple[Path, dict, dict]:
    """Write a run; return its folder, its weights and its optimizer state under native names."""
    checkpoint = checkpoint_of(folder, **fields)
    model = weights(checkpoint)
    if bf16:
        model = {name: x.bfloat16() for name, x in model.items()}
    kinds = ADAM | (MASTER if bf16 else {})
    states = values_of(model, kinds)
    tensors = in_stacks(model)
    for kind, state in states.items():
        stored = state
        if form == "fully_sharded_model_space":
            stored = {name: flattened(name, x, ranks, "swiglu" in fields) for name, x in state.items()}
        shard = Shards if form == "fully_sharded_model_space" else Tensor.contiguous
        tensors |= {f"optimizer.state.{kind}.{name}": shard(x) for name, x in in_stacks(stored).items()}
    optimizer = OPTIMIZERS[form] if form in OPTIMIZERS else DISTRIBUTED | {"param_state_sharding_type": form}
    root = folder / "run"
    write(root / "iter_0000012", tensors, common_state(checkpoint, optimizer))
    expected = {f"{kinds[kind]}/{name}": x for kind, state in states.items() for name, x in state.items()}
    return root, model, expected


@pytest.mark.parametrize("fields", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    ("form", "bf16"),
    [
        ("fully_reshardable", True),
        ("fully_sharded_model_space", True),
        ("fp32", False),
        ("half", True),
        ("chained", True),
    ],
)
def test_optimizer_state(tmp_path: Path, form: str, bf16: bool, fields: dict[str, Any]) -> None:
    root, model, expected = written(tmp_path, form, bf16=bf16, **fields)
    found = open_megatron(root, TOKENIZER)
    assert_equal(weights(found), {name: x.float() for name, x in model.items()})
    assert_equal(weights(found, "optimizer"), expected)
    progress = {"iteration": 12, "consumed_samples": 96, "train_samples": 160, "optimizer_steps": 12}
    assert found.state.items() >= progress.items() and not found.notes
    assert found.state["schedule"] == {
        "max_lr": 1e-3,
        "min_lr": 1e-5,
        "init_lr": 1e-6,
        "warmup": 8,
        "decay": 160,
        "decay_style": "cosine",
        "wsd_decay": 32,
        "wsd_decay_style": "linear",
        "start_weight_decay": 0.1,
        "end_weight_decay": 0.1,
        "weight_decay_style": "constant",
        "train_samples": 160,
    }
    without = open_megatron(root, TOKENIZER, load_optim=False)
    assert list(without.tensors) == ["model"] and without.iteration == 12 and not without.notes


@pytest.mark.parametrize("form", ["fully_reshardable", "half"])
def test_shared_state_among_the_chunks(tmp_path: Path, form: str) -> None:
    """Newer versions write the shared state as an object of the checkpoint, and no common.pt."""
    root, _, expected = written(tmp_path, form)
    folder = root / "iter_0000012"
    common = torch.load(folder / "common.pt", weights_only=False)
    content: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    }
    dcp.load(content, checkpoint_id=folder, no_dist=True)
    serialized = io.BytesIO()
    torch.save([common | {"content_metadata": {"distrib_optim_sharding_type": form}}], serialized)
    newer = save(tmp_path / "newer", content | {"common_state/shard_0_1": serialized})
    found = open_megatron(newer, TOKENIZER)
    assert_equal(weights(found, "optimizer"), expected)
    assert found.iteration == found.state["optimizer_steps"] == 12 and not found.notes


def test_run_continues_with_these_moments(
    pretrain: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of the continued run starts with the state of the checkpoint."""
    root, _, expected = written(tmp_path, "fully_reshardable")
    write_native(open_megatron(root, TOKENIZER), tmp_path / "native", lambda size: None)
    found: dict[str, Tensor] = {}
    counts = []
    step = Optimizer.step

    def recorded_step(self: Optimizer, *args: Any, **given: Any) -> dict[str, Tensor]:
        counts.append(self.steps)
        for kind, owned in {"master": self.buffer.masters, **self.state}.items():
            for param, part, begin in self.buffer.parts(owned) if len(counts) == 1 else ():
                assert begin == 0
                found[f"{kind}/{param.name}"] = part.clone()
        return step(self, *args, **given)

    monkeypatch.setattr(Optimizer, "step", recorded_step)
    flags = ["--num-layers", 4, "--hidden-size", 32, "--num-attention-heads", 4, "--seq-length", 16, "--bf16"]
    flags += [
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        VOCAB - 1,
        "--mock-data",
        "--device",
        "cpu",
    ]
    flags += ["--make-vocab-size-divisible-by", 4, "--micro-batch-size", 8, "--num-workers", 0, "--lr", 1e-3]
    flags += ["--data-order", "head", "--use-checkpoint-opt_param-scheduler", "--eval-iters", 0]
    flags += ["--train-iters", 20, "--log-interval", 1, "--metrics-path", tmp_path / "metrics"]
    pretrain(*flags, "--load", tmp_path / "native")
    assert counts == list(range(12, 20)) and '"consumed samples": 104' in (tmp_path / "metrics").read_text()
    assert_equal(found, {name: x.flatten() for name, x in expected.items()})


@pytest.mark.parametrize(
    ("common", "name", "message"),
    [
        (
            {"content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}},
            "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16).bucket_idx_0.exp_avg",
            r"common\.pt: its optimizer state is in the format 'dp_reshardable', which depends on the ranks that wrote "
            r"it; save it again in Megatron-LM with --dist-ckpt-optim-fully-reshardable, or give --no-load-optim",
        ),
        (
            {"optimizer": {"param_state_sharding_type": "fully_sharded_bucket_space"}},
            "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg",
            "is in the format 'fully_sharded_bucket_space', which",
        ),
        (
            {"optimizer": None},
            "chained_0.optimizer.state.exp_avg.x",
            "is in an unnamed format, which depends",
        ),
    ],
)
def test_formats_that_depend_on_the_ranks(tmp_path: Path, common: dict, name: str, message: str) -> None:
    checkpoint = checkpoint_of(tmp_path)
    model = weights(checkpoint)
    folder = tmp_path / "run" / "iter_0000012"
    write(folder, in_stacks(model) | {name: torch.ones(3)}, common_state(checkpoint, None) | common)
    with pytest.raises(InputError, match=message) as caught:
        open_megatron(folder, TOKENIZER)
    assert "\n" not in str(caught.value)
    found = open_megatron(folder, TOKENIZER, load_optim=False)
    assert_equal(weights(found), model)
    assert found.iteration == 12


LAYERS = "decoder.layers.mlp.linear_fc2.weight"
PREFIX = "optimizer.state.exp_avg."
BAD: dict[str, tuple[Callable[[dict, dict], object], str]] = {
    "other kind": (
        lambda tensors, common: tensors.update({"optimizer.state.max_exp_avg_sq.x": torch.ones(3)}),
        r"unknown tensors: 1 tensor\(s\): max_exp_avg_sq; supported are those of Adam and SGD; give --no-load-optim",
    ),
    "missing": (
        lambda tensors, common: tensors.pop(PREFIX + LAYERS),
        r"exp_avg and its weights are not of the same tensors: 4 tensor\(s\): decoder\.layers\.0\.mlp",
    ),
    "unknown": (
        lambda tensors, common: tensors.update({PREFIX + "x": torch.ones(3)}),
        r"exp_avg and its weights are not of the same tensors: 1 tensor\(s\): x; give --no-load-optim",
    ),
    "shape": (
        lambda tensors, common: tensors.update({PREFIX + LAYERS: torch.ones(4, 32, 127)}),
        r"exp_avg of decoder\.layers\.0\.mlp\.linear_fc2\.weight has shape \(32, 127\) and dtype float32, but the "
        r"weight has shape \(32, 128\)",
    ),
    "uneven shards": (
        lambda tensors, common: tensors.update({PREFIX + LAYERS: torch.ones(4, 3, 1, 1365)}),
        r"has shape \(3, 1, 1365\)",
    ),
    "no elements": (
        lambda tensors, common: tensors.update({PREFIX + LAYERS: torch.ones(4, 0, 1, 128)}),
        r"stacks all layers, but has the shape \(4, 0, 1, 128\)",
    ),
    "dtype": (
        lambda tensors, common: tensors.update({PREFIX + LAYERS: torch.ones(4, 32, 128, dtype=torch.uint8)}),
        "has shape .* and dtype uint8",
    ),
    "no layers": (
        lambda tensors, common: tensors.update({PREFIX + LAYERS: torch.tensor(1.0)}),
        r"\.metadata: is damaged \(optimizer\.state\.exp_avg\.decoder\.layers\.mlp\.linear_fc2\.weight stacks all",
    ),
    "stacked under a false name": (
        lambda tensors, common: tensors.update({f"{PREFIX}optimizer.state.x.{LAYERS}": torch.ones(1, 2)}),
        r"exp_avg and its weights are not of the same tensors: 1 tensor\(s\): optimizer\.state\.x\.decoder",
    ),
    "no steps": (
        lambda tensors, common: common.update(optimizer={"param_groups": [3, {"lr": 1}]}),
        r"common\.pt: lacks the number of steps of its optimizer; give --no-load-optim",
    ),
    "no optimizer": (lambda tensors, common: common.pop("optimizer"), "lacks the number of steps"),
    "impossible steps": (
        lambda tensors, common: common.update(optimizer={"param_groups": [{"step": -1}]}),
        "the number of steps of its optimizer is -1, which is impossible",
    ),
    "steps of no number": (
        lambda tensors, common: common.update(optimizer={"state": {"common_step": torch.ones(2)}}),
        "the number of steps of its optimizer is of type StoredTensor, which is impossible",
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input(tmp_path: Path, name: str) -> None:
    checkpoint = checkpoint_of(tmp_path)
    model = in_stacks(weights(checkpoint))
    tensors = dict(model) | {PREFIX + key: x for key, x in model.items()}
    common = common_state(checkpoint, DISTRIBUTED)
    change, message = BAD[name]
    change(tensors, common)
    folder = write(tmp_path / "run" / "iter_0000012", tensors, common)
    with pytest.raises(InputError, match=message) as caught:
        open_megatron(folder, TOKENIZER)
    assert "\n" not in str(caught.value)


def test_sgd_steps_are_iterations(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path)
    model = weights(checkpoint)
    tensors = in_stacks(model) | {
        f"optimizer.state.momentum_buffer.{name}": 2 * x for name, x in in_stacks(model).items()
    }
    folder = write(
        tmp_path / "run" / "iter_0000012", tensors, common_state(checkpoint, {"param_groups": [{"lr": 1e-3}]})
    )
    found = open_megatron(folder, TOKENIZER)
    assert_equal(weights(found, "optimizer"), {f"momentum_buffer/{name}": 2 * x for name, x in model.items()})
    assert found.state["optimizer_steps"] == 12
