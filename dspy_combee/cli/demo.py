"""`python -m dspy_combee demo`: `CombeeOptimizer` from end to end, beside one flat reflection call and a control."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError

from dspy_combee import CombeeOptimizer, ThreadExecutor
from dspy_combee.cli.common import CommandError, check_writable, positive, reachable_lm
from dspy_combee.testing import (
    CapacityLoss,
    Loss,
    PowerLoss,
    Reflector,
    SimulatedLM,
    Task,
    conventions_task,
    count_tokens,
    shuffled_feedback,
)

DESCRIPTION = """\
Learn a task with CombeeOptimizer and print what it brought: accuracy on held-out examples before and after, beside
the same run with one flat reflection call and a control whose feedback is shuffled between the examples.
Without --model the language model is simulated and needs no key. With --model only the first run is made; the
provider's key is read from the environment (for example OPENAI_API_KEY), and calls may cost money."""
SIMULATED = """\
SIMULATED: no language model is called. A simulated student does what its instruction states, and a
simulated reflection model loses lessons as its prompt grows, by a law fitted on the flat figures of the
paper. The figures show how the method treats lessons, not how good a language model is."""

SIMULATED_SEEDS = 5
_ARMS = {
    # title: number of groups (with one a step makes one flat reflection call), and whether feedback is shuffled
    "Combee": (None, False),
    "one flat reflection call": (1, False),
    "control: Combee, shuffled feedback": (None, True),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the demo."""
    add = parser.add_argument
    add("--model", metavar="NAME", help="the model that does the task, as dspy.LM takes it (openai/gpt-4o-mini)")
    add("--reflection-model", metavar="NAME", help="the model that reflects (default: the same as --model)")
    add("--api-base", metavar="URL", help="address of the models' server; DSPy wants some key set for it too")
    add("--num-threads", metavar="N", type=positive, default=8, help="calls in flight at most (default: 8)")
    add("--minibatch-size", metavar="N", type=positive, default=40, help="examples per step, n (default: 40)")
    add("--budget", metavar="N", type=positive, default=600, help="metric calls of one run (default: 600)")
    add("--seed", metavar="N", type=int, default=0, help="seed of data, minibatches and shuffles (default: 0)")
    add("--save", metavar="FILE.json", type=Path, help="save the learned program to FILE.json")


def run(options: argparse.Namespace) -> None:
    """Run every arm, printing each as it ends, then print what the first run learned."""
    if options.save is not None:
        check_writable("--save", options.save, ".json")
    lms = _real_lms(options)
    tasks = [conventions_task(options.seed + number) for number in range(1 if lms else SIMULATED_SEEDS)]
    train, val, test = (len(split) for split in (tasks[0].trainset, tasks[0].valset, tasks[0].testset))
    needed = 2 * (val + options.minibatch_size)
    if options.minibatch_size > train or options.budget < needed:
        raise CommandError(
            f"--minibatch-size {options.minibatch_size} and --budget {options.budget} do not go together: there are "
            f"{train} examples, and a step takes {needed} metric calls"
        )
    print(
        f"{SIMULATED if lms is None else f'CombeeOptimizer with {options.model}. Calls may cost money.'}\n\n"
        f"Task: {tasks[0].name}; {train} training, {val} validation and {test} held-out examples.\n"
        f"Minibatch n = {options.minibatch_size}, budget {options.budget} metric calls, {options.num_threads} threads; "
        f"means over seeds: {len(tasks)}.\n\n{'held-out accuracy in %':<36}{'before':>8}{'after':>7}{'steps':>7}"
        f"{'accepted':>10}{'seconds':>9}{'LM calls':>10}{'tokens':>11}"
    )
    first, *_ = [_run_arm(title, tasks, lms, options) for title in (_ARMS if lms is None else ["Combee"])]
    if lms is None:
        print("\nThe same with the other loss of the simulation, at most 4 lessons per reflection call:")
        for title in list(_ARMS)[:2]:
            _run_arm(title, tasks, lms, options, CapacityLoss())
    _explain(first, options.seed)
    if options.save is not None:
        try:
            first.save(options.save)
        except Exception as error:  # DSPy makes a RuntimeError of whatever it is, with a guess at the cause.
            raise CommandError(f"--save {options.save} cannot be written: {error.__context__ or error}") from error
        print(f"\nSaved to {options.save}.")
    if lms is None:
        print("\nPoint it at a language model with --model (the provider's key is read from the environment).")


def _real_lms(options: argparse.Namespace) -> tuple[dspy.LM, dspy.LM] | None:
    if options.model is None:
        for name in ("reflection_model", "api_base"):
            if getattr(options, name):
                raise CommandError(f"--{name.replace('_', '-')} needs --model")
        return None
    lm = reachable_lm("--model", options.model, options.api_base)
    if options.reflection_model in (None, options.model):
        return lm, lm
    return lm, reachable_lm("--reflection-model", options.reflection_model, options.api_base)


def _simulated_lms(task: Task, seed: int, loss: Loss | None) -> tuple[dspy.LM, dspy.LM]:
    example = task.trainset[0]
    record = f"{example.inputs().toDict()}{task.metric(example, dspy.Prediction()).feedback}"
    fitted = PowerLoss(one_record_tokens=count_tokens(record) + 100)  # the rest of the message: about 100 tokens
    reflection_lm = SimulatedLM(seed, reflector=Reflector(loss or fitted), model="simulated/reflection")
    return SimulatedLM(seed, model="simulated/student"), reflection_lm


def _run_arm(
    title: str,
    tasks: Sequence[Task],
    lms: tuple[dspy.LM, dspy.LM] | None,
    options: argparse.Namespace,
    loss: Loss | None = None,
) -> Any:
    """Learn every task in one way and print what it brought, in the mean; return the first program."""
    runs = [
        _learn(title, task, seed, lms or _simulated_lms(task, seed, loss), options)
        for seed, task in enumerate(tasks, options.seed)
    ]
    programs, *measured = zip(*runs, strict=True)
    before, after, seconds = map(mean, measured)
    results = [program.detailed_results for program in programs]
    accepted = mean(sum(step.accepted for step in result.steps) for result in results)
    usage = [result.spent.usage for result in results]
    print(
        f"{title:<36}{before:>8.1f}{after:>7.1f}{mean(len(result.steps) for result in results):>7.1f}{accepted:>10.1f}"
        f"{seconds:>9.1f}{mean(one.calls for one in usage):>10,.0f}"
        f"{mean(one.input_tokens + one.output_tokens for one in usage):>11,.0f}",
        flush=True,
    )
    if len(runs) > 1:
        print(f"{'  after, seed by seed':<44}" + "".join(f"{one:>7.1f}" for one in measured[1]), flush=True)
    return programs[0]


def _learn(
    title: str, task: Task, seed: int, lms: tuple[dspy.LM, dspy.LM], options: argparse.Namespace
) -> tuple[Any, float, float, float]:
    """Return the program, its accuracy before and after, and the seconds that learning took."""
    num_groups, shuffled = _ARMS[title]
    taught = shuffled_feedback(task, seed) if shuffled else task
    optimizer = CombeeOptimizer(
        metric=taught.metric,
        max_metric_calls=options.budget,
        reflection_lm=lms[1],
        reflection_minibatch_size=options.minibatch_size,
        num_threads=options.num_threads,
        num_groups=num_groups,
        seed=seed,
        track_stats=True,
        use_merge=False,
        verbose=options.model is not None,  # a simulated run is over before a progress line is of use
    )
    with dspy.context(lm=lms[0]):
        before = _accuracy(task, task.program, options.num_threads)
        started = time.perf_counter()
        program = optimizer.compile(taught.program, taught.trainset, valset=taught.valset)
        seconds = time.perf_counter() - started
        return program, before, _accuracy(task, program, options.num_threads), seconds


def _accuracy(task: Task, program: Any, num_threads: int) -> float:
    """Return accuracy on the held-out examples in percent; a reply that cannot be parsed is wrong."""

    def score(example: dspy.Example) -> float:
        try:
            return float(task.metric(example, program(**example.inputs())).score)
        except AdapterParseError:
            return 0.0

    return 100 * mean(ThreadExecutor(num_threads).map(score, task.testset))


def _explain(program: Any, seed: int) -> None:
    result = program.detailed_results
    print(f"\nThe run of Combee with seed {seed}, {result.total_metric_calls} metric calls:")
    for number, step in enumerate(result.steps, start=1):
        verdict = "accepted" if step.accepted else f"not accepted ({step.reason or 'no reason given'})"
        before, after = (f"{100 * mean(s):.0f}%" if s else "none" for s in (step.scores_before, step.scores_after))
        print(f"  step {number}: n={step.n}, k={step.k}, minibatch {before} -> {after}, {verdict}")
    for phase, usage in result.spent.usage_by_phase.items():
        print(f"  {phase}: {usage.calls} LM calls, {usage.input_tokens:,} tokens in, {usage.output_tokens:,} out")
    for name, predictor in program.named_predictors():
        print(f"\nLearned instruction of {name}:")
        print("\n".join(f"  {line}" for line in predictor.signature.instructions.splitlines()))
