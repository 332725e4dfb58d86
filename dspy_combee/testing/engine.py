"""LMs that answer from this process and record every call; `ScriptedLM` answers as a test writes down.

A fake engine fills DSPy's engine contract (`complete(Request) -> Response` and its async counterpart), so all that
DSPy does around a call (callbacks, history, usage tracking, error types, retries) is real. An engine is shared by
reference under `copy.deepcopy` and `lm.copy(...)`: whatever copies a program makes, there is one record of calls.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import dspy
from dspy import lm15
from dspy.clients.engines.base import validate_request
from dspy.utils.exceptions import LMError


def count_tokens(text: str) -> int:
    """Estimate the tokens of a text as a quarter of its characters."""
    return max(1, len(text) // 4)


class Prompt(str):
    """Hold the text of one request: the system prompt and every message, with a blank line between.

    It is a `str`, so that rules can search it.
    """

    system: str
    """The system prompt."""
    demos: str
    """All messages but the last."""
    question: str
    """The last message."""
    output_fields: tuple[str, ...]
    """The names of the fields it asks for, in order."""
    wants_json: bool
    """Whether it asks for a JSON object, rather than for `[[ ## field ## ]]` markers."""

    @classmethod
    def of(cls, request: lm15.Request) -> Prompt:
        """Return the prompt of a request; parts that are no text appear as a short tag."""
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

    def input(self, name: str) -> str:
        """Return the text of an input field of the question; "" if there is none of that name."""
        pattern = rf"\[\[ ## {name} ## \]\]\n(.*?)(?=\n\n\[\[ ## |\n\nRespond with |\Z)"
        found = re.search(pattern, self.question, re.DOTALL)
        return found[1] if found else ""

    def render(self, fields: Mapping[str, Any]) -> str:
        """Return output fields in the format that this prompt asks for."""
        if self.wants_json:
            return _json(dict(fields))
        texts = {name: value if isinstance(value, str) else _json(value) for name, value in fields.items()}
        return "\n\n".join(f"[[ ## {name} ## ]]\n{text}" for name, text in {**texts, "completed": ""}.items())


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _parts_text(parts: Iterable[Any]) -> str:
    return "\n".join(part.text if isinstance(part, lm15.TextPart) else _media_tag(part) for part in parts)


def _media_tag(part: Any) -> str:
    source = getattr(part, "url", None) or f"{len(getattr(part, 'data', None) or '')} characters of data"
    return f"<{part.type} {getattr(part, 'media_type', None) or ''} {source}>"


@dataclass(frozen=True)
class Reply:
    """Hold what the LM says: a text, or output fields to render in the format that the prompt asks for."""

    text: str | Mapping[str, Any]
    finish_reason: Literal["stop", "length", "tool_call", "content_filter", "error"] = "stop"
    reasoning: str | None = None


@dataclass(frozen=True)
class Call:
    """Record one call."""

    prompt: Prompt
    reply: str
    """The reply's text, or the error's type and message."""
    role: str
    started: float
    """By `time.monotonic()`, as is `ended`."""
    ended: float


@dataclass(frozen=True)
class Tally:
    """Count the calls of one role, and their tokens by `count_tokens`."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Record:
    """Keep calls, tallies by role and peak concurrency, under one lock. A pickled copy starts empty."""

    def __init__(self, keep_calls: bool) -> None:
        self.keep_calls = keep_calls
        self.lock = threading.Lock()
        self.calls: list[Call] = []
        self.tallies: dict[str, Tally] = {}
        self.running = self.peak = 0

    def __reduce__(self) -> tuple[type[_Record], tuple[bool]]:
        return type(self), (self.keep_calls,)

    def start(self) -> None:
        with self.lock:
            self.running += 1
            self.peak = max(self.peak, self.running)

    def finish(self, call: Call) -> None:
        read, written = count_tokens(call.prompt), count_tokens(call.reply)
        with self.lock:
            self.running -= 1
            old = self.tallies.get(call.role, Tally())
            self.tallies[call.role] = Tally(old.calls + 1, old.input_tokens + read, old.output_tokens + written)
            if self.keep_calls:
                self.calls.append(call)


