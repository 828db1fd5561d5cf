"""Writers to services that track experiments: Weights & Biases, MLflow."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import json
import os
import re
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from megatron.checkpoint.storage import replace_text
from megatron.errors import InputError
from megatron.files import read_file
from megatron.reports.config import ReportConfig
from megatron.reports.writers import Point, Tracker
from megatron.training.config import RunConfig
from megatron.training.start import resumes

# In the folder of --save: the id of the run in each service, by which a resumed run continues it.
RUN_IDS = "tracked-runs.json"
MAX_RUN_IDS_BYTES = 1 << 16

MAX_METRICS = 1000  # of a request to MLflow


class Service(Tracker):
    """A run in a service. A run that is resumed (--load of the folder of --save) continues its run there."""

    name: str  # in the file of run ids

    def __init__(self, config: RunConfig) -> None:
        self.config, self.flags = config, config.plugin(ReportConfig)

    def start(self, iteration: int, samples: int, *, evaluation_due: bool) -> None:
        save = self.config.checkpoint.save
        file = None if save is None or self.config.training.skip_train else Path(save) / RUN_IDS
        ids = {} if file is None else read_run_ids(file)
        run_id = self.begin(ids.get(self.name) if iteration and resumes(self.config.checkpoint) else None)
        if file is not None:
            try:
                replace_text(file, json.dumps(ids | {self.name: run_id}) + "\n")
            except OSError as error:
                raise InputError(f"--save: {file}: {error.strerror}") from None

    @abstractmethod
    def begin(self, run_id: str | None) -> str:
        """Begin a run, or continue the one with this id. Returns its id."""


def read_run_ids(file: Path) -> dict[str, str]:
    """Read the ids of the run in the services, by name; none if there is no file."""
    if not file.is_file():
        return {}
    try:
        ids = json.loads(read_file(file, MAX_RUN_IDS_BYTES))
        if not all(isinstance(text, str) for pair in ids.items() for text in pair):
            raise TypeError
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise InputError(
            f"{file}: is not a file of run ids; delete it to begin new runs in Weights & Biases and MLflow"
        ) from None
    return ids


class WeightsAndBiases(Service):
    """A run in Weights & Biases (--wandb-project)."""

    flag, name = "--wandb-project", "wandb"
    run: Any = None

    @classmethod
    def make(cls, config: RunConfig) -> WeightsAndBiases | None:
        if config.plugin(ReportConfig).wandb_project is None:
            return None
        try:
            import wandb  # noqa: F401
        except ImportError:
            raise InputError("--wandb-project needs Weights & Biases: pip install wandb") from None
        return cls(config)

    def begin(self, run_id: str | None) -> str:
        import wandb

        try:
            self.run = wandb.init(
                project=self.flags.wandb_project,
                name=self.flags.wandb_exp_name,
                entity=self.flags.wandb_entity,
                group=self.flags.wandb_group,
                id=run_id,
                resume=None if run_id is None else "allow",
                config=dataclasses.asdict(self.config),
            )
        except wandb.Error as error:
            raise InputError(f"--wandb-project: {self.flags.wandb_project}: {error}") from None
        # Its own steps must increase, and an evaluation may come before the log line of earlier iterations.
        self.run.define_metric("iteration", hidden=True)
        self.run.define_metric("*", step_metric="iteration")
        return str(self.run.id)

    def write(self, points: Sequence[Point]) -> None:
        with wandb_errors():
            for iteration, samples, values in points:
                self.run.log(values | {"train/consumed samples": samples, "iteration": iteration})

    def text(self, tag: str, text: str, iteration: int) -> None:
        import wandb

        with wandb_errors():
            self.run.log({tag: wandb.Html(f"<pre>{escape(text)}</pre>"), "iteration": iteration})

    def close(self, *, failed: bool) -> None:
        if self.run is not None:
            with wandb_errors():
                self.run.finish(exit_code=int(failed))


class MLflow(Service):
    """A run in MLflow (--mlflow-experiment)."""

    flag, name = "--mlflow-experiment", "mlflow"
    client: Any = None
    run_id: str = ""

    @classmethod
    def make(cls, config: RunConfig) -> MLflow | None:
        flags = config.plugin(ReportConfig)
        if flags.mlflow_experiment is None:
            return None
        packages = ["mlflow"]
        if not (flags.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")).startswith("http"):
            packages += ["sqlalchemy", "alembic"]  # for a database, which is the default
        if not all(map(importlib.util.find_spec, packages)):
            packages[0] = "mlflow-skinny"
            raise InputError(f"--mlflow-experiment needs MLflow: pip install {' '.join(packages)}")
        return cls(config)

    def begin(self, run_id: str | None) -> str:
        from mlflow import MlflowClient

        experiment = self.flags.mlflow_experiment
        assert experiment is not None
        try:
            with service_errors():
                client = MlflowClient(self.flags.mlflow_tracking_uri)
                if run_id is not None:
                    client.update_run(run_id, status="RUNNING")
                else:
                    found = client.get_experiment_by_name(experiment)
                    made = client.create_experiment(experiment) if found is None else found.experiment_id
                    run_id = client.create_run(made, run_name=self.flags.mlflow_run_name).info.run_id
        except OSError as error:
            raise InputError(f"--mlflow-experiment: {experiment}: {error.strerror}") from None
        self.client, self.run_id = client, run_id
        return run_id

    def write(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [
            Metric(re.sub(r"[^\w\-. :/]", "_", tag), value, now, point.iteration)
            for point in points
            for tag, value in point.values.items()
        ]
        with service_errors():
            for begin in range(0, len(metrics), MAX_METRICS):
                self.client.log_batch(self.run_id, metrics=metrics[begin : begin + MAX_METRICS])

    def text(self, tag: str, text: str, iteration: int) -> None:
        with service_errors():
            self.client.log_text(self.run_id, text, f"{tag}/iteration {iteration}.txt")

    def close(self, *, failed: bool) -> None:
        if self.client is not None:
            with service_errors():
                self.client.set_terminated(self.run_id, status="FAILED" if failed else "FINISHED")


@contextmanager
def wandb_errors() -> Iterator[None]:
    """Turn an error of Weights & Biases into an `OSError`, which the run outlives."""
    import wandb

    try:
        yield
    except wandb.Error as error:
        raise OSError(errno.EIO, " ".join(str(error).split())[:300]) from None


@contextmanager
def service_errors() -> Iterator[None]:
    """Turn an error of MLflow, such as an unreachable server, into an `OSError`, which the run outlives."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise OSError(errno.EIO, str(error).splitlines()[0][:300]) from None
