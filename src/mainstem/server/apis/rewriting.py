"""`Rewriting`: applies the rules of `--prompt-rules` to requests, before anything else reads their prompts.

What the rules changed is in `Generation.rewrites`, for the usage, explanations and a header. A rewritten request is one
like any other: it is answered as if the client had sent it so. The front of a fleet applies the same rules, so that it
routes by the prompts that its replicas compute.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar
from urllib.parse import quote

from starlette.datastructures import Headers

from mainstem.metric import Metric
from mainstem.prompt_rules.notes import Notes
from mainstem.prompt_rules.rewriting import Declared, KeptTools, Rewritten, rewritten
from mainstem.prompt_rules.rule_file import read_rules
from mainstem.prompt_rules.rules import Caller, Keep, Rewrite, Rule, counts
from mainstem.server.access.api_keys import Access
from mainstem.server.apis.generation import Conversation, Generation, Texts
from mainstem.server.errors import ApiError
from mainstem.server.fields.breakpoints import Mark
from mainstem.server.fields.tools import Tool, Tooling
from mainstem.settings.server import ServerConfig
from mainstem.settings.tenants import read_tenants

HEADER = "X-Mainstem-Prompt-Rules"
"""The header of a response that names the rules which changed its prompt."""


@dataclass(frozen=True, slots=True)
class RewritingStats:
    """How often each rule changed a prompt, by its name."""

    rewrites: Mapping[str, int]

    METRICS: ClassVar = (
        Metric("mainstem_prompt_rewrites", "Changes of prompts by rules", {("*",): "rewrites.*"}, ("rule",)),
    )


class Rewriting:
    """The rules of one server. Any thread may call it.

    Args:
        config: names the files of the rules and of the tenants.
        access: knows the keys of clients.
        remembers: whether notes and tools of earlier turns are remembered; a front does not see every turn.

    Raises:
        BadRule: a file is not there, or a rule in it is refused.
    """

    def __init__(self, config: ServerConfig, access: Access, *, remembers: bool = True) -> None:
        self._rules = read_rules(config.prompt_rules)
        self._access = access
        self._kept = KeptTools() if remembers else None
        self._notes = Notes() if remembers else None
        tenants = {} if config.tenants is None else read_tenants(config.tenants).tenants
        self._tenants = {
            secret: name
            for name, each in tenants.items()
            for secret in (each.key(name), each.cache_salt)
            if secret is not None
        }
        self._counts = Counter({rule.name: 0 for rule in self._rules})
        self._lock = threading.Lock()

    def applied(
        self, generation: Generation, route: str, client: str, owner: bytes | None, *, remember: bool = True
    ) -> Generation:
        """Returns a request after the rules that cover it; the same one if they change nothing.

        Args:
            generation: the request.
            route: the path of its API.
            client: its user agent.
            owner: the key that it came with; see `Access.tenant`.
            remember: whether it is answered, so that later turns go on from it.

        Raises:
            ApiError: 400; it is nested too deeply.
        """
        request = generation.request
        if request.prompt_rules is False or not (rules := self._covering(route, client, owner, request.cache_salt)):
            return generation
        if isinstance(generation.prompt, Texts):
            return _with_texts(generation, generation.prompt, rules)
        kept = next((rule for rule in rules if isinstance(rule.action, Keep)), None)
        with _nested():
            return self._with_conversation(generation, generation.prompt, rules, kept, owner, remember)

    def chat(
        self, asked: Conversation, headers: Headers, owner: bytes | None, salt: str | None = None, *, whole: bool = True
    ) -> Conversation:
        """Returns messages that no request has as a client's request for a chat would have them; remembers nothing.

        Args:
            asked: the messages.
            headers: those of the client.
            owner, salt: of the request.
            whole: whether they are all of a request; else they are what several begin with.

        Raises:
            ApiError: 400; they are nested too deeply.
        """
        rules = self._covering("/v1/chat/completions", headers.get("user-agent", ""), owner, salt)
        with _nested():
            made = rewritten(rules, asked.messages, _declared(asked), whole=whole)
            if whole:
                made.place(Notes(), ())
        if not made.changes:
            return asked
        return replace(asked, messages=made.messages, tooling=_tooling(asked.tooling, made.tools))

    def text(self, prompt: str, headers: Headers, owner: bytes | None, salt: str | None = None) -> str:
        """Returns a text that no request has as a client's request to complete it would have it; see `chat`."""
        rules = self._covering("/v1/completions", headers.get("user-agent", ""), owner, salt)
        return rewritten(rules, texts=[prompt]).texts[0]

    def _covering(self, route: str, client: str, owner: bytes | None, salt: str | None) -> list[Rule]:
        """Returns the rules that cover a request."""
        if not self._rules:
            return []
        names = (self._tenants.get(secret) for secret in (self._access.api_key(owner), salt) if secret is not None)
        caller = Caller(route, client, next((name for name in names if name is not None), None))
        return [rule for rule in self._rules if rule.scope.covers(caller)]

    def count(self, rewrites: Iterable[Rewrite]) -> None:
        """Counts the changes of a request that is answered."""
        with self._lock:
            self._counts.update(counts(rewrites))

    def stats(self) -> RewritingStats:
        """Returns the changes since the start."""
        with self._lock:
            return RewritingStats(dict(self._counts))

    def _with_conversation(
        self,
        generation: Generation,
        asked: Conversation,
        rules: Sequence[Rule],
        keep: Rule | None,
        owner: bytes | None,
        remember: bool,
    ) -> Generation:
        made = rewritten(rules, asked.messages, _declared(asked))
        scope = (owner, generation.request.model, generation.request.cache_salt)
        if keep is not None and self._kept is not None and generation.request.prompt_rules and generation.session:
            self._keep(made, keep, scope, generation.session, remember)
        made.place(self._notes or Notes(), (*scope, generation.session), remember=remember)
        if not made.changes:
            return generation
        tooling = _tooling(asked.tooling, made.tools)
        marks = tuple(_placed(mark, made) for mark in generation.marks)
        prompt = replace(asked, messages=made.messages, tooling=tooling)
        return replace(generation, prompt=prompt, marks=marks, rewrites=tuple(made.changes))

    def _keep(self, made: Rewritten, rule: Rule, scope: object, session: str, remember: bool) -> None:
        """Declares the tools that the session had."""
        assert self._kept is not None
        before = list(made.tools)
        made.tools = self._kept.with_kept(scope, session, before, remember=remember)
        if [tool.name for tool in made.tools] != [tool.name for tool in before]:
            added = sum(tool.size for tool in made.tools if tool.index is None)
            made.changes.append(Rewrite(rule.name, rule.action.name, "tools", 0, added))


