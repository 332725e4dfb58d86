"""The commands of `python -m dspy_combee`."""
