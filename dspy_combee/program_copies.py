"""Copies of a program: each rollout runs on one of its own."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from types import MethodType
from typing import Any

import dspy
from dspy.clients.base_lm import BaseLM

_MOST_COPIED = 100_000  # An attribute with more items than this (or an array of 10 MB) is shared by copies.


class ProgramCopier:
    """Copies programs fast and quietly.

    The copies share language models, whatever cannot be copied (a lock, a client) and what is too big to copy for
    each run (a corpus, an index).

    Args:
        program: The program that the later copies are made of, or of copies of it.
    """

    def __init__(self, program: Any) -> None:
        self._shared: dict[int, Any] = {}
        values = [value for _, module in program.named_sub_modules() for value in module.__getstate__().values()]
        for find in (_find_lms, _find_uncopyable):
            for value in values:
                find(value, self._shared)

    def copy(self, program: Any) -> Any:
        """A copy of `program` whose predictors and state are its own."""
        return self._copy(program, dict(self._shared))

    def _copy(self, value: Any, memo: dict[int, Any]) -> Any:
        attempt = dict(memo)
        try:
            new = copy.deepcopy(value, attempt)
        except Exception:
            if not isinstance(value, dspy.Module):
                return value
            # It has got something that it had not before, or refuses to be copied as a whole.
            memo[id(value)] = new = value.__class__.__new__(value.__class__)
            new.__setstate__({name: self._copy(part, memo) for name, part in value.__getstate__().items()})
        else:
            memo.update(attempt)
        return new


def _find_lms(value: Any, found: dict[int, Any]) -> None:
    if isinstance(value, BaseLM):
        found[id(value)] = value
    for item in _items(value):
        _find_lms(item, found)


def _find_uncopyable(value: Any, found: dict[int, Any]) -> None:
    """Find what cannot be copied in an attribute of a module; the modules in it are looked at by themselves."""
    if isinstance(value, dspy.Module):
        return
    if _leads_to_module(value):
        for part in _parts(value):
            _find_uncopyable(part, found)
    elif not _can_copy(value, found):
        found[id(value)] = value


def _leads_to_module(value: Any, depth: int = 5) -> bool:
    """Whether `value` holds a module, or a tool that is a method of one."""
    deeper = depth > 0 and any(_leads_to_module(part, depth - 1) for part in _parts(value))
    return deeper or isinstance(value, dspy.Module)


def _parts(value: Any) -> Collection[Any]:
    if isinstance(value, dspy.Tool):
        return (value.func,)
    if isinstance(value, MethodType):
        return (value.__self__,)
    return _items(value)


def _items(value: Any) -> Collection[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _can_copy(value: Any, shared: Mapping[int, Any]) -> bool:
    memo = dict(shared)
    try:
        copy.deepcopy(value, memo)
    except Exception:
        return False
    copied = [item for key, item in memo.items() if key not in shared]
    return sum(map(_size, copied)) <= _MOST_COPIED


def _size(value: Any) -> int:
    """How much there is to copy in one object: its items, or a hundredth of an array's bytes."""
    nbytes = getattr(value, "nbytes", 0)
    return len(value) if isinstance(value, list | tuple | set | Mapping) else nbytes // 100
