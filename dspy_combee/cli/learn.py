"""`python -m dspy_combee learn`: a playbook from collected traces, without a program."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, overload

import dspy

from dspy_combee.cli.command_line import CommandError, positive, reachable_lm, run_command
from dspy_combee.playbook import Playbook
from dspy_combee.playbook.records import PlaybookStep
from dspy_combee.playbook_optimizer import PlaybookOptimizer
from dspy_combee.records.errors import ReflectionError
from dspy_combee.reduce.tree import TreeAggregator
from dspy_combee.testing import SimulatedLM
from dspy_combee.testing.playbook_simulation import playbook_roles
from dspy_combee.traces import ON_ERROR, Trace, TraceCollection, TraceError, known_formats, load_traces

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
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


def run(options: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status: 0, 2 for options or files that are no good, 1 for a run that failed, 130 for Ctrl-C.
    """
    return run_command(lambda: _learn(options), (TraceError, ImportError), (ValueError,))


def _learn(options: argparse.Namespace) -> None:
    _check_out(options)
    traces = _of_no_program(options)
    print(f"{SIMULATED}\n" if options.simulate else f"Reflection by {options.reflection_model}: calls cost money.")
    print(f"Reading {options.traces} ...", flush=True)
    if not traces:
        raise CommandError(f"{options.traces} holds no traces")
    optimizer = _optimizer(options, _Progress(len(traces) * options.epochs))
    bad = traces.bad
    print(f"{len(traces):,} traces{f'; {bad:,} bad ones are left out' if bad else ''}.", flush=True)
    try:
        program = optimizer.compile(dspy.Predict(Task), traces=traces)
    except BaseException as error:
        best = getattr(error, "best_program", None)
        if best is not None and len(Playbook.from_program(best)):
            _save(best, options.out, "What was learned until then")
        raise
    steps = program.detailed_results.steps
    failures = [r.error for step in steps for r in step.reductions if r.error]
    failures += [item.error for step in steps for item in step.reflections if item.error]
    if failures and not len(Playbook.from_program(program)):
        raise ReflectionError(f"nothing was learned, and {options.out} is not written: {failures[-1]}")
    _save(program, options.out, "The playbook")
    spent = program.detailed_results.spent.usage_in("reflection")
    cost = "" if not spent.cost else f", ${spent.cost:.2f}"
    print(f"{spent.calls:,} calls, {spent.input_tokens:,} tokens in, {spent.output_tokens:,} out{cost}.")


def _check_out(options: argparse.Namespace) -> None:
    out, start = options.out, options.playbook
    if not out.parent.is_dir():
        raise CommandError(f"--out {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise CommandError(f"--out {out} is a folder; expected a file")
    if out.exists() and not (start is not None and start.exists() and out.samefile(start)):
        raise CommandError(f"--out {out} is there already: give another one, or go on from it with --playbook {out}")
    try:
        with tempfile.TemporaryFile(dir=out.resolve().parent):
            pass
    except OSError as error:
        raise CommandError(f"--out {out} cannot be written: {error}") from error
    if options.simulate and (options.api_base or options.max_cost):
        raise CommandError("--api-base and --max-cost need --reflection-model")


def _optimizer(options: argparse.Namespace, progress: _Progress) -> PlaybookOptimizer:
    try:
        start = Playbook.load(options.playbook) if options.playbook else None
    except (OSError, ValueError) as error:
        raise CommandError(f"--playbook {options.playbook}: {error}") from error
    try:
        return PlaybookOptimizer(
            _no_metric,
            reflection_lm=_lm(options),
            minibatch_size=options.minibatch_size or "auto",
            num_epochs=options.epochs,
            num_threads=options.num_threads,
            seed=options.seed,
            aggregator=TreeAggregator(max_context_tokens=options.max_context_tokens),
            playbook=start,
            log_dir=options.log_dir,
            max_reflection_cost=options.max_cost,
            step_callbacks=[progress],
            track_stats=True,
            verbose=False,
        )
    except (ValueError, TypeError) as error:
        raise CommandError(error) from error


def _no_metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
    raise NotImplementedError("nothing is run, so nothing is scored")


def _lm(options: argparse.Namespace) -> Any:
    """The reflection LM."""
    if options.simulate:
        return SimulatedLM(options.seed, roles=playbook_roles(), model="simulated/reflection")
    return reachable_lm("--reflection-model", options.reflection_model, options.api_base)


def _save(program: Any, out: Path, what: str) -> None:
    playbook = Playbook.from_program(program)
    playbook.save(out)
    print(f"{what} is in {out}: {len(playbook)} bullet{'' if len(playbook) == 1 else 's'}.", flush=True)


class _Progress:
    """Prints a line for each step.

    Args:
        total: Traces to read.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.read = 0

    def __call__(self, step: PlaybookStep) -> None:
        self.read += step.n
        note = f"  ({step.reason[:200]})" if step.reason else ""
        print(
            f"step {step.iteration}: {self.read:,} of {self.total:,} traces, {step.bullets} bullets, "
            f"{step.tokens:,} tokens, {step.seconds:.1f} s{note}",
            flush=True,
        )


class _OfNoProgram(Sequence[Trace]):
    """The first traces of a collection, all of them taken as traces of whole programs."""

    def __init__(self, traces: TraceCollection, limit: int | None) -> None:
        self.traces = traces
        self.limit = limit

    @property
    def bad(self) -> int:
        """Bad traces that are left out."""
        return self.traces.counts.bad

    def __len__(self) -> int:
        return len(self.traces) if self.limit is None else min(self.limit, len(self.traces))

    def __iter__(self) -> Iterator[Trace]:
        return (replace(trace, predictor=None) for trace in islice(self.traces, self.limit))

    @overload
    def __getitem__(self, position: int) -> Trace: ...

    @overload
    def __getitem__(self, position: slice) -> list[Trace]: ...

    def __getitem__(self, position: int | slice) -> Trace | list[Trace]:
        wanted = range(len(self))[position]
        if isinstance(wanted, range):
            return [self[index] for index in wanted]
        return replace(self.traces[wanted], predictor=None)


def _of_no_program(options: argparse.Namespace) -> _OfNoProgram:
    try:
        return _OfNoProgram(load_traces(options.traces, options.format, options.on_error), options.limit)
    except FileNotFoundError as error:
        raise CommandError(error) from error
