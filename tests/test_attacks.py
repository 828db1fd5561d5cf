"""tests/attacks.py: damages, classification of outcomes, and continuation."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from pathlib import Path

import attacks
import pytest
from attack.commands import MEMORY, Ended
from attack.damage import DAMAGES

TRACEBACK = 'Traceback (most recent call last):\n  File "x"\nKeyError: 1\n'


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damage_changes_the_file_and_repeats(damage, tmp_path: Path) -> None:
    content = b'{"rows": [1, 22, 333]}\n' * 300
    results = []
    for copy in ("a", "b"):
        folder = tmp_path / copy
        (folder / "in").mkdir(parents=True)
        (folder / "other.json").write_bytes(b"other")
        path = folder / "in" / "x.json"
        path.write_bytes(content)
        damage(path, random.Random(5))
        is_small = path.is_file() and path.stat().st_size < 10**6
        results.append(path.read_bytes() if is_small else path.stat().st_size if path.is_file() else None)
    assert results[0] == results[1] != content


def test_classification() -> None:
    fine = Ended(0, "", "", 0)
    assert not fine.failure() and not dataclasses.replace(fine, status=2, stderr="error: x\n").failure()
    failures = {
        "memory": {"memory": MEMORY + 1},
        "hang": {"status": None},
        "crash": {"status": -7},
        "traceback": {"stderr": TRACEBACK},
        "unclear": {"status": 2, "stderr": "error: a\nerror: b\n"},
    }
    found = {name: dataclasses.replace(fine, **fields).failure() for name, fields in failures.items()}
    assert found == {name: name for name in failures}
    assert dataclasses.replace(fine, status=1, stderr="").failure() == "unclear"


def test_results_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = []

    def attack(number: int, seed: int, folder: Path) -> dict:
        done.append((seed, number))
        outcome = "silent" if number == 1 and seed == 0 else "harmless"
        return {"number": number, "attack": "x", "outcome": outcome, "says": ""}

    monkeypatch.setitem(attacks.KINDS, "files", (lambda folder: None, attack, ("silent",)))
    path = tmp_path / "results"
    words = ["files", "--results", str(path)]
    assert attacks.main([*words, "--count", "2"]) == 1
    with path.open("a") as file:
        file.write('{"seed": 0, "num')
    assert (
        attacks.main([*words, "--count", "3"]) == 1
        and attacks.main([*words, "--count", "1", "--seed", "1"]) == 0
    )
    assert done == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert attacks.main([*words, "--summary"]) == 1
    assert "attack 1: silent    x" in capsys.readouterr().out
    assert attacks.main([*words, "--count", "3"]) == 1 and len(done) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("files", 24), ("kills", 3)])
def test_attacks(kind: str, count: int, tmp_path: Path) -> None:
    words = [sys.executable, attacks.__file__, kind, "--count", str(count), "--results", str(tmp_path / "x")]
    subprocess.run(words, check=True)
