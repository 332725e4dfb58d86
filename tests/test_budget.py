"""The budget: never exceeded by a call, said in four ways, in dollars too, and accounted for to the last token."""

import json
import logging
import random
import re
import threading
from types import SimpleNamespace
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMAuthError
from gepa.proposer.reflective_mutation.base import CandidateSelector
from gepa.strategies.batch_sampler import EpochShuffledBatchSampler
from gepa.strategies.eval_policy import FullEvaluationPolicy
from gepa.strategies.proposal_sampling import IndependentSampling, PxNSampling, SameParentSampling
from hypothesis import given
from hypothesis import strategies as st

from dspy_combee import CombeeOptimizer, CombeeProposer, PowerLawBatchSize, ThreadExecutor, UnknownCostError, Usage
from dspy_combee.calls.guard import CallGuard
from dspy_combee.controller.sampling import Budget, tasks_per_step
from dspy_combee.records.errors import OutOfBudgetError, ProviderError
from dspy_combee.records.types import Rollout
from dspy_combee.report.step_log import read_steps

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
    rules_in,
)
from .openai_server import Reply

# --- the pure pieces ---------------------------------------------------------------------------------------
from .run_parts import make_scope


def test_what_fits_after_the_seed_makes_the_budget_exact():
    assert Budget(20, 5, max_metric_calls=12).is_exact
    assert not Budget(20, 5, max_metric_calls=11).is_exact
    assert Budget(20, 5, max_metric_calls=9, num_seed_validation=2).is_exact
    assert Budget(20, 5, num_epochs=1).is_exact


def test_the_largest_minibatch_leaves_room_for_validation():
    budget = Budget(100, 10, max_metric_calls=60)
    assert budget.largest_minibatch(metric_calls=10, drawn=0) == 20
    assert budget.largest_minibatch(metric_calls=48, drawn=0) == 1
    assert Budget(15, 10, max_metric_calls=60).largest_minibatch(10, 0) == 15
    assert Budget(100, 10, max_metric_calls=130, tasks_per_step=3).largest_minibatch(10, 0) == 15
    assert Budget(100, 10, max_metric_calls=60, tasks_per_step=9).largest_minibatch(10, 0) == 1


def test_a_due_merge_reserves_its_worst_case():
    budget = Budget(100, 10, max_metric_calls=60)
    assert [budget.is_spent(calls, 0, merge_may_be_due=False) for calls in (47, 48, 49)] == [False, False, True]
    assert [budget.is_spent(calls, 0, merge_may_be_due=True) for calls in (45, 46)] == [False, True]


def test_epochs_are_counted_in_draws():
    budget = Budget(30, 5, num_epochs=0.1)
    assert budget.num_draws == 3, "and not 4, by the rounding of 0.1 * 30"
    assert budget.minibatch_rollouts == 6
    assert budget.largest_minibatch(0, 1) == 2
    assert budget.is_spent(0, 3, merge_may_be_due=False)
    assert Budget(7, 5, num_epochs=1.5).num_draws == 11


@given(st.integers(1, 50), st.integers(1, 30), st.integers(0, 400), st.lists(st.integers(1, 50), min_size=1))
def test_expected_steps(num_examples, num_validation, spare, sizes):
    budget = Budget(num_examples, num_validation, max_metric_calls=num_validation + spare)
    fewest, most = (budget.steps_of(sizes, all_accepted=accepted) for accepted in (True, False))
    assert 0 <= fewest <= most
    done = [*sizes[:most], *[sizes[-1]] * (most - len(sizes))]
    assert sum(2 * n for n in done) <= spare


def test_proposals_of_the_strategies_of_gepa():
    strategies = [None, PxNSampling(2, 3), SameParentSampling(4), IndependentSampling(5), object()]
    assert [tasks_per_step(strategy) for strategy in strategies] == [1, 6, 4, 5, 1]


def test_the_ledger_adds_up_by_phase():
    scope = make_scope(dspy.Predict("question -> answer"), make(learning_lm()))
    made = [Rollout(i, None, None, (), 0.0, None, usage=Usage(calls=2, input_tokens=10)) for i in range(3)]
    scope.note_rollouts("profiling", made)
    scope.note_rollouts("rollouts", made[:1])
    scope.note_feedback(7, Usage())
    other = make_scope(dspy.Predict("question -> answer"), make(learning_lm()))
    other.restore(scope.spent)
    assert other.spent.metric_calls == 4
    assert other.spent.metric_calls_in("profiling") == 3
    assert other.spent.metric_calls_in("feedback") == 7
    assert other.spent.usage == Usage(calls=8, input_tokens=40)


