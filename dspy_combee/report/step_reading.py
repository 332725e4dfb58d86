"""Steps read back from the plain values that `to_dict` makes of them: those of `PlaybookOptimizer` too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from dspy_combee.controller.batch_size import BatchSizeFit
from dspy_combee.playbook.bullets import Bullet
from dspy_combee.playbook.deltas import Applied, Conflict, Refused, delta_from
from dspy_combee.playbook.pruning import Pruned
from dspy_combee.playbook.records import CuratorNode, PlaybookChange, PlaybookStep, Reflection, describe
from dspy_combee.records.types import ProposalNode, Reduction, StepRecord, Usage


def step_from_dict(plain: Mapping[str, Any]) -> StepRecord:
    """The step that `to_dict` made these values of: a `PlaybookStep` where they hold changes of playbooks.

    What `to_dict` writes as text, because JSON does not know it, stays text. Fields of a later version are left out.

    Raises:
        AttributeError: If a value is of another kind.
        KeyError: If a part is missing; so a `TypeError`.
        ValueError: If a value is out of range.
    """
    if "changes" not in plain:
        return StepRecord(**_step_values(StepRecord, plain, _node))
    values = _step_values(PlaybookStep, plain, _curator_node)
    values["reductions"] = tuple(_with_deltas(reduction) for reduction in values["reductions"])
    values["changes"] = tuple(_change(change) for change in values["changes"])
    values["reflections"] = tuple(_reflection(reflection) for reflection in values["reflections"])
    values["unused_reflections"] = tuple(values["unused_reflections"])
    return PlaybookStep(**values)


def _step_values(kind: Any, plain: Mapping[str, Any], node: Any) -> dict[str, Any]:
    values = _known(kind, plain)
    for name in ("minibatch_ids", "scores_before", "scores_after"):
        values[name] = tuple(values[name])
    values["reductions"] = tuple(_reduction(reduction, node) for reduction in values["reductions"])
    values["usage"] = _usage(values)
    if values.get("fit") is not None:
        fit = _known(BatchSizeFit, values["fit"])
        values["fit"] = BatchSizeFit(**{**fit, "medians": _pairs(fit["medians"])})
    return values


def _reduction(plain: Mapping[str, Any], node: Any) -> Reduction:
    values = _known(Reduction, plain)
    values["nodes"] = tuple(node(item) for item in values["nodes"])
    values["sources"] = tuple(values.get("sources") or ())
    return Reduction(**values)


def _node_values(kind: Any, plain: Mapping[str, Any]) -> dict[str, Any]:
    values = _known(kind, plain)
    return {**values, "inputs": tuple(values["inputs"]), "usage": _usage(values)}


def _node(plain: Mapping[str, Any]) -> ProposalNode:
    return ProposalNode(**_node_values(ProposalNode, plain))


def _usage(values: Mapping[str, Any]) -> Usage:
    return Usage(**_known(Usage, values.get("usage") or {}))


def _pairs(pairs: Sequence[Sequence[Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(n), float(seconds)) for n, seconds in pairs)


def _known(kind: Any, plain: Mapping[str, Any]) -> dict[str, Any]:
    """The values for the fields that this version knows."""
    return {field.name: plain[field.name] for field in fields(kind) if field.name in plain}


# Playbooks ---------------------------------------------------------------------------------------------------


def _curator_node(plain: Mapping[str, Any]) -> ProposalNode:
    if "refused" not in plain:
        return _node(plain)
    values = _node_values(CuratorNode, plain)
    if isinstance(values.get("output"), list):  # Of an aggregator that summarizes it may be a summary.
        values["output"] = _deltas(values["output"])
    return CuratorNode(**{**values, "refused": tuple(_refused(item, _frozen) for item in values["refused"])})


def _with_deltas(reduction: Reduction) -> Reduction:
    if reduction.text is None:
        return reduction
    return Reduction(**{**vars(reduction), "text": _deltas(reduction.text)})


def _change(plain: Mapping[str, Any]) -> PlaybookChange:
    values = _known(PlaybookChange, plain)
    values["deltas"] = _deltas(values["deltas"])
    values["applied"] = tuple(
        Applied(**{**_known(Applied, item), "delta": delta_from(item["delta"])}) for item in values["applied"]
    )
    values["tags_refused"] = tuple(_refused(item, _frozen) for item in values["tags_refused"])
    values["refused"] = tuple(_refused(item, _delta_or_plain) for item in values["refused"])
    values["conflicts"] = tuple(
        Conflict(**{**_known(Conflict, item), "kept": tuple(item["kept"]), "dropped": tuple(item["dropped"])})
        for item in values["conflicts"]
    )
    values["pruned"] = tuple(
        Pruned(**{**_known(Pruned, item), "bullet": Bullet(**_known(Bullet, item["bullet"]))})
        for item in values["pruned"]
    )
    return PlaybookChange(**values)


def _reflection(plain: Mapping[str, Any]) -> Reflection:
    values = _known(Reflection, plain)
    return Reflection(**{**values, "tags": _frozen(values["tags"]), "usage": _usage(values)})


def _refused(plain: Mapping[str, Any], read: Callable[[Any], Any]) -> Refused:
    return Refused(plain["index"], read(plain["given"]), plain["reason"])


def _delta_or_plain(value: Any) -> Any:
    """A delta of a batch where the values are all that one is written as, else as plain as they are."""
    try:
        delta = delta_from(value)
    except (AttributeError, TypeError, ValueError):
        return _frozen(value)
    return delta if describe(delta) == value else _frozen(value)


def _deltas(plain: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    return tuple(delta_from(item) for item in plain)


def _frozen(value: Any) -> Any:
    """Lists as the tuples that they were written from."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
