"""Save and load checkpoints, and refuse incomplete or damaged ones."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import random
import re
import shutil
import stat
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIG, SCHEDULE, edit_state, make, save, sign
from models import CPU
from safetensors.torch import load_file, save_file

from megatron.checkpoint import save as save_module
from megatron.checkpoint import storage
from megatron.checkpoint.checkpoint import check_architecture, differences
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.load import load_into
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.pieces import piece_key, write_pieces
from megatron.checkpoint.tensor_file import TensorFile
from megatron.errors import InputError, TrainingFault
from megatron.inference.load import load_weights
from megatron.model.config import ModelConfig
from megatron.optim.buffer import ParamBuffer
from megatron.optim.optimizer import Optimizer
from megatron.parallel.slices import Block, GlobalSlice
from megatron.recipes.config import LossScaleConfig
from megatron.recipes.loss_scale import LossScaler
from megatron.recipes.retention import discard
from megatron.recipes.spikes import SpikeRule
from megatron.training.report import History
from megatron.training.state import TrainState


def train(buffer: ParamBuffer, optimizer: Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for entry in buffer.flat_params:
            grad = entry.view(buffer.grads)
            grad.copy_(torch.randn(grad.shape, generator=generator))
        optimizer.step(lr=1e-3, weight_decay=0.1)


def load(root: Path, buffer, optimizer) -> None:
    checkpoint = find_checkpoint(str(root), None)
    load_into(checkpoint, buffer, optimizer)
    if optimizer is None:
        return
    state = TrainState(history=History(("lm loss",), []), schedule=SCHEDULE, train_samples=100)
    state.load_state_dict(checkpoint.state, optimizer)


BIAS = "decoder.final_layernorm.bias"
WEIGHT = "decoder.layers.0.mlp.linear_fc1.weight"  # [64, 16]


def piece(rows: tuple[int, int], columns: tuple[int, int], key: str = WEIGHT) -> list:
    return ["model.safetensors", key, list(rows), list(columns)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_round_trip_is_bit_exact(tmp_path: Path, dtype: torch.dtype, kind: str) -> None:
    buffer, optimizer, _ = make(dtype, padded=50, kind=kind)
    train(buffer, optimizer, 3)
    save(tmp_path, buffer, optimizer)
    other, other_optimizer, _ = make(dtype, padded=50, kind=kind, seed=2)
    load(tmp_path, other, other_optimizer)
    assert torch.equal(buffer.params, other.params)
    for mine, theirs in (
        (buffer.masters, other.masters),
        *zip(optimizer.state.values(), other_optimizer.state.values(), strict=True),
    ):
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
    train(buffer, optimizer, 2)
    train(other, other_optimizer, 2)
    assert all(torch.equal(x, y) for x, y in zip(buffer.masters, other.masters, strict=True))


def test_bf16_optimizer_states_convert_to_and_from_fp32(tmp_path: Path) -> None:
    half = {"bf16_optimizer_states": True, "padded": 50}
    buffer, optimizer, _ = make(torch.bfloat16, **half)
    train(buffer, optimizer, 3)
    save(tmp_path, buffer, optimizer)
    index = find_checkpoint(str(tmp_path), None).tensors["optimizer"].index
    kinds = {(name.split("/")[0], tensor["dtype"]) for name, tensor in index.items()}
    assert kinds == {("exp_avg", "bfloat16"), ("exp_avg_sq", "bfloat16"), ("master", "float32")}
    same, same_optimizer, _ = make(torch.bfloat16, seed=2, **half)
    wide, wide_optimizer, _ = make(torch.bfloat16, seed=2, padded=50)
    for other, other_optimizer in ((same, same_optimizer), (wide, wide_optimizer)):
        load(tmp_path, other, other_optimizer)
        for name, pieces in optimizer.state.items():
            theirs = other_optimizer.state[name]
            assert all(torch.equal(x.float(), y.float()) for x, y in zip(pieces, theirs, strict=True))
    train(buffer, optimizer, 2)
    train(same, same_optimizer, 2)
    assert all(torch.equal(x, y) for x, y in zip(buffer.masters, same.masters, strict=True))
    save(tmp_path, wide, wide_optimizer, iteration=4)
    load(tmp_path, same, same_optimizer)  # rounds fp32 states to bf16
    train(same, same_optimizer, 1)
    assert all(master.isfinite().all() for master in same.masters)


def test_other_precision_and_padding(tmp_path: Path) -> None:
    """A checkpoint loads in another precision and with another padding of the vocabulary."""
    buffer, optimizer, _ = make(torch.bfloat16)
    train(buffer, optimizer, 3)
    save(tmp_path, buffer, optimizer)
    other, other_optimizer, _ = make(torch.float32, padded=50)
    load(tmp_path, other, other_optimizer)
    for kind, a, b in (
        ("master", buffer.masters, other.masters),
        *((name, pieces, other_optimizer.state[name]) for name, pieces in optimizer.state.items()),
    ):
        for (entry, tensor, _), (_, expected, _) in zip(other.parts(b), buffer.parts(a), strict=True):
            assert torch.equal(tensor, expected[: len(tensor)]), (kind, entry.name)
    save(tmp_path, other, other_optimizer, iteration=4)
    again, again_optimizer, _ = make(torch.bfloat16)
    load(tmp_path, again, again_optimizer)
    for (entry, tensor, _), (_, expected, _) in zip(
        again.parts(again.masters), buffer.parts(buffer.masters), strict=True
    ):
        num_valid = 50 * 16 if "word_embeddings" in entry.name else len(tensor)
        assert torch.equal(tensor[:num_valid], expected[:num_valid])


def test_files_of_a_checkpoint(tmp_path: Path) -> None:
    buffer, optimizer, model = make()
    vocab = tmp_path / "vocab.json"
    vocab.write_text("{}")
    save(tmp_path / "run", buffer, optimizer, files=[vocab])
    folder = tmp_path / "run" / "iter_0000003"
    names = sorted(str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*") if p.is_file())
    assert names == [
        "iter_0000003/index.json",
        "iter_0000003/model.safetensors",
        "iter_0000003/optimizer.safetensors",
        "iter_0000003/state.json",
        "iter_0000003/tokenizer/vocab.json",
        "latest_checkpointed_iteration.txt",
    ]
    assert (tmp_path / "run" / storage.TRACKER).read_text() == "3"
    assert set(load_file(folder / "model.safetensors")) == {n for n, _ in model.named_parameters()}
    other = make(seed=2)[2]
    load_weights(find_checkpoint(str(tmp_path / "run"), None), other, torch.float32)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(
            a[:50] if "word_embeddings" in name else a, b[: 50 if "word_embeddings" in name else None]
        )


def test_keep_last(tmp_path: Path) -> None:
    buffer, optimizer, _ = make()
    for iteration in (1, 2, 30):
        save(tmp_path, buffer, optimizer, iteration, keep_last=2)
    assert storage.iterations(tmp_path) == [2, 30]
    # After a rollback, --keep-last deletes neither the newest checkpoint nor those of later iterations.
    storage.replace_text(tmp_path / storage.TRACKER, "2")
    for iteration in (3, 4):
        save(tmp_path, buffer, optimizer, iteration, keep_last=1)
        assert storage.newest_iteration(tmp_path) == iteration
        assert storage.iterations(tmp_path) == [iteration, 30]


@pytest.mark.parametrize("tracker", [None, "", "\n"])
def test_run_resumes_without_the_tracker(tmp_path: Path, tracker: str | None) -> None:
    """A run killed between its first checkpoint and the tracker resumes from that checkpoint."""
    buffer, optimizer, _ = make()
    save(tmp_path, buffer, optimizer)
    if tracker is None:
        (tmp_path / storage.TRACKER).unlink()
    else:
        (tmp_path / storage.TRACKER).write_text(tracker)
    assert find_checkpoint(str(tmp_path), str(tmp_path)).folder == storage.folder_of(tmp_path, 3)
    with pytest.raises(InputError, match="iter_0000003 but no iteration in latest_checkpointed_iteration"):
        find_checkpoint(str(tmp_path), None)
    (storage.folder_of(tmp_path, 3) / "state.json").write_text("{}")
    with pytest.raises(InputError, match=r"state\.json"):
        find_checkpoint(str(tmp_path), str(tmp_path))


def test_a_flag_that_turns_off_is_shown_as_given() -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 8}
    without = ModelConfig(**sizes, add_bias_linear=False)
    found = differences(without, ModelConfig(**sizes), is_bert=False)
    assert found == [("--disable-bias-linear", True, False)]


def test_without_the_tracker_the_newest_checkpoint_counts(tmp_path: Path) -> None:
    buffer, optimizer, _ = make()
    for iteration in (3, 5):
        save(tmp_path, buffer, optimizer, iteration)
    (tmp_path / storage.TRACKER).unlink()
    assert find_checkpoint(str(tmp_path), str(tmp_path)).folder == storage.folder_of(tmp_path, 5)


def test_a_discarded_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    buffer, optimizer, _ = make()
    save(tmp_path, buffer, optimizer, 1)
    discard(storage.folder_of(tmp_path, 1))
    assert [path.name for path in tmp_path.iterdir()] == [storage.TRACKER]


def test_interrupted_save_keeps_the_previous_checkpoint(tmp_path: Path, monkeypatch) -> None:
    buffer, optimizer, _ = make()
    save(tmp_path, buffer, optimizer, 1)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    class Killed(BaseException):
        pass

    # The process may die in any call that syncs or renames.
    for name in ("sync", "replace_text"):
        for num_calls in range(5):
            calls_left = [num_calls]
            original = getattr(storage, name)

            def fail(*args, original=original, calls_left=calls_left):
                if calls_left[0] == 0:
                    raise Killed
                calls_left[0] -= 1
                return original(*args)

            monkeypatch.setattr(storage, name, fail)
            try:
                save(tmp_path, buffer, optimizer, 2)
            except Killed:
                found = find_checkpoint(str(tmp_path), None)
                assert found.iteration in (1, 2)
                load_into(found, *make()[:2])
            monkeypatch.setattr(storage, name, original)
    assert all(path.read_bytes() == data for path, data in before.items() if path.name != storage.TRACKER)
    save(tmp_path, buffer, optimizer, 2)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_load_from_an_empty_or_missing_folder(tmp_path: Path) -> None:
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
    ("change", "message"),
    [
        (lambda f: (f.parent / storage.TRACKER).write_text("x"), "is not an iteration"),
        (lambda f: (f.parent / storage.TRACKER).write_text("9"), "iteration 9"),
        (lambda f: (f / "state.json").unlink(), "state.json: is missing"),
        (lambda f: (f / "state.json").write_text("{"), "state.json: has 1 bytes, but"),
        (lambda f: write(f, "state.json", "{"), "state.json: is not JSON"),
        (lambda f: write(f, "state.json", "[" * 1000000), "state.json: is not JSON"),
        (lambda f: write(f, "state.json", "{}"), "state.json: is not the state"),
        (lambda f: edit(f, "version", 99), "version 99"),
        (lambda f: edit(f, "iteration", "three"), "'iteration'"),
        (lambda f: edit(f, "iteration", 4), "of iteration 4, but is in iter_0000003"),
        (lambda f: edit(f, "consumed_samples", -8), "'consumed_samples'"),
        (lambda f: edit(f, "consumed_samples", True), "'consumed_samples'"),
        (lambda f: edit(f, "history", [1]), "'history'"),
        (lambda f: edit(f, "history", [{"lm loss": "x"}]), "'history'"),
        (lambda f: edit(f, "history", [{"lm loss": 1.0}]), "'history'"),
        (lambda f: edit(f, "schedule", []), "'schedule'"),
        (lambda f: edit(f, "schedule", dataclasses.asdict(SCHEDULE) | {"max_lr": "x"}), "'schedule'"),
        (lambda f: edit(f, "schedule", {"max_lr": 1.0}), "'schedule'"),
        (lambda f: edit(f, "evaluation_due", 1), "'evaluation_due'"),
        (lambda f: edit(f, "bad_steps", -1), "'bad_steps'"),
        (lambda f: edit(f, "config", {"model": 3}), "'config'"),
        (lambda f: edit(f, "optimizer_steps", "x"), "'optimizer_steps'"),
        (lambda f: edit(f, "padded_vocab_size", None), "'padded_vocab_size'"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: is missing"),
        (lambda f: (f / "optimizer.safetensors").unlink(), "optimizer.safetensors: is missing"),
        (lambda f: replace_by_link(f / "model.safetensors"), "model.safetensors: is a symbolic link"),
        (lambda f: link_to_dev_zero(f / "index.json"), "index.json: is a symbolic link"),
        (lambda f: link_to_dev_zero(f.parent / storage.TRACKER), "is a symbolic link"),
        (lambda f: replace_by_pipe(f / "index.json"), "index.json: is not a file"),
        (lambda f: edit(f, "operations", "plain"), "'operations'"),
        (lambda f: edit(f, "spike_window", [[10**400] * 128] * 2), "'spike_window'"),
        (lambda f: edit(f, "loss_scaler", {"scale": 0.0, "clean": 0, "patience": 2}), "'loss_scaler'"),
        (lambda f: write(f, "model.safetensors", "junk"), "model.safetensors: cannot be read"),
        (lambda f: edit_tensors(f, lambda t: t.pop(BIAS)), "final_layernorm.bias cannot be read"),
        (lambda f: edit_tensors(f, lambda t: t.update({BIAS: torch.ones(3)})), "smaller than in the index"),
        (lambda f: (f / "index.json").unlink(), "index.json: is missing"),
        (lambda f: (f / "index.json").write_text("[" * 1000000), "index.json: is damaged"),
        (lambda f: (f / "index.json").write_text("{}"), "index.json: is damaged"),
        (
            lambda f: edit_index(f, lambda m: m.tensors["model"][BIAS].update(shape=[16] + [1] * 8)),
            "index.json: is damaged",  # a tensor has at most eight dimensions
        ),
        (lambda f: edit_index(f, lambda m: m.tensors["model"].pop(BIAS)), "lacks the tensor"),
        (lambda f: edit_index(f, lambda m: m.tensors.pop("model")), "lists no state.json, or no tensors"),
        (lambda f: edit_index(f, lambda m: m.files.pop("state.json")), "lists no state.json, or no tensors"),
        (
            lambda f: edit_index(f, lambda m: m.tensors["model"].update(extra=m.tensors["model"][BIAS])),
            "1 tensor.s. that the model lacks: extra",
        ),
        (
            lambda f: edit_index(
                f, lambda m: m.tensors["model"][BIAS].update(shape=[3], pieces=[piece((0, 3), (0, 1), BIAS)])
            ),
            r"has shape \(3,\), but the model has \(16,\)",
        ),
        *(
            (
                lambda f, p=pieces: edit_index(
                    f, lambda m: m.tensors["model"][WEIGHT].update(pieces=[piece(*block) for block in p])
                ),
                f"index.json: is damaged .the pieces of {WEIGHT} overlap or leave elements out",
            )
            for pieces in (
                [],
                [((0, 64), (0, 16)), ((0, 64), (0, 16))],
                [((0, 64), (0, 16)), ((3, 3), (0, 16))],
                [((0, 40), (0, 16)), ((24, 64), (0, 16))],  # a middle that two pieces cover
                [((0, 40), (0, 16)), ((41, 64), (0, 16))],
                [((0, 32), (0, 16))] * 2,  # as many elements as the tensor
                [((0, 32), (0, 8)), ((0, 32), (8, 16)), ((16, 48), (0, 8)), ((32, 64), (8, 16))],
                [((0, 64), (0, 17))],
                [((0, 65), (0, 16))],
            )
        ),
        (
            lambda f: edit_index(f, lambda m: m.tensors.update(other=m.tensors["model"])),
            "is in the unknown file 'model.safetensors'",
        ),
        (
            lambda f: edit_index(f, lambda m: m.tensors["model"][BIAS].update(shape=[])),
            "index.json: is damaged",
        ),
        (
            lambda f: edit_index(f, lambda m: m.tensors["model"][BIAS]["pieces"][0].__setitem__(2, [-9, 7])),
            "index.json: is damaged",
        ),
        *(
            (
                lambda f, n=name: edit_index(f, lambda m: m.files.update({n: (1, "")})),
                "is not the name of a checkpoint's file",
            )
            for name in (
                "../state.json",
                "/etc/passwd",
                "tokenizer/../x",
                "model.pt",
                "model-1-of-2.safetensors",
            )
        ),
        (
            lambda f: edit_index(
                f, lambda m: m.tensors["model"][BIAS]["pieces"][0].__setitem__(0, "../model.safetensors")
            ),
            "is in the unknown file",
        ),
    ],
)
def test_damaged_checkpoint_is_refused(tmp_path: Path, change, message: str) -> None:
    buffer, optimizer, _ = make()
    save(tmp_path, buffer, optimizer)
    change(tmp_path / "iter_0000003")
    buffer, optimizer, _ = make()
    optimizer.rules = [LossScaler(LossScaleConfig(), CPU), SpikeRule(3.0, buffer.mesh)]
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path, buffer, optimizer)
    assert "\n" not in str(caught.value)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def link_to_dev_zero(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def write(folder: Path, file: str, text: str) -> None:
    (folder / file).write_text(text)
    sign(folder, file)


def edit(folder: Path, name: str, value: object) -> None:
    edit_state(folder, **{name: value})


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    sign(folder, "model.safetensors")


def edit_index(folder: Path, change) -> None:
    manifest = read_manifest(folder)
    change(manifest)
    manifest.write()


def test_a_tracker_ahead_of_its_folder(tmp_path: Path) -> None:
    """A run that resumes takes the checkpoint before."""
    buffer, optimizer, _ = make()
    for iteration in (3, 4):
        save(tmp_path, buffer, optimizer, iteration=iteration)
    shutil.rmtree(storage.folder_of(tmp_path, 4))
    found = find_checkpoint(str(tmp_path), str(tmp_path))
    assert found.iteration == 3 and "iter_0000004" in found.passed_over[0]
    with pytest.raises(InputError, match="names iteration 4, but there is no"):
        find_checkpoint(str(tmp_path), None)


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_any_flipped_bit_or_truncation_is_detected(tmp_path: Path, count: int) -> None:
    buffer, optimizer, _ = make()
    save(tmp_path / "good", buffer, optimizer)
    rng = random.Random(0)
    files = [p for p in sorted((tmp_path / "good").rglob("*")) if p.is_file()]
    for i in range(count):
        folder = tmp_path / "bad"
        shutil.copytree(tmp_path / "good", folder)
        path = folder / rng.choice(files).relative_to(tmp_path / "good")
        data = bytearray(path.read_bytes())
        if i % 2:
            data = data[: rng.randrange(len(data))]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with pytest.raises(InputError) as caught:
            find_checkpoint(str(folder), None)
        assert "\n" not in str(caught.value)
        shutil.rmtree(folder)


def test_flipped_bit_in_a_large_file_is_detected(tmp_path: Path) -> None:
    """Checksums are computed in blocks of 1 MiB, and the files of the other tests fit in one."""
    vocab = tmp_path / "vocab.json"
    vocab.write_bytes(random.Random(0).randbytes(3 << 20))
    save(tmp_path / "run", *make()[:2], files=[vocab])
    path = tmp_path / "run" / "iter_0000003" / "tokenizer" / "vocab.json"
    find_checkpoint(str(tmp_path / "run"), None)
    for offset in (0, (1 << 20) - 1, 1 << 20, (3 << 20) - 1):
        flip(path, offset)
        with pytest.raises(InputError, match="its checksum differs"):
            find_checkpoint(str(tmp_path / "run"), None)
        flip(path, offset)
    find_checkpoint(str(tmp_path / "run"), None)


@pytest.mark.parametrize("segment", [100, 1000, 4096, 10**6])
def test_digests_of_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment: int) -> None:
    """A file has one digest for each segment, whatever the sizes of its tensors; a flip in any segment is detected."""
    monkeypatch.setattr(storage, "SEGMENT_BYTES", segment)
    save(tmp_path, *make()[:2])
    folder = tmp_path / "iter_0000003"
    manifest = json.loads((folder / "index.json").read_text())["content"]
    for file in ("model.safetensors", "optimizer.safetensors"):
        content = (folder / file).read_bytes()
        parts = [content[i : i + segment] for i in range(0, len(content), segment)]
        assert manifest["files"][file] == [len(content), [hashlib.sha256(part).hexdigest() for part in parts]]
        assert len(parts) > 1 or segment == 10**6
        for offset in (0, segment - 1, segment, len(content) - 1):
            if offset < len(content):
                flip(folder / file, offset)
                with pytest.raises(InputError, match="its checksum differs"):
                    find_checkpoint(str(tmp_path), None)
                flip(folder / file, offset)
    load(tmp_path, *make()[:2])


def test_checkpoints_with_one_digest_for_each_file_are_verified(tmp_path: Path, monkeypatch) -> None:
    """Earlier versions wrote a file's digest as text, not as a list, however large the file is."""
    save(tmp_path, *make()[:2])
    folder = tmp_path / "iter_0000003"
    manifest = read_manifest(folder)
    for name, (size, digests) in manifest.files.items():
        manifest.files[name] = (size, digests[0])  # type: ignore[assignment]
    manifest.write()
    monkeypatch.setattr(storage, "SEGMENT_BYTES", 100)
    load(tmp_path, *make()[:2])
    flip(folder / "model.safetensors", 500)
    with pytest.raises(InputError, match="its checksum differs"):
        find_checkpoint(str(tmp_path), None)


