"""A real HTTP server on loopback that speaks the OpenAI chat API; a function of the test writes the replies.

    with OpenAIServer(lambda request: "hello") as server:
        lm = dspy.LM("openai/gpt-4o-mini", api_base=server.api_base, api_key=server.api_key)

The handler takes the request's JSON body and returns the reply's text or a `Reply`. It is called from one
thread per connection, so it must be thread-safe.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dspy import lm15

CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class Reply:
    """One answer of the server; everything but the text has the default of a healthy provider."""

    text: str = ""
    finish_reason: str = "stop"
    status: int = 200
    """Anything but 200 sends OpenAI's error body with `text` as the message."""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0
    """Seconds before the answer; closing the server ends the wait."""
    usage: Mapping[str, Any] | None = None
    """`None` counts about four characters a token."""
    reasoning: str | None = None
    raw_body: str | bytes | None = None
    """Sent in place of the JSON body, as it is."""


@dataclass(frozen=True)
class RecordedRequest:
    """What a client sent. The key itself is never kept, only whether it was the right one."""

    path: str
    body: dict[str, Any]
    authorized: bool
    headers: Mapping[str, str]
    """By lower-case name, without `authorization`."""

    @property
    def response_format(self) -> dict[str, Any] | None:
        """What structured output was asked for, if any."""
        return self.body.get("response_format")

    @property
    def prompt(self) -> str:
        """The text of all messages."""
        return _prompt_text(self.body)


Handler = Callable[[dict[str, Any]], "str | Reply"]


class OpenAIServer:
    """The server; a context manager that listens from `__enter__` to `__exit__`."""

    def __init__(self, handler: Handler = lambda request: "ok", api_key: str = "test-key") -> None:
        self.handler = handler
        self.api_key = api_key
        self.requests: list[RecordedRequest] = []
        self.handler_errors: list[Exception] = []
        self.peak_concurrency = 0
        self._in_flight = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._http = _HTTPServer(("127.0.0.1", 0), _ChatHandler)
        self._http.owner = self

    @property
    def api_base(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    def __enter__(self) -> OpenAIServer:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing.set()
        self.stop_listening()

    def stop_listening(self) -> None:
        """Refuse connections from now on, and drop those there are: the provider is gone."""
        self._http.shutdown()
        self._http.server_close()
        self._http.close_connections()

    def answer(self, request: RecordedRequest) -> Reply:
        """Record the request and find its reply, waiting as long as the reply says."""
        with self._lock:
            self.requests.append(request)
            self._in_flight += 1
            self.peak_concurrency = max(self.peak_concurrency, self._in_flight)
        try:
            reply = self._reply(request)
            self._closing.wait(reply.delay)
            return reply
        finally:
            with self._lock:
                self._in_flight -= 1

    def _reply(self, request: RecordedRequest) -> Reply:
        if request.path != CHAT_PATH:
            return Reply(f"no such path: {request.path}", status=404)
        if not request.authorized:
            return Reply("Incorrect API key provided.", status=401)
        if request.body.get("stream"):
            return Reply("This server does not stream.", status=400)
        try:
            reply = self.handler(request.body)
        except Exception as error:  # a bug in the test: kept, so that the fixture can fail with it
            self.handler_errors.append(error)
            return Reply(f"the test's handler raised {error!r}", status=500)
        return Reply(reply) if isinstance(reply, str) else reply


def relay(body: dict[str, Any], engine: Any) -> str:
    """The text that a fake engine of `dspy_combee.testing` answers a request with."""
    texts = [message["content"] for message in body["messages"]]
    messages = tuple(lm15.Message.user(text) for text in texts[1:] or texts)
    return str(engine.complete(lm15.Request("m", messages, system=texts[0] if texts[1:] else None)).text)


class _HTTPServer(ThreadingHTTPServer):
    request_queue_size = 256
    owner: OpenAIServer

    def __init__(self, *args: Any) -> None:
        self._connections: set[Any] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """Let go of the clients that keep their connection alive."""
        for connection in list(self._connections):
            self.shutdown_request(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event."""


class _ChatHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keep-alive
    wbufsize = -1  # head and body in one packet: Nagle's algorithm would hold the second back for 40 ms
    server: _HTTPServer

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            body = json.loads(raw)
        except ValueError:
            self._send(Reply("The body is not JSON.", status=400), {})
            return
        owner = self.server.owner
        authorization = self.headers.get("Authorization")
        request = RecordedRequest(
            path=self.path,
            body=body,
            authorized=authorization == f"Bearer {owner.api_key}",
            headers={k.lower(): v for k, v in self.headers.items() if k.lower() != "authorization"},
        )
        self._send(owner.answer(request), body)

    def do_GET(self) -> None:
        self._send(Reply(f"no such path: {self.path}", status=404), {})

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""

    def _send(self, reply: Reply, request: dict[str, Any]) -> None:
        if reply.raw_body is not None:
            payload = reply.raw_body.encode() if isinstance(reply.raw_body, str) else reply.raw_body
        else:
            body = _completion(reply, request) if reply.status == 200 else _error(reply)
            payload = json.dumps(body).encode()
        self.send_response(reply.status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(payload)), **reply.headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)


def _completion(reply: Reply, request: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    prompt_tokens, completion_tokens = len(_prompt_text(request)) // 4 + 1, len(reply.text) // 4 + 1
    usage = reply.usage or {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return {
        "id": "chatcmpl-test",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": request.get("model", "test"),
        "choices": [{"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}],
        "usage": dict(usage),
    }


def _error(reply: Reply) -> dict[str, Any]:
    types = {401: "invalid_request_error", 429: "rate_limit_error"}
    kind = types.get(reply.status, "server_error" if reply.status >= 500 else "invalid_request_error")
    return {"error": {"message": reply.text or kind, "type": kind, "param": None, "code": None}}


def _prompt_text(request: dict[str, Any]) -> str:
    parts: list[str] = []
    for message in request.get("messages", []):
        content = message.get("content") or ""
        blocks = [{"text": content}] if isinstance(content, str) else content
        parts.extend(block.get("text", "") for block in blocks)
    return "\n".join(parts)
