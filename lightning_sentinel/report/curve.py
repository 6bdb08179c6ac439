"""The annotated loss curve as a PNG, against tokens. Needs matplotlib (``pip install lightning-sentinel[report]``)."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .chart import LANES, Chart, LaneRow, build_chart, lay_out, place, si
from .data import RunData
from .summary import in_turn

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Transform

MISSING_MATPLOTLIB = (
    "No loss.png: matplotlib is not installed. Install it with `pip install 'lightning-sentinel[report]'`, then run"
    " `lightning-sentinel report RUN`."
)

# Okabe and Ito: told apart by colour-blind eyes, and each kind has its own glyph as well.
BLUE, SKY, ORANGE, VERMILION, GREEN, PURPLE, GREY = (
    "#0072B2",
    "#56B4E9",
    "#E69F00",
    "#D55E00",
    "#009E73",
    "#AA4499",
    "#8A8A8A",
)
STATUS_COLOURS = {"open": VERMILION, "escalated": VERMILION, "recovered": GREEN, "resolved": GREY}
# Kind of a mark: glyph, colour, filled.
GLYPHS: Mapping[str, tuple[str, str, bool]] = {
    "fault": ("v", PURPLE, True),
    "retry_step": ("o", BLUE, False),
    "skip_step": ("x", BLUE, True),
    "quarantine": ("s", BLUE, False),
    "reduce_lr": ("v", BLUE, True),
    "lower_loss_scale": ("v", BLUE, False),
    "restore_optimizer": ("P", BLUE, True),
    "stop": ("s", VERMILION, True),
    "candidate": ("^", GREY, False),
    "known_good": ("^", GREEN, True),
    "poisoned": ("X", VERMILION, True),
    "failed": ("s", ORANGE, False),
    "removed": ("_", GREY, True),
    "overflow": ("x", ORANGE, True),
    "backoff": ("v", ORANGE, False),
    "growth": ("^", ORANGE, False),
    "changed": ("D", ORANGE, False),
    "restart": ("|", "black", True),
    "topology": ("|", PURPLE, True),
    "infra": ("D", GREY, True),
    "rate": ("d", SKY, True),
    "mixture": ("d", ORANGE, True),
    "experiment": ("*", PURPLE, True),
}
_GLYPH_NAMES = {
    "candidate": "checkpoint, candidate",
    "known_good": "checkpoint, known-good",
    "poisoned": "checkpoint, poisoned",
    "failed": "checkpoint, failed",
    "removed": "checkpoint, removed",
    "overflow": "fp16 overflow",
    "backoff": "loss scale lowered",
    "growth": "loss scale raised",
    "changed": "loss scale set",
    "infra": "infrastructure event",
}
WIDTH_INCHES, DPI = 13.0, 110
LEFT_INCHES, RIGHT_INCHES = 1.35, 0.35
AXIS_PIXELS = (WIDTH_INCHES - LEFT_INCHES - RIGHT_INCHES) * DPI
KEY_LINES, KEY_WIDTH = 12, 165


def render_png(run: RunData, summary: Mapping[str, Any]) -> bytes:
    """The picture of a run as PNG bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = draw(build_chart(run, summary), summary)
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def draw(chart: Chart, summary: Mapping[str, Any]) -> Figure:
    """The figure: loss, the strip of what happened, gradient norm, learning rate, loss scale, and the key of incidents."""
    from matplotlib.figure import Figure

    laid = {lane: lay_out(chart, lane, AXIS_PIXELS, character=7.4) for lane in chart.lanes}
    strip = 0.21 * sum(rows for _, rows in laid.values()) + 0.06 * len(laid)
    key = key_lines(summary)
    heights = {"loss": 4.0, "strip": max(strip, 0.2), "gradient": 1.15, "rate": 0.85}
    if chart.scale is not None:
        heights["scale"] = 0.85
    top, gap, bottom = 1.55, 0.14, 0.62 + 0.19 * len(key)
    total = top + sum(heights.values()) + gap * (len(heights) - 1) + bottom
    figure = Figure(figsize=(WIDTH_INCHES, total), facecolor="white")
    axes: dict[str, Axes] = {}
    y = total - top
    for name, height in heights.items():
        axes[name] = figure.add_axes(
            (
                LEFT_INCHES / WIDTH_INCHES,
                (y - height) / total,
                1 - (LEFT_INCHES + RIGHT_INCHES) / WIDTH_INCHES,
                height / total,
            )
        )
        y -= height + gap
    _loss(axes["loss"], chart)
    _strip(axes["strip"], laid)
    _gradient(axes["gradient"], chart)
    _rate(axes["rate"], chart)
    if "scale" in axes:
        _scale(axes["scale"], chart)
    _common(axes, chart)
    _words(figure, chart, summary, key, total, bottom)
    return figure


