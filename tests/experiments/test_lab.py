"""Experiments as one lab: cells that survive an interruption, a catalog, a page of results."""

import json
import multiprocessing
import operator
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser

import pytest

from experiments import work_savings
from experiments.__main__ import main
from experiments.lab import catalog, harness
from experiments.lab.harness import recorded_tables
from experiments.lab.plots import pyplot
from experiments.lab.report import write_report
from experiments.lab.run import find_result, run_experiment


@dataclass(frozen=True)
class Config:
    sizes: tuple[int, ...] = (1, 2, 3)


class Doubling:
    """An experiment that counts its measurements and may be interrupted at one."""

    def __init__(self, interrupted_at=None):
        self.measured, self.interrupted_at = [], interrupted_at

    def cells(self, config):
        for size in config.sizes:
            yield f"size {size}", lambda size=size: self.measure(size)

    def measure(self, size):
        if size == self.interrupted_at:
            raise KeyboardInterrupt
        self.measured.append(size)
        return [{"size": size, "doubled": 2 * size}]

    def show(self, data):
        print("shown", len(data["rows"]))

    def plot(self, data):
        return pyplot().figure()

    def answer(self, data):
        return f"The largest is {max(row['doubled'] for row in data['rows'])}."


def run(experiment, out, config=None):
    config = config or Config()
    return json.loads(run_experiment("doubling", out, config, experiment).read_text())


def test_rows_come_in_the_order_of_the_cells(tmp_path, capsys):
    data = run(Doubling(), tmp_path)
    assert [row["doubled"] for row in data["rows"]] == [2, 4, 6]
    assert data["config"] == {"sizes": [1, 2, 3]} and data["environment"]["num_cores"]
    assert "shown 3" in capsys.readouterr().out


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    with pytest.raises(SystemExit) as stopped:
        run(Doubling(interrupted_at=3), tmp_path)
    assert stopped.value.code == 130
    assert not (tmp_path / "doubling.json").exists()
    again = Doubling()
    assert [row["doubled"] for row in run(again, tmp_path)["rows"]] == [2, 4, 6]
    assert again.measured == [3]
    assert not list(tmp_path.glob("*.part"))


def test_another_config_starts_anew(tmp_path):
    with pytest.raises(SystemExit):
        run(Doubling(interrupted_at=3), tmp_path)
    again = Doubling()
    run(again, tmp_path, Config((2, 3)))
    assert again.measured == [2, 3]


def test_a_broken_part_file_is_no_obstacle(tmp_path):
    (tmp_path / "doubling.json.part").write_text("{")
    assert len(run(Doubling(), tmp_path)["rows"]) == 3


def test_a_failure_keeps_what_was_measured(tmp_path):
    first = Doubling()
    first.measure = lambda size, measure=first.measure: measure(size) if size < 3 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(first, tmp_path)
    again = Doubling()
    run(again, tmp_path)
    assert again.measured == [3]


def double(size):
    return [{"size": size, "doubled": 2 * size, "silent": harness.is_silent}]


class Beside(Doubling):
    """Cells that pickle, for processes beside each other."""

    def cells(self, config):
        for size in config.sizes:
            yield f"size {size}", partial(double, size)


def test_cells_run_beside_each_other(tmp_path):
    config = Config((5, 1, 4, 2))
    path = run_experiment("doubling", tmp_path, config, Beside(), at_once=True)
    rows = json.loads(path.read_text())["rows"]
    assert [row["doubled"] for row in rows] == [10, 2, 8, 4]
    assert all(row["silent"] for row in rows) and not harness.is_silent
    assert not list(tmp_path.glob("*.part"))


def test_a_failure_beside_others_is_told(tmp_path):
    beside = Beside()
    beside.cells = lambda config: [(str(size), partial(operator.truediv, 6, size)) for size in config.sizes]
    with pytest.raises(TypeError):
        run_experiment("doubling", tmp_path, Config((1, "x", 3)), beside, at_once=True)
    assert not multiprocessing.active_children()


# ---- the catalog


def test_every_experiment_is_in_the_catalog():
    scripts = {path.stem for path in catalog.FOLDER.glob("*.py") if "\ndef answer(" in path.read_text()}
    assert scripts == {entry.name for entry in catalog.entries()}


NEW = '''"""Is a new file enough?

Expected: yes.

    python -m experiments.new_one
"""

ENTRY = Entry("growth", seconds=1, report=("--short",))
'''


