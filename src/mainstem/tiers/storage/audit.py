"""An audit of a store, value by value: which values are intact, and whose they are.

    verify   reads every value: its length, its header, its seal        damaged values can be deleted
    usage    by identity, namespace and component, and by age           from the labels in headers

Both read all values; `usage` needs only the listing for what is known without a header. A store whose back end cannot
list its values cannot be audited: `StorageError` with the cause `refused`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from mainstem.storage.base import Backend, Listed
from mainstem.storage.moving import BATCH_VALUES, Progress, each_batch, read_batch, show_nothing
from mainstem.tiers.storage import identities
from mainstem.tiers.storage.sealer import HEADER_BYTES, Header, Sealer

HOUR_S, DAY_S = 3600.0, 86_400.0

AGES_S = {"under 1 h": HOUR_S, "under 1 day": DAY_S, "under 7 days": 7 * DAY_S, "under 30 days": 30 * DAY_S}
"""The ages by which values are counted; then "older", and "unknown"."""

BASE = "base"


def damage(sealer: Sealer, key: bytes, value: memoryview) -> str | None:
    """Returns None if a value is intact, else "length" (shorter than a header), "header" (none of a value of this
    length), "misdirected" (that of another key), or "altered" (its seal is not right, or of another secret)."""
    if len(value) < HEADER_BYTES:
        return "length"
    header = sealer.header(value)
    if header is None:
        return "header"
    return "misdirected" if header.key != key else sealer.verify(value, key)


@dataclass(slots=True)
class Audit:
    """Verifies all values of a store.

    Whether a seal was made with another secret or was forged, nobody can tell without that secret. So altered values
    count as damaged only where others are intact under this secret: otherwise it is probably the wrong one.

    Args:
        store: can list its values.
        sealer: has the secret.

    Attributes:
        intact, intact_bytes: values that verified.
        causes: the other values by cause: those of `damage`, "absent" where the store did not give what it listed, and
            "length" where it gave another length.
        deleted: values that were deleted.
    """

    store: Backend
    sealer: Sealer
    intact: int = 0
    intact_bytes: int = 0
    deleted: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    _damaged: list[bytes] = field(default_factory=list, repr=False)
    _altered: list[bytes] = field(default_factory=list, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def other_secret(self) -> bool:
        """Whether no value is intact under this secret and some are altered: it is probably not theirs."""
        return not self.intact and bool(self._altered)

    def run(self, progress: Progress = show_nothing) -> None:
        """Reads and verifies all values.

        Raises:
            StorageError: the store cannot list its values, or failed several times.
        """
        each_batch(self.store, self._verify, progress=progress)

    def delete(self) -> None:
        """Deletes the damaged values that `run` found, but no altered ones if `other_secret`.

        Raises:
            StorageError: the store failed. What was deleted counts.
        """
        doomed = self._damaged + ([] if self.other_secret else self._altered)
        for at in range(0, len(doomed), BATCH_VALUES):
            batch = doomed[at : at + BATCH_VALUES]
            self.store.delete(batch)
            self.deleted += len(batch)

    def _verify(self, batch: Sequence[Listed]) -> None:
        causes = self._causes(batch)
        if again := [value for value in batch if causes[value.key] == "absent"]:  # a single request may have failed
            causes |= self._causes(again)
        intact = [value for value in batch if causes[value.key] is None]
        with self._lock:
            self.intact += len(intact)
            self.intact_bytes += sum(value.length for value in intact)
            self.causes.update(cause for cause in causes.values() if cause is not None)
            self._altered += [key for key, cause in causes.items() if cause == "altered"]
            self._damaged += [key for key, cause in causes.items() if cause not in (None, "absent", "altered")]

    def _causes(self, batch: Sequence[Listed]) -> dict[bytes, str | None]:
        """Returns for each key why its value is damaged or was not read; None: it is intact."""
        return {value.key: cause for value, _, cause in read_batch(self.store, batch, partial(damage, self.sealer))}


@dataclass(frozen=True, slots=True)
class Group:
    """Values that belong together.

    Args:
        model: of their identity, or "" where it is not known.
        identity, namespace: ids of their labels, in hex; "" where values have none. The namespace without adapter and
            salt is `BASE`.
        component: such as "full", or "note"; "" where it is not known.
    """

    model: str = ""
    identity: str = ""
    namespace: str = ""
    component: str = ""


@dataclass(slots=True)
class Share:
    """The values of a group, their bytes, and the bytes by age, named as in `AGES_S`."""

    values: int = 0
    bytes: int = 0
    ages: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Usage:
    """Counts the values of a store by their labels and by age.

    Without the secret that labelled them, values have no label. A value's age is that since it was sealed, or what the
    store says of it.

    Args:
        store: can list its values.
        sealer: has the secret.
        headers: whether to read the values for their headers; otherwise only the listing counts, by age.
        now: the time in seconds since the epoch.
    """

    store: Backend
    sealer: Sealer
    headers: bool = True
    now: Callable[[], float] = time.time
    shares: dict[Group, Share] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _models: dict[bytes, str] = field(default_factory=dict, repr=False)

    def run(self, progress: Progress = show_nothing) -> None:
        """Counts all values.

        Raises:
            StorageError: the store cannot list its values, or failed several times.
        """
        writers = identities.find(self.store, self.sealer, Counter())
        self._models = {identities.id_of(writer, self.sealer): writer.get("model", "") for writer in writers}
        if self.headers:
            each_batch(self.store, self._count, progress=progress)
            return
        values = size = 0
        for batch in self.store.scan():
            self._add([(value, None) for value in batch])
            values, size = values + len(batch), size + sum(value.length for value in batch)
            progress(values, size)

    def rows(self) -> list[dict[str, object]]:
        """Returns a row for each group, the largest first."""
        shares = sorted(self.shares.items(), key=lambda item: -item[1].bytes)
        return [
            {**asdict(group), "values": share.values, "bytes": share.bytes, "ages": dict(share.ages)}
            for group, share in shares
        ]

    def _count(self, batch: Sequence[Listed]) -> None:
        found = read_batch(self.store, batch)
        self._add([(value, None if cause else self.sealer.header(content)) for value, content, cause in found])

    def _add(self, values: Sequence[tuple[Listed, Header | None]]) -> None:
        with self._lock:
            for value, header in values:
                share = self.shares.setdefault(self._group(header), Share())
                share.values += 1
                share.bytes += value.length
                share.ages[self._age(value, header)] += value.length

    def _group(self, header: Header | None) -> Group:
        label = None if header is None else header.label
        if label is None:
            return Group()
        if not any(label.identity):
            return Group(component=label.component)
        model = self._models.get(label.identity, "")
        base = label.namespace == self.sealer.id_of(b"")
        return Group(model, label.identity.hex(), BASE if base else label.namespace.hex(), label.component)

    def _age(self, value: Listed, header: Header | None) -> str:
        sealed_s = None if header is None else header.sealed_s
        age_s = value.age_s if sealed_s is None else self.now() - sealed_s
        if age_s is None:
            return "unknown"
        return next((name for name, limit_s in AGES_S.items() if age_s < limit_s), "older")
