"""Checkpoints: what goes in comes out, and what is not whole is refused."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from models import flat
from safetensors.torch import load_file, save_file

from megatron.checkpoint import storage
from megatron.checkpoint.checkpoint import (
    check_architecture,
    find_checkpoint,
    load_into,
    load_weights,
    save_checkpoint,
)
from megatron.flags import InputError
from megatron.model.config import ModelConfig
from megatron.model.gpt import GPTModel
from megatron.optim.buffer import ParamBuffer
from megatron.optim.config import OptimizerConfig
from megatron.optim.optimizer import Optimizer

CPU = torch.device("cpu")
CONFIG = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, max_position_embeddings=8)


def make(dtype=torch.float32, padded: int = 64, kind: str = "adam", seed: int = 1):
    model = GPTModel(CONFIG, vocab_size=50, padded_vocab_size=padded)
    buffer = flat(model, dtype)
    buffer.initialize(seed)
    return buffer, Optimizer(buffer, OptimizerConfig(lr=1.0, optimizer=kind)), model


def train(buffer: ParamBuffer, optimizer: Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for entry in buffer.entries:
            grad = entry.view(buffer.grads)
            grad.copy_(torch.randn(grad.shape, generator=generator))
        optimizer.step(lr=1e-3, weight_decay=0.1)


def save(root: Path, buffer, optimizer, iteration: int = 3, keep_last: int | None = None, files=()) -> None:
    state = {
        "iteration": iteration,
        "consumed_samples": 4 * iteration,
        "vocab_size": 50,
        "padded_vocab_size": 64,
        "task": "GPT",
        "train_samples": 100,
        "evaluation_due": False,
        "bad_steps": 0,
        "history": [],
        "schedule": {},
        "config": {"model": dataclasses.asdict(CONFIG)},
    }
    save_checkpoint(
        root,
        state,
        mesh=buffer.mesh,
        buffer=buffer,
        optimizer=optimizer,
        tokenizer_files=list(files),
        keep_last=keep_last,
    )


def load(root: Path, buffer, optimizer) -> None:
    load_into(find_checkpoint(str(root), None), buffer, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_everything_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, kind: str) -> None:
    buffer, optimizer, _ = make(dtype, padded=50, kind=kind)
    train(buffer, optimizer, 3)
    save(tmp_path, buffer, optimizer)
    other, other_optimizer, _ = make(dtype, padded=50, kind=kind, seed=2)
    load(tmp_path, other, other_optimizer)
    assert torch.equal(buffer.params, other.params)
    for mine, theirs in (
        (buffer.masters, other.masters),
        *zip(optimizer.moments.values(), other_optimizer.moments.values(), strict=True),
    ):
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
    train(buffer, optimizer, 2)
    train(other, other_optimizer, 2)
    assert all(torch.equal(x, y) for x, y in zip(buffer.masters, other.masters, strict=True))


def test_other_precision_and_padding(tmp_path: Path) -> None:
    """fp32 continues as bf16 and back; the padding of the vocabulary is not part of the model."""
    buffer, optimizer, _ = make(torch.bfloat16)
    train(buffer, optimizer, 3)
    save(tmp_path, buffer, optimizer)
    other, other_optimizer, _ = make(torch.float32, padded=50)
    load(tmp_path, other, other_optimizer)
    for kind, a, b in (
        ("master", buffer.masters, other.masters),
        *((name, pieces, other_optimizer.moments[name]) for name, pieces in optimizer.moments.items()),
    ):
        for (entry, tensor), (_, expected) in zip(other.named(b), buffer.named(a), strict=True):
            assert torch.equal(tensor, expected[: len(tensor)]), (kind, entry.name)
    save(tmp_path, other, other_optimizer, iteration=4)
    again, again_optimizer, _ = make(torch.bfloat16)
    load(tmp_path, again, again_optimizer)
    for (entry, tensor), (_, expected) in zip(
        again.named(again.masters), buffer.named(buffer.masters), strict=True
    ):
        rows = 50 if "word_embeddings" in entry.name else len(tensor)
        assert torch.equal(tensor[:rows], expected[:rows])


def test_files_are_plain(tmp_path: Path) -> None:
    buffer, optimizer, model = make()
    vocab = tmp_path / "vocab.json"
    vocab.write_text("{}")
    save(tmp_path / "run", buffer, optimizer, files=[vocab])
    folder = tmp_path / "run" / "iter_0000003"
    names = sorted(str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*") if p.is_file())
    assert names == [
        "iter_0000003/model.safetensors",
        "iter_0000003/optimizer.safetensors",
        "iter_0000003/state.json",
        "iter_0000003/tokenizer/vocab.json",
        "latest_checkpointed_iteration.txt",
    ]
    assert (tmp_path / "run" / storage.TRACKER).read_text() == "3"
    assert set(load_file(folder / "model.safetensors")) == {n for n, _ in model.named_parameters()}
    other = make(seed=2)[2]
    load_weights(find_checkpoint(str(tmp_path / "run"), None), other)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(
            a[:50] if "word_embeddings" in name else a, b[: 50 if "word_embeddings" in name else None]
        )


def test_keep_last(tmp_path: Path) -> None:
    buffer, optimizer, _ = make()
    for iteration in (1, 2, 30):
        save(tmp_path, buffer, optimizer, iteration, keep_last=2)
    assert storage.iterations(tmp_path) == [2, 30]
    # A run that was taken back to an earlier checkpoint deletes neither what it saves nor what it may regret.
    storage.replace_text(tmp_path / storage.TRACKER, "2")
    for iteration in (3, 4):
        save(tmp_path, buffer, optimizer, iteration, keep_last=1)
        assert storage.newest_iteration(tmp_path) == iteration
        assert storage.iterations(tmp_path) == [iteration, 30]


def test_a_lost_tracker_does_not_start_from_the_beginning(tmp_path: Path) -> None:
    save(tmp_path, *make()[:2])
    (tmp_path / storage.TRACKER).unlink()
    with pytest.raises(InputError, match="iter_0000003, but no latest_checkpointed_iteration"):
        find_checkpoint(str(tmp_path), str(tmp_path))


def test_an_interrupted_save_leaves_the_last_one_whole(tmp_path: Path, monkeypatch) -> None:
    buffer, optimizer, _ = make()
    save(tmp_path, buffer, optimizer, 1)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    class Killed(BaseException):
        pass

    # Whatever call of the operating system it is that the process does not survive.
    for name in ("sync", "replace_text"):
        for survives in range(5):
            left = [survives]
            real = getattr(storage, name)

            def dying(*args, real=real, left=left):
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return real(*args)

            monkeypatch.setattr(storage, name, dying)
            try:
                save(tmp_path, buffer, optimizer, 2)
            except Killed:
                found = find_checkpoint(str(tmp_path), None)
                assert found.iteration in (1, 2)
                load_into(found, *make()[:2])
            monkeypatch.setattr(storage, name, real)
    assert all(path.read_bytes() == data for path, data in before.items() if path.name != storage.TRACKER)
    save(tmp_path, buffer, optimizer, 2)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_where_a_run_starts(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (empty, tmp_path / "absent"):
        assert find_checkpoint(str(folder), str(folder)) is None
        assert find_checkpoint(f"{tmp_path}/empty/../{folder.name}", str(folder)) is None
        with pytest.raises(InputError, match="--load"):
            find_checkpoint(str(folder), None)
        with pytest.raises(InputError, match="--load"):
            find_checkpoint(str(folder), str(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f.parent / storage.TRACKER).write_text("x"), "not the number"),
        (lambda f: (f.parent / storage.TRACKER).write_text("9"), "iteration 9"),
        (lambda f: (f / "state.json").unlink(), "state.json"),
        (lambda f: (f / "state.json").write_text("{"), "state.json"),
        (lambda f: (f / "state.json").write_text("[" * 100000), "state.json"),
        (lambda f: (f / "state.json").write_text("{}"), "state.json"),
        (lambda f: edit(f, "version", 99), "version 99"),
        (lambda f: edit(f, "iteration", "three"), "'iteration'"),
        (lambda f: edit(f, "iteration", 4), "of iteration 4, but lies in iter_0000003"),
        (lambda f: edit(f, "consumed_samples", -8), "'consumed_samples'"),
        (lambda f: edit(f, "consumed_samples", True), "'consumed_samples'"),
        (lambda f: edit(f, "history", [1]), "'history'"),
        (lambda f: edit(f, "history", [{"lm loss": "x"}]), "'history'"),
        (lambda f: edit(f, "schedule", []), "'schedule'"),
        (lambda f: edit(f, "config", {"model": 3}), "'config'"),
        (lambda f: edit(f, "optimizer_steps", "x"), "'optimizer_steps'"),
        (lambda f: edit(f, "padded_vocab_size", None), "'padded_vocab_size'"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
        (lambda f: (f / "optimizer.safetensors").unlink(), "optimizer.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"junk"), "model.safetensors"),
        (lambda f: edit_tensors(f, lambda t: t.pop("decoder.final_layernorm.bias")), "final_layernorm.bias"),
        (lambda f: edit_tensors(f, lambda t: t.update(extra=torch.ones(1))), "extra"),
        (
            lambda f: edit_tensors(f, lambda t: t.update({"decoder.final_layernorm.bias": torch.ones(3)})),
            "shape",
        ),
    ],
)
def test_what_is_not_whole_is_refused(tmp_path: Path, change, words: str) -> None:
    buffer, optimizer, _ = make()
    save(tmp_path, buffer, optimizer)
    change(tmp_path / "iter_0000003")
    with pytest.raises(InputError, match=words) as caught:
        load(tmp_path, *make()[:2])
    assert "\n" not in str(caught.value)


def edit(folder: Path, name: str, value: object) -> None:
    path = folder / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_torn_files_never_give_a_traceback(tmp_path: Path) -> None:
    buffer, optimizer, _ = make()
    save(tmp_path / "good", buffer, optimizer)
    rng = random.Random(0)
    for i in range(60):
        folder = tmp_path / f"bad{i}"
        shutil.copytree(tmp_path / "good", folder)
        path = rng.choice([p for p in sorted(folder.rglob("*")) if p.is_file()])
        data = bytearray(path.read_bytes())
        if rng.random() < 0.5:
            data = data[: rng.randrange(len(data))]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            load(folder, *make()[:2])
        except InputError as error:
            assert "\n" not in str(error)


def test_no_optimizer_state(tmp_path: Path) -> None:
    save(tmp_path, make()[0], None)
    with pytest.raises(InputError, match="--no-load-optim"):
        load(tmp_path, *make()[:2])
    load(tmp_path, make()[0], None)


def test_another_architecture_names_the_flags(tmp_path: Path) -> None:
    save(tmp_path, *make()[:2])
    other = dataclasses.replace(CONFIG, num_layers=2, ffn_hidden_size=32, hidden_dropout=0.5)
    with pytest.raises(
        InputError, match=r"--num-layers \(checkpoint: 1, given: 2\).*--ffn-hidden-size"
    ) as caught:
        check_architecture(find_checkpoint(str(tmp_path), None), other)
    assert "dropout" not in str(caught.value)
