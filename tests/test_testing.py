"""What `dspy_combee.testing` offers: an LM that is scripted, one that is simulated, and the task that it learns."""

import asyncio
import copy
import json
import math
import random
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import dspy
import pytest
from dspy import lm15
from dspy.teleprompt.gepa import InstructionProposer

from dspy_combee import CombeeProposer, Playbook, PlaybookOptimizer
from dspy_combee.testing import (
    CapacityLoss,
    Lesson,
    PlaybookCurator,
    PowerLoss,
    Prompt,
    Reflector,
    Reply,
    ScriptedLM,
    SimulatedLM,
    Student,
    Tally,
    Task,
    UnmatchedPromptError,
    conventions_task,
    count_tokens,
    find_lessons,
    playbook_roles,
    read_code,
    shuffled_feedback,
)

CHAT, JSON = dspy.ChatAdapter(), dspy.JSONAdapter()


def ask(lm, signature="question -> answer", adapter=CHAT, **inputs):
    with dspy.context(lm=lm, adapter=adapter):
        return dspy.Predict(signature)(**(inputs or {"question": "crimson?"}))


def answer(lm, question="crimson?", signature="question -> answer"):
    return ask(lm, signature, question=question).answer


# Scripts ------------------------------------------------------------------------------------------------------


YES, NO = {"answer": "yes"}, {"answer": "no"}


@pytest.mark.parametrize(
    ("rules", "default", "questions", "answers"),
    [
        ([("blue", NO), ("crimson", YES), ("crimson", NO)], None, ["crimson?", "blue?"], ["yes", "no"]),
        ([(re.compile(r"\bcrims[oa]n\b"), YES)], None, ["crimson?"], ["yes"]),
        ([(lambda prompt: "crimson" in prompt.question, YES)], NO, ["crimson?", "blue?"], ["yes", "no"]),
        ({"crimson": YES}, NO, ["crimson", "green"], ["yes", "no"]),
        (
            [("crimson", [YES, NO]), ("crimson", {"answer": "rest"})],
            None,
            ["crimson"] * 4,
            ["yes", "no", "rest", "rest"],
        ),
    ],
    ids=["substring", "pattern", "predicate", "mapping", "list"],
)
def test_the_first_rule_that_matches_and_has_a_reply_left_answers(rules, default, questions, answers):
    lm = ScriptedLM(rules, default)
    assert [answer(lm, question) for question in questions] == answers


def test_a_list_is_used_once_each_under_threads():
    lm = ScriptedLM([("crimson", [str(i) for i in range(64)])], latency=0.001)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: lm("crimson")[0], range(64)))
    assert sorted(map(int, answers)) == list(range(64))


def test_a_callable_sees_the_prompt():
    lm = ScriptedLM(default=lambda prompt: {"answer": f"{prompt.output_fields} {prompt.system[:4]} {prompt.demos}"})
    assert answer(lm) == "('answer',) Your"
    assert lm.calls[0].prompt.input("question") == "crimson?"
    assert lm.calls[0].prompt.input("context") == ""


@pytest.mark.parametrize("adapter", [CHAT, JSON], ids=["markers", "json"])
def test_fields_come_in_the_format_that_the_prompt_asks_for(adapter):
    lm = ScriptedLM(default={"answer": 'a "quote"\nand [[ ## answer ## ]] {x}', "numbers": [1, 2]})
    prediction = ask(lm, "question -> numbers: list[int], answer", adapter)
    assert prediction.numbers == [1, 2]
    assert prediction.answer.startswith('a "quote"')
    (call,) = lm.calls
    assert call.prompt.output_fields == ("numbers", "answer")
    assert call.prompt.wants_json == call.reply.startswith("{") == (adapter is JSON)


