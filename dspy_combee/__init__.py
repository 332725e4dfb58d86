"""Combee for DSPy: prompt learning from large minibatches without losing lessons."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspy_combee.ace.result import PlaybookResult
    from dspy_combee.aggregation import Aggregator, TreeAggregator
    from dspy_combee.baselines import FlatAggregator, SummarizeAggregator, TopKAggregator
    from dspy_combee.batch_size import BatchSizeFit, PowerLawBatchSize
    from dspy_combee.errors import (
        CombeeError,
        ExecutorError,
        OutOfBudgetError,
        ProviderError,
        ReflectionError,
        UnknownCostError,
    )
    from dspy_combee.executors import Executor, ThreadExecutor
    from dspy_combee.optimizer import CombeeOptimizer
    from dspy_combee.playbook import Bullet, Playbook
    from dspy_combee.playbook_optimizer import PlaybookOptimizer
    from dspy_combee.proposer import CombeeProposer
    from dspy_combee.ray_executor import RayExecutor
    from dspy_combee.records import ProposalNode, Reduction, Rollout, Spent, StepRecord, Usage
    from dspy_combee.result import CombeeResult
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
    "Aggregator": "aggregation",
    "BatchSizeFit": "batch_size",
    "Bullet": "playbook",
    "CombeeError": "errors",
    "CombeeOptimizer": "optimizer",
    "CombeeProposer": "proposer",
    "CombeeResult": "result",
    "Executor": "executors",
    "ExecutorError": "errors",
    "FlatAggregator": "baselines",
    "OutOfBudgetError": "errors",
    "Playbook": "playbook",
    "PlaybookOptimizer": "playbook_optimizer",
    "PlaybookResult": "ace.result",
    "PowerLawBatchSize": "batch_size",
    "ProposalNode": "records",
    "ProviderError": "errors",
    "RayExecutor": "ray_executor",
    "Reduction": "records",
    "ReflectionError": "errors",
    "Rollout": "records",
    "Spent": "records",
    "StepRecord": "records",
    "SummarizeAggregator": "baselines",
    "ThreadExecutor": "executors",
    "TopKAggregator": "baselines",
    "Trace": "traces",
    "TreeAggregator": "aggregation",
    "UnknownCostError": "errors",
    "Usage": "records",
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
