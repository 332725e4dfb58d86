"""The benchmark of context overload: its models, its task, and what it prints."""

import random
from types import SimpleNamespace

import dspy
import pytest

from benchmarks import context_overload
from benchmarks._overload_fit import FORMULA, sketches
from benchmarks._overload_runs import CALL_SECONDS, WIDTH, Arm, run, simulated_seconds
from benchmarks._overload_task import WORDINGS, Novelty, overload_lm, overload_task, post_lines
from dspy_combee.playbook.pruning import same_words
from dspy_combee.testing import CapacityLoss, Lesson, PowerLoss, SimulatedLM, find_lessons
from dspy_combee.testing.playbook_simulation import PlaybookCurator

CURATE = dspy.Signature("playbook: str, reflections: list[dict] -> operations: list[dict]")


@pytest.mark.parametrize("model", context_overload.MODELS, ids=lambda model: model.name)
def test_the_models_are_those_that_fit_the_flat_figures(model):
    samples, large = FORMULA["samples"], FORMULA["large batch"]
    assert sketches(model.loss, model.novelty, 1, samples).lessons == pytest.approx(264, rel=0.1)
    assert sketches(model.loss, model.novelty, large, samples).lessons == pytest.approx(21, rel=0.1)


def curate(loss, playbook, insights, **options):
    lm = SimulatedLM(roles=[PlaybookCurator(loss, **options)])
    reflections = [{"id": f"s1.r{place}", "key_insight": text} for place, text in enumerate(insights)]
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        reply = dspy.Predict(CURATE)(playbook=playbook, reflections=reflections)
    return [operation["content"] for operation in reply.operations]


def lesson(number):
    return str(Lesson(f"GROUP {number}", f"post to {1000 + number}-AB with the tax split out"))


class Recording:
    """Keeps everything, and remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def keep(self, lessons, prompt_tokens, rng):
        self.asked.append((len(lessons), prompt_tokens))
        return list(lessons)


def test_what_stands_in_the_playbook_is_read_but_need_not_be_written_again():
    standing = "\n".join(f"[othe-{n:05d}] helpful=0 harmful=0 :: {lesson(n)}" for n in range(1, 51))
    loss = Recording()
    for playbook in ("", standing):
        assert curate(loss, playbook, [lesson(99), lesson(7) if playbook else "", lesson(99)]) == [lesson(99)]
    (items, short), (items_too, long) = loss.asked
    assert items == items_too == 1
    assert long - short > len(standing) // 5
    assert curate(CapacityLoss(1), standing, [lesson(99)]) == [lesson(99)]
    assert curate(PowerLoss(9, 100), standing, [lesson(99)]) == []


def test_a_lesson_is_found_in_every_wording():
    for wording in WORDINGS:
        (content,) = curate(Recording(), "", [lesson(1)], wordings=(wording,))
        assert [str(found) for found in find_lessons(content)] == [lesson(1)]
    texts = [wording.replace("{}", lesson(1)) for wording in WORDINGS]
    assert len(set(same_words(texts))) > 1, "nothing would be left for the merge call"


def test_the_task_teaches_what_it_asks_and_right_lines_teach_nothing():
    task = overload_task(0, Novelty(50), 30, 30)
    told = {}
    for example in task.trainset + task.testset:
        before = task.metric(example, SimpleNamespace(codes=post_lines(example.invoice, {})))
        lessons = {found.topic: found.statement for found in find_lessons(before.feedback)}
        assert (before.score == 1) == (not lessons)
        assert task.metric(example, SimpleNamespace(codes=post_lines(example.invoice, lessons))).score == 1
        told.update(lessons)
    assert 10 < len(told) <= 50
    # A long list with a long tail.
    assert len(find_lessons(" ".join(" ".join(item.told) for item in task.trainset))) < 3 * len(task.trainset)


def test_reflections_are_as_long_as_asked():
    lengths = []
    for tokens in (100, 800):
        role = next(role for role in overload_lm(Recording(), 0, tokens).engine.roles if role.name == "reflection")
        lengths.append(len(role.notes) // 4 + 75)
    assert lengths == pytest.approx([100, 800], abs=5)


@pytest.mark.parametrize("model", context_overload.MODELS, ids=lambda model: model.name)
def test_the_tree_keeps_more_and_loses_nothing_after_level_1(model):
    runs = [Arm(model.loss, model.novelty, 40, 40, how, 2, 0, num_test=5) for how in ("flat", "tree")]
    flat, tree = map(run, runs)
    assert tree.lessons >= 2 * flat.lessons
    for outcome in (flat, tree):
        assert outcome.flow.told >= outcome.flow.reflected >= outcome.flow.proposed
        assert outcome.flow.proposed == outcome.flow.merged == outcome.flow.applied == outcome.lessons
        assert outcome.duplicates >= 0
    assert tree.reflection_tokens > flat.reflection_tokens


def test_simulated_time_goes_wave_by_wave():
    usage = SimpleNamespace(calls=1, output_tokens=0)
    nodes = [SimpleNamespace(id=name, usage=usage) for name in ("1.0", "1.1", "2.0")]
    step = SimpleNamespace(n=0, reflections=[], nodes=nodes)
    assert simulated_seconds(step) == 2 * CALL_SECONDS
    step.nodes = [SimpleNamespace(id=f"1.{index}", usage=usage) for index in range(WIDTH + 1)]
    assert simulated_seconds(step) == 2 * CALL_SECONDS


def test_the_losses_are_drawn_from_the_seed():
    arm = Arm(PowerLoss(1, 1000), Novelty(100), 20, 20, "tree", 2, 3, num_test=2)
    assert run(arm) == run(arm)
    assert PowerLoss(1, 100).keep([Lesson("A", "b")], 100, random.Random(0))


def test_it_says_that_it_is_simulated(capsys, monkeypatch):
    plan = context_overload.Plan((40,), 1, 16, 1, predict=False, sensitivity=False)
    monkeypatch.setattr(context_overload, "QUICK", plan)
    context_overload.main(["--quick", "--workers", "1"])
    printed = capsys.readouterr().out
    assert printed.startswith("Context overload, SIMULATED.")
    for name in ("power", "capacity"):
        assert f"{name}, n = 40: tree / flat lessons" in printed
    assert "tree p=2" in printed
