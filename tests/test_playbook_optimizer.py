"""The contract of `PlaybookOptimizer`: what a run learns, records and gives back."""

import json
import threading
from dataclasses import replace

import dspy
import pytest
from dspy.teleprompt import Teleprompter

from dspy_combee import (
    Bullet,
    Playbook,
    PlaybookOptimizer,
    PlaybookResult,
    PowerLawBatchSize,
    StepRecord,
    TreeAggregator,
)
from dspy_combee.playbook import attach, playbooks_in
from dspy_combee.playbook.bullets import SECTIONS
from dspy_combee.playbook.records import PlaybookStep
from dspy_combee.records.provenance import surviving_nodes
from dspy_combee.reduce.baselines import TopKAggregator
from dspy_combee.testing import ScriptedLM

from .clocks import LookClock
from .lessons import Chain, examples, instruction, metric, numbers_in, rules_in
from .playbook_lessons import (
    add,
    all_text,
    bullets_in,
    contents,
    curate,
    field,
    is_curator,
    is_merge,
    is_reflector,
    learn,
    lesson,
    make,
    playbook_lm,
)

START = Playbook(entries=(Bullet("misc-00007", "OTHERS", "State rule-answer-3.", helpful=2),), next_number=12)
BASE = "Given the fields `question`, produce the fields `answer`."


def rules_of(program, predictor=None):
    return rules_in(" ".join(contents(program, predictor)))


# What comes back


def test_it_is_a_teleprompter_and_learns_the_rules():
    lm = playbook_lm()
    student = dspy.Predict("question -> answer")
    program = learn(lm, student)
    assert issubclass(PlaybookOptimizer, Teleprompter)
    assert numbers_in(" ".join(contents(program))) == set(range(12))
    assert type(program) is dspy.Predict
    assert instruction(student) == BASE
    with dspy.context(lm=lm):
        assert [program(**example.inputs()).answer for example in examples(12)] == ["right"] * 12


def test_the_instructions_end_with_the_playbook():
    program = learn(playbook_lm())
    playbook = Playbook.from_program(program)
    assert instruction(program) == attach(BASE, playbook)
    # The reflections that a bullet came from stand in the results, not in the prompt.
    with_sources = program.detailed_results.playbooks["self"]
    assert all(bullet.reflection_ids for bullet in with_sources)
    assert [replace(bullet, reflection_ids=()) for bullet in with_sources] == list(playbook)


def test_save_and_load(tmp_path):
    program = learn(playbook_lm(), reflect_on="all")
    program.save(str(tmp_path / "program.json"))
    loaded = dspy.Predict("question -> answer")
    loaded.load(str(tmp_path / "program.json"))
    assert instruction(loaded) == instruction(program)
    assert Playbook.from_program(loaded) == Playbook.from_program(program)


def test_without_stats_there_are_no_results():
    assert not hasattr(learn(playbook_lm(), track_stats=False), "detailed_results")


def test_nothing_learned_is_an_empty_playbook():
    program = learn(playbook_lm(curator={"operations": []}))
    assert len(Playbook.from_program(program)) == 0
    assert instruction(program).startswith(BASE)


def test_demos_and_lms_of_the_student_are_kept():
    student = dspy.Predict("question -> answer")
    student.demos = [dspy.Example(question="question 0", answer="right")]
    student.lm = playbook_lm()
    program = make(playbook_lm()).compile(student, examples(6))
    assert program.demos == student.demos
    assert program.lm is student.lm


