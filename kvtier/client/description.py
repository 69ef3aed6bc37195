"""What a router must know of a keyspace to name its blocks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvtier.block import address
from kvtier.errors import ConfigError
from kvtier.keys import chain


@dataclass(frozen=True, slots=True)
class Description:
    """A keyspace by its root: enough to compute the addresses of its blocks, not to read or make KV.

    Whoever has it can ask whether a prompt is stored: with tenants, keep the file where other tenants cannot read it.

    Attributes:
        model, revision, plan, adapter: for people.
        rank: tensor-parallel rank whose blocks are meant; all ranks of an engine store the same prompts.
        block_tokens: tokens in one block.
        root: of the keyspace, 64 hexadecimal digits.
    """

    model: str
    revision: str
    plan: str
    adapter: str
    rank: int
    block_tokens: int
    root: str

    def __post_init__(self) -> None:
        try:
            root = bytes.fromhex(self.root)
        except ValueError:
            root = b""
        if len(root) != 32 or self.block_tokens < 1 or not 0 <= self.rank < 2**16:
            raise ConfigError("root has 64 hexadecimal digits, block_tokens is 1 or more, rank is below 65536")

    def addresses(self, token_ids: Any) -> list[bytes]:
        """Addresses of all whole blocks of a sequence, in order, as events and `where` name them.

        Raises:
            BadTokens: ids that are not unsigned 32-bit integers.
        """
        root = bytes.fromhex(self.root)
        return [address(key, self.rank) for key in chain(root, token_ids, self.block_tokens)]

    def write(self, path: Path | str) -> None:
        """Write it as JSON."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(asdict(self))) + b"\n")

    @classmethod
    def read(cls, path: Path | str) -> Description:
        """Read what `write` wrote.

        Raises:
            ConfigError: there is no such file, or it is none.
        """
        try:
            return msgspec.json.decode(Path(path).expanduser().read_bytes(), type=cls)
        except OSError as exc:
            raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
        except (msgspec.DecodeError, ConfigError) as exc:
            raise ConfigError(
                f"{path} describes no keyspace ({exc}); an engine writes one by space.describe().write(path)"
            ) from exc
