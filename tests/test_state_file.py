"""A damaged state in `log_dir`: one error that names the file, before anything is spent, whatever the damage."""

import copy
import json

import pytest

from dspy_combee import PowerLawBatchSize

from . import playbook_lessons
from .clocks import LookClock
from .lessons import examples, learning_lm, make
from .playbook_lessons import playbook_lm
from .trace_runs import compile_on
from .trace_samples import traces

WRONG = [None, "x", -1, float("nan"), [[1]], {"a": 1}]


def playbook_run(lm, folder):
    options = {"minibatch_size": PowerLawBatchSize(clock=LookClock()), "num_epochs": 5, "valset": examples(2)}
    playbook_lessons.learn(lm, n_train=20, log_dir=folder, **options)


def trace_run(lm, folder):
    optimizer = make(lm, reflection_minibatch_size=4, log_dir=str(folder))
    compile_on(optimizer, lm, traces(8), valset=examples(4))


RUNS = {
    "playbook_state.json": (playbook_run, playbook_lm),
    "trace_state.json": (trace_run, learning_lm),
}


def paths(value, at=()):
    """The places in a JSON value; of a list the first item alone."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from paths(item, (*at, key))


def damaged(data):
    """The state with one field left out, one too many, or one of another type or out of range."""
    for *way, last in paths(data):
        for wrong in (..., *WRONG):
            changed = inner = copy.deepcopy(data)
            for key in way:
                inner = inner[key]
            if wrong is ...:
                del inner[last]
            else:
                inner[last] = wrong
            yield json.dumps(changed)
    yield json.dumps({**data, "strange": 1})


@pytest.fixture(scope="module", params=RUNS)
def saved(request, tmp_path_factory):
    """A run, what makes its language model, and the file of its state."""
    folder = tmp_path_factory.mktemp("run")
    run, make_lm = RUNS[request.param]
    run(make_lm(), folder)
    file = folder / request.param
    return run, make_lm, file, file.read_text(encoding="utf-8")


def outcome(saved, content):
    """What the run raises, None where it goes on; what is raised must be clear, and come before any call."""
    run, make_lm, file, _ = saved
    lm, raised = make_lm(), None
    file.write_bytes(content)
    try:
        run(lm, file.parent)
    except ValueError as error:
        raised = error
    if raised is not None:
        assert str(file) in str(raised)
        assert "log_dir" in str(raised), "what to do"
        assert len(str(raised).splitlines()) == 1
        assert lm.calls == []
    return raised


def test_whatever_is_damaged_the_error_is_clear(saved):
    texts = list(damaged(json.loads(saved[3])))
    errors = [outcome(saved, text.encode()) for text in texts]
    assert sum(error is not None for error in errors) > 0.7 * len(texts)


def test_a_file_that_is_cut_short_or_no_json(saved):
    whole = saved[3].rstrip().encode()
    contents = [whole[:end] for end in range(0, len(whole), len(whole) // 40)]
    for content in [*contents, b"\xff\xfe" + whole, b"[" * 100_000, whole + b"}", b"null", b"[1]", b'"x"']:
        assert "or it is damaged" in str(outcome(saved, content))
    assert outcome(saved, whole) is None


def test_the_state_of_other_components_is_refused(saved):
    data = json.loads(saved[3])
    held = data["state"]["current"]
    held["stranger"] = held.pop(next(iter(held)))
    assert "stranger" in str(outcome(saved, json.dumps(data).encode()))


def test_values_of_the_file_are_not_told(saved):
    data = json.loads(saved[3])
    data["state"]["batch_sizes"] = "s3cr3t"
    error = str(outcome(saved, json.dumps(data).encode()))
    assert "batch_sizes" in error
    assert "s3cr3t" not in error
