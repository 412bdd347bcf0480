"""The types of requests and their results: plain values, checked when they are made.

Every layer of the runtime and the server uses these types. They do not know schedulers, models or text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.expected import check_next_use
from mainstem.cache.explain import Stretches
from mainstem.cache.keys import IMAGE_DIGEST_BYTES, IMAGE_MIN_LENGTH
from mainstem.cache.namespaces import Namespace, encode_namespace
from mainstem.cache.retention import LEAST_S, Kept
from mainstem.errors import BadArgument, BadTokens, check_integer
from mainstem.runtime.schedule.timeline import Phase
from mainstem.settings.engine import SamplingParams

if TYPE_CHECKING:
    import torch

    from mainstem.runtime.models.adapters import Adapter
    from mainstem.runtime.text.detokenizer import Content

_INT32_MAX = 2**31 - 1
LOWEST_PRIORITY = -_INT32_MAX
"""Of requests that nobody waits for: their prompts are computed in small pieces, so that others wait less for them."""
LONGEST_GROUP = 256
"""Characters of the name of a group."""
_NOTHING = np.empty(0, np.int32)
_NOTHING.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """An image in a prompt.

    Args:
        start: its first position in the prompt.
        length: positions that it fills; at least 5.
        identity: 16 bytes of a cryptographic hash over everything that its embeddings depend on.
        inputs: the arguments of the model's encoder for this image alone.
        splits: whether the model attends to it in one direction only, so that it may be computed in parts.

    Raises:
        BadArgument: names the field and its range.
    """

    start: int
    length: int
    identity: bytes
    inputs: Mapping[str, torch.Tensor]
    splits: bool = False

    def __post_init__(self) -> None:
        """Checks all but the inputs, which only the model knows."""
        object.__setattr__(self, "start", check_integer("start", self.start, 0, _INT32_MAX))
        object.__setattr__(self, "length", check_integer("length", self.length, IMAGE_MIN_LENGTH, _INT32_MAX))
        whole = isinstance(self.identity, bytes) and len(self.identity) == IMAGE_DIGEST_BYTES
        _require("identity", self.identity, whole, f"{IMAGE_DIGEST_BYTES} bytes")

    @property
    def end(self) -> int:
        """The position after its last."""
        return self.start + self.length


@dataclass(frozen=True, slots=True, eq=False)
class PreparedPrompt:
    """A prompt, in the form that a `Request` takes.

    Args:
        tokens: int32 [n], read-only; values at the positions of images are ignored.
        images: in order.
        positions: int64 [3, n] for models with M-RoPE; None: token i is at position i.
        marks: as in `Request`.
        partings: of each variant that was asked for, how many tokens come before the place where it parts from this
            prompt; 0: the variant cannot be made, or is the same.
    """

    tokens: NDArray[np.int32]
    images: tuple[ImageInput, ...] = ()
    positions: NDArray[np.int64] | None = None
    marks: tuple[int, ...] = ()
    partings: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix of a prompt that a client marks. At the end of its request the usage says what the cache has of it.

    Args:
        end: its tokens, at least one.
        retain_s: for how long after the end of the request it is retained, as far as it fits within the bounds of
            `mainstem.cache.retention`; None: it is not.
        renewed: whether every later hit begins that time anew.
        ttl: what the client calls the time.

    Raises:
        BadArgument: `end` is below 1, or `retain_s` below a millisecond.
    """

    end: int
    retain_s: float | None = None
    renewed: bool = False
    ttl: str | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        object.__setattr__(self, "end", check_integer("end", self.end, 1, _INT32_MAX))
        fits = self.retain_s is None or LEAST_S <= self.retain_s < float("inf")
        _require("retain_s", self.retain_s, fits, f"seconds, {LEAST_S} or more")


