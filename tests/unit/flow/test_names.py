"""What needs transformers is imported when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = """
import sys
sys.modules["transformers"] = None
import kvtier.flow
print(kvtier.flow.parse_recipe("int4").every)
try:
    kvtier.flow.Flow
except kvtier.errors.ConfigError as exc:
    print(exc)
"""


def test_recipes_are_read_without_transformers():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["100", "a flow needs transformers: pip install 'kvtier[transformers]'"]


def test_other_names_are_not_there():
    import kvtier.flow

    with pytest.raises(AttributeError, match="Flw"):
        _ = kvtier.flow.Flw
