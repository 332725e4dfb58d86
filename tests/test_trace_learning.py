"""`CombeeOptimizer` on collected traces: what the traces replace, and what stays the same."""

import json
import logging
import re
import time
import tracemalloc

import dspy
import pytest
from dspy.clients import base_lm

from dspy_combee import (
    CombeeResult,
    PowerLawBatchSize,
    ReflectionError,
    Spent,
    TreeAggregator,
    Usage,
    load_traces,
    save_traces,
)
from dspy_combee.learners.learner import CONTEXT_TOKENS, context_tokens, record_tokens
from dspy_combee.records.text import estimate_tokens
from dspy_combee.report import html_page
from dspy_combee.runs.state import LoopState, StateFile
from dspy_combee.testing import SimulatedLM

from .clocks import LookClock
from .lessons import (
    Chain,
    examples,
    instruction,
    is_level_1,
    is_merge,
    is_reflection,
    learning_lm,
    make,
    metric,
    numbers_in,
    rules_in,
    write_down,
)
from .openai_server import Reply
from .trace_runs import (
    MILLION,
    PROGRAM,
    Stop,
    check_hostile_run,
    compile_on,
    hostile_traces,
    priced_lm,
    steps_of,
    stop_at,
)
from .trace_samples import long_trace, trace, traces


def learn(lm, given, program=None, trainset=(), valset=None, **options):
    """Compile on traces; n = 4 where nothing else is said."""
    return compile_on(make(lm, **{"reflection_minibatch_size": 4, **options}), lm, given, program, trainset, valset)


def positions(step) -> list[int]:
    return [int(re.match(r"trace (\d+)", name)[1]) for name in step.minibatch_ids]


# What the traces replace --------------------------------------------------------------------------------------


def test_the_traces_take_the_place_of_map():
    lm = learning_lm()
    student = dspy.Predict(PROGRAM)
    program = learn(lm, traces(10), student, valset=examples(6))
    assert numbers_in(instruction(program)) == set(range(10))
    assert instruction(student) == instruction(dspy.Predict(PROGRAM))
    result = program.detailed_results
    assert isinstance(result, CombeeResult)
    assert [(step.n, step.k, step.accepted) for step in result.steps] == [(4, 2, True), (4, 2, True), (2, 1, True)]
    # Each trace once, each minibatch named; nothing is run but the validation.
    assert sorted(position for step in result.steps for position in positions(step)) == list(range(10))
    assert "trace 3: runs.jsonl:3" in {name for step in result.steps for name in step.minibatch_ids}
    calls = len([call for call in lm.calls if not is_reflection(call.prompt)])
    assert calls == result.total_metric_calls == result.spent.metric_calls_in("validation") == 4 * 6
    assert result.spent.usage_in("reflection").calls == 3 + 3 + 1
    assert (result.best_idx, result.batch_sizes, result.num_full_val_evals) == (0, (4, 4, 2), 4)
    assert result.val_aggregate_scores == [1.0]
    json.dumps(result.to_dict(), allow_nan=False)


def test_shuffle_and_reduce_are_those_of_rollouts():
    lm = learning_lm()
    program = learn(lm, traces(9), reflection_minibatch_size=9)
    (step,) = steps_of(program)
    assert (step.n, step.k, step.duplication_factor) == (9, 3, 2)
    groups = [call.prompt for call in lm.calls if is_level_1(call.prompt)]
    assert sorted(len(numbers_in(prompt.question)) for prompt in groups) == [6, 6, 6]
    assert sum(is_merge(call.prompt) for call in lm.calls) == 1
    assert step.reductions[0].sources == tuple(range(9))
    assert step.from_traces
    assert step.scores_before == step.scores_after == ()


