"""The heat map of the ranks for the page: a small PNG inside an SVG that names ranks and steps."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from html import escape

import numpy as np

from .data import FloatArray, Steps
from .svg import WIDE, Sheet, linear_ticks

# How many standard deviations more often than chance a rank must be the worst to be named for it.
UNUSUAL = 4.0


@dataclass(frozen=True)
class HeatMap:
    """Excess of each rank's loss over the median of the ranks, over time.

    Attributes:
        svg: The picture, one SVG element for each sheet.
        text: What it shows in a sentence.
        full_scale: Excess in nats at which the colour is full.
        shown: Number of rows.
        world_size: Number of ranks.
        worst: Ranks that were the worst more often than chance allows, as :func:`often_worst` tells.
        seconds: Where the time of a step goes and which rank is slow, in sentences; empty where the journal does not tell.
        gaps: Whether the loss of a rank is not known for a stretch of time, in which the rank may not have been there.
    """

    svg: tuple[str, ...]
    text: str
    full_scale: float
    shown: int
    world_size: int
    worst: list[tuple[int, float, float]]
    seconds: str = ""
    gaps: bool = False


def heat_map(
    steps: Steps, named: Collection[int] = (), *, columns: int = 600, sheets: tuple[Sheet, ...] = (WIDE,)
) -> HeatMap | None:
    """The heat map over all passes in the order written; None for one rank or without the ranks' losses.

    Args:
        steps: The journal's steps.
        named: Ranks that an incident names; their rows are labelled.
        columns: Stretches of time at most.
        sheets: One picture for each.
    """
    losses, known = steps.rank_losses, steps.rank_known
    if losses is None or known is None:
        return None
    with np.errstate(invalid="ignore"):
        excess = losses - steps["loss_median"][:, None]
    excess = np.where(np.isfinite(excess), excess, 0.0).clip(min=0.0)
    starts = np.unique(np.linspace(0, len(excess), min(columns, len(excess)) + 1).astype(np.int64)[:-1])
    cells = np.maximum.reduceat(excess, starts, axis=0).T
    broken = np.logical_or.reduceat(known & ~np.isfinite(losses), starts, axis=0).T
    # Of many ranks the lines hold those furthest out: of one that is there and not among them it is known that it is not.
    steps_worlds = np.where(steps.worlds > 0, steps.worlds, np.iinfo(np.int64).max)[:, None]
    untold = ~known & ((steps.ranks >= steps_worlds) | ~np.isfinite(steps["loss_median"])[:, None])
    gone = np.logical_and.reduceat(untold, starts, axis=0).T
    # Full colour is reached at an excess that healthy noise does not reach, or at the largest one.
    noise = float(np.quantile(excess, 0.99)) if excess.size else 0.0
    full = max(float(min(cells.max(), max(1.0, 10 * noise))), 1e-9)
    row, column = np.unravel_index(int(np.argmax(cells)), cells.shape)
    rank, at = int(steps.ranks[row]), int(steps.step[starts[column]])
    text = f"largest excess: rank {rank}, {cells.max():.2f} nats above the median of the ranks, near step {at}"
    if broken.any():
        ranks = ", ".join(str(r) for r in steps.ranks[broken.any(axis=1)][:8])
        text += f"; not finite at times: rank {ranks}"
    if gone.any():
        absent = [str(r) for r in steps.ranks[gone.any(axis=1)]]
        more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
        text += f"; not there or not known at times: rank {', '.join(absent[:8])}{more}"
    worst = often_worst(steps)
    image = _png(_shade(cells / full, broken, gone))
    labelled = sorted({*named, rank, *(r for r, _, _ in worst)})
    pictures = tuple(_picture(steps, starts, image, gone, labelled, text, sheet) for sheet in sheets)
    world_size, seconds = max(steps.world_size, len(cells)), seconds_words(steps)
    return HeatMap(pictures, text, full, len(cells), world_size, worst, seconds, bool(gone.any()))


def seconds_words(steps: Steps) -> str:
    """Where the median rank's time goes, and who is slow by its own time: that of a step without the waiting for others."""
    slowest, own, usual = steps["slowest_rank"], steps["own_seconds"], steps["own_seconds_median"]
    parts = [steps[f"{name}_seconds_median"] for name in ("step", "data", "wait")]
    told = np.isfinite([slowest, own, *parts]).all(axis=0) & (usual > 0)
    if not told.any():
        return ""
    step, data, wait = (float(np.median(part[told])) for part in parts)
    words = (
        f"A step takes the median rank {step:.3g} s, of which it waits {data:.3g} s for data and {wait:.3g} s for other"
        " ranks."
    )
    slow = []
    for rank, share, chance in often_worst(steps, "slowest_rank"):
        times = float(np.median((own / np.where(told, usual, 1.0))[told & (slowest == rank)]))
        slow.append(
            f"rank {rank} ({share:.0%} of the steps; with equal ranks it would be {chance:.1%}), {times:.2f} times the"
            " median rank's own time"
        )
    if not slow:
        return f"{words} By its own time, waiting for others left out, no rank is the slowest more often than chance allows."
    return f"{words} Slowest by its own time, waiting for others left out: {'; '.join(slow)}.".replace("%", " %")


