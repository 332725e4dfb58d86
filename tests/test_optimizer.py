"""`CombeeOptimizer.compile`: how and from where it is called, what it leaves alone, how it fails, that it repeats."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import dspy
import numpy as np
import pytest
from dspy import lm15
from gepa.strategies.proposal_sampling import PxNSampling

from dspy_combee import (
    CombeeError,
    CombeeOptimizer,
    ProviderError,
    ReflectionError,
    ThreadExecutor,
    TreeAggregator,
)
from dspy_combee.calls.executors import Backoff

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
    numbers_in,
    rules_in,
    write_down,
)


def student():
    return dspy.Predict("question -> answer")


# Our own keywords


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"reflection_minibatch_size": 0}, ValueError, "reflection_minibatch_size"),
        ({"reflection_minibatch_size": -3}, ValueError, "reflection_minibatch_size"),
        ({"reflection_minibatch_size": 2.5}, TypeError, "reflection_minibatch_size"),
        ({"reflection_minibatch_size": True}, TypeError, "reflection_minibatch_size"),
        ({"duplication_factor": 0}, ValueError, "duplication_factor"),
        ({"duplication_factor": 1.0}, TypeError, "duplication_factor"),
        ({"duplication_factor": None}, TypeError, "duplication_factor"),
        ({"num_groups": 0}, ValueError, "num_groups"),
        ({"num_groups": "3"}, TypeError, "num_groups"),
        ({"num_threads": 0}, ValueError, "num_threads"),
        ({"num_threads": 2.0}, TypeError, "num_threads"),
        ({"aggregator": "trees"}, ValueError, "tree"),
        ({"aggregator": 3}, TypeError, "Aggregator"),
        ({"executor": "processes"}, ValueError, "threads"),
        ({"executor": 3}, TypeError, "Executor"),
        ({"gepa_kwargs": {"reflection_strategy": "combee"}}, ValueError, "reflection_strategy"),
        ({"gepa_kwargs": {"sampling_strategy": "pxn"}}, TypeError, "sampling_strategy"),
        ({"gepa_kwargs": {"sampling_strategy": PxNSampling}}, TypeError, "sampling_strategy"),
    ],
    ids=str,
)
def test_a_wrong_keyword_of_ours_is_refused_at_construction(options, error, says):
    with pytest.raises(error, match=says):
        make(learning_lm(), **options)


def test_groups_and_duplication_are_what_was_asked_for():
    def step(**options):
        return learn(
            learning_lm(), reflection_minibatch_size=12, max_metric_calls=40, **options
        ).detailed_results.steps[0]

    assert (step().k, step().duplication_factor) == (3, 2)
    assert (step(num_groups=4).k, step(num_groups=4, duplication_factor=3).duplication_factor) == (4, 3)
    reads = [name for node in step(num_groups=4, duplication_factor=1).nodes[:-1] for name in node.inputs]
    assert sorted(reads) == sorted(f"r{i}" for i in range(12))


def test_an_aggregator_and_an_executor_of_the_user_are_used():
    class Counting(ThreadExecutor):
        items = 0

        def map(self, function, items, **options):
            items = list(items)
            self.items += len(items)
            return super().map(function, items, **options)

    class Noting(TreeAggregator):
        sizes = ()

        def aggregate(self, tasks, call, executor):
            self.sizes += tuple(len(task.records) for task in tasks)
            return super().aggregate(tasks, call, executor)

    executor, aggregator = Counting(3), Noting()
    lm = learning_lm(latency=0.002)
    results = learn(lm, executor=executor, aggregator=aggregator, max_metric_calls=24).detailed_results
    assert aggregator.sizes == (6,)
    assert executor.items >= results.total_metric_calls
    assert lm.peak_concurrency <= 3


# Calling compile


def test_the_trainset_goes_by_position_or_by_keyword():
    lm = learning_lm()
    with dspy.context(lm=lm):
        first = make(lm).compile(student(), examples(12), valset=examples(6))
        second = make(lm).compile(student(), trainset=examples(12), valset=examples(6))
        third = make(lm).compile(student=student(), trainset=examples(12), valset=examples(6), teacher=None)
    assert instruction(first) == instruction(second) == instruction(third)


@pytest.mark.parametrize(
    "wrong", [5, True, "examples.json", {"question": "?"}, examples(1)[0], [1, 2], ["a"]], ids=repr
)
@pytest.mark.parametrize("name", ["trainset", "valset"])
def test_what_is_no_list_of_examples_is_refused(name, wrong):
    lm = learning_lm()
    with dspy.context(lm=lm), pytest.raises(TypeError, match=rf"^{name}.* must be a .*dspy\.Example, got"):
        make(lm).compile(student(), **{"trainset": examples(4), "valset": examples(4), name: wrong})
    assert not lm.calls


def test_examples_may_come_from_an_iterator():
    lm = learning_lm()
    with dspy.context(lm=lm):
        learned = make(lm).compile(student(), iter(examples(12)), valset=iter(examples(6)))
    assert instruction(learned) == instruction(learn(learning_lm()))


def test_ints_of_numpy_are_ints(tmp_path):
    names = "reflection_minibatch_size", "num_groups", "duplication_factor", "num_threads"
    sizes = dict(zip(names, np.array([6, 3, 2, 4]), strict=True))
    step = learn(learning_lm(), log_dir=str(tmp_path), **sizes).detailed_results.steps[0]
    assert (step.n, step.k, step.duplication_factor) == (6, 3, 2)


def test_without_a_valset_the_trainset_decides_and_a_warning_says_so(caplog):
    lm = learning_lm()
    with caplog.at_level(logging.WARNING, logger="dspy_combee"), dspy.context(lm=lm):
        program = make(lm, max_metric_calls=80).compile(student(), examples(9))
    assert set(program.detailed_results.val_subscores[0]) == set(range(9))
    assert any("No valset" in record.getMessage() for record in caplog.records)


def test_compile_twice_with_one_optimizer_gives_equal_results():
    lm = learning_lm()
    optimizer = make(lm, max_metric_calls=90)
    before = dict(optimizer.get_params())
    with dspy.context(lm=lm):
        first, second = [optimizer.compile(Chain(), examples(20), valset=examples(6)) for _ in range(2)]
    assert first.detailed_results.to_dict()["candidates"] == second.detailed_results.to_dict()["candidates"]
    assert [step.minibatch_ids for step in first.detailed_results.steps] == [
        step.minibatch_ids for step in second.detailed_results.steps
    ]
    assert first.detailed_results.batch_sizes == second.detailed_results.batch_sizes
    assert optimizer.get_params() == before


def test_one_optimizer_compiles_in_two_threads_at_once():
    lm = learning_lm(latency=0.001)
    optimizer = make(lm, max_metric_calls=60)
    jobs = {
        "low": (student(), examples(12), examples(6)),
        "high": (Chain(), examples(12, start=100), examples(6, start=100)),
    }
    together = threading.Barrier(2)
    learned, failures = {}, []

    def compile_one(name):
        try:
            together.wait(timeout=30)
            program, trainset, valset = jobs[name]
            with dspy.context(lm=lm):
                learned[name] = optimizer.compile(program, trainset, valset=valset)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=compile_one, args=(name,)) for name in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures
    for name, (program, trainset, valset) in jobs.items():
        with dspy.context(lm=lm):
            alone = optimizer.compile(program, trainset, valset=valset).detailed_results
        at_once = learned[name].detailed_results
        assert at_once.to_dict()["candidates"] == alone.to_dict()["candidates"]
        assert at_once.total_metric_calls == alone.total_metric_calls
        assert len(at_once.steps) == len(alone.steps)
    assert numbers_in(instruction(learned["low"])) <= set(range(12))
    assert {number >= 100 for number in numbers_in(instruction(learned["high"], "first"))} == {True}


def test_the_lm_of_the_context_runs_the_program_and_the_reflection_lm_reflects():
    runs, reflects = learning_lm(), learning_lm()
    with dspy.context(lm=runs):
        make(reflects).compile(student(), examples(12), valset=examples(6))
    assert {is_reflection(call.prompt) for call in runs.calls} == {False}
    assert {is_reflection(call.prompt) for call in reflects.calls} == {True}


def test_inside_a_running_event_loop():
    async def compile_there():
        return learn(learning_lm(), Chain())

    inside = asyncio.run(compile_there())
    assert instruction(inside, "first") == instruction(learn(learning_lm(), Chain()), "first")


def test_inside_better_together():
    lm = learning_lm()
    program = student()
    program.set_lm(lm)

    def score(example, prediction, trace=None):
        return float(prediction.answer == "right")

    together = dspy.BetterTogether(metric=score, p=make(lm, max_metric_calls=60))
    learned = together.compile(program, trainset=examples(12), valset=examples(6), strategy="p", num_threads=1)
    assert not learned.flag_compilation_error_occurred
    assert learned.candidate_programs[0]["strategy"] == "p"
    assert learned.candidate_programs[0]["score"] > learned.candidate_programs[-1]["score"]
    assert rules_in(instruction(learned))


@pytest.mark.parametrize("tracked", [True, False])
def test_nothing_is_printed(capsys, tracked):
    learn(learning_lm(), Chain(), track_stats=tracked, use_merge=True)
    assert capsys.readouterr() == ("", "")


def test_the_progress_line_goes_to_stderr_alone(capsys):
    learn(learning_lm(), verbose=True)
    assert capsys.readouterr().out == ""


# The student


def test_the_student_stays_and_demos_and_lms_are_kept():
    own = learning_lm()
    program = Chain()
    program.first.demos = [dspy.Example(question="question 99", hint="right")]
    program.second.lm = own
    program.first.signature = program.first.signature.with_instructions("Give a hint.")
    learned = learn(learning_lm(), program, component_selector="all")
    assert instruction(program, "first") == "Give a hint."
    assert instruction(program, "second") == instruction(Chain(), "second")
    assert program.second.lm is own
    assert [dict(demo) for demo in program.first.demos] == [{"question": "question 99", "hint": "right"}]
    assert learned is not program
    assert not hasattr(program, "detailed_results")
    assert learned.first.demos == program.first.demos
    assert learned.second.lm is own
    assert rules_in(instruction(learned, "first"))
    assert own.calls


def test_a_frozen_submodule_keeps_its_instruction():
    class WithFrozen(dspy.Module):
        def __init__(self):
            super().__init__()
            self.first = Chain()
            self.first._compiled = True
            self.last = student()

        def forward(self, question):
            self.first(question=question)
            return self.last(question=question)

    learned = learn(learning_lm(), WithFrozen())
    assert instruction(learned.first, "first") == instruction(Chain(), "first")
    assert rules_in(instruction(learned, "last"))
    assert all(set(candidate) for candidate in learned.detailed_results.to_dict()["candidates"])


def test_a_program_without_predictors_raises_what_dspy_gepa_raises():
    class Empty(dspy.Module):
        def forward(self, question):
            return dspy.Prediction(answer="right")

    texts = []
    for cls in (dspy.GEPA, CombeeOptimizer):
        with pytest.raises(ValueError, match="at least one component") as caught:
            make(learning_lm(), cls).compile(Empty(), trainset=examples(4), valset=examples(4))
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


# Errors


def fails_after_the_first_step(reply):
    """A reflection model that does its work once (two groups and a merge) and then only `reply`."""
    return learning_lm((is_reflection, [write_down] * 3), reflect=reply)


def assert_learned_in_the_first_step(program):
    assert len(rules_in(instruction(program))) == 6


def test_three_failed_reflection_steps_in_a_row_end_the_run():
    lm = fails_after_the_first_step("no object")
    with pytest.raises(ReflectionError, match="3 steps in a row") as caught:
        learn(lm, n_train=40, max_metric_calls=600)
    assert "holds no JSON object" in str(caught.value)
    assert_learned_in_the_first_step(caught.value.best_program)
    # Two groups in each of the three failed steps, each tried twice, in DSPy's two ways of asking for JSON at most.
    asked = [call for call in lm.calls if is_level_1(call.prompt) and call.reply == "no object"]
    assert 12 <= len(asked) <= 24


def test_failed_steps_that_do_not_follow_each_other_are_no_reason_to_stop():
    failing = [write_down] * 3 + ["no"] * 8
    lm = learning_lm((is_reflection, failing * 3))
    results = learn(lm, n_train=60, max_metric_calls=400, reflection_minibatch_size=5).detailed_results
    assert sum("reflection calls of level 1 failed" in step.reason for step in results.steps) > 2


def test_a_skipped_step_is_no_failed_step():
    program = student()
    program.signature = program.signature.with_instructions(" ".join(f"rule-answer-{i}" for i in range(12)))
    results = learn(learning_lm(), program, max_metric_calls=80).detailed_results
    assert len(results.steps) > 3


@pytest.mark.parametrize("error", [lm15.AuthError("bad key"), lm15.BillingError("no money")], ids=["auth", "billing"])
def test_a_provider_that_refuses_the_reflection_stops_the_run_at_once(error):
    lm = fails_after_the_first_step(error)
    with pytest.raises(ProviderError) as caught:
        learn(lm, n_train=40, max_metric_calls=600)
    assert isinstance(caught.value, CombeeError)
    assert str(error).split("\n")[0] in str(caught.value)
    assert caught.value.__cause__ is not None
    assert_learned_in_the_first_step(caught.value.best_program)
    # The second step's two groups at most, and no rollout after them.
    refused = [call for call in lm.calls if type(error).__name__ in call.reply]
    assert 1 <= len(refused) <= 2
    assert len(lm.calls) == (6 + 6 + 3 + 6 + 6) + 6 + len(refused)


def test_a_provider_that_refuses_the_program_stops_the_run_at_once():
    lm = learning_lm((lambda prompt: not is_reflection(prompt) and rules_in(prompt.system), lm15.AuthError("bad key")))
    with pytest.raises(ProviderError, match="bad key") as caught:
        learn(lm, num_threads=1)
    assert instruction(caught.value.best_program) == instruction(student())
    assert sum("AuthError" in call.reply for call in lm.calls) == 1


def test_keyboard_interrupt_in_the_program_leaves_with_the_best_program():
    class Interrupted(dspy.Module):
        def __init__(self):
            super().__init__()
            self.self = student()

        def forward(self, question):
            if rules_in(self.self.signature.instructions) and question == "question 4":
                raise KeyboardInterrupt
            return self.self(question=question)

    with pytest.raises(KeyboardInterrupt) as caught:
        learn(learning_lm(), Interrupted(), n_train=6, n_val=4)
    best = caught.value.best_program
    assert isinstance(best, Interrupted)
    assert instruction(best, "self") == instruction(student())


def test_keyboard_interrupt_after_a_step_leaves_with_what_was_learned():
    stop = threading.Event()

    class Interrupt:
        def on_iteration_start(self, event):
            if event["iteration"] == 2:
                stop.set()

    def interrupted(gold, pred, trace=None, pred_name=None, pred_trace=None):
        if stop.is_set():
            raise KeyboardInterrupt
        return metric(gold, pred, trace, pred_name, pred_trace)

    with pytest.raises(KeyboardInterrupt) as caught:
        learn(learning_lm(), metric=interrupted, gepa_kwargs={"callbacks": [Interrupt()]})
    assert_learned_in_the_first_step(caught.value.best_program)


def test_whatever_is_raised_in_the_search_carries_the_best_program():
    def stopper(state):
        if state.i >= 0:
            raise LookupError("no such thing")
        return False

    with pytest.raises(LookupError, match="no such thing") as caught:
        learn(learning_lm(), gepa_kwargs={"stop_callbacks": stopper})
    assert_learned_in_the_first_step(caught.value.best_program)


def test_an_aggregator_that_raises_ends_the_run_with_its_own_error():
    class Broken(TreeAggregator):
        def aggregate(self, tasks, call, executor):
            raise LookupError("a bug")

    lm = learning_lm()
    with pytest.raises(LookupError, match="a bug") as caught:
        learn(lm, aggregator=Broken())
    assert instruction(caught.value.best_program) == instruction(student())
    assert len(lm.calls) == 6 + 6


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ([], ValueError, "one Reduction for each task, in order, got 0 for 1"),
        (None, TypeError, "a list of Reductions, one for each task, got None"),
        (["text"], TypeError, "got \\['text'\\]"),
    ],
    ids=repr,
)
def test_an_aggregator_that_gives_something_else_ends_the_run(given, error, says):
    class Wrong(TreeAggregator):
        def aggregate(self, tasks, call, executor):
            return given

    with pytest.raises(error, match=f"Wrong.aggregate must return {says}" if error is ValueError else says):
        learn(learning_lm(), aggregator=Wrong())


@pytest.mark.parametrize("given", [None, "text"])
def test_a_proposer_that_gives_no_dict_ends_the_run_at_once(given):
    def proposer(candidate, reflective_dataset, components_to_update):
        calls.append(candidate)
        return given

    calls = []
    with pytest.raises(TypeError, match=f"must return a dict .*, got {type(given).__name__} from <function"):
        learn(learning_lm(), instruction_proposer=proposer, num_threads=1)
    assert len(calls) == 1


class WithCode(dspy.Module):
    """A `dspy.Flex` whose source is read, not run."""

    def __init__(self):
        super().__init__()
        self.code = dspy.Flex("question -> answer")

    def forward(self, question):
        known = f"rule-answer-{question.split()[-1]}" in rules_in(self.code.module_src)
        return dspy.Prediction(answer="right" if known else "wrong")


def test_a_code_proposer_that_raises_is_a_failed_reflection():
    calls = []

    def code_proposer(**given):
        calls.append(given)
        raise LookupError("no code today")

    with pytest.raises(ReflectionError, match="no code today"):
        learn(learning_lm(), WithCode(), code_proposer=code_proposer, max_metric_calls=300)
    assert len(calls) == 3


def test_a_provider_that_refuses_the_code_proposer_stops_the_run_at_once():
    lm = learning_lm((lambda prompt: "revised_source" in prompt.output_fields, lm15.AuthError("bad key")))
    with pytest.raises(ProviderError, match="bad key") as caught:
        learn(lm, WithCode(), max_metric_calls=300)
    assert caught.value.best_program.code.module_src == WithCode().code.module_src
    assert len(lm.calls) == 1


def asks_for_code(prompt):
    return "revised_source" in prompt.output_fields


def test_a_provider_that_turns_the_code_proposer_away_is_asked_again():
    failures = [lm15.RateLimitError("slow down"), lm15.ServerError("reset"), {"revised_source": "x = 1"}]
    lm = learning_lm((asks_for_code, failures))
    executor = ThreadExecutor(4, Backoff(first_delay=0.001))
    results = learn(lm, WithCode(), executor=executor, max_metric_calls=24).detailed_results
    assert len([call for call in lm.calls if asks_for_code(call.prompt)]) == 3
    assert results.steps[0].scores_after


# The same seed gives the same program


def learned_texts(num_threads):
    """All candidates and minibatches of a run whose LM takes random time."""
    lm = learning_lm(latency=lambda prompt, rng: rng.random() * 0.003)
    results = learn(
        lm,
        Chain(),
        n_train=30,
        num_threads=num_threads,
        reflection_minibatch_size=9,
        component_selector="all",
        max_metric_calls=170,
        gepa_kwargs={"sampling_strategy": PxNSampling(1, 2)},
    ).detailed_results
    minibatches = [list(step.minibatch_ids) for step in results.steps]
    trees = [[node.inputs for node in step.nodes] for step in results.steps]
    return json.loads(json.dumps([results.to_dict()["candidates"], minibatches, trees, results.val_aggregate_scores]))


@pytest.mark.parametrize("num_threads", [8, 32])
def test_the_same_at_any_number_of_threads(num_threads):
    one = learned_texts(1)
    assert len(one[0]) > 3
    assert learned_texts(num_threads) == one


@pytest.mark.parametrize("hash_seed", ["1", "4711"])
def test_the_same_in_another_process_and_quiet_there(hash_seed, tmp_path):
    code = "import json; from tests.test_optimizer import learned_texts; print(json.dumps(learned_texts(8)))"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "DSPY_CACHEDIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.stderr == ""
    assert json.loads(run.stdout) == learned_texts(8)
