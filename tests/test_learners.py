"""A learner of a user's own in the loop: all that a run promises works for it, without one line about it."""

from pathlib import Path

import dspy
import pytest

from dspy_combee import Usage
from dspy_combee.controller.batch_size import FixedSize
from dspy_combee.controller.sampling import Budget, EpochSampler
from dspy_combee.records.step_log import read_steps
from dspy_combee.report import html_page
from dspy_combee.runs.loop import Loop, Source
from dspy_combee.runs.scope import RunOptions, RunScope
from dspy_combee.runs.tracking import TrackingOptions

from .fact_learner import FactLearner
from .lessons import examples, instruction, learning_lm, metric, rules_in
from .test_tracking import mlflow, runs_of, series  # noqa: F401 (a fixture)

PROGRAM = "question -> answer"
OPTIONS = {
    "reflection_lm": None,
    "executor": "threads",
    "num_threads": 4,
    "seed": 0,
    "log_dir": None,
    "step_callbacks": (),
    "max_reflection_cost": None,
    "rollout_timeout": None,
    "reflection_timeout": None,
    "failure_score": 0.0,
    "perfect_score": 1.0,
    "track_stats": True,
    "verbose": False,
}


def fact_lm():
    return learning_lm((lambda prompt: "fact" in prompt.output_fields, note))


def note(prompt):
    return {"fact": "Know " + " ".join(sorted(rules_in(prompt.question)))}


def run(lm, **options):
    """Learn facts from twelve examples, four at a time, in two passes; the loop and the program."""
    given = RunOptions(metric, **{**OPTIONS, "reflection_lm": lm, **options})
    program = dspy.Predict(PROGRAM)
    trainset, valset = examples(12), examples(6)
    scope = RunScope(given, program, lm, len(trainset), 2 * len(trainset))
    source = Source(trainset, EpochSampler(FixedSize(4), Budget(len(trainset), 0, num_epochs=2), 0))
    state = None if given.log_dir is None else Path(given.log_dir) / "facts.json"
    loop = Loop(scope, FactLearner(program, scope.tools()), [source], valset, state)
    with dspy.context(lm=lm), scope.opened([*trainset, *valset]):
        loop.run()
    return loop, loop.build()


def test_it_learns_and_its_best_state_comes_back():
    loop, program = run(fact_lm())
    assert loop.state.best_score == 1.0
    assert loop.best_step == 3
    assert rules_in(instruction(program)) == {f"rule-answer-{number}" for number in range(12)}
    assert [step.n for step in loop.scope.steps] == [4] * 6


class Stop(BaseException):
    pass


def test_it_goes_on_after_a_kill(tmp_path):
    def stop(step):
        if step.iteration == 2:
            raise Stop

    whole, program = run(fact_lm(), log_dir=tmp_path / "whole")
    with pytest.raises(Stop) as caught:
        run(fact_lm(), log_dir=tmp_path / "killed", step_callbacks=[stop])
    assert 0 < len(rules_in(instruction(caught.value.best_program))) < 12
    lm = fact_lm()
    resumed, again = run(lm, log_dir=tmp_path / "killed")
    assert instruction(again) == instruction(program)
    assert resumed.state == whole.state
    assert len(lm.calls) < resumed.scope.spent.usage.calls
    assert [step.iteration for step in read_steps(tmp_path / "killed")] == [1, 2, 3, 4, 5, 6]


def test_the_limits_of_money_and_time_hold(monkeypatch):
    class Priced:
        usage = Usage()

        def add(self, usage):
            self.usage = Usage(self.usage.calls + usage.calls, cost=(self.usage.cost or 0.0) + usage.calls)

    monkeypatch.setattr("dspy_combee.calls.guard.UsageMeter", Priced)
    monkeypatch.setattr("dspy_combee.runs.scope.check_priced", lambda lm: None)
    loop, _ = run(fact_lm(), max_reflection_cost=4.0)
    assert loop.scope.guard.meter.usage.calls == 4, "one wave, and then nothing more"
    assert len(loop.scope.steps) == 1


def test_the_report_page_shows_it():
    loop, _ = run(fact_lm())
    page = html_page(loop.scope.steps)
    assert "rule-answer" not in page, "nothing of it is in a tree of calls"
    assert all(f"{score:.3g}" in page for score in (loop.state.best_score, 6))


def test_its_steps_reach_mlflow(mlflow):  # noqa: F811
    loop, _ = run(fact_lm(), tracking=TrackingOptions(use_mlflow=True))
    (tracked,) = runs_of(mlflow)
    best = series(mlflow, tracked.info.run_id, "combee/score/best")
    assert [value for _, value in best] == [step.best_score for step in loop.scope.steps]
    assert mlflow.active_run() is None


def test_a_learner_says_what_it_cannot_load(tmp_path):
    run(fact_lm(), log_dir=tmp_path)
    file = tmp_path / "facts.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"current": [', '"current": 3, "x": ['), encoding="utf-8")
    with pytest.raises(ValueError, match="no state of this run, or it is damaged"):
        run(fact_lm(), log_dir=tmp_path)
