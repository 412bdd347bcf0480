"""The `mainstem store` commands, which `mainstem.cli` mounts. Arguments and printing, nothing else.

Examples:

  mainstem store serve 'file:./kv?capacity=64GiB' --host-bytes 8GiB
  mainstem store status

Other processes use the store as shared+SPEC, in --storage and wherever a store is named.
The first of them starts an owner if there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from mainstem.errors import MainstemError, redacted
from mainstem.settings.flags import Switch, command, group
from mainstem.settings.owner import OwnerConfig
from mainstem.terminal import say
from mainstem.units import show_bytes

store = group(
    "store",
    __doc__,
    help="Hold a store, and a host tier in shared memory, for all processes of this user on this machine.",
)


@command(store)
def serve(
    spec: Annotated[str, Parameter(help="Store, such as file:./kv or redis://127.0.0.1:6379/0; see docs/storage.md.")],
    *,
    config: OwnerConfig = OwnerConfig(),
) -> None:
    """Open a store and serve it to other processes, which name it shared+SPEC.

    Examples:

      mainstem store serve 'file:./kv?capacity=64GiB' --host-bytes 8GiB
      mainstem store serve redis://127.0.0.1:6379/0 --socket /run/user/1000/kv/store.sock --linger-s 600

    SIGTERM or Ctrl-C lets it write what is queued; a second one ends it at once.
    """
    import logging

    from mainstem.owner.process import serve as serve_store

    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    serve_store(spec, config, lambda place: say(f"{place.path} serves {place.shown}"))


@command(store)
def status(spec: str | None = None, *, socket: Path | None = None, json: Switch = False) -> None:
    """Show what owners hold, and what they have counted since they started.

    Args:
        spec: The store of one owner. Default: all owners in the folder of this user.
        socket: Where it listens, if not where its store says.
        json: Print one JSON object per owner.

    Examples:

      mainstem store status
      mainstem store status 'file:./kv?capacity=64GiB' --json
    """
    count = 0
    for counts in _found(spec, socket):
        count += 1
        if json:
            print(dumps(counts, ensure_ascii=False))
            continue
        for name, value in counts.items():
            print(f"{name:15} {_shown(name, value)}")
    if not count and (spec or socket):
        raise MainstemError(f"there is no owner of {redacted(spec) if spec else socket}")
    if not count:
        say("no owner is running")


def _found(spec: str | None, socket: Path | None) -> Iterator[dict[str, Any]]:
    from mainstem.owner import client, start

    if spec is None and socket is None:
        paths = list(start.running())
    else:
        paths = [start.Place.of(spec or "", None if socket is None else str(socket)).path]
    yield from filter(None, map(client.status, paths))


def _shown(name: str, value: object) -> object:
    if name.endswith("_bytes") and isinstance(value, int):
        return show_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{cause} {count}" for cause, count in value.items()) or "none"
    return value
