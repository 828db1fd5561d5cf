"""Process groups, connections and memory of a process at up to 16,384 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_path.group_counts import RUNS, count, table

from megatron.parallel import mesh

LAUNCHING = Path(__file__).resolve().parents[2] / "docs" / "launching.md"


def test_the_table_of_the_page() -> None:
    text = LAUNCHING.read_text(encoding="utf-8")
    for row in table():
        assert row in text


@pytest.mark.parametrize(("ranks", "tensor", "stages"), RUNS)
def test_a_process_of_a_large_run(ranks: int, tensor: int, stages: int) -> None:
    found = count(ranks, tensor, stages)
    # The whole run, its axes, and the group of tied embeddings.
    assert found.communicators <= 5
    assert found.peers <= (ranks - 1) + (stages - 1) + (tensor - 1) + (ranks // tensor // stages - 1) + 1
    assert found.kilobytes < 10_000


def test_further_groups_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    sound, embedding = count(8, 2, 2), mesh._embedding_axis

    def twice(*arguments):
        mesh.dist.new_group(list(range(8)))
        return embedding(*arguments)

    monkeypatch.setattr(mesh, "_embedding_axis", twice)
    found = count(8, 2, 2)
    assert (found.communicators, found.splits, found.peers) == (
        sound.communicators + 1,
        sound.splits + 1,
        sound.peers + 7,
    )
