"""Measure the time to build the BERT sentence map of a large dataset, and the rate of building samples.

    python benchmarks/bert_data.py [--documents N] [--mean-sentences N] [--mean-length N] [--seq-length N]

Writes an index file with that many documents (its .bin file is sparse and takes no disk space). A new process opens the
data and builds the map for one epoch, and another one loads it from the cache. Then one thread builds samples from a
smaller dataset with tokens. Writes benchmarks/results/bert_data.json. Needs 12 bytes of disk per sentence and 12 per
sample in the temporary directory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.data.bert_dataset import BertDataset
from megatron.data.bert_index import CutRules, load_or_build
from megatron.data.bert_samples import SampleRules
from megatron.data.index_cache import IndexRequest, MappedArrays
from megatron.data.indexed import HEADER, MAGIC, IndexedDataset

CHUNK = 1 << 20
SMALL_DOCUMENTS = 5_000  # documents in the dataset for building samples
SAMPLES = 5_000
VOCABULARY = 30_522
CONTINUATION_PIECES = VOCABULARY // 5  # about the number of ## pieces in BERT's vocabulary


def draw_lengths(rng: np.random.Generator, mean: int, sigma: float, count: int) -> np.ndarray:
    """Draw log-normal integers, the distribution of sentence and document lengths."""
    return np.maximum(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count), 1).astype("<i8")


def make_data(prefix: Path, documents: int, mean_sentences: int, mean_length: int) -> int:
    """Write an index of random lengths and a .bin file of zeros. Returns the number of tokens."""
    rng = np.random.default_rng(0)
    counts = draw_lengths(rng, mean_sentences, 1.0, documents)
    sentences = int(counts.sum())
    tokens = 0
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, sentences, documents + 1))
        for begin in range(0, sentences, CHUNK):
            sizes = draw_lengths(rng, mean_length, 0.6, min(CHUNK, sentences - begin))
            ends = tokens + np.cumsum(sizes)
            file.seek(HEADER.size + 4 * begin)
            file.write(sizes.astype("<i4").data)
            file.seek(HEADER.size + 4 * sentences + 8 * begin)
            file.write(((ends - sizes) * 2).data)
            tokens = int(ends[-1])
        file.write(bytes(8))
        file.write(np.cumsum(counts).data)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * tokens)
    return tokens


def load_map(dataset: IndexedDataset, seq_length: int) -> MappedArrays:
    """Load the map for one epoch from the cache, or build it."""
    request = IndexRequest(
        dataset=dataset,
        documents=range(len(dataset.doc_idx) - 1),
        split="train",
        samples=1,
        seed=1234,
        cache=f"{dataset.prefix}-cache",
    )
    return load_or_build(request, CutRules.of(seq_length=seq_length, short_seq_prob=0.1, binary_head=True))


def measure(prefix: str, seq_length: int) -> dict[str, float]:
    """Open the data, then its map, and return the time and memory that this process needed."""
    start = time.perf_counter()
    dataset = IndexedDataset(prefix)
    opened = time.perf_counter()
    (rows,) = load_map(dataset, seq_length)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
    return {
        "sentences": len(dataset),
        "samples": len(rows),
        "open_seconds": round(opened - start, 2),
        "map_seconds": round(done - opened, 2),
        "total_seconds": round(done - start, 2),
        "total_cpu_seconds": round(time.process_time(), 2),
        "peak_rss_gb": round(peak * 1024 / 1e9, 2),
    }


def measure_in_new_process(prefix: Path, seq_length: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", str(prefix), "--seq-length", str(seq_length)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def samples_per_cpu_second(prefix: Path, seq_length: int) -> int:
    """Return the samples that one thread builds per second of CPU time, the best of three runs."""
    dataset = IndexedDataset(prefix)
    rules = SampleRules(
        seq_length=seq_length,
        mask_prob=0.15,
        binary_head=True,
        vocab_size=VOCABULARY,
        cls=101,
        sep=102,
        mask=103,
        pad=0,
        continues=np.arange(VOCABULARY) >= VOCABULARY - CONTINUATION_PIECES,
    )
    samples = BertDataset(dataset, load_map(dataset, seq_length), rules, seed=1234)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        for i in range(SAMPLES):
            samples[i]
        seconds.append(time.process_time() - start)
    return round(SAMPLES / min(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=10**7, help="documents in the dataset")
    parser.add_argument("--mean-sentences", type=int, default=20, help="sentences per document, on average")
    parser.add_argument("--mean-length", type=int, default=25, help="tokens per sentence, on average")
    parser.add_argument("--seq-length", type=int, default=512, help="tokens per sample")
    parser.add_argument("--measure", metavar="PREFIX", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.seq_length)))
        return
    with tempfile.TemporaryDirectory() as folder:
        prefix, small = Path(folder, "data"), Path(folder, "small")
        make_data(prefix, arguments.documents, arguments.mean_sentences, arguments.mean_length)
        results = {
            "build": measure_in_new_process(prefix, arguments.seq_length),
            "from_cache": measure_in_new_process(prefix, arguments.seq_length),
        }
        tokens = make_data(small, SMALL_DOCUMENTS, arguments.mean_sentences, arguments.mean_length)
        ids = np.random.default_rng(1).integers(1000, VOCABULARY, tokens)
        small.with_suffix(".bin").write_bytes(ids.astype("<u2").data)
        results["samples_per_cpu_second"] = samples_per_cpu_second(small, arguments.seq_length)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    record = {
        "command": " ".join(["python", "benchmarks/bert_data.py", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "load_average_of_a_minute": round(os.getloadavg()[0], 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"numpy {np.__version__}",
        "documents": arguments.documents,
        "mean_sentences": arguments.mean_sentences,
        "mean_length": arguments.mean_length,
        "seq_length": arguments.seq_length,
        "results": results,
    }
    text = json.dumps(record, indent=2)
    (ROOT / "benchmarks" / "results" / "bert_data.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
