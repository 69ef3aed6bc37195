from __future__ import annotations

import pytest

from kvtier.rpc import generate


def test_the_committed_code_is_what_the_proto_gives():
    pytest.importorskip("grpc_tools")
    for name, text in generate.generate().items():
        assert (generate.HERE / name).read_text() == text, f"run `python -m {generate.__name__}`"
