"""Outside code of a run: an objective, inputs, a model, an optimizer, a schedule and jobs, and how the command line finds them.

A recipe, a cache and a checkpoint never name code. A user names it with `--import`, or installs a package with an entry point
in the group `wands.plugins`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from wands.errors import ConfigError, one_line

if TYPE_CHECKING:
    from wands.conditions.condition import Condition
    from wands.objectives.objective import Objective

ENTRY_POINTS = "wands.plugins"
ATTRIBUTE = "plugin"
"""Name of the `Plugin` in a module that `--import` names."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Parts that outside code adds to a run. Each field has the meaning of the argument of `wands.Trainer` with the same name.

    Attributes:
        objective: None for `FlowMatching`.
        conditions: inputs of the model in addition to those of its variant.
        model: function with the arguments and the result of `wands.engine.engine.build_model`.
        optimizer: function of (named parameters, learning rate) that returns a torch optimizer.
        schedule: function with the arguments and the result of `wands.engine.engine.build_schedule`.
        jobs: `wands.Job` objects, which run after the jobs of wands.
        sources: origin of the parts, for the description of a run. `load_plugins` sets it.
    """

    objective: Objective | None = None
    conditions: tuple[Condition, ...] = ()
    model: Callable[..., Any] | None = None
    optimizer: Callable[..., Any] | None = None
    schedule: Callable[..., Any] | None = None
    jobs: tuple[Any, ...] = ()
    sources: tuple[str, ...] = ()

    def joined(self, other: Plugin) -> Plugin:
        """Return a plugin with the parts of both.

        Raises:
            ConfigError: if both set a part of which a run has only one.
        """
        values: dict[str, Any] = {}
        for field in fields(self):
            own = getattr(self, field.name)
            others = getattr(other, field.name)
            if isinstance(own, tuple):
                values[field.name] = (*own, *others)
                continue
            if own is not None and others is not None:
                raise ConfigError(
                    f"two plugins set the part {field.name}, of which a run has one; remove an --import, an installed plugin, or "
                    f"the argument {field.name} of wands.Trainer."
                )
            values[field.name] = others if own is None else own
        return Plugin(**values)


def load_plugins(names: Sequence[str] = ()) -> Plugin:
    """Return the parts of all installed plugins and of the modules in `names`, the values of `--import`.

    A name is a module, such as "my_package.depth", or a Python file, such as "./depth.py".

    Raises:
        ConfigError: if a plugin cannot be imported, or has no attribute `plugin`.
    """
    joined = Plugin()
    for point in entry_points(group=ENTRY_POINTS):
        plugin = _checked(f"the installed plugin {point.name}", point.load)
        package = f"{point.dist.name} {point.dist.version}" if point.dist else point.name
        joined = joined.joined(replace(plugin, sources=(package,)))
    for name in names:
        plugin = _checked(f"--import {name}", partial(_plugin_of, name))
        joined = joined.joined(replace(plugin, sources=(name,)))
    return joined


def plugin_importer(names: Sequence[str]) -> Callable[[], object] | None:
    """Return the function with which a new process imports the modules of `--import`; None without modules.

    The process can then unpickle objects of their classes.
    """
    return partial(_import_all, tuple(names)) if names else None


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        _import(name)


def _checked(label: str, load: Callable[[], Any]) -> Plugin:
    try:
        found = load()
    except ConfigError:
        raise
    except Exception as error:  # outside code raises errors of any class
        raise ConfigError(f"{label} cannot be imported ({one_line(error)}); fix the module.") from error
    if not isinstance(found, Plugin):
        raise ConfigError(
            f"{label} has no wands.Plugin: it must define {ATTRIBUTE} = wands.Plugin(...); found {type(found).__name__}."
        )
    return found


def _plugin_of(name: str) -> Any:
    return getattr(_import(name), ATTRIBUTE, None)


def _import(name: str) -> ModuleType:
    """Import a module by its name, or a file by its path: under its stem, so that its objects can be sent to other processes."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    if not path.is_file():
        raise ConfigError(f"the file {path} of --import does not exist; correct the path.")
    if path.stem in sys.modules:
        module = sys.modules[path.stem]
        if getattr(module, "__file__", None) != str(path):
            raise ImportError(f"a module named {path.stem} exists already; rename the file")
        return module
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module
