"""`python -m dspy_combee demo`: `CombeeOptimizer` from end to end, beside one flat reflection call and a control.

Without `--model` nothing leaves the machine: a simulated student and a simulated reflection model take the place
of a language model, and the output says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError

from dspy_combee import CombeeOptimizer, ThreadExecutor
from dspy_combee.cli.command_line import CommandError, positive, reachable_lm, run_command
from dspy_combee.testing import (
    AnswerKey,
    CapacityLoss,
    Lesson,
    Loss,
    PowerLoss,
    Reflector,
    SimulatedLM,
    Solver,
    Student,
    count_tokens,
    find_lessons,
    read_code,
)
from dspy_combee.testing.tasks import Task, conventions_task, finer_task, formula_task, shuffled_feedback

DESCRIPTION = """\
Learn a task with CombeeOptimizer and print what it brought: accuracy on held-out examples before and after, beside
the same run with one flat reflection call and a control whose feedback is shuffled between the examples.
Without --model the language model is simulated and needs no key. With --model the provider's key is read from the
environment (for example OPENAI_API_KEY), and calls may cost money."""

SIMULATED_SEEDS = 5
BASE_ABILITY = 0.5
_DATA_TASKS = {"formula": formula_task, "finer": finer_task}


class DemoError(CommandError):
    """The demo cannot run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the demo."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--data", metavar="FILE", type=Path, help="learn on the rows of FILE: JSON lines with context and target")
    add("--task", choices=sorted(_DATA_TASKS), help="what the rows of --data are")
    add("--model", metavar="NAME", help="the model that does the task, as dspy.LM takes it (openai/gpt-4o-mini)")
    add("--reflection-model", metavar="NAME", help="the model that reflects (default: the same as --model)")
    add("--api-base", metavar="URL", help="address of the models' server; DSPy wants some key set for it too")
    add("--num-threads", metavar="N", type=positive, default=8, help="calls in flight at most (default: 8)")
    add("--minibatch-size", metavar="N", type=positive, default=40, help="examples per step, n (default: 40)")
    add("--budget", metavar="N", type=positive, default=600, help="metric calls of one run (default: 600)")
    add("--seed", metavar="N", type=int, default=0, help="seed of data, minibatches and shuffles (default: 0)")
    add("--save", metavar="FILE", type=Path, help="save the learned program to FILE (.json)")
    add("--compare", action="store_true", help="with --model: also run the flat call and the control (costs money)")


