"""The parts of the package depend on each other one way; ARCHITECTURE.md draws the same arrows."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# part -> the parts it may import. A part is a module or package of radixkv, or one of the other top-level packages.
ARROWS = {
    "radixkv.tokens": set(),
    "radixkv.cache": {"radixkv.tokens"},
    "radixkv.block_allocator": {"radixkv.cache"},
    "radixkv.sequence_blocks": {"radixkv.cache"},
    "radixkv.kv_manager": {
        "radixkv.block_allocator",
        "radixkv.cache",
        "radixkv.sequence_blocks",
        "radixkv.tokens",
    },
    "radixkv.replay": {"radixkv.kv_manager", "radixkv.block_allocator", "radixkv.cache", "radixkv.tokens"},
    "radixkv.bounds": {"radixkv.cache", "radixkv.tokens"},
    "radixkv.batch": {"radixkv.kv_manager"},
    "radixkv.request": {"radixkv.cache"},
    "radixkv.sequence": {"radixkv.cache", "radixkv.kv_manager", "radixkv.request"},
    "radixkv.ordering": {"radixkv.sequence"},
    "radixkv.waiting": {"radixkv.cache", "radixkv.ordering", "radixkv.sequence"},
    "radixkv.running": {
        "radixkv.batch",
        "radixkv.block_allocator",
        "radixkv.kv_manager",
        "radixkv.sequence",
        "radixkv.tokens",
    },
    "radixkv.scheduler": {
        "radixkv.batch",
        "radixkv.block_allocator",
        "radixkv.cache",
        "radixkv.kv_manager",
        "radixkv.request",
        "radixkv.running",
        "radixkv.sequence",
        "radixkv.tokens",
        "radixkv.waiting",
    },
    "radixkv.model": {"radixkv.request", "radixkv_kernels"},
    "radixkv.generation": {"radixkv.model", "radixkv.request"},
    "radixkv.held_signals": set(),
    "radixkv.selftest": {
        "radixkv.engine",
        "radixkv.model",
        "radixkv.request",
        "radixkv.sequence",
        "radixkv_kernels",
    },
    "radixkv.prompts": {"radixkv.model"},
    "radixkv.metrics": {"radixkv.generation", "radixkv.step_stats"},
    "radixkv.stepper": {
        "radixkv.batch",
        "radixkv.generation",
        "radixkv.held_signals",
        "radixkv.kv_manager",
        "radixkv.metrics",
        "radixkv.model",
        "radixkv.runner",
        "radixkv.scheduler",
        "radixkv.sequence",
        "radixkv.step_stats",
    },
    "radixkv.engine": {
        "radixkv.cache",
        "radixkv.generation",
        "radixkv.held_signals",
        "radixkv.kv_manager",
        "radixkv.metrics",
        "radixkv.model",
        "radixkv.prompts",
        "radixkv.replay",
        "radixkv.request",
        "radixkv.runner",
        "radixkv.scheduler",
        "radixkv.sequence_blocks",
        "radixkv.step_stats",
        "radixkv.stepper",
    },
    "radixkv.inspect": {"radixkv.cache", "radixkv.replay", "radixkv.tokens", "radixkv.workloads"},
    "radixkv.step_stats": {"radixkv.kv_manager"},
    "radixkv.tree_plans": {"radixkv.batch", "radixkv.model", "radixkv_kernels"},
    "radixkv.runner": {
        "radixkv.batch",
        "radixkv.kv_manager",
        "radixkv.model",
        "radixkv.tree_plans",
        "radixkv_kernels",
    },
    "radixkv.workloads": {"radixkv.cache", "radixkv.tokens"},
    "radixkv.routing": {"radixkv.cache", "radixkv.tokens"},
    "radixkv.simulate": {
        "radixkv.batch",
        "radixkv.cache",
        "radixkv.model_shapes",
        "radixkv.request",
        "radixkv.scheduler",
        "radixkv.sequence",
        "radixkv.step_stats",
        "radixkv.tokens",
        "radixkv.workloads",
    },
    "radixkv.fleet": {
        "radixkv.batch",
        "radixkv.cache",
        "radixkv.routing",
        "radixkv.simulate",
        "radixkv.step_stats",
        "radixkv.workloads",
    },
    "radixkv.ray_replicas": {"radixkv.cache", "radixkv.engine", "radixkv.request", "radixkv.routing"},
    "radixkv.model_shapes": set(),
    "radixkv_kernels": set(),
    "experiments": {"radixkv", "radixkv_kernels"},
}
WITHOUT_TORCH = (
    "radixkv.tokens",
    "radixkv.cache",
    "radixkv.kv_manager",
    "radixkv.replay",
    "radixkv.bounds",
    "radixkv.workloads",
    "radixkv.inspect",
    "radixkv.scheduler",
    "radixkv.routing",
    "radixkv.simulate",
    "radixkv.fleet",
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