def test_all_calls_of_a_step_see_the_same_candidate():
    lm = learning_lm()
    learn(lm, traces(32), reflection_minibatch_size=16)
    first, second = ([c.prompt for c in lm.calls if is_level_1(c.prompt)][i : i + 4] for i in (0, 4))
    starts = [
        {re.search(r"## current_instruction ## \]\]\n(.*?)\n\n\[\[", p.question, re.DOTALL)[1] for p in prompts}
        for prompts in (first, second)
    ]
    assert [len(start) for start in starts] == [1, 1]
    assert starts[0] != starts[1]


def test_one_pass_by_default_and_num_epochs_passes_if_given():
    one = learn(learning_lm(), traces(10))
    assert sum(step.n for step in steps_of(one)) == 10
    two = learn(learning_lm(), traces(10), num_epochs=2, max_metric_calls=None)
    drawn = [position for step in steps_of(two) for position in positions(step)]
    assert sorted(drawn) == sorted([*range(10), *range(10)])
    assert sorted(drawn[:10]) == list(range(10))
    assert drawn[:10] != drawn[10:]


@pytest.mark.parametrize("num_threads", [1, 8])
def test_the_same_seed_gives_the_same_program(num_threads):
    reference = learn(learning_lm(), traces(30), seed=3)
    again = learn(learning_lm(), traces(30), seed=3, num_threads=num_threads)
    assert instruction(again) == instruction(reference)
    assert [step.minibatch_ids for step in steps_of(again)] == [step.minibatch_ids for step in steps_of(reference)]
    other = learn(learning_lm(), traces(30), seed=4)
    assert [step.minibatch_ids for step in steps_of(other)] != [step.minibatch_ids for step in steps_of(reference)]


def test_any_iterable_of_traces_will_do(tmp_path):
    given = traces(6)
    save_traces(given, tmp_path / "runs.jsonl")
    reference = instruction(learn(learning_lm(), given))
    for form in (tuple(given), (item for item in given), load_traces(tmp_path)):
        assert instruction(learn(learning_lm(), form)) == reference


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], ValueError, "at least one trace"),
        ("runs.jsonl", TypeError, r"load_traces\('runs.jsonl'\)"),
        (5, TypeError, "got int"),
        (trace(1), TypeError, "got Trace"),
        ({"a": trace(1)}, TypeError, "got dict"),
        ([trace(1), {"inputs": {}}], TypeError, r"traces\[1\] must be a Trace, got dict"),
        ([trace(1, predictor="other")], ValueError, r"trace 0: runs.jsonl:1 names the predictor 'other'.*\['self'\]"),
    ],
)
def test_what_is_no_traces_is_refused_before_anything_is_spent(given, error, message):
    lm = learning_lm()
    with pytest.raises(error, match=message):
        learn(lm, given)
    assert lm.calls == []


def test_without_traces_a_trainset_is_still_needed():
    with pytest.raises(AssertionError, match="Trainset must be provided"):
        learn(learning_lm(), None)


# Whose trace it is --------------------------------------------------------------------------------------------


def test_a_trace_of_a_predictor_teaches_that_predictor_and_one_of_the_program_teaches_all():
    given = [
        *traces(2, field="hint", predictor="first"),
        *traces(2, start=2, predictor="second"),
        trace(4, field="hint", feedback="rule-hint-4 and rule-answer-4"),
    ]
    lm = learning_lm()
    program = learn(lm, given, Chain(), reflection_minibatch_size=5)
    assert rules_in(instruction(program, "first")) == {"rule-hint-0", "rule-hint-1", "rule-hint-4", "rule-answer-4"}
    assert rules_in(instruction(program, "second")) == {
        *("rule-answer-2", "rule-answer-3"),
        *("rule-hint-4", "rule-answer-4"),
    }
    (step,) = steps_of(program)
    assert [made.component for made in step.reductions] == ["first", "second"]
    assert [made.sources for made in step.reductions] == [
        tuple(i for i, name in enumerate(step.minibatch_ids) if positions(step)[i] in wanted)
        for wanted in ({0, 1, 4}, {2, 3, 4})
    ]
    notes = [p for call in lm.calls if "This is a run of the whole program" in (p := call.prompt)]
    assert len(notes) == 2
    assert "of which second is one of 2 predictors (first)" in notes[0] + notes[1]


