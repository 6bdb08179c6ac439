"""The chart for the page: SVG whose colours follow the page's theme.

Every group bears a class (``s-band``, ``s-fault``, ...) that the page's legend switches on and off; every mark bears its
sentence as ``<title>``, which is both the tooltip and what a screen reader says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from .chart import LANES, Band, Chart, LaneRow, Line, Mark, lay_out, place, si, switch

ROW = 20


@dataclass(frozen=True)
class Sheet:
    """Measures in pixels: the whole width, what is kept free on both sides, and how many labels an axis bears."""

    name: str
    width: int
    left: int
    right: int
    ticks: int

    @property
    def inner(self) -> int:
        return self.width - self.left - self.right

    @property
    def edge(self) -> int:
        """Where the panels end on the right."""
        return self.width - self.right


WIDE = Sheet("wide", 1120, 108, 24, 8)
NARROW = Sheet("narrow", 480, 98, 10, 4)  # for a phone: the same words at the same size

# Kind of a mark: glyph and CSS class of its colour.
_GLYPHS = {
    "fault": ("triangle-down", "purple"),
    "rollback": ("arrow", "blue"),
    "retry_step": ("ring", "blue"),
    "skip_step": ("cross", "blue"),
    "quarantine": ("square-open", "blue"),
    "reduce_lr": ("triangle-down", "blue"),
    "lower_loss_scale": ("triangle-down-open", "blue"),
    "restore_optimizer": ("plus", "blue"),
    "stop": ("square", "red"),
    "candidate": ("triangle-open", "grey"),
    "known_good": ("triangle", "green"),
    "poisoned": ("cross", "red"),
    "failed": ("square-open", "orange"),
    "removed": ("minus", "grey"),
    "overflow": ("cross", "orange"),
    "backoff": ("triangle-down-open", "orange"),
    "growth": ("triangle-open", "orange"),
    "changed": ("diamond", "orange"),
    "restart": ("bar", "ink"),
    "topology": ("bar", "purple"),
    "infra": ("diamond", "grey"),
    "rate": ("diamond", "blue"),
    "mixture": ("diamond", "orange"),
    "experiment": ("plus", "purple"),
}
STATUS_CLASSES = {"open": "red", "escalated": "red", "recovered": "green", "resolved": "grey"}
_SHAPES = {
    "triangle": "M0,-6L6,5L-6,5Z",
    "triangle-open": "M0,-6L6,5L-6,5Z",
    "triangle-down": "M0,6L6,-5L-6,-5Z",
    "triangle-down-open": "M0,6L6,-5L-6,-5Z",
    "cross": "M-5,-5L5,5M5,-5L-5,5",
    "arrow": "M-7,0L1,-5V-1H7V1H1V5Z",
    "minus": "M-6,0L6,0",
    "plus": "M0,-6L0,6M-6,0L6,0",
    "square": "M-5,-5H5V5H-5Z",
    "square-open": "M-5,-5H5V5H-5Z",
    "diamond": "M0,-6L5,0L0,6L-5,0Z",
    "bar": "M0,-8L0,8",
    "ring": "M-5,0A5,5 0 1 0 5,0A5,5 0 1 0 -5,0",
}


@dataclass
class _Axis:
    """Maps tokens and one panel's values to pixels."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    top: float
    height: float
    sheet: Sheet
    log: bool = False

    def x(self, tokens: float) -> float:
        low, high = self.x_range
        return self.sheet.left + (tokens - low) / (high - low) * self.sheet.inner

    def y(self, value: float) -> float:
        low, high = self.y_range
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
        share = (value - low) / (high - low)
        return self.top + self.height * (1 - min(1.02, max(-0.02, share)))

    def path(self, line: Line) -> str:
        """An SVG path; breaks where the value is not finite."""
        parts, pen_down = [], False
        for x, y in zip(line.x.tolist(), line.y.tolist(), strict=True):
            if not math.isfinite(y) or (self.log and y <= 0):
                pen_down = False
                continue
            parts.append(f"{'L' if pen_down else 'M'}{self.x(x):.1f},{self.y(y):.1f}")
            pen_down = True
        return "".join(parts)

    def alone(self, line: Line) -> list[tuple[float, float]]:
        """Where values stand between gaps, so that :meth:`path` draws nothing of them."""
        drawn = np.isfinite(line.y) & ((line.y > 0) if self.log else True)
        padded = np.concatenate([[False], drawn, [False]])
        index = np.flatnonzero(drawn & ~padded[:-2] & ~padded[2:])
        return [(self.x(float(line.x[i])), self.y(float(line.y[i]))) for i in index]

    def area(self, band: Band) -> str:
        keep = np.isfinite(band.low) & np.isfinite(band.high)
        xs, lows, highs = band.x[keep].tolist(), band.low[keep].tolist(), band.high[keep].tolist()
        there = [f"{self.x(x):.1f},{self.y(h):.1f}" for x, h in zip(xs, highs, strict=True)]
        back = [f"{self.x(x):.1f},{self.y(v):.1f}" for x, v in zip(reversed(xs), reversed(lows), strict=True)]
        return f"M{'L'.join(there + back)}Z" if there else ""


