"""One script a question. Run one with `python -m experiments.NAME --help`."""
