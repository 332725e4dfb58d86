"""The shape of the package: which room may import which, what it exports, and what importing it loads."""

import ast
import importlib
import inspect
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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
    "__main__": {"cli"},
    "cli": {"__init__", "playbook", "records", "report", "testing", "traces"},
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
    unused = "dspy_combee.playbook", "dspy_combee.traces", "dspy_combee.report.plots", "jinja2", "filelock", *heavy
    for names, absent in (("*", heavy), ("CombeeOptimizer", unused)):
        code = f"import sys; from dspy_combee import {names}; print([name for name in {absent} if name in sys.modules])"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
        assert run.stdout.strip() == "[]"


# Dependencies: those that are imported ------------------------------------------------------------------------

DISTRIBUTIONS = {"sklearn": "scikit-learn"}
"""The distribution of a module whose name is another."""
EXTRAS = {
    "traces": ({"atif"}, "traces"),
    "top-k": ({"scikit-learn", "threadpoolctl"}, "reduce"),
    "ray": ({"ray"}, "calls"),
    "report": ({"matplotlib"}, "report"),
    "mlflow": ({"mlflow"}, "runs"),
    "wandb": ({"wandb"}, "runs"),
}
"""What each extra for users installs, and the one room that imports it."""


def distributions_of(name: str) -> set[str]:
    """The distributions that a module imports, wherever in the file, also by `import_module`."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    roots = {target.split(".")[0] for target in found} - sys.stdlib_module_names - {PACKAGE.name}
    return {DISTRIBUTIONS.get(root, root) for root in roots}


def declared() -> dict[str, set[str]]:
    """The distributions that pyproject.toml names: those of each extra, and the package's own under ""."""
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {name: {Requirement(line).name for line in lines} for name, lines in groups.items()}


def test_dependencies_are_those_that_are_imported():
    imported = set.union(*map(distributions_of, MODULES))
    extras = set.union(*(names for names, _ in EXTRAS.values()))
    assert imported - extras == declared()[""]
    assert {name: names for name, names in declared().items() if name in EXTRAS} == {
        extra: names for extra, (names, _) in EXTRAS.items()
    }


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_imported_by_its_room(extra):
    names, room = EXTRAS[extra]
    importing = {(name, module.split(".")[0]) for module in MODULES for name in distributions_of(module) & names}
    assert importing == {(name, room) for name in names}


# Docstrings begin with a verb ---------------------------------------------------------------------------------

NO_VERBS = """
A All An Any As At Base By Each Every For From How If In It Its Metric One Our Ray Reflection Some That The These This
Those To What When Where Whether Which Who Why With
"""
VERBS_IN_ED_AND_ING = {"Bring", "Embed", "Feed", "Need", "Proceed", "Seed"}


def begins_with_a_verb(docstring: str) -> bool:
    word = docstring.split()[0].rstrip(".,:;")
    if word in VERBS_IN_ED_AND_ING:
        return True
    inflected = word.endswith(("ed", "ing")) or (word.endswith("s") and not word.endswith("ss"))
    return word.isalpha() and word.istitle() and word not in NO_VERBS.split() and not inflected


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_begin_with_a_verb(room):
    wrong = []
    for module in (name for name in MODULES if name.split(".")[0] == room):
        for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                # The docstring of an item of a reply is in the schema that a language model reads.
                in_prompts = "AsGiven" in map(ast.unparse, getattr(node, "bases", ()))
                text = None if in_prompts else ast.get_docstring(node)
                if text and not begins_with_a_verb(text):
                    wrong.append(f"{module}:{node.lineno} {node.name}: {text.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)
