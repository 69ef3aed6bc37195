"""What a kvtier.toml may say of clients on other hosts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field

from kvtier.config import machine
from kvtier.errors import ConfigError

_LISTEN = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^:\[\]\s]+):(?P<port>\d{1,5})")
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|\[::1\]")


def _default_tokens_file() -> str:
    config = os.environ.get("XDG_CONFIG_HOME")
    return str((Path(config) if config else Path.home() / ".config") / "kvtier" / "tokens.json")


class RemoteConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Clients on other hosts: see docs/remote.md."""

    listen: Annotated[
        str,
        Meta(
            description='Where each host listens for them, "address:port", as in "0.0.0.0:7070"; {host} stands for the '
            'host\'s name; "" for nowhere.'
        ),
    ] = ""
    bulk_port: Annotated[
        int, Meta(ge=0, le=65535, description="Port of their KV; 0 for the one after the port of `listen`.")
    ] = 0
    cert: Annotated[str, Meta(description="Certificate chain of the host (PEM); read again when it is renewed.")] = ""
    key: Annotated[str, Meta(description="Its private key (PEM).")] = ""
    client_ca: Annotated[
        str, Meta(description='Certificates (PEM) of who vouches for clients; "" asks clients for none.')
    ] = ""
    insecure: Annotated[
        bool, Meta(description="Listen without TLS where others can read along. On loopback it is not needed.")
    ] = False
    tokens_file: Annotated[
        str,
        Meta(
            description="File that `kvtier token` writes: who may come in, with the salt and the quota of each tenant. "
            "The same on all hosts of a fleet. Default: kvtier/tokens.json in $XDG_CONFIG_HOME, else in ~/.config."
        ),
    ] = field(default_factory=_default_tokens_file)

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key) or (self.client_ca and not self.cert):
            raise ConfigError("remote.cert and remote.key go together, and remote.client_ca needs both")
        if self.listen and not (_LISTEN.fullmatch(self.listen) and 0 <= self.address[1] <= 65535):
            raise ConfigError(f'remote.listen is {self.listen!r}; set it to "address:port", such as "0.0.0.0:7070"')
        if self.listen and not self.cert and not self.insecure and not _LOOPBACK.fullmatch(self.address[0]):
            raise ConfigError(
                f"remote.listen is {self.listen}, where tokens and KV would be plain text: set remote.cert and "
                "remote.key, or listen on 127.0.0.1, or write insecure = true"
            )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on."""
        host, _, port = self.listen.replace("{host}", machine.host_name()).rpartition(":")
        return host, int(port)

    @property
    def bulk(self) -> int:
        """Port of bulk calls; 0 for any free one."""
        port = self.address[1]
        return self.bulk_port or (port + 1 if port else 0)

    @property
    def tokens(self) -> Path:
        """The tokens file, absolute."""
        return Path(self.tokens_file.replace("{host}", machine.host_name())).expanduser().absolute()
