"""From a Hydra configuration to callbacks, with errors that name the key, the bound and the nearest valid name.

Example:
    >>> from omegaconf import OmegaConf
    >>> cfg = OmegaConf.create({"spike": {"_target_": "lightning_sentinel.SpikeDetector", "treshold": 8.0}})
    >>> try:
    ...     build_callbacks(cfg)
    ... except ConfigError as error:
    ...     print(error)
    callbacks.spike.treshold is no option of lightning_sentinel.SpikeDetector. Nearest valid name: threshold.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hydra.utils import get_object, instantiate
from lightning.pytorch import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


class ConfigError(ValueError):
    """A key that does not exist, a value of the wrong type or out of its bounds."""


def build_callbacks(cfg: DictConfig | Mapping[str, Any] | None, where: str = "callbacks") -> list[Callback]:
    """The callbacks of a mapping ``name -> node with _target_``, checked, in the order in which they must stand.

    Args:
        cfg: The ``callbacks`` node. Entries that are None are left out (``callbacks.rollback=null`` removes one).
        where: Its path in the configuration, for error messages.

    Raises:
        ConfigError: With the key, what was found, what was expected, and the nearest valid name.
    """
    from .callbacks.defaults import in_order

    callbacks = []
    for key, node in (cfg or {}).items():
        name = str(key)
        if node is None:
            continue
        if not isinstance(node, Mapping | DictConfig) or "_target_" not in node:
            raise ConfigError(
                f"{where}.{name} has no _target_; expected the class of a callback, or null to leave it out."
            )
        check_node(node, f"{where}.{name}")
        callbacks.append(build(node, f"{where}.{name}"))
    _give_journal_its_config(callbacks, cfg)
    return in_order(callbacks)


def _give_journal_its_config(callbacks: Sequence[Callback], cfg: DictConfig | Mapping[str, Any] | None) -> None:
    """The whole configuration that ``cfg`` is a node of, where ``RunJournal`` was given none: a replay starts from it."""
    from .callbacks.run_journal import RunJournal

    if not isinstance(cfg, DictConfig) or cfg._get_parent() is None:
        return
    for callback in callbacks:
        if isinstance(callback, RunJournal) and callback.config is None:
            with contextlib.suppress(OmegaConfBaseException):  # an interpolation that nothing resolves here
                whole: Any = OmegaConf.to_container(cfg._get_root(), resolve=True)
                callback.config = whole


def build(node: DictConfig | Mapping[str, Any], where: str) -> Any:
    """``hydra.utils.instantiate`` with the key in front of the constructor's own error. Containers arrive as plain ones."""
    from hydra.errors import InstantiationException

    try:
        return instantiate(node, **({} if "_convert_" in node else {"_convert_": "all"}))
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError | TypeError):
            raise ConfigError(f"{_blamed(node, where, str(cause))}: {cause}") from cause
        raise


def _blamed(node: DictConfig | Mapping[str, Any], where: str, message: str) -> str:
    """``where``, down to the option that a constructor's error speaks of first."""
    names = [str(name) for name in node if not str(name).startswith("_")]
    places = [(match.start(), -len(name), name) for name in names if (match := re.search(rf"\b{name}\b", message))]
    return f"{where}.{min(places)[2]}" if places else where


def check_node(node: DictConfig | Mapping[str, Any], where: str) -> None:
    """Compare a ``_target_`` node with the constructor it names: unknown keys and wrong types are errors.

    Types are looked at for this package's own classes only; other people's hints may promise less than they take.
    """
    target = str(node["_target_"])
    try:
        factory = get_object(target)
    except Exception as error:
        raise ConfigError(f"{where}._target_ is {target!r}, which can't be imported.{_import_hint(target)}") from error
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return  # built in without a signature
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    hints = {}
    if target.startswith("lightning_sentinel."):
        hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    values = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else dict(node)
    assert isinstance(values, dict)
    for name, value in values.items():
        key = str(name)
        if key.startswith("_") and key.endswith("_"):
            continue
        if key not in parameters and not takes_any:
            raise ConfigError(f"{where}.{key} is no option of {target}.{nearest(key, parameters)}")
        hint = hints.get(key)
        if hint is not None and not fits(value, hint):
            advice = nearest(value, typing.get_args(hint)) if _is_choice(value, hint) else ""
            raise ConfigError(
                f"{where}.{key} is {value!r} ({type(value).__name__}), expected {describe(hint)}.{advice}"
            )


def _is_choice(value: Any, hint: Any) -> bool:
    return isinstance(value, str) and typing.get_origin(hint) is Literal


def _import_hint(target: str) -> str:
    """The nearest class of this package where there is no such class, else what the import itself says."""
    import lightning_sentinel

    package, _, name = target.rpartition(".")
    if package == "lightning_sentinel" and name not in lightning_sentinel.__all__:
        return nearest(target, [f"lightning_sentinel.{public}" for public in lightning_sentinel.__all__])
    try:
        getattr(importlib.import_module(package or target), name)
    except Exception as error:
        return f" {type(error).__name__}: {error}"
    return ""


