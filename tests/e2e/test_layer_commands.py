"""`layers import` and `layers remove` beside a running service: what is imported answers, and what does not work is said."""

import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
import torch
from safetensors.torch import save_file

from service.api.auth.key_ring import Role, line_for
from service.layers.importer import import_layer
from service.layers.store import Store, StoredLayer
from tests import processes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
PARITY = ROOT / ".venv-parity" / "bin" / "python"
KEYS = {"the-admins-own": Role.ADMIN, "a-callers-own": Role.INFER}
ADMIN, CALLER = KEYS


@pytest.fixture
def service(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{line_for(secret, role)}\n" for secret, role in KEYS.items()), encoding="ascii")
    found = serve(workers=2, api_keys_file=keys)
    found.wait_ready()
    return found


@pytest.fixture
def layers(tmp_path):
    """Run a `layers` command over the service's directory, or another one."""

    def run(
        *words: object, key: str | None = None, directory: str = "layers", python: Path | None = None
    ) -> tuple[int, list[str], str]:
        environment = processes.environment(layers_dir=directory) | ({"ATTENTION_CLIENT_KEY": key} if key else {})
        command = [str(python or sys.executable), "-P", "-m", "service", "layers", *map(str, words)]
        environment["PYTHONPATH"] = ":".join(sys.path) if python is None else str(ROOT)
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert not any(secret in ran.stdout + ran.stderr for secret in KEYS)
        return ran.returncode, ran.stdout.splitlines(), ran.stderr

    return run


def checkpoint(tmp_path, seed: int = 0) -> tuple[torch.nn.MultiheadAttention, str]:
    torch.manual_seed(seed)
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    save_file(module.state_dict(), tmp_path / f"{seed}.safetensors")
    return module, f"{seed}.safetensors"


def asked(service, module: torch.nn.MultiheadAttention) -> None:
    """The layer `mine` gives the output of the module."""
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    url, headers = f"{service.url}/v1/layers/mine/attend", {"x-api-key": CALLER}
    answer = httpx2.post(url, json={"query": x.tolist()}, headers=headers).raise_for_status().json()
    expected = module(x[None], x[None], x[None])[0][0]
    torch.testing.assert_close(torch.tensor(answer["output"]), expected.detach(), atol=1e-5, rtol=1e-5)


def status(service) -> int:
    return httpx2.get(f"{service.url}/v1/layers/mine", headers={"x-api-key": CALLER}).status_code


@pytest.mark.long
def test_an_imported_layer_is_served_at_once_replaced_and_removed(service, layers, tmp_path):
    (first, source), (second, other) = checkpoint(tmp_path), checkpoint(tmp_path, seed=5)
    options = ("--name", "mine", "--heads", 4, "--url", service.url)
    code, lines, err = layers("import", source, *options, key=ADMIN)
    assert (code, err) == (0, "")
    digest = lines[0].rpartition(", ")[2]
    assert lines[2:] == ["mine: wrote layers/mine.safetensors", f"mine: {service.url} serves it now, {digest}"]
    asked(service, first)
    code, lines, _ = layers("import", source, *options, key=ADMIN)
    assert (code, lines[2]) == (0, "mine: layers/mine.safetensors holds it already")
    assert layers("import", other, *options, "--replace", key=ADMIN)[0] == 0
    asked(service, second)
    code, lines, err = layers("remove", "mine")
    assert (code, lines[0], err) == (0, "mine: removed layers/mine.safetensors", "")
    assert not (tmp_path / "layers" / "mine.safetensors").exists()


@pytest.mark.long
def test_the_printed_command_makes_the_service_serve_the_layer_and_drop_it(service, layers, tmp_path):
    module, source = checkpoint(tmp_path)

    def run(line: str) -> None:
        command = line[line.index("curl ") :].replace("http://127.0.0.1:8000", service.url)
        subprocess.run(f"{command} -sf", shell=True, env={"PATH": "/usr/bin:/bin", "KEY": ADMIN}, check=True)

    run(layers("import", source, "--name", "mine", "--heads", 4)[1][-1])
    asked(service, module)
    run(layers("remove", "mine")[1][-1])
    assert status(service) == 404


@pytest.mark.long
def test_an_import_that_is_not_served_says_why_and_stays_stored(service, layers, tmp_path):
    """Another directory than the service's, a key that may not, no key, and no service."""
    _, source = checkpoint(tmp_path)
    options, where = ("import", source, "--name", "mine", "--heads", 4, "--url"), f"{tmp_path}/other/layers"
    nobody = f"http://127.0.0.1:{processes.free_port()}"
    for url, key, why in (
        (service.url, ADMIN, f"404: its layer directory is another than {where}; compare its ATTENTION_LAYERS_DIR"),
        (
            service.url,
            CALLER,
            "403: this route needs a key with the role admin",
        ),
        (service.url, None, "401: "),
        (nobody, ADMIN, f"no answer from {nobody} (Connection refused)"),
    ):
        code, lines, err = layers(*options, url, key=key, directory="other/layers")
        start = f'attention-service: "mine" is stored, but {url} does not serve it: {why}'
        assert (code, len(lines), err[: len(start)], err.count("\n")) == (1, 3, start, 1)
        assert (tmp_path / "other" / "layers" / "mine.safetensors").exists()
    assert status(service) == 404


MODELS = """
import sys, torch, transformers
shared = dict(vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
gpt2, t5 = dict(n_embd=32, n_layer=2, n_head=4), dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
for kind, name, options in (
    ("CausalLM", "Llama", dict(num_key_value_heads=2, eos_token_id=[1, 2]) | shared),
    ("MaskedLM", "Bert", shared),
    ("Seq2SeqLM", "T5", dict(vocab_size=90) | t5),
    ("CausalLM", "GPT2", dict(vocab_size=90, n_positions=48) | gpt2),
):
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(getattr(transformers, f"{name}Config")(**options))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) / 4)
    model.save_pretrained(f"{sys.argv[1]}/{name}")
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Random models as transformers saves them."""
    if not any((ROOT / ".venv-parity").glob("lib/*/site-packages/transformers")):
        pytest.skip("transformers is not installed: make install-parity")
    found: Path = tmp_path_factory.mktemp("models")
    subprocess.run([PARITY, "-c", MODELS, found], check=True, capture_output=True)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("Llama", {"layer": 1}),
        ("Bert", {"layer": 1}),
        ("GPT2", {"layer": 1}),
        ("T5", {"prefix": "decoder.block.1.layer.0.SelfAttention"}),
        ("T5", {"prefix": "decoder.block.1.layer.1.EncDecAttention"}),
    ],
    ids=str,
)
def test_a_check_compares_with_the_module_of_the_model_where_transformers_is_installed(
    layers, models, tmp_path, name, choice
):
    """A changed weight is found."""
    store = Store(tmp_path / "layers")
    mine = import_layer(models / name, name="mine", **choice)
    store.save(mine)
    check = (
        "check",
        "mine",
        models / name,
        *(word for option, value in choice.items() for word in (f"--{option}", value)),
    )
    code, lines, err = layers(*check, python=PARITY)
    assert (code, err, len(lines)) == (0, "", 1)
    assert "; the same digest: parity with transformers 5." in lines[0]
    mine.tensors["value.weight"][5, 7] += 1e-3
    store.save(StoredLayer("mine", mine.spec, mine.tensors, mine.source, mine.family))
    code, lines, _ = layers(*check, python=PARITY)
    assert code == 1
    assert "; another digest: NO PARITY with transformers 5." in lines[0]
