"""The fleet on Ray Serve: the only module that imports Ray.

    Serve's HTTP proxy -> front (an ingress deployment) -> router -> replicas (a deployment of engines)
                                                                       -> router -> those that compute prompts alone

Serve starts processes, watches them, replaces those that end, and lets those that must go finish their requests. Ours
are the choice of a replica, the retries, and the answers to clients.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mainstem.events.source import PUBLIC_SECRET
from mainstem.fleet.front import policy as policy_module
from mainstem.fleet.front import process
from mainstem.fleet.front.app import Front, Homes
from mainstem.fleet.front.asking import Ask, Head, Part, ReplicaLost
from mainstem.fleet.front.following import Following
from mainstem.fleet.front.reading import Reading
from mainstem.fleet.front.routing import CostRouter
from mainstem.fleet.loopback import listen_on_loopback, stay_on_loopback
from mainstem.fleet.peers import PeerLists
from mainstem.fleet.place import FleetError
from mainstem.fleet.replica import DRAIN, PrefillReplicas, Replica
from mainstem.imports import needs
from mainstem.server.access.origins import Guard, reach_of
from mainstem.settings.engine import Role
from mainstem.settings.fleet import FleetConfig

with needs("ray", "Ray Serve is not installed: pip install 'mainstem[fleet]'", FleetError):
    import ray
    from ray import serve
    from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError
    from ray.serve.api import RunTarget
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
    from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
    from ray.serve.request_router import RequestRouter

log = logging.getLogger(__name__)

APP, ENGINE, PREFILL, FRONT = "mainstem", "engine", "prefill", "front"
_LOST = (RayActorError, NodeDiedError, ObjectLostError, WorkerCrashedError)
_LEAST_CPUS = 0.01  # of replicas that share the machine's cores
_MOST_ONGOING = 10_000
_END_S = 15.0  # for an engine that writes what it has, after its requests
_POLL_S = 0.25
_PEERS_S = 1.0
_ANSWER_S = 10.0


# ---------------------------------------------------------------- in the processes of the fleet


class FleetRouter(RequestRouter):  # type: ignore[misc]  # Ray need not be installed where types are checked
    """Chooses replicas by a `CostRouter`. Serve calls it in the process that has the handle."""

    def initialize_state(self, **options: Any) -> None:
        self._cost_router = CostRouter(time.monotonic, secret=process.SECRET[-1])
        self._following = Following(self._cost_router.apply)
        process.ROUTERS[self._deployment_id.name] = self

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        statistics = {each.replica_id.unique_id: each.routing_stats for each in replicas}
        self._cost_router.follow(statistics)
        self._following.follow(statistics)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Returns replicas, the best first."""
        candidates = {each.replica_id.unique_id: each for each in candidate_replicas}
        ask = _ask_of(pending_request)
        if ask is None:
            return [candidate_replicas]
        if ask.to in candidates:
            return [[candidates[ask.to]]]
        active = [name for name, each in candidates.items() if not each.routing_stats.get("draining")]
        awake = active or list(candidates)
        fresh = [name for name in awake if name not in ask.avoid] or awake
        return [[candidates[name]] for name in self._cost_router.order(ask.prompt, fresh)]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        ask = _ask_of(pending_request)
        self._cost_router.sent(None if ask is None else ask.prompt, replica_id.unique_id)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        self._cost_router.ended(replica_id.unique_id)

    def index(self) -> dict[str, int]:
        """Returns the counts of the index, and of messages that are no batches."""
        return self._cost_router.stats() | {"unreadable": self._following.bad}

    def awake(self) -> list[str]:
        """Returns the names of the replicas that take requests."""
        replicas = dict(self.curr_replicas)  # another thread changes them
        return [key.unique_id for key, each in replicas.items() if not each.routing_stats.get("draining")]


def _ask_of(pending_request: Any) -> Ask | None:
    arguments = () if pending_request is None else pending_request.args
    return next((each for each in arguments if isinstance(each, Ask)), None)


