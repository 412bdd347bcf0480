"""What a server says about itself."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem import __version__
from mainstem.server.app import create_app
from mainstem.settings.server import ServerConfig

ANTHROPIC = {"anthropic-version": "2023-06-01"}


def server(**config: Any) -> TestClient:
    engine = FakeEngine()
    engine.adapters = ("french", "legal")
    return TestClient(create_app(engine, ServerConfig(**config), now=lambda: 86400.0))  # type: ignore[arg-type]


def test_anthropics_clients_get_models_in_the_form_of_their_api() -> None:
    with anthropic.Anthropic(base_url="http://testserver", api_key="none", http_client=server()) as client:
        models = list(client.models.list(limit=2))
        assert [model.id for model in models] == ["fake", "french", "legal"], "over two pages"
        assert models[0].max_input_tokens == 4096 and models[0].created_at.year == 1970
        assert client.models.retrieve("french").display_name == "french"
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.models.retrieve("none")
        assert caught.value.request_id, "of the header request-id"


def test_openais_clients_get_theirs() -> None:
    with openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=server()) as client:
        assert [model.id for model in client.models.list()] == ["fake", "french", "legal"]
        assert client.models.retrieve("french").owned_by == "mainstem"
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("none")
        assert caught.value.code == "model_not_found"


def test_the_whole_body_of_a_list() -> None:
    body = server().get("/v1/models?limit=1", headers=ANTHROPIC).json()
    one = {"id": "fake", "display_name": "fake", "created_at": "1970-01-02T00:00:00Z", "type": "model"}
    sizes = {"max_input_tokens": 4096, "max_tokens": 4096, "lifecycle": "active"}
    assert body == {"data": [{**one, **sizes}], "has_more": True, "first_id": "fake", "last_id": "fake"}


def test_errors_about_models_have_the_form_of_the_clients_api() -> None:
    for path in ("/v1/models/none", "/v1/models?after_id=none"):
        assert server().get(path, headers=ANTHROPIC).json()["type"] == "error"
    assert set(server().get("/v1/models/none").json()) == {"error"}
    assert server(api_key=("k",)).get("/v1/models", headers=ANTHROPIC).json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", ["/health", "/ping"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_probes(path: str, method: str) -> None:
    made = server(api_key=("k",))
    assert made.request(method, path).status_code == 200
    made.app.state.draining = True  # type: ignore[attr-defined]
    assert made.request(method, path).status_code == 503
    assert made.post("/ping").json() == {"status": "draining"}


def test_the_page_at_the_root_says_where_what_is() -> None:
    page = server().get("/")
    assert page.headers["content-type"].startswith("text/html") and __version__ in page.text and "fake" in page.text
    for path in ("/v1/models", "/cache", "/openapi.json", "/metrics", "/health"):
        assert f'href="{path}"' in page.text and server().get(path).status_code == 200
    assert server().head("/").status_code == 200
    keyed = server(api_key=("k",))
    assert "fake" not in keyed.get("/").text and "/cache" in keyed.get("/").text
    assert "fake" in keyed.get("/", headers={"Authorization": "Bearer k"}).text


def test_a_name_on_the_page_is_text() -> None:
    assert "<b>" not in server(served_model_name=("<b>",)).get("/").text
