"""Run items in another process: what a function must do for that, how it is pickled, and the worker's side of a task.

Everything is sent by cloudpickle; what cannot be pickled is named in the error. Language models travel without their
history.
"""

from __future__ import annotations

import faulthandler
import inspect
import io
import logging
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import cloudpickle
import dspy
from dspy.clients.base_lm import BaseLM
from dspy.utils.caching import default_cache_dir
from dspy.utils.usage_tracker import UsageTracker

from dspy_combee.calls.executors import Backoff, ThreadExecutor
from dspy_combee.records.errors import ExecutorError
from dspy_combee.records.secrets import shorten

logger = logging.getLogger("dspy_combee")

_GRACE = 5.0  # Seconds beyond an item's timeout after which a process that runs no Python any more is ended.
# Settings that belong to the calls that are under way in the sender's process.
_LOCAL_SETTINGS = {"trace", "usage_tracker", "caller_modules", "caller_predict", "send_stream", "stream_listeners"}


@runtime_checkable
class RemoteFunction(Protocol):
    """Run items in other processes, on a copy of this function that is pickled once for each map."""

    def __call__(self, item: Any) -> Any:
        """Return the result of an item, in either process."""
        ...

    def parts(self) -> Mapping[str, Any]:
        """Return, in the sender, what the function is made of, by the names that an error should use."""
        ...

    def send_items(self, items: Sequence[Any]) -> bytes:
        """Pickle some items, in the sender."""
        ...

    def receive_items(self, sent: bytes) -> list[Any]:
        """Return the items that were sent, in the worker."""
        ...

    def send_results(self, results: Sequence[Any]) -> bytes:
        """Pickle results and whatever else the items left in the function, in the worker."""
        ...

    def receive_results(self, items: Sequence[Any], sent: bytes) -> list[Any]:
        """Return the results of these items as if they had run here, in the sender."""
        ...

    def lost_result(self, item: Any, reason: str) -> Any:
        """Return the result of an item whose worker was lost, in the sender."""
        ...


# Classes of this process that were pickled as a whole: those of a script, of a notebook, inside a function.
_SENT_CLASSES: weakref.WeakSet[type] = weakref.WeakSet()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, reply: bool) -> None:
        super().__init__(file)  # type: ignore[no-untyped-call]
        self.reply = reply

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, BaseLM) and getattr(value, "history", None):
            reduced = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
            if len(reduced) > 2 and isinstance(reduced[2], dict):
                return (*reduced[:2], {**reduced[2], "history": []}, *reduced[3:])
        reduced = super().reducer_override(value)  # type: ignore[no-untyped-call]
        if not isinstance(value, type) or not isinstance(reduced, tuple) or len(reduced) != 6:
            return reduced
        if not self.reply:
            _SENT_CLASSES.add(value)
            return reduced
        *made, state, _, _, fill = reduced
        return (*made, (fill, state), None, None, _fill_unless_sent)


def _fill_unless_sent(made: type, fill_and_state: tuple[Callable[[type, Any], Any], Any]) -> None:
    """Give a class that came back its attributes, but leave the sender's own class as it is."""
    fill, state = fill_and_state
    if made not in _SENT_CLASSES:
        fill(made, state)


def dumps(value: Any, reply: bool = False) -> bytes:
    """Pickle a value; as a `reply` it changes no class of the process that it goes back to."""
    buffer = io.BytesIO()
    _Pickler(buffer, reply).dump(value)  # type: ignore[no-untyped-call]
    return buffer.getvalue()


loads = pickle.loads


def pack(value: Any, parts: Callable[[], Mapping[str, Any]]) -> bytes:
    """Pickle a value, or raise a `TypeError` that names the smallest thing in its `parts` that cannot be pickled."""
    try:
        return dumps(value)
    except Exception as error:
        named = [(name, part) for name, part in parts().items() if _failure(part) is not None]
        name, culprit = _culprit(*named[0], {}) or named[0] if named else ("what is sent", value)
        cause = _failure(culprit) or error
        raise TypeError(
            f"The rollouts cannot be sent to other processes: {name}, a {type(culprit).__name__}, cannot be pickled "
            f"({shorten(str(cause))}). Create it inside the worker, exclude it in `__getstate__`, or use "
            'executor="threads".'
        ) from error


def _failure(value: Any) -> BaseException | None:
    try:
        dumps(value)
    except Exception as error:
        return error
    return None


def _culprit(name: str, value: Any, seen: dict[int, Any]) -> tuple[str, Any] | None:
    """Find a part of `value` that cannot be pickled though its own parts can; None if it was seen before."""
    seen[id(value)] = value
    failing = [(label, part) for label, part in _parts_of(value) if _failure(part) is not None]
    for label, part in failing:
        found = None if id(part) in seen else _culprit(name + label, part, seen)
        if found is not None:
            return found
    return None if failing else (name, value)


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dspy.Example | Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{position}]", item) for position, item in enumerate(value))
    elif inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        yield from ((f" with {name!r}", item) for name, item in {**used.nonlocals, **used.globals}.items())
        yield " with a default", (value.__defaults__, value.__kwdefaults__)
    elif isinstance(value, type):
        attributes = ((name, getattr(item, "__func__", item)) for name, item in vars(value).items())
        yield from ((f".{name}", item) for name, item in attributes if inspect.isfunction(item) or name[:2] != "__")
        yield from ((f", a {base.__name__}", base) for base in value.__bases__)
    else:
        with suppress(Exception):
            _, arguments, *state = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
            if state and isinstance(state[0], Mapping):
                yield from ((f".{name}", item) for name, item in state[0].items())
            for item in (*arguments, type(value)):
                yield f": {getattr(item, '__name__', type(item).__name__)}", item


