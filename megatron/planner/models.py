"""Models of the papers' tables, and the published runs with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.model.config import ModelConfig
from megatron.planner.layout import Job, Layout

VOCAB_SIZE = 51200  # padded; the same in both papers
# Tokens of a step where the authors' batch is not published or changes during training.
BATCH_TOKENS = 2**22


@dataclasses.dataclass(frozen=True)
class Published:
    """A published run: the model and the layout it was trained in.

    Attributes:
        micro_batch_size, layers_per_chunk: from the authors' scripts; the second is None without interleaving.
        tflops: per GPU, recomputation included; None where the paper has no number.
    """

    layers: int
    hidden: int
    heads: int
    seq_length: int
    tensor: int
    pipeline: int
    gpus: int
    global_batch_size: int
    micro_batch_size: int
    layers_per_chunk: int | None = None
    tflops: float | None = None

    def batch(self, seq_length: int) -> int:
        """Samples of a step, for samples of any length."""
        return self.global_batch_size

    def model(self) -> ModelConfig:
        return ModelConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            max_position_embeddings=self.seq_length,
        )

    def job(self) -> Job:
        return Job(self.model(), self.seq_length, VOCAB_SIZE, self.global_batch_size)

    def layout(self) -> Layout:
        """Layout of the run: full recomputation; without a pipeline, DDP with overlapped gradient reduction."""
        per_chunk = self.layers_per_chunk or self.layers // self.pipeline
        return Layout(
            tensor=self.tensor,
            pipeline=self.pipeline,
            data=self.gpus // (self.tensor * self.pipeline),
            chunks=self.layers // (self.pipeline * per_chunk),
            micro_batch_size=self.micro_batch_size,
            recompute="full",
            overlap_grad_reduce=self.pipeline == 1,
        )


@dataclasses.dataclass(frozen=True)
class Preset:
    """A published model, and the size of a run of it.

    Attributes:
        fields: of the model's config.
        global_batch_size: None where the authors' is not known.
        gpus: None where the authors do not say on how many they trained it.
    """

    fields: Mapping[str, Any]
    vocab_size: int
    seq_length: int
    global_batch_size: int | None = None
    gpus: int | None = None

    def batch(self, seq_length: int) -> int:
        """Samples of a step; if the authors' number is not known, the power of two with at most `BATCH_TOKENS`."""
        return self.global_batch_size or 2 ** (max(1, BATCH_TOKENS // seq_length).bit_length() - 1)


# GPT-2 medium of NVIDIA's examples, and 1909.08053 table 1: 64 replicas with 8 samples each.
V100_MODELS = {
    "345m": Published(24, 1024, 16, 1024, 1, 1, 64, 512, 8),
    "1.2b": Published(40, 1536, 16, 1024, 1, 1, 64, 512, 8, tflops=39),
    "2.5b": Published(54, 1920, 20, 1024, 2, 1, 128, 512, 8),
    "4.2b": Published(64, 2304, 24, 1024, 4, 1, 256, 512, 8),
    "8.3b": Published(72, 3072, 32, 1024, 8, 1, 512, 512, 8),
}
# 2104.04473 table 1 and, for 175B, section 5.1; microbatch sizes and chunks of the scripts published with it
# (NVIDIA/Megatron-LM, examples/sc21).
A100_MODELS = {
    "1.7b": Published(24, 2304, 24, 2048, 1, 1, 32, 512, 16, tflops=137),
    "3.6b": Published(30, 3072, 32, 2048, 2, 1, 64, 512, 16, tflops=138),
    "7.5b": Published(36, 4096, 32, 2048, 4, 1, 128, 512, 16, tflops=142),
    "18.4b": Published(40, 6144, 48, 2048, 8, 1, 256, 1024, 8, tflops=135),
    "39.1b": Published(48, 8192, 64, 2048, 8, 2, 512, 1536, 4, tflops=138),
    "76.1b": Published(60, 10240, 80, 2048, 8, 4, 1024, 1792, 2, 5, tflops=140),
    "145.6b": Published(80, 12288, 96, 2048, 8, 8, 1536, 2304, 2, 5, tflops=148),
    "175b": Published(96, 12288, 96, 2048, 8, 16, 1024, 1536, 1, tflops=140),
    "310.1b": Published(96, 16384, 128, 2048, 8, 16, 1920, 2160, 1, 3, tflops=155),
    "529.6b": Published(105, 20480, 128, 2048, 8, 35, 2520, 2520, 1, 1, tflops=163),
    "1t": Published(128, 25600, 160, 2048, 8, 64, 3072, 3072, 1, tflops=163),
}
MODELS = V100_MODELS | A100_MODELS
