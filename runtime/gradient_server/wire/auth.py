"""The join handshake: worker and server prove that they know the run's token without sending it. Sans-io.

worker                          server
Hello(nonce, node_id, …)   →                       nonce: the worker's, 16 bytes
                           ←    Challenge(nonce)   the server's, 32 bytes, used for this connection only
Proof(HMAC)                →                       over "worker", the server's nonce and the whole Hello
                           ←    Welcome(HMAC)      over "server" and the same
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from monitoring.http import tokens
from runtime.errors import ConfigError
from runtime.gradient_server.wire.messages import VERSION, Challenge, Hello, Proof, Reason, Welcome, WireError, encode

_REMEMBERED = 4096  # nonces, in half a MiB: more than there are joins in a run
_MOST_NAME_CHARACTERS = 255


def read_token(path: str) -> bytes:
    """The token in a file. Raises ConfigError if it cannot be read, is too short, or every user can read it."""
    try:
        return tokens.read_token(path, is_private=True)
    except OSError as error:
        raise ConfigError(f"{path}: the token can't be read: {error.strerror}.") from error
    except tokens.UnusableToken as error:
        raise ConfigError(f"{path}: {error} {error.remedy}") from error


def worker_proof(token: bytes, server_nonce: bytes, hello: Hello) -> bytes:
    """The MAC with which a worker answers a challenge."""
    return _mac(token, b"worker", server_nonce, hello)


def server_proof(token: bytes, server_nonce: bytes, hello: Hello) -> bytes:
    """The MAC in the server's welcome."""
    return _mac(token, b"server", server_nonce, hello)


def _mac(token: bytes, who: bytes, server_nonce: bytes, hello: Hello) -> bytes:
    """Label and nonce have fixed sizes, so different inputs never give the same bytes."""
    data = b"parallel3d gradient " + who + server_nonce + encode(hello)
    return hmac.digest(token, data, hashlib.sha256)


def check_node_id(node_id: str) -> None:
    """Raise WireError (bad_text) unless the name can be shown in logs and errors."""
    if not node_id.isprintable() or not 1 <= len(node_id) <= _MOST_NAME_CHARACTERS:
        size = f"1 to {_MOST_NAME_CHARACTERS} printable characters"
        raise WireError(Reason.BAD_TEXT, f"{node_id[:40]!r} is no name for a worker, which has {size}.")


class SeenNonces:
    """The workers' nonces of successful joins to a server; the oldest are forgotten."""

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._most = most
        self._nonces: dict[bytes, None] = {}

    def __contains__(self, nonce: bytes) -> bool:
        return nonce in self._nonces

    def add(self, nonce: bytes) -> None:
        self._nonces[nonce] = None
        if len(self._nonces) > self._most:
            del self._nonces[next(iter(self._nonces))]


class ServerHandshake:
    """The server's side of one connection's join. A challenge is valid for one proof."""

    def __init__(self, token: bytes, seen: SeenNonces) -> None:
        self._token, self._seen = token, seen
        self._hello: Hello | None = None
        self._nonce: bytes | None = None

    def challenge(self, hello: Hello) -> Challenge:
        """The answer to Hello. WireError: version_refused, bad_text, already_joined, replayed."""
        check_node_id(hello.node_id)
        if hello.version != VERSION:
            raise WireError(Reason.VERSION_REFUSED, f"{hello.node_id!r} speaks {hello.version}, this server {VERSION}.")
        if self._hello is not None:
            raise WireError(Reason.ALREADY_JOINED, f"{hello.node_id!r} says Hello again.")
        if hello.nonce in self._seen:
            raise WireError(Reason.REPLAYED, f"{hello.node_id!r} joined with this nonce before.")
        self._hello, self._nonce = hello, secrets.token_bytes(32)
        return Challenge(self._nonce)

    def check(self, proof: Proof) -> tuple[Hello, bytes]:
        """(Hello of the worker that joined, MAC of its Welcome). WireError: not_joined, replayed, bad_token."""
        hello, nonce, self._nonce = self._hello, self._nonce, None
        if hello is None:
            raise WireError(Reason.NOT_JOINED, "Proof before Hello.")
        if nonce is None or hello.nonce in self._seen:
            raise WireError(Reason.REPLAYED, f"{hello.node_id!r} has used its challenge up.")
        if not hmac.compare_digest(proof.mac, worker_proof(self._token, nonce, hello)):
            raise WireError(Reason.BAD_TOKEN, f"{hello.node_id!r} has another token than this server.")
        self._seen.add(hello.nonce)
        return hello, server_proof(self._token, nonce, hello)


class WorkerHandshake:
    """The worker's side of one connection's join."""

    def __init__(self, token: bytes, node_id: str, *, step: int = 0, has_state: bool = False) -> None:
        self._token, self._nonce = token, b""
        self.hello = Hello(VERSION, node_id, secrets.token_bytes(16), step, has_state)
        """The first message to send."""

    def prove(self, challenge: Challenge) -> Proof:
        """The answer to the server's challenge."""
        if self._nonce:
            raise WireError(Reason.UNEXPECTED, "a second Challenge.")
        self._nonce = challenge.nonce
        return Proof(worker_proof(self._token, challenge.nonce, self.hello))

    def check(self, welcome: Welcome) -> None:
        """Raise WireError (bad_token) unless the server knows the token too."""
        expected = server_proof(self._token, self._nonce, self.hello) if self._nonce else b""
        if not hmac.compare_digest(welcome.mac, expected):
            raise WireError(Reason.BAD_TOKEN, "the server has another token than this worker.")
