"""Save checkpoints: every process writes its part of the tensors, rank 0 also everything else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.checkpoint import FORMAT, VERSION
from megatron.checkpoint.config import CheckpointConfig
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.pieces import Index, file_name, pieces_to_write, write_pieces, written_parts
from megatron.checkpoint.storage import begin_checkpoint, finish_checkpoint, temporary_folder
from megatron.checkpoint.tensor_file import TensorFile
from megatron.errors import TrainingFault
from megatron.optim.buffer import ParamBuffer
from megatron.optim.optimizer import Optimizer
from megatron.parallel.collectives import all_reduce_sum, gather_texts, raise_on_all_ranks
from megatron.parallel.mesh import Axis


@dataclasses.dataclass
class Saver:
    """Saves the checkpoints of a run, one at a time. Every method is collective.

    Every method raises `TrainingFault` if a checkpoint cannot be written. Earlier checkpoints remain complete.

    Attributes:
        tokenizer_files: content of the tokenizer's files, by name.
        log: receives a line for each checkpoint.
        iteration: that of the newest checkpoint, also while it is being written.
        after_write: called on the first process with the folder of checkpoints and the iteration of a complete one.
    """

    config: CheckpointConfig
    buffer: ParamBuffer
    optimizer: Optimizer
    tokenizer_files: dict[str, bytes]
    log: Callable[[str], None]
    iteration: int = 0
    after_write: list[Callable[[Path, int], None]] = dataclasses.field(default_factory=list)

    def save(self, state: dict[str, Any]) -> None:
        """Save a checkpoint; `state` is the content of state.json."""
        self.iteration = state["iteration"]
        self.write(take_snapshot(self.config, state, self.buffer, self.optimizer), self.buffer.mesh.world)
        self.log_saved()

    def wait(self) -> None:
        """Wait until the newest checkpoint is complete. Here `save` does."""

    def log_saved(self) -> None:
        """Log that the newest checkpoint is complete."""
        self.log(f"saved checkpoint at iteration {self.iteration} to {self.config.save}")

    def write(self, snapshot: Snapshot, world: Axis) -> None:
        """Write a checkpoint. Of `buffer` only the layout counts; `world` has all ranks."""
        assert self.config.save is not None
        root, iteration, first = Path(self.config.save), snapshot.state["iteration"], world.rank == 0
        folder = temporary_folder(root, iteration)
        kinds = {kind: pieces_to_write(self.buffer, group) for kind, group in snapshot.tensors.items()}
        size = sum(t.nbytes for pieces in kinds.values() for blocks in pieces.values() for _, _, t in blocks)
        needed = int(all_reduce_sum(torch.tensor([size]), world))
        try:
            with raise_on_all_ranks(world):
                if first:
                    begin_checkpoint(root, iteration, needed)
            with raise_on_all_ranks(world):
                digests = {}
                for kind, pieces in kinds.items():
                    path = folder / file_name(kind, world.rank, world.size)
                    digests[path.name] = write_pieces(path, pieces)
                    self.buffer.mesh.heartbeat.steps += 1
                written = {name: ((folder / name).stat().st_size, d.get()) for name, d in digests.items()}
            files: dict[str, tuple[int, list[str]]] = {}
            for text in gather_texts(json.dumps(written), world):
                files |= json.loads(text)
            with raise_on_all_ranks(world):
                if first:
                    state = {"format": FORMAT, "version": VERSION, **snapshot.state}
                    indices = _join_indices(folder, list(files))
                    files |= write_rest(folder, state, self.tokenizer_files)
                    Manifest(folder, files, indices).write()
                    finish_checkpoint(root, iteration)
        except BaseException as error:
            if first:
                shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise TrainingFault(
                f"--save: the checkpoint of iteration {iteration} cannot be written to {root}: {error}; "
                "earlier checkpoints are complete"
            ) from None
        if first:
            for callback in self.after_write:
                callback(root, iteration)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The part of a checkpoint that this process writes.

    Attributes:
        state: the content of state.json without format and version.
        tensors: by kind, "model" or "optimizer", and by prefix of the parameters' names, the `written_parts` of a flat
            buffer.
    """

    state: dict[str, Any]
    tensors: dict[str, dict[str, list[Tensor]]]


def take_snapshot(
    config: CheckpointConfig, state: dict[str, Any], buffer: ParamBuffer, optimizer: Optimizer
) -> Snapshot:
    """Take a snapshot. Its tensors are views of the run's own memory, which the next step changes."""
    optimizer.finish()
    buffer.gather.finish()
    shards = zip(buffer.buckets, buffer.param_memory.shards, buffer.masters, strict=True)
    weights = [master if bucket.group.optimizer.counts else shard for bucket, shard, master in shards]
    groups = {"model": {"": weights}}
    if config.save_optim:
        masters = {} if buffer.is_fp32 else {"master": buffer.masters}
        groups["optimizer"] = {f"{name}/": owned for name, owned in (masters | optimizer.state).items()}
    tensors = {
        kind: {prefix: written_parts(buffer, owned) for prefix, owned in group.items()}
        for kind, group in groups.items()
    }
    return Snapshot({"optimizer_steps": optimizer.steps if config.save_optim else None, **state}, tensors)


def write_rest(
    folder: Path, state: dict[str, Any], tokenizer_files: dict[str, bytes]
) -> dict[str, tuple[int, list[str]]]:
    """Write state.json and the tokenizer's files; returns their sizes and checksums."""
    files = {"state.json": (json.dumps(state, indent=1, allow_nan=False) + "\n").encode()}
    files |= {f"tokenizer/{name}": content for name, content in tokenizer_files.items()}
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return {name: (len(content), [hashlib.sha256(content).hexdigest()]) for name, content in files.items()}


def _join_indices(folder: Path, files: list[str]) -> dict[str, Index]:
    """Join the indices of all files of tensors, by kind."""
    joined: dict[str, Index] = {}
    for file in files:
        index = joined.setdefault(file.split(".")[0].split("-")[0], {})
        for name, tensor in json.loads(TensorFile(folder / file).metadata["index"]).items():
            index.setdefault(name, tensor | {"pieces": []})["pieces"] += tensor["pieces"]
    return joined
