"""POST /v1/score and /v1/rerank: how likely a model finds the first of some labels after a text, such as yes.

The bodies are those that clients of vLLM know. There the models are made for scores; here any model that generates text
judges by a template, and the score is the probability of the first label among all labels:

    template with both texts  ->  log-probability of each label after it  ->  softmax over the labels

The texts of a request share what their prompts begin with, which is computed once: by default the instruction and the
first text, so the query of a reranker.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType
from numpy.typing import NDArray
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mainstem.prompt_rules.rules import filled
from mainstem.runtime.request import Request
from mainstem.runtime.scoring import requests_of
from mainstem.server import errors
from mainstem.server.apis.bodies import decode_known
from mainstem.server.apis.embeddings import Compute
from mainstem.server.apis.replies import Generated, PromptTokensDetails, scores_of, usage_body
from mainstem.server.fields.rules import Field, Rules, Unheeded
from mainstem.server.parts import Parts
from mainstem.server.transport import json_response

MAX_TEXTS = 2048
"""Maximum number of pairs of texts of one HTTP request."""
MAX_CHARACTERS = 16 << 20
"""Maximum size of all its prompts together, each counted once for each label: a text may be in many pairs."""

TEMPLATE = (
    "Read the query and the text. Judge whether the text answers the query: yes or no.\n\n"
    "Query: {text_1}\n\nText: {text_2}\n\nAnswer:"
)
LABELS = (" yes", " no")
RULES = Rules({"user": Field("who asks")})

Label = Annotated[str, Meta(min_length=1)]
Labels = Annotated[list[Label], Meta(min_length=2, max_length=64)]


class _Judging(Struct, kw_only=True):
    """The fields of both routes.

    Args:
        template: the prompt, with `{text_1}` and `{text_2}` for the texts; of a reranker the query and the document.
        labels: what the model may say after it, by default `LABELS`; the score is the probability of the first one.
    """

    model: str
    template: str = TEMPLATE
    labels: Labels | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None


class ScoreRequest(_Judging, kw_only=True):
    """The body of POST /v1/score: pairs of texts. One text on either side stands in all pairs."""

    text_1: str | list[str]
    text_2: str | list[str]


class RerankRequest(_Judging, kw_only=True):
    """The body of POST /v1/rerank: a query, and the documents to sort by how well they answer it."""

    query: str
    documents: Annotated[list[str], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None


class ScoreUsage(Struct):
    """The tokens of all prompts, each with its labels."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    weight_versions: list[list[Generated]] | UnsetType = UNSET


class ScoreItem(Struct):
    """The score of one pair, from 0 to 1."""

    index: int
    score: float
    object: str = "score"


class ScoreList(Struct):
    """The response of POST /v1/score."""

    id: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: ScoreUsage
    object: str = "list"


class Document(Struct):
    """A document of a reranker."""

    text: str


class Ranked(Struct):
    """A document's place in the request, and its score."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RankedList(Struct):
    """The response of POST /v1/rerank, the best document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: ScoreUsage


@dataclass(frozen=True, slots=True)
class Judged:
    """A request that can run.

    Args:
        body: of the client.
        requests: one for each label of each pair, adjacent.
    """

    body: ScoreRequest | RerankRequest
    requests: list[Request]


Answer: TypeAlias = Callable[[HttpRequest, Unheeded], Awaitable[Response]]
"""Answers a request, and adds its fields that do nothing."""


