"""Chart, picture and page: what is drawn, and what is escaped."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_journals import MadeRun, bad_rank, data_verdict, fp16_run, parade

from lightning_sentinel.cli.report import incident_line
from lightning_sentinel.incidents import Experiment, FindingKind, IncidentStatus, Verdict, VerdictKind
from lightning_sentinel.report.build import write_reports
from lightning_sentinel.report.chart import build_chart, lay_out, loss_limits, place, thin, thin_band
from lightning_sentinel.report.curve import key_lines, render_png
from lightning_sentinel.report.data import RunData, load_run
from lightning_sentinel.report.heat import heat_map, often_worst, seconds_words
from lightning_sentinel.report.html import cards, glance, layer_words, render_html, times_words
from lightning_sentinel.report.summary import summarise
from lightning_sentinel.report.svg import NARROW, WIDE, chart_svg, linear_ticks, log_ticks

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def parade_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parade")
    parade(folder)
    write_reports(folder)
    return folder


class Page(HTMLParser):
    """Tags, ids and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name == "href":
                self.links.append(value or "")
            elif name == "src":
                self.sources.append(value or "")


# ------------------------------------------------------------------------------------------------------------------ chart


def test_thinning_keeps_extremes_ends_and_gaps() -> None:
    x, y = np.arange(10_000.0), np.ones(10_000)
    y[1234], y[5678], y[9000] = 50.0, -3.0, np.nan
    line = thin(x, y, 300)
    assert len(line.x) <= 400
    assert dict(zip(line.x.tolist(), line.y.tolist(), strict=True))[1234.0] == 50.0
    assert -3.0 in line.y
    assert 9000.0 in line.x[np.isnan(line.y)]
    assert (line.x[0], line.x[-1]) == (0.0, 9999.0)
    band = thin_band(x, y, y + 1, 100)
    assert (np.nanmin(band.low), np.nanmax(band.high)) == (-3.0, 51.0)


def test_nothing_is_placed_on_anything_else() -> None:
    boxes = [(0.0, 50.0), (10.0, 60.0), (20.0, 70.0), (60.0, 90.0), (30.0, 40.0)]
    rows = place(boxes, rows=3)
    assert rows == [0, 1, 2, 0, None]
    for i, a in enumerate(boxes):
        for j, b in enumerate(boxes[:i]):
            if rows[i] is not None and rows[i] == rows[j]:
                assert a[1] < b[0] or b[1] < a[0]


def test_the_chart_of_the_parade(parade_dir: Path) -> None:
    run = load_run(parade_dir)
    chart = build_chart(run, summarise(run))
    assert chart.lanes == ["fault", "incident", "action", "checkpoint", "schedule"]
    assert chart.band is None
    assert [len(a.x) for a in chart.abandoned] == [1 + 1, 21 + 1, 50 + 1]  # each with the live step before the fork
    assert chart.nonfinite.tolist() == [141 * 1024]
    assert not chart.log_loss
    rollbacks = [m for m in chart.marks if m.kind == "rollback"]
    assert [(m.x, m.end) for m in rollbacks] == [(196 * 1024, 176 * 1024), (300 * 1024, 251 * 1024)]
    assert [m.label for m in chart.marks if m.lane == "schedule"] == ["rate 0.1 → 0.002", "rate 0.002 → 0.1", "mixture"]
    incidents = [(m.number, m.step, m.kind) for m in chart.marks if m.lane == "incident"]
    assert incidents == [(1, 120, "recovered"), (2, 140, "recovered"), (3, 195, "recovered"), (4, 299, "recovered")]
    for lane in chart.lanes:
        laid, rows = lay_out(chart, lane, 1000)
        assert all(item.labelled for item in laid if item.mark.label)
        assert max(item.row for item in laid) == rows - 1


def test_what_happened_to_machines_is_marked_where_it_happened(tmp_path: Path) -> None:
    """A restart, the ranks that are left, a lost rank and another host: on the curve, in the picture's words, on the page."""
    run = MadeRun(tmp_path, ranks=4)
    run.begin()
    run.run(30)
    run.write("infra.event", kind="lost_rank", text="rank 3 (newest line at step 29) ended without a word, or hangs")
    for journal in run.journals:  # killed: no end is written
        journal.close()
    run.step = 20
    run.begin(segment=1)
    run.write("run.resumed", checkpoint="checkpoints/step-00000020")
    run.run(5)
    run.write("infra.event", kind="host", text="rank 1 runs on host c, before on a")
    run.write("topology.changed", old_world_size=4, world_size=2)
    run.run(15)
    run.end()
    data = load_run(tmp_path)
    chart = build_chart(data, summarise(data))
    marks = [(m.kind, m.step, m.x / run.tokens_per_step, m.label) for m in chart.marks if m.lane == "run"]
    # each where its step's loss is drawn, which is at that step's end; every rank has seen what happened
    assert sorted(set(marks)) == [
        ("infra", 25, 26, "host"),
        ("infra", 30, 31, "lost_rank"),
        ("restart", 20, 21, "restart"),
        ("topology", 25, 26, "4 to 2 ranks"),
    ]
    assert "run" in chart.lanes
    text = render_html(data, summarise(data))
    for words in ("restart at step 20", "4 to 2 ranks at step 25", "rank 1 runs on host c, before on a at step 25"):
        assert words in text
    assert "ended without a word, or hangs at step 30" in text


