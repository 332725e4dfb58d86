"""The executors by name, checked when they are given and made when a run begins."""

from __future__ import annotations

from typing import Any

import dspy

from dspy_combee.calls.executors import Executor, ThreadExecutor
from dspy_combee.calls.ray_executor import RayExecutor

EXECUTORS = ("ray", "threads")


def check_executor(executor: Any) -> str | Executor:
    """The executor, if it can be one.

    Raises:
        ValueError: If no executor has that name.
        TypeError: If it is neither a name nor an `Executor`.
        ImportError: If `"ray"` lacks ray.
    """
    if isinstance(executor, str):
        if executor not in EXECUTORS:
            raise ValueError(f"Unknown executor {executor!r}; known are {list(EXECUTORS)}.")
        if executor == "ray":
            RayExecutor()
        return executor
    if not isinstance(executor, Executor):
        raise TypeError(f"executor must be a name or an Executor, got {type(executor).__name__}.")
    return executor


def make_executor(executor: str | Executor, num_threads: int | None) -> Executor:
    """What runs the rollouts and reflection calls of one run.

    Args:
        executor: A name, or an `Executor`, which has a width of its own (a `RayExecutor` takes `num_threads`).
        num_threads: The width; None for DSPy's setting.
    """
    if executor == "ray":
        executor = RayExecutor()
    if isinstance(executor, RayExecutor):
        return executor if num_threads is None else executor.with_width(num_threads)
    if isinstance(executor, str):
        return ThreadExecutor(num_threads or dspy.settings.num_threads)
    return executor
