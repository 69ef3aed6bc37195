"""Only kvtier's own files are removed, and only its own folders are used."""

from __future__ import annotations

import os

import pytest

from kvtier.errors import ConfigError
from kvtier.memory.arena import Arena
from kvtier_services.actors.folders import make_folder, sweep_arena
from kvtier_services.cluster import head, node


def test_a_folder_is_for_this_user_alone(tmp_path):
    make_folder(tmp_path / "a" / "b", "run_dir")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    with pytest.raises(ConfigError, match=r"run_dir .* belongs to another user"):
        make_folder(tmp_path, "run_dir")


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"arena_dir .* cannot be made: .*; set it to a folder of yours"):
        make_folder(tmp_path / "file" / "x", "arena_dir")


def test_an_unknown_group_is_said(tmp_path):
    with pytest.raises(ConfigError, match="there is no group 'no-such-group'"):
        make_folder(tmp_path / "x", "arena_dir", "no-such-group")


def test_sweeping_leaves_what_is_not_kvtiers(tmp_path):
    folder = tmp_path / "arena"
    Arena.own(folder, 1 << 20).close()
    (folder / "letter.txt").touch()
    sweep_arena(folder)
    assert [path.name for path in folder.iterdir()] == ["letter.txt"]
    (folder / "letter.txt").unlink()
    sweep_arena(folder)
    assert not folder.exists()


def test_only_a_ray_folder_of_kvtiers_is_removed(tmp_path):
    for name in ("kvtier-ray-1", "precious"):
        (tmp_path / name).mkdir()
        node.sweep(str(tmp_path / name))
    node.sweep("")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_the_head_hears_nothing_that_was_meant_for_another_ray(tmp_path):
    outer = {"RAY_ADDRESS": "elsewhere:6379", "RAY_AUTH_TOKEN": "secret", "HOME": "/home/me"}
    inner = node.environment(outer, "run", tmp_path / "token")
    assert "RAY_ADDRESS" not in inner
    assert "RAY_AUTH_TOKEN" not in inner
    assert inner["HOME"] == "/home/me"
    assert (inner["RAY_AUTH_MODE"], inner["RAY_AUTH_TOKEN_PATH"]) == ("token", str(tmp_path / "token"))
    assert inner["KVTIER_RUN"] == "run"


def test_a_token_is_secret_and_new(tmp_path):
    token = tmp_path / "token"
    head.make_token(token)
    first = token.read_text()
    head.make_token(token)
    assert token.read_text() != first
    assert token.stat().st_mode & 0o777 == 0o600
