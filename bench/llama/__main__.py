"""Serves a folder of a Llama-like model by llama.cpp: python -m bench.llama FOLDER PORT THREADS SEATS.

The weights become a GGUF file of bfloat16 first, beside the packages of Node; a file that is there is taken as it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.llama.convert import write_gguf

HERE = Path(__file__).parent
PACKAGES = Path(__file__).parents[2] / ".venv-llama"


def main(model: str, *rest: str) -> None:
    """Becomes the server: this process is replaced, so that its memory is the server's alone."""
    gguf = PACKAGES / f"{Path(model).name}-bf16.gguf"
    if not gguf.exists():
        fresh = gguf.with_suffix(".part")
        write_gguf(Path(model), fresh)
        fresh.rename(gguf)
    os.execvp("node", ["node", str(HERE / "server.mjs"), str(PACKAGES), str(gguf), *rest])


if __name__ == "__main__":
    main(*sys.argv[1:])