def test_one_bad_rank_is_drawn_as_itself(tmp_path: Path) -> None:
    bad_rank(tmp_path, ranks=64, rank=41)
    run = load_run(tmp_path)
    chart = build_chart(run, summarise(run))
    assert chart.worst is not None
    assert chart.worst[0] == 41
    assert np.nanmax(chart.worst[1].y) > 39
    assert chart.log_loss
    assert chart.loss_range[1] > 40
    assert np.nanmax(chart.mean.y) < 6
    heat = heat_map(run.steps, {41}, sheets=(WIDE, NARROW))
    assert heat is not None
    assert (heat.shown, heat.world_size) == (64, 64)
    assert heat.text.startswith("largest excess: rank 41, 3")
    assert [re.findall(r'<text class="lane"[^>]*>([^<]*)<', svg) for svg in heat.svg] == [["rank 41"]] * 2
    assert [re.findall(r"back to step (\d+)", svg) for svg in heat.svg] == [["100"]] * 2
    assert heat.worst == []  # five steps out of 325 are no habit


def test_of_more_than_64_ranks_the_journal_keeps_those_furthest_out(tmp_path: Path) -> None:
    bad_rank(tmp_path, ranks=200, rank=137)
    run = load_run(tmp_path)
    steps = run.steps
    assert steps.world_size == 200
    assert len(steps.ranks) == 64
    assert steps.rank_known is not None
    assert steps.rank_known.sum(axis=1).max() == 8
    column = steps.ranks.tolist().index(137)
    assert steps.rank_losses is not None
    bad = np.flatnonzero((steps.step >= 120) & (steps.step < 125) & (steps.attempt == 0))
    assert (steps.rank_losses[bad, column] > 35).all()
    chart = build_chart(run, summarise(run))
    assert chart.worst is not None
    assert chart.worst[0] == 137
    text = render_html(run, summarise(run))
    assert "Shown are the 64 of 200 ranks that were ever furthest out" in text
    assert "largest excess: rank 137" in text


def test_a_rank_is_named_for_being_the_worst_only_beyond_chance(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, ranks=4)
    run.begin()
    run.run(200)
    assert often_worst(load_run(tmp_path).steps) == []
    run.bad_rank = {2: 4.0}
    run.run(200)
    run.end()
    steps = load_run(tmp_path).steps
    assert often_worst(steps) == [(2, float((steps["worst_rank"] == 2).mean()), 0.25)]


def test_the_page_says_where_the_time_goes_and_who_is_slow(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, ranks=4)
    run.begin()
    run.run(100)
    words = "A step takes the median rank 0.05 s, of which it waits 0.001 s for data and 0.03 s for other ranks."
    equal = (
        f"{words} By its own time, waiting for others left out, no rank is the slowest more often than chance allows."
    )
    assert seconds_words(load_run(tmp_path).steps) == equal
    run.slow_rank = 3
    run.run(300)
    run.end()
    data = load_run(tmp_path)
    share = float((data.steps["slowest_rank"] == 3).mean())
    expected = (
        f"{words} Slowest by its own time, waiting for others left out: rank 3 ({100 * share:.0f} % of the steps; with"
        " equal ranks it would be 25.0 %), 2.00 times the median rank's own time."
    )
    assert share > 0.75
    assert seconds_words(data.steps) == expected
    assert f"<p>{expected}</p>" in render_html(data, summarise(data)).replace("&#39;", "'")


def test_a_journal_that_does_not_tell_the_seconds_of_the_ranks_is_read_without_them(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, ranks=2)
    run.seconds = lambda: {"step_seconds": 0.05}  # type: ignore[method-assign]
    run.begin()
    run.run(50)
    run.end()
    data = load_run(tmp_path)
    assert seconds_words(data.steps) == ""
    assert "A step takes the median rank" not in render_html(data, summarise(data))


def test_chance_is_judged_by_the_ranks_of_each_step(tmp_path: Path) -> None:
    # On two ranks each is the worst of half of the steps: more than a quarter, and still nobody's fault.
    run = MadeRun(tmp_path, ranks=4)
    run.begin()
    run.run(100)
    run.ranks = 2
    run.begin(segment=1)
    run.run(300)
    run.end()
    steps = load_run(tmp_path).steps
    assert [steps.worlds[i] for i in (0, 99, 100, 399)] == [4, 4, 2, 2]
    assert (steps["worst_rank"] == 0).mean() > 0.36
    assert often_worst(steps) == []
    run.bad_rank = {1: 4.0}
    run.run(200)
    run.end()
    steps = load_run(tmp_path).steps
    [(rank, share, chance)] = often_worst(steps)
    assert (rank, chance) == (1, pytest.approx((100 / 4 + 500 / 2) / 600))
    assert share == float((steps["worst_rank"] == 1).mean())


