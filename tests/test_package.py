"""The shape of the package: which module may import which, what it exports, and what importing it loads."""

import ast
import importlib.util
import inspect
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dspy_combee

PACKAGE = Path(dspy_combee.__file__).parent

EXPORTED = [
    "Aggregator",
    "BatchSizeFit",
    "Bullet",
    "CombeeError",
    "CombeeOptimizer",
    "CombeeProposer",
    "CombeeResult",
    "Executor",
    "ExecutorError",
    "FlatAggregator",
    "OutOfBudgetError",
    "Playbook",
    "PlaybookOptimizer",
    "PlaybookResult",
    "PowerLawBatchSize",
    "ProposalNode",
    "ProviderError",
    "RayExecutor",
    "Reduction",
    "ReflectionError",
    "Rollout",
    "Spent",
    "StepRecord",
    "SummarizeAggregator",
    "ThreadExecutor",
    "TopKAggregator",
    "Trace",
    "TreeAggregator",
    "UnknownCostError",
    "Usage",
    "load_traces",
    "save_traces",
    "traces_from",
]

# What a module may import from inside the package. A module that is not written yet may stand here already;
# a module that is written and does not stand here fails. Arrows go one way only.
PARTS = {
    "records": set(),
    "checks": set(),
    "errors": set(),
    "text": set(),
    "redaction": set(),
    "lengths": set(),
    "secrecy": {"redaction"},
    "calls": {"records", "errors", "text", "secrecy"},
    "backoff": set(),
    "executors": {"checks", "errors", "backoff"},
    "travel": {"secrecy"},
    "ray_tasks": {"backoff", "errors", "executors", "secrecy", "travel"},
    "ray_executor": {"errors", "executors", "ray_tasks", "secrecy", "travel"},
    "executor_options": {"executors", "ray_executor"},
    "program_copies": set(),
    "scoring": {"records", "calls", "errors", "secrecy"},
    "rollout": {"records", "executors", "calls", "errors", "program_copies", "scoring", "secrecy", "travel"},
    "reflective_dataset": {"records", "executors", "calls", "scoring", "secrecy"},
    "shuffle": set(),
    "aggregation": {"checks", "records", "executors", "shuffle", "lengths"},
    "baselines": {"records", "executors", "aggregation"},
    "aggregators": {"aggregation", "baselines"},
    "instruction_calls": {"records", "errors", "text", "calls", "aggregation"},
    "proposer": {
        "secrecy",
        "checks",
        "records",
        "executors",
        "aggregation",
        "aggregators",
        "calls",
        "errors",
        "instruction_calls",
        "text",
    },
    "batch_size": set(),
    "sizes": {"batch_size"},
    "budget": {"records", "errors", "executors", "calls"},
    "sampling": {"budget", "sizes"},
    "step_reading": {"records", "batch_size", "bullets", "deltas", "playbook_records", "pruning"},
    "step_log": {"records", "step_reading"},
    "provenance": {"records"},
    "progress": set(),
    "tracking": {"records"},
    "steps": {"records", "budget", "sampling", "secrecy", "sizes", "step_log"},
    "adapter": {"records", "executors", "program_copies", "rollout", "scoring", "reflective_dataset", "secrecy"},
    "reflection": {"records", "adapter", "budget", "calls", "errors", "proposer", "secrecy", "steps"},
    "bullets": {"errors"},
    "deltas": {"bullets"},
    "near_duplicates": {"bullets"},
    "playbook_text": {"bullets"},
    "pruning": {"bullets", "deltas", "near_duplicates"},
    "playbook_diff": {"bullets", "playbook_text"},
    "playbook_files": {"bullets", "playbook_text"},
    "playbook": {
        "errors",
        "bullets",
        "deltas",
        "near_duplicates",
        "playbook_diff",
        "playbook_files",
        "playbook_text",
        "pruning",
    },
    "playbook_records": {"records", "deltas", "pruning"},
    "playbook_provenance": {"records", "deltas", "playbook_records"},
    "playbook_result": {
        "records",
        "batch_size",
        "playbook",
        "playbook_provenance",
        "playbook_records",
        "plots",
        "report",
    },
    "playbook_program": {"program_copies", "playbook"},
    "playbook_state": {"records", "playbook", "playbook_files"},
    "delta_merge": {"secrecy", "bullets", "deltas", "near_duplicates", "playbook", "pruning"},
    "structured": {"records", "errors", "calls", "executors"},
    "playbook_reflection": {"calls", "text", "playbook_records", "structured"},
    "curation": {
        "records",
        "calls",
        "text",
        "aggregation",
        "bullets",
        "deltas",
        "delta_merge",
        "near_duplicates",
        "playbook",
        "playbook_records",
        "structured",
    },
    "playbook_options": {
        "checks",
        "executor_options",
        "executors",
        "aggregation",
        "aggregators",
        "batch_size",
        "sizes",
        "delta_merge",
        "near_duplicates",
        "playbook",
        "playbook_records",
    },
    "playbook_step": {
        "records",
        "errors",
        "calls",
        "text",
        "executors",
        "rollout",
        "scoring",
        "reflective_dataset",
        "aggregation",
        "aggregators",
        "budget",
        "deltas",
        "delta_merge",
        "playbook",
        "curation",
        "playbook_options",
        "playbook_program",
        "playbook_records",
        "playbook_reflection",
        "structured",
    },
    "playbook_run": {
        "checks",
        "records",
        "errors",
        "executors",
        "batch_size",
        "sizes",
        "sampling",
        "budget",
        "playbook",
        "playbook_options",
        "playbook_program",
        "playbook_records",
        "playbook_result",
        "playbook_state",
        "playbook_step",
        "playbook_traces",
        "progress",
        "secrecy",
        "step_log",
    },
    "trace_types": {"errors", "secrecy", "text"},
    "trace_formats": {"secrecy", "trace_types"},
    "trace_io": {"trace_types"},
    "trace_trials": {"trace_formats", "trace_io", "trace_types"},
    "trace_files": {"trace_formats", "trace_io", "trace_trials", "trace_types"},
    "program_traces": {"text", "trace_types"},
    "trace_rendering": {"records", "lengths", "program_traces", "trace_types"},
    "traces": {"redaction", "program_traces", "trace_files", "trace_formats", "trace_rendering", "trace_types"},
    "trace_batches": {
        "checks",
        "records",
        "aggregation",
        "batch_size",
        "budget",
        "sampling",
        "shuffle",
        "sizes",
        "traces",
    },
    "trace_state": {"records", "playbook_files"},
    "trace_steps": {"records", "sizes", "trace_batches"},
    "playbook_traces": {
        "calls",
        "lengths",
        "playbook_options",
        "playbook_program",
        "playbook_records",
        "playbook_reflection",
        "sizes",
        "trace_batches",
        "traces",
    },
    "run_parts": {
        "adapter",
        "aggregation",
        "budget",
        "calls",
        "executor_options",
        "executors",
        "program_copies",
        "proposer",
        "scoring",
        "secrecy",
    },
    "trace_learning": {
        "checks",
        "records",
        "errors",
        "batch_size",
        "executor_options",
        "lengths",
        "progress",
        "run_parts",
        "secrecy",
        "sizes",
        "step_log",
        "steps",
        "trace_batches",
        "trace_state",
        "trace_steps",
    },
    "report_diff": set(),
    "report_playbook": set(),
    "report_data": {"records", "provenance", "report_diff", "report_playbook"},
    "report": {"records", "step_log", "report_data"},
    "plots": {"records", "report_data"},
    "result": {"records", "batch_size", "provenance", "steps", "report", "plots", "trace_learning"},
}
FRONT_DOORS = {"optimizer", "playbook_optimizer", "proposer"}
TABLE = {
    **PARTS,
    "run": set(PARTS),
    "optimizer": set(PARTS) | {"run"},
    "playbook_optimizer": set(PARTS) - {"adapter", "proposer", "reflection", "run_parts", "trace_learning"},
    "fake_engine": set(),
    "simulation": {"fake_engine"},
    "playbook_simulation": {"fake_engine", "simulation"},
    "testing": {"records", "fake_engine", "simulation"},
    "finance": set(),
    "tasks": {"finance"},
    "demo": FRONT_DOORS | {"__init__", "testing", "tasks", "report", "traces", "errors"},
    "learn": FRONT_DOORS
    | {"aggregation", "errors", "playbook", "playbook_records", "playbook_simulation", "testing", "traces"},
    "__main__": FRONT_DOORS | {"testing", "demo", "learn", "report", "traces", "errors"},
    "__init__": FRONT_DOORS | set(PARTS),
}

