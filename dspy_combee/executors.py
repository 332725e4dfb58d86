"""Executors: an ordered map over many items, at most `width` of them at once."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")
R = TypeVar("R")


@runtime_checkable
class Executor(Protocol):
    """Runs one function over many items.

    Attributes:
        width: How many items are in flight at most, all kinds of work together.
    """

    width: int

    def map(
        self,
        function: Callable[[T], R],
        items: Sequence[T],
        *,
        timeout: float | None = None,
        on_timeout: Callable[[T], R] | None = None,
    ) -> list[R]:
        """Apply `function` to every item.

        Args:
            function: Called once per item, each time in a copy of the caller's context (`contextvars`).
            items: The items.
            timeout: Seconds that one item may take, from its start; None for no limit.
            on_timeout: Gives the result of an item that took longer. The late result is dropped and the item
                no longer counts towards the width. Required with `timeout`.

        Returns:
            The results, in the order of the items, always as many as the items.

        Raises:
            BaseException: The first error that `function` raised. Items that had not started never start.
        """
        ...


class ThreadExecutor:
    """Executor over daemon threads, which hold up neither Ctrl-C nor the interpreter's exit.

    At width 1 and without a timeout everything runs in the caller's own thread.

    Args:
        width: How many items are in flight at most, an int of at least 1.

    Raises:
        TypeError: If width is no int.
        ValueError: If width is below 1.
    """

    def __init__(self, width: int) -> None:
        if isinstance(width, bool) or not isinstance(width, int):
            raise TypeError(f"num_threads must be an int of at least 1, got {width!r}.")
        if width < 1:
            raise ValueError(f"num_threads must be at least 1, got {width}.")
        self.width = width

    def map(
        self,
        function: Callable[[T], R],
        items: Sequence[T],
        *,
        timeout: float | None = None,
        on_timeout: Callable[[T], R] | None = None,
    ) -> list[R]:
        """See `Executor.map`."""
        items = list(items)
        deadline = None
        if timeout is not None:
            if on_timeout is None:
                raise ValueError("timeout needs on_timeout, which gives the result of an item that takes too long.")
            deadline = _Deadline(timeout, on_timeout)
        if deadline is None and (self.width == 1 or len(items) <= 1):
            return [contextvars.copy_context().run(function, item) for item in items]
        job = _Job(function, items, deadline)
        for _ in range(min(self.width, len(items))):
            job.add_worker()
        try:
            return job.collect()
        finally:
            job.pending.clear()


@dataclass(frozen=True)
class _Deadline:
    seconds: float
    on_timeout: Callable[[Any], Any]


@dataclass(frozen=True)
class _Outcome:
    index: int
    value: Any = None
    error: BaseException | None = None


class _Job:
    """One call of `ThreadExecutor.map`: the items that wait, and the outcomes that come in."""

    def __init__(self, function: Callable[[Any], Any], items: list[Any], deadline: _Deadline | None) -> None:
        self.function = function
        self.items = items
        self.deadline = deadline
        self.contexts = [contextvars.copy_context() for _ in items]
        self.pending = deque(range(len(items)))
        self.started: dict[int, float] = {}
        self.outcomes: queue.SimpleQueue[_Outcome | None] = queue.SimpleQueue()

    def add_worker(self) -> None:
        threading.Thread(target=self._work, name="dspy-combee", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                index = self.pending.popleft()
            except IndexError:
                return
            if self.deadline is not None:
                self.started[index] = time.monotonic()
                self.outcomes.put(None)  # There is a new deadline to watch.
            try:
                outcome = _Outcome(index, self.contexts[index].run(self.function, self.items[index]))
            except BaseException as error:
                outcome = _Outcome(index, error=error)
            abandoned = self.deadline is not None and self.started.pop(index, None) is None
            self.outcomes.put(outcome)
            if abandoned:
                return  # Another worker took this one's place.

    def collect(self) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(self.items):
            try:
                outcome = self.outcomes.get(timeout=self._patience())
            except queue.Empty:
                results.update(self._abandoned())
                continue
            if outcome is None or outcome.index in results:
                continue
            if outcome.error is not None:
                raise outcome.error
            results[outcome.index] = outcome.value
        return [results[index] for index in range(len(self.items))]

    def _patience(self) -> float | None:
        starts = list(self.started.values())
        if self.deadline is None or not starts:
            return None
        return max(0.0, min(starts) + self.deadline.seconds - time.monotonic())

    def _abandoned(self) -> dict[int, Any]:
        results: dict[int, Any] = {}
        if self.deadline is not None:
            now = time.monotonic()
            for index, start in list(self.started.items()):
                if now - start >= self.deadline.seconds and self.started.pop(index, None) is not None:
                    results[index] = self.deadline.on_timeout(self.items[index])
                    self.add_worker()
        return results
