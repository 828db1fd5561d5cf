"""How long the BERT sentence map of a large data set takes to build, and how much memory.

    python benchmarks/bert_index.py [--documents N] [--mean-sentences N] [--mean-length N] [--seq-length N]

Makes an index file of that many documents (the .bin beside it is sparse: it takes no room), then, in a fresh
process each, opens the data and builds the map for one epoch, and opens it again from the cache. Writes
benchmarks/results/bert_index.json. Takes 12 bytes of disk per sentence in the temporary folder.
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

from megatron.data.bert_index import CutRules, load_or_build
from megatron.data.indexed import HEADER, MAGIC, IndexedDataset

CHUNK = 1 << 20


def make_data(prefix: Path, documents: int, mean_sentences: int, mean_length: int) -> None:
    """An index of documents and sentences whose lengths are spread as those of text are (log-normal)."""
    rng = np.random.default_rng(0)

    def lengths(mean: int, sigma: float, count: int) -> np.ndarray:
        return np.maximum(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count), 1)

    counts = lengths(mean_sentences, 1.0, documents).astype("<i8")
    sentences = int(counts.sum())
    tokens = 0
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, sentences, documents + 1))
        file.seek(HEADER.size + 4 * sentences)
        for at in range(0, sentences, CHUNK):
            sizes = lengths(mean_length, 0.6, min(CHUNK, sentences - at)).astype("<i4")
            ends = tokens + np.cumsum(sizes, dtype="<i8")
            file.write(((ends - sizes) * 2).data)
            file.seek(HEADER.size + 4 * at)
            file.write(sizes.data)
            file.seek(HEADER.size + 4 * sentences + 8 * (at + len(sizes)))
            tokens = int(ends[-1])
        file.write(bytes(8))
        file.write(np.cumsum(counts, dtype="<i8").data)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * tokens)


def measure(prefix: str, seq_length: int) -> dict[str, float]:
    """Open the data and then its map; what that took in this process."""
    start = time.perf_counter()
    dataset = IndexedDataset(prefix)
    opened = time.perf_counter()
    (rows,) = load_or_build(
        dataset,
        range(len(dataset.doc_idx) - 1),
        CutRules.of(seq_length=seq_length, short_seq_prob=0.1, binary_head=True),
        name="train",
        samples=1,
        seed=1234,
        cache=str(Path(prefix).parent / "cache"),
    )
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
        prefix = Path(folder) / "data"
        make_data(prefix, arguments.documents, arguments.mean_sentences, arguments.mean_length)
        results = {
            "build": in_fresh_process(prefix, arguments.seq_length),
            "from_cache": in_fresh_process(prefix, arguments.seq_length),
        }
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    record = {
        "command": " ".join(["python", "benchmarks/bert_index.py", *sys.argv[1:]]),
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
    (ROOT / "benchmarks" / "results" / "bert_index.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
