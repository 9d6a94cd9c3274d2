"""Keywords and values of other libraries: each is answered with what to write instead, before anything is sent."""

import asyncio
import inspect
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import attention_client
from attention_client import AsyncClient, Client, Request, Weights, errors, masks
from tests.unit.client.answering import FACTS, Answering, answer_of

X = np.ones((3, 2), np.float32)


@pytest.fixture
def service():
    return Answering()


def asked(service: Answering, kind: type, method: str, **options: object) -> None:
    client = kind(transport=service.transport)
    arrays = {"attend": ("small", X), "attention": (X, X, X)}
    found = getattr(client, method)(*arrays[method], **options)
    if inspect.iscoroutine(found):
        asyncio.run(found)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("method", ["attend", "attention"])
@pytest.mark.parametrize(
    ("name", "written"),
    [("mask", "masks.attend(values)"), ("attn_mask", "masks.ignore(values)"), ("attention_mask", "masks=["),
     ("key_padding_mask", "masks=[masks.key_padding_mask(values)]"), ("attn_bias", "masks=[masks.bias(values)]"),
     ("is_causal", 'masks=[masks.causal("top_left")]'), ("use_causal_mask", "masks.causal"),
     ("valid_lens", "masks=[masks.lengths(n)]"),
     ("window_size", "masks=[masks.window(left, right)]"), ("need_weights", 'weights="heads"'),
     ("output_attentions", 'weights="mean"'),
     ("return_attention_scores", "weights="), ("top_k", 'weights=Weights("top_k", k=3)'),
     ("q", "write query="), ("k", "write key="),
     ("v", "write value="), ("past_key_values", "past|whole"), ("dropout_p", "leave it out"), ("training", "leave it out"),
     ("query_mask", "masks.attend(values)"), ("head_mask", "masks.attend"), ("alibi_slopes", "masks=[masks.bias(values)]"),
     ("key_value_seq_lengths", "masks=[masks.lengths(n)]"), ("local_window_size", "masks=[masks.window(left, right)]"),
     ("return_attn_probs", 'weights="heads"'), ("inputs_q", "write query="), ("encoder_hidden_states", "write key="),
     ("timeout", "did you mean timeout_s="), ("masked_row", "did you mean masked_rows="),
     ("weigths", "did you mean weights="), ("xyz", "it has ")],
)  # fmt: skip
def test_a_keyword_of_another_library_is_answered_with_what_to_write(service, kind, method, name, written):
    with pytest.raises(TypeError, match=rf"^{method}\(\) has no argument {name}: ") as raised:
        asked(service, kind, method, **{name: True})
    assert any(word in str(raised.value) for word in written.split("|"))
    assert not service.seen


@pytest.mark.parametrize("name", ["scale", "softcap", "num_heads", "sm_scale", "sinks", "s_aux", "freqs_cis", "cos"])
def test_a_layer_has_its_own_scale_heads_sinks_and_rotation(service, name):
    with pytest.raises(TypeError, match=rf"attend\(\) has no argument {name}: leave it out: a layer has its own"):
        asked(service, Client, "attend", **{name: 2})


@pytest.mark.parametrize(
    ("name", "written"),
    [("position_ids", "positions="), ("cache_position", "positions="), ("input_pos", "positions="),
     ("use_cache", "present=True"), ("past_key_values", "past_key= and past_value=")],
)  # fmt: skip
def test_the_positions_and_the_cache_of_other_libraries_have_names_here(service, name, written):
    with pytest.raises(TypeError, match=rf"attend\(\) has no argument {name}: write {written}$"):
        asked(service, Client, "attend", **{name: X})


def test_a_request_answers_too():
    with pytest.raises(TypeError, match=r"^Request\(\) has no argument mask: write masks=\["):
        Request(X, mask=X)  # type: ignore[call-arg]


def test_the_methods_of_the_asynchronous_client_are_coroutine_functions():
    assert inspect.iscoroutinefunction(AsyncClient.attend)
    assert inspect.iscoroutinefunction(AsyncClient.attention)


@pytest.mark.parametrize("value", [True, False, 1, np.True_, ["heads"], ("mean",), X], ids=repr)
@pytest.mark.parametrize("method", ["attend", "attention"])
def test_weights_that_name_no_form_are_answered_with_the_forms(service, method, value):
    with pytest.raises(
        errors.InvalidInput, match=r'write weights="heads" .* weights="mean" .* None for none'
    ) as raised:
        asked(service, Client, method, weights=value)
    assert raised.value.param == "/weights"
    assert not service.seen


@pytest.mark.parametrize(
    ("value", "written"),
    [({"kind": "causal"}, "masks=[masks.causal()]"), ([{"kind": "causal"}], "masks[0] is a dict: write masks.causal()"),
     ([masks.causal(), {"kind": "attend", "values": [True], "axes": "s"}],
      "masks[1] is a dict: write masks.attend(values, axes='s')"),
     ([{"kind": "window", "left": 4, "right": 0, "align": "top_left"}], "write masks.window(left=4, right=0, align='top_left')"),
     ({"kind": "lengths", "values": [3]}, "masks=[masks.lengths(values)]"), ("causal", "masks=[masks.causal()]"),
     (["ignore"], "masks[0] is a str: write masks.ignore(values)"),
     ([{"kind": "padding"}], "a mask must say what its values mean"),
     ([{}], "a mask must say"), ([True], "a mask must say"), (masks.causal(), "write masks=[masks.causal()]")],
    ids=repr,
)  # fmt: skip
def test_a_mask_in_the_form_of_the_api_is_answered_with_the_call_that_makes_it(service, value, written):
    with pytest.raises(errors.InvalidInput) as raised:
        asked(service, Client, "attend", masks=value)
    assert written in raised.value.message
    assert not service.seen


def test_the_repr_of_an_answer_and_of_what_is_sent_is_one_line_of_shapes(service):
    with Client(transport=service.transport) as client:
        assert repr(client.attend("small", X, weights="heads")) == (
            "Answer(output=float32 [3, 2], weights=float32 [4, 3, 3], masked_rows=1, layer='small')"
        )
        top = client.attend("small", torch.ones(2, 3, 2).bfloat16(), weights=Weights("top_k", k=2))
        assert repr(top) == (
            "Answer(output=bfloat16 [2, 3, 2], weights=TopK(values=float32 [2, 4, 3, 2], indices=int32 [2, 4, 3, 2], "
            "rest=float32 [2, 4, 3]), masked_rows=1, layer='small')"
        )
        assert repr(client.attention(X, X, X)) == "AttentionAnswer(output=float32 [3, 2], masked_rows=1)"
        widths = "query_width=16, key_width=16, value_width=16, out_width=16, num_heads=4"
        assert repr(client.layers()) == f"[Layer(name='small', {widths})]"
    request = Request(X, masks=[masks.attend(X > 0), masks.causal()])
    assert repr(request) == (
        "Request(query=float32 [3, 2], masks=[Mask(kind='attend', values=bool [3, 2]), Mask(kind='causal')], masked_rows='zero', "
        "layer_masks='apply')"
    )


def test_a_name_with_a_line_break_stays_on_the_line_of_a_repr():
    named = FACTS | {"layer": {"name": "a\nb", "digest": "x"}}
    with Client(transport=Answering(answer_of({"output": torch.tensor(X)}, named)).transport) as client:
        assert "\n" not in repr(client.attend("small", X))


def test_the_version_is_that_of_the_distribution():
    text = (Path(attention_client.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert attention_client.__version__ == tomllib.loads(text)["project"]["version"]
