"""Programs on generations of GPUs: what each reaches of the peaks, and how far predictions are from published runs.

The constants are fitted by `python benchmarks/planner.py --rows FILE... --fit` to at most five published runs for each
generation. docs/scaling.md has the method and the errors over all other runs.
"""

from __future__ import annotations

import dataclasses

from megatron.planner.cluster import DATA_SHEET_EFFICIENCY, Cluster, Efficiency
from megatron.planner.programs import (
    FSDP,
    MEGATRON_CORE,
    MEGATRON_CORE_2025,
    MEGATRON_CORE_2025_X86,
    MEGATRON_CORE_SPRING_2025,
    MEGATRON_DEEPSPEED_BF16,
    MEGATRON_DEEPSPEED_FP16,
    NVIDIA_2021,
    Program,
)

# Beginnings of the planner's names of GPUs, by generation.
GENERATIONS = {
    "V100": ("v100",),
    "A100": ("a100", "a800"),
    "H100": ("h100", "h200", "h800", "h20", "gh200"),
    "B200": ("b200", "gb200"),
    "B300": ("b300", "gb300"),
    "MI300X": ("mi300x",),
}
# Mean absolute errors of the time of a step over the published runs of a generation that no constants are fitted to, in
# all programs: of dense models and of mixtures of experts. Those of MI300X are a guess.
ERRORS: dict[str, tuple[float, float | None]] = {
    "V100": (0.114, None),
    "A100": (0.049, None),
    "H100": (0.043, 0.102),
    "B200": (0.058, 0.111),
    "B300": (0.041, 0.080),
    "MI300X": (0.25, 0.4),
}
# That over all mixtures: on generations after A100.
MIXTURE_ERROR = 0.095


@dataclasses.dataclass(frozen=True)
class Constants:
    """Shares of the peaks that a program reaches on a generation of GPUs.

    Attributes:
        fitted: names of the published runs that the constants are fitted to; none for tests of single operations.
    """

    efficiency: Efficiency
    fitted: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Profile:
    """A program on a generation of GPUs."""

    name: str
    program: Program
    constants: Constants


# Start of the fits, which leave some constants as they are. Attention: FlashAttention 2 reaches 35% of the peak of an
# H100 (2407.08608 section 1), and cuDNN's kernels in Transformer Engine about what it reaches on an A100.
START = Efficiency(
    matmul=0.75,
    memory=0.7,
    stream=0.7,
    link=0.7,
    attention=0.55,
    network=0.7,
    launch=4e-6,
    fp8=0.95,
    expert=0.85,
)
# Blackwell's share in FP8 over that in bf16, by the fitted runs of "nemo-2025" in both precisions. The runs that other
# programs' constants are fitted to are in FP8 alone.
BLACKWELL = dataclasses.replace(START, fp8=0.865)
BLOOM_NETWORK = 0.224  # share of the peak of its adapters
_A100 = Constants(DATA_SHEET_EFFICIENCY, ("1.7b", "18.4b", "1t"))


def _fit(start: Efficiency, fitted: tuple[str, ...], **values: float) -> Constants:
    """Constants with values that `benchmarks/planner.py --fit` prints. `stream` equals `memory`."""
    if "memory" in values:
        values["stream"] = values["memory"]
    return Constants(dataclasses.replace(start, **values), fitted)


_H100 = _fit(
    START,
    ("280", "288", "352"),
    matmul=0.725,
    memory=0.704,
    link=0.7,
    fp8=1.013,
    expert=0.897,
)
_B200 = _fit(BLACKWELL, ("36", "25"), matmul=0.651, link=0.720)
_B300 = _fit(BLACKWELL, ("121", "194", "39", "24"), matmul=0.828, link=0.907)
# DeepEP reaches 153 GB/s of 160 within a node, and 43 to 58 GB/s over an adapter of 50 (its README): 0.9, where
# all-to-alls reach 0.7.
_DEEPEP_H100 = Constants(dataclasses.replace(_H100.efficiency, all_to_all=0.9 / START.network), fitted=())
_FLASH_2 = dataclasses.replace(START, attention=0.35)
# PyTorch's ring attention, by the difference between 32,768 tokens and 131,072 over four times as many ranks
# (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 6).
_TORCH_RING = dataclasses.replace(_FLASH_2, context=0.6)
# No training run on MI300X is among the published ones, so these are shares that public tests of single operations
# reach. Products of large matrices: 620 of 1,307 TFLOP/s in bf16 and 990 of 2,615 in FP8 (SemiAnalysis, "MI300X vs H100
# vs H200 Benchmark Part 1: Training", December 2024; 45% of the peak in all formats in 2510.27583). Memory: BabelStream
# reaches 81% (2510.27583) where it reaches 90% on an H100, whose fit has 0.704. Links: RCCL's all-reduce over 8 GPUs
# reaches about 304 of 448 GB/s. Attention: FlashAttention 2's share on an H100.
_MI300X = Constants(
    dataclasses.replace(
        _FLASH_2, matmul=0.474, memory=0.63, stream=0.63, link=0.68, network=0.7, fp8=0.8, expert=0.897
    ),
    fitted=(),
)


def _in_triton(start: Efficiency) -> Efficiency:
    """Constants with FlashAttention in Triton, which llm-foundry's benchmarks use (submit_benchmarks.py, attn_impl).

    FlashAttention 2 is 1.3 to 1.5 times as fast in forward and twice as fast in backward (2307.08691 section 4.1).
    """
    return dataclasses.replace(start, attention=start.attention / 1.4, attention_backward=1.4 / 2)


