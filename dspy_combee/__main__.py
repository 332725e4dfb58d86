"""`python -m dspy_combee`: the demo, playbooks from collected traces, and the report of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from dspy_combee.cli import demo, learn
from dspy_combee.report import report_main


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Those after the program's name. Default: the process's own.

    Returns:
        The exit status.
    """
    parser = _Parser(prog="python -m dspy_combee", description="Prompt learning from large minibatches, for DSPy.")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    demo.add_arguments(commands.add_parser("demo", help="learn a task and print what it brought"))
    learn.add_arguments(commands.add_parser("learn", help="grow a playbook from collected traces, without a program"))
    page = commands.add_parser("report", help="make the HTML report of a run that had a log_dir")
    page.add_argument("log_dir", metavar="LOG_DIR", type=Path, help="the log_dir of the run")
    page.add_argument("--out", metavar="FILE", type=Path, help="the file to write (default: LOG_DIR/report.html)")
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = {"demo": demo.run, "learn": learn.run, "report": _report}[
        options.command
    ]
    return run(options)


def _report(options: argparse.Namespace) -> int:
    try:
        file, count = report_main(options.log_dir, options.out)
    except (OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"Wrote {file} ({count} step{'' if count == 1 else 's'}).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
