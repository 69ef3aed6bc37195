"""The public names of kvtier: one that comes or goes does so on purpose, here."""

import kvtier

PUBLIC = ["Cache", "Hit", "KVSpec", "Keyspace", "Saved", "Space", "connect", "open"]


def test_public_names():
    assert sorted(getattr(kvtier, "__all__", [])) == sorted(PUBLIC)
    assert all(hasattr(kvtier, name) for name in PUBLIC)
