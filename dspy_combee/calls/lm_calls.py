"""One reflection-LM call: judged on the raw reply, retried once, accounted for.

A parser that means well turns half a JSON object, a list or an open think tag into an instruction. So the raw
reply decides here: it must have ended by itself, and where a JSON object was asked for, hold a whole one.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import dspy
from dspy.adapters.json_adapter import JSONAdapter
from dspy.utils.callback import BaseCallback
from dspy.utils.exceptions import LMError

from dspy_combee.calls.provider_errors import is_refusal, may_pass
from dspy_combee.records.errors import ProviderError
from dspy_combee.records.secrets import hide_own_secrets, shorten
from dspy_combee.records.text import repair
from dspy_combee.records.types import Usage

T = TypeVar("T")

ATTEMPTS = 2

_METERING = threading.Lock()

# Only what a reply begins with is thinking; a tag further on is part of what it says.
_THINKING = re.compile(r"(?:\s*<think(?:ing)?>.*?</think(?:ing)?>)+", re.DOTALL | re.IGNORECASE)
_OPEN_THINKING = re.compile(r"\s*<think(?:ing)?>", re.IGNORECASE)
_OBJECT = re.compile(r'\{\s*"')
_CUT_OFF = {"length", "max_tokens", "incomplete", "content_filter", "error"}


class MisuseError(TypeError):
    """What the user gave to make the calls does not do what it must, so that no second attempt can mend it."""


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
        usage: What the LM calls of the attempts took.
    """

    value: Any
    error: str | None
    prompt: str
    raw_output: str
    seconds: float
    usage: Usage


class _Ear(BaseCallback):
    """Stands among the modules that a call is made in, where DSPy keeps a history; else it is a callback."""

    def __init__(self, heard: list[Mapping[str, Any]]) -> None:
        self.heard = heard

    @property
    def history(self) -> _Ear:
        return self

    def __len__(self) -> int:
        return 0  # DSPy drops the oldest entry of what has max_history_size of them.

    def append(self, entry: Mapping[str, Any]) -> None:
        self.heard.append(entry)

    def on_lm_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """A call of which nothing else is known, such as its cost."""
        if exception is None:
            self.heard.append({})


def call_lm(function: Callable[[], Any], lm: Any, json_fields: Sequence[str] | Mapping[str, type] = ()) -> LMCallResult:
    """Run `function`, which calls the LM in force, until its reply can be used, at most twice.

    Args:
        function: Makes the call through DSPy and returns the text it is for.
        lm: The reflection LM. The second attempt goes past DSPy's cache.
        json_fields: Where the reply must be a JSON object: the names one of which it must hold, as text. Or a
            mapping from names to types: the object must hold them all, each of its type and be it empty, and
            `function` may return anything.

    Returns:
        The text (or what `function` returned), or the error of the last attempt, with what both attempts took.

    Raises:
        ProviderError: If the provider refuses the call for good (authentication, billing, configuration), or, as
            a transient one, if it turns the call away or cannot be reached.
        MisuseError: If `function` does.
    """
    started = time.perf_counter()
    history: list[Mapping[str, Any]] = []
    unrecorded, value, error = 0, None, None
    for attempt in range(ATTEMPTS):
        heard: list[Mapping[str, Any]] = []
        attempt_lm = lm if attempt == 0 else lm.copy(cache=False)
        try:
            with dspy.context(lm=attempt_lm, **audible()), hearing(heard):
                text = function()
            _check_replies(heard, json_fields)
            value, error = text if isinstance(json_fields, Mapping) else _check_text(text, json_fields), None
        except MisuseError:
            raise
        except Exception as failure:
            if is_refusal(failure):
                raise ProviderError(f"The reflection LM refused the call: {shorten(str(failure))}") from failure
            if may_pass(failure):
                raise _unreachable(failure, usage_of([*history, *heard])) from failure
            error = _cause(failure, heard, json_fields)
            unrecorded += isinstance(failure, LMError)
        history.extend(heard)
        if error is None:
            break
    last: Mapping[str, Any] = history[-1] if history else {}
    return LMCallResult(
        value=value,
        error=error,
        prompt=hide_own_secrets(_render_messages(last)),
        raw_output=hide_own_secrets("\n".join(_texts(last))),
        seconds=time.perf_counter() - started,
        usage=usage_of(history) + Usage(calls=unrecorded),
    )