def test_the_one_predictor_of_a_program_needs_no_note():
    lm = learning_lm()
    learn(lm, traces(4))
    assert not any("whole program" in call.prompt for call in lm.calls)


# What is kept -------------------------------------------------------------------------------------------------


def test_with_a_valset_only_what_is_better_is_kept():
    # Only question 0 is validated: the rules of the other traces bring nothing, but for those beside it.
    program = learn(learning_lm(), traces(12), valset=examples(1))
    steps, result = steps_of(program), program.detailed_results
    assert sum(step.accepted for step in steps) == 1
    best = 0.0
    for step in steps:
        assert step.accepted == (step.validation_score > best)
        assert step.accepted or f"no better than {best:.4g}" in step.reason
        best = max(best, step.validation_score)
        assert step.best_score == best
    assert result.val_aggregate_scores == [best]
    kept = {position for step in steps if step.accepted for position in positions(step)}
    assert numbers_in(instruction(program)) == kept


def test_what_makes_it_worse_is_not_kept(caplog):
    def spoil(prompt):
        return {"new_instruction": "Say nothing."}

    with caplog.at_level(logging.INFO, "dspy_combee"):
        program = learn(learning_lm(reflect=spoil), traces(8), valset=examples(4))
    assert instruction(program) == instruction(dspy.Predict(PROGRAM))
    assert program.detailed_results.provenance("self") == []
    assert "validation score 0 is no better than 0" in caplog.text


def test_without_a_valset_it_is_taken_and_the_log_says_so(caplog):
    with caplog.at_level(logging.INFO, "dspy_combee"):
        program = learn(learning_lm(), traces(8))
    assert any(r.levelname == "WARNING" and "nothing checks it" in r.message for r in caplog.records)
    assert all(step.accepted and "taken unchecked" in step.reason for step in steps_of(program))
    result = program.detailed_results
    assert (result.val_aggregate_scores, result.best_idx, result.total_metric_calls) == ([], 0, 0)
    assert instruction(result.best_candidate) == instruction(program)
    assert all(step.best_score is None for step in result.steps)
    json.dumps(result.to_dict(), allow_nan=False)
    assert html_page(result.steps)


def test_provenance_goes_back_to_the_traces():
    program = learn(learning_lm(), traces(8))
    last, first = program.detailed_results.provenance("self")
    assert (last.iteration, first.iteration) == (2, 1)
    assert sorted([*last.fed, *first.fed]) == sorted(f"trace {i}: runs.jsonl:{i}" for i in range(8))
    assert last.lost == first.lost == ()


def test_a_proposal_that_changes_nothing_is_not_validated():
    def repeat(prompt):
        return {"new_instruction": instruction(dspy.Predict(PROGRAM))}

    program = learn(learning_lm(reflect=repeat), traces(4), valset=examples(3))
    (step,) = steps_of(program)
    assert (step.accepted, step.reason) == (False, "the proposal changes nothing")
    assert program.detailed_results.total_metric_calls == 3


# How many traces a step takes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["auto", None, PowerLawBatchSize()])
@pytest.mark.parametrize(("count", "sizes"), [(20, (20,)), (75, (30, 30, 15))])
def test_few_traces_take_the_paper_s_size(size, count, sizes):
    program = learn(learning_lm(), traces(count), reflection_minibatch_size=size)
    assert program.detailed_results.batch_sizes == sizes
    assert "below 150 traces no sizes are timed" in steps_of(program)[0].size_reason


