"""Tab completion, made from the parser, in a real bash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
def test_commands_and_options_are_completed(tmp_path: Path) -> None:
    made = tmp_path / "completion.bash"
    with made.open("w") as file:
        command = [sys.executable, "-m", "shtab", "--shell=bash", "lightning_sentinel.cli.build_parser"]
        subprocess.run(command, stdout=file, check=True, timeout=120)
    for words, expected in ((["ver"], ["verify"]), (["quarantine", "re"], ["revert"]), (["watch", "--on"], ["--once"])):
        command = [str(BASH), "-c", TRY, "bash", str(made), "lightning-sentinel", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == expected
