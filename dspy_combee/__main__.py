"""`python -m dspy_combee`: the demo."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from dspy_combee import demo


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
    options = parser.parse_args(arguments)
    return demo.run(options)


if __name__ == "__main__":
    sys.exit(main())
