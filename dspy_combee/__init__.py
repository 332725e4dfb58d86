"""Combee for DSPy: prompt learning from large minibatches without losing lessons."""

from dspy_combee.aggregation import Aggregator, TreeAggregator
from dspy_combee.batch_size import BatchSizeFit, PowerLawBatchSize
from dspy_combee.errors import CombeeError, OutOfBudgetError, ProviderError, ReflectionError, UnknownCostError
from dspy_combee.executors import Executor, ThreadExecutor
from dspy_combee.optimizer import CombeeOptimizer
from dspy_combee.proposer import CombeeProposer
from dspy_combee.records import ProposalNode, Reduction, Rollout, Spent, StepRecord, Usage
from dspy_combee.result import CombeeResult

__version__ = "0.1.0"

__all__ = [
    "Aggregator",
    "BatchSizeFit",
    "CombeeError",
    "CombeeOptimizer",
    "CombeeProposer",
    "CombeeResult",
    "Executor",
    "OutOfBudgetError",
    "PowerLawBatchSize",
    "ProposalNode",
    "ProviderError",
    "Reduction",
    "ReflectionError",
    "Rollout",
    "Spent",
    "StepRecord",
    "ThreadExecutor",
    "TreeAggregator",
    "UnknownCostError",
    "Usage",
]
