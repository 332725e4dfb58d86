import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import dspy
import pytest
from dspy.adapters.json_adapter import JSONAdapter
from dspy.lm15 import AuthError, Message, RateLimitError, Response, ServerError, TextPart, ThinkingPart, Usage
from dspy.utils.exceptions import LMRateLimitError
from hypothesis import example, given
from hypothesis import strategies as st

from dspy_combee import ProviderError
from dspy_combee.calls.lm_calls import (
    StrictJSONAdapter,
    UnusableReplyError,
    call_lm,
    check_reply,
    collect_history,
    json_part,
    usage_of,
)
from dspy_combee.testing import Reply, ScriptedLM

from .openai_server import OpenAIServer, RecordedRequest
from .openai_server import Reply as HTTPReply

FIELDS = ("new_instruction", "shortened_instruction")
GOOD = "Answer in one word."
GOOD_JSON = json.dumps({"new_instruction": GOOD})


class Propose(dspy.Signature):
    """Write a new instruction."""

    current: str = dspy.InputField()
    new_instruction: str = dspy.OutputField()


PROPOSE = dspy.Predict(Propose)


def propose():
    with dspy.context(adapter=StrictJSONAdapter()):
        return PROPOSE(current="Answer.").new_instruction


def propose_mending():
    """The same through DSPy's own adapter, which makes something of half an object, of null and of a list."""
    with dspy.context(adapter=JSONAdapter()):
        return PROPOSE(current="Answer.").new_instruction


def ask():
    """A call that asks for no JSON."""
    return dspy.settings.lm("Write an instruction.")[0]


BAD_REPLIES = {
    "empty": ("", "empty"),
    "white space": (" \n\t", "empty"),
    "prose": ("I would rather not.", "no JSON object"),
    "null": ("null", "no JSON object"),
    "a number": ("42", "no JSON object"),
    "an empty object": ("{}", "no JSON object"),
    "a list": ('["a", "b"]', "no JSON object"),
    "a list of answers": (f"[{GOOD_JSON}]", "a list"),
    "another field": ('{"instruction": "Answer."}', "none of the fields"),
    "a nested field": ('{"result": {"new_instruction": "Answer."}}', "none of the fields"),
    "a blank field": ('{"new_instruction": " \\n"}', "blank"),
    "a null field": ('{"new_instruction": null}', "no text but None"),
    "a list in the field": ('{"new_instruction": ["a", "b"]}', "no text but"),
    "an object in the field": ('{"new_instruction": {"text": "a"}}', "no text but"),
    "half an object": (GOOD_JSON[:-4], "not whole"),
    "an object without its end": (GOOD_JSON[:-1], "not whole"),
    "an unclosed fence": (f"```json\n{GOOD_JSON}", "code fence"),
    "an unclosed fence around fences": ('```json\n{"new_instruction": "Use ```code```."}\n', "code fence"),
    "half an object in a fence": (f"```json\n{GOOD_JSON[:-4]}", "not whole"),
    "an open think tag": (f"<think>Perhaps {GOOD_JSON}", "think tag"),
    "an open think tag after a closed one": (f"<think>a</think>\n<thinking>b {GOOD_JSON}", "think tag"),
    "thinking and nothing else": ("<think>Hm.</think>\n", "empty"),
    "two answers, the second one half": (GOOD_JSON + '\n{"new_instruction": "Answer i', "two answers"),
    "two answers, loosely written": (GOOD_JSON + " { new_instruction: 'Answer i", "two answers"),
    "a Python dict": ("{'new_instruction': 'Answer.'}", "no JSON object"),
    "too deep": ('{"a":' * 100_000, "not whole"),
}


@pytest.mark.parametrize(("reply", "complaint"), BAD_REPLIES.values(), ids=BAD_REPLIES)
def test_a_bad_reply_is_refused_with_the_reason(reply, complaint):
    with pytest.raises(UnusableReplyError, match=complaint):
        check_reply(reply, FIELDS)


