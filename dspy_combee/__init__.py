"""Combee for DSPy: prompt learning from large minibatches."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspy_combee.calls.executors import Executor, ThreadExecutor
    from dspy_combee.calls.ray_executor import RayExecutor
    from dspy_combee.controller.batch_size import PowerLawBatchSize
    from dspy_combee.learners.instruction import CombeeProposer
    from dspy_combee.optimizer import CombeeOptimizer
    from dspy_combee.playbook import Bullet, Playbook
    from dspy_combee.playbook_optimizer import PlaybookOptimizer
    from dspy_combee.records.errors import (
        CombeeError,
        ExecutorError,
        OutOfBudgetError,
        ProviderError,
        ReflectionError,
        UnknownCostError,
    )
    from dspy_combee.records.types import BatchSizeFit, ProposalNode, Reduction, Rollout, Spent, StepRecord, Usage
    from dspy_combee.reduce.baselines import FlatAggregator, SummarizeAggregator, TopKAggregator
    from dspy_combee.reduce.tree import Aggregator, TreeAggregator
    from dspy_combee.runs.result import CombeeResult, PlaybookResult
    from dspy_combee.traces import Trace, load_traces, save_traces, traces_from

__version__ = "0.1.0"

__all__ = [
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

# Each name is loaded when it is first used, from its module: nobody waits for what they do not use.
_HOMES = {
    "Aggregator": "reduce.tree",
    "BatchSizeFit": "records.types",
    "Bullet": "playbook",
    "CombeeError": "records.errors",
    "CombeeOptimizer": "optimizer",
    "CombeeProposer": "learners.instruction",
    "CombeeResult": "runs.result",
    "Executor": "calls.executors",
    "ExecutorError": "records.errors",
    "FlatAggregator": "reduce.baselines",
    "OutOfBudgetError": "records.errors",
    "Playbook": "playbook",
    "PlaybookOptimizer": "playbook_optimizer",
    "PlaybookResult": "runs.result",
    "PowerLawBatchSize": "controller.batch_size",
    "ProposalNode": "records.types",
    "ProviderError": "records.errors",
    "RayExecutor": "calls.ray_executor",
    "Reduction": "records.types",
    "ReflectionError": "records.errors",
    "Rollout": "records.types",
    "Spent": "records.types",
    "StepRecord": "records.types",
    "SummarizeAggregator": "reduce.baselines",
    "ThreadExecutor": "calls.executors",
    "TopKAggregator": "reduce.baselines",
    "Trace": "traces",
    "TreeAggregator": "reduce.tree",
    "UnknownCostError": "records.errors",
    "Usage": "records.types",
    "load_traces": "traces",
    "save_traces": "traces",
    "traces_from": "traces",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
