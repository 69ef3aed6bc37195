"""Compiling the kernels, and the folder that keeps them for the next process."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numba


def cache_folder() -> Path | None:
    """Choose the first folder that can be written, or None.

    `NUMBA_CACHE_DIR` if it is set, else beside this package, else `XDG_CACHE_HOME/kvtier/numba`. Below it, a folder of
    these sources' and this numba's own, so that kernels of another version are never picked up. One that is empty gets
    what another of these folders has: an image keeps kernels where none of its processes may write.
    """
    # numba looks at the time stamp of one file; here are the bytes of all that the machine code depends on. Releases of
    # numba overwrite each other's kernels, which an engine's environment and kvtier's own would do at every start.
    digest = hashlib.sha256(numba.__version__.encode())
    package = Path(__file__).parent
    for source in [*sorted(package.glob("*.py")), package.with_name("layout.py"), package.with_name("codebook.py")]:
        digest.update(source.read_bytes())
    folders = [base / f"kvtier-{digest.hexdigest()[:12]}" for base in _candidates()]
    chosen = next(filter(_writable, folders), None)
    if chosen is not None and not _filled(chosen):
        for folder in filter(_filled, folders):
            with suppress(OSError):
                shutil.copytree(folder, chosen, copy_function=_put, dirs_exist_ok=True)
                break
    return chosen


def _candidates() -> Iterator[Path]:
    if os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(os.environ["NUMBA_CACHE_DIR"])
    yield Path(__file__).with_name("__pycache__")
    home = os.environ.get("XDG_CACHE_HOME")
    if home or os.environ.get("HOME"):
        yield Path(home or Path.home() / ".cache") / "kvtier" / "numba"


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _filled(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def _put(source: str, target: str) -> None:
    """Copy, with its time, as a whole: other processes read here already. Access rights are the new folder's."""
    part = f"{target}.{os.getpid()}"
    shutil.copyfile(source, part)
    os.utime(part, ns=(Path(source).stat().st_atime_ns, Path(source).stat().st_mtime_ns))
    Path(part).replace(target)


CACHE_FOLDER = cache_folder()
"""Where this process finds and keeps compiled kernels; None when nothing can be written."""


@contextmanager
def _numba_cache(folder: Path) -> Iterator[None]:
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def compiled(signature: Any) -> Callable[[Any], Any]:
    """Compile for exactly this signature now, or load what an earlier process compiled; the GIL is released."""

    def decorate(function: Any) -> Any:
        if CACHE_FOLDER is None:
            return numba.njit(signature, nogil=True, error_model="numpy")(function)
        with _numba_cache(CACHE_FOLDER):
            return numba.njit(signature, nogil=True, error_model="numpy", cache=True)(function)

    return decorate


part_of_kernel = numba.njit(nogil=True, error_model="numpy")
"""A function that is only called by kernels: compiled with each, cached with each."""
inlined = numba.njit(nogil=True, error_model="numpy", inline="always")
"""A part that one place calls: typed with it, so that the machine code is optimised once and not at every level."""
