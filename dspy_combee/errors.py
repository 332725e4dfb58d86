"""Errors of this package, drawn as a tree.

    CombeeError
    ├── ProviderError      the LM provider refused or cannot be reached: the run stops, no candidate is blamed
    └── ReflectionError    reflection proposed nothing, three steps in a row

Wrong arguments raise `TypeError` or `ValueError`, and the checks inherited from `dspy.GEPA` raise what they
raise there. Whatever leaves `CombeeOptimizer.compile` carries `best_program`, the best program so far.
"""

from __future__ import annotations

from typing import Any


class CombeeError(Exception):
    """Base class of the errors that this package defines.

    Attributes:
        best_program: The best program found before the error, ready to use; None where no run was under way.
    """

    best_program: Any = None


class ProviderError(CombeeError):
    """The provider of a language model refused a call for good (key, quota, outage).

    It says nothing about the candidate that was being evaluated, so no score is given for it.
    """


class ReflectionError(CombeeError):
    """Reflection failed in three steps in a row, so that the run could only go on spending."""