def test_the_layer_in_which_a_rank_first_differs_is_named() -> None:
    compared = {"module": "layers.2.mixer", "rank": 1, "healthy_rank": 0, "failing_rms": 14.25, "healthy_rms": 1.003}
    verdict = {"evidence": {"comparisons": {"first_deviating_layer": compared}}}
    assert layer_words(verdict) == (
        "layers.2.mixer: activations of 14.2 (root mean square) on rank 1, 1 on the healthy ranks"
    )
    assert layer_words({"evidence": {"comparisons": {"first_deviating_layer": None}}}) is None
    rank = {"culprits": ["rank:1"]}
    unrun = {"first_deviating_layer": None, "activation_norms": "not measured: the verdict needed no replay"}
    named = rank | {"evidence": {"comparisons": unrun}}
    assert layer_words(named) == "not measured: the verdict needed no replay"
    assert layer_words(rank) == "not measured: the verdict compares no layers"
    alone = rank | {"evidence": {"comparisons": unrun | {"activation_norms": {"layers.0": 1.0}}}}
    assert layer_words(alone) == "not measured: there are the layers of one rank, of no other"
    compared["module"] = None
    assert layer_words(verdict) == "none: every layer of rank 1 is like those of the healthy ranks"


def test_a_card_tells_every_finding_and_why_no_layer_was_compared(tmp_path: Path) -> None:
    """Of a bad rank the spike of the mean is seen first; the rank itself is the second finding."""
    run = MadeRun(tmp_path, ranks=2)
    run.begin()
    run.run(40)
    verdict = Verdict(
        VerdictKind.INFRASTRUCTURE,
        ("rank:1",),
        "The weights of the ranks differ.",
        evidence={"comparisons": {"activation_norms": "not measured: the verdict needed no replay"}},
    )
    incident = run.incident(1, FindingKind.SPIKE, score=146.72, threshold=8.0, message="21 nats above", verdict=verdict)
    mean, ranks = incident.findings[0], FindingKind.RANK_OUTLIER
    told = {"detector": "rank_outlier", "score": 338.53, "threshold": 7.5, "message": f"{EVIL} the mean hides it"}
    incident.findings.append(replace(mean, kind=ranks, **told))
    run.write("incident.updated", incident=incident.to_dict())
    run.end()
    data = load_run(tmp_path)
    page = render_html(data, summarise(data))
    assert re.findall(
        r'<tr class="finding"><th>(.*?)</th><td>(.*?)<br><span class="soft">(.*?)</span></td></tr>', page
    ) == [
        ("seen", "21 nats above", "spike: statistic 146.7 robust sigma, threshold 8 (18.3 times it)"),
        (
            "seen, too",
            "&lt;script&gt;alert(1)&lt;/script&gt; the mean hides it",
            "rank outlier: statistic 338.5 robust sigma, threshold 7.5 (45.1 times it)",
        ),
    ]
    assert "<tr><th>first layer that differs</th><td>not measured: the verdict needed no replay</td></tr>" in page


