"""Combee for DSPy: prompt learning from large minibatches without losing lessons."""

from dspy_combee.aggregation import Aggregator, TreeAggregator
from dspy_combee.errors import CombeeError, ProviderError, ReflectionError
from dspy_combee.executors import Executor, ThreadExecutor
from dspy_combee.optimizer import CombeeOptimizer
from dspy_combee.proposer import CombeeProposer
from dspy_combee.records import ProposalNode, Reduction, Rollout, StepRecord
from dspy_combee.result import CombeeResult

__version__ = "0.1.0"

__all__ = [
    "Aggregator",
    "CombeeError",
    "CombeeOptimizer",
    "CombeeProposer",
    "CombeeResult",
    "Executor",
    "ProposalNode",
    "ProviderError",
    "Reduction",
    "ReflectionError",
    "Rollout",
    "StepRecord",
    "ThreadExecutor",
    "TreeAggregator",
]
