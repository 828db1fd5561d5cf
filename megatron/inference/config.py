"""Flags of what uses a trained model: which one, and where it computes."""

from __future__ import annotations

import dataclasses

from megatron.flags import Config, flag
from megatron.parallel.config import ParallelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceConfig(Config):
    """A checkpoint of any layout, and the layout that it is to compute in."""

    load: str = flag(
        None,
        "folder of checkpoints, of which the newest is used; of this program, of Megatron-LM, or a model of Hugging "
        "Face's",
        required=True,
        metavar="DIR",
    )
    ckpt_step: int | None = flag(None, "use the checkpoint of this iteration", low=0)
    device: str = flag("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    dtype: str = flag(
        "auto",
        "precision of weights, and on a GPU of the key/value cache; auto takes that of the training",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    tensor_model_parallel_size: int = flag(1, "processes that share every layer", low=1)
    pipeline_model_parallel_size: int = flag(1, "stages that the layers are divided into", low=1)
    distributed_timeout_minutes: int = flag(
        10, "how long a process waits in a collective for the others before it stops", low=1, high=10**6
    )

    @property
    def parallel(self) -> ParallelConfig:
        """The same layout as that of a training."""
        return ParallelConfig(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            distributed_timeout_minutes=self.distributed_timeout_minutes,
        )
