"""What importing the package costs on top of Lightning, each measured in fresh interpreters, in turns.

    lightning_s         import of lightning.pytorch alone, seconds
    package_s           import of lightning_sentinel after it, seconds
    suite_s             the same and every callback of the suite, seconds
    package_ratio       package_s / lightning_s
    suite_ratio         suite_s / lightning_s

Run it with ``python benchmarks/import_time.py [--repeat 5] [--json FILE]``. The fastest of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

MEASURE = """
import time
start = time.perf_counter()
import lightning.pytorch
middle = time.perf_counter()
import lightning_sentinel
{then}
print(middle - start, time.perf_counter() - middle)
"""


def seconds(then: str) -> tuple[float, float]:
    """Seconds of the import of Lightning, and of what comes after it, in a new process."""
    command = [sys.executable, "-W", "ignore", "-c", MEASURE.format(then=then)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    return float(first), float(second)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--repeat", type=int, default=5, help="measurements; the fastest counts")
    arguments.add_argument("--json", type=Path, help="write the numbers to this file too")
    options = arguments.parse_args()
    package, suite = [], []
    for _ in range(options.repeat):
        package.append(seconds(""))
        suite.append(seconds("lightning_sentinel.default_callbacks()"))
    lightning = min(first for first, _ in [*package, *suite])
    result = {
        "lightning_s": lightning,
        "package_s": min(second for _, second in package),
        "suite_s": min(second for _, second in suite),
    }
    result |= {"package_ratio": result["package_s"] / lightning, "suite_ratio": result["suite_s"] / lightning}
    for name, value in result.items():
        print(f"{name:15s} {value:8.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
