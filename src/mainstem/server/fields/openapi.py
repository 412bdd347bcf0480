"""Routes that describe themselves, and the description of all of them for programs: OpenAPI 3.1.

Protocol: https://spec.openapis.org/oas/v3.1.1. It is made from the types of bodies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from mainstem import __version__
from mainstem.server.errors import ErrorBody

_REFERENCE = "#/components/schemas/{name}"


class Operation(Route):
    """A route of one method, and its description.

    Args:
        method: of HTTP.
        path: as Starlette has it.
        endpoint: answers.
        summary: in a few words.
        request: the type of the body; None: there is none.
        response: the type of the response; None: any JSON object; `str`: text.
        event: the type of a stream's events, if it can be streamed; `dict`: any JSON object.
        open: whether it needs no key.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[..., Any],
        summary: str,
        request: type | None = None,
        response: type | None = None,
        event: type | None = None,
        *,
        open: bool = False,
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        self.method, self.summary, self.open = method, summary, open
        self.request, self.response, self.event = request, response, event

    @property
    def described_path(self) -> str:
        """The path as OpenAPI has it."""
        return re.sub(r":\w+}", "}", self.path)


def document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """Returns the description of the operations among some routes, as it is written in JSON."""
    operations = [route for route in routes if isinstance(route, Operation)]
    bodies = [body for each in operations for body in (each.request, each.response, each.event)]
    types = dict.fromkeys([ErrorBody, *(body for body in bodies if body not in (None, str))])
    references, schemas = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    by_type = dict(zip(types, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.described_path, {})[operation.method.lower()] = _described(operation, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Mainstem", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],  # without API keys none is needed
    }


def _described(operation: Operation, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    if operation.response is str:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": schemas.get(operation.response, {"type": "object"})}}
    if operation.event is not None:
        content["text/event-stream"] = {"schema": schemas[operation.event]}
    errors = {"application/json": {"schema": schemas[ErrorBody]}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "Success", "content": content},
            "default": {"description": "An error", "content": errors},
        },
    }
    if operation.param_convertors:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in operation.param_convertors
        ]
    if operation.request is not None:
        body = {"application/json": {"schema": schemas[operation.request]}}
        described["requestBody"] = {"required": True, "content": body}
    if operation.open:
        described["security"] = []
    return described
