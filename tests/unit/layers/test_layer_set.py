"""Layer sets: a published directory is read back whole, and a fault of it leaves nothing that could be served."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

from service.errors import LayerError
from service.layers import layer_set
from service.layers.layer_set import MANIFEST, LayerSet, SetCache, SetFile, publish
from service.layers.set_source import MIN_BYTES_PER_S, PATIENCE_S, SetSource
from tests.doubles import ManualClock

MAX_BYTES = 2**20
FIRST = {"a.safetensors": b"a" * 3000, "b.safetensors": b"b" * 2000, "m.model": b"m" * 100}
SECOND = {**FIRST, "b.safetensors": b"B" * 2500}


def digest_of(name: str) -> str:
    return f"sha256:{name[0] * 64}" if name[0] in "abc" else f"sha256:{'0' * 64}"


class Shop:
    """A published directory and a cache that follows it."""

    def __init__(self, directory: Path) -> None:
        self.files, self.published, self.root = directory / "files", directory / "published", Path("cache")
        self.clock = ManualClock()
        self.cache = SetCache(self.root, SetSource(str(self.published), self.clock.now), MAX_BYTES)
        assert self.cache.lead()

    def publish(self, files: dict[str, bytes]) -> LayerSet:
        self.files.mkdir(exist_ok=True)
        for name, content in files.items():
            (self.files / name).write_bytes(content)
        return publish({self.files / name: digest_of(name) for name in files}, self.published)

    def fetched(self, digest: str) -> dict[str, bytes]:
        directory = self.root / digest.removeprefix("sha256:")
        return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != MANIFEST}

    def sets(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir() if path.is_dir() and not path.is_symlink())

    @property
    def manifest(self) -> Any:
        return json.loads((self.published / MANIFEST).read_text())

    def change_manifest(self, **fields) -> None:
        (self.published / MANIFEST).write_text(json.dumps({**self.manifest, **fields}))


@pytest.fixture
def shop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the default of ATTENTION_LAYERS_DIR is a relative path
    shop = Shop(tmp_path)
    yield shop
    shop.cache.close()


def test_a_published_set_is_fetched_whole_under_its_digest(shop):
    published = shop.publish(FIRST)
    assert shop.cache.fetch("") == published
    assert shop.fetched(published.digest) == FIRST
    assert published.layers == {"a": digest_of("a"), "b": digest_of("b")}, "a model is of the set, and no layer"
    assert shop.publish(FIRST).digest == published.digest == shop.manifest["digest"]
    assert shop.publish(SECOND).digest != published.digest


def test_the_files_of_the_set_before_stay_published_and_older_ones_go(shop):
    shop.publish(FIRST)
    (shop.published / "notes.txt").write_text("not ours")
    shop.publish(SECOND)
    assert len(list(shop.published.iterdir())) == 2 + 4
    shop.publish({"c.safetensors": b"c"})
    assert len(list(shop.published.iterdir())) == 2 + 3 + 1


def test_only_what_changed_is_fetched_and_only_what_is_served_stays(shop):
    first = shop.publish(FIRST)
    shop.cache.fetch("")
    shop.cache.keep(first.digest)
    second = shop.publish(SECOND)
    for name in ("a.safetensors", "m.model"):
        (shop.published / next(file.sha256 for file in second.files if file.name == name)).unlink()
    shop.cache.fetch(first.digest)
    assert shop.fetched(second.digest) == SECOND
    assert shop.fetched(first.digest) == FIRST, "a replacement may still need it"
    shop.cache.keep(second.digest)
    shop.publish(SECOND)
    shop.cache.fetch(second.digest)
    assert shop.sets() == [second.digest.removeprefix("sha256:")]
    assert shop.cache.last_served() == second
    shop.cache.discard(second.digest)
    assert shop.cache.last_served() is None


def bigger(shop: Shop) -> None:
    shop.change_manifest(files=[{**shop.manifest["files"][0], "size": MAX_BYTES + 1}])


def entry(**changed):
    return lambda shop: shop.change_manifest(files=[{**shop.manifest["files"][0], **changed}])


def in_file(change):
    def damage(shop: Shop) -> None:
        path = shop.published / shop.manifest["files"][0]["sha256"]
        change(path)

    return damage


def in_manifest(raw: bytes):
    return lambda shop: (shop.published / MANIFEST).write_bytes(raw)


DAMAGES = {
    "away": (lambda shop: shop.published.rename(shop.files / "moved"), "does not exist"),
    "no manifest": (lambda shop: (shop.published / MANIFEST).unlink(), "does not exist"),
    "a device": (lambda shop: [(shop.published / MANIFEST).unlink(), (shop.published / MANIFEST).symlink_to(os.devnull)],
                 "not a regular file"),
    "no JSON": (in_manifest(b"{"), "not valid JSON"),
    "empty": (in_manifest(b""), "not valid JSON"),
    "no UTF-8": (in_manifest(b'{"files": "\xff"}'), "not valid JSON in UTF-8"),
    "no object": (in_manifest(b"[]"), "must be a JSON object"),
    "deep": (in_manifest(b"[" * 100_000), "nested too deeply"),
    "huge": (in_manifest(b" " * (layer_set.MAX_MANIFEST_BYTES + 1)), "more than 1048576 bytes"),
    "a key twice": (in_manifest(b'{"files": [], "files": []}'), "duplicate key"),
    "another version": (lambda shop: shop.change_manifest(format_version=2), "format_version 1 only"),
    "version true": (lambda shop: shop.change_manifest(format_version=True), "format_version 1 only"),
    "no files": (lambda shop: shop.change_manifest(files=[]), "1 to 1000 files, and a layer"),
    "files of no list": (lambda shop: shop.change_manifest(files={"a": 1}), "files must be a list"),
    "too many files": (lambda shop: shop.change_manifest(files=[{**shop.manifest["files"][0], "name": f"{n}.model"}
                                                                    for n in range(1001)]), "1 to 1000 files"),
    "no layer": (lambda shop: shop.change_manifest(files=shop.manifest["files"][2:]), "and a layer among them"),
    "a name twice": (lambda shop: shop.change_manifest(files=shop.manifest["files"][:1] * 2), "name twice"),
    "another digest": (lambda shop: shop.change_manifest(digest=digest_of("a")), "changed after it was published"),
    "a file left out": (lambda shop: shop.change_manifest(files=shop.manifest["files"][1:]), "changed after"),
    "too large": (bigger, "the limit is 1048576 .ATTENTION_MAX_LAYER_BYTES"),
    **{
        f"name {name}": (entry(name=name), "each of files needs")
        for name in ("../a.safetensors", "/a.safetensors", "A.safetensors", "a.bin", ".safetensors", "sdpa.safetensors",
                     "sdpa.model", "a/b.model", "a.safetensors\n", "", 1, None, ["a.model"], f"{'a' * 65}.model")
    },
    **{f"size {size}": (entry(size=size), "each of files needs") for size in (-1, 1.0, "1", None, True)},
    **{f"sha256 {text}": (entry(sha256=text), "each of files needs") for text in ("", "../x", "a" * 63, "A" * 64, 5)},
    **{f"digest {text}": (entry(digest=text), "each of files needs") for text in ("", "a" * 64, "sha256:", None)},
    "an entry of no object": (lambda shop: shop.change_manifest(files=["a"]), "each of files needs"),
    "a file missing": (in_file(Path.unlink), "'a.safetensors': the file does not exist"),
    "a file cut": (in_file(lambda path: os.truncate(path, 100)), "other bytes than"),
    "a file longer": (in_file(lambda path: path.write_bytes(b"a" * 3001)), "more than 3000 bytes"),
    "a file changed": (in_file(lambda path: path.write_bytes(b"A" + b"a" * 2999)), "other bytes than"),
    "a directory": (in_file(lambda path: (path.unlink(), path.mkdir())), "not a regular file"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_set_is_refused_in_one_sentence_and_leaves_no_set(shop, damage, reason):
    shop.publish(FIRST)
    damage(shop)
    with pytest.raises(LayerError, match=reason) as refused:
        shop.cache.fetch("")
    assert "\n" not in refused.value.message
    assert str(shop.published) not in refused.value.message
    assert all(name.startswith(".") for name in shop.sets()), "nothing that could be served"
    (shop.published.exists() or (shop.files / "moved").rename(shop.published))
    for path in shop.published.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    published = shop.publish(FIRST)
    assert shop.cache.fetch("") == published
    assert shop.fetched(published.digest) == FIRST


def test_a_manifest_that_is_replaced_while_files_are_read_is_noticed_and_then_followed(shop, monkeypatch):
    first, chunks = shop.publish({"a.safetensors": b"old" * 9}), shop.cache.source.chunks

    def swapped(name: str, size: int):
        if name != MANIFEST and not shop.sets()[1:]:
            shop.publish(SECOND)
            shop.publish({"a.safetensors": b"newer"})  # after two more sets the files of the first are gone
        return chunks(name, size)

    with monkeypatch.context() as patched:
        patched.setattr(shop.cache.source, "chunks", swapped)
        with pytest.raises(LayerError, match="does not exist"):
            shop.cache.fetch("")
    assert shop.cache.fetch("").layers == first.layers
    assert shop.fetched(shop.manifest["digest"]) == {"a.safetensors": b"newer"}


def test_a_slow_source_is_given_up_after_the_time_of_its_size(shop, monkeypatch):
    shop.publish({"a.safetensors": b"x" * MAX_BYTES})
    monkeypatch.setattr("service.layers.set_source.CHUNK_BYTES", 2**18)
    opened = shop.cache.source._opened

    class Slow:
        def __init__(self, file) -> None:
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            self.file.close()

        def read(self, size: int) -> Any:
            shop.clock.advance((PATIENCE_S + MAX_BYTES / MIN_BYTES_PER_S) / 3)
            return self.file.read(size)

    monkeypatch.setattr(
        shop.cache.source, "_opened", lambda name: Slow(opened(name)) if name != MANIFEST else opened(name)
    )
    with pytest.raises(LayerError, match=r"'a.safetensors': the source is too slow, or has stopped sending"):
        shop.cache.fetch("")


def test_one_of_two_caches_of_a_directory_leads_until_it_ends(shop):
    second = SetCache(shop.root, shop.cache.source, MAX_BYTES)
    assert [shop.cache.lead(), second.lead()] == [True, False]
    shop.cache.close()
    assert second.lead()
    second.close()


def test_a_directory_that_cannot_be_written_is_named_by_its_setting(shop):
    shop.publish(FIRST)
    (shop.root / "file").write_text("")
    cache = SetCache(shop.root / "file", shop.cache.source, MAX_BYTES)
    with pytest.raises(LayerError, match=r"\(ATTENTION_LAYERS_DIR\) cannot be written"):
        cache.lead()


def test_an_address_of_fsspec_is_followed_and_its_faults_name_a_class_only(shop):
    published = shop.publish(FIRST)
    store = fsspec.filesystem("memory")
    store.put(f"{shop.published}/", "/shelf/", recursive=True)
    cache = SetCache(shop.root, SetSource("memory://shelf"), MAX_BYTES)
    assert cache.fetch("") == published
    store.rm("/shelf", recursive=True)
    with pytest.raises(LayerError, match=r"^layer-set.json: the source has no such file$"):
        cache.fetch("")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("/mnt/layers", "/mnt/layers"),
        ("s3://bucket/a", "s3://bucket/a"),
        ("https://me:pass@host/a?sig=secret", "https://host/a"),
        ("https://me:p@ss/word@host/a?sig=secret", "https://host/a"),
        ("https://me:pass?word@host/a", "https://"),
        ("https://me:pass@host/?sig=secret@secret", "https://"),
        ("/mnt//a@b?c", "/mnt//a@b?c"),
        ("simplecache::https://key@host/a", "simplecache::https://host/a"),
    ],
)
def test_an_address_is_shown_without_credentials_and_query(address, shown, monkeypatch):
    monkeypatch.setattr("service.layers.set_source._options", lambda scheme: {})
    assert SetSource(address).shown == shown


def test_a_library_that_is_missing_is_reported_with_the_remedy(monkeypatch):
    with pytest.raises(LayerError, match="a scheme that fsspec does not know"):
        SetSource("nowhere://a")
    with pytest.raises(LayerError, match=r"s3:// .*is not installed: pip install 'attention-service\[source\]'"):
        SetSource("s3://bucket/a")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(LayerError, match="fsspec is not installed"):
        SetSource("https://host/a")


def test_the_digest_is_that_of_the_documented_text():
    file = SetFile("a.safetensors", 1, "b" * 64, f"sha256:{'c' * 64}")
    text = f'[["a.safetensors",1,"{"b" * 64}","sha256:{"c" * 64}"]]'
    assert LayerSet((file,)).digest == f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