def test_results_and_steps():
    seen = []
    program = learn(playbook_lm(), num_epochs=1.5, step_callbacks=[seen.append])
    result = program.detailed_results
    assert isinstance(result, PlaybookResult)
    assert tuple(seen) == result.steps
    assert result.batch_sizes == (6, 6, 6)
    assert result.best_score is None
    first, second, _ = result.steps
    assert isinstance(first, PlaybookStep)
    assert isinstance(first, StepRecord)
    assert (first.iteration, first.parent, first.candidate, first.accepted) == (1, 0, 1, True)
    assert (first.n, first.k, first.bullets, second.bullets) == (6, 2, 6, 12)
    assert first.tokens > 0
    assert first.scores_before == (0.0,) * 6
    assert first.scores_after == ()
    assert [item.id for item in first.reflections] == [f"s1.r{index}" for index in range(6)]
    assert {item.predictor for item in first.reflections} == {"self"}
    for reflection in first.reflections:
        assert f"rule-answer-{first.minibatch_ids[reflection.source]}" in reflection.text
    assert len(first.applied) == 6
    assert (first.refused, first.conflicts, first.pruned, first.unused_reflections) == ((), (), (), ())
    assert first.usage.calls == 6 + 6 + len([node for node in first.nodes if node.prompt])
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["steps"][0]["bullets"] == 6
    assert plain["steps"][0]["changes"][0]["applied"][0]["delta"]["type"] == "ADD"
    assert plain["steps"][0]["reductions"][0]["nodes"][0]["output"][0]["type"] == "ADD"
    assert plain["playbooks"]["self"] == result.playbooks["self"].to_text()


def test_spending_is_reported():
    lm = playbook_lm()
    result = learn(lm, num_epochs=2, valset=examples(3)).detailed_results
    spent = result.spent
    assert spent.metric_calls_in("rollouts") == 24
    # The seed's pass, and one for each step that changed the playbook.
    assert spent.metric_calls_in("validation") == 3 * (1 + sum(step.accepted for step in result.steps))
    assert spent.metric_calls_in("feedback") == 0
    assert spent.usage.calls == len(lm.calls)
    roles = is_reflector, is_curator, is_merge
    reflecting = [call for call in lm.calls if any(role(call.prompt) for role in roles)]
    assert spent.usage_in("reflection").calls == len(reflecting)


# The loop


def test_everything_in_a_step_sees_the_same_playbook():
    lm = playbook_lm()
    learn(lm, n_train=12, minibatch_size=12, playbook=START, num_epochs=1)
    books = {field(call.prompt, "playbook") for call in lm.calls if is_reflector(call.prompt)}
    assert len(books) == 1
    curated = {field(call.prompt, "playbook") for call in lm.calls if is_curator(call.prompt)}
    assert len(curated) == 1
    assert curated.pop() == books.pop().replace("helpful=2", "helpful=3")


def test_tags_are_counted_exactly():
    def reflect(prompt):
        harmful = "question 5" in json.dumps(field(prompt, "attempt"))
        return lesson("", [("misc-00007", "harmful" if harmful else "helpful")])

    program = learn(playbook_lm(reflector=reflect), n_train=40, minibatch_size=40, playbook=START)
    step = program.detailed_results.steps[0]
    assert (step.helpful, step.harmful, step.neutral) == (39, 1, 0)
    bullet = Playbook.from_program(program).get("misc-00007")
    assert (bullet.helpful, bullet.harmful) == (2 + 39, 1)


def test_one_reflection_tags_a_bullet_once_and_unknown_tags_are_refused():
    tags = [("misc-00007", "helpful"), ("[misc-00007]", "helpful"), ("misc-00099", "helpful"), ("misc-00007", "bad")]
    program = learn(playbook_lm(reflector=lesson("", tags)), n_train=4, minibatch_size=4, playbook=START)
    step = program.detailed_results.steps[0]
    assert step.helpful == 4
    assert len(step.refused) == 12
    assert Playbook.from_program(program).get("misc-00007").helpful == 6


def test_reflections_without_a_delta_are_listed():
    def curator(prompt):
        kept = [item for item in field(prompt, "reflections") if not item["id"].endswith(("r1", "r4"))]
        return {"operations": [add(item["key_insight"], item["id"]) for item in kept]}

    step = learn(playbook_lm(curator=curator), n_train=6).detailed_results.steps[0]
    assert step.unused_reflections == ("s1.r1", "s1.r4")
    used = {name for item in step.applied for name in item.delta.reflection_ids}
    assert used | set(step.unused_reflections) == {item.id for item in step.reflections}


