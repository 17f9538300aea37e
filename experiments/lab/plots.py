"""How plots look, light and dark, and the bars that several experiments draw."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

from experiments.lab.harness import Row, grouped

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any  # matplotlib is imported for a picture alone, as that takes most of a second

_is_dark = False


@contextmanager
def dark_plots() -> Iterator[None]:
    """While the block runs, plots are drawn light on dark."""
    global _is_dark
    _is_dark = True
    try:
        yield
    finally:
        _is_dark = False


def pyplot() -> Any:
    """Returns matplotlib's pyplot, without a display, in this package's look."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f"the experiments need {error.name}: pip install 'radixkv[experiments]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcdefaults()
    ink, paper = ("#e6e9f0", "#14171e") if _is_dark else ("#1d2330", "#ffffff")
    plt.rcParams.update(
        {
            "figure.facecolor": paper,
            "axes.facecolor": paper,
            "savefig.facecolor": paper,
            "text.color": ink,
            "axes.labelcolor": ink,
            "axes.edgecolor": ink,
            "xtick.color": ink,
            "ytick.color": ink,
            "figure.figsize": (8, 4.5),
            "figure.dpi": 130,
            "savefig.bbox": "tight",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "axes.axisbelow": True,
            "legend.frameon": True,  # what is drawn below a legend is not to be read through it
            "legend.facecolor": paper,
            "legend.edgecolor": paper,
            "font.size": 10,
        }
    )
    return plt


def png(figure: Figure) -> bytes:
    """Returns a figure as PNG, and closes it."""
    from matplotlib import pyplot as plt

    picture = BytesIO()
    figure.savefig(picture, format="png")
    plt.close(figure)
    return picture.getvalue()


def draw_bars(axis: Any, heights: Mapping[str, Mapping[Any, float]], **ticks: Any) -> list[Any]:
    """Draws groups of bars: a series a key, in it a height for each group that it has; returns the groups.

    Args:
        ticks: how the groups' names look, as `set_xticks` takes it; without any, long ones are wrapped.
    """
    groups = list(dict.fromkeys(group for series in heights.values() for group in series))
    width = 0.8 / len(heights)
    for i, (name, series) in enumerate(heights.items()):
        places = [groups.index(group) + (i - (len(heights) - 1) / 2) * width for group in series]
        axis.bar(places, list(series.values()), width, label=name)
    room = max(84 // max(len(groups), 1), 6)  # letters below each
    names = [str(group) if ticks else textwrap.fill(str(group), room, break_long_words=False) for group in groups]
    axis.set_xticks(range(len(groups)), names, **ticks)
    return groups


def draw_lines(axis: Any, lines: Mapping[Any, Sequence[Row]], x: str, y: str, style: str = "o-", **more: Any) -> None:
    """Draws a line of `y` over `x` for each group of rows, and a legend of their names."""
    for name, rows in lines.items():
        axis.plot([row[x] for row in rows], [row[y] for row in rows], style, label=str(name), **more)
    axis.legend()


def draw_stacks(axis: Any, labels: Sequence[str], parts: Mapping[str, Sequence[float]], **ticks: Any) -> None:
    """Draws a horizontal bar for each label, the first on top, stacked of its value in each part."""
    left = [0.0] * len(labels)
    for name, widths in parts.items():
        axis.barh(range(len(labels)), widths, left=left, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.set_yticks(range(len(labels)), labels, **ticks)
    axis.invert_yaxis()


def bars(rows: Sequence[Row], across: str, series: str, value: str, ylabel: str, title: str) -> Figure:
    """Draws groups of bars: a group for each `across`, a bar for each `series`."""
    figure, axis = pyplot().subplots()
    lines = grouped(rows, series)
    draw_bars(axis, {str(name): {row[across]: row[value] for row in some} for name, some in lines.items()})
    axis.set(xlabel=across.replace("_", " "), ylabel=ylabel, title=title)
    axis.legend()
    return figure
