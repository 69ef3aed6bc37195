"""Where compiled kernels are kept, and that no missing folder stops anybody. Folders are redirected by environment."""

import shutil
from pathlib import Path

import pytest
from numba import types

from kvtier.codecs.cpu import jit

HERE = Path(jit.__file__).parent
real = jit._writable


def test_the_first_folder_that_can_be_written_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "asked"))
    assert jit.cache_folder().parent == tmp_path / "asked"
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert jit.cache_folder().parent == HERE / "__pycache__"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jit, "_writable", lambda folder: folder.is_relative_to(tmp_path))
    assert jit.cache_folder().parent == tmp_path / "kvtier" / "numba"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    assert jit.cache_folder() is None


def test_a_new_folder_gets_the_kernels_of_one_that_only_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "image"))
    kept = jit.cache_folder()
    (kept / "cpu").mkdir()
    (kept / "cpu" / "kernel.nbc").write_bytes(b"code")
    (kept / "cpu").chmod(0o555)
    monkeypatch.setattr(jit, "_candidates", lambda: iter([tmp_path / "own", tmp_path / "image"]))
    monkeypatch.setattr(jit, "_writable", lambda folder: real(folder) and folder != kept)
    own = jit.cache_folder()
    assert (own.parent, own.name) == (tmp_path / "own", kept.name)
    assert [path.name for path in (own / "cpu").iterdir()] == ["kernel.nbc"]
    assert (own / "cpu" / "kernel.nbc").read_bytes() == b"code"
    (own / "cpu" / "kernel.nbc").write_bytes(b"mine")
    assert (jit.cache_folder() / "cpu" / "kernel.nbc").read_bytes() == b"mine", "what is there stays"


def test_a_file_in_the_place_of_a_folder_is_not_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    assert jit.cache_folder().parent != tmp_path / "file"


def test_numba_keeps_its_own_setting(tmp_path: Path) -> None:
    import numba

    before = numba.config.CACHE_DIR
    with jit._numba_cache(tmp_path):
        assert str(tmp_path) == numba.config.CACHE_DIR
    assert before == numba.config.CACHE_DIR


def test_kernels_of_other_sources_are_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any file that machine code comes from, the layout's numbers and the codebook's levels among them."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    package = tmp_path / "codecs"
    shutil.copytree(HERE, package / "cpu", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("layout.py", "codebook.py"):
        shutil.copy(HERE.with_name(name), package)
    monkeypatch.setattr(jit, "__file__", str(package / "cpu" / "jit.py"))
    seen = {jit.cache_folder()}
    for source in ("layout.py", "codebook.py", "cpu/units.py", "cpu/decode.py", "cpu/jit.py"):
        with (package / source).open("a") as file:
            file.write("\n")
        seen.add(jit.cache_folder())
    assert len(seen) == 6


def test_where_nothing_can_be_written_kernels_are_compiled_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "CACHE_FOLDER", None)

    @jit.compiled(types.int64(types.int64))
    def twice(number: int) -> int:
        return 2 * number

    assert twice(21) == 42
    assert twice.stats.cache_path is None


def test_two_releases_of_numba_keep_their_kernels_apart(monkeypatch) -> None:
    mine = jit.cache_folder()
    monkeypatch.setattr(jit.numba, "__version__", "0.0.1")
    assert jit.cache_folder() != mine