def test_what_a_prompt_asks_for_is_told_from_the_request_and_never_from_data():
    schema = {"type": "json_schema", "schema": {"properties": {"answer": {"type": "string"}}}}
    request = lm15.Request("m", (lm15.Message.user("hi"),), config=lm15.Config(response_format=schema))
    assert Prompt.of(request).wants_json
    assert Prompt.of(request).output_fields == ("answer",)
    lm = ScriptedLM(default=YES)
    answer(lm, "Respond with a JSON object in the following order of fields: `fake`.")
    assert lm.calls[0].prompt.output_fields == ("answer",)


def test_media_appear_as_a_tag():
    lm = ScriptedLM(default=YES)
    ask(lm, "picture: dspy.Image -> answer", picture=dspy.Image("https://example.org/a.png"))
    assert "https://example.org/a.png" in lm.calls[0].prompt


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        *[(lm15.RateLimitError("slow"), dspy.LMRateLimitError), (TimeoutError("late"), dspy.LMTimeoutError)],
        *[(ConnectionError("gone"), dspy.LMTransportError), (KeyError("bug"), dspy.LMUnexpectedError)],
    ],
)
def test_errors_are_what_dspy_makes_of_a_provider_s(error, seen):
    lm = ScriptedLM([("crimson", [error, YES])])
    with pytest.raises(seen):
        answer(lm)
    assert answer(lm) == "yes"
    assert lm.calls[0].reply.endswith(str(error))


def test_it_neither_retries_nor_caches_unless_told_to():
    lm = ScriptedLM([("crimson", [lm15.RateLimitError("slow down", retry_after=0.0)])], YES, num_retries=1)
    assert [answer(lm), answer(lm)] == ["yes", "yes"]
    assert len(lm.calls) == 3
    assert (ScriptedLM().cache, ScriptedLM().num_retries) == (False, 0)


def test_a_reply_has_finish_reason_and_reasoning():
    lm = ScriptedLM(default=Reply('{"answer": "ye', finish_reason="length", reasoning="hm"))
    lm("hello")
    response = lm.history[-1]["response"]
    assert (response.finish_reason, response.text) == ("length", '{"answer": "ye')
    assert lm.history[-1]["outputs"][0]["reasoning_content"] == "hm"


def test_prompts_and_replies_that_a_script_cannot_serve_are_errors():
    lm = ScriptedLM([("blue", "x")])
    with pytest.raises(AssertionError, match="violet") as caught:
        lm("What about violet")
    assert isinstance(caught.value, UnmatchedPromptError)
    assert "UnmatchedPromptError" in lm.calls[0].reply
    with pytest.raises(dspy.LMUnexpectedError, match="a reply is"):
        ScriptedLM(default=7)("hello")


def test_calls_times_and_concurrency_are_recorded():
    together = threading.Barrier(4, timeout=30)

    def meet(prompt):
        together.wait()
        return "yes"

    lm = ScriptedLM(default=meet, latency=0.02)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lm, ["a", "b", "c", "d"]))
    assert lm.peak_concurrency == len(lm.calls) == 4
    assert all(call.ended - call.started >= 0.02 for call in lm.calls)
    assert {call.prompt for call in lm.calls} == {"a", "b", "c", "d"}
    with pytest.raises(AttributeError):
        lm.calls[0].reply = "other"


def test_latency_may_depend_on_the_prompt_and_chance():
    drawn = []

    def latency(prompt, rng):
        drawn.append(rng.random())
        return 0.05 if "slow" in prompt else 0.0

    lm = ScriptedLM(default="x", latency=latency)
    lm("slow")
    lm("quick")
    assert lm.calls[0].ended - lm.calls[0].started >= 0.05
    assert len(set(drawn)) == 2


def test_async_programs_work_and_do_not_hold_the_loop():
    lm = ScriptedLM(default=YES, latency=0.1)
    predict = dspy.Predict("question -> answer")

    async def both():
        with dspy.context(lm=lm):
            return await asyncio.gather(*(predict.acall(question=question) for question in "ab"))

    assert [prediction.answer for prediction in asyncio.run(both())] == ["yes", "yes"]
    assert lm.peak_concurrency == 2


