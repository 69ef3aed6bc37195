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
