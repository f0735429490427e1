"""Rules of how a run is watched: who may reach it, and what they have to show."""

from __future__ import annotations

from collections.abc import Iterator

from monitoring.http.addresses import is_loopback
from parallel3d.config.errors import enumerate_words
from parallel3d.config.findings import Finding, Rule
from parallel3d.config.sections import RunConfig


def _others_need_a_token(config: RunConfig, _: int | None) -> Iterator[Finding]:
    watched = config.monitoring
    if not watched.enabled or is_loopback(watched.host):
        return
    needed = {
        "token_file": watched.token_file,
        "tls_certificate": watched.tls_certificate,
        "tls_key": watched.tls_key,
    }
    missing = [f"monitoring.{key}" for key, value in needed.items() if value is None]
    if missing:
        yield Finding(
            ("monitoring.host",),
            "other hosts reach this address, so the run asks for a token and answers over TLS only.",
            f"Set {enumerate_words(missing, 'and')}, or host to 127.0.0.1.",
        )


def _certificate_has_a_key(config: RunConfig, _: int | None) -> Iterator[Finding]:
    pair = {"tls_certificate": config.monitoring.tls_certificate, "tls_key": config.monitoring.tls_key}
    given = [key for key, value in pair.items() if value is not None]
    if len(given) == 1 and is_loopback(config.monitoring.host):  # elsewhere the rule above says so
        (missing,) = pair.keys() - set(given)
        yield Finding(
            (f"monitoring.{given[0]}",),
            f"TLS needs {missing} too.",
            f"Set monitoring.{missing}, or remove {given[0]}.",
        )


MONITORING_RULES = (
    Rule(
        _others_need_a_token,
        (
            "monitoring.enabled",
            "monitoring.host",
            "monitoring.token_file",
            "monitoring.tls_certificate",
            "monitoring.tls_key",
        ),
    ),
    Rule(_certificate_has_a_key, ("monitoring.host", "monitoring.tls_certificate", "monitoring.tls_key")),
)
