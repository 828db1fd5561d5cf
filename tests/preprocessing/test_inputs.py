"""Inputs of preprocessing: order, folders, pipes, addresses of fsspec, an S3 server, Hugging Face datasets."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.errors import InputError
from megatron.preprocessing.documents import documents, read_batches
from megatron.preprocessing.inputs import Input, find_inputs, total_size
from megatron.preprocessing.preprocess import PreprocessConfig, preprocess
from megatron.tokenizer.config import TokenizerConfig


def texts(*patterns: object, keys: tuple[str, ...] = ("text",)) -> list[str]:
    """The first text of each document of all inputs."""
    found: list[str] = []
    for batch in read_batches([source.address for source in find_inputs([str(p) for p in patterns])], keys):
        good, bad = documents(batch, keys)
        assert not bad
        found += [document.texts[0] for document in good]
    return found


def lines(*words: str) -> bytes:
    return "".join(json.dumps({"text": word}) + "\n" for word in words).encode()


def addresses(*patterns: object) -> list[str]:
    return [source.address for source in find_inputs([str(pattern) for pattern in patterns])]


def test_files_and_patterns(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt", "[x].jsonl"):
        (tmp_path / name).write_bytes(b"12")
    (tmp_path / "d.jsonl").mkdir()
    names = [Path(f).name for f in addresses(f"{tmp_path}/c.txt", f"{tmp_path}/?.jsonl")]
    assert names == ["c.txt", "a.jsonl", "b.jsonl"]
    assert find_inputs([f"{tmp_path}/[x].jsonl"]) == [Input(f"{tmp_path}/[x].jsonl", 2)]
    with pytest.raises(InputError, match=r"--input: .*/no.jsonl does not exist"):
        find_inputs([f"{tmp_path}/no.jsonl"])
    with pytest.raises(InputError, match=r"--input: .*/\*.zip matches no file"):
        find_inputs([f"{tmp_path}/*.zip"])


def test_a_folder_is_read_in_the_order_of_its_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = (
        "b/2.jsonl",
        "b/10.jsonl.gz",
        "a.txt",
        "b.json",
        "README.md",
        "b/.hidden.txt",
        ".git/x.txt",
        "c/x",
    )
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = [os.path.relpath(f, tmp_path) for f in addresses(tmp_path)]
    assert found == ["a.txt", "b.json", "b/10.jsonl.gz", "b/2.jsonl"]
    note = capsys.readouterr().err
    assert note == (
        f"note: --input: {tmp_path}: 4 files to read; 2 others have no known suffix, such as README.md\n"
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"--input: .*/empty is a folder without files"):
        find_inputs([str(tmp_path / "empty")])
    with pytest.raises(InputError, match=r"--input: .*/c has no file with one of the suffixes \.txt \.jsonl"):
        find_inputs([str(tmp_path / "c")])


def test_folders_that_a_pattern_matches_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.jsonl", "sub/b.jsonl"):
        (tmp_path / name).write_bytes(b"x")
    assert addresses(f"{tmp_path}/*") == [f"{tmp_path}/a.jsonl"]
    assert capsys.readouterr().err == (
        f"note: --input: {tmp_path}/*: matching folders are not read: {tmp_path}/sub (1 in all); name a folder itself "
        "to read its files\n"
    )
    assert addresses(f"{tmp_path}/**") == [f"{tmp_path}/a.jsonl", f"{tmp_path}/sub/b.jsonl"]
    assert capsys.readouterr().err == ""
    with pytest.raises(InputError, match=r"--input: .*/s\* matches no file, only folders$"):
        find_inputs([f"{tmp_path}/s*"])


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    """Two links lead to one folder, which has a link back."""
    corpus, linked = tmp_path / "corpus", tmp_path / "linked"
    (linked / "part").mkdir(parents=True)
    corpus.mkdir()
    for path in (corpus / "c.jsonl", linked / "a.jsonl", linked / "part" / "b.jsonl"):
        path.write_bytes(b"x")
    (corpus / "one").symlink_to(linked)
    (corpus / "two").symlink_to(linked)
    (linked / "part" / "back").symlink_to(corpus)
    found = [os.path.relpath(f, corpus) for f in addresses(corpus)]
    assert found == ["c.jsonl", "one/a.jsonl", "one/part/b.jsonl"]


def test_a_pipe_is_read_though_it_cannot_seek(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(lines("1 2", "3"),), daemon=True)
    writer.start()
    assert total_size(find_inputs([str(pipe)])) is None
    config = PreprocessConfig(
        input=(str(pipe),), output_prefix=str(tmp_path / "o"), workers=1, log_interval=1
    )
    report = preprocess(config, TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9))
    writer.join()
    assert (report.documents, report.outputs[0].tokens) == (2, 3)


def test_addresses_of_fsspec(tmp_path: Path) -> None:
    """Here of its local and memory file systems, which need no server."""
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    try:
        memory.pipe({"/corpus/b.jsonl": lines("b"), "/corpus/a.jsonl.gz": gzip.compress(lines("a"))})
        memory.pipe({"/corpus/sub/c.txt": b"c\n\nd\n", "/corpus/sub/LICENSE": b"x"})
        assert texts("memory://corpus/b.jsonl") == ["b"]
        assert texts("memory://corpus/*.jsonl*") == ["a", "b"]
        assert texts("memory://corpus") == ["a", "b", "c\n\nd"]
        with pytest.raises(InputError, match=r"^--input: memory://corpus/no\.jsonl does not exist$"):
            find_inputs(["memory://corpus/no.jsonl"])
        with pytest.raises(InputError, match=r"^--input: memory://corpus/\*\.zip matches no file$"):
            find_inputs(["memory://corpus/*.zip"])
    finally:
        memory.store.clear()
    (tmp_path / "a.jsonl").write_bytes(lines("local"))
    assert texts(f"file://{tmp_path}/*.jsonl") == ["local"]
    assert texts(f"simplecache::file://{tmp_path}/*.jsonl") == ["local"]
    with pytest.raises(
        InputError, match=r"^--input: nosuch://x cannot be listed: Protocol not known: nosuch"
    ):
        find_inputs(["nosuch://x"])


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a bucket on a local S3 server."""
    for library in ("s3fs", "flask", "boto3"):
        pytest.importorskip(library)
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host.replace('0.0.0.0', '127.0.0.1')}:{port}"
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "no_proxy": "127.0.0.1,localhost",
    }.items():
        monkeypatch.setenv(name, value)
    import boto3
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    try:
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="corpus")
        yield "s3://corpus"
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()


