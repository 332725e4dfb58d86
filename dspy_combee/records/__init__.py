"""The frozen values that pass between stages, and what every room needs: errors, checks, text as data, secrets."""

from dspy_combee.records.types import Spent, Usage

# GEPA's saved states of version 0.1 name these two here.
__all__ = ["Spent", "Usage"]
