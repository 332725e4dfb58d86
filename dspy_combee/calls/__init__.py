"""Calls of language models, and the executors that make many of them at once."""

from __future__ import annotations

import dspy

from dspy_combee.calls.executors import Executor, ThreadExecutor


def resolve_executor(executor: str | Executor, num_threads: int | None = None) -> Executor:
    """Return the executor of one run's rollouts and reflection calls.

    Args:
        executor: `"threads"`, `"ray"`, or an `Executor`, which may keep a width of its own.
        num_threads: The width; None for DSPy's setting, or the executor's own width.

    Raises:
        ValueError: If no executor has that name.
        TypeError: If it is neither a name nor an `Executor`.
        ImportError: If `"ray"` lacks ray.
    """
    if executor == "threads":
        return ThreadExecutor(dspy.settings.num_threads if num_threads is None else num_threads)
    if executor == "ray":
        from dspy_combee.calls.ray_executor import RayExecutor

        executor = RayExecutor()
    if isinstance(executor, str):
        raise ValueError(f"Unknown executor {executor!r}; known are ['ray', 'threads'].")
    if isinstance(executor, type) or not isinstance(executor, Executor):
        raise TypeError(
            f"executor must be a name or an Executor, got {type(executor).__name__}. A class of your own should "
            "subclass dspy_combee.Executor."
        )
    return executor if num_threads is None else executor.with_width(num_threads)