class FakeEngine:
    """Answer requests by `play`, which a subclass defines. One object serves all copies of an LM.

    Args:
        keep_calls: Whether to keep every call, or only the tallies.
    """

    def __init__(self, keep_calls: bool) -> None:
        self.record = _Record(keep_calls)

    def play(self, prompt: Prompt) -> tuple[str, Reply, float]:
        """Return the role that answers, its reply, and the seconds it takes."""
        raise NotImplementedError

    def failure_delay(self, prompt: Prompt) -> float:
        """Return the seconds until an error of `play` is raised."""
        return 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeEngine:
        return self

    def complete(self, request: lm15.Request) -> lm15.Response:
        """Answer one request."""
        with self.turn(request) as (delay, answer):
            time.sleep(delay)
            return answer()

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        """Answer one request as a stream of events."""
        return lm15.response_to_events(self.complete(request))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    @contextmanager
    def turn(self, request: lm15.Request) -> Iterator[tuple[float, Callable[[], lm15.Response]]]:
        """Record one call; give the seconds to wait, and what then returns the response or raises the error."""
        validate_request(request)
        prompt, role, reply = Prompt.of(request), "unknown", Reply("")
        error: BaseException | None = None
        self.record.start()
        started = time.monotonic()
        try:
            role, reply, delay = self.play(prompt)
            text = reply.text if isinstance(reply.text, str) else prompt.render(reply.text)
        except BaseException as raised:  # for after the wait
            error, text, delay = raised, f"{type(raised).__name__}: {raised}", self.failure_delay(prompt)

        def answer() -> lm15.Response:
            if error is not None:
                raise error.with_traceback(None)
            thoughts = [] if reply.reasoning is None else [lm15.ThinkingPart(reply.reasoning)]
            message = lm15.Message.assistant([*thoughts, lm15.TextPart(text)])
            usage = lm15.Usage(input_tokens=count_tokens(prompt), output_tokens=count_tokens(text))
            return lm15.Response(None, request.model, message, finish_reason=reply.finish_reason, usage=usage)

        try:
            yield delay, answer
        finally:
            self.record.finish(Call(prompt, text, role, started, time.monotonic()))


