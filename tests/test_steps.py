"""`StepRecord`: one account for each proposal of a run, that says what became of it and of what."""

from types import SimpleNamespace

import dspy
import pytest
from gepa.proposer.reflective_mutation.base import CandidateSelector
from gepa.strategies.batch_sampler import BatchSampler
from gepa.strategies.proposal_sampling import IndependentSampling, PxNSampling, SameParentSampling
from gepa.strategies.proposal_selection import TopKImprovements
from gepa.utils import MaxCandidateProposalsStopper

from dspy_combee import Reduction
from dspy_combee.runs.events import StepRecorder

from .lessons import (
    Chain,
    is_level_1,
    is_reflection,
    learn,
    learning_lm,
    make,
    numbers_in,
)
from .run_parts import make_scope


class Watch:
    """A GEPA callback and acceptance criterion that notes what passes."""

    def __init__(self):
        self.minibatches, self.proposals, self.ends, self.rejections = [], [], [], []

    def on_minibatch_sampled(self, event):
        self.minibatches.append(tuple(event["minibatch_ids"]))

    def on_proposal_end(self, event):
        self.ends.append(event)

    def on_candidate_rejected(self, event):
        self.rejections.append(event["reason"])

    def should_accept(self, proposal, state):
        self.proposals.append(proposal)
        return sum(proposal.subsample_scores_after) > sum(proposal.subsample_scores_before)


def steps_of(lm, program=None, iterations=1, **options):
    """The step records of a run of so many iterations."""
    kwargs = {"stop_callbacks": lambda state: state.i + 1 >= iterations, **options.pop("gepa_kwargs", {})}
    options = {"max_metric_calls": 600, "n_train": 20, **options}
    return learn(lm, program, gepa_kwargs=kwargs, **options).detailed_results.steps


def test_an_accepted_step():
    watch = Watch()
    (step,) = steps_of(
        learning_lm(), reflection_minibatch_size=9, gepa_kwargs={"callbacks": [watch], "acceptance_criterion": watch}
    )
    assert (step.iteration, step.parent) == (1, 0)
    assert step.minibatch_ids == watch.minibatches[0]
    assert len(set(step.minibatch_ids)) == step.n == 9
    assert (step.k, step.duplication_factor, step.num_tasks) == (3, 2, 1)
    assert step.scores_before == (0.0,) * 9
    assert step.scores_after == (1.0,) * 9
    assert (step.accepted, step.candidate, step.reason) == (True, 1, "")
    assert step.seconds > 0
    assert step.validation_seconds > 0


def test_the_nodes_of_a_step_hold_prompts_outputs_and_where_they_read():
    (step,) = steps_of(learning_lm(), reflection_minibatch_size=9)
    *level_1, root = step.nodes
    assert [node.id for node in level_1] == ["1.0", "1.1", "1.2"]
    assert (root.id, root.inputs) == ("2.0", ("1.0", "1.1", "1.2"))
    assert sorted(i for node in level_1 for i in node.inputs) == sorted([f"r{i}" for i in range(9)] * 2)
    for node in step.nodes:
        assert (node.component, node.error, node.usage.calls) == ("self", None, 1)
        assert "new_instruction" in node.raw_output
        assert node.output in node.raw_output
        assert node.usage.input_tokens > node.usage.output_tokens > 0
        assert node.seconds > 0
    for node in level_1:
        read = {step.minibatch_ids[int(name[1:])] for name in node.inputs}
        assert numbers_in(node.prompt) == numbers_in(node.output) == read
    for node in level_1:
        assert node.output in root.prompt
    assert root.output == step.reductions[0].text
    assert numbers_in(root.output) == set(step.minibatch_ids)


def test_a_rejected_step():
    watch = Watch()
    talk = {"new_instruction": "Nothing learned."}
    (step,) = steps_of(learning_lm(reflect=talk), gepa_kwargs={"callbacks": [watch]})
    assert (step.accepted, step.candidate) == (False, None)
    assert step.reason == watch.rejections[0]
    assert "not better" in step.reason
    assert step.scores_after == step.scores_before == (0.0,) * 6
    assert step.reductions[0].text == "Nothing learned."
    assert step.validation_seconds < step.seconds


