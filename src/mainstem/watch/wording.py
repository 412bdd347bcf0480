"""An explanation in words: a row for each stretch of a prompt. Knows the JSON of `/v1/cache/explain` alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mainstem.units import show_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from mainstem.cache.explain import Stretch

_WORDS = {
    "never_seen": "never seen",
    "parted": "parts from an earlier prompt",
    "evicted": "evicted",
    "over_quota": "evicted, as the tenant had more than its quota",
    "removed": "removed",
    "forgotten": "evicted or never seen: it is not remembered which",
    "in_flight": "on its way, or being computed by another request",
    "partial_page": "less than a page, or the last token, which is always computed",
    "window_missing": "cached, but no window is kept there",
    "state_missing": "cached, but no state is kept there",
    "too_short": "too short to be worth it",
    "no_room": "cached, but there was no room to bring it up",
    "late": "in storage, or perhaps, but computing was as quick",
    "failed": "in storage, or perhaps, but that failed",
    "not_stored": "an earlier request asked not to store it",
    "scored": "log-probabilities of the prompt, or its embedding, need every position",
    "disabled": "the cache is off",
}
_DETAILS = {
    "timeout": "the wait was over", "slow": "storage is slow", "limit": "too many reads were under way",
    "meanwhile": "computed while others were read", "breaker": "the breaker is open", "fault": "storage failed",
    "host_room": "the host is full", "device": "the device is full", "host": "for a load from the host",
    "too_few": "for a read from storage", "unasked": "storage was not asked", "load": "the copy to the device failed",
}  # fmt: skip


def shown(stretch: Stretch, page_tokens: int) -> dict[str, Any]:
    """Returns a stretch of a cache in the form of the JSON; of a trace there is no text."""
    made: dict[str, Any] = {"begin": stretch.begin, "end": stretch.end}
    if stretch.tier is not None:
        return {**made, "tier": stretch.tier}
    made["cause"] = stretch.cause
    if stretch.parted is not None:
        made["parted"] = {"at": stretch.parted.at}
    if stretch.eviction is not None:
        gone = asdict(stretch.eviction)
        pages = gone.pop("distance_pages")
        del gone["idle_ticks"]
        made["evicted"] = gone if pages is None else {**gone, "kept_by_tokens": pages * page_tokens}
    return made


def why(stretch: Mapping[str, Any]) -> str:
    """Returns where a stretch was found, or why it was computed."""
    if "tier" in stretch:
        return f"found {'in' if stretch['tier'] == 'storage' else 'on the'} {stretch['tier']}"
    words = _WORDS.get(stretch["cause"], str(stretch["cause"]).replace("_", " "))
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
