"""`dspy.GEPA(...)` with one word changed: the same signature, the same errors, and every keyword does what it did."""

import inspect
import json
import logging
import pickle
from pathlib import Path

import cloudpickle
import dspy
import gepa
import pytest
from dspy.teleprompt import Teleprompter
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.teleprompt.gepa import InstructionProposer
from gepa.core.callbacks import GEPACallback
from gepa.proposer.reflective_mutation.base import CandidateSelector
from gepa.strategies.batch_sampler import EpochShuffledBatchSampler
from gepa.strategies.eval_policy import FullEvaluationPolicy
from gepa.strategies.proposal_sampling import IndependentSampling, PxNSampling, SameParentSampling
from gepa.strategies.proposal_selection import BestImprovement, TopKImprovements
from gepa.utils import MaxCandidateProposalsStopper, ScoreThresholdStopper

from dspy_combee import CombeeOptimizer, CombeeProposer

from .lessons import (
    Chain,
    examples,
    instruction,
    is_level_1,
    is_merge,
    is_reflection,
    learn,
    learning_lm,
    make,
    metric,
    numbers_in,
    rules_in,
)

EVENTS = {name for name in vars(GEPACallback) if name.startswith("on_")}


class Events:
    """A GEPA callback object that keeps every event."""

    def __init__(self):
        self.log = []

    def __getattr__(self, name):
        if name not in EVENTS:
            raise AttributeError(name)
        return lambda event: self.log.append((name, event))

    def of(self, name):
        return [event for logged, event in self.log if logged == name]

    @property
    def names(self):
        return {name for name, _ in self.log}


class AlwaysTheSeed(CandidateSelector):
    def select_candidate_idx(self, state):
        return 0


def started_chain():
    """A chain that knows a little from the start, in both parts: GEPA's merge wants an ancestor that scores."""
    program = Chain()
    program.first.signature = program.first.signature.with_instructions("Rules: rule-hint-0")
    program.second.signature = program.second.signature.with_instructions("Rules: rule-answer-1")
    return program


# The signature


def test_it_is_a_dspy_gepa_and_a_teleprompter():
    optimizer = make(learning_lm())
    assert isinstance(optimizer, dspy.GEPA)
    assert isinstance(optimizer, Teleprompter)


@pytest.mark.parametrize("name", [name for name in inspect.signature(dspy.GEPA.__init__).parameters if name != "self"])
def test_every_keyword_of_dspy_gepa_has_its_default(name):
    theirs = inspect.signature(dspy.GEPA.__init__).parameters[name]
    ours = inspect.signature(CombeeOptimizer.__init__).parameters[name]
    assert ours.kind == theirs.kind
    if name != "reflection_minibatch_size":
        assert ours.default == theirs.default


def test_keywords_of_ours_come_after_theirs_and_all_have_defaults():
    theirs = list(inspect.signature(dspy.GEPA.__init__).parameters)
    ours = inspect.signature(CombeeOptimizer.__init__).parameters
    assert list(ours)[: len(theirs)] == theirs
    assert all(ours[name].default is not inspect.Parameter.empty for name in list(ours)[len(theirs) :])


def test_get_params_holds_what_dspy_gepa_holds():
    options = {"auto": "light", "seed": 3, "failure_score": 0.5, "gepa_kwargs": {"cache_evaluation": True}}
    lm = learning_lm()
    theirs, ours = make(lm, dspy.GEPA, **options).get_params(), make(lm, use_merge=True, **options).get_params()
    for name, value in theirs.items():
        if name != "track_stats":
            assert ours[name] == value, name


# The same errors from the same wrong calls


def outcome(cls, options, call):
    """The error of constructing and compiling, as (class, text)."""
    lm = learning_lm()
    arguments = {"trainset": examples(6), "valset": examples(4)} | call
    try:
        optimizer = make(lm, cls, **options) if options.pop("_budget", True) else cls(metric, reflection_lm=lm)
        with dspy.context(lm=lm):
            optimizer.compile(dspy.Predict("question -> answer"), **arguments)
    except Exception as error:
        return type(error), str(error)
    return None


