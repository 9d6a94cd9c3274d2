"""File descriptors: the connection limit fits the descriptor limit and leaves some for everything else."""

import resource

import pytest

from service.settings import SettingsError
from service.supervisor.descriptors import (
    DEFAULT_MAX_CONNECTIONS,
    RESERVED_DESCRIPTORS,
    max_connections,
    raise_descriptor_limit,
)


@pytest.mark.parametrize(
    ("wanted", "descriptors", "kept"),
    [
        (0, 1024, 1024 - RESERVED_DESCRIPTORS),
        (0, 2**20, DEFAULT_MAX_CONNECTIONS),
        (0, resource.RLIM_INFINITY, DEFAULT_MAX_CONNECTIONS),
        (50_000, resource.RLIM_INFINITY, 50_000),
        (50_000, 2**20, 50_000),
        (864, 1024, 864),
        (0, RESERVED_DESCRIPTORS + 1, 1),
    ],
)
def test_the_number_of_connections_fits_the_descriptors(monkeypatch, wanted, descriptors, kept):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5, descriptors))
    assert max_connections(wanted) == kept


@pytest.mark.parametrize(("wanted", "descriptors"), [(865, 1024), (0, RESERVED_DESCRIPTORS), (10**6, 10**6)])
def test_more_connections_than_descriptors_refuse_the_start(monkeypatch, wanted, descriptors):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5, descriptors))
    with pytest.raises(SettingsError, match=r"^ATTENTION_MAX_CONNECTIONS: .* need .* file descriptors"):
        max_connections(wanted)


@pytest.mark.parametrize(("wanted", "found"), [(100, 700), (800, 800), (10**9, 1000)])
def test_the_soft_limit_of_descriptors_is_raised_as_far_as_may_be(monkeypatch, wanted, found):
    limits = [(700, 1000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    raise_descriptor_limit(wanted - RESERVED_DESCRIPTORS)
    assert limits[-1] == (found, 1000)
