"""The Python interface, in the test's process, in several processes, and in the kernel of a notebook."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed

from megatron import api
from megatron.api import (
    GPT,
    CheckpointConfig,
    DataConfig,
    Hook,
    InputError,
    LengthConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PerformanceConfig,
    Run,
    RunConfig,
    ShorthandConfig,
    TokenizerConfig,
    Trainer,
    TrainingConfig,
    configure,
    train,
)
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.planner.config import DryRunConfig
from megatron.variants.mock_data import MockGPTDataset

ROOT = Path(__file__).resolve().parent.parent
MODEL = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2)
DATA = DataConfig(mock_data=True, seq_length=8, num_workers=0)
TOKENIZER = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=59)
OPTIMIZER = OptimizerConfig(lr=1e-2)


def training(iterations: int, **others: Any) -> TrainingConfig:
    given = {"micro_batch_size": 2, "device": "cpu", "eval_interval": 2, "eval_iters": 1} | others
    return TrainingConfig(train_iters=iterations, **given)


def small_run(*configs: Any, iterations: int = 4, hooks: tuple[Hook, ...] = ()) -> Run:
    return train(GPT, MODEL, DATA, TOKENIZER, OPTIMIZER, training(iterations), *configs, hooks=hooks)


class Interrupt(Hook):
    """Sends SIGINT to the process after an iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def after_step(self, trainer: Trainer) -> None:
        if trainer.state.iteration == self.iteration:
            os.kill(os.getpid(), signal.SIGINT)


def process_state() -> tuple[Any, ...]:
    logger = logging.getLogger("megatron")
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    threads = {thread.name for thread in threading.enumerate() if "tqdm" not in thread.name}
    process = threads, torch.get_num_threads(), sys.stdout
    return dict(os.environ), handlers, list(logger.handlers), logger.level, process


def test_a_run_returns_its_model_and_values() -> None:
    run = small_run()
    assert [row["iteration"] for row in run.iterations] == [1, 2, 3, 4]
    assert run.losses == [row["lm loss"] for row in run.iterations]
    assert all(0 < loss < 5 for loss in run.losses) and run.losses[-1] != run.losses[0]
    assert [(e["iteration"], "lm loss validation" in e) for e in run.evaluations] == [
        (2, True),
        (4, True),
        (4, False),  # on test data
    ]
    assert run.stop_reason is None
    ids = torch.zeros(1, 8, dtype=torch.int64)
    assert run.model(ids, torch.arange(8).unsqueeze(0)).shape == (1, 8, 60)


def test_runs_leave_the_process_as_it_was() -> None:
    before = process_state()
    first = small_run()
    assert process_state() == before
    assert small_run().losses == first.losses
    assert process_state() == before


def test_the_number_of_threads_is_that_of_the_run() -> None:
    before = process_state()
    found: list[int] = []

    class Threads(Hook):
        def after_step(self, trainer: Trainer) -> None:
            found.append(torch.get_num_threads())

    threads = torch.get_num_threads() + 1
    small_run(PerformanceConfig(num_threads=threads), iterations=1, hooks=(Threads(),))
    assert found == [threads] and process_state() == before


def test_an_error_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    before = process_state()
    with pytest.raises(InputError, match=r"^--load: .* no checkpoint|^--load: "):
        small_run(CheckpointConfig(load=str(tmp_path / "none")))
    assert process_state() == before


def test_an_interrupt_returns_control() -> None:
    before = process_state()
    run = small_run(iterations=1000, hooks=(Interrupt(3),))
    assert run.stop_reason == "SIGINT was received" and len(run.losses) in (3, 4)
    assert process_state() == before


def test_the_log_interval_does_not_matter_to_the_values() -> None:
    assert small_run(LoggingConfig(log_interval=1)).losses == small_run().losses


def test_the_length_may_be_in_tokens_or_epochs(tmp_path: Path) -> None:
    sizes = TrainingConfig(micro_batch_size=2, device="cpu", eval_iters=0)
    run = train(GPT, MODEL, DATA, TOKENIZER, OPTIMIZER, sizes, LengthConfig(train_tokens=8 * 2 * 3))
    assert len(run.losses) == 3
    with IndexedDatasetWriter(tmp_path / "tokens", np.uint16) as writer:
        writer.add_document([np.arange(33)])
    data = DataConfig(data_path=(str(tmp_path / "tokens"),), split="1", seq_length=8, num_workers=0)
    run = train(GPT, MODEL, data, TOKENIZER, OPTIMIZER, sizes, LengthConfig(train_epochs=2))
    assert run.config.training.train_samples == 8
    assert len(run.losses) == 4


def test_a_run_that_has_ended_returns_its_model(tmp_path: Path) -> None:
    folder = CheckpointConfig(save=str(tmp_path), load=str(tmp_path))
    first, again = small_run(folder), small_run(folder)
    assert again.losses == []
    assert again.evaluations == []
    weights = {name: value for name, value in first.model.state_dict().items() if name.startswith("decoder")}
    assert weights
    for name, value in weights.items():
        assert torch.equal(again.model.state_dict()[name], value)


