"""Authorisation: bearer tokens with scopes, combined with Triton's restricted APIs (pure).

scope       the API of a route or an RPC: Triton's categories, and the metrics page
token       `Authorization: Bearer TOKEN`; grants the scopes listed in the token file
restricted  an API that additionally requires a configured header and value

All listeners apply the same rules. gRPC calls `Authorisation.authorise`; HTTP uses a
`ClientIdentity` (gateway/listener.py), which caches the credentials of a connection. Without tokens
all scopes are open, and access is limited by the listening addresses alone.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shmserve.errors import (
    InvalidArgument,
    PermissionDenied,
    ShmserveError,
    Unauthenticated,
    convert_os_errors,
    read_text,
)

# The APIs that --http-restricted-api and --grpc-restricted-protocol accept.
RESTRICTABLE = (
    *("health", "metadata", "inference", "shared-memory", "model-config", "model-repository"),
    *("statistics", "trace", "logging"),
)
METRICS = "metrics"
# The scope for the metadata of models. The inference scope includes this scope, since requests
# depend on the metadata. A restriction of the metadata API also applies to it.
MODEL_METADATA = "metadata of models"
SCOPES = (*RESTRICTABLE, METRICS)
# Health probes need no token, because the server's health is not confidential.
SCOPES_WITHOUT_TOKEN = frozenset({"health"})

GRPC_HEADER_PREFIX = "triton-grpc-protocol-"

_MIN_TOKEN_LEN = 16
_TOKENS_FILE = "--auth-token-file"


class Restricted(PermissionDenied):
    """Triton's rejection of a restricted API: 403 over HTTP, UNAVAILABLE over gRPC."""

    code = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class Restriction:
    """The header (lower case) and the value that a restricted API requires."""

    header: str
    value: str


# The SHA-256 digest (hex) of each token, and its scopes.
Tokens = Mapping[str, tuple[str, ...]]
Restrictions = dict[str, Restriction]


class Authorisation:
    """The authorisation rules of one protocol.

    Args:
        tokens: The accepted tokens; None or empty: no token is required.
        rules: The restricted APIs, each with the header that it requires.
        api_noun: The protocol's term for a restricted API ("API" for HTTP, "protocol" for gRPC).
    """

    def __init__(self, tokens: Tokens | None, rules: Restrictions, api_noun: str = "API") -> None:
        self._tokens = [
            (bytes.fromhex(digest), frozenset((*scopes, *_implied_scopes(scopes))))
            for digest, scopes in (tokens or {}).items()
        ]
        self.requires_token = bool(self._tokens)
        if "metadata" in rules:
            rules = {**rules, MODEL_METADATA: rules["metadata"]}
        self.restrictions = rules
        self._api_noun = api_noun

    def with_tokens(self, tokens: Tokens) -> Authorisation:
        """Return the same rules with other tokens."""
        return Authorisation(tokens, self.restrictions, self._api_noun)

    def authorise(self, scope: str, metadata: Mapping[str, str]) -> ShmserveError | None:
        """Return the error for a request to an API of `scope`; None if the request is permitted.

        `metadata` are the request's headers, looked up by lower-case names.
        """
        if self.requires_token and scope not in SCOPES_WITHOUT_TOKEN:
            scopes = self.scopes(metadata.get("authorization"))
            if (refusal := self.refuse_scope(scope, scopes)) is not None:
                return refusal
        return self.refuse_restricted(scope, metadata)

    def scopes(self, header: str | None) -> frozenset[str] | None:
        """Return the scopes of the token in an Authorization header; None if the token is unknown.

        The header's digest is compared with every token's digest, in constant time.
        """
        auth_scheme, _, token = (header or "").partition(" ")
        if auth_scheme.lower() != "bearer":
            return None
        digest = hashlib.sha256(token.strip().encode(errors="surrogateescape")).digest()
        granted_scopes: frozenset[str] | None = None
        for accepted_digest, scopes in self._tokens:
            if hmac.compare_digest(accepted_digest, digest):
                granted_scopes = scopes
        return granted_scopes

    @staticmethod
    def refuse_scope(scope: str, scopes: frozenset[str] | None) -> ShmserveError | None:
        """Return the error if a client's `scopes` (None: unknown token) lack `scope`, else None."""
        if scopes is None:
            text = "this server requires a known token: 'Authorization: Bearer TOKEN'"
            return Unauthenticated(text)
        if scope not in scopes:
            return PermissionDenied(f"this token has no access to the {scope} API")
        return None

    def refuse_restricted(self, scope: str, metadata: Mapping[str, str]) -> ShmserveError | None:
        """Return Triton's error if `scope` is restricted and the header is missing or wrong."""
        rule = self.restrictions.get(scope)
        if rule is None:
            return None
        value = metadata.get(rule.header.lower(), "")
        if hmac.compare_digest(_encode(value), _encode(rule.value)):
            return None
        return Restricted(f"This {self._api_noun} is restricted, expecting header '{rule.header}'")