def test_from_150_traces_on_the_controller_times_reflection():
    size = PowerLawBatchSize(clock=LookClock())
    program = learn(learning_lm(), traces(300), reflection_minibatch_size=size)
    steps = steps_of(program)
    assert [step.n for step in steps[:3]] == [5, 5, 10]
    assert steps[0].profiling
    assert not steps[-1].profiling
    assert {step.seconds for step in steps} == {1.0}  # To reflect and reduce; there is nothing else.
    fit = program.detailed_results.batch_size_fit
    assert fit.alpha == pytest.approx(1.0)
    assert max(step.n for step in steps) > 20
    assert sum(step.n for step in steps) == 300
    replay = learn(learning_lm(), traces(300), reflection_minibatch_size=list(program.detailed_results.batch_sizes))
    assert instruction(replay) == instruction(program)


def test_d_of_n_is_the_time_without_validation():
    size = PowerLawBatchSize(clock=LookClock(), max_minibatch_size=10)
    program = learn(learning_lm(), traces(20), valset=examples(5), reflection_minibatch_size=size)
    assert {(step.n, step.seconds, step.validation_seconds) for step in steps_of(program)} == {(10, 1.0, 1.0)}


def test_a_long_list_replays_and_a_short_one_repeats_its_last_size():
    program = learn(learning_lm(), traces(12), reflection_minibatch_size=[2, 5])
    assert program.detailed_results.batch_sizes == (2, 5, 5)


# The budget ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "steps"), [(6, 0), (11, 0), (12, 1), (17, 1), (18, 2), (100, 5)])
def test_the_metric_calls_are_never_exceeded(budget, steps, caplog):
    program = learn(learning_lm(), traces(20), valset=examples(6), max_metric_calls=budget)
    result = program.detailed_results
    assert len(result.steps) == steps
    assert result.total_metric_calls <= budget
    assert ("do not cover another validation pass (6)" in caplog.text) == (steps < 5)


@pytest.mark.parametrize("budget", [{"auto": "light"}, {"max_full_evals": 4}])
def test_the_other_budgets_hold_too(budget):
    program = learn(learning_lm(), traces(8), valset=examples(5), **budget)
    assert numbers_in(instruction(program))


# Traces first, then rollouts ----------------------------------------------------------------------------------


def test_what_the_traces_teach_is_where_the_search_starts():
    lm = learning_lm()
    program = learn(lm, traces(6), trainset=examples(12), valset=examples(12), max_metric_calls=150)
    result = program.detailed_results
    read = [step for step in result.steps if step.from_traces]
    searched = [step for step in result.steps if not step.from_traces]
    assert [step.from_traces for step in result.steps] == [True] * len(read) + [False] * len(searched)
    assert len(read) == 2
    assert numbers_in(instruction(result.candidates[0])) == set(range(6))
    assert numbers_in(instruction(program)) > set(range(6))
    assert [step.iteration for step in result.steps] == sorted({step.iteration for step in result.steps})
    calls = [step.metric_calls for step in result.steps]
    assert calls == sorted(calls)
    assert result.spent.metric_calls == len([c for c in lm.calls if not is_reflection(c.prompt)]) <= 150
    assert result.batch_sizes == tuple(step.n for step in result.steps)
    # From the best candidate back, through the search, to the traces.
    kinds = [str(item.fed[0]).startswith("trace") for item in result.provenance("self")]
    assert kinds == sorted(kinds)
    assert set(kinds) == {False, True}
    assert html_page(result.steps)
    json.dumps(result.to_dict(), allow_nan=False)


def test_the_traces_take_at_most_half_of_the_metric_calls():
    program = learn(learning_lm(), traces(100), trainset=examples(12), valset=examples(10), max_metric_calls=100)
    result = program.detailed_results
    assert [s.metric_calls for s in result.steps if s.from_traces][-1] == 50
    assert result.spent.metric_calls <= 100
    assert not result.steps[-1].from_traces


