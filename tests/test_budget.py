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
from gepa.strategies.proposal_sampling import IndependentSampling, PxNSampling

from dspy_combee import CombeeOptimizer, CombeeProposer, PowerLawBatchSize, ProviderError, UnknownCostError, Usage
from dspy_combee.records.step_log import read_steps

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
from .test_sampling import ThreeAtOnce


class Counting:
    """The metric, with a count of its calls. The score stays below 1, so that no step is skipped."""

    def __init__(self):
        self.scoring = self.feedback = 0
        self._lock = threading.Lock()

    def __call__(self, gold, pred, trace=None, pred_name=None, pred_trace=None):
        with self._lock:
            self.scoring += pred_name is None
            self.feedback += pred_name is not None
        made = metric(gold, pred, trace, pred_name, pred_trace)
        return dspy.Prediction(score=0.9 * made.score, feedback=made.feedback)


def predictor() -> Any:
    return dspy.Predict("question -> answer")


# --- never exceeded ----------------------------------------------------------------------------------------


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
    n_val = rng.choice([1, 2, 3, 5, 10])
    extra: dict[str, Any] = {
        "sampling_strategy": rng.choice([None, None, PxNSampling(2, 2), IndependentSampling(3), ThreeAtOnce()]),
        "val_evaluation_policy": rng.choice([None, None, Half(), OneForTheSeed()]),
        "cache_evaluation": rng.random() < 0.3 or None,
    }
    return {
        "program": rng.choice([Chain, predictor])(),
        "n_train": rng.choice([1, 2, 3, 4, 5, 7, 20, 60]),
        "n_val": n_val,
        "max_metric_calls": 2 * n_val + 2 + rng.choice([0, 1, 2, rng.randrange(20), rng.randrange(90)]),
        "reflection_minibatch_size": rng.choice(["auto", 20, 3, [5, 7, 9], PowerLawBatchSize(candidates=(1, 4))]),
        "use_merge": rng.random() < 0.5,
        "gepa_kwargs": {name: value for name, value in extra.items() if value is not None},
        "seed": seed,
    }


def spend(program, **options):
    """The calls of the metric and the result of a run, which must agree and keep to the budget."""
    counting = Counting()
    result = learn(learning_lm(), program, metric=counting, **options).detailed_results
    assert counting.scoring <= options["max_metric_calls"], options
    assert result.total_metric_calls == counting.scoring == result.spent.metric_calls
    assert result.spent.metric_calls_in("feedback") == counting.feedback
    return counting, result


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(n, marks=pytest.mark.slow) for n in range(1000, 1400))])
def test_the_budget_is_not_exceeded_by_a_single_call(seed):
    _, result = spend(**drawn_case(seed))
    assert result.steps, "one whole step fits"


@pytest.mark.parametrize("left", range(12))
def test_the_last_calls_are_used(left):
    """The first step is free of waste: whatever is left after it goes into smaller ones."""
    budget = 3 + 15 + left
    counting, result = spend(Chain(), n_train=40, n_val=3, max_metric_calls=budget, reflection_minibatch_size=6)
    assert result.batch_sizes[0] == 6
    assert result.steps[0].accepted
    assert budget - counting.scoring < 2 + 3, "less is left than the smallest step takes"


@pytest.mark.parametrize("strategy", [None, PxNSampling(2, 2)], ids=["one", "four"])
@pytest.mark.parametrize("budget", [10, 15, 23, 40])
def test_minibatches_of_a_sampler_of_the_users_own_are_cut_to_the_budget_too(budget, strategy):
    extra = {"batch_sampler": EpochShuffledBatchSampler(7), "sampling_strategy": strategy}
    options = {"max_metric_calls": budget, "reflection_minibatch_size": None, "gepa_kwargs": extra}
    _, result = spend(Chain(), n_train=20, n_val=4, **options)
    assert result.steps


class AlwaysTheSeed(CandidateSelector):
    def select_candidate_idx(self, state):
        return 0