def written(text):
    """The reply forms in which models give `text`."""
    plain = json.dumps({"new_instruction": text})
    raw = json.dumps({"new_instruction": text}, ensure_ascii=False)
    return {
        "plain": plain,
        "characters as they are": raw,
        "indented": json.dumps({"new_instruction": text}, indent=2),
        "fenced": f"```json\n{plain}\n```",
        "fenced without a language": f"```\n{raw}\n```\n",
        "after prose": f"Here is the instruction:\n\n{plain}",
        "fenced after prose": f"Here it is.\n```json\n{raw}\n```\nI hope that helps.",
        "after thinking": f"<think>The editors {{agree}}: {GOOD_JSON[:20]}\n</think>\n\n{plain}",
        "fenced after thinking": f"<thinking>Hm.</thinking>```json\n{plain}\n```",
        "with another field": json.dumps({"reasoning": "because", "new_instruction": text}),
    }


TEXTS = {
    "words": GOOD,
    "fences": 'Answer so:\n```json\n{"a": 1}\n```\nand ```nothing``` else',
    "an unclosed fence": "Never write ```",
    "an open think tag": "<think> is how to begin",
    "think tags": "Begin with <think> and end with </think>.",
    "markers": '[[ ## answer ## ]] {placeholder} %s {"new_instruction": "x"} <<CUSTOM-TYPE-START-IDENTIFIER>>',
    "scripts": '中文 العربية עברית 👩‍👩‍👧‍👦 \u202e nul \x00 back\\slash "quoted"',
}


@pytest.mark.parametrize("form", written(GOOD))
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_good_reply_is_accepted_in_every_form_and_read_as_it_is(text, form):
    reply = written(text)[form]
    check_reply(reply, FIELDS)
    lm = ScriptedLM(default=reply)
    result = call_lm(propose, lm, FIELDS)
    assert (result.value, result.error) == (text, None)
    assert result.raw_output == reply
    assert len(lm.calls) == result.usage.calls == 1


def test_newlines_may_stand_in_the_text_as_they_are():
    reply = '{"new_instruction": "One.\nTwo.\n\n\tThree."}'
    assert call_lm(propose, ScriptedLM(default=reply), FIELDS).value == "One.\nTwo.\n\n\tThree."


def test_lone_surrogates_of_a_reply_are_replaced():
    assert call_lm(propose, ScriptedLM(default='{"new_instruction": "a\\ud800b"}'), FIELDS).value == "a\ufffdb"


# Any text, of the pieces that replies are made of.
pieces = st.sampled_from(
    [
        *"{}[]\"'\\`:,\n ",
        "```",
        "```json\n",
        "<think>",
        "</think>",
        '{"new_instruction": "',
        '"}',
        '\\"',
        "null",
        GOOD_JSON,
    ]
)
any_reply = st.lists(st.one_of(pieces, st.text(max_size=4)), max_size=20).map("".join)
any_instruction = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(any_reply, st.sampled_from([FIELDS, (), ("playbook",)]))
@example("{" * 100_000, FIELDS)
@example(GOOD_JSON + "{" * 100_000, FIELDS)
@example("<think>" * 50_000, FIELDS)
@example("</think>" * 50_000, ())
@example("```" * 50_001 + GOOD_JSON, FIELDS)
@example('{"new_instruction": ' + "[" * 100_000, FIELDS)
def test_any_reply_is_accepted_or_refused_and_nothing_else(reply, fields):
    try:
        check_reply(reply, fields)
    except UnusableReplyError:
        return
    assert reply.strip()


@given(any_reply)
def test_what_is_read_is_a_whole_object_of_the_reply(reply):
    try:
        check_reply(reply, ["new_instruction"])
    except UnusableReplyError:
        return
    read = StrictJSONAdapter().parse(Propose, reply)["new_instruction"]
    assert read.strip()
    assert json.loads(json_part(reply, ["new_instruction"]), strict=False)["new_instruction"].strip() == read.strip()


