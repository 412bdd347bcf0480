"""Records requests for replay: lines of JSON, with prompts as keyed hashes.

Knows requests and their results. Does not know HTTP, or the readers of the file (`mainstem.replay.readers.open`). Never
blocks a request: finished requests are queued, and one thread hashes and writes them.

    end of a generation  ->  queue, bounded in tokens  ->  writer thread: hash, encode, append
                              '- full: dropped, counted     '- disk full: counted, the file stays whole

The format, version 1: UTF-8, one object per line. A header is the first line; each server that resumes the file adds a
header:

    {"format": "mainstem-recording", "version": 1,
     "block_size": 16,              tokens per block
     "server": "0.1.0",             version of mainstem
     "model": "SmolLM2-135M",       the base model
     "started": 1760000000.123,     seconds since the epoch
     "key": "9f86d081884c7d65"}     identifies the secret: with equal keys and block sizes, blocks are comparable

Then follows a line for each choice of each prompt that the engine accepted, in the order in which they **ended**.
Readers sort by `time`.

    {"time": 1760000001.25,         seconds since the epoch, at the arrival at the engine
     "kind": "chat",                or "completion"
     "model": "SmolLM2-135M",       as requested: the base model, or an adapter
     "tenant": "03ac674216f3e15c",  hash of the API key and the cache salt; "" without both
     "input_tokens": 100,
     "output_tokens": 13,
     "cached": {"device": 48, "host": 0, "storage": 0},     tokens hit; null for a request that was cut off
     "ttft_s": 0.02, "e2e_s": 0.04,                         seconds from `time`; null for the same
     "finish": "stop",              "length", "error", or "cancelled"
     "blocks": "e3b0c44298fc1c14..."}   16 hex digits per block, ceil(input_tokens / block_size) blocks

A line also has "cache_key", a hash of the client's `prompt_cache_key` and the tenant, if the client gives one; and with
`text` "prompt" and "answer". Readers must ignore unknown fields.

A block is an 8-byte BLAKE2b hash (RFC 7693) over the hash of the block before it and its own tokens, 4 bytes each,
little endian; the last block may be partial. The tokens of an image are derived from its identity. The key of the hash
is derived from the file's secret, the model, the adapter, the salt and the API key. So blocks that cannot share KV
differ, and prompts cannot be checked against the blocks without the secret. An adapter is identified by its name here,
whatever its weights.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

import mainstem
from mainstem.cache.keys import Image
from mainstem.cache.namespaces import Namespace
from mainstem.errors import BadArgument
from mainstem.here import check_output
from mainstem.metric import Metric, each
from mainstem.runtime.request import Delta, Request, Usage
from mainstem.server.run import Watcher
from mainstem.settings.server import RecordConfig

log = logging.getLogger(__name__)

FORMAT = "mainstem-recording"
VERSION = 1
HASH_BYTES = 8

_QUEUED_TOKENS = 16 << 20  # at most 64 MiB of prompts
_LINE_TOKENS = 256  # the cost of a queued line in addition to its tokens
_CLOSING_S = 10.0  # how long `close` waits for the queue to be written
_START = f'{{"format":"{FORMAT}"'.encode()

Kind = Literal["chat", "completion"]


class _Header(msgspec.Struct):
    format: str
    version: int
    block_size: int
    server: str
    model: str
    started: float
    key: str


class _Line(msgspec.Struct, omit_defaults=True):
    time: float
    kind: Kind
    model: str
    tenant: str
    input_tokens: int
    output_tokens: int
    cached: dict[str, int] | None
    ttft_s: float | None
    e2e_s: float | None
    finish: str
    blocks: str
    cache_key: str | None = None
    prompt: str | None = None
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class RecordStats:
    """Counts of lines: written; dropped, because the queue was full; failed, because of an error of the file."""

    written: int
    dropped: int
    failed: int

    METRICS: ClassVar = (
        Metric("mainstem_recorded_requests", "Requests to be recorded, by outcome",
            each("{}", "written", "dropped", "failed"), ("outcome",)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The parts of a request that are kept until it is written; pixels are not."""

    time_s: float
    kind: Kind
    model: str
    tokens: NDArray[np.int32]
    images: tuple[tuple[int, Image], ...]
    scope: Namespace
    tenant: Namespace
    cache_key: str | None


def check_recording(config: RecordConfig) -> None:
    """Tries the file of a recording before there is a model to record requests of.

    Raises:
        BadArgument, OSError: see `Recorder`.
    """
    _File(config, os.write).close()