MODULES = {path.stem: path for path in sorted(PACKAGE.glob("*.py"))}


def imports_of(name: str) -> set[str]:
    """The modules of the package that the module imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            source = importlib.util.resolve_name(source, PACKAGE.name)
            targets = [f"{source}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            root, *rest = target.split(".")
            if root == PACKAGE.name:
                found.add(rest[0] if rest and rest[0] in MODULES else "__init__")
    return found - {name}


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_table(name):
    assert name in TABLE, f"{name}.py is new: add it, and what it may import, to TABLE in {Path(__file__).name}"
    forbidden = imports_of(name) - TABLE[name]
    assert not forbidden, f"{name}.py may not import {sorted(forbidden)}; allowed: {sorted(TABLE[name])}"


def test_no_subpackages():
    assert not [str(path) for path in PACKAGE.glob("*/*.py")], "the table above knows only a flat package"


@pytest.mark.parametrize("graph", [TABLE, {name: imports_of(name) for name in MODULES}], ids=["table", "files"])
def test_no_import_cycles(graph):
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


def test_exported_names():
    assert sorted(dspy_combee.__all__) == sorted(EXPORTED)
    without_docstring = [name for name in EXPORTED if not inspect.getdoc(getattr(dspy_combee, name))]
    assert not without_docstring


def test_import_stays_light():
    heavy = "ray", "matplotlib", "scipy"
    code = f"import sys; from dspy_combee import *; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert run.stdout.strip() == "[]"
