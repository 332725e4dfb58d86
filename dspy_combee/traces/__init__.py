"""Collected traces: runs that somebody logged, read from files or taken from memory, to learn from without running."""

from dspy_combee.traces.collection import (
    TraceCollection,
    TraceCounts,
    load_traces,
    redact_trace,
    save_traces,
)
from dspy_combee.traces.programs import traces_from
from dspy_combee.traces.rendering import render_trace, to_record
from dspy_combee.traces.types import Trace, TraceError, TraceMessage

__all__ = [
    "Trace",
    "TraceCollection",
    "TraceCounts",
    "TraceError",
    "TraceMessage",
    "load_traces",
    "redact_trace",
    "render_trace",
    "save_traces",
    "to_record",
    "traces_from",
]
