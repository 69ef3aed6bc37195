"""Where compiled kernels are kept, and that no missing folder stops anybody. Folders are redirected by environment."""

from pathlib import Path

import pytest

from kvtier.codecs.cpu import jit

ROOT = Path(jit.__file__).parents[2]


def test_the_first_folder_that_can_be_written_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "asked"))
    assert jit.cache_folder().parent == tmp_path / "asked"
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert jit.cache_folder().parent == ROOT / "kvtier" / "codecs" / "__pycache__"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jit, "_writable", lambda folder: folder.is_relative_to(tmp_path))
    assert jit.cache_folder().parent == tmp_path / "kvtier" / "numba"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    assert jit.cache_folder() is None


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
