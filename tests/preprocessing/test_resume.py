"""Interrupted preparations: the same command continues them, and the files are those of one run."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.data.indexed import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import InputError
from megatron.preprocessing import blocks
from megatron.preprocessing import preprocess as module
from megatron.preprocessing.preprocess import PreprocessConfig, Report, preprocess
from megatron.tokenizer.config import TokenizerConfig

ROOT = Path(__file__).resolve().parents[2]
NULL = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1000)


class Work:
    """Encoding in this process, interrupted after `batches` batches."""

    batches: int | None = None

    def __call__(self, make: type, settings: object, items: Iterator, workers: int) -> Iterator:
        yield from map(make(settings), itertools.islice(items, self.batches))
        if self.batches is not None:
            raise KeyboardInterrupt


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    work = Work()
    monkeypatch.setattr(module, "map_in_order", work)
    monkeypatch.setattr(module, "SAVE_INTERVAL", 0.0)
    monkeypatch.setattr(blocks, "BATCH_BYTES", 100)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 40)
    return work


def run(source: Path | list[Path], output: Path, tokenizer: TokenizerConfig = NULL, **flags: Any) -> Report:
    sources = source if isinstance(source, list) else [source]
    return preprocess(
        PreprocessConfig(input=tuple(map(str, sources)), output_prefix=str(output), **flags), tokenizer
    )


def interrupt(work: Work, batches: int, *args: Any, **flags: Any) -> None:
    work.batches = batches
    with pytest.raises(KeyboardInterrupt):
        run(*args, **flags)
    work.batches = None


def lines(first: int, count: int) -> str:
    """Documents of one to seven tokens, and some without any."""
    texts = (" ".join(str((first + i) % 1000) for _ in range(i % 8)) for i in range(count))
    return "".join(json.dumps({"text": text, "other": f"{i % 9}"}) + "\n" for i, text in enumerate(texts))


def sources(folder: Path) -> list[Path]:
    """Files of all formats whose batches are cut by bytes, an empty and a blank one among them."""
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines(0, 40))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(300, 30).encode()))
    (folder / "c.jsonl").write_text("")
    (folder / "d.txt").write_text("".join(f"{i}\n{i + 1}\n\n" for i in range(60)))
    (folder / "e.txt").write_text(" \n\n")
    (folder / "f.jsonl").write_text(lines(700, 20).rstrip("\n"))
    return sorted(folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return dict(sorted(found.items()))


@pytest.mark.parametrize("flags", [{}, {"shard": "2/3"}, {"shard": "2/9", "append_eod": True}])
@pytest.mark.parametrize("txt", ["file", "blank-lines"])
def test_the_files_are_those_of_one_run(
    work: Work, tmp_path: Path, flags: dict[str, Any], txt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted again and again; each run cuts its batches elsewhere."""
    inputs, flags = sources(tmp_path / "in"), {**flags, "txt_documents": txt}
    whole = run(inputs, tmp_path / "whole/o", **flags)
    for size in range(60, 700, 40):
        monkeypatch.setattr(blocks, "BATCH_BYTES", size)
        interrupt(work, 3, inputs, tmp_path / "o/o", **flags)
        left = sorted(path.name.split(".", 1)[1] for path in (tmp_path / "o").iterdir())
        assert left == ["bin.part", "documents.part", "progress.part", "sizes.part"]
    report = run(inputs, tmp_path / "o/o", **flags)
    assert contents(tmp_path / "o") == contents(tmp_path / "whole")
    for name in ("records", "documents", "text_bytes", "bad_count"):
        assert getattr(report, name) == getattr(whole, name)
    assert [vars(o) | {"prefix": ""} for o in report.outputs] == [
        vars(o) | {"prefix": ""} for o in whole.outputs
    ]


@pytest.mark.parametrize("batches", [1, 2, 9])
def test_outputs_of_several_keys(work: Work, tmp_path: Path, batches: int) -> None:
    (tmp_path / "a.jsonl").write_text(lines(0, 60))
    flags = {"json_keys": ("text", "other")}
    run(tmp_path / "a.jsonl", tmp_path / "whole/o", **flags)
    interrupt(work, batches, tmp_path / "a.jsonl", tmp_path / "o/o", **flags)
    run(tmp_path / "a.jsonl", tmp_path / "o/o", **flags)
    assert contents(tmp_path / "o") == contents(tmp_path / "whole")


