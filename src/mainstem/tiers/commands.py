"""The `mainstem storage` commands, which `mainstem.cli` mounts. Arguments and printing, nothing else.

Results go to standard output, progress to standard error. The commands import heavy modules themselves.

Examples:

  mainstem storage stats file:./kv --json
  mainstem storage migrate file:./kv redis://127.0.0.1:6379/0
  mainstem storage verify file:./kv --delete
  mainstem storage du file:./kv
  mainstem storage clear redis://127.0.0.1:6379/0
  mainstem storage check my_package.my_store:MyStore
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from mainstem.errors import BackendUnavailable, BadArgument, MainstemError
from mainstem.settings.engine import StorageSecret
from mainstem.settings.flags import Switch, command, group
from mainstem.terminal import bar, say
from mainstem.units import show_bytes

if TYPE_CHECKING:
    from mainstem.storage import Backend
    from mainstem.storage.moving import Migration, Progress
    from mainstem.tiers.storage.sealer import Sealer

storage = group("storage", __doc__)

Spec = Annotated[str, Parameter(help="Store, such as file:./kv or redis://127.0.0.1:6379/0; see docs/storage.md.")]


@command(storage)
def stats(spec: Spec, *, secret: StorageSecret = StorageSecret(), json: Switch = False) -> None:
    """Show what a store holds, and which models, layouts and numbers of ranks wrote to it.

    Args:
        secret: The secret of the store.
        json: Print one JSON object.

    Examples:

      mainstem storage stats file:./kv
      mainstem storage stats 's3://my-bucket?endpoint=http://127.0.0.1:9000' --json
    """
    from mainstem.tiers.storage import identities

    with _backend(spec) as backend:
        held = {**asdict(backend.stats()), **asdict(backend.capabilities)}
        writers = identities.find(backend, _sealer(secret), Counter())
    if json:
        print(dumps({**held, "writers": writers}))
        return
    for name, value in held.items():
        print(f"{name:15} {value}")
    for writer in writers:
        print(f"written by      {identities.describe(writer)}")


@command(storage)
def migrate(
    source: Spec,
    target: Spec,
    *,
    secret: StorageSecret = StorageSecret(),
    json: Switch = False,
) -> None:
    """Copy to one store what another has and it lacks.

    Args:
        source: Store to copy from; it must be able to list its values.
        target: Store to copy to. What it has stays as it is.
        secret: The secret of the source: values that it did not seal are not copied.
        json: Print one JSON object.

    Examples:

      mainstem storage migrate file:./kv 's3://my-bucket?endpoint=http://127.0.0.1:9000'
      MAINSTEM_STORAGE_SECRET="$(cat secret)" mainstem storage migrate redis://10.0.0.1 redis://10.0.0.2 --json

    Values are copied as they are; with a secret, only those that it sealed. Interrupted or failed, run it again.
    """
    from mainstem.storage.moving import Migration
    from mainstem.tiers.storage.audit import damage

    check = None if secret.storage_secret is None else partial(damage, _sealer(secret))
    with _backend(source) as old, _backend(target, existing=False) as new:
        moving = Migration(old, new, check)
        try:
            with _progress("copying values", old) as progress:
                moving.run(progress=progress)
        except (KeyboardInterrupt, MainstemError):
            say("not all was copied: the same command goes on from there")
            raise
        finally:
            _print_migration(moving, json)
    if moving.left:
        raise MainstemError(f"{moving.left.total():,} values were not copied: {_by_cause(moving.left)}")


def _print_migration(moving: Migration, json: bool) -> None:
    if json:
        counts = {"copied": moving.copied, "copied_bytes": moving.copied_bytes, "there": moving.there}
        print(dumps({**counts, "left": dict(moving.left)}))
        return
    print(f"copied {moving.copied:,} values ({show_bytes(moving.copied_bytes)}); {moving.there:,} were there")


@command(storage)
def verify(
    spec: Spec,
    *,
    secret: StorageSecret = StorageSecret(),
    delete: Switch = False,
    json: Switch = False,
) -> None:
    """Read all values of a store, and check their lengths, headers and seals.

    Args:
        secret: The secret of the store. Values of another secret count as altered.
        delete: Delete the damaged values.
        json: Print one JSON object.

    Examples:

      mainstem storage verify file:./kv
      MAINSTEM_STORAGE_SECRET="$(cat secret)" mainstem storage verify redis://127.0.0.1:6379/0 --delete
    """
    from mainstem.tiers.storage.audit import Audit

    with _backend(spec) as backend:
        audit = Audit(backend, _sealer(secret))
        with _progress("verifying values", backend) as progress:
            audit.run(progress=progress)
        if delete:
            audit.delete()
    causes = dict(audit.causes)
    held = {"intact": audit.intact, "intact_bytes": audit.intact_bytes, "damaged": causes, "deleted": audit.deleted}
    if json:
        print(dumps(held))
    else:
        print(f"{audit.intact:,} values are intact ({show_bytes(audit.intact_bytes)}), {audit.deleted:,} were deleted")
    if audit.other_secret:
        given = "this secret" if secret.storage_secret else "no secret (--storage-secret)"
        raise MainstemError(f"no value verifies with {given}: {_by_cause(audit.causes)}; no altered one was deleted")
    if audit.causes.total() > audit.deleted:
        raise MainstemError(f"{audit.causes.total():,} values are damaged: {_by_cause(audit.causes)}")


@command(storage)
def du(
    spec: Spec,
    *,
    secret: StorageSecret = StorageSecret(),
    headers: bool = True,
    json: Switch = False,
) -> None:
    """Show what fills a store: by model, namespace and component, and by age.

    Args:
        secret: The secret of the store, without which values have no namespace.
        headers: Read every value for its header; --no-headers only lists them, by age where the store knows it.
        json: Print one JSON object per group.

    Examples:

      mainstem storage du file:./kv
      mainstem storage du 's3://my-bucket?endpoint=http://127.0.0.1:9000' --no-headers --json
    """
    from mainstem.tiers.storage.audit import Usage

    with _backend(spec) as backend:
        usage = Usage(backend, _sealer(secret), headers)
        with _progress("reading values", backend) as progress:
            usage.run(progress=progress)
    rows = usage.rows()
    if json:
        for row in rows:
            print(dumps(row))
    else:
        _print_usage(rows)


def _print_usage(rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"{'bytes':>9} {'values':>9}  {'model':24} {'namespace':10} {'component':16} by age")
    for row in rows:
        ages = ", ".join(f"{age} {show_bytes(size)}" for age, size in row["ages"].items())
        named = f"{row['model'] or row['identity'][:8] or '-':24.24} {row['namespace'][:8] or '-':10}"
        print(f"{show_bytes(row['bytes']):>9} {row['values']:>9,}  {named} {row['component'] or '-':16} {ages}")


def _sealer(secret: StorageSecret) -> Sealer:
    from mainstem.tiers.storage.sealer import PUBLIC_SECRET, Sealer

    return Sealer(None, secret.storage_secret or PUBLIC_SECRET)


def _by_cause(causes: Counter[str]) -> str:
    return ", ".join(f"{cause} {count:,}" for cause, count in causes.most_common())


@command(storage)
def clear(spec: Spec) -> None:
    """Delete every value in a store.

    Examples:

      mainstem storage clear file:./kv
      mainstem storage clear redis://127.0.0.1:6379/0
    """
    with _backend(spec) as backend:
        backend.clear()


@command(storage)
def check(spec: Spec, *, erase: bool = False, json: Switch = False) -> None:
    """Run the conformance suite against a store. The store is empty afterwards.

    Args:
        erase: Run even if the store may not be empty, and delete what it holds.
        json: Print one JSON object per case.

    Examples:

      mainstem storage check file:./new
      mainstem storage check my_package.my_store:MyStore --erase --json
    """
    from mainstem.storage import open_backend
    from mainstem.storage.conformance import CASES, run

    with suppress(BackendUnavailable), _backend(spec) as backend:
        if not erase and backend.stats().entries != 0:
            raise BadArgument("spec", spec, "a store that is known to be empty; --erase empties it")
    open_backend(spec).close()
    failed = 0
    for case in CASES:
        result = run(case, lambda: open_backend(spec))
        print(dumps({**asdict(result), "passed": result.passed}) if json else result, flush=True)
        failed += not result.passed
    clear(spec)
    if failed:
        raise MainstemError(f"{failed} of {len(CASES)} cases failed")


@contextmanager
def _backend(spec: str, *, existing: bool = True) -> Iterator[Backend]:
    from mainstem.storage import open_backend

    backend = open_backend(spec, existing=existing)
    try:
        yield backend
    finally:
        backend.close()


@contextmanager
def _progress(words: str, store: Backend) -> Iterator[Progress]:
    """Yields what shows the values that are done: as a bar on a terminal, of as many as the store counts."""
    if not sys.stderr.isatty():
        yield lambda values, size: None
        return
    total = store.stats().entries or 0
    with bar(words) as show:
        yield lambda values, size: show(
            values, total and max(total, values), f"{words}: {values:,}, {show_bytes(size)}"
        )
