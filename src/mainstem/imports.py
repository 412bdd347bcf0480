"""What is imported by name: packages that need not be installed, and `module:name`, a user's own object."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mainstem.errors import BackendUnavailable, BadArgument, MainstemError

PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""`module:name`."""


def is_missing(error: ImportError, package: str) -> bool:
    """Whether an import failed because a package, or a module in it, is not there; not for any other reason."""
    name = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    return name == package or name.startswith(package + ".")


@contextmanager
def needs(package: str, hint: str, kind: type[MainstemError] = BackendUnavailable) -> Iterator[None]:
    """Stands around the import of a package that need not be installed.

    Args:
        package: its top-level name.
        hint: what needs it, and how it is installed.
        kind: of the error.

    Raises:
        BackendUnavailable: or another `kind`. The package is not there: the hint; or it is there and its import fails:
            why.
    """
    try:
        yield
    except ImportError as error:
        raise kind(hint if is_missing(error, package) else f"{package} cannot be imported: {error}") from error


def load_object(argument: str, path: str) -> object:
    """What `module:name` names. The module may lie in the working directory, which stays on the path from then on.

    Args:
        argument: what errors call it.
        path: fits `PATH`.

    Raises:
        BadArgument: there is no such module, its import fails, or it has nothing of that name.
    """
    module, _, name = path.partition(":")
    if (here := os.getcwd()) not in sys.path:  # a console script has its own folder there instead
        sys.path.append(here)
    try:
        found = importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise BadArgument(argument, path, f"module:name; there is no module {error.name}") from error
        why = f"{type(error).__name__}: {error}"
        raise BadArgument(argument, path, f"of a module that can be imported: {why}") from error
    try:
        return getattr(found, name)
    except AttributeError as error:
        raise BadArgument(argument, path, f"module:name; {module} has no {name}") from error
