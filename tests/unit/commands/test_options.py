"""The options that several commands have: the address that they ask."""

import pytest

from service.commands.options import service_url
from service.settings import ENV_PREFIX, Settings, SettingsError


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in Settings.model_fields:
        monkeypatch.delenv(f"{ENV_PREFIX}{name.upper()}", raising=False)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"HOST": "0.0.0.0", "PORT": "9000"}, "http://127.0.0.1:9000"),
        ({"HOST": "::"}, "http://[::1]:8000"),
        ({"HOST": "192.0.2.7"}, "http://192.0.2.7:8000"),
        ({"TLS_CERT_FILE": "cert.pem"}, "https://127.0.0.1:8000"),
    ],
)
def test_the_address_comes_from_the_settings(given, url, monkeypatch):
    for name, value in given.items():
        monkeypatch.setenv(f"{ENV_PREFIX}{name}", value)
    assert service_url(None) == url


def test_port_zero_cannot_be_checked(monkeypatch):
    monkeypatch.setenv(f"{ENV_PREFIX}PORT", "0")
    assert service_url("http://127.0.0.1:1") == "http://127.0.0.1:1"
    with pytest.raises(SettingsError, match="give --url"):
        service_url(None)
