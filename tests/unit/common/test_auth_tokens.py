"""Authorisation: tokens, scopes, restricted APIs, and their command-line flags."""

import hashlib
from pathlib import Path

import pytest

from shmserve.common.auth_tokens import (
    GRPC_HEADER_PREFIX,
    MODEL_METADATA,
    RESTRICTABLE,
    SCOPES,
    SCOPES_WITHOUT_TOKEN,
    Authorisation,
    Restriction,
    parse_restrictions,
    read_tokens,
)
from shmserve.errors import InvalidArgument

ADMIN, LIMITED = "all-scopes-token", "inference-token!"


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# ours\n\n{ADMIN}\n  {LIMITED} inference,metadata # a program\n")
    path.chmod(0o600)
    return path


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_a_token_grants_its_scopes(tokens_file: Path) -> None:
    rules = Authorisation(read_tokens(tokens_file), {})
    assert rules.authorise(MODEL_METADATA, bearer(LIMITED)) is None
    for scope in SCOPES:
        assert rules.authorise(scope, bearer(ADMIN)) is None
        access_error = rules.authorise(scope, bearer(LIMITED))
        if scope in ("inference", "metadata", *SCOPES_WITHOUT_TOKEN):
            assert access_error is None
        else:
            assert access_error is not None
            assert (access_error.status, access_error.code) == (403, "PERMISSION_DENIED")
            assert scope in access_error.message


@pytest.mark.parametrize(
    ("scopes", "status"), [("inference", 0), ("metadata", 0), ("health,statistics", 403)]
)
def test_the_inference_scope_may_read_signatures(tmp_path: Path, scopes: str, status: int) -> None:
    path = tmp_path / "some"
    path.write_text(f"{LIMITED} {scopes}\n")
    rules = Authorisation(read_tokens(path), {"metadata": Restriction("key", "secret")})
    access_error = rules.authorise(MODEL_METADATA, {**bearer(LIMITED), "key": "secret"})
    assert (access_error.status if access_error else 0) == status
    # The scope "metadata of models" is restricted like the metadata API.
    assert rules.authorise(MODEL_METADATA, bearer(LIMITED)) is not None
    if scopes == "inference":
        assert rules.authorise("metadata", {**bearer(LIMITED), "key": "secret"}) is not None


@pytest.mark.parametrize(
    "header",
    [
        *(
            "",
            "Bearer",
            "Bearer ",
            f"Basic {ADMIN}",
            ADMIN,
            f"Bearer {ADMIN}x",
            f"Bearer {ADMIN[:-1]}",
        ),
        *(f"Bearer {ADMIN.upper()}", "Bearer \udcff\udcfe", f"Bearer {ADMIN},{LIMITED}"),
    ],
)
def test_a_header_without_a_token_grants_only_health(tokens_file: Path, header: str) -> None:
    rules = Authorisation(read_tokens(tokens_file), {})
    for metadata in ({"authorization": header}, {}):
        for scope in SCOPES:
            access_error = rules.authorise(scope, metadata)
            if scope in SCOPES_WITHOUT_TOKEN:
                assert access_error is None
            else:
                assert access_error is not None
                assert (access_error.status, access_error.code) == (401, "UNAUTHENTICATED")


def test_the_authorization_scheme_is_case_insensitive(tokens_file: Path) -> None:
    rules = Authorisation(read_tokens(tokens_file), {})
    assert rules.authorise("inference", {"authorization": f"bearer  {ADMIN} "}) is None


def test_without_tokens_every_scope_is_granted() -> None:
    rules = Authorisation(None, {})
    assert all(rules.authorise(scope, {}) is None for scope in SCOPES)


def test_tokens_are_kept_as_digests(tokens_file: Path) -> None:
    """No token is stored by the server, passed to its processes, or printable."""
    digests = read_tokens(tokens_file)
    assert set(digests) == {hashlib.sha256(t.encode()).hexdigest() for t in (ADMIN, LIMITED)}
    assert ADMIN not in repr(digests)


