"""The wire format: vLLM's batches of events, in MessagePack.

    batch    [seconds since 1970, [event, ...], data-parallel rank]
    event    a map with `type` and the fields of that event; `cache_salt` only where there is one

https://docs.vllm.ai, "KV cache events". Other fields of vLLM are ignored when read, such as those of cache groups: our
events are about full attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from mainstem.events.source import AllBlocksCleared, BlockRemoved, BlockStored, Event
from mainstem.imports import needs


class Batch(NamedTuple):
    """Events that were sent together, at a time in seconds since 1970."""

    sent_s: float
    events: Iterable[Event]
    rank: int | None


def encode(batch: Batch) -> bytes:
    """Returns a batch as bytes, one event at a time: to encode all at once would keep other threads from running.

    Raises:
        BackendUnavailable: msgspec is not installed.
    """
    with needs("msgspec", "KV events need msgspec: pip install 'mainstem[events]'"):
        import msgspec
    events = [msgspec.Raw(msgspec.msgpack.encode(_to_map(event))) for event in batch.events]
    return msgspec.msgpack.encode([batch.sent_s, events, batch.rank])


def decode(payload: bytes) -> Batch:
    """Reverses `encode`; also reads what vLLM sends, but for hashes in bytes.

    Raises:
        ValueError: it is no batch of events.
        BackendUnavailable: msgspec is not installed.
    """
    with needs("msgspec", "KV events need msgspec: pip install 'mainstem[events]'"):
        import msgspec
    try:
        sent_s, events, *rank = msgspec.msgpack.decode(payload)
        return Batch(float(sent_s), [_from_map(event) for event in events], rank[0] if rank else None)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise ValueError(f"no batch of KV events: {error}") from None


def _to_map(event: Event) -> dict[str, Any]:
    match event:
        case BlockStored():
            fields: dict[str, Any] = {
                "type": "BlockStored",
                "block_hashes": event.block_hashes,
                "parent_block_hash": event.parent_block_hash,
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": event.medium,
                "lora_name": event.lora_name,
            }
            return fields if event.cache_salt is None else {**fields, "cache_salt": event.cache_salt}
        case BlockRemoved():
            return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": event.medium}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _from_map(fields: dict[str, Any]) -> Event:
    match fields["type"]:
        case "BlockStored":
            return BlockStored(
                tuple(fields["block_hashes"]),
                fields["parent_block_hash"],
                tuple(fields["token_ids"]),
                fields["block_size"],
                fields["medium"],
                fields.get("lora_name"),
                fields.get("cache_salt"),
            )
        case "BlockRemoved":
            return BlockRemoved(tuple(fields["block_hashes"]), fields["medium"])
        case "AllBlocksCleared":
            return AllBlocksCleared()
        case other:
            raise ValueError(f"no KV event: {other}")