def _implied_scopes(scopes: Iterable[str]) -> tuple[str, ...]:
    return (MODEL_METADATA,) if not {"metadata", "inference"}.isdisjoint(scopes) else ()


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


# --- from the command line ------------------------------------------------------------------------


def read_tokens(path: Path) -> dict[str, tuple[str, ...]]:
    """Read a token file and return the scopes of each token's digest.

    A line is `TOKEN` (all scopes) or `TOKEN scope,scope`; `#` starts a comment.

    Raises:
        InvalidArgument: The file is invalid; the message never contains a token.
    """
    with convert_os_errors(f"{_TOKENS_FILE}: cannot read '{path}'", "not text"):
        file_mode = path.stat().st_mode
    text = read_text(_TOKENS_FILE, path)
    if file_mode & 0o022:
        text = f"is writable by users other than its owner; run chmod go-w '{path}'"
        raise InvalidArgument(f"{_TOKENS_FILE}: '{path}' {text}")
    tokens: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        position = f"{_TOKENS_FILE}: '{path}' line {number}"
        if len(words) > 2:
            message = f"{position}: expected TOKEN or TOKEN SCOPE,SCOPE, found more words"
            raise InvalidArgument(message)
        if len(words[0]) < _MIN_TOKEN_LEN:
            raise InvalidArgument(f"{position}: a token needs {_MIN_TOKEN_LEN} characters or more")
        scopes = words[1].split(",") if len(words) == 2 else SCOPES
        for scope in scopes:
            if scope not in SCOPES:
                allowed_names = ", ".join(SCOPES)
                message = f"{position}: unknown scope '{scope}' (allowed: {allowed_names})"
                raise InvalidArgument(message)
        digest = hashlib.sha256(_encode(words[0])).hexdigest()
        if digest in tokens:
            raise InvalidArgument(f"{position}: duplicate token")
        tokens[digest] = tuple(scopes)
    if not tokens:
        raise InvalidArgument(f"{_TOKENS_FILE}: '{path}' has no token")
    return tokens


def parse_restrictions(flag: str, values: Iterable[str], prefix: str = "") -> Restrictions:
    """Return the restrictions in the values of a flag, which have Triton's form.

    The form is `api[,api]:header=value`.

    Args:
        flag: The name of the flag, for error texts.
        values: The values of the flag.
        prefix: The prefix of every header.

    Raises:
        InvalidArgument: A value has another form, or an API is unknown or repeated.
    """
    noun = flag.rpartition("-")[2]  # the noun in error texts: "api" or "protocol"
    restrictions: dict[str, Restriction] = {}
    for text in values:
        names, _, setting = text.partition(":")
        header, _, value = setting.partition("=")
        if not (names and header and value):
            message = f"{flag} option format is '<config name>:<setting>=<value>'. Got {names}"
            raise InvalidArgument(message)
        for name in names.split(","):
            if name not in RESTRICTABLE:
                allowed_names = ", ".join(RESTRICTABLE)
                message = f"{flag}: unknown restricted {noun} '{name}' (allowed: {allowed_names})"
                raise InvalidArgument(message)
            if name in restrictions:
                raise InvalidArgument(
                    f"{flag}: restricted {noun} '{name}' can not be specified in multiple config "
                    "groups"
                )
            restrictions[name] = Restriction(prefix + header, value)
    return restrictions
