"""Whole runs in which reflection fails, GEPA's merge fails, nothing gets better, or records are long.

Other faults: `test_faults_provider.py` (rate limits, outages, keys), `test_faults_stalls.py` (what never returns,
Ctrl-C), `test_faults_killed.py` and `test_resume.py` (SIGKILL), `test_faults_state.py` (files, hostile text, secrets).
`docs/reliability.md` lists what is promised and the tests that show it.
"""

import ast
import itertools
import random
import re
from pathlib import Path

import dspy
import pytest
from dspy.utils.exceptions import AdapterParseError
from gepa.strategies.acceptance import ImprovementOrEqualAcceptance
from hypothesis import example, given

from dspy_combee import ReflectionError
from dspy_combee.calls.lm_calls import StrictJSONAdapter, UnusableReplyError
from dspy_combee.records.text import estimate_tokens
from dspy_combee.reduce.tree import TreeAggregator
from dspy_combee.runs.scope import RunScope
from dspy_combee.testing import Reply

from .lessons import (
    Chain,
    examples,
    instruction,
    is_level_1,
    is_reflection,
    learn,
    learning_lm,
    make,
    metric,
    rules_in,
    write_down,
)
from .test_calls import any_reply
from .test_drop_in import AlwaysTheSeed
from .test_resume import Counting

# Reflection fails ----------------------------------------------------------------------------------------------

ALL_FAIL = {
    "raises": (dspy.lm15.ServerError("overloaded"), "overloaded"),
    "empty": ("", "empty"),
    "prose": ("I would rather not.", "no JSON object"),
    "null": ("null", "no JSON object"),
    "a list": ('["Rules."]', "no JSON object"),
    "a blank field": ('{"new_instruction": " "}', "blank"),
    "a null field": ('{"new_instruction": null}', "no text but None"),
    "half an object": ('{"new_instruction": "Rules: ru', "not whole"),
    "an unclosed fence": ('```json\n{"new_instruction": "Rules."}', "code fence"),
    "cut off": (Reply('{"new_instruction": "Rules."}', finish_reason="length"), "cut off"),
    "an open think tag": ('<think>{"new_instruction": "Rules."}', "think tag"),
    "reasoning alone": (Reply("", reasoning="Hm."), "empty"),
}


@pytest.mark.parametrize(("reply", "cause"), ALL_FAIL.values(), ids=ALL_FAIL)
def test_three_steps_of_failing_reflection_end_the_run_with_the_cause_and_what_was_learned(reply, cause, tmp_path):
    """The first step goes well; what it learned is in the error and on disk, and a run with a better LM goes on."""
    options = {"log_dir": str(tmp_path), "n_train": 24, "max_metric_calls": 120}
    lm = learning_lm((is_reflection, [write_down] * 3), reflect=reply)
    with pytest.raises(ReflectionError, match="3 steps in a row") as caught:
        learn(lm, **options)
    assert cause in str(caught.value)
    best = instruction(caught.value.best_program)
    assert len(rules_in(best)) == 6

    resumed = learn(learning_lm(), **options)
    assert [instruction(candidate) for candidate in resumed.detailed_results.candidates][1] == best
    # The third of the failed steps, the one under way, is made again.
    assert [cause in step.reason for step in resumed.detailed_results.steps[:4]] == [False, True, True, False]
    assert len(rules_in(instruction(resumed))) > 6


def test_a_level_1_call_that_always_fails_is_made_twice_and_the_step_goes_on_without_it():
    """6 groups, 2 of which read the record that the reflection model cannot stand."""
    refused = (lambda prompt: is_level_1(prompt) and "rule-answer-7." in prompt, dspy.lm15.ServerError("reset"))
    lm = learning_lm(refused)
    sizes = {"n_train": 36, "n_val": 4, "reflection_minibatch_size": 36, "max_metric_calls": 80}
    (step,) = learn(lm, **sizes).detailed_results.steps
    assert (step.k, step.accepted) == (6, True)
    failed = [node for node in step.nodes if node.error]
    assert len(failed) == 2
    assert all("reset" in node.error for node in failed)
    assert len([call for call in lm.calls if "reset" in call.reply]) == 2 * 2
    (merge,) = [node for node in step.nodes if node.id.startswith("2.")]
    assert len(merge.inputs) == 4


