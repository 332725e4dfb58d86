import random

import dspy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_combee.records.text import estimate_tokens
from dspy_combee.records.types import ReflectionRecord
from dspy_combee.traces import Trace, TraceMessage, render_trace, to_record
from dspy_combee.traces.rendering import MIN_RECORD_TOKENS, allot, cut
from dspy_combee.traces.types import KINDS

WORDS = ("the", "agent", "reads", "a", "file", "and", "finds", "nothing", "of", "use", "elsewhere")


def prose(rng, words):
    return " ".join(rng.choices(WORDS, k=words))


def long_trace(seed=0, num_steps=200, output_words=300):
    rng = random.Random(seed)
    steps = [TraceMessage("user", "TASK " + prose(rng, 100), step=1)]
    for number in range(2, num_steps + 1):
        error = "\nPermissionError: [Errno 13] number 77" if number == 77 else ""
        steps += [
            TraceMessage("agent", f"SAY{number} " + prose(rng, 20), step=number),
            TraceMessage("call", f"CALL{number}", "bash", number),
            TraceMessage("output", f"OUT{number} {prose(rng, output_words)}{error} END{number}", "bash", number),
        ]
    feedback = "VERIFIER " + prose(rng, 50) + " 3 failed"
    return Trace({"task": steps[0].text}, {"final_message": "all done"}, feedback, 0.0, steps=tuple(steps))


def test_a_short_trace_is_shown_whole():
    steps = (
        TraceMessage("user", "Sort it.", step=1),
        TraceMessage("reasoning", "Easy.", step=2),
        TraceMessage("call", "sort x", "bash", 2),
        TraceMessage("output", "a\nb", "bash", 2),
        TraceMessage("agent", "Sorted.", step=3),
        TraceMessage("agent", "Bye."),
    )
    trace = Trace({"task": "Sort it."}, {"final_message": "Sorted."}, "Well done.", 1, steps=steps)
    text = """\
Task:
task: Sort it.

Feedback:
This trajectory got a score of 1.0.
Well done.

Outcome:
final_message: Sorted.

Steps:
[2] reasoning: Easy.
[2] call bash: sort x
[2] output bash: a
b
agent: Bye."""
    assert render_trace(trace) == render_trace(trace, 1000) == text
    record = to_record(trace, source=7)
    assert isinstance(record, ReflectionRecord)
    assert record.source == 7
    assert record == to_record(trace, 1000)
    assert record == {
        "Inputs": {"task": "Sort it."},
        "Generated Outputs": {"final_message": "Sorted.", "trajectory": text.partition("Steps:\n")[2]},
        "Feedback": "This trajectory got a score of 1.0.\nWell done.",
    }


def test_a_record_keeps_its_values_and_names():
    image = dspy.Image("https://example.org/x.png")
    trace = Trace({"image": image, "n": [1]}, {"trajectory": {"a": 1}}, steps=(TraceMessage("agent", "x"),))
    record = to_record(trace, 2000)
    assert record["Inputs"]["image"] is image
    assert record["Inputs"]["n"] == [1]
    assert record["Generated Outputs"] == {"trajectory": {"a": 1}, "steps": "agent: x"}
    assert record["Feedback"] == "Nobody scored this trajectory or said anything about it."
    assert to_record(trace, 100)["Inputs"] == {"image": '"[Image]"', "n": "[1]"}
    assert "image: " in render_trace(trace)
    assert to_record(Trace({})) == {"Inputs": {}, "Generated Outputs": {}, "Feedback": record["Feedback"]}


def test_outputs_of_tools_are_cut_before_messages():
    trace = long_trace()
    text = render_trace(trace, 24_000)
    assert "TASK" in text
    assert all(f"SAY{number} " in text and f"CALL{number}" in text for number in range(2, 201))
    assert all(f"END{number}" in text for number in range(2, 201))
    assert "PermissionError: [Errno 13] number 77" in text
    assert "steps" not in text.partition("Steps:")[2]
    # The last outputs and the one with the error are cut less than the others.
    sizes = {number: text.index(f"END{number}") - text.index(f"OUT{number} ") for number in (40, 77, 120, 200)}
    assert min(sizes[77], sizes[200]) > 1.5 * max(sizes[40], sizes[120])


