"""Megatron-LM checkpoints: files that NVIDIA's own code wrote, and files written here in the same format."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia import (
    HEADS,
    NO_TOKENIZER,
    RUN,
    SHAPE,
    VOCAB,
    WIDTH,
    assert_equal,
    checkpoint_of,
    edit,
    files,
    optimizer_of,
    run_data,
    weights,
    written,
)
from torch import Tensor

from megatron.checkpoint.checkpoint import model_config
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.tokenizer import saved_tokenizer
from megatron.errors import InputError
from megatron.interop.convert import write_native
from megatron.interop.external import ExternalTensor, ExternalTensors
from megatron.interop.nvidia.read import open_megatron
from megatron.interop.nvidia.write import write_megatron
from megatron.model.config import ModelConfig
from megatron.tokenizer.config import TokenizerConfig

# --- checkpoints written by NVIDIA's own code


@pytest.mark.parametrize("written_by", ["init_tp2", "init_pp2"])
def test_layouts_hold_the_same_model(shared: Path, written_by: str) -> None:
    vectors = shared / "vectors" / "gpt-v2.5"
    expected = weights(open_megatron(vectors / "init_tp1", NO_TOKENIZER))
    assert_equal(weights(open_megatron(vectors / written_by, NO_TOKENIZER)), expected)


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline", "vocab_size"),
    [
        ("gpt-v2.5/init_tp1", 1, 1, 5000),
        ("gpt-v2.5/init_tp2", 2, 1, 5000),
        ("gpt-v2.5/init_pp2", 1, 2, 5000),
        ("gpt-v2.5/after6_pp2", 1, 2, 5000),
        ("bert-v2.5/after6_tp1", 1, 1, 30524),
    ],
)
def test_export_equals_nvidia_files(
    shared: Path, tmp_path: Path, name: str, tensor: int, pipeline: int, vocab_size: int
) -> None:
    """Convert to native and back: the same nested dicts in the same order, and every tensor bit for bit."""
    theirs = shared / "vectors" / name
    checkpoint = open_megatron(theirs, TokenizerConfig(vocab_size=vocab_size))
    write_native(checkpoint, tmp_path / "native", lambda size: None)
    native = find_checkpoint(str(tmp_path / "native"), None)
    sizes = {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
    write_megatron(native, tmp_path / "megatron", lambda size: None, **sizes)
    assert [path.parent.name for path in files(tmp_path / "megatron")] == [
        p.parent.name for p in files(theirs)
    ]
    for ours, expected in zip(files(tmp_path / "megatron"), files(theirs), strict=True):
        ours, expected = (torch.load(path, weights_only=False) for path in (ours, expected))
        assert_same(ours["model"], expected["model"])
        assert ours["checkpoint_version"] == 3.0
        their_args = vars(expected["args"])
        assert their_args.items() >= {
            (name, value)
            for name, value in vars(ours["args"]).items()
            if name in their_args and not name.startswith(("consumed", "tokenizer", "rank"))
        }


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, Tensor):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
        return
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        assert_same(ours[key], value)


def test_resume_from_nvidia_optimizer(pretrain: Callable, shared: Path, tmp_path: Path) -> None:
    """Three iterations after six of Megatron-LM equal those after six here, as does the state after six."""
    vectors = shared / "vectors" / "gpt-v2.5"
    for name in ("init_tp1", "after6_tp1"):
        checkpoint = open_megatron(vectors / name, TokenizerConfig(vocab_size=5000))
        write_native(checkpoint, tmp_path / name, lambda size: None)
    flags = [*RUN, *run_data(shared, tmp_path / "cache")]
    pretrain(*flags, "--load", tmp_path / "init_tp1", "--finetune", "--save", tmp_path / "ours")

    ours, theirs = (find_checkpoint(str(tmp_path / name), None) for name in ("ours", "after6_tp1"))
    for name in (
        "iteration",
        "consumed_samples",
        "train_samples",
        "optimizer_steps",
        "vocab_size",
        "schedule",
    ):
        assert ours.state[name] == theirs.state[name], name
    found, expected = weights(ours, "optimizer"), weights(theirs, "optimizer")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if not name.endswith("linear_qkv.bias"):  # the gradient of the keys' biases is a rounding error
            assert (found[name] - tensor).norm() <= 1e-5 * tensor.norm(), name

    records = {}
    for name in ("ours", "after6_tp1"):
        metrics = tmp_path / f"{name}.jsonl"
        pretrain(*flags, "--train-iters", 9, "--load", tmp_path / name, "--metrics-path", metrics)
        records[name] = [json.loads(line) for line in metrics.read_text().splitlines()]
    for found, expected in zip(records["ours"], records["after6_tp1"], strict=True):
        for key in found.keys() & {"iteration", "lm loss", "grad norm", "learning rate", "lm loss test"}:
            assert found[key] == pytest.approx(expected[key], rel=1e-5), key
    assert [record["iteration"] for record in records["ours"]][:3] == [7, 8, 9]


# --- other layouts and versions


@pytest.mark.parametrize("task", ["GPT", "BERT", "BERT --bert-no-binary-head"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_round_trip(tmp_path: Path, task: str, tensor: int, pipeline: int) -> None:
    root = written(tmp_path, task, tensor, pipeline)
    found = open_megatron(root, NO_TOKENIZER)
    assert found.state["task"] == task
    assert model_config(found) == ModelConfig(**SHAPE, mask_padded_vocab=False)
    assert_equal(weights(found), weights(checkpoint_of(tmp_path, task)))
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "release"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    root = written(tmp_path)

    def cast(content: dict[str, Any]) -> None:
        content["model"] = map_tensors(content["model"], lambda key, x: x.to(dtype))

    edit(root, cast)
    found = open_megatron(root, NO_TOKENIZER)
    assert_equal(
        weights(found), {n: x.to(dtype).float() for n, x in weights(checkpoint_of(tmp_path)).items()}
    )
    write_native(found, tmp_path / "native", lambda size: None)
    index = find_checkpoint(str(tmp_path / "native"), None).manifest.tensors["model"]
    assert {tensor["dtype"] for tensor in index.values()} == {
        "bfloat16" if dtype == torch.bfloat16 else "float32"
    }
    assert any("fp16" in note for note in found.notes) == (dtype == torch.float16)


def test_export_in_half_precision(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path)
    values = {name: x.bfloat16() for name, x in weights(checkpoint).items()}
    sources = {name: ExternalTensor(tuple(x.shape), x.dtype, (lambda x=x: x,)) for name, x in values.items()}
    checkpoint = dataclasses.replace(checkpoint, tensors={"model": ExternalTensors(tmp_path, sources)})
    write_megatron(checkpoint, tmp_path / "x", lambda size: None, tensor_parallel=2, pipeline_parallel=2)
    content = torch.load(files(tmp_path / "x")[0], weights_only=False)
    assert content["args"].bf16 and content["args"].params_dtype == torch.bfloat16
    found = open_megatron(tmp_path / "x", NO_TOKENIZER)
    assert found.state["config"]["training"]["bf16"]
    assert_equal(weights(found), {name: x.float() for name, x in values.items()})


def map_tensors(nested: dict[str, Any], change: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
    return {k: map_tensors(v, change) if isinstance(v, dict) else change(k, v) for k, v in nested.items()}


@pytest.mark.parametrize("version", [None, 0, 1.0, 2.0])
@pytest.mark.parametrize("tensor", [1, 2])
def test_older_versions(tmp_path: Path, version: float | None, tensor: int) -> None:
    """Older order of attention's rows, older names, and no flags, as in the models that NVIDIA released."""
    root = written(tmp_path, tensor=tensor)
    heads = HEADS // tensor

    def older(key: str, x: Tensor) -> Tensor:
        if "query_key_value" not in key or version == 2.0:
            return x
        out = torch.empty_like(x)
        for head in range(heads):
            for part in range(3):
                for channel in range(WIDTH):
                    row = (head * 3 + part) * WIDTH + channel
                    if version == 1.0:
                        out[(head * WIDTH + channel) * 3 + part] = x[row]
                    else:
                        out[(part * heads + head) * WIDTH + channel] = x[row]
        return out

    def rewrite(content: dict[str, Any]) -> None:
        language_model = map_tensors(content["model"]["language_model"], older)
        encoder = {
            k.replace("self_attention", "attention"): v for k, v in language_model.pop("encoder").items()
        }
        content.clear()
        content |= {"iteration": 7, "model": {"language_model": language_model | {"transformer": encoder}}}
        if version is not None:
            content["checkpoint_version"] = version

    edit(root, rewrite)
    with pytest.raises(InputError, match=r"^--num-attention-heads is required: \S+ lacks it"):
        open_megatron(root, NO_TOKENIZER)
    found = open_megatron(root, TokenizerConfig(vocab_size=VOCAB), {"num_attention_heads": HEADS})
    assert_equal(weights(found), weights(checkpoint_of(tmp_path)))
    assert model_config(found).tanh_gelu and "the tanh form of GELU is assumed" in found.notes[0]
    assert found.iteration == 0


