"""The files of a user's fleet on this machine, and the Ray processes that it started.

    ray_token     authenticates to Ray; only this user can read it
    secret        of the store, unless another one is given
    fleet.json    the fleet that runs: where Ray is, which process started it, the address of the front
    store/        the store of a fleet that names none
    ray.log       what Ray's first process printed

In `mainstem/fleet` of the user's state folder. All processes of a fleet inherit a mark in their environment, by which
`end_all` finds them even after the process that started them has ended. No other process is touched.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mainstem.errors import MainstemError
from mainstem.settings.fleet import FleetConfig

MARK = "MAINSTEM_FLEET"
_STORE_BYTES, _HOST_BYTES, _OBJECT_BYTES = "8GiB", "256MiB", 128 << 20
_END_S = 20.0  # for processes that were asked to end
_POLL_S = 0.1


class FleetError(MainstemError):
    """A fleet cannot be started, reached or changed; the message says why."""


@dataclass(frozen=True, slots=True)
class Record:
    """A fleet that runs.

    Args:
        address: HOST:PORT of Ray.
        url: of the front.
        mark: in the environment of its processes; empty: Ray ran before.
        replicas: how many were asked for last.
    """

    address: str
    url: str
    mark: str
    replicas: int


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of a fleet.

    Args:
        folder: only this user can open it.
    """

    folder: Path

    @classmethod
    def default(cls) -> Place:
        """Returns the place in the user's state folder, which is made.

        Raises:
            FleetError: the folder cannot be made, or others own it.
        """
        import platformdirs

        folder = Path(platformdirs.user_state_path("mainstem", appauthor=False)) / "fleet"
        _own(folder)
        return cls(folder)

    @property
    def own_store(self) -> str:
        """The store of a fleet that names none."""
        return f"shared(host_bytes={_HOST_BYTES})+file:{self.folder / 'store'}?capacity={_STORE_BYTES}"

    def secret(self) -> str:
        """Returns the secret of the store, which is made once."""
        return _kept(self.folder / "secret")

    def environment(self, mark: str) -> dict[str, str]:
        """Returns the environment variables of processes that join the fleet, or talk to it.

        Args:
            mark: of the fleet; empty for a process that only talks to it.
        """
        _kept(self.folder / "ray_token")
        own = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "ray_token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_LOG_TO_STDERR": "0",
            "SPT_NOENV": "1",  # else the titles of Ray's processes overwrite their environment, where the mark is
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # Serve has let requests end before
        }
        return {**own, MARK: mark} if mark else own

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keeps other commands from changing the fleet meanwhile.

        Raises:
            FleetError: one is changing it.
        """
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FleetError("another command is changing the fleet; try again when it has ended") from None
            yield

    def read(self) -> Record | None:
        """Returns the record of the fleet that runs."""
        try:
            return Record(**json.loads((self.folder / "fleet.json").read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise FleetError(f"{self.folder / 'fleet.json'} is damaged: {error}") from error

    def write(self, record: Record | None) -> None:
        """Notes the fleet that runs; None: none does."""
        path = self.folder / "fleet.json"
        if record is None:
            path.unlink(missing_ok=True)
            return
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(record)))
        fresh.replace(path)

    def start_ray(self, config: FleetConfig, cores: int, gpus: int, mark: str) -> str:
        """Starts Ray on this machine, and returns its address.

        Args:
            config: of the fleet.
            cores, gpus: of the machine.
            mark: of the fleet.

        Raises:
            FleetError: it does not start.
        """
        host = config.node_host
        port, client_port, agent_port = free_port(host), free_port(host), free_port(host)
        # The paths of its sockets may not be long, as a state folder may be. Ray lets everyone into its own folder.
        scratch = Path(tempfile.gettempdir()) / f"mainstem-{os.getuid()}"
        _own(scratch)
        command = [
            sys.executable, "-m", "mainstem.fleet.loopback", "start", "--head", "--block", "--disable-usage-stats",
            f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false", "--no-monitor",
            f"--ray-client-server-port={client_port}", f"--dashboard-agent-listen-port={agent_port}",
            f"--num-cpus={cores}", f"--num-gpus={gpus}", f"--object-store-memory={_OBJECT_BYTES}",
            f"--temp-dir={scratch / 'ray'}",
        ]  # fmt: skip
        environment = {**os.environ, **self.environment(mark)}
        with (self.folder / "ray.log").open("w") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        _wait_for(process, host, port, self.folder / "ray.log", config.start_timeout_s)
        return f"{host}:{port}"


def end_all(mark: str, timeout_s: float = _END_S) -> int:
    """Terminates all processes of a fleet, and kills those that do not end in time. Returns their number."""
    begun_s, pids = time.monotonic(), set[int]()
    while (left := marked(mark)) and time.monotonic() < begun_s + timeout_s:
        for pid in left - pids:
            _send(pid, signal.SIGTERM)
        pids |= left
        time.sleep(_POLL_S)
    while left := marked(mark):
        for pid in left:
            _send(pid, signal.SIGKILL)
        pids |= left
        time.sleep(_POLL_S)
    return len(pids)


def marked(mark: str) -> set[int]:
    """Returns the processes of this user that have a mark in their environment."""
    entry, pids = f"{MARK}={mark}".encode(), set()
    for folder in Path("/proc").iterdir() if mark else ():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with suppress(OSError):  # it has ended, or is another user's
                alive = b"\nState:\tZ" not in (folder / "status").read_bytes()
                if alive and entry in (folder / "environ").read_bytes().split(b"\0"):
                    pids.add(int(folder.name))
    return pids


def free_port(host: str) -> int:
    """Returns a port without a listener.

    Raises:
        FleetError: this machine does not have the address.
    """
    try:
        with socket.create_server((host, 0)) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise FleetError(f"nothing can listen at {host}: {error.strerror}") from error


def read_file(path: Path | None) -> object:
    """Reads the file of a fleet; None: there is none, and all is at its default.

    Raises:
        FleetError: it cannot be read, or is no YAML.
    """
    if path is None:
        return None
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise FleetError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def secrets_of(environment: Mapping[str, str], place: Place) -> dict[str, str]:
    """Returns an environment with a secret of the store, which is made if none is given."""
    name = "MAINSTEM_STORAGE_SECRET"
    return {**environment, name: environment.get(name) or place.secret()}


def _wait_for(process: subprocess.Popen[bytes], host: str, port: int, log: Path, timeout_s: float) -> None:
    """Waits until Ray is up: it says so when all of its processes have been started."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise FleetError(f"Ray ended with {process.returncode} while starting, see {log}")
        if "Ray runtime started" in log.read_text(errors="replace"):
            with suppress(OSError), socket.create_connection((host, port), 1):
                return
        time.sleep(_POLL_S)
    raise FleetError(f"Ray has not started in {timeout_s:g} s, see {log}")


def _kept(path: Path) -> str:
    """Returns the secret in a file that only this user can read; it is made if it is not there."""
    with suppress(FileExistsError):
        fresh = path.with_suffix(f".{os.getpid()}")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(fresh, path)  # one of several that come at once is kept
        finally:
            fresh.unlink()
    return path.read_text()


def _own(folder: Path) -> None:
    """Makes a folder that only this user can open.

    Raises:
        FleetError: it cannot be made, or another user has it.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise FleetError(f"the folder {folder} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise FleetError(f"the folder {folder} must be this user's alone (mode 0700)")


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