def header(rewrites: Sequence[Rewrite]) -> dict[str, str]:
    """Returns the header that names rules, each with its number of changes; none where nothing was changed."""
    counted = counts(rewrites)
    return {HEADER: ", ".join(f"{quote(name)}={n}" for name, n in counted.items())} if counted else {}


def _declared(asked: Conversation) -> list[Declared]:
    """Returns the tools of a prompt as rules read them."""
    return [Declared(tool.name, tool.description, tool.parameters, i) for i, tool in enumerate(asked.tooling.tools)]


def _with_texts(generation: Generation, asked: Texts, rules: Sequence[Rule]) -> Generation:
    at = [i for i, prompt in enumerate(asked.prompts) if isinstance(prompt, str)]
    made = rewritten(rules, texts=[str(asked.prompts[i]) for i in at])
    if not made.changes:
        return generation
    prompts = list(asked.prompts)
    for i, text in zip(at, made.texts, strict=True):
        prompts[i] = text
    return replace(generation, prompt=replace(asked, prompts=prompts), rewrites=tuple(made.changes))


def _tooling(tooling: Tooling, tools: Sequence[Declared]) -> Tooling:
    """Returns the tools after the rules; one that the client did not send cannot be called."""
    listed = [
        replace(tooling.tools[tool.index], description=tool.description, parameters=tool.parameters)
        if tool.index is not None
        else Tool(tool.name, tool.description, tool.parameters)
        for tool in tools
    ]
    missing = any(tool.index is None for tool in tools)
    sent = frozenset(tool.name for tool in tooling.tools)
    return replace(
        tooling, tools=tuple(listed), allowed=sent if missing and tooling.allowed is None else tooling.allowed
    )


def _placed(mark: Mark, made: Rewritten) -> Mark:
    """Returns where a breakpoint is after the rules: that of a tool is behind all that the client has before it."""
    if mark.tool is not None:
        before = (i for i, tool in enumerate(made.tools) if tool.index is not None and tool.index <= mark.tool)
        return replace(mark, tool=max(before))
    return mark if mark.message is None else replace(mark, offset=made.offset(mark.message, mark.offset))


@contextmanager
def _nested() -> Iterator[None]:
    """Turns a schema or a message that is nested too deeply for rules into the error of such a body."""
    try:
        yield
    except RecursionError:
        raise ApiError(400, "The JSON of the body is nested too deeply", code="invalid_json") from None
