"""`ScriptedLM`: an LM whose replies a test writes down, without network or key."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from dspy import lm15
from dspy.utils.exceptions import LMError

from dspy_combee.testing.fake_engine import Call, FakeEngine, FakeLM, Prompt, Reply

Matcher: TypeAlias = "str | re.Pattern[str] | Callable[[Prompt], bool]"
ReplyLike: TypeAlias = (
    "str | Mapping[str, Any] | Reply | BaseException | Callable[[Prompt], ReplyLike] "
    "| list[ReplyLike] | tuple[ReplyLike, ...]"
)
Latency: TypeAlias = "float | Callable[[Prompt, random.Random], float]"


class UnmatchedPromptError(LMError, AssertionError):
    """No rule of a `ScriptedLM` fits the prompt. An `LMError`, so that DSPy hands it on as it is."""


class _Rule:
    """A matcher and what it is worth: one reply for ever, or several, each used once, in order."""

    def __init__(self, matcher: Matcher, reply: ReplyLike) -> None:
        self.matcher = matcher
        self.left = list(reply) if isinstance(reply, list | tuple) else None
        self.reply = reply

    def matches(self, prompt: Prompt) -> bool:
        if isinstance(self.matcher, str):
            return self.matcher in prompt
        if isinstance(self.matcher, re.Pattern):
            return self.matcher.search(prompt) is not None
        return bool(self.matcher(prompt))


class _Script(FakeEngine):
    def __init__(self, rules: list[_Rule], latency: Latency) -> None:
        super().__init__(keep_calls=True)
        self.rules, self.latency, self.rng = rules, latency, random.Random(0)

    def play(self, prompt: Prompt) -> tuple[str, Reply, float]:
        return "scripted", self._reply(self._pick(prompt), prompt), self.failure_delay(prompt)

    def failure_delay(self, prompt: Prompt) -> float:
        return self.latency(prompt, self.rng) if callable(self.latency) else self.latency

    def _pick(self, prompt: Prompt) -> ReplyLike:
        for rule in self.rules:
            if rule.matches(prompt):
                if rule.left is None:
                    return rule.reply
                with self.recorder.lock:
                    if rule.left:
                        return rule.left.pop(0)
        raise UnmatchedPromptError(
            f"None of the {len(self.rules)} rules has a reply for the prompt that ends in:\n{prompt[-600:]}"
        )

    def _reply(self, chosen: ReplyLike, prompt: Prompt) -> Reply:
        if isinstance(chosen, Reply):
            return chosen
        if isinstance(chosen, str | Mapping):
            return Reply(chosen)
        if isinstance(chosen, BaseException):
            raise _as_lm15(chosen)
        if callable(chosen):
            return self._reply(chosen(prompt), prompt)
        raise TypeError(f"a reply is a text, fields, a Reply, an exception or a callable, not {chosen!r}")


def _as_lm15(error: BaseException) -> BaseException:
    """Python's own connection errors as an engine has to raise them; any other error as it is."""
    if isinstance(error, TimeoutError):
        return lm15.TimeoutError(str(error))
    return lm15.TransportError(str(error)) if isinstance(error, ConnectionError) else error


class ScriptedLM(FakeLM):
    """An LM for tests that answers by what matters in a prompt.

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
        super().__init__(model, _Script([_Rule(*pair) for pair in pairs], latency), lm_kwargs)

    @property
    def calls(self) -> list[Call]:
        """Every call so far, in the order in which they ended."""
        return self._recorder.snapshot()