def _begin(config: FleetConfig) -> None:
    """Prepares a process of the fleet, before it does anything."""
    if config.on_this_machine:
        listen_on_loopback()
    process.SECRET.append(config.engine.tiers.storage_secret or PUBLIC_SECRET)


class ServedReplica(Replica):
    """A replica as Serve starts and ends it."""

    def __init__(self, config: FleetConfig, threads: int, role: Role = "both", prefill: Any = None) -> None:
        _begin(config)
        host = "127.0.0.1" if config.on_this_machine else ray.util.get_node_ip_address()
        aside = None if prefill is None or config.prefill is None else PrefillReplicas(_Served(prefill), config.prefill)
        super().__init__(config, serve.get_replica_context().replica_id.unique_id, threads, host, role, aside)

    def record_routing_stats(self) -> dict[str, Any]:
        return {**self.where(), "pid": os.getpid()}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self.seen()

    async def __del__(self) -> None:
        await asyncio.to_thread(self.close)


class _Served:
    """The `Replicas` of deployments, by their handles; those of the first one take requests."""

    def __init__(self, *handles: Any) -> None:
        self._handles = {each.deployment_name: each.options(stream=True) for each in handles}
        self._first = handles[0].deployment_name

    def names(self) -> Sequence[str]:
        return _awake(self._first)

    def everyone(self) -> Sequence[str]:
        return [name for deployment in self._handles for name in _awake(deployment)]

    async def ask(self, ask: Ask) -> AsyncGenerator[Part, None]:
        homes = [deployment for deployment in self._handles if ask.to in _statistics(deployment)]
        pieces = self._handles[homes[0] if homes else self._first].ask.remote(ask)
        try:
            async for piece in pieces:
                yield _without_id(piece) if isinstance(piece, Head) else piece
        except _LOST as error:
            raise ReplicaLost from error
        except DeploymentUnavailableError as error:
            raise ReplicaLost(refused=True) from error  # nothing was sent
        finally:
            pieces.cancel()  # if the client has gone


def _awake(deployment: str) -> Sequence[str]:
    """Returns the names of a deployment's replicas that take requests; Serve tells a process that has its handle."""
    router = process.ROUTERS.get(deployment)
    return [] if router is None else router.awake()


def _without_id(head: Head) -> Head:
    """Returns a head without X-Request-Id: Serve adds the client's own, or the id that Serve gave the request."""
    return replace(head, headers=tuple(each for each in head.headers if each[0].lower() != b"x-request-id"))


class ServedFront:
    """The front as Serve starts and ends it."""

    async def __init__(self, engines: Any, prefill: Any, config: FleetConfig) -> None:  # type: ignore[misc]  # awaited
        from mainstem.runtime.models.loading import load_tokenizer

        _begin(config)
        self._replicas, homes = _Served(engines, *([] if prefill is None else [prefill])), Homes()
        async for _ in self._replicas.ask(Ask("GET", "/version")):
            pass  # so that there is a replica when it is up
        loaded = await asyncio.to_thread(load_tokenizer, config.model, config.load.max_context)
        reading = Reading(config, *loaded, homes.get)
        self._front = Front(self._replicas, reading.read, homes, max_body_bytes=config.server.max_body_bytes)
        self._guard = Guard(self._front, reach_of(config.server, config.host))
        self._updating = asyncio.create_task(self._update_peers(PeerLists(self._replicas)))

    async def _update_peers(self, lists: PeerLists) -> None:
        """Tells replicas of their peers as long as the front lives."""
        while True:
            await asyncio.sleep(_PEERS_S)
            try:
                await lists.update(_statistics())
            except Exception:
                log.exception("replicas could not be told of their peers")

    def __serve_build_asgi_app__(self) -> Guard:
        return self._guard

    def describe(self) -> dict[str, Any]:
        """Returns the replicas, the size of the index, and the counts of the front."""
        counts = self._front.counts
        replicas = {name: {**stats, "served": counts.served[name]} for name, stats in _statistics().items()}
        router = process.ROUTERS.get(ENGINE)
        index = {} if router is None else router.index()
        done = {"again": counts.again, "continued": counts.continued, "broken": counts.broken}
        return {"replicas": replicas, "index": index, "running": self._front.running, **done}

    async def drain(self, timeout_s: float) -> bool:
        return await self._front.drain(timeout_s)

    async def renew(self, replica: str) -> bool:
        """Drains one replica, which another one replaces. Returns whether there is a replica of this name."""
        if replica not in self._replicas.everyone():
            return False
        async for head in self._replicas.ask(Ask(DRAIN, "/", to=replica)):
            return isinstance(head, Head) and head.status == 200
        return False


