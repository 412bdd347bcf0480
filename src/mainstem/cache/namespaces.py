"""Namespaces: prefixes are shared only within one. Each has its own root in the tree.

Knows nothing of keys. The encoding is injective: every field has a tag and every string its length, so an adapter
called "a" and a salt called "a" never share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mainstem import _core
from mainstem.errors import BadArgument


@dataclass(frozen=True, slots=True)
class Namespace:
    """The namespace of a sequence: what its KV depends on apart from its tokens.

    Args:
        adapter: name of the adapter (LoRA); None is the base model, which differs from the adapter "".
        salt: tenants with different salts never share.
        extra: anything else that KV depends on, as strings; the order matters.
        tenant: whose it is. Tenants never share; one may have many salts.
        name: what a namespace that is only a text is called; nothing else of it has a value then.
        weights: what names the version of the model's weights; None: those that it began with.

    Raises:
        BadArgument: a field has another type.
    """

    adapter: str | None = None
    salt: str | None = None
    extra: tuple[str, ...] = ()
    tenant: str | None = None
    name: str | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        for name in ("adapter", "salt", "tenant", "name", "weights"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise BadArgument(name, value, "a str or None")
        if not isinstance(self.extra, tuple) or not all(isinstance(item, str) for item in self.extra):
            raise BadArgument("extra", self.extra, "a tuple of str")
        if self.name is not None and (self.adapter, self.salt, self.extra, self.tenant) != (None, None, (), None):
            raise BadArgument("name", self.name, "None beside an adapter, a salt, a tenant or anything else")

    def encode(self) -> bytes:
        """Returns the bytes that name the root of this namespace."""
        parts = [] if self.adapter is None else [_field(b"a", self.adapter)]
        if self.tenant is not None:
            parts.append(_field(b"t", self.tenant))
        if self.salt is not None:
            parts.append(_field(b"s", self.salt))
        parts.extend(_field(b"e", item) for item in self.extra)
        if self.name is not None:
            parts.append(_field(b"n", self.name))
        if self.weights is not None:
            parts.append(_field(b"w", self.weights))
        return b"".join(parts)


NamespaceLike = Namespace | str | bytes | None

DEFAULT = "default namespace"
"""The name that users read for the namespace without any field."""


def encode_namespace(namespace: NamespaceLike) -> bytes:
    """Encodes any form of a namespace; None is `Namespace()`.

    Raises:
        BadArgument: the namespace has another type.
    """
    if namespace is None:
        return b""
    if isinstance(namespace, Namespace):
        return namespace.encode()
    if isinstance(namespace, str):
        return _field(b"n", namespace)
    if isinstance(namespace, bytes):
        return b"b" + len(namespace).to_bytes(8, "little") + namespace
    raise BadArgument("namespace", namespace, "a Namespace, str, bytes or None")


def split_adapter(encoded: bytes) -> tuple[str | None, bytes]:
    """Returns the adapter of an encoded namespace, if it has one, and the encoding of the rest."""
    if encoded[:1] != b"a":
        return None, encoded
    end = 9 + int.from_bytes(encoded[1:9], "little")
    return encoded[9:end].decode("utf-8", "surrogatepass"), encoded[end:]


def of_weights(namespace: Namespace | str | None, weights: str | None) -> Namespace | str | None:
    """Returns the namespace of the same sequences under a version of the model's weights; None: the first."""
    if not isinstance(namespace, Namespace):
        if weights is None:
            return namespace
        namespace = Namespace(name=namespace)
    return namespace if namespace.weights == weights else replace(namespace, weights=weights)


def split_weights(encoded: bytes) -> tuple[str | None, bytes]:
    """Returns the version of the weights of an encoded namespace, if it has one, and the encoding of the rest."""
    at = 0
    while at < len(encoded):
        end = at + 9 + int.from_bytes(encoded[at + 1 : at + 9], "little")
        if encoded[at : at + 1] == b"w":  # the last field
            return encoded[at + 9 : end].decode("utf-8", "surrogatepass"), encoded[:at]
        at = end
    return None, encoded


def owner_of(encoded: bytes) -> bytes:
    """Returns the owner of the pages of an encoded namespace: its tenant, else its salt or name; empty if it has none.

    Adapters, and anything else that KV depends on, make other namespaces but no other owners.
    """
    return _core.owner_of(encoded)


def describe_namespace(encoded: bytes) -> str:
    """Returns an encoded namespace as readable text: its fields in order."""
    names = {b"a": "adapter=", b"t": "tenant=", b"s": "salt=", b"e": "extra=", b"n": "", b"b": "", b"w": "weights="}
    fields = []
    while encoded:
        end = 9 + int.from_bytes(encoded[1:9], "little")
        value = encoded[9:end]
        shown = repr(value) if encoded[:1] == b"b" else repr(value.decode("utf-8", "replace"))
        fields.append(names[encoded[:1]] + shown)
        encoded = encoded[end:]
    return ", ".join(fields)


def _field(tag: bytes, text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return tag + len(data).to_bytes(8, "little") + data
