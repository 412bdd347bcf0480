"""The fleet's calls of Ray and Ray Serve, over a double of both: what is deployed, looked at, waited for and ended."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doubles.ray_interface import (
    DeploymentUnavailableError,
    Handle,
    NodeDiedError,
    ObjectLostError,
    Ray,
    RayActorError,
    RayServeException,
    Status,
    WorkerCrashedError,
    app,
    ray_double,
    replica,
)

from mainstem.cache.namespaces import Namespace
from mainstem.events.source import PUBLIC_SECRET, BlockStored, salt_id
from mainstem.fleet.front import process
from mainstem.fleet.front.app import Counts
from mainstem.fleet.front.asking import Ask, Head, Prompt, ReplicaLost
from mainstem.fleet.place import FleetError
from mainstem.fleet.replica import DRAIN
from mainstem.settings.engine import EngineConfig
from mainstem.settings.fleet import Autoscaling, FleetConfig, PrefillSize
from mainstem.settings.server import ServerConfig

pytest.importorskip("zmq", reason="pyzmq is not installed")

LOST = (RayActorError, NodeDiedError, ObjectLostError, WorkerCrashedError)
UP = app(Status.RUNNING, engine=(Status.HEALTHY, {"RUNNING": 2}, ""), front=(Status.HEALTHY, {"RUNNING": 1}, ""))


class Time:
    """A clock that only sleeping advances."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept.append(seconds)