def key_lines(summary: Mapping[str, Any]) -> list[str]:
    """One line for each incident: number, steps, what, verdict, culprit, action, outcome."""
    rows = list(summary["incidents"])
    shown = rows if len(rows) <= KEY_LINES else rows[: KEY_LINES - 1]
    lines = []
    for row in shown:
        culprits = ", ".join(row["culprits"][:2]) + (
            f" and {len(row['culprits']) - 2} more" if len(row["culprits"]) > 2 else ""
        )
        kinds = ", ".join(k.replace("_", " ") for k in row["kinds"]) or "?"
        proof = (
            ""
            if row["path_z"] is None
            else f" (path z {row['path_z']:.1f})"
            if isinstance(row["path_z"], float)
            else ""
        )
        line = (
            f"{row['number']:>3}  step {row['opened_step']}: {kinds} → {row['verdict']}: {culprits or 'nobody named'}"
            f" → {' → '.join(in_turn(row['actions'])) or 'none'} → {row['status']}{proof}"
        )
        lines.append(line if len(line) <= KEY_WIDTH else line[: KEY_WIDTH - 3] + "...")
    if len(rows) > len(shown):
        lines.append(f"     and {len(rows) - len(shown)} more incidents: see report.html")
    return lines


def _loss(ax: Axes, chart: Chart) -> None:
    for i, line in enumerate(chart.abandoned):
        label = "abandoned: rolled back, or lost in a restart" if i == 0 else None
        ax.plot(line.x, line.y, color=GREY, lw=1.1, alpha=0.65, ls=(0, (4, 2)), label=label, zorder=2)
    if chart.band is not None:
        ax.fill_between(
            chart.band.x,
            chart.band.low,
            chart.band.high,
            color=SKY,
            alpha=0.3,
            lw=0,
            label="all ranks, lowest to highest",
        )
    if chart.worst is not None:
        rank, line = chart.worst
        ax.plot(line.x, line.y, color=ORANGE, lw=0.9, label=f"rank {rank}, the furthest out", zorder=3)
    ax.plot(chart.mean.x, chart.mean.y, color=BLUE, lw=1.6, label="mean loss, the path that counts", zorder=4)
    ax.set_ylim(*chart.loss_range)
    if chart.log_loss:
        _log_axis(ax)
    if chart.nonfinite.size:
        # At the axis' upper edge: a value that is no number has no height.
        ax.plot(
            chart.nonfinite,
            np.full(chart.nonfinite.size, 0.975),
            transform=ax.get_xaxis_transform(),
            ls="",
            marker="X",
            ms=7,
            mec="white",
            mew=0.5,
            color=VERMILION,
            label="not finite",
            zorder=6,
        )
    unit = "loss, nats per token" + (" (log)" if chart.log_loss else "")
    ax.set_ylabel(unit + ("\nhigher values are cut" if chart.clipped else ""))
    _incident_numbers(ax, chart)


