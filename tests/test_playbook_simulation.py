"""The simulated roles of playbook learning: what they keep, lose and name."""

import dspy
import pytest

from dspy_combee import Playbook, PlaybookOptimizer
from dspy_combee.testing import CapacityLoss, PowerLoss, SimulatedLM, find_lessons
from dspy_combee.testing.playbook_simulation import playbook_roles
from dspy_combee.testing.tasks import conventions_task

LOSSLESS = CapacityLoss(10**6)


def learn(loss, num_threads=4, seed=0, **options):
    task = conventions_task(0, sizes=(60, 5, 40))
    lm = SimulatedLM(seed, roles=playbook_roles(loss))
    defaults = {"minibatch_size": 20, "num_threads": num_threads, "track_stats": True}
    with dspy.context(lm=lm):
        optimizer = PlaybookOptimizer(task.metric, reflection_lm=lm, **{**defaults, **options})
        program = optimizer.compile(task.program, task.trainset)
        score = sum(task.metric(example, program(**example.inputs())).score for example in task.testset)
        before = sum(task.metric(example, task.program(**example.inputs())).score for example in task.testset)
    return program, before, score, task


def test_without_loss_every_lesson_becomes_a_bullet_and_helps():
    program, before, after, task = learn(LOSSLESS)
    told = {str(lesson) for example in task.trainset for lesson in find_lessons(task.metric(example, None).feedback)}
    asked = {bullet.content for bullet in Playbook.from_program(program)}
    assert asked <= told
    assert after > before
    assert all(step.unused_reflections == () or step.reason for step in program.detailed_results.steps)
    assert sum(step.helpful for step in program.detailed_results.steps) > 0


@pytest.mark.parametrize("loss", [PowerLoss(), CapacityLoss()])
def test_a_tree_keeps_more_than_one_flat_call(loss):
    flat, tree = (learn(loss, minibatch_size=60, num_groups=k)[0] for k in (1, None))
    assert len(Playbook.from_program(tree)) > len(Playbook.from_program(flat))


def test_replies_do_not_depend_on_the_thread_count():
    one, many = (learn(PowerLoss(), num_threads=width)[0] for width in (1, 16))
    assert Playbook.from_program(one) == Playbook.from_program(many)


def test_a_merge_names_only_what_covers():
    merge = playbook_roles(LOSSLESS)[2]
    lm = SimulatedLM(roles=[merge])
    signature = dspy.Signature("playbook: str, deltas: dict, related: list -> decisions: list")
    lesson, other = "Convention TAXI RIDES: post to 6840-AB.", "Convention TAXI RIDES: post to 6840-CD."
    deltas = {
        key: {"type": "ADD", "content": text}
        for key, text in {"d0": lesson, "d1": f"Mind this. {lesson}", "d2": other, "d3": f"{lesson} {other}"}.items()
    }
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        reply = dspy.Predict(signature)(playbook="", deltas=deltas, related=[])
    assert [(item["deltas"], item["by"]) for item in reply.decisions] == [(["d1"], "d0")]
