"""The shape of the package: which room may import which, what it exports, and what importing it loads."""

import ast
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

# The rooms of the package, modules and subpackages, and what each may import from the others. A room that is not
# written yet may stand here already; one that is written and does not stand here fails. Arrows go one way only.
PARTS = {
    "batch_size": set(),
    "errors": set(),
    "records": set(),
    "checks": set(),
    "lengths": set(),
    "program_copies": set(),
    "progress": set(),
    "text": set(),
    "shuffle": set(),
    "backoff": set(),
    "testing": set(),
    "redaction": set(),
    "provider_errors": set(),
    "sizes": {"batch_size", "checks"},
    "playbook": {"errors"},
    "provenance": {"records"},
    "tracking": {"records"},
    "executors": {"backoff", "checks", "errors"},
    "secrecy": {"redaction", "text"},
    "playbook_records": {"playbook", "records"},
    "state_file": {"playbook", "records"},
    "aggregation": {"checks", "executors", "lengths", "records", "shuffle"},
    "calls": {"errors", "provider_errors", "records", "secrecy", "text"},
    "traces": {"errors", "lengths", "records", "redaction", "secrecy", "text"},
    "travel": {"secrecy"},
    "step_reading": {"batch_size", "playbook", "playbook_records", "records"},
    "baselines": {"aggregation", "executors", "records"},
    "budget": {"calls", "errors", "executors", "records"},
    "instruction_calls": {"aggregation", "calls", "errors", "records", "text"},
    "scoring": {"errors", "provider_errors", "records", "secrecy"},
    "ray_tasks": {"backoff", "errors", "executors", "secrecy", "travel"},
    "step_log": {"records", "step_reading"},
    "aggregators": {"aggregation", "baselines"},
    "sampling": {"budget", "sizes"},
    "reflective_dataset": {"calls", "executors", "records", "scoring", "secrecy", "text"},
    "rollout": {"calls", "errors", "executors", "program_copies", "records", "scoring", "secrecy", "text", "travel"},
    "ray_executor": {"checks", "errors", "executors", "ray_tasks", "secrecy", "travel"},
    "report": {"batch_size", "provenance", "records", "step_log"},
    "proposer": {
        "aggregation",
        "aggregators",
        "calls",
        "checks",
        "errors",
        "executors",
        "instruction_calls",
        "records",
        "secrecy",
        "text",
    },
    "steps": {"budget", "records", "sampling", "secrecy", "sizes", "step_log"},
    "adapter": {
        "errors",
        "executors",
        "program_copies",
        "records",
        "reflective_dataset",
        "rollout",
        "scoring",
        "secrecy",
        "text",
    },
    "executor_options": {"executors", "ray_executor"},
    "reflection": {"adapter", "budget", "calls", "errors", "proposer", "records", "scoring", "secrecy", "steps"},
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
        "aggregation",
        "batch_size",
        "budget",
        "checks",
        "errors",
        "executor_options",
        "lengths",
        "playbook",
        "progress",
        "records",
        "run_parts",
        "sampling",
        "secrecy",
        "shuffle",
        "sizes",
        "state_file",
        "step_log",
        "steps",
        "traces",
    },
    "ace": {
        "aggregation",
        "aggregators",
        "batch_size",
        "budget",
        "calls",
        "checks",
        "errors",
        "executor_options",
        "executors",
        "lengths",
        "playbook",
        "playbook_records",
        "program_copies",
        "progress",
        "records",
        "reflective_dataset",
        "report",
        "rollout",
        "sampling",
        "scoring",
        "secrecy",
        "sizes",
        "state_file",
        "step_log",
        "text",
        "trace_learning",
        "traces",
    },
    "result": {"provenance", "records", "report", "steps", "trace_learning"},
}
FRONT_DOORS = {"optimizer", "playbook_optimizer", "proposer"}
TABLE = {
    **PARTS,
    "run": set(PARTS),
    "optimizer": set(PARTS) | {"run"},
    "playbook_optimizer": set(PARTS) - {"adapter", "proposer", "reflection", "run_parts", "trace_learning"},
    "command_line": {"errors"},
    "demo": FRONT_DOORS | {"__init__", "command_line", "testing", "report", "traces", "errors"},
    "learn": FRONT_DOORS
    | {"aggregation", "command_line", "errors", "playbook", "playbook_records", "testing", "traces"},
    "__main__": FRONT_DOORS | {"testing", "demo", "learn", "report", "traces", "errors"},
    "__init__": FRONT_DOORS | set(PARTS),
}

SUBPACKAGES = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted([*PACKAGE.glob("*.py"), *PACKAGE.glob("*/*.py")])
}
ROOMS = sorted({name.split(".")[0] for name in MODULES})


def imports_of(name: str) -> set[str]:
    """The modules of the package that the module imports, wherever in the file; a subpackage stands for its face."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import: the package uses absolute ones"
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            root, *rest = target.split(".")
            if root == PACKAGE.name:
                longest = (".".join(rest[:length]) for length in (2, 1) if ".".join(rest[:length]) in MODULES)
                face = f"{rest[0]}.__init__" if rest and rest[0] in SUBPACKAGES else "__init__"
                found.add(next(longest, face))
    return found - {name}


def room_imports_of(room: str) -> set[str]:
    """The other rooms that a room imports."""
    names = [name for name in MODULES if name.split(".")[0] == room]
    return {imported.split(".")[0] for name in names for imported in imports_of(name)} - {room}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_follow_the_table(room):
    assert room in TABLE, f"{room} is new: add it, and what it may import, to TABLE in {Path(__file__).name}"
    forbidden = room_imports_of(room) - TABLE[room]
    assert not forbidden, f"{room} may not import {sorted(forbidden)}; allowed: {sorted(TABLE[room])}"


@pytest.mark.parametrize("subpackage", sorted(SUBPACKAGES))
def test_nothing_in_a_subpackage_imports_its_face(subpackage):
    names = [name for name in MODULES if name.startswith(f"{subpackage}.")]
    assert not [name for name in names if f"{subpackage}.__init__" in imports_of(name)]


GRAPHS = {
    "table": TABLE,
    "rooms": {room: room_imports_of(room) for room in ROOMS},
    "modules": {name: imports_of(name) for name in MODULES},
}


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
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
