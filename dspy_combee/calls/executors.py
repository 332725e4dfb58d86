"""Executors: an ordered map over many items, at most `width` of them at once.

`ThreadExecutor` also holds the back-off: when a provider turns a call away, all items pause and slow down together.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import random
import threading
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from dspy_combee.records.checks import check_int
from dspy_combee.records.errors import ProviderError

logger = logging.getLogger("dspy_combee")

T = TypeVar("T")
R = TypeVar("R")

WAKE = 1.0  # Longest wait in seconds. An endless one could sleep through a Ctrl-C that arrives just before it.

# The executors whose items this context runs inside.
_INSIDE: contextvars.ContextVar[tuple[Executor, ...]] = contextvars.ContextVar("dspy_combee_inside", default=())


@runtime_checkable
class Executor(Protocol):
    """Run one function over many items.

    To write your own, subclass this and provide `width` and `map`; the other methods have defaults.
    """

    width: int
    """Items in flight at most, over all calls of `map` that are under way."""

    @abstractmethod
    def map(
        self,
        function: Callable[[T], R],
        items: Sequence[T],
        *,
        timeout: float | None = None,
        on_timeout: Callable[[T], R] | None = None,
    ) -> list[R]:
        """Apply `function` to every item.

        An item may call `map` itself; its items then run one at a time, in the slot of the item that waits for them.

        Args:
            function: Called once per item, each time in a copy of the caller's context (`contextvars`).
            items: The items.
            timeout: Seconds that one item may take from its start, more than 0; None for no limit.
            on_timeout: Returns the result of an item that took longer. Its late result is dropped, and the item no
                longer counts towards the width. Required with `timeout`.

        Returns:
            The results, in the order of the items, always as many as the items.

        Raises:
            BaseException: The first error that `function` raised. Items that had not started never start, and
                those in flight no longer count towards the width.
            ValueError: If the timeout is out of range or lacks `on_timeout`.
        """
        ...

    def opened(self) -> AbstractContextManager[object]:
        """Keep the executor's resources open for the duration of a run. Default: there are none."""
        return nullcontext()

    def check(self, function: Callable[[T], Any], items: Iterable[T]) -> None:
        """Refuse what cannot go where the items run, before a run spends anything. Default: everything can.

        Args:
            function: A function that `map` will be called with.
            items: Items that it will be called with, made one by one as they are asked for.

        Raises:
            TypeError: If the function or an item cannot go there, naming the part that cannot.
        """
        return

    def with_width(self, width: int) -> Executor:
        """Return the executor for a run with `num_threads=width`. Default: this one, which keeps its own width."""
        return self


@dataclass(frozen=True)
class Backoff:
    """Say how calls that a provider turned away are retried.

    A pause doubles from `first_delay` with each incident since the last success, with jitter, and is never shorter
    than what the provider asks for (Retry-After).
    """

    incidents: int = 6
    """Incidents in a row, without a success in between, after which the run gives up."""
    attempts: int = 24
    """Attempts at one item, however well the others fare."""
    first_delay: float = 1.0
    """Seconds of the first pause."""
    max_delay: float = 60.0
    """Longest pause in seconds; the run gives up on a provider that asks for more."""
    jitter: float = 0.5
    """Share of a pause that is drawn at random and added to it."""

    def delay(self, incident: int, asked: float | None) -> float:
        """Return the seconds to pause after an incident (from 1), given the seconds that the provider asks for."""
        pause = min(self.max_delay, self.first_delay * 2.0 ** (incident - 1))
        return max(pause, asked or 0.0) * (1.0 + self.jitter * random.random())


class ThreadExecutor(Executor):
    """Run items on daemon threads, which hold up neither Ctrl-C nor the interpreter's exit.

    At width 1 and without a timeout everything runs in the caller's own thread.

    An item that fails with a transient `ProviderError` (rate limit, timeout, connection) is retried; until then all
    items pause, and fewer run at once for a while. No other place retries such errors.

    Args:
        width: Items in flight at most, an int of at least 1.
        backoff: How items are retried.

    Raises:
        TypeError: If width is not an int.
        ValueError: If width is below 1.
    """

    def __init__(self, width: int, backoff: Backoff | None = None) -> None:
        self.width = check_int("num_threads", width)
        self.backoff = backoff or Backoff()
        self.slots = Throttle(width, self.backoff)
        """One slot for each item in flight."""

    def __reduce__(self) -> tuple[type[ThreadExecutor], tuple[int, Backoff]]:
        return type(self), (self.width, self.backoff)  # A copy has slots of its own.

    def __repr__(self) -> str:
        return f"ThreadExecutor({self.width})"

    @property
    def holds_caller(self) -> bool:
        """Return whether the caller is itself an item of this executor, and so holds a slot."""
        return self in _INSIDE.get()

    def map(
        self,
        function: Callable[[T], R],
        items: Sequence[T],
        *,
        timeout: float | None = None,
        on_timeout: Callable[[T], R] | None = None,
    ) -> list[R]:
        """Apply `function` to every item; see `Executor.map`."""
        items = list(items)
        check_timeout(timeout, on_timeout)
        inside = _INSIDE.get()
        nested = self.holds_caller
        # An item that calls `map` holds a slot already.
        slots = Throttle(1, self.backoff) if nested else self.slots
        width = 1 if nested else min(self.width, len(items))
        token = _INSIDE.set(inside if nested else (*inside, self))
        try:
            job = _Job(function, items, timeout, on_timeout, slots)
        finally:
            _INSIDE.reset(token)
        try:
            if timeout is None and (width <= 1 or self.width == 1):
                job.work()
            else:
                for _ in range(width):
                    job.add_worker()
            return job.collect()
        finally:
            job.abandon()


