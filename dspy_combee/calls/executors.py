"""Executors: an ordered map over many items, at most `width` of them at once."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from dspy_combee.calls.backoff import WAKE, Backoff, Throttle
from dspy_combee.records.checks import check_int
from dspy_combee.records.errors import ProviderError

logger = logging.getLogger("dspy_combee")

T = TypeVar("T")
R = TypeVar("R")

# The executors whose items this context runs inside.
_INSIDE: contextvars.ContextVar[tuple[Executor, ...]] = contextvars.ContextVar("dspy_combee_inside", default=())


@runtime_checkable
class Executor(Protocol):
    """Runs one function over many items.

    Attributes:
        width: How many items are in flight at most, over all the calls of `map` that are under way.
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

        An item may call `map` itself; its items then run one at a time, in the place of the one that waits.

        Args:
            function: Called once per item, each time in a copy of the caller's context (`contextvars`).
            items: The items.
            timeout: Seconds that one item may take, from its start, more than 0; None for no limit.
            on_timeout: Gives the result of an item that took longer. The late result is dropped and the item
                no longer counts towards the width. Required with `timeout`.

        Returns:
            The results, in the order of the items, always as many as the items.

        Raises:
            BaseException: The first error that `function` raised. Items that had not started never start, and
                those in flight no longer count towards the width.
            ValueError: If the timeout is out of range or lacks on_timeout.
        """
        ...


class ThreadExecutor:
    """Executor over daemon threads, which hold up neither Ctrl-C nor the interpreter's exit.

    At width 1 and without a timeout everything runs in the caller's own thread.

    An item that fails with a transient `ProviderError` (rate limit, timeout, connection) is tried again; until then
    all items pause, and fewer run at once for a while. This is the one place where that is done.

    Args:
        width: How many items are in flight at most, an int of at least 1.
        backoff: How items are tried again.

    Attributes:
        slots: Its places, one for each item in flight.

    Raises:
        TypeError: If width is no int.
        ValueError: If width is below 1.
    """

    def __init__(self, width: int, backoff: Backoff | None = None) -> None:
        self.width = check_int("num_threads", width)
        self.backoff = backoff or Backoff()
        self.slots = Throttle(width, self.backoff)

    def __reduce__(self) -> tuple[type[ThreadExecutor], tuple[int, Backoff]]:
        return type(self), (self.width, self.backoff)  # A copy has slots of its own.

    def __repr__(self) -> str:
        return f"ThreadExecutor({self.width})"

    @property
    def holds_caller(self) -> bool:
        """Whether the caller is an item of this executor, so that it holds a slot."""
        return self in _INSIDE.get()

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
        check_timeout(timeout, on_timeout)
        deadline = None if timeout is None or on_timeout is None else _Deadline(timeout, on_timeout)
        inside = _INSIDE.get()
        nested = self.holds_caller
        # An item that calls `map` holds a slot already.
        slots = Throttle(1, self.backoff) if nested else self.slots
        width = 1 if nested else min(self.width, len(items))
        token = _INSIDE.set(inside if nested else (*inside, self))
        try:
            if deadline is None and (width <= 1 or self.width == 1):
                return [_run_here(function, item, slots) for item in items]
            job = _Job(function, items, deadline, slots)
        finally:
            _INSIDE.reset(token)
        try:
            for _ in range(width):
                job.add_worker()
            return job.collect()
        finally:
            job.abandon()


@contextmanager
def in_use(executor: Executor) -> Iterator[None]:
    """The length of a run: an executor that holds something open (a connection) holds it open as long as this lasts."""
    with executor if isinstance(executor, AbstractContextManager) else nullcontext():
        yield


def check_timeout(timeout: float | None, on_timeout: Callable[[Any], Any] | None) -> None:
    """Refuse a timeout that is out of range, or that lacks on_timeout."""
    if timeout is None:
        return
    if not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, got {timeout!r}.")
    if on_timeout is None:
        raise ValueError("timeout needs on_timeout, which gives the result of an item that takes too long.")


def _run_here(function: Callable[[T], R], item: T, slots: Throttle) -> R:
    attempt = 0
    while True:
        attempt += 1
        slots.acquire()
        try:
            value = contextvars.copy_context().run(function, item)
        except ProviderError as error:
            if not _should_retry(error, attempt, slots):
                raise
        else:
            slots.succeed()
            return value
        finally:
            slots.release()


def _should_retry(error: BaseException | None, attempt: int, slots: Throttle) -> bool:
    """Whether an item should run again, after the pause that this makes everyone take."""
    if not (isinstance(error, ProviderError) and error.transient):
        return False
    retry = slots.slow_down(attempt, error.retry_after)
    logger.info("%s, after attempt %d: %s", "Slowing down" if retry else "Giving up", attempt, error)
    return retry


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

    def __init__(
        self,
        function: Callable[[Any], Any],
        items: list[Any],
        deadline: _Deadline | None,
        slots: Throttle,
    ) -> None:
        self.function = function
        self.items = items
        self.deadline = deadline
        self.slots = slots
        self.contexts = [contextvars.copy_context() for _ in items]
        self.pending = deque(range(len(items)))
        self.started: dict[int, float] = {}  # Items in flight. Who takes one out gives its slot back.
        self.attempts: Counter[int] = Counter()
        self.outcomes: queue.SimpleQueue[_Outcome | None] = queue.SimpleQueue()

    def add_worker(self) -> None:
        threading.Thread(target=self._work, name="dspy-combee", daemon=True).start()

    def _work(self) -> None:
        while True:
            self.slots.acquire()
            try:
                index = self.pending.popleft()
            except IndexError:
                self.slots.release()
                return
            self.started[index] = time.monotonic()
            if self.deadline is not None:
                self.outcomes.put(None)  # There is a new deadline to watch.
            try:
                outcome = _Outcome(index, self.contexts[index].copy().run(self.function, self.items[index]))
            except BaseException as error:
                outcome = _Outcome(index, error=error)
            if index not in self.started:
                return  # It was given up: how it ends slows nobody down.
            self.attempts[index] += 1
            retry = _should_retry(outcome.error, self.attempts[index], self.slots)
            if outcome.error is None:
                self.slots.succeed()
            if not self._end(index, failed=outcome.error is not None and not retry):
                return  # The item was given up, and another worker took this one's place.
            if retry:
                self.pending.appendleft(index)
            else:
                self.outcomes.put(outcome)

    def _end(self, index: int, failed: bool = False) -> bool:
        if self.started.pop(index, None) is None:
            return False
        if failed:
            self.pending.clear()
        self.slots.release()
        return True

    def collect(self) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(self.items):
            try:
                outcome = self.outcomes.get(timeout=self._patience())
            except queue.Empty:
                results.update(self._timed_out())
                continue
            if outcome is None:
                continue
            if outcome.error is not None:
                raise outcome.error
            results[outcome.index] = outcome.value
        return [results[index] for index in range(len(self.items))]

    def abandon(self) -> None:
        """Start nothing more, and no longer count what is in flight."""
        self.pending.clear()
        for index in self.started.copy():
            self._end(index)

    def _patience(self) -> float:
        starts = self.started.copy().values()
        if self.deadline is None or not starts:
            return WAKE
        return min(WAKE, max(0.0, min(starts) + self.deadline.seconds - time.monotonic()))

    def _timed_out(self) -> dict[int, Any]:
        results: dict[int, Any] = {}
        if self.deadline is not None:
            now = time.monotonic()
            for index, start in self.started.copy().items():
                if now - start >= self.deadline.seconds and self._end(index):
                    results[index] = self.deadline.on_timeout(self.items[index])
                    self.add_worker()
        return results
