"""Makes the tiers of an engine from its settings: host memory, a store, and the identity of the model.

This module knows settings and models. `mainstem.tiers` decides what moves when.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mainstem.cache.identity import Identity
from mainstem.errors import BadArgument
from mainstem.imports import needs
from mainstem.runtime.memory.host import HostPool
from mainstem.runtime.models.loading import IRRELEVANT, LoadedModel
from mainstem.runtime.parallel.division import whole
from mainstem.runtime.parallel.ranks import Ranks
from mainstem.settings.engine import TierConfig
from mainstem.share import Share
from mainstem.storage.base import RANK, Backend, open_backend
from mainstem.storage.peer import NO_SECRET, PeerBackend, Peering, PeerServer
from mainstem.tiers.controller import Tiers
from mainstem.tiers.host.shelf import AndStore, HostOnly, Shelf
from mainstem.tiers.host.tier import HostTier
from mainstem.tiers.storage import identities
from mainstem.tiers.storage.calibrated import open_codec
from mainstem.tiers.storage.codecs import Codec
from mainstem.tiers.storage.sealer import PUBLIC_SECRET, Sealer
from mainstem.tiers.storage.store import Store
from mainstem.tiers.storage.workers import ThreadWorkers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from mainstem.runtime.memory.pools import Pools

log = logging.getLogger(__name__)

_LOOKUP_THREADS = 12  # for lookups in storage, in addition to the threads that read
_CLOSE_S = 5.0  # for calls that have not returned
_DRAIN_S = 5.0  # for pending writes
_HASHED_AT_ONCE = 1 << 26  # bytes of weights that are copied from the device together


def build_tiers(
    config: TierConfig,
    pools: Pools,
    loaded: LoadedModel,
    page_size: int,
    clock: Callable[[], float],
    backend: Backend | None = None,
) -> tuple[HostTier, Store | None]:
    """Makes the host tier and the store of an engine. `backend` is its `open_store`; None: that is called here.

    Raises:
        BadArgument: a size or a spec is invalid, or the codec was calibrated for another model.
        BackendUnavailable: the store's client is not installed, or its server does not answer.
    """
    codec = open_codec(config.storage_codec)
    shelf = Shelf() if config.peers.exist else None
    memory = None
    backend = backend or open_store(config, loaded.ranks) or (None if shelf is None else HostOnly(shelf))
    try:
        memory = pools.host_memory(config.size, backend is not None)
        tier = HostTier(memory, config.host, memory.sizes, loaded.ranks.agree)
        store = None
        if backend is not None:
            identity = identity_of(loaded, page_size, memory.content, codec.name, pools.computation)
            codec.check(identity)
            store = _store(config, backend, shelf, identity, codec, clock)
    except BaseException:
        if backend is not None:
            backend.close()
        if memory is not None:
            memory.close()
        raise
    return tier, store


def close_tiers(tier: HostTier, store: Store | None) -> None:
    """Closes what `build_tiers` made: calls, the back end, copies."""
    try:
        if store is not None:
            store.close(_CLOSE_S)
    finally:
        if isinstance(tier.memory, HostPool):
            tier.memory.close()


def end_tiers(tiers: Tiers, *, drains: bool = True) -> None:
    """Closes the tiers of an engine; if it `drains`, after listing the hottest prefixes and ending pending writes."""
    try:
        if drains:
            tiers.remember()
            tiers.drain(_DRAIN_S)
    finally:
        tiers.close()  # with the store
        close_tiers(tiers.host, None)


def identity_of(
    loaded: LoadedModel, page_size: int, content: str, codec: str = "none", computation: Sequence[str] = ()
) -> Identity:
    """Returns everything that the pages of a loaded model depend on. Reads every weight.

    Args:
        loaded: the model.
        page_size: positions per page.
        content: the name of the format of a page's content.
        codec: the name of that which encodes its numbers.
        computation: how they are computed.
    """
    config = loaded.model.config.get_text_config(decoder=True)
    heads = int(getattr(config, "num_attention_heads", None) or 0)  # none: a model without attention
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    latent = getattr(config, "kv_lora_rank", None)
    states = getattr(loaded.model, "_is_stateful", False)
    quantization = getattr(loaded.model.config, "quantization_config", None)
    return Identity(
        model=loaded.name,
        weights=_digest_weights(loaded.model),
        dtype=str(loaded.dtype).removeprefix("torch."),
        quantization="none" if quantization is None else json.dumps(_plain(quantization), sort_keys=True),
        layout=content,
        shape=f"{config.num_hidden_layers} layers, "
        + (f"a latent of {latent} + {config.qk_rope_head_dim}" if latent else f"{kv_heads} of {heads} heads"),
        # Ranks hold the same latents, but states of their own.
        attention=("mla with states" if states else "mla") if latent else "mha" if kv_heads == heads else "gqa",
        rope=json.dumps(_plain(getattr(config, "rope_parameters", None)), sort_keys=True),
        tokenizer=_digest_tokenizer(loaded),
        symbols="token ids/4",
        page_size=page_size,
        tp_rank=loaded.ranks.rank,
        tp_size=loaded.ranks.size,
        extra=(f"configuration {_digest_config(loaded.model.config)}", f"codec {codec}", *computation),
    )


def open_store(config: TierConfig, ranks: Ranks) -> Backend | None:
    """Opens a rank's store: all ranks share one, or each has its own, with its number in place of {rank}.

    Raises:
        BadArgument: there is no such store, or several ranks cannot open it.
        BackendUnavailable: the store's client is not installed, or its server does not answer.
        RankFailed: another rank could not open its store.
    """
    spec = config.storage
    if spec is None:
        return None
    own = spec.replace(RANK, str(ranks.rank))
    if ranks.rank > 0:
        ranks.share(lambda: None)  # rank 0 opens it first
    backend = open_backend(own)
    try:
        can = backend.capabilities
        if ranks.size > 1 and own == spec and can.persistent and not can.shared:
            allowed = f"a store that several processes can open, or one with {RANK} in its spec"
            raise BadArgument("storage", spec, allowed)
        if ranks.rank == 0:
            ranks.share(lambda: None)
        ranks.agree([0])  # all have opened theirs; else this ends with the words of one that has not
    except BaseException:
        backend.close()
        raise
    return backend


def _store(
    config: TierConfig,
    backend: Backend,
    shelf: Shelf | None,
    identity: Identity,
    codec: Codec,
    clock: Callable[[], float],
) -> Store:
    """Makes the store, and what gives its pages to peers.

    Raises:
        BackendUnavailable: pyzmq is not installed, or a peer has another secret.
        BadArgument: the address to listen on cannot be bound.
    """
    if config.storage_secret is None:
        log.warning("storage has no secret: stored pages are safe from damage, not from forgery")
    limits, peering = config.limits, config.peers
    sealer = Sealer(identity, PUBLIC_SECRET if config.storage_secret is None else config.storage_secret)
    secret = config.storage_secret or NO_SECRET
    reads = bool(peering.peers) or peering.peers_later
    peers = PeerBackend(peering.peers, secret, peering.peer_timeout_s) if reads else None
    server: PeerServer | None = None
    if shelf is not None and peering.peer_listen is not None:
        try:
            share = Share(peering.peer_share, clock=clock)
            alone = config.storage is not None and not backend.capabilities.shared
            source = AndStore(shelf, backend) if alone else shelf
            server = PeerServer(
                source, peering.peer_listen, secret, share=share, in_flight_bytes=peering.peer_bytes, clock=clock
            )
        except BaseException:
            if peers is not None:
                peers.close()
            raise
        shelf.server = server
        log.info("peers read pages at %s", server.address)
    store = Store(
        backend,
        sealer,
        limits,
        readers=ThreadWorkers(min(limits.max_prefetches, _LOOKUP_THREADS) + limits.batches, "mainstem-read"),
        writers=ThreadWorkers(limits.writes, "mainstem-write"),
        clock=clock,
        codec=codec,
        dtype=identity.dtype,
        peers=peers,
        shelf=shelf,
    )
    if peering.exist:
        name = identities.id_of(identities.summarize(identity), sealer).hex()
        follow = None if peers is None else peers.follow
        store.peering = Peering(None if server is None else server.address, follow, name)
    return store


def _digest_weights(model: torch.nn.Module) -> str:
    """Returns BLAKE3 over every parameter and persistent buffer, with name, shape and dtype; others are computed."""
    with needs("blake3", "storage needs blake3: pip install 'mainstem[storage]'"):
        from blake3 import blake3
    hasher = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(model.state_dict(keep_vars=False).items()):
        hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\0".encode())
        flat = whole(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
        for part in flat.split(_HASHED_AT_ONCE):
            hasher.update(part.cpu().numpy())
    return hasher.hexdigest()


def _digest_tokenizer(loaded: LoadedModel) -> str:
    """Returns BLAKE3 over a vocabulary; "none" without a tokenizer, where all prompts are given as tokens."""
    from blake3 import blake3

    if loaded.tokenizer is None:
        return "none"
    vocabulary = sorted((index, token) for token, index in loaded.tokenizer.get_vocab().items())
    return blake3(json.dumps(vocabulary).encode("utf-8", "surrogatepass")).hexdigest()


def _digest_config(config: PreTrainedConfig) -> str:
    from blake3 import blake3

    relevant = {name: value for name, value in config.to_dict().items() if name not in IRRELEVANT}
    return blake3(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()


def _plain(value: object) -> object:
    """Returns a configuration object as plain JSON values."""
    to_dict = getattr(value, "to_dict", None)
    return json.loads(json.dumps(to_dict() if callable(to_dict) else value, default=str))