@pytest.mark.parametrize(
    ("text", "expected_error"),
    [
        ("", "has no token"),
        ("# nothing\n", "has no token"),
        ("short\n", "line 1: a token needs 16 characters"),
        (f"{ADMIN} inference,nothing\n", "line 1: unknown scope 'nothing' (allowed: health, "),
        (f"{ADMIN} inference metadata\n", "line 1: expected TOKEN or TOKEN SCOPE,SCOPE"),
        (f"{ADMIN}\n{ADMIN} inference\n", "line 2: duplicate token"),
    ],
)
def test_bad_token_files_are_rejected(tokens_file: Path, text: str, expected_error: str) -> None:
    tokens_file.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        read_tokens(tokens_file)
    assert expected_error in caught.value.message
    assert ADMIN not in caught.value.message


def test_unreadable_and_shared_token_files_are_rejected(tokens_file: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read"):
        read_tokens(tokens_file / "nothing")
    tokens_file.write_bytes(b"\xff\xfe\n")
    with pytest.raises(InvalidArgument, match="cannot read"):
        read_tokens(tokens_file)
    tokens_file.write_text(ADMIN)
    tokens_file.chmod(0o620)
    with pytest.raises(InvalidArgument, match="is writable by users other"):
        read_tokens(tokens_file)


def test_restrictions_are_parsed_as_in_triton() -> None:
    flag = "--http-restricted-api"
    found = parse_restrictions(flag, ["health,model-repository:admin-key=a=b", "trace:K:x=v,w"])
    assert found == {
        "health": Restriction("admin-key", "a=b"),
        "model-repository": Restriction("admin-key", "a=b"),
        "trace": Restriction("K:x", "v,w"),
    }
    assert parse_restrictions(flag, []) == {}
    assert set(parse_restrictions(flag, [",".join(RESTRICTABLE) + ":k=v"])) == set(RESTRICTABLE)


@pytest.mark.parametrize(
    ("text", "expected_error"),
    [
        ("health", "option format is '<config name>:<setting>=<value>'. Got health"),
        ("health:k", "option format is"),
        ("health:k=", "option format is"),
        ("health:=v", "option format is"),
        (":k=v", "option format is"),
        ("foo:k=v", "unknown restricted api 'foo'"),
        ("metrics:k=v", "unknown restricted api 'metrics'"),
        (
            "health,health:k=v",
            "restricted api 'health' can not be specified in multiple config groups",
        ),
    ],
)
def test_invalid_restrictions_are_rejected(text: str, expected_error: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_restrictions("--http-restricted-api", [text])
    assert expected_error in caught.value.message
    with pytest.raises(InvalidArgument, match="can not be specified in multiple"):
        parse_restrictions("--http-restricted-api", ["trace:k=v", "trace:k=w"])


def test_a_restricted_api_needs_its_header() -> None:
    rules = Authorisation(None, {"health": Restriction("Admin-Key", "secret")})
    assert rules.authorise("metadata", {}) is None
    assert rules.authorise("health", {"admin-key": "secret"}) is None
    for metadata in ({}, {"admin-key": ""}, {"admin-key": "Secret"}, {"admin-key": "\udcff"}):
        access_error = rules.authorise("health", metadata)
        assert access_error is not None
        assert (access_error.status, access_error.code) == (403, "UNAVAILABLE")
        assert access_error.message == "This API is restricted, expecting header 'Admin-Key'"


def test_a_restricted_protocol_has_a_longer_header() -> None:
    found = parse_restrictions("--grpc-restricted-protocol", ["trace:k=v"], GRPC_HEADER_PREFIX)
    rules = Authorisation(None, found, "protocol")
    assert rules.authorise("trace", {"triton-grpc-protocol-k": "v"}) is None
    access_error = rules.authorise("trace", {"k": "v"})
    assert access_error is not None
    text = "This protocol is restricted, expecting header 'triton-grpc-protocol-k'"
    assert access_error.message == text


def test_a_restriction_holds_for_tokens_too(tokens_file: Path) -> None:
    rules = Authorisation(read_tokens(tokens_file), {"trace": Restriction("k", "v")})
    assert rules.authorise("trace", {**bearer(ADMIN), "k": "v"}) is None
    assert rules.authorise("trace", bearer(ADMIN)) is not None
    assert rules.authorise("trace", {"k": "v"}) is not None
