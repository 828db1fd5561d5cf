"""Continue prompts with a trained GPT: one, those of a file, or yours as you type.

python tools/generate_text.py --load checkpoints --prompt "Once upon a time"
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.arguments import Parser, add_flags, make_config, run_command
from megatron.inference.beam import BeamConfig
from megatron.inference.config import InferenceConfig
from megatron.inference.lead import lead
from megatron.inference.sampling import SamplingConfig
from megatron.inference.terminal import TextConfig, run
from megatron.tokenizer.config import TokenizerConfig


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    configs = {
        "model": InferenceConfig,
        "prompts": TextConfig,
        "sampling": SamplingConfig,
        "beam search": BeamConfig,
        "tokenizer (default: the one saved with the checkpoint)": TokenizerConfig,
    }
    for title, config in configs.items():
        add_flags(parser, config, title)
    args = vars(parser.parse_args(argv))
    model, text, sampling, beam, tokenizer = (make_config(config, args) for config in configs.values())
    drawing = {field.name for field in dataclasses.fields(SamplingConfig)} - {"out_seq_length"}
    beam.check(args.keys() & (drawing | {"num_samples", "logprobs"}))
    lead(model, tokenizer, functools.partial(run, text, sampling, beam))


if __name__ == "__main__":
    run_command(main)
