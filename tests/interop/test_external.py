"""Tensors of external files, and their conversion to native checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.checkpoint import Checkpoint
from megatron.checkpoint.find import find_checkpoint
from megatron.errors import InputError
from megatron.interop.convert import write_native
from megatron.interop.external import ExternalTensor, ExternalTensors, weights_only_state
from megatron.interop.huggingface.hub_file import HubFile
from megatron.interop.tensor_writer import TensorToWrite, in_shards, write_tensors
from megatron.model.config import ModelConfig
from megatron.parallel.slices import GlobalSlice, whole
from megatron.tokenizer.config import TokenizerConfig

SHAPES = {"table": (10, 4), "matrix": (6, 8), "vector": (5,)}


def external_checkpoint(folder: Path) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    values = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    sources = {
        name: ExternalTensor(tuple(x.shape), torch.bfloat16, (lambda x=x: x.float(),))
        for name, x in values.items()
    }
    model = ModelConfig(num_layers=1, hidden_size=4, num_attention_heads=2, max_position_embeddings=8)
    state = weights_only_state("GPT", model, TokenizerConfig(), vocab_size=10, bf16=True)
    return Checkpoint(folder, state, {"model": ExternalTensors(folder, sources)}), values


def test_shards_of_tensors(tmp_path: Path) -> None:
    checkpoint, values = external_checkpoint(tmp_path)
    tensors = checkpoint.tensors["model"]
    columns = GlobalSlice((6, 8), 1, ((2, 6),))
    assert tensors.read("matrix", columns).equal(values["matrix"][:, 2:6].float())
    rows = GlobalSlice((6, 8), 0, ((4, 6), (0, 1)))
    assert tensors.read("matrix", rows).equal(values["matrix"][[4, 5, 0]].float())
    padded = GlobalSlice((16, 4), 0, ((8, 16),), num_valid_rows=10)
    expected = torch.zeros(8, 4)
    expected[:2] = values["table"][8:]
    assert tensors.read("table", padded).equal(expected)
    with pytest.raises(InputError, match=r"table has shape \(10, 4\), but the model has \(12, 4\)"):
        tensors.read("table", whole(12, 4))


@pytest.mark.parametrize("shard", [50, 10**9])
def test_conversion_to_native(tmp_path: Path, shard: int) -> None:
    checkpoint, values = external_checkpoint(tmp_path)
    root, progress = tmp_path / "native", []
    write_native(checkpoint, root, progress.append, shard)
    found = find_checkpoint(str(root), None)
    assert found.iteration == 0 and found.state["vocab_size"] == 10
    assert {file for file in found.manifest.files if file.startswith("model")} == (
        {"model.safetensors"} if shard > 50 else {f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)}
    )
    assert {
        name: tensor["dtype"] for name, tensor in found.manifest.tensors["model"].items()
    } == dict.fromkeys(SHAPES, "bfloat16")
    for name, expected in values.items():
        assert found.tensors["model"].read(name, whole(*SHAPES[name])).equal(expected.float())
    assert progress == [2 * x.numel() for x in values.values()]


def test_failed_conversion_leaves_no_files(tmp_path: Path) -> None:
    checkpoint, _ = external_checkpoint(tmp_path)

    def fail() -> torch.Tensor:
        raise InputError("torn")

    checkpoint.tensors["model"].tensors["vector"] = ExternalTensor((5,), torch.bfloat16, (fail,))
    (tmp_path / "empty").mkdir()
    for root in (tmp_path / "new", tmp_path / "empty"):
        with pytest.raises(InputError, match="torn"):
            write_native(checkpoint, root, lambda size: None)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize("kind", ["a file", "full"])
def test_existing_files_are_not_overwritten(tmp_path: Path, kind: str) -> None:
    checkpoint, _ = external_checkpoint(tmp_path)
    root = tmp_path / "x"
    if kind == "full":
        root.mkdir()
    (root if kind == "a file" else root / "precious").write_text("")
    with pytest.raises(InputError, match=r"^--save: \S+ is not (empty|a folder); give"):
        write_native(checkpoint, root, lambda size: None)
    assert root.exists()


def test_written_files_are_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    values = {"a": torch.randn(3, 5), "b": torch.randn(7).half(), "c": torch.randn(2, 3, 4).bfloat16()}
    tensors = {name: TensorToWrite(tuple(x.shape), x.dtype, lambda x=x: x) for name, x in values.items()}
    write_tensors(tmp_path / "x.safetensors", tensors, lambda size: None)
    theirs, ours = load_file(tmp_path / "x.safetensors"), HubFile(tmp_path / "x.safetensors").contents()
    for name, x in values.items():
        assert theirs[name].equal(x) and ours[name].read().equal(x)
    assert [list(part) for part in in_shards(tensors, 70)] == [["a"], ["b", "c"]]
