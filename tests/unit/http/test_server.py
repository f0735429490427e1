"""The endpoint: who may ask for what, over plain HTTP on loopback and over TLS elsewhere."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
import trustme
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from monitoring.http.addresses import host_and_port, is_loopback, without_port
from monitoring.http.endpoint import Endpoint, new_token, read_bearer_token, tls_context
from monitoring.http.server import RENDER_SECONDS, Exposition, make_app, serve
from monitoring.http.tokens import UnusableToken
from tests.support.tools import IPV6, needs

TOKEN = "a-token-of-16-characters"


class Scrapes:
    """Counts how often it was collected."""

    num = 0

    def collect(self):
        self.num += 1
        yield CounterMetricFamily("parallel3d_tokens", "Tokens of all steps.", self.num)
        rank = GaugeMetricFamily("parallel3d_rank_info", "A rank's place.", labels=["host"])
        rank.add_metric(['"quoted"\n\\'], 1)
        yield rank


async def page(request: web.Request) -> web.Response:
    return web.Response(text=f"page {request.query_string}")


@asynccontextmanager
async def served(endpoint: Endpoint, collector=None, **options):
    app = make_app(endpoint, collector or Scrapes(), [web.get("/", page), web.get("/api/run", page)], **options)
    runner = await serve(app, endpoint)
    try:
        yield endpoint.url("")
    finally:
        await runner.cleanup()
        endpoint.close()


@pytest.fixture
async def asks():
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


async def status(session, url: str, **options) -> int:
    async with session.get(url, **options) as answer:
        return answer.status


async def test_on_loopback_metrics_are_open_and_the_page_takes_the_token(asks):
    endpoint = Endpoint.open("127.0.0.1", None, TOKEN)
    async with served(endpoint) as url:
        async with asks.get(f"{url}/metrics") as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            text = await answer.text()
        assert "# TYPE parallel3d_tokens_total counter\nparallel3d_tokens_total 1.0\n" in text
        assert 'parallel3d_rank_info{host="\\"quoted\\"\\n\\\\"} 1.0' in text
        assert await status(asks, f"{url}/healthz") == 200
        for path in ("/", "/api/run", "/nothing"):
            assert await status(asks, url + path) == 401
        assert await status(asks, f"{url}/", headers={"Authorization": f"Bearer {TOKEN}"}) == 200
        for wrong in (f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer", "Bearer é", f"Bearer {TOKEN[:-1]}"):
            assert await status(asks, f"{url}/", headers={"Authorization": wrong}) == 401
        async with asks.post(f"{url}/metrics") as answer:
            assert answer.status == 405


async def test_the_address_with_the_token_leaves_a_cookie_and_the_token_goes_from_the_address(asks):
    endpoint = Endpoint.open("127.0.0.1", None, TOKEN)
    async with served(endpoint) as url:
        assert endpoint.url("/", with_token=True) == f"{url}/?token={TOKEN}"
        async with asks.get(f"{url}/?token={TOKEN}&step=3", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/?step=3")
            cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert "Secure" not in cookie, "or it would not come back over plain HTTP"
        async with asks.get(f"{url}/?step=3") as answer:
            assert await answer.text() == "page step=3"
        assert await status(asks, f"{url}/?token=wrong") == 200, "the cookie is good"
        asks.cookie_jar.clear()
        assert await status(asks, f"{url}/?token=wrong") == 401
        # Two slashes would make a browser go to another host.
        async with asks.get(f"{url}//elsewhere.example/?token={TOKEN}", allow_redirects=False) as answer:
            assert answer.headers["Location"] == "/elsewhere.example/"


async def test_two_runs_on_one_host_have_cookies_of_their_own(asks):
    one, other = (Endpoint.open("127.0.0.1", None) for _ in range(2))
    async with served(one), served(other):
        for endpoint in (one, other):
            assert await status(asks, endpoint.url("/", with_token=True)) == 200
        for endpoint in (one, other):
            assert await status(asks, endpoint.url("/")) == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", 200),
        ("localhost:1234", 200),
        ("127.0.0.1:80", 200),
        ("127.1.2.3", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("evil.example:9090", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.1", 403),
        ("[::2]", 403),
        ("", 403),
    ],
)
async def test_a_page_elsewhere_that_resolves_to_loopback_is_turned_away(asks, host, expected):
    endpoint = Endpoint.open("127.0.0.1", None, TOKEN)
    async with served(endpoint) as url:
        for path in ("/metrics", "/healthz", f"/api/run?token={TOKEN}"):
            answer = await status(asks, url + path, headers={"Host": host}, allow_redirects=False)
            assert answer == (303 if "token" in path and expected == 200 else expected)


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def tls(authority, tmp_path):
    issued = authority.issue_cert("127.0.0.1", "localhost", socket.gethostname())
    (tmp_path / "key.pem").write_bytes(issued.private_key_pem.bytes())
    (tmp_path / "cert.pem").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    return tls_context(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))


async def test_elsewhere_metrics_take_the_token_too_over_tls(asks, tls, authority):
    import ssl

    endpoint = Endpoint.open("0.0.0.0", None, TOKEN, tls)
    assert endpoint.url("/metrics") == f"https://{socket.gethostname()}:{endpoint.port}/metrics"
    trusted, url = ssl.create_default_context(), f"https://localhost:{endpoint.port}"
    authority.configure_trust(trusted)
    async with served(endpoint):
        for path in ("/metrics", "/sd", "/"):
            assert await status(asks, url + path, ssl=trusted) == 401
        assert await status(asks, f"{url}/healthz", ssl=trusted) == 200
        bearer = {"Authorization": f"bearer {TOKEN}", "Host": "scraped.example"}
        assert await status(asks, f"{url}/metrics", ssl=trusted, headers=bearer) == 200
        async with asks.get(f"{url}/?token={TOKEN}", ssl=trusted, allow_redirects=False) as answer:
            assert "Secure" in answer.headers["Set-Cookie"]
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await status(asks, f"{url}/metrics", headers=bearer)
        with pytest.raises(aiohttp.ClientError):
            await status(asks, url.replace("https", "http"))


async def test_a_hundred_scrapes_at_a_time_are_rendered_once(asks):
    collector, endpoint = Scrapes(), Endpoint.open("127.0.0.1", None)
    async with served(endpoint, collector) as url:
        exposition = await asyncio.gather(*(status(asks, f"{url}/metrics") for _ in range(100)))
    assert exposition == [200] * 100
    assert collector.num <= 3  # a slow machine may need longer than the text is kept


def test_the_text_is_kept_for_half_a_second():
    now = 100.0
    collector = Scrapes()
    exposition = Exposition(collector, clock=lambda: now)
    first = exposition.text()
    now += RENDER_SECONDS * 0.99
    assert exposition.text() is first
    now += RENDER_SECONDS * 0.02
    assert b"parallel3d_tokens_total 2.0" in exposition.text()


async def test_ranks_are_listed_for_service_discovery(asks):
    endpoint = Endpoint.open("127.0.0.1", None)
    found = [{"targets": ["127.0.0.1:4000"], "labels": {"rank": "0"}}]
    async with served(endpoint, targets=lambda: found) as url, asks.get(f"{url}/sd") as answer:
        assert answer.content_type == "application/json"
        assert json.loads(await answer.text()) == found
    endpoint = Endpoint.open("127.0.0.1", None, TOKEN)
    async with served(endpoint) as url:
        assert await status(asks, f"{url}/sd") == 404


def test_tokens(tmp_path):
    assert len({new_token() for _ in range(10)}) == 10
    path = tmp_path / "token"
    path.write_text(f"  {TOKEN}\n")
    assert read_bearer_token(str(path)) == TOKEN
    for text, said in (
        ("short", "16 to 65536 bytes, and this one has 5"),
        ("two words that are long enough", "without spaces"),
        ("two-lines-that-are\nlong-enough", "one line"),
        ("eine-Lösung-die-lang-genug-ist", "printable ASCII"),
    ):
        path.write_text(text)
        with pytest.raises(UnusableToken, match=said):
            read_bearer_token(str(path))


def test_a_key_with_a_passphrase_is_refused_and_not_asked_for(tmp_path, authority):
    from cryptography.hazmat.primitives import serialization

    issued = authority.issue_cert("localhost")
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    form = serialization.PrivateFormat.PKCS8
    (tmp_path / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, secret))
    (tmp_path / "cert.pem").write_bytes(issued.cert_chain_pems[0].bytes())
    with pytest.raises(OSError):  # noqa: PT011  OpenSSL's words differ by version
        tls_context(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))


def test_addresses():
    assert [is_loopback(each) for each in ("localhost", "127.8.8.8", "::1")] == [True] * 3
    assert [is_loopback(each) for each in ("0.0.0.0", "::", "10.0.0.1", "host", "")] == [False] * 5
    assert host_and_port("10.0.0.1", 80) == "10.0.0.1:80"
    assert host_and_port("::1", 80) == "[::1]:80"
    assert host_and_port("::", 80) == f"{socket.gethostname()}:80"
    assert [without_port(each) for each in ("a:80", "a", "[::1]:80", "[::1]", "")] == ["a", "a", "::1", "::1", ""]


@needs(IPV6)
@pytest.mark.parametrize(("host", "reached"), [("::", ["127.0.0.1", "::1"]), ("::1", ["::1"])])
def test_all_addresses_are_those_of_ipv4_too(host, reached):
    endpoint = Endpoint.open(host, None)
    found = []
    for address in ("127.0.0.1", "::1"):
        with suppress(OSError):
            socket.create_connection((address, endpoint.port), timeout=5.0).close()
            found.append(address)
    endpoint.close()
    assert found == reached


def test_a_port_that_is_taken_is_told():
    endpoint = Endpoint.open("localhost", None)
    with pytest.raises(OSError, match="in use"):
        Endpoint.open("127.0.0.1", endpoint.port)
    endpoint.close()
