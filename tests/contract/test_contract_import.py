"""What importing the package costs: nothing that Lightning has not paid for already."""

from __future__ import annotations

import subprocess
import sys

MEASURE = """
import sys, time
{first}
before = set(sys.modules)
start = time.perf_counter()
import lightning_sentinel
{then}
print(time.perf_counter() - start)
heavy = {{"torch", "lightning", "numpy", "hydra", "omegaconf", "matplotlib", "jinja2", "torchdata"}}
print(sorted(heavy & {{name for name in set(sys.modules) - before}}))
"""


def output_of(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_package_alone_imports_nothing_heavy() -> None:
    seconds, found = output_of(MEASURE.format(first="", then=""))
    assert found == "[]"
    assert float(seconds) < 0.3


def test_the_whole_suite_after_lightning_is_cheap() -> None:
    code = MEASURE.format(first="import lightning.pytorch", then="lightning_sentinel.default_callbacks")
    seconds, found = output_of(code)
    assert found == "[]"
    assert float(seconds) < 3.0  # a fraction of a second on a machine that does nothing else