class Scores:
    """The routes.

    Args:
        parts: of the server.
        compute: runs the prompts.
    """

    def __init__(self, parts: Parts, compute: Compute) -> None:
        self._parts, self._compute = parts, compute
        self._access, self._preparation = parts.access, parts.preparation

    def routes(self) -> Iterator[tuple[str, Answer, str, type[Struct], type[Struct]]]:
        """Yields path, answer, summary, and the types of both bodies of each route; clients know several paths."""
        for path in ("/v1/score", "/score"):
            yield path, self.score, "Score pairs of texts", ScoreRequest, ScoreList
        for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
            yield path, self.rerank, "Sort documents by how well they answer a query", RerankRequest, RankedList

    async def score(self, http: HttpRequest, unheeded: Unheeded) -> Response:
        """Answers with the score of each pair.

        Raises:
            ApiError, MainstemError, ClientDisconnect: it cannot be answered.
        """
        judged, found, usage = await self._judge(http, ScoreRequest, unheeded)
        data = [ScoreItem(i, score) for i, score in enumerate(found)]
        head = f"score-{uuid.uuid4().hex}", int(self._parts.now()), self._model(judged.body)
        return json_response(ScoreList(*head, data, usage))

    async def rerank(self, http: HttpRequest, unheeded: Unheeded) -> Response:
        """Answers with the documents in the order of their scores.

        Raises:
            ApiError, MainstemError, ClientDisconnect: it cannot be answered.
        """
        judged, found, usage = await self._judge(http, RerankRequest, unheeded)
        body = judged.body
        assert isinstance(body, RerankRequest)
        best = sorted(range(len(found)), key=lambda i: (-found[i], i))[: body.top_n or None]
        shown = body.return_documents is not False
        results = [Ranked(i, found[i], Document(body.documents[i]) if shown else UNSET) for i in best]
        return json_response(RankedList(f"rerank-{uuid.uuid4().hex}", self._model(body), results, usage))

    async def _judge(
        self, http: HttpRequest, kind: type[ScoreRequest] | type[RerankRequest], unheeded: Unheeded
    ) -> tuple[Judged, list[float], ScoreUsage]:
        tenant = self._access.tenant(http.headers)
        if self._parts.draining():
            raise errors.draining()

        def made(body: bytes) -> Judged:
            return self._made(decode_known(body, kind, unheeded, RULES), tenant)

        judged = await self._parts.bodies.parsed(http, made)
        answers = await self._compute(http, judged.body, judged.requests, tenant)
        likely = [sum(score.logprob for score in scores_of(answer)) for answer in answers]
        labels = len(judged.body.labels or LABELS)
        found = [first_of(likely[at : at + labels]) for at in range(0, len(likely), labels)]
        usages = [answer[-1].usage for answer in answers]
        usage = usage_body([each for each in usages if each is not None], 1)
        counted = usage.prompt_tokens, usage.prompt_tokens, usage.prompt_tokens_details, usage.weight_versions
        return judged, found, ScoreUsage(*counted)

    def _made(self, body: ScoreRequest | RerankRequest, tenant: bytes | None) -> Judged:
        """Makes the prompts of a request."""
        self._preparation.check_model(body.model)
        for name in ("{text_1}", "{text_2}"):
            if body.template.count(name) != 1:
                raise errors.wrong("template", f"must have {name} once")
        namespace = self._preparation.namespace(body.model, body.cache_salt, tenant if self._access.separates else None)
        labels = [self._label(at, label) for at, label in enumerate(body.labels or LABELS)]
        pairs, name = pairs_of(body), _VARIED[type(body)]
        size = sum(len(body.template) + len(one) + len(other) for one, other in pairs) * len(labels)
        if size > MAX_CHARACTERS:
            raise errors.wrong(
                name, f"at most {MAX_CHARACTERS:,} characters in all prompts, with each label; these have {size:,}"
            )
        made: list[Request] = []
        for at, pair in enumerate(pairs):
            with errors.client_names({"prompt": f"{name}[{at}]"}):
                context = self._prompt(body.template, *pair)
                self._preparation.prompts.check_length(len(context) + max(map(len, labels)), "prompt")
            made += requests_of(context, labels, namespace, keep=True)
        return Judged(body, made)

    def _prompt(self, template: str, one: str, other: str) -> NDArray[np.int32]:
        """Returns the prompt of a pair, in whose texts control tokens are text."""
        prompts = self._preparation.prompts
        texts = {"{text_1}": prompts.escapes.text(one, name="text_1")}
        texts["{text_2}"] = prompts.escapes.text(other, name="text_2")
        return prompts.text(prompts.escapes.rendered(filled(template, texts)), escaped=True)

    def _label(self, at: int, label: str) -> NDArray[np.int32]:
        with errors.client_names({"prompt": f"labels[{at}]"}):
            return self._preparation.prompts.text(label, special_tokens=False, parse_special=False)

    def _model(self, body: ScoreRequest | RerankRequest) -> str:
        return self._preparation.adapter(body.model) or self._preparation.names[0]


def first_of(logprobs: Sequence[float]) -> float:
    """Returns the probability of the first of some labels, if the model says one of them.

    Args:
        logprobs: of each label; if all of them are impossible, they are equally likely.
    """
    most = max(logprobs)
    shares = [math.exp(each - most) if most > -math.inf else 1.0 for each in logprobs]
    return shares[0] / sum(shares)


_VARIED = {ScoreRequest: "text_2", RerankRequest: "documents"}
"""The field that a pair is named by in errors."""


def pairs_of(body: ScoreRequest | RerankRequest) -> list[tuple[str, str]]:
    """Returns the pairs of a request.

    Raises:
        ApiError: 400; there are too many, or the two sides have different numbers.
    """
    if isinstance(body, RerankRequest):
        one, other = [body.query], body.documents
    else:
        one, other = ([each] if isinstance(each, str) else each for each in (body.text_1, body.text_2))
    most, name = max(len(one), len(other)), _VARIED[type(body)]
    if not one:
        raise errors.wrong("text_1", "must have one text or more")
    if not other or min(len(one), len(other)) not in (1, most):
        raise errors.wrong(name, f"must be one text, or as many as text_1, which is {len(one)}; there are {len(other)}")
    if most > MAX_TEXTS:
        raise errors.wrong(name, f"at most {MAX_TEXTS} pairs in a request")
    one, other = (each * most if len(each) == 1 else each for each in (one, other))
    return list(zip(one, other, strict=True))
