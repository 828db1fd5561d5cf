"""Check that all processes of a run were started alike."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from pathlib import Path

import torch

import megatron
from megatron.errors import InputError
from megatron.files import read_file
from megatron.flags import flag_name
from megatron.parallel.collectives import all_reduce_max
from megatron.parallel.mesh import Axis
from megatron.parallel.random import stable_hash
from megatron.training.config import RunConfig


def check_same_everywhere(config: RunConfig, world: Axis) -> None:
    """Check that all processes have the same flags, code and versions.

    Raises:
        InputError: names the differences.
    """
    values = {"the code of this program": _code(), "the version of torch": torch.__version__}
    values["the version of Python"] = sys.version.split()[0]
    for section in config.sections:
        for field in dataclasses.fields(section):
            values[flag_name(field)] = repr(getattr(section, field.name))
    keys = torch.tensor([stable_hash(value, bits=32) for value in values.values()])
    largest, smallest = all_reduce_max(torch.stack((keys, -keys)), world)
    differing = [name for name, same in zip(values, (largest == -smallest).tolist(), strict=True) if not same]
    if differing:
        raise InputError(
            f"the processes were not started alike: they differ in {', '.join(differing)}; start all with the same "
            f"program and flags (rank {world.rank} has {_shown(values, differing)})"
        )


def _shown(values: dict[str, str], names: list[str]) -> str:
    flags = [f"{name} {values[name]}" for name in names if name.startswith("--")]
    return ", ".join(flags[:5]) or "its own"


def _code() -> str:
    """Hash of the sources of this package and of the entry point."""
    root, entry = Path(megatron.__file__).parent, Path(sys.argv[0])
    files = sorted(root.rglob("*.py")) + ([entry] if entry.is_file() else [])
    digest = hashlib.blake2b()
    for file in files:
        digest.update(file.name.encode() + b"\0" + read_file(file))
    return digest.hexdigest()
