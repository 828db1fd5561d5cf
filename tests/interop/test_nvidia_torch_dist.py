"""Checkpoints of current Megatron-LM, saved with torch.distributed.checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia import HEADS, VOCAB, assert_equal, checkpoint_of, weights
from safetensors.torch import load_file
from torch_dist import in_stacks, save

from megatron.checkpoint.checkpoint import Checkpoint, model_config
from megatron.errors import InputError
from megatron.interop.nvidia.read import open_megatron
from megatron.model.config import ModelConfig
from megatron.tokenizer.config import TokenizerConfig

# torch warns that there is only one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

GIVEN = {"num_attention_heads": HEADS}
LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
}
LLAMA |= {"untie_embeddings_and_output_weights": True, "group_query_attention": True, "num_query_groups": 2}


def open_dist(folder: Path, given: dict[str, Any] | None = None, vocab_size: int = VOCAB) -> Checkpoint:
    return open_megatron(folder, TokenizerConfig(vocab_size=vocab_size), GIVEN if given is None else given)


@pytest.mark.parametrize("written_by", ["torch_dist_tp1", "torch_dist_tp2"])
def test_equals_nvidia_weights(shared: Path, written_by: str) -> None:
    """Bit-exact weights. tests/model/test_gpt.py compares their logits, gradients and losses."""
    vectors = shared / "vectors" / "core-head"
    prefix = "state_dict/"
    theirs = load_file(vectors / "gpt2.safetensors")
    expected = {name.removeprefix(prefix): x for name, x in theirs.items() if name.startswith(prefix)}
    found = open_dist(vectors / written_by, vocab_size=512)
    assert_equal(weights(found), expected)
    assert "lacks the flags" in found.notes[0]


SINKS = {"softmax_type": "learnable", "softmax_scale": 0.2, "rotary_interleaved": True}


@pytest.mark.parametrize("fields", [{}, LLAMA, {**LLAMA, **SINKS}], ids=["gpt2", "llama", "sinks"])
@pytest.mark.parametrize("form", ["stacked", "stacked and fused", "one by one"])
def test_files_of_torch(tmp_path: Path, form: str, fields: dict) -> None:
    """Files written by torch itself, with the run's flags in common.pt."""
    checkpoint = checkpoint_of(tmp_path, **fields)
    expected = weights(checkpoint)
    tensors = expected if form == "one by one" else in_stacks(expected, fused=form.endswith("fused"))
    root = tmp_path / "run"
    folder = save(root / "iter_0000003", tensors | {"optimizer.state.exp_avg.x": torch.ones(3)})
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    args = vars(model_config(checkpoint)) | {"orig_vocab_size": VOCAB, "make_vocab_size_divisible_by": 4}
    if not fields:
        args["num_query_groups"] = 1  # Megatron-LM's default
    torch.save({"args": argparse.Namespace(**args), "iteration": 3}, folder / "common.pt")
    found = open_megatron(root, TokenizerConfig())
    assert_equal(weights(found), expected)
    assert model_config(found) == ModelConfig(**vars(model_config(checkpoint)) | {"mask_padded_vocab": False})
    assert found.iteration == 0 and "its optimizer state is not read" in found.notes[0]


