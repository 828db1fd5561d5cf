"""Every layout trains the same model as one process: losses, gradient norms, zeros and final weights."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from distributed import run_distributed
from safetensors import safe_open

from megatron.arguments import parse_run_config
from megatron.plugins import run
from megatron.pretrain_bert import bert
from megatron.pretrain_gpt import GPT

# The 251 ids are padded to 256 rows, or to 512 with four tensor-parallel ranks.
FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 250 --num-layers 8 --hidden-size 32
    --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 2e-3
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-interval 5 --eval-iters 1 --num-workers 0
    --device cpu --log-num-zeros-in-grad --log-params-norm --distributed-timeout-minutes 1
"""
TASKS = {"GPT": GPT, "BERT": bert(binary_head=True)}
LLAMA = """
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
"""
SHAPES = {
    "gpt2": "",
    "bert": "",
    "llama": LLAMA,
    "qwen2": f"{LLAMA} --add-qkv-bias",
    "qwen3": f"{LLAMA} --qk-layernorm",
    "olmo2": f"{LLAMA} --qk-layernorm --qk-layernorm-all-heads --norm-after --lr 2e-4",
    "opt": "--activation-function relu",
    "gpt_neox": "--position-embedding-type rope --rotary-percent 0.5 --use-parallel-residual",
    "bloom": "--position-embedding-type alibi --embed-layernorm --init-method-std 0.1",
    "gemma": "--position-embedding-type rope --normalization RMSNorm --activation-function geglu --disable-bias-linear "
    "--group-query-attention --apply-layernorm-1p --scale-embeddings --kv-channels 16",
    "lion": "--optimizer lion --lr 2e-4",
    "muon": f"{LLAMA} --optimizer muon --muon-extra-scale-factor 0.2 --muon-nesterov",
}
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
SP, CHUNKS = "--sequence-parallel", "--num-layers-per-virtual-pipeline-stage"
ZERO = "--use-distributed-optimizer"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
LAYOUTS = {
    "T2": (2, f"{TP} 2"),
    "T2+SP": (2, f"{TP} 2 {SP}"),
    "T4": (4, f"{TP} 4"),
    "P2": (2, f"{PP} 2"),
    "P2 gpipe": (2, f"{PP} 2 --pipeline-schedule gpipe"),
    "P2 uneven": (2, f"{PP} 2 --decoder-first-pipeline-num-layers 5"),
    "P4": (4, f"{PP} 4"),
    "P4 uneven": (
        4,
        f"{PP} 4 --decoder-first-pipeline-num-layers 0 --decoder-last-pipeline-num-layers 2",
    ),
    "P2V2": (2, f"{PP} 2 {CHUNKS} 2"),
    "P4V2": (4, f"{PP} 4 {CHUNKS} 1"),
    "D2": (2, ""),
    "D2 overlapped": (2, "--overlap-grad-reduce --ddp-bucket-size 5000"),
    "D2+ZeRO": (2, ZERO),
    "D4": (4, ""),
    "T2P2": (4, f"{TP} 2 {PP} 2"),
    "T2P2 no scatter-gather": (4, f"{TP} 2 {PP} 2 --no-scatter-gather-tensors-in-pipeline"),
    "T2P2+SP": (4, f"{TP} 2 {PP} 2 {SP}"),
    "T4+SP": (4, f"{TP} 4 {SP}"),
    "T2D2+ZeRO": (4, f"{TP} 2 {ZERO} {OVERLAP}"),
    "P2D2V2": (4, f"{PP} 2 {CHUNKS} 2"),
    "P4 few microbatches": (4, f"{PP} 4 --micro-batch-size 2"),  # fewer microbatches than stages
    "everything": (
        8,
        f"{TP} 2 {PP} 2 {SP} {CHUNKS} 2 {ZERO} {OVERLAP} --recompute-granularity full",
    ),
    "recomputed": (1, "--checkpoint-activations --recompute-num-layers 3"),
    "block recomputed": (1, "--recompute-granularity full --recompute-method block --recompute-num-layers 3"),
    "selectively recomputed": (1, "--recompute-activations"),
    "T2 distributed activations": (2, f"{TP} 2 --checkpoint-activations --distribute-saved-activations"),
}
# The layouts that shapes of other models' parts are trained in.
FEW_LAYOUTS = {
    "qwen2": ["T4"],
    "qwen3": ["T4"],
    "olmo2": ["T4", "T2P2+SP"],
    "opt": ["T2P2+SP"],
    "gpt_neox": ["T2P2+SP"],
    "bloom": ["T2", "P2", "T2P2+SP"],
    "gemma": ["T2", "P2", "T2P2+SP"],
}
FAST = {
    "bert": "T2P2|D2+ZeRO",  # test_finetune.py runs T2+SP with fine-tuning
    "gpt2": "P2V2|D2+ZeRO|T2P2|P4 uneven|everything",  # T2+SP runs in bf16 below
    "llama": "P2 gpipe|T2D2+ZeRO",
    "qwen2": "",
    "qwen3": "T4",
    "olmo2": "",
    "opt": "",
    "gpt_neox": "",
    "bloom": "",
    "gemma": "",
    "lion": "",
    "muon": "P2V2|T2D2+ZeRO",
}


