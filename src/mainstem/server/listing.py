"""Lists that clients read page by page, by the OpenAI API reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from mainstem.server.errors import ApiError

_MOST, _DEFAULT = 100, 20


class Page(Struct):
    """A part of a list."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def page(
    entries: Sequence[tuple[str, dict[str, Any]]], query: Mapping[str, str], order: Literal["asc", "desc"]
) -> Page:
    """Returns a page of a list.

    Args:
        entries: all of it, the oldest first, each with its id.
        query: `order`, `limit` (1 to 100) and `after`, an id after which the page begins.
        order: the default.

    Raises:
        ApiError: 400; one of these is wrong.
    """
    given = query.get("order", order)
    if given not in ("asc", "desc"):
        raise _wrong("order", given, "'asc' or 'desc'")
    limit = query.get("limit", str(_DEFAULT))
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _MOST):
        raise _wrong("limit", limit, f"a number from 1 to {_MOST}")
    ordered = list(entries) if given == "asc" else [*reversed(entries)]
    begin = 0
    if (after := query.get("after")) is not None:
        ids = [id for id, _ in ordered]
        if after not in ids:
            raise _wrong("after", after, "the id of an entry of this list")
        begin = ids.index(after) + 1
    shown = ordered[begin : begin + int(limit)]
    first, last = (shown[0][0], shown[-1][0]) if shown else (None, None)
    return Page([entry for _, entry in shown], first, last, begin + len(shown) < len(ordered))


def _wrong(name: str, value: str, allowed: str) -> ApiError:
    return ApiError(400, f"{name}: must be {allowed}, got {value!r}", param=name)
