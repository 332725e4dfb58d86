"""What every `Aggregator` must do, then what only `TreeAggregator` does. The calls are made by a function here.

What the others promise of themselves is in `test_baselines.py`.
"""

import logging
import random
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_combee import Aggregator, ProposalNode, ThreadExecutor, TreeAggregator
from dspy_combee.records.lengths import estimate_tokens
from dspy_combee.reduce import AGGREGATORS, resolve_aggregator
from dspy_combee.reduce.tree import NodeCall, ReductionTask

WAIT = 30


class Calls:
    """Makes the calls: a proposal lists what it read; those named in `failing` fail, those in `outputs` say that."""

    def __init__(self, failing=(), outputs=None):
        self.failing, self.outputs = failing, outputs or {}
        self.made: list[NodeCall] = []
        self.lock = threading.Lock()

    def __call__(self, call: NodeCall) -> ProposalNode:
        with self.lock:
            self.made.append(call)
        failed = call.id in self.failing or call.kind in self.failing
        made = self.outputs.get(call.id, f"{call.task.component} {call.id} from {' '.join(call.inputs)}")
        output, error = (None, f"call {call.id} failed") if failed else (made, None)
        return ProposalNode(call.id, call.task.component, call.inputs, output=output, error=error)

    def of(self, kind):
        return [call for call in self.made if call.kind == kind]

    def per_level(self):
        return Counter(call.id.split(".")[0] for call in self.made)


def task(n, component="c", seed=0, **options):
    records = [f"record {i}" for i in range(n)]
    return ReductionTask(component, "the current instruction", records, random.Random(seed), **options)


def reduce_one(aggregator, a_task, calls=None):
    calls = calls or Calls()
    (reduction,) = aggregator.aggregate([a_task], calls, ThreadExecutor(4))
    return reduction, calls


# The contract ------------------------------------------------------------------------------------------------


@pytest.fixture(params=sorted(AGGREGATORS))
def aggregator(request):
    return AGGREGATORS[request.param]()


def test_is_an_aggregator(aggregator):
    assert isinstance(aggregator, Aggregator)
    assert resolve_aggregator(aggregator) is aggregator


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 9, 25, 60])
def test_calls_read_what_their_ids_say_and_one_of_the_outputs_is_the_text(aggregator, n):
    reduction, calls = reduce_one(aggregator, task(n))
    assert reduction.error is None
    assert reduction.text in {node.output for node in reduction.nodes}
    known = {f"r{i}": f"record {i}" for i in range(n)} | {node.id: node.output for node in reduction.nodes}
    for call in calls.made:
        assert call.items
        assert len(set(call.inputs)) == len(call.inputs)
        # Equal outputs may be shown once, so there can be fewer items than ids.
        assert list(dict.fromkeys(known[i] for i in call.inputs)) == list(dict.fromkeys(call.items))
    assert {call.kind for call in calls.made if call.inputs[0].startswith("r")} <= {"propose", "summarize"}


def test_the_reduction_says_what_it_was_made_of(aggregator):
    sources = tuple(range(100, 109))
    reduction, _ = reduce_one(aggregator, task(9, "answerer", sources=sources))
    assert (reduction.component, reduction.current) == ("answerer", "the current instruction")
    assert reduction.sources == sources
    assert reduce_one(aggregator, task(9))[0].sources == tuple(range(9))
    assert reduction.num_groups >= 1
    assert reduction.duplication_factor >= 1


def test_the_task_is_left_as_it_is(aggregator):
    a_task = task(40)
    reduce_one(aggregator, a_task)
    assert a_task.records == [f"record {i}" for i in range(40)]


def test_the_nodes_are_the_calls_and_what_they_read_came_before(aggregator):
    reduction, calls = reduce_one(aggregator, task(40))
    assert [node.id for node in reduction.nodes] == [call.id for call in sorted(calls.made, key=lambda c: _key(c.id))]
    known = {f"r{i}" for i in range(40)}
    for node in reduction.nodes:
        assert set(node.inputs) <= known
        assert node.id not in known
        known.add(node.id)


def _key(node_id):
    return tuple(int(part) for part in node_id.split("."))


