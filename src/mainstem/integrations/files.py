"""Digests of the files that a model or an adapter is loaded from, for the identity of stored blocks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from pathlib import Path

from mainstem.errors import BadArgument
from mainstem.imports import needs

log = logging.getLogger(__name__)

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


@functools.cache
def digest_weights(model: str, revision: str | None = None) -> str:
    """Returns BLAKE3 over all files of weights of a model, in hex; reads all of them once in a process.

    Args:
        model: a folder, a file, or a name on the Hugging Face hub whose files are in the local cache.
        revision: of a name on the hub.

    Raises:
        BadArgument: there are no such files.
        BackendUnavailable: the package blake3 is not installed.
    """
    path = Path(model)
    if not path.exists():
        path = _cached(model, revision) or path
    paths = {file for kind in _WEIGHTS for file in path.glob(kind)} if path.is_dir() else {path}
    files = sorted(file for file in paths if file.is_file())
    if not files:
        raise BadArgument("weights", None, f"a name of your own for the weights: {model} has no files of weights here")
    return digest_files(files)


def digest_adapter(folder: str) -> str:
    """Returns BLAKE3 over all files of a folder, in hex; reads them again only if one was replaced.

    Raises:
        OSError: they cannot be read.
    """
    files = sorted(file for file in Path(folder).iterdir() if file.is_file())
    return _digest_unchanged(tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


def digest_files(files: Iterable[Path]) -> str:
    """Returns BLAKE3 over files with their names and lengths, in hex, with all cores."""
    with needs("blake3", "storage needs blake3: pip install 'mainstem[storage]'"):
        from blake3 import blake3
    hasher = blake3(max_threads=blake3.AUTO)
    for file in files:
        hasher.update(f"{file.name} {file.stat().st_size}\0".encode())
        hasher.update_mmap(file)
    return hasher.hexdigest()


@functools.lru_cache(maxsize=256)
def _digest_unchanged(files: tuple[tuple[Path, int, int], ...]) -> str:
    return digest_files(file for file, _, _ in files)


def _cached(model: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:  # noqa: BLE001  # whatever the hub's client raises: there are no files
        log.debug("%s is not in the local cache: %s", model, error)
        return None
