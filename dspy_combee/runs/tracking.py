"""The steps of a run as metrics in MLflow and Weights & Biases, beside those that GEPA logs there.

gepa's tracker starts the run, or joins the one that is active. Ours goes into the same one, under `combee/`, as each
step ends, on the thread that `compile` was called on. Both clients are imported on use.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from gepa.logging.experiment_tracker import create_experiment_tracker

from dspy_combee.records.types import StepRecord, Usage

PREFIX = "combee/"
TRACKER_KEYWORDS = (
    "wandb_attach_existing",
    "mlflow_tracking_uri",
    "mlflow_experiment_name",
    "mlflow_attach_existing",
)
"""gepa's keywords for its trackers beyond those of `dspy.GEPA`."""

STEP = f"{PREFIX}step"
"""The metric that counts our steps; in W&B it is the axis of the others."""


class Tracker(Protocol):
    """Log to a tracked run."""

    def last_step(self) -> int:
        """Return the last step of ours that the active run holds; -1 for none."""
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step."""
        ...


class MlflowTracker:
    """Log to the MLflow run that is active on this thread."""

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
    """Log to the active W&B run.

    Args:
        attached: Whether the run is not GEPA's own: the host's, or one opened for steps that are no search's. W&B counts
            one step for all of a run and refuses to go back: there each step of ours takes the next one, in GEPA's own
            the one at which GEPA is.
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


@dataclass(frozen=True)
class TrackingOptions:
    """Hold what a user says about trackers; all of it means what it means in `dspy.GEPA`."""

    use_mlflow: bool = False
    use_wandb: bool = False
    wandb_api_key: str | None = None
    wandb_init_kwargs: Mapping[str, Any] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """gepa's further keywords: tracking URI, experiment name, whether to attach to the active run."""


class StepTracking:
    """Log each step to MLflow, W&B or both, as a step listener.

    Steps are those of the run. In a tracked run that holds steps of ours already, such as a host's in which this is
    the second `compile`, they go on from the last one. Several proposals of an iteration share a step; W&B shows the
    last of them.

    Args:
        options: Where to log.
        num_examples: N, the size of the trainset.
    """

    def __init__(self, options: TrackingOptions, num_examples: int) -> None:
        self.options = options
        self.num_examples = num_examples
        self.is_wanted = options.use_mlflow or options.use_wandb
        self._attached = options.use_wandb and bool(options.more.get("wandb_attach_existing", has_wandb_run()))
        self._is_open = False
        self._offsets: list[tuple[Tracker, int]] | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep a tracked run open, as gepa's own tracker opens it, or join the one that is active.

        A search alone needs none: gepa opens its own.
        """
        options = self.options
        if not self.is_wanted:
            yield
            return
        init = dict(options.wandb_init_kwargs or {})
        more = {**options.more, "wandb_attach_existing": self._attached}
        with create_experiment_tracker(
            use_wandb=options.use_wandb,
            wandb_api_key=options.wandb_api_key,
            wandb_init_kwargs=init,
            use_mlflow=options.use_mlflow,
            **more,
        ):
            self._is_open = True
            yield

    def gepa_arguments(self) -> dict[str, Any]:
        """Return the keywords of `gepa.optimize`, which joins the run that `opened` keeps open, or the host's."""
        options = self.options
        arguments = {
            "use_wandb": options.use_wandb,
            "wandb_api_key": options.wandb_api_key,
            "wandb_init_kwargs": options.wandb_init_kwargs,
            "use_mlflow": options.use_mlflow,
        }
        joins_wandb = options.use_wandb and (self._attached or self._is_open)
        return arguments | ({"wandb_attach_existing": True} if joins_wandb else {})

    def __call__(self, step: StepRecord) -> None:
        """Log a step.

        Raises:
            Exception: Whatever a client raises; a run goes on when a listener does.
        """
        if self._offsets is None:
            self._offsets = [(made, max(0, made.last_step() + 1 - step.iteration)) for made in self._trackers()]
        metrics = step_metrics(step, self.num_examples) if self._offsets else {}
        for tracker, offset in self._offsets:
            number = step.iteration + offset
            tracker.log({**metrics, STEP: float(number)}, number)

    def _trackers(self) -> list[Tracker]:
        trackers: list[Tracker] = [MlflowTracker()] if self.options.use_mlflow else []
        return [*trackers, WandbTracker(self._attached or self._is_open)] if self.options.use_wandb else trackers


def has_wandb_run() -> bool:
    """Return whether there is a W&B run, the host's then, which gepa would take for its own and end."""
    return getattr(sys.modules.get("wandb"), "run", None) is not None


def step_metrics(step: StepRecord, num_examples: int) -> dict[str, float]:
    """Return what is logged of a step, by name. What is not known, or no finite number, is left out.

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