def test_a_reflection_whose_bullet_is_pruned_at_once_is_unused():
    step = learn(playbook_lm(), n_train=6, token_budget=100).detailed_results.steps[0]
    gone = {name for item in step.pruned for name in item.bullet.reflection_ids}
    assert gone
    assert set(step.unused_reflections) == gone
    assert step.tokens <= 100
    assert step.bullets == 6 - len(gone)


def test_copies_of_a_reflection_give_one_bullet():
    lm = playbook_lm()
    step = learn(lm, n_train=16, minibatch_size=16).detailed_results.steps[0]
    assert (step.k, step.duplication_factor, step.bullets) == (4, 2, 16)
    proposed = [delta for node in step.nodes if node.id.startswith("1.") for delta in node.output]
    assert len(proposed) == 32


def test_near_identical_adds_of_several_groups_unite_without_a_call():
    def curator(prompt):
        ids = [item["id"] for item in field(prompt, "reflections")]
        end = "." if "s1.r0" in ids else ""
        return {"operations": [add(f"Check the units before adding the totals{end}", *ids)]}

    lm = playbook_lm(curator=curator)
    step = learn(lm, n_train=9, minibatch_size=9).detailed_results.steps[0]
    assert step.bullets == 1
    assert step.unused_reflections == ()
    assert not any(is_merge(call.prompt) for call in lm.calls)


def test_an_add_is_lost_only_for_a_name_that_covers_it():
    texts = ["Divide income by equity for the return.", "Divide income by assets for the return."]

    def curator(prompt):
        first = field(prompt, "reflections")[0]["id"]
        return {"operations": [add(texts[int(first[-1]) % 2], *(item["id"] for item in field(prompt, "reflections")))]}

    def merge(prompt):
        keys = sorted(field(prompt, "deltas"))
        return {"decisions": [{"type": "COVERED", "deltas": [keys[1]], "by": by} for by in ("d99", keys[0])]}

    options = {"n_train": 9, "minibatch_size": 9, "duplication_factor": 1, "seed": 3}
    kept = learn(playbook_lm(curator=curator), **options)
    assert sorted(contents(kept)) == sorted(texts)
    lm = playbook_lm(curator=curator, merge=merge)
    program = learn(lm, **options)
    step = program.detailed_results.steps[0]
    assert len(contents(program)) == 1
    assert "unknown" in step.refused[0].reason
    assert step.unused_reflections == ()  # They went to the ADD that covers theirs.


def test_update_merge_and_remove_work():
    entries = [Bullet(f"misc-0000{n}", "OTHERS", f"old lesson {word}") for n, word in enumerate("abcd", start=1)]
    operations = [
        {"type": "UPDATE", "id": "misc-00001", "content": "better", "reflection_ids": ["s1.r0"]},
        {"type": "MERGE", "ids": ["misc-00002", "misc-00003"], "content": "joined", "reflection_ids": ["s1.r1"]},
        {"type": "REMOVE", "id": "misc-00004", "reason": "wrong", "reflection_ids": ["s1.r2"]},
    ]
    lm = playbook_lm(curator={"operations": operations})
    program = learn(lm, n_train=3, playbook=Playbook(entries=tuple(entries)))
    assert contents(program) == ["better", "joined"]
    assert program.detailed_results.steps[0].unused_reflections == ()


def test_conflicting_updates_go_to_the_merge_call():
    def curator(prompt):
        ids = [item["id"] for item in field(prompt, "reflections")]
        return {"operations": [{"type": "UPDATE", "id": "misc-00007", "content": ids[0], "reflection_ids": ids}]}

    def merge(prompt):
        return {"decisions": [{"type": "COMBINE", "deltas": list(field(prompt, "deltas")), "content": "all of it"}]}

    program = learn(playbook_lm(curator=curator, merge=merge), n_train=9, minibatch_size=9, playbook=START)
    assert contents(program) == ["all of it"]
    program = learn(playbook_lm(curator=curator), n_train=9, minibatch_size=9, playbook=START)
    assert [item.kind for item in program.detailed_results.steps[0].conflicts] == ["updates"]


