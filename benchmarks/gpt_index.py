"""Measure the time and memory to build the GPT sample indices of a large dataset.

    python benchmarks/gpt_index.py [--documents N] [--mean-length N] [--seq-length N]

Writes an index file with that many documents (its .bin file is sparse and takes no disk space). A new process opens the
data and builds the indices for one epoch, and another one loads them from the cache. Writes
benchmarks/results/gpt_index.json. Needs 20 bytes of disk per document and 12 per sample in the temporary directory.
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

from megatron.data.gpt_index import load_or_build
from megatron.data.index_cache import IndexRequest
from megatron.data.indexed import HEADER, MAGIC, IndexedDataset

CHUNK = 1 << 20


def make_data(prefix: Path, documents: int, mean_length: int) -> None:
    """Write an index of documents with log-normal lengths, the distribution of web pages."""
    rng = np.random.default_rng(0)
    sigma = 1.0
    lengths = rng.lognormal(np.log(mean_length) - sigma**2 / 2, sigma, documents)
    sizes = np.clip(lengths, 1, 10**6).astype("<i4")
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        file.write(sizes.data)
        start = 0
        for first in range(0, documents, CHUNK):
            part = sizes[first : first + CHUNK]
            ends = start + np.cumsum(part, dtype="<i8")
            file.write(((ends - part) * 2).data)
            start = int(ends[-1])
        for first in range(0, documents + 1, CHUNK):
            file.write(np.arange(first, min(first + CHUNK, documents + 1), dtype="<i8").data)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * start)


def measure(prefix: str, seq_length: int) -> dict[str, float]:
    """Open the data, then its indices, and return the time and memory that this process needed."""
    start = time.perf_counter()
    dataset = IndexedDataset(prefix)
    opened = time.perf_counter()
    request = IndexRequest(
        dataset=dataset,
        documents=range(len(dataset)),
        split="train",
        samples=(dataset.num_tokens - 1) // seq_length,
        seed=1234,
        cache=str(Path(prefix).parent / "cache"),
    )
    _, _, shuffle = load_or_build(request, seq_length)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
    return {
        "samples": len(shuffle),
        "open_seconds": round(opened - start, 2),
        "indices_seconds": round(done - opened, 2),
        "total_seconds": round(done - start, 2),
        "total_cpu_seconds": round(time.process_time(), 2),
        "peak_rss_gb": round(peak * 1024 / 1e9, 2),
    }


def measure_in_new_process(prefix: Path, seq_length: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", str(prefix), "--seq-length", str(seq_length)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=10**8, help="documents in the dataset")
    parser.add_argument("--mean-length", type=int, default=512, help="tokens per document, on average")
    parser.add_argument("--seq-length", type=int, default=1024, help="tokens per sample")
    parser.add_argument("--measure", metavar="PREFIX", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.seq_length)))
        return
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "data"
        make_data(prefix, arguments.documents, arguments.mean_length)
        results = {
            "build": measure_in_new_process(prefix, arguments.seq_length),
            "from_cache": measure_in_new_process(prefix, arguments.seq_length),
        }
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    record = {
        "command": " ".join(["python", "benchmarks/gpt_index.py", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "load_average_of_a_minute": round(os.getloadavg()[0], 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"numpy {np.__version__}",
        "documents": arguments.documents,
        "mean_length": arguments.mean_length,
        "seq_length": arguments.seq_length,
        "results": results,
    }
    text = json.dumps(record, indent=2)
    (ROOT / "benchmarks" / "results" / "gpt_index.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
