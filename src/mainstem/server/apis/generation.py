"""`Generation`: the request of a client in one form for all APIs, between the readers of bodies and the engine.

    body -- read, one function of each API --> Generation --> Preparation --> the engine's requests
                 '- Linked: it goes on from answers that the server keeps; joined with them, it is a Generation

A reader checks all but what only the engine knows. `paths` maps the engine's names to the client's where they differ,
so that errors name the client's field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec import Struct

from mainstem.cache.expected import check_next_use
from mainstem.cache.retention import LEAST_S
from mainstem.errors import BadArgument
from mainstem.prompt_rules.rules import Rewrite
from mainstem.runtime.request import LONGEST_GROUP, Hints
from mainstem.runtime.text.prompts import Template
from mainstem.server.apis.conversation import parts
from mainstem.server.fields.breakpoints import CacheOptions, Mark, counted
from mainstem.server.fields.sampling import Common, sampling_of
from mainstem.server.fields.structured import AnswerForm
from mainstem.server.fields.tools import NO_TOOLS, Tooling
from mainstem.server.kept.response_store import Kept
from mainstem.server.watch.diagnosis import Comparison
from mainstem.settings.engine import SEEDS, SamplingParams

Keep: TypeAlias = Callable[[Any], Kept]
"""Makes the record that is kept of the body of a whole answer."""


class CacheHints(Struct):
    """`cache_hints`: how the client expects to use the KV of a request again; see `runtime.request.Hints`."""

    retain_s: float | None = None
    one_shot: bool | None = None
    no_store: bool | None = None
    next_use_s: float | None = None
    next_use_steps: float | None = None
    group: str | None = None

    def checked(self, longest_s: float, session: str | None) -> Hints:
        """Returns the hints of a session's request; it may be retained for at most `longest_s`.

        Raises:
            BadArgument: the time is out of range, or nothing would be there to retain.
        """
        name = "cache_hints.retain_s"
        if self.retain_s is not None and not LEAST_S <= self.retain_s <= longest_s:
            raise BadArgument(name, self.retain_s, f"seconds from {LEAST_S} to {longest_s:g} (max_retain_s)")
        if self.retain_s is not None and self.no_store:
            raise BadArgument(name, self.retain_s, "left out with cache_hints.no_store")
        check_next_use(self.next_use_s, self.next_use_steps, longest_s, "cache_hints.")
        for name in ("next_use_s", "next_use_steps"):
            value = getattr(self, name)
            if value is not None and self.no_store:
                raise BadArgument(f"cache_hints.{name}", value, "left out with cache_hints.no_store")
        if self.group is not None and not 0 < len(self.group) <= LONGEST_GROUP:
            raise BadArgument("cache_hints.group", self.group, f"a name of 1 to {LONGEST_GROUP} characters")
        return Hints(
            self.retain_s,
            bool(self.one_shot),
            bool(self.no_store),
            next_use_s=self.next_use_s,
            next_use_steps=self.next_use_steps,
            session=session or None,
            group=self.group,
        )


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts that are completed.

    Args:
        prompts: texts or token ids.
        special_tokens: whether the tokenizer adds its own to a text.
        parse_special: whether the texts of control tokens become these.
        echo: whether the answer begins with the prompt.
    """

    prompts: Sequence[str | list[int]]
    special_tokens: bool = True
    parse_special: bool = True
    echo: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt that a chat template renders.

    Args:
        messages: as templates take them; see `chat.request.Message.template_input`.
        tooling: the tools.
        path: of the messages, for errors.
        begins, continues, variables, special_tokens: see `Template`; None: by default.
        thinks, effort: see `Switches.variables`.
    """

    messages: Sequence[dict[str, Any]]
    tooling: Tooling = NO_TOOLS
    path: str = "messages"
    begins: bool | None = None
    continues: bool | None = None
    variables: Mapping[str, Any] | None = None
    special_tokens: bool | None = None
    thinks: bool | None = None
    effort: str | None = None

    @property
    def has_images(self) -> bool:
        """Whether a message has an image, which may have to be fetched."""
        return bool(parts(self.messages, "image"))

    def template(self, variables: Mapping[str, Any] = {}) -> Template:
        """Returns how the chat template is applied, with variables that the client may override.

        Raises:
            BadArgument: the client's fields contradict each other, or a variable has a reserved name.
        """
        continues = bool(self.continues)
        begins = not continues if self.begins is None else self.begins
        variables = {**variables, **(self.variables or {})}
        return Template(begins, continues, variables, special_tokens=bool(self.special_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The request of a client, in the form that all APIs share.

    Args:
        request: the body, as its API has it.
        prompt: what the model reads.
        paths: the client's names, by those of the engine, where they differ.
        sampling: fields of `SamplingParams`, but for those that depend on the prompt or the choice.
        max_tokens: of an answer; None: all that the context has room for.
        form: of the answer; None: any.
        kept: answers to each prompt that the client gets.
        choices: how many answers to each prompt are generated.
        logprobs: alternatives to each token of the answer whose log-probabilities are computed; None: none are.
        shows_logprobs: whether the client gets them; else they choose answers.
        prompt_logprobs: the same as `logprobs` of the prompt's tokens, which the client gets.
        shows_ids, ids_for_names: whether token ids are shown; whether they name tokens in log-probabilities.
        truncate: the last tokens of the prompt that are taken; None: all.
        bad_words: texts that no answer has.
        include_usage: whether a stream ends with the usage.
        counts_chunks: whether the events before say what was used so far.
        session: the client's name for requests that share a prefix.
        hints: how its KV will be used again, as far as the client says.
        marks: the breakpoints that count, in the order of the prompt.
        comparison: the request as a diagnosis compares it; None: no diagnosis.
        keep: makes the record of the whole answer that is kept; None: none is kept.
        rewrites: what the rules of the server changed in the prompt.
    """

    request: Common
    prompt: Texts | Conversation
    paths: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    form: AnswerForm | None = None
    kept: int = 1
    choices: int = 1
    logprobs: int | None = None
    shows_logprobs: bool = True
    prompt_logprobs: int | None = None
    shows_ids: bool = False
    ids_for_names: bool = False
    truncate: int | None = None
    bad_words: Sequence[str] = ()
    include_usage: bool = False
    counts_chunks: bool = False
    session: str | None = None
    hints: CacheHints = field(default_factory=CacheHints)
    marks: tuple[Mark, ...] = ()
    comparison: Comparison | None = None
    keep: Keep | None = None
    rewrites: tuple[Rewrite, ...] = ()

    @classmethod
    def of(
        cls, request: Common, prompt: Texts | Conversation, marks: Sequence[Mark], options: CacheOptions | None,
        **parts: Any,
    ) -> Generation:  # fmt: skip
        """Makes one of a body, with the sampling parameters of its fields.

        Args:
            request: the body.
            prompt: what the model reads.
            marks: all breakpoints.
            options: `prompt_cache_options`.
            parts: the other arguments.
        """
        sampling = {**sampling_of(request), **parts.pop("sampling", {})}
        counting = tuple(counted(marks, options or CacheOptions()))
        return cls(request=request, prompt=prompt, sampling=sampling, marks=counting, **parts)

    @property
    def has_images(self) -> bool:
        """Whether the prompt has an image, which may have to be fetched."""
        return isinstance(self.prompt, Conversation) and self.prompt.has_images

    @property
    def scored(self) -> int | None:
        """Alternatives to each prompt token whose log-probabilities are computed; None: none. An echo shows them."""
        echoed = self.logprobs if isinstance(self.prompt, Texts) and self.prompt.echo and self.shows_logprobs else None
        return max((k for k in (self.prompt_logprobs, echoed) if k is not None), default=None)

    @property
    def unscored(self) -> int:
        """How many tokens of the prompt have no log-probability, where those of the prompt are asked for."""
        start: int = self.sampling.get("logprob_start", 0)
        return max(start, 1)

    def params(self, room: int, choice: int = 0) -> SamplingParams:
        """Returns the sampling parameters of one choice, which may use all `room` in the context by default.

        Raises:
            BadArgument: a value is outside its range.
        """
        seed = self.request.seed
        return SamplingParams(
            max_tokens=max(room, 1) if self.max_tokens is None else self.max_tokens,
            seed=None if seed is None else _seed(seed, choice),
            logprobs=self.logprobs,
            prompt_logprobs=self.scored,
            grammar=None if self.form is None else self.form.grammar,
            **self.sampling,
        )


def _seed(seed: int, choice: int) -> int:
    """Returns the seed of a choice; the seeds of a request's choices differ, and wrap around after the last one."""
    return seed + choice - SEEDS if 0 <= seed < SEEDS <= seed + choice else seed + choice


@dataclass(frozen=True, slots=True)
class Linked:
    """A request that goes on from answers which the server keeps.

    Args:
        previous: the id of the answer that it follows; None: it follows none.
        references: ids of items of kept answers, by their places in the request.
        join: makes it whole, of the conversation of `previous` and the items that are referred to.
    """

    previous: str | None
    references: Mapping[int, str]
    join: Callable[[Sequence[dict[str, Any]], Mapping[int, dict[str, Any]]], Generation]