def test_no_optimizer_state(tmp_path: Path) -> None:
    save(tmp_path, *make()[:2], save_optim=False)
    with pytest.raises(InputError, match="--no-load-optim"):
        load(tmp_path, *make()[:2])
    load(tmp_path, make()[0], None)


def test_architecture_mismatch_names_the_flags(tmp_path: Path) -> None:
    save(tmp_path, *make()[:2])
    other = dataclasses.replace(CONFIG, num_layers=2, ffn_hidden_size=32, hidden_dropout=0.5)
    with pytest.raises(
        InputError, match=r"--num-layers \(checkpoint: 1, given: 2\).*--ffn-hidden-size"
    ) as caught:
        check_architecture(find_checkpoint(str(tmp_path), None), other)
    assert "dropout" not in str(caught.value)
    found = find_checkpoint(str(tmp_path), None)
    check_architecture(found, dataclasses.replace(CONFIG, openai_gelu=True))
    with pytest.raises(InputError, match="--no-bias-gelu-fusion"):
        check_architecture(found, dataclasses.replace(CONFIG, bias_gelu_fusion=False))


def flip(path: Path, offset: int | None = None) -> None:
    """Flip one bit of the byte at `offset`, by default in the middle of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if offset is None else offset] ^= 1
    path.write_bytes(data)


def test_resumed_run_skips_a_damaged_checkpoint(tmp_path: Path) -> None:
    buffer, optimizer, _ = make()
    for iteration in (1, 2, 3):
        save(tmp_path, buffer, optimizer, iteration)
    flip(tmp_path / "iter_0000003" / "optimizer.safetensors")
    found = find_checkpoint(str(tmp_path), str(tmp_path))
    assert found.iteration == 2
    assert len(found.passed_over) == 1 and "iter_0000003/optimizer.safetensors" in found.passed_over[0]
    # A run that starts from it fails instead of loading other weights than it asked for.
    with pytest.raises(InputError, match="its checksum differs"):
        find_checkpoint(str(tmp_path), None)
    for iteration in (1, 2):
        (tmp_path / f"iter_{iteration:07d}" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"iter_0000003/optimizer.*; the older checkpoints are damaged too"):
        find_checkpoint(str(tmp_path), str(tmp_path))


def test_save_retain_interval(tmp_path: Path) -> None:
    buffer, optimizer, _ = make()
    for iteration in range(1, 8):
        save(tmp_path / "a", buffer, optimizer, iteration, save_retain_interval=3)
        save(tmp_path / "b", buffer, optimizer, iteration, save_retain_interval=3, keep_last=2)
    assert storage.iterations(tmp_path / "a") == [3, 6, 7]
    assert storage.iterations(tmp_path / "b") == [3, 5, 6, 7]


def test_full_disk(tmp_path: Path, monkeypatch) -> None:
    buffer, optimizer, _ = make()
    save(tmp_path, buffer, optimizer, 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(TrainingFault, match=r"it needs .* GB, and 1e-06 GB are free"):
            save(tmp_path, buffer, optimizer, 2)
    assert find_checkpoint(str(tmp_path), None).iteration == 1
    save(tmp_path, buffer, optimizer, 2)


def test_a_full_disk_is_found_by_the_bytes_of_all_ranks(tmp_path: Path, monkeypatch) -> None:
    buffer, optimizer, _ = make()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    needed = []
    for ranks in (1, 1000):
        monkeypatch.setattr(save_module, "all_reduce_sum", lambda x, axis, n=ranks: n * x)
        with pytest.raises(TrainingFault) as caught:
            save(tmp_path, buffer, optimizer, 1)
        needed.append(float(re.search(r"it needs (\S+) GB", str(caught.value))[1]))
    assert needed[1] > 100 * needed[0]


def test_pieces_of_vectors_are_named_by_rows_alone() -> None:
    assert piece_key("bias", Block((2, 4), (0, 1)), (8,)) == "bias[2:4]"
    assert piece_key("weight", Block((2, 4), (0, 3)), (8, 6)) == "weight[2:4,0:3]"
    assert piece_key("weight", Block((0, 8), (0, 6)), (8, 6)) == "weight"


def test_saving_reads_no_tensors_back(tmp_path: Path) -> None:
    """The checksums are computed while the files are written."""
    io = Path("/proc/self/io")
    if not io.exists():
        pytest.skip("no count of the bytes that a process reads")

    def bytes_read() -> int:
        return int(io.read_text().split()[1])  # rchar

    values = {f"layer{i}": torch.arange(1 << 19, dtype=torch.float32) + i for i in range(4)}
    pieces = {
        name: [(GlobalSlice((1 << 19,), 0, ((0, 1 << 19),)), Block((0, 1 << 19), (0, 1)), x)]
        for name, x in values.items()
    }
    before = bytes_read()
    found = write_pieces(tmp_path / "model.safetensors", pieces).get()
    read = bytes_read() - before
    content = (tmp_path / "model.safetensors").read_bytes()
    assert found == [hashlib.sha256(content).hexdigest()]
    assert read < len(content) // 100
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == values.keys() and all(torch.equal(loaded[name], values[name]) for name in values)


def test_two_runs_cannot_save_to_one_folder(tmp_path: Path) -> None:
    held = storage.lock(tmp_path)
    with pytest.raises(InputError, match=r"is being written to by another run \(process \d+ on "):
        storage.lock(tmp_path)
    held.close()
    storage.lock(tmp_path).close()


def test_a_folder_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on Lustre without the mount option flock; and a lock's file that cannot be opened."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.INFO, "megatron"), storage.lock(tmp_path):
        pass
    note = f"{tmp_path} has no locks (Function not implemented); save one run there only"
    assert caplog.messages == [note]
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").mkdir()
    with pytest.raises(
        InputError, match=rf"^--save: {tmp_path}/\.lock cannot be written \(Is a directory\)$"
    ):
        storage.lock(tmp_path)


def test_pickles_and_oversized_headers_are_refused(tmp_path: Path) -> None:
    buffer, optimizer, _ = make()
    save(tmp_path, buffer, optimizer)
    folder = tmp_path / "iter_0000003"
    for file in ("model.safetensors", "optimizer.safetensors"):
        shutil.copytree(tmp_path, tmp_path / f"damaged-{file}", ignore=shutil.ignore_patterns("damaged*"))
        damaged = tmp_path / f"damaged-{file}"
        torch.save({"weight": torch.ones(3)}, damaged / folder.name / file)
        sign(damaged / folder.name, file)
        with pytest.raises(InputError, match="cannot be read"):
            load(damaged, *make()[:2])
    header = (2**62).to_bytes(8, "little") + b"{}"
    (folder / "model.safetensors").write_bytes(header)
    sign(folder, "model.safetensors")
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path, *make()[:2])


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_tensors_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    file = tmp_path / "folder" / "model.safetensors"
    before = os.umask(umask)
    try:
        file.parent.mkdir()
        write_pieces(file, {})
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == mode


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    with pytest.raises(InputError, match=r"--save: .*link is a link to nothing; make the folder"):
        CheckpointConfig(save=str(tmp_path / "link"))
    (tmp_path / "absent").mkdir()
    assert CheckpointConfig(save=str(tmp_path / "link")).save


def test_a_file_that_vanishes_after_the_checks(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model\.safetensors: is missing; the checkpoint is incomplete$"):
        TensorFile(tmp_path / "model.safetensors")
