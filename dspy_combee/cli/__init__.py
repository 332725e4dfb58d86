"""`python -m dspy_combee`: the demo, playbooks from collected traces, and the report of a run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from dspy.utils.exceptions import LMError

from dspy_combee.cli import demo, learn
from dspy_combee.cli.common import CommandError, quiet_logs
from dspy_combee.records.errors import CombeeError
from dspy_combee.report import report_main
from dspy_combee.traces import TraceError


class _Parser(argparse.ArgumentParser):
    """Report an error as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; an error that it may meet becomes one line.

    Args:
        arguments: Those after the program's name. Default: the process's own.

    Returns:
        The exit status: 0, 2 for options or files that are no good, 1 for a run that failed, 130 for Ctrl-C.
    """
    parser = _Parser(prog="python -m dspy_combee", description="Prompt learning from large minibatches, for DSPy.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, summary: str, description: str, run: Callable[[argparse.Namespace], None]) -> _Parser:
        form = argparse.RawDescriptionHelpFormatter
        made: _Parser = commands.add_parser(name, help=summary, description=description, formatter_class=form)
        made.set_defaults(run=run)
        return made

    demo.add_options(add("demo", "learn a task and print what it brought", demo.DESCRIPTION, demo.run))
    learn.add_options(
        add("learn", "grow a playbook from collected traces, without a program", learn.DESCRIPTION, learn.run)
    )
    report = add("report", "make the HTML report of a run that had a log_dir", "", _report)
    report.add_argument("log_dir", metavar="LOG_DIR", type=Path, help="the log_dir of the run")
    report.add_argument("--out", metavar="FILE", type=Path, help="the file to write (default: LOG_DIR/report.html)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its price map is not worth a download
    try:
        with quiet_logs():
            options.run(options)
    except (CommandError, TraceError, ImportError) as error:
        return _fail(error, 2)
    except (LMError, CombeeError, OSError, ValueError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


def _fail(error: object, status: int) -> int:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    print(f"error: {lines[0][:500]}", file=sys.stderr)
    return status


def _report(options: argparse.Namespace) -> None:
    try:
        file, count = report_main(options.log_dir, options.out)
    except (OSError, ValueError) as error:
        raise CommandError(error) from error
    print(f"Wrote {file} ({count} step{'' if count == 1 else 's'}).")
