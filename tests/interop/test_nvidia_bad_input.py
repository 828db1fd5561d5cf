"""Damaged or inconsistent Megatron-LM checkpoints, and models that its format does not support."""

from __future__ import annotations

import argparse
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia import NO_TOKENIZER, VOCAB, checkpoint_of, edit, files, optimizer_of, weights, written
from torch import Tensor

from megatron.errors import InputError
from megatron.interop.convert import write_native
from megatron.interop.external import ExternalTensor
from megatron.interop.nvidia.read import open_megatron
from megatron.interop.nvidia.write import write_megatron
from megatron.tokenizer.config import TokenizerConfig

FOLDER, LAST = "mp_rank_01_000", "layers.1.mlp.dense_4h_to_h.bias"


def encoder(content: dict[str, Any]) -> dict[str, Tensor]:
    return content["model"]["language_model"]["encoder"]


def flags(**values: object) -> Callable[[dict[str, Any]], None]:
    return lambda content: vars(content["args"]).update(values)


def doubled(inner: Any, times: int = 40, width: int = 2) -> Any:
    """Nest containers that repeat one element: a file of a few bytes whose repr is exponentially long."""
    for _ in range(times):
        inner = [inner] * width if isinstance(inner, list) else {str(i): inner for i in range(width)}
    return inner