class _AsyncEngine:
    """Offer an engine to a running event loop, which a wait does not hold up."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> _AsyncEngine:
        return self

    async def complete(self, request: lm15.Request) -> lm15.Response:
        with self.engine.turn(request) as (delay, answer):
            await asyncio.sleep(delay)
            return answer()

    async def stream(self, request: lm15.Request) -> AsyncIterator[Any]:
        for event in lm15.response_to_events(await self.complete(request)):
            yield event

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""


class FakeLM(dspy.LM):
    """Put a fake engine behind a `dspy.LM`, which neither caches nor retries unless told to.

    Args:
        model: The model's name.
        engine: What answers.
        lm_kwargs: For `dspy.LM`.
    """

    def __init__(self, model: str, engine: FakeEngine, lm_kwargs: Mapping[str, Any]) -> None:
        settings = {"cache": False, "num_retries": 0, **lm_kwargs}
        super().__init__(model, engine=engine, async_engine=_AsyncEngine(engine), **settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeLM:
        return self

    @property
    def peak_concurrency(self) -> int:
        """Return the most calls that were ever in flight at once."""
        return int(self.engine.record.peak)

    @property
    def usage(self) -> dict[str, Tally]:
        """Return calls and tokens so far, by role."""
        with self.engine.record.lock:
            return dict(self.engine.record.tallies)

    @property
    def calls(self) -> list[Call]:
        """Return every call so far, in the order in which they ended; none where only tallies are kept."""
        with self.engine.record.lock:
            return list(self.engine.record.calls)


# Scripts ----------------------------------------------------------------------------------------------------

Matcher: TypeAlias = "str | re.Pattern[str] | Callable[[Prompt], bool]"
ReplyLike: TypeAlias = (
    "str | Mapping[str, Any] | Reply | BaseException | Callable[[Prompt], ReplyLike] "
    "| list[ReplyLike] | tuple[ReplyLike, ...]"
)
Latency: TypeAlias = "float | Callable[[Prompt, random.Random], float]"


class UnmatchedPromptError(LMError, AssertionError):
    """Say that no rule of a `ScriptedLM` fits a prompt. DSPy passes it on as it is, since it is an `LMError`."""


class ScriptedLM(FakeLM):
    """Answer by what matters in a prompt, as a test writes it down.

    The first rule that matches and has a reply left answers. A matcher is a substring, a compiled regular
    expression or a predicate over the `Prompt`. A reply is a text; a dict of output fields (rendered as the
    prompt asks); a `Reply`; an exception (a `dspy.lm15` error is what a provider would raise; `TimeoutError`
    and `ConnectionError` are translated); a callable of the `Prompt` that returns one of these; or a list of
    them, each used once, in order.

    Args:
        rules: (matcher, reply) pairs, or a mapping.
        default: The reply where no rule has one. Without it such a prompt raises `UnmatchedPromptError`.
        latency: Seconds per call, or a callable of the prompt and a `random.Random`.
        model: The model's name.
        **lm_kwargs: For `dspy.LM`.
    """

    def __init__(
        self,
        rules: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (),
        default: ReplyLike | None = None,
        *,
        latency: Latency = 0.0,
        model: str = "scripted/lm",
        **lm_kwargs: Any,
    ) -> None:
        pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
        if default is not None:
            pairs.append(("", default))
        super().__init__(model, _Script(pairs, latency), lm_kwargs)


class _Script(FakeEngine):
    def __init__(self, rules: Iterable[tuple[Matcher, ReplyLike]], latency: Latency) -> None:
        super().__init__(keep_calls=True)
        # A list of replies is used up, so it is ours alone.
        self.rules = [(matcher, list(reply) if isinstance(reply, list | tuple) else reply) for matcher, reply in rules]
        self.latency, self.rng = latency, random.Random(0)

    def play(self, prompt: Prompt) -> tuple[str, Reply, float]:
        return "scripted", _as_reply(self._pick(prompt), prompt), self.failure_delay(prompt)

    def failure_delay(self, prompt: Prompt) -> float:
        return self.latency(prompt, self.rng) if callable(self.latency) else self.latency

    def _pick(self, prompt: Prompt) -> ReplyLike:
        for matcher, reply in self.rules:
            if _matches(matcher, prompt):
                if not isinstance(reply, list):
                    return reply
                with self.record.lock:
                    if reply:
                        return reply.pop(0)
        raise UnmatchedPromptError(
            f"None of the {len(self.rules)} rules has a reply for the prompt that ends in:\n{prompt[-600:]}"
        )


def _matches(matcher: Matcher, prompt: Prompt) -> bool:
    if isinstance(matcher, str):
        return matcher in prompt
    return bool(matcher.search(prompt) if isinstance(matcher, re.Pattern) else matcher(prompt))


def _as_reply(chosen: ReplyLike, prompt: Prompt) -> Reply:
    if isinstance(chosen, Reply):
        return chosen
    if isinstance(chosen, str | Mapping):
        return Reply(chosen)
    # An engine raises DSPy's errors: Python's own for connections are translated.
    if isinstance(chosen, TimeoutError):
        raise lm15.TimeoutError(str(chosen))
    if isinstance(chosen, ConnectionError):
        raise lm15.TransportError(str(chosen))
    if isinstance(chosen, BaseException):
        raise chosen
    if callable(chosen):
        return _as_reply(chosen(prompt), prompt)
    raise TypeError(f"a reply is a text, fields, a Reply, an exception or a callable, not {chosen!r}")