def test_a_step_that_is_skipped_because_its_scores_are_perfect():
    program = dspy.Predict("question -> answer")
    program.signature = program.signature.with_instructions(" ".join(f"rule-answer-{i}" for i in range(20)))
    (step,) = steps_of(learning_lm(), program)
    assert (step.accepted, step.candidate, step.reason) == (False, None, "all_scores_perfect")
    assert step.scores_before == (1.0,) * 6
    assert (step.scores_after, step.reductions, step.nodes) == ((), (), ())
    assert (step.n, step.k, step.duplication_factor) == (6, 0, 0)


def test_a_step_whose_reflection_failed_says_why_and_keeps_the_calls():
    (step,) = steps_of(learning_lm(reflect="I would rather not."), reflection_minibatch_size=9)
    assert (step.accepted, step.candidate, step.scores_after) == (False, None, ())
    assert step.reason.startswith("self: 3 of 3 reflection calls of level 1 failed; last: ")
    assert step.reductions[0].text is None
    assert step.reductions[0].error in step.reason
    assert len(step.nodes) == 3
    for node in step.nodes:
        assert node.output is None
        assert node.error
        assert node.raw_output == "I would rather not."
        assert node.usage.calls >= 2


class Lonely(dspy.Module):
    """A chain with a predictor that never runs."""

    def __init__(self):
        super().__init__()
        self.chain = Chain()
        self.unused = dspy.Predict("question -> summary")

    def forward(self, question):
        return self.chain(question=question)


def test_a_step_without_reflection_records():
    lm = learning_lm()
    (step,) = steps_of(lm, Lonely(), component_selector=lambda *given: ["unused"])
    assert step.reason == "no reflection records"
    assert (step.accepted, step.scores_after, step.reductions) == (False, (), ())
    assert step.scores_before == (0.0,) * 6
    assert not any(is_reflection(call.prompt) for call in lm.calls)


def test_a_step_with_records_for_one_of_two_components():
    (step,) = steps_of(learning_lm(), Lonely(), component_selector=lambda *given: ["unused", "chain.second"])
    assert [reduction.component for reduction in step.reductions] == ["chain.second"]
    assert step.accepted


def test_a_step_that_makes_a_candidate_that_is_there_already_is_not_evaluated_again():
    known = {"new_instruction": "Rules: " + " ".join(f"rule-answer-{i}" for i in range(10))}
    results = learn(
        learning_lm(reflect=known),
        n_train=20,
        max_metric_calls=200,
        candidate_selection_strategy=SeedSelector(),
        gepa_kwargs={"stop_callbacks": MaxCandidateProposalsStopper(2)},
    ).detailed_results
    first, second = results.steps
    assert first.accepted
    assert not second.accepted
    assert "candidate 1" in second.reason
    assert second.scores_after == ()
    assert results.repeated_proposals == 1


class SeedSelector(CandidateSelector):
    def select_candidate_idx(self, state):
        return 0


# Several tasks in a step


@pytest.mark.parametrize("strategy", [PxNSampling(2, 2), IndependentSampling(4), SameParentSampling(4)])
def test_each_task_of_a_step_has_its_own_tree(strategy):
    steps = steps_of(
        learning_lm(),
        iterations=2,
        n_train=40,
        reflection_minibatch_size=5,
        gepa_kwargs={"sampling_strategy": strategy},
    )
    assert [step.iteration for step in steps] == [1] * 4 + [2] * 4
    for step in steps:
        assert step.num_tasks == 4
        assert (step.n, step.k) == (5, 2)
        read = set().union(*(numbers_in(node.output) for node in step.nodes if node.id.startswith("1.")))
        assert set(step.minibatch_ids) <= read
        if step.iteration == 1:
            assert read == set(step.minibatch_ids)
    drawn = [i for step in steps for i in step.minibatch_ids]
    assert sorted(drawn) == list(range(40))
    assert [step.candidate for step in steps] == list(range(1, 9))


