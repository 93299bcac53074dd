"""The results as text and as a picture: ratios of shmserve to Triton, and queue delays."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from bench.report.results import MACHINE, SHMSERVE, TRITON, Results, Row, Spread

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.report.results import Figure


_HEADER = ("case", "unit", "shmserve", "Triton", "shmserve / Triton", "must", "aim", "reaches")
_DELAY_EDGES_US = (0, 100, 120, 150, 200, 300, 500, 1000, 2000)
_BAR = 40


def render(results: Results) -> str:
    """Return the complete report as text, which ends with a newline."""
    cells = [_cells(row) for row in results.rows if MACHINE not in row.samples]
    parts = [_preamble(results), format_table(_HEADER, cells) if cells else ""]
    parts += [_memcpy(results), _delays(results)]
    if results.notes:
        parts.append("notes\n" + "\n".join(f"  {note}" for note in dict.fromkeys(results.notes)))
    if results.not_run:
        rows = [f"  {item.what}: {item.why}" for item in results.not_run]
        parts.append("not measured\n" + "\n".join(rows))
    return "\n\n".join(part for part in parts if part) + "\n"


def compare(before: Results, after: Results) -> str:
    """Return the figures of both results and their ratios to Triton, as text."""
    header = ("case", "unit", "A", "B", "B / A", "", "A / Triton", "B / Triton")
    rows_before = {row.figure.name: row for row in before.rows}
    rows = [
        _change(rows_before[r.figure.name], r) for r in after.rows if r.figure.name in rows_before
    ]
    parts = [f"A: {_origin(before)}\nB: {_origin(after)}", format_table(header, rows)]
    unmatched_rows = rows_before.keys() ^ {row.figure.name for row in after.rows}
    if unmatched_rows:
        parts.append("only in one of them: " + ", ".join(sorted(unmatched_rows)))
    return "\n\n".join(parts) + "\n"


def format_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table; the first two columns are left-aligned, numbers are right-aligned."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _preamble(results: Results) -> str:
    machine = results.machine
    text = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
    text += f"{machine['system']}, load before: {machine['load_before']}\n"
    text += ", ".join(f"{name} {version}" for name, version in results.versions.items())
    repeats, seconds = results.settings["repeats"], results.settings["seconds"]
    samples = f"{repeats:g} samples, {seconds:g} s of load each"
    return f"{text}\nmedian [smallest .. largest] of {samples}"


def _cells(row: Row) -> tuple[str, ...]:
    figure = row.figure
    values = map(_spread_text, (row.of(SHMSERVE), row.of(TRITON), row.ratio()))
    targets = (_target_text(figure, figure.target.must), _target_text(figure, figure.target.aim))
    return (figure.title, figure.unit, *values, *targets, row.verdict())


def _target_text(figure: Figure, value: float | None) -> str:
    if value is None:
        return ""
    return f"{'>=' if figure.better == 'higher' else '<='} {value:g}"


def _spread_text(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{number(spread.median)} [{number(spread.low)} .. {number(spread.high)}]"


def number(value: float) -> str:
    """Return a number with at least three significant digits, and no needless decimals."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _memcpy(results: Results) -> str:
    rows = {row.figure.name: row for row in results.rows}
    copy = rows["memcpy"].of(MACHINE) if "memcpy" in rows else None
    if copy is None:
        return ""
    text = f"one memcpy of 16 MiB on this machine: {_spread_text(copy)} µs"
    for server in (SHMSERVE, TRITON):
        identity = rows["shm16m"].of(server) if "shm16m" in rows else None
        if identity:
            ratio = identity.median / copy.median
            text += f"; {server}'s 16 MiB identity takes {ratio:.1f} of them"
    return text


def _delays(results: Results) -> str:
    """Return a text histogram of each server's queue delays, with the same buckets."""
    parts = []
    for server, delays in results.raw_delays_us.items():
        rows = [f"time in {server}'s queue for a delay of 100 µs, {len(delays)} single requests"]
        for low, high in pairwise((*_DELAY_EDGES_US, float("inf"))):
            count = sum(low <= delay < high for delay in delays)
            bar = "#" * round(_BAR * count / len(delays))
            rows.append(f"  {_bucket(low, high):>12} µs  {100 * count / len(delays):5.1f} %  {bar}")
        parts.append("\n".join(row.rstrip() for row in rows))
    return "\n\n".join(parts)


def _bucket(low: float, high: float) -> str:
    return f"{low:g} and more" if high == float("inf") else f"{low:g} to {high:g}"


def _origin(results: Results) -> str:
    version = results.versions.get("commit", results.versions.get("shmserve", "?"))
    return f"{results.date}, {version}, {results.machine['processor']}"


def _change(before: Row, after: Row) -> tuple[str, ...]:
    server = MACHINE if MACHINE in after.samples else SHMSERVE
    old, new = before.of(server), after.of(server)
    ratio = number(new.median / old.median) if old and new and old.median else "-"
    ratios = [
        f"{spread_of_ratio.median:.2f}" if spread_of_ratio else "-"
        for spread_of_ratio in (before.ratio(), after.ratio())
    ]
    return (
        after.figure.title,
        after.figure.unit,
        _spread_text(old),
        _spread_text(new),
        ratio,
        _judgement(after.figure, old, new),
        *ratios,
    )


def _judgement(figure: Figure, old: Spread | None, new: Spread | None) -> str:
    """Return `better` or `worse` if the old and new samples do not overlap, else ""."""
    if old is None or new is None or (new.low <= old.high and old.low <= new.high):
        return ""
    return "better" if (new.median > old.median) == (figure.better == "higher") else "worse"


_COLOURS = {SHMSERVE: "#2a6fbb", TRITON: "#8a8a8a"}
_LONGEST_DELAY_US = 600


def draw(results: Results, path: Path) -> str | None:
    """Write the picture (SVG or PNG, by suffix).

    Returns:
        The reason if the picture cannot be drawn; None on success.
    """
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
        _draw_delays(axes[0][-1], results)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return None


def _ratios(axes: Axes, rows: list[Row], results: Results) -> None:
    """Draw one line per load: the speed of shmserve relative to Triton; right is better."""
    for y, row in enumerate(reversed(rows)):
        ratio = row.ratio()
        assert ratio is not None
        power = 1 if row.figure.better == "higher" else -1
        axes.plot([ratio.low**power, ratio.high**power], [y, y], color=_COLOURS[SHMSERVE], lw=2)
        axes.plot(ratio.median**power, y, "o", color=_COLOURS[SHMSERVE], ms=8, label="measured")
        target = row.figure.target
        if target.must:
            axes.plot(target.must**power, y, "|", color="#c0392b", ms=18, mew=2, label="must")
        if target.aim:
            axes.plot(target.aim**power, y, "D", mfc="none", mec="#2e8b57", ms=8, label="aim")
    axes.set_yticks(range(len(rows)), [row.figure.title for row in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1, color=_COLOURS[TRITON], lw=1, zorder=0)
    axes.set_xlabel(f"times as fast as Triton {results.versions.get(TRITON, '')}")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:3], labels[:3], frameon=False, fontsize="small", loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_delays(axes: Axes, results: Results) -> None:
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