# --- never exceeded ----------------------------------------------------------------------------------------


class Counting:
    """The metric, with a count of its calls. The score stays below 1, so that no step is skipped."""

    def __init__(self, factor=0.9):
        self.scoring = self.feedback = 0
        self.factor = factor
        self._lock = threading.Lock()

    def __call__(self, gold, pred, trace=None, pred_name=None, pred_trace=None):
        with self._lock:
            self.scoring += pred_name is None
            self.feedback += pred_name is not None
        made = metric(gold, pred, trace, pred_name, pred_trace)
        return dspy.Prediction(score=self.factor * made.score, feedback=made.feedback)


class ThreeAtOnce:
    """A strategy that does not say how many proposals it makes."""

    def sample_tasks(self, *given):
        return SameParentSampling(3).sample_tasks(*given)


class Half(FullEvaluationPolicy):
    """Half of the validation examples, for the seed too."""

    def get_seed_eval_batch(self, loader):
        return list(loader.all_ids())[::2]

    def get_eval_batch(self, loader, state, target_program_idx=None):
        return list(loader.all_ids())[::2]


class OneForTheSeed(FullEvaluationPolicy):
    def get_seed_eval_batch(self, loader):
        return list(loader.all_ids())[:1]


def drawn_case(seed):
    """N, |val|, the room after one whole step, and options, drawn at random."""
    rng = random.Random(seed)
    num_validation = rng.choice([1, 2, 3, 5, 10])
    extra: dict[str, Any] = {}
    strategy = rng.choice([None, None, PxNSampling(2, 2), IndependentSampling(3), ThreeAtOnce()])
    if strategy is not None:
        extra["sampling_strategy"] = strategy
    policy = rng.choice([None, None, Half(), OneForTheSeed()])
    if policy is not None:
        extra["val_evaluation_policy"] = policy
    if rng.random() < 0.3:
        extra["cache_evaluation"] = True
    return SimpleNamespace(
        n_train=rng.choice([1, 2, 3, 4, 5, 7, 20, 60]),
        n_val=num_validation,
        budget=2 * num_validation + 2 + rng.choice([0, 1, 2, rng.randrange(20), rng.randrange(90)]),
        size=rng.choice(["auto", 20, 3, [5, 7, 9], PowerLawBatchSize(candidates=(1, 4))]),
        use_merge=rng.random() < 0.5,
        program=rng.choice([Chain, lambda: dspy.Predict("question -> answer")])(),
        extra=extra,
    )


def spend(case, **options):
    counting = Counting()
    program = learn(
        learning_lm(),
        case.program,
        n_train=case.n_train,
        n_val=case.n_val,
        metric=counting,
        max_metric_calls=case.budget,
        reflection_minibatch_size=case.size,
        use_merge=case.use_merge,
        gepa_kwargs=case.extra,
        **options,
    )
    return counting, program.detailed_results


@pytest.mark.parametrize("seed", range(40))
def test_the_budget_is_not_exceeded_by_a_single_call(seed):
    case = drawn_case(seed)
    counting, result = spend(case, seed=seed)
    assert counting.scoring <= case.budget, vars(case)
    assert result.steps, "one whole step fits"
    assert result.total_metric_calls == counting.scoring == result.spent.metric_calls
    assert result.spent.metric_calls_in("feedback") == counting.feedback


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_the_budget_is_not_exceeded_by_a_single_call_in_many_more_cases(seed):
    test_the_budget_is_not_exceeded_by_a_single_call(seed)


@pytest.mark.parametrize("left", range(12))
def test_the_last_calls_are_used(left):
    """The first step is free of waste: whatever is left after it goes into smaller ones."""
    counting, result = spend(
        SimpleNamespace(n_train=40, n_val=3, budget=3 + 15 + left, size=6, use_merge=False, extra={}, program=Chain())
    )
    assert result.batch_sizes[0] == 6
    assert result.steps[0].accepted
    assert 3 + 15 + left - counting.scoring < 2 + 3, "less is left than the smallest step takes"


