"""Lists that clients read page by page, by the API references of OpenAI and Anthropic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from mainstem.server.errors import ApiError, wrong

_MOST, _MOST_EITHER_WAY, _DEFAULT = 100, 1000, 20


class Page(Struct):
    """A part of a list."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Deleted(Struct, kw_only=True):
    """What was forgotten; `object` says of which kind."""

    id: str
    deleted: bool = True
    object: str


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
    direction = query.get("order", order)
    if direction not in ("asc", "desc"):
        raise _wrong("order", direction, "'asc' or 'desc'")
    limit = _limit(query, _MOST)
    ordered = list(entries) if direction == "asc" else [*reversed(entries)]
    begin = 0
    if (after := query.get("after")) is not None:
        ids = [id for id, _ in ordered]
        if after not in ids:
            raise _wrong("after", after, "the id of an entry of this list")
        begin = ids.index(after) + 1
    shown = ordered[begin : begin + limit]
    first, last = (shown[0][0], shown[-1][0]) if shown else (None, None)
    return Page([entry for _, entry in shown], first, last, begin + len(shown) < len(ordered))


def between(ids: Sequence[str], query: Mapping[str, str]) -> tuple[Sequence[str], bool]:
    """Returns a page of a list that is read in either direction, as at Anthropic, and whether more follow in its own.

    Args:
        ids: all of it, in order.
        query: `limit` (1 to 1,000), and `after_id` or `before_id`, the id that the page follows or precedes.

    Raises:
        ApiError: 400; one of these is wrong.
    """
    limit = _limit(query, _MOST_EITHER_WAY)
    bounds = {name: query[name] for name in ("after_id", "before_id") if name in query}
    for name, id in bounds.items():
        if id not in ids:
            raise _wrong(name, id, "the id of an entry of this list")
    if len(bounds) == 2:
        raise wrong("before_id", "cannot be given with after_id")
    if "before_id" in bounds:
        end = ids.index(bounds["before_id"])
        return ids[max(end - limit, 0) : end], end > limit
    begin = ids.index(bounds["after_id"]) + 1 if bounds else 0
    return ids[begin : begin + limit], begin + limit < len(ids)


def _limit(query: Mapping[str, str], most: int) -> int:
    limit = query.get("limit", str(_DEFAULT))
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= most):
        raise _wrong("limit", limit, f"a number from 1 to {most}")
    return int(limit)


def _wrong(name: str, value: str, allowed: str) -> ApiError:
    return wrong(name, f"must be {allowed}, got {value!r}")
