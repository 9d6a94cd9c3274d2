"""The keys file: taken whole or not at all, read again when it changes, and never repeated in an error."""

import asyncio
import errno
import hmac
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.auth import key_ring as keys
from service.api.auth.key_ring import (
    KeyFile,
    KeyRing,
    KeysError,
    Role,
    digest_of,
    line_for,
    new_secret,
    parse_keys,
    read_keys,
)

HEX = digest_of(b"user").hex()
OTHER = digest_of(b"root").hex()


def found(ring: KeyRing, secret: bytes) -> Role | None:
    key = ring.find(secret)
    return None if key is None else key.role


@pytest.mark.parametrize(
    "text",
    [
        f"{HEX} infer\n{OTHER} admin\n",
        f"{HEX} infer\n{OTHER} admin",
        f"# ours\n\n  {HEX}\t infer  # team a\r\n   \n{OTHER} admin#ops\r\n",
        f"\ufeff{HEX.upper()} infer # é\n{OTHER} admin # \u2028\n#",
        f"{HEX} infer\n{OTHER} admin\n{HEX} infer # again",
    ],
)
def test_a_line_is_a_digest_a_role_and_an_optional_comment(text):
    ring = parse_keys(text.encode())
    assert (found(ring, b"user"), found(ring, b"root"), found(ring, b"else")) == (Role.INFER, Role.ADMIN, None)
    assert (ring.count(Role.INFER), ring.count(Role.ADMIN)) == (1, 1)


@pytest.mark.parametrize(
    ("comment", "name"),
    [
        ("# team a", "team a"),
        ("#team a  ", "team a"),
        ("# a # b", "a # b"),
        ("# é", "é"),
        ("# " + "x" * 300, "x" * 64),
        ("", HEX[:8]),
        ("#", HEX[:8]),
    ],
)
def test_a_key_is_named_by_its_comment_or_the_first_digits_of_its_digest(comment, name):
    key = parse_keys(f"{HEX} infer {comment}".encode()).find(b"user")
    assert key is not None
    assert key.name == name


@pytest.mark.parametrize("text", [b"", b"\n\n", b"# nobody\n"])
def test_an_empty_file_refuses_every_key(text):
    assert parse_keys(text).keys == ()


SECRET = "my-plain-key"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{SECRET} infer", 1),
        (f"\n# x\n{HEX}", 3),
        (f"{HEX} infer\n{OTHER} root", 2),
        (f"{HEX} INFER", 1),
        (f"{HEX} infer admin", 1),
        (f"{HEX[:-1]} infer", 1),
        (f"{HEX}0 infer", 1),
        (f"{HEX[:-1]}g infer", 1),
        (f"{HEX}infer", 1),
        (f"infer {HEX}", 1),
        (f"sha256:{HEX} infer", 1),
        (f"{HEX} infer\0", 1),
        (f"{HEX} infer\n{HEX} admin", 2),
        (f"{HEX}  -", 1),
        ("\0" * 100, 1),
    ],
)
def test_a_bad_line_is_reported_by_its_number_and_not_repeated(text, line):
    with pytest.raises(KeysError, match=rf"^ATTENTION_API_KEYS_FILE: line {line} ") as error:
        parse_keys(text.encode())
    assert HEX[:8] not in error.value.message
    assert SECRET not in error.value.message
    assert "\n" not in error.value.message


def test_the_number_of_keys_is_bounded(monkeypatch):
    monkeypatch.setattr(keys, "MAX_KEYS", 3)
    lines = [line_for(new_secret(), Role.INFER) for _ in range(4)]
    assert len(parse_keys("\n".join(lines[:3]).encode()).keys) == 3
    with pytest.raises(KeysError, match="line 4 exceeds the limit"):
        parse_keys("\n".join(lines).encode())


@given(st.binary(max_size=300))
def test_any_bytes_give_a_key_ring_or_one_line(text):
    try:
        told = ""
        assert isinstance(parse_keys(text), KeyRing)
    except KeysError as error:
        told = error.message
    assert "\n" not in told
    assert len(told) < 200


