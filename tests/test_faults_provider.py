"""Providers that turn calls away: rate limits, outages and refused keys, over a real HTTP server."""

import gc
import json
import logging
import re
import threading
import time
from functools import partial

import dspy
import pytest

from dspy_combee import CombeeOptimizer, ProviderError
from dspy_combee.calls.executors import Backoff, ThreadExecutor, Throttle

from .openai_server import OpenAIServer, Reply

# LiteLLM drops clients without closing them.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

KEY = "test-key-of-the-user"
N_TRAIN, N_VAL, N, BUDGET = 12, 6, 6, 48
THREADS = 8
QUICK = Backoff(first_delay=0.03, max_delay=5.0)


class Provider:
    """Answers the task, unless `fault` has another reply to the call with this number, among so many at once."""

    def __init__(self, fault=lambda number, at_once, request: None, seconds=0.0):
        self.fault = fault
        self.seconds = seconds
        self.lock = threading.Lock()
        self.calls = self.at_once = self.answered = self.turned_away = 0
        self.reflections = 0

    def __call__(self, request):
        with self.lock:
            self.calls += 1
            self.at_once += 1
            reply = self.fault(self.calls, self.at_once, request)
            self.turned_away += reply is not None
            self.answered += reply is None
            self.reflections += reply is None and is_reflection(request)
        try:
            if reply is not None:
                return reply
            time.sleep(self.seconds)
            return json.dumps(answer(request))
        finally:
            with self.lock:
                self.at_once -= 1


def is_reflection(request):
    return "answer" not in fields_of(request)


def fields_of(request):
    return request["response_format"]["json_schema"]["schema"]["required"]


def answer(request):
    (name,) = fields_of(request)
    system, user = (message["content"] for message in request["messages"])
    if name == "answer":
        number = re.findall(r"question (\d+)", user)[-1]
        return {name: "right" if re.search(rf"rule-{number}\b", system) else "wrong"}
    rules = sorted(set(re.findall(r"rule-\d+", user)), key=lambda rule: int(rule[5:]))
    return {name: "Follow " + " ".join(rules)}


class Metric:
    """Counts the scoring calls for each question."""

    def __init__(self):
        self.scored = []

    def __call__(self, gold, pred, trace=None, pred_name=None, pred_trace=None):
        if pred_name is None:
            self.scored.append(gold.question)
        return dspy.Prediction(score=float(pred.answer == "right"), feedback=f"Remember {gold.rule}.")


def examples(n):
    return [dspy.Example(question=f"question {i}", rule=f"rule-{i}").with_inputs("question") for i in range(n)]


def run(server, engine="lm15", *, metric=None, executor=None, key=KEY, num_retries=0, **options):
    lm = dspy.LM(
        "openai/gpt-4o-mini", engine=engine, api_base=server.api_base, api_key=key, cache=False, num_retries=num_retries
    )
    optimizer = CombeeOptimizer(
        metric=metric or Metric(),
        reflection_lm=lm,
        reflection_minibatch_size=N,
        executor=executor or ThreadExecutor(THREADS, QUICK),
        use_merge=False,
        track_stats=True,
        verbose=False,
        **{"max_metric_calls": BUDGET, **options},
    )
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        return optimizer.compile(dspy.Predict("question -> answer"), examples(N_TRAIN), valset=examples(N_VAL))


@pytest.fixture
def provider():
    """A provider whose fault a test may set, and its server."""
    provider = Provider()
    with OpenAIServer(provider, api_key=KEY) as server:
        provider.server = server
        yield provider
    assert not server.handler_errors
    gc.collect()


@pytest.fixture(scope="module")
def whole():
    """The run as it is when nothing happens to it."""
    with OpenAIServer(Provider(), api_key=KEY) as server:
        return run(server)


