"""The generated pages of docs/ match the code."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.errors import InputError

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("tool", ["document_flags", "document_api"])
def test_references_are_up_to_date(tool: str) -> None:
    command = [sys.executable, f"tools/{tool}.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_readmes_config_file_trains(tmp_path: Path, pretrain: Callable[..., str]) -> None:
    (settings,) = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    file = tmp_path / "small.yaml"
    file.write_text(settings)
    flags = (
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 300 --num-workers 0 --eval-iters 0 --lr 1e-3 "
        "--global-batch-size 1 --micro-batch-size 1"
    )
    out = pretrain(
        "--config", file, *flags.split(), "--device", "cpu", "--train-iters", 1, "--log-interval", 1
    )
    assert "  1/1  loss " in out
    # Embedding and output layer; per layer QKV, projection, gated MLP and two norms; the final norm.
    layer = 256 * (256 + 2 * 2 * 32) + 256 * 256 + 3 * 256 * 640 + 2 * 256
    assert f"{2 * 301 * 256 + 4 * layer + 256:,} parameters" in out


def test_a_stale_page_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import document_flags

    monkeypatch.setattr(document_flags, "ROOT", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    document_flags.main(["--check"])
    for name in ("flags.md", "coming-from-megatron.md"):
        page = tmp_path / "docs" / name
        page.write_text(page.read_text(encoding="utf-8").replace("| `--", "| `---", 1), encoding="utf-8")
        with pytest.raises(
            InputError, match=rf"^docs/{name} is out of date; run python tools/document_flags"
        ):
            document_flags.main(["--check"])
        document_flags.main([])
        document_flags.main(["--check"])


def test_the_reference_has_all_of_the_interface() -> None:
    from megatron import api

    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = re.findall(r"^### (\w+)$", page, re.M) + re.findall(r"^\| `(\w+Config)` \|", page, re.M)
    documented_elsewhere = {"GPT", "bert", "RunConfig", "Tokenizer"}
    assert sorted({*names, *documented_elsewhere}) == sorted({*api.__all__, *documented_elsewhere})
    assert "\n    " not in page.replace(
        "\n    \n", ""
    )  # an unknown section of a docstring would be shown as code


def test_every_page_is_on_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    assert sorted(re.findall(r": ([\w-]+\.md)$", site, re.M)) == pages


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Pages load nothing from other hosts.
    page = (tmp_path / "site" / "tutorial.html").read_text(encoding="utf-8")
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:)?//', page)