@dataclass(frozen=True, slots=True)
class Hints:
    """A client's hints of how a request's KV will be used again. They change no answer.

    Args:
        retain_s: for how long after its end prompt and answer are retained, as far as they fit within the bounds of
            `mainstem.cache.retention`; None: not.
        one_shot: the answer will not be used again: nothing after the prompt stays in the cache.
        no_store: nothing that the request computes stays in the cache.
        prefixes: of the prompt, that a client marks.
        next_use_s: seconds from its end to the next request that goes on from its prompt and answer; None: unknown.
        next_use_steps: the same in steps of the workflow that it belongs to: 1 is the next step.
        session: what the client calls the conversation that it is a turn of; None: its prompt says.
        group: what the client calls the samples that it compares, within a namespace; see `schedule.versions`.

    Raises:
        BadArgument: `retain_s` is below a millisecond, `next_use_s` or `next_use_steps` is negative or no number, both
            are given, or there would be nothing to retain or to use.
    """

    retain_s: float | None = None
    one_shot: bool = False
    no_store: bool = False
    prefixes: tuple[Prefix, ...] = ()
    next_use_s: float | None = None
    next_use_steps: float | None = None
    session: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        """Checks the times, and the name of the group."""
        named = self.group is None or (isinstance(self.group, str) and 0 < len(self.group) <= LONGEST_GROUP)
        _require("group", self.group, named, f"a name of 1 to {LONGEST_GROUP} characters")
        fits = self.retain_s is None or LEAST_S <= self.retain_s < float("inf")
        _require("retain_s", self.retain_s, fits, f"seconds, {LEAST_S} or more")
        _require("retain_s", self.retain_s, not (self.retain_s and self.no_store), "left out with no_store")
        check_next_use(self.next_use_s, self.next_use_steps)
        for name in ("next_use_s", "next_use_steps"):
            value = getattr(self, name)
            _require(name, value, not (self.no_store and value is not None), "left out with no_store")

    def kept(self, prompt: int, computed: int) -> int:
        """Returns how many of the positions computed stay in the cache, of a prompt of `prompt` tokens."""
        return 0 if self.no_store else min(prompt, computed) if self.one_shot else computed


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt, and how to complete it.

    Args:
        tokens: int32 [n], n >= 1: the prompt. Any integer sequence is accepted; it is copied, unless it is a
            read-only int32 array.
        params: how to sample, and when to end.
        namespace: prefixes are shared only within it.
        priority: higher goes first; an int32, `LOWEST_PRIORITY` or more.
        images: in order and disjoint; the values of `tokens` at their positions are ignored.
        positions: int64 [3, n]: the M-RoPE positions of each token of the prompt; None: its index.
        adapter: computes in place of the base model; the namespace must name it, too.
        marks: positions in [0, n], ascending, where other prompts are expected to part from this one: the end of the
            system message, of the tools, of each turn. A model with recurrent states keeps some of its states there.
        hints: of how its KV will be used again.
        said: int32 [m]: the first tokens of the answer, which another engine has generated. They are events again, and
            the answer goes on as that engine would have gone on, with the same random numbers if there is a seed.
        content: makes what finds the stop texts of `params` in an answer, where they count in a part of it only: with
            several ranks, on each of them. The text of events then has all that was generated, and its reader finds
            the same stop text. None: they count anywhere.

    Raises:
        BadArgument: the namespace, the priority, the images, the positions or the marks are invalid, `said` is longer
            than the answer may be, or `logprob_start` is behind the prompt.
        BadTokens: the prompt is empty, or it or `said` has more than one dimension, or holds anything but int32
            integers >= 0.
    """

    tokens: NDArray[np.int32]
    params: SamplingParams = field(default_factory=SamplingParams)
    namespace: Namespace | str | None = None
    priority: int = 0
    images: tuple[ImageInput, ...] = ()
    positions: NDArray[np.int64] | None = None
    adapter: Adapter | None = None
    marks: Sequence[int] = ()
    hints: Hints = field(default_factory=Hints)
    said: NDArray[np.int32] = field(default_factory=lambda: _NOTHING)
    content: Callable[[], Content] | None = None

    def __post_init__(self) -> None:
        """Checks the fields, and copies the prompt, so that it cannot change while the request runs."""
        encode_namespace(self.namespace)
        object.__setattr__(self, "priority", check_integer("priority", self.priority, LOWEST_PRIORITY, _INT32_MAX))
        tokens = np.asarray(self.tokens)
        if tokens.size == 0:
            raise BadTokens(f"a prompt of shape {tokens.shape}: must be one dimension of at least one token")
        # Many requests may share an array that cannot change.
        object.__setattr__(self, "tokens", _checked_tokens("a prompt", tokens))
        _check_images(self.images, len(tokens))
        object.__setattr__(self, "marks", _checked_marks(self.marks, len(tokens)))
        if self.positions is not None:
            object.__setattr__(self, "positions", _checked_positions(self.positions, len(tokens)))
        said = _checked_tokens("the begin of an answer", np.asarray(self.said)) if len(self.said) else _NOTHING
        object.__setattr__(self, "said", said)
        _require("said", len(said), len(said) <= self.params.max_tokens, "at most max_tokens tokens")
        start, length = self.params.logprob_start, len(tokens)
        fits = self.params.prompt_logprobs is None or start <= length
        _require("logprob_start", start, fits, f"at most {length}, the tokens of the prompt")

    def in_namespace(self, namespace: Namespace | str | None) -> Request:
        """Returns the same request in another namespace."""
        return self if namespace == self.namespace else replace(self, namespace=namespace)

    def positions_of(self, begin: int, end: int) -> NDArray[np.int64] | None:
        """Returns the M-RoPE positions of the tokens at [begin, end), int64 [3, end - begin]; None: their indices.

        Tokens after the prompt continue by 1 from its highest position.
        """
        if self.positions is None:
            return None
        known = self.positions.shape[1]
        after = self.positions.max() + 1 + np.arange(max(begin - known, 0), max(end - known, 0))
        return np.concatenate([self.positions[:, begin:end], np.broadcast_to(after, (3, len(after)))], axis=1)


def _checked_tokens(name: str, tokens: NDArray[Any]) -> NDArray[np.int32]:
    if tokens.ndim != 1:
        raise BadTokens(f"{name} of shape {tokens.shape}: must be one dimension of at least one token")
    if tokens.dtype.kind not in "iu":
        raise BadTokens(f"{name} of type {tokens.dtype}: must hold integers")
    wrong = np.flatnonzero((tokens < 0) | (tokens > _INT32_MAX))
    if wrong.size:
        raise BadTokens(f"token {tokens[wrong[0]]} at position {wrong[0]}: must be from 0 to {_INT32_MAX}")
    return _frozen(tokens, np.dtype(np.int32))


def _frozen(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns the array itself if it is read-only, else a read-only copy."""
    if array.dtype == dtype and not array.flags.writeable:
        return array
    copy = array.astype(dtype)
    copy.flags.writeable = False
    return copy