def account(program):
    """What two equal runs have in common."""
    results = program.detailed_results
    return (
        [candidate.signature.instructions for candidate in results.candidates],
        results.val_aggregate_scores,
        results.total_metric_calls,
        [(s.n, s.scores_before, s.scores_after, s.accepted, [node.error for node in s.nodes]) for s in results.steps],
        results.spent.metric_calls_by_phase,
        results.spent.usage,
    )


# Rate limits


def above_three(number, at_once, request):
    return Reply("too many at once", status=429) if at_once > 3 else None


class ForAWhile:
    """Turns every 4th call away, for so many seconds from the first call on."""

    def __init__(self, seconds, **headers):
        self.seconds = seconds
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.started = None
        self.times = []

    def __call__(self, number, at_once, request):
        now = time.monotonic()
        self.started = self.started or now
        self.times.append(now)
        if number % 4 or now > self.started + self.seconds:
            return None
        return Reply("slow down", status=429, headers=self.headers)


@pytest.mark.parametrize("engine", ["lm15", "litellm"])
@pytest.mark.parametrize("kind", ["above three at once", "every fourth for two seconds"])
def test_rate_limits_change_nothing_but_the_number_of_calls(kind, engine, provider, whole):
    provider.fault = above_three if kind == "above three at once" else ForAWhile(2.0)
    provider.seconds = 0.01
    metric = Metric()
    program = run(provider.server, engine, metric=metric)
    assert provider.turned_away > 0
    assert account(program) == account(whole)
    spent = program.detailed_results.spent
    assert len(metric.scored) == spent.metric_calls == program.detailed_results.total_metric_calls
    assert spent.usage.calls == provider.answered, "every call that was answered is counted, and counted once"


@pytest.mark.parametrize("engine", ["lm15", "litellm"])
def test_rate_limits_with_dspys_own_retries(engine, provider, whole):
    provider.fault = ForAWhile(0.5)
    provider.seconds = 0.02
    program = run(provider.server, engine, num_retries=3)
    assert provider.turned_away > 0
    assert account(program) == account(whole)


@pytest.mark.parametrize("engine", ["lm15", "litellm"])
def test_the_pause_that_a_provider_asks_for_is_kept(engine, provider, whole):
    fault = provider.fault = ForAWhile(0.2, Retry_After="1")
    program = run(provider.server, engine)
    assert provider.turned_away > 0
    # What was in flight when the first was turned away still came; then nobody did, until the second was over.
    pauses = [later - earlier for earlier, later in zip(fault.times, fault.times[1:], strict=False)]
    assert max(pauses) > 0.7
    assert account(program) == account(whole)


def test_a_provider_that_asks_for_an_hour_is_given_up_at_once(provider):
    provider.fault = lambda number, at_once, request: Reply("quota", status=429, headers={"Retry-After": "3600"})
    with pytest.raises(ProviderError, match="quota") as caught:
        run(provider.server)
    assert caught.value.retry_after == 3600
    assert provider.calls <= THREADS


@pytest.mark.parametrize("retry_after", ["3600", "0"], ids=["asks for an hour", "six incidents"])
def test_an_executor_that_gave_up_serves_the_next_run(retry_after, provider, whole):
    executor = ThreadExecutor(THREADS, QUICK)
    slow_down = Reply("quota", status=429, headers={"Retry-After": retry_after})
    provider.fault = lambda number, at_once, request: slow_down
    with pytest.raises(ProviderError, match="quota"):
        run(provider.server, executor=executor)
    again = iter([Reply("slow down", status=429)])
    provider.fault = lambda number, at_once, request: next(again, None)
    assert account(run(provider.server, executor=executor)) == account(whole)


def test_width_drops_by_half_and_comes_back_one_by_one():
    throttle = Throttle(8, Backoff(first_delay=0.001))
    assert throttle.slow_down(1, None)
    assert throttle.limit == 4
    assert throttle.slow_down(1, None), "it was in flight already: the same incident"
    assert throttle.limit == 4
    widths = []
    for _ in range(4 + 5 + 6 + 7):
        throttle.succeed()
        widths.append(throttle.limit)
    assert widths == [4] * 3 + [5] * 5 + [6] * 6 + [7] * 7 + [8]
    throttle.succeed()
    assert throttle.limit == 8