def test_mixed_without_a_valset_validates_on_the_trainset_in_the_search_alone(caplog):
    program = learn(learning_lm(), traces(6), trainset=examples(12), num_epochs=1, max_metric_calls=None)
    assert "nothing checks it" in caplog.text
    assert "No valset provided; using the trainset" in caplog.text
    read = [step for step in steps_of(program) if step.from_traces]
    assert all(step.metric_calls == 0 for step in read)
    assert sum(step.n for step in steps_of(program) if not step.from_traces) == 12


def test_the_sizes_of_a_mixed_run_replay_it():
    options = {"trainset": examples(12), "valset": examples(8), "max_metric_calls": 120}
    first = learn(learning_lm(), traces(10), reflection_minibatch_size=[3, 7, 5, 2], **options)
    sizes = first.detailed_results.batch_sizes
    assert sizes[:4] == (3, 7, 5, 2)
    again = learn(learning_lm(), traces(10), reflection_minibatch_size=list(sizes), **options)
    assert again.detailed_results.batch_sizes == sizes
    assert instruction(again) == instruction(first)


# Errors, money, time ------------------------------------------------------------------------------------------


def broken(prompt):
    return "no instruction"


@pytest.mark.parametrize("first_good", [0, 1])
def test_three_failing_steps_end_the_run(first_good):
    made = []

    def reflect(prompt):
        made.append(prompt)
        return write_down(prompt) if len(made) <= 3 * first_good else broken(prompt)

    seen = []
    with pytest.raises(ReflectionError, match="3 steps in a row") as caught:
        learn(learning_lm(reflect=reflect), traces(40), step_callbacks=[seen.append], num_threads=1)
    assert len(seen) == 3 + first_good
    assert all(not step.accepted and "reflection calls of level 1 failed" in step.reason for step in seen[-3:])
    assert len(numbers_in(instruction(caught.value.best_program))) == 4 * first_good


def test_a_component_that_fails_leaves_the_other_its_proposal():
    def reflect(prompt):
        return broken(prompt) if "rule-hint" in prompt.question else write_down(prompt)

    given = [*traces(4, field="hint", predictor="first"), *traces(4, predictor="second")]
    program = learn(learning_lm(reflect=reflect), given, Chain(), reflection_minibatch_size=8)
    (step,) = steps_of(program)
    assert step.accepted
    assert "first: " in step.reason
    assert numbers_in(instruction(program, "second")) == set(range(4))
    assert not rules_in(instruction(program, "first"))


def test_a_reflection_call_that_takes_too_long_has_failed():
    def slow(prompt):
        if "question 0" in prompt.question:
            time.sleep(1.5)
        return write_down(prompt)

    program = learn(learning_lm(reflect=slow), traces(16), reflection_minibatch_size=16, reflection_timeout=0.5)
    (step,) = steps_of(program)
    late = [node for node in step.nodes if node.error]
    assert len(late) == 2
    assert all("took longer than 0.5 seconds" in node.error for node in late)
    assert step.accepted


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize(("dollars", "steps"), [(0.16, 1), (0.44, 1), (0.46, 2), (0.61, 2), (9.0, 3)])
def test_the_run_ends_when_the_dollars_are_spent(dollars, steps, openai_server, caplog):
    def reflects(request):
        text = "\n".join(message["content"] for message in request["messages"])
        return Reply(json.dumps({"new_instruction": " ".join(sorted(rules_in(text)))}), usage=MILLION)

    lm = priced_lm(openai_server, reflects)  # Two groups and a merge for each step.
    with caplog.at_level(logging.INFO, "dspy_combee"):
        program = learn(lm, traces(12), max_reflection_cost=dollars)
    spent = program.detailed_results.spent.usage_in("reflection").cost
    assert spent < dollars + 2 * 0.15 + 1e-9
    recorded = sum(node.usage.cost for step in steps_of(program) for node in step.nodes)
    assert recorded == pytest.approx(spent), "what was paid for a step that was cut short is there"
    assert len(steps_of(program)) == steps
    assert (f"max_reflection_cost=${dollars:g} is spent" in caplog.text) == (dollars < 9)