@pytest.mark.parametrize("n", [2, 9])
@pytest.mark.parametrize("aggregator", ["tree", "flat", "summarize"])
def test_conflicting_updates_in_one_reply_go_to_the_merge_call(n, aggregator):
    """With n = 2 there is one curator; with 9, three who say the same, which the tree takes for one."""
    updates = [{"type": "UPDATE", "id": "misc-00007", "content": text, "reflection_ids": []} for text in ("one", "two")]
    removal = {"type": "REMOVE", "id": "misc-00007", "reason": "", "reflection_ids": []}
    combine = {"decisions": [{"type": "COMBINE", "deltas": ["d0", "d1"], "content": "one and two"}]}

    def run(operations, merge):
        summary = (lambda prompt: "summary" in prompt.output_fields, {"summary": "short"})
        lm = playbook_lm(summary, curator={"operations": operations}, merge=merge)
        program = learn(lm, n_train=n, minibatch_size=n, playbook=START, aggregator=aggregator)
        (step,) = program.detailed_results.steps
        return contents(program), step, sum(is_merge(call.prompt) for call in lm.calls)

    learned, step, merges = run([*updates, removal], combine)
    assert (learned, merges) == (["one and two"], 1)
    assert step.reductions[0].nodes[-1].prompt
    assert set(surviving_nodes(step.reductions[0])) == {node.id for node in step.nodes}
    learned, step, merges = run(updates, "no reply of use")
    assert (learned, merges) == (["two"], 2), "settled by support, after the call has failed twice"
    assert [item.kind for item in step.conflicts] == ["updates"]
    assert run([updates[0], removal, updates[0]], combine)[2] == 0


def test_a_bullet_that_stands_already_is_not_added_again():
    program = learn(playbook_lm(curator={"operations": [add("State rule-answer-3")]}), n_train=6, playbook=START)
    assert contents(program) == ["State rule-answer-3."]


def test_reflect_on_failures():
    lm = playbook_lm()
    step = learn(lm, n_train=6, playbook=START, reflect_on="failures").detailed_results.steps[0]
    assert sum(step.scores_before) == 1
    assert len(step.reflections) == 5
    assert step.scores_before[0] in (0.0, 1.0)
    everything = learn(playbook_lm(), n_train=6, playbook=START).detailed_results.steps[0]
    assert len(everything.reflections) == 6


@pytest.mark.parametrize("shown", [True, False])
def test_ground_truth(shown):
    lm = playbook_lm()
    learn(lm, n_train=4, use_ground_truth=shown)
    prompts = [call.prompt for call in lm.calls if is_reflector(call.prompt)]
    assert all(("[[ ## expected ## ]]" in prompt) is shown for prompt in prompts)
    if shown:
        assert {field(prompt, "expected")["number"] for prompt in prompts} == {0, 1, 2, 3}


def test_an_unparsable_answer_is_reflected_on():
    lm = playbook_lm((lambda prompt: "question 2" in prompt and not is_reflector(prompt), "no fields here"))
    step = learn(lm, n_train=4).detailed_results.steps[0]
    assert len(step.reflections) == 4
    failed = [call.prompt for call in lm.calls if is_reflector(call.prompt) and "no fields here" in call.prompt]
    assert len(failed) == 1


# Programs with several predictors


def test_each_predictor_has_a_playbook_of_its_own():
    lm = playbook_lm()
    program = learn(lm, Chain(), n_train=8)
    assert rules_of(program, "first") == {f"rule-hint-{n}" for n in range(8)}
    assert rules_of(program, "second") == {f"rule-answer-{n}" for n in range(8)}
    result = program.detailed_results
    assert set(result.playbooks) == {"first", "second"}
    assert result.spent.metric_calls_in("feedback") == 16
    ids = [item.id for item in result.steps[0].reflections]
    assert len(set(ids)) == len(ids) == 12
    assert {change.component for change in result.steps[0].changes} == {"first", "second"}