@pytest.fixture
def ray() -> Ray:
    return Ray()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def serving(ray: Ray, time: Time, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(process, "ROUTERS", {})
    monkeypatch.setattr(process, "SECRET", [PUBLIC_SECRET])
    with ray_double(ray) as module:
        monkeypatch.setattr(module, "time", time)
        monkeypatch.setattr(module, "stay_on_loopback", lambda: ray.calls.append(("stay on loopback",)))
        monkeypatch.setattr(module, "listen_on_loopback", lambda: ray.calls.append(("listen on loopback",)))
        yield module


# ---------------------------------------------------------------- what is deployed


def deployed(serving: Any, ray: Ray, config: FleetConfig, cores: int = 8) -> Any:
    ray.status = lambda looks: UP
    serving.deploy(config, cores, lambda words: None)
    return next(call for call in ray.calls if call[0] == "serve.run_many")


def test_a_fleet_is_engines_and_a_front_before_them(serving: Any, ray: Ray) -> None:
    config = FleetConfig(port=9000, gpus=0.5, server=ServerConfig(drain_timeout_s=7.0))
    _, target, *waits = deployed(serving, ray, config)
    assert ("serve.start", ("proxy_location", "HeadOnly"), ("http_options", {"host": "127.0.0.1", "port": 9000})) in (
        ray.calls
    )
    assert waits == [("wait_for_ingress_deployment_creation", False), ("wait_for_applications_running", False)]
    front = target.target
    engines, computing, given = front.arguments
    assert (target.name, target.route_prefix, target.external_scaler_enabled) == ("mainstem", "/", True)
    assert (front.made_of, engines.made_of) == (serving.ServedFront, serving.ServedReplica)
    assert (computing, given, engines.arguments) == (None, config, (config, 4, "both", None))
    common = {
        "graceful_shutdown_timeout_s": 22.0,  # 15 s beyond those for requests
        "graceful_shutdown_wait_loop_s": 0.2,
        "max_ongoing_requests": 10_000,
    }
    router = engines.given.pop("request_router_config")
    assert vars(router) == {
        "request_router_class": "mainstem.fleet.serving.FleetRouter",
        "request_routing_stats_period_s": 1.0,
    }
    assert engines.given == {
        **common,
        "name": "engine",
        "num_replicas": 2,
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 60.0,
        "ray_actor_options": {"num_cpus": 0.01, "num_gpus": 0.5},
    }
    assert front.given == {**common, "name": "front", "ray_actor_options": {"num_cpus": 0.01}}


def test_cores_are_those_of_the_file_or_are_shared(serving: Any, ray: Ray) -> None:
    engines = deployed(serving, ray, FleetConfig(cpus=3.0))[1].target.arguments[0]
    assert (engines.given["ray_actor_options"]["num_cpus"], engines.arguments[1]) == (3.0, 3)
    ray.calls.clear()
    assert deployed(serving, ray, FleetConfig(replicas=5), cores=2)[1].target.arguments[0].arguments[1] == 1


def test_the_load_scales_engines_if_the_file_says_so(serving: Any, ray: Ray) -> None:
    scaling = Autoscaling(min=2, max=5, target_ongoing=3.0, window_s=7.0)
    target = deployed(serving, ray, FleetConfig(autoscaling=scaling))[1]
    given = target.target.arguments[0].given
    assert not target.external_scaler_enabled
    assert "num_replicas" not in given
    found = vars(given["autoscaling_config"])
    policy = vars(found.pop("policy"))
    assert found == {"min_replicas": 2, "max_replicas": 5, "target_ongoing_requests": 3.0}
    assert policy["policy_function"] == "mainstem.fleet.front.policy:ReplicaPolicy"
    assert Autoscaling(**policy["policy_kwargs"]) == scaling


def test_those_that_compute_prompts_alone_are_known_to_those_that_answer_and_to_the_front(
    serving: Any, ray: Ray
) -> None:
    tiers = replace(EngineConfig().tiers, peers=replace(EngineConfig().tiers.peers, peer_listen="127.0.0.1:0"))
    config = FleetConfig(prefill=PrefillSize(replicas=3), engine=EngineConfig(tiers=tiers))
    engines, computing, _ = deployed(serving, ray, config, cores=10)[1].target.arguments
    assert (computing.given["name"], computing.given["num_replicas"]) == ("prefill", 3)
    assert computing.arguments == (config, 2, "prefill")
    assert engines.arguments == (config, 2, "both", computing)
    assert (engines.given["name"], engines.given["num_replicas"]) == ("engine", 2)


def test_a_process_listens_on_loopback_and_knows_the_secret_unless_nodes_are_elsewhere(serving: Any, ray: Ray) -> None:
    tiers = replace(EngineConfig().tiers, storage_secret=b"s" * 16)
    serving._begin(FleetConfig(engine=EngineConfig(tiers=tiers)))
    assert (ray.calls, process.SECRET[-1]) == ([("listen on loopback",)], b"s" * 16)
    serving._begin(FleetConfig(node_host="10.0.0.1"))
    assert (len(ray.calls), process.SECRET[-1]) == (1, PUBLIC_SECRET)


# ---------------------------------------------------------------- waiting until it is up


def test_each_change_of_state_is_said_once_until_all_is_healthy(serving: Any, ray: Ray, time: Time) -> None:
    starting = app(
        Status.DEPLOYING,
        engine=(Status.UPDATING, {"STARTING": 2, "RUNNING": 0}, ""),
        front=(Status.UPDATING, {"STARTING": 1}, ""),
    )
    almost = app(
        Status.RUNNING,
        engine=(Status.UNHEALTHY, {"RUNNING": 1, "STARTING": 1}, ""),
        front=(Status.HEALTHY, {"RUNNING": 1}, ""),
    )
    states = [None, None, starting, starting, almost, UP]
    ray.status = states.__getitem__
    said: list[str] = []
    serving._wait(600.0, said.append)
    assert said == [
        "waiting for Ray Serve",
        "engine: 2 starting, front: 1 starting",
        "engine: 1 running 1 starting, front: 1 running",
        "engine: 2 running, front: 1 running",
    ]
    assert time.slept == [0.25] * 5


@pytest.mark.parametrize("state", [None, app(Status.DEPLOYING, engine=(Status.HEALTHY, {"RUNNING": 2}, ""))])
def test_a_fleet_that_does_not_come_up_is_given_up_in_time(serving: Any, ray: Ray, time: Time, state: Any) -> None:
    ray.status = lambda looks: state
    words = "waiting for Ray Serve" if state is None else "engine: 2 running"
    with pytest.raises(FleetError, match=rf"^the fleet has not started in 10 s: {words}$"):
        serving.deploy(FleetConfig(start_timeout_s=10.0), 2, lambda words: None)
    assert time.slept == [0.25] * 40


@pytest.mark.parametrize(
    ("message", "parts", "cause"),
    [
        ("failed\n", "Traceback:\n  mainstem.errors.X: no\nretried", "mainstem.errors.X: no"),
        ("one\ntwo\n\n", "", "two"),
        ("", " \n", "(no message)"),
    ],
)  # fmt: skip
def test_why_it_failed_is_one_line(serving: Any, ray: Ray, message: str, parts: str, cause: str) -> None:
    ray.status = lambda looks: app(Status.DEPLOY_FAILED, message, engine=(Status.UNHEALTHY, {}, parts))
    with pytest.raises(FleetError) as caught:
        serving._wait(10.0, lambda words: None)
    assert str(caught.value) == f"the fleet did not start: {cause}"


# ---------------------------------------------------------------- the commands


def test_a_command_connects_to_the_ray_of_this_user(serving: Any, ray: Ray) -> None:
    serving.connect("127.0.0.1:7")
    named = {"address": "127.0.0.1:7", "namespace": "mainstem", "log_to_driver": False, "logging_level": "ERROR"}
    assert ray.calls == [("stay on loopback",), ("init", *named.items())]
    serving.disconnect()
    assert not ray.up


@pytest.mark.parametrize(
    ("error", "line"), [(OSError("a\n no such host \n\n"), "no such host"), (ValueError(), "ValueError")]
)
def test_a_ray_that_does_not_answer_is_one_line(serving: Any, ray: Ray, error: Exception, line: str) -> None:
    ray.failure = error
    with pytest.raises(FleetError) as caught:
        serving.connect("a:7")
    assert str(caught.value) == f"Ray at a:7 cannot be reached: {line}"


def test_the_status_is_that_of_the_deployments_and_what_the_front_says(serving: Any, ray: Ray) -> None:
    ray.status = lambda looks: app(Status.DEPLOYING, engine=(Status.UPDATING, {"RUNNING": 2, "STARTING": 0}, ""))
    ray.answer = lambda name: {"running": 3, "asked": name}
    parts = {"engine": {"status": "UPDATING", "replicas": {"RUNNING": 2}}}
    assert serving.status() == {"status": "DEPLOYING", "deployments": parts, "running": 3, "asked": "describe"}
    assert ray.front.waits == [10.0]


@pytest.mark.parametrize("error", [RayServeException(), TimeoutError(), *(each() for each in LOST)], ids=repr)
def test_without_an_answer_of_the_front_there_is_the_status_of_the_deployments(
    serving: Any, ray: Ray, error: Exception
) -> None:
    ray.status, ray.answer = lambda looks: UP, lambda name: error
    assert serving.status().keys() == {"status", "deployments"}


def test_a_ray_without_a_fleet_is_one_line(serving: Any) -> None:
    for call in (serving.status, lambda: serving.scale(2, 1.0)):
        with pytest.raises(FleetError, match=r"^Ray runs, but no fleet is on it$"):
            call()


def test_scaling_waits_until_there_are_as_many_and_no_others(serving: Any, ray: Ray, time: Time) -> None:
    counts: list[dict[str, int]] = [
        {"RUNNING": 2},  # the look before it begins
        {"RUNNING": 2},
        {"RUNNING": 3, "STARTING": 1},
        {"RUNNING": 3, "STOPPING": 1},
        {"RUNNING": 3, "STOPPING": 0},
    ]
    asked: list[tuple[Any, ...]] = []
    ray.answer = lambda *arguments: asked.append(arguments)
    ray.status = lambda looks: app(Status.RUNNING, engine=(Status.HEALTHY, counts[looks], ""))
    serving.scale(3, 60.0)
    assert asked == [("update_deployment_replicas", "id of engine", 3)]
    assert time.slept == [0.25] * 3


def test_scaling_that_does_not_come_about_is_given_up_in_time(serving: Any, ray: Ray, time: Time) -> None:
    ray.status = lambda looks: app(Status.RUNNING, prefill=(Status.HEALTHY, {"RUNNING": 2}, ""))
    with pytest.raises(FleetError, match=r"^there are not 3 replicas after 5 s: prefill: 2 running$"):
        serving.scale(3, 5.0, serving.PREFILL)
    assert time.slept == [0.25] * 20


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("x external_scaler_enabled y"), "with `autoscaling`, the file of the fleet says how many"),
        (ValueError("a\nb"), "the number of replicas cannot be set: b"),
    ],
)
def test_why_replicas_cannot_be_scaled_is_one_line(serving: Any, ray: Ray, error: Exception, said: str) -> None:
    ray.status, ray.answer = lambda looks: UP, lambda *arguments: error
    with pytest.raises(FleetError, match=f"^{said}"):
        serving.scale(3, 5.0)
    with pytest.raises(FleetError, match=r"^no replicas compute prompts alone"):
        serving.scale(3, 5.0, serving.PREFILL)


