"""The options of a store inside another engine, as that engine's configuration has them. Needs no engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mainstem.errors import BackendUnavailable, BadArgument, one_of, redacted
from mainstem.storage.base import check_spec
from mainstem.units import parse_bytes, parse_seconds

_BUFFER_BYTES = 1 << 30
_TRIED_S = 60.0
_TRY = """
import sys
from mainstem.errors import MainstemError
from mainstem.storage.base import open_backend
try:
    open_backend(sys.stdin.read()).close()
except MainstemError as error:
    sys.exit(str(error))
"""


@dataclass(frozen=True)
class Options:
    """The options in vLLM's `kv_connector_extra_config`.

    Args:
        storage: the spec of the store, see docs/storage.md.
        host_bytes: host memory for stored blocks, which all processes of this machine share, see `mainstem.owner`.
            None: the owner's default. 0: no owner, each process opens the store itself.
        buffer_bytes: memory for blocks on their way, in each worker.
        timeout_s: how long a call to the store may take, and so how long a request waits for it at most.
        weights: a name for the weights, in place of a digest of their files.
    """

    storage: str
    host_bytes: int | None = None
    buffer_bytes: int = _BUFFER_BYTES
    timeout_s: float = 5.0
    weights: str | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """Reads the options as vLLM has them.

        Raises:
            BadArgument: an option is unknown, missing or of another form, or the spec names no store.
        """
        names = ("storage", "host_bytes", "buffer_bytes", "timeout", "weights")
        for name in given:
            if name not in names:
                raise BadArgument("kv_connector_extra_config", name, one_of(name, names))
        if not isinstance(given.get("storage"), str):
            raise BadArgument(
                "storage", given.get("storage"), 'the spec of a store, such as "file:./kv?capacity=64GiB"'
            )
        check_spec(given["storage"])
        return cls(
            given["storage"],
            parse_bytes("host_bytes", str(given["host_bytes"])) if "host_bytes" in given else None,
            parse_bytes("buffer_bytes", str(given.get("buffer_bytes", _BUFFER_BYTES))),
            parse_seconds("timeout", str(given.get("timeout", "5s"))),
            given.get("weights"),
        )

    @property
    def spec(self) -> str:
        """The spec of the store, with its owner on this machine unless there is to be none."""
        if self.host_bytes == 0 or self.storage.startswith(("shared+", "shared(")):
            return self.storage
        size = "" if self.host_bytes is None else f"host_bytes={self.host_bytes}&"
        return f"shared({size}timeout={self.timeout_s:g}s)+{self.storage}"

    def try_store(self) -> None:
        """Opens the store once, and closes it.

        A process of its own does, since this one may fork later, which clients of stores do not survive.

        Raises:
            BackendUnavailable: the store cannot be opened; the message says why.
        """
        command = [sys.executable, "-c", _TRY]  # the spec may have a password, which other users must not see
        try:
            tried = subprocess.run(command, input=self.spec, capture_output=True, text=True, timeout=_TRIED_S)
        except subprocess.TimeoutExpired:
            raise BackendUnavailable(
                f"storage {redacted(self.storage)!r}: it does not open in {_TRIED_S:g} s"
            ) from None
        if tried.returncode:
            why = (tried.stderr.strip().splitlines() or ["its process ended"])[-1]
            raise BackendUnavailable(f"storage {redacted(self.storage)!r}: {why}")