def test_merges_stay_within_the_budget():
    """Two components learned apart from the seed, each of which scores: GEPA merges them, at 5 calls and |val|."""
    merged = []
    for budget in range(45, 69, 4):
        program = Chain()
        program.first.signature = program.first.signature.with_instructions("Rules: rule-hint-0")
        program.second.signature = program.second.signature.with_instructions("Rules: rule-answer-1")
        watch = SimpleNamespace(on_merge_accepted=lambda event, budget=budget: merged.append(budget))
        options = {"candidate_selection_strategy": AlwaysTheSeed(), "gepa_kwargs": {"callbacks": [watch]}}
        sizes = {"n_train": 6, "n_val": 6, "reflection_minibatch_size": 6}
        spend(program, max_metric_calls=budget, use_merge=True, **sizes, **options)
    assert merged == [53, 57, 61, 65], "as soon as it fits: 6 + 2 * (2 * 6 + 6) + 5 + 6"


@pytest.mark.parametrize("extra", [0, 1, 2, 6])
@pytest.mark.parametrize("n_val", [1, 4])
def test_where_no_step_fits_it_behaves_as_dspy_gepa_and_warns_with_the_numbers(n_val, extra, caplog):
    budget = n_val + min(extra, n_val + 1)
    counts = []
    for cls in (dspy.GEPA, CombeeOptimizer):
        counting, lm = Counting(), learning_lm()
        options: dict[str, Any] = {"max_metric_calls": budget, "reflection_minibatch_size": 3, "use_merge": False}
        with dspy.context(lm=lm):
            optimizer = make(lm, cls, metric=counting, **options)
            optimizer.compile(predictor(), trainset=examples(9), valset=examples(n_val))
        counts.append(counting.scoring)
    assert counts[0] == counts[1]
    (warning,) = [record.getMessage() for record in caplog.records if "does not cover" in record.getMessage()]
    assert re.findall(r"\d+", warning) == [str(budget), str(n_val), str(2 + n_val)]


# --- four budgets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"auto": "light"}, {"max_full_evals": 2}, {"max_metric_calls": 50}], ids=str)
def test_num_epochs_is_one_of_four_budgets_and_the_message_names_all(other):
    with pytest.raises(AssertionError) as caught:
        CombeeOptimizer(metric, reflection_lm=learning_lm(), num_epochs=1, **other)
    for name in ("auto", "max_full_evals", "max_metric_calls", "num_epochs"):
        assert f"{name}={({'num_epochs': 1} | other).get(name)}" in str(caught.value)


@pytest.mark.parametrize("name", ["num_epochs", "max_reflection_cost"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((value, ValueError) for value in (0, -1, float("nan"), float("inf"))),
        *((value, TypeError) for value in ("2", True, [1])),
    ],
)
def test_limits_out_of_range_or_of_another_type(name, value, error):
    others = {} if name == "num_epochs" else {"num_epochs": 1}
    with pytest.raises(error, match=name):
        CombeeOptimizer(metric, reflection_lm=learning_lm(), **others, **{name: value})


@pytest.mark.parametrize("strategy", [None, PxNSampling(2, 2), ThreeAtOnce()], ids=["one", "four", "three"])
@pytest.mark.parametrize(("num_epochs", "draws"), [(1, 14), (2.5, 35), (0.1, 2)])
@pytest.mark.parametrize("size", [4, "auto"])
def test_num_epochs_is_exactly_that_many_draws(num_epochs, draws, strategy, size):
    optimizer = CombeeOptimizer(
        Counting(),
        reflection_lm=learning_lm(),
        num_epochs=num_epochs,
        reflection_minibatch_size=size,
        track_stats=True,
        gepa_kwargs={"sampling_strategy": strategy},
    )
    with dspy.context(lm=learning_lm()):
        result = optimizer.compile(predictor(), examples(14), valset=examples(3)).detailed_results
    assert sum(result.batch_sizes) == draws
    drawn = [i for step in result.steps for i in step.minibatch_ids]
    assert len(drawn) == draws
    assert num_epochs != 1 or sorted(drawn) == list(range(14))
    assert optimizer.get_params()["max_metric_calls"] is None


