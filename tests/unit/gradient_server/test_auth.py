"""Who may join: only who knows the token, once for each challenge, and only a server that knows it too."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.errors import ConfigError
from runtime.gradient_server.wire.auth import (
    SeenNonces,
    ServerHandshake,
    WorkerHandshake,
    read_token,
    server_proof,
    worker_proof,
)
from runtime.gradient_server.wire.messages import (
    Challenge,
    Codec,
    Hello,
    Proof,
    Reason,
    Welcome,
    WireError,
    decode,
    encode,
)

TOKEN = b"a-token-of-16-or-more"
HELLO = Hello(2, "n1", bytes(16), 7, True)
NONCE = bytes(range(32))


def welcome(mac: bytes) -> Welcome:
    return Welcome(0, 1, mac, 5000, 30_000, 1 << 20, Codec.NONE)


def refusal(error: pytest.ExceptionInfo[WireError]) -> Reason:
    return error.value.reason


@pytest.mark.parametrize("token", [TOKEN, b""], ids=["token", "no token on loopback"])
def test_both_prove_that_they_know_the_token(token: bytes) -> None:
    worker, server = WorkerHandshake(token, "n1", step=7, has_state=True), ServerHandshake(token, SeenNonces())
    hello = decode(encode(worker.hello)[4:])
    assert isinstance(hello, Hello)
    assert (hello.version, hello.node_id, hello.step, hello.has_state) == (2, "n1", 7, True)
    proof = worker.prove(server.challenge(hello))
    joined, mac = server.check(proof)
    assert joined == hello
    worker.check(welcome(mac))


def test_the_proofs_bytes() -> None:
    """Written down, so that workers of other makes can join."""
    said = NONCE + encode(HELLO)
    expected = hmac.new(TOKEN, b"parallel3d gradient worker" + said, hashlib.sha256).digest()
    assert worker_proof(TOKEN, NONCE, HELLO) == expected
    expected = hmac.new(TOKEN, b"parallel3d gradient server" + said, hashlib.sha256).digest()
    assert server_proof(TOKEN, NONCE, HELLO) == expected


def test_a_proof_is_of_all_that_was_said() -> None:
    proofs = [
        worker_proof(TOKEN, NONCE, HELLO),
        server_proof(TOKEN, NONCE, HELLO),
        worker_proof(TOKEN + b"x", NONCE, HELLO),
        worker_proof(TOKEN, bytes(32), HELLO),
        *(
            worker_proof(TOKEN, NONCE, replace(HELLO, **change))
            for change in (
                {"version": 3},
                {"node_id": "n2"},
                {"nonce": bytes(15) + b"\1"},
                {"step": 8},
                {"has_state": False},
            )
        ),
    ]
    assert len(set(proofs)) == len(proofs)


def test_another_token() -> None:
    worker, server = WorkerHandshake(b"another-token-than-it", "n1"), ServerHandshake(TOKEN, SeenNonces())
    proof = worker.prove(server.challenge(worker.hello))
    with pytest.raises(WireError, match="'n1' has another token than this server") as error:
        server.check(proof)
    assert refusal(error) is Reason.BAD_TOKEN


def test_no_second_guess() -> None:
    """A challenge is used up by a wrong proof too."""
    worker, server = WorkerHandshake(TOKEN, "n1"), ServerHandshake(TOKEN, SeenNonces())
    proof = worker.prove(server.challenge(worker.hello))
    with pytest.raises(WireError) as error:
        server.check(Proof(bytes(32)))
    assert refusal(error) is Reason.BAD_TOKEN
    with pytest.raises(WireError) as error:
        server.check(proof)
    assert refusal(error) is Reason.REPLAYED


def test_a_server_that_does_not_know_the_token() -> None:
    worker, liar = WorkerHandshake(TOKEN, "n1"), ServerHandshake(b"a-guess-of-the-token", SeenNonces())
    proof = worker.prove(liar.challenge(worker.hello))
    for mac in (bytes(32), proof.mac, server_proof(b"", NONCE, worker.hello)):
        with pytest.raises(WireError, match="the server has another token") as error:
            worker.check(welcome(mac))
        assert refusal(error) is Reason.BAD_TOKEN


def test_a_welcome_without_a_challenge() -> None:
    worker = WorkerHandshake(b"", "n1")
    with pytest.raises(WireError) as error:
        worker.check(welcome(server_proof(b"", b"", worker.hello)))
    assert refusal(error) is Reason.BAD_TOKEN


def test_a_replayed_join() -> None:
    """Whoever recorded a join, and sends it again on a connection of its own."""
    seen = SeenNonces()
    worker, server = WorkerHandshake(TOKEN, "n1"), ServerHandshake(TOKEN, seen)
    proof = worker.prove(server.challenge(worker.hello))
    server.check(proof)
    with pytest.raises(WireError) as error:
        server.check(proof)
    assert refusal(error) is Reason.REPLAYED
    with pytest.raises(WireError, match="'n1' joined with this nonce before") as error:
        ServerHandshake(TOKEN, seen).challenge(worker.hello)
    assert refusal(error) is Reason.REPLAYED

    forgetful = ServerHandshake(TOKEN, SeenNonces())  # a server that was started anew
    forgetful.challenge(worker.hello)
    with pytest.raises(WireError) as error:
        forgetful.check(proof)
    assert refusal(error) is Reason.BAD_TOKEN, "the proof was of another challenge"


def test_two_connections_with_one_nonce() -> None:
    seen = SeenNonces()
    worker = WorkerHandshake(TOKEN, "n1")
    first, second = ServerHandshake(TOKEN, seen), ServerHandshake(TOKEN, seen)
    one, other = first.challenge(worker.hello), second.challenge(worker.hello)
    first.check(Proof(worker_proof(TOKEN, one.nonce, worker.hello)))
    with pytest.raises(WireError) as error:
        second.check(Proof(worker_proof(TOKEN, other.nonce, worker.hello)))
    assert refusal(error) is Reason.REPLAYED


def test_the_order_of_a_join() -> None:
    server = ServerHandshake(TOKEN, SeenNonces())
    with pytest.raises(WireError) as error:
        server.check(Proof(bytes(32)))
    assert refusal(error) is Reason.NOT_JOINED
    server.challenge(HELLO)
    with pytest.raises(WireError) as error:
        server.challenge(HELLO)
    assert refusal(error) is Reason.ALREADY_JOINED
    with pytest.raises(WireError, match="'n1' speaks 3, this server 2") as error:
        ServerHandshake(TOKEN, SeenNonces()).challenge(replace(HELLO, version=3))
    assert refusal(error) is Reason.VERSION_REFUSED
    for wrong in ("", "x" * 256, "a\nb"):
        with pytest.raises(WireError, match="is no name for a worker") as error:
            ServerHandshake(TOKEN, SeenNonces()).challenge(replace(HELLO, node_id=wrong))
        assert refusal(error) is Reason.BAD_TEXT
    worker = WorkerHandshake(TOKEN, "n1")
    worker.prove(Challenge(NONCE))
    with pytest.raises(WireError) as error:
        worker.prove(Challenge(bytes(32)))
    assert refusal(error) is Reason.UNEXPECTED


def test_nonces_are_new_each_time() -> None:
    seen = SeenNonces()
    assert len({ServerHandshake(TOKEN, seen).challenge(HELLO).nonce for _ in range(100)}) == 100
    assert len({WorkerHandshake(TOKEN, "n1").hello.nonce for _ in range(100)}) == 100


def test_only_so_many_joins_are_remembered() -> None:
    seen = SeenNonces(most=3)
    for number in range(5):
        seen.add(bytes([number]))
    assert [bytes([number]) in seen for number in range(5)] == [False, False, True, True, True]


class TestTokenFiles:
    """What is read, and what is refused with its remedy."""

    def write(self, folder: Path, data: bytes, mode: int = 0o600) -> str:
        path = folder / "token"
        path.write_bytes(data)
        path.chmod(mode)
        return str(path)

    @pytest.mark.parametrize("data", [TOKEN, TOKEN + b"\n", b" \t" + TOKEN + b"\r\n"])
    def test_a_token(self, tmp_path: Path, data: bytes) -> None:
        assert read_token(self.write(tmp_path, data)) == TOKEN
        assert read_token(self.write(tmp_path, data, 0o640)) == TOKEN, "a group may be meant to"

    @pytest.mark.parametrize(
        ("data", "size"), [(b"", 0), (b"x" * 15, 15), (b"x" * 15 + b"\n\n", 15), (b"x" * 99_999, 65_537)]
    )
    def test_one_to_be_guessed_or_no_token_at_all(self, tmp_path: Path, data: bytes, size: int) -> None:
        path = self.write(tmp_path, data)
        with pytest.raises(ConfigError) as error:
            read_token(path)
        assert str(error.value) == (
            f"{path}: a token has 16 to 65536 bytes, and this one has {size}. "
            "Write a new one: (umask 077; openssl rand -hex 24 > FILE)"
        )

    def test_one_that_everybody_reads(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, TOKEN, 0o644)
        with pytest.raises(ConfigError, match=r"everybody on this host can read the token\. chmod 600 "):
            read_token(path)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="the token can't be read: No such file or directory"):
            read_token(str(tmp_path / "none"))
        with pytest.raises(ConfigError, match="the token can't be read: Is a directory"):
            read_token(str(tmp_path))