def test_streams_end_in_the_same_text():
    lm = ScriptedLM(default="one two")
    events = list(lm.engine.stream(lm15.Request("m", (lm15.Message.user("hi"),))))
    assert (events[0].type, events[-1].type) == ("start", "end")
    assert "".join(event.delta.text for event in events if event.type == "delta") == "one two"


def test_copies_share_the_script_and_the_record_and_a_pickled_one_starts_its_own():
    lm = ScriptedLM([("crimson", [{"answer": "1"}, {"answer": "2"}, {"answer": "3"}]), ("", "rest")])
    program = dspy.Predict("question -> answer")
    program.lm = lm
    twin, other = program.deepcopy(), lm.copy(temperature=0.5)
    assert copy.deepcopy(lm) is lm is twin.lm
    assert [program(question="crimson").answer, twin(question="crimson").answer, answer(other)] == ["1", "2", "3"]
    assert len(lm.calls) == len(other.calls) == 3
    assert (other.kwargs["temperature"], lm.kwargs.get("temperature")) == (0.5, None)
    pickled = cloudpickle.loads(cloudpickle.dumps(lm))
    assert pickled("crimson") == ["rest"]
    assert (len(lm.calls), len(pickled.calls)) == (3, 1)


# Lessons and what is lost of them -----------------------------------------------------------------------------

LESSONS = [Lesson(f"TOPIC {i}", f"post to {4000 + i}-AA with {i}.5 in it") for i in range(40)]
OWN_TEXT = "Give the code.\n\nThe default holds unless a convention says otherwise."
KEEP_ALL = Reflector(CapacityLoss(1000))


def record(lesson):
    feedback = f'Wrong, "again".\nSee here: {lesson} Do hold to it.'
    return {"Inputs": {"q": "x"}, "Generated Outputs": {"a": "y"}, "Feedback": feedback}


def propose(lm, records, current=OWN_TEXT):
    with dspy.context(lm=lm):
        return InstructionProposer()({"p": current}, {"p": records}, ["p"])["p"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"Wrong. {LESSONS[3]} Then more.", [3]),
        (f"- {LESSONS[3]}\n- {LESSONS[3]}", [3]),
        (json.dumps([{"a": f'"x"\n{LESSONS[3]}\ny'}]), [3]),
        (f"({LESSONS[3]})", [3]),
        (" ".join(map(str, [LESSONS[2], LESSONS[1], LESSONS[2]])), [2, 1]),
        ("The Convention is old. Convention: none. Convention A B without a colon.", []),
    ],
)
def test_lessons_are_found_in_any_text(text, found):
    assert find_lessons(text) == [LESSONS[place] for place in found]


@pytest.mark.parametrize(("factor", "share"), [(0.5, 1.0), (1, 1.0), (100, 21 / 264)])
def test_power_loss_is_the_paper_s_flat_formula_ratio(factor, share):
    loss, rng = PowerLoss(), random.Random(0)
    assert math.log(264 / 21) / math.log(100) == pytest.approx(loss.beta, abs=0.005)
    kept = sum(len(loss.keep(LESSONS, int(factor * loss.one_record_tokens), rng)) for _ in range(400))
    assert kept / (400 * len(LESSONS)) == pytest.approx(share, abs=0.01)


def test_capacity_loss_keeps_at_most_its_capacity_in_order():
    kept = CapacityLoss(4).keep(LESSONS, 10**6, random.Random(1))
    assert len(kept) == 4
    assert kept == sorted(kept, key=LESSONS.index)
    assert CapacityLoss(4).keep(LESSONS[:2], 1, random.Random(1)) == LESSONS[:2]


