"""The steps of a run as metrics in MLflow and Weights & Biases, beside those that GEPA logs there.

GEPA's tracker starts the run, or joins the one that is active. Ours goes into the same one, under `combee/`, as each
step ends, on the thread that `compile` was called on. It starts no run and ends none. Both clients are imported on use.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dspy_combee.records.types import StepRecord, Usage

PREFIX = "combee/"
STEP = f"{PREFIX}step"
"""The metric that counts our steps; in W&B it is the axis of the others."""


class Tracker(Protocol):
    """A run to log to."""

    def last_step(self) -> int:
        """The last step of ours that the active run holds; -1 for none."""
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step."""
        ...


class MlflowTracker:
    """Logs to the MLflow run that is active on this thread."""

    def __init__(self) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")

    def last_step(self) -> int:
        """See `Tracker.last_step`."""
        run = self._mlflow.active_run()
        if run is None:
            return -1
        # The active run's own data is that of its start.
        saved = self._mlflow.MlflowClient().get_run(run.info.run_id)
        return int(saved.data.metrics.get(STEP, -1))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Tracker.log`; without an active run there is nothing to log to, and a new one is not ours to start."""
        run = self._mlflow.active_run()
        if run is None:
            return
        metric: Any = self._mlflow.entities.Metric
        now = int(1000 * time.time())
        made = [metric(name, value, now, step) for name, value in metrics.items()]
        self._mlflow.MlflowClient().log_batch(run.info.run_id, metrics=made)


class WandbTracker:
    """Logs to the active W&B run.

    Args:
        attached: Whether the run is the host's. W&B counts one step for all of a run and refuses to go back: in the
            host's run each step of ours takes the next one, in GEPA's own the one at which GEPA is.
    """

    def __init__(self, attached: bool) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._attached = attached
        self._defined: Any = None

    def last_step(self) -> int:
        """See `Tracker.last_step`."""
        run = self._wandb.run
        return -1 if run is None else int(run.summary.get(STEP, -1))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Tracker.log`."""
        run = self._wandb.run
        if run is None:
            return
        if self._defined is not run:
            run.define_metric(STEP)
            run.define_metric(f"{PREFIX}*", step_metric=STEP)
            self._defined = run
        run.log(dict(metrics), step=None if self._attached else run.step)


class StepTracking:
    """A step listener that logs each step to MLflow, W&B or both.

    Steps are those of the run. In a tracked run that holds steps of ours already, such as a host's in which this is
    the second `compile`, they go on from the last one. Several proposals of an iteration share a step; W&B shows the
    last of them.

    Args:
        use_mlflow: Whether to log to MLflow.
        use_wandb: Whether to log to W&B.
        wandb_attached: Whether the W&B run is the host's.
        num_examples: N, the size of the trainset.
    """

    def __init__(self, use_mlflow: bool, use_wandb: bool, wandb_attached: bool, num_examples: int) -> None:
        self.use_mlflow = use_mlflow
        self.use_wandb = use_wandb
        self.wandb_attached = wandb_attached
        self.num_examples = num_examples
        self._offsets: list[tuple[Tracker, int]] | None = None

    def __call__(self, step: StepRecord) -> None:
        """Log a step.

        Raises:
            Exception: Whatever a client raises; a run goes on when a listener does.
        """
        if self._offsets is None:
            self._offsets = [(made, max(0, made.last_step() + 1 - step.iteration)) for made in self._trackers()]
        metrics = step_metrics(step, self.num_examples)
        for tracker, offset in self._offsets:
            number = step.iteration + offset
            tracker.log({**metrics, STEP: float(number)}, number)

    def _trackers(self) -> list[Tracker]:
        """Made at the first step: where a client is missing, GEPA has said so by then."""
        trackers: list[Tracker] = [MlflowTracker()] if self.use_mlflow else []
        return [*trackers, WandbTracker(self.wandb_attached)] if self.use_wandb else trackers


def has_wandb_run() -> bool:
    """Whether there is a W&B run, the host's then, which GEPA would take for its own and end."""
    return getattr(sys.modules.get("wandb"), "run", None) is not None


def step_metrics(step: StepRecord, num_examples: int) -> dict[str, float]:
    """What is logged of a step, by name. What is not known, or no finite number, is left out.

    Args:
        step: The step.
        num_examples: N, the size of the trainset.
    """
    calls = sum((node.usage for node in step.nodes), Usage())
    fit = step.fit
    values: dict[str, float | None] = {
        "iteration": step.iteration,
        "n": step.n,
        "k": step.k,
        "p": step.duplication_factor,
        "profiling": step.profiling,
        "accepted": step.accepted,
        "score/minibatch_before": _mean(step.scores_before),
        "score/minibatch_after": _mean(step.scores_after),
        "score/validation": step.validation_score,
        "score/best": step.best_score,
        "fit/alpha": None if fit is None else fit.alpha,
        "fit/plateau": None if fit is None else fit.plateau,
        "fit/choice": None if fit is None else fit.choice,
        "seconds/step": step.seconds,
        "seconds/epoch": step.epoch_seconds(num_examples),
        **{f"seconds/{phase}": seconds for phase, seconds in step.phase_seconds.items()},
        "reflection/calls": calls.calls,
        "reflection/failed_calls": sum(node.error is not None for node in step.nodes),
        "reflection/input_tokens": calls.input_tokens,
        "reflection/output_tokens": calls.output_tokens,
        "reflection/dollars": calls.cost,
        "metric_calls": step.metric_calls,
    }
    return {
        f"{PREFIX}{name}": float(value) for name, value in values.items() if value is not None and math.isfinite(value)
    }


def _mean(scores: Sequence[float]) -> float | None:
    return sum(scores) / len(scores) if scores else None
