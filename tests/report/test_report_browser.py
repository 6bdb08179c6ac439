"""The page of a run on several ranks as a browser shows it: widths, light and dark, the legend, screen readers, paper."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_browser import CHROMIUM, Browser
from report_journals import TOKENS_PER_STEP, long_night, parade

from lightning_sentinel.report.build import write_reports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]

WIDE, NARROW = 1300, 430
PER_STEP = 4 * TOKENS_PER_STEP
# What each switch shows or hides, and at which step: a step stands at the tokens that have been processed when it is done.
MARKS = {
    "fault": [("fault bad_rank at step 120", 120)],
    "incident": [("incident 1, steps 120 to 149", 120), ("incident 2, steps 270", 270), ("incident 3, steps 300", 300)],
    "rollback": [("rollback from step 123", 123)],
    "action": [("skip step at step 270", 270), ("reduce rate at step 319", 319)],
    "checkpoint-known-good": [
        ("checkpoint of step 100: known-good", 100),
        ("checkpoint of step 200: known-good", 200),
    ],
    "checkpoint-candidate": [("checkpoint of step 320: candidate", 320)],
    "checkpoint-poisoned": [("checkpoint of step 310: poisoned", 310)],
    "scaler": [("overflow at step 180: 65536.0 to 32768.0", 180)],
    "restart": [("restart at step 200", 200)],
    "topology": [("4 to 2 ranks at step 200", 200)],
    "machines": [("node 1: 2 uncorrectable errors on device 0", 150)],
    "rate": [("learning rate 0.003 → 0.0015 at step 240", 240)],
    "mixture": [("mixture at step 170: prose 0.5, code 0.5", 170)],
    "experiment": [("experiment from step 260: higher dropout", 260), ("reduced rate from step 320 for good", 320)],
}
# Everything the legend can switch off on this page.
SWITCHES = ["mean", "band", "worst", "abandoned", *MARKS]

SVGS = """[...document.querySelectorAll('svg')].map(svg => ({
  hidden: svg.getAttribute('aria-hidden'), role: svg.getAttribute('role'), shown: svg.checkVisibility(),
  name: (svg.getAttribute('aria-labelledby') || '').split(' ').map(id => document.getElementById(id)?.textContent),
  text: (svg.getAttribute('aria-describedby') || '').split(' ').map(id => document.getElementById(id)?.textContent)}))"""
# Title of each mark, and where it stands as a share of the chart's width; with the labelled ticks of the token axis.
PLACES = """(() => {
  const chart = [...document.querySelectorAll('svg.chart')].find(svg => svg.checkVisibility());
  const middle = e => { const r = e.getBoundingClientRect(); return r.x + r.width / 2; };
  const bottom = Math.max(...[...chart.querySelectorAll('text.tick')].map(t => t.getBoundingClientRect().y));
  const ticks = [...chart.querySelectorAll('text.tick')].filter(t => t.getBoundingClientRect().y > bottom - 1);
  const marks = [];
  for (const g of chart.querySelectorAll('g[class^=s-]')) for (const title of g.querySelectorAll('title')) {
    const glyph = title.parentElement, line = glyph.querySelector('line'), matrix = glyph.getScreenCTM();
    const x = line === null ? 0 : line.x1.baseVal.value;
    marks.push([g.getAttribute('class').slice(2), title.textContent, matrix.a * x + matrix.e]);
  }
  return {ticks: ticks.map(t => [t.textContent, middle(t)]), marks};
})()"""
# Smallest contrast of any visible text with what lies behind it, and that text. SVG text lies on the page, but for the
# number in a disc.
CONTRAST = """(() => {
  const light = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
    .map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
  const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!c.endsWith(', 0)')) return c; } return 'rgb(255, 255, 255)'; };
  let worst = [99, ''];
  for (const e of document.querySelectorAll('body *')) {
    if (!e.checkVisibility() || ![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    if (['title', 'desc'].includes(e.tagName)) continue;
    const style = getComputedStyle(e), svg = e.tagName === 'text';
    const disc = e.classList.contains('number') ? e.parentElement.querySelector('rect, circle') : null;
    const [a, b] = [light(svg ? style.fill : style.color), light(disc ? getComputedStyle(disc).fill : behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.textContent.trim().slice(0, 40) + ' <' + e.tagName + '>'];
  }
  return worst;
})()"""
# Not checkVisibility(), which calls a group within an SVG visible whatever its style is.
SHOWN = "[...document.querySelectorAll('svg.chart.wide .s-{key}')].map(e => e.getBoundingClientRect().height > 0)"


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("night")
    long_night(folder)
    return folder / "report.html", write_reports(folder).summary


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


def pixels(png: Path) -> np.ndarray:
    from matplotlib import image

    read: np.ndarray = image.imread(io.BytesIO(png.read_bytes()))[..., :3]
    return read


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_page_is_readable(browser: Browser, night: Any, tmp_path: Path, width: int, dark: bool) -> None:
    browser.complaints.clear()
    browser.open(night[0], width=width, dark=dark)
    picture = pixels(browser.picture(tmp_path / "page.png"))
    assert browser.complaints == []
    assert picture.shape[1] == width
    assert picture.shape[0] > 3000
    assert picture.std() > 0.05  # not a blank page
    assert (picture[5, 5].mean() < 0.2) == dark
    assert browser.evaluate("document.documentElement.scrollWidth") <= width  # nothing to push sideways
    shown = browser.evaluate(
        "[...document.querySelectorAll('svg.chart')].map(e => [e.classList[1], e.checkVisibility()])"
    )
    wanted = "wide" if width == WIDE else "narrow"
    assert sorted(map(tuple, shown)) == sorted([(k, k == wanted) for k in ("wide", "narrow")] * 2)
    assert browser.evaluate("[...document.querySelectorAll('article.card')].map(e => e.id)") == [
        "incident-1",
        "incident-2",
        "incident-3",
    ]
    # Of the table at the top the last column, the state, is there without scrolling, and once the time.
    rows = (
        "[...document.querySelectorAll('.glance tr')].slice(1)"
        ".map(r => [r.innerText.match(/\\d{4}-\\d\\d-\\d\\d/g).length,"
        " r.querySelector('.badge').getBoundingClientRect().right])"
    )
    assert [(times, right <= width) for times, right in browser.evaluate(rows)] == [(1, True)] * 3
    # The level that WCAG 2 asks of text (AA).
    ratio, text = browser.evaluate(CONTRAST)
    assert ratio >= 4.5, text


def test_what_the_page_of_several_ranks_says(browser: Browser, night: Any) -> None:
    browser.open(night[0], width=WIDE)
    text = re.sub(r"\s+", " ", browser.evaluate("document.body.textContent"))
    for words in (
        "Look at open incident 3; if the loss does not come back, resume from checkpoints/step-00000200.",
        "rank 2, the furthest out",
        "Largest excess: rank 2, 3",
        "layers.2.mixer: activations of 14.2 (root mean square) on rank 2, 1 on the healthy ranks",
        f"lightning-sentinel replay {night[0].parent} --incident 1",
        "at step 200, 20",  # the restart, with its time
        "higher dropout from here on, ticket 41",
    ):
        assert words in text
    rows = browser.evaluate(
        "[...document.querySelectorAll('#checkpoints tr')].slice(1)"
        ".map(r => [...r.cells].slice(1, 3).map(c => c.textContent))"
    )
    assert rows == [["100", "known-good"], ["200", "known-good"], ["310", "poisoned"], ["320", "candidate"]]
    # The path that counts is drawn strong, what was left of it faint and dashed.
    styles = "(e => [parseFloat(e.strokeWidth), e.strokeDasharray, parseFloat(e.opacity)])(getComputedStyle({}))"
    strong = browser.evaluate(styles.format("document.querySelector('.chart.wide .s-mean.strong')"))
    faint = browser.evaluate(styles.format("document.querySelector('.chart.wide .s-abandoned')"))
    assert strong[0] > faint[0]
    assert (strong[1], strong[2]) == ("none", 1)
    assert faint[1] != "none"
    assert faint[2] < 1
    # In the heat map only the row of the bad rank is named as such.
    assert browser.evaluate("[...document.querySelectorAll('#ranks .wide text.lane')].map(e => e.textContent)") == [
        "rank 2"
    ]


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_mark_stands_at_its_tokens(browser: Browser, night: Any, width: int) -> None:
    browser.open(night[0], width=width)
    places = browser.evaluate(PLACES)
    scale = {"k": 1e3, "M": 1e6}
    ticks = [(float(t.rstrip("kM")) * scale.get(t[-1], 1), x) for t, x in places["ticks"]]
    assert len(ticks) >= 2
    slope, start = np.polyfit(*zip(*ticks, strict=True), 1)
    for key, expected in MARKS.items():
        found = {title: x for where, title, x in places["marks"] if where == key}
        assert len(found) == len(expected), found
        for words, step in expected:
            [x] = [x for title, x in found.items() if title.startswith(words)]
            assert x == pytest.approx(start + slope * (step + 1) * PER_STEP, abs=1.0), words


def test_the_legend_hides_and_shows(browser: Browser, night: Any) -> None:
    browser.open(night[0], width=WIDE)
    labels = browser.evaluate("[...document.querySelectorAll('.legend label')].map(e => e.htmlFor)")
    assert labels == [f"show-{key}" for key in SWITCHES]
    before = {key: browser.evaluate(SHOWN.format(key=key)) for key in SWITCHES}
    assert all(shown and all(shown) for shown in before.values())
    for key in SWITCHES:
        browser.click(f"label[for=show-{key}]")
        after = {other: browser.evaluate(SHOWN.format(key=other)) for other in SWITCHES}
        assert [other for other in SWITCHES if not any(after[other])] == [key]
        browser.click(f"label[for=show-{key}]")
    assert {key: browser.evaluate(SHOWN.format(key=key)) for key in SWITCHES} == before
    # By the keyboard, too.
    browser.evaluate("document.querySelector('#show-checkpoint-poisoned').focus()")
    browser.press(" ", "Space")
    assert not any(browser.evaluate(SHOWN.format(key="checkpoint-poisoned")))


def test_links_lead_somewhere(browser: Browser, night: Any) -> None:
    browser.open(night[0], width=WIDE)
    links = browser.evaluate("[...document.querySelectorAll('a, area')].map(a => a.getAttribute('href'))")
    assert len(links) > 10
    assert browser.evaluate(f"{links}.filter(h => !h.startsWith('#') || !document.querySelector(h))") == []
    assert browser.evaluate("[...document.querySelectorAll('[src], link[href]')].map(e => e.src || e.href)") == [
        "data:,"
    ]
    browser.click('.chart.wide a[href="#incident-3"]')
    assert browser.evaluate("location.hash") == "#incident-3"
    top = browser.evaluate("document.querySelector('#incident-3').getBoundingClientRect().y")
    assert -5 <= top < 1000


def test_pictures_have_words_for_those_who_do_not_see_them(browser: Browser, night: Any) -> None:
    page, summary = night
    browser.open(page, width=WIDE)
    drawn = [svg for svg in browser.evaluate(SVGS) if svg["hidden"] != "true"]
    assert [svg["role"] for svg in drawn] == ["img"] * 4
    assert all(part for svg in drawn for part in [*svg["name"], *svg["text"]])
    told = browser.names()
    [chart, heat] = [(name, text) for role, name, text in told if role == "image"]
    assert chart[0] == "Loss against tokens"
    for words in (
        f"{summary['loss_nats']:.3f} nats per token over the last 20 steps",
        f"{summary['steps']} steps, {summary['applied_steps']} applied",
        "last known-good checkpoint: step 200",
        "Rank 2 lies furthest above the other ranks. 2 passes were abandoned",
        "Incident 1, steps 120 to 149: rank 2 is at 40.0 nats, the median of the ranks at 2.5; infrastructure, rank:2",
        "Incident 3, steps 300 to now: the loss sits 0.55 nats higher since step 300",
        "4 to 2 ranks at step 200",
    ):
        assert words in chart[1]
    assert heat[0] == "Heat map of rank against time"
    assert re.match(r"4 of 4 ranks, 384 steps; largest excess: rank 2, 3\d\.\d\d nats above", heat[1])
    boxes = [name for role, name, _ in told if role == "checkbox"]
    assert len(boxes) == len(SWITCHES)
    assert all(boxes)


@pytest.mark.parametrize(("inches", "backgrounds"), [((8.27, 11.69), False), ((8.5, 11.0), True)], ids=["a4", "letter"])
def test_the_page_on_paper(
    browser: Browser, night: Any, tmp_path: Path, inches: tuple[float, float], backgrounds: bool
) -> None:
    pypdfium2 = pytest.importorskip("pypdfium2", reason="pip install 'lightning-sentinel[dev]'")
    browser.open(night[0], width=NARROW, dark=True)  # whatever the screen is like, paper is white and wide
    document = pypdfium2.PdfDocument(browser.print(tmp_path / "page.pdf", inches, backgrounds=backgrounds))
    try:
        assert 3 <= len(document) <= 8
        texts = [re.sub(r"\s+", " ", page.get_textpage().get_text_range()) for page in document]
        shown = [page.render(scale=1.0).to_numpy()[..., :3] for page in document]
    finally:
        document.close()
    for picture in shown:
        assert picture[3, 3].tolist() == [255, 255, 255]
        assert picture.std() > 5  # something on every sheet
    # The first sheet has the answers and the chart.
    for words in (
        "3 incidents: 1 open, 2 recovered",
        "Next: Look at open incident 3",
        "Loss against tokens",
        "bad rank",
        # What nothing but the key explains.
        "mean loss, the path that counts",
        "all ranks, lowest to highest",
        "rank 2, the furthest out",
        "checkpoint, known-good",
        "poisoned",
    ):
        assert words in texts[0]
    used = np.flatnonzero((shown[0] < 200).any(axis=(1, 2)))
    assert used[-1] > 0.75 * len(shown[0])  # the chart is on it, not only its heading
    whole = " ".join(texts)
    for n, kind in ((1, "rank outlier"), (2, "spike"), (3, "level shift")):
        assert f"Incident {n}: {kind}" in whole
    for words in (
        "rank 2 is at 40.0 nats, the median of the ranks at 2.5",
        "layers.2.mixer: activations of 14.2",
        "the same batch on rank 0",  # folded on the screen
        "back to step 100; 48 samples replayed",
        "sample:prose/0000010e/0",
        "poisoned",
    ):
        assert words in whole
    assert "Show or hide" not in whole  # nothing can be clicked on paper
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        badges = "[...document.querySelectorAll('.badge')].map(e => getComputedStyle(e).backgroundColor)"
        assert set(browser.evaluate(badges)) == {"rgba(0, 0, 0, 0)"}
        ratio, text = browser.evaluate(CONTRAST)
        assert ratio >= 4.5, text
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")


def test_the_page_of_one_process(browser: Browser, tmp_path: Path) -> None:
    parade(tmp_path)
    write_reports(tmp_path)
    browser.complaints.clear()
    for width in (WIDE, NARROW):
        browser.open(tmp_path / "report.html", width=width)
        assert browser.evaluate("[...document.querySelectorAll('article.card')].map(e => e.id)") == [
            f"incident-{n}" for n in (1, 2, 3, 4)
        ]
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.complaints == []
    assert browser.evaluate("document.querySelector('#ranks')") is None
