"""Clusters and jobs of the papers, for the planner's tests."""

from __future__ import annotations

from megatron.model.config import ModelConfig
from megatron.planner.cluster import Cluster, cluster_from_data_sheet
from megatron.planner.device_specs import data_sheet
from megatron.planner.layout import Job, Layout
from megatron.planner.models import VOCAB_SIZE
from megatron.planner.programs import NVIDIA_2021, Program
from megatron.planner.simulate import Simulator


def cluster(gpus: int, gpu: str = "a100-80gb") -> Cluster:
    return cluster_from_data_sheet(data_sheet(gpu, where="test"), gpus)


def job(layers: int, hidden: int, heads: int, batch: int, seq_length: int = 2048) -> Job:
    model = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        max_position_embeddings=seq_length,
    )
    return Job(model, seq_length, VOCAB_SIZE, batch)


def tflops(
    job: Job, layout: Layout, gpu: str = "a100-80gb", program: Program = NVIDIA_2021, gpus: int | None = None
) -> float:
    """Predicted TFLOP/s per GPU, counting full recomputation as the papers do."""
    gpus = gpus or layout.processes
    step = Simulator(job, layout, cluster(gpus, gpu), program).step()
    return job.flops(recompute="full") / step.seconds / layout.processes / 1e12
