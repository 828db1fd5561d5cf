"""Small checkpoints, and edits that damage them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import torch
from models import flat

from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.save import Saver
from megatron.model.config import ModelConfig
from megatron.model.context import ModelContext
from megatron.model.gpt import GPTModel
from megatron.optim.config import OptimizerConfig
from megatron.optim.optimizer import Optimizer
from megatron.optim.schedule import Schedule
from megatron.recipes.config import RetentionConfig
from megatron.recipes.retention import discard_older

CONFIG = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, max_position_embeddings=8)
SCHEDULE = Schedule.from_config(OptimizerConfig(lr=1.0), global_batch_size=4, train_samples=100)


def make(dtype=torch.float32, padded: int = 64, kind: str = "adam", seed: int = 1, **settings):
    model = GPTModel(CONFIG, ModelContext(vocab_size=50, padded_vocab_size=padded))
    config = OptimizerConfig(lr=1.0, optimizer=kind, **settings)
    buffer = flat(model, dtype, optimizer=config)
    buffer.initialize(seed)
    return buffer, Optimizer(buffer, config), model


def save(root: Path, buffer, optimizer, iteration: int = 3, files=(), **fields) -> None:
    """Save a checkpoint. `fields` are those of `CheckpointConfig` and `RetentionConfig`."""
    root.mkdir(exist_ok=True)
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
        "schedule": dataclasses.asdict(SCHEDULE),
        "config": {"model": dataclasses.asdict(CONFIG)},
    }
    names = {field.name for field in dataclasses.fields(RetentionConfig)}
    retention = RetentionConfig(**{name: fields.pop(name) for name in names & fields.keys()})
    config = CheckpointConfig(save=str(root), **fields)
    contents = {file.name: file.read_bytes() for file in files}
    saver = Saver(config, buffer, optimizer, tokenizer_files=contents, log=print)
    saver.after_write.append(functools.partial(discard_older, config=retention))
    saver.save(state)


def sign(folder: Path, file: str) -> None:
    """Update a file's size and checksum in the manifest, as an attacker would."""
    path, manifest = folder / file, read_manifest(folder)
    manifest.files[file] = (path.stat().st_size, [hashlib.sha256(path.read_bytes()).hexdigest()])
    manifest.write()


def edit_state(folder: Path, **fields: object) -> Path:
    """Edit fields of a checkpoint's state.json, update its checksum and return its path."""
    path = folder / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    sign(folder, path.name)
    return path
