"""What mkdocs makes while it builds: a page per callback, and the configuration reference.

Both are read off the package, so they cannot say what is not so.
"""

from __future__ import annotations

import html
import inspect
import json
import re
from collections.abc import Iterator
from itertools import groupby

from lightning.pytorch import Callback
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import lightning_sentinel
from lightning_sentinel.cli.config import config_options


def callbacks() -> list[str]:
    """Names of the public callbacks."""
    public = {name: getattr(lightning_sentinel, name) for name in lightning_sentinel.__all__}
    return sorted(name for name, value in public.items() if inspect.isclass(value) and issubclass(value, Callback))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The callbacks' pages, which no file holds, at the end of the navigation."""
    config.nav.append({"Callbacks": ["callbacks/index.md", *(f"callbacks/{name}.md" for name in callbacks())]})
    return config


def pages() -> Iterator[tuple[str, str]]:
    """Generated pages by path."""
    names = callbacks()
    rows = "\n".join(f"- [{name}]({name}.md): {summary(name)}" for name in names)
    yield "callbacks/index.md", f"# Callbacks\n\nThe order in the Trainer is that of `default_callbacks()`.\n\n{rows}\n"
    for name in names:
        yield f"callbacks/{name}.md", f"::: lightning_sentinel.{name}\n"
    yield "configuration.md", configuration()


def summary(name: str) -> str:
    return inspect.getdoc(getattr(lightning_sentinel, name)).split("\n\n")[0].replace("\n", " ")


def configuration() -> str:
    """Every option of the shipped Hydra groups."""
    parts = [
        "# Configuration\n",
        "Every option with its default, as `lightning-sentinel config` prints it. A key is overridden by its path:\n",
        "```\npython examples/pretrain.py callbacks.spike_detector.threshold=10 policy=recover\n```\n",
        "A key that does not exist, a value of the wrong type or out of its bounds is an error before training starts. With"
        " `lightning_sentinel.config.build_callbacks(cfg.callbacks)` it names the bound and the nearest name; plain"
        " `hydra.utils.instantiate` checks the same bounds, but words an unknown key in its own way.\n",
    ]
    for target, options in groupby(config_options(), key=lambda row: (row["target"], row["file"])):
        name = target[0].rpartition(".")[2]
        parts.append(
            f"## {name}\n\n`{target[1]}`\n\n| path | default | type; unit; bound | meaning |\n| --- | --- | --- | --- |"
        )
        parts += [
            f"| {name_cell(row['path'])} | {name_cell(json.dumps(row['default']))} |"
            f" {cell('; '.join(x for x in (row['type'], row['unit'], row['bound']) if x))} | {cell(row['meaning'])} |"
            for row in options
        ]
        parts.append("")
    return "\n".join(parts)


def name_cell(text: str) -> str:
    """Code that a narrow column may break behind a dot, a comma or a colon."""
    code = html.escape(text).replace("|", "&#124;")
    return f"<code>{re.sub(r'(?<=[.,:])', '<wbr>', code)}</code>"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