def _unreachable(failure: Exception, usage: Usage) -> ProviderError:
    text = f"The reflection LM cannot be reached: {shorten(str(failure))}"
    error = ProviderError(text, transient=True, retry_after=getattr(failure, "retry_after", None))
    error.usage = usage
    return error


def _cause(
    failure: Exception, history: Sequence[Mapping[str, Any]], json_fields: Sequence[str] | Mapping[str, type]
) -> str:
    """Why an attempt failed: what is wrong with the raw reply, where that is wrong, tells more than the parser."""
    try:
        _check_replies(history, json_fields)
    except UnusableReplyError as complaint:
        failure = complaint
    return f"{type(failure).__name__}: {shorten(str(failure))}"


def audible() -> dict[str, Any]:
    """Settings under which `hearing` hears the calls of one task, and DSPy keeps hardly more than the user wants."""
    wanted = 0 if dspy.settings.disable_history else dspy.settings.max_history_size
    return {"disable_history": False, "max_history_size": max(100, wanted)}


@contextmanager
def hearing(history: list[Mapping[str, Any]]) -> Iterator[None]:
    """While this lasts, the language-model calls that are made inside are added to `history`.

    Where DSPy's history is turned off (`disable_history`), an empty entry is, which stands for a call of unknown cost.
    """
    # DSPy adds each call to the `history` of every module that it was made in.
    place = "caller_modules"
    if dspy.settings.disable_history or dspy.settings.max_history_size == 0:
        place = "callbacks"
    listening = {place: [*(dspy.settings.get(place) or []), _Ear(history)]}
    # The caller's trace would keep all that these calls were shown, 10,000 of them.
    with dspy.context(trace=[], **listening):
        yield


def usage_of(history: Sequence[Mapping[str, Any]]) -> Usage:
    """What the calls of a DSPy history took."""
    return sum((_entry_usage(entry) for entry in history), Usage())


def _entry_usage(entry: Mapping[str, Any]) -> Usage:
    usage = entry.get("usage") or {}
    if not usage and _was_metered(entry.get("response")):
        return Usage(calls=1, cache_hits=1)  # It shows the cost of the call that filled the cache; it had none.
    cost = entry.get("cost")
    return Usage(
        calls=1,
        input_tokens=int(usage.get("prompt_tokens") or usage.get("input_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens") or usage.get("output_tokens") or 0),
        cost=None if cost is None else float(cost),
    )


def _was_metered(response: Any) -> bool:
    """Whether the reply came with token counts once: an entry without usage is then a cache hit."""
    if _get(response, "cache_hit"):
        return True
    replies = response if isinstance(response, list | tuple) else [response]
    counts = [_get(_get(reply, "usage"), name) for reply in replies for name in ("input_tokens", "total_tokens")]
    return any(count is not None for count in counts)


class UsageMeter:
    """Adds up usage from several threads."""

    def __init__(self) -> None:
        self.usage = Usage()

    def add(self, usage: Usage) -> None:
        """Add what a call took."""
        with _METERING:
            self.usage = self.usage + usage

    def take(self) -> Usage:
        """What was added since this was last asked."""
        with _METERING:
            usage, self.usage = self.usage, Usage()
        return usage

    def get_state(self) -> Usage:
        """What a resumed run needs to go on counting."""
        return self.usage

    def set_state(self, state: Usage) -> None:
        """Go on from the count of another run."""
        self.usage = state


def _check_text(text: Any, json_fields: Sequence[str]) -> str:
    if not isinstance(text, str):
        raise UnusableReplyError(f"expected a text, got {type(text).__name__}")
    if not (json_fields and text.strip()):  # As a field of a JSON object, a think tag is a text like any other.
        check_reply(text)
    return str(hide_own_secrets(repair(text.strip())))