def test_one_reduction_for_each_task_in_order(aggregator):
    tasks = [task(n, f"component {n}") for n in (9, 1, 40, 4)]
    reductions = aggregator.aggregate(tasks, Calls(), ThreadExecutor(3))
    assert [reduction.component for reduction in reductions] == [t.component for t in tasks]
    assert all(reduction.text.startswith(reduction.component) for reduction in reductions)
    assert all(node.component == reduction.component for reduction in reductions for node in reduction.nodes)
    assert aggregator.aggregate([], Calls(), ThreadExecutor(3)) == []


def test_the_same_seed_makes_the_same_calls_at_any_width_and_beside_any_task(aggregator):
    alone, _ = reduce_one(aggregator, task(40, seed=7))
    for width in (1, 8):
        others = [task(30, "other", seed=1), task(40, seed=7), task(9, "third", seed=2)]
        assert aggregator.aggregate(others, Calls(), ThreadExecutor(width))[1] == alone


def test_when_every_call_fails_there_is_no_text_and_the_cause_is_named(aggregator):
    reduction, _ = reduce_one(aggregator, task(40), Calls(failing=("propose", "merge", "summarize")))
    assert reduction.text is None
    assert "failed" in reduction.error
    assert reduction.nodes
    assert all(node.error for node in reduction.nodes)


def test_one_task_that_fails_does_not_touch_the_others(aggregator):
    def call(node_call):
        if node_call.task.component == "bad":
            return ProposalNode(node_call.id, "bad", node_call.inputs, error="no reply")
        return Calls()(node_call)

    bad, good = aggregator.aggregate([task(9, "bad"), task(9, "good")], call, ThreadExecutor(2))
    assert bad.text is None
    assert good.text is not None


def test_no_records_give_no_text(aggregator):
    reduction, calls = reduce_one(aggregator, task(0))
    assert (reduction.text, calls.made) == (None, [])
    assert "no records" in reduction.error


def test_what_an_error_of_the_call_function_is_stops_the_reduction(aggregator):
    def call(node_call):
        raise ConnectionError("refused for good")

    with pytest.raises(ConnectionError, match="refused for good"):
        aggregator.aggregate([task(9)], call, ThreadExecutor(2))


def test_the_first_calls_of_all_tasks_run_at_once(aggregator):
    tasks = [task(9, f"component {i}") for i in range(3)]
    (width,) = {sum(1 for call in reduce_one(aggregator, one)[1].made if call.id.startswith("1.")) for one in tasks}
    barrier = threading.Barrier(3 * width)

    def call(node_call):
        if node_call.id.startswith("1."):
            barrier.wait(WAIT)  # Opens only when the whole level is in flight.
        return Calls()(node_call)

    reductions = aggregator.aggregate(tasks, call, ThreadExecutor(3 * width))
    assert all(reduction.text for reduction in reductions)


# The tree: how many calls -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "levels"),
    [(1, [1]), (3, [1]), (4, [2, 1]), (8, [2, 1]), (9, [3, 1]), (40, [6, 1]), (100, [10, 1]), (10_000, [100, 4, 1])],
)
def test_calls_per_level(n, levels):
    reduction, calls = reduce_one(TreeAggregator(), task(n))
    assert [calls.per_level()[str(level + 1)] for level in range(len(levels) + 1)] == [*levels, 0]
    assert reduction.num_groups == levels[0]
    assert reduction.text == reduction.nodes[-1].output


def test_fewer_than_four_records_are_one_plain_call_and_a_log_line_says_so(caplog):
    with caplog.at_level(logging.INFO, "dspy_combee"):
        reduction, calls = reduce_one(TreeAggregator(), task(3, "answerer", num_groups=3, duplication_factor=3))
    assert [call.inputs for call in calls.made] == [("r0", "r1", "r2")]
    assert (reduction.num_groups, reduction.duplication_factor) == (1, 1)
    assert "answerer: 3 records go into one plain reflection call" in caplog.text


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 9, 25, 60])
def test_every_record_is_read_by_a_call_that_proposes(n):
    _, calls = reduce_one(TreeAggregator(), task(n))
    assert {i for call in calls.of("propose") for i in call.inputs} == {f"r{i}" for i in range(n)}
    for call in calls.of("propose"):
        assert call.items == tuple(f"record {i[1:]}" for i in call.inputs)


@pytest.mark.parametrize("n", [9, 16, 40, 100])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_every_record_is_read_by_exactly_p_groups_of_nearly_equal_size(n, p):
    reduction, calls = reduce_one(TreeAggregator(), task(n, duplication_factor=p))
    expected = min(p, reduction.num_groups - 1)
    groups = [call.inputs for call in calls.of("propose")]
    assert set(Counter(i for group in groups for i in group).values()) == {expected}
    assert all(len(set(group)) == len(group) for group in groups)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    assert reduction.duplication_factor == expected


