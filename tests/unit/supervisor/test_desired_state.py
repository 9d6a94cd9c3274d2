"""Desired state: what each phase serves and holds, and the rollback."""

import pytest

from service.supervisor.desired_state import DesiredState, Phase

OLD, NEW = {"a": "sha256:1", "b": "sha256:2"}, {"a": "sha256:3", "b": "sha256:2"}


def test_a_rollout_serves_the_old_layers_until_all_are_ready_and_holds_both_until_all_serve():
    before = DesiredState(4, Phase.SETTLED, OLD)
    prepare = before.prepare("a", "sha256:3")
    serve = prepare.serve()
    after = serve.settle()
    assert [desired.version for desired in (before, prepare, serve, after)] == [4, 5, 6, 7]
    assert [desired.served for desired in (before, prepare, serve, after)] == [OLD, OLD, NEW, NEW]
    both = {*OLD.items(), *NEW.items()}
    assert [desired.loaded for desired in (before, prepare, serve, after)] == [
        {*OLD.items()},
        both,
        both,
        {*NEW.items()},
    ]


@pytest.mark.parametrize(
    ("name", "digest", "layers"),
    [("a", None, {"b": "sha256:2"}), ("c", "sha256:9", {**OLD, "c": "sha256:9"}), ("a", "sha256:1", OLD)],
    ids=["drop", "add", "same"],
)
def test_a_rollout_changes_one_layer(name, digest, layers):
    desired = DesiredState(4, Phase.SETTLED, OLD).prepare(name, digest)
    assert (desired.layers, desired.previous, desired.changed_layer) == (layers, OLD, name)
    assert desired.serve().changed_layer == name
    assert desired.serve().settle() == DesiredState(7, Phase.SETTLED, layers)


@pytest.mark.parametrize("steps", [1, 2])
def test_an_abort_restores_the_old_layers_from_either_phase(steps):
    desired = DesiredState(4, Phase.SETTLED, OLD).prepare("a", "sha256:3")
    desired = desired.serve() if steps == 2 else desired
    assert desired.abort() == DesiredState(desired.version + 1, Phase.SETTLED, OLD)
