"""Lightning's private names: all in one module, and a name that is gone is said by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.combined_loader import CombinedLoader

import lightning_sentinel
from lightning_sentinel.state import lightning_private as private

PACKAGE = Path(lightning_sentinel.__file__).parent

# Private names of others than Lightning that the suite may use where it needs them: torch's tensors, modules, foreach
# functions, autograd engine and scaler, a scheduler's last rates, torchmetrics' defaults, omegaconf's parents, argparse, sys,
# what torchdata's iterator draws from.
OTHERS = {
    *("_version", "_buffers", "_forward_hooks", "_schema", "_cdata", "_call_impl", "_NormBase", "_local_tensor"),
    *("_modules", "_compiled_call_impl", "_BatchNorm", "_execution_engine"),
    *("_foreach_mul", "_foreach_norm", "_foreach_copy_", "_foreach_sub_", "_foreach_mul_", "_foreach_add_"),
    *("_get_scale_async", "_per_optimizer_states", "_last_lr", "_defaults"),
    "_sampler_iter",
    *("_get_parent", "_get_root", "_SubParsersAction", "_getframe"),
}


def plain_trainer() -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (CombinedLoader, "_state_dicts", "lightning.pytorch.utilities.combined_loader.CombinedLoader._state_dicts"),
        (_TrainingEpochLoop, "_build_kwargs", "training_epoch_loop._TrainingEpochLoop._build_kwargs"),
    ],
)
def test_a_name_that_lightning_drops_is_said_by_name(
    owner: type, name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = plain_trainer()
    assert private.missing_names(trainer) == []
    monkeypatch.delattr(owner, name)
    [missing] = private.missing_names(trainer)
    assert said in missing
    assert "(checked on 2.6.6)" in missing


def test_an_attribute_that_lightning_drops_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = plain_trainer()
    del trainer.fit_loop._data_fetcher
    assert private.missing_names(trainer) == ["Trainer.fit_loop._data_fetcher (checked on 2.6.6)"]
    inner = ModelCheckpoint.__init__

    def without(self: ModelCheckpoint, *args: object, **options: object) -> None:
        inner(self, *args, **options)  # type: ignore[arg-type]
        del self._last_global_step_saved

    monkeypatch.setattr(ModelCheckpoint, "__init__", without)
    assert private.missing_names(plain_trainer()) == ["ModelCheckpoint._last_global_step_saved (checked on 2.6.6)"]


def own_names(trees: dict[Path, ast.Module]) -> set[str]:
    """Every private name that the package itself defines somewhere."""
    found = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                found.add(node.attr)
    return found


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def foreign_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr) and node.attr not in own | OTHERS:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"line {node.lineno}: {node.module}.{n.name}" for n in node.names if is_private(n.name))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_one_module_alone_touches_what_is_private_to_others() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    trees.pop(PACKAGE / "state" / "lightning_private.py")
    own = own_names(trees)
    found = [
        f"{path.relative_to(PACKAGE)}, {name}" for path, tree in trees.items() for name in foreign_names(tree, own)
    ]
    assert found == []
    # the check can fail
    assert list(foreign_names(ast.parse("from lightning.x import _y\ntrainer.fit_loop._data_fetcher"), own)) == [
        "line 1: lightning.x._y",
        "line 2: trainer.fit_loop._data_fetcher",
    ]