# By program and generation.
CONSTANTS = {
    ("nvidia-2021", "A100"): _A100,
    ("megatron-deepspeed", "V100"): _fit(
        DATA_SHEET_EFFICIENCY,
        (
            "jz-1b3-v100-32-T1P1D8b8",
            "jz-1b3-v100-32-norc-T1P1D8b1",
            "jz-1b3-v100-32-T1P4D2b8",
            "jz-52b-v100",
        ),
        matmul=0.636,
        memory=0.971,
        link=0.593,
        network=0.723,
    ),
    # The kernels are Megatron-LM's, so only the network of this cluster is fitted: Omni-Path, on which an all-reduce of
    # 32 GPUs reached 0.10 of the adapters' peak, since NCCL did not use all adapters (bigscience,
    # experiments/bandwidth). Transfers to the next stage are assumed to reach the same share as on other networks.
    ("megatron-deepspeed-fp16", "A100"): _fit(
        dataclasses.replace(DATA_SHEET_EFFICIENCY, send=DATA_SHEET_EFFICIENCY.network / BLOOM_NETWORK),
        ("bloom-0225-L72h14336a64-T4P12D8b2g2048",),
        network=BLOOM_NETWORK,
    ),
    ("llm-foundry", "A100"): _fit(
        _in_triton(START),
        ("mpt-7b-a100-40gb-128-s2048-b18",),
        matmul=0.765,
        memory=0.701,
    ),
    ("llm-foundry", "H100"): _fit(
        _in_triton(_FLASH_2),
        ("mpt-7b-h100-80gb-8-s2048-b6",),
        matmul=0.622,
        memory=0.674,
    ),
    ("torchtitan", "A100"): Constants(
        dataclasses.replace(START, matmul=0.765, memory=0.701, stream=0.701), fitted=()
    ),
    ("torchtitan", "H100"): _fit(_TORCH_RING, ("titan-8b-128",), matmul=0.540, memory=0.650),
    ("megatron-core", "H100"): _H100,
    ("automodel", "H100"): _DEEPEP_H100,
    ("megatron-core", "B200"): _B200,
    ("megatron-core", "B300"): _B300,
    ("megatron-core", "MI300X"): _MI300X,
    ("nemo-2025", "B200"): _fit(START, ("378", "368"), matmul=0.564, link=0.677, fp8=0.865),
    ("gpt-oss-2025", "B200"): _fit(_B200.efficiency, ("128",), expert=0.367),
    ("gpt-oss-2025", "B300"): _fit(_B300.efficiency, ("171",), expert=0.390),
}
# A program without rows on a generation takes the constants of this one; by default Megatron-Core's, or on A100 those
# of Megatron-LM in 2021.
NEAREST = {
    ("megatron-core", "V100"): ("megatron-deepspeed", "V100"),
    **{
        (program, kind): ("gpt-oss-2025", kind)
        for program in ("gpt-oss", "gpt-oss-2025-x86")
        for kind in ("B200", "B300")
    },
    ("megatron-deepspeed-bf16", "A100"): ("megatron-deepspeed-fp16", "A100"),
    ("megatron-deepspeed", "A100"): ("nvidia-2021", "A100"),
}
PROGRAMS = {
    "nvidia-2021": NVIDIA_2021,
    "megatron-deepspeed": NVIDIA_2021,
    "megatron-deepspeed-fp16": MEGATRON_DEEPSPEED_FP16,
    "megatron-deepspeed-bf16": MEGATRON_DEEPSPEED_BF16,
    "llm-foundry": FSDP,
    "torchtitan": FSDP,
    "maxtext": FSDP,
    "automodel": FSDP,
    "megatron-core": MEGATRON_CORE,
    "nemo-2025": MEGATRON_CORE_2025,
    "megatron-core-2025": MEGATRON_CORE_2025,
    "megatron-core-spring-2025": MEGATRON_CORE_SPRING_2025,
    "megatron-core-2025-x86": MEGATRON_CORE_2025_X86,
    # Learned sinks, and experts with biases and a clamped activation.
    "gpt-oss": MEGATRON_CORE,
    "gpt-oss-2025": MEGATRON_CORE_2025,
    "gpt-oss-2025-x86": MEGATRON_CORE_2025_X86,
}


def known_generation(gpu: str) -> str | None:
    """Generation of a GPU by the planner's name; None if no training or operations on it are published.

    Cards for PCI Express and the H20 have the constants of a generation whose published runs are on other GPUs.
    """
    return None if gpu.endswith(("-pcie", "-nvl")) or gpu.startswith("h20-") else _named_generation(gpu)


def generation(gpu: str) -> str:
    """Generation whose constants a GPU has, by default A100's."""
    return _named_generation(gpu) or "A100"


def _named_generation(gpu: str) -> str | None:
    return next((name for name, starts in GENERATIONS.items() if gpu.startswith(starts)), None)


def expected_error(gpu: str, *, mixture: bool) -> float:
    """Relative error to expect of the time of a step on a GPU of a generation with published runs.

    On a generation without mixtures it is that over the mixtures of newer ones.
    """
    dense, mixtures = ERRORS[generation(gpu)]
    return (MIXTURE_ERROR if mixtures is None else mixtures) if mixture else dense


def find_profile(program: str, gpu: str) -> Profile:
    """Profile of a program on a GPU."""
    return Profile(program, PROGRAMS[program], find_constants(gpu, program))


def find_constants(gpu: str, program: str = "megatron-core") -> Constants:
    """Constants of a program on a GPU, by default those of the newest program of NVIDIA with published runs."""
    key = program, generation(gpu)
    key = key if key in CONSTANTS else NEAREST.get(key, ("megatron-core", key[1]))
    return CONSTANTS.get(key, _A100)


def with_constants(cluster: Cluster, constants: Constants) -> Cluster:
    """A cluster on which programs reach what the constants say."""
    return dataclasses.replace(cluster, efficiency=constants.efficiency)
