"""`python -m dspy_combee learn`: a playbook from collected traces, without a program."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dspy

from dspy_combee import Playbook, PlaybookOptimizer, Trace, TreeAggregator, load_traces
from dspy_combee.cli.common import CommandError, check_writable, positive, reachable_lm
from dspy_combee.playbook.records import PlaybookStep
from dspy_combee.records.errors import ReflectionError
from dspy_combee.testing import SimulatedLM, playbook_roles
from dspy_combee.traces import ON_ERROR, TraceCollection, known_formats

DESCRIPTION = """\
Grow a playbook from the traces in a file or a folder: short bullets of advice that an assistant can be given. Nothing
is run but the reflection model. Formats: our JSON lines, ATIF trajectories, Terminal-Bench rows. What looks like a
secret is redacted. The provider's key is read from the environment (for example OPENAI_API_KEY); calls cost money."""
SIMULATED = """\
SIMULATED: no language model is called. The simulated one knows only lessons of the form
"Convention TOPIC: statement." in the feedback of the traces, and loses some. It shows the steps, not a result."""


class Task(dspy.Signature):  # type: ignore[metaclass]
    """Do the task that you are given, with the tools that you have."""

    task: str = dspy.InputField()
    result: str = dspy.OutputField()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("traces", metavar="TRACES", type=Path, help="a file or a folder of traces")
    add("--out", metavar="PLAYBOOK", type=Path, required=True, help="the file to write: JSON if it ends in .json")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--reflection-model", metavar="NAME", help="as dspy.LM takes it (openai/gpt-4o-mini)")
    model.add_argument("--simulate", action="store_true", help="a simulated model instead, to see how it goes")
    add("--api-base", metavar="URL", help="address of the model's server; DSPy wants some key set for it too")
    add("--num-threads", metavar="N", type=positive, default=8, help="calls in flight at most (default: 8)")
    add("--minibatch-size", metavar="N", type=positive, help="traces per step (default: 30; timed from 150 traces on)")
    add("--epochs", metavar="N", type=positive, default=1, help="passes over the traces (default: 1)")
    add("--playbook", metavar="START", type=Path, help="the playbook to start from")
    add("--max-context-tokens", metavar="N", type=positive, help="what one call may read; longer traces are cut")
    add("--max-cost", metavar="DOLLARS", type=float, help="end when so much has been spent")
    add("--log-dir", metavar="FOLDER", type=Path, help="keep state and steps: go on from there, make a report of it")
    add("--seed", metavar="N", type=int, default=0, help="seed of order and shuffles (default: 0)")
    add("--format", choices=known_formats(), default="auto", help="form of the traces (default: auto)")
    add("--on-error", choices=ON_ERROR, default="raise", help="what to do at a bad trace (default: raise)")
    add("--limit", metavar="N", type=positive, help="read the first N traces only")


def run(options: argparse.Namespace) -> None:
    """Learn, printing a line for each step, and save the playbook; also what there is when an error ends the run."""
    start = _start(options)
    _check(options)
    traces = _read(options)
    optimizer = _optimizer(options, start, len(traces) * options.epochs)
    bad = traces.collection.counts.bad
    print(f"{len(traces):,} traces{f'; {bad:,} bad ones are left out' if bad else ''}.", flush=True)
    try:
        program = optimizer.compile(dspy.Predict(Task), traces=traces)
    except BaseException as error:
        best = getattr(error, "best_program", None)
        if best is not None and len(Playbook.from_program(best)):
            _save(best, options.out, "What was learned until then")
        raise
    result = program.detailed_results
    failures = [one.error for step in result.steps for one in (*step.reductions, *step.reflections) if one.error]
    if failures and not len(Playbook.from_program(program)):
        raise ReflectionError(f"nothing was learned, and {options.out} is not written: {failures[-1]}")
    _save(program, options.out, "The playbook")
    spent = result.spent.usage_in("reflection")
    cost = f", ${spent.cost:.2f}" if spent.cost else ""
    print(f"{spent.calls:,} calls, {spent.input_tokens:,} tokens in, {spent.output_tokens:,} out{cost}.")


def _start(options: argparse.Namespace) -> Playbook | None:
    try:
        return Playbook.load(options.playbook) if options.playbook else None
    except (OSError, ValueError) as error:
        raise CommandError(f"--playbook {options.playbook}: {error}") from error


def _check(options: argparse.Namespace) -> None:
    out, start = options.out, options.playbook
    check_writable("--out", out)
    if out.exists() and not (start is not None and out.samefile(start)):
        raise CommandError(f"--out {out} is there already: give another one, or go on from it with --playbook {out}")
    if options.simulate and (options.api_base or options.max_cost):
        raise CommandError("--api-base and --max-cost need --reflection-model")


class _TracesOfAnyProgram(Sequence[Trace]):
    """Take the first traces of a collection as traces of the one program that learns."""

    def __init__(self, collection: TraceCollection, limit: int | None) -> None:
        self.collection = collection
        self.limit = limit

    def __len__(self) -> int:
        return min(len(self.collection), self.limit or len(self.collection))

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return [self[index] for index in range(len(self))[position]]
        return replace(self.collection[range(len(self))[position]], predictor=None)


def _read(options: argparse.Namespace) -> _TracesOfAnyProgram:
    try:
        collection = load_traces(options.traces, options.format, options.on_error)
    except FileNotFoundError as error:
        raise CommandError(error) from error
    print(f"{SIMULATED}\n" if options.simulate else f"Reflection by {options.reflection_model}: calls cost money.")
    print(f"Reading {options.traces} ...", flush=True)
    if not collection:
        raise CommandError(f"{options.traces} holds no traces")
    return _TracesOfAnyProgram(collection, options.limit)


def _optimizer(options: argparse.Namespace, start: Playbook | None, total: int) -> PlaybookOptimizer:
    read = 0

    def print_step(step: PlaybookStep) -> None:
        nonlocal read
        read += step.n
        note = f"  ({step.reason[:200]})" if step.reason else ""
        print(
            f"step {step.iteration}: {read:,} of {total:,} traces, {step.bullets} bullets, {step.tokens:,} tokens, "
            f"{step.seconds:.1f} s{note}",
            flush=True,
        )

    try:
        return PlaybookOptimizer(
            lambda gold, pred, trace=None, pred_name=None, pred_trace=None: 0.0,  # never called: nothing is run
            reflection_lm=_lm(options),
            minibatch_size=options.minibatch_size or "auto",
            num_epochs=options.epochs,
            num_threads=options.num_threads,
            seed=options.seed,
            aggregator=TreeAggregator(max_context_tokens=options.max_context_tokens),
            playbook=start,
            log_dir=options.log_dir,
            max_reflection_cost=options.max_cost,
            step_callbacks=[print_step],
            track_stats=True,
            verbose=False,
        )
    except (ValueError, TypeError) as error:
        raise CommandError(error) from error


def _lm(options: argparse.Namespace) -> dspy.LM:
    if options.simulate:
        return SimulatedLM(options.seed, roles=playbook_roles(), model="simulated/reflection")
    return reachable_lm("--reflection-model", options.reflection_model, options.api_base)


def _save(program: Any, out: Path, what: str) -> None:
    playbook = Playbook.from_program(program)
    playbook.save(out)
    print(f"{what} is in {out}: {len(playbook)} bullet{'' if len(playbook) == 1 else 's'}.", flush=True)
