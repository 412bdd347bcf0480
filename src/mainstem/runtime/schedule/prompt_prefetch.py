"""Reads one prompt from storage: one prefetch after another, each from where the cache ends by then.

```
begin -> waits   the request is not admitted yet, since more may soon arrive
      -> leads   it computes from the front, while the prefetch reads from the back
      -> meets   what has arrived goes on where it has computed to: it is admitted again
      -> end     nothing more is read
```
"""

from __future__ import annotations

from mainstem.cache.namespaces import NamespaceLike
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.runtime.schedule.timeline import Timeline
from mainstem.runtime.schedule.tokens import Tokens
from mainstem.tiers.prefetch.missed import Missed
from mainstem.tiers.prefetch.prefetch import Prefetch

_MOST = 4  # prefetches of one request


class PromptPrefetch:
    """The prefetches of one request.

    Args:
        cache: where they read to.
        tokens: of the request.
        namespace: of the request.
        timeline: of the request.

    Attributes:
        missed: what storage has, or may have, and they did not bring.
        leads: the request computes while a prefetch goes on.
        met: the request waits to be admitted again, after pages that have arrived.
    """

    def __init__(self, cache: PrefixCache, tokens: Tokens, namespace: NamespaceLike, timeline: Timeline) -> None:
        self._cache, self._tiers = cache, cache.tiers if cache.enabled else None
        self._tokens, self._namespace, self._timeline = tokens, namespace, timeline
        self._current: Prefetch | None = None
        self._begun = self._loaded = 0  # prefetches; positions that those before have loaded
        self.missed: list[Missed] = []
        self.leads = self.met = False

    @property
    def loaded(self) -> int:
        """Positions that were loaded from storage to the host."""
        return self._loaded + (0 if self._current is None else self._current.loaded)

    def begin(self) -> None:
        """Starts to read what neither device nor host has of the prompt."""
        if self._tiers is None:
            return
        self._current = self._tiers.prefetch(self._tokens.encoded(), self._namespace, bidirectional=True)
        self._begun += 1
        if self._current is not None:
            self._timeline.begin("prefetch")
        elif self._tiers.declined is not None:
            self.missed.append(self._tiers.declined)

    def move(self, namespace: NamespaceLike, counted: int) -> None:
        """Reads from another namespace from now on; `counted`: what counts as loaded so far."""
        self.end()
        self._namespace, self._loaded, self._begun = namespace, counted, 0

    def end(self) -> None:
        """Reads no further; what has arrived stays."""
        prefetch, self._current = self._current, None
        if prefetch is not None:
            if self.leads:
                prefetch.stop_leading()
            self._loaded += prefetch.loaded
            self.missed += prefetch.missed(self._tokens.encoded().symbols)
            prefetch.revoke()
            self.leads = False
            self._timeline.end("prefetch")

    def waits(self, *, again: bool) -> bool:
        """Returns whether the request is not to be admitted yet, since more of its prompt may soon arrive.

        Args:
            again: another prefetch may begin, if there were too many under way, or if this one was shared with a prompt
                that parts from this one.
        """
        prefetch = self._current
        again = again and self._begun < _MOST and self._tiers is not None
        if again and prefetch is not None and prefetch.ended and prefetch.shared and prefetch.loaded:
            self.end()
            self.begin()
        elif again and prefetch is None and self._tiers is not None and self._tiers.can_prefetch:
            self.begin()
        return self._current is not None and self._current.waiting

    def begins_to_lead(self, computed: int, *, loads: bool) -> None:
        """Lets an admitted request compute from `computed` while its prefetch goes on, or ends the prefetch.

        Args:
            computed: positions that it has.
            loads: pages of the host are being loaded for it.
        """
        met, self.met = self.met, False
        if self._current is not None and (loads or not met):  # else what has arrived cannot be used
            self.leads = self.leads or self._current.lead(self._tokens.encoded().symbols, computed)
            if self.leads:
                return
        self.end()

    def ahead(self, computed: int) -> int | None:
        """Returns how many positions may be computed before what is being read; None: any number."""
        return None if self._current is None else self._current.ahead(computed)

    def meets(self, computed: int, *, loading: bool) -> bool:
        """Returns whether a running request goes on after pages that have arrived: it is to be admitted again."""
        prefetch = self._current
        if prefetch is None or self._tiers is None:
            return False
        if prefetch.usable > computed and not loading:
            more = self._cache.peek(self._tokens.encoded(), self._namespace) - computed
            self.met = more > 0 and more >= self._tiers.load_min_tokens()
            if self.met:
                return True
        if prefetch.ended:
            self.end()
        return False

    def reached(self, computed: int, *, prefilling: bool) -> None:
        """Tells a prefetch how far the request has computed; it ends with the prompt."""
        if self._current is not None:
            self._current.reached(computed)
            if not prefilling:
                self.end()
