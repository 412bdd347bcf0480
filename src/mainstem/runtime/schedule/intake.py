"""Intake: rejects requests that could never run, and makes the sequences of the others."""

from __future__ import annotations

import random as random_module
from collections.abc import Callable

from mainstem.cache.components import Local, State, by_name
from mainstem.cache.keys import Encoded, Spliced
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.errors import BadArgument, BadTokens, RequestTooLong
from mainstem.runtime.memory.sizing import window_pages
from mainstem.runtime.parallel.ranks import Ranks
from mainstem.runtime.request import Request
from mainstem.runtime.sampling.grammars import CompiledGrammar, Grammars
from mainstem.runtime.sampling.processor import LogitsProcessor, check_rules
from mainstem.runtime.sampling.sampler import Sampler
from mainstem.runtime.schedule.sequence import Sequence
from mainstem.runtime.schedule.timeline import Timeline
from mainstem.runtime.schedule.tokens import spliced_images
from mainstem.runtime.text.detokenizer import Detokenizer, Tokenizer, hiding, special_tokens
from mainstem.settings.engine import Limits


class Intake:
    """Checks the requests of one scheduler.

    Args:
        vocab_size: tokens that have logits.
        cache, tokenizer, limits, max_context, eos, clock, random, ranks: see `Scheduler`.

    Attributes:
        grammars: of requests; only rank 0 compiles any.
    """

    def __init__(
        self,
        cache: PrefixCache,
        vocab_size: int,
        tokenizer: Tokenizer,
        limits: Limits,
        max_context: int,
        eos: frozenset[int],
        clock: Callable[[], float],
        random: random_module.Random,
        ranks: Ranks,
    ) -> None:
        self.grammars = Grammars(tokenizer, vocab_size)
        self._cache, self._vocab_size, self._tokenizer, self._limits = cache, vocab_size, tokenizer, limits
        self._eos, self._clock, self._random, self._ranks = eos, clock, random, ranks
        self._special = special_tokens(tokenizer)
        self._max_context = max_context
        self._held = cache.pool.total * cache.page_size if "full" in cache.pools else max_context  # positions
        components = cache.tree.components
        self._local = {name: row for name, row in by_name(components).items() if isinstance(row, Local)}
        self._has_states = any(isinstance(component, State) for component in components)

    def check(self, request: Request) -> Encoded:
        """Rejects a request that could never run, otherwise encodes its prompt. Callable from any thread.

        Raises:
            RequestTooLong: it exceeds the context or the pool.
            BadTokens: a token is outside the vocabulary.
            BadArgument: a rule of its parameters names a token outside the vocabulary, or they leave none; its grammar
                does not compile; they ask how likely images are; or no pool holds the window of one of its images.
            UnsupportedModel: it has a grammar, which this model cannot follow.
        """
        if request.images and request.params.reads_from is not None:
            name = "embedding" if request.params.embedding else "prompt_logprobs"
            raise BadArgument(name, getattr(request.params, name), "left out for a prompt with images")
        check_rules(request.params, self._eos, self._vocab_size)
        if (request.said >= self._vocab_size).any():
            raise BadTokens(f"said: token {request.said.max()}: must be below {self._vocab_size}")
        self._compiled(request)
        prompt, new = len(request.tokens), request.params.max_tokens
        longest = max((image.length for image in request.images), default=0)
        # The last token is never computed, so it needs no page.
        if prompt + new > self._max_context or prompt + max(new, 1) - 1 > self._held:
            raise RequestTooLong("prompt", prompt, min(self._max_context, self._held), answer=new)
        for name, row in self._local.items():
            self._check_local(name, row, min(prompt, max(longest, self._limits.token_budget)))
        images = spliced_images(request)
        return Encoded.of(self._cache.tree.keys, Spliced(request.tokens, images) if images else request.tokens)

    def _check_local(self, name: str, row: Local, chunk: int) -> None:
        size, total = self._cache.page_size, self._cache.pools[name].total
        pages = window_pages(row.tokens, chunk, size, states=self._has_states)
        if pages > total:
            allowed = f"fewer positions at once: with the {row.tokens} that a query sees they need {pages} {name} pages"
            raise BadArgument("prefill", chunk, f"{allowed} of {size} positions, and the memory for KV holds {total}")

    def _compiled(self, request: Request) -> CompiledGrammar | None:
        grammar = request.params.grammar
        return None if grammar is None or self._ranks.rank > 0 else self.grammars.compile(grammar)

    def sequence(
        self,
        id: str,
        request: Request,
        prompt: Encoded,
        arrival: int,
        arrived_s: float | None,
        version: int,
        base: int,
    ) -> Sequence:
        """Makes the sequence of a request that was checked; `arrival`: its place in the order of arrival.

        `version`, `base`: of the weights, those that compute, and those whose KV it goes on from.
        """
        arrived_s = self._clock() if arrived_s is None else arrived_s
        params = request.params
        rules = (params, request.tokens, self._eos, self._compiled(request)) if params.shapes_logits else None
        sampler = Sampler(params, self._random, None if rules is None else LogitsProcessor(*rules))
        skipped, hidden = hiding(params, self._special)
        content = request.content() if request.content is not None and params.stop else None
        shown = (skipped, params.include_stop_str_in_output, hidden, content)
        text = Detokenizer(self._tokenizer, params.stop, request.tokens, *shown)
        times = Timeline(self._clock, arrived_s)
        return Sequence(id, request, self._cache, prompt, arrival, arrived_s, sampler, text, times, version, base)
