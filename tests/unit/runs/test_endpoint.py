"""Where a run is served, as configured: what is refused before anything starts, and what endpoints.json tells."""

from __future__ import annotations

import errno
import os
import socket
import stat

import pytest
import trustme

from monitoring.http.endpoint import Endpoint
from parallel3d.config import RunConfig, load_config
from parallel3d.config.errors import Place
from parallel3d.runs.endpoint import endpoints, open_endpoint, page_to_show
from parallel3d.runs.folder import RunFolder
from runtime.errors import ConfigError

TOKEN = "a-token-of-16-characters"


def config_of(**watched) -> RunConfig:
    return load_config(None, overrides={f"monitoring.{key}": value for key, value in watched.items()}, environ={})


def refusal(**watched) -> list[str]:
    with pytest.raises(ConfigError) as error:
        open_endpoint(config_of(**watched), lambda key: Place("run.yaml", 3, 7))
    return str(error.value).splitlines()


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    issued, other = (trustme.CA().issue_cert("localhost") for _ in range(2))
    issued.private_key_pem.write_to_path("key.pem")
    other.private_key_pem.write_to_path("other.pem")
    issued.cert_chain_pems[0].write_to_path("cert.pem")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return tmp_path


def test_by_default_it_is_a_free_port_of_loopback():
    one, other = (open_endpoint(config_of()) for _ in range(2))
    assert one.host == other.host == "127.0.0.1"
    assert one.port != other.port
    assert one.token != other.token
    assert one.tls is None
    one.close()
    other.close()


def test_a_run_that_is_not_watched_has_none():
    assert open_endpoint(config_of(enabled=False, port=1)) is None


def test_the_token_and_the_certificate_come_from_files(files):
    found = open_endpoint(config_of(host="0.0.0.0", token_file="token", tls_certificate="cert.pem", tls_key="key.pem"))
    assert (found.token, found.scheme, found.is_loopback) == (TOKEN, "https", False)
    found.close()


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refusal(port=port) == [
            f"run.yaml:3:7  monitoring.port = {port}: 127.0.0.1 can't be listened on at this port: "
            "Address already in use.",
            "              Give another, or null for a free one.",
        ]


def test_where_no_free_port_can_be_had_the_run_goes_on_without(monkeypatch, capsys):
    def none_is_free(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Endpoint, "open", none_is_free)
    assert open_endpoint(config_of()) is None
    assert capsys.readouterr().err == "parallel3d: the run has no /metrics and no page: Too many open files\n"


def test_an_address_of_another_host_is_refused(files):
    given = {"token_file": "token", "tls_certificate": "cert.pem", "tls_key": "key.pem"}
    assert refusal(host="203.0.113.1", **given) == [
        'run.yaml:3:7  monitoring.host = "203.0.113.1": this host has no such address.',
        "              Give one of this host's, or 127.0.0.1.",
    ]


@pytest.mark.parametrize(
    ("watched", "key", "words"),
    [
        ({"token_file": "nothing"}, "token_file", "it can't be read: No such file or directory."),
        ({"token_file": "."}, "token_file", "it can't be read: Is a directory."),
        ({"token_file": "short"}, "token_file", "16 to 65536 bytes, and this one has 3."),
        ({"tls_certificate": "nothing", "tls_key": "key.pem"}, "tls_certificate", "it can't be read: No such file"),
        ({"tls_certificate": "cert.pem", "tls_key": "nothing"}, "tls_key", "it can't be read: No such file"),
        ({"tls_certificate": "cert.pem", "tls_key": "other.pem"}, "tls_certificate", "no pair that TLS can use"),
        ({"tls_certificate": "token", "tls_key": "key.pem"}, "tls_certificate", "no pair that TLS can use"),
    ],
)
def test_files_that_do_not_do_are_named(files, watched, key, words):
    (files / "short").write_text("abc")
    first, remedy = refusal(**watched)
    assert first.startswith(f'run.yaml:3:7  monitoring.{key} = "{watched[key]}": ')
    assert words in first
    assert remedy.strip()


def test_endpoints_are_for_the_user_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    endpoint = open_endpoint(config_of())
    url = f"http://127.0.0.1:{endpoint.port}"
    known = endpoints("id", endpoint)
    assert known == {
        "run_id": "id",
        "pid": os.getpid(),
        "metrics": f"{url}/metrics",
        "page": f"{url}/?token={endpoint.token}",
        "token": endpoint.token,
    }
    assert endpoints("id", endpoint, per_rank=True) == {**known, "sd": f"{url}/sd"}
    assert endpoints("id", None) == {"run_id": "id", "pid": os.getpid()}
    folder = RunFolder.create(config_of(), "id", endpoints=known)
    assert stat.S_IMODE((folder.path / "endpoints.json").stat().st_mode) == 0o600
    endpoint.close()


def test_a_token_that_outlives_the_run_is_not_shown(files):
    endpoint = open_endpoint(config_of(token_file="token"))
    known = endpoints("id", endpoint)
    assert page_to_show(known, config_of()) == f"http://127.0.0.1:{endpoint.port}/?token={TOKEN}"
    shown = page_to_show(known, config_of(token_file="token"))
    assert shown == f"http://127.0.0.1:{endpoint.port}/ (with its token: in endpoints.json)"
    assert page_to_show(endpoints("id", None), config_of()) is None
    endpoint.close()
