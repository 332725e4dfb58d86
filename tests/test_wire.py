"""`CombeeOptimizer` end to end over a real HTTP server, through each of DSPy's engines."""

import gc
import json
import logging
import re
import threading

import dspy
import pytest

from dspy_combee import CombeeOptimizer, ProviderError

from .openai_server import OpenAIServer, Reply

# LiteLLM drops clients without closing them.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

KEY = "sk-secret-of-the-user"
THREADS = 4
N = 12

engines = pytest.mark.parametrize("engine", ["litellm", "lm15"])


class Model:
    """What the server answers: it follows the rules of its instruction, and reflects by listing those it is shown."""

    def __init__(self):
        self.together = threading.Barrier(THREADS)
        self.lock = threading.Lock()
        self.seen = 0

    def __call__(self, request):
        with self.lock:
            self.seen += 1
            first = self.seen <= THREADS
        if first:
            self.together.wait(30)  # Opens only when num_threads requests are in flight together.
        return Reply(json.dumps(self.fields(request)), delay=0.002)

    def fields(self, request):
        """One text for each field of the schema that was asked for, and nothing else."""
        schema = request["response_format"]["json_schema"]
        assert schema["strict"] is True
        (name,) = schema["schema"]["required"]
        assert list(schema["schema"]["properties"]) == [name]
        system, user = (message["content"] for message in request["messages"])
        if name == "answer":
            number = re.findall(r"question (\d+)", user)[-1]
            return {name: "right" if re.search(rf"rule-{number}\b", system) else "wrong"}
        rules = sorted(set(re.findall(r"rule-\d+", user)), key=lambda rule: int(rule[5:]))
        return {name: "Follow " + " ".join(rules)}


@pytest.fixture
def server():
    with OpenAIServer(Model(), api_key=KEY) as server:
        yield server
    assert not server.handler_errors
    gc.collect()


def metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
    return dspy.Prediction(score=float(pred.answer == "right"), feedback=f"Remember {gold.rule}.")


def examples():
    return [dspy.Example(question=f"question {i}", rule=f"rule-{i}").with_inputs("question") for i in range(N)]


def make_lm(server, engine, **options):
    settings = {"cache": False, "num_retries": 0, "api_key": KEY, **options}
    return dspy.LM("openai/gpt-4o-mini", engine=engine, api_base=server.api_base, **settings)


def compile_over(lm, **options):
    settings = {"max_metric_calls": 3 * N + N, "track_stats": True, "use_merge": False, "num_threads": THREADS}
    optimizer = CombeeOptimizer(metric=metric, reflection_lm=lm, reflection_minibatch_size=N, **{**settings, **options})
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        return optimizer.compile(dspy.Predict("question -> answer"), examples(), valset=examples())


@engines
def test_a_program_is_learned_over_http(server, engine, caplog):
    lm = make_lm(server, engine)
    with caplog.at_level(logging.DEBUG, "dspy_combee"):
        program = compile_over(lm)
    results = program.detailed_results

    assert results.val_aggregate_scores == [0.0, 1.0]
    assert program.signature.instructions == "Follow " + " ".join(f"rule-{i}" for i in range(N))
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        assert program(question="question 3").answer == "right"
        server.requests.pop()

    (step,) = results.steps
    assert (step.n, step.k, step.duplication_factor, step.accepted) == (N, 3, 2, True)
    rollouts, reflection = results.total_metric_calls, sum(node.usage.calls for node in step.nodes)
    assert (rollouts, reflection) == (N + N + N + N, 3 + 1)
    assert len(server.requests) == rollouts + reflection
    assert all(request.authorized for request in server.requests)
    assert server.peak_concurrency == THREADS

    asked = [request.response_format["json_schema"]["schema"]["required"] for request in server.requests]
    assert asked.count(["answer"]) == rollouts
    assert asked.count(["new_instruction"]) == reflection
    usage = step.nodes[-1].usage
    assert usage.input_tokens > 0
    assert usage.cost > 0

    told = json.dumps(results.to_dict()) + repr(results.steps) + caplog.text
    assert "Combee" in caplog.text
    assert KEY not in told
    assert "authorization" not in told.lower()


@engines
def test_with_dspys_cache_the_second_run_asks_nothing_and_ends_the_same(server, engine):
    lm = make_lm(server, engine, cache=True)
    first = compile_over(lm)
    requests = len(server.requests)
    again = compile_over(lm)
    assert len(server.requests) == requests
    assert again.signature.instructions == first.signature.instructions
    (step,) = again.detailed_results.steps
    assert {node.usage.cache_hits for node in step.nodes} == {1}
    assert {node.usage.cost for node in step.nodes} == {0.0}


@engines
def test_a_provider_that_fails_now_and_then_changes_nothing_but_the_number_of_calls(server, engine):
    model, failed = server.handler, set()

    def unsteady(request):
        text = json.dumps(request["messages"])
        if "examples_with_feedback" in text and text not in failed:
            failed.add(text)
            return Reply("try again", status=500) if len(failed) % 2 else Reply('{"new_instruction": "Foll')
        return model(request)

    server.handler = unsteady
    program = compile_over(make_lm(server, engine))
    assert program.signature.instructions == "Follow " + " ".join(f"rule-{i}" for i in range(N))
    (step,) = program.detailed_results.steps
    assert [node.usage.calls for node in step.nodes] == [2, 2, 2, 1]
    assert [node.error for node in step.nodes] == [None] * 4


@engines
def test_a_refused_key_ends_the_run_at_once_and_is_in_no_text(server, engine, caplog):
    lm = make_lm(server, engine, api_key="sk-another-secret")
    with caplog.at_level(logging.DEBUG, "dspy_combee"), pytest.raises(ProviderError) as caught:
        compile_over(lm)
    assert len(server.requests) <= THREADS
    assert caught.value.best_program.signature.instructions == dspy.Predict("question -> answer").signature.instructions
    assert "secret" not in f"{caught.value}{caplog.text}"