@given(any_instruction, st.data())
def test_no_part_of_a_reply_is_accepted_for_the_whole(text, data):
    reply = data.draw(
        st.sampled_from(["plain", "characters as they are", "indented", "fenced", "after prose", "after thinking"])
    )
    whole = written(text)[reply].rstrip()
    check_reply(whole, FIELDS)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(UnusableReplyError):
        check_reply(whole[:cut], FIELDS)


# The call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reply", "complaint"), BAD_REPLIES.values(), ids=BAD_REPLIES)
@pytest.mark.parametrize("function", [propose, propose_mending])
def test_a_bad_reply_is_asked_for_once_more_and_never_used(function, reply, complaint):
    lm = ScriptedLM(default=reply)
    result = call_lm(function, lm, FIELDS)
    assert result.value is None
    assert complaint in result.error
    assert len(lm.calls) == result.usage.calls == 2


@pytest.mark.parametrize("reply", [reply for reply, _ in BAD_REPLIES.values()], ids=BAD_REPLIES)
def test_a_good_second_reply_is_used(reply):
    lm = ScriptedLM([("", [reply, GOOD_JSON])])
    result = call_lm(propose, lm, FIELDS)
    assert (result.value, result.error) == (GOOD, None)
    assert result.usage.calls == len(lm.calls) == 2
    assert result.usage.output_tokens == sum(max(1, len(call.reply) // 4) for call in lm.calls)


@pytest.mark.parametrize("reason", ["length", "content_filter", "error"])
@pytest.mark.parametrize("function", [propose, propose_mending, ask])
def test_a_reply_that_was_cut_off_is_not_used_however_whole_it_looks(function, reason):
    lm = ScriptedLM(default=Reply(GOOD_JSON, finish_reason=reason))
    result = call_lm(function, lm, FIELDS)
    assert result.value is None
    assert f"cut off (finish reason '{reason}')" in result.error
    assert len(lm.calls) == 2


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("Do this.", "Do this."),
        ("<think>so</think>Do", "<think>so</think>Do"),
        ("", None),
        ("<think>so", None),
        (" ", None),
    ],
)
def test_without_fields_any_text_that_is_whole_is_used(reply, value):
    assert call_lm(ask, ScriptedLM(default=reply)).value == value


@pytest.mark.parametrize("value", [None, 3, ["a"], "", " ", "<think>never closed"])
def test_a_function_that_gives_no_usable_text_is_called_twice(value):
    calls = []

    def function():
        calls.append(1)
        return value

    result = call_lm(function, ScriptedLM())
    assert result.value is None
    assert result.error.startswith("UnusableReplyError")
    assert (len(calls), result.usage.calls) == (2, 0)


def test_an_lm_that_always_fails_is_reached_exactly_twice():
    lm = ScriptedLM(default=ServerError("overloaded"))
    result = call_lm(propose, lm, FIELDS)
    assert result.value is None
    assert "overloaded" in result.error
    assert (len(lm.calls), result.usage.calls, result.usage.cost) == (2, 2, 0.0)


def test_an_error_and_then_a_good_reply():
    lm = ScriptedLM([("", [ServerError("overloaded"), GOOD_JSON])])
    result = call_lm(propose, lm, FIELDS)
    assert (result.value, result.error, result.usage.calls) == (GOOD, None, 2)


@pytest.mark.parametrize("failure", [RateLimitError("slow down"), ConnectionError("refused"), TimeoutError("no reply")])
def test_what_may_pass_is_left_to_the_executor(failure):
    lm = ScriptedLM(default=failure)
    with pytest.raises(ProviderError, match=r"cannot be reached: .*(slow down|refused|no reply)") as caught:
        call_lm(propose, lm, FIELDS)
    assert caught.value.transient
    assert len(lm.calls) == 1


def test_a_refused_key_is_no_bad_reply_and_is_not_tried_again():
    lm = ScriptedLM(default=AuthError("wrong key"))
    with pytest.raises(ProviderError, match="wrong key"):
        call_lm(propose, lm, FIELDS)
    assert len(lm.calls) == 1