def test_a_step_callback_that_raises_does_not_end_the_run(caplog):
    program = learn(learning_lm(), traces(8), step_callbacks=[lambda step: 1 / 0])
    assert len(steps_of(program)) == 2
    assert "A step callback raised an error" in caplog.text


# Going on -----------------------------------------------------------------------------------------------------


MIXED = {"trainset": examples(12), "valset": examples(8), "max_metric_calls": 160}


@pytest.mark.parametrize("iteration", [1, 3, 4, 6])
def test_a_run_that_stopped_goes_on_as_if_unbroken(iteration, tmp_path):
    whole = learn(learning_lm(), traces(10), log_dir=str(tmp_path / "whole"), **MIXED)
    folder = str(tmp_path / "broken")
    first = learning_lm()
    with pytest.raises(Stop) as caught:
        learn(first, traces(10), log_dir=folder, step_callbacks=[stop_at(iteration)], **MIXED)
    assert caught.value.best_program is not None
    lm = learning_lm()
    program = learn(lm, traces(10), log_dir=folder, **MIXED)
    assert instruction(program) == instruction(whole)
    assert [s.to_dict()["minibatch_ids"] for s in steps_of(program)] == [
        s.to_dict()["minibatch_ids"] for s in steps_of(whole)
    ]
    assert program.detailed_results.batch_sizes == whole.detailed_results.batch_sizes
    assert [s.iteration for s in steps_of(program)] == [s.iteration for s in steps_of(whole)]
    reflections = program.detailed_results.spent.usage_in("reflection").calls
    assert reflections == whole.detailed_results.spent.usage_in("reflection").calls
    made = sum(is_reflection(call.prompt) for call in lm.calls)
    assert made < reflections or iteration == 1


def test_a_finished_run_on_traces_costs_nothing_more(tmp_path):
    first = learn(learning_lm(), traces(8), valset=examples(4), log_dir=str(tmp_path))
    lm = learning_lm()
    again = learn(lm, traces(8), valset=examples(4), log_dir=str(tmp_path))
    assert lm.calls == []
    assert instruction(again) == instruction(first)
    assert again.detailed_results.to_dict()["steps"] == first.detailed_results.to_dict()["steps"]
    assert {file.name for file in tmp_path.iterdir()} == {"trace_state.json", "steps.jsonl", ".lock"}


