"""Option values of the benchmarks, checked by argparse."""

from __future__ import annotations

import argparse
import math


def whole(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return value
