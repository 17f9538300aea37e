"""Would the tests notice? Plants one fault at a time in a copy of the packages, and runs tests until one fails.

    python tests/mutants/run.py            all of them, a table, exit status 1 if one survives
    python tests/mutants/run.py tail pin   those whose name contains one of these words

A fault is a piece of Python in a function, and what it is replaced by (`faults.py`). It is found by syntax tree
(`anchors.py`), so a fault survives a new layout and a move to another file. Where the rule itself is rewritten,
`test_anchors.py` fails until `faults.py` says anew what would be wrong.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from anchors import planted, read_modules
from faults import FAULTS

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600


def caught_by(copy, tests):
    """Returns the first of the tests that fails, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    environment = {
        "RADIXKV_SCRIPTS": "800",
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / ".h"),
    }
    done = subprocess.run(
        [*command, "--hypothesis-profile=mutants", *tests],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed is None:
        raise RuntimeError(f"no test failed, and yet:\n{done.stdout}{done.stderr}")
    return failed[1]


def main(words):
    unknown = [word for word in words if not any(word in fault.name for fault in FAULTS)]
    if unknown:
        names = "\n".join(f"  {fault.name}" for fault in FAULTS)
        print(f"{__doc__}\nno fault is called {', '.join(unknown)}; there are:\n{names}", file=sys.stderr)
        return 2
    faults = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    num_survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "radixkv"
        for name in ("radixkv", "kernels", "experiments", "tests", "pyproject.toml"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
            else:
                shutil.copy(source, copy / name)
        modules = read_modules(copy)
        for number, fault in enumerate(faults, 1):
            began = time.perf_counter()
            module, text = planted(modules, fault)
            module.path.write_text(text)
            try:
                test = caught_by(copy, fault.tests)
            except subprocess.TimeoutExpired:
                test = f"a hang (over {TIMEOUT_S} s)"
            module.path.write_text(module.text)
            num_survived += test is None
            where = module.path.relative_to(copy)
            took = time.perf_counter() - began
            print(
                f"{number:2}/{len(faults)}  {fault.name:58}{where!s:32}{test or 'SURVIVED'}  ({took:.0f} s)", flush=True
            )
    print(f"{len(faults) - num_survived} of {len(faults)} faults caught")
    return 1 if num_survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
