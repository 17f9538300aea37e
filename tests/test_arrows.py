"""The parts of the package depend on each other one way; ARCHITECTURE.md draws the same arrows."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# part -> the parts it may import. A part is a module or package of radixkv, or one of the other top-level packages.
ARROWS = {
    "radixkv.cache.tokens": set(),
    "radixkv.cache": {"radixkv.cache.tokens"},
    "radixkv.blocks.allocator": {"radixkv.cache"},
    "radixkv.blocks.sequence_blocks": {"radixkv.cache"},
    "radixkv.blocks.kv_manager": {
        "radixkv.blocks.allocator",
        "radixkv.cache",
        "radixkv.blocks.sequence_blocks",
        "radixkv.cache.tokens",
    },
    "radixkv.blocks.replay": {
        "radixkv.blocks.kv_manager",
        "radixkv.blocks.allocator",
        "radixkv.cache",
        "radixkv.cache.tokens",
    },
    "radixkv.blocks.bounds": {"radixkv.cache", "radixkv.cache.tokens"},
    "radixkv.scheduling.batch": {"radixkv.blocks.kv_manager"},
    "radixkv.scheduling.request": {"radixkv.cache"},
    "radixkv.scheduling.sequence": {"radixkv.cache", "radixkv.blocks.kv_manager", "radixkv.scheduling.request"},
    "radixkv.scheduling.ordering": {"radixkv.scheduling.sequence"},
    "radixkv.scheduling.waiting": {"radixkv.cache", "radixkv.scheduling.ordering", "radixkv.scheduling.sequence"},
    "radixkv.scheduling.running": {
        "radixkv.scheduling.batch",
        "radixkv.blocks.allocator",
        "radixkv.blocks.kv_manager",
        "radixkv.scheduling.sequence",
        "radixkv.cache.tokens",
    },
    "radixkv.scheduling.scheduler": {
        "radixkv.scheduling.batch",
        "radixkv.blocks.allocator",
        "radixkv.cache",
        "radixkv.blocks.kv_manager",
        "radixkv.scheduling.request",
        "radixkv.scheduling.running",
        "radixkv.scheduling.sequence",
        "radixkv.cache.tokens",
        "radixkv.scheduling.waiting",
    },
    "radixkv.engine.model": {"radixkv.scheduling.request", "radixkv_kernels"},
    "radixkv.engine.generation": {"radixkv.engine.model", "radixkv.scheduling.request"},
    "radixkv.engine.held_signals": set(),
    "radixkv.engine.selftest": {
        "radixkv.engine.engine",
        "radixkv.engine.model",
        "radixkv.scheduling.request",
        "radixkv.scheduling.sequence",
        "radixkv_kernels",
    },
    "radixkv.engine.prompts": {"radixkv.engine.model"},
    "radixkv.engine.metrics": {"radixkv.engine.generation", "radixkv.scheduling.step_stats"},
    "radixkv.engine.stepper": {
        "radixkv.scheduling.batch",
        "radixkv.engine.generation",
        "radixkv.engine.held_signals",
        "radixkv.blocks.kv_manager",
        "radixkv.engine.metrics",
        "radixkv.engine.model",
        "radixkv.engine.runner",
        "radixkv.scheduling.scheduler",
        "radixkv.scheduling.sequence",
        "radixkv.scheduling.step_stats",
    },
    "radixkv.engine.engine": {
        "radixkv.cache",
        "radixkv.engine.generation",
        "radixkv.engine.held_signals",
        "radixkv.blocks.kv_manager",
        "radixkv.engine.metrics",
        "radixkv.engine.model",
        "radixkv.engine.prompts",
        "radixkv.blocks.replay",
        "radixkv.scheduling.request",
        "radixkv.engine.runner",
        "radixkv.scheduling.scheduler",
        "radixkv.blocks.sequence_blocks",
        "radixkv.scheduling.step_stats",
        "radixkv.engine.stepper",
    },
    "radixkv.inspect": {"radixkv.cache", "radixkv.blocks.replay", "radixkv.cache.tokens", "radixkv.traces"},
    "radixkv.scheduling.step_stats": {"radixkv.blocks.kv_manager"},
    "radixkv.engine.tree_plans": {"radixkv.scheduling.batch", "radixkv.engine.model", "radixkv_kernels"},
    "radixkv.engine.runner": {
        "radixkv.scheduling.batch",
        "radixkv.blocks.kv_manager",
        "radixkv.engine.model",
        "radixkv.engine.tree_plans",
        "radixkv_kernels",
    },
    "radixkv.traces": {"radixkv.cache", "radixkv.cache.tokens"},
    "radixkv.fleet.routing": {"radixkv.cache", "radixkv.cache.tokens"},
    "radixkv.simulate": {
        "radixkv.scheduling.batch",
        "radixkv.cache",
        "radixkv.simulate.model_shapes",
        "radixkv.scheduling.request",
        "radixkv.scheduling.scheduler",
        "radixkv.scheduling.sequence",
        "radixkv.scheduling.step_stats",
        "radixkv.cache.tokens",
        "radixkv.traces",
    },
    "radixkv.fleet.simulated": {
        "radixkv.scheduling.batch",
        "radixkv.cache",
        "radixkv.fleet.routing",
        "radixkv.simulate",
        "radixkv.scheduling.step_stats",
        "radixkv.traces",
    },
    "radixkv.fleet.ray": {
        "radixkv.cache",
        "radixkv.engine.engine",
        "radixkv.scheduling.request",
        "radixkv.fleet.routing",
    },
    "radixkv.simulate.model_shapes": set(),
    "radixkv_kernels": set(),
    "experiments": {"radixkv", "radixkv_kernels"},
}
WITHOUT_TORCH = (
    "radixkv.cache.tokens",
    "radixkv.cache",
    "radixkv.blocks.kv_manager",
    "radixkv.blocks.replay",
    "radixkv.blocks.bounds",
    "radixkv.traces",
    "radixkv.inspect",
    "radixkv.scheduling.scheduler",
    "radixkv.fleet.routing",
    "radixkv.simulate",
    "radixkv.fleet.simulated",
)
OURS = ("radixkv", "radixkv_kernels", "experiments")


def modules():
    for folder in (ROOT, ROOT / "kernels"):
        for name in OURS:
            for path in sorted((folder / name).rglob("*.py")):
                parts = path.relative_to(folder).with_suffix("").parts
                yield ".".join(parts).removesuffix(".__init__"), path


def part_of(module):
    head, _, rest = module.partition(".")
    return f"{head}.{rest.partition('.')[0]}" if head == "radixkv" and rest else head


def imports(path):
    """Yields every module that a file imports, those inside functions too; `if TYPE_CHECKING` blocks do not run."""
    tree = ast.parse(path.read_text())
    unused = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in unused:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:  # stays inside its package
                continue
            # `from package import name` may mean a module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda value: str(value).replace(str(ROOT), ""))
def test_imports_follow_the_arrows(module, path):
    part = part_of(module)
    if part == "radixkv":
        assert not [name for name in imports(path) if name.split(".")[0] in OURS]
        return
    assert part in ARROWS, f"{part}: a new part; say here and in ARCHITECTURE.md what it may import"
    for imported in imports(path):
        if imported.split(".")[0] in OURS:
            target = part_of(imported)
            allowed = target == part or target in ARROWS[part] or target.split(".")[0] in ARROWS[part]
            assert allowed, f"{module} imports {imported}"


def test_the_arrows_make_no_circle():
    done = set()
    while len(done) < len(ARROWS):
        ready = {part for part, targets in ARROWS.items() if part not in done and targets & ARROWS.keys() <= done}
        assert ready, f"a circle among {ARROWS.keys() - done}"
        done |= ready


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_importing_it_loads_no_torch(part):
    code = f"import sys, {part}; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    for name, _ in modules():
        if part_of(name) == part:
            code = f"import {name}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
