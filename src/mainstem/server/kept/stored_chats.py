"""Chats whose answers are kept because their request says `store: true`, by the OpenAI API reference.

They are in one store with the responses, within the same bounds and for the same owners only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from mainstem.runtime.request import Delta
from mainstem.server.apis.replies import ChatBody, ChatReply, UsageBody
from mainstem.server.apis.requests import ChatRequest, decode_known
from mainstem.server.errors import ApiError
from mainstem.server.generation import Task
from mainstem.server.kept.listing import Page, page
from mainstem.server.kept.response_store import Kept, Owner, ResponseStore
from mainstem.server.parsing.output import Piece

ID_PREFIX = "chatcmpl-"

Keep = Callable[[ChatBody], None]


class MetadataUpdate(Struct):
    """The body of POST /v1/chat/completions/{id}: what replaces the notes of the client."""

    metadata: dict[str, str] | None


class DeletedChat(Struct):
    """The response of DELETE /v1/chat/completions/{id}."""

    id: str
    deleted: bool = True
    object: str = "chat.completion.deleted"


class KeptChatReply(ChatReply):
    """Writes the answers of one request, and keeps them when they are complete.

    Args:
        keep: called with the whole answer.
        given: see `ChatReply`.
    """

    def __init__(self, keep: Keep, *given: Any) -> None:
        super().__init__(*given)
        self._keep = keep
        self._seen: dict[int, list[tuple[Delta, list[Piece]]]] = {}

    def _parse(self, index: int, delta: Delta) -> list[Piece]:
        pieces = super()._parse(index, delta)
        self._seen.setdefault(index, []).append((delta, pieces))
        return pieces

    def closing(self, usage: UsageBody) -> bytes:
        """See `Reply`."""
        seen = [self._seen[index] for index in sorted(self._seen)]
        self._keep(self._of([self._answer(i, *zip(*each, strict=True)) for i, each in enumerate(seen)], (), usage))
        return super().closing(usage)

    def whole(self, answers: Sequence[Sequence[Delta]], usage: UsageBody) -> ChatBody:
        """See `Reply`."""
        body = super().whole(answers, usage)
        self._keep(body)
        return body


class StoredChats:
    """The API over the chats that are kept.

    Args:
        store: keeps them.
    """

    def __init__(self, store: ResponseStore[Kept]) -> None:
        self._store = store

    def task(self, request: ChatRequest, body: bytes, owner: Owner) -> Task:
        """Returns what answers a chat, and keeps the answer if the request, made of this body, says so."""
        names = {"prompt": "messages"}
        if not request.store:
            return Task(request, ChatReply, names)
        messages = msgspec.json.encode(msgspec.json.decode(body)["messages"])

        def keep(answer: ChatBody) -> None:
            kept = msgspec.json.encode({**msgspec.to_builtins(answer), "metadata": request.metadata or {}})
            self._store.put(owner, answer.id, Kept(kept, messages))

        return Task(request, partial(KeptChatReply, keep), names)

    def get(self, owner: Owner, id: str) -> bytes:
        """Returns the JSON of an answer.

        Raises:
            ApiError: 404; it is not there.
        """
        return self._kept(owner, id).body

    def listed(self, owner: Owner, query: Mapping[str, str]) -> Page:
        """Returns a page of the answers that are kept, the oldest first by default.

        Args:
            owner: the client.
            query: `model`, `metadata[name]`: of those that count; and see `listing.page`.

        Raises:
            ApiError: 400; a parameter is wrong.
        """
        kept = [(id, msgspec.json.decode(each.body)) for id, each in self._store.entries(owner)]
        chats = [(id, each) for id, each in kept if id.startswith(ID_PREFIX) and _matches(each, query)]
        return page(chats, query, "asc")

    def messages(self, owner: Owner, id: str, query: Mapping[str, str]) -> Page:
        """Returns a page of the messages that an answer was given to; see `listed`."""
        given: list[dict[str, Any]] = msgspec.json.decode(self._kept(owner, id).conversation)
        return page([(f"{id}-{i}", _message(f"{id}-{i}", each)) for i, each in enumerate(given)], query, "asc")

    def update(self, owner: Owner, id: str, body: bytes) -> bytes:
        """Replaces the notes of the client on an answer, and returns its JSON.

        Raises:
            ApiError: 400; the body is wrong. 404; the answer is not there.
        """
        metadata = decode_known(body, MetadataUpdate).metadata or {}
        kept = self._kept(owner, id)
        changed = msgspec.json.encode({**msgspec.json.decode(kept.body), "metadata": metadata})
        self._store.replace(owner, id, Kept(changed, kept.conversation))
        return changed

    def delete(self, owner: Owner, id: str) -> DeletedChat:
        """Forgets an answer.

        Raises:
            ApiError: 404; it is not there.
        """
        self._kept(owner, id)
        self._store.delete(owner, id)
        return DeletedChat(id)

    def _kept(self, owner: Owner, id: str) -> Kept:
        kept = self._store.get(owner, id) if id.startswith(ID_PREFIX) else None
        if kept is None:
            message = f"The chat completion {id!r} was not found: only those with store = true are kept, none forever."
            raise ApiError(404, message, code="completion_not_found")
        return kept


def _matches(body: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    wanted = {name[9:-1]: value for name, value in query.items() if name.startswith("metadata[") and name[-1] == "]"}
    named = all(body["metadata"].get(name) == value for name, value in wanted.items())
    return named and query.get("model", body["model"]) == body["model"]


def _message(id: str, message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message as lists show it: with an id, and its parts apart from its text."""
    content = message.get("content")
    parts = {"content": None, "content_parts": content} if isinstance(content, list) else {"content": content}
    return {**message, "id": id, **parts}