def test_flags_and_objects_make_the_same_configuration() -> None:
    from megatron.arguments import parse_run_config

    words = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --num-workers 0 "
        "--tokenizer-type NullTokenizer --vocab-size 59 --lr 1e-2 --train-iters 4 --micro-batch-size 2 --device cpu "
        "--eval-interval 2 --eval-iters 1 --recompute-activations --tensor-model-parallel-size 2"
    )
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    shorthand = ShorthandConfig(recompute_activations=True)
    built = configure(MODEL, DATA, TOKENIZER, OPTIMIZER, training(4), parallel, shorthand)
    assert built == parse_run_config(words.split(), description="", defaults={})
    # A configuration that was derived once is accepted again.
    assert configure(*built.sections) == built


def test_all_sections_can_be_given() -> None:
    """`train` refuses only the flags of a dry run."""
    sections = {kind.__name__ for kind in RunConfig.section_types().values() if kind is not DryRunConfig}
    assert sections <= set(api.__all__)


def test_wrong_configurations() -> None:
    with pytest.raises(InputError, match=r"^ModelConfig is given twice; give it once"):
        small_run(MODEL)
    with pytest.raises(InputError, match=r"^Config is not a section"):
        from megatron.flags import Config

        small_run(Config())
    with pytest.raises(InputError, match=r"^--train-iters, .* is required"):
        train(GPT, MODEL, DATA, TOKENIZER, OPTIMIZER, TrainingConfig(micro_batch_size=2, device="cpu"))
    with pytest.raises(InputError, match=r"^--micro-batch-size is required"):
        train(GPT, MODEL, DATA, TOKENIZER, OPTIMIZER, LengthConfig(train_tokens=64))
    with pytest.raises(InputError, match=r"^dry_run: train\(\) trains"):
        small_run(DryRunConfig(dry_run=True))


def test_a_data_set_of_a_notebook_cannot_reach_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MockGPTDataset, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # a worker of pytest has none
    data = dataclasses.replace(DATA, num_workers=1)
    with pytest.raises(
        InputError, match=r"^--num-workers: 1 worker processes cannot import MockGPTDataset, which"
    ):
        train(GPT, MODEL, data, TOKENIZER, OPTIMIZER, training(1))
    small_run(iterations=1)


def test_another_thread_is_refused() -> None:
    errors: list[BaseException] = []

    def body() -> None:
        try:
            small_run()
        except InputError as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert "needs the process's main thread" in str(errors[0])


def run_twice() -> tuple[list[float], list[float], bool]:
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    with suppress(InputError):  # after the processes have met
        small_run(parallel, CheckpointConfig(load="none"))
    first, second = small_run(parallel), small_run(parallel)
    return first.losses, second.losses, dist.is_initialized()


def test_two_processes_run_twice() -> None:
    alone = small_run().losses
    results = run_distributed(run_twice, 2)
    for first, second, initialized in results:
        assert first == second == results[0][0] and not initialized
        # Dropout masks differ between layouts.
        assert first == pytest.approx(alone, abs=0.5)


WORKERS = """
import multiprocessing.forkserver as server
from test_api import DATA, GPT, MODEL, OPTIMIZER, TOKENIZER, small_run, train, training
from megatron.api import DataConfig

if __name__ == "__main__":
    data = DataConfig(mock_data=True, seq_length=8, num_workers=1)
    losses = train(GPT, MODEL, data, TOKENIZER, OPTIMIZER, training(2)).losses
    assert losses == small_run(iterations=2).losses
    assert server._forkserver._forkserver_pid is None
"""


@pytest.mark.slow
def test_data_loading_processes_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WORKERS)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Interrupting(nbclient.NotebookClient):
    """Interrupts the kernel once the cell that would run forever has printed a loss."""

    interruption: asyncio.Task[None] | None = None

    def process_message(self, msg: Any, cell: Any, index: int) -> Any:
        shows_loss = msg["msg_type"] == "stream" and "grad norm" in msg["content"]["text"]
        if shows_loss and "FOREVER" in cell["source"] and self.interruption is None:
            self.interruption = asyncio.ensure_future(self.km.interrupt_kernel())
        return super().process_message(msg, cell, index)


def test_the_notebook_in_a_fresh_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs examples/notebook.ipynb, and then interrupts a run that would not end."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("train_iters=100", "train_iters=20, device='cpu'")
    (call,) = [cell.source for cell in notebook.cells if cell.source.startswith("run = train(")]
    endless = call.replace("train_iters=20", "train_iters=10**6").replace("log_interval=20", "log_interval=1")
    last = "print(run.stop_reason, len(run.losses) < 10**6)"
    for source in (f"# FOREVER\n{endless}", last):
        notebook.cells.append(nbformat.v4.new_code_cell(source))
    Interrupting(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()

    def printed(cell: Any) -> str:
        return "".join(output["text"] for output in cell.outputs if output.get("name") == "stdout")

    texts = [printed(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert "loss 5." in texts[2] and texts[3].startswith("The ")
    assert texts[-1] == "SIGINT was received True\n"


def test_importing_the_package_stays_cheap() -> None:
    code = "import sys, megatron; print({'torch', 'numpy', 'megatron.api'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n"