@pytest.mark.parametrize("strategy", [None, PxNSampling(2, 2)], ids=["one", "four"])
@pytest.mark.parametrize("budget", [10, 15, 23, 40])
def test_minibatches_of_a_sampler_of_the_users_own_are_cut_to_the_budget_too(budget, strategy):
    extra = {"batch_sampler": EpochShuffledBatchSampler(7), "sampling_strategy": strategy}
    case = SimpleNamespace(n_train=20, n_val=4, budget=budget, size=None, use_merge=False, program=Chain(), extra=extra)
    counting, result = spend(case)
    assert result.steps
    assert counting.scoring <= budget


class AlwaysTheSeed(CandidateSelector):
    def select_candidate_idx(self, state):
        return 0


def test_merges_stay_within_the_budget():
    """Two components learned apart from the seed, each of which scores: GEPA merges them, at 5 calls and |val|."""
    merged = []

    class Watch:
        def on_merge_accepted(self, event):
            merged.append(budget)

    for budget in range(45, 69, 4):
        program = Chain()
        program.first.signature = program.first.signature.with_instructions("Rules: rule-hint-0")
        program.second.signature = program.second.signature.with_instructions("Rules: rule-answer-1")
        extra = {"callbacks": [Watch()]}
        case = SimpleNamespace(n_train=6, n_val=6, budget=budget, size=6, use_merge=True, program=program, extra=extra)
        counting, result = spend(case, candidate_selection_strategy=AlwaysTheSeed())
        assert counting.scoring == result.spent.metric_calls <= budget
    assert merged == [53, 57, 61, 65], "as soon as it fits: 6 + 2 * (2 * 6 + 6) + 5 + 6"


@pytest.mark.parametrize("extra", [0, 1, 2, 6])
@pytest.mark.parametrize("n_val", [1, 4])
def test_where_no_step_fits_it_behaves_as_dspy_gepa_and_warns_with_the_numbers(n_val, extra, caplog):
    budget = n_val + min(extra, n_val + 1)
    counts = []
    for cls in (dspy.GEPA, CombeeOptimizer):
        counting = Counting()
        lm = learning_lm()
        options: dict[str, Any] = {"max_metric_calls": budget, "reflection_minibatch_size": 3, "use_merge": False}
        with dspy.context(lm=lm):
            make(lm, cls, metric=counting, **options).compile(
                dspy.Predict("question -> answer"), trainset=examples(9), valset=examples(n_val)
            )
        counts.append(counting.scoring)
    assert counts[0] == counts[1]
    (warning,) = [record.getMessage() for record in caplog.records if "does not cover" in record.getMessage()]
    assert re.findall(r"\d+", warning) == [str(budget), str(n_val), str(2 + n_val)]


# --- four budgets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budgets",
    [
        {},
        {"num_epochs": 1, "max_metric_calls": 50},
        {"num_epochs": 1, "auto": "light"},
        {"num_epochs": 1, "max_full_evals": 2},
        {"auto": "light", "max_metric_calls": 50},
        {"auto": "light", "max_metric_calls": 50, "num_epochs": 1, "max_full_evals": 2},
    ],
    ids=str,
)
def test_exactly_one_budget_and_the_message_names_all_four(budgets):
    with pytest.raises(AssertionError) as caught:
        CombeeOptimizer(metric, reflection_lm=learning_lm(), **budgets)
    for name in ("auto", "max_full_evals", "max_metric_calls", "num_epochs"):
        assert f"{name}={budgets.get(name)}" in str(caught.value)


@pytest.mark.parametrize("num_epochs", [0, -1, float("nan"), float("inf")])
def test_num_epochs_out_of_range(num_epochs):
    with pytest.raises(ValueError, match="num_epochs"):
        CombeeOptimizer(metric, reflection_lm=learning_lm(), num_epochs=num_epochs)


@pytest.mark.parametrize("num_epochs", ["2", True, [1]])
def test_num_epochs_of_another_type(num_epochs):
    with pytest.raises(TypeError, match="num_epochs"):
        CombeeOptimizer(metric, reflection_lm=learning_lm(), num_epochs=num_epochs)


