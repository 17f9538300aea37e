"""The folders of the package depend on each other one way, type-level imports included; ARCHITECTURE.md draws them.

`python tests/test_arrows.py` prints the picture that ARCHITECTURE.md shows.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# folder of radixkv -> the folders that it may import
ARROWS = {
    "cache": set(),
    "blocks": {"cache"},
    "traces": {"cache"},
    "integrations": {"blocks", "cache", "radixkv_kernels"},
    "scheduling": {"blocks", "cache"},
    "inspect": {"blocks", "cache", "traces"},
    "engine": {"blocks", "cache", "scheduling", "radixkv_kernels"},
    "simulate": {"cache", "scheduling", "traces"},
    "fleet": {"cache", "engine", "scheduling", "simulate", "traces"},
}
MOST_FLOORS = {"radixkv": 5, "radixkv_kernels": 4, "experiments": 3}
WITHOUT_TORCH = ("cache", "blocks", "traces", "scheduling", "inspect", "simulate", "fleet")
WITH_TORCH = ("radixkv.fleet.ray",)  # it has engines
PACKAGES = ("radixkv", "radixkv_kernels", "experiments")


def modules() -> dict[str, Path]:
    """Every module of ours by its name; a folder's own is its `__init__`."""
    found = {}
    for name in PACKAGES:
        folder = ROOT / "kernels" if name == "radixkv_kernels" else ROOT
        for path in sorted((folder / name).rglob("*.py")):
            found[".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()
FOLDERS = sorted(name for name, path in MODULES.items() if path.name == "__init__.py")


def imports(name: str) -> set[str]:
    """Every module of ours that a module imports: inside functions too, and where only types are checked."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")
                base = ".".join(filter(None, [*above[: len(above) - node.level + 1], base]))
            # `from folder import name` may mean a module
            found |= {full if (full := f"{base}.{alias.name}") in MODULES else base for alias in node.names}
    return {target for target in found if target.split(".")[0] in PACKAGES}


IMPORTS = {name: imports(name) for name in MODULES}


def rooms(folder: str) -> dict[str, set[str]]:
    """The modules and folders that lie in a folder -> those of them that each imports."""
    depth = folder.count(".") + 2
    found = defaultdict(set)
    for name, targets in IMPORTS.items():
        if name.startswith(f"{folder}."):
            room = ".".join(name.split(".")[:depth])
            inside = (".".join(target.split(".")[:depth]) for target in targets if target.startswith(f"{folder}."))
            found[room] |= {target for target in inside if target != room}
    return dict(found)


def floors(arrows: dict[str, set[str]]) -> dict[str, int]:
    """On which floor each room is: 1 for those that import none.

    Raises:
        AssertionError: some import each other in a circle.
    """
    found: dict[str, int] = {}
    while len(found) < len(arrows):
        ready = {room for room, targets in arrows.items() if room not in found and targets <= found.keys()}
        assert ready, f"a circle among {sorted(arrows.keys() - found.keys())}"
        found |= {room: 1 + max((found[target] for target in arrows[room]), default=0) for room in ready}
    return found


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("radixkv.")])
def test_imports_follow_the_arrows(name):
    folder = name.split(".")[1]
    assert folder in ARROWS, f"{name}: expected a module in one of {sorted(ARROWS)}"
    for target in IMPORTS[name]:
        package, _, rest = target.partition(".")
        to = rest.partition(".")[0] if package == "radixkv" else package
        assert to == folder or to in ARROWS[folder], f"{name} imports {target}"


def test_every_arrow_is_used():
    used = defaultdict(set)
    for name, targets in IMPORTS.items():
        if name.startswith("radixkv."):
            folder = name.split(".")[1]
            used[folder] |= {t.split(".")[1] if t.startswith("radixkv.") else t.split(".")[0] for t in targets}
    assert {folder: used[folder] - {folder} for folder in ARROWS} == ARROWS


def picture() -> str:
    """The folders and their arrows as a Mermaid graph, without the arrows that others imply."""
    arrows = ARROWS | {"experiments": set(ARROWS), "radixkv_kernels": set()}
    below = {folder: reachable(arrows, folder) for folder in arrows}
    lines = ["graph BT"]
    for folder, targets in arrows.items():
        for target in sorted(targets):
            if not any(target in below[other] for other in targets - {target}):
                lines.append(f"    {folder} --> {target}")
    return "\n".join(lines)


def reachable(arrows: dict[str, set[str]], folder: str) -> set[str]:
    return arrows[folder].union(*(reachable(arrows, target) for target in arrows[folder]))


def test_the_picture_is_of_these_arrows():
    assert f"```mermaid\n{picture()}\n```" in (ROOT / "ARCHITECTURE.md").read_text()


def test_kernels_know_nothing_of_the_rest():
    for name, targets in IMPORTS.items():
        if name.startswith("radixkv_kernels"):
            assert all(target.startswith("radixkv_kernels") for target in targets), name
    for name, targets in IMPORTS.items():
        assert name.startswith("experiments") or not any(target.startswith("experiments") for target in targets), name


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_folder_has_a_circle(folder):
    found = floors(rooms(folder))
    if folder in MOST_FLOORS:
        assert max(found.values()) <= MOST_FLOORS[folder], sorted((floor, room) for room, floor in found.items())


@pytest.mark.parametrize("folder", WITHOUT_TORCH)
def test_importing_it_loads_no_torch(folder):
    inside = [name for name in MODULES if name.startswith(f"radixkv.{folder}") and name not in WITH_TORCH]
    names = [name for name in inside if not name.endswith("__main__")]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_token_ids_on_their_way_into_the_tree_enter_no_folder_twice(monkeypatch):
    from radixkv.cache.radix.tree import RadixTree
    from radixkv.engine.engine import Engine

    ways = []
    walk = RadixTree.walk

    def followed(*arguments):
        frame, way = sys._getframe(1), []
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            folder = ".".join(name.split(".")[:2])
            if name.startswith("radixkv.") and way[-1:] != [folder]:
                way.append(folder)
            frame = frame.f_back
        ways.append(way[::-1])
        return walk(*arguments)

    monkeypatch.setattr(RadixTree, "walk", followed)
    engine = Engine.from_pretrained("tiny_gpt", num_blocks=64)
    engine.add_request(list(range(100)))
    engine.step()
    assert ways
    for way in ways:
        assert len(set(way)) == len(way), way


if __name__ == "__main__":
    print(picture())