def check_timeout(timeout: float | None, on_timeout: Callable[[Any], Any] | None) -> None:
    """Refuse a timeout that is out of range, or that lacks `on_timeout`."""
    if timeout is None:
        return
    if not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, got {timeout!r}.")
    if on_timeout is None:
        raise ValueError("timeout needs on_timeout, which gives the result of an item that takes too long.")


class Throttle:
    """Hand out the slots of an executor: as many as its width, fewer after an incident, none during a pause.

    An incident halves the number of slots; as many successes as there are slots bring one back.
    """

    def __init__(self, width: int, backoff: Backoff) -> None:
        self.width = width
        self.backoff = backoff
        self.limit = width
        self._condition = threading.Condition()
        self._in_flight = 0
        self._successes = 0
        self._incidents = 0
        self._resume_at = 0.0

    def acquire(self, most: int = 1, wait: bool = True) -> int:
        """Take the free slots, at most `most`, and return how many were taken: 0 if none was free without a wait."""
        with self._condition:
            while True:
                pause = self._resume_at - time.monotonic()
                free = 0 if pause > 0 else min(most, self.limit - self._in_flight)
                if free > 0:
                    self._in_flight += free
                    return free
                if not wait:
                    return 0
                self._condition.wait(min(pause, WAKE) if pause > 0 else WAKE)

    def release(self, number: int = 1) -> None:
        """Give slots back."""
        with self._condition:
            self._in_flight -= number
            self._condition.notify_all()

    def succeed(self) -> None:
        """Record that a call went through."""
        with self._condition:
            self._incidents = 0
            if self.limit < self.width:
                self._successes += 1
                if self._successes >= self.limit:
                    self._successes = 0
                    self.limit += 1
                    self._condition.notify_all()

    def slow_down(self, attempts: int, asked: float | None) -> bool:
        """Pause and narrow, because a call was turned away.

        A call that is turned away during a pause was under way before it, and belongs to the same incident.

        Args:
            attempts: Attempts at that call so far.
            asked: Seconds to wait that the provider asks for.

        Returns:
            Whether to retry the call.
        """
        with self._condition:
            now = time.monotonic()
            if now >= self._resume_at:
                self._incidents += 1
                self._successes = 0
                self.limit = max(1, self.limit // 2)
                self._resume_at = now + self.backoff.delay(self._incidents, asked)
            patient = asked is None or asked <= self.backoff.max_delay
            if patient and self._incidents < self.backoff.incidents:
                return attempts < self.backoff.attempts
            self._incidents, self._resume_at = 0, now  # The run ends; the next one on these slots starts afresh.
            self._condition.notify_all()
            return False


def _should_retry(error: BaseException | None, attempt: int, slots: Throttle) -> bool:
    """Return whether to run an item again; if it was turned away, make everyone pause."""
    if not (isinstance(error, ProviderError) and error.transient):
        return False
    retry = slots.slow_down(attempt, error.retry_after)
    logger.info("%s, after attempt %d: %s", "Slowing down" if retry else "Giving up", attempt, error)
    return retry


@dataclass(frozen=True)
class _Outcome:
    index: int
    value: Any = None
    error: BaseException | None = None


@dataclass
class _Job:
    """Run one call of `ThreadExecutor.map`: hold its pending items and collect their outcomes."""

    function: Callable[[Any], Any]
    items: list[Any]
    timeout: float | None
    on_timeout: Callable[[Any], Any] | None
    slots: Throttle
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    started: dict[int, float] = field(default_factory=dict)
    """Items in flight. Whoever removes one gives its slot back."""
    attempts: Counter[int] = field(default_factory=Counter)
    outcomes: queue.SimpleQueue[_Outcome | None] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.pending = deque(range(len(self.items)))

    def add_worker(self) -> None:
        threading.Thread(target=self.work, name="dspy-combee", daemon=True).start()

    def work(self) -> None:
        while True:
            self.slots.acquire()
            try:
                index = self.pending.popleft()
            except IndexError:
                self.slots.release()
                return
            self.started[index] = time.monotonic()
            if self.timeout is not None:
                self.outcomes.put(None)  # Wake `collect`: there is a new deadline to watch.
            try:
                outcome = _Outcome(index, self.context.copy().run(self.function, self.items[index]))
            except BaseException as error:
                outcome = _Outcome(index, error=error)
            if index not in self.started:
                return  # The item was given up: how it ends slows nobody down.
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
                self._give_up_late()
                continue
            if outcome is None:
                continue
            if outcome.error is not None:
                raise outcome.error
            results[outcome.index] = outcome.value
        return [results[index] for index in range(len(self.items))]

    def abandon(self) -> None:
        """Start nothing more, and stop counting what is in flight."""
        self.pending.clear()
        for index in self.started.copy():
            self._end(index)

    def _patience(self) -> float:
        starts = self.started.copy().values()
        if self.timeout is None or not starts:
            return WAKE
        return min(WAKE, max(0.0, min(starts) + self.timeout - time.monotonic()))

    def _give_up_late(self) -> None:
        if self.timeout is None or self.on_timeout is None:
            return
        now = time.monotonic()
        for index, start in self.started.copy().items():
            if now - start >= self.timeout and self._end(index):
                self.outcomes.put(_Outcome(index, self.on_timeout(self.items[index])))
                self.add_worker()