def _statistics(*deployments: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns the routing statistics of the replicas of some deployments, or of all, by their names."""
    routers = [router for name, router in process.ROUTERS.items() if not deployments or name in deployments]
    replicas = [(key, each) for router in routers for key, each in dict(router.curr_replicas).items()]
    return {key.unique_id: each.routing_stats for key, each in replicas}


# ---------------------------------------------------------------- in the process of a command


def connect(address: str) -> None:
    """Connects this process to Ray.

    Raises:
        FleetError: there is no Ray, or it does not know this user.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    stay_on_loopback()
    try:
        ray.init(address=address, namespace=APP, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        raise FleetError(f"Ray at {address} cannot be reached: {_line(error)}") from error


def deploy(config: FleetConfig, cores: int, progress: Callable[[str], None]) -> None:
    """Starts the fleet, or changes the one that runs: replica by replica, so that others answer meanwhile.

    Args:
        config: of the fleet.
        cores: of a machine.
        progress: called with a line about the state of the replicas.

    Raises:
        FleetError: it does not start.
    """
    serve.start(proxy_location="HeadOnly", http_options={"host": config.host, "port": config.port})
    scaled = config.autoscaling is None
    target = RunTarget(_application(config, cores), name=APP, route_prefix="/", external_scaler_enabled=scaled)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    _wait(config.start_timeout_s, progress)


def _application(config: FleetConfig, cores: int) -> Any:
    server, scaling, prefill = config.server, config.autoscaling, config.prefill
    grace_s = server.drain_timeout_s + _END_S
    threads = max(1, int(config.cpus or cores / config.most_replicas))
    common = {"graceful_shutdown_timeout_s": grace_s, "graceful_shutdown_wait_loop_s": 0.2}
    size: dict[str, Any] = {"num_replicas": config.replicas}
    if scaling is not None:
        policy = AutoscalingPolicy(
            policy_function=f"{policy_module.__name__}:ReplicaPolicy", policy_kwargs=vars(scaling)
        )
        size = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=scaling.min,
                max_replicas=scaling.max,
                target_ongoing_requests=scaling.target_ongoing,
                policy=policy,
            )
        }
    engine = serve.deployment(ServedReplica).options(
        ray_actor_options={"num_cpus": config.cpus or _LEAST_CPUS, "num_gpus": config.gpus},
        max_ongoing_requests=_MOST_ONGOING,  # the engine has a queue of its own, and says when it is full
        health_check_period_s=1.0,
        health_check_timeout_s=60.0,
        request_router_config=RequestRouterConfig(
            request_router_class=f"{__name__}.FleetRouter", request_routing_stats_period_s=1.0
        ),
        **common,
    )
    computing = None
    if prefill is not None:
        computing = engine.options(name=PREFILL, num_replicas=prefill.replicas).bind(config, threads, "prefill")
    engines = engine.options(name=ENGINE, **size).bind(config, threads, "both", computing)
    front = serve.deployment(serve.ingress()(ServedFront)).options(
        name=FRONT,
        ray_actor_options={"num_cpus": _LEAST_CPUS},
        max_ongoing_requests=_MOST_ONGOING,
        **common,
    )
    return front.bind(engines, computing, config)


