"""What is published: the sdist, the wheel built from it, ``pip install .`` and ``-e .``; each used elsewhere."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import collective_limit
import pytest
from docs_pages import Block, commands
from template_app import result_of, run_app, write_app

import lightning_sentinel
from lightning_sentinel.callbacks.defaults import ORDER

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sources(of: Path = ROOT) -> set[str]:
    """Every file that the package must hold, as it lies in the source tree."""
    return {
        str(path.relative_to(of))
        for part in ("lightning_sentinel", "hydra_plugins")
        for path in (of / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git has of this tree, so that nothing is built within it."""
    tree = tmp_path_factory.mktemp("tree")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("the build is tested from a git checkout")
    wanted = ("lightning_sentinel/", "hydra_plugins/", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
    for name in listed.stdout.split("\0"):
        if name.startswith(wanted) and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    return tree


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from the sdist, not from this tree."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree, cwd=folder)
    return folder


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """A fresh environment that borrows this one's packages, but not the editable installation of this tree."""
    folder = tmp_path / "second"
    folder.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    site = next(folder.glob("lib/python*/site-packages"))
    # Paths in a .pth are appended as they are: the .pth files that lie in them are not read.
    (site / "borrowed.pth").write_text("\n".join(packages()) + "\n")
    return folder


def packages() -> list[str]:
    """Where this environment's packages lie."""
    return list(
        dict.fromkeys([sysconfig.get_paths()["purelib"], *(p for p in sys.path if p.endswith("site-packages"))])
    )


@pytest.fixture
def without_ours(second: Path) -> Path:
    """The second environment, in which pip sees every other package, but not that this one is installed."""
    borrowed = second / "borrowed"
    borrowed.mkdir()
    for folder in map(Path, packages()):
        for entry in folder.iterdir():
            ours = "lightning_sentinel" in entry.name or entry.name == "hydra_plugins" or entry.suffix == ".pth"
            if not (ours or (borrowed / entry.name).exists()):
                (borrowed / entry.name).symlink_to(entry)
    site = next(second.glob("lib/python*/site-packages"))
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    return second


def test_wheel_and_sdist_hold_every_file(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    (sdist,) = built.glob("*.tar.gz")
    version = lightning_sentinel.__version__
    assert wheel.name == f"lightning_sentinel-{version}-py3-none-any.whl"
    assert sdist.name == f"lightning_sentinel-{version}.tar.gz"
    expected = sources()
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if ".dist-info/" not in name}
        (metadata,) = (n for n in file.namelist() if n.endswith("METADATA"))
        text = file.read(metadata).decode()
        (entry_points,) = (n for n in file.namelist() if n.endswith("entry_points.txt"))
        assert "lightning-sentinel = lightning_sentinel.cli:main" in file.read(entry_points).decode()
    assert packed == expected
    for name in ("lightning_sentinel/py.typed", "lightning_sentinel/report/report.html.j2"):
        assert name in packed
    assert len([name for name in packed if name.endswith(".yaml")]) == len(ORDER) + 1 + 3
    assert "License-Expression: Apache-2.0" in text
    assert "Provides-Extra: report" in text
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert expected | {"pyproject.toml", "README.md", "LICENSE"} <= held


def test_wheel_in_a_second_environment(built: Path, second: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    python = second / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--no-deps"]
    run(*pip, "--quiet", "--no-index", wheel, cwd=tmp_path)
    script = write_app(tmp_path)
    site = next(second.glob("lib/python*/site-packages"))

    def trained(out: Path) -> None:
        result = result_of(out)
        assert Path(result["package"]) == site / "lightning_sentinel" / "__init__.py"
        assert Path(result["plugin"]).is_relative_to(site / "hydra_plugins")
        added = ["CollectiveLimit"] if out.name == "out" else []
        assert result["callbacks"] == [*(kind.__name__ for kind in ORDER), *added]
        assert (result["steps"], result["finite"]) == (10, True)
        page = (out / "report.html").read_text()
        assert "training_step" in page  # the module that the incident's verdict names

    done = run_app(script, "-m", "policy=recover,guard", "hydra.sweep.dir=sweep", python=python)
    assert done.returncode == 0, done.stderr
    for job in (0, 1):
        trained(tmp_path / "sweep" / str(job))
    # Lightning starts the second process with Hydra's command line and this environment's Python.
    shutil.copy(collective_limit.__file__, script.parent)
    limit = "+callbacks.limit._target_=collective_limit.CollectiveLimit"
    ranks = ("trainer.devices=2", "+trainer.strategy=ddp", limit)
    done = run_app(script, "policy=recover", *ranks, "hydra.run.dir=out", python=python)
    assert done.returncode == 0, done.stderr
    trained(tmp_path / "out")
    for rank in (0, 1):
        started = json.loads((tmp_path / "out" / "journal" / f"rank-{rank:05d}.jsonl").read_text().splitlines()[0])
        assert (started["event"], started["rank"], started["world_size"]) == ("run.started", rank, 2)
    printed = json.loads(run(second / "bin" / "lightning-sentinel", "config", "rollback", "--json", cwd=tmp_path))
    assert [row["path"] for row in printed][:2] == ["callbacks.rollback.every_n_steps", "callbacks.rollback.keep"]


def test_an_editable_install_in_a_second_environment(tree: Path, second: Path, tmp_path: Path) -> None:
    """``pip install -e .``: Hydra finds the groups in the tree, in a multirun of somebody else's application."""
    python = second / "bin" / "python"
    # Built by this environment's pip and setuptools, for the other one: it only borrows them.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--quiet"]
    run(*pip, "--no-deps", "--no-build-isolation", "--no-index", "-e", tree, cwd=tmp_path)
    site = next(second.glob("lib/python*/site-packages"))
    assert not (site / "lightning_sentinel").exists()
    assert not (site / "hydra_plugins").exists()
    script = write_app(tmp_path)
    done = run_app(
        script,
        *("-m", "policy=guard,recover", "callbacks.run_journal.report=false", "hydra.sweep.dir=out"),
        python=python,
    )
    assert done.returncode == 0, done.stderr
    results = [result_of(tmp_path / "out" / str(job)) for job in (0, 1)]
    for result in results:
        assert Path(result["package"]) == tree / "lightning_sentinel" / "__init__.py"
        assert Path(result["plugin"]).is_relative_to(tree / "hydra_plugins")
        assert result["callbacks"] == [kind.__name__ for kind in ORDER]
        assert (result["steps"], result["finite"]) == (10, True)
    printed = json.loads(run(second / "bin" / "lightning-sentinel", "config", "rollback", "--json", cwd=tmp_path))
    assert printed[0]["path"] == "callbacks.rollback.every_n_steps"


def test_pip_lines_of_the_documentation(
    built: Path, without_ours: Path, tmp_path: Path, documented: list[Block]
) -> None:
    """``pip install`` as typed, in another environment: everything it asks for is looked for; the wheel is the built one."""
    python = without_ours / "bin" / "python"
    for block in documented:
        for line in commands(block.take()):
            words = shlex.split(line)
            assert words[:2] == ["pip", "install"]
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
            printed = run(*pip, "install", "--no-index", "--find-links", built, *words[2:], cwd=tmp_path)
            assert f"Successfully installed lightning-sentinel-{lightning_sentinel.__version__}" in printed
            assert "Requirement already satisfied: lightning" in printed  # what it depends on was looked for
            assert "Requirement already satisfied: jinja2" in printed  # and what the extra does
            site = next(without_ours.glob("lib/python*/site-packages"))
            where = "import lightning_sentinel, sys; sys.stdout.write(lightning_sentinel.__file__)"
            assert Path(run(python, "-c", where, cwd=tmp_path)) == site / "lightning_sentinel" / "__init__.py"
            assert "usage: lightning-sentinel" in run(
                without_ours / "bin" / "lightning-sentinel", "--help", cwd=tmp_path
            )
            run(*pip, "uninstall", "--yes", "lightning-sentinel", cwd=tmp_path)


def test_pip_install_of_a_source_tree(built: Path, tmp_path: Path) -> None:
    """``pip install .``, not editable."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.glob("lightning_sentinel-*")
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    run(*pip, "--no-build-isolation", "--no-index", "--target", target, ".", cwd=tree)
    assert sources(target) == sources()