@pytest.mark.parametrize("strategy", [None, PxNSampling(2, 2), ThreeAtOnce()], ids=["one", "four", "three"])
@pytest.mark.parametrize(("num_epochs", "draws"), [(1, 14), (2.5, 35), (0.1, 2)])
@pytest.mark.parametrize("size", [4, "auto"])
def test_num_epochs_is_exactly_that_many_draws(num_epochs, draws, strategy, size):
    with dspy.context(lm=learning_lm()):
        optimizer = CombeeOptimizer(
            Counting(),
            reflection_lm=learning_lm(),
            num_epochs=num_epochs,
            reflection_minibatch_size=size,
            track_stats=True,
            gepa_kwargs={"sampling_strategy": strategy},
        )
        result = optimizer.compile(
            dspy.Predict("question -> answer"), examples(14), valset=examples(3)
        ).detailed_results
    assert sum(result.batch_sizes) == draws
    drawn = [i for step in result.steps for i in step.minibatch_ids]
    assert len(drawn) == draws
    if num_epochs == 1:
        assert sorted(drawn) == list(range(14))
    assert optimizer.get_params()["max_metric_calls"] is None


def test_num_epochs_cannot_count_the_draws_of_another_sampler():
    options = {"num_epochs": 1, "reflection_minibatch_size": None}
    optimizer = CombeeOptimizer(
        metric,
        reflection_lm=learning_lm(),
        gepa_kwargs={"batch_sampler": EpochShuffledBatchSampler(2)},
        **options,
    )
    with pytest.raises(ValueError, match="batch_sampler"):
        optimizer.compile(dspy.Predict("question -> answer"), examples(14), valset=examples(3))


# --- the plan ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (9, "n = 9; k = 3; 7 to 9 steps expected. A step takes 18 rollouts and about 4 reflection calls"),
        ([4, 9], "n from a list of 2 sizes (4 to 9); k = 2 to 3; 7 to 9 steps expected"),
        ("auto", "profiling n = [1, 4]"),
    ],
    ids=str,
)
def test_the_plan_is_logged_before_the_first_call(size, says, caplog):
    before: list[str] = []

    def first_call(prompt, rng):
        if not before:
            before.extend(record.getMessage() for record in caplog.records)
        return 0.0

    kind = PowerLawBatchSize(candidates=(1, 4)) if size == "auto" else size
    with caplog.at_level(logging.INFO, "dspy_combee"):
        learn(
            learning_lm(latency=first_call),
            n_train=30,
            n_val=6,
            max_metric_calls=174,
            reflection_minibatch_size=kind,
            num_threads=1,
        )
    assert any("174 metric calls: 30 training and 6 validation examples" in line for line in before)
    (plan,) = [line for line in before if line.startswith("The plan: ")]
    assert says in plan
    assert "6 rollouts more if its proposal is accepted" in plan
    if size == "auto":
        assert "then n is chosen, from 1 to 30" in plan


# --- the account -------------------------------------------------------------------------------------------


