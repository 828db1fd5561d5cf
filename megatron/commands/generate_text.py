"""Generate text from prompts with a trained GPT: a prompt, a file of prompts, or prompts that you type.

megatron generate --load checkpoints --prompt "Once upon a time"
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.inference.beam import BeamConfig
from megatron.inference.config import InferenceConfig
from megatron.inference.driver import driver
from megatron.inference.sampling import SamplingConfig
from megatron.inference.terminal import TextConfig, run
from megatron.settings.tokenizer import TokenizerFlags, tokenizer_config


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    configs = {
        "model": InferenceConfig,
        "prompts": TextConfig,
        "sampling": SamplingConfig,
        "beam search": BeamConfig,
        "tokenizer (default: the one saved with the checkpoint)": TokenizerFlags,
    }
    for title, config in configs.items():
        add_flags(parser, config, title)
    parser.flags["--prompt"].type = str  # which, unlike other values, may be empty
    args = vars(parser.parse_args(argv))
    beam = make_config(BeamConfig, args)
    sampling_flags = {field.name for field in dataclasses.fields(SamplingConfig)} - {"out_seq_length"}
    beam.check(args.keys() & (sampling_flags | {"num_samples", "logprobs"}))
    generate = functools.partial(run, make_config(TextConfig, args), make_config(SamplingConfig, args), beam)
    driver(make_config(InferenceConfig, args), tokenizer_config(args), generate)


if __name__ == "__main__":
    run_command(main)