def _check_replies(history: Sequence[Mapping[str, Any]], json_fields: Sequence[str] | Mapping[str, type]) -> None:
    for entry in history:
        reasons = _CUT_OFF & _finish_reasons(entry.get("response"))
        if reasons:
            raise UnusableReplyError(f"the reply was cut off (finish reason {sorted(reasons)[0]!r})")
    # Without JSON, DSPy asks again in JSON when it cannot read a reply: only the last one counts then.
    for entry in history if json_fields else history[-1:]:
        for text in _texts(entry) or [""]:
            check_reply(text, json_fields)


def check_reply(text: str, json_fields: Sequence[str] | Mapping[str, type] = ()) -> None:
    """Refuse a raw reply that is empty, left open, or not the JSON object that was asked for.

    Args:
        text: The raw reply.
        json_fields: Names one of which the JSON object must hold as a text that is not blank; none: any text. Or
            names with types: the JSON object must hold them all.

    Raises:
        UnusableReplyError: Saying what is wrong.
    """
    if not json_fields:
        _without_thinking(text)
        return
    fields = json.loads(json_part(text, tuple(json_fields)), strict=False)
    if isinstance(json_fields, Mapping):
        _check_types(fields, json_fields)
        return
    held = [fields[name] for name in json_fields if name in fields]
    if not held:
        raise UnusableReplyError(f"the reply's JSON object has none of the fields {', '.join(json_fields)}")
    if not isinstance(held[0], str):
        raise UnusableReplyError(f"the reply's field is no text but {shorten(repr(held[0]), 80)}")
    if not repair(held[0]).strip():
        raise UnusableReplyError("the reply's field is blank")


def _check_types(fields: Mapping[str, Any], types: Mapping[str, type]) -> None:
    missing = [name for name in types if name not in fields]
    if missing:
        raise UnusableReplyError(f"the reply's JSON object has no field {', '.join(missing)}")
    for name, kind in types.items():
        if not isinstance(fields[name], kind):
            given = shorten(repr(fields[name]), 80)
            raise UnusableReplyError(f"the reply's field {name} must be a {kind.__name__}, not {given}")


def _without_thinking(reply: str) -> str:
    thinking = _THINKING.match(reply)
    text = reply[thinking.end() :] if thinking else reply
    if not text.strip():
        raise UnusableReplyError("the reply is empty")
    if _OPEN_THINKING.match(text):
        raise UnusableReplyError("the reply ends inside a think tag")
    return text


def json_part(reply: str, names: Sequence[str]) -> str:
    """The JSON object of a reply, which may stand after thinking, in prose and in a code fence.

    Args:
        reply: The raw reply.
        names: Names that the object may hold; a second object with one of them is a second answer.

    Raises:
        UnusableReplyError: If there is no whole JSON object, or it is not clear which one is meant.
    """
    text = _without_thinking(reply)
    start = _OBJECT.search(text)
    if start is None:
        raise UnusableReplyError("the reply holds no JSON object")
    before = text[: start.start()]
    if before.rstrip().endswith("["):
        raise UnusableReplyError("the reply is a list, not a JSON object")
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text, start.start())
    except (json.JSONDecodeError, RecursionError) as error:
        raise UnusableReplyError(f"the reply's JSON object is not whole: {error}") from error
    after = text[end:]
    if before.count("```") % 2 and "```" not in after:
        raise UnusableReplyError("the reply ends inside a code fence")
    if any(re.search(r"\{\W{0,20}" + re.escape(name), after) for name in names):
        raise UnusableReplyError("the reply holds two answers")
    return text[start.start() : end]


class StrictJSONAdapter(JSONAdapter):
    """A `JSONAdapter` that mends nothing, and that thinking or prose around the JSON object does not confuse."""

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        """The output fields of a reply."""
        part = json_part(hide_own_secrets(completion), tuple(signature.output_fields))
        fields = super().parse(signature, part)
        return {name: repair(value) if isinstance(value, str) else value for name, value in fields.items()}


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


def _render_messages(entry: Mapping[str, Any]) -> str:
    messages = entry.get("messages") or [{"role": "user", "content": entry.get("prompt") or ""}]
    return "\n\n".join(f"[{message.get('role')}]\n{_render_content(message.get('content'))}" for message in messages)


def _render_content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or f"<{part.get('type')}>") for part in content)
    return str(content)
