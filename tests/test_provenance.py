"""Provenance: from an instruction, or a bullet, back to the examples that fed it, and those that were lost."""

from dataclasses import replace

import dspy
import pytest

from dspy_combee import Playbook, ProposalNode, Reduction
from dspy_combee.playbook.deltas import Add, Applied, Conflict, Merge, Remove, Update
from dspy_combee.playbook.pruning import Pruned
from dspy_combee.playbook.records import PlaybookChange
from dspy_combee.records.provenance import surviving_nodes, trace_back

from . import playbook_lessons
from .lessons import Chain, examples, instruction, is_level_1, learn, learning_lm, numbers_in
from .playbook_lessons import bullets_in, playbook_lm
from .report_samples import playbook_steps, steps_of


def node(name, *inputs, output="text", error=None):
    return ProposalNode(name, "answer", inputs, output, error=error)


def tree(*nodes, text="text", n=4):
    return Reduction("answer", text, nodes, 2, 1, sources=tuple(range(n)))


def step(number, reduction, parent=0, ids=(10, 11, 12, 13)):
    base = steps_of(1)[0]
    return replace(
        base, iteration=number, parent=parent, candidate=number, minibatch_ids=ids, n=len(ids), reductions=(reduction,)
    )


# Trees -------------------------------------------------------------------------------------------------------


def test_a_tree_of_two_levels():
    made = tree(node("1.0", "r0", "r1", output="a"), node("1.1", "r2", "r3", output="b"), node("2.0", "1.0", "1.1"))
    assert surviving_nodes(made) == ("2.0", "1.0", "1.1")
    (found,) = trace_back([step(1, made)], 1, "answer")
    assert (found.fed, found.lost) == ((10, 11, 12, 13), ())
    assert (found.iteration, found.candidate, found.parent, found.text) == (1, 1, 0, "text")


def test_the_records_of_a_failed_call_are_lost():
    made = tree(
        node("1.0", "r0", "r1", output=None, error="it failed"),
        node("1.1", "r1", "r2", "r3", output="b"),
        node("2.0", "1.1"),
    )
    (found,) = trace_back([step(1, made)], 1, "answer")
    assert found.nodes == ("2.0", "1.1")
    assert (found.fed, found.lost) == ((11, 12, 13), (10,))


def test_equal_proposals_that_were_merged_without_a_call_are_all_roots():
    made = tree(node("1.0", "r0", "r1"), node("1.1", "r2", "r3"), text="text")
    assert set(surviving_nodes(made)) == {"1.0", "1.1"}
    assert trace_back([step(1, made)], 1, "answer")[0].lost == ()


def test_of_several_levels_every_way_down_is_walked():
    made = tree(
        *(node(f"1.{i}", f"r{i}", output=f"p{i}") for i in range(4)),
        node("2.0", "1.0", "1.1", output="a"),
        node("2.1", "1.2", "1.3", output=None, error="it failed"),
        node("3.0", "2.0"),
    )
    (found,) = trace_back([step(1, made)], 1, "answer")
    assert found.nodes == ("3.0", "2.0", "1.0", "1.1")
    assert (found.fed, found.lost) == ((10, 11), (12, 13))


def test_a_record_stands_for_the_example_that_it_came_from():
    made = replace(tree(node("1.0", "r0", "r1")), sources=(3, 1))
    (found,) = trace_back([step(1, made)], 1, "answer")
    assert found.fed == (13, 11)


def test_the_walk_goes_from_candidate_to_parent_and_leaves_other_components_out():
    first, second = step(1, tree(node("1.0", "r0"), text="text")), step(2, tree(node("1.0", "r1")), parent=1)
    other = replace(step(3, replace(tree(node("1.0", "r2")), component="hint")), parent=2)
    assert [item.iteration for item in trace_back([first, second, other], 3, "answer")] == [2, 1]
    assert [item.iteration for item in trace_back([first, second, other], 3, "hint")] == [3]
    assert trace_back([first, second, other], 0, "answer") == []
    assert trace_back([first, second, other], 99, "answer") == []


def test_a_run_where_a_call_fails_loses_what_no_other_call_read():
    """With p = 1 each record is in one group, so the failed group's records are the lost ones."""
    lm = learning_lm((lambda prompt: is_level_1(prompt) and "question 3" in prompt.question, "no fields"))
    program = learn(lm, n_train=9, reflection_minibatch_size=9, duplication_factor=1, max_metric_calls=40)
    result = program.detailed_results
    entries = result.provenance("self")
    assert entries
    for entry in entries:
        (made,) = [item for item in result.steps if item.iteration == entry.iteration]
        failed = {int(name[1:]) for call in made.nodes if call.output is None for name in call.inputs}
        assert set(entry.lost) == {made.minibatch_ids[position] for position in failed}
        assert numbers_in(entry.text) >= set(entry.fed)
        assert not numbers_in(entry.text) & set(entry.lost) or entry.parent != 0
    assert entries[0].text == instruction(program)


