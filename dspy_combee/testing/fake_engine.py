"""The engine under the LMs of `testing.py`: it answers from this process and records every call.

It fills DSPy's engine contract (`complete(Request) -> Response` and its async counterpart), so all that DSPy
does around a call (callbacks, history, usage tracking, error types, retries) is real. An engine is shared by
reference under `copy.deepcopy` and `lm.copy(...)`: whatever copies a program makes, there is one record.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import dspy
from dspy import lm15
from dspy.clients.engines.base import validate_request

FinishReason: TypeAlias = Literal["stop", "length", "tool_call", "content_filter", "error"]


def count_tokens(text: str) -> int:
    """Tokens of a text, estimated as a quarter of its characters."""
    return max(1, len(text) // 4)


class Prompt(str):
    """The text of one request: the system prompt and every message, with a blank line between.

    A `str`, so that rules can search it; `system`, `demos` and `question` (the last message) are its pieces.
    `output_fields` are the fields it asks for, in order; `wants_json` says in which of DSPy's two formats.
    """

    system: str
    demos: str
    question: str
    output_fields: tuple[str, ...]
    wants_json: bool

    @classmethod
    def of(cls, request: lm15.Request) -> Prompt:
        """The prompt of a request; parts that are no text appear as a short tag."""
        system = request.system if isinstance(request.system, str) else _parts_text(request.system or ())
        messages = [_parts_text(message.parts) for message in request.messages]
        prompt = cls("\n\n".join(text for text in (system, *messages) if text))
        prompt.system, prompt.demos, prompt.question = system, "\n\n".join(messages[:-1]), messages[-1]
        # The request for output fields is the last thing DSPy writes; text before it is data.
        tail = messages[-1][messages[-1].rfind("Respond with ") :]
        schema: Any = request.config.response_format
        prompt.wants_json = schema is not None or tail.startswith("Respond with a JSON object")
        marked = r"(?:fields: |, then )`(\w+)`" if prompt.wants_json else r"`\[\[ ## (\w+) ## \]\]`"
        names = re.findall(marked, tail) or list((schema or {}).get("schema", {}).get("properties", {}))
        prompt.output_fields = tuple(name for name in names if prompt.wants_json or name != "completed")
        return prompt

    def render(self, fields: Mapping[str, Any]) -> str:
        """`fields` in the format that this prompt asks for: a JSON object, or `[[ ## field ## ]]` markers."""
        if self.wants_json:
            return json.dumps(dict(fields), ensure_ascii=False, default=str)
        texts = {
            k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False, default=str) for k, v in fields.items()
        }
        return "\n\n".join(f"[[ ## {name} ## ]]\n{text}" for name, text in {**texts, "completed": ""}.items())


def _parts_text(parts: Iterable[Any]) -> str:
    return "\n".join(part.text if isinstance(part, lm15.TextPart) else _media_text(part) for part in parts)


def _media_text(part: Any) -> str:
    source = getattr(part, "url", None) or f"{len(getattr(part, 'data', None) or '')} characters of data"
    return f"<{part.type} {getattr(part, 'media_type', None) or ''} {source}>"


@dataclass(frozen=True)
class Reply:
    """What the LM says: a text, or output fields to render in the format that the prompt asks for."""

    text: str | Mapping[str, Any]
    finish_reason: FinishReason = "stop"
    reasoning: str | None = None


@dataclass(frozen=True)
class Call:
    """One call. `reply` is the text, or the error's type and message; times are `time.monotonic()`."""

    prompt: Prompt
    reply: str
    role: str
    started: float
    ended: float


@dataclass(frozen=True)
class Tally:
    """Calls of one role, and their tokens by `count_tokens`."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Recorder:
    """Calls, tallies by role and peak concurrency, under one lock. A pickled copy starts empty."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.lock = threading.Lock()
        self.calls: list[Call] = []
        self.tallies: dict[str, Tally] = {}
        self.running = self.peak = 0

    def __reduce__(self) -> tuple[type[_Recorder], tuple[bool]]:
        return type(self), (self.keep,)

    def snapshot(self) -> list[Call]:
        with self.lock:
            return list(self.calls)

    def start(self) -> None:
        with self.lock:
            self.running += 1
            self.peak = max(self.peak, self.running)

    def finish(self, call: Call) -> None:
        with self.lock:
            self.running -= 1
            old = self.tallies.get(call.role, Tally())
            tokens = (
                old.input_tokens + count_tokens(call.prompt),
                old.output_tokens + count_tokens(call.reply),
            )
            self.tallies[call.role] = Tally(old.calls + 1, *tokens)
            if self.keep:
                self.calls.append(call)