def test_accepted_rejected_and_failed_tasks_of_one_step():
    """Of the first step's four tasks the one that reads question 0 learns nothing and the one with 1 fails."""
    lm = learning_lm(
        (lambda prompt: is_level_1(prompt) and 0 in numbers_in(prompt), {"new_instruction": "Nothing learned."}),
        (lambda prompt: is_level_1(prompt) and 1 in numbers_in(prompt), "not at all"),
    )
    watch = Watch()
    steps = steps_of(
        lm,
        n_train=12,
        reflection_minibatch_size=3,
        gepa_kwargs={"sampling_strategy": SameParentSampling(4), "callbacks": [watch]},
    )
    assert [step.minibatch_ids for step in steps] == watch.minibatches
    expected, candidate, rejections = [], 0, list(watch.rejections)
    for ids in watch.minibatches:
        if 0 in ids:
            expected.append((False, None, rejections.pop(0)))
        elif 1 in ids:
            expected.append((False, None, "failed"))
        else:
            candidate += 1
            expected.append((True, candidate, ""))
    assert candidate >= 2
    for step, (accepted, index, reason) in zip(steps, expected, strict=True):
        assert (step.accepted, step.candidate) == (accepted, index)
        assert reason in step.reason
        assert bool(step.reason) is not accepted


class SameExamples(BatchSampler):
    def next_minibatch_ids(self, loader, state):
        return [0, 1, 2, 3]


def test_tasks_that_share_an_evaluation_of_the_parent_do_not_share_a_tree():
    steps = steps_of(
        learning_lm(),
        Chain(),
        reflection_minibatch_size=None,
        component_selector="all",
        gepa_kwargs={"sampling_strategy": SameParentSampling(2), "batch_sampler": SameExamples()},
    )
    assert [step.minibatch_ids for step in steps] == [(0, 1, 2, 3)] * 2
    for step in steps:
        assert [reduction.component for reduction in step.reductions] == ["first", "second"]
        assert len(step.nodes) == 6
        assert step.scores_after == (1.0,) * 4
    # Both made the same child; GEPA keeps the first and says so of the second.
    assert [step.candidate for step in steps] == [1, None]
    assert "Duplicate" in steps[1].reason


def test_of_two_tasks_that_made_the_same_child_the_one_that_gepa_kept_has_the_candidate():
    """TopK puts the larger gain first, so GEPA keeps the second task's copy and drops the first's."""
    everything = {"new_instruction": "Rules: " + " ".join(f"rule-answer-{i}" for i in range(20))}
    program = dspy.Predict("question -> answer")
    program.signature = program.signature.with_instructions("Rules: rule-answer-0 rule-answer-1 rule-answer-2")

    class KnownFirst(BatchSampler):
        def __init__(self):
            self.batches = [[0, 1, 2, 3], [4, 5, 6, 7]]

        def next_minibatch_ids(self, loader, state):
            return self.batches.pop(0)

    first, second = steps_of(
        learning_lm(reflect=everything),
        program,
        reflection_minibatch_size=None,
        gepa_kwargs={
            "sampling_strategy": SameParentSampling(2),
            "selection_strategy": TopKImprovements(2),
            "batch_sampler": KnownFirst(),
        },
    )
    assert (sum(first.scores_before), sum(second.scores_before)) == (3.0, 0.0)
    assert (first.accepted, second.accepted) == (False, True)
    assert "Duplicate" in first.reason
    assert second.candidate == 1


# What goes to GEPA


def test_the_tree_is_in_the_proposals_metadata():
    watch = Watch()
    steps = steps_of(
        learning_lm(),
        Chain(),
        component_selector="all",
        gepa_kwargs={"acceptance_criterion": watch, "sampling_strategy": SameParentSampling(2)},
    )
    assert len(steps) == len(watch.proposals) == 2
    for step, proposal in zip(steps, watch.proposals, strict=True):
        assert tuple(proposal.subsample_indices) == step.minibatch_ids
        trees = proposal.metadata["combee:nodes"]
        assert list(trees) == ["first", "second"]
        assert tuple(node for tree in trees.values() for node in tree) == step.nodes
        assert proposal.metadata["combee:errors"] == {}
        assert proposal.metadata["prompt:first"] == trees["first"][-1].prompt


def test_errors_of_a_tree_are_in_the_proposals_metadata():
    watch = Watch()
    lm = learning_lm((lambda prompt: is_level_1(prompt) and "rule-hint-" in prompt, "not at all"))
    (step,) = steps_of(lm, Chain(), component_selector="all", gepa_kwargs={"acceptance_criterion": watch})
    (proposal,) = watch.proposals
    assert proposal.metadata["combee:errors"] == {"first": step.reductions[0].error}
    assert step.accepted


