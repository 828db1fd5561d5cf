"""The size of the core: the files that a GPT pretraining run imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from megatron.optim.registry import OPTIMIZERS

ROOT = Path(__file__).resolve().parent.parent

# Maximum number of lines: 10,000 for dense models in data, tensor and pipeline parallelism, and what mixtures of
# experts add. It is to stay below 12,500 with context parallelism and sharded parameters.
LIMIT = 12_335
# The entry point hands the run to megatron.plugins, which calls pretrain() with these hooks.
ROOTS = (
    "megatron.pretrain_gpt",
    "megatron.training.pretrain",
    "megatron.training.hooks",
    "megatron.training.log_hook",
)
# Not counted: plugins, operations for CPUs only or by apex, the optimizers other than AdamW in fp32, since a run has
# one, the units of --data-parallel-sharding-strategy and the copies of --cpu-offload-optimizer, which other runs do not
# import.
LEFT_OUT = (
    "megatron.plugin_flags",
    "megatron.plugins",
    "megatron.ops.apex",
    "megatron.ops.cpu",
    "megatron.ops.host_memory",
    "megatron.optim.bf16_adam",
    "megatron.optim.offload",
    "megatron.optim.sharded_units",
    "megatron.optim.units",
    *(kind.__module__ for name, kind in OPTIMIZERS.items() if name != "adam"),
)


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, also within functions and for types."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            # A name may be a submodule of the package.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(module: str) -> Path | None:
    """Path of a module of this repository; None for other modules."""
    path = ROOT / module.replace(".", "/")
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def core() -> dict[str, int]:
    """Number of lines of each file that the core imports."""
    lines: dict[str, int] = {}
    waiting = list(ROOTS)
    while waiting:
        module = waiting.pop()
        path = file_of(module)
        if path is None or module.startswith(LEFT_OUT) or str(path.relative_to(ROOT)) in lines:
            continue
        lines[str(path.relative_to(ROOT))] = len(path.read_text(encoding="utf-8").splitlines())
        waiting += imports(path)
    return lines


def test_the_core_is_small() -> None:
    lines = core()
    assert "megatron/training/pretrain.py" in lines and "megatron/data/indexed.py" in lines
    largest = "\n".join(f"{n:6} {name}" for name, n in sorted(lines.items(), key=lambda item: -item[1]))
    assert sum(lines.values()) <= LIMIT, f"{sum(lines.values())} lines in {len(lines)} files:\n{largest}"


def test_the_training_step_is_ten_short_files() -> None:
    """Checks the files that docs/design.md lists in reading order."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    files = re.findall(r"^\| \d+ \| `([^`]+)` \|", page, re.M)
    assert len(files) == 10
    lines = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in files}
    assert sum(lines.values()) < 2000, lines


if __name__ == "__main__":
    for name, number in sorted(core().items()):
        print(f"{number:6} {name}")
    print(f"{sum(core().values()):6} lines")
