"""One reflection-LM call: judged on the raw reply, retried once, accounted for.

A lenient parser turns half a JSON object, a list or an open think tag into an instruction. So the raw reply decides
here: it must have ended by itself and, if a JSON object was asked for, hold a whole one.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import dspy
from dspy.adapters.json_adapter import JSONAdapter
from dspy.clients import base_lm
from dspy.utils.callback import BaseCallback
from dspy.utils.exceptions import LMError
from pydantic import BaseModel, ModelWrapValidatorHandler, PrivateAttr, model_validator

from dspy_combee.calls.provider_errors import is_refusal, may_pass
from dspy_combee.records.errors import ProviderError
from dspy_combee.records.secrets import hide_own_secrets, shorten
from dspy_combee.records.text import repair
from dspy_combee.records.types import Usage

T = TypeVar("T")

ATTEMPTS = 2

_METER_LOCK = threading.Lock()
_HISTORY_LOCK = threading.Lock()
# With a small limit, threads that append to one history at a time may pop from an empty list.
_FORCED_SIZE = 100

# Only a think tag that begins a reply is thinking; a later one is part of the text.
_THINKING = re.compile(r"(?:\s*<think(?:ing)?>.*?</think(?:ing)?>)+", re.DOTALL | re.IGNORECASE)
_OPEN_THINKING = re.compile(r"\s*<think(?:ing)?>", re.IGNORECASE)
_OBJECT = re.compile(r'\{\s*"')
_CUT_OFF = {"length", "max_tokens", "incomplete", "content_filter", "error"}


class MisuseError(TypeError):
    """Report that an object of the user's that makes the calls breaks its contract, so that a retry cannot help."""


class UnusableReplyError(ValueError):
    """Report why the reply of a language model cannot be used."""


@dataclass(frozen=True)
class LMCallResult:
    """Hold what a reflection-LM call returned and used."""

    value: Any
    """What the call returned; None if both attempts failed."""
    error: str | None
    """Why both attempts failed; None if one did not."""
    prompt: str
    """The chat messages of the last LM call, as text."""
    raw_output: str
    """The reply of the last LM call."""
    seconds: float
    """Wall time of both attempts."""
    usage: Usage
    """Usage of the LM calls of both attempts."""


def call_lm(function: Callable[[], Any], lm: Any, json_fields: Sequence[str] | Mapping[str, type] = ()) -> LMCallResult:
    """Run `function`, which calls the LM in force, until its reply can be used, at most twice.

    Args:
        function: Makes the call through DSPy and returns the text that was asked for.
        lm: The reflection LM. The second attempt bypasses DSPy's cache.
        json_fields: Names of which the reply, a JSON object, must hold one, as text. Or a mapping from names to
            types: the object must hold every name with a value of its type, which may be empty, and `function` may
            return anything. By default the reply is no JSON.

    Raises:
        ProviderError: If the provider refuses the call for good (authentication, billing, configuration), or, marked
            as transient, if it rejects the call for now or cannot be reached.
        MisuseError: If `function` raises it.
    """
    started = time.perf_counter()
    history: list[Mapping[str, Any]] = []
    failed_calls, value, error = 0, None, None
    for attempt in range(ATTEMPTS):
        entries: list[Mapping[str, Any]] = []
        attempt_lm = lm if attempt == 0 else lm.copy(cache=False)
        try:
            with dspy.context(lm=attempt_lm), collect_history(entries, force=True):
                text = function()
            _check_replies(entries, json_fields)
            value, error = text if isinstance(json_fields, Mapping) else _check_text(text, json_fields), None
        except MisuseError:
            raise
        except Exception as failure:
            if is_refusal(failure):
                raise ProviderError(f"The reflection LM refused the call: {shorten(str(failure))}") from failure
            if may_pass(failure):
                raise _unreachable(failure, usage_of([*history, *entries])) from failure
            error = _reason(failure, entries, json_fields)
            failed_calls += isinstance(failure, LMError)
        history.extend(entries)
        if error is None:
            break
    last: Mapping[str, Any] = history[-1] if history else {}
    return LMCallResult(
        value=value,
        error=error,
        prompt=hide_own_secrets(_render_messages(last)),
        raw_output=hide_own_secrets("\n".join(_texts(last))),
        seconds=time.perf_counter() - started,
        usage=usage_of(history) + Usage(calls=failed_calls),
    )


