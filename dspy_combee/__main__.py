"""`python -m dspy_combee`: see `dspy_combee.cli`."""

import sys

from dspy_combee.cli import main

if __name__ == "__main__":
    sys.exit(main())