def test_num_epochs_cannot_count_the_draws_of_another_sampler():
    extra = {"batch_sampler": EpochShuffledBatchSampler(2)}
    options = {"num_epochs": 1, "reflection_minibatch_size": None, "gepa_kwargs": extra}
    with pytest.raises(ValueError, match="batch_sampler"):
        CombeeOptimizer(metric, reflection_lm=learning_lm(), **options).compile(predictor(), examples(14))


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (9, "n = 9; k = 3; 7 to 9 steps expected. A step takes 18 rollouts and about 4 reflection calls"),
        ([4, 9], "n from a list of 2 sizes (4 to 9); k = 2 to 3; 7 to 9 steps expected"),
        (PowerLawBatchSize(candidates=(1, 4)), "takes 12 of 168 rollouts, then n is chosen, from 1 to 30"),
    ],
    ids=["int", "list", "auto"],
)
def test_the_plan_is_logged_before_the_first_call(size, says, caplog):
    before: list[str] = []

    def first_call(prompt, rng):
        if not before:
            before.extend(record.getMessage() for record in caplog.records)
        return 0.0

    options = {"max_metric_calls": 174, "reflection_minibatch_size": size, "num_threads": 1}
    with caplog.at_level(logging.INFO, "dspy_combee"):
        learn(learning_lm(latency=first_call), n_train=30, n_val=6, **options)
    assert any("174 metric calls: 30 training and 6 validation examples" in line for line in before)
    (plan,) = [line for line in before if line.startswith("The plan: ")]
    assert says in plan
    assert "6 rollouts more if its proposal is accepted" in plan


# --- the account -------------------------------------------------------------------------------------------


