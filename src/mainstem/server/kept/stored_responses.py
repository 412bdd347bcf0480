"""Responses that are kept, so that later requests go on from them, by the OpenAI API reference.

The ids of items contain that of their response, so that a reference to one is found in the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from mainstem.server.apis.generation import Generation, Linked
from mainstem.server.apis.responses.reply import ID_PREFIX
from mainstem.server.errors import ApiError
from mainstem.server.kept.listing import Deleted, Page, page
from mainstem.server.kept.response_store import Kept, Owner, ResponseStore


class StoredResponses:
    """The API over the responses that are kept.

    Args:
        store: keeps them.
    """

    def __init__(self, store: ResponseStore[Kept]) -> None:
        self._store = store

    def join(self, request: Generation | Linked, owner: Owner) -> Generation:
        """Joins a client's request to the conversation that it goes on from, if it does.

        Raises:
            ApiError: 404; the response or the item that it refers to is not there. 400; what `read` raises.
        """
        if isinstance(request, Generation):
            return request
        found = self._items(owner, request.references)
        earlier: list[dict[str, Any]] = []
        if request.previous is not None:
            earlier = msgspec.json.decode(self._kept(owner, request.previous, "previous_response_id").conversation)
        return request.join(earlier, found)

    def get(self, owner: Owner, id: str) -> bytes:
        """Returns the JSON of a response.

        Raises:
            ApiError: 404; it is not there.
        """
        return self._kept(owner, id).body

    def input_items(self, owner: Owner, id: str, query: Mapping[str, str]) -> Page:
        """Returns a page of what a response answers.

        Args:
            owner, id: of the response.
            query: see `listing.page`.

        Raises:
            ApiError: 404; the response is not there. 400; a parameter is wrong.
        """
        kept = self._kept(owner, id)
        items = _numbered(id, kept)
        given = items[: len(items) - len(msgspec.json.decode(kept.body)["output"])]
        return page([(item["id"], item) for item in given], query, "desc")

    def cancel(self, owner: Owner, id: str) -> NoReturn:
        """Cancels nothing: a response that is kept has ended, since none is made in the background.

        Raises:
            ApiError: 400, or 404; the response is not there.
        """
        self._kept(owner, id)
        message = "Only responses that are made in the background can be cancelled: close the connection of any other."
        raise ApiError(400, message, param="id", code="not_cancellable")

    def delete(self, owner: Owner, id: str) -> Deleted:
        """Forgets a response.

        Raises:
            ApiError: 404; it is not there.
        """
        self._kept(owner, id)
        self._store.delete(owner, id)
        return Deleted(id=id, object="response")

    def _items(self, owner: Owner, references: Mapping[int, str]) -> dict[int, dict[str, Any]]:
        """Returns the items that references stand for; each at most once, so that a body cannot grow by them."""
        known: dict[str, dict[str, Any]] = {}  # the items of an answer and of what it answers, by id
        found = {}
        for i, id in references.items():
            answer = ID_PREFIX + id.split("_")[1] if id.count("_") == 2 else ""
            if answer not in known:
                kept = self._store.get(owner, answer)
                known[answer] = {} if kept is None else {each["id"]: each for each in _numbered(answer, kept)}
            if id not in known[answer]:
                at = f"input[{i}].id"
                message = (
                    f"{at}: the item {id!r} was not found, or it was referred to before; no answer is kept forever"
                )
                raise ApiError(404, message, param=at, code="item_not_found")
            found[i] = known[answer].pop(id)
        return found

    def _kept(self, owner: Owner, id: str, param: str | None = None) -> Kept:
        kept = self._store.get(owner, id) if id.startswith(ID_PREFIX) else None
        if kept is None:
            message = f"The response {id!r} was not found: not every response is kept, and none forever."
            raise ApiError(404, message, param=param, code="response_not_found")
        return kept


def _numbered(id: str, kept: Kept) -> list[dict[str, Any]]:
    """Returns the items of a conversation, of which each has an id, and messages have parts."""
    items: list[dict[str, Any]] = msgspec.json.decode(kept.conversation)
    for i, item in enumerate(items):
        kind = item.setdefault("type", "message")
        prefix = "msg" if kind == "message" else "item"
        item["id"] = item.get("id") or f"{prefix}_{id.removeprefix(ID_PREFIX)}_i{i}"
        if kind == "message" and isinstance(item.get("content"), str):
            part = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": part, "text": item["content"]}]
    return items