def interleave(root: Path, stages: int, chunks: int) -> None:
    """Rewrite a checkpoint of one process as one of `stages` stages with `chunks` model chunks each."""
    (path,) = files(root)
    content = torch.load(path, weights_only=False)
    model = content.pop("model")
    encoder = model["language_model"]["encoder"]
    each = SHAPE["num_layers"] // (stages * chunks)
    content["args"].pipeline_model_parallel_size = stages
    for stage in range(stages):
        parts = {}
        for chunk in range(chunks):
            begin = chunk * (SHAPE["num_layers"] // chunks) + stage * each
            layers = {}
            for key, value in encoder.items():
                if key.startswith("layers."):
                    _, number, rest = key.split(".", 2)
                    if begin <= int(number) < begin + each:
                        layers[f"layers.{int(number) - begin}.{rest}"] = value
            parts[f"model{chunk}"] = {"language_model": {"encoder": layers}}
        if stage == 0:
            embedding = model["language_model"]["embedding"]
            parts["model0"]["language_model"] = {"embedding": embedding, **parts["model0"]["language_model"]}
        if stage == stages - 1:
            last = parts[f"model{chunks - 1}"]
            last["language_model"]["encoder"] |= {k: v for k, v in encoder.items() if k.startswith("final")}
            last["word_embeddings_for_head"] = dict(model["language_model"]["embedding"]["word_embeddings"])
        folder = path.parent.parent / f"mp_rank_00_{stage:03d}"
        folder.mkdir()
        torch.save(content | parts, folder / path.name)
    shutil.rmtree(path.parent)


def test_interleaved_stages(tmp_path: Path) -> None:
    root = written(tmp_path)
    interleave(root, stages=2, chunks=2)
    assert_equal(weights(open_megatron(root, NO_TOKENIZER)), weights(checkpoint_of(tmp_path)))


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "half"])
@pytest.mark.parametrize(
    ("task", "tensor", "pipeline"), [("GPT", 2, 2), ("BERT", 2, 2), ("BERT", 1, 1), ("GPT", 1, "interleaved")]
)
def test_optimizer(tmp_path: Path, task: str, tensor: int, pipeline: Any, half: bool) -> None:
    root = written(tmp_path, task, tensor, 1 if pipeline == "interleaved" else pipeline)
    if pipeline == "interleaved":
        interleave(root, stages=2, chunks=2)

    def train(content: dict[str, Any]) -> None:
        models = [value for key, value in content.items() if key.startswith("model")]
        content["optimizer"] = optimizer_of(models, half)
        content["iteration"] = 12
        flags = {"train_iters": 20, "global_batch_size": 8, "consumed_train_samples": 96, "weight_decay": 0.1}
        flags |= {
            "train_samples": None,
            "seed": 7,
            "data_path": ["x"],
            "split": "1,0,0",
            "dataloader_type": "single",
        }
        vars(content["args"]).update(flags)
        schedule = {"max_lr": 1e-3, "min_lr": 1e-5, "warmup_steps": 8, "decay_steps": 160, "num_steps": 96}
        content["lr_scheduler"] = schedule | {"decay_style": "linear"}

    edit(root, train)
    assert list(open_megatron(root, NO_TOKENIZER).tensors) == ["model"]  # a release holds only the model
    (root / "release").rename(root / "iter_0000012")
    (root / "latest_checkpointed_iteration.txt").write_text("12")
    found = open_megatron(root, NO_TOKENIZER)
    model = weights(found)
    scales = {"exp_avg": 2, "exp_avg_sq": 3} | ({"master": 4} if half else {})
    expected = {f"{kind}/{name}": scale * x for kind, scale in scales.items() for name, x in model.items()}
    assert_equal(weights(found, "optimizer"), expected)
    expected_state = {"iteration": 12, "consumed_samples": 96, "train_samples": 160, "optimizer_steps": 12}
    assert found.state.items() >= expected_state.items()
    assert found.state["schedule"]["start_weight_decay"] == 0.1
    without = open_megatron(root, NO_TOKENIZER, load_optim=False)
    assert list(without.tensors) == ["model"] and without.state["optimizer_steps"] is None
    write_native(found, tmp_path / "native", lambda size: None)
    assert_equal(weights(find_checkpoint(str(tmp_path / "native"), None), "optimizer"), expected)


