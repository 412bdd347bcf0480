"""An owner that a client starts, `python -m mainstem.owner` with JSON as its input: see `mainstem.owner.start`."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress

from mainstem.errors import MainstemError
from mainstem.owner.process import serve
from mainstem.owner.start import READY
from mainstem.settings.owner import OwnerConfig


def main() -> int:
    """Serves, and reports to the starter whether it can. Returns the exit code."""
    order = json.load(sys.stdin)
    lock, ready = order["lock"], order["ready"]
    for descriptor in (lock, ready):
        os.set_inheritable(descriptor, False)  # processes that the store starts must not keep the lock
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s: %(message)s")

    def report(answer: bytes) -> None:
        nonlocal ready
        if ready >= 0:
            with suppress(BrokenPipeError):  # the starter waits no longer; others may come
                os.write(ready, answer)
            os.close(ready)
            ready = -1

    try:
        serve(order["spec"], OwnerConfig(**order["config"]), lambda place: report(READY), lock)
    except (MainstemError, OSError, ImportError) as error:
        logging.error("%s", error)
        report(" ".join(str(error).split()).encode()[:4096])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
