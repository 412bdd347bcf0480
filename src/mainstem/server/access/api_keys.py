"""API keys: the client that sends a request, and its rights.

Keys are compared and named by digests. Knows no routes and no engines.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from starlette.datastructures import Headers

from mainstem.server.errors import ApiError, wrong


def tenant_secret(storage_secret: bytes | None) -> Callable[[int], bytes]:
    """Returns a maker of the secret of an `Access`: the same for all servers of a store with a secret, else random."""
    if storage_secret is None:
        return secrets.token_bytes
    return lambda size: hashlib.blake2b(storage_secret, digest_size=size, person=b"mainstem tenant").digest()


class Access:
    """The keys of one server.

    Args:
        api_keys: the clients' keys; empty: no key is required.
        admin_key: the key for routes that concern all clients. None: the only API key, or none if none is required.
        secret: keys the digests.
        separates: whether clients are tenants that share no prefix, even if there is one key.

    Attributes:
        separates: whether they are; always with several keys.
    """

    def __init__(
        self, api_keys: Sequence[str], admin_key: str | None, secret: bytes, *, separates: bool = False
    ) -> None:
        self._secret = secret
        self._keys = {self._digest(key.encode()): key for key in api_keys}
        self._admin_key = None if admin_key is None else self._digest(admin_key.encode())
        self.separates = separates or len(self._keys) > 1

    def tenant(self, headers: Headers) -> bytes | None:
        """Returns the digest of the client's key, or None if no key is required.

        Raises:
            ApiError: 401; the key is missing or unknown.
        """
        return self._matching_key(headers, list(self._keys)) if self._keys else None

    def tenant_of(self, api_key: str | None) -> bytes | None:
        """Returns the digest of one of the API keys; None for anything else."""
        digest = self._digest((api_key or "").encode())
        return digest if digest in self._keys else None

    def api_key(self, tenant: bytes | None) -> str | None:
        """Returns the key of a tenant."""
        return None if tenant is None else self._keys[tenant]

    def names(self, secret: bytes) -> dict[str, bytes | None]:
        """Returns the tenants by names that a restart does not change, if the secret stays; None without keys."""
        if not self._keys:
            return {"": None}
        return {hmac.digest(secret, key.encode(), "sha256").hex(): tenant for tenant, key in self._keys.items()}

    def require_admin(self, headers: Headers, *, browser: bool = False) -> None:
        """Requires the admin key, or the only API key if there is no admin key.

        Args:
            headers: of the request.
            browser: the key may also be the password that a person gave to a browser (HTTP Basic). Only for routes that
                change nothing: browsers send it whichever page asks them to.

        Raises:
            ApiError: 401 for a missing or unknown key, 403 for a key without this right.
        """
        if browser:
            with _asking_a_person():
                self.require_admin(_as_bearer(headers))
            return
        if self._admin_key is None:
            self.tenant(headers)
            allowed = len(self._keys) <= 1
        else:
            allowed = self._matching_key(headers, [self._admin_key, *self._keys]) == self._admin_key
        if not allowed:
            message = "This route concerns all clients of the server and needs its admin key (option --admin-key)."
            raise ApiError(403, message, type="permission_error", code="admin_key_needed")

    def is_admin(self, headers: Headers) -> bool:
        """Whether a client has the rights that `require_admin` requires."""
        try:
            self.require_admin(headers)
        except ApiError:
            return False
        return True

    def asker(self, headers: Headers) -> tuple[bytes | None, bool]:
        """Returns the tenant whose prefixes are asked about, and whether the client is the admin.

        If clients are tenants, the admin sends two keys: its own as the bearer, and a client's as `x-api-key`.

        Raises:
            ApiError: 401; a key is missing or unknown. 400; the admin's request names no tenant.
        """
        sent = self._sent(headers)
        if not (self._admin_key in sent or self.is_admin(headers)):
            return self.tenant(headers), False
        named = [key for key in sent if key in self._keys]
        if self.separates and not named:
            raise wrong("x-api-key", "must be the API key of the tenant whose cache the admin asks about")
        return (named[0] if named else None), True

    def remover(self, headers: Headers) -> tuple[bytes | None, bool]:
        """Returns the tenant whose prefixes a client may remove, and whether the client is the admin.

        Raises:
            ApiError: 401 or 403, as in `require_admin`.
        """
        if not self.separates:
            self.require_admin(headers)
            return None, True
        return self.client(headers)

    def client(self, headers: Headers) -> tuple[bytes | None, bool]:
        """Returns the tenant whose prefixes a client may name, and whether the client is the admin.

        Raises:
            ApiError: 401; the key is missing or unknown.
        """
        admins = [] if self._admin_key is None else [self._admin_key]
        if not self._keys:
            return None, True
        known = self._matching_key(headers, [*self._keys, *admins])
        return (known, known in admins) if self.separates else (None, True)

    def _matching_key(self, headers: Headers, keys: Sequence[bytes]) -> bytes:
        """Returns the digest of the key that the client sends, which must be one of `keys`."""
        # Compares all keys, and by their digests, so that the time taken reveals nothing about a key.
        matches = [key for sent in self._sent(headers) for key in keys if hmac.compare_digest(key, sent)]
        if not matches:
            message = "The API key is missing or unknown: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            asks = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, type="authentication_error", code="invalid_api_key", headers=asks)
        return matches[0]

    def _sent(self, headers: Headers) -> list[bytes]:
        """Returns digests of the keys that a client sends: as a Bearer token, and as Anthropic's clients do."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        sent = [token.strip() if scheme.lower() == "bearer" else None, headers.get("x-api-key")]
        return [self._digest(key.encode("latin-1")) for key in sent if key is not None]

    def _digest(self, key: bytes) -> bytes:
        # Keyed, because digests name the tenants' prefixes: a plain digest could be checked against likely keys.
        return hmac.digest(self._secret, key, "sha256")


def _as_bearer(headers: Headers) -> Headers:
    """Returns the headers with the password of HTTP Basic, if there is one, as a Bearer token."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return headers
    try:
        _, _, key = base64.b64decode(token.strip(), validate=True).decode().partition(":")
    except ValueError:
        key = ""
    return Headers({"authorization": f"Bearer {key}"} if key.isprintable() and key.isascii() else {})


@contextmanager
def _asking_a_person() -> Iterator[None]:
    """Makes a browser ask its user for the key."""
    try:
        yield
    except ApiError as error:
        if error.status == 401:
            error.headers = {
                "WWW-Authenticate": 'Basic realm="Mainstem: the admin key is the password", charset="UTF-8"'
            }
        raise