def test_what_ends_the_program_is_not_caught():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_lm(interrupt, ScriptedLM())


def test_every_reply_on_the_way_is_judged_where_json_was_asked_for():
    def in_two_steps():
        draft = propose_mending()
        with dspy.context(adapter=JSONAdapter()):
            return dspy.Predict("draft -> shortened_instruction")(draft=draft).shortened_instruction

    half = GOOD_JSON[:-4]  # DSPy mends it: the second step then gets half an instruction.
    lm = ScriptedLM([("shortened_instruction", '{"shortened_instruction": "Answer."}'), ("", half)])
    result = call_lm(in_two_steps, lm, FIELDS)
    assert result.value is None
    assert "not whole" in result.error
    assert result.usage.calls == len(lm.calls) == 4


def test_the_prompt_of_the_last_call_is_kept_as_text():
    result = call_lm(propose, ScriptedLM(default=GOOD_JSON), FIELDS)
    assert result.prompt.startswith("[system]\n")
    assert "[user]\n[[ ## current ## ]]\nAnswer." in result.prompt


OFF = {"disable_history": True, "max_history_size": 0}


@pytest.mark.parametrize("settings", [{"disable_history": True}, {"max_history_size": 0}, {}])
def test_the_users_history_settings_do_not_hide_the_reply(settings):
    lm = ScriptedLM(default=Reply(GOOD_JSON, finish_reason="length"))
    with dspy.context(**settings):
        result = call_lm(propose, lm, FIELDS)
    assert (result.value, result.usage.calls, result.usage.output_tokens > 0) == (None, 2, True)


@pytest.mark.parametrize(
    ("settings", "global_entries", "entries"),
    [
        (OFF, 0, 0),
        ({"disable_history": True}, 0, 0),
        ({"max_history_size": 0}, 50, 0),
        ({"max_history_size": 7}, 50, 7),
        ({}, 50, 50),
    ],
    ids=str,
)
def test_dspy_keeps_no_more_history_than_the_user_wants(settings, global_entries, entries, monkeypatch):
    kept = []
    monkeypatch.setattr("dspy.clients.base_lm.GLOBAL_HISTORY", kept)
    lm, outer, inner = ScriptedLM(default=GOOD_JSON), dspy.Predict(Propose), dspy.Predict(Propose)
    inner.lm = lm

    def call(_):
        with dspy.context(caller_modules=[outer], adapter=StrictJSONAdapter(), **settings):
            return call_lm(lambda: inner(current="Answer.").new_instruction, lm, FIELDS)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(call, range(50)))
    assert {result.value for result in results} == {GOOD}
    assert {result.usage.calls for result in results} == {1}
    assert [len(kept), *(len(owner.history) for owner in (lm, outer, inner))] == [global_entries, *[entries] * 3]


def test_usage_tracking_and_callbacks_of_the_user_hold_inside():
    started = []

    class Callback(dspy.utils.BaseCallback):
        def on_lm_start(self, call_id, instance, inputs):
            started.append(call_id)

    with dspy.context(track_usage=True, callbacks=[Callback()]):
        assert call_lm(propose, ScriptedLM(default=GOOD_JSON), FIELDS).value == GOOD
    assert len(started) == 1


def test_collect_history_tells_what_the_calls_inside_took():
    lm = ScriptedLM(default="12345678")
    with dspy.context(lm=lm):
        heard = []
        with collect_history(heard):
            value = ask() + ask()
        usage = usage_of(heard)
    assert value == "12345678" * 2
    assert (usage.calls, usage.output_tokens, usage.cost) == (2, 4, None)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [({"disable_history": True}, 0), ({"max_history_size": 0}, 0), ({"max_history_size": 1}, 4)],
    ids=str,
)
def test_calls_that_dspy_keeps_no_history_of_are_heard_too(settings, tokens):
    heard = []
    with dspy.context(lm=ScriptedLM(default="12345678"), **settings), collect_history(heard):
        ask()
        asyncio.run(dspy.settings.lm.acall("Write an instruction."))
        with pytest.raises(LMRateLimitError):
            ScriptedLM(default=RateLimitError("slow down"))("Write an instruction.")
    usage = usage_of(heard)
    assert (usage.calls, usage.output_tokens, usage.cost) == (2, tokens, None)


