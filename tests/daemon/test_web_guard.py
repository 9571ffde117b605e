"""Access control of HTTP requests that change state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tmd.daemon.web.guard import RequestHeaders, host_name, refusal
from tmd.schema import Secret

TOKEN = "0123456789abcdef"
NAMES = frozenset({"node7", "10.0.0.7"})
GOOD = RequestHeaders(
    host="localhost:7471", authorization=f"Bearer {TOKEN}", content_type="application/json"
)


def code(**changes):
    problem = refusal(structs.replace(GOOD, **changes), Secret(TOKEN), NAMES)
    return problem.code if problem else None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"host": "127.0.0.1:9999"},
        {"host": "[::1]:7471"},
        {"host": "Node7:7471"},
        {"host": "10.0.0.7"},
        {"authorization": f"bearer  {TOKEN}"},
        {"origin": "http://localhost:7471", "fetch_site": "same-origin"},
        {"fetch_site": "none"},
    ],
)
def test_operators_are_let_in(changes):
    assert code(**changes) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"authorization": ""}, "wrong_token"),
        ({"authorization": "Bearer "}, "wrong_token"),
        ({"authorization": f"Basic {TOKEN}"}, "wrong_token"),
        ({"authorization": f"Bearer {TOKEN}x"}, "wrong_token"),
        ({"authorization": "Bearer \u00fc"}, "wrong_token"),
        ({"authorization": "Bearer \udcff"}, "wrong_token"),  # a byte that is not UTF-8
        ({"host": "evil.example:7471"}, "wrong_host"),
        ({"host": ""}, "wrong_host"),
        ({"host": "[::1"}, "wrong_host"),
        ({"origin": "http://evil.example"}, "cross_origin"),
        ({"origin": "http://localhost:8080"}, "cross_origin"),
        ({"origin": "null"}, "cross_origin"),
        ({"fetch_site": "cross-site"}, "cross_origin"),
        ({"fetch_site": "same-site"}, "cross_origin"),
        ({"content_type": "text/plain"}, "wrong_content_type"),
    ],
)
def test_others_are_refused_with_a_code(changes, expected):
    assert code(**changes) == expected


def test_without_a_token_every_request_is_refused():
    problem = refusal(structs.replace(GOOD, authorization="Bearer "), None, NAMES)

    assert (problem.status, problem.code) == (403, "no_token_configured")


@given(st.text(), st.text(), st.text())
def test_no_header_crashes_the_guard_or_passes_it_without_a_token(host, authorization, origin):
    problem = refusal(
        structs.replace(GOOD, host=host, authorization=authorization, origin=origin),
        Secret(TOKEN),
        NAMES,
    )

    assert problem is not None
    assert isinstance(host_name(host), str)
