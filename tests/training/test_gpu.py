"""Training on a GPU matches training on a CPU.

The other side of each comparison is the CPU with plain operations, so that nothing of what a GPU runs is on both sides.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.data.indexed_writer import IndexedDatasetWriter

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 4 --hidden-size 64
    --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 2e-3
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-interval 10 --eval-iters 1
""".split()

VOCABULARY = 2000  # and EOD
SHAPE = f"""
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --num-layers 4 --hidden-size 256
    --num-attention-heads 4 --seq-length 256 --micro-batch-size 4 --global-batch-size 8 --train-iters 6 --lr 1e-3
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0 --num-workers 0 --seed 7
"""
RMS = """
    --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --ffn-hidden-size 512
"""
LLAMA = f"{RMS} --position-embedding-type rope --group-query-attention --num-query-groups 2"
LATENT = f"""
    {RMS} --position-embedding-type rope --multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 64
    --qk-pos-emb-head-dim 32 --v-head-dim 64
"""
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256"
MIXTURE = f"{LLAMA} {EXPERTS} --moe-aux-loss-coeff 1e-2"
DOCUMENTS = "--reset-attention-mask --reset-position-ids"
WINDOW = "--window-size 64,0"
# Models and parts of the program that have code of their own on a GPU.
FEATURES = {
    "plain operations": "--ops-backend plain",
    "uncompiled": f"{LLAMA} --no-torch-compile",
    "grouped queries": LLAMA,
    "normalized queries": f"{LLAMA} --qk-layernorm",
    "documents": f"{LLAMA} {DOCUMENTS} --eod-mask-loss",
    "documents, plain operations": f"{LLAMA} {DOCUMENTS} --ops-backend plain",
    "window": f"{LLAMA} {WINDOW}",
    "windows in every second layer": f"{LLAMA} {WINDOW} --window-attn-skip-freq 2 --no-rope-freq 4 {DOCUMENTS}",
    "soft cap": f"{LLAMA} --attn-logit-softcapping 30",
    "sinks": f"{LLAMA} {WINDOW} --softmax-type learnable",
    "ALiBi": "--position-embedding-type alibi",
    "latent attention": LATENT,
    "mixture": MIXTURE,
    "mixture, grouped products": f"{MIXTURE} --moe-grouped-gemm",
    "mixture, capacity": f"{MIXTURE} --moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity",
    "mixture, recomputation": f"{MIXTURE} --moe-layer-recompute",
    "DeepSeek-V3": f"""
        {LATENT} {EXPERTS} --moe-shared-expert-intermediate-size 256 --moe-router-score-function sigmoid
        --moe-router-enable-expert-bias --moe-layer-freq [0]*1+[1]*3 --moe-grouped-gemm --mtp-num-layers 1
    """,
    "multi-token prediction": f"{LLAMA} --mtp-num-layers 2",
    "full recomputation": f"{LLAMA} --recompute-granularity full",
    "selective recomputation": "--recompute-granularity selective",
    "optimizer on the host": f"{LLAMA} --cpu-offload-optimizer",
    "activations on the host": f"{LLAMA} --cpu-offload-activations --cpu-offload-activations-num-layers 2",
    "distributed optimizer": f"{LLAMA} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "ZeRO-3": f"{LLAMA} --data-parallel-sharding-strategy optim_grads_params",
    "Muon": f"{LLAMA} --optimizer muon",
    "bf16 moments": f"{LLAMA} --bf16-optimizer-states",
}
# Without --bf16: what differs by dtype.
IN_FP32 = ("grouped queries", "documents", "window", "latent attention", "mixture")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a file of short documents, several in each sample."""
    random = np.random.default_rng(5)
    prefix = tmp_path_factory.mktemp("data") / "documents"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in random.integers(10, 150, 300):
            # Ends with EOD.
            writer.add_document([np.append(random.integers(0, VOCABULARY, length), VOCABULARY)])
    return f"--data-path {prefix} --split 1,0,0"


def losses_of(pretrain, folder: Path, flags: str, device: str) -> list[float]:
    path = folder / f"{device}.jsonl"
    pretrain(*flags.split(), "--device", device, "--metrics-path", path)
    records = (json.loads(line) for line in path.read_text().splitlines())
    return [record["lm loss"] for record in records if "lm loss" in record]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("feature", "precision", "tolerance"),
    [(name, "--bf16", 1e-3) for name in FEATURES] + [(name, "", 1e-5) for name in IN_FP32],
)
def test_features_are_those_of_a_cpu(
    pretrain, data: str, tmp_path: Path, feature: str, precision: str, tolerance: float
) -> None:
    flags = f"{SHAPE} {data} {precision} {FEATURES[feature]}"
    found = losses_of(pretrain, tmp_path, flags, "cuda")
    expected = losses_of(pretrain, tmp_path, f"{flags} --ops-backend plain", "cpu")
    assert len(found) == 6 and found == pytest.approx(expected, rel=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("numbers", ["e4m3", "hybrid"])
def test_fp8_is_that_of_a_cpu(pretrain, data: str, tmp_path: Path, numbers: str) -> None:
    """The CPU emulates it, and the default operations round in other places."""
    pytest.importorskip("torchao", reason="needs torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with FP8 products")
    flags = f"{SHAPE} {data} --bf16 {LLAMA} --fp8-format {numbers}"
    found, expected = (losses_of(pretrain, tmp_path, flags, device) for device in ("cuda", "cpu"))
    assert found == pytest.approx(expected, rel=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [([], 1e-3), (["--bf16"], 2e-2), (["--fp16", "--initial-loss-scale", 65536], 2e-2)],
    ids=["fp32", "bf16", "fp16"],
)
def test_same_as_on_a_cpu(pretrain, tmp_path: Path, precision: list, tolerance: float) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        path = tmp_path / f"{device}.jsonl"
        pretrain(*FLAGS, *precision, "--device", device, "--metrics-path", path)
        records = [json.loads(line) for line in path.read_text().splitlines()]
        losses.append([r[k] for r in records for k in r if k.startswith("lm loss")])
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "precision", ["", "--bf16", "--fp16 --initial-loss-scale 65536 --loss-scale-window 3"]
)
def test_a_cuda_graph_changes_no_bit(pretrain, tmp_path: Path, precision: str) -> None:
    runs = []
    for name, more in (("plain", []), ("graph", ["--cuda-graph"])):
        path = tmp_path / name
        pretrain(*FLAGS, *precision.split(), "--device", "cuda", "--metrics-path", path, *more)
        records = [json.loads(line) for line in path.read_text().splitlines()]
        runs.append([(r.get("lm loss"), r.get("lm loss validation"), r.get("grad norm")) for r in records])
    assert runs[1] == runs[0]


@pytest.mark.gpu
def test_a_resumed_run_continues(pretrain, tmp_path: Path) -> None:
    for folder, runs in (("whole", [[]]), ("parts", [["--exit-interval", 7], []])):
        for extra in runs:
            paths = ["--save", tmp_path / folder, "--load", tmp_path / folder]
            paths += ["--metrics-path", tmp_path / f"{folder}.jsonl"]
            pretrain(*FLAGS, "--bf16", "--device", "cuda", *paths, *extra)
    whole, parts = (
        [json.loads(line).get("lm loss") for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    assert parts == pytest.approx(whole, rel=1e-2)
