"""What travels to other processes: a function, its items and results, and the surroundings of the caller.

Everything goes by cloudpickle. What cannot is named in the error. Language models travel without their history.
"""

from __future__ import annotations

import functools
import inspect
import io
import logging
import os
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import cloudpickle
import dspy
from dspy.clients.base_lm import BaseLM
from dspy.utils.caching import default_cache_dir
from dspy.utils.usage_tracker import UsageTracker

from dspy_combee.records.secrecy import shorten

logger = logging.getLogger("dspy_combee")

# Settings that belong to the calls that are under way here.
_STAYS = {"trace", "usage_tracker", "caller_modules", "caller_predict", "send_stream", "stream_listeners"}


@runtime_checkable
class RemoteFunction(Protocol):
    """A function whose items may run in other processes, on copies of it.

    It is copied by pickle, with what its items share, once for each map.
    """

    def __call__(self, item: Any) -> Any:
        """Here or there: the result of an item."""
        ...

    def parts(self) -> Mapping[str, Any]:
        """Here: what it is made of, by the names that an error should use."""
        ...

    def send_items(self, items: Sequence[Any]) -> bytes:
        """Here: some items."""
        ...

    def receive_items(self, sent: bytes) -> list[Any]:
        """There: the items that were sent."""
        ...

    def send_results(self, results: Sequence[Any]) -> bytes:
        """There: their results, and whatever else the items left in the function."""
        ...

    def receive_results(self, items: Sequence[Any], sent: bytes) -> list[Any]:
        """Here: the results of these items, as if they had run here."""
        ...

    def lost_result(self, item: Any, reason: str) -> Any:
        """Here: the result of an item whose process was lost."""
        ...


# Classes of this process that were pickled as a whole: those of a script, of a notebook, inside a function.
_SENT: weakref.WeakSet[type] = weakref.WeakSet()


class _Pickler(cloudpickle.Pickler):
    reply = False

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, BaseLM) and getattr(value, "history", None):
            reduced = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
            if len(reduced) > 2 and isinstance(reduced[2], dict):
                return (*reduced[:2], {**reduced[2], "history": []}, *reduced[3:])
        reduced = super().reducer_override(value)  # type: ignore[no-untyped-call]
        if not isinstance(value, type) or not isinstance(reduced, tuple) or len(reduced) != 6:
            return reduced
        if not self.reply:
            _SENT.add(value)
            return reduced
        *made, state, _, _, fill = reduced
        return (*made, (fill, state), None, None, _fill_unless_sent)


def _fill_unless_sent(made: type, fill_and_state: tuple[Callable[[type, Any], Any], Any]) -> type:
    """Give a class that came back its attributes, but leave the sender's own class as it is."""
    fill, state = fill_and_state
    if made not in _SENT:
        fill(made, state)
    return made


def dumps(value: Any, reply: bool = False) -> bytes:
    """Pickle `value`.

    Args:
        value: What travels.
        reply: Whether it goes back, to a process whose classes must not be changed by what it gets.
    """
    buffer = io.BytesIO()
    pickler: Any = _Pickler(buffer)  # type: ignore[no-untyped-call]
    pickler.reply = reply
    pickler.dump(value)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """What was pickled."""
    return pickle.loads(data)


def pack(value: Any, parts: Callable[[], Mapping[str, Any]]) -> bytes:
    """Pickle `value`.

    Args:
        value: What travels.
        parts: Gives what it is made of, by the names that an error should use.

    Raises:
        TypeError: If it cannot be pickled; it names the smallest thing in the parts that cannot.
    """
    try:
        return dumps(value)
    except Exception as error:
        failing = ((name, part) for name, part in parts().items() if _failure(part) is not None)
        name, culprit = next(
            (_culprit(part, name, {}) or (name, part) for name, part in failing), ("what is sent", value)
        )
        cause = _failure(culprit) or error
        raise TypeError(
            f"The rollouts cannot be sent to other processes: {name}, a {type(culprit).__name__}, cannot be pickled "
            f"({shorten(str(cause))}). Make it where it is used, leave it out of the pickle (__getstate__), or run on "
            "threads."
        ) from error


def _failure(value: Any) -> BaseException | None:
    try:
        dumps(value)
    except Exception as error:
        return error
    return None


