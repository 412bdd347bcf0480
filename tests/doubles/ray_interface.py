"""The parts of Ray and Ray Serve that `mainstem.fleet.serving` uses, so that its calls can be replayed without Ray.

Only what that module imports is here, with the same names and arguments, as Ray 2.60 has them. `Ray` notes each call.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

OURS = "mainstem.fleet.serving"


class RayActorError(Exception):
    pass


class NodeDiedError(Exception):
    pass


class ObjectLostError(Exception):
    pass


class WorkerCrashedError(Exception):
    pass


class RayServeException(Exception):
    pass


class DeploymentUnavailableError(RayServeException):
    pass


class Status(enum.StrEnum):
    DEPLOYING = "DEPLOYING"
    RUNNING = "RUNNING"
    DEPLOY_FAILED = "DEPLOY_FAILED"
    HEALTHY = "HEALTHY"
    UPDATING = "UPDATING"
    UNHEALTHY = "UNHEALTHY"


class RunTarget(NamedTuple):
    target: Any
    name: str
    route_prefix: str
    external_scaler_enabled: bool = False


class Keywords(SimpleNamespace):
    """Stands for `AutoscalingConfig` and the like, which keep what they are given."""


@dataclass
class Deployment:
    """A class with the options and arguments of its replicas."""

    made_of: type
    given: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()

    def options(self, **given: Any) -> Deployment:
        return Deployment(self.made_of, {**self.given, **given}, self.arguments)

    def bind(self, *arguments: Any) -> Deployment:
        return Deployment(self.made_of, self.given, arguments)


class RequestRouter:
    """Serve's router of one deployment: it has the replicas that there are."""

    def __init__(self, deployment: str) -> None:
        self._deployment_id = SimpleNamespace(name=deployment)
        self.curr_replicas: dict[Any, Any] = {}
        self.initialize_state()

    def initialize_state(self, **options: Any) -> None:
        raise NotImplementedError

    def update_replicas(self, replicas: list[Any]) -> None:
        self.curr_replicas = {each.replica_id: each for each in replicas}


class ReplicaId(NamedTuple):
    unique_id: str


def replica(name: str, **statistics: Any) -> Any:
    """Makes a replica as a router sees it."""
    return SimpleNamespace(replica_id=ReplicaId(name), routing_stats=statistics)


class Answer:
    """The result of a remote call, which is waited for or comes in pieces; or a list of each call's waits."""

    def __init__(self, value: object, waits: list[float]) -> None:
        self._value, self._waits = value, waits
        self.cancelled = False

    def result(self, timeout_s: float) -> object:
        self._waits.append(timeout_s)
        if isinstance(self._value, Exception):
            raise self._value
        return self._value

    async def __aiter__(self) -> AsyncIterator[Any]:
        assert isinstance(self._value, list)
        for each in self._value:
            if isinstance(each, Exception):
                raise each
            yield each

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Calls the methods of a deployment, which `answer` answers by name and arguments."""

    def __init__(self, deployment: str, answer: Callable[..., object]) -> None:
        self.deployment_name, self.deployment_id = deployment, f"id of {deployment}"
        self.waits: list[float] = []
        self.calls: list[Answer] = []
        self.streams = False
        self._answer = answer

    def options(self, *, stream: bool) -> Handle:
        self.streams = stream
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def remote(*arguments: Any) -> Answer:
            self.calls.append(Answer(self._answer(name, *arguments), self.waits))
            return self.calls[-1]

        return SimpleNamespace(remote=remote)


def app(status: Status, message: str = "", **deployments: tuple[Status, dict[str, int], str]) -> Any:
    """Makes Serve's status of an application, and of its deployments by name."""
    parts = {
        name: SimpleNamespace(status=each, replica_states=states, message=said)
        for name, (each, states, said) in deployments.items()
    }
    return SimpleNamespace(status=status, message=message, deployments=parts)


class Ray:
    """One Ray with Serve on it.

    Attributes:
        calls: the names of what was called, with arguments.
        status: the status of the fleet by the number of looks before this one; None: there is none.
        answer: answers the front's methods, and those of Serve's controller.
        up: whether this process is connected.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.looks = 0
        self.status: Callable[[int], Any] = lambda looks: None
        self.answer: Callable[..., object] = lambda name, *arguments: True
        self.failure: Exception | None = None
        self.up = False
        self.front = Handle("front", lambda name, *arguments: self.answer(name, *arguments))
        self.controller = Handle("controller", lambda name, *arguments: self.answer(name, *arguments))

    def _note(self, name: str, *arguments: Any, **named: Any) -> None:
        self.calls.append((name, *arguments, *named.items()))

    def _look(self) -> Any:
        self.looks += 1
        found = self.status(self.looks - 1)
        return SimpleNamespace(applications={} if found is None else {"mainstem": found})

    def _init(self, **named: Any) -> None:
        self._note("init", **named)
        if self.failure is not None:
            raise self.failure
        self.up = True

    def _shut_down(self) -> None:
        self._note("shutdown")
        self.up = False

    def _end_serve(self) -> None:
        self._note("serve.shutdown")
        if self.failure is not None:
            raise self.failure

    def modules(self) -> dict[str, dict[str, Any]]:
        names: dict[str, Any] = {
            "start": lambda **named: self._note("serve.start", **named),
            "run_many": lambda targets, **named: self._note("serve.run_many", *targets, **named),
            "status": self._look,
            "shutdown": self._end_serve,
            "deployment": Deployment,
            "ingress": lambda: lambda cls: cls,
            "get_app_handle": lambda name: self.front,
            "get_deployment_handle": lambda name, of: Handle(name, self.answer),
            "get_replica_context": lambda: SimpleNamespace(replica_id=ReplicaId("r1")),
        }
        return {
            "ray": {
                "serve": SimpleNamespace(**names),
                "init": self._init,
                "shutdown": self._shut_down,
                "is_initialized": lambda: self.up,
                "get_actor": lambda name, namespace: self.controller,
                "get": lambda answer: answer.result(timeout_s=-1.0),
                "util": SimpleNamespace(get_node_ip_address=lambda: "10.0.0.9"),
            },
            "ray.serve": names,
            "ray.exceptions": {
                each.__name__: each for each in (RayActorError, NodeDiedError, ObjectLostError, WorkerCrashedError)
            },
            "ray.serve.exceptions": {
                "DeploymentUnavailableError": DeploymentUnavailableError,
                "RayServeException": RayServeException,
            },
            "ray.serve.api": {"RunTarget": RunTarget},
            "ray.serve.config": dict.fromkeys(
                ("AutoscalingConfig", "AutoscalingPolicy", "RequestRouterConfig"), Keywords
            ),
            "ray.serve.request_router": {"RequestRouter": RequestRouter},
        }


@contextmanager
def ray_double(ray: Ray) -> Iterator[Any]:
    """Imports `mainstem.fleet.serving` over the double; afterwards neither is imported."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name == OURS or name.split(".")[0] == "ray"}
    package = importlib.import_module("mainstem.fleet")
    try:
        for path, content in ray.modules().items():
            module = ModuleType(path)
            module.__path__ = []
            vars(module).update(content)
            sys.modules[path] = module
        yield importlib.import_module(OURS)
    finally:
        for name in list(sys.modules):
            if name == OURS or name.split(".")[0] == "ray":
                del sys.modules[name]
        vars(package).pop("serving", None)
        sys.modules.update(before)
