"""The way to a host that this process does not run on."""

from __future__ import annotations

import re

import grpc

from kvtier.client.credentials import Credentials
from kvtier.client.staged import StagedMemory
from kvtier.client.way import Metadata
from kvtier.config.machine import is_loopback
from kvtier.errors import ConfigError
from kvtier.rpc.channel import REMOTE_OPTIONS
from kvtier.rpc.kvtier_pb2 import Welcome

_URL = re.compile(r"(?P<scheme>grpcs?)://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^/:@\[\]]+):(?P<port>\d+)/?")


def is_remote(target: object) -> bool:
    """Whether this names a host to reach over the network."""
    return isinstance(target, str) and re.match(r"\w+://", target) is not None


class RemoteWay:
    """To the remote door of a host: control by gRPC, bulk by Arrow Flight, with the same credentials.

    Args:
        url: grpcs://host:port, or grpc://host:port for plain text.
        credentials: what proves who is who.
        insecure: let the token go over the network as plain text.

    Raises:
        ConfigError: no such URL, or plain text to another machine.
    """

    def __init__(self, url: str, credentials: Credentials, *, insecure: bool = False) -> None:
        host, port, tls = split_url(url)
        if not tls and not insecure and not is_loopback(host):
            raise ConfigError(
                f"{url} would send the token and the KV as plain text: use grpcs://, or pass insecure=True on a "
                "network that nobody else reads"
            )
        self.where = f"{host}:{port}"
        self._host = host
        self._credentials = credentials
        self.metadata: Metadata = credentials.metadata

    def open(self) -> grpc.Channel:
        tls = self._credentials.tls
        if tls is None:
            return grpc.insecure_channel(self.where, list(REMOTE_OPTIONS))
        proof = grpc.ssl_channel_credentials(tls.roots, tls.key or None, tls.cert or None)
        return grpc.secure_channel(self.where, proof, list(REMOTE_OPTIONS))

    def memory(self, welcome: Welcome) -> StagedMemory:
        from kvtier.client.bulk import Bulk

        return StagedMemory(welcome, Bulk(self._host, welcome.bulk, self._credentials))

    def presence(self, welcome: Welcome) -> None:
        return None


def split_url(url: str) -> tuple[str, int, bool]:
    """Host, port, and whether it is TLS.

    Raises:
        ConfigError: it is no such URL.
    """
    parts = _URL.fullmatch(url)
    if parts is None:
        raise ConfigError(f"{url!r} names no host; use grpcs://host:7070 (TLS) or grpc://localhost:7070")
    return parts["host"], int(parts["port"]), parts["scheme"] == "grpcs"
