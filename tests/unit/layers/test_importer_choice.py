"""Importer: which layer of a checkpoint a family, a prefix and a number choose."""

from __future__ import annotations

import pytest
import torch

from service.errors import LayerError
from service.layers.importer import choose
from service.layers.source import Entry, Source


def source(*prefixes: str, name: str = "in_proj_weight", config: dict[str, object] | None = None) -> Source:
    entry = Entry((24, 8), lambda: torch.zeros(24, 8))
    return Source("x", config, dict.fromkeys(sorted(f"{prefix}{name}" for prefix in prefixes), entry))


STACKS = ("encoder.0.attn.", "encoder.1.attn.", "decoder.0.attn.", "decoder.0.cross.", "decoder.10.attn.", "head.")


def chosen(prefixes=STACKS, **how) -> str:
    return choose(source(*prefixes), **{"family": None, "prefix": None, "layer": None, **how}).prefix


def refused(prefixes=STACKS, *, made: Source | None = None, **how) -> str:
    with pytest.raises(LayerError) as caught:
        choose(made or source(*prefixes), **{"family": None, "prefix": None, "layer": None, **how})
    assert len(caught.value.message) <= 500
    return caught.value.message


@pytest.mark.parametrize(
    ("how", "prefix"),
    [
        ({"prefix": "encoder.1.attn"}, "encoder.1.attn."),
        ({"prefix": "encoder.1.attn."}, "encoder.1.attn."),
        ({"prefix": "encoder.1"}, "encoder.1.attn."),
        ({"prefix": "decoder.0.cross"}, "decoder.0.cross."),
        ({"prefix": "head"}, "head."),
        ({"layer": 1}, "encoder.1.attn."),
        ({"layer": 10}, "decoder.10.attn."),
        ({"layer": 0, "prefix": "encoder"}, "encoder.0.attn."),
    ],
)
def test_a_prefix_a_number_or_both_select_a_layer(how, prefix):
    assert chosen(**how) == prefix


def test_a_single_layer_needs_no_selection():
    assert chosen(["a.3.attn."]) == "a.3.attn."
    assert chosen(["a.3.attn."], layer=3) == "a.3.attn."
    assert chosen([""]) == ""
    assert chosen([""], layer=0) == ""
    assert chosen(["", "a."], prefix="") == ""


def test_several_layers_are_listed_with_the_options_that_select():
    """The list is bounded, and no layer is taken because it comes first."""
    message = refused()
    assert message.startswith(
        "it has 6 attention layers; choose one with --layer N or --prefix P: 'head', 'decoder.0.att"
    )
    assert message.endswith("and 2 more")
    assert refused(layer=0).startswith("layer 0 has 3 attentions: --prefix 'decoder.0.attn' or --prefix '")
    assert refused(prefix="decoder").startswith("it has 3 attention layers")
    assert "and 9996 more" in refused([f"{'x' * 1000}.{i}." for i in range(10_000)])


def test_two_attentions_of_one_layer_are_named_as_the_option_takes_them():
    """A decoder's self-attention and cross-attention; `--layer` cannot choose between them."""
    decoder = [f"decoder.layers.{i}.{name}." for i in (0, 1) for name in ("self_attn", "multihead_attn")]
    for how in ({"layer": 0}, {"prefix": "decoder.layers.0"}, {"layer": 0, "prefix": "decoder"}):
        assert refused(decoder, **how) == (
            "layer 0 has two attentions: --prefix 'decoder.layers.0.multihead_attn' or --prefix 'decoder.layers.0.self_attn'"
        )
    assert chosen(decoder, prefix="decoder.layers.0.self_attn") == "decoder.layers.0.self_attn."
    assert chosen(decoder, prefix="decoder.layers.0.self_attn", layer=0) == "decoder.layers.0.self_attn."
    deep = f"{'x' * 150}.layers.0."
    assert f"--prefix '{deep}self_attn'" in refused([f"{deep}self_attn.", f"{deep}cross."])
    assert refused(["self_attn.", "multihead_attn."]) == (
        "it has two attentions: --prefix 'multihead_attn' or --prefix 'self_attn'"
    )


def test_a_prefix_means_whole_names():
    """encoder.1 is not encoder.10, and a part of a name matches nothing."""
    both = ["encoder.1.", "encoder.10."]
    assert chosen(both, prefix="encoder.1") == "encoder.1."
    assert "no attention layer has the prefix 'encode'" in refused(both, prefix="encode")


def test_a_number_out_of_range_gives_the_number_of_layers():
    layers = [f"layer.{i}." for i in range(6)]
    for layer in (6, -1, 10**4000):
        assert refused(layers, layer=layer).endswith("has attention layers numbered 0 to 5 (6 in all)")
    assert refused(["a.", "b."], layer=0).endswith("has no attention layer with a number in its name")
    assert refused(["a."], layer=1).endswith("has attention layers numbered 0 to 0 (1 in all)")


ALBERT = "albert.encoder.albert_layer_groups.0.albert_layers.0."


@pytest.mark.parametrize(
    ("config", "depth"), [({"num_hidden_layers": 12}, 12), ({}, 1), (None, 1), ({"num_hidden_layers": "9"}, 1)]
)
def test_the_shared_layer_of_albert_is_every_layer(config, depth):
    made = source(ALBERT, name="attention.query.weight", config=config)
    for layer in (None, 0, depth - 1):
        assert choose(made, family=None, prefix=None, layer=layer).prefix == ALBERT
    assert f"has attention layers numbered 0 to {depth - 1} ({depth} in all)" in refused(made=made, layer=depth)


def test_an_unknown_checkpoint_shows_some_of_its_keys():
    """A few, spread over all of them, each cut, and how many there are."""
    keys = [f"model.layers.{i}.self_attn.{name}_own.weight" for i in range(40) for name in "qkvo"]
    message = refused(made=source(*keys, name=""))
    assert "no known family of attention layers in its 160 keys; name the four weights with --map query=KEY" in message
    assert "; found keys like 'model.layers.0.self_attn.k" in message
    assert message.count("model.layers.") == 4
    assert "in its 0 keys; name the four" in refused(made=source())
    assert refused(made=source()).endswith("; found keys like ")


def test_only_a_named_family_is_searched():
    assert "the family 'gpt' is unknown; known families are clip, torch-mha, esm, bert" in refused(family="gpt")
    assert refused(family="bert") == "no layer of the family bert in its 6 keys; it has layers of 'torch-mha'"
    assert chosen(["a."], family="torch-mha") == "a."
    assert len(refused(family="x" * 10_000)) <= 500
