from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.data.batch import Batch
from megatron.data.bert_dataset import build_bert_datasets
from megatron.data.config import DataConfig
from megatron.data.gpt_dataset import build_gpt_datasets
from megatron.data.loader import eval_batches, train_batches
from megatron.errors import InputError, TransientFault
from megatron.variants.mock_data import MockBertDataset, MockGPTDataset

LAYOUT = {"micro_batch_size": 2, "dp_rank": 1, "dp_size": 2, "pin_memory": False}


def config(workers: int = 0, **flags) -> DataConfig:
    return DataConfig(seq_length=8, num_workers=workers, **flags)


def mock(samples: int = 60) -> MockGPTDataset:
    return MockGPTDataset(samples=samples, config=config(), vocab_size=50, seed=(1, 0))


def equal(ours, theirs) -> bool:
    def same(a: Batch, b: Batch) -> bool:
        pairs = zip(a.items(), b.items(), strict=True)
        return type(a) is type(b) and all(m == n and torch.equal(x, y) for (m, x), (n, y) in pairs)

    return all(same(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_batches_do_not_depend_on_workers(kind: str) -> None:
    def first(workers: int) -> list:
        batches = train_batches(mock(), config(workers, dataloader_type=kind), consumed_samples=8, **LAYOUT)
        return list(itertools.islice(batches, 12))

    expected = first(0)
    assert expected[0].tokens.shape == (2, 8)
    assert {k: v.dtype for k, v in expected[0].items()} == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
    }
    if kind == "single":
        assert expected[0].tokens[0].tolist() == mock()[8 + 2]["text"][:-1].tolist()
        assert expected[0].labels[0].tolist() == mock()[8 + 2]["text"][1:].tolist()
    for workers in (1, 2):
        assert equal(first(workers), expected)


def test_training_resumes_at_consumed_samples() -> None:
    batches = train_batches(mock(), config(), consumed_samples=0, **LAYOUT)
    whole = list(itertools.islice(batches, 15))
    later = train_batches(mock(), config(), consumed_samples=5 * 4, **LAYOUT)
    assert equal(itertools.islice(later, 10), whole[5:])


@pytest.mark.parametrize("workers", [0, 2])
def test_training_out_of_samples(workers: int) -> None:
    batches = train_batches(mock(19), config(workers), consumed_samples=4, **LAYOUT)
    for _ in range(3):
        next(batches)
    with pytest.raises(
        InputError, match="no samples left: the training data has 19, this run started at sample 4"
    ):
        next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_worker_error_is_one_line(corpus, workers: int) -> None:
    flags = config(workers, data_path=[corpus.prefix], split="1")
    dataset = build_gpt_datasets(flags, samples=(40, 0, 0), seed=1, vocab_size=300)["train"]
    with pytest.raises(InputError, match=r"corpus\.bin: token .* the vocabulary has 300 ids") as caught:
        list(itertools.islice(train_batches(dataset, flags, consumed_samples=0, **LAYOUT), 20))
    assert "\n" not in str(caught.value)


def test_a_killed_worker_is_a_transient_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    monkeypatch.setattr(
        iterator._try_get_data, "__defaults__", (0.2,)
    )  # seconds between looks at the workers
    before = set(multiprocessing.active_children())
    batches = train_batches(mock(), config(1), consumed_samples=0, **LAYOUT)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(
        TransientFault, match=r"^a process that reads data has died: .*; if memory ran out, lower"
    ):
        list(batches)


def test_a_file_truncated_under_a_run_is_named(corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading behind the end of a mapped file ends a worker by SIGBUS."""
    iterator = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    monkeypatch.setattr(iterator._try_get_data, "__defaults__", (0.2,))
    flags = config(1, data_path=[corpus.prefix], split="1")
    dataset = build_gpt_datasets(flags, samples=(400, 0, 0), seed=1, vocab_size=2000)["train"]
    batches = train_batches(dataset, flags, consumed_samples=0, **LAYOUT)
    next(batches)
    os.truncate(corpus.bin_path, 0)
    with pytest.raises(InputError, match=r"corpus\.bin: 0 bytes, but .*; one of the files is truncated"):
        list(batches)


class FaultHandlerProbe(MockGPTDataset):
    def collate(self, samples):
        raise InputError(f"faulthandler is enabled: {faulthandler.is_enabled()}")


def test_workers_print_where_a_signal_ends_them() -> None:
    dataset = FaultHandlerProbe(samples=60, config=config(), vocab_size=50, seed=(1, 0))
    with pytest.raises(InputError, match="enabled: True"):
        next(train_batches(dataset, config(1), consumed_samples=0, **LAYOUT))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_pinned_by_a_thread(monkeypatch, workers: int) -> None:
    """A patched `pin_memory` records its thread, since pinning itself needs a GPU."""
    threads = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread())
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    samples, layout = range(24), LAYOUT | {"pin_memory": True}
    expected = list(eval_batches(mock(), config(), samples=samples, **LAYOUT))
    assert equal(eval_batches(mock(), config(workers), samples=samples, **layout), expected)
    assert len(threads) == len(expected) * len(list(expected[0].items()))
    assert len(set(threads)) == 1 and threads[0] is not threading.main_thread()

    batches = train_batches(mock(7), config(workers), consumed_samples=0, **layout)
    next(batches)
    with pytest.raises(InputError, match="no samples left"):
        next(batches)
    batches = train_batches(mock(), config(workers), consumed_samples=0, **layout)
    next(batches)
    batches.close()
    assert not any(thread.is_alive() for thread in threads)
    assert not multiprocessing.active_children()


class RecordingDataset(MockGPTDataset):
    """Creates a file for each sample that any process reads."""

    folder: Path

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        (self.folder / str(index)).touch()
        return super().__getitem__(index)


@pytest.mark.parametrize(("workers", "pin"), [(1, False), (2, True), (0, True)])
def test_global_batch_is_prefetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int, pin: bool
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    dataset = RecordingDataset(samples=60, config=config(), vocab_size=50, seed=(1, 0))
    dataset.folder = tmp_path
    layout = LAYOUT | {"pin_memory": pin}
    batches = train_batches(dataset, config(workers), consumed_samples=0, ahead=6, **layout)
    next(batches)
    expected = {str(sample) for step in range(7) for sample in (4 * step + 2, 4 * step + 3)}
    deadline = time.monotonic() + 60
    while not expected <= {path.name for path in tmp_path.iterdir()}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    batches.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_reads_every_sample_once(workers: int) -> None:
    dataset, samples = mock(), range(3, 16)
    expected = sorted(tuple(dataset[i]["text"][:-1].tolist()) for i in samples)
    seen, lengths = [], set()
    for rank in range(3):
        layout = LAYOUT | {"dp_rank": rank, "dp_size": 3}
        batches = list(eval_batches(dataset, config(workers), samples=samples, **layout))
        lengths.add(len(batches))
        assert all(batch.seq_length == 8 for batch in batches)
        seen += [tuple(row) for batch in batches for row in batch.tokens.tolist()]
    assert sorted(seen) == expected
    assert lengths == {3}


def test_evaluation_out_of_samples() -> None:
    with pytest.raises(InputError, match="evaluation needs samples 50 to 61, but the data has 60"):
        eval_batches(mock(), config(), samples=range(50, 61), **LAYOUT)


def test_global_rng_state_is_unchanged() -> None:
    before = torch.get_rng_state()
    for workers in (0, 1):
        list(eval_batches(mock(), config(workers), samples=range(8), **LAYOUT))
    assert torch.equal(torch.get_rng_state(), before)


def test_document_ids_with_reset_attention_mask() -> None:
    flags = config(reset_attention_mask=True)
    dataset = MockGPTDataset(samples=60, config=flags, vocab_size=50, seed=(1, 0), eod=3)
    batch = next(train_batches(dataset, flags, consumed_samples=0, **LAYOUT))
    assert batch.document_ids.shape == (2, 8)


def mock_bert(samples: int = 60) -> MockBertDataset:
    return MockBertDataset(samples, DataConfig(seq_length=16), vocab_size=50, seed=(1, 0))


def test_bert_batches() -> None:
    def first(workers: int) -> list:
        flags = DataConfig(seq_length=16, num_workers=workers)
        batches = train_batches(mock_bert(), flags, consumed_samples=8, **LAYOUT)
        return list(itertools.islice(batches, 12))

    expected = first(0)
    samples = [mock_bert()[8 + 2], mock_bert()[8 + 3]]  # of the second of two replicas
    longest = max(int(sample["padding_mask"].sum()) for sample in samples)
    most = max(int(sample["loss_mask"].sum()) for sample in samples)
    names = {"tokens": "text", "tokentype_ids": "types", "padding_mask": "padding_mask"}
    rows = dict.fromkeys(names, ((2, -(-longest // 8) * 8), torch.int64))
    rows |= dict.fromkeys(("positions", "labels", "loss_mask"), ((2, most), torch.int64))
    rows |= {"loss_mask": ((2, most), torch.float32), "is_random": ((2,), torch.int64)}
    assert {name: (tuple(v.shape), v.dtype) for name, v in expected[0].items()} == rows
    for i, sample in enumerate(samples):
        row = {name: values[i] for name, values in expected[0].items()}
        for name, theirs in names.items():
            assert row[name].tolist() == sample[theirs][: len(row[name])].tolist()
        masked = row["loss_mask"].bool()
        assert row["positions"][masked].tolist() == np.flatnonzero(sample["loss_mask"]).tolist()
        assert row["labels"][masked].tolist() == [x for x in sample["labels"].tolist() if x >= 0]
        assert row["is_random"] == sample["is_random"]
    for workers in (1, 2):
        assert equal(first(workers), expected)


def test_bert_evaluation_reads_every_sample_once() -> None:
    flags, samples, seen = DataConfig(seq_length=16, num_workers=0), range(3, 16), []
    for rank in range(3):
        layout = LAYOUT | {"dp_rank": rank, "dp_size": 3}
        for batch in eval_batches(mock_bert(), flags, samples=samples, **layout):
            assert batch.seq_length in (8, 16) and len(batch.is_random) == batch.num_sequences
            seen += [tuple(row) for row in F.pad(batch.tokens, (0, 16 - batch.seq_length)).tolist()]
    assert sorted(seen) == sorted(tuple(mock_bert()[i]["text"].tolist()) for i in samples)


def test_bert_batches_are_padded_to_their_longest_sample() -> None:
    dataset = MockBertDataset(60, DataConfig(seq_length=61), vocab_size=50, seed=(1, 0), length_multiple=12)
    lengths = [int(dataset[i]["padding_mask"].sum()) for i in range(60)]
    seen = set()
    for sizes in ([i] for i in range(60)):
        length = dataset.collate([dataset[i] for i in sizes]).seq_length
        assert length == min(-(-max(lengths[i] for i in sizes) // 12) * 12, 61)
        seen.add(length)
    assert seen == {36, 48, 60, 61}
    assert dataset.collate([]).tokens.shape == (0, 12)


def test_bert_blend_batches(write_documents, bert_tokenizer) -> None:
    files = [write_documents([[[5 + i] * 4, [6 + i] * 4]] * 3, f"part{i}") for i in range(2)]
    flags = DataConfig(seq_length=16, train_data_path=[file.prefix for file in files], num_workers=1)
    dataset = build_bert_datasets(flags, samples=(40, 0, 0), seed=1, tokenizer=bert_tokenizer)["train"]
    batches = train_batches(dataset, flags, consumed_samples=0, **LAYOUT)
    assert next(batches).tokens[0].tolist() == dataset[2]["text"].tolist()


SIGNAL_SCRIPT = """
import itertools, signal, sys, time
from megatron.data.config import DataConfig
from megatron.variants.mock_data import MockGPTDataset
from megatron.data.loader import start_fork_server, train_batches

class Samples(MockGPTDataset):
    def __getitem__(self, i):
        assert "colorsys" in sys.modules  # forked with the imports of the server
        return super().__getitem__(i)

if __name__ == "__main__":
    start_fork_server("colorsys")
    received = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: received.append(n))
    config = DataConfig(seq_length=8, num_workers=2)
    dataset = Samples(samples=10_000, config=config, vocab_size=50, seed=(1, 0))
    layout = {"micro_batch_size": 2, "dp_rank": 0, "dp_size": 1, "pin_memory": False}
    batches = train_batches(dataset, config, consumed_samples=0, **layout)
    next(batches)
    print("reading", flush=True)
    while len(received) < 2:
        time.sleep(0.01)
    for _ in itertools.islice(batches, 500):
        pass
    print("read on after", len(received), "signals", flush=True)
    if sys.argv[1] == "killed":
        sys.stdin.read()
    raise RuntimeError("left by an error")
"""


@pytest.mark.parametrize("end", [pytest.param("killed", marks=pytest.mark.slow), "by an error"])
def test_workers_ignore_signals_and_end_with_training(tmp_path: Path, end: str) -> None:
    """Also, they need not import what the fork server has imported."""
    script = tmp_path / "script.py"
    script.write_text(SIGNAL_SCRIPT)
    process = subprocess.Popen(
        [sys.executable, script, end],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout.readline() == "reading\n"
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == "read on after 2 signals\n"
    if end == "killed":
        process.kill()
    # The pipes close only when every process that holds them has ended.
    _, errors = process.communicate(timeout=60)
    assert "left by an error" in errors or end == "killed"
    assert errors.count("Traceback") == (0 if end == "killed" else 1)
