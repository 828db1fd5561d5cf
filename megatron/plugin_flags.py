"""The command line of the parts that plug into the core: their flags, names and values of other programs' flags.

Importing this module fills the registries of the command line. It imports no torch, which takes seconds, so that
`--help` and errors in flags appear at once; `megatron.plugins` registers everything else.
"""

from __future__ import annotations

from megatron.arguments import AFTER_COMMAND_LINE, AFTER_DEFAULTS, BEFORE_COMMAND_LINE, PARSER_EXTENSIONS
from megatron.cli import OTHER_NAMES
from megatron.data.samplers import SAMPLE_ORDERS
from megatron.data.split import DATA_ORDERS
from megatron.evaluation.config import EvalTasksConfig
from megatron.faults.config import FaultsConfig
from megatron.inference.config import SampleTextsConfig
from megatron.interop.nvidia.data_order import head_split_bounds
from megatron.interop.nvidia.flags import add_nvidia_flags
from megatron.interop.nvidia.loss_mean import LossMeanConfig
from megatron.interop.other_names import FLAG_NAMES
from megatron.parallel.schedules import CHUNKED, SCHEDULES, SPLIT, V_SHAPED
from megatron.performance.config import Fp8Config, OffloadConfig, PerformanceConfig
from megatron.planner.config import DryRunConfig
from megatron.recipes.config import (
    ExitConfig,
    FreezeConfig,
    LossScaleConfig,
    RampUpConfig,
    RetentionConfig,
    SaveBestConfig,
    SpikeConfig,
)
from megatron.recipes.length import LengthConfig, length_in_samples, replace_default_length
from megatron.reports.config import ProfileConfig, ReportConfig, TimingConfig
from megatron.settings.checkpoint_args import add_checkpoint_args
from megatron.settings.config import SettingsConfig
from megatron.settings.config_file import add_config_flag, parse_config_file
from megatron.settings.data_tokenizer import DataTokenizerConfig, add_data_tokenizer
from megatron.settings.help import add_help
from megatron.settings.shorthands import ShorthandConfig, expand_shorthands
from megatron.settings.tokenizer import expand_tokenizer
from megatron.training.config import PLUGIN_CONFIGS
from megatron.variants.auto_schedule import AutoScheduleConfig
from megatron.variants.cyclic import cyclic
from megatron.variants.named_schedules import NAMED, SPLIT_BACKWARD, V_SHAPES, WITH_CHUNKS
from megatron.verify.config import CaptureConfig

SCHEDULES.update(NAMED)
V_SHAPED.update(V_SHAPES)
CHUNKED.update(WITH_CHUNKS)
SPLIT.update(SPLIT_BACKWARD)
OTHER_NAMES.update(FLAG_NAMES)
SAMPLE_ORDERS.update({"cyclic": cyclic})
DATA_ORDERS.update({"head": head_split_bounds})
PLUGIN_CONFIGS.update(
    {
        "settings": SettingsConfig,
        "shorthands": ShorthandConfig,
        "tokenizer folder": DataTokenizerConfig,
        "length": LengthConfig,
        "loss scale": LossScaleConfig,
        "spikes": SpikeConfig,
        "ramp-up": RampUpConfig,
        "exit": ExitConfig,
        "freezing": FreezeConfig,
        "old checkpoints": RetentionConfig,
        "best checkpoint": SaveBestConfig,
        "performance": PerformanceConfig,
        "activations": OffloadConfig,
        "pipeline schedule": AutoScheduleConfig,
        "low precision": Fp8Config,
        "reports": ReportConfig,
        "timing": TimingConfig,
        "profile": ProfileConfig,
        "faults": FaultsConfig,
        "evaluation": EvalTasksConfig,
        "samples": SampleTextsConfig,
        "dry run": DryRunConfig,
        "loss": LossMeanConfig,
        "capture": CaptureConfig,
    }
)
PARSER_EXTENSIONS[:] = [add_help, add_config_flag, add_nvidia_flags]
BEFORE_COMMAND_LINE[:] = [parse_config_file]
AFTER_COMMAND_LINE[:] = [
    expand_shorthands,
    expand_tokenizer,
    add_checkpoint_args,
    add_data_tokenizer,
    replace_default_length,
]
AFTER_DEFAULTS[:] = [length_in_samples]