@given(any_reply)
@example("{" * 100_000)
@example('{"new_instruction": ' + "[" * 100_000)
def test_the_strict_adapter_reads_any_reply_or_refuses_it(reply):
    class Rules(dspy.Signature):
        current: str = dspy.InputField()
        new_instruction: str = dspy.OutputField()
        rules: list[str] = dspy.OutputField()

    for signature in (Rules, Rules.delete("rules")):
        try:
            fields = StrictJSONAdapter().parse(signature, reply)
        except (UnusableReplyError, AdapterParseError):
            continue
        assert set(fields) == set(signature.output_fields)


# GEPA's merge fails --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_log_dir", [True, False])
def test_when_gepas_merge_fails_the_run_goes_on_without_merge(with_log_dir, tmp_path, caplog):
    """Two components, and the common ancestor scores 0: GEPA draws an ancestor by its score."""
    sizes = {"n_train": 12, "n_val": 6, "max_metric_calls": 160, "candidate_selection_strategy": AlwaysTheSeed()}
    log_dir = str(tmp_path) if with_log_dir else None
    counting = Counting()
    program = learn(learning_lm(), Chain(), metric=counting, use_merge=True, log_dir=log_dir, **sizes)
    (line,) = [record.message for record in caplog.records if "merge failed" in record.message]
    assert "Total of weights must be greater than zero" in line
    assert counting.calls == program.detailed_results.total_metric_calls, "nothing is run again"

    whole = learn(learning_lm(), Chain(), use_merge=False, **sizes)
    for name in ("first", "second"):
        assert instruction(program, name) == instruction(whole, name)
    assert program.detailed_results.spent == whole.detailed_results.spent
    assert program.detailed_results.log_dir == log_dir


def test_another_value_error_is_no_failed_merge():
    class Broken(ImprovementOrEqualAcceptance):
        def should_accept(self, proposal, state):
            raise ValueError("not the merge")

    with pytest.raises(ValueError, match="not the merge"):
        learn(learning_lm(), Chain(), use_merge=True, gepa_kwargs={"acceptance_criterion": Broken()})


# No progress ---------------------------------------------------------------------------------------------------

BUDGETS = [
    {"max_metric_calls": 50},
    {"max_full_evals": 3},
    {"auto": "light"},
    {"max_metric_calls": None, "num_epochs": 2},
]
IDS = ["max_metric_calls", "max_full_evals", "auto", "num_epochs"]


def perfect(gold, pred, trace=None, pred_name=None, pred_trace=None):
    return 1.0


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("budget", BUDGETS, ids=IDS)
def test_a_run_in_which_all_is_perfect_ends(budget, cached):
    program = learn(learning_lm(), metric=perfect, gepa_kwargs={"cache_evaluation": cached}, **budget)
    assert instruction(program) == dspy.Predict("question -> answer").signature.instructions
    assert program.detailed_results.steps


@pytest.mark.parametrize("budget", [BUDGETS[0], BUDGETS[3]], ids=[IDS[0], IDS[3]])
def test_a_proposal_that_was_refused_is_not_evaluated_again_on_the_same_examples(budget):
    """A deterministic model, and minibatches that hold the whole trainset."""
    lm = learning_lm(reflect={"new_instruction": "Nothing learned."})
    counting = Counting()
    sizes = {"n_train": 6, "n_val": 3, "reflection_minibatch_size": 6}
    results = learn(lm, metric=counting, **sizes, **budget).detailed_results
    first, *others = [step for step in results.steps if step.n == 6]  # The budget may make the last step smaller.
    assert len(first.scores_after) == 6
    assert others
    assert all(step.reason.startswith("the same proposal again") and not step.scores_after for step in others)
    assert results.repeated_proposals == len(others)
    assert results.total_metric_calls == counting.calls


def test_random_replies_and_scores_do_not_stop_a_run(caplog):
    """Anything may come from the metric and from the reflection model, and the run ends as its budget says."""
    rng = random.Random(7)
    odd = [None, float("nan"), float("inf"), -3, 7, True, "good", {"score": 0.5}, {"feedback": ""}, 0.0, 1.0, [1]]
    replies = [reply for reply, _ in ALL_FAIL.values()]

    def any_metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
        if rng.random() < 0.1:
            raise RuntimeError("no score today")
        return rng.choice(odd)

    lm = learning_lm(reflect=lambda prompt: rng.choice([*replies, write_down, write_down]))
    with dspy.context(lm=lm):
        optimizer = make(lm, metric=any_metric, max_metric_calls=300, num_threads=2)
        try:
            program = optimizer.compile(dspy.Predict("question -> answer"), examples(20), valset=examples(5))
        except ReflectionError as error:
            program = error.best_program
    assert isinstance(program, dspy.Predict)
    warnings = [record.message for record in caplog.records if "(Said once.)" in record.message]
    assert len(warnings) == len(set(warnings)) <= 6


