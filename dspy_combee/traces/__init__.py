"""Collected traces: runs that somebody logged, read from files or taken from memory, to learn from without running."""

from dspy_combee.traces.collection import (
    ON_ERROR,
    TraceCollection,
    TraceCounts,
    known_formats,
    load_traces,
    redact_trace,
    save_traces,
)
from dspy_combee.traces.programs import traces_from
from dspy_combee.traces.readers import TraceReader, all_readers, register_reader
from dspy_combee.traces.rendering import render_trace, to_record
from dspy_combee.traces.types import Trace, TraceError, TraceMessage

__all__ = [
    "ON_ERROR",
    "Trace",
    "TraceCollection",
    "TraceCounts",
    "TraceError",
    "TraceMessage",
    "TraceReader",
    "all_readers",
    "known_formats",
    "load_traces",
    "redact_trace",
    "register_reader",
    "render_trace",
    "save_traces",
    "to_record",
    "traces_from",
]
