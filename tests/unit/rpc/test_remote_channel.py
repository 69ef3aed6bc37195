"""What a channel to another host must have."""

from __future__ import annotations

from kvtier.rpc.channel import BULK_OPTIONS, OPTIONS, REMOTE_OPTIONS


def test_a_far_host_has_time_for_its_handshake():
    """gRPC gives a connection as long as the least pause between two attempts; 50 ms are few for TLS over a network."""
    for options in (BULK_OPTIONS, REMOTE_OPTIONS):
        values = [value for name, value in options if name == "grpc.min_reconnect_backoff_ms"]
        assert values == [5000]
    assert dict(OPTIONS)["grpc.min_reconnect_backoff_ms"] == 50, "a Unix socket answers at once, or not at all"