def _unreachable(failure: Exception, usage: Usage) -> ProviderError:
    text = f"The reflection LM cannot be reached: {shorten(str(failure))}"
    error = ProviderError(text, transient=True, retry_after=getattr(failure, "retry_after", None))
    error.usage = usage
    return error


def _reason(
    failure: Exception, entries: Sequence[Mapping[str, Any]], json_fields: Sequence[str] | Mapping[str, type]
) -> str:
    """Say why an attempt failed: a fault of the raw reply, if it has one, explains more than the parser's error."""
    try:
        _check_replies(entries, json_fields)
    except UnusableReplyError as complaint:
        failure = complaint
    return f"{type(failure).__name__}: {shorten(str(failure))}"


def ask(
    predictor: Any, inputs: Mapping[str, Any], lm: Any, types: Mapping[str, type], meter: UsageMeter
) -> LMCallResult:
    """Make one call with a `dspy.Predict` and `StrictJSONAdapter`; the value of the result is the prediction.

    Args:
        predictor: The `dspy.Predict`.
        inputs: Its inputs, safe for a prompt (`records.text.as_data`).
        lm: The reflection LM.
        types: The fields that the reply must hold, and their types.
        meter: Counts what the call used.

    Raises:
        ProviderError: As in `call_lm`.
    """

    def predict() -> Any:
        with dspy.context(adapter=StrictJSONAdapter()):
            return predictor(**hide_own_secrets(dict(inputs)))

    try:
        result = call_lm(predict, lm, types)
    except ProviderError as error:
        meter.add(error.usage or Usage())
        raise
    meter.add(result.usage)
    return result


class AsGiven(BaseModel):
    """Keep an item of a reply as it was given, valid or not, while the prompt shows the schema of the subclass."""

    _given: Any = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: ModelWrapValidatorHandler[AsGiven]) -> AsGiven:
        made = cls.model_construct()
        made._given = value
        return made

    @property
    def given(self) -> Any:
        """Return the item as it stood in the reply."""
        return self._given


# History and usage --------------------------------------------------------------------------------------------


class _HistoryCollector(BaseCallback):
    """Collect the history entry of every LM call made in a block.

    DSPy appends entries to the `history` of the LM and of each active module, so this poses as a module. With `forced`
    it also notes them all (the LMs as a callback), to make their histories short again in the end.
    """

    def __init__(self, entries: list[Mapping[str, Any]], forced: bool) -> None:
        self.entries = entries
        self.forced = forced
        self.owners: dict[int, Any] = {}

    @property
    def history(self) -> _HistoryCollector:
        return self

    def __len__(self) -> int:
        return 0  # DSPy drops the oldest entry of a full history; this one is never full.

    def append(self, entry: Mapping[str, Any]) -> None:
        self.entries.append(entry)
        if self.forced:
            self.owners.update((id(module), module) for module in dspy.settings.caller_modules)

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        self.owners[id(instance)] = instance

    def restore_limits(self, size: int, is_disabled: bool) -> None:
        """Leave in the histories of LMs and modules what DSPy would have with `max_history_size=size`."""
        histories = [owner.history for owner in self.owners.values() if isinstance(owner.history, list)]
        with _HISTORY_LOCK:
            for history in [*histories, base_lm.GLOBAL_HISTORY] if is_disabled else histories:
                if size:
                    del history[:-size]
                for entry in [] if size else self.entries:
                    with suppress(ValueError):  # It is not there: DSPy has dropped it.
                        history.remove(entry)


class _CallCounter(BaseCallback):
    """Add an empty entry for every LM call that returns."""

    def __init__(self, entries: list[Mapping[str, Any]]) -> None:
        self.entries = entries

    def on_lm_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        if exception is None:
            self.entries.append({})


@contextmanager
def collect_history(entries: list[Mapping[str, Any]], force: bool = False) -> Iterator[None]:
    """Append DSPy's history entry of every LM call made in the block to `entries`.

    Where the user has turned the history off (`disable_history` or `max_history_size=0`) an entry is empty, and
    stands for a call of unknown cost, unless `force` is set.

    Args:
        entries: Takes the entries.
        force: Turn the history on in the block if it is off. When the block ends, DSPy's histories keep no more than
            under the user's settings.
    """
    is_disabled = dspy.settings.disable_history
    size = 0 if is_disabled else dspy.settings.max_history_size
    force = force and size < _FORCED_SIZE
    collector = _HistoryCollector(entries, force)
    settings: dict[str, Any] = {"trace": []}  # The caller's own would keep the inputs of all of these calls.
    if force or size:
        settings["caller_modules"] = [*(dspy.settings.caller_modules or []), collector]
    if force or not size:
        callback = collector if force else _CallCounter(entries)
        settings["callbacks"] = [*(dspy.settings.callbacks or []), callback]
    if force:
        settings |= {"disable_history": False, "max_history_size": _FORCED_SIZE}
    try:
        with dspy.context(**settings):
            yield
    finally:
        if force:
            collector.restore_limits(size, is_disabled)


