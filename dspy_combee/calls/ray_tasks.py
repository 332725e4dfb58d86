"""The Ray tasks of one map: shards of the items that fly, land, and are sent again when their worker is lost."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from dspy_combee.calls.executors import Backoff, ThreadExecutor, Throttle
from dspy_combee.calls.travel import RemoteFunction, Surroundings, add_usage, dumps, loads, pack, shards
from dspy_combee.records.errors import ExecutorError
from dspy_combee.records.secrecy import shorten

logger = logging.getLogger("dspy_combee")

_GRACE = 5.0  # Seconds beyond an item's timeout after which a process that runs no Python any more is ended.


@dataclass(frozen=True)
class Cargo:
    """What all the shards of a map share."""

    function: RemoteFunction
    timeout: float | None
    on_timeout: Callable[[Any], Any] | None
    backoff: Backoff

    def pack(self) -> bytes:
        """Pickle it, with the caller's surroundings.

        Raises:
            TypeError: If that cannot be done; it names what cannot be pickled.
        """
        around = Surroundings.here()
        return pack((self, around), lambda: {**self.function.parts(), **around.parts()})


@dataclass(frozen=True)
class Shape:
    """How the items of a map are spread.

    Attributes:
        tasks: Tasks at once.
        threads: Threads of one task.
        size: Items of one task at most.
    """

    tasks: int
    threads: int
    size: int


def run_shard(cargo: bytes, sent: bytes, threads: int) -> bytes:
    """In a worker: run the items of a shard.

    Returns:
        What the function sends back, the first error that an item raised or None, and the usage tracked.
    """
    load, around = loads(cargo)
    results: Any = None
    failure: BaseException | None = None
    with around.in_force() as tracker, _Watchdog(load.timeout):
        items = load.function.receive_items(sent)
        executor = ThreadExecutor(threads, load.backoff)
        try:
            results = executor.map(load.function, items, timeout=load.timeout, on_timeout=load.on_timeout)
        except BaseException as error:
            failure = _sendable_error(error)
        sent_back = None if failure is not None else load.function.send_results(results)
        return dumps((sent_back, failure, {} if tracker is None else dict(tracker.usage_data)), reply=True)


def _sendable_error(error: BaseException) -> BaseException:
    try:
        loads(dumps(error, reply=True))
    except Exception:
        return ExecutorError(f"{type(error).__name__}: {shorten(error)}")
    return error


class _Watchdog:
    """Ends the process when no Python thread gets to run for longer than an item may take.

    Timeouts are watched by Python; code that never lets go of the interpreter can only be ended with its process.

    Args:
        timeout: Seconds that an item may take; None to watch nothing.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> _Watchdog:
        if self.timeout is not None:
            nowhere = open(os.devnull, "w")
            seconds = self.timeout + _GRACE
            self._thread = threading.Thread(
                target=self._watch, args=(nowhere, seconds), name="dspy-combee-watchdog", daemon=True
            )
            # Wound up here already: an item could block before that thread gets to run.
            self._wind_up(nowhere, seconds)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()

    def _watch(self, nowhere: IO[str], seconds: float) -> None:
        with nowhere:
            while not self._over.wait(min(1.0, seconds / 4)):
                self._wind_up(nowhere, seconds)
            faulthandler.cancel_dump_traceback_later()

    @staticmethod
    def _wind_up(nowhere: IO[str], seconds: float) -> None:
        # Its clock is kept by a thread that needs no interpreter.
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)


@dataclass(frozen=True)
class _Shard:
    """Items of one task, by position, and which attempt at them this is."""

    positions: list[int]
    sent: bytes
    attempt: int = 1


class Flight:
    """One map on Ray.

    Args:
        function: The function.
        items: The items, at least one.
        task: The Ray task for `run_shard`.
        slots: The executor's places; a task takes one for each of its threads.
        shape: How the items are spread.
    """

    def __init__(self, function: RemoteFunction, items: list[Any], task: Any, slots: Throttle, shape: Shape) -> None:
        self.function = function
        self.items = items
        self.task = task
        self.slots = slots
        self.shape = shape
        self._waiting = deque(self._shard(part) for part in shards(range(len(items)), shape.size))
        self._flying: dict[Any, tuple[_Shard, int]] = {}
        self._results: dict[int, Any] = {}
        self._lost = 0

    def results(self, cargo: bytes) -> list[Any]:
        """Run the items.

        Args:
            cargo: What the shards share, pickled.

        Returns:
            The results, in the order of the items.

        Raises:
            BaseException: The first error that an item raised.
            ExecutorError: If a worker could not run the function, or all items were lost.
        """
        import ray

        shared = ray.put(cargo)
        try:
            while self._waiting or self._flying:
                self._launch(shared)
                landed, _ = ray.wait(list(self._flying), num_returns=1)
                for reference in landed:
                    self._land(reference)
        finally:
            self._abandon()
        return [self._results[position] for position in range(len(self.items))]

    def _shard(self, positions: list[int], attempt: int = 1) -> _Shard:
        return _Shard(positions, self.function.send_items([self.items[position] for position in positions]), attempt)

    def _launch(self, shared: Any) -> None:
        import ray

        while self._waiting:
            shard = self._waiting[0]
            if shard.attempt == 1 and len(self._flying) >= self.shape.tasks:
                return
            taken = self.slots.acquire(min(self.shape.threads, len(shard.positions)), wait=not self._flying)
            if not taken:
                return
            try:
                reference = self.task.remote(shared, ray.put(shard.sent), taken)
            except BaseException:
                self.slots.release(taken)
                raise
            self._flying[reference] = self._waiting.popleft(), taken

    def _land(self, reference: Any) -> None:
        import ray
        from ray import exceptions

        shard, taken = self._flying.pop(reference)
        self.slots.release(taken)
        try:
            sent_back, failure, usage = loads(ray.get(reference))
        except (exceptions.RayTaskError, exceptions.RuntimeEnvSetupError, exceptions.TaskUnschedulableError) as error:
            cause = getattr(error, "cause", None) or error
            raise ExecutorError(
                f"A Ray worker cannot run the rollouts: {type(cause).__name__}: {shorten(str(cause))}. Workers need "
                "this package and the modules of program and metric, in the same versions as here; runtime_env can "
                "give them."
            ) from error
        except exceptions.RayError as error:
            self._lose(shard, error)
            return
        add_usage(usage)
        if failure is not None:
            raise failure
        items = [self.items[position] for position in shard.positions]
        self._results.update(zip(shard.positions, self.function.receive_results(items, sent_back), strict=True))

    def _lose(self, shard: _Shard, error: Exception) -> None:
        """Send the items of a lost shard again, each by itself; those that were sent again already are lost."""
        reason = f"{type(error).__name__}: {shorten(str(error).split('.')[0], 200)}"
        if shard.attempt == 1:
            logger.warning(
                "A Ray worker was lost (%s). Its %d examples are run once more, each in a task of its own.",
                reason,
                len(shard.positions),
            )
            self._waiting.extend(self._shard([position], attempt=2) for position in shard.positions)
            return
        self._lost += 1
        if self._lost == len(self.items):
            raise ExecutorError(f"Every example was lost with its Ray worker, twice. The last time: {reason}.")
        for position in shard.positions:
            what = f"the Ray worker that ran it was lost, twice; the last time: {reason}"
            self._results[position] = self.function.lost_result(self.items[position], what)

    def _abandon(self) -> None:
        import ray

        for reference, (_, taken) in self._flying.items():
            with suppress(Exception):
                ray.cancel(reference, force=True)
            self.slots.release(taken)
        self._flying.clear()