@pytest.fixture
def new_file(tmp_path, monkeypatch):
    """An experiment more, in a copy of the folder."""
    for path in catalog.FOLDER.glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(catalog, "FOLDER", tmp_path)
    catalog.entries.cache_clear()
    yield tmp_path / "new_one.py"
    catalog.entries.cache_clear()


def test_a_file_is_an_experiment_because_it_has_an_entry(new_file, tmp_path, capsys):
    before = catalog.entries()
    new_file.write_text(NEW)
    catalog.entries.cache_clear()
    (found,) = set(catalog.entries()) - set(before)
    assert (found.name, found.question, found.expectation) == ("new_one", "Is a new file enough?", "Expected: yes.")
    assert found.command == "python -m experiments new_one --short"
    growth = [entry.name for entry in catalog.entries() if entry.part == "growth"]
    assert growth == ["load", "endurance", "new_one"]  # no place: last in its part
    main(["--out", str(tmp_path / "out")])
    assert "Is a new file enough?" in capsys.readouterr().out
    (tmp_path / "out").mkdir()
    assert "python -m experiments new_one --short" in write_report(tmp_path / "out").read_text()


def test_an_entry_of_no_part_is_told(new_file):
    new_file.write_text(NEW.replace("growth", "nowhere"))
    catalog.entries.cache_clear()
    with pytest.raises(ValueError, match=r"new_one\.py: expected a part of prefixes, .*, got 'nowhere'"):
        catalog.entries()


@pytest.mark.parametrize("entry", catalog.entries(), ids=lambda entry: entry.name)
def test_an_experiment_says_what_it_asks_and_expects(entry):
    assert entry.question.endswith("?") and len(entry.question) < 120
    assert "xpect" in entry.expectation
    module = entry.load()
    for name in ("show", "plot", "answer", "main"):
        assert callable(getattr(module, name))
    assert f"python -m experiments.{entry.name}" in module.__doc__


