"""Record the results of runs bit for bit, and compare two records.

    python tests/record.py make before             # about three minutes on two cores
    ... change the code ...
    python tests/record.py make after
    python tests/record.py compare before after

A refactoring must not change any number. For each run, a record holds the metrics of every iteration at full precision,
the SHA-256 of every tensor of the final checkpoint (weights and optimizer state), and the text and scores that the
tools print. Make both records on the same machine, since rounding differs between CPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from classification import write_mnli, write_vocab
from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
# Metrics that depend on the machine's speed.
TIMED = ("seconds per iteration", "tokens per second", "TFLOP/s per device", "mfu", "hfu")

COMMON = """
    --mock-data --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2
    --global-batch-size 8 --train-iters 20 --lr 2e-3 --lr-warmup-iters 4 --log-interval 1 --log-params-norm
    --log-num-zeros-in-grad --eval-interval 10 --eval-iters 1 --num-workers 0 --device cpu
"""
NULL = "--tokenizer-type NullTokenizer --vocab-size 250"
LLAMA = """
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
"""
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
CHUNKS = "--num-layers-per-virtual-pipeline-stage"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"


@dataclasses.dataclass(frozen=True)
class Run:
    """A command and the number of processes that torchrun starts for it.

    Attributes:
        needs: names of runs whose folders the command reads, as {name} in `flags`.
        writes: the command writes metrics and a checkpoint; otherwise its output is compared as text.
    """

    script: str
    flags: str
    processes: int = 1
    needs: tuple[str, ...] = ()
    writes: bool = True


def gpt(flags: str, processes: int = 1, needs: tuple[str, ...] = ()) -> Run:
    return Run("pretrain_gpt.py", f"{COMMON} {NULL} {flags}", processes, needs)


def bert(flags: str, processes: int = 1) -> Run:
    words = "--tokenizer-type BertWordPieceLowerCase --vocab-file {vocab}"
    return Run("pretrain_bert.py", f"{COMMON} {words} {flags}", processes)


RUNS = {
    "gpt": gpt(""),
    "gpt-bf16": gpt("--bf16 --overlapping-eval 7 --eval-tasks PPL --eval-tasks-data {text}"),
    "gpt-fp16": gpt("--fp16 --initial-loss-scale 65536 --loss-scale-window 5"),
    "gpt-compiled": gpt("--bf16 --ops-backend compile"),
    "gpt-plain": gpt(f"{LLAMA} --ops-backend plain"),
    "gpt-bf16-states": gpt("--bf16 --bf16-optimizer-states --spike-skip 2.0"),
    "gpt-sgd": gpt("--optimizer sgd --lr 0.1"),
    "gpt-muon-T2": gpt(f"--optimizer muon {TP} 2 {LLAMA}", 2),
    "gpt-muon-D2-distributed-optimizer": gpt(f"--optimizer muon {ZERO}", 2),
    "gpt-recompute-full": gpt("--recompute-granularity full --recompute-num-layers 3"),
    "gpt-recompute-selective": gpt(f"{LLAMA} --bf16 --recompute-activations --qk-layernorm"),
    "gpt-resumed": gpt("--load {gpt-half} --train-iters 20", needs=("gpt-half",)),
    "gpt-half": gpt("--exit-interval 10"),
    "gpt-T2": gpt(f"{TP} 2", 2),
    "gpt-T2-SP-bf16": gpt(f"{TP} 2 --sequence-parallel --bf16 {LLAMA} --qk-layernorm", 2),
    "gpt-P2": gpt(f"{PP} 2", 2),
    "gpt-P2V2": gpt(f"{PP} 2 {CHUNKS} 1 --bf16", 2),
    "gpt-D2-distributed-optimizer": gpt(f"{ZERO} --bf16", 2),
    "gpt-D2": gpt(f"{LLAMA}", 2),
    "gpt-T2P2": gpt(f"{TP} 2 {PP} 2 {LLAMA}", 4),
    "gpt-T2-one-group": gpt(f"{TP} 2 {LLAMA} --num-query-groups 1", 2),
    "bert": bert(""),
    "bert-T2-SP-bf16": bert(f"{TP} 2 --sequence-parallel --bf16", 2),
    "bert-P2": bert(f"{PP} 2", 2),
    "finetune": Run(
        "tools/finetune_bert.py",
        """--task MNLI --train-data {mnli} --valid-data {mnli} --load {bert} --seq-length 32 --micro-batch-size 8
        --epochs 2 --lr 1e-3 --log-interval 1 --num-workers 0 --device cpu""",
        needs=("bert",),
    ),
    "generate-greedy": Run(
        "tools/generate_text.py",
        "--load {gpt} --prompt '1 2 3' --greedy --out-seq-length 20 --device cpu",
        needs=("gpt",),
        writes=False,
    ),
    "generate-seeded": Run(
        "tools/generate_text.py",
        "--load {gpt-T2P2} --prompt '1 2 3' --seed 5 --top-k 20 --temperature 0.9 --out-seq-length 20 --device cpu",
        needs=("gpt-T2P2",),
        writes=False,
    ),
    "evaluate": Run(
        "tools/evaluate.py",
        "--load {gpt} --task PPL --valid-data {text} --overlapping-eval 7 --device cpu --micro-batch-size 2",
        needs=("gpt",),
        writes=False,
    ),
    "skip-train": gpt("--load {gpt} --skip-train", needs=("gpt",)),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="run everything and write the record to a file")
    make.add_argument("record", type=Path)
    make.add_argument("--tree", type=Path, default=ROOT, help="checkout to run (default: this one)")
    make.add_argument(
        "--runs", nargs="+", choices=RUNS, default=list(RUNS), help="runs to make (default: all)"
    )
    compare = commands.add_parser("compare", help="list the differences of two records")
    compare.add_argument("records", type=Path, nargs=2)
    args = parser.parse_args()
    if args.command == "make":
        record = make_record(args.tree.resolve(), args.runs)
        args.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{args.record}: {len(record)} runs")
        return 0
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in args.records)
    different = list(differences(before, after))
    print("\n".join(different) if different else f"identical: {len(before)} runs")
    return 1 if different else 0


def make_record(tree: Path, names: list[str]) -> dict[str, Any]:
    """Run the commands, each after those that it needs, two at a time."""
    needed = list(dict.fromkeys(need for name in names for need in (*RUNS[name].needs, name)))
    with tempfile.TemporaryDirectory() as folder:
        paths = {**write_data(Path(folder)), **{name: f"{folder}/{name}/checkpoints" for name in needed}}
        record: dict[str, Any] = {}
        with ThreadPoolExecutor(2) as pool:
            for ready in (
                [name for name in needed if not RUNS[name].needs],
                [name for name in needed if RUNS[name].needs],
            ):
                results = pool.map(lambda name: execute(tree, RUNS[name], paths, paths[name]), ready)
                for name, result in zip(ready, results, strict=True):
                    print(f"{name}: done", flush=True)
                    record[name] = result
    return record


def write_data(folder: Path) -> dict[str, str]:
    """Write a vocabulary for BERT, labeled texts for fine-tuning, and a text of numbers for evaluation."""
    numbers = np.random.default_rng(0).integers(0, 250, 400)
    text = folder / "text"
    text.write_text(" ".join(map(str, numbers)), encoding="utf-8")
    vocab, mnli = write_vocab(folder / "vocab.txt"), write_mnli(folder / "mnli.tsv", 100, 1)
    return {"vocab": str(vocab), "mnli": str(mnli), "text": str(text)}


def execute(tree: Path, run: Run, paths: dict[str, str], checkpoints: str) -> dict[str, Any]:
    """Execute a command; return its metrics and digests of its tensors, or its output."""
    folder = Path(checkpoints).parent
    folder.mkdir(parents=True, exist_ok=True)
    words = [word.format(**paths) for word in shlex.split(run.flags)]
    if run.writes:
        words += ["--metrics-path", f"{folder}/metrics.jsonl"]
        words += [] if "--skip-train" in words else ["--save", checkpoints]
    launch = [sys.executable]
    if run.processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={run.processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, run.script, *words], cwd=tree, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join([run.script, *words])}\nexited with {done.returncode}\n{done.stderr[-3000:]}"
        )
    if not run.writes:
        return {"output": done.stdout}
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [{k: v for k, v in json.loads(line).items() if k not in TIMED} for line in lines]
    tensors = dict(tensor_digests(Path(checkpoints))) if Path(checkpoints).exists() else {}
    return {"metrics": rows, "tensors": tensors}


def tensor_digests(checkpoints: Path) -> Iterator[tuple[str, str]]:
    """Yield name and SHA-256 of each tensor of the last checkpoint, assembled from its files."""
    last = max(checkpoints.glob("iter_*"))
    index = json.loads((last / "index.json").read_text(encoding="utf-8"))["content"]["tensors"]
    for kind, tensors in index.items():
        for name, tensor in tensors.items():
            whole = None
            for file, key, (top, bottom), (left, right) in tensor["pieces"]:
                with safe_open(last / file, framework="pt") as opened:
                    piece = opened.get_tensor(key)
                if whole is None:
                    whole = torch.zeros(tensor["shape"], dtype=piece.dtype)
                target = whole.view(len(whole), -1)[top:bottom, left:right] if whole.dim() else whole
                target.copy_(piece.view(target.shape))
            data = whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            yield f"{kind} {name}", hashlib.sha256(data).hexdigest()


def differences(before: dict[str, Any], after: dict[str, Any], limit: int = 3) -> Iterator[str]:
    """Yield a line for each difference, at most `limit` of each kind in each run."""
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            yield f"{name}: is missing from the {'second' if name in before else 'first'} record"
            continue
        for kind in sorted(before[name].keys() | after[name].keys()):
            old, new = before[name].get(kind), after[name].get(kind)
            if old == new:
                continue
            found = list(changed_items(old, new))
            for line in found[:limit]:
                yield f"{name}, {kind}: {line}"
            if len(found) > limit:
                yield f"{name}, {kind}: {len(found) - limit} more"


def changed_items(old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            if a != b:
                keys = [k for k in a.keys() | b.keys() if a.get(k) != b.get(k)]
                yield f"row {i} (iteration {a.get('iteration')}): " + ", ".join(
                    f"{k}: {a.get(k)} != {b.get(k)}" for k in sorted(keys)
                )
    elif isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                yield f"{key}: {old.get(key)} != {new.get(key)}"
    else:
        yield f"{old!r} != {new!r}"


if __name__ == "__main__":
    sys.exit(main())
