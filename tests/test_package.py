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

# The rooms, from the front doors down, and what each may import: only rooms below it. The data's way is read upwards.
TABLE = {
    "__main__": {"cli", "report"},
    "cli": {
        "__init__",
        "learners",
        "playbook_optimizer",
        "playbook",
        "records",
        "reduce",
        "report",
        "runs",
        "testing",
        "traces",
    },
    "__init__": {"calls", "controller", "learners", "optimizer", "playbook", "playbook_optimizer", "records", "reduce"}
    | {"runs", "traces"},
    "optimizer": {"calls", "controller", "learners", "records", "reduce", "rollouts", "runs", "traces"},
    "playbook_optimizer": {"calls", "controller", "learners", "playbook", "records", "reduce", "runs", "traces"},
    "runs": {"calls", "controller", "learners", "playbook", "records", "reduce", "report", "rollouts", "traces"},
    "report": {"playbook", "records"},
    "learners": {"calls", "controller", "playbook", "records", "reduce", "rollouts", "traces"},
    "reduce": {"calls", "records"},
    "rollouts": {"calls", "records"},
    "traces": {"records"},
    "controller": {"calls", "records"},
    "calls": {"records"},
    "playbook": {"records"},
    "records": set(),
    "testing": set(),
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
    heavy = "ray", "matplotlib", "scipy", "sklearn"
    code = f"import sys; from dspy_combee import *; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert run.stdout.strip() == "[]"