def chart_svg(chart: Chart, description: str, sheet: Sheet = WIDE, linked: Collection[int] | None = None) -> str:
    """The whole chart as one SVG element; ``linked`` are the incidents that have a card to link to, None for all."""
    left, edge = sheet.left, sheet.edge
    laid = {lane: lay_out(chart, lane, sheet.inner) for lane in chart.lanes}
    body: list[str] = []
    top = 34.0
    loss = _Axis(chart.x_range, chart.loss_range, top, 330, sheet, chart.log_loss)
    body += _frame(loss, "loss, nats per token" + (" (log)" if chart.log_loss else ""), value_ticks(loss))
    body += _step_ticks(chart, loss)
    body += _loss_lines(chart, loss)
    top += loss.height + 16
    strip_top, spans = top, [(loss.top, loss.top + loss.height)]
    for lane, (items, rows) in laid.items():
        height = ROW * rows + 6.0
        by_switch: dict[str, list[str]] = {}
        for item in items:
            drawn = _mark_svg(item, loss, top + 3 + ROW * (item.row + 0.5), linked)
            by_switch.setdefault(switch(item.mark), []).append(drawn)
        # A lane's name goes with its marks, where one switch has them all.
        css = f"lane s-{next(iter(by_switch))}" if len(by_switch) == 1 else "lane"
        body.append(f'<text class="{css}" x="{left - 8}" y="{top + height / 2 + 4:.0f}">{LANES[lane]}</text>')
        body += [f'<g class="s-{key}">{"".join(marks)}</g>' for key, marks in by_switch.items()]
        top += height
        body.append(f'<line class="rule" x1="{left}" x2="{edge}" y1="{top:.0f}" y2="{top:.0f}"/>')
    top += 16 if top > strip_top else 0
    for title, lines, scaled, log_scale in _panels(chart):
        top += 12  # the title's line
        axis = _Axis(chart.x_range, _limits(scaled, log_scale), top, 84, sheet, log_scale)
        body += _frame(axis, "", value_ticks(axis, few=True))
        for css in dict.fromkeys(css for css, _ in lines):
            body += _lines(axis, css, [line for name, line in lines if name == css])
        body += _beyond(axis, [line for css, line in lines if css == "s-abandoned"])
        # Above the frame: on the side it would be longer than the panel is high, and within it would lie on the lines.
        body.append(f'<text class="inside" text-anchor="end" x="{edge}" y="{top - 5:.0f}">{escape(title)}</text>')
        spans.append((axis.top, axis.top + axis.height))
        top += axis.height + 16
    body += _incident_lines(chart, loss, spans, linked)
    body += [
        f'<text class="tick" text-anchor="middle" x="{loss.x(v):.1f}" y="{top:.0f}">{si(v)}</text>'
        for v in linear_ticks(*chart.x_range, sheet.ticks)
    ]
    body.append(
        f'<text class="axis" text-anchor="middle" x="{left + sheet.inner / 2}" y="{top + 20:.0f}">tokens</text>'
    )
    full_height = top + 28
    name = sheet.name
    return (
        f'<svg class="chart {name}" viewBox="0 0 {sheet.width} {full_height:.0f}" role="img"'
        f' aria-labelledby="{name}-title" aria-describedby="{name}-text"><title id="{name}-title">Loss against tokens</title>'
        f'<desc id="{name}-text">{escape(description)}</desc>{"".join(body)}</svg>'
    )