@pytest.mark.parametrize("n", range(4, 9))
@pytest.mark.parametrize("p", [1, 2, 3])
def test_two_groups_read_each_record_once(n, p):
    reduction, calls = reduce_one(TreeAggregator(), task(n, duplication_factor=p))
    assert Counter(i for call in calls.of("propose") for i in call.inputs) == {f"r{i}": 1 for i in range(n)}
    assert (reduction.num_groups, reduction.duplication_factor) == (2, 1)


@pytest.mark.parametrize(("given_k", "n", "k"), [(1, 40, 1), (5, 40, 5), (40, 40, 40), (99, 40, 40)])
def test_num_groups_can_be_given(given_k, n, k):
    reduction, calls = reduce_one(TreeAggregator(max_fan_in=64), task(n, num_groups=given_k))
    assert len(calls.of("propose")) == reduction.num_groups == k


def test_a_merge_reads_every_proposal_and_no_record():
    reduction, calls = reduce_one(TreeAggregator(), task(40))
    (merge,) = calls.of("merge")
    assert sorted(merge.items) == sorted(node.output for node in reduction.nodes[:-1])
    assert merge.inputs == tuple(f"1.{i}" for i in range(6))
    assert not any(item.startswith("record") for item in merge.items)


# The tree: merging --------------------------------------------------------------------------------------------


def test_levels_above_the_first_are_even_and_within_the_fan_in():
    _, calls = reduce_one(TreeAggregator(), task(10_000))
    sizes = [len(call.items) for call in calls.of("merge")]
    assert sizes == [25, 25, 25, 25, 4]
    read = [i for call in calls.of("merge") for i in call.inputs]
    assert Counter(read) == {**{f"1.{i}": 1 for i in range(100)}, **{f"2.{i}": 1 for i in range(4)}}


@given(m=st.integers(2, 60), fan_in=st.integers(2, 10))
def test_any_tree_ends_reads_each_proposal_once_and_never_merges_one_alone(m, fan_in):
    reduction, calls = reduce_one(TreeAggregator(max_fan_in=fan_in), task(m + 4, num_groups=m))
    assert reduction.text is not None
    merges = calls.of("merge")
    assert all(2 <= len(call.items) <= fan_in for call in merges)
    root = reduction.nodes[-1].id
    assert Counter(i for call in merges for i in call.inputs) == {
        node.id: 1 for node in reduction.nodes if node.id != root
    }


def test_equal_proposals_are_merged_without_a_call():
    outputs = {f"1.{i}": "the same rule" for i in range(6)}
    reduction, calls = reduce_one(TreeAggregator(), task(40), Calls(outputs=outputs))
    assert reduction.text == "the same rule"
    assert calls.of("merge") == []


def test_equal_proposals_are_shown_once_to_the_merge():
    outputs = {"1.0": "A", "1.1": "B", "1.2": "A", "1.3": "B", "1.4": "A", "1.5": "C"}
    _, calls = reduce_one(TreeAggregator(), task(40), Calls(outputs=outputs))
    (merge,) = calls.of("merge")
    assert merge.items == ("A", "B", "C")
    assert sorted(merge.inputs) == [f"1.{i}" for i in range(6)]


def test_equal_proposals_of_an_upper_level_are_merged_without_a_call_too():
    outputs = {f"2.{i}": "the same rule" for i in range(4)}
    reduction, calls = reduce_one(TreeAggregator(), task(10_000), Calls(outputs=outputs))
    assert reduction.text == "the same rule"
    assert calls.per_level()["3"] == 0


# The tree: failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [(), ("1.0",), ("1.0", "1.4"), ("1.0", "1.2", "1.5")])
def test_half_of_the_first_level_is_enough(failing):
    reduction, calls = reduce_one(TreeAggregator(), task(40), Calls(failing=failing))
    assert reduction.error is None
    (merge,) = calls.of("merge")
    assert merge.inputs == tuple(f"1.{i}" for i in range(6) if f"1.{i}" not in failing)
    assert [node.id for node in reduction.nodes if node.error] == list(failing)


