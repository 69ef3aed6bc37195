"""How the NVMe tier's file is cut. All integers are little-endian.

superblock, 4 KiB          region 0              region 1 ...
+------------------------+---------------------+---------------------+
| magic, version,        | begin, records,     | begin, records,     |
| region size, count, id | table               | table               |
+------------------------+---------------------+---------------------+
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvtier.block import PAGE
from kvtier.errors import ConfigError
from kvtier.tiers.nvme.seal import is_sealed, seal

VERSION = 2
_SUPER = struct.Struct("<8sHHI16sQQ")
_SUPER_MAGIC = b"KVTIERRL"
STORE_ID_NBYTES = 16

REGION_NBYTES = 257 << 20
"""256 MiB and room for frames, headers and table, so that 127 payloads of 2 MiB or 8 of 32 MiB fit without waste."""
REGIONS_AT_LEAST = 8
PAGES_AT_LEAST = 4
"""Of a region: its begin, a frame, a payload, its table."""
RESERVE = 8 * PAGE
"""Of the capacity, for what else takes blocks: superblock, lock file, folder, the file system's extent tree."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the file is cut.

    Attributes:
        region_nbytes: bytes of a region.
        count: regions.
    """

    region_nbytes: int
    count: int

    @property
    def file_nbytes(self) -> int:
        """Bytes of the file."""
        return PAGE + self.count * self.region_nbytes

    def start(self, region: int) -> int:
        """Where a region begins in the file."""
        return PAGE + region * self.region_nbytes

    @classmethod
    def fit(cls, capacity: int, region_nbytes: int) -> Geometry:
        """As many regions as the capacity holds, each an eighth of it at most.

        Raises:
            ConfigError: the capacity is too small.
        """
        size = min(region_nbytes, capacity // REGIONS_AT_LEAST) // PAGE * PAGE
        least = REGIONS_AT_LEAST * RESERVE
        if capacity < least or size < PAGES_AT_LEAST * PAGE:
            raise ConfigError(
                f"an NVMe tier of {capacity} bytes with regions of {region_nbytes} cannot work; set nvme.capacity "
                f"to at least {least} (sensible: 1GiB) and regions of at least {PAGES_AT_LEAST * PAGE}"
            )
        return cls(size, (capacity - RESERVE) // size)


@dataclass(frozen=True, slots=True)
class Superblock:
    """The first page of the file.

    Attributes:
        store: random id; what another store wrote is foreign.
        geometry: how the file was cut when this was written.
    """

    store: bytes
    geometry: Geometry

    def pack(self) -> bytes:
        """Encode as one page."""
        geometry = self.geometry
        front = _SUPER.pack(_SUPER_MAGIC, VERSION, 0, PAGE, self.store, geometry.region_nbytes, geometry.count)
        return seal(front).ljust(PAGE, b"\0")

    @classmethod
    def unpack(cls, page: bytes | memoryview) -> Superblock | str:
        """Decode; a text when this version cannot use it, which says why."""
        if len(page) < _SUPER.size + 8:
            return "it is too short"
        magic, version, _, unit, store, region_nbytes, count = _SUPER.unpack_from(page)
        if magic != _SUPER_MAGIC:
            return "it has no superblock"
        if version != VERSION:
            return f"its format version is {version}, this kvtier's is {VERSION}"
        if not is_sealed(page, _SUPER.size) or unit != PAGE:
            return "its superblock is corrupt"
        return cls(store, Geometry(region_nbytes, count))