def train(folder: str, flags: str, task: str = "GPT") -> None:
    """Train on this rank, with results in `folder`."""
    paths = f"--save {folder}/checkpoints --metrics-path {folder}/metrics.jsonl"
    words = f"{FLAGS} {flags} {paths}".split()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert run(parse_run_config(words, description="", defaults={}), TASKS[task]) == 0


class Run:
    """Metrics and final weights of a run."""

    def __init__(self, folder: Path) -> None:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        self.records = [json.loads(line) for line in lines]
        folder = folder / "checkpoints" / "iter_0000010"
        self.weights: dict[str, torch.Tensor] = {}
        for name, tensor in json.loads((folder / "index.json").read_text())["content"]["tensors"][
            "model"
        ].items():
            whole = self.weights[name] = torch.full(tensor["shape"], torch.nan)
            for file, key, (top, bottom), (left, right) in tensor["pieces"]:
                target = whole.view(len(whole), -1)[top:bottom, left:right]
                assert target.isnan().all(), f"{name} was saved twice"
                with safe_open(folder / file, framework="pt") as opened:
                    target.copy_(opened.get_tensor(key).view(target.shape))
            assert not whole.isnan().any(), f"{name} was not saved whole"

    def assert_equals(self, other: Run, *, loss: float, weights: float, zeros: float = 40) -> None:
        """Compare metrics and final weights.

        `loss` limits relative differences of losses and norms, `weights` those of each weight matrix or vector, and
        `zeros` the difference between counts of zeros.
        """
        assert len(self.records) == len(other.records) == 10 + 3  # two evaluations in between, two at the end
        for mine, theirs in zip(self.records, other.records, strict=True):
            for name, value in mine.items():
                if name.startswith(("lm loss", "sop loss", "grad norm", "params norm")):
                    assert theirs[name] == pytest.approx(value, rel=loss), (mine["iteration"], name)
                elif name == "num zeros":  # rounding decides whether terms cancel exactly
                    assert theirs[name] == pytest.approx(value, abs=zeros), mine["iteration"]
                elif name in ("iteration", "consumed samples", "learning rate", "global batch size"):
                    assert theirs[name] == value
        assert self.weights.keys() == other.weights.keys()
        for name, mine in self.weights.items():
            theirs = other.weights[name]
            if name.endswith("linear_qkv.bias"):
                # Key biases cancel in the softmax. Their gradient is rounding error, which Adam amplifies.
                groups = (len(mine) // 8 - 4) // 2
                mine, theirs = (x.view(groups, -1, 8)[:, [0, -1]] for x in (mine, theirs))
            assert (theirs - mine).norm() <= weights * mine.norm(), name


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory):
    """Function that trains on one process; results are cached by task and flags."""
    runs: dict[tuple[str, str], Run] = {}

    def run(flags: str, task: str = "GPT") -> Run:
        if (task, flags) not in runs:
            folder = tmp_path_factory.mktemp("one")
            run_distributed(train, 1, str(folder), flags, task)
            runs[task, flags] = Run(folder)
        return runs[task, flags]

    return run


CASES = [
    pytest.param(
        shape,
        layout,
        marks=() if layout in FAST[shape].split("|") else pytest.mark.slow,
        id=f"{shape}-{layout.replace(' ', '-')}",
    )
    for shape in SHAPES
    for layout in FEW_LAYOUTS.get(shape, LAYOUTS)
]


@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_same_as_one_process(one_process, tmp_path: Path, shape: str, layout: str) -> None:
    processes, flags = LAYOUTS[layout]
    task = "BERT" if shape == "bert" else "GPT"
    run_distributed(train, processes, str(tmp_path), f"{SHAPES[shape]} {flags}", task)
    one_process(SHAPES[shape], task).assert_equals(Run(tmp_path), loss=1e-5, weights=1e-4)


def test_vocabulary_padding_does_not_scale_initial_weights(one_process, tmp_path: Path) -> None:
    """Xavier's bound depends on the number of outputs, which for the output layer excludes padding."""
    flags = f"{SHAPES['llama']} --init-method-xavier-uniform --make-vocab-size-divisible-by 100"  # 300 or 400 rows
    run_distributed(train, 2, str(tmp_path), f"{flags} {TP} 2")
    mine, theirs = one_process(flags).records[0], Run(tmp_path).records[0]
    assert theirs["lm loss"] == pytest.approx(mine["lm loss"], rel=1e-6)
    assert theirs["grad norm"] == pytest.approx(mine["grad norm"], rel=1e-4)