def _culprit(value: Any, name: str, seen: dict[int, Any]) -> tuple[str, Any] | None:
    """A part of `value` that cannot be pickled though its own parts can, and its name; None if that was seen before."""
    seen[id(value)] = value
    failing = [(label, part) for label, part in _parts_of(value) if _failure(part) is not None]
    for label, part in failing:
        found = None if id(part) in seen else _culprit(part, name + label, seen)
        if found is not None:
            return found
    return None if failing else (name, value)


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dspy.Example):
        yield from ((f".{name}", item) for name, item in value.items())
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{position}]", item) for position, item in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif inspect.ismethod(value):
        yield ".__self__", value.__self__
    elif inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        yield from ((f" with {name!r}", item) for name, item in {**used.nonlocals, **used.globals}.items())
        yield " with a default", (value.__defaults__, value.__kwdefaults__)
    elif isinstance(value, type):
        yield from ((f".{name}", item) for name, item in vars(value).items() if not _is_made_anew(name, item))
        yield from ((f", a {base.__name__}", base) for base in value.__bases__)
    elif isinstance(value, classmethod | staticmethod):
        yield "", value.__func__
    else:
        try:
            state = value.__getstate__() if hasattr(value, "__getstate__") else vars(value)
        except Exception:
            state = getattr(value, "__dict__", None)
        if isinstance(state, Mapping):
            yield from ((f".{name}", item) for name, item in state.items())
        yield f": {type(value).__name__}", type(value)


def _is_made_anew(name: str, attribute: Any) -> bool:
    """Whether an attribute of a class does not travel with it."""
    return name == "_abc_impl" or inspect.isgetsetdescriptor(attribute) or inspect.ismemberdescriptor(attribute)


def sendable(value: Any) -> Any:
    """`value`, with text in the place of what cannot be pickled."""
    if _failure(value) is None:
        return value
    if isinstance(value, dspy.Prediction):
        return dspy.Prediction(**{name: sendable(item) for name, item in value.items()})
    if isinstance(value, Mapping):
        return {name: sendable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [sendable(item) for item in value]
    return shorten(value, 1000, repr)


@dataclass(frozen=True)
class Surroundings:
    """What holds around the caller and should hold around the items there: DSPy's settings, usage tracking, cache.

    Attributes:
        settings: DSPy's settings in force.
        tracks_usage: Whether a usage tracker is in force.
        cache: Whether DSPy's disk cache and memory cache are on, the disk cache's folder if it is not DSPy's own.
    """

    settings: Mapping[str, Any]
    tracks_usage: bool
    cache: tuple[bool, bool, str | None]

    @classmethod
    def here(cls) -> Surroundings:
        """Those of the caller."""
        values = {name: value for name, value in dspy.settings.config.items() if name not in _STAYS and name[0] != "_"}
        cache = dspy.cache
        folder = None if cache.disk_cache_dir in (None, os.fspath(default_cache_dir())) else cache.disk_cache_dir
        switches = bool(cache.enable_disk_cache), bool(cache.enable_memory_cache)
        return cls(values, dspy.settings.usage_tracker is not None, (*switches, folder))

    def parts(self) -> dict[str, Any]:
        """The settings by name, for `pack`."""
        return {f"dspy.settings.{name}": value for name, value in self.settings.items()}

    @contextmanager
    def in_force(self) -> Iterator[UsageTracker | None]:
        """While this lasts, they hold here. Gives the usage tracker, whose entries belong to the sender's."""
        self._set_cache()
        tracker = UsageTracker() if self.tracks_usage else None
        with dspy.context(**self.settings, usage_tracker=tracker):
            yield tracker

    def _set_cache(self) -> None:
        on_disk, in_memory, folder = self.cache
        now = dspy.cache
        if (now.enable_disk_cache, now.enable_memory_cache) == (on_disk, in_memory) and (
            folder is None or not on_disk or folder == now.disk_cache_dir
        ):
            return
        try:
            dspy.configure_cache(on_disk, in_memory, folder or default_cache_dir())
        except Exception as error:
            logger.warning("DSPy's disk cache cannot be used in this process: %s", shorten(str(error)))
            dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=in_memory)


def add_usage(entries: Mapping[str, list[Any]]) -> None:
    """Add what calls elsewhere took to the usage tracker in force here."""
    tracker = dspy.settings.usage_tracker
    if tracker is not None:
        for name, items in entries.items():
            tracker.usage_data[name].extend(items)


def shards(items: Sequence[Any], size: int) -> list[list[Any]]:
    """The items in as few runs of at most `size` as there can be, whose sizes differ by at most one."""
    number = -(-len(items) // size)
    bounds = [len(items) * position // number for position in range(number + 1)] if number else [0]
    return [list(items[start:end]) for start, end in pairwise(bounds)]
