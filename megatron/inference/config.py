"""Flags for using a trained model (the checkpoint, the device, the layout), and for samples during training."""

from __future__ import annotations

import dataclasses

from megatron.errors import InputError
from megatron.flags import Config, flag
from megatron.parallel.config import ParallelConfig
from megatron.training.config import PluginConfig, RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceConfig(Config):
    """A checkpoint saved in any layout, and the layout to run it in."""

    load: str = flag(
        None,
        "directory of checkpoints (the newest is used), of a Megatron-LM checkpoint, or of a Hugging Face model",
        required=True,
        metavar="DIR",
    )
    ckpt_step: int | None = flag(None, "use the checkpoint of this iteration", low=0)
    verify_checkpoint: bool = flag(
        True, "do not compare the checksums of a checkpoint's files before loading it"
    )
    device: str = flag("auto", "device to run on", choices=("auto", "cpu", "cuda"))
    dtype: str = flag(
        "auto",
        "precision of the weights and, on a GPU, of the key/value cache; auto: that of training",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    tensor_model_parallel_size: int = flag(1, "ranks that each layer is split over", low=1)
    pipeline_model_parallel_size: int = flag(1, "pipeline stages that the layers are split into", low=1)
    expert_model_parallel_size: int = flag(
        1, "groups of the tensor-parallel ranks that share the experts of a layer", low=1
    )
    expert_tensor_parallel_size: int | None = flag(
        None,
        "ranks that share each expert (default: --tensor-model-parallel-size / --expert-model-parallel-size)",
        low=1,
    )
    distributed_timeout_minutes: int = flag(
        10, "minutes that a process waits for others in a collective before it aborts", low=1, high=10**6
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        tensor, experts = self.tensor_model_parallel_size, self.expert_model_parallel_size
        parts = self.expert_tensor_parallel_size or max(tensor // experts, 1)
        if experts * parts != tensor:
            raise InputError(
                f"--expert-model-parallel-size: {experts} times --expert-tensor-parallel-size {parts} is not "
                f"--tensor-model-parallel-size {tensor}, whose ranks divide the experts"
            )
        object.__setattr__(self, "expert_tensor_parallel_size", parts)

    @property
    def parallel(self) -> ParallelConfig:
        """The layout as a training configuration."""
        return ParallelConfig(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
            distributed_timeout_minutes=self.distributed_timeout_minutes,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleTextsConfig(PluginConfig):
    """Sample texts during the training of a GPT."""

    sample_interval: int | None = flag(
        None, "iterations between samples, which continue each prompt of --sample-prompts", low=1
    )
    sample_prompts: str | None = flag(
        None,
        "file with a prompt per line; in a .jsonl file the string under 'prompt' or 'text' of each line",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sample_interval is not None and self.sample_prompts is None:
            raise InputError("--sample-interval needs --sample-prompts, a file with a prompt per line")
        if self.sample_prompts is not None and self.sample_interval is None:
            raise InputError("--sample-prompts needs --sample-interval, the iterations between samples")

    def check(self, run: RunConfig) -> None:
        parallel = run.parallel
        if self.sample_interval is not None and parallel.tensor_model_parallel_size % parallel.expert_size:
            raise InputError(
                f"--sample-interval: {self.sample_interval} needs all experts of a layer in a replica, which generates "
                "alone; choose --expert-model-parallel-size x --expert-tensor-parallel-size to divide "
                "--tensor-model-parallel-size"
            )
        if self.sample_interval is not None and parallel.v_shaped:
            raise InputError(
                f"--sample-interval does not go with --pipeline-schedule {parallel.pipeline_schedule}; leave it out"
            )