def test_less_than_half_of_the_first_level_gives_no_proposal_and_the_reason():
    failing = ("1.0", "1.1", "1.2", "1.3")
    reduction, calls = reduce_one(TreeAggregator(), task(40), Calls(failing=failing))
    assert reduction.text is None
    assert reduction.error == "4 of 6 reflection calls of level 1 failed; last: call 1.3 failed"
    assert calls.of("merge") == []


def test_a_single_survivor_of_two_is_the_proposal():
    reduction, calls = reduce_one(TreeAggregator(), task(4), Calls(failing=("1.1",)))
    assert reduction.text == reduction.nodes[0].output
    assert calls.of("merge") == []


@pytest.mark.parametrize(
    ("failing", "survives"), [(("2.0", "2.3"), True), (("2.0", "2.1", "2.2"), False), (("3.0",), False)]
)
def test_the_half_rule_holds_at_every_level(failing, survives):
    reduction, _ = reduce_one(TreeAggregator(), task(10_000), Calls(failing=failing))
    assert (reduction.text is not None) == survives
    if not survives:
        assert f"level {failing[0][0]} failed; last: call {failing[-1]} failed" in reduction.error


# The tree: the context limit ----------------------------------------------------------------------------------


def test_a_group_over_the_token_limit_is_split():
    a_task = ReductionTask("c", "now", ["x" * 400 for _ in range(16)], random.Random(0))  # 100 tokens each
    reduction, calls = reduce_one(TreeAggregator(max_context_tokens=250), a_task)
    assert all(sum(map(estimate_tokens, call.items)) <= 250 for call in calls.of("propose"))
    assert set(Counter(i for call in calls.of("propose") for i in call.inputs).values()) == {2}
    assert reduction.num_groups == len(calls.of("propose")) == 16
    assert reduction.text == reduction.nodes[-1].output


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 100))
def test_no_group_is_over_the_token_limit_but_one_record_always_stands(sizes, limit):
    a_task = ReductionTask("c", "now", ["x" * 4 * size for size in sizes], random.Random(0))
    _, calls = reduce_one(TreeAggregator(max_context_tokens=limit), a_task)
    for call in calls.of("propose"):
        assert call.items
        assert len(call.items) == 1 or sum(map(estimate_tokens, call.items)) <= limit
    counts = Counter(i for call in calls.of("propose") for i in call.inputs)
    assert len(counts) == len(sizes)
    assert len(set(counts.values())) == 1


def test_groups_within_the_token_limit_stay_whole():
    _, calls = reduce_one(TreeAggregator(max_context_tokens=10_000), task(16))
    assert calls.per_level() == {"1": 4, "2": 1}


def test_a_plain_call_over_the_limit_is_split_too():
    a_task = ReductionTask("c", "now", ["x" * 400 for _ in range(3)], random.Random(0))
    reduction, calls = reduce_one(TreeAggregator(max_context_tokens=210), a_task)
    assert [call.inputs for call in calls.of("propose")] == [("r0", "r1"), ("r2",)]
    assert len(calls.of("merge")) == 1
    assert reduction.num_groups == 2


# The tree: at once --------------------------------------------------------------------------------------------


def test_the_calls_of_a_level_of_all_tasks_run_at_once():
    tasks = [task(9, f"component {i}") for i in range(4)]
    barriers = {"propose": threading.Barrier(12), "merge": threading.Barrier(4)}

    def call(node_call):
        barriers[node_call.kind].wait(WAIT)  # Opens only when the whole level is in flight.
        return Calls()(node_call)

    reductions = TreeAggregator().aggregate(tasks, call, ThreadExecutor(12))
    assert all(reduction.text for reduction in reductions)


# Construction -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"max_fan_in": 1}, {"max_fan_in": 0}, {"max_context_tokens": 0}])
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be at least"):
        TreeAggregator(**options)


@pytest.mark.parametrize("options", [{"max_fan_in": 2.5}, {"max_fan_in": True}, {"max_context_tokens": "8k"}])
def test_numbers_of_the_wrong_type_are_refused(options):
    with pytest.raises(TypeError, match=f"{next(iter(options))} must be an int"):
        TreeAggregator(**options)


def test_names_are_resolved_and_unknown_ones_list_the_known():
    assert isinstance(resolve_aggregator("tree"), TreeAggregator)
    with pytest.raises(ValueError, match=r"Unknown aggregator 'bush'; known are \[.*'tree'.*\]"):
        resolve_aggregator("bush")
    with pytest.raises(TypeError, match="name or an Aggregator, got 3"):
        resolve_aggregator(3)