def test_prompts_and_raw_outputs_of_the_last_calls_reach_on_proposal_end():
    watch = Watch()
    (step,) = steps_of(learning_lm(), Chain(), component_selector="all", gepa_kwargs={"callbacks": [watch]})
    (event,) = watch.ends
    roots = {reduction.component: reduction.nodes[-1] for reduction in step.reductions}
    assert event["new_instructions"] == {name: node.output for name, node in roots.items()}
    assert event["prompts"] == {name: node.prompt for name, node in roots.items()}
    assert event["raw_lm_outputs"] == {name: node.raw_output for name, node in roots.items()}
    assert all(event["prompts"].values())


def test_merge_steps_make_no_record():
    program = Chain()
    program.first.signature = program.first.signature.with_instructions("Rules: rule-hint-0")
    program.second.signature = program.second.signature.with_instructions("Rules: rule-answer-1")
    results = learn(
        learning_lm(),
        program,
        use_merge=True,
        candidate_selection_strategy=SeedSelector(),
        reflection_minibatch_size=12,
        max_metric_calls=120,
    ).detailed_results
    merged = [index for index, parents in enumerate(results.parents) if len(parents) == 2]
    assert merged
    assert not [step for step in results.steps if step.candidate in merged]
    assert len({step.iteration for step in results.steps}) == len(results.steps)


# The recorder by itself


STATE = SimpleNamespace(program_candidates=[{}], program_full_scores_val_set=[0.5], total_num_evals=9)


def make_recorder():
    program = dspy.Predict("question -> answer")
    return StepRecorder(make_scope(program, make(learning_lm(), track_stats=True)))


def recorded(*events):
    recorder = make_recorder()
    recorder.on_iteration_start({"state": STATE, "iteration": 4})
    recorder.on_candidate_selected({"candidate_idx": 2})
    recorder.on_minibatch_sampled({"minibatch_ids": ["a", "b"]})
    for name, event in events:
        getattr(recorder, name)(event)
    recorder.on_iteration_end({"proposal_accepted": False})
    return recorder.scope.steps


SCORES = [0.0, 1.0]


def test_a_step_that_raised_after_its_evaluation_says_so():
    evaluated = ("on_evaluation_end", {"candidate_idx": 2, "scores": SCORES})
    failed = ("on_error", {"exception": RuntimeError("broken")})
    (step,) = recorded(evaluated, failed)
    assert step.reason == "the step raised RuntimeError: broken"
    assert (step.iteration, step.parent, step.minibatch_ids) == (4, 2, ("a", "b"))
    assert step.scores_before == (0.0, 1.0)


def test_a_step_that_raised_before_its_evaluation_is_no_step():
    assert recorded(("on_error", {"exception": RuntimeError("broken")})) == []


def test_a_child_of_code_alone_is_a_child():
    """Code components give no nodes; two tasks that share the parent's scores still get one child each."""
    recorder = make_recorder()
    recorder.on_iteration_start({"state": STATE, "iteration": 1})
    for _ in range(2):
        recorder.on_candidate_selected({"candidate_idx": 0})
        recorder.on_minibatch_sampled({"minibatch_ids": ["a", "b"]})
    for _ in range(2):
        recorder.on_evaluation_end({"candidate_idx": 0, "scores": SCORES})
    for text in ("one", "two"):
        made = [Reduction("code", text, (), 1, 1)]
        recorder.note_reductions(SCORES, {"code": "", "say": "x"}, {"code": text}, made)
    for scores in ([1.0, 1.0], [0.0, 0.0]):
        recorder.on_evaluation_end({"candidate_idx": None, "scores": scores})
    recorder.on_candidate_rejected({"old_score": 1.0, "new_score": 0.0, "reason": "worse"})
    entered = {"candidate_idx": 1, "candidate": {"code": "one", "say": "x"}, "average_score": 0.9}
    recorder.on_valset_evaluated(entered)
    recorder.on_candidate_accepted({"new_candidate_idx": 1, "new_score": 2.0, "parent_ids": [0]})
    recorder.on_iteration_end({"proposal_accepted": True})
    first, second = recorder.scope.steps
    assert (first.candidate, first.scores_after, first.reason) == (1, (1.0, 1.0), "")
    assert (second.candidate, second.scores_after, second.reason) == (None, (0.0, 0.0), "worse")
    assert first.k == first.duplication_factor == 1
