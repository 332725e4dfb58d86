"""Combee for DSPy: prompt learning from large minibatches without losing lessons."""

from dspy_combee.aggregation import Aggregator, TreeAggregator
from dspy_combee.batch_size import BatchSizeFit, PowerLawBatchSize
from dspy_combee.bullets import Bullet
from dspy_combee.errors import CombeeError, OutOfBudgetError, ProviderError, ReflectionError, UnknownCostError
from dspy_combee.executors import Executor, ThreadExecutor
from dspy_combee.optimizer import CombeeOptimizer
from dspy_combee.playbook import Playbook
from dspy_combee.playbook_optimizer import PlaybookOptimizer
from dspy_combee.playbook_result import PlaybookResult
from dspy_combee.proposer import CombeeProposer
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
    "OutOfBudgetError",
    "Playbook",
    "PlaybookOptimizer",
    "PlaybookResult",
    "PowerLawBatchSize",
    "ProposalNode",
    "ProviderError",
    "Reduction",
    "ReflectionError",
    "Rollout",
    "Spent",
    "StepRecord",
    "ThreadExecutor",
    "Trace",
    "TreeAggregator",
    "UnknownCostError",
    "Usage",
    "load_traces",
    "save_traces",
    "traces_from",
]