class Recorder:
    """Writes one recording. Usable from any thread; as a context manager it closes the recording at the end.

    Args:
        config: the settings of recordings.
        model: name of the base model.
        decode: returns the text of tokens, for `config.record_text`.
        now: returns seconds since the epoch.
        random: returns n random bytes, for the secret if none is given.
        queued_tokens: maximum number of prompt tokens that wait to be written; requests beyond it are dropped.
        write: writes like `os.write`.

    Raises:
        BadArgument: the file cannot be written, is neither empty nor a recording, or another server writes to it.
        OSError: the file cannot be opened or written.
    """

    def __init__(
        self,
        config: RecordConfig,
        model: str,
        decode: Callable[[Sequence[int]], str],
        *,
        now: Callable[[], float] = time.time,
        random: Callable[[int], bytes] = secrets.token_bytes,
        queued_tokens: int = _QUEUED_TOKENS,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._model = model
        self._text = config.record_text
        self._now = now
        self._lines = _Lines(config, model, decode, random)
        self._room = queued_tokens
        self._queue: deque[tuple[int, Callable[[], bytes]]] = deque()  # sizes, and what makes the lines
        self._changed = threading.Condition()
        self._closed = False
        self._written = self._dropped = self._failed = 0
        self._file = _File(config, write)
        with ExitStack() as undo:
            undo.callback(self._file.close)
            self._file.append(self._lines.header(now()))
            undo.pop_all()
        self._writer = threading.Thread(target=self._run, name="mainstem-recording", daemon=True)
        self._writer.start()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def note(
        self,
        request: Request,
        kind: Kind,
        scope: Namespace,
        api_key: str | None = None,
        cache_key: str | None = None,
    ) -> Watcher:
        """Returns the watcher that records a request that arrives now.

        Args:
            request: the request to the engine.
            kind: the endpoint of the request.
            scope: the namespace in which prefixes are shared, apart from the model and the API key.
            api_key: the client's API key, if it sent one.
            cache_key: the client's name for requests that share a prefix, if it has one.
        """
        owner = () if api_key is None else (f"key:{api_key}",)
        images = tuple((image.start, Image(image.identity, image.length)) for image in request.images)
        prompt = _Prompt(
            time_s=self._now(),
            kind=kind,
            model=self._model if scope.adapter is None else scope.adapter,
            tokens=request.tokens,
            images=images,
            scope=replace(scope, extra=(f"model:{self._model}", *owner, *scope.extra)),
            tenant=Namespace(salt=scope.salt, extra=owner),
            cache_key=cache_key,
        )

        def ended(finish: str, usage: Usage | None, deltas: Sequence[Delta]) -> None:
            text = "".join(delta.text for delta in deltas) if self._text else ""
            line = partial(self._lines.line, prompt, finish, sum(len(delta.tokens) for delta in deltas), usage, text)
            self._put(len(prompt.tokens) + _LINE_TOKENS, line)

        return Watcher(ended)

    def stats(self) -> RecordStats:
        """Returns the counts since the start."""
        return RecordStats(self._written, self._dropped, self._failed)

    def close(self) -> None:
        """Writes the queue and closes the file, but waits only some seconds. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._writer.join(_CLOSING_S)
        if self._writer.is_alive():
            log.warning("the recording is incomplete: %d queued lines were not written in time", len(self._queue))

    def _put(self, size: int, line: Callable[[], bytes]) -> None:
        with self._changed:
            if self._closed or size > self._room:
                self._dropped += 1
                first = self._dropped == 1
            else:
                self._room -= size
                self._queue.append((size, line))
                self._changed.notify()
                return
        if first:
            log.warning("the recording cannot keep up and omits requests: see the metric mainstem_recorded_requests")

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            size, line = taken
            self._append(line())
            with self._changed:
                self._room += size
        self._file.close()

    def _take(self) -> tuple[int, Callable[[], bytes]] | None:
        """Returns the next finished request; None after the last one."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return self._queue.popleft() if self._queue else None

    def _append(self, line: bytes) -> None:
        try:
            self._file.append(line)
            self._written += 1
        except OSError as error:
            self._failed += 1
            if self._failed == 1:
                log.error("a request could not be recorded; further failures are only counted: %s", error)


class _Lines:
    """Encodes finished requests as lines, under one secret."""

    def __init__(
        self,
        config: RecordConfig,
        model: str,
        decode: Callable[[Sequence[int]], str],
        random: Callable[[int], bytes],
    ) -> None:
        secret = random(32) if config.record_secret is None else config.record_secret
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"mainstem record").digest()
        self._step = 4 * config.record_block_size
        self._model = model
        self._decode = decode if config.record_text else None

    def header(self, started_s: float) -> bytes:
        name = self._keyed(b"name", b"", HASH_BYTES).hex()
        header = _Header(FORMAT, VERSION, self._step // 4, mainstem.__version__, self._model, started_s, name)
        return msgspec.json.encode(header) + b"\n"

    def line(self, prompt: _Prompt, finish: str, output_tokens: int, usage: Usage | None, answer: str) -> bytes:
        line = _Line(
            time=round(prompt.time_s, 6),
            kind=prompt.kind,
            model=prompt.model,
            tenant=self._tenant(prompt.tenant),
            input_tokens=len(prompt.tokens),
            output_tokens=output_tokens,
            cached=None if usage is None else _by_tier(usage),
            ttft_s=None if usage is None else round(usage.ttft_s, 6),
            e2e_s=None if usage is None else round(usage.duration_s, 6),
            finish=finish,
            blocks=self._blocks(prompt),
            cache_key=self._cache_key(prompt),
        )
        if self._decode is not None:
            line.prompt, line.answer = self._decode(prompt.tokens.tolist()), answer
        return msgspec.json.encode(line) + b"\n"

    def _tenant(self, tenant: Namespace) -> str:
        return "" if tenant == Namespace() else self._keyed(b"tenant", tenant.encode(), HASH_BYTES).hex()

    def _cache_key(self, prompt: _Prompt) -> str | None:
        if prompt.cache_key is None:
            return None
        data = prompt.tenant.encode() + prompt.cache_key.encode(errors="surrogatepass")
        return self._keyed(b"cache key", data, HASH_BYTES).hex()

    def _blocks(self, prompt: _Prompt) -> str:
        data = _symbols(prompt).tobytes()
        key = self._keyed(b"blocks", prompt.scope.encode(), 32)
        hashes = []
        parent = b""
        for start in range(0, len(data), self._step):
            block = parent + data[start : start + self._step]
            parent = hashlib.blake2b(block, digest_size=HASH_BYTES, key=key).digest()
            hashes.append(parent)
        return b"".join(hashes).hex()

    def _keyed(self, person: bytes, data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, digest_size=size, key=self._key, person=person).digest()


def _symbols(prompt: _Prompt) -> NDArray[Any]:
    """Returns the tokens, with those of images derived from their identities: these exceed all tokens of text."""
    if not prompt.images:
        return prompt.tokens.astype("<u4", copy=False)
    symbols = prompt.tokens.astype("<u4")
    for start, image in prompt.images:
        symbols[start : start + image.kv_length] = image.symbols()
    return symbols


def _by_tier(usage: Usage) -> dict[str, int]:
    off_device = usage.host_tokens + usage.storage_tokens
    return {"device": usage.cached_tokens - off_device, "host": usage.host_tokens, "storage": usage.storage_tokens}


class _File:
    """A file of whole lines, to which only this process appends."""

    def __init__(self, config: RecordConfig, write: Callable[[int, bytes], int]) -> None:
        if config.record is None:
            raise BadArgument("record", None, "the path of a file")
        self._write = write
        check_output("record", config.record)
        self._fd = os.open(config.record, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with ExitStack() as undo:
            undo.callback(os.close, self._fd)
            _take_over(self._fd, config)
            undo.pop_all()

    def append(self, line: bytes) -> None:
        """Appends a line, or raises OSError and leaves the file unchanged."""
        end = os.fstat(self._fd).st_size
        try:
            rest = line
            while rest:
                rest = rest[self._write(self._fd, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, end)
            raise

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


def _take_over(fd: int, config: RecordConfig) -> None:
    """Locks the file, and truncates a line that a killed server left unfinished."""
    path = str(config.record)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise BadArgument("record", path, "a regular file")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadArgument("record", path, "a file that no other server writes to") from None
    if os.fstat(fd).st_size == 0:
        return
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as held:
        if held[: len(_START)] != _START:
            raise BadArgument("record", path, "a new file, or a recording to append to")
        whole = held.rfind(b"\n") + 1
        if whole:
            _check_header(held[: held.find(b"\n")], config)
    os.ftruncate(fd, whole)


def _check_header(line: bytes, config: RecordConfig) -> None:
    try:
        header = msgspec.json.decode(line, type=_Header)
    except msgspec.MsgspecError:
        raise BadArgument("record", str(config.record), "a new file, or a recording to append to") from None
    if (header.version, header.block_size) != (VERSION, config.record_block_size):
        held = f"version {header.version} and blocks of {header.block_size} tokens"
        raise BadArgument("record", str(config.record), f"a recording of this version and block size; it has {held}")
