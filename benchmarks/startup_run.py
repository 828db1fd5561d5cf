"""Run pretrain_gpt.py and write the seconds of each phase to FILE. startup.py starts it at TIME.

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

from megatron import pretrain_gpt
from megatron.arguments import parse_run_config
from megatron.data.batch import Batch
from megatron.optim.buffer import ParamBuffer
from megatron.parallel.mesh import Mesh
from megatron.reports.reports import Reports
from megatron.reports.throughput import Throughput
from megatron.training import pretrain
from megatron.training.log_hook import Logging
from megatron.training.loop import Trainer

imported = time.time()


class Phases:
    """Seconds of the phases of a run, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.time() - start

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time counts toward a phase."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return run


def main() -> None:
    start_time, output, flags = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    phases = Phases()
    phases.seconds["interpreter and imports"] = imported - start_time

    class TimedLogging(Logging):
        """Logging hook that times the first iteration, after `Logging` has synchronized the device."""

        def before_training(self, trainer: Trainer) -> None:
            super().before_training(trainer)
            train_step = trainer.step

            def step(batches: Iterator[Batch]) -> None:
                self.begin = time.time()
                with phases.phase("waiting for the first batch"):
                    first = next(batches)
                train_step(itertools.chain([first], batches))

            trainer.step = step

        def after_step(self, trainer: Trainer) -> None:
            super().after_step(trainer)
            phases.seconds["first iteration"] = time.time() - self.begin
            phases.seconds["in all"] = time.time() - start_time
            phases.seconds["in all, of the processor"] = time.process_time()

    init_mesh = pretrain.init_mesh

    @contextmanager
    def timed_mesh(*args: Any) -> Iterator[Mesh]:
        with ExitStack() as stack:
            with phases.phase("process group"):
                mesh = stack.enter_context(init_mesh(*args))
            yield mesh

    pretrain.init_mesh = timed_mesh
    pretrain.build_tokenizer = phases.timed("tokenizer", pretrain.build_tokenizer)
    pretrain.build_engine = phases.timed("model", pretrain.build_engine)
    ParamBuffer.initialize = phases.timed("model", ParamBuffer.initialize)
    build_datasets = phases.timed("datasets", pretrain_gpt.GPT.build_datasets)
    task = dataclasses.replace(pretrain_gpt.GPT, build_datasets=build_datasets)
    with phases.phase("command line"):
        config = parse_run_config(flags, description="", defaults=pretrain_gpt.DEFAULTS)
    pretrain.pretrain(config, task, [Throughput(Reports()), TimedLogging()])
    if os.environ.get("RANK", "0") == "0":
        output.write_text(json.dumps(phases.seconds), encoding="utf-8")


if __name__ == "__main__":
    main()