def test_only_a_component_of_the_program_has_a_provenance():
    result = learn(learning_lm(), Chain(), component_selector="all").detailed_results
    assert result.provenance("first")[0].iteration == result.provenance("second")[0].iteration
    with pytest.raises(ValueError, match=r"no component 'third'; there are \['first', 'second'\]"):
        result.provenance("third")


# Bullets -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned():
    return playbook_lessons.learn(playbook_lm(), n_train=12, num_epochs=2).detailed_results


def test_a_bullet_goes_back_to_the_example_that_told_it(learned):
    for bullet in learned.playbooks["self"]:
        (number,) = numbers_in(bullet.content)
        (entry,) = learned.provenance(bullet.id)
        assert (entry.change, entry.content, entry.bullet_id) == ("ADD", bullet.content, bullet.id)
        assert entry.fed == (number,)
        assert [item.id for item in entry.reflections] == list(bullet.reflection_ids)
        assert all(f"rule-answer-{number}" in item.text for item in entry.reflections)
        made = learned.steps[entry.iteration - 1]
        calls = {call.id: call for call in made.nodes}
        assert entry.nodes
        for name in entry.nodes:
            assert any(delta.content == bullet.content for delta in calls[name].output)


def test_the_reflections_that_reached_no_bullet_are_lost():
    def forgets(prompt):
        made = playbook_lessons.curate(prompt)["operations"]
        return {"operations": [item for item in made if "rule-answer-2." not in item["content"]]}

    result = playbook_lessons.learn(playbook_lm(curator=forgets), n_train=6).detailed_results
    bullet = next(iter(result.playbooks["self"]))
    (entry,) = result.provenance(bullet.id)
    assert entry.lost == (2,)
    assert 2 not in entry.fed


def test_updates_are_entries_of_their_own_the_last_one_first():
    def curator(prompt):
        known = list(bullets_in(prompt))
        if not known:
            return playbook_lessons.curate(prompt)
        ids = [item["id"] for item in playbook_lessons.field(prompt, "reflections")]
        return {
            "operations": [{"type": "UPDATE", "id": known[0], "content": f"After {ids[0]}.", "reflection_ids": ids}]
        }

    def reflector(prompt):
        return {**playbook_lessons.reflect(prompt), "key_insight": told(prompt)}

    lm = playbook_lm(reflector=reflector, curator=curator)
    result = playbook_lessons.learn(lm, n_train=4, minibatch_size=2, num_threads=1).detailed_results
    bullet = next(iter(result.playbooks["self"]))
    entries = result.provenance(bullet.id)
    assert [(entry.iteration, entry.change) for entry in entries] == [(2, "UPDATE"), (1, "ADD")]
    assert entries[0].content == bullet.content
    assert {number for entry in entries for number in entry.fed} <= set(range(4))
    assert len(entries[0].fed) == 2


def told(prompt):
    return " ".join(sorted(playbook_lessons.rules_in(playbook_lessons.field(prompt, "attempt")["Feedback"])))


def changed(number, **changes):
    (base,), _ = playbook_steps(1)
    change = PlaybookChange("answer", 3, 30, **changes)
    return replace(base, iteration=number, changes=(change,), minibatch_ids=(20, 21, 22, 23), reductions=())


def applied(*deltas):
    return tuple(Applied(index, delta, name) for index, (delta, name) in enumerate(deltas))


def result_of(learned, *steps, ids=("misc-00001",)):
    text = "## OTHERS\n" + "".join(f"[{name}] helpful=0 harmful=0 :: {name}\n" for name in ids)
    return replace(learned, playbooks={"answer": Playbook.from_text(text)}, steps=steps, best_step=None)


def test_a_merge_and_a_near_duplicate_bring_the_history_of_their_bullets(learned):
    one = changed(
        1,
        applied=applied(
            (Add("OTHERS", "a", ("s1.r0",)), "misc-00001"),
            (Add("OTHERS", "b", ("s1.r1",)), "misc-00002"),
            (Add("OTHERS", "c", ("s1.r2",)), "misc-00003"),
        ),
    )
    book = Playbook.from_text("## OTHERS\n[misc-00003] helpful=0 harmful=0 :: c\n")
    two = changed(
        2,
        applied=applied((Merge(("misc-00001", "misc-00002"), "ab"), "misc-00001")),
        pruned=(Pruned(next(iter(book)), "near-duplicate", "misc-00001"),),
    )
    entries = result_of(learned, one, two).provenance("misc-00001")
    assert [(item.iteration, item.change, item.bullet_id) for item in entries] == [
        (2, "UNITE", "misc-00003"),
        (2, "MERGE", "misc-00001"),
        (1, "ADD", "misc-00003"),
        (1, "ADD", "misc-00002"),
        (1, "ADD", "misc-00001"),
    ]
    assert [item.fed for item in entries] == [(), (), (22,), (21,), (20,)]
    assert entries[0].content == "c"