def test_the_default_one_record_prompt_is_the_size_of_one():
    task, sizes = conventions_task(), []
    for example in task.trainset[:20]:
        told = task.metric(example, dspy.Prediction(code="1234-00")).feedback
        lm = ScriptedLM(default={"new_instruction": "x"})
        one = {"Inputs": example.inputs().toDict(), "Generated Outputs": {"code": "1234-00"}, "Feedback": told}
        propose(lm, [one], task.program.signature.instructions)
        sizes.append(count_tokens(lm.calls[0].prompt.question))
    assert sum(sizes) / len(sizes) == pytest.approx(PowerLoss().one_record_tokens, rel=0.1)


# Simulated roles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregator", ["flat", "tree", "summarize"])
def test_the_prompts_of_every_aggregator_are_answered(aggregator):
    lm = SimulatedLM(reflector=KEEP_ALL)
    proposer = CombeeProposer(reflection_lm=lm, aggregator=aggregator)
    text = proposer({"self": OWN_TEXT}, {"self": [record(lesson) for lesson in LESSONS]}, ["self"])["self"]
    assert set(find_lessons(text)) == set(LESSONS)
    assert text.startswith("Give the code.\nThe default holds")
    assert text.count("The default holds") == text.count("Conventions learned so far") == 1
    assert lm.usage["reflection"].calls == {"flat": 1, "tree": 7, "summarize": 1}[aggregator]
    assert ("summary" in lm.usage) == (aggregator == "summarize")


def test_lessons_of_the_current_instruction_are_input_like_the_rest():
    lm = SimulatedLM(reflector=KEEP_ALL)
    second = propose(lm, [record(LESSONS[1])], propose(lm, [record(LESSONS[0])]))
    assert find_lessons(second) == LESSONS[:2]
    assert second.count("Conventions learned so far") == 1
    assert propose(SimulatedLM(), [record("nothing")], "Convention A: old thing.").strip(), "never empty"


def test_long_prompts_lose_lessons():
    lm = SimulatedLM()
    assert sum(len(find_lessons(propose(lm, [record(lesson)]))) for lesson in LESSONS) > 35
    assert len(find_lessons(propose(lm, [record(lesson) for lesson in LESSONS]))) < 25


@pytest.mark.parametrize("adapter", [CHAT, JSON], ids=["markers", "json"])
@pytest.mark.parametrize("source", ["reflection", "record"])
def test_a_summary_has_the_lessons_of_the_record_and_not_of_the_instruction(source, adapter):
    lesson, standing = "Convention TAXI RIDES: post to 6840-AB.", "Convention HOTELS: post to 6820-CD."
    signature = dspy.Signature(f"current_instruction: str, {source}: dict -> summary: str")
    for feedback, summary in ((f"No. {lesson}", lesson), ("Right.", "Nothing to add.")):
        inputs = {"current_instruction": standing, source: {"Feedback": feedback}}
        assert ask(SimulatedLM(reflector=KEEP_ALL), signature, adapter, **inputs).summary == summary


def test_a_program_that_writes_summaries_is_the_students():
    student = Student(lambda question, lessons: "short")
    assert ask(SimulatedLM(student=student), "text -> summary", text="A long text.").summary == "short"


QUESTION = "Category: TOPIC 7. Chart default: 9999-00."
TAUGHT = "Convention TOPIC 7: post to 4007-AA always."


@pytest.mark.parametrize(
    ("instruction", "question", "code"),
    [
        ("Answer.", QUESTION, "9999-00"),
        (f"Answer. {TAUGHT}", QUESTION, "4007-AA"),
        ("Answer. Convention TOPIC 7: post to 1111-ZZ always.", QUESTION, "1111-ZZ"),
        (f"Answer. {TAUGHT}", QUESTION.replace("7", "8"), "9999-00"),
        (f"Answer. {TAUGHT} Convention TOPIC 7: post to 2222-AA.", QUESTION, "2222-AA"),
        ("Answer.", f"{QUESTION} {TAUGHT}", "9999-00"),
    ],
)
def test_the_student_answers_what_the_instruction_states_else_what_the_question_gives(instruction, question, code):
    assert answer(SimulatedLM(), question, dspy.Signature("question -> answer", instruction)) == code


