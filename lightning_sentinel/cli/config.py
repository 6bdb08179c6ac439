"""``lightning-sentinel config``: every option with default, unit, bound and meaning."""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from ..limits import CHOICES, limits_of
from .common import OK, Commands, add_command, print_json

CODES = "Exit codes: 0 printed, 2 wrong usage or no such callback, 130 interrupted."


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    words = "print every option with its path in the YAML, default, type, unit, bound and meaning"
    parser = add_command(commands, "config", run, words, "config spike_detector", exit_codes=CODES)
    parser.add_argument(
        "callback", nargs="?", metavar="CALLBACK", help="only this one, by its name in the configuration"
    )


def run(options: argparse.Namespace) -> int:
    rows = list(config_options())
    names = sorted({row["callback"] for row in rows})
    if options.callback is not None:
        rows = [row for row in rows if row["callback"] == options.callback]
        if not rows:
            close = difflib.get_close_matches(options.callback, names, n=1, cutoff=0.4)
            hint = f"Did you mean {close[0]}?" if close else f"There are {', '.join(names)}."
            raise ValueError(f"No callback {options.callback!r} in the configuration. {hint}")
    if options.json:
        print_json(rows)
        return OK
    for i, row in enumerate(rows):
        if i == 0 or rows[i - 1]["callback"] != row["callback"]:
            print(("\n" if i else "") + f"{row['target']}  ({row['file']})")
        about = "; ".join(part for part in (row["type"], row["unit"], row["bound"]) if part)
        print(f"  {row['path']}={json.dumps(row['default'])}  ({about})\n      {row['meaning']}")
    return OK


def config_options() -> Iterator[dict[str, Any]]:
    """Every option of the shipped configuration: path in the YAML, default, type, unit, bound and meaning."""
    from hydra.utils import get_class
    from omegaconf import OmegaConf

    folder = files("lightning_sentinel.conf").joinpath("callbacks", "sentinel")
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        text = file.read_text(encoding="utf-8")
        if not file.name.endswith(".yaml") or "_target_" not in text:
            continue
        nodes: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        name, values = next((k, v) for k, v in nodes.items() if "_target_" in v)
        signature = inspect.signature(get_class(values["_target_"])).parameters
        limits = limits_of(values["_target_"].rpartition(".")[2])
        choices = CHOICES.get(values["_target_"].rpartition(".")[2], {})
        handed_on = _policy_bounds() if name == "incident_response" else {}
        meanings = _comments(text)
        for key, value in values.items():
            if key != "_target_":
                limit, words = limits.get(key), choices.get(key)
                yield {
                    "callback": name,
                    "target": values["_target_"],
                    "file": f"callbacks/sentinel/{file.name}",
                    "path": f"callbacks.{name}.{key}",
                    "default": value,
                    "type": str(signature[key].annotation) if key in signature else "",
                    "unit": limit.unit if limit else "",
                    "bound": limit.words() if limit else one_of(words) or handed_on.get(key, ""),
                    "meaning": meanings.get(key, ""),
                }
    yield from _policy_options()


def _policy_options() -> Iterator[dict[str, Any]]:
    """The group ``policy``: what the answers are. Its files differ in the mode only."""
    from omegaconf import OmegaConf

    text = files("lightning_sentinel.conf").joinpath("policy", "observe.yaml").read_text(encoding="utf-8")
    values: Any = OmegaConf.to_container(OmegaConf.create(text))
    bounds = _policy_bounds()
    meanings = _comments(text)
    for key, value in values.items():
        yield {
            "callback": "policy",
            "target": "lightning_sentinel.policy.Policy",
            "file": "policy/observe.yaml",
            "path": f"policy.{key}",
            "default": value,
            "type": {"mode": "str", "ladders": "dict[str, list[str]]", "budgets": "dict[str, int]"}[key],
            "unit": "times within budget_steps steps" if key == "budgets" else "",
            "bound": bounds[key],
            "meaning": meanings.get(key, ""),
        }


def _policy_bounds() -> dict[str, str]:
    from ..policy import DEFAULT_BUDGETS, DEFAULT_LADDERS

    return {
        "mode": one_of(CHOICES["policy"]["mode"]),
        "ladders": f"cases: {', '.join(DEFAULT_LADDERS)}",
        "budgets": f"actions: {', '.join(DEFAULT_BUDGETS)}; each at least 0",
    }


def one_of(words: tuple[str, ...] | None) -> str:
    return f"one of {', '.join(words)}" if words else ""


def _comments(text: str) -> dict[str, str]:
    """The comment lines above each key of a YAML file."""
    found: dict[str, str] = {}
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped[1:].strip())
        elif ":" in stripped:
            found.setdefault(stripped.split(":", 1)[0], " ".join(comment))
            comment = []
    return found
