"""The bodies of explanations: why prompts were found in part only. `explain` decides who sees what of them."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET, Struct, UnsetType

from mainstem.prompt_rules.rules import Rewrite


class EvictedBody(Struct, omit_defaults=True):
    """How something left a tier: for what reason (`why`), after how many uses; seconds are null where unknown.

    `ago_s`: since then. `idle_s`: how long it had not been used then. `kept_by_tokens`: how large the tier would have
    had to be, under LRU, to have it still; for the admin.
    """

    tier: str
    policy: str
    why: str
    uses: int
    ago_s: float | None
    idle_s: float | None
    kept_by_tokens: int | UnsetType = UNSET


class PartedBody(Struct, omit_defaults=True):
    """Where a prompt went on with other tokens than the nearest earlier one; `instead`: what that one has there."""

    at: int
    instead: str | UnsetType = UNSET


class StretchBody(Struct, omit_defaults=True):
    """Positions [begin, end) of a prompt: found on a `tier`, or computed for one `cause`. `text`: where it begins.

    `since_s`, for the admin: that it was never seen, or parted, is known for so many seconds; absent: since the start.
    """

    begin: int
    end: int
    tier: str | UnsetType = UNSET
    cause: str | UnsetType = UNSET
    detail: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    evicted: EvictedBody | UnsetType = UNSET
    parted: PartedBody | UnsetType = UNSET
    since_s: float | UnsetType = UNSET


class PromptExplained(Struct):
    """One prompt. `missed_tokens`: by cause."""

    prompt_tokens: int
    cached_tokens: int
    missed_tokens: dict[str, int]
    stretches: list[StretchBody]


class RewriteBody(Struct):
    """One change of the prompt by a rule of the server: which rule, where, how many characters."""

    rule: str
    action: str
    at: str
    removed: int
    added: int


def rewrites_body(rewrites: Iterable[Rewrite]) -> list[RewriteBody] | UnsetType:
    """Returns the changes of a prompt as bodies have them; nothing where there is none."""
    return [RewriteBody(each.rule, each.action, each.at, each.removed, each.added) for each in rewrites] or UNSET


class Explanation(Struct):
    """The response body of /v1/cache/explain: one entry for each prompt. `id`: of the answer; null if none was made."""

    id: str | None
    prompts: list[PromptExplained]
    prompt_rewrites: list[RewriteBody] | UnsetType = UNSET


class TenantMisses(Struct):
    """Prompt tokens of one tenant."""

    name: str
    prompt_tokens: int
    cached_tokens: int
    missed_tokens: dict[str, int]


class RecentMiss(Struct):
    """One of the latest requests. `cause`: of most of what it missed."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    cause: str | None


class Misses(Struct):
    """The response body of GET /v1/cache/explain; the newest request is the last."""

    tenants: list[TenantMisses]
    recent: list[RecentMiss]