def by_role(lm):
    """Calls and tokens that the stub saw, of the program and of reflection."""
    tallies = {}
    for role, wanted in (("program", False), ("reflection", True)):
        calls = [call for call in lm.calls if is_reflection(call.prompt) == wanted]
        tallies[role] = (
            len(calls),
            sum(max(1, len(call.prompt) // 4) for call in calls),
            sum(max(1, len(call.reply) // 4) for call in calls),
        )
    return tallies


def tally(*usages):
    total = sum(usages, Usage())
    return total.calls, total.input_tokens, total.output_tokens


def test_spent_adds_up_to_what_the_stub_and_the_metric_saw():
    lm, counting = learning_lm((is_level_1, ["of no use"])), Counting()
    size = PowerLawBatchSize(candidates=(2, 8))
    program = learn(
        lm, Chain(), n_train=40, n_val=5, metric=counting, reflection_minibatch_size=size, max_metric_calls=250
    )
    result = program.detailed_results
    spent = result.spent
    assert spent.metric_calls == counting.scoring == result.total_metric_calls
    assert spent.metric_calls_in("feedback") == counting.feedback

    profiling = [step for step in result.steps if step.profiling]
    others = [step for step in result.steps if not step.profiling]
    assert profiling
    assert others
    for phase, steps in (("profiling", profiling), ("rollouts", others)):
        rollouts = sum(len(step.scores_before) + len(step.scores_after) for step in steps)
        assert spent.metric_calls_in(phase) == rollouts
        assert spent.usage_in(phase).calls == 2 * rollouts, "the program has two predictors"
    accepted = sum(step.accepted for step in result.steps)
    assert spent.metric_calls_in("validation") == 5 * (1 + accepted)

    program_usage = [spent.usage_in(phase) for phase in ("profiling", "rollouts", "validation")]
    assert tally(*program_usage) == by_role(lm)["program"]
    assert tally(spent.usage_in("reflection")) == by_role(lm)["reflection"]
    assert tally(spent.usage) == tuple(map(sum, zip(*by_role(lm).values(), strict=True)))
    assert tally(*(node.usage for step in result.steps for node in step.nodes)) == by_role(lm)["reflection"]
    assert json.loads(json.dumps(result.to_dict()))["spent"]["feedback"]["metric_calls"] == counting.feedback


def test_spent_adds_up_over_a_resume(tmp_path):
    lm, counting = learning_lm(), Counting()
    options = {"n_train": 40, "n_val": 5, "metric": counting, "log_dir": str(tmp_path), "reflection_minibatch_size": 4}
    learn(lm, max_metric_calls=80, **options)
    first = counting.scoring
    spent = learn(lm, max_metric_calls=200, **options).detailed_results.spent
    assert 5 < first < counting.scoring == spent.metric_calls
    assert spent.metric_calls_in("feedback") == counting.feedback
    program_usage = [spent.usage_in(phase) for phase in ("profiling", "rollouts", "validation")]
    assert tally(*program_usage) == by_role(lm)["program"]
    assert tally(spent.usage_in("reflection")) == by_role(lm)["reflection"]


@pytest.mark.parametrize(
    "settings", [{"disable_history": True}, {"max_history_size": 0}, {"max_history_size": 1}], ids=str
)
def test_every_call_is_counted_whatever_history_dspy_keeps(settings):
    """A program of two calls, and a metric that asks for feedback: no cost is known of any."""
    judge = dspy.Predict("question -> verdict")

    def judged(gold, pred, trace=None, pred_name=None, pred_trace=None):
        if pred_name is not None:
            judge(question=f"question {gold.number}")
        return metric(gold, pred, trace, pred_name, pred_trace)

    lm = learning_lm()
    with dspy.context(**settings):
        spent = learn(lm, Chain(), metric=judged).detailed_results.spent
    assert spent.usage.calls == len(lm.calls)
    for phase in ("validation", "rollouts", "feedback", "reflection"):
        assert spent.usage_in(phase).calls > 0
        assert spent.usage_in(phase).cost is None


def test_cache_hits_are_calls_that_cost_nothing():
    lm, counting = learning_lm(cache=True), Counting()
    options = {"n_train": 20, "n_val": 5, "metric": counting, "reflection_minibatch_size": 6, "max_metric_calls": 60}
    first = learn(lm, **options).detailed_results.spent
    made = len(lm.calls)
    second = learn(lm, **options).detailed_results.spent
    assert len(lm.calls) == made
    assert second.metric_calls == first.metric_calls
    assert second.usage.cache_hits == second.usage.calls == first.usage.calls
    assert (second.usage.input_tokens, second.usage.output_tokens, second.usage.cost) == (0, 0, 0.0)


# --- dollars -----------------------------------------------------------------------------------------------

PER_CALL = 0.15  # one million prompt tokens of gpt-4o-mini
TOKENS = {"prompt_tokens": 1_000_000, "completion_tokens": 0, "total_tokens": 1_000_000}

# LiteLLM drops clients without closing them.
over_http = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


def reflects(request):
    """The reflection model behind the server."""
    text = "\n".join(message["content"] for message in request["messages"])
    return Reply(json.dumps({"new_instruction": "Rules: " + " ".join(sorted(rules_in(text)))}), usage=TOKENS)


@pytest.fixture
def priced_lm(openai_server):
    openai_server.handler = reflects

    def make_lm(model="openai/gpt-4o-mini", **options):
        kept = {"cache": False, "num_retries": 0, **options}
        return dspy.LM(model, api_base=openai_server.api_base, api_key=openai_server.api_key, **kept)

    return make_lm


def learn_for(lm, max_reflection_cost, program=None, **options):
    """n = 9: three calls of level 1 and a merge for each step."""
    kept = {"max_metric_calls": 200, "reflection_minibatch_size": 9, "max_reflection_cost": max_reflection_cost}
    with dspy.context(lm=learning_lm()):
        return make(lm, **{**kept, **options}).compile(
            program or dspy.Predict("question -> answer"), examples(60), valset=examples(5)
        )


@over_http
@pytest.mark.parametrize(
    ("calls_paid", "calls_made"),
    [
        (0.5, 3),  # the first wave; the merge is not made, so there is no proposal
        (3, 3),
        (3.5, 4),  # the merge too
        (4.5, 7),
        (8, 8),
    ],
)
def test_the_search_ends_when_the_dollars_are_spent(calls_paid, calls_made, priced_lm, openai_server, caplog, tmp_path):
    with caplog.at_level(logging.INFO, "dspy_combee"):
        program = learn_for(priced_lm(), calls_paid * PER_CALL, log_dir=str(tmp_path))
    assert len(openai_server.requests) == calls_made, "a wave that has begun is finished, and no other begins"
    spent = program.detailed_results.spent.usage_in("reflection")
    assert spent.cost == pytest.approx(calls_made * PER_CALL)
    assert spent.input_tokens == calls_made * TOKENS["prompt_tokens"]
    assert len(program.detailed_results.candidates) == 1 + calls_made // 4
    assert bool(rules_in(instruction(program))) == (calls_made >= 4)
    if calls_made % 4:
        assert any(f"max_reflection_cost=${calls_paid * PER_CALL:g} is spent" in line for line in caplog.messages)
    for steps in (program.detailed_results.steps, read_steps(tmp_path)):
        assert sum(node.usage.calls for step in steps for node in step.nodes) == calls_made, (
            "all that was paid is there"
        )
        last = steps[-1]
        if calls_made % 4 == 3:
            assert (last.k, last.duplication_factor, last.nodes[0].output[:6]) == (3, 2, "Rules:")
            assert "is spent" in last.reason


def test_what_a_step_has_paid_for_is_recorded_where_its_merge_ends_the_run():
    def refused(prompt):
        raise LMAuthError("The key is refused.")

    steps, lm = [], learning_lm((is_merge, refused))
    with pytest.raises(ProviderError, match="key is refused"):
        learn(lm, n_train=20, reflection_minibatch_size=9, step_callbacks=[steps.append])
    (step,) = steps
    assert [node.id for node in step.nodes] == ["1.0", "1.1", "1.2"]
    assert all(rules_in(node.output) for node in step.nodes)
    assert "key is refused" in step.reason
    assert not step.scores_after


@over_http
def test_without_a_limit_the_dollars_are_counted(priced_lm, openai_server):
    spent = learn_for(priced_lm(), None).detailed_results.spent
    assert spent.usage_in("reflection").cost == pytest.approx(len(openai_server.requests) * PER_CALL)
    assert spent.usage_in("rollouts").cost is None, "an LM with an engine of its own reports no cost"


@over_http
def test_cache_hits_cost_nothing(priced_lm, openai_server):
    lm = priced_lm(cache=True)
    first = learn_for(lm, 100.0)
    made = len(openai_server.requests)
    assert made > 4
    again = learn_for(lm, PER_CALL / 2)
    assert len(openai_server.requests) == made
    assert again.detailed_results.spent.usage_in("reflection").cost == 0.0
    assert again.detailed_results.spent.usage_in("reflection").calls == made
    assert instruction(again) == instruction(first)


@over_http
def test_the_dollars_of_an_earlier_process_count(priced_lm, openai_server, tmp_path):
    learn_for(priced_lm(), 4.5 * PER_CALL, log_dir=str(tmp_path))
    made = len(openai_server.requests)
    again = learn_for(priced_lm(), 4.5 * PER_CALL, log_dir=str(tmp_path))
    assert len(openai_server.requests) == made
    assert again.detailed_results.spent.usage_in("reflection").cost == pytest.approx(made * PER_CALL)


@over_http
def test_a_model_without_a_price_is_an_error_at_its_first_call(priced_lm, openai_server):
    with pytest.raises(UnknownCostError, match="max_reflection_cost cannot be enforced") as caught:
        learn_for(priced_lm("openai/a-model-of-no-known-price"), 1.0)
    assert len(openai_server.requests) == 3, "one wave"
    assert instruction(caught.value.best_program) == instruction(dspy.Predict("question -> answer"))


@over_http
def test_without_max_reflection_cost_no_price_is_needed(priced_lm):
    spent = learn_for(priced_lm("openai/a-model-of-no-known-price"), None).detailed_results.spent
    assert spent.usage_in("reflection").cost is None
    assert spent.usage_in("reflection").input_tokens > 0


@pytest.mark.parametrize("through", ["reflection_lm", "proposer"])
def test_an_lm_on_an_engine_of_its_own_is_refused_at_construction(through):
    proposer = {"instruction_proposer": CombeeProposer(reflection_lm=learning_lm())} if through == "proposer" else {}
    with pytest.raises(ValueError, match="max_reflection_cost cannot be enforced"):
        CombeeOptimizer(
            metric, auto="light", reflection_lm=learning_lm(), max_reflection_cost=1.0, track_stats=True, **proposer
        )


def test_an_lm_that_comes_from_the_context_is_refused_at_its_first_call():
    lm = learning_lm()
    optimizer = CombeeOptimizer(
        metric, max_metric_calls=60, instruction_proposer=CombeeProposer(), max_reflection_cost=1.0
    )
    with dspy.context(lm=lm), pytest.raises(UnknownCostError) as caught:
        optimizer.compile(dspy.Predict("question -> answer"), examples(20), valset=examples(5))
    assert caught.value.best_program is not None


@pytest.mark.parametrize("cost", [0, -1.0, float("nan"), float("inf")])
def test_a_cost_out_of_range(cost):
    with pytest.raises(ValueError, match="max_reflection_cost"):
        CombeeOptimizer(metric, auto="light", reflection_lm=learning_lm(), max_reflection_cost=cost)


@pytest.mark.parametrize("cost", ["1", True])
def test_a_cost_of_another_type(cost):
    with pytest.raises(TypeError, match="max_reflection_cost"):
        CombeeOptimizer(metric, auto="light", reflection_lm=learning_lm(), max_reflection_cost=cost)


class WithCode(dspy.Module):
    """A `dspy.Flex` whose source is read, not run."""

    def __init__(self):
        super().__init__()
        self.code = dspy.Flex("question -> answer")

    def forward(self, question):
        known = f"rule-answer-{question.split()[-1]}" in rules_in(self.code.module_src)
        return dspy.Prediction(answer="right" if known else "wrong")


def writes_code(request):
    """The code model behind the server: the same class, with one more rule in a comment each time."""
    text = "\n".join(message["content"] for message in request["messages"])
    source = WithCode().code.module_src + f"\n# {' '.join(sorted(rules_in(text)))} {len(text)}"
    return Reply(f"[[ ## revised_source ## ]]\n{source}\n\n[[ ## completed ## ]]", usage=TOKENS)


@over_http
def test_code_proposals_count_too(priced_lm, openai_server):
    openai_server.handler = writes_code
    program = learn_for(priced_lm(), 1.5 * PER_CALL, program=WithCode())
    assert len(openai_server.requests) == 2
    assert program.detailed_results.spent.usage_in("reflection").cost == pytest.approx(2 * PER_CALL)


@over_http
def test_code_of_a_model_without_a_price_is_an_error(priced_lm, openai_server):
    openai_server.handler = writes_code
    with pytest.raises(UnknownCostError):
        learn_for(priced_lm("openai/a-model-of-no-known-price"), 1.0, program=WithCode())
    assert len(openai_server.requests) == 1


# --- the guard ---------------------------------------------------------------------------------------------


class Calls:
    """Text of each item; what is refused is an error."""

    def __call__(self, item):
        return str(item)

    def late(self, item, seconds):
        raise TimeoutError

    def refused(self, item, error):
        raise error


def test_a_proposer_that_calls_nothing_through_dspy_is_pointed_out_once(priced_lm, openai_server, caplog):
    def outside(candidate, reflective_dataset, components_to_update):
        return {name: candidate[name] + " More." for name in components_to_update}

    learn_for(priced_lm(), 1.0, instruction_proposer=outside)
    assert len([line for line in caplog.messages if "sees only calls made through DSPy" in line]) == 1


def test_the_guard_refuses_a_wave_once_the_money_is_spent():
    guard = CallGuard(ThreadExecutor(2), max_cost=1.0)
    guard.meter.add(Usage(calls=1, cost=0.99))
    assert guard.map(Calls(), [1]) == ["1"]
    guard.meter.add(Usage(calls=1, cost=0.01))
    with pytest.raises(OutOfBudgetError, match=r"\$1"):
        guard.map(Calls(), [1])
