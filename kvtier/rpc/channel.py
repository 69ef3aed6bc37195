"""A client's channel, and what a call that failed means."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
from grpc import StatusCode

from kvtier.errors import (
    DeadlineExceeded,
    KVTierError,
    OverQuota,
    ProtocolMismatch,
    SessionError,
    SessionUnavailable,
    Unauthenticated,
    UsageError,
)
from kvtier.rpc.protocol import MAX_MESSAGE

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    # A host that comes back is found at once; gRPC's own pause of a second would be a second of misses.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    # What a lost call means is decided by the session, which knows what it must give back.
    ("grpc.enable_retries", 0),
    # A connection for each session, so that sessions end one by one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

BULK_OPTIONS: tuple[tuple[str, int], ...] = (
    *(option for option in OPTIONS if option[0] != "grpc.min_reconnect_backoff_ms"),
    # This is also what a connection may take, with its TLS handshake.
    ("grpc.min_reconnect_backoff_ms", 5000),
)
"""For bulk from and to another host. No pings: Flight's server takes more than a few for an attack."""

REMOTE_OPTIONS: tuple[tuple[str, int], ...] = (
    *BULK_OPTIONS,
    # A host that is gone without a word is noticed, and so is a path that swallows everything.
    ("grpc.keepalive_time_ms", 3000),
    ("grpc.keepalive_timeout_ms", 4000),
    # Of the pings that gRPC sends to measure the path: one that is under way takes the place of those above.
    ("grpc.http2.ping_timeout_ms", 4000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""For control of a host that this process does not run on."""

MEANING: dict[StatusCode, type[SessionError]] = {
    StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    StatusCode.RESOURCE_EXHAUSTED: OverQuota,
    StatusCode.UNAUTHENTICATED: Unauthenticated,
    StatusCode.PERMISSION_DENIED: Unauthenticated,
    StatusCode.FAILED_PRECONDITION: ProtocolMismatch,
    StatusCode.INVALID_ARGUMENT: ProtocolMismatch,
    StatusCode.OUT_OF_RANGE: ProtocolMismatch,
    StatusCode.UNIMPLEMENTED: ProtocolMismatch,
    StatusCode.UNAVAILABLE: SessionUnavailable,
    StatusCode.ABORTED: SessionUnavailable,
    StatusCode.CANCELLED: SessionUnavailable,
    StatusCode.NOT_FOUND: SessionUnavailable,
    StatusCode.ALREADY_EXISTS: SessionUnavailable,
    StatusCode.UNKNOWN: SessionUnavailable,
    StatusCode.INTERNAL: SessionUnavailable,
    StatusCode.DATA_LOSS: SessionUnavailable,
    StatusCode.OK: SessionUnavailable,  # a stream that ended although nobody ended it
}

ENDS_SESSION = frozenset({StatusCode.UNAVAILABLE, StatusCode.ABORTED})
"""After these the client attaches again: nobody answers, or the host does not know the session."""

_DISTRUST = (
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not vouched for by `ca`, or has ended"),
    ("(?i)hostname verification", "its certificate is for another name: use a name or an address that is in it"),
    (
        "handshake|to all addresses.*ipv[46]:.*Socket closed",
        "does not begin to talk: use grpcs:// where the host has remote.cert, grpc:// where it has not, and pass "
        "`cert` and `key` where it has remote.client_ca",
    ),
)
"""What gRPC says of an address where somebody answers that it does not trust, or that does not trust this client."""

_CODES: dict[type[Exception], StatusCode] = {
    DeadlineExceeded: StatusCode.DEADLINE_EXCEEDED,
    OverQuota: StatusCode.RESOURCE_EXHAUSTED,
    Unauthenticated: StatusCode.UNAUTHENTICATED,
    ProtocolMismatch: StatusCode.FAILED_PRECONDITION,
    SessionUnavailable: StatusCode.ABORTED,
    UsageError: StatusCode.INVALID_ARGUMENT,
    KVTierError: StatusCode.INTERNAL,
}


def open_channel(socket: Path) -> grpc.Channel:
    """A channel to the door at a Unix socket; it connects with the first call."""
    return grpc.insecure_channel(f"unix:{socket.absolute()}", list(OPTIONS))


def error_of(failed: grpc.RpcError, where: str) -> SessionError:
    """What a failed call means to its caller.

    Args:
        failed: what gRPC raised.
        where: the door, for the message.
    """
    code = code_of(failed)
    details = failed.details() or code.name
    if code is StatusCode.UNAVAILABLE:
        return SessionUnavailable(
            next((f"{where} answers, but {why}" for sign, why in _DISTRUST if re.search(sign, details)), "")
            or f"nobody answers at {where}; is kvtier running? (`kvtier status`; start it with `kvtier up`)"
        )
    if code is StatusCode.UNIMPLEMENTED and details == code.name:
        return ProtocolMismatch(f"{where} answers, but is no door of kvtier's; is that the port of remote.listen?")
    if code is StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"the host at {where} did not answer in time")
    return MEANING[code](f"the host at {where} says: {details}")


def code_of(failed: grpc.RpcError) -> StatusCode:
    """Status of a failed call."""
    code = failed.code()
    return code if code in MEANING else StatusCode.UNKNOWN


def status_of(error: Exception) -> StatusCode:
    """How a host says this error; the inverse of `error_of`."""
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