def sendable(value: Any) -> Any:
    """Return the value with text in place of what cannot be pickled."""
    if _failure(value) is None:
        return value
    if isinstance(value, dspy.Prediction):
        return dspy.Prediction(**{name: sendable(item) for name, item in value.items()})
    if isinstance(value, Mapping):
        return {name: sendable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [sendable(item) for item in value]
    return shorten(value, 1000, repr)


def _settings_here() -> dict[str, Any]:
    settings = dspy.settings.config.items()
    return {name: value for name, value in settings if name not in _LOCAL_SETTINGS and not name.startswith("_")}


def _cache_here() -> tuple[bool, bool, str | None]:
    cache = dspy.cache
    folder = None if cache.disk_cache_dir in (None, os.fspath(default_cache_dir())) else cache.disk_cache_dir
    return bool(cache.enable_disk_cache), bool(cache.enable_memory_cache), folder


@dataclass(frozen=True)
class TaskPayload:
    """Hold what all tasks of a map share: the function, its limits, and DSPy's state around the caller."""

    function: RemoteFunction
    timeout: float | None
    on_timeout: Callable[[Any], Any] | None
    backoff: Backoff
    settings: Mapping[str, Any] = field(default_factory=_settings_here)
    """DSPy's settings in force."""
    tracks_usage: bool = field(default_factory=lambda: dspy.settings.usage_tracker is not None)
    """Whether a usage tracker is in force."""
    cache: tuple[bool, bool, str | None] = field(default_factory=_cache_here)
    """Whether DSPy's disk and memory caches are on, and the disk cache's folder if it is not DSPy's default."""

    def pack(self) -> bytes:
        """Pickle the payload, or name what cannot be pickled in a `TypeError`."""
        settings = {f"dspy.settings.{name}": value for name, value in self.settings.items()}
        return pack(self, lambda: {**self.function.parts(), **settings})

    @contextmanager
    def dspy_state(self) -> Iterator[UsageTracker]:
        """Put the caller's DSPy state in force; yield the tracker of what the calls use, for the caller's own."""
        self._set_cache()
        tracker = UsageTracker()
        with dspy.context(**self.settings, usage_tracker=tracker if self.tracks_usage else None):
            yield tracker

    def _set_cache(self) -> None:
        on_disk, in_memory, folder = self.cache
        now = dspy.cache
        same_folder = folder is None or not on_disk or folder == now.disk_cache_dir
        if same_folder and (now.enable_disk_cache, now.enable_memory_cache) == (on_disk, in_memory):
            return
        try:
            dspy.configure_cache(on_disk, in_memory, folder or default_cache_dir())
        except Exception as error:
            logger.warning("DSPy's disk cache cannot be used in this process: %s", shorten(str(error)))
            dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=in_memory)


def run_shard(payload: bytes, sent: bytes, threads: int) -> bytes:
    """Run the items of a shard, in the worker; return the results, the error that ended them and the usage, pickled."""
    task: TaskPayload = loads(payload)
    sent_back, failure = None, None
    with task.dspy_state() as tracker, _watchdog(task.timeout):
        items = task.function.receive_items(sent)
        executor = ThreadExecutor(threads, task.backoff)
        try:
            results = executor.map(task.function, items, timeout=task.timeout, on_timeout=task.on_timeout)
        except BaseException as error:
            failure = _sendable_error(error)
        else:
            sent_back = task.function.send_results(results)
        return dumps((sent_back, failure, dict(tracker.usage_data)), reply=True)


def _sendable_error(error: BaseException) -> BaseException:
    try:
        loads(dumps(error, reply=True))
    except Exception:
        return ExecutorError(f"{type(error).__name__}: {shorten(error)}")
    return error


@contextmanager
def _watchdog(timeout: float | None) -> Iterator[None]:
    """End the process when no Python thread gets to run for longer than an item may take.

    Timeouts are watched by Python; code that never releases the interpreter's lock can only be ended with its process.
    """
    if timeout is None:
        yield
        return
    seconds = timeout + _GRACE
    over = threading.Event()
    with open(os.devnull, "w") as nowhere:

        def rearm() -> None:
            # The timer runs in a thread of C, which needs no lock.
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)

        def watch() -> None:
            while not over.wait(min(1.0, seconds / 4)):
                rearm()

        rearm()  # Here already: an item could block before the thread gets to run.
        thread = threading.Thread(target=watch, name="dspy-combee-watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()