WRONG_CALLS = {
    "auto unknown": ({"auto": "tiny"}, {}),
    "no reflection_lm": ({"reflection_lm": None}, {}),
    "metric takes three": ({"metric": lambda gold, pred, trace=None: 1.0}, {}),
    "metric takes six": ({"metric": lambda a, b, c, d, e, f: 1.0}, {}),
    "metric is no function": ({"metric": 3}, {}),
    "track_best_outputs alone": ({"track_best_outputs": True, "track_stats": False}, {}),
    "max_reflection_cost": ({"gepa_kwargs": {"max_reflection_cost": 1.0}}, {}),
    "reflection_prompt_template": ({"gepa_kwargs": {"reflection_prompt_template": "<curr_param> <side_info>"}}, {}),
    "trainset empty": ({}, {"trainset": []}),
    "trainset None": ({}, {"trainset": None}),
    "teacher": ({}, {"teacher": dspy.Predict("question -> answer")}),
    "selector unknown": ({"candidate_selection_strategy": "best"}, {}),
    "selector no selector": ({"candidate_selection_strategy": 3}, {}),
    "component_selector unknown": ({"component_selector": "some"}, {}),
    "perfect_score None": ({"perfect_score": None}, {}),
    "frontier_type unknown": ({"gepa_kwargs": {"frontier_type": "all"}}, {}),
    "frontier_type without objectives": ({"gepa_kwargs": {"frontier_type": "objective"}}, {}),
    "acceptance unknown": ({"gepa_kwargs": {"acceptance_criterion": "any"}}, {}),
    "acceptance no criterion": ({"gepa_kwargs": {"acceptance_criterion": 3}}, {}),
    "policy unknown": ({"gepa_kwargs": {"val_evaluation_policy": "half"}}, {}),
    "sampler beside a size": ({"gepa_kwargs": {"batch_sampler": EpochShuffledBatchSampler(2)}}, {}),
    "sampler unknown beside a size": ({"gepa_kwargs": {"batch_sampler": "random"}}, {}),
    "merge floor": ({"use_merge": True, "gepa_kwargs": {"merge_val_overlap_floor": 0}}, {}),
    "task_lm": ({"gepa_kwargs": {"task_lm": "a/b"}}, {}),
    "gepa_kwargs unknown": ({"gepa_kwargs": {"no_such_option": 1}}, {}),
}


