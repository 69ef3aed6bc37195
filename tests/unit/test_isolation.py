"""The fence around unit tests holds."""

import socket
import time

import pytest


@pytest.mark.parametrize(
    "call",
    [
        lambda: socket.create_connection(("127.0.0.1", 9), timeout=1),
        lambda: socket.socket(socket.AF_UNIX).connect("/nowhere"),
        lambda: socket.socket().bind(("127.0.0.1", 0)),
        lambda: time.sleep(0.001),
    ],
)
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_unit_test_cannot_reach_outside(call, forbidden_calls):
    with pytest.raises(pytest.fail.Exception, match="a unit test called"):
        call()
    assert len(forbidden_calls) == 1
    forbidden_calls.clear()


def test_giving_up_the_processor_is_no_sleep(forbidden_calls):
    time.sleep(0)
    assert forbidden_calls == []
