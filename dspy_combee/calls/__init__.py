"""Calls of language models, and the executors that make many of them at once."""

from __future__ import annotations

import dspy

from dspy_combee.calls.executors import Executor, ThreadExecutor

EXECUTORS = ("ray", "threads")


def check_executor(executor: object) -> str | Executor:
    """Return the executor if it can be one.

    Raises:
        ValueError: If no executor has that name.
        TypeError: If it is neither a name nor an `Executor`.
        ImportError: If `"ray"` lacks ray.
    """
    if isinstance(executor, str):
        if executor not in EXECUTORS:
            raise ValueError(f"Unknown executor {executor!r}; known are {list(EXECUTORS)}.")
        make_executor(executor, None)
        return executor
    if isinstance(executor, type) or not isinstance(executor, Executor):
        raise TypeError(
            f"executor must be a name or an Executor, got {type(executor).__name__}. A class of your own should "
            "subclass dspy_combee.Executor."
        )
    return executor


def make_executor(executor: str | Executor, num_threads: int | None) -> Executor:
    """Return the executor of one run's rollouts and reflection calls.

    Args:
        executor: A name, or an `Executor` (which may have a width of its own: see `Executor.with_width`).
        num_threads: The width; None for DSPy's setting.
    """
    if executor == "ray":
        from dspy_combee.calls.ray_executor import RayExecutor

        executor = RayExecutor()
    if isinstance(executor, str):
        return ThreadExecutor(num_threads or dspy.settings.num_threads)
    return executor if num_threads is None else executor.with_width(num_threads)
