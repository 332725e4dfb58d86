"""The parts of a run, made through the optimizer as `compile` makes them, for tests that look at one of them."""

from dspy_combee import CombeeOptimizer
from dspy_combee.runs.adapter import CombeeAdapter
from dspy_combee.runs.scope import RunScope
from dspy_combee.testing import ScriptedLM


def make_scope(program, optimizer) -> RunScope:
    options = optimizer._run_options()
    return RunScope(options, program, options.reflection_lm, num_examples=1, total=None)


def make_adapter(program, metric, num_threads=4, **options) -> CombeeAdapter:
    optimizer = CombeeOptimizer(
        metric, max_metric_calls=100, reflection_lm=ScriptedLM(default="x"), num_threads=num_threads, **options
    )
    scope = make_scope(program, optimizer)
    return CombeeAdapter(scope, optimizer._make_learner(scope), lambda rollouts, traced: None)
