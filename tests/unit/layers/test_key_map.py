"""Key map: layers whose keys the caller names, and the error for a source of no known family."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from service.errors import LayerError
from service.layers.importer import import_layer
from service.layers.key_map import HOW, parse_key_map
from service.layers.unsupported import ROTARY
from tests.unit.layers.checkpoints import linear, linears, random, save_directory, save_safetensors
from tests.unit.layers.refusals import refused_import

# Widths with numbers of heads.
SIZES = [(12, 3), (64, 4)]
SEPARATE = {
    role: f"enc.0.mix.{letter}.weight" for role, letter in zip(("query", "key", "value", "output"), "abcd", strict=True)
}
FUSED = {"qkv": "enc.0.mix.in.weight", "output": "enc.0.mix.out.weight"}


def separate(width: int, *, bias: bool = True) -> dict[str, torch.Tensor]:
    others = {"enc.0.mlp.weight": random(width, width), "enc.0.mixer.weight": random(width)}
    return {**linears("enc.0.mix.", *"abcd", width=width, bias=bias), **others}


def unparsed(*pairs: str, fused: str | None = None) -> str:
    with pytest.raises(LayerError) as caught:
        parse_key_map(pairs, fused)
    assert len(caught.value.message) <= 500
    return caught.value.message


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("width", "heads"), SIZES)
def test_four_named_keys_are_a_layer_with_their_biases(tmp_path, width, heads, bias):
    """A bias is the key with its last `weight` replaced; keys outside the module do not matter."""
    tensors = separate(width, bias=bias)
    layer = import_layer(save_safetensors(tmp_path / "x.safetensors", tensors), name="x", heads=heads, key_map=SEPARATE)
    assert (layer.family, layer.spec.num_heads) == ("mapped", heads)
    assert layer.source == "x.safetensors enc.0.mix (mapped)"
    for role, key in SEPARATE.items():
        assert torch.equal(layer.tensors[f"{role}.weight"], tensors[key])
        assert (f"{role}.bias" in layer.tensors) is bias
        if bias:
            assert torch.equal(layer.tensors[f"{role}.bias"], tensors[key.replace("weight", "bias")])


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("width", "heads"), SIZES)
def test_a_fused_key_holds_query_key_and_value_in_this_order(tmp_path, width, heads, is_transposed):
    """[3d, d] is a Linear; [d, 3d] is applied from the right, and the output with it."""
    tensors = {**linear("enc.0.mix.in", 3 * width, width), **linear("enc.0.mix.out", width, width, seed=9)}
    stored = {key: x.T.contiguous() if is_transposed and x.ndim == 2 else x for key, x in tensors.items()}
    path = save_safetensors(tmp_path / "x.safetensors", stored)
    layer = import_layer(path, name="x", heads=heads, key_map=FUSED)
    x = random(5, width)
    projected = functional.linear(x, tensors[FUSED["qkv"]], tensors["enc.0.mix.in.bias"]).split(width, dim=1)
    for role, expected in zip(("query", "key", "value"), projected, strict=True):
        found = functional.linear(x, layer.tensors[f"{role}.weight"], layer.tensors[f"{role}.bias"])
        torch.testing.assert_close(found, expected)
    assert torch.equal(layer.tensors["output.weight"], tensors[FUSED["output"]])


def test_compiled_names_may_be_given_as_the_file_has_them(tmp_path):
    path = save_safetensors(tmp_path / "x.safetensors", {f"_orig_mod.{key}": x for key, x in separate(12).items()})
    for before in ("", "_orig_mod."):
        assert import_layer(path, name="x", heads=3, key_map={role: before + key for role, key in SEPARATE.items()})


def test_compiled_names_are_other_keys_only_if_the_file_has_both(tmp_path):
    """Else one key under two names is one key."""
    tensors = {key: value for key, value in separate(12).items() if not key.startswith("enc.0.mix.b.")}
    key_map = {**SEPARATE, "key": f"_orig_mod.{SEPARATE['query']}"}
    path = save_safetensors(tmp_path / "x.safetensors", tensors)
    assert "--map names one key for two roles: 'enc.0.mix.a.weight', 'enc.0.mix.a.weight'" in refused_import(
        path, heads=3, key_map=key_map
    )
    other = random(12, 12, seed=7)
    save_safetensors(path, {**tensors, key_map["key"]: other})
    ignore = ["enc.0.mlp.weight", "enc.0.mixer.weight"]  # the two names have no module in common
    layer = import_layer(path, name="x", heads=3, key_map=key_map, ignore=ignore)
    assert torch.equal(layer.tensors["key.weight"], other)


@pytest.mark.parametrize(("width", "heads"), SIZES)
def test_an_unknown_key_is_refused_with_the_nearest_one(tmp_path, width, heads):
    path = save_safetensors(tmp_path / "x.safetensors", separate(width))
    for wrong in ("enc.0.mix.c", "enc.0.mix.c.wieght", "enc.0.mix.c.weights"):
        assert refused_import(path, heads=heads, key_map={**SEPARATE, "value": wrong}) == (
            f"source 'x.safetensors': it has no key '{wrong}' (--map value); the nearest is 'enc.0.mix.c.weight'"
        )
    save_safetensors(path, {"enc.0.mix.a.bias": random(width)})
    assert refused_import(path, heads=heads, key_map=SEPARATE).endswith(
        "it has no key 'enc.0.mix.a.weight' (--map query), and no matrix"
    )


@pytest.mark.parametrize(("width", "heads"), SIZES)
def test_shapes_that_do_not_fit_are_shown(tmp_path, width, heads):
    """A key weight with half the rows, a vector, and a fused weight whose rows do not divide by three."""
    path = tmp_path / "x.safetensors"
    tensors = separate(width, bias=False)
    half = random(width // 2, width)
    save_safetensors(path, {**tensors, SEPARATE["key"]: half})
    assert refused_import(path, heads=heads, key_map=SEPARATE).endswith(
        f"key.weight (from '{SEPARATE['key']}') has the shape [{width // 2}, {width}], expected [{width}, {width}]"
    )
    save_safetensors(path, {**tensors, SEPARATE["query"]: random(width)})
    assert refused_import(path, heads=heads, key_map=SEPARATE).endswith(f"has the shape [{width}], expected two widths")
    save_safetensors(path, {FUSED["qkv"]: random(3 * width + 1, width), FUSED["output"]: random(width, width)})
    assert f"has the shape [{3 * width + 1}, {width}]; {3 * width + 1} rows do not divide into 3" in refused_import(
        path, heads=heads, key_map=FUSED
    )


@pytest.mark.parametrize("roles", [("query", "key", "value", "output"), ("key", "query", "value", "output")])
def test_the_bias_of_a_key_is_no_weight_of_another_role(tmp_path, roles):
    """Whichever of the two the map names first."""
    path = save_safetensors(tmp_path / "x.safetensors", separate(12))
    key_map = {**{role: SEPARATE[role] for role in roles}, "query": "enc.0.mix.b.bias"}
    assert refused_import(path, heads=3, key_map=key_map, ignore=["enc.0.mix.a.bias", "enc.0.mix.a.weight"]).endswith(
        "'enc.0.mix.b.bias' has the shape [12], expected two widths"
    )


UNUSED = {
    "q_norm": ["q_norm.weight", "k_norm.weight"],
    "odd biases": ["q_bias", "v_bias"],
    "relative biases": ["rpb_table", "position_bias.weight"],
    "lora": ["a.lora_A.weight", "a.lora_B.default.weight"],
    "gate": ["gate"],
}


@pytest.mark.parametrize("prefix", ["enc.0.mix.", ""])
@pytest.mark.parametrize("extra", UNUSED.values(), ids=UNUSED)
def test_keys_of_the_module_that_a_map_does_not_name_are_refused_unless_each_is_ignored(tmp_path, extra, prefix):
    """At the root of a file all its keys are of the module; keys of other modules do not matter."""
    key_map = {role: prefix + key.removeprefix("enc.0.mix.") for role, key in SEPARATE.items()}
    outside = {"enc.0.mlp.weight": random(12, 12), "enc.0.mixer.q_norm": random(3)} if prefix else {}
    tensors = {**linears(prefix, *"abcd", width=12), **outside, **{prefix + key: random(12) for key in extra}}
    path = save_safetensors(tmp_path / "x.safetensors", tensors)
    keys = [prefix + key for key in extra]
    assert refused_import(path, heads=3, key_map=key_map).endswith(
        "the module has keys that the mapped layer does not use (--ignore KEY, once for each, leaves out what does not change "
        f"attention): {', '.join(map(repr, sorted(keys)))}"
    )
    for lacking in keys if len(keys) > 1 else ():
        assert refused_import(path, heads=3, key_map=key_map, ignore=[key for key in keys if key != lacking]).endswith(
            f"attention): {lacking!r}"
        )
    layer = import_layer(path, name="x", heads=3, key_map=key_map, ignore=keys)
    assert len(layer.tensors) == 8
    assert import_layer(path, name="x", heads=3, key_map=key_map, ignore=[f"_orig_mod.{key}" for key in keys])


def test_numbered_parts_of_a_list_are_no_module_of_their_own(tmp_path):
    """Else a norm beside the list would go unseen."""
    tensors = linears("attn.", *(f"projections.{i}" for i in range(4)), width=12)
    key_map = {role: f"attn.projections.{i}.weight" for i, role in enumerate(SEPARATE)}
    path = save_safetensors(tmp_path / "x.safetensors", tensors)
    assert import_layer(path, name="x", heads=3, key_map=key_map).source.endswith("attn (mapped)")
    save_safetensors(path, {**tensors, "attn.q_norm.weight": random(4)})
    assert "'attn.q_norm.weight'" in refused_import(path, heads=3, key_map=key_map)


@pytest.mark.parametrize(
    ("ignore", "why"),
    [
        ("enc.0.mix.a.weight", "--ignore names keys that the layer needs: 'enc.0.mix.a.weight'"),
        ("enc.0.mix.a.bias", "names keys that the layer needs: 'enc.0.mix.a.bias'"),
        ("enc.0.mlp", "it has no key 'enc.0.mlp' (--ignore); the nearest is 'enc.0.mlp.weight'"),
        ("enc.0.", "it has no key 'enc.0.' (--ignore); the nearest is '"),
        ("", "it has no key '' (--ignore)"),
    ],
)
def test_an_ignored_key_must_exist_and_be_free(tmp_path, ignore, why):
    path = save_safetensors(tmp_path / "x.safetensors", separate(12))
    assert why in refused_import(path, heads=3, key_map=SEPARATE, ignore=[ignore])


def test_a_map_goes_without_the_options_that_choose_a_layer(tmp_path):
    path = save_safetensors(tmp_path / "x.safetensors", separate(12))
    choices: list[dict[str, object]] = [{"layer": 0}, {"prefix": "enc.0"}, {"family": "bert"}]
    for choice in choices:
        assert refused_import(path, heads=3, key_map=SEPARATE, **choice) == (
            "--map names whole keys, so it goes without --layer, --prefix and --family"
        )


@pytest.mark.parametrize(
    ("pairs", "fused", "why"),
    [
        (["query=a"], None, "--map lacks key, value, output"),
        (["query=a", "key=b", "value=c"], None, "--map lacks output"),
        (["output=a"], "qkv", "--map lacks qkv"),
        ([], "qkv", "--map lacks qkv, output"),
        (["qkv=a"], None, "--map lacks output"),
        (["qkv=a", "output=b", "key=c"], None, "--map takes no 'key' here"),
        (["query=a", "key=b", "value=c", "output=d", "gate=e"], None, "--map takes no 'gate' here"),
        (["qkv=a", "output=b"], "kvq", "--fused must be qkv"),
        (["query"], None, "--map 'query' is not ROLE=KEY"),
        (["query="], None, "--map 'query=' is not ROLE=KEY"),
        (["query=a", "query=b"], None, "--map 'query=b' repeats a role or a key"),
        (["query=a", "key=a"], None, "--map 'key=a' repeats a role or a key"),
    ],
)
def test_the_error_of_a_wrong_map_shows_the_whole_form(pairs, fused, why):
    assert unparsed(*pairs, fused=fused) == f"{why}; the form is {HOW}"


def test_pairs_give_the_keys_by_role():
    """A key may have an equals sign; without pairs there is no map."""
    assert parse_key_map([]) is None
    assert parse_key_map(["qkv=a=b", "output=c"], "qkv") == {"qkv": "a=b", "output": "c"}
    assert parse_key_map(f"{role}={key}" for role, key in SEPARATE.items()) == SEPARATE


def llama(width: int, kv_width: int, prefix: str = "model.layers.0.") -> dict[str, torch.Tensor]:
    names = {"q": width, "k": kv_width, "v": kv_width, "o": width}
    return {f"{prefix}self_attn.{letter}_proj.weight": random(rows, width) for letter, rows in names.items()}


ROTARY_NAMES = {
    "llama": llama(12, 12),
    "mistral": llama(64, 16),
    "grouped": llama(64, 16, "decoder.0."),
    "neox": {"gpt_neox.layers.0.attention.query_key_value.weight": random(36, 12)},
    "meta": {f"layers.0.attention.w{letter}.weight": random(12, 12) for letter in "qkvo"},
    "frequencies": {**separate(12), "enc.0.mix.rotary_emb.inv_freq": random(2)},
}


@pytest.mark.parametrize("tensors", ROTARY_NAMES.values(), ids=ROTARY_NAMES)
def test_a_rotary_model_of_no_config_is_refused(tmp_path, tensors):
    message = refused_import(save_safetensors(tmp_path / "x.safetensors", tensors), heads=3)
    known = "its names are those of several families" in message
    assert known != (f"names look like those of an unsupported model: {ROTARY}" in message)


@pytest.mark.parametrize(("width", "heads"), SIZES)
def test_the_error_for_an_unknown_source_shows_its_keys_and_how_to_name_them(tmp_path, width, heads):
    """The advice comes before the keys, so that long keys cannot cut it."""
    message = refused_import(save_safetensors(tmp_path / "x.safetensors", separate(width)), heads=heads)
    assert message.startswith(
        "source 'x.safetensors': no known family of attention layers in its 10 keys; name the four weights with "
        "--map query=KEY key=KEY value=KEY output=KEY, or --fused qkv --map qkv=KEY output=KEY, and --heads H; "
        "found keys like 'enc.0.mix"
    )
    long = {f"{'x' * 300}.{key}": value for key, value in separate(width).items()}
    assert "and --heads H; found" in refused_import(save_safetensors(tmp_path / "x.safetensors", long))


def test_the_keys_that_are_shown_are_those_of_attention(tmp_path):
    tensors = {f"block.{i}.mlp.weight": random(2, 2) for i in range(50)} | {"block.7.self_attention.q": random(2, 2)}
    message = refused_import(save_safetensors(tmp_path / "x.safetensors", tensors))
    assert message.endswith("found keys like 'block.7.self_attention.q'")


def test_a_rotary_layer_is_refused_under_a_map_too(tmp_path):
    """Its names identify it, with a config and without."""
    tensors = llama(12, 12)
    named = {
        role: f"model.layers.0.self_attn.{letter}_proj.weight"
        for role, letter in zip(("query", "key", "value", "output"), "qkvo", strict=True)
    }
    path = save_safetensors(tmp_path / "x.safetensors", tensors)
    why = f"'model.layers.0.self_attn.o_proj.weight' is a name of an unsupported model: {ROTARY}"
    assert refused_import(path, heads=3, key_map=named).endswith(why)
    plain = save_directory(tmp_path / "plain", tensors, {"model_type": "own", "num_attention_heads": 3})
    assert refused_import(plain, key_map=named).endswith(why)
    xglm = {key.replace("o_proj", "out_proj"): value for key, value in tensors.items()}
    plain = save_directory(tmp_path / "xglm", xglm, {"model_type": "xglm", "num_attention_heads": 3})
    key_map = {role: key.replace("o_proj", "out_proj") for role, key in named.items()}
    assert import_layer(plain, name="x", key_map=key_map).family == "mapped"
    rotary = save_directory(tmp_path / "rotary", tensors, {"rope_theta": 1e4, "num_attention_heads": 3})
    assert "config.json has 'rope_theta'" in refused_import(rotary, key_map=named)
    save_safetensors(path, ROTARY_NAMES["frequencies"])
    assert "'enc.0.mix.rotary_emb.inv_freq'" in refused_import(path, heads=3, key_map=SEPARATE)
