"""List the checkpoints of a folder and verify their checksums; or say in what two checkpoints differ.

python tools/inspect_checkpoint.py my/run                        every checkpoint, whole or damaged
python tools/inspect_checkpoint.py my/run/iter_0000100           one of them, with its tensors
python tools/inspect_checkpoint.py my/run/iter_0000100 other/iter_0000100
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.arguments import Parser, run_command
from megatron.checkpoint.checkpoint import Checkpoint, open_checkpoint
from megatron.checkpoint.storage import folder_of, iterations, newest_iteration
from megatron.flags import InputError
from megatron.parallel.slices import whole


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 if a checkpoint is damaged or two differ."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", metavar="DIR", type=Path, help="of --save, or of one checkpoint in it")
    parser.add_argument("other", metavar="OTHER", type=Path, nargs="?", help="checkpoint to compare with")
    args = parser.parse_args(argv)
    if args.other is not None:
        return compare(open_one(args.folder), open_one(args.other))
    if (args.folder / "index.json").exists() or not iterations(args.folder):
        describe(open_one(args.folder))
        return 0
    return list_all(args.folder)


def open_one(folder: Path) -> Checkpoint:
    """A checkpoint by its own folder, or the newest one of a run's."""
    newest = newest_iteration(folder)
    found = open_checkpoint(folder if newest is None else folder_of(folder, newest))
    found.manifest.verify(list(found.manifest.files))
    return found


def list_all(root: Path) -> int:
    damaged, newest = 0, newest_iteration(root)
    for iteration in iterations(root):
        try:
            found = open_one(folder_of(root, iteration))
            size = sum(size for size, _ in found.manifest.files.values())
            samples = found.state["consumed_samples"]
            said = f"{size / 1e9:.3g} GB in {len(found.manifest.files)} files, {samples:,} samples"
        except InputError as error:
            damaged += 1
            said = f"DAMAGED: {error}"
        print(f"{iteration:>10,}  {said}{'  (newest)' if iteration == newest else ''}")
    return 1 if damaged else 0


def describe(checkpoint: Checkpoint) -> None:
    state, manifest = checkpoint.state, checkpoint.manifest
    print(f"{checkpoint.folder}: {state['task']}, iteration {state['iteration']:,}, all checksums are right")
    print(f"samples consumed  {state['consumed_samples']:,}")
    print(f"vocabulary        {state['vocab_size']:,} ids")
    for kind, index in manifest.tensors.items():
        elements = sum(math.prod(tensor["shape"]) for tensor in index.values())
        print(f"{kind:<18}{len(index)} tensors, {elements:,} elements")
    for name, tensor in manifest.tensors["model"].items():
        pieces = len(tensor["pieces"])
        parts = f" in {pieces} pieces" if pieces > 1 else ""
        print(f"  {name} {tuple(tensor['shape'])} {tensor['dtype']}{parts}")


def compare(a: Checkpoint, b: Checkpoint) -> int:
    """Print in what two checkpoints differ; their layouts do not matter."""
    differences = 0

    def differ(text: str) -> None:
        nonlocal differences
        differences += 1
        print(text)

    for kind in sorted(a.manifest.tensors.keys() | b.manifest.tensors.keys()):
        first, second = a.manifest.tensors.get(kind, {}), b.manifest.tensors.get(kind, {})
        for name in sorted(first.keys() | second.keys()):
            shapes = [tuple(index[name]["shape"]) if name in index else None for index in (first, second)]
            if shapes[0] != shapes[1]:
                differ(f"{kind} {name}: {shapes[0] or 'absent'} and {shapes[1] or 'absent'}")
                continue
            values = [c.pieces(kind).read(name, whole(*shapes[0])) for c in (a, b)]
            unlike = int((values[0] != values[1]).sum())
            if unlike:
                largest = (values[0] - values[1]).abs().max().item()
                differ(
                    f"{kind} {name}: {unlike:,} of {values[0].numel():,} elements differ, by up to {largest:.3g}"
                )
    for name in ("task", "iteration", "consumed_samples", "vocab_size", "schedule"):
        if a.state[name] != b.state[name]:
            differ(f"{name}: {a.state[name]} and {b.state[name]}")
    print(f"{differences} differences" if differences else "no difference in weights, optimizer or position")
    return 1 if differences else 0


if __name__ == "__main__":
    run_command(main)
