"""What the settings of a server need of this machine: opened or tried before a model is loaded, which takes long."""

from __future__ import annotations

from socket import socket

from mainstem.here import listen
from mainstem.server.access.public_prefixes import parse_public_prefixes
from mainstem.server.watch.recording import check_recording
from mainstem.server.watch.tracing import check_installed
from mainstem.settings.server import ServerConfig


def bind(config: ServerConfig) -> socket:
    """Binds the port. Connections are refused until `serve` listens, so no client waits while the model loads.

    Raises:
        BackendUnavailable: the settings ask for what is not installed.
        BadArgument: the address cannot be bound, the recording not written, or a file not read; it names the setting.
    """
    if config.otlp is not None:
        check_installed()
    if config.record.record is not None:
        check_recording(config.record)
    if config.public_prefix is not None:
        parse_public_prefixes(config.public_prefix)
    return listen(config.host, config.port)