def nearest(name: str, valid: Sequence[str] | Mapping[str, object]) -> str:
    """`` Nearest valid name: x.`` or nothing."""
    close = difflib.get_close_matches(name, [str(v) for v in valid], n=1, cutoff=0.4)
    return f" Nearest valid name: {close[0]}." if close else f" Valid names: {', '.join(sorted(map(str, valid)))}."


def fits(value: Any, hint: Any) -> bool:
    """True if a plain configuration value fits a type hint, as far as that can be told."""
    origin = typing.get_origin(hint)
    if hint is Any or isinstance(hint, typing.TypeVar):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, h) for h in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is type(None) or hint is None:
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    if hint is Path:
        return isinstance(value, str | Path)
    if isinstance(value, Mapping) and "_target_" in value:
        return True  # an object in the making
    kind = origin or hint
    if not inspect.isclass(kind):
        return True
    inner = typing.get_args(hint)
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping)
    if issubclass(kind, Sequence | set | frozenset):
        return isinstance(value, list | tuple) and (not inner or all(fits(item, inner[0]) for item in value))
    if kind.__module__ == "collections.abc":
        return callable(value)
    return isinstance(value, kind)


def describe(hint: Any) -> str:
    """A type hint in the words of a configuration file.

    Example:
        >>> describe(Sequence[str] | None)
        'a list or null'
    """
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(h) for h in typing.get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(repr(v) for v in typing.get_args(hint))
    if hint is type(None):
        return "null"
    kind = origin or hint
    if kind in (str, int, float, bool, Path) or not inspect.isclass(kind):
        return getattr(hint, "__name__", str(hint))
    if issubclass(kind, Mapping):
        return "a mapping"
    return "a list" if issubclass(kind, Sequence | set | frozenset) else "a node with _target_"


@contextlib.contextmanager
def suggest_names(config_dir: str | Path, config_name: str = "config") -> Iterator[None]:
    """Around a Hydra main: when an override names a key that does not exist, say the nearest one that does.

    Hydra reports such a key itself and exits with status 1; this adds the line that saves a look into the documentation.

    Example:
        ``with suggest_names("configs"): main()``
    """
    try:
        yield
    except SystemExit as stop:
        if stop.code == 1:
            for line in misspelt_overrides(sys.argv[1:], config_dir, config_name):
                print(line, file=sys.stderr)
        raise


def misspelt_overrides(arguments: Sequence[str], config_dir: str | Path, config_name: str = "config") -> list[str]:
    """One line for each override whose key, group or option is not in the configuration.

    Args:
        arguments: The command line without the program's name; what is not an override is left out.
        config_dir: The application's configuration folder.
        config_name: Its primary configuration, unless the command line names another one.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-name", "-cn", default=config_name)
    config_name = parser.parse_known_args(arguments)[0].config_name
    lines = []
    GlobalHydra.instance().clear()
    try:
        overrides = OverridesParser.create().parse_overrides([a for a in arguments if re.match(r"[^-].*=", a)])
        with initialize_config_dir(str(Path(config_dir).resolve()), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            groups = set(_all_groups(loader))
            chosen = [
                o for o in overrides if o.key_or_group in groups and not o.is_delete() and not o.is_sweep_override()
            ]
            try:
                cfg = compose(config_name, [str(o.input_line) for o in chosen], return_hydra_config=True)
            except HydraException:  # one of the chosen options does not exist: said below
                cfg = compose(config_name, return_hydra_config=True)
            known = {*_keys(cfg), *groups}
            for override in overrides:
                key = override.key_or_group
                if key in groups:
                    lines += [line for option in _options(override) if (line := _misspelt_option(loader, key, option))]
                elif key not in known and not override.is_add() and not override.is_delete():
                    close = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.4)
                    lines.append(f"{key}: no such key." + (f" Nearest valid name: {close[0]}" if close else ""))
    except HydraException:
        return []  # the configuration itself is broken: what Hydra has said is all there is to say
    finally:
        GlobalHydra.instance().clear()
    return lines


def _options(override: Any) -> list[str]:
    """The options that an override of a group chooses; several in a sweep."""
    value = override.value()
    values = value.list if override.is_choice_sweep() else value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, str)]


def _misspelt_option(loader: Any, group: str, option: str) -> str | None:
    folder, _, name = option.rpartition("/")
    options = loader.get_group_options(f"{group}/{folder}" if folder else group)
    if name in options or f"{name}.yaml" in options:
        return None
    valid = [f"{folder}/{o}" if folder else o for o in options]
    return f"{group}={option}: no such option.{nearest(option, valid) if valid else ''}"


def _all_groups(loader: Any, parent: str = "") -> Iterator[str]:
    for name in loader.list_groups(parent):
        path = f"{parent}/{name}" if parent else name
        if path.startswith("hydra"):
            continue
        yield path
        yield from _all_groups(loader, path)


def _keys(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in cfg:
        key = str(name)
        path = f"{prefix}{key}"
        yield path
        if OmegaConf.is_missing(cfg, key) or OmegaConf.is_interpolation(cfg, key):
            continue
        value = cfg[key]
        if isinstance(value, DictConfig):
            yield from _keys(value, path + ".")
