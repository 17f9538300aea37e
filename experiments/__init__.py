"""One script a question. Run one with `python -m experiments.NAME --help`."""

import os

# As the Makefile has it, and before anything loads torch: threads that spin while they wait make small products ten
# times as slow where other work shares the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
