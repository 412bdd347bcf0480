"""Imports by name: of optional packages, and of a user's own object, `module:name`."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mainstem.errors import BackendUnavailable, BadArgument, MainstemError

PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""`module:name`."""


def is_missing(error: ImportError, package: str) -> bool:
    """Returns whether an import failed because a package, or a module in it, is missing, and not for another reason."""
    name = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    return name == package or name.startswith(package + ".")


@contextmanager
def needs(package: str, hint: str, kind: type[MainstemError] = BackendUnavailable) -> Iterator[None]:
    """Guards the import of an optional package.

    Args:
        package: its top-level name.
        hint: what needs the package, and how to install it.
        kind: type of the error.

    Raises:
        BackendUnavailable: or another `kind`. The message is the hint if the package is missing, else why its import
            fails.
    """
    try:
        yield
    except ImportError as error:
        raise kind(hint if is_missing(error, package) else f"{package} cannot be imported: {error}") from error


def load_package(module: str, hint: str) -> Any:
    """Imports a module of an optional package; see `needs`."""
    with needs(module.partition(".")[0], hint):
        return importlib.import_module(module)


def load_object(argument: str, path: str) -> object:
    """Imports the object `module:name`. The module may be in the working directory, which stays on the import path.

    Args:
        argument: the name of the argument, for errors.
        path: a string that matches `PATH`.

    Raises:
        BadArgument: there is no such module, its import fails, or it does not define the name.
    """
    module, _, name = path.partition(":")
    if (here := os.getcwd()) not in sys.path:  # a console script has its own folder on the path instead
        sys.path.append(here)
    try:
        loaded = importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise BadArgument(argument, path, f"module:name; there is no module {error.name}") from error
        why = f"{type(error).__name__}: {error}"
        raise BadArgument(argument, path, f"an object of a module that can be imported: {why}") from error
    try:
        return getattr(loaded, name)
    except AttributeError as error:
        raise BadArgument(argument, path, f"module:name; {module} has no {name}") from error