def test_of_many_incidents_those_that_need_somebody_have_a_card_and_every_link_leads_to_one(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.begin()
    run.run(30)
    for n in range(1, 216):
        incident = run.incident(n, FindingKind.SPIKE, verdict=data_verdict(f"prose/{n}"))
        run.write("quarantine.added", names=[f"sample:prose/{n}"], reason="corrupt", incident=n)
        run.run(1)
        if n not in (3, 7):
            run.close(incident, status=IncidentStatus.ESCALATED if n == 5 else IncidentStatus.RECOVERED)
    run.end()
    data = load_run(tmp_path)
    text = render_html(data, summarise(data))
    page = Page(text)
    shown = [3, 5, 7, *range(19, 216)]
    assert [i for i in page.ids if i.startswith("incident-")] == [f"incident-{n}" for n in shown]
    assert {link.removeprefix("#") for link in page.links if link.startswith("#")} <= set(page.ids)
    assert {f"#incident-{n}" for n in (3, 5, 7, 215)} <= set(page.links)
    assert re.findall(r'<p class="cardless">([^:]*):', text) == ["15 of 215 incidents have no card here"]
    assert '<td class="n">18</td><td>out</td><td>corrupt</td>' in text  # named, without a link


def test_what_is_done_step_after_step_is_told_once(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.begin()
    run.run(40)
    incident = run.incident(1, FindingKind.NONFINITE_GRADS, verdict=data_verdict())
    for _ in range(6):
        run.run(1, applied=False)
        run.act(incident, "skip_step", sample_ids=[f"s{run.step - 1}"])
    run.run(3)
    run.act(incident, "skip_step", sample_ids=["late"])
    run.run(30)
    run.close(incident)
    run.end()
    data = load_run(tmp_path)
    summary = summarise(data)
    marks = [(m.label, m.step, m.end is not None) for m in build_chart(data, summary).marks if m.lane == "action"]
    assert marks == [("6 x skip step", 40, True), ("skip step", 48, False)]
    [card] = cards(data, summary)
    assert card["done"] == ["7 x skip_step"]
    assert card["samples_skipped"] == [*(f"s{n}" for n in range(40, 46)), "late"]


def test_the_table_at_the_top_shows_what_needs_somebody_first() -> None:
    made = [
        {"number": n, "status": "escalated" if n == 3 else "open" if n == 17 else "recovered"} for n in range(1, 21)
    ]
    assert [c["number"] for c in glance(made)] == [17, 3, 20, 19, 18, 16, 15, 14, 13, 12, 11, 10]


@pytest.mark.parametrize(
    ("how", "colour"),
    [
        (IncidentStatus.ESCALATED, "red"),
        (None, "red"),  # still open
        (IncidentStatus.RECOVERED, "green"),
        (IncidentStatus.RESOLVED, "green"),
    ],
)
def test_a_run_that_needs_somebody_is_red_though_it_finished(
    tmp_path: Path, how: IncidentStatus | None, colour: str
) -> None:
    run = MadeRun(tmp_path)
    run.begin()
    run.run(40)
    incident = run.incident(1, FindingKind.SPIKE, score=9, message="a jump", verdict=data_verdict("prose/1"))
    run.run(10)
    if how is not None:
        run.close(incident, status=how)
    run.end()
    write_reports(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert f'<h1><span class="badge {colour}">finished</span>' in page
    assert ('<p class="next bad">' in page, '<p class="next">' in page) == (colour == "red", colour == "green")


@pytest.mark.parametrize(
    ("make", "lines"),
    [
        (
            bad_rank,
            {
                "gradient norm, update (dashed)": ["s-abandoned", "s-mean", "s-update"],
                "learning rate": ["s-abandoned", "s-mean"],
            },
        ),
        (
            fp16_run,
            {
                "gradient norm, update (dashed)": ["s-mean", "s-update"],
                "learning rate": ["s-mean"],
                "loss scale": ["s-scale"],
            },
        ),
    ],
)
def test_below_the_loss_each_panel_has_its_title_and_lines_on_the_same_axis(
    tmp_path: Path, make: Callable[[Path], MadeRun], lines: dict[str, list[str]]
) -> None:
    make(tmp_path)
    run = load_run(tmp_path)
    for sheet in (WIDE, NARROW):
        svg = chart_svg(build_chart(run, summarise(run)), "words", sheet)
        frames = [
            tuple(map(float, found))
            for found in re.findall(r'<rect class="frame" x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"', svg)
        ]
        titles = re.findall(r'<text class="inside" [^>]*y="(\S+)">([^<]*)<', svg)
        assert [title for _, title in titles] == list(lines)
        assert len(frames) == 1 + len(lines)
        assert {(x, width) for x, _, width, _ in frames} == {(sheet.left, sheet.inner)}
        paths = re.findall(r'<path class="line (s-[a-z]+)[^"]*" d="M([^"]*)"', svg)
        for (y, title), (_, top, _, height), (_, above, _, above_height) in zip(
            titles, frames[1:], frames, strict=False
        ):
            assert above + above_height < float(y) - 8 < float(y) < top  # on no line, and in no other panel
            drawn = {}
            for css, d in paths:
                points = [tuple(map(float, point.split(","))) for point in re.split("[ML]", d)]
                if all(top - 3 <= point[1] <= top + height + 3 for point in points):
                    drawn[css] = (points[0][0], points[-1][0])
            assert sorted(drawn) == lines[title]
            for css in set(drawn) & {"s-mean", "s-scale"}:
                assert drawn[css] == (sheet.left, sheet.edge)  # from the run's first token to its last, as the loss


def test_an_abandoned_rate_far_above_the_plan_is_cut_and_its_height_told(parade_dir: Path) -> None:
    data = load_run(parade_dir)
    chart = build_chart(data, summarise(data))
    spike = max(chart.rate[1], key=lambda line: float(np.nanmax(line.y)))
    assert np.nanmax(spike.y) > 20 * np.nanmax(chart.rate[0].y)
    for sheet in (WIDE, NARROW):
        svg = chart_svg(chart, "words", sheet)
        [(title, x, y, words)] = re.findall(
            r'<g class="s-abandoned"><title>([^<]*)</title><path class="fill grey" d="M([\d.]+),([\d.]+)[^>]*>'
            r"<text[^>]*>([^<]*)</text></g>",
            svg,
        )
        assert (title, words) == (
            f"beyond the panel, up to {np.nanmax(spike.y):.3g}",
            f"up to {np.nanmax(spike.y):.2g}",
        )
        low, high = chart.x_range
        at = sheet.left + (spike.x[np.nanargmax(spike.y)] - low) / (high - low) * sheet.inner
        assert float(x) == pytest.approx(at, abs=0.06)
        frames = re.findall(r'<rect class="frame" x="\S+" y="(\S+)" width="\S+" height="(\S+)"', svg)
        top = float(frames[2][0])  # of the learning rate, below loss and gradient
        assert float(y) == top + 1
        ticks = re.findall(r'<text class="tick" text-anchor="end"[^>]*>(0\.\d+)<', svg)
        assert "0.002" in ticks  # the plan has the panel


def test_many_abandoned_passes_do_not_swell_the_page() -> None:
    """Two thirds of 76,500 steps were left: on 25 long passes, and by a retry at every 50th step."""
    noise = np.random.default_rng(0).normal(3.0, 0.1, 100_000).tolist()
    path: list[int] = []
    for start in range(0, 25_000, 1000):
        path += [*range(start, start + 2000), *range(start, start + 1000)]
    path = [step for at in path for step in ([at, at] if at % 50 == 0 else [at])]
    run = RunData.from_events(
        {
            "event": "step", "step": step, "attempt": 0, "tokens": 1024 * (step + 1), "rank": 0, "time": 1e9 + n,
            "loss": noise[n], "loss_min": noise[n], "loss_max": noise[n], "grad_norm": noise[n], "lr": [noise[n]],
        }
        for n, step in enumerate(path)
    )  # fmt: skip
    assert len(run.steps) > 75_000
    assert int((~run.steps.live).sum()) > 50_000
    summary = summarise(run)
    chart = build_chart(run, summary)
    assert len(chart.abandoned) > 1500
    assert sum(len(line.x) for line in chart.abandoned) < 30_000
    assert len(render_html(run, summary).encode()) < 2_000_000


def test_a_measurement_repeated_after_a_rollback_counts_where_its_step_is_made_again(tmp_path: Path) -> None:
    """Measured at every tenth step, each value journalled until the next: the one of step 50 first on a pass that is left."""
    run = MadeRun(tmp_path)
    run.begin()
    norms, newest = {0: 0.5, 10: 0.4, 50: 0.3}, float("nan")
    write = run.write

    def with_norms(event: str, **fields: Any) -> None:
        nonlocal newest
        if event == "step":
            newest = norms.get(fields["step"], newest)
            fields["update_norm"] = newest
        write(event, **fields)

    run.write = with_norms  # type: ignore[method-assign]
    run.run(55)
    incident = run.incident(1, FindingKind.SPIKE, verdict=data_verdict("prose/1"))
    run.back_to(40, incident)
    run.run(30)
    run.end()
    data = load_run(tmp_path)
    chart = build_chart(data, summarise(data))
    assert chart.update is not None
    told = [(round(x / run.tokens_per_step) - 1, y) for x, y in zip(chart.update.x, chart.update.y, strict=True)]
    assert told == [(0, 0.5), (10, 0.4), (50, 0.3)]


@pytest.mark.parametrize(("norm", "dots"), [(0.3, 1), (0.0, 0), (float("nan"), 0)])
def test_a_single_measurement_is_a_dot_and_none_is_not_announced(tmp_path: Path, norm: float, dots: int) -> None:
    run = MadeRun(tmp_path)
    run.begin()
    write = run.write
    run.write = lambda event, **fields: write(  # type: ignore[method-assign]
        event, **(fields | {"update_norm": norm} if event == "step" else fields)
    )
    run.run(30)
    run.end()
    data = load_run(tmp_path)
    svg = chart_svg(build_chart(data, summarise(data)), "words")
    assert svg.count('<circle class="point s-update"') == dots
    assert svg.count('<path class="line s-update"') == 0
    assert (">gradient norm, update (dashed)<" in svg) == (dots == 1)
    assert (">gradient norm<" in svg) == (dots == 0)


def test_the_states_of_checkpoints_differ_in_shape_and_stand_out(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.begin()
    states = ("saved", "known_good", "poisoned", "removed", "failed")
    for n, state in enumerate(states):
        run.run(20)
        run.checkpoint(step=20 * n)
        if state != "saved":
            run.checkpoint(state, step=20 * n)
    run.end()
    data = load_run(tmp_path)
    page = render_html(data, summarise(data))
    keys = re.findall(
        r'<label for="show-checkpoint-([a-z-]*)">.*?<path class="([a-z ]*)" d="([^"]*)".*?</svg>([^<]*)<', page
    )
    assert [(key, words) for key, _, _, words in keys] == [
        ("known-good", "checkpoint, known-good"),
        ("candidate", "candidate"),
        ("poisoned", "poisoned"),
        ("failed", "failed"),
        ("removed", "removed"),
    ]
    assert len({(css.split()[0], path) for _, css, path, _ in keys}) == 5
    themes = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{([^}]*)\}", page)]
    assert len(themes) == 2
    for theme in themes:
        for _, css, _, _ in keys:
            assert contrast(theme[css.split()[1]], theme["page"]) >= 3  # what WCAG 2 asks of graphics
    for key, _, path, _ in keys:
        assert (
            len(re.findall(rf'<g class="s-checkpoint-{key}"><g [^>]*><title>[^<]*</title><path [^>]*"{path}"', page))
            == 2
        )


def contrast(a: str, b: str) -> float:
    """Of two colours ``#rrggbb``, as WCAG 2 defines it."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_page_says_since_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_800_000_000.0]  # 2027-01-15 08:00:00 UTC
    monkeypatch.setattr("lightning_sentinel.journal.time.time", lambda: now[0])
    run = MadeRun(tmp_path)
    run.begin()
    now[0] += 3600
    run.run(40)
    incident = run.incident(1, FindingKind.SPIKE, verdict=data_verdict("prose/1"))
    now[0] += 60
    run.run(10)
    data = load_run(tmp_path)
    still = "Started 2027-01-15 08:00:00 UTC, last step written 2027-01-15 09:01:00 UTC, no end written."
    assert times_words(data) == still
    now[0] += 5
    run.close(incident)
    run.end()
    data = load_run(tmp_path)
    words = times_words(data)
    assert words == still.replace("no end written", "ended 2027-01-15 09:01:05 UTC")
    page = render_html(data, summarise(data))
    assert f'<p class="soft times">{words}</p>' in page
    assert re.findall(r'<td class="seen roomy">([^<]*)</td>', page) == ["2027-01-15 09:00:00"]
    assert times_words(RunData.from_events([])) == "Started –, last step written –, no end written."


def test_experiments_are_told_in_sentences(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.begin()
    run.run(40)
    reduced = {"kind": "reduce_lr", "factor": 0.5, "from": 39, "incident": 1}
    run.write("experiment.started", experiment="lr-1-39", until=None, **reduced)
    run.write("experiment.started", experiment=None, until=60, **reduced)
    run.write("infra.event", kind="experiment", text=f"higher dropout {EVIL}")
    run.run(21)
    run.write("experiment.ended", until=60, **reduced)
    run.end()
    data = load_run(tmp_path)
    page = render_html(data, summarise(data))
    table = page[page.index('<section id="experiments">') : page.index('<section id="config">')]
    assert re.findall(r"<td>[^<]*</td><td>([^<]*)</td></tr>", table) == [
        "reduced rate from step 40 for good, factor 0.5; this is experiment lr-1-39",
        "reduced rate from step 40 until step 60, factor 0.5",
        "experiment from step 40: higher dropout &lt;script&gt;alert(1)&lt;/script&gt;",
        "reduced rate ended at step 61",
    ]


def test_ranks_that_are_gone_are_no_perfect_ranks(tmp_path: Path) -> None:
    from matplotlib import image

    run = MadeRun(tmp_path, ranks=4)
    run.begin()
    run.run(60)
    run.ranks = 2
    run.begin(segment=1)
    run.run(40)
    run.end()
    data = load_run(tmp_path)
    heat = heat_map(data.steps)
    assert heat is not None
    assert heat.gaps
    assert heat.text.endswith("; not there or not known at times: rank 2, 3")
    [svg] = heat.svg
    found = re.search(r"data:image/png;base64,([^\"]*)", svg)
    assert found is not None
    pixels = (image.imread(io.BytesIO(base64.b64decode(found[1]))) * 255).round().astype(int)
    grey = (pixels == [128, 128, 128, 96]).all(axis=-1)
    expected = np.zeros((4, 100), dtype=bool)
    expected[2:, 60:] = True
    assert (grey == expected).all()
    left, right = WIDE.left + 0.6 * WIDE.inner, WIDE.edge
    rows = [f"M{left:.1f},{4 + 24 * (i + 0.5):.1f}H{right:.1f}" for i in (2, 3)]
    assert f'<path class="gone" d="{"".join(rows)}"/>' in svg
    assert "grey with a line through it: the rank was not there" in render_html(data, summarise(data))


def test_of_many_ranks_one_that_no_line_names_is_not_gone(tmp_path: Path) -> None:
    bad_rank(tmp_path, ranks=200, rank=137)
    data = load_run(tmp_path)
    heat = heat_map(data.steps)
    assert heat is not None
    assert not heat.gaps
    assert "grey with a line" not in render_html(data, summarise(data))


def test_what_the_page_leaves_out_is_counted(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.begin()
    run.run(40)
    tried = tuple(Experiment(f"try {n}", "no change", {}) for n in range(45))
    names = tuple(f"sample:prose/{n}" for n in range(403))
    verdict = Verdict(VerdictKind.DATA, names[:25], "bad", experiments=tried, evidence={"healthy_rank": None})
    incident = run.incident(1, FindingKind.SPIKE, verdict=verdict)
    run.write("quarantine.added", names=names, incident=1, reason="data/samples")
    for n in range(302):
        run.act(incident, "skip_step")
        run.write("scaler.overflow", old_scale=2.0, new_scale=1.0, parameters=[f"p{i}" for i in range(8)])
        run.checkpoint(step=n)
        run.write("infra.event", kind="experiment", text=f"note {n}")
    run.end()
    failures = [f"failure {n}" for n in range(54)]
    summary = write_reports(tmp_path, failures=failures).summary
    page = (tmp_path / "report.html").read_text()
    happened = cards(load_run(tmp_path), summary)[0]["timeline"]
    told = [
        "and 4 more: summary.json has them all",  # failures
        "and 5 more: summary.json has them all",  # culprits
        "and 5 more: the journal has them all",  # experiments
        "and 343 more: summary.json has them all",  # quarantined by the incident
        f"and {len(happened) - 300} more: the journal has them all",  # its time line
        "and 103 more: summary.json has them all",  # the ledger
        *["and 2 more: in the journal"] * 300,  # parameters of each overflow
        "and 2 more: the journal has the earlier ones",  # scaler
        "and 2 more: summary.json has the earlier ones",  # checkpoints
        "and 2 more: summary.json has them all",  # notes
    ]
    assert re.findall(r'class="soft more">([^<]*)<', page) == told
    assert "0 replayed, 403 quarantined</summary>" in page
    assert "healthy_rank: not known" in page
    assert incident_line(summary["incidents"][0]).startswith(
        "#1 step 39: spike; data, sample:prose/0, sample:prose/1, sample:prose/2 and 22 more; "
    )
    assert incident_line(summary["incidents"][0] | {"culprits": list(names[:3])}).startswith(
        "#1 step 39: spike; data, sample:prose/0, sample:prose/1, sample:prose/2; "
    )


@pytest.mark.parametrize(
    ("closing", "told"),
    [
        (
            "back on the path: -1.4 sigma from the forecast made before the incident (at most 4), over 20 healthy steps",
            "Back on the path: -1.4 sigma from the forecast made before the incident (at most 4), over 20 healthy steps",
        ),
        (
            "the loss is back",
            "<strong>-1.41 robust sigma</strong> from the forecast made before the incident. The loss is back",
        ),
    ],
)
def test_the_distance_from_the_path_is_told_once(tmp_path: Path, closing: str, told: str) -> None:
    run = MadeRun(tmp_path)
    run.begin()
    run.run(40)
    incident = run.incident(1, FindingKind.SPIKE, verdict=data_verdict("prose/1"))
    incident.status, incident.path_z, incident.closing = IncidentStatus.RECOVERED, -1.41, closing
    run.write("incident.closed", incident=incident.to_dict())
    run.end()
    data = load_run(tmp_path)
    page = render_html(data, summarise(data))
    assert f"<tr><th>back on its path?</th><td>{told}</td></tr>" in page


@pytest.mark.parametrize("ended", [True, False])
def test_of_a_run_that_has_ended_nobody_waits_for_the_loss(tmp_path: Path, ended: bool) -> None:
    run = MadeRun(tmp_path)
    run.begin()
    run.run(40)
    run.incident(1, FindingKind.SPIKE, verdict=data_verdict("prose/1"))
    if ended:
        run.end()
    data = load_run(tmp_path)
    choose = "choose a restore point: no checkpoint has passed probation."
    assert summarise(data, now=data.last_time)["next_action"] == (
        f"Look at open incident 1, which the run's end left undecided; to take it back, {choose}"
        if ended
        else f"Look at open incident 1; if the loss does not come back, {choose}"
    )


def test_open_and_closed_are_told_apart_without_colour(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.run(20)
    first = run.incident(1, FindingKind.SPIKE, verdict=data_verdict())
    run.run(30)
    run.close(first)
    run.incident(2, FindingKind.SPIKE, verdict=data_verdict())
    run.run(5)
    data = load_run(tmp_path)
    for sheet in (WIDE, NARROW):
        svg = chart_svg(build_chart(data, summarise(data)), "words", sheet)
        assert svg.count('<rect class="fill red"') == 2  # in the panel and in the lane
        assert svg.count('<circle class="fill green"') == 2
        lefts = [float(x) for x in re.findall(r'<text[^>]* x="(-?[\d.]+)"', svg)]
        assert min(lefts) >= 0
        assert max(lefts) <= sheet.width


def test_words_at_the_right_edge_stand_on_the_left_of_their_mark(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.run(99)
    run.write("fault.injected", name="out_of_range_token", fired=1)
    run.run(1)
    run.end()
    data = load_run(tmp_path)
    chart = build_chart(data, summarise(data))
    ((item,), rows) = lay_out(chart, "fault", 1000)
    assert (item.mark.label, item.labelled, item.flipped, rows) == ("out of range token", True, True, 1)
    text = render_html(data, summarise(data))
    assert re.search(r'<text class="label" text-anchor="end" x="\d+\.\d" y="\d+\.\d">out of range token</text>', text)


def test_a_value_far_out_does_not_flatten_the_rest(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.run(50)
    run.run(1, jump=1e6)
    run.run(49)
    run.end()
    (low, high), log_loss, clipped = loss_limits(load_run(tmp_path).steps)
    assert log_loss
    assert clipped
    assert high < 1000
    assert low > 1


def test_ticks_are_round_numbers() -> None:
    assert linear_ticks(0.13, 0.94, 4) == [0.2, 0.4, 0.6, 0.8]
    assert linear_ticks(3, 3, 4) == [3]
    assert log_ticks(0.004, 30) == [0.01, 0.1, 1.0, 10.0]
    assert log_ticks(1.9, 45) == [2.0, 5.0, 10.0, 20.0]


# ---------------------------------------------------------------------------------------------------------------- picture


def test_the_picture_is_a_png_with_something_on_it(parade_dir: Path) -> None:
    from matplotlib import image

    run = load_run(parade_dir)
    pixels = image.imread(io.BytesIO(render_png(run, summarise(run))))
    assert pixels.shape[1] == 1430
    assert pixels.shape[0] > 900
    blue = np.abs(pixels[..., :3] - np.array([0x00, 0x72, 0xB2]) / 255).max(axis=-1) < 0.02
    assert blue.sum() > 1000


@pytest.mark.parametrize("make", [bad_rank, fp16_run])
def test_the_picture_of_other_runs(tmp_path: Path, make: object) -> None:
    make(tmp_path)  # type: ignore[operator]
    run = load_run(tmp_path)
    assert render_png(run, summarise(run))[:4] == b"\x89PNG"


def test_no_words_of_the_picture_lie_on_each_other(parade_dir: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from lightning_sentinel.report.curve import draw

    run = load_run(parade_dir)
    summary = summarise(run)
    figure = draw(build_chart(run, summary), summary)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = [t for ax in figure.axes for t in ax.texts if t.get_text() and t.get_visible()] + figure.texts
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts]
    assert len(boxes) > 20
    overlaps = [
        (a, b)
        for i, (a, box) in enumerate(boxes)
        for b, other in boxes[:i]
        if box.shrunk(0.98, 0.9).overlaps(other.shrunk(0.98, 0.9))
    ]
    assert overlaps == []
    assert all(box.x1 <= figure.bbox.width and box.x0 >= 0 for _, box in boxes)


def test_the_key_names_each_incident_and_stays_short(parade_dir: Path) -> None:
    summary = summarise(load_run(parade_dir))
    assert key_lines(summary)[2] == (
        "  3  step 195: spike → optimization: optimizer:lr → rollback_replay → recovered (path z 0.4)"
    )
    many = summary | {"incidents": summary["incidents"] * 10}
    assert len(key_lines(many)) == 12
    assert key_lines(many)[-1] == "     and 29 more incidents: see report.html"


# ------------------------------------------------------------------------------------------------------------------- page


def test_the_page_needs_nothing_else_and_its_links_resolve(parade_dir: Path) -> None:
    text = (parade_dir / "report.html").read_text()
    page = Page(text)
    assert [i for i in page.ids if i.startswith("incident-")] == [f"incident-{n}" for n in (1, 2, 3, 4)]
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links if link.startswith("#")} <= set(page.ids)
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert "script" not in page.tags
    assert not re.search(r"url\(|@import|https?://", text)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert "0.135" in text  # the geometric-mean token probability
    for words in ("The batch alone gives this loss, whatever the weights.", "neighbour batch", "2.0 times it"):
        assert words in text
    assert "<strong>+0.40 robust sigma</strong> from the forecast made before the incident." in text
    assert f"{400:064x}" in text  # the hash of a checkpoint


def test_everything_from_the_run_is_escaped(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.begin(data={"path": EVIL})
    run.run(30)
    run.write("fault.injected", name=EVIL, fired=1)
    incident = run.incident(1, FindingKind.SPIKE, verdict=data_verdict(EVIL), message=EVIL)
    run.act(incident, "skip_step", reason=EVIL, sample_ids=[EVIL])
    run.write("quarantine.added", names=[f"sample:{EVIL}"], reason=EVIL, incident=1)
    run.write("infra.event", message=EVIL)
    run.write("mixture.changed", weights={EVIL: 1.0}, old={"a": 1.0})
    run.write("scaler.overflow", old_scale=EVIL, new_scale=1, parameters=[EVIL])
    run.run(5)
    run.end()
    data = load_run(tmp_path)
    text = render_html(data, summarise(data))
    assert "<script" not in text.lower()
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 10
    assert "script" not in Page(text).tags


def test_an_empty_and_a_stepless_run_have_a_page(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.begin()
    run.end()
    result = write_reports(tmp_path)
    assert result.notes == ["No loss.png: the journal holds no step lines (RunJournal step_interval: 1 writes them)."]
    text = (tmp_path / "report.html").read_text()
    assert "The run finished; no incident." in text
    assert "No finite loss" in text
