"""What enters and leaves the tiers of a host, told to routers.

    schema      events and batches as they travel: vLLM's, with two keys of our own
    ring        the last batches, for those who missed some
    publisher   Publisher: a host tells its changes (ZeroMQ PUB) and answers who missed some (ROUTER)
    asking      requests to a publisher's replay socket
    subscriber  Subscriber: follows one host, notices what it missed, and gets it
    view        View: which blocks a host has, by its events

>>> subscriber, view = Subscriber("tcp://host:5557"), View()
>>> for batch in subscriber:
...     view.apply(batch)
...     view.prefix(keys)

`docs/events.md` has the schema and what is promised, byte by byte. In short: the sequence numbers of a publisher's
life begin at the microsecond of its start and grow by one, so a restart is a gap like any other; a gap is filled from
the ring; what the ring no longer has is had by a dump, which is taken in parts while the host goes on, and is right
together with the batches behind it, because what they say holds whether or not the dump says it already.

A host collects nothing unless `events.endpoint` is set, and then a few array operations a call; encoding and sending
are a thread's. Everything is bounded: changes that wait, batches that are kept, what one slow subscriber may have
queued. Who falls behind any of it sees a gap, never a wrong view.
"""

from kvtier.events.subscriber import Batch, Subscriber
from kvtier.events.view import View

__all__ = ["Batch", "Subscriber", "View"]