def test_every_entry_is_compared_for_every_key(monkeypatch):
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    secrets = [new_secret().encode() for _ in range(5)]
    ring = parse_keys("\n".join(line_for(s.decode(), Role.INFER) for s in secrets).encode())
    for secret in (secrets[0], secrets[-1], b"nobody"):
        compared.clear()
        ring.find(secret)
        assert len(compared) == 5
        assert all(isinstance(side, bytes) and len(side) == 32 for pair in compared for side in pair)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda _: None], ids=["pipe", "directory", "missing"])
def test_an_unreadable_file_is_one_line(tmp_path, make):
    make(tmp_path / "keys")
    with pytest.raises(KeysError, match=r"^ATTENTION_API_KEYS_FILE: the file ") as error:
        read_keys(tmp_path / "keys")
    assert str(tmp_path) not in error.value.message


def test_a_huge_file_is_not_read_whole(tmp_path):
    (tmp_path / "keys").write_bytes(b"#" * (keys.MAX_FILE_BYTES + 1))
    with pytest.raises(KeysError, match="has more than"):
        read_keys(tmp_path / "keys")


class Heard:
    def __init__(self) -> None:
        self.events: list[str] = []

    def keys_taken(self, ring):
        assert threading.current_thread() is threading.main_thread()
        self.events.append(f"taken {len(ring.keys)}")

    def keys_refused(self, error):
        assert threading.current_thread() is threading.main_thread()
        self.events.append("refused")


class Watched:
    def __init__(self, directory) -> None:
        self.path = directory / "keys"
        self.heard = Heard()
        self.write("user")
        self.file = KeyFile(self.path, self.heard)

    def write(self, *secrets: str) -> None:
        self.path.write_text("".join(line_for(secret, Role.INFER) + "\n" for secret in secrets))

    async def looks(self, number: int = 2) -> list[str]:
        """What was heard in so many looks."""
        before = len(self.heard.events)
        for _ in range(number):
            await self.file.check()
        return self.heard.events[before:]

    def lets_in(self, secret: str) -> bool:
        return self.file.ring.find(secret.encode()) is not None


@pytest.fixture
def watched(tmp_path):
    def run(story):
        async def main():
            file = Watched(tmp_path)
            await file.file.open()
            await story(file)

        asyncio.run(main())

    return run


def test_before_the_first_read_every_key_is_refused(tmp_path):
    assert not Watched(tmp_path).lets_in("user")


def test_an_unchanged_file_is_read_once(watched, monkeypatch):
    async def story(file):
        monkeypatch.setattr("service.api.auth.key_ring.read_keys", None)
        assert await file.looks(5) == []

    watched(story)


def test_A9_keys_change_with_the_file(watched):
    async def story(file):
        file.write("user", "new")
        assert await file.looks() == ["taken 2"]
        assert file.lets_in("user")
        assert file.lets_in("new")
        file.write("new")
        assert await file.looks() == ["taken 1"]
        assert not file.lets_in("user")

    watched(story)


@pytest.mark.parametrize("text", ["", "# all keys were removed\n"])
def test_a_file_without_keys_locks_all_out_once_it_is_clear_that_nobody_writes_it(watched, text):
    async def story(file):
        file.path.write_text(text)
        assert await file.looks(keys.MAX_CHECKS - 1) == []
        assert file.lets_in("user")
        assert await file.looks(1) == ["taken 0"]
        assert not file.lets_in("user")
        assert await file.looks(keys.MAX_CHECKS) == []
        file.write("user")
        assert await file.looks() == ["taken 1"]

    watched(story)


def test_a_slow_command_that_empties_the_file_first_locks_no_key_out(watched):
    async def story(file):
        file.path.write_text("")
        assert await file.looks(4) == []
        assert file.lets_in("user")
        file.write("user", "new")
        assert await file.looks() == ["taken 2"]

    watched(story)


