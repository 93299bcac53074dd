"""Results as one picture: shmserve beside Triton under load, and the queue's real delay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.report.results import PEER, US, Results, Row

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

_COLOURS = {US: "#2a6fbb", PEER: "#8a8a8a"}
_LONGEST_DELAY_US = 600


def draw(results: Results, path: Path) -> str | None:
    """Write the picture (SVG or PNG, by suffix); the reason, where it cannot be drawn."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "matplotlib is not installed"
    rows = [row for row in results.rows if row.figure.target.of == "ratio" and row.ratio()]
    panels = bool(rows) + bool(results.raw_delays_us)
    if not panels:
        return "nothing was measured that is drawn"
    figure, axes = pyplot.subplots(1, panels, figsize=(7.5 * panels, 3.6), squeeze=False)
    if rows:
        _ratios(axes[0][0], rows, results)
    if results.raw_delays_us:
        _delays(axes[0][-1], results)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return None


def _ratios(axes: Axes, rows: list[Row], results: Results) -> None:
    """Draw one line per load: the speed relative to Triton; right is better."""
    for place, row in enumerate(reversed(rows)):
        ratio = row.ratio()
        assert ratio is not None
        power = 1 if row.figure.better == "higher" else -1
        axes.plot([ratio.low**power, ratio.high**power], [place, place], color=_COLOURS[US], lw=2)
        axes.plot(ratio.median**power, place, "o", color=_COLOURS[US], ms=8, label="measured")
        target = row.figure.target
        if target.must:
            axes.plot(target.must**power, place, "|", color="#c0392b", ms=18, mew=2, label="must")
        if target.aim:
            axes.plot(target.aim**power, place, "D", mfc="none", mec="#2e8b57", ms=8, label="aim")
    axes.set_yticks(range(len(rows)), [row.figure.title for row in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1, color=_COLOURS[PEER], lw=1, zorder=0)
    axes.set_xlabel(f"times as fast as Triton {results.versions.get(PEER, '')}")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:3], labels[:3], frameon=False, fontsize="small", loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)


def _delays(axes: Axes, results: Results) -> None:
    """Draw the distribution of the time in the queue of single requests."""
    for server, delays in results.raw_delays_us.items():
        shares = [(rank + 1) / len(delays) for rank in range(len(delays))]
        axes.step(sorted(delays), shares, color=_COLOURS[server], label=server, where="post")
    axes.axvline(100, color="#c0392b", lw=1, ls=":", label="asked for")
    axes.set_xlim(0, _LONGEST_DELAY_US)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("µs in the queue, one request in flight, max_queue_delay_microseconds: 100")
    axes.set_ylabel("share of requests")
    axes.legend(frameon=False, fontsize="small", loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