def test_a_shared_playbook():
    lm = playbook_lm()
    program = learn(lm, Chain(), n_train=8, shared_playbook=True)
    books = playbooks_in(program)
    assert books["first"] == books["second"] == Playbook.from_program(program)
    assert rules_of(program) == {f"rule-{kind}-{n}" for n in range(8) for kind in ("hint", "answer")}
    result = program.detailed_results
    assert result.playbooks["first"] == result.playbooks["second"]
    assert len(result.steps[0].reductions) == 1


def test_an_agent_keeps_its_list_of_tools():
    def look_up(word: str) -> str:
        """Look a word up in the glossary."""
        return word

    agent = dspy.ReAct("question -> answer", tools=[look_up], max_iters=1)
    before = {name: predictor.signature.instructions for name, predictor in agent.named_predictors()}
    lm = playbook_lm()
    program = learn(lm, agent, n_train=4)
    for name, predictor in program.named_predictors():
        assert predictor.signature.instructions.startswith(before[name])
    assert "Look a word up in the glossary." in dict(program.named_predictors())["react"].signature.instructions


# Where learning starts


def test_a_starting_playbook_is_grown_on():
    program = learn(playbook_lm(), n_train=6, playbook=START)
    playbook = Playbook.from_program(program)
    assert playbook.get("misc-00007").helpful == 3
    assert [bullet.id for bullet in playbook][1:] == [f"misc-{n:05d}" for n in range(12, 17)]


def test_the_playbook_in_the_student_is_grown_on_and_its_ids_continue():
    once = learn(playbook_lm(), n_train=6)
    twice = learn(playbook_lm(), once, n_train=12)
    first, second = Playbook.from_program(once), Playbook.from_program(twice)
    assert not first.diff(second).removed
    assert len(second) == 12
    assert instruction(twice) == attach(BASE, second)
    assert instruction(once) == attach(BASE, first)


def test_a_given_playbook_replaces_the_one_in_the_student():
    once = learn(playbook_lm(), n_train=6)
    assert len(Playbook.from_program(learn(playbook_lm(curator={"operations": []}), once, playbook=START))) == 1


def test_playbooks_can_be_given_by_predictor():
    program = learn(playbook_lm(curator={"operations": []}), Chain(), n_train=4, playbook={"second": START})
    assert contents(program, "first") == []
    assert contents(program, "second") == ["State rule-answer-3."]
    with pytest.raises(ValueError, match="third"):
        learn(playbook_lm(), Chain(), playbook={"third": START})
    with pytest.raises(ValueError, match="share"):
        learn(playbook_lm(), program, shared_playbook=True)


def test_reflection_ids_go_on_after_those_of_a_starting_playbook():
    first = learn(playbook_lm(), n_train=6).detailed_results
    second = learn(playbook_lm(), n_train=12, playbook=first.playbooks).detailed_results
    assert second.steps[0].reflections[0].id == "s2.r0"


@pytest.mark.parametrize(
    "aggregator", ["flat", "summarize", TopKAggregator(3, lambda texts: [[len(t)] for t in texts])]
)
def test_the_baselines_aggregate_reflections_too(aggregator):
    def summary(prompt):
        return {"summary": " ".join(sorted(rules_in(prompt.question)))}

    lm = playbook_lm((lambda prompt: prompt.output_fields == ("summary",), summary))
    program = learn(lm, n_train=6, aggregator=aggregator)
    step = program.detailed_results.steps[0]
    kept = 6 if isinstance(aggregator, str) else len(step.applied)
    assert 1 <= len(contents(program)) == kept
    assert len(step.unused_reflections) == 6 - kept


def test_an_aggregator_that_gives_something_else_ends_the_run():
    class Wrong(TreeAggregator):
        def aggregate(self, tasks, call, executor):
            return []

    with pytest.raises(ValueError, match=r"Wrong\.aggregate must return one Reduction .* got 0"):
        learn(playbook_lm(), n_train=6, aggregator=Wrong())


