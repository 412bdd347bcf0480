"""Chats whose answers are kept because their request says `store: true`, by the OpenAI API reference.

They are in one store with the responses, within the same bounds and for the same owners only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from mainstem.server.apis.bodies import decode_known
from mainstem.server.apis.chat.reply import ID_PREFIX
from mainstem.server.errors import ApiError
from mainstem.server.kept.listing import Deleted, Page, page
from mainstem.server.kept.response_store import Kept, Owner, ResponseStore


class MetadataUpdate(Struct):
    """The body of POST /v1/chat/completions/{id}: what replaces the notes of the client."""

    metadata: dict[str, str] | None


class StoredChats:
    """The API over the chats that are kept.

    Args:
        store: keeps them.
    """

    def __init__(self, store: ResponseStore[Kept]) -> None:
        self._store = store

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

    def delete(self, owner: Owner, id: str) -> Deleted:
        """Forgets an answer.

        Raises:
            ApiError: 404; it is not there.
        """
        self._kept(owner, id)
        self._store.delete(owner, id)
        return Deleted(id=id, object="chat.completion.deleted")

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
