"""pretrain_gpt.py with a clock. Started by startup.py, which says when it did, and reads the seconds of each phase.

python benchmarks/startup_run.py TIME FILE [flags of pretrain_gpt.py]
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pretrain_gpt
from megatron.arguments import parse_run_config
from megatron.data.batch import Batch
from megatron.optim.buffer import ParamBuffer
from megatron.parallel.mesh import Mesh
from megatron.training import pretrain
from megatron.training.log_hook import Logging
from megatron.training.loop import Trainer

imported = time.time()


class Phases:
    """Seconds that parts of a run have taken, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        start = time.time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.time() - start

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which counts among a phase."""

        def run(*arguments: Any, **named: Any) -> Any:
            with self.named(name):
                return function(*arguments, **named)

        return run


def main() -> None:
    began, output, flags = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    phases = Phases()
    phases.seconds["interpreter and imports"] = imported - began

    class Timed(Logging):
        """Called after `Logging` has waited for the device."""

        def before_training(self, trainer: Trainer) -> None:
            super().before_training(trainer)
            plain = trainer.step

            def step(batches: Iterator[Batch]) -> None:
                self.begin = time.time()
                with phases.named("waiting for the first batch"):
                    first = next(batches)
                plain(itertools.chain([first], batches))

            trainer.step = step

        def after_step(self, trainer: Trainer) -> None:
            super().after_step(trainer)
            phases.seconds["first iteration"] = time.time() - self.begin
            phases.seconds["in all"] = time.time() - began
            phases.seconds["in all, of the processor"] = time.process_time()

    init_mesh = pretrain.init_mesh

    @contextmanager
    def timed_mesh(*arguments: Any) -> Iterator[Mesh]:
        with ExitStack() as stack:
            with phases.named("process group"):
                mesh = stack.enter_context(init_mesh(*arguments))
            yield mesh

    pretrain.init_mesh = timed_mesh
    pretrain.build_tokenizer = phases.of("tokenizer", pretrain.build_tokenizer)
    pretrain.Engine = phases.of("model", pretrain.Engine)
    ParamBuffer.initialize = phases.of("model", ParamBuffer.initialize)
    build_datasets = phases.of("datasets", pretrain_gpt.GPT.build_datasets)
    task = dataclasses.replace(pretrain_gpt.GPT, build_datasets=build_datasets)
    with phases.named("command line"):
        config = parse_run_config(flags, description="", defaults=pretrain_gpt.DEFAULTS)
    pretrain.pretrain(config, task, [Timed()])
    if os.environ.get("RANK", "0") == "0":
        output.write_text(json.dumps(phases.seconds), encoding="utf-8")


if __name__ == "__main__":
    main()