def _panels(chart: Chart) -> list[tuple[str, list[tuple[str, Line]], list[Line], bool]]:
    """Title, (CSS class, line), the lines that must fit in, logarithmic."""
    panels = []
    gradient = [*(("s-abandoned", line) for line in chart.gradient[1]), ("s-mean", chart.gradient[0])]
    title = "gradient norm"
    if chart.update is not None:
        gradient.append(("s-update", chart.update))
        title += ", update (dashed)"
    if any((line.y[np.isfinite(line.y)] > 0).any() for _, line in gradient):
        panels.append((title, gradient, [line for _, line in gradient], True))
    live, abandoned = chart.rate
    if np.isfinite(live.y).any():
        # The plan stays readable: an abandoned excursion of the rate may be fifty times as high, and is cut.
        most = 2 * float(np.nanmax(np.where(np.isfinite(live.y), live.y, np.nan)))
        near = [line for line in abandoned if not (np.isfinite(line.y) & (line.y > most)).any()]
        rates = [*(("s-abandoned", line) for line in abandoned), ("s-mean", live)]
        panels.append(("learning rate", rates, [live, *near], False))
    if chart.scale is not None:
        panels.append(("loss scale", [("s-scale", chart.scale)], [chart.scale], True))
    return panels


def _lines(axis: _Axis, css: str, lines: Sequence[Line]) -> list[str]:
    """Lines of one kind, and a dot for each value that has no neighbour to draw a line to."""
    path = "".join(axis.path(line) for line in lines)
    dots = [dot for line in lines for dot in axis.alone(line)]
    name = css.partition(" ")[0]
    return [
        *([f'<path class="line {css}" d="{path}"/>'] if "L" in path else []),
        *(f'<circle class="point {name}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in dots[:300]),
    ]


def _beyond(axis: _Axis, lines: Sequence[Line]) -> list[str]:
    """For each line that leaves the panel at the top an arrowhead there, with the value it goes up to."""
    parts, free = [], -math.inf
    for line in lines[:100]:
        heights = np.where(np.isfinite(line.y), line.y, -np.inf)
        highest = int(np.argmax(heights)) if heights.size else 0
        if not heights.size or not heights[highest] > axis.y_range[1]:
            continue
        x, value, words = axis.x(float(line.x[highest])), float(heights[highest]), ""
        if abs(x - free) >= 70:
            free = x
            side = ("end", x - 9) if x + 60 > axis.sheet.edge else ("start", x + 9)
            place_at = f'text-anchor="{side[0]}" x="{side[1]:.1f}" y="{axis.top + 12:.1f}"'
            words = f'<text class="label" {place_at}>up to {value:.2g}</text>'
        parts.append(
            f'<g class="s-abandoned"><title>beyond the panel, up to {value:.3g}</title>'
            f'<path class="fill grey" d="M{x:.1f},{axis.top + 1:.1f}l5,9h-10Z"/>{words}</g>'
        )
    return parts


def _limits(lines: Sequence[Line], log_scale: bool) -> tuple[float, float]:
    values = np.concatenate([line.y for line in lines])
    values = values[np.isfinite(values) & ((values > 0) if log_scale else True)]
    # What is beyond these is a damaged line's, and the room left above it would be infinite.
    values = np.clip(values, -1e100, 1e100)
    low, high = float(values.min()), float(values.max())
    if log_scale:
        low = max(low, 1e-100)
        return low * 0.8, high * 1.25 * (high / low) ** 0.15
    return min(0.0, low), high * 1.12 if high > 0 else 1.0


def _frame(axis: _Axis, title: str, ticks: Sequence[float]) -> list[str]:
    left, edge = axis.sheet.left, axis.sheet.edge
    parts = [
        f'<rect class="frame" x="{left}" y="{axis.top:.0f}" width="{axis.sheet.inner}" height="{axis.height:.0f}"/>'
    ]
    for value in ticks:
        y = axis.y(value)
        parts.append(f'<line class="grid" x1="{left}" x2="{edge}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{left - 8}" y="{y + 4:.1f}">{_tick(value)}</text>')
    place_at = f"translate(18,{axis.top + axis.height / 2:.0f}) rotate(-90)"
    parts.append(f'<text class="axis" text-anchor="middle" transform="{place_at}">{escape(title)}</text>')
    return parts


def _tick(value: float) -> str:
    return si(value) if abs(value) >= 1e4 else f"{value:.4g}"


def _step_ticks(chart: Chart, axis: _Axis) -> list[str]:
    tokens, steps = chart.steps.x, chart.steps.y
    if len(tokens) < 2 or not (np.diff(tokens) > 0).all():
        return []
    parts = [f'<text class="tick" text-anchor="end" x="{axis.sheet.left - 8}" y="20">step</text>']
    for value in linear_ticks(float(steps[0]), float(steps[-1]), axis.sheet.ticks):
        if value == int(value):
            x = axis.x(float(np.interp(value, steps, tokens)))
            parts.append(f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="20">{int(value):,}</text>')
    return parts


def _loss_lines(chart: Chart, axis: _Axis) -> list[str]:
    parts = _lines(axis, "s-abandoned", chart.abandoned)
    if chart.band is not None:
        parts.append(f'<path class="s-band" d="{axis.area(chart.band)}"/>')
    if chart.worst is not None:
        parts += _lines(axis, "s-worst", [chart.worst[1]])
    parts += _lines(axis, "s-mean strong", [chart.mean])
    for x in chart.nonfinite.tolist()[:500]:
        parts.append(
            f'<g class="s-nonfinite" transform="translate({axis.x(x):.1f},{axis.top + 9:.0f})"><title>loss not finite at'
            f' {si(x)} tokens</title><path class="stroke red" d="{_SHAPES["cross"]}"/></g>'
        )
    return parts


def _incident_lines(
    chart: Chart, axis: _Axis, spans: Sequence[tuple[float, float]], linked: Collection[int] | None
) -> list[str]:
    incidents = [m for m in chart.marks if m.lane == "incident"]
    rows = place([(axis.x(m.x) - 11, axis.x(m.x) + 11) for m in incidents], rows=4, gap=2)
    parts = ['<g class="s-incident">']
    for mark, row in zip(incidents, rows, strict=True):
        x, css = axis.x(mark.x), STATUS_CLASSES.get(mark.kind, "grey")
        parts += [
            f'<line class="stroke thin {css}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.0f}" y2="{bottom:.0f}"/>'
            for top, bottom in spans
        ]
        if row is not None:
            parts.append(_disc(x, axis.top + 28 + 22 * row, mark, css, linked))
    return [*parts, "</g>"]


def _disc(x: float, y: float, mark: Mark, css: str, linked: Collection[int] | None) -> str:
    # A square still needs somebody, a disc does not: told apart without colour.
    shape = '<rect class="fill red" x="-9" y="-9" width="18" height="18"/>' if css == "red" else ""
    shape = shape or f'<circle class="fill {css}" r="9"/>'
    disc = (
        f'<g transform="translate({x:.1f},{y:.1f})"><title>{escape(mark.detail)}</title>{shape}'
        f'<text class="number" text-anchor="middle" y="4">{escape(mark.label)}</text></g>'
    )
    # Not in the order of the Tab key: within a picture a screen reader finds no links, and the table above has the same.
    link = linked is None or mark.number in linked
    return f'<a href="#incident-{mark.number}" tabindex="-1">{disc}</a>' if link else disc


def _mark_svg(item: LaneRow, axis: _Axis, y: float, linked: Collection[int] | None) -> str:
    mark = item.mark
    x = right = axis.x(mark.x)
    title = f"<title>{escape(mark.detail)}</title>"
    if mark.kind == "rollback" and mark.end is not None:
        end = axis.x(mark.end)
        shape = (
            f'<g>{title}<line class="stroke blue" x1="{x:.1f}" x2="{end + 7:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<path class="fill blue" d="M{end:.1f},{y:.1f}l8,-5v10Z"/></g>'
        )
    elif mark.lane == "incident":
        css = STATUS_CLASSES.get(mark.kind, "grey")
        right = x if mark.end is None else max(x, axis.x(mark.end))
        bar = f'<rect class="fill span {css}" x="{x:.1f}" y="{y - 4:.1f}" width="{right - x:.1f}" height="8"/>'
        return bar + _disc(x, y, mark, css, linked)
    else:
        glyph, css = _GLYPHS.get(mark.kind, ("diamond", "grey"))
        right = x if mark.end is None else max(x, axis.x(mark.end))
        path = f'<path class="{_paint(glyph)} {css}" d="{_SHAPES[glyph]}"/>'
        shape = f'<g transform="translate({x:.1f},{y:.1f})">{title}{path}</g>'
        if right > x:
            bar = f'x="{x:.1f}" y="{y - 3:.1f}" width="{right - x:.1f}" height="6"'
            shape = f'<rect class="fill span {css}" {bar}/>{shape}'
    if item.labelled and item.flipped:
        left = x if mark.end is None else min(x, axis.x(mark.end))
        shape += (
            f'<text class="label" text-anchor="end" x="{left - 10:.1f}" y="{y + 4:.1f}">{escape(mark.label)}</text>'
        )
    elif item.labelled:
        shape += f'<text class="label" x="{right + 10:.1f}" y="{y + 4:.1f}">{escape(mark.label)}</text>'
    return shape


def _paint(glyph: str) -> str:
    return "stroke" if glyph.endswith("-open") or glyph in ("cross", "plus", "minus", "bar", "ring") else "fill"


def glyph_svg(kind: str) -> str:
    """A mark's glyph alone, for tables and the legend; of an ``incident`` both of its shapes."""
    if kind == "incident":
        both = '<rect class="fill red" x="-8" y="-4" width="7" height="8"/><circle class="fill green" cx="4" r="4"/>'
        return f'<svg class="glyph" viewBox="-8 -8 16 16" aria-hidden="true">{both}</svg>'
    glyph, css = _GLYPHS.get(kind, ("diamond", "grey"))
    path = f'<path class="{_paint(glyph)} {css}" d="{_SHAPES[glyph]}"/>'
    return f'<svg class="glyph" viewBox="-8 -8 16 16" aria-hidden="true">{path}</svg>'


# ------------------------------------------------------------------------------------------------------------------ ticks


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between two limits, at most about ``count``.

    Example:
        >>> linear_ticks(0, 1000, 5)
        [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]
    """
    span = high - low
    if not span > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(n * power for n in (1, 2, 5, 10) if span / (n * power) <= count + 0.5)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) + 0.0 for i in range(first, last + 1)]


def log_ticks(low: float, high: float, *, few: bool = False) -> list[float]:
    """1, 2, 5, 10, ... between two positive limits; only some of the powers of ten where there are many.

    Example:
        >>> log_ticks(1.8, 60)
        [2.0, 5.0, 10.0, 20.0, 50.0]
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    per_decade = (1, 2, 5) if math.log10(high / low) < (1.2 if few else 2.5) else (1,)
    ticks = [float(f"{n}e{d}") for d in decades for n in per_decade if low <= float(f"{n}e{d}") <= high]
    return ticks[:: max(1, math.ceil(len(ticks) / (4 if few else 8)))]


def value_ticks(axis: _Axis, *, few: bool = False) -> list[float]:
    low, high = axis.y_range
    return log_ticks(low, high, few=few) if axis.log else linear_ticks(low, high, 3 if few else 7)
