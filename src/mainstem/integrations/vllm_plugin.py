"""vLLM's plug-in: checks a configuration that names a store of Mainstem while vLLM reads it.

vLLM shows a connector its options when it makes one: a minute later, after the weights, in another process, whose
errors it repeats hundreds of lines deep. A configuration without Mainstem is left alone.

Protocol: https://docs.vllm.ai/en/latest/design/plugin_system.html, the group `vllm.general_plugins`.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Iterator, Mapping
from typing import Any

from mainstem.errors import MainstemError
from mainstem.integrations.options import Options

log = logging.getLogger("vllm.mainstem")  # vLLM shows the loggers below its own

_MODULE = "mainstem.integrations.vllm"


def register() -> None:
    """Makes vLLM check a configuration when it is read. Each process calls it; only the first one reads any."""
    if multiprocessing.parent_process() is not None:
        return
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if getattr(create, "checks", None) is register:
        return

    @functools.wraps(create)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        check_configuration(self.kv_transfer_config)
        return create(self, *args, **options)

    checked.checks = register  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = checked


def check_configuration(config: Any) -> None:
    """Checks the options of `MainstemConnector`, and opens its store once.

    Args:
        config: vLLM's `KVTransferConfig`, or what it is made of; None: there is none.

    Raises:
        BadArgument: an option is not one that can be served.
        BackendUnavailable: the store cannot be opened.
    """
    for options in _given(config):
        try:
            Options.read(options).try_store()
        except MainstemError as error:
            log.error("--kv-transfer-config: %s", error)
            raise


def _given(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the options of each connector of ours, which may be one of several."""
    fields = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    options = fields.get("kv_connector_extra_config") or {}
    if fields.get("kv_connector_module_path") == _MODULE:
        yield options
    for inner in options.get("connectors", ()):
        yield from _given(inner)