@pytest.mark.parametrize("full", ["text", "other"])
def test_a_full_disk_at_the_end_replaces_no_file(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """The index of one key does not fit: the files of no key are replaced, and the same command continues."""
    flags = {"json_keys": ("text", "other")}
    for name, count in (("old", 9), ("new", 60)):
        (tmp_path / name).write_text(lines(0, count))
    run(tmp_path / "old", tmp_path / "o/o", **flags)
    run(tmp_path / "new", tmp_path / "whole/o", **flags)
    before, whole = contents(tmp_path / "o"), contents(tmp_path / "whole")
    original = IndexedDatasetWriter._write_index

    def write_index(writer: IndexedDatasetWriter) -> None:
        if writer.prefix.endswith(f"_{full}_document"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(writer)

    with monkeypatch.context() as patch, pytest.raises(InputError, match=r"cannot be written: No space left"):
        patch.setattr(IndexedDatasetWriter, "_write_index", write_index)
        run(tmp_path / "new", tmp_path / "o/o", **flags)
    left = contents(tmp_path / "o")
    assert {name: left[name] for name in before} == before
    parts = {name.split(".", 1)[1] for name in left.keys() - before.keys()}
    assert parts == {"bin.part", "documents.part", "progress.part", "sizes.part"}
    assert [p.name for p in (tmp_path / "o").glob("*.progress.part")] == ["o_text_document.progress.part"]
    run(tmp_path / "new", tmp_path / "o/o", **flags)
    assert contents(tmp_path / "o") == whole


@pytest.mark.parametrize("full", ["text", "other"])
def test_a_full_disk_under_a_tokenizer_replaces_no_file(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    flags = {"json_keys": ("text", "other"), "shard": "1/1"}
    for name, count in (("old", 9), ("new", 60)):
        (tmp_path / name).write_text(lines(0, count))
    run(tmp_path / "old", tmp_path / "o/o", **flags)
    run(tmp_path / "new", tmp_path / "whole/o", **flags)
    before, whole, write = contents(tmp_path / "o"), contents(tmp_path / "whole"), module.write_tokenizer

    def write_tokenizer(prefix: str, *rest: Any) -> Any:
        renames = write(prefix, *rest)
        if f"_{full}_" in prefix:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return renames

    with monkeypatch.context() as patch, pytest.raises(InputError, match=r"cannot be written: No space left"):
        patch.setattr(module, "write_tokenizer", write_tokenizer)
        run(tmp_path / "new", tmp_path / "o/o", **flags)
    left = contents(tmp_path / "o")
    assert {name: left[name] for name in before} == before
    parts = {name.split(".", 1)[1] for name in left.keys() - before.keys()}
    assert parts == {"bin.part", "documents.part", "progress.part", "sizes.part"}
    run(tmp_path / "new", tmp_path / "o/o", **flags)
    assert contents(tmp_path / "o") == whole


def test_a_full_disk_under_the_tokenizer_keeps_the_progress(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "a.jsonl").write_text(lines(0, 60))
    run(tmp_path / "a.jsonl", tmp_path / "whole/o")

    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(InputError, match=r"cannot be written: No space left"):
        patch.setattr(module, "write_tokenizer", write)
        run(tmp_path / "a.jsonl", tmp_path / "o/o")
    capsys.readouterr()
    run(tmp_path / "a.jsonl", tmp_path / "o/o")
    assert "continuing an interrupted run after 60 documents" in capsys.readouterr().err
    assert contents(tmp_path / "o") == contents(tmp_path / "whole")


def test_rows_of_a_table(work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("megatron.preprocessing.documents.BATCH_ROWS", 7)
    parquet.write_table(pyarrow.table({"text": [str(i) for i in range(50)]}), tmp_path / "a.parquet")
    interrupt(work, 3, tmp_path / "a.parquet", tmp_path / "o")
    monkeypatch.setattr("megatron.preprocessing.documents.BATCH_ROWS", 8)
    run(tmp_path / "a.parquet", tmp_path / "o")
    assert IndexedDataset(tmp_path / "o_text_document").tokens.tolist() == list(range(50))


def test_inputs_that_were_read_are_not_read_again(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text(lines(0, 30))
    inputs = sorted(tmp_path.glob("*.jsonl"))
    interrupt(work, 12, inputs, tmp_path / "o")
    assert "the same command continues from the progress in" in capsys.readouterr().err
    opened = []
    open_input = module.read_batches.__globals__["open_input"]
    monkeypatch.setattr(
        "megatron.preprocessing.documents.open_input",
        lambda address: opened.append(Path(address).name) or open_input(address),
    )
    run(inputs, tmp_path / "o")
    assert opened == ["b.jsonl", "c.jsonl"]
    assert "continuing an interrupted run after " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"append_eod": True}, "--append-eod: is True, but was False in the interrupted run"),
        ({"txt_documents": "blank-lines"}, "--txt-documents: is blank-lines, but was file"),
        ({"json_keys": ("text", "other")}, r"--json-keys: is \['text', 'other'\], but was \['text'\]"),
        (
            {"tokenizer": TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=999)},
            r"--tokenizer: is NullTokenizer \(1,000 ids\).* but was NullTokenizer \(1,001 ids\)",
        ),
        ({"source": "longer"}, "--input: is 1 inputs .*, but was 1 inputs"),
    ],
)
def test_other_settings_are_refused_by_name(
    work: Work, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(lines(0, 30))
    interrupt(work, 2, source, tmp_path / "o")
    before = contents(tmp_path)
    if change.pop("source", None):
        source.write_text(lines(0, 31))
        before = contents(tmp_path)
    with pytest.raises(InputError, match=rf"{message}.*remove .*/o_text_document\.\*\.part"):
        run(source, tmp_path / "o", **change)
    assert contents(tmp_path) == before


def test_a_bad_line_can_be_skipped_afterwards(work: Work, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(lines(0, 30) + "bad\n" + lines(30, 30))
    with pytest.raises(InputError, match=r"a\.jsonl:31: is not JSON"):
        run(source, tmp_path / "o/o")
    interrupt(work, 12, source, tmp_path / "o/o", on_bad_line="skip")
    with pytest.raises(InputError, match=r"a\.jsonl:31: is not JSON"):
        run(source, tmp_path / "o/o")
    report = run(source, tmp_path / "o/o", on_bad_line="skip")
    assert (report.bad_count, report.documents) == (1, 60)
    run(source, tmp_path / "whole/o", on_bad_line="skip")
    assert contents(tmp_path / "o") == contents(tmp_path / "whole")


def test_damaged_progress(work: Work, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(lines(0, 60))
    interrupt(work, 4, source, tmp_path / "o/o")
    kept = contents(tmp_path / "o")
    progress, tokens = (tmp_path / f"o/o_text_document.{name}.part" for name in ("progress", "bin"))
    for content in (b"", kept[progress.name][:-9], kept[progress.name].replace(b'"read"', b'"raed"')):
        progress.write_bytes(content)
        with pytest.raises(
            InputError, match=r"progress\.part is damaged.*; remove .*\.\*\.part to start again"
        ):
            run(source, tmp_path / "o/o")
    progress.write_bytes(kept[progress.name])
    tokens.write_bytes(kept[tokens.name][:-1])
    with pytest.raises(InputError, match=r"bin\.part has fewer than the .* bytes .*; remove .*\.\*\.part"):
        run(source, tmp_path / "o/o")
    for part in (tmp_path / "o").glob("*.part"):
        part.unlink()
    run(source, tmp_path / "o/o")
    assert {path.name.rsplit(".")[-1] for path in (tmp_path / "o").iterdir()} == {"bin", "idx", "tokenizer"}


PROGRAM = """
import sys
from megatron.cli import run_command
from megatron.commands import preprocess_data
from megatron.preprocessing import preprocess
preprocess.SAVE_INTERVAL = 0.01
run_command(preprocess_data.main)
"""


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_a_signal_ended_continues(stop: signal.Signals, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text((json.dumps({"text": " ".join(map(str, range(500)))}) + "\n") * 5_000)
    command = [sys.executable, "-c", PROGRAM, "--input", source, "--tokenizer-type", "NullTokenizer"]
    command += ["--vocab-size", "1000", "--workers", "2", "--log-interval", "1000", "--output-prefix"]
    tool = subprocess.Popen(
        [*command, tmp_path / "o/o"], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert tool.stderr is not None
    while not (tmp_path / "o/o_text_document.progress.part").exists():
        assert tool.poll() is None
        time.sleep(0.01)
    os.kill(tool.pid, stop)
    errors = tool.communicate(timeout=120)[1]
    assert tool.returncode in (128 + stop, -stop)
    assert "Traceback" not in errors
    done = subprocess.run([*command, tmp_path / "o/o"], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "continuing an interrupted run after" in done.stderr
    dataset = IndexedDataset(tmp_path / "o/o_text_document")
    assert len(dataset) == 5_000
    assert dataset.num_tokens == 2_500_000 and (dataset.tokens.reshape(-1, 500)[:, -1] == 499).all()
    assert not list(tmp_path.glob("o/*.part"))
