"""List the checkpoints in a folder and verify their checksums, or list the differences of two checkpoints.

megatron inspect-checkpoint my/run                        every checkpoint, whole or damaged
megatron inspect-checkpoint my/run/iter_0000100           one of them, with its tensors
megatron inspect-checkpoint my/run/iter_0000100 other/iter_0000100
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.checkpoint import Checkpoint, open_checkpoint
from megatron.checkpoint.storage import TRACKER, folder_of, iterations, newest_iteration
from megatron.cli import Parser, run_command
from megatron.errors import InputError
from megatron.parallel.slices import whole


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if a checkpoint is damaged or two differ, otherwise 0."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", metavar="DIR", type=Path, help="a run's --save folder, or a checkpoint in it"
    )
    parser.add_argument("other", metavar="OTHER", type=Path, nargs="?", help="checkpoint to compare with")
    args = parser.parse_args(argv)
    if args.other is not None:
        return compare(open_one(args.folder), open_one(args.other))
    if (args.folder / "index.json").exists() or not iterations(args.folder):
        describe(open_one(args.folder))
        return 0
    return list_all(args.folder)


def open_one(folder: Path) -> Checkpoint:
    """Open and verify a checkpoint, or the newest one of a run."""
    newest = newest_iteration(folder)
    found = open_checkpoint(folder if newest is None else folder_of(folder, newest))
    found.verify()
    return found


def list_all(root: Path) -> int:
    damaged, newest = 0, newest_iteration(root, exists=False)
    present = iterations(root)
    for iteration in present:
        try:
            found = open_one(folder_of(root, iteration))
            assert found.manifest is not None
            size = sum(size for size, _ in found.manifest.files.values())
            samples = found.state["consumed_samples"]
            facts = f"{size / 1e9:.3g} GB in {len(found.manifest.files)} files, {samples:,} samples"
        except InputError as error:
            damaged += 1
            facts = f"DAMAGED: {error}"
        print(f"{iteration:>10,}  {facts}{'  (newest)' if iteration == newest else ''}")
    if newest is not None and newest not in present:
        damaged += 1
        print(f"{newest:>10,}  DAMAGED: missing; there is no folder of the iteration that {TRACKER} names")
    return 1 if damaged else 0


def describe(checkpoint: Checkpoint) -> None:
    state = checkpoint.state
    print(f"{checkpoint.folder}: {state['task']}, iteration {state['iteration']:,}, checksums verified")
    print(f"samples consumed  {state['consumed_samples']:,}")
    print(f"vocabulary        {state['vocab_size']:,} ids")
    for kind, source in checkpoint.tensors.items():
        elements = sum(math.prod(tensor["shape"]) for tensor in source.index.values())
        print(f"{kind:<18}{len(source.index)} tensors, {elements:,} elements")
    for name, tensor in checkpoint.tensors["model"].index.items():
        pieces = len(tensor["pieces"])
        parts = f" in {pieces} pieces" if pieces > 1 else ""
        print(f"  {name} {tuple(tensor['shape'])} {tensor['dtype']}{parts}")


def compare(a: Checkpoint, b: Checkpoint) -> int:
    """Print the differences of two checkpoints, which may have been saved in different layouts."""
    differences = 0

    def differ(text: str) -> None:
        nonlocal differences
        differences += 1
        print(text)

    for kind in sorted(a.tensors.keys() | b.tensors.keys()):
        first, second = ({} if kind not in c.tensors else c.tensors[kind].index for c in (a, b))
        for name in sorted(first.keys() | second.keys()):
            shapes = [tuple(index[name]["shape"]) if name in index else "absent" for index in (first, second)]
            if shapes[0] != shapes[1]:
                differ(f"{kind} {name}: {shapes[0]} and {shapes[1]}")
                continue
            values = [c.tensors[kind].read(name, whole(*first[name]["shape"])) for c in (a, b)]
            unequal = int((values[0] != values[1]).sum())
            if unequal:
                largest = (values[0] - values[1]).abs().max().item()
                differ(
                    f"{kind} {name}: {unequal:,} of {values[0].numel():,} elements differ, by up to {largest:.3g}"
                )
    for name in ("task", "iteration", "consumed_samples", "vocab_size", "schedule"):
        if a.state[name] != b.state[name]:
            differ(f"{name}: {a.state[name]} and {b.state[name]}")
    print(f"{differences} differences" if differences else "no differences in weights, optimizer or position")
    return 1 if differences else 0


if __name__ == "__main__":
    run_command(main)
