"""Addresses of outputs: what may be shown of them, and which are refused."""

from __future__ import annotations

import pytest

from batchgen.errors import UsageError
from batchgen.outputs.urls import Location, check_slashes, is_url, state_folder, without_secrets

SECRET = "hunter2"
BARED = {
    f"s3://AKIA:{SECRET}@bucket/a/b?token={SECRET}": "s3://bucket/a/b",
    f"sftp://me:{SECRET}@host:22/dir": "sftp://host:22/dir",
    f"https://host/x?sig={SECRET}#frag": "https://host/x",
    f"error at 's3://k:{SECRET}@b/x?secret={SECRET}': and ftp://u:{SECRET}@h/y, too": "error at 's3://b/x': and ftp://h/y, too",
    f"user:{SECRET}@ftp://k:{SECRET}@h": f"user:{SECRET}@ftp://h",  # no address, no password of one
    "a mail me@host.org and 5 a? no": "a mail me@host.org and 5 a? no",
    "file:///tmp/x": "file:///tmp/x",
}


@pytest.mark.parametrize(("text", "shown"), BARED.items())
def test_no_secret_is_left_in_a_text(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


@pytest.mark.parametrize("text", [f"s3://AKIA:{SECRET}@bucket/a/", f"s3://bucket/a?secret={SECRET}&key=AKIA", f"sftp://me:{SECRET}@host/dir"])
def test_a_place_says_nothing_secret_of_itself(text: str) -> None:
    place = Location.parse(text)
    assert SECRET not in repr(place)
    assert SECRET not in place.shown
    assert SECRET in repr((place.address, place.options)), "the connection has it"


def test_an_s3_place_takes_what_its_connection_needs() -> None:
    place = Location.parse("s3://A%2FB:C@bucket/run/?endpoint_url=http://127.0.0.1:9&region=eu-x&anon=false")
    assert (place.shown, place.address) == ("s3://bucket/run", "s3://bucket/run")
    assert dict(place.options) == {
        "key": "A/B", "secret": "C", "endpoint_url": "http://127.0.0.1:9", "anon": False, "client_kwargs": (("region_name", "eu-x"),),
    }


@pytest.mark.parametrize("text", ["s3://", "s3:///x", "memory://", "out", f"sftp://h/x?sig={SECRET}", f"s3://b/x?who={SECRET}", "zip::s3://b/x"])
def test_addresses_that_lead_nowhere_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Location.parse(text)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(("text", "url"), [("s3://b/x", True), ("memory://x", True), ("out/x", False), ("C:\\out", False), ("/a//b", False), ("a:b", False)])
def test_what_is_an_address(text: str, url: bool) -> None:
    assert is_url(text) == url


@pytest.mark.parametrize(
    ("text", "meant"),
    [("s3:/night/x", "s3://night/x"), ("memory:/x", "memory://x"), ("gs:/b", "gs://b"), (f"s3:/a:{SECRET}@b/x?secret={SECRET}", "s3://b/x")],
)
def test_an_address_with_one_slash_is_no_folder(text: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {meant}") as caught:
        check_slashes(text)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("text", ["s3://b/x", "out/x", "C:/out", "C:\\out", "/a//b", "./s3:/night", "a:b", "out/s3:/x"])
def test_folders_and_addresses_have_the_slashes_they_need(text: str) -> None:
    check_slashes(text)


def test_each_place_has_a_state_of_its_own() -> None:
    one, other = Location.parse("s3://a:b@bucket/run"), Location.parse("s3://bucket2/run")
    assert state_folder(one, {"XDG_STATE_HOME": "/s"}) == state_folder(Location.parse("s3://bucket/run/?key=z"), {"XDG_STATE_HOME": "/s"})
    assert state_folder(one, {"XDG_STATE_HOME": "/s"}) != state_folder(other, {"XDG_STATE_HOME": "/s"})
    assert state_folder(one, {"XDG_STATE_HOME": "/s"}, "1-of-2") != state_folder(one, {"XDG_STATE_HOME": "/s"})
    assert str(state_folder(one, {"HOME": "/home/me"})).startswith("/home/me/.local/state/batchgen/run-")
