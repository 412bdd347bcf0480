"""What is in a store: intact and damaged values, of which secret, whose they are and how old."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from rigs.hand_driven import IDENTITY, SECRET, Rig

from mainstem.cache.namespaces import encode_namespace
from mainstem.errors import StorageError
from mainstem.storage.base import ABSENT, Backend, Listed
from mainstem.storage.conformance import make_keys
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.storage.audit import BASE, DAY_S, HOUR_S, Audit, Group, Usage, damage
from mainstem.tiers.storage.identities import enter, id_of, summarize
from mainstem.tiers.storage.sealer import HEADER_BYTES, PUBLIC_SECRET, Label, Sealer

KEYS = make_keys(random.Random(5), 40)
SEALER = Sealer(None, SECRET)
NOW_S = 1_800_000_000.0


def value(key: bytes, payload: bytes = b"payload", sealer: Sealer = SEALER, **more: object) -> memoryview:
    slot = memoryview(bytearray(HEADER_BYTES) + payload)
    sealer.seal(slot, key, **more)  # type: ignore[arg-type]
    return slot


def changed(slot: memoryview, at: int) -> memoryview:
    slot[at] ^= 1
    return slot


def stored(values: dict[bytes, memoryview]) -> MemoryBackend:
    backend = MemoryBackend()
    backend.put(list(values), list(values.values()))
    return backend


def audited(backend: Backend, sealer: Sealer = SEALER) -> Audit:
    audit = Audit(backend, sealer)
    audit.run()
    return audit


# ---------------------------------------------------------------- verify

DAMAGED = {
    "length": memoryview(bytearray(HEADER_BYTES - 1)),
    "header": changed(value(KEYS[1]), 0),
    "misdirected": value(KEYS[9]),
    "altered": changed(value(KEYS[3]), HEADER_BYTES + 2),
}


@pytest.mark.parametrize(("number", "cause"), list(enumerate(DAMAGED)))
def test_each_damage_has_its_cause(number: int, cause: str) -> None:
    assert damage(SEALER, KEYS[number], DAMAGED[cause]) == cause
    assert damage(SEALER, KEYS[number], value(KEYS[number])) is None


def test_a_value_that_was_cut_or_extended_has_a_header_of_another_length() -> None:
    assert damage(SEALER, KEYS[0], value(KEYS[0])[:-1]) == "header"
    assert damage(SEALER, KEYS[0], memoryview(bytearray(value(KEYS[0])) + b"x")) == "header"


def test_all_values_are_read_and_only_the_damaged_ones_deleted() -> None:
    values = {key: value(key) for key in KEYS} | dict(zip(KEYS, DAMAGED.values(), strict=False))
    backend = stored(values)
    audit = audited(backend)
    assert audit.causes == Counter(DAMAGED.keys()) and audit.intact == 36 and not audit.other_secret
    assert audit.intact_bytes == 36 * (HEADER_BYTES + 7) and all(backend.exists(KEYS))
    audit.delete()
    assert audit.deleted == 4 and backend.exists(KEYS) == [False] * 4 + [True] * 36
    assert audited(backend).causes == Counter()


def test_with_another_secret_nothing_altered_is_deleted() -> None:
    """Otherwise a mistyped secret would empty the store."""
    backend = stored({key: value(key) for key in KEYS[:5]} | {KEYS[6]: DAMAGED["length"], KEYS[7]: value(KEYS[9])})
    for sealer in (Sealer(None, b"another secret of enough bytes"), Sealer(None, PUBLIC_SECRET)):
        audit = audited(backend, sealer)
        assert audit.other_secret and audit.causes == Counter(altered=5, length=1, misdirected=1)
    audit.delete()
    assert audit.deleted == 2 and backend.exists(KEYS[:8]) == [True] * 5 + [False] * 3


def test_values_without_a_secret_are_verified_against_damage() -> None:
    public = Sealer(None, PUBLIC_SECRET)
    backend = stored({KEYS[0]: value(KEYS[0], sealer=public), KEYS[1]: changed(value(KEYS[1], sealer=public), 130)})
    assert audited(backend, public).causes == Counter(altered=1)


def test_what_cannot_be_read_is_counted_and_never_deleted() -> None:
    class Unreadable(MemoryBackend):
        def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
            lengths = super().get(keys, buffers)
            return [ABSENT if key == KEYS[1] else length for key, length in zip(keys, lengths, strict=True)]

    backend = Unreadable()
    backend.put(KEYS[:3], [value(key) for key in KEYS[:3]])
    audit = audited(backend)
    audit.delete()
    assert (audit.intact, audit.causes, audit.deleted) == (2, Counter(absent=1), 0) and all(backend.exists(KEYS[:3]))


def test_a_single_read_that_fails_is_made_again() -> None:
    class Flaky(MemoryBackend):
        reads = 0

        def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
            self.reads += 1
            return [ABSENT] * len(keys) if self.reads == 1 else super().get(keys, buffers)

    backend = Flaky()
    backend.put(KEYS[:3], [value(key) for key in KEYS[:3]])
    assert (audited(backend).intact, audited(backend).causes) == (3, Counter())


def test_a_store_that_cannot_list_cannot_be_audited() -> None:
    class Silent(MemoryBackend):
        def scan(self) -> Iterator[Sequence[Listed]]:
            return Backend.scan(self)

    with pytest.raises(StorageError, match="cannot list"):
        audited(Silent())
    with pytest.raises(StorageError, match="cannot list"):
        Usage(Silent(), SEALER, headers=False).run()


# ---------------------------------------------------------------- usage


def used(backend: Backend, sealer: Sealer = SEALER, *, headers: bool = True) -> Usage:
    usage = Usage(backend, sealer, headers, now=lambda: NOW_S)
    usage.run()
    return usage


def test_what_a_cache_stored_is_grouped_by_model_namespace_and_component() -> None:
    backend = MemoryBackend()
    rig = Rig(backend=backend)
    rig.serve([1, 2, 3, 4, 5])
    rig.serve([1, 2, 3, 4, 5, 6, 7, 8, 9], "a")
    rig.settle()
    enter(backend, Sealer(IDENTITY, SECRET), Counter())
    usage = used(backend)
    identity = id_of(summarize(IDENTITY), SEALER).hex()
    tenant = SEALER.id_of(encode_namespace("a")).hex()
    shares = {group: share.values for group, share in usage.shares.items()}
    assert shares == {
        Group(IDENTITY.model, identity, BASE, "full"): 2,
        Group(IDENTITY.model, identity, tenant, "full"): 4,
        Group(component="note"): 1,
    }
    assert [row["component"] for row in usage.rows()] == ["note", "full", "full"]
    assert sum(share.bytes for share in usage.shares.values()) == backend.stats().used_bytes


def test_without_the_secret_no_value_says_whose_it_is() -> None:
    label = Label(b"identity-001", b"namespace-01", "full")
    backend = stored({key: value(key, label=label, sealed_s=NOW_S) for key in KEYS})
    assert list(used(backend).shares) == [Group("", b"identity-001".hex(), b"namespace-01".hex(), "full")]
    assert list(used(backend, Sealer(None, PUBLIC_SECRET)).shares) == [Group()]


def test_values_are_counted_by_the_age_of_their_seal_or_else_by_the_stores() -> None:
    class Aged(MemoryBackend):
        def scan(self) -> Iterator[Sequence[Listed]]:
            for batch in super().scan():
                yield [replace(found, age_s=2 * DAY_S) for found in batch if found.key != KEYS[5]]
            yield [Listed(KEYS[5], HEADER_BYTES + 7)]

    ages = {KEYS[0]: 60.0, KEYS[1]: 2 * HOUR_S, KEYS[2]: 20 * DAY_S, KEYS[3]: 300 * DAY_S}
    backend = Aged()
    backend.put(list(ages), [value(key, sealed_s=NOW_S - age_s) for key, age_s in ages.items()])
    backend.put(KEYS[4:6], [value(KEYS[4]), value(KEYS[5])])
    (share,) = used(backend).shares.values()
    size = HEADER_BYTES + 7
    names = ["under 1 h", "under 1 day", "under 30 days", "older", "under 7 days", "unknown"]
    assert share.ages == Counter(dict.fromkeys(names, size))
    (share,) = used(backend, headers=False).shares.values()
    assert share.ages == Counter({"under 7 days": 5 * size, "unknown": size}) and share.values == 6


def test_a_listing_alone_reads_no_values() -> None:
    class Unread(MemoryBackend):
        def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
            assert len(keys) == 1, "only the note of those who wrote"
            return super().get(keys, buffers)

    backend = Unread()
    backend.put(KEYS, [value(key) for key in KEYS])
    (share,) = used(backend, headers=False).shares.values()
    assert (share.values, share.bytes) == (40, 40 * (HEADER_BYTES + 7))


def test_a_page_says_when_it_was_stored() -> None:
    backend, before_s = MemoryBackend(), int(time.time())
    rig = Rig(backend=backend)
    rig.serve([1, 2, 3, 4, 5])
    rig.settle()
    for batch in backend.scan():
        for found in batch:
            slot = memoryview(bytearray(found.length))
            backend.get([found.key], [slot])
            header = SEALER.header(slot)
            assert header is not None and header.label is not None
            assert (
                header.sealed_s is None
                if header.label.component == "note"
                else (header.sealed_s is not None and before_s <= header.sealed_s <= time.time())
            )