# DSPy's cache -------------------------------------------------------------------------------------------------


BAD_AND_CACHED = {
    "truncated": Reply(GOOD_JSON, finish_reason="length"),
    "half": GOOD_JSON[:-4],
    "open think tag": f"<think>{GOOD_JSON}",
    "blank": '{"new_instruction": ""}',
}


@pytest.mark.parametrize("reply", BAD_AND_CACHED.values(), ids=BAD_AND_CACHED)
def test_a_bad_reply_in_the_cache_is_never_used_and_the_retry_goes_past_it(reply):
    first = ScriptedLM(default=reply, cache=True)
    assert call_lm(propose, first, FIELDS).value is None
    assert len(first.calls) == 2, "the second attempt went to the LM, not to the cache"

    second = ScriptedLM(default=GOOD_JSON, cache=True)
    result = call_lm(propose, second, FIELDS)
    assert result.value == GOOD
    assert len(second.calls) == 1, "the first attempt was the cached reply"
    assert (result.usage.calls, result.usage.cache_hits) == (2, 1)


def test_a_good_reply_in_the_cache_is_used_and_costs_nothing():
    call_lm(propose, ScriptedLM(default=GOOD_JSON, cache=True), FIELDS)
    lm = ScriptedLM(cache=True)
    result = call_lm(propose, lm, FIELDS)
    assert (result.value, lm.calls) == (GOOD, [])
    assert (result.usage.cache_hits, result.usage.input_tokens, result.usage.cost) == (1, 0, 0.0)


# The forms of a reply, by engine ------------------------------------------------------------------------------


class ChatAndResponses(OpenAIServer):
    """The server, which also speaks the Responses API."""

    def _reply(self, request: RecordedRequest) -> HTTPReply:
        if request.path != "/v1/responses":
            return super()._reply(request)
        reply = self.handler(request.body)
        cut = reply.finish_reason == "length"
        content = [{"type": "output_text", "text": reply.text, "annotations": []}]
        body = {
            "id": "resp_test",
            "object": "response",
            "created_at": 1_700_000_000,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": request.body["model"],
            "output": [{"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": content}],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {"input_tokens": 1000, "output_tokens": 100, "total_tokens": 1100},
        }
        return HTTPReply(raw_body=json.dumps(body))


USAGE = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
PRICE = 1000 * 0.15e-6 + 100 * 0.6e-6  # gpt-4o-mini


@pytest.fixture
def server():
    with ChatAndResponses() as server:
        yield server
    assert not server.handler_errors


engines = pytest.mark.parametrize("engine", ["litellm", "lm15"])
model_types = pytest.mark.parametrize("model_type", ["chat", "responses"])


def http_lm(server, engine, **options):
    settings = {"cache": True, "num_retries": 0, **options}
    return dspy.LM("openai/gpt-4o-mini", engine=engine, api_base=server.api_base, api_key=server.api_key, **settings)


@engines
@model_types
def test_text_tokens_and_dollars_of_each_engine(server, engine, model_type):
    server.handler = lambda request: HTTPReply(GOOD_JSON, usage=USAGE)
    lm = http_lm(server, engine, model_type=model_type)
    result = call_lm(propose, lm, FIELDS)
    assert (result.value, result.raw_output) == (GOOD, GOOD_JSON)
    usage = result.usage
    assert (usage.calls, usage.cache_hits, usage.input_tokens, usage.output_tokens) == (1, 0, 1000, 100)
    assert usage.cost == pytest.approx(PRICE)
    again = call_lm(propose, lm, FIELDS)
    assert (again.value, again.raw_output) == (GOOD, GOOD_JSON)
    usage = again.usage
    assert (usage.calls, usage.cache_hits, usage.input_tokens, usage.cost) == (1, 1, 0, 0.0)
    assert len(server.requests) == 1


