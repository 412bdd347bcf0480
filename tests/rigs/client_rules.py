"""What Mainstem's own rules make of the requests of clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from typing import Any

from rigs.client_calls import Call

from mainstem.prompt_rules.rule_file import own_files
from mainstem.server.access.api_keys import Access
from mainstem.server.apis.generation import Conversation, Generation, Linked
from mainstem.server.apis.rewriting import Rewriting
from mainstem.server.apis.table import APIS
from mainstem.settings.server import ServerConfig

Message = dict[str, Any]


def rewriting(files: Iterable[str]) -> Rewriting:
    """Returns the rules of files as a server without keys has them."""
    return Rewriting(ServerConfig(prompt_rules=tuple(files)), Access((), None, b""))


def asked(call: Call, rules: Rewriting) -> Generation | None:
    """Returns the request of a call after rules; None: it generates nothing, or needs an answer that is kept."""
    path = call.path.partition("?")[0]
    if path not in APIS or call.status >= 400:
        return None
    read = APIS[path].read(json.dumps(call.body).encode(), None)
    if isinstance(read, Linked):
        return None
    return rules.applied(read, path, call.headers.get("user-agent", ""), None, remember=False)


def all_asked(calls: Sequence[Call], rules: Rewriting) -> list[Generation]:
    """Returns the requests of calls after rules."""
    return [made for call in calls if (made := asked(call, rules)) is not None]


def rules_at_work(calls: Sequence[Call]) -> set[str]:
    """Returns the names of the rules that change calls, of all that come with Mainstem."""
    return {change.rule for made in all_asked(calls, rewriting(own_files())) for change in made.rewrites}


def before_the_user(made: Generation) -> list[Message]:
    """Returns the messages before the first one of the user."""
    assert isinstance(made.prompt, Conversation)
    messages = list(made.prompt.messages)
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    return messages[:first]


def of_one_session(calls: Sequence[Call], folder: str, today: date) -> list[str]:
    """Returns what stands before the first message of the user, after all rules, and is another in the next session.

    Args:
        calls: of a client, as they were heard.
        folder: a regular expression, which finds the folders that it ran in.
        today: the day on which it ran.
    """
    days = (f"{today:%B} {today.day}, {today.year}", f"{today.month}/{today.day}/{today.year}", f"{today:%b %d %Y}")
    changing = re.compile("|".join((folder, *map(re.escape, (today.isoformat(), *days)))))
    texts = (text for made in all_asked(calls, rewriting(own_files())) for text in _texts(made))
    return [text[max(found.start() - 80, 0) : found.end() + 80] for text in texts for found in changing.finditer(text)]


def _texts(made: Generation) -> Iterator[str]:
    assert isinstance(made.prompt, Conversation)
    for message in before_the_user(made):
        content = message["content"]
        yield from [content] if isinstance(content, str) else [part.get("text", "") for part in content or ()]
    for tool in made.prompt.tooling.tools:
        yield tool.description or ""
