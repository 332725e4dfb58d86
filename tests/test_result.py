"""`CombeeResult`: `dspy.GEPA`'s detailed results with ours on top."""

import json

import dspy
import pytest
from dspy.teleprompt.gepa.gepa import DspyGEPAResult
from gepa.core.data_loader import ListDataLoader

from dspy_combee import CombeeResult, StepRecord

from .lessons import Chain, examples, instruction, learn, learning_lm, make


def test_it_is_a_dspy_gepa_result_with_the_fields_of_one():
    results = learn(learning_lm()).detailed_results
    assert isinstance(results, CombeeResult)
    assert isinstance(results, DspyGEPAResult)
    assert results.val_aggregate_scores[0] == 0.0
    assert results.parents[0] == [None]
    assert results.num_full_val_evals == len(results.candidates)
    assert results.log_dir is None
    assert results.seed == 0
    assert results.discovery_eval_counts[0] == 0
    assert results.highest_score_achieved_per_val_task == dict.fromkeys(range(6), 1.0)


def test_the_best_candidate_is_the_program_that_compile_returned():
    program = learn(learning_lm(), Chain(), component_selector="all")
    results = program.detailed_results
    assert results.best_idx == max(range(len(results.candidates)), key=results.val_aggregate_scores.__getitem__) > 0
    for name in ("first", "second"):
        assert instruction(results.best_candidate, name) == instruction(program, name)
        assert instruction(results.candidates[0], name) == instruction(Chain(), name)
    lm = learning_lm()
    with dspy.context(lm=lm):
        assert results.best_candidate(question="question 1").answer == program(question="question 1").answer


def test_steps_and_batch_sizes_follow_the_run():
    results = learn(learning_lm(), n_train=20, max_metric_calls=100).detailed_results
    assert all(isinstance(step, StepRecord) for step in results.steps)
    assert list(results.batch_sizes) == [step.n for step in results.steps]
    assert results.batch_sizes[0] == 6
    assert [step.iteration for step in results.steps] == list(range(1, len(results.steps) + 1))
    accepted = [step for step in results.steps if step.accepted]
    assert [step.candidate for step in accepted] == list(range(1, len(results.candidates)))
    assert [[step.parent] for step in accepted] == results.parents[1:]


def test_batch_sizes_given_back_replay_the_run():
    first = learn(learning_lm(), n_train=20, max_metric_calls=100, reflection_minibatch_size=[4, 7, 5]).detailed_results
    assert list(first.batch_sizes[:3]) == [4, 7, 5]
    second = learn(
        learning_lm(), n_train=20, max_metric_calls=100, reflection_minibatch_size=list(first.batch_sizes)
    ).detailed_results
    assert [step.minibatch_ids for step in second.steps] == [step.minibatch_ids for step in first.steps]
    assert second.to_dict()["candidates"] == first.to_dict()["candidates"]


@pytest.mark.parametrize("program", [dspy.Predict("question -> answer"), Chain()], ids=["one", "two"])
def test_to_dict_is_json_with_the_steps(program):
    results = learn(learning_lm(), program, track_best_outputs=True).detailed_results
    plain = results.to_dict()
    assert set(DspyGEPAResult.to_dict(results)) < set(plain)
    text = json.dumps(plain, allow_nan=False)
    again = json.loads(text)
    assert again["batch_sizes"] == list(results.batch_sizes)
    assert again["best_idx"] == results.best_idx
    assert again["candidates"][0] == {
        name: predictor.signature.instructions for name, predictor in program.named_predictors()
    }
    assert len(again["steps"]) == len(results.steps)
    for step, record in zip(results.steps, again["steps"], strict=True):
        assert record["minibatch_ids"] == list(step.minibatch_ids)
        assert record["scores_before"] == list(step.scores_before)
        assert (record["accepted"], record["candidate"], record["reason"]) == (
            step.accepted,
            step.candidate,
            step.reason,
        )
        nodes = [node for reduction in record["reductions"] for node in reduction["nodes"]]
        assert [node["output"] for node in nodes] == [node.output for node in step.nodes]
        assert [node["prompt"] for node in nodes] == [node.prompt for node in step.nodes]


def test_best_outputs_are_plain_fields_in_to_dict():
    results = learn(learning_lm(), track_best_outputs=True).detailed_results
    index, output = results.to_dict()["best_outputs_valset"][3][0]
    assert results.val_subscores[index][3] == 1.0
    assert output == {"answer": "right"}


def test_to_dict_is_not_tied_to_the_result():
    results = learn(learning_lm()).detailed_results
    plain = results.to_dict()
    plain["steps"].clear()
    plain["parents"].clear()
    plain["val_subscores"][0].clear()
    assert results.steps
    assert results.parents
    assert results.val_subscores[0]


def test_ids_that_json_does_not_know_become_text():
    class Pairs(ListDataLoader):
        def all_ids(self):
            return [("row", index) for index in range(len(self.items))]

        def fetch(self, ids):
            return [self.items[index] for _, index in ids]

    lm = learning_lm()
    with dspy.context(lm=lm):
        results = (
            make(lm)
            .compile(dspy.Predict("question -> answer"), Pairs(examples(12)), valset=Pairs(examples(6)))
            .detailed_results
        )
    assert results.steps[0].accepted
    plain = json.loads(json.dumps(results.to_dict()))
    assert plain["steps"][0]["minibatch_ids"] == [str(i) for i in results.steps[0].minibatch_ids]
    assert set(plain["val_subscores"][0]) == {str(("row", index)) for index in range(6)}


def test_what_was_spent_adds_up():
    lm = learning_lm()
    results = learn(lm).detailed_results
    assert results.spent.metric_calls == results.total_metric_calls
    reflections = [node for step in results.steps for node in step.nodes]
    assert results.spent.usage_in("reflection").calls == sum(node.usage.calls for node in reflections)
    assert sum(node.usage.calls for node in reflections) == sum(
        "new_instruction" in call.prompt.output_fields for call in lm.calls
    )