def test_a_bullet_that_was_kept_out_of_a_merge_is_no_part_of_it(learned):
    one = changed(1, applied=applied(*((Add("OTHERS", c, ()), f"misc-0000{i}") for i, c in enumerate("abc", 1))))
    two = changed(
        2,
        applied=applied(
            (Merge(("misc-00001", "misc-00002", "misc-00003"), "ac"), "misc-00001"),
            (Update("misc-00002", "b2"), "misc-00002"),
        ),
        conflicts=(Conflict("merge_over_updated", "misc-00002", (1, 0), (), "it is updated"),),
    )
    result = result_of(learned, one, two, ids=("misc-00001", "misc-00002"))
    assert {item.bullet_id for item in result.provenance("misc-00001")} == {"misc-00001", "misc-00003"}
    assert [item.change for item in result.provenance("misc-00002")] == ["UPDATE", "ADD"]


def test_a_bullet_that_was_removed_has_a_provenance_too(learned):
    one = changed(1, applied=applied((Add("OTHERS", "a", ("s1.r0",)), "misc-00007")))
    two = changed(2, applied=applied((Remove("misc-00007", "wrong"), "misc-00007")))
    entries = result_of(learned, one, two).provenance("misc-00007")
    assert [(item.change, item.content) for item in entries] == [("REMOVE", ""), ("ADD", "a")]


def test_what_came_after_the_best_playbook_is_no_part_of_it(learned):
    one = changed(1, applied=applied((Add("OTHERS", "a", ()), "misc-00001")))
    two = changed(2, applied=applied((Update("misc-00001", "worse"), "misc-00001")))
    best = replace(result_of(learned, one, two), best_step=1, best_score=0.5)
    assert [item.change for item in best.provenance("misc-00001")] == ["ADD"]


def test_the_step_of_the_best_playbook_is_known_after_a_resume(tmp_path):
    options = {"n_train": 12, "valset": examples(4), "num_epochs": 2}
    first = playbook_lessons.learn(playbook_lm(), log_dir=tmp_path, **options).detailed_results
    again = playbook_lessons.learn(playbook_lm(), log_dir=tmp_path, **options).detailed_results
    scores = [item.validation_score for item in first.steps]
    assert first.best_step == 1 + scores.index(first.best_score)
    assert again.best_step == first.best_step
    bullet = next(iter(again.playbooks["self"]))
    assert again.provenance(bullet.id) == first.provenance(bullet.id) != []


def test_a_bullet_of_the_start_that_was_left_alone_has_none():
    start = Playbook.from_text("## OTHERS\n[misc-00001] helpful=0 harmful=0 :: State nothing.\n")
    result = playbook_lessons.learn(playbook_lm(), playbook=start).detailed_results
    assert result.provenance("misc-00001") == []


def test_which_playbook_is_meant_has_to_be_clear():
    result = playbook_lessons.learn(playbook_lm(), Chain()).detailed_results
    shared_ids = {b.id for b in result.playbooks["first"]} & {b.id for b in result.playbooks["second"]}
    name = min(shared_ids)
    with pytest.raises(ValueError, match=rf"several bullets '{name}': give the predictor .*\['first', 'second'\]"):
        result.provenance(name)
    for predictor in ("first", "second"):
        (entry,) = result.provenance(name, predictor)
        assert entry.component == predictor
        assert {item.predictor for item in entry.reflections} == {predictor}
    with pytest.raises(ValueError, match=r"no bullet 'misc-99999'"):
        result.provenance("misc-99999")
    with pytest.raises(ValueError, match=r"no bullet .* of 'third'"):
        result.provenance(name, "third")


def test_a_shared_playbook_is_one(learned):
    result = playbook_lessons.learn(playbook_lm(), Chain(), shared_playbook=True).detailed_results
    bullet = next(iter(result.playbooks["second"]))
    assert result.provenance(bullet.id) == result.provenance(bullet.id, "first") != []


def test_a_playbook_result_draws_and_saves(learned, tmp_path):
    learned.save_html(tmp_path / "page.html")
    assert next(iter(learned.playbooks["self"])).id in (tmp_path / "page.html").read_text(encoding="utf-8")
    import matplotlib as mpl
    from matplotlib import pyplot

    mpl.use("Agg")
    for axes in (learned.plot_scores(), learned.plot_delay(), learned.plot_tree()):
        axes.figure.canvas.draw()
    assert learned.plot_scores().get_ylabel() == "mean minibatch score"
    assert learned.batch_size_fit is None
    pyplot.close("all")


def test_learn_gives_no_results():
    lm = playbook_lm()
    with dspy.context(lm=lm):
        _, program = playbook_lessons.make(lm).learn(dspy.Predict("question -> answer"), examples(3))
    assert program.detailed_results.provenance(next(iter(Playbook.from_program(program))).id)
