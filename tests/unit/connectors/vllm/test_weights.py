"""The name of the weights changes with the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.connectors.vllm.weights import Adapters, revision_of
from kvtier.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model-1.safetensors").write_bytes(b"one")
    (folder / "model-2.safetensors").write_bytes(b"two")
    return folder


def test_a_commit_of_the_hub_names_them(model: Path) -> None:
    assert revision_of("name/on-the-hub", COMMIT) == f"commit:{COMMIT}"
    snapshot = model.parent / "snapshots" / COMMIT
    snapshot.parent.mkdir()
    model.rename(snapshot)
    assert revision_of(str(snapshot), None) == f"commit:{COMMIT}"


def test_a_branch_does_not(model: Path) -> None:
    assert revision_of(str(model), "main").startswith("sha256:")
    (model.parent / "snapshots").mkdir()
    moved = model.rename(model.parent / "snapshots" / "main")
    assert revision_of(str(moved), None).startswith("sha256:")


def test_copies_have_the_same_name_and_one_changed_byte_another(model: Path, tmp_path: Path) -> None:
    named = revision_of(str(model), None)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert revision_of(str(copy), None) == named
    (copy / "config.json").write_text('{"other": 1}')
    assert revision_of(str(copy), None) == named  # the configuration is in the key by itself
    (copy / "model-2.safetensors").write_bytes(b"twp")
    assert revision_of(str(copy), None) != named


def test_files_that_change_places_are_other_weights(model: Path) -> None:
    named = revision_of(str(model), None)
    one, two = (model / f"model-{number}.safetensors" for number in (1, 2))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    assert revision_of(str(model), None) != named


def test_one_file_may_be_the_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    named = revision_of(str(file), None)
    file.write_bytes(b"weightt")
    assert revision_of(str(file), None) != named


def test_nothing_to_name_them_by_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision="):
        revision_of(str(tmp_path), None)
    with pytest.raises(ConfigError, match="revision="):
        revision_of("name/on-the-hub", None)


def test_an_adapter_is_named_by_configuration_and_weights(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    with pytest.raises(ConfigError, match="adapter_model"):
        Adapters().digest("a", str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    named = Adapters().digest("a", str(tmp_path))
    assert Adapters().digest("b", str(tmp_path)) == named
    (tmp_path / "adapter_config.json").write_text('{"r": 9}')
    assert Adapters().digest("a", str(tmp_path)) != named


def test_an_adapter_whose_files_change_under_its_name_has_none_any_more(tmp_path: Path) -> None:
    """vLLM may have loaded the one or the other."""
    (tmp_path / "adapter_config.json").write_text("{}")
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"weights")
    adapters = Adapters()
    named = adapters.digest("a", str(tmp_path))
    weights.touch()
    assert adapters.digest("a", str(tmp_path)) == named
    weights.write_bytes(b"weightt")
    for _ in range(2):
        with pytest.raises(ConfigError, match="new name"):
            adapters.digest("a", str(tmp_path))
    assert adapters.digest("b", str(tmp_path)) != named
    weights.write_bytes(b"weights")
    assert adapters.digest("a", str(tmp_path)) == named