# Changes to the folder of a checkpoint of four processes.
DAMAGE = {
    "no folder": (lambda release: shutil.rmtree(release / FOLDER), f"lacks {FOLDER}"),
    "no file": (
        lambda release: (release / FOLDER / "model_optim_rng.pt").unlink(),
        f"lacks {FOLDER}/model_optim",
    ),
    "no stage": (
        lambda release: [shutil.rmtree(path) for path in release.glob("*_001")],
        "holds files of 2 x 1 ranks .* pipeline_model_parallel_size 2; some are missing",
    ),
    "truncated": (
        lambda release: (release / FOLDER / "model_optim_rng.pt").write_bytes(b"PK\3\4..."),
        f"{FOLDER}/.*: is damaged",
    ),
    "no model": (
        lambda release: torch.save({"state_dict": {}}, release / FOLDER / "model_optim_rng.pt"),
        "is not a Megatron-LM checkpoint",
    ),
    "no dict": (
        lambda release: torch.save([1], release / FOLDER / "model_optim_rng.pt"),
        "is not a Megatron-LM checkpoint",
    ),
}
# Changes to the content of the first process's file.
CHANGES = {
    "text": (
        lambda content: content["model"].update(binary_head={"weight": "x"}),
        "binary_head.weight is neither a tensor nor",
    ),
    "missing tensor": (
        lambda content: encoder(content).pop(LAST),
        r"ranks hold unequal shards of 1 tensor\(s\): decoder\.layers\.1\.mlp\.linear_fc2\.bias",
    ),
    "extra tensors": (
        lambda content: encoder(content).update({f"layers.0.x{i}.weight": torch.ones(1) for i in range(11)}),
        r"has unknown or duplicate tensors: 11 tensor\(s\): .*x8\.weight in mp_rank_00_000, \.\.\.$",
    ),
    "integers": (
        lambda content: encoder(content).update({LAST: torch.arange(32)}),
        "its weights are float32 and int64",
    ),
    "heads": (
        flags(num_attention_heads=8),
        r"linear_qkv.weight has shape \(96, 32\), but \(192, 32\) by the flags",
    ),
    "wider heads": (
        flags(kv_channels=16),
        r"linear_qkv.weight has shape \(96, 32\), but \(192, 32\) by the flags",
    ),
    "width": (flags(hidden_size=64), "hidden_size is 64 in its flags, but 32 by its tensors"),
    "layers": (flags(num_layers=10**5), "num_layers is 100000 in its flags, but 4 by its tensors"),
    "tensor-parallel size": (
        flags(tensor_model_parallel_size=4),
        "tensor_model_parallel_size 4; some are missing",
    ),
    "swiglu": (flags(swiglu=True), "was trained with --swiglu, which is not supported"),
    "another activation": (flags(squared_relu=True), "was trained with --squared-relu, which is not"),
    "vocabulary": (
        flags(orig_vocab_size=300),
        "but 300 ids, given by orig_vocab_size in it, are padded to another number",
    ),
    "batch": (flags(global_batch_size="x"), "its flag global_batch_size is 'x', which is impossible"),
    "data": (
        flags(data_path=["a", torch.ones(1)]),
        "its flag data_path is of type StoredTensor, which is impossible",
    ),
    "list": (flags(seed=[1]), "its flag seed is of type list, which is impossible"),
    "zero": (flags(make_vocab_size_divisible_by=0), "divisible_by is 0, which is impossible"),
    "long number": (flags(seed=-(10**5000)), "its flag seed is of type int, which is impossible"),
    "long number of layers": (flags(num_layers=10**5000), "its flag num_layers is of type int, which"),
    "exponential list": (flags(num_layers=doubled([])), "its flag num_layers is of type list, which"),
    "exponential version": (
        lambda content: content.update(checkpoint_version=doubled([])),
        "checkpoint_version is of type list; supported are",
    ),
    "exponential dict": (
        lambda content: content["model"].update(x=doubled({}, 7, width=60)),
        r"has too many tensors, or too long a name \(",
    ),
    "long name": (
        lambda content: content["model"].update({"x" * 300: {}}),
        r"has too many tensors, or too long a name \(xxx",
    ),
    "number as name": (lambda content: content["model"].update({1: {}}), "model is neither a tensor"),
    "duplicate tensor": (
        lambda content: encoder(content).update({"layers.0.attention.dense.bias": torch.ones(32)}),
        r"duplicate tensors: 1 tensor.*encoder\.layers\.0\.attention\.dense\.bias in mp_rank_00_000",
    ),
    "version": (
        lambda content: content.update(checkpoint_version=4.0),
        "is 4.0; supported are 0, 1.0, 2.0 or 3.0",
    ),
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_damaged_folders(tmp_path: Path, name: str) -> None:
    root, (change, message) = written(tmp_path, tensor=2, pipeline=2), DAMAGE[name]
    change(root / "release")
    assert_refused(root, message)


@pytest.mark.parametrize("name", list(CHANGES))
def test_invalid_content(tmp_path: Path, name: str) -> None:
    root, (change, message) = written(tmp_path, tensor=2, pipeline=2), CHANGES[name]
    edit(root, change, first=True)
    assert_refused(root, message)


def assert_refused(root: Path, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        open_megatron(root, NO_TOKENIZER)
    assert str(root) in str(caught.value) and "\n" not in str(caught.value)


def test_heads_that_cannot_be_divided(tmp_path: Path) -> None:
    root = written(tmp_path, tensor=4)
    edit(root, lambda content: content.pop("args"))
    sizes, given = TokenizerConfig(vocab_size=VOCAB), {"num_attention_heads": 2}
    with pytest.raises(
        InputError, match=r"^--num-attention-heads: 2 heads cannot be divided among the 4 tensor-parallel"
    ):
        open_megatron(root, sizes, given)


def test_copies_of_tied_embeddings_must_be_equal(tmp_path: Path) -> None:
    root = written(tmp_path, tensor=2, pipeline=2)
    path = files(root)[3]
    content = torch.load(path, weights_only=False)
    content["model"]["word_embeddings_for_head"]["weight"][5, 5] += 1
    torch.save(content, path)
    found = open_megatron(root, NO_TOKENIZER)
    with pytest.raises(InputError, match=r"differs from the first stage's \(tensor-parallel rank 1\)"):
        weights(found)
    with pytest.raises(InputError):
        write_native(found, tmp_path / "native", lambda size: None)
    assert not (tmp_path / "native").exists()


def test_mismatched_optimizers(tmp_path: Path) -> None:
    root = written(tmp_path)
    (root / "release").rename(root / "iter_0000001")
    (root / "latest_checkpointed_iteration.txt").write_text("1")

    def add(optimizer: Any) -> None:
        schedule = {
            "max_lr": 1.0,
            "min_lr": 0.0,
            "warmup_steps": 0,
            "decay_steps": 9,
            "decay_style": "linear",
        }
        vars_ = {"train_iters": 9, "global_batch_size": 1}
        edit(root, lambda c: c.update(iteration=1, lr_scheduler=schedule, optimizer=optimizer))
        edit(root, lambda c: vars(c["args"]).update(vars_))

    good = optimizer_of([torch.load(files(root)[0], weights_only=False)["model"]], half=False)
    add([{"param_state": 1}])
    with pytest.raises(InputError, match=r"its optimizer state is not that of .*; give --no-load-optim"):
        open_megatron(root, NO_TOKENIZER)
    assert list(open_megatron(root, NO_TOKENIZER, load_optim=False).tensors) == ["model"]
    good["param_groups"][1]["params"].pop()
    add(good)
    with pytest.raises(InputError, match="has 51 tensors exp_avg, but the model has 52 weights"):
        open_megatron(root, NO_TOKENIZER)
    good["param_groups"][1]["params"].insert(0, 0)
    add(good)
    with pytest.raises(
        InputError, match=r"exp_avg of \S+layernorm\S+ in its optimizer has shape \(128, 32\)"
    ):
        open_megatron(root, NO_TOKENIZER)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--load: \S+ holds no Megatron-LM checkpoint"):
        open_megatron(tmp_path, NO_TOKENIZER)
    with pytest.raises(InputError, match=r"^--load: \S+ is not a folder"):
        open_megatron(tmp_path / "absent", NO_TOKENIZER)
    (tmp_path / "x.zip").write_bytes(b"PK")
    with pytest.raises(InputError, match="unzip it"):
        open_megatron(tmp_path / "x.zip", NO_TOKENIZER)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(InputError, match="names a release, but there is no"):
        open_megatron(tmp_path, NO_TOKENIZER)
    (tmp_path / "release").mkdir()
    with pytest.raises(InputError, match="holds no mp_rank_00"):
        open_megatron(tmp_path, NO_TOKENIZER)


def test_vocabulary_size_must_be_known(tmp_path: Path) -> None:
    root = written(tmp_path, tensor=2)
    edit(root, lambda content: delattr(content["args"], "orig_vocab_size"))
    with pytest.raises(InputError, match=r"have 256 rows with padding; give the tokenizer"):
        open_megatron(root, NO_TOKENIZER)
    assert open_megatron(root, TokenizerConfig(vocab_size=VOCAB)).state["vocab_size"] == VOCAB
    found = open_megatron(root, TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1))
    assert found.state["vocab_size"] == VOCAB
    for wrong in (257, 400):
        with pytest.raises(
            InputError, match=f"{wrong} ids, given by --vocab-size, are padded to another number"
        ):
            open_megatron(root, TokenizerConfig(vocab_size=wrong))


@pytest.mark.parametrize(
    ("fields", "sizes", "message"),
    [
        (
            {"position_embedding_type": "rope"},
            (1, 1),
            "--position-embedding-type: .* learned_absolute, not rope",
        ),
        ({"normalization": "RMSNorm"}, (1, 1), "--normalization: .* LayerNorm, not RMSNorm"),
        ({"swiglu": True}, (1, 1), "--swiglu: "),
        ({"untie_embeddings_and_output_weights": True}, (1, 1), "--untie-embeddings-and-output-weights: "),
        (
            {},
            (3, 1),
            "--target-tensor-model-parallel-size: 3 does not divide the model's num_attention_heads, 4",
        ),
        ({}, (1, 3), "--target-pipeline-model-parallel-size: 3 does not divide the model's num_layers, 4"),
    ],
)
def test_unsupported_models(tmp_path: Path, fields: dict, sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        written(tmp_path, "GPT", *sizes, **fields)
    assert not list(tmp_path.iterdir())


def test_failed_export_leaves_no_files(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path)

    def fail() -> Tensor:
        raise InputError("torn")

    checkpoint.tensors["model"].tensors["decoder.final_layernorm.bias"] = ExternalTensor(
        (32,), torch.float32, (fail,)
    )
    (tmp_path / "empty").mkdir()
    for root in (tmp_path / "new", tmp_path / "empty"):
        with pytest.raises(InputError, match="torn"):
            write_megatron(checkpoint, root, lambda size: None, tensor_parallel=1, pipeline_parallel=2)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize(
    "names",
    [
        ["mp_rank_00"],
        ["mp_rank_00_000", "mp_rank_00_001"],
        ["mp_rank_00_000_000", "mp_rank_00_000_001"],
    ],
)
def test_current_files_of_each_rank_are_named(tmp_path: Path, names: list[str]) -> None:
    """--ckpt-format torch has the names of torch_dist in the files of v3.0, and files of expert-parallel ranks."""
    model = {
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight": torch.ones(2, 2),
        "decoder.layers.0.self_attention.linear_qkv._extra_state": io.BytesIO(b"state"),
    }
    args = argparse.Namespace(pipeline_model_parallel_size=1, expert_model_parallel_size=2)
    for name in names:
        folder = tmp_path / "iter_0000001" / name
        folder.mkdir(parents=True)
        torch.save({"args": args, "model": model, "checkpoint_version": 3.0}, folder / "model_optim_rng.pt")
    with pytest.raises(InputError, match="was saved by current Megatron-LM with --ckpt-format torch, which"):
        open_megatron(folder.parent, TokenizerConfig())
