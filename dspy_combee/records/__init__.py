"""The frozen values that pass between stages, and what every room needs: errors, checks, text as data, secrets."""

from dspy_combee.records.types import Spent, Usage

__all__ = ["Spent", "Usage"]  # By these names states of earlier versions were pickled.
