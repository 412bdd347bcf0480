"""The manifests of deploy/kubernetes: fields that the API has, flags that the server has, names that fit each other.

The router of the manifests runs before two servers, with the flags of the manifests.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from machine import eventually
from rigs.servers import free_port, start
from rigs.serving import PATIENCE_S, Serve, server_of, tiny_folder, unlike

from mainstem.settings.engine import EngineConfig, ModelConfig
from mainstem.settings.mapping import names_of, read_settings
from mainstem.settings.server import ServerConfig

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OBJECTS: list[dict[str, Any]] = [
    one for path in sorted(FOLDER.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())
]
TOKENS = 20 * 16 + 1
PYTHON = ROOT / ".venv-fleet" / "bin" / "python"
ROUTER = ROOT / ".venv-fleet" / "bin" / "smg"
needs_models = pytest.mark.skipif(not PYTHON.exists(), reason="no Ray in .venv-fleet, nor Kubernetes' models")


def find(kind: str, name: str = "mainstem") -> dict[str, Any]:
    [found] = [one for one in OBJECTS if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def container() -> dict[str, Any]:
    [found] = find("Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def wrong(objects: list[dict[str, Any]]) -> list[str]:
    """Returns what the models of the official client say against some objects."""
    script = Path(__file__).parents[1] / "rigs" / "kubernetes_models.py"
    done = subprocess.run(
        [str(PYTHON), str(script)], input=json.dumps(objects), capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.splitlines()


@needs_models
def test_every_field_is_one_of_the_api() -> None:
    assert {one["kind"] for one in OBJECTS} >= {"Deployment", "Service", "ConfigMap", "Role", "PodDisruptionBudget"}
    assert wrong(OBJECTS) == []


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown": (lambda pod: pod["containers"][0].update(envs=[]), "has no such field"),
    "deep": (lambda pod: pod["containers"][0]["readinessProbe"]["httpGet"].update(paths="/"), "has no such field"),
    "type": (lambda pod: pod.update(terminationGracePeriodSeconds="90"), "is not int"),
    "missing": (lambda pod: pod["containers"][0].pop("name"), "is required"),
    "list": (lambda pod: pod.update(volumes={"name": "a"}), "not a list"),
}


@needs_models
@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_field_is_found(change: str) -> None:
    made = copy.deepcopy(find("Deployment"))
    apply, says = CHANGES[change]
    apply(made["spec"]["template"]["spec"])
    [line] = wrong([made])
    assert says in line


def test_flags_are_those_of_the_server_and_values_are_in_range(tmp_path: Path) -> None:
    values = {name.upper().replace("-", "_"): value for name, value in find("ConfigMap")["data"].items()}
    command, model, *flags = [
        re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], each) for each in container()["args"]
    ]
    assert (command, model) == ("serve", "/models/my-model")
    given = dict(flag.removeprefix("--").partition("=")[::2] for flag in flags)
    given = {name.replace("-", "_"): value for name, value in given.items()}
    known = {kind: names_of(kind) for kind in (EngineConfig, ServerConfig, ModelConfig)}
    assert not given.keys() - set().union(*known.values())
    assert given["unknown_fields"] == "warn"  # see the test of the router
    typed: dict[str, Any] = {**given, "warm": True, "port": 8000, "drain_timeout_s": 60, "kv_events_keys": tmp_path}
    typed["peers"] = (given["peers"],)
    secret = {"MAINSTEM_STORAGE_SECRET": "s" * 32, "MAINSTEM_API_KEY": "a", "MAINSTEM_ADMIN_KEY": "b"}
    for kind, names in known.items():
        read_settings(kind, {name: typed[name] for name in given if name in names}, environment=secret)
    service = find("Service")
    assert given["peers"] == f"dns:{service['metadata']['name']}:7100" and service["spec"]["clusterIP"] == "None"
    grace_s = find("Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= float(given["drain_timeout_s"]) + 15


def test_secrets_are_named_and_never_written_down() -> None:
    assert not [one for one in OBJECTS if one["kind"] == "Secret"]
    env = {each["name"]: each for each in container()["env"]}
    for name in ("MAINSTEM_STORAGE_SECRET", "MAINSTEM_API_KEY", "MAINSTEM_ADMIN_KEY"):
        assert env[name]["valueFrom"]["secretKeyRef"]["name"] == "mainstem"
    known = set(find("ConfigMap")["data"])
    assert {
        each["valueFrom"]["configMapKeyRef"]["key"] for each in env.values() if "configMapKeyRef" in each["valueFrom"]
    } == known


def test_names_fit_each_other() -> None:
    pod = find("Deployment")["spec"]["template"]
    ports = {each["name"]: each["containerPort"] for each in container()["ports"]}
    assert {each["targetPort"] for each in find("Service")["spec"]["ports"]} == set(ports)
    assert ports == {"http": 8000, "events": 5557, "replays": 5558, "peers": 7100}
    assert find("Service")["spec"]["selector"] == pod["metadata"]["labels"] == {"app": "mainstem"}
    volumes = {each["name"] for each in pod["spec"]["volumes"]}
    mounts = [
        mount for each in [*pod["spec"]["containers"], *pod["spec"]["initContainers"]] for mount in each["volumeMounts"]
    ]
    assert {mount["name"] for mount in mounts} == volumes
    assert "/keys" in {mount["mountPath"] for mount in container()["volumeMounts"]}
    [router] = find("Deployment", "mainstem-router")["spec"]["template"]["spec"]["containers"]
    assert "--selector app=mainstem --service-discovery-port 8000" in router["args"][0]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    model = tiny_folder("llama", tmp_path_factory.mktemp("models") / "tiny")
    return server_of(model, tmp_path_factory.mktemp("logs"), {"unknown-fields": "warn"})


@pytest.mark.deadline
@pytest.mark.skipif(not ROUTER.exists(), reason="no Ray in .venv-fleet, nor sglang-router")
def test_the_router_sends_a_prompt_where_its_prefix_is(serve: Serve, tmp_path: Path) -> None:
    [made] = find("Deployment", "mainstem-router")["spec"]["template"]["spec"]["containers"]
    assert "sglang-router==0.3.2" in made["args"][0]
    port, metrics = free_port(), free_port()
    with serve({}) as first, serve({}) as second:
        urls = [str(server.http.base_url) for server in (first, second)]
        command = [str(PYTHON), "-m", "sglang_router.launch_router", "--policy", "cache_aware", "--port", str(port)]
        with start([*command, "--worker-urls", *urls, "--prometheus-port", str(metrics)], port, timeout_s=60):
            url = f"http://127.0.0.1:{port}/v1/completions"
            eventually(lambda: httpx.post(url, json=body(9), timeout=PATIENCE_S).status_code == 200, 60)
            for number in (1, 2, 3):
                hits = [answer(url, number) for _ in range(3)]
                assert hits[1:] == [TOKENS - 1] * 2, hits


def body(number: int) -> dict[str, Any]:
    text = " ".join(f"w{token}" for token in unlike(number, TOKENS))
    return {"model": "tiny", "prompt": text, "max_tokens": 2, "temperature": 0}


def answer(url: str, number: int) -> int:
    reply = httpx.post(url, json=body(number), timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