def _log_axis(ax: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _incident_numbers(ax: Axes, chart: Chart) -> None:
    """Numbered discs along the upper edge, in as many rows as it takes."""
    incidents = [m for m in chart.marks if m.lane == "incident"]
    low, high = chart.x_range
    pixels = [(m.x - low) / (high - low) * AXIS_PIXELS for m in incidents]
    rows = place([(p - 9, p + 9) for p in pixels], rows=4, gap=2)
    for mark, row in zip(incidents, rows, strict=True):
        if row is None:
            continue
        colour = STATUS_COLOURS.get(mark.kind, GREY)
        ax.axvline(mark.x, color=colour, lw=0.8, alpha=0.7, zorder=1)
        _disc(ax, mark.x, 0.915 - 0.062 * row, mark.label, colour, ax.get_xaxis_transform(), size=8.5)


def _disc(ax: Axes, x: float, y: float, words: str, colour: str, transform: Transform, *, size: float) -> None:
    ax.text(
        x,
        y,
        words,
        transform=transform,
        ha="center",
        va="center",
        fontsize=size,
        fontweight="bold",
        color="white",
        bbox={"boxstyle": "circle,pad=0.2", "fc": colour, "ec": "white", "lw": 0.8},
        zorder=7,
    )


def _strip(ax: Axes, laid: Mapping[str, tuple[list[LaneRow], int]]) -> None:
    """What happened, a lane for each kind."""
    y, ticks, labels = 0.0, [], []
    for lane, (items, rows) in laid.items():
        height = 0.21 * rows + 0.06
        for item in items:
            _mark(ax, item, y + 0.03 + 0.21 * (item.row + 0.5))
        ticks.append(y + height / 2)
        labels.append(LANES[lane])
        y += height
        ax.axhline(y, color="#DDDDDD", lw=0.7)
    ax.set_ylim(max(y, 0.2), 0)
    ax.set_yticks(ticks, labels)
    ax.tick_params(axis="y", length=0)
    ax.grid(False)


def _mark(ax: Axes, item: LaneRow, y: float) -> None:
    mark = item.mark
    left = mark.x if mark.end is None else min(mark.x, mark.end)
    right = mark.x
    if mark.kind == "rollback" and mark.end is not None:
        ax.annotate(
            "",
            xy=(mark.end, y),
            xytext=(mark.x, y),
            arrowprops={"arrowstyle": "-|>", "color": BLUE, "lw": 1.6, "shrinkA": 0, "shrinkB": 0},
        )
        right = max(mark.x, mark.end)
    elif mark.lane == "incident":
        colour = STATUS_COLOURS.get(mark.kind, GREY)
        right = mark.x if mark.end is None else max(mark.x, mark.end)
        ax.plot([mark.x, right], [y, y], color=colour, lw=5, alpha=0.45, solid_capstyle="butt")
        _disc(ax, mark.x, y, mark.label, colour, ax.transData, size=7.0)
    else:
        glyph, colour, filled = GLYPHS.get(mark.kind, ("o", GREY, True))
        right = mark.x if mark.end is None else max(mark.x, mark.end)
        if right > mark.x:
            ax.plot([mark.x, right], [y, y], color=colour, lw=3, alpha=0.5, solid_capstyle="butt")
        ax.plot(
            [mark.x], [y], marker=glyph, ms=6.5, color=colour, mfc=colour if filled else "white", mec=colour, mew=1.2
        )
    if item.labelled and mark.lane != "incident":
        ax.annotate(
            mark.label,
            xy=(left if item.flipped else right, y),
            xytext=(-7 if item.flipped else 7, -0.5),
            textcoords="offset points",
            ha="right" if item.flipped else "left",
            va="center",
            fontsize=7.5,
            color="#222222",
            annotation_clip=False,
        )


def _gradient(ax: Axes, chart: Chart) -> None:
    live, abandoned = chart.gradient
    positive = np.concatenate([live.y, *(line.y for line in abandoned)]) if abandoned else live.y
    if (positive[np.isfinite(positive)] > 0).any():
        ax.set_yscale("log")
    for line in abandoned:
        ax.plot(line.x, line.y, color=GREY, lw=0.9, alpha=0.65, ls=(0, (4, 2)))
    ax.plot(live.x, live.y, color=BLUE, lw=1.0, label="gradient, before clipping")
    if chart.update is not None:
        ax.plot(chart.update.x, chart.update.y, color=GREEN, lw=1.2, ls=(0, (5, 2)), marker=".", ms=3, label="update")
    ax.set_ylabel("2-norm (log)")
    ax.legend(loc="upper right", fontsize=7.5, frameon=False, ncols=2, borderaxespad=0.1)


def _rate(ax: Axes, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter

    live, abandoned = chart.rate
    for line in abandoned:
        ax.plot(line.x, line.y, color=GREY, lw=0.9, alpha=0.65, ls=(0, (4, 2)))
    ax.plot(live.x, live.y, color=BLUE, lw=1.3)
    finite = live.y[np.isfinite(live.y)]
    if finite.size and finite.max() > 0:
        # An abandoned excursion of the rate may be fifty times the plan; the plan stays readable.
        top = finite.max() * 1.15
        ax.set_ylim(0, top)
        for line in abandoned:
            heights = np.where(np.isfinite(line.y), line.y, -np.inf)
            if heights.size and heights.max() > top:
                ax.plot([line.x[int(heights.argmax())]], [0.95 * top], "^", color=GREY, ms=5)
    ax.set_ylabel("learning rate")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.3g}"))


def _scale(ax: Axes, chart: Chart) -> None:
    assert chart.scale is not None
    ax.plot(chart.scale.x, chart.scale.y, color=ORANGE, lw=1.3, drawstyle="steps-post")
    ax.set_yscale("log", base=2)
    ax.set_ylabel("loss scale")


def _common(axes: Mapping[str, Axes], chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter

    low, high = chart.x_range
    margin = 0.01 * (high - low)
    last = list(axes)[-1]
    for name, ax in axes.items():
        ax.set_xlim(low - margin, high + margin)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: si(v)))
        ax.tick_params(labelbottom=name == last, labelsize=8)
        ax.yaxis.label.set_fontsize(8.5)
        ax.yaxis.set_label_coords(-0.062, 0.5)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        if name != "strip":
            ax.grid(True, color="#EBEBEB", lw=0.7)
            ax.set_axisbelow(True)
            for mark in chart.marks:
                if mark.lane == "incident" and name != "loss":
                    ax.axvline(mark.x, color=STATUS_COLOURS.get(mark.kind, GREY), lw=0.7, alpha=0.5, zorder=1)
    axes[last].set_xlabel("tokens", fontsize=9)
    _step_axis(axes["loss"], chart)