def tally_of(lm, reflection):
    """Calls, input and output tokens that the stub saw, of the program or of reflection."""
    calls = [call for call in lm.calls if is_reflection(call.prompt) == reflection]
    tokens = [(max(1, len(call.prompt) // 4), max(1, len(call.reply) // 4)) for call in calls]
    return len(calls), sum(read for read, _ in tokens), sum(written for _, written in tokens)


def tally(*usages):
    total = sum(usages, Usage())
    return total.calls, total.input_tokens, total.output_tokens


def check_account(spent, lm, counting):
    assert spent.metric_calls == counting.scoring
    assert spent.metric_calls_in("feedback") == counting.feedback
    program_usage = [spent.usage_in(phase) for phase in ("profiling", "rollouts", "validation")]
    assert tally(*program_usage) == tally_of(lm, reflection=False)
    assert tally(spent.usage_in("reflection")) == tally_of(lm, reflection=True)
    assert tally(spent.usage) == tuple(map(sum, zip(tally_of(lm, True), tally_of(lm, False), strict=True)))


def test_spent_adds_up_to_what_the_stub_and_the_metric_saw():
    lm, counting = learning_lm((is_level_1, ["of no use"])), Counting()
    options = {"reflection_minibatch_size": PowerLawBatchSize(candidates=(2, 8)), "max_metric_calls": 250}
    result = learn(lm, Chain(), n_train=40, n_val=5, metric=counting, **options).detailed_results
    spent = result.spent
    check_account(spent, lm, counting)
    assert spent.metric_calls == result.total_metric_calls
    for phase in ("profiling", "rollouts"):
        steps = [step for step in result.steps if step.profiling == (phase == "profiling")]
        assert steps
        rollouts = sum(len(step.scores_before) + len(step.scores_after) for step in steps)
        assert spent.metric_calls_in(phase) == rollouts
        assert spent.usage_in(phase).calls == 2 * rollouts, "the program has two predictors"
    assert spent.metric_calls_in("validation") == 5 * (1 + sum(step.accepted for step in result.steps))
    assert tally(*(node.usage for step in result.steps for node in step.nodes)) == tally_of(lm, reflection=True)
    assert json.loads(json.dumps(result.to_dict()))["spent"]["feedback"]["metric_calls"] == counting.feedback


def test_spent_adds_up_over_a_resume(tmp_path):
    lm, counting = learning_lm(), Counting()
    options = {"n_train": 40, "n_val": 5, "metric": counting, "log_dir": str(tmp_path), "reflection_minibatch_size": 4}
    learn(lm, max_metric_calls=80, **options)
    first = counting.scoring
    spent = learn(lm, max_metric_calls=200, **options).detailed_results.spent
    assert 5 < first < counting.scoring
    check_account(spent, lm, counting)


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


# --- dollars -----------------------------------------------------------------------------------------------

PER_CALL = 0.15  # one million prompt tokens of gpt-4o-mini
TOKENS = {"prompt_tokens": 1_000_000, "completion_tokens": 0, "total_tokens": 1_000_000}
UNPRICED = "openai/a-model-of-no-known-price"

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
        return make(lm, **{**kept, **options}).compile(program or predictor(), examples(60), valset=examples(5))


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
    result = program.detailed_results
    spent = result.spent.usage_in("reflection")
    assert spent.cost == pytest.approx(calls_made * PER_CALL)
    assert spent.input_tokens == calls_made * TOKENS["prompt_tokens"]
    assert len(result.candidates) == 1 + calls_made // 4
    assert bool(rules_in(instruction(program))) == (calls_made >= 4)
    if calls_made % 4:
        assert any(f"max_reflection_cost=${calls_paid * PER_CALL:g} is spent" in line for line in caplog.messages)
    for steps in (result.steps, read_steps(tmp_path)):
        assert sum(node.usage.calls for step in steps for node in step.nodes) == calls_made, "what was paid is there"
        if calls_made % 4 == 3:
            last = steps[-1]
            assert (last.k, last.duplication_factor, last.nodes[0].output[:6]) == (3, 2, "Rules:")
            assert "is spent" in last.reason
    # The dollars of an earlier process count.
    again = learn_for(priced_lm(), calls_paid * PER_CALL, log_dir=str(tmp_path))
    assert len(openai_server.requests) == calls_made
    assert again.detailed_results.spent.usage_in("reflection").cost == pytest.approx(calls_made * PER_CALL)


@over_http
def test_without_a_limit_the_dollars_are_counted_where_a_price_is_known(priced_lm, openai_server):
    spent = learn_for(priced_lm(), None).detailed_results.spent
    assert spent.usage_in("reflection").cost == pytest.approx(len(openai_server.requests) * PER_CALL)
    assert spent.usage_in("rollouts").cost is None, "an LM with an engine of its own reports no cost"
    spent = learn_for(priced_lm(UNPRICED), None).detailed_results.spent
    assert spent.usage_in("reflection").cost is None
    assert spent.usage_in("reflection").input_tokens > 0


@over_http
def test_cache_hits_are_calls_that_cost_nothing(priced_lm, openai_server):
    lm, student, counting = priced_lm(cache=True), learning_lm(cache=True), Counting()
    programs = []
    for limit in (100.0, PER_CALL / 2):
        program = predictor()
        program.lm = student
        programs.append(learn_for(lm, limit, program, metric=counting))
        made = len(openai_server.requests), len(student.calls)
        if limit == 100.0:
            first = made
    assert made == first
    assert first[0] > 4
    one, two = (program.detailed_results.spent for program in programs)
    assert two.metric_calls == one.metric_calls == counting.scoring / 2
    assert two.usage.cache_hits == two.usage.calls == one.usage.calls
    assert (two.usage.input_tokens, two.usage.output_tokens, two.usage.cost) == (0, 0, 0.0)
    assert instruction(programs[0]) == instruction(programs[1])


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
@pytest.mark.parametrize(("make_program", "handler", "wave"), [(predictor, reflects, 3), (WithCode, writes_code, 1)])
def test_a_model_without_a_price_is_an_error_at_its_first_wave(make_program, handler, wave, priced_lm, openai_server):
    openai_server.handler = handler
    with pytest.raises(UnknownCostError, match="max_reflection_cost cannot be enforced") as caught:
        learn_for(priced_lm(UNPRICED), 1.0, program=make_program())
    assert len(openai_server.requests) == wave
    assert caught.value.best_program is not None


@pytest.mark.parametrize("through", ["reflection_lm", "proposer"])
def test_an_lm_on_an_engine_of_its_own_is_refused_at_construction(through):
    proposer = {"instruction_proposer": CombeeProposer(reflection_lm=learning_lm())} if through == "proposer" else {}
    with pytest.raises(ValueError, match="max_reflection_cost cannot be enforced"):
        CombeeOptimizer(metric, auto="light", reflection_lm=learning_lm(), max_reflection_cost=1.0, **proposer)


def test_an_lm_that_comes_from_the_context_is_refused_at_its_first_call():
    options = {"max_metric_calls": 60, "instruction_proposer": CombeeProposer(), "max_reflection_cost": 1.0}
    with dspy.context(lm=learning_lm()), pytest.raises(UnknownCostError) as caught:
        CombeeOptimizer(metric, **options).compile(predictor(), examples(20), valset=examples(5))
    assert caught.value.best_program is not None


def test_waves_without_calls_through_dspy_are_pointed_out_once(priced_lm, caplog):
    def propose(candidate, reflective_dataset, components_to_update):
        return {name: f"{candidate[name]}." for name in components_to_update}

    for limit, warnings in ((None, 0), (1.0, 1)):
        result = learn_for(priced_lm(), limit, instruction_proposer=propose).detailed_results
        assert len(result.steps) > 1
        assert len([line for line in caplog.messages if "sees only calls made through DSPy" in line]) == warnings