@pytest.mark.timeout(120)
def test_a_corpus_on_s3(bucket: str, tmp_path: Path) -> None:
    import s3fs

    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    local = tmp_path / "c.parquet"
    parquet.write_table(pyarrow.table({"text": ["5", "6"]}), local)
    files = s3fs.S3FileSystem()
    files.pipe("corpus/a/1.jsonl", lines("1 2", "3"))
    files.pipe("corpus/a/2.jsonl.gz", gzip.compress(lines("4")))
    files.pipe("corpus/a/3.parquet", local.read_bytes())
    config = PreprocessConfig(input=(f"{bucket}/a",), output_prefix=str(tmp_path / "o"), workers=1)
    report = preprocess(config, TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9))
    assert (report.documents, report.outputs[0].tokens) == (5, 6)
    assert texts(f"{bucket}/a/*.jsonl*") == ["1 2", "3", "4"]
    assert total_size(find_inputs([f"{bucket}/a/1.jsonl"])) == len(lines("1 2", "3"))
    with pytest.raises(InputError, match=f"^--input: {bucket}/b.jsonl does not exist$"):
        find_inputs([f"{bucket}/b.jsonl"])
    files.pipe("corpus/bad.jsonl", lines("1") + b"bad\n")
    (batch,) = read_batches([f"{bucket}/bad.jsonl"], ["text"])
    assert documents(batch, ["text"])[1][0].startswith(f"{bucket}/bad.jsonl:2: is not JSON")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def test_saved_hugging_face_datasets(tmp_path: Path, offline: None) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [f"text {i}" for i in range(600)]
    datasets.Dataset.from_dict({"id": range(600), "text": rows}).save_to_disk(tmp_path / "one")
    both = {
        "train": datasets.Dataset.from_dict({"text": ["a"]}),
        "test": datasets.Dataset.from_dict({"text": ["b"]}),
    }
    datasets.DatasetDict(both).save_to_disk(tmp_path / "two")
    assert texts(f"hf:{tmp_path}/one") == rows
    assert texts(f"hf:{tmp_path}/two") == ["a"] and texts(f"hf:{tmp_path}/two:test") == ["b"]
    last = list(read_batches([f"hf:{tmp_path}/one"], ["text"]))[-1]
    assert last.first + last.records - 1 == 600
    for name, message in {
        "two:valid": "has no split valid; its splits: train, test",
        "two:x:train": "a saved dataset has no configs; write hf:FOLDER or hf:FOLDER:SPLIT",
        "one:train": "this folder holds a single split; write hf:FOLDER",
        "three": "there is no folder ",
        "one::": "write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT",
    }.items():
        with pytest.raises(InputError, match=f"^--input: hf:{tmp_path}/{name}: {message}"):
            texts(f"hf:{tmp_path}/{name}")
    with pytest.raises(InputError, match=r"one: has no column 'body'; its columns: id, text \(--json-keys\)"):
        texts(f"hf:{tmp_path}/one", keys=("body",))
    with pytest.raises(InputError, match=r"--input: .*/one is a Hugging Face dataset; write hf:.*/one$"):
        find_inputs([str(tmp_path / "one")])


def test_versions_of_datasets_that_run_code_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    with pytest.raises(
        InputError, match=r"hf:x: datasets 3\.6\.0 may run code of a dataset; pip install 'datasets>=4'"
    ):
        texts("hf:x")


def test_a_hugging_face_dataset_of_files_is_streamed(tmp_path: Path, offline: None) -> None:
    """The same call that reads a dataset of the hub, here of a folder with files and configs."""
    pytest.importorskip("datasets")
    for name, word in {"en/train": "one", "en/test": "two", "fr/train": "un"}.items():
        path = tmp_path / "data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lines(word))
    (tmp_path / "data/README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: default\n  data_files:\n  - {split: train, path: en/train.jsonl}\n"
        "  - {split: test, path: en/test.jsonl}\n"
        "- config_name: fr\n  data_files:\n  - {split: train, path: fr/train.jsonl}\n---\n"
    )
    name = f"hf:{tmp_path}/data"
    assert texts(name) == ["one"]
    assert texts(f"{name}:test") == ["two"]  # a split
    assert texts(f"{name}:fr") == ["un"]  # a config
    assert texts(f"{name}:default:test") == ["two"]
    with pytest.raises(InputError, match="data:fr:valid: has no split valid; its splits: train"):
        texts(f"{name}:fr:valid")
    with pytest.raises(InputError, match=r"has no column 'body'; its columns: text \(--json-keys\)"):
        texts(name, keys=("body",))


@pytest.mark.parametrize("pattern", ["", "*.jsonl"])
def test_a_link_to_nothing_is_refused(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n')
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=r"--input: .*/b\.jsonl cannot be read: No such file or directory"):
        find_inputs([str(tmp_path / pattern)])
