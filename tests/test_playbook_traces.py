"""`PlaybookOptimizer` on collected traces."""

import json
import logging
import time

import pytest

from dspy_combee import Playbook, PowerLawBatchSize, ReflectionError, TreeAggregator, load_traces, save_traces
from dspy_combee.records.step_log import read_steps
from dspy_combee.records.text import estimate_tokens
from dspy_combee.report import html_page

from .clocks import LookClock
from .lessons import Chain, examples, numbers_in, rules_in
from .openai_server import Reply
from .playbook_lessons import (
    add,
    all_text,
    contents,
    curate,
    field,
    is_curator,
    is_reflector,
    lesson,
    make,
    playbook_lm,
    reflect,
)
from .trace_runs import (
    MILLION,
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
    options = {"minibatch_size": 4, "verbose": False, **options}
    return compile_on(make(lm, **options), lm, given, program, trainset, valset)


def known(program, predictor=None) -> set[int]:
    return numbers_in(" ".join(contents(program, predictor)))


def test_the_traces_take_the_place_of_map():
    lm = playbook_lm()
    program = learn(lm, traces(10))
    assert known(program) == set(range(10))
    assert [(step.n, step.k) for step in steps_of(program)] == [(4, 2), (4, 2), (2, 1)]
    result = program.detailed_results
    assert result.spent.metric_calls == 0
    assert sum(is_reflector(call.prompt) for call in lm.calls) == 10
    assert all(is_reflector(c.prompt) or "operations" in c.prompt or "decisions" in c.prompt for c in lm.calls)
    names = [name for step in result.steps for name in step.minibatch_ids]
    assert sorted(names) == sorted(f"trace {i}: runs.jsonl:{i}" for i in range(10))
    assert all(step.from_traces and step.scores_before == () for step in result.steps)
    assert not any(step.unused_reflections for step in result.steps)
    (bullet,) = [item for item in Playbook.from_program(program) if "rule-answer-7" in item.content]
    assert [name for item in result.provenance(bullet.id) for name in item.fed] == ["trace 7: runs.jsonl:7"]
    json.dumps(result.to_dict(), allow_nan=False)


def test_the_reflector_is_told_that_the_attempt_was_logged():
    lm = playbook_lm()
    learn(lm, traces(1))
    (prompt,) = [call.prompt for call in lm.calls if is_reflector(call.prompt)]
    assert "one logged attempt" in prompt.system
    assert field(prompt, "attempt")["Feedback"].startswith("This trajectory got a score of 0.0.")
    assert "expected" not in prompt.question


def test_all_reflections_of_a_step_see_one_playbook_and_the_next_step_sees_more():
    lm = playbook_lm()
    learn(lm, traces(8))
    seen = [rules_in(field(call.prompt, "playbook")) for call in lm.calls if is_reflector(call.prompt)]
    assert seen[:4] == [set()] * 4
    assert len({frozenset(rules) for rules in seen[4:]}) == 1
    assert len(seen[4]) == 4


def test_any_iterable_passes_and_epochs(tmp_path):
    save_traces(traces(6), tmp_path / "runs.jsonl")
    reference = all_text(learn(playbook_lm(), traces(6)))
    assert all_text(learn(playbook_lm(), load_traces(tmp_path))) == reference
    assert all_text(learn(playbook_lm(), iter(traces(6)), num_threads=1)) == reference
    twice = learn(playbook_lm(), traces(6), num_epochs=2)
    assert twice.detailed_results.batch_sizes == (4, 4, 4)


def test_what_is_no_traces_is_refused():
    for given, error in (([], ValueError), ("x", TypeError), ([trace(1, predictor="other")], ValueError)):
        with pytest.raises(error):
            learn(playbook_lm(), given)
    with pytest.raises(ValueError, match="at least one example"):
        learn(playbook_lm(), None)


# Whose trace it is --------------------------------------------------------------------------------------------


def mixed_traces():
    return [
        *traces(2, field="hint", predictor="first"),
        *traces(2, start=2, predictor="second"),
        trace(4, feedback="rule-hint-4 and rule-answer-4"),
    ]


def test_each_predictor_learns_from_its_traces_and_all_from_those_of_the_program():
    lm = playbook_lm()
    program = learn(lm, mixed_traces(), Chain(), minibatch_size=5)
    assert known(program, "first") == {0, 1, 4}
    assert known(program, "second") == {2, 3, 4}
    assert sum(is_reflector(call.prompt) for call in lm.calls) == 6
    assert sum("This is a run of the whole program" in call.prompt for call in lm.calls) == 2


def test_where_all_share_a_playbook_a_trace_is_reflected_on_once():
    lm = playbook_lm()
    program = learn(lm, mixed_traces(), Chain(), minibatch_size=5, shared_playbook=True)
    assert known(program, "first") == known(program, "second") == set(range(5))
    prompts = [call.prompt for call in lm.calls if is_reflector(call.prompt)]
    assert len(prompts) == 5
    (whole,) = [prompt for prompt in prompts if "rule-hint-4" in prompt]
    assert field(whole, "instruction").startswith("first: ")
    assert "\n\nsecond: " in whole.question


def test_only_failures_are_reflected_on_where_that_is_wanted():
    given = [trace(0), trace(1, score=1.0), trace(2, score=None)]
    program = learn(playbook_lm(), given, reflect_on="failures")
    assert known(program) == {0, 2}


# What is kept -------------------------------------------------------------------------------------------------


def test_with_a_valset_only_what_is_better_is_kept(tmp_path):
    program = learn(playbook_lm(), traces(12), valset=examples(1), log_dir=tmp_path)
    steps = steps_of(program)
    assert len(steps) == 3
    (kept,) = [step for step in steps if step.accepted]
    assert "trace 0: runs.jsonl:0" in kept.minibatch_ids
    assert known(program) == {int(name.rsplit(":", 1)[1]) for name in kept.minibatch_ids}
    for step in steps:
        if step is not kept:
            assert "is no better than" in step.reason
            assert step.candidate is None
            assert step.applied == ()
            assert len(step.unused_reflections) == len(step.reflections) == 4
            assert step.bullets == (4 if step.iteration > kept.iteration else 0)
    assert program.detailed_results.best_score == 1.0
    assert program.detailed_results.best_step == kept.iteration
    assert [step.to_dict() for step in read_steps(tmp_path)] == [step.to_dict() for step in steps]
    assert "Playbook of self" in html_page(steps)


def test_without_a_valset_it_is_taken_and_the_log_says_so(caplog):
    program = learn(playbook_lm(), traces(4))
    assert "nothing checks it" in caplog.text
    assert program.detailed_results.best_score is None


def test_traces_first_then_rollouts():
    lm = playbook_lm()
    program = learn(lm, traces(6, start=100), trainset=examples(8))
    assert known(program) == {*range(100, 106), *range(8)}
    assert [step.from_traces for step in steps_of(program)] == [True] * 2 + [False] * 2
    assert [step.iteration for step in steps_of(program)] == [1, 2, 3, 4]
    assert program.detailed_results.spent.metric_calls == 8
    sizes = program.detailed_results.batch_sizes
    assert sizes == (4, 2, 4, 4)
    again = learn(playbook_lm(), traces(6, start=100), trainset=examples(8), minibatch_size=list(sizes))
    assert all_text(again) == all_text(program)
    assert html_page(steps_of(program))


def test_the_playbook_that_is_given_is_where_it_starts():
    first = learn(playbook_lm(), traces(4))
    start = first.detailed_results.playbooks["self"]
    program = learn(playbook_lm(), traces(4, start=4), playbook=start)
    assert known(program) == set(range(8))
    ids = [reflection.id for step in steps_of(program) for reflection in step.reflections]
    assert ids[0].startswith("s2.")


# Sizes --------------------------------------------------------------------------------------------------------


def test_few_traces_take_the_paper_s_size():
    program = learn(playbook_lm(), traces(40), minibatch_size="auto")
    assert program.detailed_results.batch_sizes == (30, 10)


def test_from_150_traces_on_the_controller_times_reflection():
    program = learn(playbook_lm(), traces(160), minibatch_size=PowerLawBatchSize(clock=LookClock()))
    steps = steps_of(program)
    assert [step.n for step in steps[:3]] == [5, 5, 10]
    assert steps[0].profiling
    assert {step.seconds for step in steps} == {1.0}
    assert program.detailed_results.batch_size_fit.alpha == pytest.approx(1.0)
    assert known(program) == set(range(160))


def test_sixty_traces_of_200_steps_fit_32000_tokens():
    lm = playbook_lm()
    aggregator = TreeAggregator(max_context_tokens=32_000)
    program = learn(lm, [long_trace(i) for i in range(60)], minibatch_size="auto", aggregator=aggregator, num_threads=2)
    assert known(program) == set(range(60))
    sizes = [estimate_tokens(call.prompt) for call in lm.calls if is_reflector(call.prompt)]
    assert len(sizes) == 60
    assert 28_000 < max(sizes) < 32_000 * 1.1


# Errors, time, going on ---------------------------------------------------------------------------------------


def test_three_failing_steps_end_the_run():
    count = [0]

    def breaks(prompt):
        count[0] += 1
        return reflect(prompt) if count[0] <= 4 else "nothing of use"

    with pytest.raises(ReflectionError, match=r"3 steps in a row.*all 4 reflection calls failed") as caught:
        learn(playbook_lm(reflector=breaks), traces(40), num_threads=1)
    assert len(contents(caught.value.best_program)) == 4


def test_a_reflection_that_takes_too_long_has_failed():
    def slow(prompt):
        if "question 1" in prompt.question:
            time.sleep(1.5)
        return reflect(prompt)

    program = learn(playbook_lm(reflector=slow), traces(4), reflection_timeout=0.5)
    assert known(program) == {0, 2, 3}
    assert "took longer than 0.5 seconds" in steps_of(program)[0].reason


def test_a_run_that_stopped_goes_on_as_if_unbroken(tmp_path):
    options = {"trainset": examples(8), "valset": examples(3)}
    whole = learn(playbook_lm(), traces(10, start=1), log_dir=tmp_path / "whole", **options)
    for iteration in range(1, 6):
        folder = tmp_path / str(iteration)
        with pytest.raises(Stop):
            learn(playbook_lm(), traces(10, start=1), log_dir=folder, step_callbacks=[stop_at(iteration)], **options)
        lm = playbook_lm()
        program = learn(lm, traces(10, start=1), log_dir=folder, **options)
        assert all_text(program) == all_text(whole)
        assert program.detailed_results.spent == whole.detailed_results.spent
        assert [s.minibatch_ids for s in steps_of(program)] == [s.minibatch_ids for s in steps_of(whole)]
        assert iteration != 5 or lm.calls == []
    with pytest.raises(ValueError, match="another run, which differs in \\['traces'\\]"):
        learn(playbook_lm(), traces(9), log_dir=folder, **options)
    with pytest.raises(ValueError, match="another run, which differs in \\['traces'\\]"):
        learn(playbook_lm(), None, log_dir=folder, **options)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize(("dollars", "steps", "bullets"), [(0.5, 1, 0), (0.8, 1, 4), (1.4, 2, 4), (9.0, 3, 12)])
def test_the_run_ends_when_the_dollars_are_spent(dollars, steps, bullets, openai_server, caplog):
    def answers(request):
        text = request["messages"][-1]["content"]
        rules = sorted(set(rules_in(text.split("## playbook ##")[0] + text.split("## attempt ##")[-1])))
        if "`bullet_tags`" in text or "bullet_tags" in str(request.get("response_format", "")):
            return Reply(json.dumps(lesson(" ".join(rules))), usage=MILLION)
        if "operations" in text:
            return Reply(json.dumps({"operations": [add(f"State {rule}.") for rule in rules_in(text)]}), usage=MILLION)
        return Reply(json.dumps({"decisions": []}), usage=MILLION)

    lm = priced_lm(openai_server, answers)  # Four reflections and two curators for each step.
    with caplog.at_level(logging.INFO, "dspy_combee"):
        program = learn(lm, traces(12), max_reflection_cost=dollars)
    assert len(steps_of(program)) == steps
    assert len(known(program)) == bullets
    assert (f"max_reflection_cost=${dollars:g} is spent" in caplog.text) == (dollars < 9)


# Other people's text ------------------------------------------------------------------------------------------


def test_hostile_text_is_data(tmp_path, monkeypatch):
    def repeat(prompt):
        return lesson(json.dumps(field(prompt, "attempt"), ensure_ascii=False))

    lm = playbook_lm(reflector=repeat, curator=curate)
    with hostile_traces(tmp_path, monkeypatch) as given:
        program = learn(lm, given, minibatch_size=9)
    assert known(program) == set(range(9))
    assert sum(is_curator(call.prompt) for call in lm.calls) == 3
    check_hostile_run(lm, steps_of(program))