def often_worst(steps: Steps, column: str = "worst_rank") -> list[tuple[int, float, float]]:
    """Ranks that were the worst more often than equal ranks would be: rank, share of its steps, share expected by chance.

    ``column`` says who was: ``worst_rank`` by loss, ``slowest_rank`` by time.

    Under chance a rank is the worst of a step with probability one by the number of ranks, which a restart may change: the
    count is a sum of Bernoulli variables, and its normal approximation judges. The most frequent first, at most five.
    """
    known = np.isfinite(steps[column])
    worst = steps[column][known].astype(np.int64)
    if not worst.size:
        return []
    worlds = np.where(steps.worlds > 0, steps.worlds, max(steps.world_size, 2))[known]
    found = []
    for rank, count in enumerate(np.bincount(worst)):
        chance = 1 / worlds[worlds > rank]
        expected, spread = float(chance.sum()), math.sqrt(float((chance * (1 - chance)).sum()))
        if chance.size and count > expected + UNUSUAL * spread:
            found.append((rank, float(count) / chance.size, expected / chance.size))
    return sorted(found, key=lambda row: -row[1])[:5]


def _picture(
    steps: Steps, starts: np.ndarray, image: str, gone: np.ndarray, labelled: list[int], text: str, sheet: Sheet
) -> str:
    rows, name = len(steps.ranks), sheet.name
    row = min(24.0, max(4.0, 320 / rows))
    height = row * rows
    everyone = rows <= 16
    words = f"{rows} of {max(steps.world_size, rows)} ranks, {len(steps):,} steps; {text}."
    parts = [
        f'<image href="{image}" x="{sheet.left}" y="4" width="{sheet.inner}" height="{height:.1f}"'
        ' preserveAspectRatio="none" style="image-rendering: pixelated"/>',
        f'<rect class="frame" x="{sheet.left}" y="4" width="{sheet.inner}" height="{height:.1f}"/>',
    ]
    # Grey alone might be taken for a weak colour.
    lines = []
    for i, begin, end in _stretches(gone)[:2000]:
        left, right = (sheet.left + sheet.inner * edge / gone.shape[1] for edge in (begin, end))
        lines.append(f"M{left:.1f},{4 + row * (i + 0.5):.1f}H{right:.1f}")
    if lines:
        parts.append(f'<path class="gone" d="{"".join(lines)}"/>')
    last = -math.inf
    for i, rank in enumerate(steps.ranks.tolist()):
        y = 4 + row * (i + 0.5)
        if (everyone or rank in labelled or i in (0, rows - 1)) and y - last >= 11:
            last = y
            css = "lane" if rank in labelled else "tick"
            parts.append(
                f'<text class="{css}" text-anchor="end" x="{sheet.left - 8}" y="{y + 4:.1f}">rank {rank}</text>'
            )
    # The columns are passes in the order computed: where one was abandoned, the steps begin again further back.
    position = np.interp(np.arange(len(steps)), [*starts, len(steps)], np.arange(len(starts) + 1)) / len(starts)
    for i in (np.flatnonzero(np.diff(steps.branch) > 0) + 1).tolist()[:60]:
        x = sheet.left + sheet.inner * float(position[i])
        title = f"back to step {int(steps.step[i])}"
        parts.append(
            f'<line class="stroke thin blue" stroke-dasharray="3 3" x1="{x:.1f}" x2="{x:.1f}" y1="4"'
            f' y2="{height + 4:.1f}"><title>{title}</title></line>'
        )
    for tick in linear_ticks(0, len(steps) - 1, sheet.ticks) if len(steps) > 1 else [0.0]:
        x = sheet.left + sheet.inner * float(position[int(tick)])
        step = int(steps.step[int(tick)])
        parts.append(f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{height + 20:.0f}">{step:,}</text>')
    parts.append(
        f'<text class="axis" text-anchor="middle" x="{sheet.left + sheet.inner / 2:.0f}" y="{height + 36:.0f}">step, in the'
        " order computed</text>"
    )
    return (
        f'<svg class="chart {name}" viewBox="0 0 {sheet.width} {height + 44:.0f}" role="img"'
        f' aria-labelledby="{name}-ranks-title" aria-describedby="{name}-ranks-text">'
        f'<title id="{name}-ranks-title">Heat map of rank against time</title>'
        f'<desc id="{name}-ranks-text">{escape(words)}</desc>{"".join(parts)}</svg>'
    )


def _stretches(cells: np.ndarray) -> list[tuple[int, int, int]]:
    """Where a row of truth values holds: row, first column, the column behind the last.

    Example:
        >>> _stretches(np.array([[False, False, False], [True, False, True]]))
        [(1, 0, 1), (1, 2, 3)]
    """
    edges = np.diff(np.pad(cells.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    (rows, begins), (_, ends) = np.nonzero(edges == 1), np.nonzero(edges == -1)
    return list(zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True))


def _shade(share: FloatArray, broken: np.ndarray, gone: np.ndarray) -> np.ndarray:
    """RGBA bytes ``[ranks, columns, 4]``: vermilion, the more opaque the further out; purple not finite, grey not known."""
    pixels = np.zeros((*share.shape, 4), dtype=np.uint8)
    pixels[..., :3] = (213, 94, 0)
    pixels[..., 3] = (np.sqrt(share.clip(0, 1)) * 255).astype(np.uint8)
    pixels[broken] = (170, 68, 153, 255)
    pixels[gone] = (128, 128, 128, 96)
    return pixels


def _png(pixels: np.ndarray) -> str:
    """A ``data:`` address of RGBA pixels ``[height, width, 4]``."""
    height, width, _ = pixels.shape
    raw = b"".join(b"\0" + row.tobytes() for row in pixels)
    chunk: Callable[[bytes, bytes], bytes] = lambda kind, data: (  # noqa: E731
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")