def test_an_embedder_tells_near_duplicates():
    def embedder(texts):
        return [[1.0, 0.0] if "income" in text else [0.0, 1.0] for text in texts]

    def curator(prompt):
        ids = [item["id"] for item in field(prompt, "reflections")]
        text = "Compare income with equity" if "s1.r0" in ids else "Equity shares the whole income"
        return {"operations": [add(text, *ids)]}

    options = {"n_train": 9, "minibatch_size": 9, "duplication_factor": 1}
    assert len(contents(learn(playbook_lm(curator=curator), **options))) == 2
    assert len(contents(learn(playbook_lm(curator=curator), embedder=embedder, **options))) == 2 - 1


# Validation


def shrinking_curator(prompt):
    """Learns at first, and takes everything away as soon as there is something."""
    known = bullets_in(prompt)
    return {"operations": [{"type": "REMOVE", "id": name} for name in known]} if known else curate(prompt)


def test_the_best_playbook_by_validation_is_returned_and_learning_goes_on_from_the_last():
    lm = playbook_lm(curator=shrinking_curator)
    program = learn(lm, n_train=12, valset=examples(12))
    result = program.detailed_results
    assert [step.validation_score for step in result.steps] == [0.5, 0.0]
    assert result.best_score == 0.5
    assert len(contents(program)) == 6
    assert contents(learn(playbook_lm(curator=shrinking_curator), n_train=12)) == []


def test_the_start_counts_too():
    lm = playbook_lm(curator=shrinking_curator)
    program = learn(lm, n_train=6, valset=examples(6), playbook=START)
    assert program.detailed_results.best_score == pytest.approx(1 / 6)
    assert contents(program) == ["State rule-answer-3."]


# Sizes


def test_replayed_sizes():
    assert learn(playbook_lm(), minibatch_size=[2, 4, 6]).detailed_results.batch_sizes == (2, 4, 6)


def test_auto_is_the_controller():
    policy = PowerLawBatchSize(clock=LookClock())
    result = learn(playbook_lm(), n_train=60, minibatch_size=policy, num_epochs=3).detailed_results
    assert sum(result.batch_sizes) == 180
    assert result.steps[0].profiling
    assert result.spent.metric_calls_in("profiling") > 0
    assert any(step.fit is not None for step in result.steps)
    replayed = learn(playbook_lm(), n_train=60, minibatch_size=list(result.batch_sizes), num_epochs=3)
    assert replayed.detailed_results.playbooks == result.playbooks
    assert learn(playbook_lm(), n_train=6, minibatch_size="auto").detailed_results.batch_sizes


# Online


def test_learn_predicts_a_window_and_then_learns_from_it():
    calls = []

    def counting(gold, pred, trace=None, pred_name=None, pred_trace=None):
        calls.append((gold.number, pred_name))
        return metric(gold, pred, trace, pred_name, pred_trace)

    lm = playbook_lm()
    optimizer = make(lm, metric=counting, minibatch_size=2)
    student = dspy.Predict("question -> answer")
    with dspy.context(lm=lm):
        predictions, program = optimizer.learn(student, examples(5))
        assert [prediction.answer for prediction in predictions] == ["wrong"] * 5
        assert sorted(calls) == [(n, None) for n in range(5)]
        assert rules_of(program) == {f"rule-answer-{n}" for n in range(5)}
        predictions, program = optimizer.learn(program, examples(5, start=3))
    assert [prediction.answer for prediction in predictions] == ["right"] * 2 + ["wrong"] * 3
    assert rules_of(program) == {f"rule-answer-{n}" for n in range(8)}
    assert len(calls) == 10
    assert instruction(student) == BASE
    assert program.detailed_results.batch_sizes == (5,)


def test_learn_calls_the_metric_once_for_several_predictors_too():
    calls = []

    def counting(gold, pred, trace=None, pred_name=None, pred_trace=None):
        calls.append(pred_name)
        return 0.0

    lm = playbook_lm()
    with dspy.context(lm=lm):
        _, program = make(lm, metric=counting).learn(Chain(), examples(4))
    assert calls == [None] * 4
    assert set(playbooks_in(program)) == {"first", "second"}