def _check_images(images: tuple[ImageInput, ...], length: int) -> None:
    _require("images", images, isinstance(images, tuple), "a tuple of ImageInput")
    end = 0
    for image in images:
        _require("images", image, isinstance(image, ImageInput), "a tuple of ImageInput")
        fits = end <= image.start and image.end <= length
        _require(
            "images", f"one at [{image.start}, {image.end})", fits, f"in order, disjoint, and inside [{end}, {length})"
        )
        end = image.end


def _checked_marks(marks: Sequence[int], length: int) -> tuple[int, ...]:
    positions = np.asarray(marks)
    whole = positions.ndim == 1 and positions.dtype.kind in ("iu" if positions.size else "iuf")
    fits = whole and (
        not positions.size or (positions[0] >= 0 and positions[-1] <= length and bool((np.diff(positions) > 0).all()))
    )
    _require("marks", marks, bool(fits), f"ascending integers from 0 to {length}")
    return tuple(positions.tolist())


def _checked_positions(positions: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    columns = np.asarray(positions)
    fits = columns.shape == (3, length) and columns.dtype.kind in "iu" and columns.min() >= 0
    _require("positions", columns, bool(fits), f"integers >= 0 of shape (3, {length}), one column per token")
    return _frozen(columns, np.dtype(np.int64))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's natural log-probability before temperature, and the best alternatives, most likely first.

    `rank` is its place among all tokens, from 1, for a token of the prompt; for others it is not counted, 0.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """The counts and times of one request.

    Args:
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens that were in the cache when the request was first admitted.
        host_tokens, storage_tokens: cached tokens that were on the host, and in storage, when the request arrived. The
            rest were on the device.
        completion_tokens: generated tokens, the end-of-sequence token included.
        queue_s: from arrival to the first admission (or to the end, if it was never admitted).
        ttft_s: from arrival to the first token; 0 if there was none.
        duration_s: from arrival to the end.
        prefixes: those that the request marks, each with how much of it the cache has in the end, and retains.
        phases: what it did when, for traces.
        explanation: where its prompt was found, and why the rest was computed; None: this was not asked for.
        weight_versions: the versions of the weights that generated its tokens, in order, each with how many; one with
            0 if it generated none: then its scores are of that version.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    ttft_s: float
    duration_s: float
    host_tokens: int = 0
    storage_tokens: int = 0
    prefixes: tuple[tuple[Prefix, Kept], ...] = ()
    phases: tuple[Phase, ...] = field(default=(), compare=False, repr=False)
    explanation: Stretches | None = field(default=None, compare=False, repr=False)
    weight_versions: tuple[tuple[int, int], ...] = ((0, 0),)


@dataclass(frozen=True, slots=True)
class Delta:
    """One event of a stream.

    Args:
        text: text that is safe to show: never part of a character, never the possible start of a stop text, unless the
            request has `content`.
        tokens: tokens generated since the last event.
        logprobs: one for each of the tokens, if requested.
        finish_reason: None until the last event; then "stop", "length", "cancelled" or "error".
        usage: on the last event.
        error: what went wrong, if the reason is "error".
        stop: the stop text that ended the text, if one did; on the last event.
        prompt_logprobs: one for each token of the prompt from `logprob_start` on, if requested: before or with the
            first token.
        embedding: float32 [size], of length 1: the mean of the prompt's last hidden states, if requested.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None
    stop: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """All of one request's output."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Progress:
    """The prompt tokens whose KV is present, cached or computed, and the prompt's length."""

    done: int
    total: int


def _require(name: str, value: object, allowed: bool, range_: str) -> None:
    if not allowed:
        raise BadArgument(name, value, range_)
