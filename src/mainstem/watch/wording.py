"""An explanation in words: a row for each stretch of a prompt. Knows the JSON of `/v1/cache/explain` alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mainstem.cache.explain import CAUSES
from mainstem.units import show_seconds

if TYPE_CHECKING:
    from rich.table import Table

_DETAILS = {
    "timeout": "the wait was over", "slow": "storage is slow", "limit": "too many reads were under way",
    "meanwhile": "computed while others were read", "breaker": "the breaker is open", "fault": "storage failed",
    "host_room": "the host is full", "device": "the device is full", "host": "for a load from the host",
    "too_few": "for a read from storage", "unasked": "storage was not asked", "load": "the copy to the device failed",
}  # fmt: skip


def why(stretch: Mapping[str, Any]) -> str:
    """Says where a stretch was found, or why it was computed."""
    if "tier" in stretch:
        return f"found {'in' if stretch['tier'] == 'storage' else 'on the'} {stretch['tier']}"
    words = CAUSES.get(stretch["cause"], str(stretch["cause"]).replace("_", " "))
    if "parted" in stretch:
        words += f" at token {stretch['parted']['at']:,}"
    if "detail" in stretch:
        words += f" ({_DETAILS.get(stretch['detail'], stretch['detail'])})"
    since = stretch.get("since_s")
    known = [] if since is None else [f"nothing is known of what was more than {show_seconds(since)} ago"]
    return "; ".join([words, *known, *_eviction(stretch.get("evicted"))])


def _eviction(gone: Mapping[str, Any] | None) -> Iterator[str]:
    if gone is None:
        return
    ago = "" if gone["ago_s"] is None else f" {show_seconds(gone['ago_s'])} ago"
    reason = "" if gone["why"] == "policy" else f", {gone['why']}"
    yield f"left the {gone['tier']}{ago} by {gone['policy']}{reason}"
    if gone["idle_s"] is not None:
        yield f"unused for {show_seconds(gone['idle_s'])} then"
    if "kept_by_tokens" in gone:
        yield f"room for {gone['kept_by_tokens']:,} tokens would have kept it"


def table(stretches: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table of the stretches of one prompt."""
    from rich.markup import escape
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    for title, side in (("tokens", "right"), ("of them", "right"), ("", "left"), ("text", "left")):
        made.add_column(title, justify=side)  # type: ignore[arg-type]
    for each in stretches:
        span = f"{each['begin']:,} to {each['end']:,}"
        made.add_row(span, f"{each['end'] - each['begin']:,}", escape(why(each)), escape(_text(each)))
    return made


def _text(stretch: Mapping[str, Any]) -> str:
    text, instead = stretch.get("text"), stretch.get("parted", {}).get("instead")
    if instead is None:
        return "" if text is None else repr(text)
    return f"an earlier prompt had {instead!r}" if text is None else f"{text!r}\n  where it had {instead!r}"