def _step_axis(ax: Axes, chart: Chart) -> None:
    """Steps along the upper edge; tokens a step may vary."""
    tokens, steps = chart.steps.x, chart.steps.y
    if len(tokens) < 2 or not (np.diff(tokens) > 0).all():
        return
    span = max(1.0, float(steps[-1] - steps[0]))
    nice = next(n * 10**e for e in range(12) for n in (1, 2, 5) if span / (n * 10**e) <= 9)
    values = np.arange(np.ceil(steps[0] / nice) * nice, steps[-1] + 1, nice)
    upper = ax.secondary_xaxis("top")
    upper.set_xticks(np.interp(values, steps, tokens).tolist(), [f"{int(v):,}" for v in values])
    upper.tick_params(labelsize=8, colors="#555555")
    upper.set_xlabel("step", fontsize=8.5, color="#555555")
    upper.spines["top"].set_color("#BBBBBB")


def _words(
    figure: Figure, chart: Chart, summary: Mapping[str, Any], key: list[str], total: float, bottom: float
) -> None:
    left = 0.018
    colour = VERMILION if summary["open_incidents"] or summary["status"] in ("failed", "lost") else "black"
    figure.text(left, 1 - 0.27 / total, summary["headline"], fontsize=14, fontweight="bold", color=colour, va="center")
    figure.text(left, 1 - 0.53 / total, subtitle(summary), fontsize=9.5, color="#333333", va="center")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: not labels[i].startswith("mean"))
    glyphs = _glyph_legend(chart)
    rows = [([handles[i] for i in order], [labels[i] for i in order]), (list(glyphs.values()), list(glyphs))]
    for row, (artists, names) in enumerate(rows):
        figure.legend(
            artists,
            names,
            loc="center left",
            bbox_to_anchor=(left - 0.006, 1 - (0.79 + 0.22 * row) / total),
            ncols=max(1, len(names)),
            fontsize=8.5,
            frameon=False,
            columnspacing=1.6,
        )
    for i, line in enumerate(key):
        figure.text(
            left, (bottom - 0.62 - 0.19 * i) / total, line, fontsize=8.5, family="DejaVu Sans Mono", va="center"
        )


def _glyph_legend(chart: Chart) -> dict[str, Artist]:
    """Glyphs that bear no words in the strip, and the colours of incidents."""
    from matplotlib.lines import Line2D

    legend: dict[str, Artist] = {}
    for mark in chart.marks:
        name = _GLYPH_NAMES.get(mark.kind)
        if mark.lane == "incident":
            name, glyph, colour, filled = f"incident, {mark.kind}", "o", STATUS_COLOURS.get(mark.kind, GREY), True
        elif name is not None:
            glyph, colour, filled = GLYPHS[mark.kind]
        else:
            continue
        legend[name] = Line2D([], [], ls="", marker=glyph, color=colour, mfc=colour if filled else "white", ms=6.5)
    return legend


def subtitle(summary: Mapping[str, Any]) -> str:
    """Loss, tokens, steps and the last known-good checkpoint in one line."""
    loss = summary["loss_nats"]
    parts = [
        "no finite loss"
        if loss is None
        else f"{loss:.3f} nats per token over the last {summary['loss_steps']} steps"
        f" (geometric-mean probability {summary['token_probability']:.3f})",
        f"{si(summary['tokens'])} tokens",
        f"{summary['steps']:,} steps, {summary['applied_steps']:,} applied",
    ]
    good = summary["last_known_good"]
    parts.append(f"last known-good checkpoint: step {good['step']:,}" if good else "no known-good checkpoint")
    return "   ·   ".join(parts)
