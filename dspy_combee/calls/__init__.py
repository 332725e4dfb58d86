"""Calls of language models, and the executors that make many of them at once."""
