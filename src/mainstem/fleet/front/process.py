"""Global state of a process with a router: its routers, and the secret of the fleet's events.

Ray Serve makes a router for each handle, shows it to nobody, and gives it no argument of ours that is secret. Serve
copies the module of a router's class by value, and what that module imports by reference; so both stand here.
"""

from __future__ import annotations

from typing import Any

from mainstem.events.source import PUBLIC_SECRET

ROUTERS: dict[str, Any] = {}
"""The newest router of each deployment."""

SECRET: list[bytes] = [PUBLIC_SECRET]
"""The newest secret is the last."""