def usage_of(entries: Sequence[Mapping[str, Any]]) -> Usage:
    """Add up the usage of the calls of a DSPy history."""
    return sum((_entry_usage(entry) for entry in entries), Usage())


def _entry_usage(entry: Mapping[str, Any]) -> Usage:
    usage = entry.get("usage") or {}
    if not usage and _was_metered(entry.get("response")):
        return Usage(calls=1, cache_hits=1)  # Its entry shows the cost of the call that filled the cache.
    cost = entry.get("cost")
    return Usage(
        calls=1,
        input_tokens=int(usage.get("prompt_tokens") or usage.get("input_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens") or usage.get("output_tokens") or 0),
        cost=None if cost is None else float(cost),
    )


def _was_metered(response: Any) -> bool:
    """Tell whether the reply once came with token counts: an entry without usage is then a cache hit."""
    if _get(response, "cache_hit"):
        return True
    replies = response if isinstance(response, list | tuple) else [response]
    counts = [_get(_get(reply, "usage"), name) for reply in replies for name in ("input_tokens", "total_tokens")]
    return any(count is not None for count in counts)


class UsageMeter:
    """Add up usage from several threads."""

    def __init__(self) -> None:
        self.usage = Usage()

    def add(self, usage: Usage) -> None:
        """Add the usage of a call."""
        with _METER_LOCK:
            self.usage = self.usage + usage

    def take(self) -> Usage:
        """Return the usage so far, and start again from zero."""
        with _METER_LOCK:
            usage, self.usage = self.usage, Usage()
        return usage

    def get_state(self) -> Usage:
        """Return what a resumed run needs to go on counting."""
        return self.usage

    def set_state(self, state: Usage) -> None:
        """Go on from the count of another run."""
        self.usage = state


# Judging a reply -----------------------------------------------------------------------------------------------


def _check_text(text: Any, json_fields: Sequence[str]) -> str:
    if not isinstance(text, str):
        raise UnusableReplyError(f"expected a text, got {type(text).__name__}")
    if not (json_fields and text.strip()):  # As a field of a JSON object, a think tag is a text like any other.
        check_reply(text)
    return str(hide_own_secrets(repair(text.strip())))


def _check_replies(entries: Sequence[Mapping[str, Any]], json_fields: Sequence[str] | Mapping[str, type]) -> None:
    for entry in entries:
        reasons = _CUT_OFF & _finish_reasons(entry.get("response"))
        if reasons:
            raise UnusableReplyError(f"the reply was cut off (finish reason {sorted(reasons)[0]!r})")
    # Without JSON, DSPy asks again in JSON if it cannot parse a reply: then only the last one counts.
    for entry in entries if json_fields else entries[-1:]:
        for text in _texts(entry) or [""]:
            check_reply(text, json_fields)


def check_reply(text: str, json_fields: Sequence[str] | Mapping[str, type] = ()) -> None:
    """Check that a raw reply is whole, not empty, and the JSON object that was asked for (as in `call_lm`).

    Raises:
        UnusableReplyError: If it is not; the message says why.
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
    """Extract the JSON object of a reply, which may stand after thinking, in prose and in a code fence.

    Args:
        reply: The raw reply.
        names: Field names of the object; a second object with one of them is a second answer.

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
    """Parse replies as `JSONAdapter` does, but repair nothing, and ignore thinking and prose around the JSON object."""

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        """Return the output fields of a reply."""
        part = json_part(hide_own_secrets(completion), tuple(signature.output_fields))
        fields = super().parse(signature, part)
        return {name: repair(value) if isinstance(value, str) else value for name, value in fields.items()}


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _finish_reasons(response: Any) -> set[str]:
    """Collect the finish reasons of a history entry's response, in DSPy's own form or a provider's."""
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