VARIANTS = {
    "rotary_seq_len_interpolation_factor": (2, 1),
    "qk_l2_norm": (True, False),
    "quick_geglu": (True, False),
    "activation_func_clamp_value": (7.0, None),
    "attention_output_gate": (True, False),
    "layernorm_zero_centered_gamma": (True, False),
    "glu_linear_offset": (1.0, 0.0),
    "moe_latent_size": (64, None),
    "moe_router_topk_limited_devices": (2, None),
    "use_mup": (True, False),
}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"window_size": (5, 0)}, {"window_size": "5,0"}),
        (
            {"window_size": [5, -1], "window_attn_skip_freq": [1, 0, 1, 1]},
            {"window_size": "5,0", "window_attn_skip_freq": "[1,0,1,1]"},
        ),
        ({"window_size": (5, 0), "window_attn_skip_freq": 2}, {"window_attn_skip_freq": "2"}),
        ({"position_embedding_type": "rope", "no_rope_freq": [0, 1, 0, 0]}, {"no_rope_freq": "[0,1,0,0]"}),
        ({"position_embedding_type": "rope", "no_rope_freq": 2}, {"no_rope_freq": "2"}),
    ],
)
def test_flags_of_layers(tmp_path: Path, flags: dict, expected: dict) -> None:
    checkpoint = checkpoint_of(
        tmp_path, **({"position_embedding_type": "rope"} if "no_rope_freq" in flags else {})
    )
    folder = save(tmp_path / "x", in_stacks(weights(checkpoint)))
    args = vars(model_config(checkpoint)) | {"num_query_groups": 1} | flags
    torch.save({"args": argparse.Namespace(**args)}, folder / "common.pt")
    found = model_config(open_dist(folder))
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"window_size": (5, 5)}, r"was trained with --window-size \[5, 5\], and only L,0 is supported"),
        ({"window_size": "5,0"}, "its flag window_size is '5,0', which is impossible"),
        ({"window_size": (5, 0), "window_attn_skip_freq": [1]}, "is for 1 layers, and --num-layers is 4"),
        ({"no_rope_freq": {}}, "its flag no_rope_freq is .*, which is impossible"),
    ],
)
def test_impossible_flags_of_layers(tmp_path: Path, flags: dict, message: str) -> None:
    checkpoint = checkpoint_of(tmp_path)
    folder = save(tmp_path / "x", in_stacks(weights(checkpoint)))
    args = vars(model_config(checkpoint)) | {"num_query_groups": 1} | flags
    torch.save({"args": argparse.Namespace(**args)}, folder / "common.pt")
    with pytest.raises(InputError, match=message):
        open_dist(folder)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_unsupported_models_with_the_same_tensors(tmp_path: Path, name: str) -> None:
    """Models that only differ in the flags of the run are refused, unless the flag has a harmless value."""
    checkpoint = checkpoint_of(tmp_path)
    folder = save(tmp_path / "x", in_stacks(weights(checkpoint)))
    args = vars(model_config(checkpoint)) | {"num_query_groups": 1}
    variant, harmless = VARIANTS[name]
    torch.save({"args": argparse.Namespace(**(args | {name: harmless}))}, folder / "common.pt")
    open_dist(folder)
    torch.save({"args": argparse.Namespace(**(args | {name: variant}))}, folder / "common.pt")
    message = rf"common\.pt: was trained with --{name.replace('_', '-')}, which is not supported in this"
    with pytest.raises(InputError, match=message):
        open_dist(folder)


class Hostile:
    def __reduce__(self) -> tuple:
        return print, ("run",)


