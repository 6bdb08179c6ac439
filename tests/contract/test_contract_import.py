"""What importing the package imports: nothing that Lightning has not imported already."""

from __future__ import annotations

import subprocess
import sys

IMPORTED = """
import sys
{first}
before = set(sys.modules)
import lightning_sentinel
{then}
heavy = {{"torch", "lightning", "numpy", "hydra", "omegaconf", "matplotlib", "jinja2", "torchdata"}}
print(sorted(heavy & {{name for name in set(sys.modules) - before}}))
"""


def output_of(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_package_alone_imports_nothing_heavy() -> None:
    assert output_of(IMPORTED.format(first="", then="")) == ["[]"]


def test_the_whole_suite_after_lightning_imports_nothing_more() -> None:
    code = IMPORTED.format(first="import lightning.pytorch", then="lightning_sentinel.default_callbacks")
    assert output_of(code) == ["[]"]
