from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from kvtier import errors
from kvtier.rpc.channel import ENDS_SESSION, MEANING, error_of, status_of

WHERE = Path("/run/door.sock")


class Failed(grpc.RpcError):
    def __init__(self, code, details="because"):
        self._code, self._details = code, details

    def code(self):
        return self._code

    def details(self):
        return self._details


@pytest.mark.parametrize("code", grpc.StatusCode)
def test_every_status_has_a_meaning(code):
    error = error_of(Failed(code), WHERE)
    assert type(error) is MEANING[code]
    assert str(WHERE) in str(error)


@pytest.mark.parametrize(
    ("details", "says"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:7070: Tls handshake failed "
            "(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:"
            "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate: OK",
            "not vouched for by `ca`",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:7070: Custom verification check "
            "failed with error: UNAUTHENTICATED: Hostname Verification Check failed.",
            "certificate is for another name",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.1:7070: Socket closed",
            "use grpcs:// where",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:7070: Failed to connect to remote "
            "host: Connection refused",
            "nobody answers at",
        ),
        ("Socket closed", "nobody answers at"),
    ],
)
def test_a_host_that_is_there_and_not_trusted_is_not_told_to_be_started(details, says):
    error = error_of(Failed(grpc.StatusCode.UNAVAILABLE, details), "box:7070")
    assert type(error) is errors.SessionUnavailable
    assert says in str(error)
    assert ("kvtier up" in str(error)) is (says == "nobody answers at")


def test_a_port_of_something_else_is_no_door():
    error = error_of(Failed(grpc.StatusCode.UNIMPLEMENTED, ""), "box:7071")
    assert "is no door of kvtier's" in str(error)


def test_a_call_without_a_status_is_unavailable():
    assert type(error_of(Failed(None, None), WHERE)) is errors.SessionUnavailable


@pytest.mark.parametrize(
    ("kind", "arrives"),
    [
        (errors.SessionUnavailable, errors.SessionUnavailable),
        (errors.DeadlineExceeded, errors.DeadlineExceeded),
        (errors.ProtocolMismatch, errors.ProtocolMismatch),
        (errors.Unauthenticated, errors.Unauthenticated),
        (errors.OverQuota, errors.OverQuota),
        (errors.UsageError, errors.ProtocolMismatch),
        (errors.KVMismatch, errors.ProtocolMismatch),
        (errors.CorruptPayload, errors.SessionUnavailable),
        (errors.TierFull, errors.SessionUnavailable),
    ],
)
def test_an_error_travels(kind, arrives):
    assert type(error_of(Failed(status_of(kind("why"))), WHERE)) is arrives


def test_a_host_that_does_not_know_the_session_is_attached_to_again():
    assert status_of(errors.SessionUnavailable("who?")) in ENDS_SESSION
