"""One reflection-LM call: judged on the raw reply, retried once, accounted for.

A parser that means well turns half a JSON object, a list or an open think tag into an instruction. So the raw
reply decides here: it must have ended by itself, and where a JSON object was asked for, hold a whole one.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dspy
from dspy.utils.exceptions import LMAuthError, LMBillingError, LMConfigurationError, LMUnsupportedModelError

from dspy_combee.errors import ProviderError
from dspy_combee.text import repair, shorten

ATTEMPTS = 2

# Errors that no second attempt can mend and that say nothing about the prompt.
FATAL_ERRORS = (LMAuthError, LMBillingError, LMConfigurationError, LMUnsupportedModelError)

_THINKING = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL | re.IGNORECASE)
_OPEN_THINKING = re.compile(r"<think(?:ing)?>", re.IGNORECASE)
_TRUNCATED = {"length", "max_tokens", "incomplete"}


class UnusableReplyError(ValueError):
    """The reply of a language model cannot be used; the message says why."""


@dataclass(frozen=True)
class LMCallResult:
    """What a reflection-LM call gave and what it took.

    Attributes:
        value: What the call returned; None when both attempts failed.
        error: Why both attempts failed; None when one did not.
        prompt: The chat messages of the last LM call, as text.
        raw_output: The reply of the last LM call.
        seconds: Wall time of the attempts together.
        input_tokens: Prompt tokens reported, cache hits not counted.
        output_tokens: Reply tokens reported, cache hits not counted.
        cost: US dollars, cache hits at zero; None when a call reported no cost.
        calls: Calls of the LM.
    """

    value: Any
    error: str | None
    prompt: str
    raw_output: str
    seconds: float
    input_tokens: int
    output_tokens: int
    cost: float | None
    calls: int


class _Listener(dspy.Module):
    """Runs a function; its `history` then holds the LM calls made inside, this thread's only."""

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


def call_lm(function: Callable[[], str], lm: Any, json_fields: Sequence[str] = ()) -> LMCallResult:
    """Run `function`, which calls the LM in force, until its reply can be used, at most twice.

    Args:
        function: Makes the call through DSPy and returns the text it is for.
        lm: The reflection LM. The second attempt goes past DSPy's cache.
        json_fields: Where the reply must be a JSON object: the names one of which it must hold, as text.

    Returns:
        The text, or the error of the last attempt, with what both attempts took.

    Raises:
        ProviderError: If the provider refuses the call for good (authentication, billing, configuration).
    """
    started = time.perf_counter()
    history: list[Mapping[str, Any]] = []
    calls, value, error = 0, None, None
    for attempt in range(ATTEMPTS):
        listener: Any = _Listener()  # type: ignore[no-untyped-call]
        attempt_lm = lm if attempt == 0 else lm.copy(cache=False)
        try:
            with dspy.context(lm=attempt_lm, disable_history=False, max_history_size=1000):
                text = listener(function)
            _check_replies(listener.history, json_fields)
            value = _check_text(text)
            error = None
        except FATAL_ERRORS as fatal:
            raise ProviderError(f"The reflection LM refused the call: {shorten(str(fatal))}") from fatal
        except Exception as failure:
            error = f"{type(failure).__name__}: {shorten(str(failure))}"
        calls += max(len(listener.history), 1 if error else 0)
        history.extend(listener.history)
        if error is None:
            break
    last: Mapping[str, Any] = history[-1] if history else {}
    return LMCallResult(
        value=value,
        error=error,
        prompt=_render_messages(last),
        raw_output="\n".join(_texts(last)),
        seconds=time.perf_counter() - started,
        input_tokens=sum(_tokens(entry, "prompt_tokens") for entry in history),
        output_tokens=sum(_tokens(entry, "completion_tokens") for entry in history),
        cost=_total_cost(history),
        calls=calls,
    )


def _check_text(text: Any) -> str:
    if not isinstance(text, str):
        raise UnusableReplyError(f"expected a text, got {type(text).__name__}")
    if not text.strip():
        raise UnusableReplyError("the reply is empty")
    return repair(text.strip())


def _check_replies(history: Sequence[Mapping[str, Any]], json_fields: Sequence[str]) -> None:
    for entry in history:
        reasons = _TRUNCATED & _finish_reasons(entry.get("response"))
        if reasons:
            raise UnusableReplyError(f"the reply was cut off (finish reason {sorted(reasons)[0]!r})")
    if history:
        for text in _texts(history[-1]):
            check_reply(text, json_fields)


def check_reply(text: str, json_fields: Sequence[str] = ()) -> None:
    """Refuse a raw reply that is empty, left open, or not the JSON object that was asked for.

    Args:
        text: The raw reply.
        json_fields: Names one of which the JSON object must hold as a text that is not blank; none: any text.

    Raises:
        UnusableReplyError: Saying what is wrong.
    """
    spoken = _THINKING.sub("", text)
    if not spoken.strip():
        raise UnusableReplyError("the reply is empty")
    if _OPEN_THINKING.match(spoken.lstrip()):
        raise UnusableReplyError("the reply ends inside a think tag")
    if not json_fields:
        return
    fields = _json_object(spoken)
    held = [fields[name] for name in json_fields if name in fields]
    if not held:
        raise UnusableReplyError(f"the reply's JSON object has none of the fields {', '.join(json_fields)}")
    if not isinstance(held[0], str) or not held[0].strip():
        raise UnusableReplyError(f"the reply's field is {'blank' if held[0] == '' else 'no text'}")


def _json_object(text: str) -> dict[str, Any]:
    start = text.find("{")
    before = text[:start] if start >= 0 else text
    if before.count("```") % 2 and "```" not in text[start:]:
        raise UnusableReplyError("the reply ends inside a code fence")
    if start < 0:
        raise UnusableReplyError("the reply holds no JSON object")
    if before.strip().startswith("["):
        raise UnusableReplyError("the reply is a list, not a JSON object")
    try:
        value, _ = json.JSONDecoder(strict=False).raw_decode(text[start:])
    except json.JSONDecodeError as error:
        raise UnusableReplyError(f"the reply's JSON object is not whole: {error}") from error
    if not isinstance(value, dict):
        raise UnusableReplyError("the reply is no JSON object")
    return value


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _finish_reasons(response: Any) -> set[str]:
    """The finish reasons of a history entry's response: DSPy's own form, or a provider's."""
    replies = response if isinstance(response, list | tuple) else (_get(response, "choices") or [response])
    reasons = {_get(reply, "finish_reason") for reply in replies} | {_get(response, "status")}
    return {reason for reason in reasons if isinstance(reason, str)}


def _texts(entry: Mapping[str, Any]) -> list[str]:
    outputs = entry.get("outputs") or []
    return [str((output.get("text") if isinstance(output, Mapping) else output) or "") for output in outputs]


def _tokens(entry: Mapping[str, Any], name: str) -> int:
    return int((entry.get("usage") or {}).get(name) or 0)


def _total_cost(history: Sequence[Mapping[str, Any]]) -> float | None:
    # A cache hit keeps the old cost but has no usage: it costs nothing.
    costs = [entry.get("cost") for entry in history if entry.get("usage")]
    return None if None in costs else float(sum(cost for cost in costs if cost is not None))


def _render_messages(entry: Mapping[str, Any]) -> str:
    messages = entry.get("messages") or [{"role": "user", "content": entry.get("prompt") or ""}]
    return "\n\n".join(f"[{message.get('role')}]\n{_render_content(message.get('content'))}" for message in messages)


def _render_content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or f"<{part.get('type')}>") for part in content)
    return str(content)
