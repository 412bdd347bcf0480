"""What each client sent in `make test-clients` is accepted, with the same fields ignored.

MAINSTEM_RECORD=1 keeps the names of the fields that are ignored now, where the server has come to honour more.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import pytest
from rigs.client_calls import RECORDED, keep, kept, sent_again
from rigs.scripted_model import scripted_app

from tests.server.test_clients import ROOT, SCRIPTED

PINS = ROOT / "tests" / "clients"

CLIENTS = sorted(path.stem for path in RECORDED.glob("*.json"))


@pytest.mark.parametrize("client", CLIENTS)
def test_what_a_client_sends(client: str) -> None:
    pairs = list(sent_again(kept(client), scripted_app()[0]))
    for before, now in pairs:
        assert now.status == before.status, f"{before.path}: {now.reply[:1000]}"
    if os.environ.get("MAINSTEM_RECORD"):
        keep(client, [replace(before, ignored=now.ignored) for before, now in pairs])
    assert [now.ignored for _, now in pairs] == [before.ignored for before in kept(client)]


def test_every_agent_of_the_lane_is_recorded() -> None:
    assert sorted(client.name for client in SCRIPTED) == CLIENTS


def test_the_page_of_clients_has_the_versions_that_are_tried() -> None:
    pinned = {line.strip() for path in PINS.glob("*.txt") for line in path.read_text().splitlines()}
    node = json.loads((PINS / "package.json").read_text())["dependencies"]
    rows = (ROOT / "docs" / "clients.md").read_text().partition("<!-- clients -->")[2].splitlines()[3:-1]
    for row in rows:
        shown = re.findall(r"`([^`]+)` (\d[\d.]*\d)", row.split("|")[2])
        assert shown, row
        assert [each for each in shown if "==".join(each) not in pinned and node.get(each[0]) != each[1]] == []