V1_SCHEDULE = {"start_lr": 1e-3, "min_lr": 1e-5, "warmup_iter": 1, "end_iter": 20, "num_iters": 12}


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        ({"batch_size": 8}, V1_SCHEDULE),
        ({"global_batch_size": 8}, V1_SCHEDULE),
        ({"batch_size": 8}, {"max_lr": 1e-3}),
    ],
    ids=["v1", "old schedule", "no global batch"],
)
def test_runs_that_count_iterations(tmp_path: Path, flags: dict[str, int], schedule: dict[str, Any]) -> None:
    """v1's flags and schedule lack the consumed samples, so only the weights are loaded."""
    root = written(tmp_path, tensor=2)

    def older(content: dict[str, Any]) -> None:
        args = vars(content["args"])
        args["model_parallel_size"] = args.pop("tensor_model_parallel_size")
        del args["pipeline_model_parallel_size"]
        args |= flags
        del content["iteration"]
        content |= {"total_iters": 12, "optimizer": {"state": {}}, "lr_scheduler": schedule}

    edit(root, older)
    (root / "release").rename(root / "iter_0000012")
    (root / "latest_checkpointed_iteration.txt").write_text("12")
    for load_optim in (True, False):
        found = open_megatron(root, NO_TOKENIZER, load_optim=load_optim)
        assert list(found.tensors) == ["model"] and found.iteration == 0 and not found.state["schedule"]
        assert "counts iterations in place of samples, as v1 did" in found.notes[0]
    assert_equal(weights(found), weights(checkpoint_of(tmp_path)))


