"""Headers that become parameters."""

import pytest

from shmserve.config.flags import convert_header_pattern
from shmserve.errors import InvalidArgument
from shmserve.gateway.inference.infer_request import select_forwarded_headers

HEADERS = [("X-My-Key", "Value One"), ("Host", "h"), ("my-other", "2"), ("X-My-Key", "Value Two")]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("", []),
        ("my", ["X-My-Key", "my-other"]),
        ("^X-", ["X-My-Key"]),
        ("host|other", ["Host", "my-other"]),
        ("^key$", []),
        ("(?-i)my", ["my-other"]),
        ("(?-i)x-|(MY|my)(?i)-O", ["my-other"]),
        ("(?-i:X)-MY|(?U)(?P<h>hos?t)", ["X-My-Key", "Host"]),
        (r"\Qx-m\E[[:alpha:]]-.*y\z|(?<n>[^[:alnum:]]oth)", ["X-My-Key", "my-other"]),
        ("(?-i)|x", ["X-My-Key", "Host", "my-other"]),
    ],
)
def test_a_name_matches_in_part_and_in_any_case(pattern: str, names: list[str]) -> None:
    selected_headers = select_forwarded_headers(
        convert_header_pattern({"flag": pattern}, "flag"), HEADERS
    )
    assert list(selected_headers) == names
    assert selected_headers.get("X-My-Key", "Value Two") == "Value Two"


def test_values_that_are_not_utf8_are_refused() -> None:
    """Parsers have bytes that are not UTF-8 as surrogates, which no message can carry."""
    value = b"caf\xe9".decode(errors="surrogateescape")
    assert select_forwarded_headers("other", [("X-A", value)]) == {}
    with pytest.raises(InvalidArgument, match="Header 'X-A' is not UTF-8 and cannot be forwarded"):
        select_forwarded_headers("x-", [("X-A", value)])
    assert select_forwarded_headers("x-", [("X-A", "caf\xe9")]) == {"X-A": "caf\xe9"}


@pytest.mark.parametrize("name", ["sequence_id", "Priority", "timeout", "headers", "triton_x"])
def test_reserved_names_are_refused(name: str) -> None:
    assert select_forwarded_headers("other", [(name, "1")]) == {}
    with pytest.raises(InvalidArgument) as caught:
        select_forwarded_headers(".*", [(name, "1")])
    text = f"Header '{name.lower()}' is reserved for Triton usage and cannot be forwarded."
    assert caught.value.message == text