def test_learn_goes_on_from_the_program_not_from_the_starting_playbook():
    lm = playbook_lm()
    optimizer = make(lm, playbook=START)
    with dspy.context(lm=lm):
        _, program = optimizer.learn(dspy.Predict("question -> answer"), examples(4))
        assert len(contents(program)) == 4
        _, program = optimizer.learn(program, examples(6))
    assert len(contents(program)) == 6


def test_a_failed_rollout_has_no_prediction_in_a_window():
    class Fragile(dspy.Module):
        def __init__(self):
            super().__init__()
            self.answer = dspy.Predict("question -> answer")

        def forward(self, question):
            if question == "question 1":
                raise RuntimeError("broken")
            return self.answer(question=question)

    lm = playbook_lm()
    with dspy.context(lm=lm):
        predictions, program = make(lm).learn(Fragile(), examples(3))
    assert [prediction is None for prediction in predictions] == [False, True, False]
    assert len(contents(program)) == 2


# The metric


def test_feedback_is_asked_for_only_where_the_score_came_without_it():
    asked = []

    def lazy(gold, pred, trace=None, pred_name=None, pred_trace=None):
        asked.append(pred_name)
        return 0.0 if pred_name is None else dspy.Prediction(score=0.0, feedback=f"rule-answer-{gold.number}")

    program = learn(playbook_lm(), n_train=4, metric=lazy)
    assert sorted(asked, key=str) == [None] * 4 + ["self"] * 4
    assert program.detailed_results.spent.metric_calls_in("feedback") == 4
    assert len(contents(program)) == 4


def test_a_metric_that_raises_scores_a_failure():
    def odd(gold, pred, trace=None, pred_name=None, pred_trace=None):
        if gold.number == 1:
            raise KeyError("odd")
        return metric(gold, pred, trace, pred_name, pred_trace)

    program = learn(playbook_lm(), n_train=4, metric=odd, failure_score=-1.0)
    assert sorted(program.detailed_results.steps[0].scores_before) == [-1.0, 0.0, 0.0, 0.0]
    assert len(contents(program)) == 3


# Determinism


@pytest.mark.parametrize("num_threads", [1, 8, 32])
def test_the_same_playbook_at_any_thread_count(num_threads):
    expected = learn(playbook_lm(), Chain(), n_train=30, minibatch_size=10, num_threads=4, num_epochs=2)
    jittery = playbook_lm(latency=lambda prompt, rng: rng.random() * 0.002)
    program = learn(jittery, Chain(), n_train=30, minibatch_size=10, num_threads=num_threads, num_epochs=2)
    assert all_text(program) == all_text(expected)
    assert program.detailed_results.playbooks == expected.detailed_results.playbooks
    unused = [step.unused_reflections for step in program.detailed_results.steps]
    assert unused == [step.unused_reflections for step in expected.detailed_results.steps]


def test_another_seed_deals_otherwise():
    one, other = (learn(playbook_lm(), n_train=12, seed=seed).detailed_results.steps[0] for seed in (0, 1))
    assert one.minibatch_ids != other.minibatch_ids


