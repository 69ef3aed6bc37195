"""The pages that are generated from the code say what it says now."""

from __future__ import annotations

import msgspec
import pytest

from docs.site.reference import DOCS, PAGES, configuration
from kvtier.config import Config


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_says(name):
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "python -m docs.site.reference writes it anew"


def test_defaults_are_the_same_on_every_machine(monkeypatch):
    before = configuration()
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "KVTIER_HOST"):
        monkeypatch.setenv(name, "/elsewhere")
    monkeypatch.setattr("kvtier.config.schema.os.access", lambda *_: False)
    monkeypatch.setattr("kvtier.config.schema.os.getuid", lambda: 54321)
    assert configuration() == before
    assert "worked out" not in before, "a default that depends on the machine is described: Default: ..."


def test_every_field_of_the_configuration_is_there():
    page = configuration()
    for info in msgspec.structs.fields(Config):
        section = msgspec.structs.fields(info.type) if f"## [{info.name}]" in page else [info]
        assert all(f"| `{field.name}` |" in page for field in section)
