"""The options of `fornax host`: addresses, sizes, tokens, and what it refuses."""

import pytest

from fornax.config import ConfigError, load
from fornax.serving.access import Auth
from fornax.serving.config import HostConfig, parse_address, parse_bytes


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (8080, "127.0.0.1", 8080),
        ("0", "127.0.0.1", 0),
        ("0.0.0.0:80", "0.0.0.0", 80),
        ("[::1]:9000", "::1", 9000),
        ("models.example:443", "models.example", 443),
    ],
)
def test_addresses_are_ports_or_host_and_port(text, host, port):
    address = parse_address("http", text)
    assert (address.host, address.port) == (host, port)


@pytest.mark.parametrize("text", ["", "x", "70000", ":80", "host:", "host:-1", "8080x", "٣"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="is not an address"):
        parse_address("http", text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("6GiB", 6 * 2**30), ("1.5 MB", 1_500_000), ("2k", 2000), ("1TiB", 2**40)],
)
def test_sizes_have_units(text, size):
    assert parse_bytes("model_memory", text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "6 parsecs", "1e9", "GiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes("model_memory", text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--http", "none", "--grpc", "none"], "leave nothing to serve on"),
        (["--tls-cert", "c.pem"], "given together"),
        (["--tls-client-ca", "ca.pem"], "needs tls_cert"),
        (["--load", "ranker"], "control=explicit only"),
        (["--poll-seconds", "0"], "poll_seconds=0"),
        (["--drain-seconds", "-1"], "drain_seconds=-1"),
        (["--trace-sample-rate", "1.5"], "not between 0 and 1"),
        (["--devices", "1", "1"], "different numbers"),
        (["--cpu-threads", "0"], "cpu_threads=0"),
        (["--model-memory", "much"], "is not a size"),
        (["--max-body-bytes", "0"], "max_body_bytes=0"),
        (["--send-timeout", "0"], "send_timeout=0"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        load(HostConfig, overrides=changes)


def test_tokens_come_from_the_environment_and_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("FORNAX_HOST_TOKEN", "one, two")
    file = tmp_path / "tokens"
    file.write_text("# of the team\nthree\n\ntwo\n")
    admins = tmp_path / "admins"
    admins.write_text("boss\n")
    config = HostConfig(token_file=file, admin_token_file=admins)
    auth, admin = config.auth(), config.admin_auth()
    assert [auth.admits(f"Bearer {token}") for token in ("one", "two", "three", "boss")] == 4 * [
        True
    ]
    assert not auth.admits("Bearer four")
    assert not auth.admits("Basic one")
    assert not auth.admits(None)
    assert admin.admits(b"bearer boss")
    assert not admin.admits("Bearer one")
    assert "one" not in repr(auth)


def test_no_token_lets_everybody_in(monkeypatch):
    monkeypatch.delenv("FORNAX_HOST_TOKEN", raising=False)
    auth = HostConfig().auth()
    assert not auth.enabled
    assert auth.admits(None)
    assert Auth(tokens=("x",)).enabled


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), ("# none\n", "no token")]
)
def test_a_file_of_tokens_that_is_none_is_refused(tmp_path, content, message):
    file = tmp_path / "tokens"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        HostConfig(token_file=file).auth()


def test_a_certificate_that_is_not_there_is_refused(tmp_path):
    config = HostConfig(tls_cert=tmp_path / "c.pem", tls_key=tmp_path / "k.pem")
    with pytest.raises(ConfigError, match=r"tls_cert=.*is not a file"):
        config.tls()


def test_shared_memory_is_for_this_machine_alone_unless_asked_for():
    assert HostConfig().shared_memory_allowed()
    assert not HostConfig(http="0.0.0.0:80").shared_memory_allowed()
    assert HostConfig(http="0.0.0.0:80", shared_memory="on").shared_memory_allowed()
    assert not HostConfig(shared_memory="off").shared_memory_allowed()


def test_an_address_that_others_reach_needs_a_token_or_leave(tmp_path, monkeypatch):
    monkeypatch.delenv("FORNAX_HOST_TOKEN", raising=False)
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    for field in ("http", "grpc"):
        for address in ("0.0.0.0:0", "10.1.2.3:80", "[::]:0", "example:80"):
            with pytest.raises(ConfigError, match=rf"{field}=.*without a token.*allow-anonymous"):
                HostConfig(**{field: address}).check_access()
            for leave in ({"token_file": tokens}, {"admin_token_file": tokens}):
                HostConfig(**{field: address}, **leave).check_access()
            HostConfig(**{field: address}, allow_anonymous=True).check_access()
    HostConfig(http="localhost:0", grpc="[::1]:0").check_access()
    HostConfig(http="127.0.0.2:0", grpc="none").check_access()
    monkeypatch.setenv("FORNAX_HOST_TOKEN", "secret")
    HostConfig(http="0.0.0.0:0").check_access()