@pytest.mark.parametrize(("options", "call"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_wrong_call_raises_what_dspy_gepa_raises(options, call):
    theirs = outcome(dspy.GEPA, dict(options), call)
    assert theirs is not None, "dspy.GEPA has come to accept this call"
    assert outcome(CombeeOptimizer, dict(options), call) == theirs


@pytest.mark.parametrize(
    "options",
    [
        {"_budget": False},
        {"auto": "light", "max_metric_calls": 5},
        {"auto": "light", "max_metric_calls": 5, "max_full_evals": 1},
    ],
    ids=str,
)
def test_a_wrong_number_of_budgets_raises_what_dspy_gepa_raises_and_names_ours(options):
    theirs, ours = outcome(dspy.GEPA, dict(options), {}), outcome(CombeeOptimizer, dict(options), {})
    assert ours[0] is theirs[0] is AssertionError
    assert ours[1].startswith(theirs[1])
    assert "num_epochs" in ours[1]


@pytest.mark.parametrize(
    "name",
    [
        "seed",
        "adapter",
        "trainset",
        "perfect_score",
        "run_dir",
        "raise_on_exception",
        "reflection_minibatch_size",
        "reflection_lm",
    ],
)
def test_a_keyword_repeated_in_gepa_kwargs_is_a_type_error_as_in_dspy_gepa(name):
    options = {"gepa_kwargs": {name: 1}}
    theirs, ours = outcome(dspy.GEPA, dict(options), {}), outcome(CombeeOptimizer, dict(options), {})
    assert theirs[0] is ours[0] is TypeError
    assert name in theirs[1]
    assert name in ours[1]


# What reaches gepa.optimize


class GepaCalledError(Exception):
    pass


def gepa_arguments(monkeypatch, cls, program=None, with_valset=True, **options):
    """The keywords with which an optimizer calls `gepa.optimize` (looked up when it is called)."""

    def optimize(**keywords):
        raise GepaCalledError(keywords)

    monkeypatch.setattr(gepa, "optimize", optimize)
    lm = learning_lm()
    with dspy.context(lm=lm), pytest.raises(GepaCalledError) as caught:
        make(lm, cls, **options).compile(
            program or dspy.Predict("question -> answer"),
            trainset=examples(7),
            valset=examples(4) if with_valset else None,
        )
    return caught.value.args[0]


@pytest.mark.parametrize(
    "budget",
    [{"auto": "light"}, {"auto": "medium"}, {"auto": "heavy"}, {"max_full_evals": 3}, {"max_metric_calls": 77}],
    ids=str,
)
@pytest.mark.parametrize("program", [dspy.Predict("question -> answer"), Chain()], ids=["one", "two"])
@pytest.mark.parametrize("with_valset", [True, False], ids=["valset", "no valset"])
def test_the_budget_is_the_number_of_dspy_gepa(monkeypatch, budget, program, with_valset):
    theirs = gepa_arguments(monkeypatch, dspy.GEPA, program, with_valset, **budget)
    ours = gepa_arguments(monkeypatch, CombeeOptimizer, program, with_valset, **budget)
    assert ours["max_metric_calls"] == theirs["max_metric_calls"] > 0


def test_trackers_seed_and_the_rest_reach_gepa_as_they_do_from_dspy_gepa(monkeypatch, tmp_path):
    options = {
        "use_wandb": True,
        "wandb_api_key": "key",
        "wandb_init_kwargs": {"project": "p"},
        "use_mlflow": True,
        "track_stats": True,
        "track_best_outputs": True,
        "seed": 11,
        "use_merge": True,
        "max_merge_invocations": 2,
        "skip_perfect_score": False,
        "perfect_score": 7.0,
        "log_dir": str(tmp_path),
        "component_selector": "all",
        "gepa_kwargs": {
            "mlflow_tracking_uri": "uri",
            "mlflow_experiment_name": "name",
            "mlflow_attach_existing": True,
            "wandb_attach_existing": True,
            "tracking_key_prefix": "p/",
            "merge_val_overlap_floor": 3,
            "frontier_type": "hybrid",
            "cache_evaluation": True,
            "acceptance_criterion": "improvement_or_equal",
            "selection_strategy": BestImprovement(),
            "use_cloudpickle": False,
        },
    }
    theirs = gepa_arguments(monkeypatch, dspy.GEPA, **options)
    ours = gepa_arguments(monkeypatch, CombeeOptimizer, **options)
    # Ours in their place: the adapter and what comes with it, the draws, the progress line, the stoppers.
    replaced = {"adapter", "logger", "reflection_lm", "reflection_minibatch_size", "candidate_selection_strategy"}
    replaced |= {"display_progress_bar", "valset", "trainset"}
    for name in theirs.keys() - replaced:
        assert ours[name] == theirs[name], name
    for name in ("trainset", "valset"):
        assert [example.number for example in ours[name]] == [example.number for example in theirs[name]]


def test_state_is_pickled_by_cloudpickle_unless_the_user_says_otherwise(monkeypatch):
    assert gepa_arguments(monkeypatch, CombeeOptimizer)["use_cloudpickle"] is True
    kwargs = {"use_cloudpickle": False}
    assert gepa_arguments(monkeypatch, CombeeOptimizer, gepa_kwargs=kwargs)["use_cloudpickle"] is False
    assert kwargs == {"use_cloudpickle": False}


@pytest.mark.parametrize("used", [True, False])
def test_use_cloudpickle(monkeypatch, tmp_path, used):
    dumps = []
    real = cloudpickle.dump
    monkeypatch.setattr(cloudpickle, "dump", lambda *given: (dumps.append(given), real(*given)))
    learn(learning_lm(), log_dir=str(tmp_path), max_metric_calls=20, gepa_kwargs={"use_cloudpickle": used})
    assert bool(dumps) is used
    with open(tmp_path / "gepa_state.bin", "rb") as file:
        assert pickle.load(file)["total_num_evals"] <= 20


# Budgets


@pytest.mark.parametrize(("budget", "limit"), [({"max_metric_calls": 37}, 37), ({"max_full_evals": 3}, 54)], ids=str)
def test_a_budget_is_kept_and_used(budget, limit):
    results = learn(learning_lm(), **budget).detailed_results
    assert limit - 6 - 12 < results.total_metric_calls <= limit


# Components


def updated(events):
    return [event["components"] for event in events.of("on_proposal_start")]


def test_component_selector_round_robin():
    events = Events()
    learn(learning_lm(), Chain(), candidate_selection_strategy="current_best", gepa_kwargs={"callbacks": [events]})
    assert updated(events)[:2] == [["first"], ["second"]]


def test_component_selector_all_changes_both_in_one_step():
    events = Events()
    program = learn(
        learning_lm(), Chain(), component_selector="all", max_metric_calls=24, gepa_kwargs={"callbacks": [events]}
    )
    assert updated(events) == [["first", "second"]]
    assert {rule.rsplit("-", 1)[0] for rule in rules_in(instruction(program, "first"))} == {"rule-hint"}
    assert {rule.rsplit("-", 1)[0] for rule in rules_in(instruction(program, "second"))} == {"rule-answer"}


def test_a_component_selector_function_sees_trace_data():
    seen = []

    def only_second(state, trajectories, subsample_scores, candidate_idx, candidate):
        seen.append((trajectories, subsample_scores, candidate_idx, candidate))
        return ["second"]

    program = learn(learning_lm(), Chain(), component_selector=only_second, max_metric_calls=24)
    trajectories, scores, index, candidate = seen[0]
    assert index == 0
    assert set(candidate) == {"first", "second"}
    assert scores == [0.0] * 6
    assert [data["example_ind"] for data in trajectories] == list(range(6))
    for data in trajectories:
        assert isinstance(data["example"], dspy.Example)
        assert data["prediction"].answer == "wrong"
        assert data["score"].score == 0.0
        predictor, inputs, prediction = data["trace"][1]
        assert predictor.signature.equals(Chain().second.signature)
        assert inputs == {"question": data["example"].question, "hint": "wrong"}
        assert prediction.answer == "wrong"
    assert instruction(program, "first") == instruction(Chain(), "first")
    assert rules_in(instruction(program, "second"))


# Proposers


def test_an_instruction_proposer_function_writes_the_level_1_proposals():
    calls = []

    def proposer(candidate, reflective_dataset, components_to_update):
        calls.append((candidate, reflective_dataset, components_to_update))
        texts = {}
        for name in components_to_update:
            told = sorted(rule for record in reflective_dataset[name] for rule in rules_in(record["Feedback"]))
            texts[name] = f"{candidate[name]} By hand: {' '.join(told)}"
        return texts

    lm = learning_lm()
    program = learn(lm, instruction_proposer=proposer, max_metric_calls=24)
    assert len(calls) == 2
    assert sorted(len(dataset["self"]) for _, dataset, _ in calls) == [3, 3]
    for candidate, dataset, names in calls:
        assert names == ["self"]
        assert candidate["self"] == "Given the fields `question`, produce the fields `answer`."
        for record in dataset["self"]:
            assert set(record) == {"Inputs", "Generated Outputs", "Feedback"}
            assert record["Generated Outputs"] == {"answer": "wrong"}
    assert not any(is_level_1(call.prompt) for call in lm.calls)
    assert len(rules_in(instruction(program))) == 6


def test_an_instruction_proposer_function_gets_texts_for_its_values_as_from_dspy_gepa():
    kinds = []

    def proposer(candidate, reflective_dataset, components_to_update):
        kinds.extend(type(record["Inputs"]["number"]) for record in reflective_dataset["self"])
        return {"self": "Rules: " + " ".join(sorted(rules_in(str(reflective_dataset))))}

    class Typed(dspy.Module):
        def __init__(self):
            super().__init__()
            self.self = dspy.Predict("question, number: int -> answer")

        def forward(self, question):
            return self.self(question=question, number=7)

    learn(learning_lm(), Typed(), instruction_proposer=proposer, max_metric_calls=24)
    assert set(kinds) == {str}


def test_an_instruction_proposer_needs_no_reflection_lm_as_in_dspy_gepa():
    def proposer(candidate, reflective_dataset, components_to_update):
        return {"self": "Rules: " + " ".join(sorted(rules_in(str(reflective_dataset))))}

    lm = learning_lm()
    program = learn(lm, reflection_lm=None, instruction_proposer=proposer, max_metric_calls=24)
    assert len(rules_in(instruction(program))) == 6


def test_an_instruction_proposer_function_sees_the_whole_candidate_as_from_dspy_gepa():
    seen = []

    def proposer(candidate, reflective_dataset, components_to_update):
        seen.append((set(candidate), components_to_update))
        return {name: f"{candidate[name]} Once more." for name in components_to_update}

    learn(learning_lm(), Chain(), instruction_proposer=proposer, max_metric_calls=24)
    assert seen
    assert all(names == {"first", "second"} for names, _ in seen)
    assert all(updated == ["first"] for _, updated in seen)


def test_skills_and_base_instructions_of_an_instruction_proposer_reach_the_level_1_calls():
    lm = learning_lm()
    proposer = InstructionProposer(skills="Skill: count\nin dozens.", base_instructions="Rewrite it in verse.")
    learn(lm, instruction_proposer=proposer, max_metric_calls=24)
    proposals = [call.prompt for call in lm.calls if is_level_1(call.prompt)]
    assert len(proposals) == 2
    assert all("in dozens." in prompt and "Rewrite it in verse." in prompt for prompt in proposals)


def test_additional_instructions_reach_the_merge_too():
    lm = learning_lm()
    learn(
        lm, instruction_proposer=InstructionProposer(additional_instructions="Imperative voice."), max_metric_calls=24
    )
    prompts = [call.prompt for call in lm.calls if is_reflection(call.prompt)]
    assert len(prompts) == 3
    assert all("Imperative voice." in prompt for prompt in prompts)


def test_max_chars_holds_for_the_level_1_calls_and_for_the_merge():
    def long_merge(prompt):
        return {"new_instruction": " ".join(sorted(rules_in(prompt.question))) + " indeed" * 50}

    lm = learning_lm(
        (lambda prompt: "shortened_instruction" in prompt.output_fields, {"shortened_instruction": "rule-answer-1"}),
        (is_merge, long_merge),
    )
    steps = learn(lm, instruction_proposer=InstructionProposer(max_chars=120)).detailed_results.steps
    outputs = [node.output for node in steps[0].nodes]
    assert len(outputs) == 3
    assert outputs[-1] == "rule-answer-1"
    assert all(len(output) <= 120 for output in outputs)
    assert any("120 characters" in call.prompt for call in lm.calls if is_merge(call.prompt))


def test_a_merge_that_stays_over_max_chars_proposes_nothing():
    lm = learning_lm(
        (
            lambda prompt: "shortened_instruction" in prompt.output_fields,
            {"shortened_instruction": "too long " * 40},
        ),
        (is_merge, {"new_instruction": "too long " * 50}),
    )
    step = learn(
        lm, instruction_proposer=InstructionProposer(max_chars=120), max_metric_calls=24
    ).detailed_results.steps[0]
    assert step.reductions[0].text is None
    assert "max_chars=120" in step.reason


def test_a_combee_proposer_is_used_as_it_is_and_not_nested():
    lm = learning_lm()
    proposer = CombeeProposer(num_groups=3, duplication_factor=1)
    steps = learn(lm, instruction_proposer=proposer, max_metric_calls=24).detailed_results.steps
    assert (steps[0].k, steps[0].duplication_factor) == (3, 1)
    assert [node.id for node in steps[0].nodes] == ["1.0", "1.1", "1.2", "2.0"]
    assert len([call for call in lm.calls if is_reflection(call.prompt)]) == 4


@pytest.mark.parametrize("options", [{"num_groups": 2}, {"duplication_factor": 1}, {"aggregator": "flat"}])
def test_options_of_the_tree_belong_to_a_given_combee_proposer(options):
    with pytest.raises(ValueError, match="belong to the CombeeProposer"):
        make(learning_lm(), instruction_proposer=CombeeProposer(), **options)


def test_a_combee_proposer_reflects_with_its_own_lm():
    own, lm = learning_lm(), learning_lm()
    learn(lm, instruction_proposer=CombeeProposer(reflection_lm=own), max_metric_calls=24)
    assert [is_reflection(call.prompt) for call in own.calls] == [True] * 3
    assert not any(is_reflection(call.prompt) for call in lm.calls)


class WithCode(dspy.Module):
    """A predictor, and a `dspy.Flex` whose source holds rules too."""

    def __init__(self):
        super().__init__()
        self.say = dspy.Predict("question -> hint")
        self.code = dspy.Flex("question -> answer")

    def forward(self, question):
        known = f"rule-answer-{question.split()[-1]}" in rules_in(self.code.module_src)
        return dspy.Prediction(hint=self.say(question=question).hint, answer="right" if known else "wrong")


def test_code_proposer_rewrites_flex_code_and_nothing_else():
    calls = []

    def code_proposer(candidate, reflective_dataset, components_to_update, task_descriptions, context_blurbs):
        calls.append((components_to_update, len(reflective_dataset["code"]), set(task_descriptions)))
        comments = "".join(f"\n# {rule}" for rule in sorted(rules_in(str(reflective_dataset["code"]))))
        return {"code": candidate["code"] + comments}

    lm = learning_lm()
    program = learn(lm, WithCode(), code_proposer=code_proposer, component_selector="all", max_metric_calls=24)
    assert calls == [(["code"], 6, {"code"})]
    assert len(rules_in(program.code.module_src)) == 6
    assert {call.prompt.count("module_src") for call in lm.calls} == {0}
    (step,) = program.detailed_results.steps
    assert [reduction.component for reduction in step.reductions] == ["say", "code"]
    assert step.reductions[1].text == program.code.module_src
    assert step.accepted


# Merge


def test_use_merge_joins_two_components_of_two_candidates():
    options = {
        "candidate_selection_strategy": AlwaysTheSeed(),
        "max_metric_calls": 120,
        "reflection_minibatch_size": 12,
    }
    events = Events()
    program = learn(learning_lm(), started_chain(), use_merge=True, gepa_kwargs={"callbacks": [events]}, **options)
    (merged,) = events.of("on_merge_accepted")
    assert merged["parent_ids"] == [1, 2]
    assert program.detailed_results.parents[merged["new_candidate_idx"]] == [1, 2]
    assert len(rules_in(instruction(program, "first"))) == len(rules_in(instruction(program, "second"))) == 12

    events = Events()
    learn(learning_lm(), started_chain(), use_merge=False, gepa_kwargs={"callbacks": [events]}, **options)
    assert not {name for name in events.names if "merge" in name}


def test_max_merge_invocations():
    events = Events()
    learn(
        learning_lm(),
        started_chain(),
        use_merge=True,
        max_merge_invocations=0,
        candidate_selection_strategy=AlwaysTheSeed(),
        max_metric_calls=120,
        reflection_minibatch_size=12,
        gepa_kwargs={"callbacks": [events]},
    )
    assert not events.of("on_merge_attempted")


# Feedback and scores


def reflection_prompts(lm):
    return [call.prompt for call in lm.calls if is_level_1(call.prompt)]


@pytest.mark.parametrize("kept", [True, False])
def test_add_format_failure_as_feedback(kept):
    def unreadable(prompt):
        return not is_reflection(prompt) and prompt.question.count("question 3\n") > 0

    lm = learning_lm((unreadable, "no fields here"))
    options = {"n_train": 6, "max_metric_calls": 24, "add_format_failure_as_feedback": kept}
    (step,) = learn(lm, **options).detailed_results.steps
    text = "\n".join(node.prompt for node in step.nodes if node.id.startswith("1."))
    assert ("no fields here" in text) is kept
    assert ("Your output failed to parse" in text) is kept
    assert 4 in numbers_in(text)


def test_an_unreadable_answer_is_a_failed_prediction_in_the_trace():
    seen = []

    def selector(state, trajectories, subsample_scores, candidate_idx, candidate):
        seen.extend(trajectories)
        return ["self"]

    def unreadable(prompt):
        return not is_reflection(prompt) and "question 3\n" in prompt.question

    lm = learning_lm((unreadable, "no fields here"))
    learn(lm, n_train=6, max_metric_calls=24, component_selector=selector, failure_score=0.25)
    failed = [data for data in seen if isinstance(data["prediction"], FailedPrediction)]
    assert [data["example"].number for data in failed[:1]] == [3]
    assert failed[0]["trace"][0][2].completion_text == "no fields here"


@pytest.mark.parametrize("failure_score", [0.0, 0.25])
def test_failure_score(failure_score):
    class Breaks(dspy.Module):
        def __init__(self):
            super().__init__()
            self.self = dspy.Predict("question -> answer")

        def forward(self, question):
            if question == "question 2":
                raise RuntimeError("broken")
            return self.self(question=question)

    results = learn(learning_lm(), Breaks(), failure_score=failure_score, max_metric_calls=24).detailed_results
    assert results.val_subscores[0] == {0: 0.0, 1: 0.0, 2: failure_score, 3: 0.0, 4: 0.0, 5: 0.0}


@pytest.mark.parametrize("warned", [True, False])
def test_warn_on_score_mismatch(caplog, warned):
    def moody(gold, pred, trace=None, pred_name=None, pred_trace=None):
        result = metric(gold, pred, trace, pred_name, pred_trace)
        return result if pred_name is None else dspy.Prediction(score=0.5, feedback=result.feedback)

    with caplog.at_level(logging.WARNING, logger="dspy_combee"):
        steps = learn(learning_lm(), metric=moody, warn_on_score_mismatch=warned).detailed_results.steps
    assert len(steps) > 1
    assert sum("a different score" in record.getMessage() for record in caplog.records) == int(warned)
    assert steps[0].scores_before == (0.0,) * 6


def knows_all(n):
    return dspy.Predict(
        dspy.Signature("question -> answer", "Rules: " + " ".join(f"rule-answer-{i}" for i in range(n)))
    )


def test_skip_perfect_score():
    lm = learning_lm()
    steps = learn(lm, knows_all(12)).detailed_results.steps
    assert {step.reason for step in steps} == {"all_scores_perfect"}
    assert not any(is_reflection(call.prompt) for call in lm.calls)

    lm = learning_lm()
    learn(lm, knows_all(12), skip_perfect_score=False)
    assert any(is_reflection(call.prompt) for call in lm.calls)


@pytest.mark.parametrize(("perfect_score", "skipped"), [(0.0, True), (1.0, False)])
def test_perfect_score_says_what_perfect_is(perfect_score, skipped):
    steps = learn(learning_lm(), perfect_score=perfect_score, max_metric_calls=24).detailed_results.steps
    assert (steps[0].reason == "all_scores_perfect") is skipped


# Choosing candidates and minibatches


def test_seed():
    def draws(seed):
        return [step.minibatch_ids for step in learn(learning_lm(), seed=seed, n_train=40).detailed_results.steps]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)


def test_candidate_selection_strategy_current_best():
    results = learn(
        learning_lm(),
        n_train=18,
        max_metric_calls=110,
        reflection_minibatch_size=3,
        candidate_selection_strategy="current_best",
    ).detailed_results
    best, scores = 0, results.val_aggregate_scores
    for step in results.steps:
        assert step.parent == best
        if step.accepted and scores[step.candidate] > scores[best]:
            best = step.candidate
    assert best > 1


@pytest.mark.parametrize("strategy", ["pareto", "epsilon_greedy", "top_k_pareto"])
def test_the_other_selectors_of_gepa(strategy):
    results = learn(learning_lm(), candidate_selection_strategy=strategy).detailed_results
    assert results.val_aggregate_scores[results.best_idx] > 0


def test_a_candidate_selector_of_the_user():
    steps = learn(learning_lm(), candidate_selection_strategy=AlwaysTheSeed()).detailed_results.steps
    assert len(steps) > 1
    assert {step.parent for step in steps} == {0}


def test_a_batch_sampler_of_the_user():
    sampler = EpochShuffledBatchSampler(minibatch_size=4)
    results = learn(
        learning_lm(), reflection_minibatch_size=None, gepa_kwargs={"batch_sampler": sampler}
    ).detailed_results
    assert {step.n for step in results.steps} == {4}
    assert {i for step in results.steps for i in step.minibatch_ids} <= set(range(12))


@pytest.mark.parametrize(
    ("strategy", "tasks", "parents"),
    [
        (PxNSampling(p=2, n=2), 4, 2),
        (IndependentSampling(n=3), 3, 3),
        (SameParentSampling(n=3), 3, 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sampling_strategy(strategy, tasks, parents):
    events = Events()
    steps = learn(
        learning_lm(),
        n_train=24,
        max_metric_calls=300,
        reflection_minibatch_size=4,
        gepa_kwargs={"sampling_strategy": strategy, "callbacks": [events]},
    ).detailed_results.steps
    first = [step for step in steps if step.iteration == 1]
    assert len(first) == tasks
    assert len({step.minibatch_ids for step in first}) == tasks
    second = [step.parent for step in steps if step.iteration == 2]
    assert len(second) == tasks
    assert len(set(second)) <= parents


def test_selection_strategy():
    def accepted(selection):
        kwargs = {"sampling_strategy": SameParentSampling(n=3), "selection_strategy": selection}
        kwargs["stop_callbacks"] = FirstIterations(1)
        steps = learn(
            learning_lm(), reflection_minibatch_size=4, max_metric_calls=100, gepa_kwargs=kwargs
        ).detailed_results.steps
        assert len(steps) == 3
        return sum(step.accepted for step in steps), [step.reason for step in steps if not step.accepted]

    assert accepted(None) == (3, [])
    count, reasons = accepted(BestImprovement())
    assert count == 1
    assert all("BestImprovement" in reason for reason in reasons)
    assert accepted(TopKImprovements(2))[0] == 2


def test_acceptance_criterion():
    def talks(prompt):
        return {"new_instruction": f"Nothing learned from {len(prompt)} characters."}

    def accepted(**kwargs):
        steps = learn(learning_lm(reflect=talks), gepa_kwargs=kwargs).detailed_results.steps
        return {step.accepted for step in steps if step.scores_after}

    assert accepted() == {False}
    assert accepted(acceptance_criterion="strict_improvement") == {False}
    assert accepted(acceptance_criterion="improvement_or_equal") == {True}


# Stopping, events, caching, validation


@pytest.mark.parametrize(
    "stoppers",
    [
        MaxCandidateProposalsStopper(2),
        [MaxCandidateProposalsStopper(2)],
        (ScoreThresholdStopper(2.0), MaxCandidateProposalsStopper(2)),
        lambda state: state.i >= 1,
    ],
    ids=["one", "list", "tuple", "function"],
)
def test_stop_callbacks(stoppers):
    steps = learn(
        learning_lm(), n_train=40, max_metric_calls=400, gepa_kwargs={"stop_callbacks": stoppers}
    ).detailed_results.steps
    assert len(steps) == 2


def test_every_event_of_gepa_arrives():
    events = Events()
    kwargs = {"callbacks": [events]}
    merging = {"use_merge": True, "candidate_selection_strategy": AlwaysTheSeed(), "max_metric_calls": 120}
    learn(learning_lm(), started_chain(), reflection_minibatch_size=12, gepa_kwargs=kwargs, **merging)
    assert events.of("on_budget_updated")[0]["metric_calls_remaining"] > 0

    def one_is_enough(gold, pred, trace=None, pred_name=None, pred_trace=None):
        told = metric(gold, pred, trace, pred_name, pred_trace).feedback
        if pred.hint == pred.answer:
            return dspy.Prediction(score=0.01, feedback=told)
        return dspy.Prediction(score=float((pred.hint == "right") == (gold.number % 2 == 0)), feedback=told)

    learn(learning_lm(), Chain(), metric=one_is_enough, reflection_minibatch_size=12, gepa_kwargs=kwargs, **merging)
    learn(learning_lm(reflect={"new_instruction": "Nothing."}), gepa_kwargs=kwargs)
    learn(learning_lm(), knows_all(12), gepa_kwargs=kwargs)

    def broken(*given):
        raise RuntimeError("no component")

    with pytest.raises(RuntimeError, match="no component"):
        learn(learning_lm(), component_selector=broken, gepa_kwargs=kwargs)
    assert events.names == EVENTS


def test_several_callback_objects_get_the_events_and_errors_in_them_do_no_harm():
    class Broken:
        def on_iteration_start(self, event):
            raise RuntimeError("not my day")

    first, second = Events(), Events()
    learn(learning_lm(), max_metric_calls=24, gepa_kwargs={"callbacks": [first, Broken(), second]})
    assert [name for name, _ in first.log] == [name for name, _ in second.log]
    assert len(first.of("on_iteration_start")) == 1


def test_cache_evaluation():
    def total(**kwargs):
        lm = learning_lm()
        calls = []

        def counting(gold, pred, trace=None, pred_name=None, pred_trace=None):
            calls.append(pred_name)
            return metric(gold, pred, trace, pred_name, pred_trace)

        options = {"metric": counting, "reflection_minibatch_size": 6, "max_metric_calls": 60}
        with dspy.context(lm=lm):
            program = make(lm, gepa_kwargs=kwargs | {"stop_callbacks": MaxCandidateProposalsStopper(1)}, **options)
            results = program.compile(dspy.Predict("question -> answer"), examples(12), valset=examples(12))
        assert len(results.detailed_results.steps) == 1
        scored = calls.count(None)
        assert scored == results.detailed_results.total_metric_calls
        return scored

    assert total() == 12 + 6 + 6 + 12
    assert total(cache_evaluation=True) == 12 + 6 + 6 + 6


@pytest.mark.parametrize("frontier_type", ["instance", "objective", "hybrid", "cartesian"])
def test_frontier_type(frontier_type):
    def two_objectives(gold, pred, trace=None, pred_name=None, pred_trace=None):
        result = metric(gold, pred, trace, pred_name, pred_trace)
        return dspy.Prediction(
            score=result.score,
            feedback=result.feedback,
            objective_scores={"right": result.score, "short": float(len(pred.answer) < 6)},
        )

    states = []

    class States:
        def on_iteration_end(self, event):
            states.append(event["state"])

    results = learn(
        learning_lm(), metric=two_objectives, gepa_kwargs={"frontier_type": frontier_type, "callbacks": [States()]}
    ).detailed_results
    assert states[-1].frontier_type == frontier_type
    assert results.val_aggregate_subscores[0] == {"right": 0.0, "short": 1.0}
    assert results.objective_pareto_front["right"] == max(results.val_aggregate_scores)


def test_val_evaluation_policy():
    class FirstThree(FullEvaluationPolicy):
        def get_eval_batch(self, loader, state, target_program_idx=None):
            return list(loader.all_ids())[:3]

    results = learn(learning_lm(), gepa_kwargs={"val_evaluation_policy": FirstThree()}).detailed_results
    assert [set(scores) for scores in results.val_subscores[:2]] == [set(range(6)), {0, 1, 2}]


# Logs and statistics


class FirstIterations:
    """Stops a run after so many iterations; holds no state."""

    def __init__(self, count):
        self.count = count

    def __call__(self, state):
        return state.i + 1 >= self.count


@pytest.mark.parametrize("program", [dspy.Predict("question -> answer"), Chain()], ids=["one", "two"])
def test_a_run_that_was_stopped_goes_on_from_its_log_dir(tmp_path, program):
    options = {"n_train": 30, "reflection_minibatch_size": 4, "max_metric_calls": 100}

    def texts(learned):
        return learned.detailed_results.to_dict()["candidates"]

    whole = learn(learning_lm(), program, **options)
    stop = {"stop_callbacks": FirstIterations(2)}
    part = learn(learning_lm(), program, log_dir=str(tmp_path), gepa_kwargs=stop, **options)
    assert 1 < len(texts(part)) < len(texts(whole))

    resumed = learn(learning_lm(), program, log_dir=str(tmp_path), **options)
    assert texts(resumed) == texts(whole)
    assert resumed.detailed_results.val_aggregate_scores == whole.detailed_results.val_aggregate_scores
    assert resumed.detailed_results.total_metric_calls == whole.detailed_results.total_metric_calls
    assert [step.minibatch_ids for step in resumed.detailed_results.steps] == [
        step.minibatch_ids for step in whole.detailed_results.steps
    ]
    assert resumed.detailed_results.log_dir == str(tmp_path)


def test_log_dir_holds_the_files_of_gepa(tmp_path):
    folder = tmp_path / "new" / "folder"
    learned = learn(learning_lm(), log_dir=str(folder), track_best_outputs=True)
    assert {"gepa_state.bin", "candidates.json", "run_log.json"} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "candidates.json").read_text()) == learned.detailed_results.to_dict()["candidates"]
    assert list(Path(folder, "generated_best_outputs_valset").iterdir())


def test_a_stop_file_in_log_dir_ends_the_run(tmp_path):
    class WriteStopFile:
        def on_iteration_end(self, event):
            (tmp_path / "gepa.stop").touch()

    kwargs = {"callbacks": [WriteStopFile()]}
    steps = learn(learning_lm(), log_dir=str(tmp_path), n_train=40, gepa_kwargs=kwargs).detailed_results.steps
    assert len(steps) == 1


def test_track_stats_off_leaves_no_results_and_sums_up_in_one_line(caplog):
    for tracked in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="dspy_combee"):
            program = learn(learning_lm(), track_stats=tracked)
        assert hasattr(program, "detailed_results") is tracked
        (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Combee ended")]
        assert "3 candidates" in line
        assert "metric calls" in line


@pytest.mark.parametrize("tracked", [True, False])
def test_track_best_outputs(tracked):
    outputs = learn(learning_lm(), track_best_outputs=tracked).detailed_results.best_outputs_valset
    if not tracked:
        assert outputs is None
        return
    assert set(outputs) == set(range(6))
    for entries in outputs.values():
        assert all(isinstance(prediction, dspy.Prediction) for _, prediction in entries)
        assert entries[-1][1].answer == "right"


def test_num_threads_bounds_the_calls_in_flight():
    def peak(num_threads):
        lm = learning_lm(latency=0.005)
        learn(lm, num_threads=num_threads, max_metric_calls=30)
        return lm.peak_concurrency

    assert peak(1) == 1
    assert 1 < peak(3) <= 3
