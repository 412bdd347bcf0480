"""What each client sent in `make test-clients` is accepted, with the same fields ignored.

MAINSTEM_RECORD=1 keeps the names of the fields that are ignored now, where the server has come to honour more.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from rigs.client_calls import RECORDED, keep, kept, sent_again
from rigs.scripted_model import scripted_app

CLIENTS = sorted(path.stem for path in RECORDED.glob("*.json"))


@pytest.mark.parametrize("client", CLIENTS)
def test_what_a_client_sends(client: str) -> None:
    pairs = list(sent_again(kept(client), scripted_app()[0]))
    for before, now in pairs:
        assert now.status == before.status, f"{before.path}: {now.reply[:1000]}"
    if os.environ.get("MAINSTEM_RECORD"):
        keep(client, [replace(before, ignored=now.ignored) for before, now in pairs])
    assert [now.ignored for _, now in pairs] == [before.ignored for before in kept(client)]