@pytest.mark.slow
@pytest.mark.parametrize("entry", catalog.entries(), ids=lambda entry: entry.name)
def test_an_experiment_runs_at_its_smallest(entry, tmp_path):
    command = [sys.executable, "-m", "experiments", entry.name, "--smoke", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=catalog.FOLDER.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if "nothing to do" not in done.stdout:  # where there is no GPU, or no vLLM
        found = find_result(entry.name, tmp_path, entry.load)
        assert isinstance(found, dict) and entry.load().answer(found)
        assert (tmp_path / f"{entry.name}.png").stat().st_size > 1000


def test_a_name_that_is_none_is_told(capsys):
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "work_savings" in capsys.readouterr().err


# ---- the page


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    work_savings.main(["--out", str(out)])
    return out


def test_the_list_tells_the_last_result(results, capsys):
    main(["--out", str(results)])
    shown = capsys.readouterr().out
    assert "83.4%" in shown and all(entry.name in shown for entry in catalog.entries())


class Page(HTMLParser):
    VOID = ("meta", "link", "img", "source")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_stands_alone(results):
    page = Page()
    page.feed(write_report(results).read_text())
    assert not page.open
    links = {attributes["href"][1:] for tag, attributes in page.tags if tag == "a"}
    assert links == {entry.name for entry in catalog.entries()}
    assert links <= {attributes.get("id") for _, attributes in page.tags}
    for tag, attributes in page.tags:
        for name in ("src", "srcset", "href"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
        assert tag != "img" or len(attributes["alt"]) > 20
    shown = "".join(page.text)
    assert "83.4%" in shown and "4,296" in shown and "Not run here" in shown


def test_tables_can_be_taken_instead_of_printed(results, capsys):
    data = json.loads((results / "work_savings.json").read_text())
    capsys.readouterr()
    with recorded_tables() as tables:
        work_savings.show(data)
    assert not capsys.readouterr().out
    assert len(tables[0].rows) == 9 and tables[0].headings[0] == "prefix"


BROWSER = """
import sys, json
from selenium import webdriver
from selenium.webdriver.common.by import By
options = webdriver.ChromeOptions()
for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
             "disable-background-networking", "disable-component-update", "disable-dev-shm-usage"):
    options.add_argument("--" + flag)
options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(sys.argv[2]))
try:
    driver.set_window_size(390, 844)
    driver.get("file://" + sys.argv[1])
    link = driver.find_element(By.CSS_SELECTOR, "nav a")
    driver.execute_script("arguments[0].click()", link)
    requests = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    print(json.dumps({
        "console": [entry["message"] for entry in driver.get_log("browser")],
        "urls": [r["params"]["request"]["url"][:60] for r in requests if r["method"] == "Network.requestWillBeSent"],
        "width": driver.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]"),
        "place": driver.execute_script("return location.hash"),
        "broken": driver.execute_script(
            "return [...document.images].filter(i => i.complete && !i.naturalWidth).length"),
        "no_alt": driver.execute_script("return [...document.images].filter(i => !i.alt).length"),
    }))
finally:
    driver.quit()
"""


def test_a_browser_loads_the_page(results):
    driver = shutil.which("chromedriver")
    pytest.importorskip("selenium", reason="no selenium: pip install 'radixkv[test]'")
    if driver is None or shutil.which("chromium") is None:
        pytest.skip("no chromium and chromedriver on this machine")
    command = [sys.executable, "-c", BROWSER, str(write_report(results).resolve()), driver]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["console"] and not found["broken"] and not found["no_alt"]
    assert all(url.startswith(("file:", "data:")) for url in found["urls"])
    assert found["width"][0] <= found["width"][1]  # nothing makes a phone scroll sideways
    assert found["place"] == f"#{catalog.entries()[0].name}"


# ---- what the page says first, and what a GPU would add


@pytest.mark.slow
def test_the_summary_is_computed_from_the_rows(tmp_path):

    from experiments import divergence, index_cost, workload_worth

    for module in (divergence, index_cost, workload_worth):
        module.main(["--smoke", "--out", str(tmp_path)])
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert any("15 at blocks of 16" in sentence for sentence in divergence.buys(results["divergence"]))
    (table,) = workload_worth.worth(results["workload_worth"])
    assert table.headings[:4] == ("workload", "flat hash 16", "radix 16", "computes, 16")
    rates = {(r["workload"], r["cache"], r["block_size"]): r["hit_rate"] for r in results["workload_worth"]["rows"]}
    flat, tree = rates["agent", "flat_hash", 16], rates["agent", "radix", 16]
    assert table.rows[0][:4] == ("agent", f"{flat:.1%}", f"{tree:.1%}", f"{(1 - flat) / (1 - tree):.2f}")
    assert any("bytes a cached token" in sentence for sentence in index_cost.costs(results["index_cost"]))
    page = write_report(tmp_path).read_text()
    assert page.index("What it buys") < page.index("Over which workloads") < page.index("At what price")


def gpu_rows(failing=False):
    check = {"part": "check", "name": "bfloat16 plain", "error": 1e-3, "passed": not failing}
    decode = {"part": "time", "name": "decode 1 x 1 new on 8191 cached", "ms": {"radixkv": 0.5, "sdpa": 0.6}}
    decode |= {"not_timed": {}, "of_copy_bandwidth": 0.8, "of_matmul_rate": 0.1}
    tree = {"part": "tree", "name": "tree 64 on 4096 + 128", "passed": True, "ms": {"paged": 3.0, "tree": 1.0}}
    return [check, decode, tree | {"of_copy_bandwidth": 0.7, "not_timed": {}}]


@pytest.mark.parametrize("failing", [False, True])
def test_results_of_a_gpu_are_shown_too(tmp_path, failing):
    from experiments import gpu_kernels
    from experiments.lab.harness import environment, save

    save(tmp_path, "gpu_kernels", {}, gpu_rows(failing), environment=environment() | {"device": "some GPU"})
    page = write_report(tmp_path).read_text()
    assert "decode 1 x 1 new on 8191 cached" in page and "some GPU" in page
    told = gpu_kernels.answer(json.loads((tmp_path / "gpu_kernels.json").read_text()))
    if failing:
        assert told == "1 of 2 checks fail on some GPU: check bfloat16 plain."
    else:
        assert "decode reaches 0.80 to 0.80 of the copy bandwidth" in told and "3.0 to 3.0 times" in told


def test_without_a_gpu_it_says_so(tmp_path, capsys):
    import torch

    from experiments import gpu_kernels

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    gpu_kernels.main(["--out", str(tmp_path)])
    assert "no CUDA device" in capsys.readouterr().out and not list(tmp_path.iterdir())