@pytest.mark.parametrize(
    "layout",
    ["T2+SP", *(pytest.param(name, marks=pytest.mark.slow) for name in ("P2V2", "D2+ZeRO", "everything"))],
)
def test_same_in_bf16_within_rounding(one_process, tmp_path: Path, layout: str) -> None:
    processes, flags = LAYOUTS[layout]
    run_distributed(train, processes, str(tmp_path), f"--bf16 {flags}")
    one_process("--bf16").assert_equals(Run(tmp_path), loss=2e-2, weights=2e-1, zeros=2000)


@pytest.mark.parametrize("layout", ["P2V2", pytest.param("everything", marks=pytest.mark.slow)])
def test_pipelines_send_the_residual_stream_in_fp32(one_process, tmp_path: Path, layout: str) -> None:
    """The first loss is bitwise equal, except for the sums of tensor parallelism."""
    processes, flags = LAYOUTS[layout]
    residual = "--bf16 --fp32-residual-connection"
    run_distributed(train, processes, str(tmp_path), f"{residual} {flags}")
    one, other = one_process(residual), Run(tmp_path)
    exact = 1e-7 if layout == "P2V2" else 1e-3
    assert other.records[0]["lm loss"] == pytest.approx(one.records[0]["lm loss"], rel=exact)
    one.assert_equals(other, loss=2e-2, weights=2e-1, zeros=2000)


@pytest.mark.parametrize("shape", ["gpt2", pytest.param("muon", marks=pytest.mark.slow)])
def test_gradients_reduced_in_bf16(one_process, tmp_path: Path, shape: str) -> None:
    run_distributed(train, 2, str(tmp_path), f"{SHAPES[shape]} --grad-reduce-in-bf16 {ZERO}")
    one_process(SHAPES[shape]).assert_equals(Run(tmp_path), loss=2e-2, weights=2e-1, zeros=2000)


@pytest.mark.parametrize("layout", ["P2V2", "D2+ZeRO", "recomputed", "selectively recomputed"])
def test_same_dropout(one_process, tmp_path: Path, layout: str) -> None:
    """Dropout masks depend on the sample and the location in the model."""
    dropout = "--attention-dropout 0.1 --hidden-dropout 0.2"
    processes, flags = LAYOUTS[layout]
    run_distributed(train, processes, str(tmp_path), f"{dropout} {flags}")
    one_process(dropout).assert_equals(Run(tmp_path), loss=1e-5, weights=1e-4)


@pytest.mark.parametrize(
    "recomputation",
    [
        "--checkpoint-activations",
        pytest.param("--checkpoint-activations --distribute-saved-activations", marks=pytest.mark.slow),
        pytest.param("--recompute-activations", marks=pytest.mark.slow),
        pytest.param(f"--checkpoint-activations {SP}", marks=pytest.mark.slow),
    ],
)
def test_dropout_is_replayed_exactly(tmp_path: Path, recomputation: str) -> None:
    dropout = f"--attention-dropout 0.1 --hidden-dropout 0.2 {TP} 2"
    runs = []
    for flags in (SP if SP in recomputation else "", recomputation):
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        run_distributed(train, 2, str(folder), f"{dropout} {flags}")
        runs.append(Run(folder))
    runs[0].assert_equals(runs[1], loss=1e-7, weights=1e-7, zeros=0)


@pytest.mark.parametrize(
    ("before", "after", "shape"),
    [
        ("T2D2+ZeRO", "P2V2", "llama"),
        ("D2+ZeRO", "T2", "muon"),
        pytest.param("P2V2", "D2+ZeRO", "llama", marks=pytest.mark.slow),
        pytest.param("everything", "T4", "llama", marks=pytest.mark.slow),
        pytest.param("everything", "D2+ZeRO", "muon", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_in_another_layout(
    one_process, tmp_path: Path, before: str, after: str, shape: str
) -> None:
    resume = f"{SHAPES[shape]} --load {tmp_path}/checkpoints"
    for layout, flags in ((before, "--exit-interval 7"), (after, "")):
        processes, layout_flags = LAYOUTS[layout]
        run_distributed(train, processes, str(tmp_path), f"{resume} {layout_flags} {flags}")
    one_process(SHAPES[shape]).assert_equals(Run(tmp_path), loss=1e-5, weights=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gpt2", "muon"])
@pytest.mark.parametrize("layout", ["T2+SP", "T2D2+ZeRO", "everything"])
def test_the_same_layout_resumes_bit_for_bit(tmp_path: Path, layout: str, shape: str) -> None:
    """The runs use dropout and data-loader worker processes."""
    processes, flags = LAYOUTS[layout]
    flags += f" {SHAPES[shape]} --attention-dropout 0.1 --hidden-dropout 0.2 --num-workers 1"
    for folder, runs in (("whole", [""]), ("parts", ["--exit-interval 7", ""])):
        (tmp_path / folder).mkdir()
        for extra in runs:
            load = f"--load {tmp_path}/{folder}/checkpoints"
            run_distributed(train, processes, str(tmp_path / folder), f"{flags} {load} {extra}")
    whole, parts = Run(tmp_path / "whole"), Run(tmp_path / "parts")
    whole.assert_equals(parts, loss=0, weights=0, zeros=0)
