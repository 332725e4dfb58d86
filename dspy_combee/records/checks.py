"""Checks of what users give, before anything is spent: what was given, what was expected, what to do."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import dspy
from dspy.clients.base_lm import BaseLM


def check_int(name: str, value: object, smallest: int | None = 1) -> int:
    """Refuse what is no int, or below `smallest`.

    Returns:
        The value as an int (numpy's ints are taken too).
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        expected = "an int" if smallest is None else f"an int of at least {smallest}"
        raise TypeError(f"{name} must be {expected}, got {value!r}.")
    if smallest is not None and value < smallest:
        raise ValueError(f"{name} must be at least {smallest}, got {value}.")
    return int(value)


def check_finite(name: str, value: object) -> None:
    """Refuse what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}.")


def check_positive(name: str, value: object) -> None:
    """Refuse what is no finite number above 0."""
    check_finite(name, value)
    if not value > 0:  # type: ignore[operator]
        raise ValueError(f"{name} must be above 0, got {value!r}.")


def check_lm(name: str, lm: Any) -> None:
    """Refuse what is no language model."""
    if isinstance(lm, str):
        raise TypeError(f"{name} must be a dspy.LM, got the text {lm!r}: use dspy.LM({lm!r}).")
    if not isinstance(lm, BaseLM):
        raise TypeError(f"{name} must be a dspy.LM, got {type(lm).__name__}.")


def check_priced(lm: Any) -> None:
    """Refuse, beside `max_reflection_cost`, a language model that is known to report no cost."""
    engine = getattr(lm, "_engine_spec", "auto")
    if not isinstance(engine, str):
        raise ValueError(
            "max_reflection_cost cannot be enforced: the reflection LM runs on a custom engine "
            f"({type(engine).__name__}), for which DSPy reports no cost. Use a model with a known price, or remove "
            "max_reflection_cost."
        )


def check_callbacks(callbacks: Any) -> tuple[Callable[[Any], Any], ...]:
    """Refuse what is no sequence of callables."""
    if callable(callbacks) or isinstance(callbacks, str) or not hasattr(callbacks, "__iter__"):
        raise TypeError(f"step_callbacks must be a sequence of callables, got {callbacks!r}.")
    made = tuple(callbacks)
    for callback in made:
        if not callable(callback):
            raise TypeError(f"step_callbacks must hold callables that take a step record, got {callback!r}.")
    return made


def check_sampling_strategy(strategy: Any) -> None:
    """Refuse, in `gepa_kwargs`, what is none of gepa's sampling strategies."""
    if strategy is None:
        return
    if isinstance(strategy, type) or not callable(getattr(strategy, "sample_tasks", None)):
        raise TypeError(
            "gepa_kwargs['sampling_strategy'] must be an object with sample_tasks, such as "
            f"gepa.strategies.proposal_sampling.SameParentSampling(2), got {strategy!r}."
        )


def check_examples(name: str, examples: Any) -> list[Any]:
    """Return the examples as a list.

    Raises:
        TypeError: If they are no sequence, or one is no example.
        ValueError: If there is none, or one does not say which of its fields are inputs.
    """
    if isinstance(examples, str | Mapping | dspy.Example) or not hasattr(examples, "__iter__"):
        raise TypeError(f"{name} must be a list of dspy.Example, got {type(examples).__name__}.")
    made = list(examples)
    if not made:
        raise ValueError(f"{name} must hold at least one example, got none.")
    for position, example in enumerate(made):
        if not hasattr(example, "inputs"):
            raise TypeError(f"{name}[{position}] must be a dspy.Example, got {type(example).__name__}.")
        try:
            example.inputs()
        except ValueError as error:
            raise ValueError(f"{name}[{position}] does not say what its inputs are: use with_inputs(...).") from error
    return made


def digest_of(examples: Iterable[Any]) -> str:
    """Return a digest of the texts and numbers of examples, by which a resumed run knows that they are the same."""
    digest = hashlib.sha256()
    for example in examples:
        fields = sorted(dict(example.items()).items()) if hasattr(example, "items") else [("", example)]
        plain = [(name, value) for name, value in fields if isinstance(value, str | int | float)]
        digest.update(repr(plain).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()[:16]
