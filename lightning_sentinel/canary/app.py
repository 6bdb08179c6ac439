"""A canary of a Hydra application: its own command line, as child processes, with overrides on top."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..journal import Follower, to_json
from ..progress import Progress
from .drill import PROBATION_STEPS, ROLLBACK_EVERY, TIGHTER, Timeline, injector
from .judge import CanaryReport, LegEnd, judge
from .page import write

POLL_SECONDS = 0.5
# What is tightened: thresholds of the callback, by its class.
THRESHOLDS: dict[str, tuple[str, ...]] = {
    "SpikeDetector": ("threshold", "gross"),
    "DivergenceDetector": ("threshold", "lost_sigma"),
    "RankOutlierDetector": ("threshold", "cold_threshold"),
}
NEEDED = ("RunJournal", "RankTelemetry", "IncidentResponse", "Rollback")


def run_app(
    app: Path,
    overrides: Sequence[str],
    folder: Path,
    plan: Timeline,
    *,
    timeout_minutes: float = 60.0,
    steps_key: str = "trainer.max_steps",
    quiet: bool = False,
) -> CanaryReport:
    """Run both legs of a Hydra application and judge them.

    Args:
        app: Its script.
        overrides: Its command line for the long run.
        folder: Where the legs and the page go.
        plan: Faults and steps.
        timeout_minutes: For each leg.
        steps_key: Key of the number of optimizer steps in its configuration.
        quiet: Show no progress.

    Raises:
        ValueError: The configuration has no suite, or cannot be had; with what to do.
    """
    folder = folder.resolve()
    if not app.is_file():
        raise FileNotFoundError(f"{app} is no file. Give --app the script of the Hydra application.")
    taken = [folder / leg for leg in ("clean", "drill") if (folder / leg).exists()]
    if taken:
        raise ValueError(f"{taken[0]} is there already. Give --out a folder that is not.")
    config = configuration(app, overrides)
    shared = shared_overrides(config, plan, steps_key)
    ends = {}
    for leg in ("clean", "drill"):
        faults = [f"++callbacks.sentinel_canary={to_override(injector(plan.faults))}"] if leg == "drill" else []
        own = [f"hydra.run.dir='{folder / leg}'", f"++{journal_key(config)}.run_dir='{folder / leg}'", *shared, *faults]
        ends[leg] = _run(leg, app, [*overrides, *own], folder / leg, plan.steps, timeout_minutes, quiet)
    report = judge(folder, plan, ends["clean"], ends["drill"], progress=not quiet)
    write(report, folder)
    return report


def configuration(app: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The application's configuration, interpolations unresolved, as it prints it itself."""
    from omegaconf import OmegaConf

    command = [sys.executable, str(app), *overrides, "--cfg", "job"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=_environment())
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise ValueError(
            f"{app} --cfg job fails: {lines[-1].rstrip('.')}. Is it a Hydra application, and are the overrides right?"
        )
    found: Any = OmegaConf.to_container(OmegaConf.create(done.stdout), resolve=False)
    return dict(found)


def _callbacks(config: Mapping[str, Any]) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """The suite's callbacks in the configuration: class to key and node."""
    found = {}
    for key, node in (config.get("callbacks") or {}).items():
        if isinstance(node, Mapping) and str(node.get("_target_", "")).startswith("lightning_sentinel."):
            found[str(node["_target_"]).rpartition(".")[2]] = (f"callbacks.{key}", node)
    return found


def journal_key(config: Mapping[str, Any]) -> str:
    return _callbacks(config)["RunJournal"][0]


def shared_overrides(config: Mapping[str, Any], plan: Timeline, steps_key: str) -> list[str]:
    """What makes a pilot of the long run: short, answering, journalled at every step, thresholds tightened."""
    there = _callbacks(config)
    missing = [name for name in NEEDED if name not in there]
    if missing:
        raise ValueError(
            f"The configuration's callbacks lack {', '.join(missing)}. Add the suite: `defaults: - callbacks:"
            " sentinel/default`, or give `callbacks=sentinel/default` behind `--`."
        )
    head = steps_key.rpartition(".")[0]
    if head and not isinstance(_at(config, head), Mapping):
        raise ValueError(
            f"The configuration has no {head!r}, so the number of steps cannot be set. Give --steps-key the key of"
            " the Trainer's max_steps."
        )
    response, rollback = there["IncidentResponse"][0], there["Rollback"][0]
    made = [
        f"++{steps_key}={plan.steps}",
        f"++{journal_key(config)}.step_interval=1",
        f"++{journal_key(config)}.report=false",
        f"++{response}.mode=recover",
        f"++{response}.probation_steps={PROBATION_STEPS}",
        f"++{rollback}.every_n_steps={ROLLBACK_EVERY}",
    ]
    if "ForensicCheckpoint" in there:
        made.append(f"++{there['ForensicCheckpoint'][0]}.every_n_steps={plan.steps // 2}")
    for name, options in THRESHOLDS.items():
        key, node = there.get(name, ("", {}))
        made += [
            f"++{key}.{option}={TIGHTER * node[option]:g}"
            for option in options
            if isinstance(node.get(option), int | float)
        ]
    return made


def to_override(value: Any) -> str:
    """A value in the grammar of Hydra's command line.

    Example:
        >>> to_override({"_target_": "a.B", "step": 3, "names": ["x"], "on": True, "none": None})
        "{_target_:'a.B',step:3,names:['x'],on:true,none:null}"
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{to_override(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(to_override, value)) + "]"
    return f"'{value}'" if isinstance(value, str) else to_json(value)


def _at(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _environment() -> dict[str, str]:
    return {**os.environ, "HYDRA_FULL_ERROR": "0"}


def _run(
    leg: str, app: Path, arguments: Sequence[str], folder: Path, steps: int, timeout_minutes: float, quiet: bool
) -> LegEnd:
    """One leg in a child process group; nothing of it is left running."""
    folder.mkdir(parents=True)
    output = folder / "output.log"
    deadline = time.monotonic() + 60 * timeout_minutes
    follower, late = Follower(folder), False
    with output.open("wb") as file, Progress(f"canary, {leg} leg", total=steps, unit="steps", enabled=not quiet) as bar:
        child = subprocess.Popen(
            [sys.executable, str(app), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,  # its own group, so that ranks and workers that it starts end with it
        )
        try:
            reached = 0
            while child.poll() is None and not late:
                time.sleep(POLL_SECONDS)
                reached = max([reached, *(e["step"] + 1 for e in follower.poll() if e["event"] == "step")])
                bar.advance(reached - bar.done)
                late = time.monotonic() > deadline
        finally:
            end_group(child)
    if late:
        return LegEnd(folder, 124, f"not finished after {timeout_minutes:g} minutes; see {output}")
    code = child.returncode
    return LegEnd(folder, code, f"{_last_line(output)} (see {output})" if code else "")


def end_group(child: subprocess.Popen[bytes], patience: tuple[float, float] = (15.0, 5.0)) -> None:
    """End a child that leads a process group, and the ranks that it started: politely, then not.

    Args:
        child: It was started with ``start_new_session=True``.
        patience: Seconds to wait after SIGTERM and after SIGKILL.
    """
    for how, seconds in zip((signal.SIGTERM, signal.SIGKILL), patience, strict=True):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=seconds)
            return


def _last_line(output: Path) -> str:
    """The last line that says something: an exception's own, if there is one."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Unavailable|Stopped)\b", line)]
    return ((errors or lines or ["no output"])[-1])[:300]
