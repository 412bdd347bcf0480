"""Stored pages: what a key depends on, and that only a page sealed with the secret for its key verifies."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs.hand_driven import IDENTITY, SECRET

from mainstem.cache.identity import Identity
from mainstem.errors import BadArgument
from mainstem.tiers.storage.sealer import HEADER_BYTES, Header, Label, Sealer

PAGE_BYTES = 8  # of symbols
PAYLOAD = bytes(range(24))


@pytest.fixture
def sealer() -> Sealer:
    return Sealer(IDENTITY, SECRET)


def sealed(sealer: Sealer, key: bytes, payload: bytes = PAYLOAD) -> memoryview:
    slot = memoryview(bytearray(b"\xee" * HEADER_BYTES + payload))
    sealer.seal(slot, key)
    return slot


def some_names(sealer: Sealer, symbols: bytes = bytes(range(32)), namespace: bytes = b"") -> list[bytes]:
    return sealer.names(sealer.root(namespace), symbols, PAGE_BYTES)


def some_keys(sealer: Sealer, symbols: bytes = bytes(range(32)), namespace: bytes = b"") -> list[bytes]:
    return sealer.keys(some_names(sealer, symbols, namespace), "full")


# ---------------------------------------------------------------- fixed values


def test_keys_and_pages_are_the_same_in_every_process_and_version() -> None:
    """A change here invalidates all stored pages: change the magic and the contexts with it."""
    identity = Identity("m", "w", "bfloat16", "none", "l", "s", "gqa", "r", "t", "TokenKeys/4", 16)
    sealer = Sealer(identity, b"sixteen bytes ok")
    root = sealer.root(b"space")
    names = sealer.names(root, bytes(range(16)), PAGE_BYTES)
    keys = sealer.keys(names, "full")
    assert root.hex() == GOLDEN["root"]
    assert [name.hex() for name in names] == GOLDEN["names"]
    assert [key.hex() for key in keys] == GOLDEN["keys"]
    assert sealer.record("hottest prefixes").hex() == GOLDEN["record"]
    assert bytes(sealed(sealer, keys[1], b"payload!")).hex() == GOLDEN["page"]


GOLDEN: dict[str, Any] = {
    "root": "4907d5b2ef728dbb3e6947c99aba32c1da09fbdc45e936849b728e02bd1ea0ee",
    "names": [
        "5624d7b99743905a02911cbdd0ea472483f13a71e3781f7fb0b5598e5aae2af0",
        "ac5e8734915b05b1b8948fbce75277a2a44241b644b22665efe5dcecc68dc8e5",
    ],
    "keys": [
        "eed81b0d632b06c74022b988bd4b22e440c317f91550e010b4e268f14ca12d7e",
        "8199b2a809c4e73aafbfe621a807e4ef2e5f8d3541f62f562bcd837be24aaddb",
    ],
    "record": "a6defb0717ea3397ea77277037069e7a512ca5193e80bf12b8d70c96e99a66ec",
    "page": (
        "4d41494e53544d3108000000000000008199b2a809c4e73aafbfe621a807e4ef"
        "2e5f8d3541f62f562bcd837be24aaddb00000000000000000000000000000000"
        "0000000000000000000000000000000000000000000000000000000000000000"
        "192b3c438cefd021e4cc0646be823948ba834e2d424f496d200a230986f35c8c"
        "7061796c6f616421"
    ),
}


# ---------------------------------------------------------------- keys


def test_a_key_is_a_digest_of_each_whole_page(sealer: Sealer) -> None:
    for length in range(33):
        keys = some_keys(sealer, bytes(range(length)))
        assert len(keys) == length // PAGE_BYTES
        assert all(len(key) == 32 for key in keys)
        assert keys == some_keys(sealer)[: len(keys)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(min_size=32, max_size=32), st.integers(0, 31), st.integers(1, 255))
def test_a_key_depends_on_every_symbol_before_and_in_its_page(symbols: bytes, at: int, flip: int) -> None:
    sealer = Sealer(IDENTITY, SECRET)
    changed = symbols[:at] + bytes([symbols[at] ^ flip]) + symbols[at + 1 :]
    pairs = list(zip(some_keys(sealer, symbols), some_keys(sealer, changed), strict=True))
    for page, (one, two) in enumerate(pairs):
        assert (one == two) == (page < at // PAGE_BYTES)


def test_names_continue_from_a_parent(sealer: Sealer) -> None:
    names = some_names(sealer)
    assert sealer.names(names[1], bytes(range(16, 32)), PAGE_BYTES) == names[2:]
    assert sealer.names(names[1], memoryview(bytes(range(16, 32))), PAGE_BYTES) == names[2:]


def test_each_component_and_shard_of_a_page_has_a_key_of_its_own() -> None:
    ranks = [Sealer(replace(IDENTITY, tp_rank=rank, tp_size=size), SECRET) for rank, size in ((0, 1), (0, 2), (1, 2))]
    names = some_names(ranks[0])
    assert all(some_names(sealer) == names for sealer in ranks), "names are the same on every rank"
    keys = [key for sealer in ranks for row in ("full", "window", "state", "") for key in sealer.keys(names, row)]
    assert len(set(keys) | set(names)) == len(keys) + len(names)
    one, other = (Sealer(replace(IDENTITY, attention="mla", tp_rank=rank, tp_size=2), SECRET) for rank in (0, 1))
    assert one.keys(names, "full") == other.keys(names, "full")


def test_namespaces_secrets_and_kinds_of_name_never_meet() -> None:
    sealer, other = Sealer(IDENTITY, SECRET), Sealer(IDENTITY, SECRET + b"!")
    names = [
        *some_names(sealer),
        *some_keys(sealer),
        *some_keys(sealer, namespace=b"a"),
        *some_keys(sealer, namespace=b"b"),
        *some_keys(other),
        *some_keys(Sealer(IDENTITY)),
        *(sealer.root(space) for space in (b"", b"a", b"b")),
        *(sealer.record(name) for name in ("", "a", "b")),
        other.root(b""),
        other.record(""),
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("field", [field.name for field in fields(Identity)])
def test_every_part_of_the_identity_is_part_of_every_key(field: str) -> None:
    identity = replace(IDENTITY, tp_size=2)
    value = getattr(identity, field)
    more: Any = {int: 1, str: " of another", tuple: ("more",)}[type(value)]
    one, two = Sealer(identity, SECRET), Sealer(replace(identity, **{field: value + more}), SECRET)
    shard = field in ("tp_rank", "tp_size")
    assert (one.root(b"space") == two.root(b"space")) == shard
    assert one.record("name") != two.record("name")
    assert not set(some_keys(one, namespace=b"space")) & set(some_keys(two, namespace=b"space"))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=8), st.binary(max_size=8))
def test_a_namespace_is_never_part_of_the_identity(one: bytes, two: bytes) -> None:
    sealer = Sealer(IDENTITY, SECRET)
    assert (sealer.root(one) == sealer.root(two)) == (one == two)


@pytest.mark.parametrize("secret", [b"", b"short", b"x" * 15])
def test_a_short_secret_is_rejected_and_not_shown(secret: bytes) -> None:
    with pytest.raises(BadArgument, match="at least 16") as caught:
        Sealer(IDENTITY, secret)
    assert not secret or secret.decode() not in str(caught.value)


# ---------------------------------------------------------------- slots


def test_a_sealed_page_verifies_with_its_own_key_only(sealer: Sealer) -> None:
    keys = some_keys(sealer)
    for key in keys:
        slot = sealed(sealer, key)
        assert bytes(slot[HEADER_BYTES:]) == PAYLOAD
        assert [sealer.verify(slot, other) for other in keys].count(None) == 1
        assert sealer.verify(slot, key) is None
        assert {sealer.verify(slot, other) for other in keys if other != key} == {"misdirected"}


def test_sealing_overwrites_the_whole_header(sealer: Sealer) -> None:
    (key, *_) = some_keys(sealer)
    before = memoryview(bytearray(bytes(HEADER_BYTES) + PAYLOAD))
    sealer.seal(before, key)
    assert bytes(before) == bytes(sealed(sealer, key))


def test_every_single_flipped_bit_is_found(sealer: Sealer) -> None:
    key = some_keys(sealer)[0]
    slot = labelled(sealer, key)
    for bit in range(8 * len(slot)):
        slot[bit // 8] ^= 1 << bit % 8
        assert sealer.verify(slot, key) == "altered", bit
        slot[bit // 8] ^= 1 << bit % 8
    assert sealer.verify(slot, key) is None


@pytest.mark.parametrize("torn", ["zeros", "ones", "another page"])
def test_a_page_written_in_part_is_found(sealer: Sealer, torn: str) -> None:
    key, other, *_ = some_keys(sealer)
    whole = bytes(sealed(sealer, key))
    rest = {
        "zeros": bytes(len(whole)),
        "ones": b"\xff" * len(whole),
        "another page": bytes(sealed(sealer, other, PAYLOAD[::-1])),
    }[torn]
    for cut in range(len(whole)):
        for slot in (whole[:cut] + rest[cut:], rest[:cut] + whole[cut:]):
            if slot != whole:
                assert sealer.verify(memoryview(bytearray(slot)), key) in ("altered", "misdirected"), cut


def test_a_shorter_or_longer_slot_is_found(sealer: Sealer) -> None:
    key = some_keys(sealer)[0]
    whole = bytes(sealed(sealer, key))
    for length in range(HEADER_BYTES, len(whole)):
        assert sealer.verify(memoryview(bytearray(whole[:length])), key) == "altered"
    for extra in (b"\0", bytes(8), whole):
        assert sealer.verify(memoryview(bytearray(whole + extra)), key) == "altered"


@pytest.mark.parametrize("content", [bytes(HEADER_BYTES), bytes(HEADER_BYTES + 24), b"\xff" * (HEADER_BYTES + 24)])
def test_a_slot_that_was_never_sealed_does_not_verify(sealer: Sealer, content: bytes) -> None:
    assert sealer.verify(memoryview(bytearray(content)), some_keys(sealer)[0]) == "altered"


def test_a_page_made_without_the_secret_does_not_verify() -> None:
    """A forger may know the key: a store sees all of them."""
    sealer = Sealer(IDENTITY, SECRET)
    key = some_keys(sealer)[0]
    for forger in (Sealer(IDENTITY), Sealer(IDENTITY, SECRET + b"!"), Sealer(IDENTITY, SECRET[::-1])):
        assert sealer.verify(sealed(forger, key), key) == "altered"


def test_a_page_of_another_format_does_not_verify(sealer: Sealer, monkeypatch: pytest.MonkeyPatch) -> None:
    key = some_keys(sealer)[0]
    with monkeypatch.context() as later:
        later.setattr("mainstem.tiers.storage.sealer._MAGIC", b"MAINSTM2")
        slot = sealed(sealer, key)
        assert sealer.verify(slot, key) is None
    assert sealer.verify(slot, key) == "altered"


def test_a_page_replayed_in_another_place_is_misdirected(sealer: Sealer) -> None:
    mine, theirs = some_keys(sealer, namespace=b"mine"), some_keys(sealer, namespace=b"theirs")
    assert sealer.verify(sealed(sealer, theirs[0]), mine[0]) == "misdirected"
    assert sealer.verify(sealed(sealer, mine[1]), mine[0]) == "misdirected"
    note = sealer.record("hottest prefixes")
    assert sealer.verify(sealed(sealer, note), mine[0]) == "misdirected"
    assert sealer.verify(sealed(sealer, mine[0]), note) == "misdirected"


# ---------------------------------------------------------------- what a header says

LABEL = Label(b"identity-001", b"namespace-01", "window-4096")


def labelled(sealer: Sealer, key: bytes, label: Label | None = LABEL, sealed_s: float = 1.8e9) -> memoryview:
    slot = memoryview(bytearray(HEADER_BYTES) + PAYLOAD)
    sealer.seal(slot, key, label, sealed_s)
    return slot


def test_a_header_says_its_key_its_time_and_its_label() -> None:
    sealer, key = Sealer(IDENTITY, SECRET), bytes(range(32))
    slot = labelled(sealer, key)
    assert sealer.header(slot) == Header(key, 1.8e9, LABEL)
    assert sealer.verify(slot, key) is None
    assert sealer.header(sealed(sealer, key)) == Header(key, None, None)


@given(st.binary(min_size=12, max_size=12), st.binary(min_size=12, max_size=12), st.binary(min_size=32, max_size=32))
def test_labels_are_read_back_with_the_secret_and_are_noise_without_it(
    identity: bytes, name: bytes, key: bytes
) -> None:
    sealer, other = Sealer(IDENTITY, SECRET), Sealer(IDENTITY, b"another secret of enough bytes")
    slot = labelled(sealer, key, Label(identity, name, "full"))
    header, blind = sealer.header(slot), other.header(slot)
    assert header is not None and header.label == Label(identity, name, "full")
    assert blind is not None and blind.label is None and blind.key == key


def test_equal_labels_of_two_keys_look_different(sealer: Sealer) -> None:
    one, two = (bytes(labelled(sealer, bytes([number]) * 32)[56:96]) for number in (1, 2))
    same = sum(a == b for a, b in zip(one, two, strict=True))
    assert same < 8 and b"identity" not in one + two


@pytest.mark.parametrize("slot", [b"", b"x" * (HEADER_BYTES - 1), b"x" * 200])
def test_bytes_that_are_no_value_have_no_header(slot: bytes) -> None:
    assert Sealer(None, SECRET).header(memoryview(bytearray(slot))) is None


def test_ids_depend_on_the_secret_and_meet_no_name() -> None:
    mine, theirs = Sealer(IDENTITY, SECRET), Sealer(IDENTITY, b"another secret of enough bytes")
    assert mine.id_of(b"a") != mine.id_of(b"b") and mine.id_of(b"a") != theirs.id_of(b"a")
    assert len(mine.id_of(b"")) == 12 and mine.id_of(b"a") not in mine.root(b"a")
