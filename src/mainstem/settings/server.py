"""The settings of a server: its address, its clients, images, recording."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from mainstem.errors import BadArgument
from mainstem.settings.engine import SECRET_BYTES
from mainstem.settings.fields import (
    INT64_MAX,
    SECRET,
    Range,
    Settings,
    instance,
    integer,
    number,
    one_of,
    seconds,
    secret_bytes,
    setting,
    switch,
    texts,
)
from mainstem.units import SIZE

UnknownFields = Literal["refuse", "warn"]
ToolCallParser = Literal[
    "auto",
    "qwen3_coder",
    "glm45",
    "hermes",
    "deepseek_v3",
    "deepseek_v31",
    "harmony",
    "mistral_args",
    "mistral",
    "llama3_json",
    "json",
]
ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1", "mistral"]

_KEY = "printable, without spaces, and not empty"


def _is_key(text: object) -> bool:
    return isinstance(text, str) and text.isprintable() and " " not in text and text != ""


_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#]+")
_HOST = re.compile(r"\*|(\*\.)?[\w.-]+", re.ASCII)
_HOSTS = (
    "a name or an address without a port, such as llm.example.org, *.example.org for all names below it, or * for all"
)


def _is_host(text: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(text))
    return _HOST.fullmatch(text) is not None


_ORIGINS = "a scheme, a host and perhaps a port, such as https://chat.example.org:8080, or * for all"


@dataclass(frozen=True)
class ImagePolicy(Settings):
    """The sources of images in chats, besides data URLs, and their limits.

    Args:
        image_http: Fetch images from public addresses over HTTP and HTTPS.
        image_host: Fetch images from this host, even at a private address. Repeat it for several hosts.
        image_folder: Read images from file: URLs of files in this folder.
        image_max_bytes: Maximum size of one encoded image.
        image_max_pixels: Maximum number of pixels of a request, over all its images; 1 or more.
        max_images: Maximum number of images in a request; 1 or more.
        image_timeout_s: Time to fetch one image over HTTP.
    """

    image_http: bool = setting(False, switch())
    image_host: tuple[str, ...] = setting((), texts("a tuple of host names", bool))
    image_folder: Path | None = setting(None, Range("a folder", lambda path: isinstance(path, Path) and path.is_dir()))
    image_max_bytes: int = setting(20 << 20, integer(1, INT64_MAX), unit=SIZE)
    image_max_pixels: int = setting(32 << 20, integer(1, INT64_MAX))
    max_images: int = setting(32, integer(1))
    image_timeout_s: float = setting(10.0, seconds(above=True), flag=False)

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        if self.image_http and self.image_host:
            raise BadArgument("image_host", self.image_host, "left out: image_http allows all public hosts")


@dataclass(frozen=True)
class RecordConfig(Settings):
    """The recording of requests, for replay; by default none.

    Args:
        record: File to append a line per request to: times, token counts, and the prompt as hashes under a secret.
        record_secret: Secret under which prompts and clients are hashed: at least 16 characters.
            Recordings under the same secret can be joined. Default: a random one, which is not kept.
        record_text: Also record prompts and answers as plain text.
        record_block_size: Tokens per hash; 1 or more.

    A new file can be read by its owner only.
    """

    record: Path | None = setting(None, instance(Path, "the path of a file"))
    record_secret: bytes | None = setting(None, secret_bytes(SECRET_BYTES), unit=SECRET, secret=True)
    record_text: bool = setting(False, switch())
    record_block_size: int = setting(16, integer(1))

    def __post_init__(self) -> None:
        """Checks every field, and that none is without effect."""
        super().__post_init__()
        if self.record is None:
            self.refuse("--record")


_URL = re.compile(r"https?://[\w.-]+(:\d{1,5})?/?|https?://\[[\da-fA-F:]+\](:\d{1,5})?/?")


@dataclass(frozen=True)
class PrefillConfig(Settings):
    """The engines that compute prompts, if not this one.

    Args:
        prefill_url: Address of a server with --role prefill, such as http://10.0.0.2:8000. It computes a prompt first;
            its pages are then read through --peers.
        prefill_timeout_s: Seconds that this may take; what it has not computed then is computed here. Above 0.
        prefill_min_bytes: Requests with shorter bodies are computed here.
    """

    prefill_url: str | None = setting(
        None, Range("http://HOST:PORT", lambda text: isinstance(text, str) and _URL.fullmatch(text) is not None)
    )
    prefill_timeout_s: float = setting(30.0, seconds(above=True))
    prefill_min_bytes: int = setting(2048, integer(0, INT64_MAX))

    def __post_init__(self) -> None:
        """Checks every field, and that none is without effect."""
        super().__post_init__()
        if self.prefill_url is None:
            self.refuse("--prefill-url")


@dataclass(frozen=True)
class SavingsConfig(Settings):
    """The assumed cost of computing, so that metrics show the savings of the cache.

    Args:
        watts: Power that the machine draws while it computes prompts. Above 0.
        price_per_hour: Price of an hour of the machine, in any currency. Above 0.
    """

    watts: float | None = setting(None, number(0, above=True))
    price_per_hour: float | None = setting(None, number(0, above=True))

    @property
    def exist(self) -> bool:
        """Whether anything is assumed."""
        return self.watts is not None or self.price_per_hour is not None


@dataclass(frozen=True)
class BatchConfig(Settings):
    """Batches of requests that clients upload, which are answered beside those that somebody waits for.

    Args:
        batch_folder: Folder of the files and batches of clients; it turns on /v1/files and /v1/batches. Its batches go
            on after a restart.
        batch_bytes: Maximum size of the files of one API key; 1 or more.
        batch_age_s: Seconds after which a file, or a batch that ended, is deleted. Above 0.
    """

    batch_folder: Path | None = setting(None, instance(Path, "the path of a folder"))
    batch_bytes: int = setting(1 << 30, integer(1, INT64_MAX), unit=SIZE)
    batch_age_s: float = setting(7 * 86400.0, seconds(above=True))

    def __post_init__(self) -> None:
        """Checks every field, and that none is without effect."""
        super().__post_init__()
        if self.batch_folder is None:
            self.refuse("--batch-folder")


_COLLECTOR = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")


def _names_tenants(path: object) -> bool:
    """Reads the file; its errors name the place in it."""
    from mainstem.settings.tenants import read_tenants  # here, because help must not load its packages

    return isinstance(path, Path) and bool(read_tenants(path))


def _names_rules(source: str) -> bool:
    """Reads the file; its errors name the line and the rule."""
    from mainstem.prompt_rules.rule_file import read_rules  # here, because help must not load its packages

    return bool(read_rules([source]))


@dataclass(frozen=True)
class ServerConfig(Settings):
    """The settings of one server.

    Args:
        host: Address to listen on. The default is reachable from this machine only, 0.0.0.0 from everywhere.
        port: Port to listen on, 0 to 65535; 0 takes a free one.
        api_key: Key that clients must send. Repeat it for several keys; no two keys share a cached prefix.
            In MAINSTEM_API_KEY, separate keys by spaces. Default: no key is required.
        admin_key: Key for the cache and adapter routes.
            Without it, they accept the only API key, and are closed if there are several API keys.
        served_model_name: Name under which clients find the model. Repeat it for several names; answers have the first.
            Default: the model's own name.
        public_prefix: File of prefixes that all tenants share, a line of JSON each: {"messages": [...]} or
            {"prompt": ...}. They are computed at startup, and copied for each tenant.
        tenants: File of tenants, each with an API key or a salt, and with its guaranteed and its largest part of the
            cache. See docs/serving.md.
        allowed_host: Name or address under which the server answers without keys, besides localhost and its own
            address: that of a reverse proxy, or of the machine in its network. *.example.org allows all names below
            one, * any name. Repeat it for several names.
        prompt_rules: File of rules that take out of prompts what changes with every request, or the name of one of
            Mainstem's own, such as claude-code. Repeat it for several files. See docs/prompts.md.
        cors_origin: Origin of web pages whose scripts may use the server, such as https://chat.example.org; * for all.
            Repeat it for several origins. Default: none.
        images: The sources of images in requests, and their limits.
        record: The recording of requests.
        prefill: The server that computes prompts.
        savings: The assumed cost of computing.
        batch: The batches of clients.
        otlp: Address of an OpenTelemetry collector, such as http://127.0.0.1:4318. Each request is sent there as a
            trace, over OTLP/HTTP; no text is in it. Needs mainstem[otlp].
        unknown_fields: How to treat a request with a field that the server does not know. refuse: status 400; warn: it
            is answered, and the header X-Mainstem-Unknown-Fields names the field.
        remember_answers: Memory for the tokens of answers, which are found again when a chat sends them back as text:
            bytes, or a size such as 64MiB; 0 turns this off.
        precompute_turns: After an answer, and while nothing else runs, compute the next turn as the chat template will
            render it, if the template drops the reasoning or changes the answer. The value is the share of the time
            that those may take which do not come; 0 turns this off.
        allow_weight_updates: Serve /v1/update_weights, by which the admin changes the model's weights while it runs.
            See docs/training.md.
        embeddings: Serve /v1/embeddings: the mean of the model's last hidden states over a text. Chat models are not
            trained for that.
        tool_call_parser: Format in which the model writes calls of tools. auto: by its chat template and vocabulary.
        reasoning_parser: Form in which the model marks its reasoning before an answer; it is split off. none: it is
            left in the text; auto: by its chat template and vocabulary.
        response_bytes: Memory for answers of /v1/responses that clients may come back to. When it is full, the client
            that has the most memory loses its oldest answer; 0 keeps none.
        response_ttl_s: Seconds for which such an answer is kept at most.
        max_body_bytes: Maximum size of a request body.
        ping_interval_s: Seconds without anything to send after which a stream sends a ping, so that no client or proxy
            gives up while a long prompt is computed; 0: never.
        drain_timeout_s: Seconds that running requests have to finish after SIGTERM; 0 or more.
    """

    host: str = setting("127.0.0.1", instance(str, "an address"))
    port: int = setting(8000, Range("0 (any free port) to 65535", integer(0, 65535).holds))
    api_key: tuple[str, ...] = setting((), texts(_KEY, _is_key), secret=True)
    admin_key: str | None = setting(None, Range(_KEY, _is_key), secret=True)
    served_model_name: tuple[str, ...] = setting((), texts(_KEY, _is_key))
    public_prefix: Path | None = setting(None, instance(Path, "the path of a file"))
    tenants: Path | None = setting(None, Range("a file of tenants", _names_tenants))
    allowed_host: tuple[str, ...] = setting((), texts(_HOSTS, _is_host))
    prompt_rules: tuple[str, ...] = setting((), texts("a tuple of files of rules", _names_rules))
    cors_origin: tuple[str, ...] = setting((), texts(_ORIGINS, lambda text: _ORIGIN.fullmatch(text) is not None))
    images: ImagePolicy = ImagePolicy()
    record: RecordConfig = RecordConfig()
    prefill: PrefillConfig = PrefillConfig()
    savings: SavingsConfig = SavingsConfig()
    batch: BatchConfig = BatchConfig()
    otlp: str | None = setting(
        None,
        Range("http://HOST:PORT, perhaps with a path", lambda text: bool(_COLLECTOR.fullmatch(str(text)))),
    )
    unknown_fields: UnknownFields = setting("refuse", one_of(UnknownFields))
    remember_answers: int = setting(64 << 20, integer(0, INT64_MAX), unit=SIZE)
    precompute_turns: float = setting(0.1, number(0, 1))
    allow_weight_updates: bool = setting(False, switch())
    embeddings: bool = setting(False, switch())
    tool_call_parser: ToolCallParser = setting("auto", one_of(ToolCallParser))
    reasoning_parser: ReasoningParser = setting("auto", one_of(ReasoningParser))
    response_bytes: int = setting(64 << 20, integer(0, INT64_MAX), unit=SIZE)
    response_ttl_s: float = setting(86400.0, seconds())
    max_body_bytes: int = setting(16 << 20, integer(1, INT64_MAX), unit=SIZE)
    ping_interval_s: float = setting(5.0, seconds(), alias="--sse-ping-interval")
    drain_timeout_s: float = setting(30.0, seconds())
