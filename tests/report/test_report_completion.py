"""Tab completion, made from the parser, in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import ROOT, Block

pytest.importorskip("shtab", reason="pip install shtab")
BASH = shutil.which("bash")

TRY = """
source "$1"
shift
function=$(complete -p lightning-sentinel | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
COMP_LINE="$*"
COMP_POINT=${#COMP_LINE}
"$function" lightning-sentinel "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(BASH is None, reason="no bash here")
def test_commands_and_options_are_completed(tmp_path: Path, documented: list[Block]) -> None:
    """The lines of the page on the command line, as they stand, in an empty home; ``pip`` finds shtab installed."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "pip"):
        module = " -m pip --disable-pip-version-check" if name == "pip" else ""
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable}{module} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | {
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": str(ROOT),
    }
    (block,) = documented
    program = [str(BASH), "-e", "-c", block.take()]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "Requirement already satisfied: shtab" in done.stdout
    made = tmp_path / ".local/share/bash-completion/completions/lightning-sentinel"
    for words, expected in ((["ver"], ["verify"]), (["quarantine", "re"], ["revert"]), (["watch", "--on"], ["--once"])):
        command = [str(BASH), "-c", TRY, "bash", str(made), "lightning-sentinel", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == expected