def test_states_of_other_runs_are_refused(tmp_path):
    folder = str(tmp_path)
    learn(learning_lm(), traces(8), log_dir=folder)
    with pytest.raises(ValueError, match="another run, which differs in \\['seed', 'traces'\\]"):
        learn(learning_lm(), traces(9), log_dir=folder, seed=1)
    with pytest.raises(ValueError, match="holds the state of a run on traces"):
        learn(learning_lm(), None, trainset=examples(12), log_dir=folder)
    (tmp_path / "trace_state.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="is no state of a run on traces"):
        learn(learning_lm(), traces(8), log_dir=folder)
    learn(learning_lm(), None, trainset=examples(12), valset=examples(4), log_dir=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="the state of a run without traces"):
        learn(learning_lm(), traces(8), log_dir=str(tmp_path / "other"))


def test_a_state_comes_back_equal(tmp_path):
    sampler = {"epoch": 1, "queue": [3], "drawn": 8, "kind": "ReplayedSizes", "sizer": 2}
    texts = {"self": "中 \ud800".encode("utf-8", "replace").decode()}
    spent = Spent({"rollouts": 12}, {"rollouts": Usage(12, 0, 5, 6, None)})
    samplers = {"traces": sampler}
    state = LoopState(
        texts, 3, 2, texts, 0.75, (0.5, 1.0), 2, (4, 4, 4), samplers, spent, Usage(3, 1, 2, 2, 0.25), True
    )
    file = StateFile(tmp_path / "new" / "trace_state.json", {"seed": 0})
    assert file.read() is None
    file.write(state)
    assert file.read() == state
    assert "中" in file.path.read_text(encoding="utf-8")


# Long ones, and many ------------------------------------------------------------------------------------------


def test_sixty_traces_of_200_steps_fit_32000_tokens():
    given = [long_trace(number) for number in range(60)]
    assert estimate_tokens(given[0].steps[2].text) > 200
    lm = learning_lm()
    program = learn(
        lm, given, reflection_minibatch_size="auto", aggregator=TreeAggregator(max_context_tokens=32_000), num_threads=2
    )
    assert numbers_in(instruction(program)) == set(range(60))
    steps = steps_of(program)
    assert [(step.n, step.k) for step in steps] == [(30, 5), (30, 5)]  # No group had to be split.
    sizes = [estimate_tokens(call.prompt) for call in lm.calls]
    assert max(sizes) < 32_000 * 1.15  # DSPy's own words come on top.
    assert max(sizes) > 20_000  # The room is used.
    assert "characters) cut ...]" in max((call.prompt for call in lm.calls), key=len)


def test_without_a_limit_a_call_fits_the_paper_s_model():
    lm = learning_lm()
    learn(lm, [long_trace(number) for number in range(30)], reflection_minibatch_size=30, num_threads=2)
    assert 0.5 * CONTEXT_TOKENS < max(estimate_tokens(call.prompt) for call in lm.calls) < 1.15 * CONTEXT_TOKENS


def test_how_much_of_a_trace_is_shown():
    tree = TreeAggregator(max_context_tokens=32_000)
    assert record_tokens(tree, 2_000, 30, None, 2) == 2_500  # Groups of 12.
    assert record_tokens(tree, 2_000, 30, 1, 2) == 1_000  # A flat tree is split rather than starved.
    assert record_tokens(tree, 2_000, 2, None, 2) == 15_000
    assert record_tokens(object(), 0, 30, None, 2) == CONTEXT_TOKENS // 30
    assert context_tokens(tree, 50_000) == 100


def test_a_large_collection_is_not_held_in_memory(tmp_path):
    count, size = 300, 30_000
    lines = (trace(number, feedback=f"rule-answer-{number % 7} " + "x y " * (size // 4)) for number in range(count))
    save_traces(lines, tmp_path / "runs.jsonl")
    lm = SimulatedLM()  # It keeps no account of its calls; DSPy's own histories do, of the last 1,000 and 10,000.
    optimizer = make(lm, reflection_minibatch_size=20, num_threads=2)
    histories = [base_lm.GLOBAL_HISTORY, lm.history]
    histories += [part.history for part in vars(optimizer.proposer.base).values() if isinstance(part, dspy.Module)]

    def forget(step):
        for history in histories:
            history.clear()

    optimizer.step_callbacks = (forget,)
    given = load_traces(tmp_path)
    tracemalloc.start()
    try:
        program = optimizer.compile(dspy.Predict(PROGRAM), traces=given)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(step.n for step in steps_of(program)) == count
    assert peak < 0.8 * count * size


# Other people's text ------------------------------------------------------------------------------------------


def test_hostile_text_is_data(tmp_path, monkeypatch):
    lm = learning_lm()
    with hostile_traces(tmp_path, monkeypatch) as given:
        program = learn(lm, given, reflection_minibatch_size=9)
    assert numbers_in(instruction(program)) == set(range(9))
    (step,) = steps_of(program)
    assert not [node for node in step.nodes if node.error]
    check_hostile_run(lm, [step])
    json.dumps(program.detailed_results.to_dict(), allow_nan=False)


def test_the_metric_is_never_called_where_nothing_is_validated():
    def never(gold, pred, trace=None, pred_name=None, pred_trace=None):
        raise AssertionError

    program = learn(learning_lm(), traces(8), metric=never)
    assert numbers_in(instruction(program)) == set(range(8))
    assert metric is not never