# Long records --------------------------------------------------------------------------------------------------

CONTEXT = 100_000


@pytest.mark.parametrize(("tokens", "n"), [(25_000, 13), (300_000, 4)])
def test_no_reflection_call_is_over_the_context_that_was_given(tokens, n):
    """13 records of 25,000 tokens; and records of which a single one is too long, which lose their middle."""

    def judge(gold, pred, trace=None, pred_name=None, pred_trace=None):
        words = f"start-{gold.number} " + "word " * (4 * tokens // 5) + f" end-{gold.number} rule-answer-{gold.number}"
        return dspy.Prediction(score=float(pred.answer == "right"), feedback=words)

    def reflect(prompt):
        return {"new_instruction": "Rules: " + " ".join(sorted(rules_in(prompt.question)))}

    lm = learning_lm(reflect=reflect)
    sizes = {"n_train": n, "n_val": 2, "reflection_minibatch_size": n, "max_metric_calls": 4 + 2 * n}
    aggregator = TreeAggregator(max_context_tokens=CONTEXT)
    program = learn(lm, metric=judge, aggregator=aggregator, **sizes)
    prompts = [call.prompt for call in lm.calls if is_level_1(call.prompt)]
    fixed = 2_000  # What the call says beside its records.
    assert max(estimate_tokens(prompt) for prompt in prompts) <= CONTEXT + fixed
    assert len(rules_in(instruction(program))) == n, "every record was read"
    cut = [prompt for prompt in prompts if "characters cut" in prompt]
    if tokens < CONTEXT:
        assert not cut
        assert any(len(rules_in(prompt.question)) > 1 for prompt in prompts)
    else:
        assert len(cut) == len(prompts)
        assert all(re.search(r"start-\d+ word .*\[\.\.\. [\d,]+ characters cut \.\.\.\].* end-\d+", p) for p in prompts)


# Long runs -----------------------------------------------------------------------------------------------------


def test_dspys_trace_and_histories_do_not_fill_with_the_calls_of_a_run():
    """Each entry holds the records that a call was shown."""
    count, trace = itertools.count(), []
    lm = learning_lm(reflect=lambda prompt: {"new_instruction": f"Attempt {next(count)}."})
    judge = dspy.Predict("question -> verdict")

    def judged(gold, pred, trace=None, pred_name=None, pred_trace=None):
        judge(question=f"question {gold.number}")
        return metric(gold, pred, trace, pred_name, pred_trace)

    with dspy.context(trace=trace, disable_history=True):
        learn(lm, metric=judged, n_train=40, n_val=2, max_metric_calls=400, reflection_minibatch_size=4)
    assert trace == []
    reflections = [call for call in lm.calls if is_reflection(call.prompt)]
    assert len(lm.history) <= 100 < len(reflections)


@pytest.mark.parametrize(("with_log_dir", "track_stats"), [(True, True), (True, False), (False, True), (False, False)])
def test_steps_are_kept_in_memory_only_where_they_are_wanted_and_not_on_disk(
    with_log_dir, track_stats, tmp_path, monkeypatch
):
    scopes, told = [], []

    class Seen(RunScope):
        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            scopes.append(self)

    monkeypatch.setattr("dspy_combee.optimizer.RunScope", Seen)
    log_dir = str(tmp_path) if with_log_dir else None
    program = learn(learning_lm(), log_dir=log_dir, track_stats=track_stats, step_callbacks=[told.append])
    (scope,) = scopes
    assert len(told) > 1
    assert len(scope._steps) == (len(told) if track_stats and not with_log_dir else 1)
    if track_stats:
        assert [step.to_dict() for step in program.detailed_results.steps] == [step.to_dict() for step in told]


# Documentation -------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent


def test_every_test_that_the_documentation_names_exists():
    named = re.findall(r"`(tests/\w+\.py)::(?:(\w+)::)?(\w+)`", (ROOT / "docs" / "reliability.md").read_text("utf-8"))
    assert len(named) > 40
    for file, _, name in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        known = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in known, f"{file} has no {name}"