@pytest.mark.parametrize("ended", [True, False])
def test_draining_waits_ten_seconds_longer_than_the_front(serving: Any, ray: Ray, ended: bool) -> None:
    asked: list[tuple[Any, ...]] = []
    ray.answer = lambda *arguments: asked.append(arguments) or ended
    assert serving.drain(30.0) is ended
    assert (asked, ray.front.waits) == ([("drain", 30.0)], [40.0])


def test_renewing_names_a_replica_that_is_there(serving: Any, ray: Ray) -> None:
    ray.answer = lambda name, one: (name, one) == ("renew", "r1")
    serving.renew("r1")
    assert ray.front.waits == [10.0]
    with pytest.raises(FleetError, match=r"^there is no replica r2 that takes requests"):
        serving.renew("r2")


def test_what_is_not_connected_is_not_shut_down(serving: Any, ray: Ray) -> None:
    serving.shut_down()
    assert ray.calls == []


@pytest.mark.parametrize("error", [None, RayServeException(), *(each() for each in LOST)], ids=repr)
def test_ray_is_left_though_serve_has_ended(serving: Any, ray: Ray, error: Exception | None) -> None:
    ray.up, ray.failure = True, error
    serving.shut_down()
    assert [call[0] for call in ray.calls] == ["serve.shutdown", "shutdown"]


