"""Plots as pieces of SVG: ink in the page's own colour, so that they are readable in light and dark, and on paper.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; markers and dashes differ as well.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib import RcParams, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":")
_INK = "#010203"
"""Stands for the page's text colour until the SVG is cut out."""
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "axes.edgecolor": _INK, "axes.labelcolor": _INK,
    "text.color": _INK, "xtick.color": _INK, "ytick.color": _INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.2, "grid.color": _INK, "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip

Interval = Mapping[str, Any]
"""``value``, ``low`` and ``high``, the last two None where there is no interval."""


def tau_by_task(setting: str, entrants: Mapping[str, Mapping[str, Any]], tasks: Sequence[str]) -> str:
    """Bars with 95 % intervals, tasks from left to right, entrants beside each other."""

    def draw(axes: Axes) -> None:
        width = 0.8 / len(entrants)
        for i, (name, entrant) in enumerate(entrants.items()):
            own = [entrant["tasks"][task]["tau"] for task in tasks]
            places = [t + (i - (len(entrants) - 1) / 2) * width for t in range(len(tasks))]
            axes.bar(
                places,
                [e["value"] for e in own],
                width,
                color=_colour(i),
                label=name,
                yerr=_errors(own),
                ecolor=_INK,
                capsize=2,
            )
        axes.set_xticks(range(len(tasks)), tasks, rotation=25, ha="right")
        axes.set_ylabel("tau")
        axes.set_ylim(bottom=1)

    return _svg(f"{setting}: tau by task", draw)


def acceptance_by_position(setting: str, entrants: Mapping[str, Mapping[str, Any]]) -> str:
    """Conditional acceptance at each draft position, with 95 % intervals."""

    def draw(axes: Axes) -> None:
        for i, (name, entrant) in enumerate(entrants.items()):
            own = entrant["acceptance"]
            axes.errorbar(range(1, len(own) + 1), [e["value"] for e in own], _errors(own), label=name, capsize=2, **_line(i))
        axes.set_xticks(range(1, max(len(e["acceptance"]) for e in entrants.values()) + 1))
        axes.set_xlabel("draft position")
        axes.set_ylabel("conditional acceptance")
        axes.set_ylim(0, 1)

    return _svg(f"{setting}: acceptance by position", draw)


def tau_by_bin(
    name: str, entrants: Mapping[str, Mapping[str, Any]], key: str, bins: Sequence[str], x: str, joined: bool
) -> str:
    """Tau with 95 % intervals over bins from left to right.

    Args:
        key: of an entrant, the list of its bins. bins: labels of all that are shown. joined: by a line.
    """

    def draw(axes: Axes) -> None:
        shift = 0.06
        for i, (label, entrant) in enumerate(entrants.items()):
            # Beside each other, so that intervals do not hide each other.
            places = [bins.index(b["bin"]) + (i - (len(entrants) - 1) / 2) * shift for b in entrant[key]]
            own = [b["tau"] for b in entrant[key]]
            style = _line(i) if joined else _line(i) | {"linestyle": "none"}
            axes.errorbar(places, [e["value"] for e in own], _errors(own), label=label, capsize=2, **style)
        axes.set_xticks(range(len(bins)), bins)
        axes.set_xlabel(x)
        axes.set_ylabel("tau")
        axes.set_ylim(bottom=1)

    return _svg(name, draw)


def speed_against_memory(setting: str, entrants: Mapping[str, Mapping[str, Any]]) -> str:
    """Speedup over no drafting against what each entrant's drafter keeps of the context."""

    def draw(axes: Axes) -> None:
        for i, (name, entrant) in enumerate(entrants.items()):
            point = entrant["speedup"]
            axes.errorbar(
                [entrant["drafter_kv_bytes"] / 1e6], [point["value"]], _errors([point]), label=name, capsize=2, **_line(i)
            )
        most = max(e["drafter_kv_bytes"] for e in entrants.values()) / 1e6 or 1.0
        axes.set_xlim(-0.05 * most, 1.1 * most)
        axes.axhline(1, color=_INK, linewidth=0.8, alpha=0.5)
        axes.set_xlabel("drafter's KV cache at the longest answer, MB")
        axes.set_ylabel("speedup over no drafting")

    return _svg(f"{setting}: speed against memory", draw)


def curves(name: str, series: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, log_x: bool = False) -> str:
    """Lines through points: training curves, costs over concurrency."""

    def draw(axes: Axes) -> None:
        for i, (label, points) in enumerate(series.items()):
            axes.plot([p[0] for p in points], [p[1] for p in points], label=label, **_line(i))
        if log_x:
            axes.set_xscale("log", base=2)
        axes.set_xlabel(x)
        axes.set_ylabel(y)

    return _svg(name, draw)


def _colour(i: int) -> str:
    return PALETTE[i % len(PALETTE)]


def _line(i: int) -> dict[str, Any]:
    return {"color": _colour(i), "marker": MARKERS[i % len(MARKERS)], "markersize": 4, "linestyle": _DASHES[i % len(_DASHES)]}


def _errors(intervals: Sequence[Interval]) -> list[list[float]]:
    known = [e if e["low"] is not None else {**e, "low": e["value"], "high": e["value"]} for e in intervals]
    return [[e["value"] - e["low"] for e in known], [e["high"] - e["value"] for e in known]]


def _svg(name: str, draw: Callable[[Axes], None]) -> str:
    """The ``<svg>`` element, scaled by the page; its ids are its own, so that several can stand in one page."""
    with rc_context(RcParams({**_STYLE, "svg.hashsalt": name})):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        if len(axes.get_legend_handles_labels()[0]) > 0:
            axes.legend(bbox_to_anchor=(0, 1.01), loc="lower left", ncols=3, borderaxespad=0)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = _own_ids(text[text.index("<svg") :].replace(_INK, "currentColor"), name)
    head, _, rest = text.partition(">")
    width = head.partition('width="')[2].partition('"')[0]
    height = head.partition('height="')[2].partition('"')[0]
    head = head.replace(f'width="{width}"', 'width="100%"').replace(f' height="{height}"', "")
    return f'{head} role="img" aria-label="{name}">{rest}'


def _own_ids(svg: str, name: str) -> str:
    """The same with every id, and every reference to one, begun by the plot's name."""
    own = re.sub(r"\W+", "-", name)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{own}-", svg)
