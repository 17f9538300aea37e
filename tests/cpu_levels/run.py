"""Do rows keep their bits on other CPUs? Both self-tests and the tests of bits under each level that this CPU can be.

    python tests/cpu_levels/run.py             all levels, a table, exit status 1 if one fails
    python tests/cpu_levels/run.py AVX2 Intel  those whose name has all of these words
    python tests/cpu_levels/run.py --list      which there are, and which this CPU can be

A level is what the libraries are told of the CPU, in the environment of a process of its own: oneDNN's and ATen's
vector instructions, and whether MKL takes the paths of an Intel CPU or of AMD's (it is asked through three functions,
which a few lines of C replace; needs gcc). Each runs with one thread and with two. A level above the CPU's is skipped
by name.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PYTEST = ("pytest", "-q", "-x", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-m", "not slow")
RUNS = {
    "kernels' self-test": ("radixkv_kernels.selftest",),
    "engine's self-test": ("radixkv.engine.selftest", "--runs", "2"),
    "engine's, bfloat16": ("radixkv.engine.selftest", "--runs", "1", "--dtype", "bfloat16"),
    "rules": (*PYTEST, "tests/kernels/test_row_rules.py", "tests/kernels/test_selftest.py"),
    "elements": (*PYTEST, "tests/kernels/test_elementwise.py"),
    "attention": (*PYTEST, "tests/kernels/test_invariance.py"),
    "tree attention": (*PYTEST, "tests/kernels/test_tree_attention.py"),
    "model": (*PYTEST, "tests/engine/model/test_invariance.py"),
    "errors": (*PYTEST, "tests/kernels/test_feature_matrix.py", "tests/kernels/test_cases.py"),
}


class Level(NamedTuple):
    name: str
    flags: tuple[str, ...]
    """What /proc/cpuinfo has to list."""
    environment: dict[str, str]


def _level(name: str, flags: tuple[str, ...], onednn: str, aten: str, mkl: str) -> Level:
    return Level(
        name,
        flags,
        {"ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": aten, "MKL_ENABLE_INSTRUCTIONS": mkl},
    )


LEVELS = (
    Level("as it is", (), {}),
    _level("SSE4.1", ("sse4_1",), "SSE41", "default", "SSE4_2"),
    _level("AVX", ("avx",), "AVX", "default", "AVX"),
    _level("AVX2", ("avx2",), "AVX2", "avx2", "AVX2"),
    _level("AVX-512", ("avx512f",), "AVX512_CORE", "avx512", "AVX512"),
    _level("AVX-512 bf16", ("avx512_bf16",), "AVX512_CORE_BF16", "avx512", "AVX512"),
    _level("AMX", ("amx_bf16",), "AVX512_CORE_AMX", "avx512", "AVX512"),
)


def cpu() -> tuple[str, str, set[str]]:
    """(model, vendor, flags) of the first CPU; empty where Linux does not tell."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().split("\n\n")[0].splitlines() if path.exists() else []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return found.get("model name", "?"), found.get("vendor_id", "?"), set(found.get("flags", "").split())


def shim(maker: str, folder: str) -> str:
    """Compiles the replacement for MKL's questions; returns its path."""
    path = f"{folder}/{maker}.so"
    source = Path(__file__).parent / f"mkl_as_on_{maker}.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source], check=True)
    return path


def run(environment: dict[str, str]) -> list[str]:
    """Names of the runs that failed in such a process; their last lines are printed."""
    failed = []
    for name, arguments in RUNS.items():
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/kernels", "OMP_WAIT_POLICY": "PASSIVE", **environment},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            failed.append(name)
            print(f"  {name}: {done.stdout[-3000:]}{done.stderr[-2000:]}", flush=True)
    return failed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="levels whose name has all of these; all levels without")
    parser.add_argument("--list", action="store_true", help="only print the levels")
    given = parser.parse_args(arguments)
    words = given.words
    model, vendor, flags = cpu()
    print(f"on {model} ({vendor})", flush=True)
    other = "intel" if vendor == "AuthenticAMD" else "amd"
    rows, num_failed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        preload = {"LD_PRELOAD": shim(other, folder)}
        for mkl, more in (("its own MKL", {}), (f"MKL as on {other.capitalize().replace('Amd', 'AMD')}", preload)):
            for level in LEVELS:
                for threads in ("1", "2"):
                    name = f"{level.name}, {mkl}, {threads} thread{'s' if threads != '1' else ''}"
                    if not all(word in name for word in words):
                        continue
                    lacking = [flag for flag in level.flags if flag not in flags]
                    began = time.perf_counter()
                    if lacking:
                        verdict = f"skipped: this CPU has no {', '.join(lacking)}"
                    elif given.list:
                        verdict = "can run"
                    else:
                        failed = run({**level.environment, **more, "OMP_NUM_THREADS": threads})
                        num_failed += bool(failed)
                        took = time.perf_counter() - began
                        verdict = f"FAILED: {', '.join(failed)}" if failed else f"same bits ({took:.0f} s)"
                    rows.append((name, verdict))
                    print(f"{name:44}{verdict}", flush=True)
    if not given.list:
        print(f"\non {model} ({vendor}):\n\n| level | bits |\n|---|---|")
        for name, verdict in rows:
            print(f"| {name} | {verdict} |")
    return 1 if num_failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