@engines
@model_types
def test_a_truncated_reply_of_each_engine_is_refused_live_and_from_the_cache(server, engine, model_type):
    server.handler = lambda request: HTTPReply(GOOD_JSON, finish_reason="length", usage=USAGE)
    lm = http_lm(server, engine, model_type=model_type)
    for requests in (2, 3):  # The second time the first attempt is the cached reply.
        result = call_lm(propose, lm, FIELDS)
        assert result.value is None
        assert "cut off" in result.error
        assert len(server.requests) == requests
    server.handler = lambda request: HTTPReply(GOOD_JSON, usage=USAGE)
    result = call_lm(propose, lm, FIELDS)
    assert result.value == GOOD
    assert (result.usage.calls, result.usage.cache_hits) == (2, 1)
    assert result.usage.cost == pytest.approx(PRICE)


@engines
def test_reasoning_without_text_counts_as_empty(server, engine):
    message = {"role": "assistant", "content": None, "reasoning_content": f"I could say {GOOD_JSON}"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE}
    server.handler = lambda request: HTTPReply(raw_body=json.dumps(body))
    for function in (propose, ask):
        result = call_lm(function, http_lm(server, engine, cache=False), FIELDS)
        assert result.value is None
        assert "the reply is empty" in result.error


@engines
def test_reasoning_beside_a_text_is_not_taken_for_it(server, engine):
    server.handler = lambda request: HTTPReply(GOOD_JSON, reasoning=json.dumps({"new_instruction": "a draft"}))
    assert call_lm(propose, http_lm(server, engine), FIELDS).value == GOOD


@engines
def test_an_unknown_model_has_no_cost(server, engine):
    server.handler = lambda request: HTTPReply(GOOD_JSON)
    lm = http_lm(server, engine).copy(model="openai/nobody-knows")
    result = call_lm(propose, lm, FIELDS)
    assert (result.value, result.usage.cost) == (GOOD, None)


@engines
def test_a_wrong_key_is_refused_for_good_and_is_in_no_message(server, engine, caplog):
    lm = http_lm(server, engine).copy(api_key="sk-secret-of-the-user")
    with pytest.raises(ProviderError) as caught:
        call_lm(propose, lm, FIELDS)
    assert len(server.requests) == 1
    assert "sk-secret" not in f"{caught.value}{caplog.text}"


class ThinkingOnly:
    """An engine whose reply has no part with text."""

    def complete(self, request):
        parts = [ThinkingPart("Perhaps so.")]
        usage = Usage(input_tokens=1, output_tokens=1)
        return Response(None, request.model, Message.assistant(parts), finish_reason="stop", usage=usage)

    def stream(self, request):
        raise NotImplementedError

    def close(self):
        pass


def test_an_engine_that_gives_reasoning_alone_counts_as_empty():
    lm = dspy.LM("thinking/only", engine=ThinkingOnly(), cache=False, num_retries=0)
    result = call_lm(propose, lm, FIELDS)
    assert result.value is None
    assert "the reply is empty" in result.error
    assert result.usage.calls == 2


class TwoChoices(ThinkingOnly):
    """An engine whose second candidate is cut off."""

    def __init__(self):
        self.calls = 0

    def complete(self, request):
        self.calls += 1
        reason = "length" if self.calls % 2 == 0 else "stop"
        usage = Usage(input_tokens=1, output_tokens=1)
        return Response(
            None, request.model, Message.assistant([TextPart(GOOD_JSON)]), finish_reason=reason, usage=usage
        )


def test_with_several_candidates_one_that_was_cut_off_is_enough_to_refuse():
    lm = dspy.LM("two/choices", engine=TwoChoices(), cache=False, num_retries=0, n=2, temperature=1.0)
    assert "cut off" in call_lm(propose, lm, FIELDS).error
