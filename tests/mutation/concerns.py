"""Find the test files that cover a module."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

# Tests that run a module without importing it: files and folders, by prefix of the module's path.
STEP_TESTS = [
    "tests/training/test_engine.py",
    "tests/training/test_plain_loop.py",
    "tests/training/test_layouts.py",
]
RUN_TESTS = ["tests/training/test_pretrain.py", "tests/training/test_pretrain_bert.py"]
CONCERNS = {
    "megatron/__main__.py": ["tests/test_main.py", "tests/test_commands.py", "tests/tools"],
    "megatron/api.py": ["tests/test_api.py", "tests/test_examples.py"],
    "megatron/arguments.py": ["tests/test_arguments.py", *RUN_TESTS],
    "megatron/cli.py": [
        "tests/test_flags.py",
        "tests/test_arguments.py",
        "tests/test_main.py",
        "tests/tools",
        "tests/training/test_pretrain.py",
    ],
    "megatron/commands/": ["tests/tools", "tests/test_main.py", "tests/settings"],
    "megatron/errors.py": ["tests/test_arguments.py", "tests/tools", "tests/faults"],
    "megatron/files.py": ["tests/test_files.py", "tests/test_durability.py", "tests/checkpoint"],
    "megatron/flags.py": ["tests/test_flags.py", "tests/test_arguments.py", "tests/settings"],
    "megatron/checkpoint/": ["tests/checkpoint", "tests/test_durability.py", *RUN_TESTS],
    "megatron/data/": [
        "tests/data",
        "tests/test_durability.py",
        "tests/tools/test_inspect_data.py",
        "tests/preprocessing",
        *RUN_TESTS,
    ],
    "megatron/evaluation/": [
        "tests/evaluation",
        "tests/tools/test_evaluate.py",
        "tests/tools/test_lm_eval_adapter.py",
    ],
    "megatron/faults/": ["tests/faults", "tests/recipes/test_spikes.py", *RUN_TESTS],
    "megatron/finetuning/": ["tests/finetuning"],
    "megatron/inference/": [
        "tests/inference",
        "tests/tools/test_generate_text.py",
        "tests/tools/test_serve.py",
        "tests/evaluation/test_zero_shot.py",
    ],
    "megatron/interop/": ["tests/interop", "tests/tools"],
    "megatron/model/": [
        "tests/model",
        *STEP_TESTS,
        "tests/planner/test_dry_run.py",
        "tests/golden",
        "tests/inference",
    ],
    "megatron/ops/": ["tests/ops", "tests/model", *STEP_TESTS, "tests/golden", "tests/inference"],
    "megatron/optim/": ["tests/optim", *STEP_TESTS, "tests/golden", "tests/checkpoint", *RUN_TESTS],
    "megatron/parallel/": [
        "tests/parallel",
        "tests/model",
        *STEP_TESTS,
        "tests/checkpoint",
        "tests/faults",
        "tests/planner/test_dry_run.py",
    ],
    "megatron/parallel/stages.py": ["tests/planner/test_search.py", "tests/test_arguments.py"],
    "megatron/planner/": ["tests/planner", "tests/tools/test_plan.py", "tests/tools/test_plan_command.py"],
    "megatron/plugin_flags.py": ["tests/settings", "tests/test_arguments.py"],
    "megatron/plugins.py": ["tests/faults", "tests/evaluation/test_in_training.py", "tests/interop"],
    "megatron/preprocessing/": ["tests/preprocessing", "tests/data", "tests/tools"],
    "megatron/pretrain_bert.py": ["tests/training/test_pretrain_bert.py", "tests/data", *STEP_TESTS],
    "megatron/pretrain_gpt.py": ["tests/training/test_pretrain.py", *STEP_TESTS],
    "megatron/recipes/": ["tests/recipes", "tests/training/test_fp16.py", "tests/training/test_engine.py"],
    "megatron/reports/": [
        "tests/reports",
        "tests/training/test_report.py",
        "tests/training/test_nvidia_log.py",
        "tests/training/test_costs.py",
        "tests/training/test_host_waits.py",
        "tests/test_examples.py",
        *RUN_TESTS,
    ],
    "megatron/performance/": ["tests/performance", "tests/training", "tests/checkpoint"],
    "megatron/settings": ["tests/settings", "tests/test_arguments.py", "tests/training/test_pretrain.py"],
    "megatron/tokenizer/": ["tests/tokenizer", "tests/preprocessing", "tests/tools"],
    "megatron/tool.py": ["tests/tools"],
    "megatron/training/": ["tests/training", "tests/faults", "tests/golden"],
    "megatron/variants/": [
        "tests/variants",
        "tests/model",
        "tests/data",
        "tests/test_arguments.py",
        "tests/interop",
        "tests/training/test_layouts.py",
    ],
}


def concerned(path: str, root: Path) -> list[str]:
    """Test files that cover a module, the most likely to fail first.

    These are its own tests (tests/a/test_b.py for megatron/a/b.py), the tests of its package that import it, all other
    tests that import it, and those listed in `CONCERNS`.
    """
    package, _, module = path.removeprefix("megatron/").removesuffix(".py").rpartition("/")
    folder = "tools" if package == "commands" else package
    mirror = f"tests/{folder}/test_{module}.py".replace("//", "/")
    dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    importing = [test for test, names in _imports(root).items() if dotted in names]
    importing.sort(key=lambda test: not test.startswith(f"tests/{package}/"))
    table = [test for start, tests in CONCERNS.items() if path.startswith(start) for test in tests]
    named = [file for test in table for file in _files(root / test, root)]
    found = dict.fromkeys(([mirror] if (root / mirror).is_file() else []) + importing + named)
    return list(found)


def _files(path: Path, root: Path) -> list[str]:
    files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    return [str(file.relative_to(root)) for file in files]


@functools.lru_cache(maxsize=1)
def _imports(root: Path) -> dict[str, set[str]]:
    """Modules of megatron that each test file imports."""
    found = {}
    for file in _files(root / "tests", root):
        names: set[str] = set()
        for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[file] = {name for name in names if name.startswith("megatron")}
    return found
