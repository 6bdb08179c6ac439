"""No rank goes back alone, and each goes back to its own data position: DDP and FSDP2 with two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sentinel_kit import run_ranks

pytestmark = pytest.mark.timeout(900)

# strategy, accumulation, workers -> step of the restore point
CELLS = {
    ("ddp", 1, 0): 4,
    ("ddp", 2, 0): 2,
    ("ddp", 1, 2): 4,
    ("fsdp2", 1, 0): 4,
    ("fsdp2", 1, 2): 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All scenes in one pair of processes: starting them costs more than training."""
    folder = tmp_path_factory.mktemp("two-ranks")
    script = Path(__file__).with_name("state_two_ranks.py")
    scenes = [":".join(map(str, cell)) for cell in CELLS]
    run_ranks(script, folder, *scenes, "uneven:early", "uneven:late", "skip", "late", seconds=800)
    return folder


def results(folder: Path, name: str) -> list[Any]:
    return [json.loads((folder / f"{name}-rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.distributed
@pytest.mark.parametrize(("cell", "restored"), CELLS.items(), ids=["-".join(map(str, c)) for c in CELLS])
def test_rollback_on_two_ranks_equals_an_uninterrupted_run(
    folder: Path, cell: tuple[str, int, int], restored: int
) -> None:
    for result in results(folder, "-".join(map(str, cell))):
        del result["resumed"]
        assert result == {"executed": 1, "restored": [restored], "problem": "", "steps": 16}


@pytest.mark.distributed
@pytest.mark.parametrize("cell", CELLS, ids=["-".join(map(str, c)) for c in CELLS])
def test_a_resume_on_two_ranks_equals_an_uninterrupted_run(folder: Path, cell: tuple[str, int, int]) -> None:
    """Each rank's samples, losses, epoch values, weights, moments and random state, from new Trainers on."""
    accumulate = cell[1]
    for result in results(folder, "-".join(map(str, cell))):
        # eight of sixteen batches are left
        assert result["resumed"] == {"from": [8 // accumulate], "bad": [], "problem": "", "calls": 8}


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "light"), [("early", [False]), ("late", [True])])
def test_no_rank_takes_another_way_back_than_the_others(folder: Path, name: str, light: list[bool]) -> None:
    for result in results(folder, f"uneven-{name}"):
        assert (result["light"], result["executed"], len(result["steps"])) == (light, 1, 16)


@pytest.mark.distributed
def test_quarantined_samples_are_drawn_on_no_rank_also_after_a_resume(folder: Path) -> None:
    first, second = results(folder, "skip")
    bad = [*first["reference"][5][3], *second["reference"][5][3]]
    assert first["excluded"] == second["excluded"] == [[f"sample:a/{i}" for i in bad]]

    def order(steps: str) -> list[int]:
        return [i for mine, theirs in zip(first[steps], second[steps], strict=True) for i in (*mine[3], *theirs[3])]

    left = [i for i in order("reference") if i not in bad]
    # sixteen steps on both: the global order less the excluded, and eight further samples at the end
    assert order("steps")[: len(left)] == left
    assert len(order("steps")) == len(order("reference")) == 128
    assert not set(bad) & set(order("steps"))
    for result in (first, second):
        assert [s[:3] for s in result["steps"]] == [s[:3] for s in result["reference"]]


@pytest.mark.distributed
def test_both_ranks_go_back_to_the_same_checkpoint(folder: Path) -> None:
    for result in results(folder, "late"):
        assert result == {"back": [[4, "step-00000004"]], "problem": ""}
