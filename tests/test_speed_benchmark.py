"""The parts of `benchmarks/speed.py` that decide, on small made-up runs; and that fast copies are good copies."""

import copy

import dspy
import pytest

from benchmarks._speed_costs import growth, tree_cost
from benchmarks._speed_lm import Latency, LoggedCall
from benchmarks._speed_run import list_schedule, longest_first, seconds_apart, timed_run, waves
from benchmarks.speed import Verdicts
from dspy_combee.rollouts.map import ProgramCopier
from dspy_combee.testing.tasks import conventions_task


def call(kind, start, end):
    return LoggedCall(kind, start, end, end - start)


def test_the_critical_path_takes_the_longest_calls_first():
    assert longest_first([1, 1, 1, 3], 2) == 3
    assert list_schedule([1, 1, 1, 3], 2) == 4
    assert longest_first([], 2) == 0


def test_a_wave_ends_with_the_kind_of_call_and_where_an_evaluation_begins():
    calls = [
        *(call("rollout", 1, 2), call("rollout", 1.5, 3), call("propose", 3, 4), call("merge", 4, 5)),
        *(call("rollout", 6, 7), call("apart", 7, 8), call("rollout", 9, 10)),
    ]
    made = waves(calls, marks=[0.5, 5.5, 8.5])
    assert [[item.kind for item in wave] for wave in made] == [
        ["rollout", "rollout"],
        ["propose"],
        ["merge"],
        ["rollout"],
        ["rollout"],
    ]


def test_validation_is_subtracted_from_its_first_to_its_last_call():
    calls = [call("apart", 0, 1), call("apart", 0.5, 2), call("rollout", 3, 4), call("apart", 5, 5.5)]
    assert seconds_apart(calls) == 2.5


def test_a_missed_target_is_said_and_kept():
    verdicts = Verdicts()
    assert verdicts.at_most("x", 1.0, 1.1) == "met"
    assert verdicts.at_most("y", 1.25, 1.1) == "MISSED by 0.15"
    assert verdicts.missed == ["y: 1.25 instead of 1.1"]


def test_growth_tells_linear_from_quadratic():
    assert growth(1, 8, 8) == pytest.approx(1)
    assert growth(1, 64, 8) == pytest.approx(2)


@pytest.mark.parametrize(("optimizer", "calls"), [("gepa", 1), ("combee", 4)])
def test_a_run_takes_as_long_as_its_calls_at_least(optimizer, calls):
    timing = timed_run(optimizer, 10, conventions_task(0, (10, 2, 4)), Latency(100), held_out=True)
    assert timing.sizes == (10,)
    assert (timing.num_rollouts, timing.num_reflections) == (20, calls)
    assert 0 < timing.drawn_path <= timing.in_order
    assert timing.drawn_path <= timing.path < timing.seconds
    assert 0 <= timing.score <= 1


def test_the_tree_of_the_benchmark_is_the_one_that_the_design_asks_for():
    assert tree_cost(1250, 10**7, repeats=1).calls == (35, 2, 1)


class Program(dspy.Module):
    """What a copy could get wrong: the same object twice, a way back, an object with a copy rule of its own."""

    def __init__(self):
        super().__init__()
        self.solve = dspy.Predict("question -> answer")
        self.again = [self.solve]
        self.notes = {"list": [1, [2]], "pair": ([3], 4)}
        self.whole = self
        self.special = Special()


class Special(dspy.Module):
    def __deepcopy__(self, memo):
        new = Special()
        new.copied = True
        return new


def test_a_fast_copy_is_what_deepcopy_gives():
    program = Program()
    program.solve.demos = [dspy.Example(question="1", answer="2").with_inputs("question")]
    new = ProgramCopier(program).copy(program)
    slow = copy.deepcopy(program)
    assert vars(new).keys() == vars(slow).keys()
    assert vars(new.solve).keys() == vars(slow.solve).keys()
    assert new.solve is new.again[0] is not program.solve
    assert new.whole is new
    assert new.notes == program.notes
    assert new.notes["list"][1] is not program.notes["list"][1]
    assert new.notes["pair"][0] is not program.notes["pair"][0]
    assert new.special.copied
    assert new.solve.demos == program.solve.demos
    assert new.solve.demos[0] is not program.solve.demos[0]
    assert new.solve.signature is program.solve.signature
    assert (new.history, new.callbacks) == ([], [])
