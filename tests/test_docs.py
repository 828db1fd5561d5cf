"""The generated pages of docs/ match the code that they are made from."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.flags import InputError

ROOT = Path(__file__).resolve().parent.parent


def test_flag_references_are_up_to_date() -> None:
    command = [sys.executable, "tools/document_flags.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stale_page_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import document_flags

    monkeypatch.setattr(document_flags, "ROOT", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    document_flags.main(["--check"])
    for name in ("flags.md", "nvidia-flags.md"):
        page = tmp_path / "docs" / name
        page.write_text(page.read_text(encoding="utf-8").replace("| `--", "| `---", 1), encoding="utf-8")
        with pytest.raises(
            InputError, match=rf"^docs/{name} is not up to date; run python tools/document_flags"
        ):
            document_flags.main(["--check"])
        document_flags.main([])
        document_flags.main(["--check"])