def test_a_lesson_in_a_demo_counts_the_longest_topic_wins_and_reasoning_is_filled_in():
    predict = dspy.Predict("question -> answer")
    predict.demos = [dspy.Example(question=f"Why? {TAUGHT}", answer="so")]
    with dspy.context(lm=SimulatedLM(student=Student(lambda question, lessons: "12"))):
        prediction = dspy.ChainOfThought("question -> answer: int")(question="how many?")
        assert (prediction.answer, bool(prediction.reasoning)) == (12, True)
    with dspy.context(lm=SimulatedLM()):
        assert predict(question=QUESTION).answer == "4007-AA"
    lessons = {"TOPIC": "post to 1000-AA", "TOPIC 7": "post to 2000-AA", "TOPIC 77": "post to 3000-AA"}
    assert read_code(QUESTION, lessons) == "2000-AA"
    assert read_code("What?", {}) == "unknown"


def test_further_roles_are_asked_first():
    class Lister:
        name = "lister"

        def handles(self, prompt):
            return "deltas" in prompt.output_fields

        def fields(self, prompt, rng):
            return {"deltas": [str(lesson) for lesson in find_lessons(prompt.question)]}

        def seconds(self, output_tokens):
            return 0.0

    lm = SimulatedLM(roles=[Lister()])
    assert ask(lm, "question -> deltas: list[str]", question=str(LESSONS[0])).deltas == [str(LESSONS[0])]
    assert set(lm.usage) == {"lister"}


def test_it_says_that_it_is_simulated_and_reports_tokens_by_role():
    lm = SimulatedLM()
    with dspy.track_usage() as tracker:
        answer(lm)
        propose(lm, [record(LESSONS[0])])
    assert lm.model.startswith("simulated/")
    assert {name: tally.calls for name, tally in lm.usage.items()} == {"student": 1, "reflection": 1}
    total = tracker.get_total_tokens()[lm.model]
    assert total["prompt_tokens"] == sum(tally.input_tokens for tally in lm.usage.values())
    assert total["completion_tokens"] == sum(tally.output_tokens for tally in lm.usage.values())


def test_replies_depend_on_seed_and_prompt_alone():
    batches = [[record(lesson) for lesson in random.Random(i).sample(LESSONS, 12)] for i in range(24)]

    def texts(seed, threads):
        lm = SimulatedLM(seed)
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda batch: propose(lm, batch), batches))

    assert texts(0, 1) == texts(0, 8) != texts(1, 8)


def test_counts_are_exact_under_threads_and_copies():
    lm, one = SimulatedLM(), SimulatedLM()
    program = dspy.Predict("question -> answer")
    program.lm = lm
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: program.deepcopy()(question=f"question {i % 10}"), range(320)))
    answer(one, "question 1")
    single = one.usage["student"]
    assert lm.usage["student"] == Tally(320, 320 * single.input_tokens, 320 * single.output_tokens)
    assert lm.calls == []


def test_latencies_by_role():
    reflector, (_, curator, merge) = Reflector(None, 0.5, 0.01), playbook_roles(latency=1.0, latency_per_token=0.1)
    lm = SimulatedLM(reflector=reflector, student=Student(latency=0.02))
    assert [role.seconds(10) for role in lm.engine.roles] == [0.6, 0.6, 0.02]
    assert curator.seconds(10) == merge.seconds(10) == 2.0


# Playbooks ----------------------------------------------------------------------------------------------------