def test_pauses_double_have_jitter_and_are_bounded():
    backoff = Backoff(first_delay=1.0, max_delay=60.0)
    for incident, least in ((1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (20, 60)):
        delays = {backoff.delay(incident, None) for _ in range(20)}
        assert len(delays) > 1
        assert least <= min(delays) <= max(delays) <= 1.5 * least
    assert backoff.delay(1, 30.0) >= 30.0


# Outages

OUTAGES = {"minibatch": 9, "reflection": 13, "call 17": 16, "validation": 25, "reflection of step 2": 33}


# LiteLLM reports a refused connection as an error of the server.
@pytest.mark.parametrize(
    ("moment", "engine"),
    [*((moment, "lm15") for moment in OUTAGES), ("reflection", "litellm"), ("call 17", "litellm")],
)
def test_an_outage_ends_the_run_and_the_next_one_goes_on(moment, engine, whole, tmp_path):
    """From the call after the `last` on connections are refused."""
    last = OUTAGES[moment]
    first, second = Metric(), Metric()
    server = OpenAIServer(Provider(), api_key=KEY)
    gone = threading.Event()

    def then_gone(number, at_once, request):
        if number > last and not gone.is_set():
            gone.set()
            server.stop_listening()
        return Reply(status=503) if number > last else None

    server.handler.fault = then_gone
    impatient = ThreadExecutor(THREADS, Backoff(incidents=3, first_delay=0.01))
    with server, pytest.raises(ProviderError, match=r"call failed|cannot be reached") as caught:
        run(server, engine, metric=first, executor=impatient, log_dir=str(tmp_path))
    assert caught.value.transient
    assert server.handler.answered == last
    assert isinstance(caught.value.best_program, dspy.Predict)
    assert (tmp_path / "gepa_state.bin").exists()

    with OpenAIServer(Provider(), api_key=KEY) as server:
        resumed = run(server, engine, metric=second, log_dir=str(tmp_path))
    assert account(resumed) == account(whole), "the same program, and nothing was scored as a failure"
    # Neither the seed's validation nor a step that had ended is paid for again.
    spent, left = N_VAL, whole.detailed_results.total_metric_calls - N_VAL
    for step in whole.detailed_results.steps:
        cost = len(step.scores_before) + len(step.scores_after) + N_VAL * step.accepted
        if spent + cost <= len(first.scored):
            spent, left = spent + cost, left - cost
    assert len(second.scored) == left
    gc.collect()


def test_an_outage_in_the_validation_of_the_seed(tmp_path, whole, provider):
    provider.fault = lambda number, at_once, request: Reply("down", status=503) if number > 3 else None
    impatient = ThreadExecutor(THREADS, Backoff(incidents=2, first_delay=0.01))
    with pytest.raises(ProviderError, match="down") as caught:
        run(provider.server, executor=impatient, log_dir=str(tmp_path))
    assert caught.value.best_program.signature.instructions == dspy.Predict("question -> answer").signature.instructions
    provider.fault = lambda number, at_once, request: None
    assert account(run(provider.server, log_dir=str(tmp_path))) == account(whole)


@pytest.mark.parametrize("status", [401, 503])
def test_a_judge_that_is_refused_or_out_of_reach_for_feedback_ends_the_run(status, provider, tmp_path):
    """GEPA goes on where no record can be made."""
    judge = dspy.Predict("question -> verdict")

    class Judging(Metric):
        def __call__(self, gold, pred, trace=None, pred_name=None, pred_trace=None):
            if pred_name is not None:
                judge(question=gold.question)
            return super().__call__(gold, pred, trace, pred_name, pred_trace)

    def judged(**options):
        return run(provider.server, metric=Judging(), **options)

    provider.fault = lambda number, at_once, request: (
        Reply("No.", status=status) if fields_of(request) == ["verdict"] else None
    )
    impatient = ThreadExecutor(THREADS, Backoff(incidents=2, first_delay=0.01))
    with pytest.raises(ProviderError, match=r"No\.") as caught:
        judged(executor=impatient, log_dir=str(tmp_path))
    assert caught.value.transient == (status == 503)
    assert isinstance(caught.value.best_program, dspy.Predict)
    assert provider.answered == N_VAL + N, "the first minibatch is the last"
    provider.fault = lambda number, at_once, request: None
    assert account(judged(log_dir=str(tmp_path))) == account(judged())


@pytest.mark.parametrize("engine", ["lm15", "litellm"])
def test_a_page_in_place_of_a_reply_is_an_outage(engine, provider, whole):
    """A proxy that is in the way sends one, with status 200."""
    provider.fault = lambda number, at_once, request: (
        Reply(raw_body="<html>Back soon</html>") if number % 5 == 0 and not is_reflection(request) else None
    )
    assert account(run(provider.server, engine)) == account(whole)
    assert provider.turned_away > 0


# Refused keys


@pytest.mark.parametrize(("engine", "num_retries"), [("lm15", 0), ("lm15", 3), ("litellm", 3)])
@pytest.mark.parametrize("where", ["rollouts", "reflection"])
def test_a_refused_key_ends_the_run_at_once(engine, num_retries, where, provider, caplog):
    def refuse(number, at_once, request):
        if is_reflection(request) == (where == "reflection"):
            return Reply("Incorrect API key provided.", status=401)
        return None

    provider.fault = refuse
    with caplog.at_level(logging.DEBUG, "dspy_combee"), pytest.raises(ProviderError, match="API key") as caught:
        run(provider.server, engine, num_retries=num_retries, executor=ThreadExecutor(THREADS))
    assert not caught.value.transient
    assert provider.turned_away <= THREADS, "no call is tried again"
    assert isinstance(caught.value.best_program, dspy.Predict)
    assert "Slowing down" not in caplog.text


@pytest.mark.parametrize("engine", ["lm15", "litellm"])
@pytest.mark.parametrize("where", ["rollouts", "reflection"])
def test_a_model_that_is_not_there_ends_the_run_at_once(engine, where, provider):
    provider.fault = lambda number, at_once, request: (
        Reply("no such model", status=404) if is_reflection(request) == (where == "reflection") else None
    )
    with pytest.raises(ProviderError, match="no such model") as caught:
        run(provider.server, engine)
    assert not caught.value.transient
    assert provider.turned_away <= THREADS, "no call is tried again"


@pytest.mark.parametrize("engine", ["lm15", "litellm"])
def test_calls_that_a_run_has_left_behind_slow_no_other_down(engine, caplog):
    """Their connections end with the server, when the run is long over; they once told the log of another run."""
    all_asked, gone = threading.Barrier(N_VAL), threading.Event()

    def refuse(request):
        if all_asked.wait(30):  # All but one of them.
            gone.wait(30)
        return Reply("Incorrect API key provided.", status=401)

    class Noting(ThreadExecutor):
        def map(self, function, items, **options):
            return super().map(partial(self.note, function), items, **options)

        def note(self, function, item):
            threads.append(threading.current_thread())
            return function(item)

    threads, executor = [], Noting(THREADS, QUICK)
    with caplog.at_level(logging.DEBUG, "dspy_combee"):
        with OpenAIServer(refuse, api_key=KEY) as server, pytest.raises(ProviderError, match="API key"):
            run(server, engine, executor=executor)
        gone.set()
        for thread in threads:
            thread.join(30)
    assert len(threads) == N_VAL
    assert "Slowing down" not in caplog.text
    assert executor.slots.limit == THREADS
    gc.collect()
