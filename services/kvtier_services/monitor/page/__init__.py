"""The status page: what a browser shows of the fleet's snapshots.

    access     who may look
    feed       one poll for all who look, and the last quarter of an hour
    app        what is served
    connection those who connect and do not ask
    server     where it listens

The page is a few static files without a build step and without anything from elsewhere, so that it works on a machine
that reaches nothing. It reads and never changes anything. Numbers and judgements are the snapshot's; only rates, as
bytes a second between two snapshots, are worked out in the browser.

It runs on a thread of its own in the controller's process. Nobody who looks, however slow, holds up the controller: it
is asked at most once a second, however many look, and each of them gets the newest snapshot when it has taken the one
before.
"""

from kvtier_services.monitor.page.server import Page

__all__ = ["Page"]