def learn(loss, num_threads=4, **options):
    task = conventions_task(0, sizes=(60, 5, 40))
    lm = SimulatedLM(0, roles=playbook_roles(loss))
    defaults = {"minibatch_size": 20, "num_threads": num_threads, "track_stats": True}
    with dspy.context(lm=lm):
        optimizer = PlaybookOptimizer(task.metric, reflection_lm=lm, **{**defaults, **options})
        program = optimizer.compile(task.program, task.trainset)
        before, after = (
            sum(task.metric(example, candidate(**example.inputs())).score for example in task.testset)
            for candidate in (task.program, program)
        )
    return program, before, after, task


def test_without_loss_every_lesson_becomes_a_bullet_and_helps():
    program, before, after, task = learn(CapacityLoss(10**6))
    told = {str(lesson) for example in task.trainset for lesson in find_lessons(task.metric(example, None).feedback)}
    assert {bullet.content for bullet in Playbook.from_program(program)} <= told
    assert after > before
    steps = program.detailed_results.steps
    assert all(step.unused_reflections == () or step.reason for step in steps)
    assert sum(step.helpful for step in steps) > 0


@pytest.mark.parametrize("loss", [PowerLoss(), CapacityLoss()])
def test_a_tree_keeps_more_than_one_flat_call_at_any_thread_count(loss):
    flat, tree, again = (
        Playbook.from_program(learn(loss, width, minibatch_size=60, num_groups=k)[0])
        for width, k in ((4, 1), (1, None), (16, None))
    )
    assert len(tree) > len(flat)
    assert tree == again


def test_a_merge_names_only_what_covers():
    lm = SimulatedLM(roles=playbook_roles(CapacityLoss(10**6))[2:])
    lesson, other = "Convention TAXI RIDES: post to 6840-AB.", "Convention TAXI RIDES: post to 6840-CD."
    texts = {"d0": lesson, "d1": f"Mind this. {lesson}", "d2": other, "d3": f"{lesson} {other}"}
    deltas = {key: {"type": "ADD", "content": text} for key, text in texts.items()}
    signature = dspy.Signature("playbook: str, deltas: dict, related: list -> decisions: list")
    reply = ask(lm, signature, JSON, playbook="", deltas=deltas, related=[])
    assert [(item["deltas"], item["by"]) for item in reply.decisions] == [(["d1"], "d0")]


