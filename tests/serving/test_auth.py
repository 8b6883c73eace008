"""Tokens: where they are read, what they allow, and that they never show."""

import pytest

from mvr_ray.errors import ConfigError
from mvr_ray.serving.auth import TokenStore, is_loopback, read_tokens, require_tokens

READ, ADMIN, OTHER = "read-" + "r" * 20, "admin-" + "a" * 20, "other-" + "o" * 20


def test_tokens_of_the_file_and_of_the_environment_have_their_roles(tmp_path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# who may what\n\nread {READ}   # the shop\nadmin {ADMIN}\t# more\nread {READ}#1\n")
    tokens = read_tokens(str(file), {"MVR_RAY_READ_TOKEN": f"{OTHER}\n"})
    assert [tokens.role(word.encode()) for word in (READ, ADMIN, OTHER)] == ["read", "admin", "read"]
    assert tokens.role(f"{READ}#1".encode()) == "read"
    for wrong in (b"", READ[:-1].encode(), READ.upper().encode(), b"\xff" * 30, f" {READ}".encode()):
        assert tokens.role(wrong) is None


def test_a_file_of_tokens_may_be_in_the_home_folder_and_begin_with_a_byte_order_mark(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tokens").write_text(f"read {READ}\n", encoding="utf-8-sig")
    assert read_tokens("~/tokens", {}).role(READ.encode()) == "read"
    with pytest.raises(ConfigError, match="holds a NUL"):
        read_tokens("to\0kens", {})


def test_what_is_kept_of_a_token_is_not_the_token(tmp_path) -> None:
    tokens = read_tokens(None, {"MVR_RAY_ADMIN_TOKEN": ADMIN})
    assert ADMIN not in repr(tokens.roles) and ADMIN not in repr(vars(tokens))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"write {READ}", "line 1 is not `read TOKEN`"),
        (f"\n{READ}", "line 2 is not `read TOKEN`"),
        (f"read {READ} {ADMIN}", "line 1 is not `read TOKEN`"),
        (f"read {READ[:19]}", "line 1 is not 20 or more"),
        (f"read {'ü' * 30}", "line 1 is not 20 or more"),
        (f"read {READ}\nadmin {READ}", "line 2 is given for both"),
    ],
)
def test_a_wrong_line_is_named_and_its_token_is_not(tmp_path, text, message) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_tokens(str(file), {})
    assert not any(word in str(error.value) for word in (READ[:19], ADMIN, "ü" * 30))


def test_a_missing_file_of_tokens_is_an_error_and_not_a_server_without_tokens(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tokens(str(tmp_path / "none"), {})


@pytest.mark.parametrize("text", ["", "\n", f"# read {READ}\n"])
def test_a_file_without_a_token_is_an_error_and_not_a_server_without_tokens(tmp_path, text) -> None:
    (file := tmp_path / "tokens").write_text(text)
    with pytest.raises(ConfigError, match="tokens holds no token; make one with"):
        read_tokens(str(file), {"MVR_RAY_READ_TOKEN": READ})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_the_loopback_needs_no_token(host) -> None:
    assert is_loopback(host)
    require_tokens(host, TokenStore())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "", "search.example", "127.0.0.1.x"])
def test_what_others_reach_is_not_served_without_a_token(host) -> None:
    with pytest.raises(ConfigError, match="import secrets"):
        require_tokens(host, TokenStore())
    require_tokens(host, read_tokens(None, {"MVR_RAY_READ_TOKEN": READ}))
