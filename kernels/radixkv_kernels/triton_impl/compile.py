"""Compiles one kernel for a GPU that need not be there, and reads what came out of it from the binary.

Uses the assembler and disassemblers that triton's wheel brings. Does not work under TRITON_INTERPRET.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_MMA_KINDS = {
    "tcgen05": r"\bUTC[A-Z]*MMA\b",
    "wgmma": r"\b[HIQ]GMMA\b",
    "mma.sync": r"\b[HIQ]MMA\b",
    "fma": r"\bFFMA\b",
}
_ARITHMETIC = r"\b(FADD|FMUL|FFMA|FMNMX|MUFU\.\w+|HGMMA|HMMA|UTC[A-Z]*MMA)\b"


@dataclasses.dataclass(frozen=True)
class Report:
    """What a compiled kernel takes, per thread (registers, spills) and per program (shared memory)."""

    registers: int
    spills: int
    """Instructions that move registers to or from local memory."""
    shared_bytes: int
    mma: str
    """"tcgen05", "wgmma", "mma.sync", "mfma", "fma" or "none"."""
    warps: tuple[tuple[int, ...], ...]
    """How the warps lie over each MMA result, as (along M, along N)."""
    arithmetic: tuple[tuple[str, int], ...]
    """Counts of floating-point instructions by opcode: equal counts and layouts hint at equal arithmetic."""


def compile_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], aligned: set[str], arch: str, warps: int, stages: int
) -> Report:
    """Compiles `kernel` for `arch` ("sm_90", "gfx942") with the options of every launch, in about a second.

    types: triton's type of each argument that is not in `constants` ("*bf16", "i32"). aligned: arguments that a launch
    would find divisible by 16. Raises what triton raises where the kernel does not compile.
    """
    names = [parameter.name for parameter in kernel.params]
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    amd = arch.startswith("gfx")
    target = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=target, options=options)
    layouts = re.findall(r"_mma<\{[^}]*warpsPerCTA = \[([\d, ]+)\]", compiled.asm["ttgir"])
    warp_layouts = tuple(sorted({tuple(int(n) for n in layout.split(",")) for layout in layouts}))
    if amd:
        return _read_amd(compiled, warp_layouts)
    return _read_nvidia(compiled, warp_layouts)


def _read_nvidia(compiled: Any, warp_layouts: tuple[tuple[int, ...], ...]) -> Report:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        code = _run("nvdisasm", "-c", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None
    counts: dict[str, int] = {}
    for opcode in re.findall(_ARITHMETIC, code):
        counts[opcode] = counts.get(opcode, 0) + 1
    return Report(
        registers=int(registers[1]),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared_bytes=compiled.metadata.shared,
        mma=next((kind for kind, pattern in _MMA_KINDS.items() if re.search(pattern, code)), "none"),
        warps=warp_layouts,
        arithmetic=tuple(sorted(counts.items())),
    )


def _read_amd(compiled: Any, warp_layouts: tuple[tuple[int, ...], ...]) -> Report:
    code = compiled.asm["amdgcn"]

    def count(field: str) -> int:
        found = re.search(rf"\.{field}:\s+(\d+)", code)
        return int(found[1]) if found else 0

    return Report(
        registers=count("vgpr_count"),
        spills=count("vgpr_spill_count"),
        shared_bytes=compiled.metadata.shared,
        mma="mfma" if "v_mfma" in code else "fma",
        warps=warp_layouts,
        arithmetic=(),
    )


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
