"""How long the BERT sentence map of a large data set takes to build, and how fast samples are made.

    python benchmarks/bert_data.py [--documents N] [--mean-sentences N] [--mean-length N] [--seq-length N]

Makes an index file of that many documents (the .bin beside it is sparse: it takes no room), then, in a fresh
process each, opens the data and builds the map for one epoch, and opens it again from the cache. Then makes samples,
of a smaller data set that has tokens, by one thread. Writes benchmarks/results/bert_data.json. Takes 12 bytes of disk
per sentence and 12 per sample in the temporary folder.
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
SMALLER = 5_000  # documents of the data that samples are made of
SAMPLES = 5_000
VOCABULARY = 30_522
CONTINUING = VOCABULARY // 5  # about as many pieces continue a word in the vocabulary of BERT


def lengths(rng: np.random.Generator, mean: int, sigma: float, count: int) -> np.ndarray:
    """Log-normal whole numbers, as the lengths of sentences and documents are."""
    return np.maximum(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count), 1).astype("<i8")


def make_data(prefix: Path, documents: int, mean_sentences: int, mean_length: int) -> int:
    """Write the index of such documents, and a .bin of zeros; gives the number of tokens."""
    rng = np.random.default_rng(0)
    counts = lengths(rng, mean_sentences, 1.0, documents)
    sentences = int(counts.sum())
    tokens = 0
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, sentences, documents + 1))
        for at in range(0, sentences, CHUNK):
            sizes = lengths(rng, mean_length, 0.6, min(CHUNK, sentences - at))
            ends = tokens + np.cumsum(sizes)
            file.seek(HEADER.size + 4 * at)
            file.write(sizes.astype("<i4").data)
            file.seek(HEADER.size + 4 * sentences + 8 * at)
            file.write(((ends - sizes) * 2).data)
            tokens = int(ends[-1])
        file.write(bytes(8))
        file.write(np.cumsum(counts).data)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * tokens)
    return tokens


def open_map(dataset: IndexedDataset, seq_length: int) -> MappedArrays:
    """The map of one epoch."""
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
    """Open the data and then its map; what that took in this process."""
    start = time.perf_counter()
    dataset = IndexedDataset(prefix)
    opened = time.perf_counter()
    (rows,) = open_map(dataset, seq_length)
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


def in_fresh_process(prefix: Path, seq_length: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", str(prefix), "--seq-length", str(seq_length)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def samples_per_cpu_second(prefix: Path, seq_length: int) -> int:
    """How many samples one thread makes in a second of its time, the best of three."""
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
        continues=np.arange(VOCABULARY) >= VOCABULARY - CONTINUING,
    )
    samples = BertDataset(dataset, open_map(dataset, seq_length), rules, seed=1234)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        for i in range(SAMPLES):
            samples[i]
        seconds.append(time.process_time() - start)
    return round(SAMPLES / min(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=10**7)
    parser.add_argument("--mean-sentences", type=int, default=20, help="in a document, on average")
    parser.add_argument("--mean-length", type=int, default=25, help="tokens in a sentence, on average")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--measure", metavar="PREFIX", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.seq_length)))
        return
    with tempfile.TemporaryDirectory() as folder:
        prefix, smaller = Path(folder, "data"), Path(folder, "smaller")
        make_data(prefix, arguments.documents, arguments.mean_sentences, arguments.mean_length)
        results = {
            "build": in_fresh_process(prefix, arguments.seq_length),
            "from_cache": in_fresh_process(prefix, arguments.seq_length),
        }
        tokens = make_data(smaller, SMALLER, arguments.mean_sentences, arguments.mean_length)
        ids = np.random.default_rng(1).integers(1000, VOCABULARY, tokens)
        smaller.with_suffix(".bin").write_bytes(ids.astype("<u2").data)
        results["samples_per_cpu_second"] = samples_per_cpu_second(smaller, arguments.seq_length)
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
