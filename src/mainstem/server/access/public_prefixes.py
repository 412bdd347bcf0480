"""The file of `--public-prefix`: prefixes that all tenants share, a line of JSON each.

{"messages": [{"role": "system", "content": "You are the assistant of ..."}], "tools": [...]}
{"prompt": "..."}
"""

from __future__ import annotations

from pathlib import Path

from mainstem.errors import BadArgument
from mainstem.server.apis.bodies import decode_known
from mainstem.server.apis.chat.request import conversation
from mainstem.server.errors import ApiError
from mainstem.server.management import Named
from mainstem.server.preparation import Preparation
from mainstem.server.prompting import Tokens

_ALLOWED = 'a line with either {"messages": [...]} and perhaps "tools", or {"prompt": ...}'


def read_public_prefixes(path: Path, preparation: Preparation) -> list[Tokens]:
    """Reads the file, and returns the tokens of each prefix.

    Raises:
        BadArgument: see `parse_public_prefixes`, or a line cannot be rendered; the message names the line.
    """
    return [_tokens(prefix, place, preparation) for place, prefix in parse_public_prefixes(path)]


def parse_public_prefixes(path: Path) -> list[tuple[str, Named]]:
    """Reads the file, and returns each prefix and its place, FILE:LINE.

    Raises:
        BadArgument: it cannot be read, or a line is no prefix; the message names the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadArgument("public_prefix", str(path), f"a file of lines of JSON ({error})") from error
    return [
        (f"{path}:{number}", _parsed(line, f"{path}:{number}")) for number, line in enumerate(lines, 1) if line.strip()
    ]


def _parsed(line: bytes, place: str) -> Named:
    shown = line[:80].decode("utf-8", "replace")
    try:
        prefix = decode_known(line, Named)
    except ApiError as error:
        raise BadArgument(place, shown, f"{_ALLOWED}: {error}") from error
    whose = [name for name in ("model", "cache_salt", "api_key") if getattr(prefix, name) is not None]
    if whose or (prefix.prompt is None) == (prefix.messages is None):
        raise BadArgument(place, shown, _ALLOWED)
    return prefix


def _tokens(prefix: Named, place: str, preparation: Preparation) -> Tokens:
    try:
        if prefix.prompt is not None:
            return preparation.tokens(prefix.prompt)
        return preparation.prefixes(conversation(prefix.messages or [], prefix.tools), None)[-1]
    except ApiError as error:
        raise BadArgument(place, "prefix", f"{_ALLOWED}: {error}") from error