def _wait(timeout_s: float, progress: Callable[[str], None]) -> None:
    """Waits until everything runs."""
    end_s, shown = time.monotonic() + timeout_s, ""
    while True:
        app = serve.status().applications.get(APP)
        words = "waiting for Ray Serve" if app is None else _words(app)
        if words != shown:
            progress(words)
            shown = words
        if app is not None and app.status == "RUNNING" and all(each.status == "HEALTHY" for each in _parts(app)):
            return
        if app is not None and app.status == "DEPLOY_FAILED":
            raise FleetError(
                f"the fleet did not start: {_cause([app.message, *(each.message for each in _parts(app))])}"
            )
        if time.monotonic() >= end_s:
            raise FleetError(f"the fleet has not started in {timeout_s:g} s: {words}")
        time.sleep(_POLL_S)


def _parts(app: Any) -> list[Any]:
    return list(app.deployments.values())


def _words(app: Any) -> str:
    counts = {
        name: {str(state): n for state, n in each.replica_states.items() if n} for name, each in app.deployments.items()
    }
    return ", ".join(
        f"{name}: {' '.join(f'{n} {state.lower()}' for state, n in states.items())}" for name, states in counts.items()
    )


def _cause(messages: Sequence[str]) -> str:
    """Returns the last line of a traceback, which has the error of the replica itself."""
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("mainstem.")]
    return (errors or lines or ["(no message)"])[-1]


def status() -> dict[str, Any]:
    """Returns the deployments, the replicas and the counts of the front.

    Raises:
        FleetError: nothing of the fleet is there.
    """
    app = _running()
    parts = {
        name: {
            "status": each.status.value,
            "replicas": {str(state): n for state, n in each.replica_states.items() if n},
        }
        for name, each in app.deployments.items()
    }
    seen: dict[str, Any] = {}
    with suppress(RayServeException, *_LOST, TimeoutError):
        seen = serve.get_app_handle(APP).describe.remote().result(timeout_s=_ANSWER_S)
    return {"status": app.status.value, "deployments": parts, **seen}


def _running() -> Any:
    """Returns Serve's status of the fleet.

    Raises:
        FleetError: nothing of it is there.
    """
    app = serve.status().applications.get(APP)
    if app is None:
        raise FleetError("Ray runs, but no fleet is on it")
    return app


def scale(replicas: int, timeout_s: float, deployment: str = ENGINE) -> None:
    """Changes the number of replicas of a deployment; those that go finish their requests.

    Raises:
        FleetError: it does not come about.
    """
    if deployment not in _running().deployments:
        raise FleetError("no replicas compute prompts alone: `prefill` in the file of the fleet starts some")
    # What Serve's own HTTP API does, which needs the dashboard.
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    target = serve.get_deployment_handle(deployment, APP).deployment_id
    try:
        ray.get(controller.update_deployment_replicas.remote(target, replicas))
    except Exception as error:
        if "external_scaler_enabled" in str(error):
            raise FleetError(
                "with `autoscaling`, the file of the fleet says how many there are: change it, and `up`"
            ) from error
        raise FleetError(f"the number of replicas cannot be set: {_line(error)}") from error
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        states = _running().deployments[deployment].replica_states
        if {str(state): n for state, n in states.items() if n} == {"RUNNING": replicas}:
            return
        time.sleep(_POLL_S)
    raise FleetError(f"there are not {replicas} replicas after {timeout_s:g} s: {_words(_running())}")


def drain(timeout_s: float) -> bool:
    """Lets the front refuse new generations, and waits for those under way. Returns whether they have ended."""
    return bool(serve.get_app_handle(APP).drain.remote(timeout_s).result(timeout_s=timeout_s + _ANSWER_S))


def renew(replica: str) -> None:
    """Lets one replica finish its requests and end; another one takes its place.

    Raises:
        FleetError: there is none of this name.
    """
    if not serve.get_app_handle(APP).renew.remote(replica).result(timeout_s=_ANSWER_S):
        raise FleetError(f"there is no replica {replica} that takes requests; `mainstem fleet status` lists them")


def shut_down() -> None:
    """Ends all that runs on Ray Serve, and disconnects."""
    if not ray.is_initialized():
        return  # else Serve would start a Ray to shut down
    with suppress(RayServeException, *_LOST):
        serve.shutdown()
    ray.shutdown()


def disconnect() -> None:
    """Disconnects this process from Ray."""
    ray.shutdown()


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
