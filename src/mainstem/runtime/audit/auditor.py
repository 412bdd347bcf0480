"""`Auditor`: draws the prefixes that are audited, and audits them one after another while there is nothing else to do.

admitted --drawn--> waits --> audit, a chunk at a poll --> equal | different | evicted | failed
                      +-- too many wait --> dropped
"""

from __future__ import annotations

import logging
import random as random_module
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, get_args

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.components import Component, Full, State
from mainstem.metric import Metric
from mainstem.runtime.audit.prefix_audit import Means, Outcome, Prefix, PrefixAudit, Tier
from mainstem.runtime.memory.sizing import window_pages
from mainstem.runtime.request import Request

log = logging.getLogger(__name__)

_CHUNK = 256  # tokens that a request may have to wait for
_MOST_WAITING = 64
_READ_POLL_S = 0.01  # between two looks at what is read from storage


@dataclass(frozen=True, slots=True)
class AuditStats:
    """Counts of an auditor.

    Args:
        tokens: of the pages that were compared, by tier.
        mismatches: copies that differed, by tier: the first of each audit.
        prefixes: that were drawn, by what came of them. equal: all that was there had the same bits. different.
            evicted: it was not on the device any more. failed: it could not be computed. dropped: too many waited, or
            the weights have changed.
    """

    tokens: dict[str, int]
    mismatches: dict[str, int]
    prefixes: dict[str, int]

    METRICS: ClassVar = (
        Metric("mainstem_audited_tokens", "Tokens whose pages were computed again and compared; --audit-share",
            {("*",): "tokens.*"}, ("tier",)),
        Metric("mainstem_audit_mismatches", "Copies of pages that differed from what computing them gives",
            {("*",): "mismatches.*"}, ("tier",)),
        Metric("mainstem_audits", "Prefixes drawn for an audit, by what came of it", {("*",): "prefixes.*"},
            ("outcome",)),
    )  # fmt: skip


def chunk_pages(token_budget: int, page_size: int) -> int:
    """Returns how many pages an audit computes at once."""
    return max(1, min(token_budget, _CHUNK) // page_size)


def own_pages(component: Component, chunk: int, page_size: int) -> int:
    """Returns how many pages or slots of a component audits need of their own, for chunks of this many pages."""
    if isinstance(component, State):
        return 1
    return chunk if isinstance(component, Full) else window_pages(component.tokens, chunk * page_size, page_size)


class Auditor:
    """Audits one cache, on the thread that steps its scheduler.

    Args:
        means: what audits work with.
        share: the part of hit tokens that is audited, above 0 and up to 1.
        random: draws them.
    """

    def __init__(self, means: Means, share: float, random: random_module.Random) -> None:
        self._means, self._share, self._random = means, share, random
        self._waiting: deque[Prefix] = deque()
        self._audit: PrefixAudit | None = None
        self._tokens: dict[str, int] = dict.fromkeys(get_args(Tier), 0)
        self._mismatches: dict[str, int] = dict.fromkeys(get_args(Tier), 0)
        self._prefixes: dict[str, int] = dict.fromkeys(get_args(Outcome), 0)

    def note(self, request: Request, found: NDArray[np.int32]) -> None:
        """Draws whether the tokens of a request that were found are audited.

        Requests with images, positions or an adapter are left out: the bits of an image's embedding depend on the
        number of threads, and an adapter may be of layers that are not exact.
        """
        pages = len(found) // self._means.cache.page_size
        if not pages or request.images or request.positions is not None or request.adapter is not None:
            return
        if self._random.random() >= self._share:
            return
        if len(self._waiting) == _MOST_WAITING:
            self._waiting.popleft()
            self._prefixes["dropped"] += 1
        self._waiting.append(Prefix(found[: pages * self._means.cache.page_size].copy(), request.namespace))

    def forget(self) -> None:
        """Drops what was drawn and is not audited yet: the model has other weights now."""
        self._prefixes["dropped"] += len(self._waiting) + (self._audit is not None)
        self._waiting.clear()
        self._audit = None

    @property
    def idle_s(self) -> float | None:
        """Seconds until a poll may find something to do; None: never."""
        if self._audit is None and not self._waiting:
            return None
        return _READ_POLL_S if self._audit is not None and self._audit.reading else 0.0

    def poll(self) -> None:
        """Goes on by one chunk at most. Call it while there is nothing else to do."""
        if self._audit is None:
            if not self._waiting:
                return
            self._audit = PrefixAudit(self._means, self._waiting.popleft())
        audit, outcome = self._audit, self._go_on(self._audit)
        if outcome is None:
            return
        self._audit = None
        self._prefixes[outcome] += 1
        _add(self._tokens, audit.tokens)
        _add(self._mismatches, audit.mismatches)

    def _go_on(self, audit: PrefixAudit) -> Outcome | None:
        try:
            return audit.go_on()
        except Exception:  # whatever a forward raises: nothing depends on an audit
            log.exception("an audit failed")
            return "failed"

    def stats(self) -> AuditStats:
        """Returns the counts, of audits that have ended. Callable from any thread."""
        return AuditStats(dict(self._tokens), dict(self._mismatches), dict(self._prefixes))


def _add(counts: dict[str, int], more: Mapping[Tier, int]) -> None:
    for name, count in more.items():
        counts[name] += count