def run(options: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        The exit status: 0, 2 for options or files that are no good, 1 for a run that failed, 130 for Ctrl-C.
    """
    return run_command(lambda: (_simulated(options) if options.model is None else _real(options)).play())


# What is run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trial:
    """A task with the LMs that learn it."""

    seed: int
    task: Task
    lm: Any
    reflection_lm: Any


@dataclass(frozen=True)
class _Arm:
    """One way to learn it; with one group a step makes one flat reflection call."""

    title: str
    num_groups: int | None = None
    shuffled: bool = False


_ARMS = (
    _Arm("Combee"),
    _Arm("one flat reflection call", num_groups=1),
    _Arm("control: Combee, shuffled feedback", shuffled=True),
)


@dataclass(frozen=True)
class _Outcome:
    """What a run brought: accuracies in percent, and what it took."""

    program: Any
    before: float
    after: float
    failed: int
    steps: Sequence[Any]
    seconds: float
    metric_calls: int
    usage: Mapping[str, list[Mapping[str, Any]]]


@dataclass(frozen=True)
class _Demo:
    headline: str
    trials: Sequence[_Trial]
    arms: Sequence[_Arm]
    options: argparse.Namespace
    closing: str = ""
    second: Sequence[_Trial] = ()

    def play(self) -> None:
        """Run every arm on every trial, printing each as it ends, then what the first run learned."""
        task, options = self.trials[0].task, self.options
        self._check()
        print(f"{self.headline}\n")
        print(
            f"Task: {task.name}; {len(task.trainset)} training, {len(task.valset)} validation and "
            f"{len(task.testset)} held-out examples.\nMinibatch n = {options.minibatch_size}, budget "
            f"{options.budget} metric calls, {options.num_threads} threads"
            + (f", means of {len(self.trials)} seeds.\n" if len(self.trials) > 1 else ".\n")
        )
        print(
            f"{'held-out accuracy in %':<36}{'before':>8}{'after':>7}{'steps':>7}{'accepted':>10}{'seconds':>9}"
            f"{'LM calls':>10}{'tokens':>11}"
        )
        outcomes = [self._arm(arm, self.trials) for arm in self.arms]
        if self.second:
            print("\nThe same with the other loss of the simulation, at most 4 lessons per reflection call:")
            for arm in self.arms[:2]:
                self._arm(arm, self.second)
        _explain(outcomes[0][0], self.trials[0].seed)
        if options.save is not None:
            try:
                outcomes[0][0].program.save(options.save)
            except Exception as error:  # DSPy makes a RuntimeError of whatever it is, with a guess at the cause.
                raise DemoError(f"--save {options.save}: it cannot be written: {error.__context__ or error}") from error
            print(f"\nSaved to {options.save}.")
        print(self.closing)

    def _arm(self, arm: _Arm, trials: Sequence[_Trial]) -> list[_Outcome]:
        outcomes = [_learn(trial, arm, self.options) for trial in trials]
        calls, tokens = zip(*(_totals(outcome.usage) for outcome in outcomes), strict=True)
        print(
            f"{arm.title:<36}{mean(o.before for o in outcomes):>8.1f}{mean(o.after for o in outcomes):>7.1f}"
            f"{mean(len(o.steps) for o in outcomes):>7.1f}"
            f"{mean(sum(step.accepted for step in o.steps) for o in outcomes):>10.1f}"
            f"{mean(o.seconds for o in outcomes):>9.1f}{mean(calls):>10,.0f}{mean(tokens):>11,.0f}"
        )
        if len(outcomes) > 1:
            print(f"{'  after, seed by seed':<44}" + "".join(f"{o.after:>7.1f}" for o in outcomes))
        sys.stdout.flush()
        return outcomes

    def _check(self) -> None:
        task, options = self.trials[0].task, self.options
        if options.minibatch_size > len(task.trainset):
            raise DemoError(f"--minibatch-size {options.minibatch_size}: there are {len(task.trainset)} examples")
        needed = 2 * len(task.valset) + 2 * options.minibatch_size
        if options.budget < needed:
            raise DemoError(
                f"--budget {options.budget} does not pay for one step: it takes {needed} metric calls (two "
                f"validation passes of {len(task.valset)} and the minibatch of {options.minibatch_size} twice)"
            )
        if options.save is not None:
            _check_writable(options.save)


def _check_writable(path: Path) -> None:
    if path.suffix != ".json" or not path.parent.is_dir():
        raise DemoError(f"--save {path}: expected a .json file in a folder that is there")
    was_there = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise DemoError(f"--save {path}: it cannot be written: {error.strerror}") from error
    if not was_there:
        path.unlink()


def _learn(trial: _Trial, arm: _Arm, options: argparse.Namespace) -> _Outcome:
    task = shuffled_feedback(trial.task, trial.seed) if arm.shuffled else trial.task
    optimizer = CombeeOptimizer(
        metric=task.metric,
        max_metric_calls=options.budget,
        reflection_lm=trial.reflection_lm,
        reflection_minibatch_size=options.minibatch_size,
        num_threads=options.num_threads,
        num_groups=arm.num_groups,
        seed=trial.seed,
        track_stats=True,
        use_merge=False,
        verbose=options.model is not None,  # a simulated run is over before a progress line is of use
    )
    with dspy.context(lm=trial.lm):
        before, _ = _accuracy(trial.task, task.program, options.num_threads)
        started = time.perf_counter()
        with dspy.track_usage() as tracker:
            program = optimizer.compile(task.program, task.trainset, valset=task.valset)
        seconds = time.perf_counter() - started
        after, failed = _accuracy(trial.task, program, options.num_threads)
    result = program.detailed_results
    metric_calls = int(result.total_metric_calls or 0)
    return _Outcome(program, before, after, failed, result.steps, seconds, metric_calls, tracker.usage_data)


def _accuracy(task: Task, program: Any, num_threads: int) -> tuple[float, int]:
    """Accuracy on the test examples in percent, and how many of them gave no answer."""
    scores = ThreadExecutor(num_threads).map(_Examiner(task, program), task.testset)
    return 100 * mean(score or 0.0 for score in scores), scores.count(None)


@dataclass(frozen=True)
class _Examiner:
    """Scores the program on an example; None where the reply cannot be parsed. Other errors are not its fault."""

    task: Task
    program: Any

    def __call__(self, example: dspy.Example) -> float | None:
        try:
            prediction = self.program(**example.inputs())
        except AdapterParseError:
            return None
        return float(self.task.metric(example, prediction).score)


def _explain(outcome: _Outcome, seed: int) -> None:
    """What the main run learned, step by step, and what it took."""
    print(f"\nThe run of Combee with seed {seed}, {outcome.metric_calls} metric calls:")
    for number, step in enumerate(outcome.steps, start=1):
        verdict = "accepted" if step.accepted else f"not accepted ({step.reason or 'no reason given'})"
        scores = f"minibatch {_percent(step.scores_before)} -> {_percent(step.scores_after)}"
        print(f"  step {number}: n={step.n}, k={step.k}, {scores}, {verdict}")
    for model, entries in sorted(outcome.usage.items()):
        read, written = (_tokens(entries, key) for key in ("prompt_tokens", "completion_tokens"))
        print(f"  {model}: {len(entries)} calls, {read:,} tokens in, {written:,} out")
    if outcome.failed:
        print(f"  {outcome.failed} of the held-out runs gave no answer and count as wrong.")
    for name, predictor in outcome.program.named_predictors():
        print(f"\nLearned instruction of {name}:")
        print("\n".join(f"  {line}" for line in predictor.signature.instructions.splitlines()))


def _tokens(entries: Sequence[Mapping[str, Any]], key: str) -> int:
    return sum(int(entry.get(key) or 0) for entry in entries)


def _totals(usage: Mapping[str, list[Mapping[str, Any]]]) -> tuple[int, int]:
    entries = [entry for model_entries in usage.values() for entry in model_entries]
    return len(entries), _tokens(entries, "prompt_tokens") + _tokens(entries, "completion_tokens")


def _percent(scores: Sequence[float]) -> str:
    return f"{100 * mean(scores):.0f}%" if scores else "none"


# The simulated run ------------------------------------------------------------------------------------------


def _answer_key(task: Task, seed: int) -> AnswerKey:
    known: dict[str, list[tuple[str, str]]] = {}
    true: set[Lesson] = set()
    for example in (*task.trainset, *task.valset, *task.testset):
        lessons = find_lessons(task.metric(example, dspy.Prediction(answer="")).feedback)
        answers = [answer.strip() for answer in example.target.split(",")]
        topics = answers if len(answers) > 1 else [lesson.topic for lesson in lessons]
        known[example.context] = list(zip(topics, answers, strict=True))
        true.update(lessons)
    return AnswerKey("context", known, frozenset(true), BASE_ABILITY, seed)


def _simulated(options: argparse.Namespace) -> _Demo:
    for name in ("reflection_model", "api_base", "compare"):
        if getattr(options, name):
            raise DemoError(f"--{name.replace('_', '-')} needs --model")
    seeds = range(options.seed, options.seed + SIMULATED_SEEDS)
    tasks = [_task(options, seed) for seed in seeds]
    trials = [_simulated_trial(task, seed, None) for task, seed in zip(tasks, seeds, strict=True)]
    second = [_simulated_trial(task, seed, CapacityLoss()) for task, seed in zip(tasks, seeds, strict=True)]
    key = (
        f"\nThe student holds the answers of the file: it gives one where its instruction states the convention\n"
        f"that goes with the question, else with probability {BASE_ABILITY}."
    )
    headline = (
        "SIMULATED: no language model is called. A simulated student does what its instruction states, and a\n"
        "simulated reflection model loses lessons as its prompt grows, by a law fitted on the flat figures of the\n"
        "paper. The figures show how the method treats lessons, not how good a language model is."
    )
    closing = "\nPoint it at a language model with --model (the provider's key is read from the environment)."
    return _Demo(headline + ("" if options.task is None else key), trials, _ARMS, options, closing, second)


def _simulated_trial(task: Task, seed: int, loss: Loss | None) -> _Trial:
    solver: Solver = read_code if task.name == "house conventions" else _answer_key(task, seed)
    example = task.trainset[0]
    record = f"{example.inputs().toDict()}{task.metric(example, dspy.Prediction()).feedback}"
    fitted = PowerLoss(one_record_tokens=count_tokens(record) + 100)  # the rest of the message: about 100 tokens
    return _Trial(
        seed,
        task,
        SimulatedLM(seed, student=Student(solver), model="simulated/student"),
        SimulatedLM(seed, reflector=Reflector(loss or fitted), model="simulated/reflection"),
    )


def _task(options: argparse.Namespace, seed: int) -> Task:
    if options.task is None:
        if options.data is not None:
            raise DemoError("--data needs --task formula or --task finer")
        return conventions_task(seed)
    try:
        return _DATA_TASKS[options.task](options.data, seed=seed)
    except (ValueError, OSError) as error:
        raise DemoError(error) from error


# The real run -----------------------------------------------------------------------------------------------


def _real(options: argparse.Namespace) -> _Demo:
    task = _task(options, options.seed)
    lm = reachable_lm("--model", options.model, options.api_base)
    reflection_model = options.reflection_model or options.model
    reflection_lm = (
        lm if reflection_model == options.model else reachable_lm("--model", reflection_model, options.api_base)
    )
    headline = f"CombeeOptimizer with {options.model}, reflection by {reflection_model}. Calls may cost money."
    closing = "" if options.compare else "\nOnly the main run was made; --compare adds the flat call and the control."
    arms = _ARMS if options.compare else _ARMS[:1]
    return _Demo(headline, [_Trial(options.seed, task, lm, reflection_lm)], arms, options, closing)
