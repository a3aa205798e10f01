"""A URL names one place, or is refused with a sentence that says what to write."""

from __future__ import annotations

import pytest

from pion_vllm_mlx.cache.connection import Address
from pion_vllm_mlx.cache.store_client_endpoint import Place, parse_url
from pion_vllm_mlx.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("tcp://localhost:7", Place(Address(host="localhost", port=7))),
        ("tcp://10.0.0.1", Place(Address(host="10.0.0.1", port=1974))),
        ("unix:///run/a%20b", Place(Address(path="/run/a b"))),
        ("embedded:", Place(embedded=True)),
        ("embedded:///a%20b%23%3F", Place(embedded=True, folder="/a b#?")),
        ("embedded:///mit leer ü", Place(embedded=True, folder="/mit leer ü")),
    ],
)
def test_a_url_names_one_place(url: str, place: Place) -> None:
    assert parse_url(url) == place


@pytest.mark.parametrize("url", ["tcp://:secret@host:1", "tcp://user@host"])
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="PION_REQUIREPASS") as refused:
        parse_url(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["embedded:///a#b", "embedded:///a?b", "tcp://host:1?db=3"])
def test_what_would_be_cut_off_a_place_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="%3F and %23"):
        parse_url(url)


@pytest.mark.parametrize("url", ["", "host:1974", "redis://host", "embedded://a/b", "tcp://h:x"])
def test_what_is_no_place_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_url(url)
