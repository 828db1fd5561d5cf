"""Damage to checkpoints, as bad disks and bad people do it."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.checkpoint.manifest import digest, read_manifest


def sign(folder: Path, file: str) -> None:
    """Let the manifest say that this is what was written, as who means harm would."""
    path, manifest = folder / file, read_manifest(folder)
    manifest.files[file] = (path.stat().st_size, digest(path))
    manifest.write()


def edit_state(folder: Path, **fields: object) -> Path:
    """Change fields of a checkpoint's state.json, which is given."""
    path = folder / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    sign(folder, path.name)
    return path