def test_A9_a_file_replaced_by_another_of_the_same_size_and_time_is_another(watched):
    async def story(file):
        old = file.path.stat()
        other = file.path.with_name("other")
        other.write_text(line_for("new", Role.INFER) + "\n")
        os.utime(other, ns=(old.st_atime_ns, old.st_mtime_ns))
        other.replace(file.path)
        assert await file.looks() == ["taken 1"]
        assert file.lets_in("new")

    watched(story)


def test_A9_a_changed_link_is_another_file(watched):
    """As Kubernetes mounts a secret."""

    async def story(file):
        file.path.rename(file.path.with_name("old"))
        file.path.symlink_to(file.path.with_name("old"))
        assert await file.looks() in ([], ["taken 1"])
        new = file.path.with_name("new")
        new.write_text(line_for("new", Role.INFER) + "\n")
        link = file.path.with_name("link")
        link.symlink_to(new)
        link.replace(file.path)
        assert await file.looks() == ["taken 1"]
        assert not file.lets_in("user")

    watched(story)


@pytest.mark.parametrize("spoil", ["nonsense", "remove", "half a line"])
def test_an_unusable_file_changes_nothing_and_is_reported_once(watched, spoil):
    async def story(file):
        if spoil == "remove":
            file.path.unlink()
        else:
            file.path.write_text(spoil if spoil == "nonsense" else line_for("new", Role.INFER)[:40])
        assert await file.looks(6) == ["refused"]
        assert file.lets_in("user")
        file.write("new")
        assert await file.looks() == ["taken 1"]
        assert not file.lets_in("user")

    watched(story)


def test_a_file_that_was_unreadable_for_a_while_is_read_again_without_a_change(watched, monkeypatch):
    async def story(file):
        file.write("new")
        with monkeypatch.context() as broken:
            broken.setattr(Path, "open", no_descriptor)
            assert await file.looks(6) == ["refused"]
            assert file.lets_in("user")
        assert await file.looks(3) == ["taken 1"]
        assert file.lets_in("new")

    watched(story)


def no_descriptor(*_):
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_restored_file_is_reported_as_recovered(watched):
    async def story(file):
        aside = file.path.with_name("aside")
        file.path.rename(aside)
        assert await file.looks() == ["refused"]
        aside.rename(file.path)
        assert await file.looks() == ["taken 1"]

    watched(story)


def test_a_half_written_file_is_not_used(watched):
    async def story(file):
        file.path.write_text("")
        assert await file.looks(1) == []
        file.write("user", "new")
        assert await file.looks(2) == ["taken 2"]

    watched(story)


def test_a_file_that_changed_again_before_the_second_check_is_not_used(watched):
    async def story(file):
        file.write("new")
        assert await file.looks(1) == []
        file.write("new", "user")
        assert await file.looks(1) == []
        assert not file.lets_in("new")
        assert await file.looks(1) == ["taken 2"]

    watched(story)


def test_a_file_that_changes_while_it_is_read_is_not_used(watched, monkeypatch):
    async def story(file):
        file.write("new")
        assert await file.looks(1) == []
        with monkeypatch.context() as during:
            during.setattr(keys, "read_keys", lambda path: (read_keys(path), file.write("new", "user"))[0])
            assert await file.looks(1) == []
        assert await file.looks() == ["taken 2"]

    watched(story)


def test_a_file_that_changes_at_every_check_is_used_after_ten(watched):
    async def story(file):
        heard = []
        for number in range(2 * keys.MAX_CHECKS):
            file.write("new", *("more" * n for n in range(1, number + 2)))
            heard += await file.looks(1)
        assert heard == ["taken 11", "taken 21"]
        assert file.lets_in("new")
        assert not file.lets_in("user")

    watched(story)


def test_a_start_with_a_bad_file_is_refused(tmp_path):
    file = Watched(tmp_path)
    file.path.write_text("nonsense")
    with pytest.raises(KeysError, match="line 1"):
        asyncio.run(file.file.open())
