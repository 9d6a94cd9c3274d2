"""Nearest path: a template of the routes or None, whatever the path is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.nearest_path import nearest_path

TEMPLATES = [
    "/healthz", "/v1/layers", "/v1/layers/{layer}", "/v1/layers/{layer}/attend", "/v1/attention", "/v2",
    "/v2/health/live", "/v2/models/{layer}/infer", "/v2/models/{layer}/versions/{version}/infer", "/openapi.json",
]  # fmt: skip
ATTEND = "/v1/layers/{layer}/attend"


@pytest.mark.parametrize("path", TEMPLATES)
@pytest.mark.parametrize("change", ["{}/", "/{}", "/api{}", "{}//", "{}?"])
def test_a_template_with_a_slash_or_a_prefix_too_many_is_found(path, change):
    assert nearest_path(change.format(path), TEMPLATES, 0.6) == path
    assert nearest_path(change.format(path.upper()), TEMPLATES, 0.6) == path


@pytest.mark.parametrize("path", [path for path in TEMPLATES if len(path) > 4])
def test_a_template_without_one_of_its_letters_is_found(path):
    for i in range(1, len(path)):
        if "{" not in path[: i + 1] and path[i] != "/":
            assert nearest_path(path[:i] + path[i + 1 :], TEMPLATES, 0.6) is not None


@pytest.mark.parametrize(
    "path", ["/attend", "/layers/x/attend", "/v1/layer/x/attend", "/v1/layers/x", "/v1/layers//attend"]
)
def test_the_hot_route_is_found_from_what_a_caller_remembers_of_it(path):
    assert nearest_path(path, [ATTEND, "/v1/attention"], 0.6) == ATTEND


def test_a_ratio_of_1_finds_only_templates_that_have_the_path_in_them():
    assert nearest_path("/v1/layers", [ATTEND], 1.0) == ATTEND
    assert nearest_path("/v1/layers/x/attend", TEMPLATES[:3], 1.0) is None


@pytest.mark.parametrize(
    "path", ["", "/", "///", "/nothing", "/v3/else", "/x" * 5000, "/" + "x" * 9000, "/é/漢", "/foo/bar"]
)
def test_far_from_every_template_there_is_none(path):
    assert nearest_path(path, TEMPLATES, 0.6) is None


@given(st.text(max_size=60))
def test_any_path_gives_a_template_or_none(path):
    assert nearest_path(path, TEMPLATES, 0.6) in (*TEMPLATES, None)
    assert nearest_path(path, [], 0.6) is None