class _Turn:
    """One call in progress: what will be answered and after how long is known before the wait."""

    def __init__(self, engine: FakeEngine, request: lm15.Request) -> None:
        validate_request(request)
        self.engine, self.model, self.prompt = engine, request.model, Prompt.of(request)
        self.role, self.text, self.delay = "unknown", "", 0.0
        self.reply = Reply("")
        self.error: BaseException | None = None

    def __enter__(self) -> _Turn:
        self.engine.recorder.start()
        self.started = time.monotonic()
        try:
            self.role, self.reply, self.delay = self.engine.play(self.prompt)
            spoken = self.reply.text
            self.text = spoken if isinstance(spoken, str) else self.prompt.render(spoken)
        except BaseException as error:  # raised after the wait, by `response`
            self.error, self.text = error, f"{type(error).__name__}: {error}"
            self.delay = self.engine.failure_delay(self.prompt)
        return self

    def __exit__(self, *exc_info: object) -> None:
        call = Call(self.prompt, self.text, self.role, self.started, time.monotonic())
        self.engine.recorder.finish(call)

    def response(self) -> lm15.Response:
        if self.error is not None:
            raise self.error.with_traceback(None)
        parts: list[Any] = [lm15.TextPart(self.text)]
        if self.reply.reasoning is not None:
            parts.insert(0, lm15.ThinkingPart(self.reply.reasoning))
        usage = lm15.Usage(input_tokens=count_tokens(self.prompt), output_tokens=count_tokens(self.text))
        message = lm15.Message.assistant(parts)
        return lm15.Response(None, self.model, message, finish_reason=self.reply.finish_reason, usage=usage)


class FakeEngine:
    """The engine contract over `play`; shared, never copied."""

    def __init__(self, keep_calls: bool) -> None:
        self.recorder = _Recorder(keep_calls)

    def play(self, prompt: Prompt) -> tuple[str, Reply, float]:
        """The role that answers, its reply, and the seconds it takes."""
        raise NotImplementedError

    def failure_delay(self, prompt: Prompt) -> float:
        """The seconds until an error is raised."""
        return 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeEngine:
        return self

    def complete(self, request: lm15.Request) -> lm15.Response:
        """Answer one request."""
        with _Turn(self, request) as turn:
            time.sleep(turn.delay)
            return turn.response()

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        """Answer one request as a stream of events."""
        return lm15.response_to_events(self.complete(request))

    def close(self) -> None:
        """Nothing to close."""


class _AsyncEngine:
    """The same engine for a running event loop: it waits without holding the loop."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> _AsyncEngine:
        return self

    async def complete(self, request: lm15.Request) -> lm15.Response:
        with _Turn(self.engine, request) as turn:
            await asyncio.sleep(turn.delay)
            return turn.response()

    async def stream(self, request: lm15.Request) -> AsyncIterator[Any]:
        for event in lm15.response_to_events(await self.complete(request)):
            yield event

    async def aclose(self) -> None:
        """Nothing to close."""


class FakeLM(dspy.LM):
    """A `dspy.LM` over one of our engines, with the record of its calls."""

    def __init__(self, model: str, engine: FakeEngine, lm_kwargs: Mapping[str, Any]) -> None:
        settings = {"cache": False, "num_retries": 0, **lm_kwargs}
        super().__init__(model, engine=engine, async_engine=_AsyncEngine(engine), **settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeLM:
        return self

    @property
    def _recorder(self) -> _Recorder:
        recorder: _Recorder = self.engine.recorder
        return recorder

    @property
    def peak_concurrency(self) -> int:
        """The most calls that were ever in flight at once."""
        return self._recorder.peak

    @property
    def usage(self) -> dict[str, Tally]:
        """Calls and tokens so far, by role."""
        with self._recorder.lock:
            return dict(self._recorder.tallies)
