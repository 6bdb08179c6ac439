"""One page of result: as text, as JSON, as HTML."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ..journal import to_json
from .drill import EXERCISES
from .judge import CanaryReport, Drilled


def text(report: CanaryReport) -> str:
    """The page for a terminal."""
    lines = [headline(report), ""]
    for check in report.checks:
        lines.append(f"  {'ok' if check.passed else 'NO':<3} {check.name:<16} {check.words}")
    lines += ["", "  Drill"]
    for row in report.drill:
        lines.append(f"  {'ok' if row.passed else 'NO':<3} {row.fault:<20} step {row.step}: {story(row)}")
        if row.why:
            lines.append(f"      {row.why}")
    lines += ["", f"  {left_out(report)}"] if left_out(report) else []
    if report.false_incidents:
        lines += ["", "  Incidents without a fault"]
        lines += [f"      {line}" for line in report.false_incidents[:10]]
    seconds = report.facts.get("median_step_seconds")
    if seconds:
        hours = seconds * 10_000 / 3600
        lines += ["", f"  {seconds:.3g} s a step (median of the clean leg): 10,000 steps take {hours:.3g} h."]
    return "\n".join([*lines, "", f"  To see a leg: lightning-sentinel report {report.folder}/drill"])


def headline(report: CanaryReport) -> str:
    """The result in one sentence."""
    if report.passed:
        faults = f"{len(report.drill)} fault{'s' * (len(report.drill) != 1)} drilled"
        return f"Canary passed: {faults}, all seen, named, answered and recovered; no false incident."
    bad = [c.name for c in report.checks if not c.passed] + [d.fault for d in report.drill if not d.passed]
    return f"Canary failed: {', '.join(bad)}. Do not start the long run before that is understood."


def left_out(report: CanaryReport) -> str:
    """What the drill has not tried: the reader should know what this page does not say."""
    rest = [name for name in EXERCISES if name not in {row.fault for row in report.drill}]
    return f"Not drilled: {', '.join(rest)}." if rest else ""


def story(row: Drilled) -> str:
    """What became of a fault, in the order in which it happened."""
    if row.seen_step is None:
        return "struck" if row.fired else "did not strike"
    more = f" and {len(row.culprits) - 2} more" if len(row.culprits) > 2 else ""
    named = (", ".join(row.culprits[:2]) or "nobody named") + more
    done = " -> ".join(row.answers) or "no answer"
    tail = f" ({row.path})" if row.path else ""
    return f"seen at {row.seen_step}; {row.verdict}, {named}; {done}; {row.status}{tail}"


def html(report: CanaryReport) -> str:
    """The page for a browser, in one file."""

    def row(passed: bool, *cells: str) -> str:
        mark = "ok" if passed else "no"
        text = "".join(f"<td{' class=short' if len(c) < 12 else ''}>{escape(c)}</td>" for c in cells)
        return f'<tr class="{mark}"><td>{mark}</td>{text}</tr>'

    checks = "".join(row(c.passed, c.name, c.words) for c in report.checks)
    drill = "".join(row(d.passed, d.fault, f"step {d.step}", story(d), d.why) for d in report.drill)
    false = "".join(f"<li>{escape(line)}</li>" for line in report.false_incidents)
    facts = "".join(
        f"<tr><td>{escape(k.replace('_', ' '))}</td><td>{escape(str(v))}</td></tr>"
        for k, v in report.facts.items()
        if v is not None
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Canary {"passed" if report.passed else "failed"}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430; }}
h1 {{ font-size: 1.3rem; }} h2 {{ font-size: 1.05rem; margin-top: 2rem; }}
table {{ border-collapse: collapse; width: 100%; }}
td {{ padding: .35rem .6rem; border-bottom: 1px solid #dde3ea; vertical-align: top; overflow-wrap: anywhere; }}
td:first-child, .ok td:nth-child(2), .no td:nth-child(2), .short {{ white-space: nowrap; }}
.ok td:first-child {{ color: #12703c; font-weight: 600; }} .no td:first-child {{ color: #b3261e; font-weight: 600; }}
.no td {{ background: #fdf1f0; }}
</style></head><body>
<h1>{escape(headline(report))}</h1>
<h2>Pilot</h2><table>{checks}</table>
<h2>Drill</h2><table>{drill}</table>
<p>{escape(left_out(report))}</p>
{f"<h2>Incidents without a fault</h2><ul>{false}</ul>" if false else ""}
<h2>Facts</h2><table>{facts}</table>
<p>Both legs are run folders: <code>lightning-sentinel report {escape(report.folder)}/drill</code> shows all of one.</p>
</body></html>
"""


def write(report: CanaryReport, folder: Path) -> list[Path]:
    """``canary.txt``, ``canary.json`` and ``canary.html`` in the folder."""
    contents = {
        "canary.txt": text(report) + "\n",
        "canary.json": to_json(report.to_dict()) + "\n",
        "canary.html": html(report),
    }
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in contents]