@pytest.mark.parametrize("tensor", [1, 2])
def test_distributed_optimizer_folders_are_not_stages(tmp_path: Path, tensor: int) -> None:
    root = written(tmp_path, tensor=tensor)
    for path in files(root):
        path.rename(path.with_name("model_rng.pt"))
        for replica in range(2):
            folder = path.parent.with_name(f"{path.parent.name}_{replica:03d}")
            folder.mkdir()
            torch.save({"optimizer": {}}, folder / "optim.pt")
    found = open_megatron(root, NO_TOKENIZER)
    assert_equal(weights(found), weights(checkpoint_of(tmp_path)))
    assert "has a distributed optimizer's state" in found.notes[0]
    (root / "release" / "mp_rank_00" / "model_rng.pt").unlink()
    with pytest.raises(InputError, match=r"mp_rank_00/model_optim_rng\.pt"):
        open_megatron(root, NO_TOKENIZER)


@pytest.mark.parametrize("name", ["make_vocab_size_divisible_by", "seq_length", "tensor_model_parallel_size"])
def test_none_flags_are_ignored(tmp_path: Path, name: str) -> None:
    """A flag with the value None counts as absent."""
    root = written(tmp_path)
    edit(root, lambda content: vars(content["args"]).update({name: None}))
    assert_equal(weights(open_megatron(root, NO_TOKENIZER)), weights(checkpoint_of(tmp_path)))


def test_flags_are_a_plain_namespace(tmp_path: Path) -> None:
    """Other programs that read these files expect argparse.Namespace."""
    training = {"attention_dropout": 0.2, "hidden_dropout": 0.3, "init_method_std": 0.01}
    root = written(tmp_path, **training)
    args = torch.load(files(root)[0], weights_only=False)["args"]
    found = model_config(open_megatron(root, NO_TOKENIZER))
    assert vars(found).items() >= training.items()
    assert type(args) is argparse.Namespace
    assert (args.attention_dropout, args.hidden_dropout, args.init_method_std) == (0.2, 0.3, 0.01)
    assert (args.padded_vocab_size, args.orig_vocab_size, args.params_dtype) == (128, VOCAB, torch.float32)


def test_tokenizer_without_files_is_kept(tmp_path: Path) -> None:
    tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1)
    write_native(open_megatron(written(tmp_path), tokenizer), tmp_path / "native", lambda size: None)
    assert saved_tokenizer(find_checkpoint(str(tmp_path / "native"), None)) == tokenizer