# ---------------------------------------------------------------- the router


class Followed:
    """Stands for `Following`, which has a thread and sockets."""

    def __init__(self, apply: Callable[..., None]) -> None:
        self.apply, self.bad, self.told = apply, 3, list[Any]()

    def follow(self, replicas: Any) -> None:
        self.told.append(dict(replicas))


@pytest.fixture
def router(serving: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(serving, "Following", Followed)
    return serving.FleetRouter("engine")


def pending(ask: Ask | None) -> Any:
    return SimpleNamespace(args=("other", *([] if ask is None else [ask])))


def choose(router: Any, replicas: list[Any], ask: Ask | None) -> list[list[str]]:
    found = asyncio.run(router.choose_replicas(replicas, pending(ask)))
    return [[each.replica_id.unique_id for each in rank] for rank in found]


PROMPT = Prompt(np.arange(64, dtype=np.int32))


def test_a_router_prefers_replicas_that_take_requests_and_did_not_fail_before(router: Any) -> None:
    replicas = [replica("a"), replica("b", draining=True), replica("c", draining=False)]
    router.update_replicas(replicas)
    ask = Ask("POST", "/", prompt=PROMPT)

    def ranked(ask: Ask, among: list[Any] = replicas) -> list[str]:
        return sorted(name for rank in choose(router, among, ask) for name in rank)

    assert ranked(ask) == ["a", "c"] and router.awake() == ["a", "c"]
    assert ranked(replace(ask, avoid=frozenset("a"))) == ["c"]
    assert ranked(replace(ask, avoid=frozenset("ac"))) == ["a", "c"]  # better again than never
    assert ranked(ask, replicas[1:2]) == ["b"]
    assert ranked(replace(ask, to="b")) == ["b"]
    assert ranked(replace(ask, to="gone")) == ["a", "c"]
    assert choose(router, replicas, None) == [["a", "b", "c"]]
    assert asyncio.run(router.choose_replicas(replicas)) == [replicas]


def test_a_router_reads_namespaces_with_the_newest_secret_of_its_process(serving: Any, router: Any) -> None:
    process.SECRET.append(b"s" * 16)
    newest = serving.FleetRouter("engine")
    assert process.ROUTERS["engine"] is newest
    space = Namespace(salt="tenant")
    prompt, salt = replace(PROMPT, namespace=space), salt_id(space, b"s" * 16)
    stored = BlockStored((1,), None, tuple(range(16)), 16, "GPU", None, salt)
    for each, found in ((newest, 16), (router, 0)):
        each.update_replicas([replica("a", page_size=16)])
        each._cost_router.apply("a", [stored])
        assert each._cost_router.match(prompt) == {"a": (found, found, found)}


def test_a_router_counts_what_it_sent_until_it_ends(router: Any) -> None:
    statistics = {"page_size": 16, "events": "tcp://1", "replay": "tcp://2"}
    replicas = [replica("a", **statistics), replica("b", **statistics)]
    router.update_replicas(replicas)
    assert router._following.told == [{"a": statistics, "b": statistics}]
    assert router._following.apply == router._cost_router.apply
    ask = Ask("POST", "/", prompt=PROMPT)

    def seconds(name: str) -> float:
        other = Prompt(np.arange(1000, 1064, dtype=np.int32))
        return next(each.seconds for each in router._cost_router.estimates(other, ["a", "b"]) if each.replica == name)

    idle_s = seconds("a")
    router.on_request_routed(pending(ask), replicas[0].replica_id, None)
    assert seconds("a") > seconds("b") == idle_s
    router.on_request_completed(replicas[0].replica_id, "id")
    assert seconds("a") == idle_s
    assert choose(router, replicas, ask)[0] == ["a"]  # which soon has it
    router.on_request_routed(pending(None), replicas[1].replica_id, None)
    assert router.index()["unreadable"] == 3
    router._cost_router.check()
    router.update_replicas(replicas[1:])
    assert router.awake() == ["b"] and router._following.told[-1] == {"b": statistics}
    router._cost_router.check()


# ---------------------------------------------------------------- the front and a replica


def served(serving: Any, router: Any, answers: dict[str, list[Any]]) -> tuple[Any, dict[str, Handle]]:
    """Makes the replicas of two deployments, of which each answers as it is said."""
    handles = {name: Handle(name, lambda _, ask, name=name: answers[name]) for name in ("engine", "prefill")}
    router.update_replicas([replica("a"), replica("b", draining=True)])
    serving.FleetRouter("prefill").update_replicas([replica("p", identity=1)])
    return serving._Served(*handles.values()), handles


async def taken(asked: Any) -> list[Any]:
    async with aclosing(asked) as pieces:
        return [piece async for piece in pieces]


def test_a_request_goes_to_the_deployment_that_has_the_replica(serving: Any, router: Any) -> None:
    head = Head(200, ((b"x-request-id", b"1"), (b"X-Request-Id", b"2"), (b"x-other", b"3")), "a")
    replicas, handles = served(serving, router, {"engine": [head, b"of a"], "prefill": [b"of p"]})
    assert (replicas.names(), replicas.everyone()) == (["a"], ["a", "p"])
    assert all(each.streams for each in handles.values())
    for to, found in ((None, [replace(head, headers=((b"x-other", b"3"),)), b"of a"]), ("p", [b"of p"])):
        assert asyncio.run(taken(replicas.ask(Ask("GET", "/", to=to)))) == found
    assert asyncio.run(taken(replicas.ask(Ask("GET", "/", to="gone"))))[-1] == b"of a"
    assert [len(each.calls) for each in handles.values()] == [2, 1]
    assert all(call.cancelled for each in handles.values() for call in each.calls)


@pytest.mark.parametrize(
    ("error", "refused"), [(DeploymentUnavailableError(), True), *((each(), False) for each in LOST)], ids=repr
)
def test_a_replica_that_ends_is_lost(serving: Any, router: Any, error: Exception, refused: bool) -> None:
    replicas, handles = served(serving, router, {"engine": [b"begun", error]})

    with pytest.raises(ReplicaLost) as caught:
        asyncio.run(taken(replicas.ask(Ask("GET", "/"))))
    assert caught.value.refused is refused
    assert handles["engine"].calls[0].cancelled


def front_of(serving: Any, replicas: Any) -> Any:
    made = object.__new__(serving.ServedFront)
    made._replicas, made._front = replicas, SimpleNamespace(counts=Counts(Counter(a=7), 1, 2, 3), running=4)
    return made


def test_a_front_describes_each_replica_with_its_answers(serving: Any, router: Any) -> None:
    replicas, _ = served(serving, router, {})
    seen = front_of(serving, replicas).describe()
    assert seen.pop("index") == router.index()
    assert seen == {
        "replicas": {"a": {"served": 7}, "b": {"draining": True, "served": 0}, "p": {"identity": 1, "served": 0}},
        "running": 4,
        "again": 1,
        "continued": 2,
        "broken": 3,
    }
    process.ROUTERS.clear()
    assert front_of(serving, replicas).describe()["index"] == {}


@pytest.mark.parametrize(
    ("name", "head", "renewed"),
    [("a", 200, True), ("p", 200, True), ("a", 503, False), ("b", 200, False), ("gone", 200, False)],
)
def test_a_replica_that_takes_requests_is_renewed(
    serving: Any, router: Any, name: str, head: int, renewed: bool
) -> None:
    asked: list[Ask] = []
    replicas, handles = served(serving, router, {})
    for each in handles.values():
        each._answer = lambda _, ask: asked.append(ask) or [Head(head, (), name)]
    assert asyncio.run(front_of(serving, replicas).renew(name)) is renewed
    assert [(ask.method, ask.to) for ask in asked] == [(DRAIN, name)] * (name in "ap")


def test_a_front_tells_replicas_of_their_peers_every_second_whatever_happens(
    serving: Any, router: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replicas, _ = served(serving, router, {})
    slept: list[float] = []
    told: list[list[str]] = []

    class Lists:
        async def update(self, stats: Any) -> None:
            told.append(sorted(stats))
            if len(told) == 2:
                raise ValueError("unreadable")

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 5:
            raise asyncio.CancelledError

    monkeypatch.setattr(serving, "asyncio", SimpleNamespace(sleep=sleep))
    with caplog.at_level(logging.ERROR), pytest.raises(asyncio.CancelledError):
        asyncio.run(front_of(serving, replicas)._update_peers(Lists()))
    assert slept == [1.0] * 5
    assert told == [["a", "b", "p"]] * 4
    assert [record.message for record in caplog.records] == ["replicas could not be told of their peers"]


@pytest.mark.parametrize("prefill", [False, True])
def test_a_front_is_up_when_a_replica_has_answered(
    serving: Any, router: Any, monkeypatch: pytest.MonkeyPatch, prefill: bool
) -> None:
    asked: list[str] = []
    handles = [Handle(name, lambda _, ask: asked.append(ask.path) or [b"1"]) for name in ("engine", "prefill")]
    monkeypatch.setattr("mainstem.runtime.models.loading.load_tokenizer", lambda model, most: ("tokenizer", model, 1))
    monkeypatch.setattr(serving, "Reading", lambda config, *loaded: SimpleNamespace(read=loaded[:2]))
    config = FleetConfig(model="m", server=ServerConfig(max_body_bytes=77))

    async def run() -> Any:
        made = object.__new__(serving.ServedFront)
        await made.__init__(handles[0], handles[1] if prefill else None, config)
        made._updating.cancel()
        return made

    made = asyncio.run(run())
    assert asked == ["/version"]
    assert made._front._read == ("tokenizer", "m")
    assert made._front._max_body_bytes == 77
    assert made._replicas._handles.keys() == ({"engine", "prefill"} if prefill else {"engine"})
    assert made.__serve_build_asgi_app__() is made._guard


@pytest.mark.parametrize(("node_host", "host"), [("127.0.0.1", "127.0.0.1"), ("10.0.0.1", "10.0.0.9")])
def test_a_replica_has_the_name_that_serve_gives_it_and_reports_its_process(
    serving: Any, monkeypatch: pytest.MonkeyPatch, node_host: str, host: str
) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(serving.Replica, "__init__", lambda self, *arguments: made.append(arguments))
    monkeypatch.setattr(serving.Replica, "where", lambda self: {"page_size": 16})
    monkeypatch.setattr(serving.Replica, "seen", lambda self: {"hits": 1.0})
    monkeypatch.setattr(serving.Replica, "close", lambda self: made.append(("closed",)))
    config = FleetConfig(node_host=node_host)
    one = serving.ServedReplica(config, 3, "prefill", Handle("prefill", lambda *_: None))
    assert made == [(config, "r1", 3, host, "prefill", None)]  # the file has no `prefill`
    assert one.record_routing_stats() == {"page_size": 16, "pid": serving.os.getpid()}
    assert one.record_autoscaling_stats() == {"hits": 1.0}
    asyncio.run(one.__del__())
    assert made.pop() == ("closed",)
    monkeypatch.setattr(serving.ServedReplica, "__del__", lambda self: None)
