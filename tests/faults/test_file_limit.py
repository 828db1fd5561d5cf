"""A run of many processes needs many open files."""

from __future__ import annotations

import resource

import pytest

from megatron.errors import InputError
from megatron.faults.file_limit import raise_file_limit


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Limits set on a machine with the usual soft limit, by rank 0 of 1,024 processes."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: found.append(limits))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1024")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return found


def test_the_soft_limit_is_raised(changed: list, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_file_limit()
    assert changed == [(4096, 4096)]
    monkeypatch.setenv("WORLD_SIZE", "1")
    raise_file_limit()
    assert len(changed) == 1


def test_a_limit_that_does_not_suffice(changed: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2048")
    with pytest.raises(InputError, match=r"^2048 processes need 4596 .* limit is 4096; run ulimit -n 4596 "):
        raise_file_limit()
    monkeypatch.setenv("RANK", "1")
    raise_file_limit()


def test_torchrun_has_the_limit_that_its_processes_start_with(
    changed: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(InputError, match=r"limit is 1024; run ulimit -n 2548 before torchrun$"):
        raise_file_limit()
    monkeypatch.setenv("WORLD_SIZE", "256")
    raise_file_limit()
