"""Identity: everything that a page's content depends on, apart from its namespace and its tokens.

In memory, one process serves one model, and the identity is not compared. Storage is shared and outlives processes, so
the identity is part of every key: after a change of any field, nothing that was stored before is found.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mainstem.errors import BadArgument, check_integer


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a stored page: two pages with different ones are different pages.

    Args:
        model: its name; models of different names never share.
        weights: a digest of the weights, so that new weights under an old name are another model.
        dtype: of the content, such as "bfloat16".
        quantization: of weights and content, such as "none" or "int8".
        layout: the order of the numbers in a page.
        shape: layers, heads and their size, in words.
        attention: "mha", "gqa", "mla", and so on. With "mla" every rank holds the same content, so ranks share it.
        rope: the settings of the position encoding, in words.
        tokenizer: what token ids mean: a digest, or a name with its revision.
        symbols: the key kind, with the width of a symbol.
        page_size: positions per page.
        tp_rank, tp_size: the index of this shard, and the number of shards; part of a page's key, not of its name.
        extra: anything else that KV depends on; the order matters.

    Raises:
        BadArgument: a field has the wrong type, or the rank is outside [0, tp_size).
    """

    model: str
    weights: str
    dtype: str
    quantization: str
    layout: str
    shape: str
    attention: str
    rope: str
    tokenizer: str
    symbols: str
    page_size: int
    tp_rank: int = 0
    tp_size: int = 1
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_integer("page_size", self.page_size, 1, 2**31 - 1)
        check_integer("tp_size", self.tp_size, 1, 2**31 - 1)
        check_integer("tp_rank", self.tp_rank, 0, self.tp_size - 1)
        if not isinstance(self.extra, tuple) or not all(isinstance(item, str) for item in self.extra):
            raise BadArgument("extra", self.extra, "a tuple of str")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("page_size", "tp_rank", "tp_size", "extra") and not isinstance(value, str):
                raise BadArgument(field.name, value, "a str")

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the same content, so that it is stored once for all."""
        return self.attention == "mla"

    @property
    def shard(self) -> str:
        """Which part of a page's content this rank holds; empty if it holds all of it."""
        return "" if self.replicated else f"{self.tp_rank} of {self.tp_size}"

    def encode(self) -> bytes:
        """Returns an injective encoding of all but the shard: every field with its name, each string with its length.

        So pages have the same names on every rank.
        """
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("tp_rank", "tp_size"):
                continue
            items = value if isinstance(value, tuple) else (str(value),)
            parts.append(_string(field.name) + len(items).to_bytes(8, "little"))
            parts.extend(_string(item) for item in items)
        return b"".join(parts)


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "little") + data