def metadata_with(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / ".metadata"
        whole = pickle.loads(path.read_bytes())  # noqa: S301, pickled here
        path.write_bytes(pickle.dumps(change(whole) or whole))

    return edit


def outside(whole: Any) -> None:
    for info in whole.storage_data.values():
        info.relative_path = "../x"


def longer(whole: Any) -> None:
    for info in whole.storage_data.values():
        info.length = 10**9


def larger(whole: Any) -> None:
    whole.state_dict_metadata["decoder.final_layernorm.bias"].size = torch.Size([2**50])


def moved(whole: Any) -> None:
    for info in whole.storage_data.values():
        info.offset += 1
        info.length -= 1


def twice(whole: Any) -> None:
    largest = max(whole.storage_data.values(), key=lambda info: info.length)
    for info in whole.storage_data.values():
        info.offset, info.length = largest.offset, largest.length


def deeply_nested_name(folder: Path) -> None:
    """A chunk whose name is a tuple nested so deeply that Python crashes when hashing it."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    def add(whole: Any) -> None:
        whole.storage_data[MetadataIndex("DEEP")] = None

    metadata_with(add)(folder)
    content = (folder / ".metadata").read_bytes()
    name = b"\x8c\x04DEEP"  # the pickle of a string of four bytes
    assert content.count(name) == 1
    (folder / ".metadata").write_bytes(content.replace(name, b")" + b"\x85" * 200_000))


def layers(*shape: int) -> Callable[[Path], None]:
    """A tensor that stacks all layers, with this shape and no elements."""

    def add(whole: Any) -> None:
        entry = dataclasses.replace(whole.state_dict_metadata["decoder.final_layernorm.bias"], chunks=[])
        entry.size = torch.Size(shape)
        whole.state_dict_metadata["decoder.layers.x.weight"] = entry

    return metadata_with(add)


def overlapping(folder: Path) -> None:
    """Replace a tensor by two chunks of half its size, the second of which overlaps the first."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    def halve(whole: Any) -> None:
        name = "decoder.final_layernorm.bias"
        entry = whole.state_dict_metadata[name]
        half = torch.Size([entry.size[0] // 2])
        (index,) = (index for index in whole.storage_data if index.fqn == name)
        info, path = whole.storage_data.pop(index), folder / "__0_1.distcp"
        torch.save(torch.ones(half), path)
        info = dataclasses.replace(info, relative_path=path.name, offset=0, length=path.stat().st_size)
        shutil.copy(path, folder / "__0_2.distcp")
        whole.storage_data[MetadataIndex(name, torch.Size([0]))] = info
        whole.storage_data[MetadataIndex(name, torch.Size([1]))] = dataclasses.replace(
            info, relative_path="__0_2.distcp"
        )
        entry.chunks = [ChunkStorageMetadata(torch.Size([begin]), half) for begin in (0, 1)]

    metadata_with(halve)(folder)


def without(whole: Any, name: str) -> None:
    del whole.state_dict_metadata[name]


BAD = {
    "os.system": (metadata_with(lambda whole: Hostile()), r"\.metadata: holds .*print, which no checkpoint"),
    "outside": (metadata_with(outside), r"\.metadata: is damaged \('\.\./x' is not the name"),
    "longer": (metadata_with(longer), r"\.distcp: is missing or too short"),
    "larger": (
        metadata_with(larger),
        r"\.metadata: is damaged \(the chunks of decoder.final_layernorm.bias are too",
    ),
    "twice": (metadata_with(twice), r"\.metadata: is damaged \(the chunks in __0_0\.distcp overlap"),
    "unhashable name": (
        deeply_nested_name,
        r"\.metadata: is damaged \(the name of a chunk is not a string",
    ),
    "empty layers": (
        layers(10**9, 0),
        r"\.metadata: is damaged \(decoder\.layers\.x\.weight stacks all layers, but has the shape \(1000000000, 0\)",
    ),
    "no layers": (layers(), r"\.metadata: is damaged \(decoder\.layers\.x\.weight stacks all layers"),
    "overlapping": (
        overlapping,
        r"__0_2\.distcp: a chunk of decoder\.final_layernorm\.bias overlaps another",
    ),
    "moved": (metadata_with(moved), r"\.distcp: is damaged, or not a file of torch.save"),
    "other": (metadata_with(lambda whole: {"a": 1}), r"\.metadata: is damaged"),
    "truncated": (
        lambda folder: (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:1000]),
        r"\.metadata: is damaged",
    ),
    "no file": (lambda folder: next(folder.glob("*.distcp")).unlink(), r"\.distcp: is missing"),
    "no format": (lambda folder: (folder / "metadata.json").unlink(), r"metadata\.json: cannot be read"),
    "large format": (
        lambda folder: os.truncate(folder / "metadata.json", 1 << 33),
        r"metadata\.json: cannot be read \(larger than 1000000 bytes",
    ),
    "zarr": (
        lambda folder: (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"})),
        "is not of the format 'torch_dist'",
    ),
    "missing tensor": (
        metadata_with(lambda whole: without(whole, "decoder.layers.self_attention.linear_proj.bias")),
        r"lacks 4 tensor\(s\): decoder\.layers\.0\.self_attention\.linear_proj\.bias, ",
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "x", in_stacks(weights(checkpoint_of(tmp_path))))
    change, message = BAD[name]
    change(folder)
    with pytest.raises(InputError, match=message) as caught:
        weights(open_dist(folder))
    assert "\n" not in str(caught.value) and capsys.readouterr().out == ""


def test_num_attention_heads_is_required(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", in_stacks(weights(checkpoint_of(tmp_path))))
    with pytest.raises(InputError, match=r"^--num-attention-heads is required"):
        open_dist(folder, {})
    with pytest.raises(InputError, match=r"kv_channels|linear_qkv\.weight has shape"):
        open_dist(folder, GIVEN | {"kv_channels": 16})
    shutil.rmtree(folder)
    save(folder, {"x": torch.ones(1)})
    with pytest.raises(InputError, match="holds no GPT"):
        open_dist(folder)