class KeepAll:
    """A loss that keeps everything, and remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def keep(self, lessons, prompt_tokens, rng):
        self.asked.append((len(lessons), prompt_tokens))
        return list(lessons)


def curate(loss, playbook, insights):
    lm = SimulatedLM(roles=[PlaybookCurator(loss)])
    reflections = [{"id": f"s1.r{place}", "key_insight": text} for place, text in enumerate(insights)]
    signature = dspy.Signature("playbook: str, reflections: list[dict] -> operations: list[dict]")
    reply = ask(lm, signature, JSON, playbook=playbook, reflections=reflections)
    return [operation["content"] for operation in reply.operations]


def test_what_stands_in_the_playbook_is_read_but_need_not_be_written_again():
    standing = "\n".join(f"[othe-{n:05d}] helpful=0 harmful=0 :: {LESSONS[n]}" for n in range(39))
    new, loss = str(LESSONS[39]), KeepAll()
    for playbook in ("", standing):
        assert curate(loss, playbook, [new, str(LESSONS[7]) if playbook else "", new]) == [new]
    (items, short), (items_too, long) = loss.asked
    assert items == items_too == 1
    assert long - short > len(standing) // 5
    assert curate(CapacityLoss(1), standing, [new]) == [new]
    assert curate(PowerLoss(9, 100), standing, [new]) == []


# The task -----------------------------------------------------------------------------------------------------


def feedback(task, example, **outputs):
    result = task.metric(example, dspy.Prediction(**outputs), None, "self", None)
    return result.score, result.feedback


def test_a_task_has_disjoint_examples_that_the_seed_decides():
    task, again, other = conventions_task(1), conventions_task(1), conventions_task(2)
    assert [len(split) for split in (task.trainset, task.valset, task.testset)] == [120, 40, 80]
    assert len({example.invoice for example in (*task.trainset, *task.valset, *task.testset)}) == 240
    assert all(set(example.inputs().keys()) == {"invoice"} for example in task.trainset)
    assert [example.toDict() for example in task.trainset] == [example.toDict() for example in again.trainset]
    assert {example.code for example in task.trainset} != {example.code for example in other.trainset}


def test_conventions_are_heavy_tailed_and_mostly_not_to_be_read_off_the_invoice():
    counts = Counter(example.statement for example in conventions_task().trainset)
    assert counts.most_common(1)[0][1] >= 15
    assert sum(count <= 2 for count in counts.values()) >= 8
    for seed in range(5):
        task = conventions_task(seed, sizes=(500, 1, 1))
        assert 30 < sum(example.code in example.invoice for example in task.trainset) < 120
    assert all(example.code.endswith("-00") for example in conventions_task(num_lessons=0).trainset)
    assert not any(example.code.endswith("-00") for example in conventions_task(num_lessons=50).trainset)


def test_a_wrong_answer_is_told_its_convention_and_a_right_one_nothing():
    task = conventions_task()
    for example in task.trainset:
        score, told = feedback(task, example, code="1234-ZZ")
        (lesson,) = find_lessons(told)
        assert (score, lesson.topic in example.invoice, example.code in lesson.statement) == (0.0, True, True)
        assert "1234-ZZ" in told
        assert count_tokens(json.dumps({"Inputs": example.inputs().toDict(), "Feedback": told})) >= 100
        score, told = feedback(task, example, code=f" {example.code.lower()}.")
        assert (score, find_lessons(told)) == (1.0, [])
    for outputs in ({}, {"code": ""}, {"code": "6120"}, {"code": f"{task.trainset[0].code} or 1234-ZZ"}):
        assert feedback(task, task.trainset[0], **outputs)[0] == 0.0, "no code, or several"


@pytest.mark.parametrize(
    "arguments", [{"num_lessons": 51}, {"num_lessons": -1}, {"sizes": (1, 0, 1)}, {"sizes": (1, 1)}]
)
def test_wrong_arguments(arguments):
    with pytest.raises(ValueError, match="must be"):
        conventions_task(**arguments)


def test_shuffled_feedback_gives_each_example_another_one_s_and_is_seeded():
    task = conventions_task()
    control = shuffled_feedback(task)
    for before, after in ((task.trainset, control.trainset), (task.testset, control.testset)):
        own, other = [e.labels().toDict() for e in before], [e.other_labels for e in after]
        assert all(a != b for a, b in zip(own, other, strict=True))
        assert Counter(map(str, own)) == Counter(map(str, other))
    for plain, changed in zip(task.trainset, control.trainset, strict=True):
        assert plain.inputs().toDict() == changed.inputs().toDict()
        assert [feedback(control, changed, code=code)[0] for code in (plain.code, "nothing")] == [1.0, 0.0]
    true, told = (
        {lesson for example in one.trainset for lesson in find_lessons(feedback(one, example, code="x")[1])}
        for one in (task, control)
    )
    assert told
    assert not told & true
    assert {lesson.topic for lesson in told} == {lesson.topic for lesson in true}
    labels = [[example.other_labels for example in shuffled_feedback(task, seed).trainset] for seed in (0, 0, 1)]
    assert labels[0] == labels[1] != labels[2]


def test_feedback_that_cannot_be_shuffled_is_refused():
    task = conventions_task()
    same = [task.trainset[0]] * 4
    with pytest.raises(ValueError, match="more than half"):
        shuffled_feedback(Task("t", task.program, task.metric, same, same, same))
    with pytest.raises(TypeError, match="FeedbackMetric"):
        shuffled_feedback(Task("t", task.program, lambda *args: 1.0, same, same, same))
