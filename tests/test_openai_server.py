"""The loopback server carries the end-to-end tests, so what they count on is tested through both of DSPy's engines."""

import threading
from concurrent.futures import ThreadPoolExecutor

import dspy
import pytest
import requests

from .openai_server import CHAT_PATH, OpenAIServer, Reply


def make_lm(server, engine, **options):
    options = {"api_key": server.api_key, "num_retries": 0, "cache": False, **options}
    return dspy.LM("openai/gpt-4o-mini", api_base=server.api_base, engine=engine, **options)


@pytest.fixture(params=["litellm", "lm15"])
def engine(request):
    return request.param


def test_a_reply_its_usage_and_its_cost(openai_server, engine):
    usage = {"prompt_tokens": 1_000_000, "completion_tokens": 1_000_000, "total_tokens": 2_000_000}
    openai_server.handler = lambda request: Reply("half a sent", usage=usage, finish_reason="length")
    lm = make_lm(openai_server, engine)
    assert lm("say hello") == ["half a sent"]
    entry = lm.history[-1]
    response = entry["response"]
    assert (response.choices[0] if engine == "litellm" else response).finish_reason == "length"
    assert entry["usage"]["prompt_tokens"] == 1_000_000
    assert entry["cost"] == pytest.approx(0.15 + 0.60)
    (request,) = openai_server.requests
    assert (request.path, request.authorized, request.prompt) == (CHAT_PATH, True, "say hello")
    assert openai_server.api_key not in repr(request)


@pytest.mark.parametrize(("adapter", "kind"), [(dspy.ChatAdapter(), None), (dspy.JSONAdapter(), "json_schema")])
def test_structured_output(openai_server, engine, adapter, kind):
    openai_server.handler = lambda request: (
        '{"answer": 4}' if "response_format" in request else "[[ ## answer ## ]]\n4\n\n[[ ## completed ## ]]"
    )
    with dspy.context(lm=make_lm(openai_server, engine), adapter=adapter):
        assert dspy.Predict("question -> answer: int")(question="2 + 2?").answer == 4
    response_format = openai_server.requests[-1].response_format
    assert (response_format and response_format["type"]) == kind


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(status=401), dspy.LMAuthError),
        (Reply(status=429, headers={"Retry-After": "0"}), dspy.LMRateLimitError),
        (Reply(status=500), dspy.LMServerError),
        (Reply(raw_body="<html>bad gateway</html>"), dspy.LMError),
    ],
)
def test_replies_that_are_errors(openai_server, engine, reply, error):
    openai_server.handler = lambda request: reply
    with pytest.raises(error):
        make_lm(openai_server, engine)("hi")
    with pytest.raises(dspy.LMAuthError):
        make_lm(openai_server, engine, api_key="another")("hi")
    assert [request.authorized for request in openai_server.requests] == [True, False]


def test_reasoning(openai_server):
    openai_server.handler = lambda request: Reply("4", reasoning="two and two")
    [output] = make_lm(openai_server, "litellm")("2 + 2?")
    assert (output["text"], output["reasoning_content"]) == ("4", "two and two")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [(CHAT_PATH, b'{"stream": true}', 400), (CHAT_PATH, b"{", 400), ("/v1/embeddings", b"{}", 404)],
    ids=["stream", "not JSON", "unknown path"],
)
def test_requests_that_it_does_not_serve(openai_server, path, body, status):
    url = openai_server.api_base.removesuffix("/v1") + path
    with requests.Session() as session:
        session.headers["Authorization"] = f"Bearer {openai_server.api_key}"
        responses = [session.post(url, data=body, timeout=10) for _ in range(2)]  # the connection is kept alive
    assert [response.status_code for response in responses] == [status, status]
    assert responses[0].json()["error"]["message"]


def test_peak_concurrency_and_errors_of_the_handler_are_kept():
    together = threading.Barrier(8, timeout=10)

    def handler(request):
        together.wait()
        return 1 / 0

    with OpenAIServer(handler) as server, ThreadPoolExecutor(8) as pool:
        lm = make_lm(server, "lm15")
        errors = [future.exception() for future in [pool.submit(lm, "hi") for _ in range(8)]]
        assert {type(error) for error in errors} == {dspy.LMServerError}
        assert server.peak_concurrency == len(server.requests) == 8
        assert {type(error) for error in server.handler_errors} == {ZeroDivisionError}


def test_closing_ends_a_delay():
    arrived = threading.Event()

    def handler(request):
        arrived.set()
        return Reply("late", delay=60)

    with ThreadPoolExecutor(1) as pool:
        with OpenAIServer(handler) as server:
            call = pool.submit(make_lm(server, "lm15"), "hi")
            assert arrived.wait(10)
        call.exception(timeout=10)  # answered or cut off, but not kept waiting