def test_then_the_middle_is_left_out_with_a_mark():
    trace = long_trace()
    text = render_trace(trace, 2000)
    for part in (
        "TASK",
        "VERIFIER",
        "3 failed",
        "score of 0.0",
        "final_message: all done",
        "SAY200",
        "END200",
        "SAY2 ",
    ):
        assert part in text
    assert "PermissionError: [Errno 13] number 77" in text
    assert "SAY100 " not in text
    marks = [line for line in text.splitlines() if " steps (" in line]
    assert len(marks) == 2
    assert all(line.startswith("[... ") and line.endswith(" characters) cut ...]") for line in marks)
    shown = sum(text.count(f"SAY{n} ") + text.count(f"CALL{n}\n") + text.count(f"OUT{n} ") for n in range(2, 201))
    assert sum(int(line.split()[1].replace(",", "")) for line in marks) == 199 * 3 - shown


def test_long_tasks_and_verdicts_are_cut_to_their_ends():
    rng = random.Random(0)
    task = "BEGIN " + prose(rng, 5000) + " STOP"
    trace = Trace({"task": task}, {"x": "y" * 9000}, prose(rng, 5000) + " 1 failed")
    text = render_trace(trace, 500)
    for part in ("BEGIN", "STOP", "1 failed", "x: yyy", "characters cut ...]"):
        assert part in text
    # What one part does not need goes to the others.
    assert estimate_tokens(text) > 400


@pytest.mark.parametrize("group", [12, 60])
def test_traces_of_200_steps_fit_a_context_of_32000_tokens(group):
    for seed in range(5):
        trace = long_trace(seed)
        record = to_record(trace, 32_000 // group)
        assert estimate_tokens(to_record(trace)) > 32_000
        assert 0.8 * (32_000 // group) < estimate_tokens(record) <= 32_000 // group
        assert "SAY200" in str(record)
        assert "VERIFIER" in str(record)


texts = st.one_of(
    st.text(max_size=30),
    st.builds(lambda text, times: text * times, st.text(min_size=1, max_size=5), st.integers(1, 800)),
)
any_trace = st.builds(
    Trace,
    st.dictionaries(texts, texts | st.lists(st.integers()), max_size=4),
    st.dictionaries(texts, texts, max_size=2),
    texts,
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
    st.none(),
    st.lists(
        st.builds(TraceMessage, st.sampled_from(KINDS), texts, st.none() | texts, st.integers(0, 10**9)), max_size=12
    ).map(tuple),
)


@given(any_trace, st.integers(1, 3000))
def test_never_over_the_limit_and_never_empty(trace, max_tokens):
    text = render_trace(trace, max_tokens)
    assert text.strip()
    assert estimate_tokens(text) <= max_tokens
    max_tokens = max(max_tokens, MIN_RECORD_TOKENS)
    record = to_record(trace, max_tokens)
    assert estimate_tokens(record) <= max_tokens
    assert list(record) == ["Inputs", "Generated Outputs", "Feedback"]
    assert record["Feedback"]


def test_a_trace_of_many_or_nameless_fields_fits_too():
    trace = Trace({f"field {i}" * 20: "x" for i in range(500)}, {"": ""}, " ")
    for max_tokens in (64, 100, 1000):
        assert estimate_tokens(to_record(trace, max_tokens)) <= max_tokens
        assert "field 0" in render_trace(trace, max_tokens)


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, "9", True])
def test_a_wrong_limit(max_tokens):
    with pytest.raises(ValueError, match="max_tokens must be an int >= 1 or None"):
        render_trace(Trace({}), max_tokens)
    with pytest.raises(ValueError, match="max_tokens must be an int >= 64 or None"):
        to_record(Trace({}), max_tokens)


@given(st.text(), st.integers(0, 200))
def test_a_cut_text_fits_and_keeps_its_ends(text, limit):
    short = cut(text * 5, limit)
    size = sum(1 if character.isascii() else 4 for character in short)
    assert size <= limit or short == text * 5 == ""
    if short != text * 5 and "characters cut" in short and "characters cut" not in text:
        head, _, rest = short.partition("\n[... ")
        count, _, end = rest.partition(" characters cut ...]\n")
        assert (text * 5).startswith(head)
        assert (text * 5).endswith(end)
        assert int(count.replace(",", "")) == len(text * 5) - len(head) - len(end)


parts = st.lists(st.tuples(st.integers(0, 1000), st.floats(0.1, 10)), max_size=10)


@given(parts, st.integers(0, 5000))
def test_shares(parts, total):
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    given_room = allot(sizes, weights, total)
    assert all(0 <= room <= size for room, size in zip(given_room, sizes, strict=True))
    assert sum(given_room) <= total
    assert sum(given_room) >= min(sum(sizes), total) - len(parts)
