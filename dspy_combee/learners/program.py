"""A program and where its playbooks stand in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from dspy_combee.playbook import Playbook, attach, detach
from dspy_combee.rollouts.map import ProgramCopier

SHARED = "shared"
"""The component's name where all predictors share one playbook."""

Playbooks = Mapping[str, Playbook]


class PlaybookProgram:
    """Takes the playbooks off a program and builds programs with others.

    A component is a playbook: one for each predictor, under its name, or one for all.

    Args:
        student: The program; it stays as it is.
        shared: Whether all predictors share one playbook.

    Attributes:
        bases: Each predictor's instruction without its playbook.
        component_of: Each predictor's component.
        components: The components, in the order of the predictors.

    Raises:
        TypeError: If the student is no DSPy program.
        ValueError: If it has no predictor.
    """

    def __init__(self, student: Any, shared: bool) -> None:
        if not hasattr(student, "named_predictors"):
            raise TypeError(f"the program must be a dspy.Module, got {type(student).__name__}.")
        self.student = student
        self.copier = ProgramCopier(student)
        self._found: dict[str, Playbook | None] = {}
        self.bases: dict[str, str] = {}
        for name, predictor in student.named_predictors():
            self.bases[name], self._found[name] = detach(predictor.signature.instructions)
        if not self.bases:
            raise ValueError("the program has no predictor, so there is nothing that a playbook could stand in.")
        self.component_of = {name: SHARED if shared else name for name in self.bases}
        self.components = tuple(dict.fromkeys(self.component_of.values()))

    def start(self, given: Playbook | Playbooks | None, *, own_first: bool = False) -> dict[str, Playbook]:
        """The playbooks to start from, by component: the ones given, else the program's own, else empty ones.

        Args:
            given: One for all predictors, or some by predictor.
            own_first: Whether those that stand in the program come before those given.

        Raises:
            ValueError: If a name is unknown, or predictors that share a playbook start from different ones.
        """
        named = {} if given is None else given if isinstance(given, Mapping) else dict.fromkeys(self.bases, given)
        unknown = sorted(set(named) - set(self.bases))
        if unknown:
            raise ValueError(f"playbook names predictors {unknown}; the program has {sorted(self.bases)}.")
        start: dict[str, Playbook] = {}
        for name, component in self.component_of.items():
            own = self._found[name]
            playbook = own if own_first and own is not None else named.get(name, own)
            if playbook is None:
                continue
            if start.setdefault(component, playbook) != playbook:
                raise ValueError(
                    "the predictors are to share a playbook and start from different ones: give one as playbook=..."
                )
        return {component: start.get(component, Playbook()) for component in self.components}

    def build(self, playbooks: Playbooks) -> Any:
        """The program with these playbooks (by component) at the end of its instructions."""
        program = self.copier.copy(self.student)
        for name, predictor in program.named_predictors():
            text = attach(self.bases[name], playbooks[self.component_of[name]])
            predictor.signature = predictor.signature.with_instructions(text)
        return program

    def by_predictor(self, playbooks: Playbooks) -> dict[str, Playbook]:
        """The playbook of each predictor."""
        return {name: playbooks[component] for name, component in self.component_of.items()}

    def fingerprint(self) -> str:
        """What tells this program from others, as far as its predictors' names and instructions do."""
        text = repr(sorted(self.bases.items())) + repr(self.components)
        return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]
