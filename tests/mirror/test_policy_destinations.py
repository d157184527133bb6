"""Addresses: only what every reader of URLs and every system call takes for the allowed place is inside it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import urllib3
import yarl
from hypothesis import given
from hypothesis import strategies as st

from statsbridge.mirror.destinations import Folder, Url, outside, parse_address, parse_url, without_secrets

ALLOWED = "https://mlflow.lab.example/team/a"


def inside(text: str, allowed: str = ALLOWED) -> bool:
    try:
        return outside(parse_address(text), parse_address(allowed)) is None
    except ValueError:
        return False


@pytest.mark.parametrize(
    "text",
    [
        "https://mlflow.lab.example/team/a",
        "https://mlflow.lab.example/team/a/",
        "https://mlflow.lab.example:443/team/a",
        "https://mlflow.lab.example/team/a/runs/7",
    ],
)
def test_the_place_itself_and_what_is_in_it(text: str) -> None:
    assert inside(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://mlflow.lab.example.evil.com/team/a",
        "https://evil.com/mlflow.lab.example/team/a",
        "https://mlflow.lab@evil.com/team/a",
        "https://mlflow.lab.example@evil.com/team/a",
        "https://mlflow.lab.example:443@evil.com/team/a",
        "https://evil.com@mlflow.lab.example/team/a",
        "https://user:password@mlflow.lab.example/team/a",
        "https://evil.com#mlflow.lab.example/team/a",
        "https://evil.com?mlflow.lab.example/team/a",
        "https://evil.com\\@mlflow.lab.example/team/a",
        "https:\\\\mlflow.lab.example/team/a",
        "https:/mlflow.lab.example/team/a",
        "https:///mlflow.lab.example/team/a",
        "https://MLFLOW.lab.example/team/a",
        "HTTPS://mlflow.lab.example/team/a",
        "https://mlflow.lab.example./team/a",
        "https://mlflow.lab..example/team/a",
        "https://.mlflow.lab.example/team/a",
        "https://mlflow.lab.exampl\u0435/team/a",  # Cyrillic е
        "https://mlflow\u3002lab.example/team/a",  # IDNA reads 。 as a dot
        "https://mlflow.lab.ex\u00adample/team/a",  # IDNA drops a soft hyphen
        "https://ⓜlflow.lab.example/team/a",
        "https://mlflow.lab%2eexample/team/a",
        "https://mlflow.lab.example%00.evil.com/team/a",
        "https://mlflow.lab.example%2f@evil.com/team/a",
        "https://mlflow.lab.example:8443/team/a",
        "https://mlflow.lab.example:80/team/a",
        "https://mlflow.lab.example:0443/team/a",
        "https://mlflow.lab.example:/team/a",
        "https://mlflow.lab.example:443:443/team/a",
        "https://mlflow.lab.example:\u0664\u0664\u0663/team/a",
        "https://mlflow.lab.example:+443/team/a",
        "https://mlflow.lab.example:65979/team/a",  # 443 modulo 2**16
        "http://mlflow.lab.example/team/a",
        "http://mlflow.lab.example:443/team/a",
        "https+evil://mlflow.lab.example/team/a",
        "https://mlflow.lab.example",
        "https://mlflow.lab.example/team",
        "https://mlflow.lab.example/team/ab",
        "https://mlflow.lab.example/Team/a",
        "https://mlflow.lab.example/team/a/../b",
        "https://mlflow.lab.example/team/a/..",
        "https://mlflow.lab.example/x/../team/a",
        "https://mlflow.lab.example/team/./a",
        "https://mlflow.lab.example//team/a",
        "https://mlflow.lab.example/team//a",
        "https://mlflow.lab.example/team/a//",
        "https://mlflow.lab.example/team/a/%2e%2e/b",
        "https://mlflow.lab.example/team/a/..;/b",
        "https://mlflow.lab.example/team/a?x=1",
        "https://mlflow.lab.example/team/a#x",
        "https://mlflow.lab.example/team/a\n",
        "https://mlflow.lab.example/te\tam/a",
        "https://mlflow.lab.\nexample/team/a",
        " https://mlflow.lab.example/team/a",
        "https://mlflow.lab.example/team/a ",
        "https://mlflow.lab.example /team/a",
        "//mlflow.lab.example/team/a",
        "mlflow.lab.example/team/a",
        "https://",
        "https:",
        "",
    ],
)
def test_what_only_looks_like_it_is_outside(text: str) -> None:
    assert not inside(text)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("http://[2001:db8::1]:5000/x", "http://[2001:db8::1]:5000"),
        ("http://[::1]", "http://[::1]:80"),
        ("aim://aim_server:53800", "aim://aim_server:53800"),
        ("s3://bucket/prefix/run", "s3://bucket/prefix"),
        ("https://xn--mnchen-3ya.example", "https://xn--mnchen-3ya.example"),
    ],
)
def test_numbers_and_other_schemes(text: str, allowed: str) -> None:
    assert inside(text, allowed)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        # Other spellings of 127.0.0.1, which the C library reads, and of [::1].
        ("http://127.1:5000", "http://127.0.0.1:5000"),
        ("http://2130706433:5000", "http://127.0.0.1:5000"),
        ("http://0177.0.0.1:5000", "http://127.0.0.1:5000"),
        ("http://0x7f.0.0.1:5000", "http://127.0.0.1:5000"),
        ("http://0x7f000001:5000", "http://127.0.0.1:5000"),
        ("http://127.0.0.01:5000", "http://127.0.0.1:5000"),
        ("http://localhost:5000", "http://127.0.0.1:5000"),
        ("http://[::ffff:127.0.0.1]:5000", "http://127.0.0.1:5000"),
        ("http://[0:0:0:0:0:0:0:1]", "http://[::1]"),
        ("http://[::1%25eth0]", "http://[::1]"),
        ("http://[::1%eth0]", "http://[::1]"),
        ("http://[::1]evil.com", "http://[::1]"),
        ("http://[::1].evil.com", "http://[::1]"),
        ("http://[::1", "http://[::1]"),
        ("http://::1", "http://[::1]"),
        ("http://[2001:DB8::1]", "http://[2001:db8::1]"),
        ("http://[2001:db8:0::1]", "http://[2001:db8::1]"),
        ("http://[v1.x]", "http://[::1]"),
        ("aim://aim_server", "aim://aim_server:53800"),
        ("s3://bucket.evil/prefix", "s3://bucket/prefix"),
        ("https://münchen.example", "https://xn--mnchen-3ya.example"),
        ("postgresql:///db?host=evil.com", "postgresql://db.lab.example"),
        ("postgresql://db.lab.example,evil.com/db", "postgresql://db.lab.example"),
        ("databricks", "https://databricks"),
        ("databricks:profile", "https://databricks"),
    ],
)
def test_other_spellings_of_numbers_are_refused(text: str, allowed: str) -> None:
    assert not inside(text, allowed)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("https://MLflow.lab.example", "write mlflow.lab.example"),
        ("HTTPS://mlflow.lab.example", "write https"),
        ("http://[2001:DB8::1]", "write [2001:db8::1]"),
        ("http://[2001:db8:0:0::1]", "write [2001:db8::1]"),
        ("http://[::ffff:1.2.3.4]", "write 1.2.3.4"),
        ("https://a@b", "names a user before the host"),
        ("https://mlflow.lab.exampl\u0435", "beyond ASCII"),
        ("https://mlflow.lab.example:x", "port 'x'"),
        ("http://127.1", "is not four decimal numbers"),
        ("/data/../etc", "write /etc"),
        ("mlruns", "neither a URL nor an absolute path"),
        ("sqlite:///mlflow.db", "write sqlite:////path"),
        ("sqlite://", "names no absolute path"),
        ("sqlite:////data/x.db?mode=rw", "a query"),
        ("file://host/data", "write file:///path"),
        ("file:///data/%2e%2e/x", "percent-encoded"),
        ("FILE:///data", "write file"),
        ("//host/share", "another machine"),
        ("/data\x00/x", "cannot be printed"),
        ("/data\\x", "backslash"),
    ],
)
def test_the_reason_says_what_to_write(text: str, told: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is what is looked at
        parse_address(text)
    assert told in str(error.value)


PIECES = st.sampled_from(
    ["https", "http", ":", "/", "//", "@", "mlflow", ".lab", ".example", ".evil.com", "evil.com", "team", "a", "..",
     ".", "%2e", "\\", "#", "?", ";", ":443", ":80", "[", "]", "::1", " ", "\t", "\n", "\u3002", "ｅ", "ß", "0x7f", "A"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=12).map("".join), st.lists(st.tuples(st.integers(0, 33), PIECES), max_size=3))
def test_no_reader_of_urls_finds_another_host_in_what_is_inside(text: str, inserted: list[tuple[int, str]]) -> None:
    mutated = ALLOWED
    for position, piece in inserted:
        mutated = mutated[:position] + piece + mutated[position:]
    for candidate in (text, mutated):
        if inside(candidate):
            assert urlsplit(candidate).hostname == "mlflow.lab.example"
            assert yarl.URL(candidate).host == "mlflow.lab.example"
            assert httpx.URL(candidate).host == "mlflow.lab.example"
            assert urllib3.util.parse_url(candidate).host == "mlflow.lab.example"
            assert f"{yarl.URL(candidate).path}/".startswith("/team/a/")


@given(st.text(max_size=20))
def test_any_text_is_judged_without_another_error(text: str) -> None:
    inside(text)
    inside(f"https://{text}")
    inside(f"https://mlflow.lab.example:{text}")
    inside(f"https://mlflow.lab.example/team/a{text}")
    inside(f"/{text}", "/data")


def test_a_url_says_itself() -> None:
    assert str(parse_url("https://mlflow.lab.example:443/team/a/")) == ALLOWED
    assert parse_url(ALLOWED) == Url("https", "mlflow.lab.example", None, ("team", "a"))
    assert str(parse_url("http://[::1]:8080")) == "http://[::1]:8080"


def test_folders(tmp_path: Path) -> None:
    allowed = Folder(str(tmp_path / "runs"))
    for text in ("runs", "runs/", "runs/mlflow.db", "runs/a/b", "runs//a"):
        assert outside(parse_address(f"{tmp_path}/{text}"), allowed) is None
    assert outside(parse_address(f"sqlite:///{tmp_path}/runs/mlflow.db"), allowed) is None
    assert outside(parse_address(f"sqlite+pysqlite:///{tmp_path}/runs/mlflow.db"), allowed) is None
    assert outside(parse_address(f"file://{tmp_path}/runs/a"), allowed) is None
    for text in ("", "run", "runs2", "Runs", "runs.evil/x"):
        assert outside(parse_address(f"{tmp_path}/{text}"), allowed) == "it is another folder"
    assert outside(Folder("/anything"), Folder("/")) is None
    assert outside(parse_url(ALLOWED), allowed) == "it is a URL, no folder"
    assert outside(allowed, parse_url(ALLOWED)) == "it is a folder, no URL"


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    allowed, elsewhere = Folder(str(tmp_path / "runs")), str(tmp_path / "elsewhere")
    for text in ("runs/out", "runs/out/deeper", "link/x"):
        reason = outside(parse_address(f"{tmp_path}/{text}"), allowed)
        assert reason is not None
        assert "symbolic link" in reason
    assert elsewhere in str(outside(Folder(str(tmp_path / "runs/out")), allowed))
    # Nor may the allowed folder itself be turned into another one.
    assert "symbolic link" in str(outside(Folder(str(tmp_path / "link/x")), Folder(str(tmp_path / "link"))))


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://user:secret@host/x", "https://***@host/x"),
        ("postgresql://user:s@cret@host/db?password=secret", "postgresql://***@host/db?***"),
        ("https://host/a@b", "https://host/a@b"),
        ("/data/a@b?c", "/data/a@b?c"),
    ],
)
def test_secrets_are_not_shown(address: str, shown: str) -> None:
    assert without_secrets(address) == shown
