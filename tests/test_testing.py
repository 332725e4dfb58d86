"""The LMs of `dspy_combee.testing`."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import dspy
import pytest
from dspy import lm15
from dspy.teleprompt.gepa import InstructionProposer
from dspy.utils.exceptions import LMRateLimitError, LMTimeoutError, LMTransportError, LMUnexpectedError

from dspy_combee import CombeeProposer
from dspy_combee.learners.instruction import MergeInstructions
from dspy_combee.testing import (
    AnswerKey,
    CapacityLoss,
    Lesson,
    PowerLoss,
    Prompt,
    Reflector,
    Reply,
    ScriptedLM,
    SimulatedLM,
    Student,
    Tally,
    UnmatchedPromptError,
    count_tokens,
    find_lessons,
    read_code,
)


def ask(lm, question="crimson?", adapter=None, signature="question -> answer"):
    with dspy.context(lm=lm, adapter=adapter or dspy.ChatAdapter()):
        return dspy.Predict(signature)(question=question)


class TestScriptedLM:
    @pytest.mark.parametrize(
        "matcher",
        ["crimson", re.compile(r"\bcrims[oa]n\b"), lambda prompt: "crimson" in prompt.question],
        ids=["substring", "pattern", "predicate"],
    )
    def test_first_rule_that_matches_answers(self, matcher):
        lm = ScriptedLM([("blue", {"answer": "no"}), (matcher, {"answer": "yes"}), ("crimson", {"answer": "late"})])
        assert ask(lm).answer == "yes"
        assert ask(lm, "blue?").answer == "no"

    def test_rules_may_be_a_mapping_and_a_default_takes_the_rest(self):
        lm = ScriptedLM({"crimson": {"answer": "yes"}}, default={"answer": "other"})
        assert [ask(lm, q).answer for q in ("crimson", "green")] == ["yes", "other"]

    @pytest.mark.parametrize("adapter", [dspy.ChatAdapter(), dspy.JSONAdapter()], ids=["markers", "json"])
    def test_fields_come_in_the_format_that_the_prompt_asks_for(self, adapter):
        lm = ScriptedLM(default={"answer": 'a "quote"\nand [[ ## answer ## ]] {x}', "numbers": [1, 2]})
        prediction = ask(lm, adapter=adapter, signature="question -> numbers: list[int], answer")
        assert prediction.numbers == [1, 2]
        assert prediction.answer.startswith('a "quote"')
        call = lm.calls[0]
        assert call.prompt.output_fields == ("numbers", "answer")
        assert call.prompt.wants_json == isinstance(adapter, dspy.JSONAdapter)
        assert call.reply.startswith("{") == call.prompt.wants_json

    def test_a_schema_in_the_request_asks_for_json_too(self):
        schema = {"type": "json_schema", "schema": {"properties": {"answer": {"type": "string"}}}}
        request = lm15.Request("m", (lm15.Message.user("hi"),), config=lm15.Config(response_format=schema))
        prompt = Prompt.of(request)
        assert prompt.wants_json
        assert prompt.output_fields == ("answer",)

    def test_field_markers_in_the_data_are_not_output_fields(self):
        lm = ScriptedLM(default={"answer": "yes"})
        ask(lm, "Respond with a JSON object in the following order of fields: `fake`.")
        assert lm.calls[0].prompt.output_fields == ("answer",)

    def test_a_list_is_used_up_in_order_then_later_rules_answer(self):
        lm = ScriptedLM([("crimson", [{"answer": "1"}, {"answer": "2"}]), ("crimson", {"answer": "rest"})])
        assert [ask(lm).answer for _ in range(4)] == ["1", "2", "rest", "rest"]

    def test_a_list_is_used_once_each_under_threads(self):
        lm = ScriptedLM([("crimson", [{"answer": str(i)} for i in range(64)])], latency=0.001)
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda _: ask(lm).answer, range(64)))
        assert sorted(map(int, answers)) == list(range(64))

    def test_a_callable_sees_the_prompt(self):
        lm = ScriptedLM(default=lambda prompt: {"answer": prompt.output_fields[0] + prompt.system[:4]})
        assert ask(lm).answer == "answerYour"

    @pytest.mark.parametrize(
        ("error", "seen"),
        [
            (lm15.RateLimitError("slow down"), LMRateLimitError),
            (TimeoutError("late"), LMTimeoutError),
            (ConnectionError("gone"), LMTransportError),
            (KeyError("bug"), LMUnexpectedError),
        ],
    )
    def test_errors_are_what_dspy_makes_of_a_provider_s(self, error, seen):
        lm = ScriptedLM([("crimson", [error, {"answer": "yes"}])])
        with pytest.raises(seen):
            ask(lm)
        assert ask(lm).answer == "yes"
        assert lm.calls[0].reply.endswith(str(error))

    def test_retries_are_dspy_s_when_asked_for(self):
        error = lm15.RateLimitError("slow down", retry_after=0.0)
        lm = ScriptedLM([("crimson", [error, {"answer": "yes"}])], num_retries=1)
        assert ask(lm).answer == "yes"
        assert len(lm.calls) == 2

    def test_reply_has_finish_reason_and_reasoning(self):
        lm = ScriptedLM(default=Reply('{"answer": "ye', finish_reason="length", reasoning="hm"))
        lm("hello")
        response = lm.history[-1]["response"]
        assert response.finish_reason == "length"
        assert response.text == '{"answer": "ye'
        assert lm.history[-1]["outputs"][0]["reasoning_content"] == "hm"

    def test_no_rule_names_the_end_of_the_prompt(self):
        lm = ScriptedLM([("blue", "x")])
        with pytest.raises(AssertionError, match="violet") as caught:
            lm("What about violet")
        assert isinstance(caught.value, UnmatchedPromptError)
        assert "UnmatchedPromptError" in lm.calls[0].reply

    def test_a_reply_of_the_wrong_type_is_an_error(self):
        with pytest.raises(LMUnexpectedError, match="a reply is"):
            ScriptedLM(default=7)("hello")

    def test_calls_times_and_concurrency_are_recorded(self):
        together = threading.Barrier(4, timeout=30)

        def answer(prompt):
            together.wait()
            return {"answer": "yes"}

        lm = ScriptedLM(default=answer, latency=0.02)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda q: ask(lm, q), ["a", "b", "c", "d"]))
        assert lm.peak_concurrency == 4
        assert len(lm.calls) == 4
        assert all(call.ended - call.started >= 0.02 for call in lm.calls)
        assert {call.prompt.question[:40].splitlines()[1] for call in lm.calls} == {"a", "b", "c", "d"}
        with pytest.raises(AttributeError):
            lm.calls[0].reply = "other"

    def test_latency_may_depend_on_the_prompt_and_chance(self):
        drawn = []

        def latency(prompt, rng):
            drawn.append(rng.random())
            return 0.2 if "slow" in prompt else 0.0

        lm = ScriptedLM(default="x", latency=latency)
        lm("slow")
        lm("quick")
        slow, quick = (call.ended - call.started for call in lm.calls)
        assert slow >= 0.2
        assert slow > quick
        assert len(set(drawn)) == 2

    def test_async_programs_work_and_do_not_hold_the_loop(self):
        lm = ScriptedLM(default={"answer": "yes"}, latency=0.5)
        predict = dspy.Predict("question -> answer")

        async def both():
            with dspy.context(lm=lm):
                return await asyncio.gather(*(predict.acall(question=q) for q in "ab"))

        assert [p.answer for p in asyncio.run(both())] == ["yes", "yes"]
        assert lm.peak_concurrency == 2

    def test_streams_end_in_the_same_text(self):
        lm = ScriptedLM(default="one two")
        request = lm15.Request("m", (lm15.Message.user("hi"),))
        events = list(lm.engine.stream(request))
        assert events[0].type == "start"
        assert events[-1].type == "end"
        assert "".join(e.delta.text for e in events if e.type == "delta") == "one two"

    def test_copies_share_the_script_and_the_record(self):
        lm = ScriptedLM([("crimson", [{"answer": "1"}, {"answer": "2"}, {"answer": "3"}])])
        program = dspy.Predict("question -> answer")
        program.lm = lm
        twin = program.deepcopy()
        other = lm.copy(temperature=0.5)
        assert copy.deepcopy(lm) is lm
        assert twin.lm is lm
        assert program(question="crimson").answer == "1"
        assert twin(question="crimson").answer == "2"
        assert ask(other, "crimson").answer == "3"
        assert len(lm.calls) == len(other.calls) == 3
        assert other.kwargs["temperature"] == 0.5
        assert lm.kwargs.get("temperature") is None

    def test_defaults_do_not_cache_or_retry(self):
        lm = ScriptedLM(default="x")
        lm("same")
        lm("same")
        assert len(lm.calls) == 2
        assert (lm.cache, lm.num_retries) == (False, 0)
        assert ScriptedLM(default="x", num_retries=2).num_retries == 2

    def test_a_pickled_copy_answers_and_starts_a_record_of_its_own(self):
        lm = ScriptedLM([("crimson", "yes")])
        lm("crimson")
        twin = cloudpickle.loads(cloudpickle.dumps(lm))
        assert twin("crimson") == ["yes"]
        assert (len(lm.calls), len(twin.calls)) == (1, 1)

    def test_media_appear_as_a_tag(self):
        lm = ScriptedLM(default={"answer": "yes"})
        with dspy.context(lm=lm):
            dspy.Predict("picture: dspy.Image -> answer")(picture=dspy.Image("https://example.org/a.png"))
        assert "https://example.org/a.png" in lm.calls[0].prompt


LESSONS = [Lesson(f"TOPIC {i}", f"post to {4000 + i}-AA with {i}.5 in it") for i in range(40)]
OWN_TEXT = "Give the code.\n\nThe default holds unless a convention says otherwise."


def propose(lm, records, current=OWN_TEXT):
    with dspy.context(lm=lm):
        return InstructionProposer()({"p": current}, {"p": records}, ["p"])["p"]


def merge(lm, proposals, current=OWN_TEXT):
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        return dspy.Predict(MergeInstructions)(
            current_instruction=current, proposed_instructions=proposals
        ).new_instruction


def record(lesson):
    feedback = f'Wrong, "again".\nSee here: {lesson} Do hold to it.'
    return {"Inputs": {"q": "x"}, "Generated Outputs": {"a": "y"}, "Feedback": feedback}


KEEP_ALL = Reflector(CapacityLoss(1000))


class TestLessons:
    def test_found_in_prose_in_lists_and_in_json(self):
        lesson = LESSONS[3]
        texts = [
            f"Wrong. {lesson} Then more.",
            f"- {lesson}\n- {lesson}",
            json.dumps([{"a": f'"x"\n{lesson}\ny'}]),
            f"({lesson})",
        ]
        assert [find_lessons(text) for text in texts] == [[lesson]] * 4

    def test_none_where_none_is_stated(self):
        assert find_lessons("The Convention is old. Convention: none. Convention A B without a colon.") == []

    def test_distinct_and_in_order(self):
        assert find_lessons(" ".join(map(str, [LESSONS[2], LESSONS[1], LESSONS[2]]))) == [LESSONS[2], LESSONS[1]]


class TestLoss:
    def test_the_exponent_is_the_paper_s_flat_formula_ratio(self):
        assert math.log(264 / 21) / math.log(100) == pytest.approx(PowerLoss().beta, abs=0.005)

    @pytest.mark.parametrize(("factor", "share"), [(0.5, 1.0), (1, 1.0), (100, 21 / 264)])
    def test_power_loss_keeps_the_share(self, factor, share):
        loss, rng = PowerLoss(), random.Random(0)
        kept = sum(len(loss.keep(LESSONS, int(factor * loss.one_record_tokens), rng)) for _ in range(400))
        assert kept / (400 * len(LESSONS)) == pytest.approx(share, abs=0.01)

    def test_capacity_loss_keeps_at_most_its_capacity_in_order(self):
        kept = CapacityLoss(4).keep(LESSONS, 10**6, random.Random(1))
        assert len(kept) == 4
        assert kept == sorted(kept, key=LESSONS.index)
        assert CapacityLoss(4).keep(LESSONS[:2], 1, random.Random(1)) == LESSONS[:2]

    def test_the_default_one_record_prompt_is_the_size_of_one(self):
        from dspy_combee.testing.tasks import conventions_task

        task = conventions_task()
        sizes = []
        for example in task.trainset[:20]:
            feedback = task.metric(example, dspy.Prediction(code="1234-00")).feedback
            lm = ScriptedLM(default={"new_instruction": "x"})
            one = {"Inputs": example.inputs().toDict(), "Generated Outputs": {"code": "1234-00"}, "Feedback": feedback}
            propose(lm, [one], task.program.signature.instructions)
            sizes.append(count_tokens(lm.calls[0].prompt.question))
        assert sum(sizes) / len(sizes) == pytest.approx(PowerLoss().one_record_tokens, rel=0.1)


class TestReflector:
    def test_reads_records_and_keeps_the_instruction_s_own_text(self):
        lm = SimulatedLM(reflector=KEEP_ALL)
        text = propose(lm, [record(lesson) for lesson in LESSONS])
        assert find_lessons(text) == LESSONS
        assert text.startswith("Give the code.\nThe default holds")

    def test_merges_proposals_with_the_same_function(self):
        lm = SimulatedLM(reflector=KEEP_ALL)
        parts = [propose(lm, [record(lesson) for lesson in LESSONS[i::4]]) for i in range(4)]
        merged = merge(lm, parts)
        assert set(find_lessons(merged)) == set(LESSONS)
        assert merged.count("The default holds") == 1
        assert lm.usage["reflection"].calls == 5

    def test_lessons_of_the_current_instruction_are_input_like_the_rest(self):
        lm = SimulatedLM(reflector=KEEP_ALL)
        first = propose(lm, [record(LESSONS[0])])
        second = propose(lm, [record(LESSONS[1])], first)
        assert find_lessons(second) == LESSONS[:2]
        assert second.count("Conventions learned so far") == 1

    def test_long_prompts_lose_lessons(self):
        lm = SimulatedLM()
        few = sum(len(find_lessons(propose(lm, [record(lesson)]))) for lesson in LESSONS)
        assert few > 35
        assert len(find_lessons(propose(lm, [record(lesson) for lesson in LESSONS]))) < 25

    def test_never_empty(self):
        assert propose(SimulatedLM(), [record("nothing")], "Convention A: old thing.").strip()


class TestSummarizer:
    @pytest.mark.parametrize("record", ["reflection", "record"])
    def test_a_summary_has_the_lessons_of_the_record_and_not_of_the_instruction(self, record):
        lesson, standing = "Convention TAXI RIDES: post to 6840-AB.", "Convention HOTELS: post to 6820-CD."
        lm = SimulatedLM(reflector=KEEP_ALL)
        signature = dspy.Signature(f"current_instruction: str, {record}: dict -> summary: str")
        for adapter in (dspy.JSONAdapter(), dspy.ChatAdapter()):
            with dspy.context(lm=lm, adapter=adapter):
                made = {"current_instruction": standing, record: {"Feedback": f"No. {lesson}"}}
                assert dspy.Predict(signature)(**made).summary == lesson
                made[record] = {"Feedback": "Right."}
                assert dspy.Predict(signature)(**made).summary == "Nothing to add."

    def test_the_prompts_of_the_aggregator_are_answered(self):
        lm = SimulatedLM(reflector=KEEP_ALL)
        proposer = CombeeProposer(reflection_lm=lm, aggregator="summarize")
        made = proposer({"self": "Give the code."}, {"self": [record(lesson) for lesson in LESSONS]}, ["self"])
        assert find_lessons(made["self"]) == LESSONS
        assert (lm.usage["summary"].calls, lm.usage["reflection"].calls) == (len(LESSONS), 1)

    def test_a_program_that_writes_summaries_is_the_students(self):
        student = Student(lambda question, lessons: "short")
        with dspy.context(lm=SimulatedLM(student=student)):
            assert dspy.Predict("text -> summary")(text="A long text.").summary == "short"


class TestStudent:
    def question(self, topic="TOPIC 7"):
        return f"Category: {topic}. Chart default: 9999-00."

    def test_without_the_lesson_it_takes_what_the_question_gives(self):
        assert ask(SimulatedLM(), self.question()).answer == "9999-00"

    def test_it_answers_what_the_instruction_states_right_or_wrong(self):
        for code in ("4007-AA", "1111-ZZ"):
            signature = dspy.Signature("question -> answer", f"Answer. Convention TOPIC 7: post to {code} always.")
            assert ask(SimulatedLM(), self.question(), signature=signature).answer == code
            assert ask(SimulatedLM(), self.question("TOPIC 8"), signature=signature).answer == "9999-00"

    def test_a_lesson_in_a_demo_counts_and_one_in_the_question_does_not(self):
        lesson = "Convention TOPIC 7: post to 4007-AA always."
        assert ask(SimulatedLM(), f"{self.question()} {lesson}").answer == "9999-00"
        predict = dspy.Predict("question -> answer")
        predict.demos = [dspy.Example(question=f"Why? {lesson}", answer="so")]
        with dspy.context(lm=SimulatedLM()):
            assert predict(question=self.question()).answer == "4007-AA"

    def test_the_longest_topic_wins_and_the_last_statement(self):
        lessons = {"TOPIC": "post to 1000-AA", "TOPIC 7": "post to 2000-AA", "TOPIC 77": "post to 3000-AA"}
        assert read_code(self.question(), lessons) == "2000-AA"
        text = "Answer. Convention TOPIC 7: post to 1111-AA. Convention TOPIC 7: post to 2222-AA."
        signature = dspy.Signature("question -> answer", text)
        assert ask(SimulatedLM(), self.question(), signature=signature).answer == "2222-AA"

    def test_reasoning_and_typed_chain_of_thought(self):
        with dspy.context(lm=SimulatedLM(student=Student(lambda question, lessons: "12"))):
            prediction = dspy.ChainOfThought("question -> answer: int")(question="how many?")
        assert prediction.answer == 12
        assert prediction.reasoning

    def test_no_code_at_all(self):
        assert read_code("What?", {}) == "unknown"

    def test_an_answer_key_answers_what_is_taught_and_its_share_of_the_rest(self):
        known = {f"Q{i}?": [(f"TOPIC {i}", f"a{i}"), ("TOPIC 0", "b")] for i in range(200)}
        key = AnswerKey("question", known, frozenset(LESSONS), 0.3)
        lm = SimulatedLM(student=Student(key))
        signature = dspy.Signature("question -> answer", f"Answer. {LESSONS[0]} Convention TOPIC 1: post elsewhere.")
        answers = [ask(lm, question, signature=signature).answer.split(", ") for question in known]
        assert all(second == "b" for _, second in answers)
        assert answers[0][0] == "a0"
        assert sum(first != "unknown" for first, _ in answers) / 200 == pytest.approx(0.3, abs=0.1)
        assert ask(lm, "Q?", signature=signature).answer == "unknown"
        assert answers == [ask(lm, question, signature=signature).answer.split(", ") for question in known]


class TestSimulatedLM:
    def test_says_that_it_is_simulated_and_reports_tokens_by_role(self):
        lm = SimulatedLM()
        with dspy.track_usage() as tracker:
            ask(lm)
            propose(lm, [record(LESSONS[0])])
        assert lm.model.startswith("simulated/")
        assert {name: tally.calls for name, tally in lm.usage.items()} == {"student": 1, "reflection": 1}
        total = tracker.get_total_tokens()[lm.model]
        assert total["prompt_tokens"] == sum(tally.input_tokens for tally in lm.usage.values())
        assert total["completion_tokens"] == sum(tally.output_tokens for tally in lm.usage.values())

    def test_replies_depend_on_seed_and_prompt_alone(self):
        batches = [[record(lesson) for lesson in random.Random(i).sample(LESSONS, 12)] for i in range(24)]

        def texts(seed, threads):
            lm = SimulatedLM(seed)
            with ThreadPoolExecutor(threads) as pool:
                return list(pool.map(lambda batch: propose(lm, batch), batches))

        assert texts(0, 1) == texts(0, 8)
        assert texts(0, 1) != texts(1, 8)

    def test_counts_are_exact_under_threads(self):
        lm = SimulatedLM()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda i: ask(lm, f"question {i % 10}"), range(320)))
        one = SimulatedLM()
        ask(one, "question 1")
        single = one.usage["student"]
        assert lm.usage["student"] == Tally(320, 320 * single.input_tokens, 320 * single.output_tokens)

    def test_latencies_by_role(self):
        lm = SimulatedLM(reflector=Reflector(latency=0.05, latency_per_token=0.001), student=Student(latency=0.02))
        started = time.monotonic()
        ask(lm)
        between = time.monotonic()
        text = propose(lm, [record(LESSONS[0])])
        assert between - started >= 0.02
        assert time.monotonic() - between >= 0.05 + 0.001 * (count_tokens(text) - 2)

    def test_further_roles_are_asked_first(self):
        class Curator:
            name = "curator"

            def handles(self, prompt):
                return "deltas" in prompt.output_fields

            def fields(self, prompt, rng):
                return {"deltas": [str(lesson) for lesson in find_lessons(prompt.question)]}

            def seconds(self, output_tokens):
                return 0.0

        lm = SimulatedLM(roles=[Curator()])
        prediction = ask(lm, str(LESSONS[0]), signature="question -> deltas: list[str]")
        assert prediction.deltas == [str(LESSONS[0])]
        assert set(lm.usage) == {"curator"}

    def test_shared_by_deep_copies_across_threads(self):
        lm = SimulatedLM()
        program = dspy.Predict("question -> answer")
        program.lm = lm
        threads = [threading.Thread(target=lambda: program.deepcopy()(question="crimson")) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert lm.usage["student"].calls == 4
