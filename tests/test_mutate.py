"""tests/mutate.py: mutations, selection of tests, and counts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import mutate
import pytest
from mutation.concerns import CONCERNS, concerned
from mutation.places import mutations, parses

ROOT = Path(__file__).resolve().parent.parent

SOURCE = '''
def step(mesh, x: "a + 1" = 3, *, seed=0):
    """A docstring: 1 < 2."""
    x = all_reduce_sum(x, mesh.tp)
    work.wait()
    self.done = True
    print(x + 1)
    for i in range(len(x)):
        x[i:] = max(x, 2)
    if x < 2 and mesh:
        raise ValueError(
            f"{x + 1}"
        )
    return stable_hash("init", seed, name), [y for y in x if not y], x.clamp(min=1) - 1
'''


def test_every_kind_of_fault_is_found_and_changes_one_line() -> None:
    found = {(m.kind, m.after.strip()) for m in mutations("megatron/a/b.py", SOURCE)}
    assert found == {
        ("dropped reduction", "x = x"),
        ("rescaled reduction", "x = 2 * all_reduce_sum(x, mesh.tp)"),
        ("permuted reduction", "x = all_reduce_sum(x, mesh.tp).flip(0)"),
        ("another group", "x = all_reduce_sum(x, mesh.dp)"),
        ("another group", "x = all_reduce_sum(x, mesh.pp)"),
        ("missing wait", "pass"),
        ("missing assignment", "pass"),
        ("off by one", "for i in range(len(x) - 1):"),
        ("off by one", "x[i + 1:] = max(x, 2)"),
        ("min for max", "x[i:] = min(x, 2)"),
        ("negated condition", "if not (x < 2 and mesh):"),
        ("weaker check", "if x <= 2 and mesh:"),
        ("weaker check", "if x < 2 or mesh:"),
        ("off by one", "if x < 3 and mesh:"),
        ("weaker check", "ValueError("),
        ("another seed", 'return stable_hash("init", seed), [y for y in x if not y], x.clamp(min=1) - 1'),
        (
            "another seed",
            'return stable_hash("init", seed + 1, name), [y for y in x if not y], x.clamp(min=1) - 1',
        ),
        (
            "negated condition",
            'return stable_hash("init", seed, name), [y for y in x if y], x.clamp(min=1) - 1',
        ),
        (
            "min for max",
            'return stable_hash("init", seed, name), [y for y in x if not y], x.clamp(max=1) - 1',
        ),
        ("off by one", 'return stable_hash("init", seed, name), [y for y in x if not y], x.clamp(min=1)'),
    }
    for mutation in mutations("megatron/a/b.py", SOURCE):
        assert parses(mutation, SOURCE)
        pairs = zip(SOURCE.splitlines(), mutation.apply(SOURCE).splitlines(), strict=True)
        assert [i for i, (a, b) in enumerate(pairs, start=1) if a != b] == [mutation.line]


def test_the_id_of_a_fault_survives_changes_of_other_lines() -> None:
    moved = SOURCE.replace("    x = all", "    y = 3\n    x = all")
    before, after = ([m.id for m in mutations("a.py", source)] for source in (SOURCE, moved))
    assert before == after and len(set(before)) == len(before)


def test_the_code_has_faults_of_all_areas_and_kinds() -> None:
    found = mutate.all_mutations(ROOT, None)
    assert {m.kind for m in found} == {m.kind for m in mutations("a.py", SOURCE)} | {"missing call"}
    assert {m.area for m in found} >= {"base", *mutate.CORE}
    first, again, other = (
        [m.id for m, _ in zip(mutate.choose(found, seed, ROOT), range(40), strict=False)]
        for seed in (1, 1, 2)
    )
    assert first == again and len(set(first)) == 40 and len(set(first) & set(other)) < 10


def test_tests_that_concern_a_module() -> None:
    for start, tests in CONCERNS.items():
        assert all((ROOT / path).exists() for path in (start, *tests)), start
    found = concerned("megatron/optim/buffer.py", ROOT)
    assert found[0] == "tests/optim/test_buffer.py"
    assert {"tests/optim/test_optimizer.py", "tests/training/test_layouts.py"} <= set(found)
    assert "tests/tokenizer/test_train.py" not in found


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small git project with one test that always fails."""
    files = {
        "megatron/a/b.py": "def clip(x):\n    if x > 3:\n        x = 3\n    return x + 1\n",
        "tests/a/test_b.py": """
            from megatron.a.b import clip
            def test_wrong(): assert clip(0) == 7
            def test_clip(): assert clip(0) == 1 and clip(4) == 4
        """.replace(" " * 12, ""),
        "pytest.ini": "[pytest]\npythonpath = .\n",
    }
    root = tmp_path / "checkout"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], cwd=root, check=True)
    return root


@pytest.mark.slow
def test_faults_are_counted_once_and_survivors_shown(checkout: Path, tmp_path: Path, capsys) -> None:
    results = ["--results", str(tmp_path / "results.jsonl")]
    assert mutate.main(["--count", "9", *results], checkout) == 0
    out = capsys.readouterr().out
    assert "tests/a/test_b.py::test_wrong fails without a fault, too, and is left out" in out
    # x > 3 and x >= 3 are equivalent here.
    (shown,) = (line for line in out.splitlines() if line.startswith("    + "))
    assert shown == "    + if x >= 3:"
    assert out.splitlines()[-1] == "all               3 of    4 noticed (75%)"
    (survivor,) = (line.split()[0] for line in out.splitlines() if "not noticed by 1 test files" in line)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    # As if killed while writing the last result: the run resumes from there.
    (tmp_path / "results.jsonl").write_text("\n".join(lines)[:-20])
    mutate.main(["--count", "9", *results], checkout)
    out = capsys.readouterr().out
    assert "[1/1, " in out and "3 of    4 noticed" in out
    mutate.main(["--equivalent", survivor, "3 is 3 either way", *results], checkout)
    out = capsys.readouterr().out
    assert "3 of    3 noticed (100%)\n1 more change nothing" in out
    assert not subprocess.run(["git", "status", "--short"], cwd=checkout, capture_output=True).stdout
