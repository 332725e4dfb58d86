"""Copies of a program: each rollout runs on one of its own."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

import dspy
from dspy.clients.base_lm import BaseLM
from dspy.signatures.signature import SignatureMeta

_UNCHANGING = {str, int, float, bool, bytes, complex, NoneType, type, SignatureMeta, FunctionType, BuiltinFunctionType}
_COPY_HOOKS = {"__deepcopy__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__", "__slots__"}
_MOST_COPIED = 100_000  # An attribute with more items than this (or an array of 10 MB) is shared by copies.


class ProgramCopier:
    """Copies programs fast and quietly.

    The copies share language models, whatever cannot be copied (a lock, a client) and what is too big to copy for
    each run (a corpus, an index).

    Args:
        program: The program that the later copies are made of, or of copies of it.
    """

    def __init__(self, program: Any) -> None:
        self._shared: dict[int, Any] = {id(lm): lm for lm in lms_in(program)}
        for value in _attributes(program):
            _find_uncopyable(value, self._shared)

    def __getstate__(self) -> dict[str, Any]:
        return {"shared": list(self._shared.values())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._shared = {id(value): value for value in state["shared"]}  # In another process they have other ids.

    def copy(self, program: Any) -> Any:
        """A copy of `program` whose predictors and state are its own."""
        return self._copy(program, dict(self._shared))

    def _copy(self, value: Any, memo: dict[int, Any]) -> Any:
        attempt = dict(memo)
        try:
            new = _deepcopy(value, attempt)
        except Exception:
            if not isinstance(value, dspy.Module):
                return value
            # It has got something that it had not before, or refuses to be copied as a whole.
            memo[id(value)] = new = value.__class__.__new__(value.__class__)
            new.__setstate__({name: self._copy(part, memo) for name, part in value.__getstate__().items()})
        else:
            memo.update(attempt)
        return new


def _deepcopy(value: Any, memo: dict[int, Any]) -> Any:
    """What `copy.deepcopy` gives, in a quarter of the time for modules and what they are mostly made of."""
    kind: Any = type(value)
    if kind in _UNCHANGING:
        return value
    if id(value) in memo:
        return memo[id(value)]
    new: Any
    if kind is list:
        memo[id(value)] = new = []
        new.extend([item if type(item) in _UNCHANGING else _deepcopy(item, memo) for item in value])
    elif kind is dict:
        memo[id(value)] = new = {}
        new.update((_deepcopy(key, memo), _deepcopy(item, memo)) for key, item in value.items())
    elif _is_plain_module(kind):
        memo[id(value)] = new = kind.__new__(kind)
        # By way of the class: looking up a module's own attributes is slow.
        state = kind.__getstate__(value)
        for name, part in state.items():
            if type(part) not in _UNCHANGING:
                state[name] = _deepcopy(part, memo)
        kind.__setstate__(new, state)
    else:
        new = copy.deepcopy(value, memo)
    return new


@lru_cache
def _is_plain_module(kind: Any) -> bool:
    """Whether objects of this class are modules that are copied as DSPy's own are."""
    if not issubclass(kind, dspy.Module):
        return False
    own = {name for base in kind.__mro__[:-1] for name in vars(base)}
    same = kind.__getstate__ is dspy.Module.__getstate__ and kind.__setstate__ is dspy.Module.__setstate__
    return same and kind.__new__ is object.__new__ and own.isdisjoint(_COPY_HOOKS)


def lms_in(program: Any) -> list[Any]:
    """The language models that a program holds, in any of its modules."""
    found: dict[int, Any] = {}
    for value in _attributes(program):
        _find_lms(value, found)
    return list(found.values())


def _attributes(program: Any) -> list[Any]:
    """The values of the attributes of all modules of a program."""
    return [value for _, module in program.named_sub_modules() for value in module.__getstate__().values()]


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