def test_compile_again_and_from_two_threads():
    lm = playbook_lm()
    optimizer = make(lm)
    made = {}

    def compile_it(name):
        with dspy.context(lm=lm):
            made[name] = optimizer.compile(dspy.Predict("question -> answer"), examples(12))

    threads = [threading.Thread(target=compile_it, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    compile_it("c")
    assert all_text(made["a"]) == all_text(made["b"]) == all_text(made["c"])
    assert made["a"].detailed_results.spent == made["c"].detailed_results.spent


# Arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"metric": None}, TypeError, "metric must be callable"),
        ({"metric": lambda gold, pred: 1.0}, TypeError, "five arguments"),
        ({"reflection_lm": None}, TypeError, "reflection_lm"),
        ({"reflection_lm": "openai/gpt-5"}, TypeError, "dspy.LM"),
        ({"minibatch_size": 0}, ValueError, "^minibatch_size"),
        ({"minibatch_size": None}, TypeError, "^minibatch_size"),
        ({"minibatch_size": "large"}, ValueError, "^minibatch_size"),
        ({"minibatch_size": [4, 2.5]}, TypeError, "^minibatch_size"),
        ({"num_epochs": 0}, ValueError, "num_epochs"),
        ({"num_epochs": "1"}, TypeError, "num_epochs"),
        ({"num_epochs": float("nan")}, ValueError, "num_epochs"),
        ({"num_threads": 0}, ValueError, "num_threads"),
        ({"num_threads": 2.0}, TypeError, "num_threads"),
        ({"seed": None}, TypeError, "seed"),
        ({"duplication_factor": 0}, ValueError, "duplication_factor"),
        ({"num_groups": True}, TypeError, "num_groups"),
        ({"aggregator": "pyramid"}, ValueError, "pyramid"),
        ({"aggregator": 3}, TypeError, "aggregator"),
        ({"executor": "processes"}, ValueError, "processes"),
        ({"executor": 3}, TypeError, "executor"),
        ({"reflect_on": "some"}, ValueError, "some"),
        ({"use_ground_truth": 1}, TypeError, "use_ground_truth"),
        ({"shared_playbook": None}, TypeError, "shared_playbook"),
        ({"playbook": "## A"}, TypeError, "playbook"),
        ({"playbook": {"self": "## A"}}, TypeError, "playbook"),
        ({"token_budget": 0}, ValueError, "token_budget"),
        ({"token_budget": 1e5}, TypeError, "token_budget"),
        ({"embedder": "openai/embedding"}, TypeError, "embedder"),
        ({"log_dir": 3}, TypeError, "log_dir"),
        ({"step_callbacks": print}, TypeError, "step_callbacks"),
        ({"step_callbacks": ["print"]}, TypeError, "step_callbacks"),
        ({"max_reflection_cost": 0}, ValueError, "max_reflection_cost"),
        ({"max_reflection_cost": 1.0}, ValueError, "custom engine"),
        ({"rollout_timeout": -1}, ValueError, "rollout_timeout"),
        ({"reflection_timeout": "1s"}, TypeError, "reflection_timeout"),
        ({"failure_score": None}, TypeError, "failure_score"),
        ({"perfect_score": float("inf")}, ValueError, "perfect_score"),
        ({"track_stats": "yes"}, TypeError, "track_stats"),
    ],
)
def test_wrong_options_are_refused_at_construction(options, error, message):
    with pytest.raises(error, match=message):
        make(ScriptedLM(), **options)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((dspy.Predict("question -> answer"),), {}, ValueError, "trainset"),
        ((dspy.Predict("question -> answer"), []), {}, ValueError, "trainset"),
        ((dspy.Predict("question -> answer"), "text"), {}, TypeError, "trainset"),
        ((dspy.Predict("question -> answer"), [{"question": "x"}]), {}, TypeError, r"trainset\[0\]"),
        ((dspy.Predict("question -> answer"), [dspy.Example(question="x")]), {}, ValueError, "with_inputs"),
        ((dspy.Predict("question -> answer"), examples(2)), {"valset": []}, ValueError, "valset"),
        ((dspy.Predict("question -> answer"), examples(2)), {"teacher": 3}, ValueError, "teacher"),
        ((dspy.Module(), examples(2)), {}, ValueError, "no predictor"),
        (("program", examples(2)), {}, TypeError, "dspy.Module"),
    ],
)
def test_wrong_arguments_of_compile(arguments, options, error, message):
    with pytest.raises(error, match=message):
        make(ScriptedLM()).compile(*arguments, **options)


def test_params_and_documentation():
    params = make(ScriptedLM(), seed=7).get_params()
    assert params["seed"] == 7
    assert "rounds" in PlaybookOptimizer.__doc__
    assert Playbook().sections == tuple(SECTIONS)
