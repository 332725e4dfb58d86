"""The loopback server carries the end-to-end tests, so it is tested through both of DSPy's engines."""

import threading
from concurrent.futures import ThreadPoolExecutor

import dspy
import pytest
import requests

from .openai_server import CHAT_PATH, OpenAIServer, Reply

ENGINES = ["litellm", "lm15"]


def make_lm(server: OpenAIServer, engine: str, **kwargs) -> dspy.LM:
    kwargs = {"api_key": server.api_key, "num_retries": 0, **kwargs}
    return dspy.LM("openai/gpt-4o-mini", api_base=server.api_base, engine=engine, **kwargs)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


def test_reply_usage_and_cost(openai_server, engine):
    openai_server.handler = lambda request: Reply(
        "hello",
        usage={"prompt_tokens": 1_000_000, "completion_tokens": 1_000_000, "total_tokens": 2_000_000},
    )
    lm = make_lm(openai_server, engine)

    assert lm("say hello") == ["hello"]

    entry = lm.history[-1]
    assert entry["usage"]["prompt_tokens"] == 1_000_000
    assert entry["cost"] == pytest.approx(0.15 + 0.60)
    [request] = openai_server.requests
    assert request.path == CHAT_PATH
    assert request.authorized
    assert request.prompt == "say hello"
    assert openai_server.api_key not in repr(request)


@pytest.mark.parametrize(
    ("adapter", "kind"),
    [(dspy.ChatAdapter(), None), (dspy.JSONAdapter(), "json_schema")],
    ids=["chat", "json"],
)
def test_structured_output(openai_server, engine, adapter, kind):
    def handler(request):
        if "response_format" in request:
            return '{"answer": 4}'
        return "[[ ## answer ## ]]\n4\n\n[[ ## completed ## ]]"

    openai_server.handler = handler
    with dspy.context(lm=make_lm(openai_server, engine), adapter=adapter):
        assert dspy.Predict("question -> answer: int")(question="2 + 2?").answer == 4

    response_format = openai_server.requests[-1].response_format
    assert (response_format and response_format["type"]) == kind


def test_json_object(openai_server, engine):
    openai_server.handler = lambda request: "{}"
    make_lm(openai_server, engine, response_format={"type": "json_object"})("hi")
    assert openai_server.requests[-1].response_format == {"type": "json_object"}


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, dspy.LMAuthError), (429, dspy.LMRateLimitError), (500, dspy.LMServerError)],
)
def test_error_status(openai_server, engine, status, error):
    openai_server.handler = lambda request: Reply("not now", status=status, headers={"Retry-After": "0"})
    with pytest.raises(error):
        make_lm(openai_server, engine)("hi")


def test_wrong_key(openai_server, engine):
    with pytest.raises(dspy.LMAuthError):
        make_lm(openai_server, engine, api_key="another")("hi")
    assert not openai_server.requests[-1].authorized


def test_truncated_reply(openai_server, engine):
    openai_server.handler = lambda request: Reply("half a sent", finish_reason="length")
    lm = make_lm(openai_server, engine)
    assert lm("hi") == ["half a sent"]
    response = lm.history[-1]["response"]
    last = response.choices[0] if engine == "litellm" else response
    assert last.finish_reason == "length"


def test_reasoning(openai_server):
    openai_server.handler = lambda request: Reply("4", reasoning="two and two")
    [output] = make_lm(openai_server, "litellm")("2 + 2?")
    assert output["text"] == "4"
    assert output["reasoning_content"] == "two and two"


def test_broken_body(openai_server, engine):
    openai_server.handler = lambda request: Reply(raw_body="<html>bad gateway</html>")
    with pytest.raises(dspy.LMError):
        make_lm(openai_server, engine)("hi")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [(CHAT_PATH, b'{"stream": true}', 400), (CHAT_PATH, b"{", 400), ("/v1/embeddings", b"{}", 404)],
    ids=["stream", "not JSON", "unknown path"],
)
def test_unsupported_request(openai_server, path, body, status):
    url = openai_server.api_base.removesuffix("/v1") + path
    headers = {"Authorization": f"Bearer {openai_server.api_key}"}
    with requests.Session() as session:
        response = session.post(url, data=body, headers=headers, timeout=10)
        again = session.post(url, data=body, headers=headers, timeout=10)  # the connection is kept alive
    assert response.status_code == again.status_code == status
    assert response.json()["error"]["message"]


def test_peak_concurrency(openai_server):
    together = threading.Barrier(8, timeout=10)

    def handler(request):
        together.wait()
        return "ok"

    openai_server.handler = handler
    lm = make_lm(openai_server, "lm15", cache=False)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lm, ["hi"] * 8)) == [["ok"]] * 8
    assert openai_server.peak_concurrency == 8
    assert len(openai_server.requests) == 8


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


def test_handler_errors_are_kept():
    with OpenAIServer(lambda request: 1 / 0) as server:
        with pytest.raises(dspy.LMServerError):
            make_lm(server, "lm15")("hi")
        assert isinstance(server.handler_errors[0], ZeroDivisionError)
