"""The HTTP server that Prometheus and Kubernetes ask."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

from kvtier_services.monitor.metrics.collector import HostCollector, OfHost
from kvtier_services.monitor.metrics.described import Status

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

SLOW = 10.0
"""Seconds that a client may be silent for while it is served."""
LONGEST, MOST = 30.0, 32
"""Seconds that a client is served for, and how many at a time; others are cut off. Each has a thread of the host's."""


class Exporter:
    """Serves a host's metrics and its readiness, on threads of its own.

        /metrics    for Prometheus
        /ready      200 and "ok" while the host serves; else 503 and the reason

    Args:
        status: `Hierarchy.status`.
        name: of the host.
        host: address to listen on.
        port: 0 for any free one.
        why_not: why the host does not serve; empty while it does.
        tenants: see `HostCollector`.

    Attributes:
        url: of the metrics; empty when it could not listen.
        fault: why it could not.
    """

    def __init__(
        self,
        status: Callable[[], Status],
        *,
        name: str,
        host: str,
        port: int,
        why_not: Callable[[], str] = str,
        tenants: Callable[[], Sequence[Status]] = tuple,
    ) -> None:
        self.url = self.fault = ""
        self._close: Callable[[], None] = lambda: None
        registry = CollectorRegistry()
        registry.register(OfHost(name, HostCollector(status, tenants), ProcessCollector(registry=None)))
        try:
            server = listen(host, port, application(make_wsgi_app(registry), why_not))
        except OSError as exc:
            self.fault = (
                f"no metrics: cannot listen on {host}:{port} ({exc.strerror}); set metrics.port to a free one, or 0"
            )
            log.warning("exporter off: %s", self.fault)
            return
        thread = threading.Thread(target=server.serve_forever, name="kvtier-metrics", daemon=True)
        thread.start()

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._close = close
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{server.server_port}/metrics"

    def close(self) -> None:
        """Stop listening; idempotent."""
        close, self._close = self._close, lambda: None
        close()


def application(metrics: WSGIApplication, why_not: Callable[[], str]) -> WSGIApplication:
    """What is served: see `Exporter`."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)
        reason = why_not() if path == "/ready" else f"there is no {path} here; try /metrics or /ready"
        status = "404 Not Found" if path != "/ready" else "503 Service Unavailable" if reason else "200 OK"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{reason or 'ok'}\n".encode()]

    return answer


def listen(host: str, port: int, served: WSGIApplication) -> WSGIServer:
    """Listen on an address.

    Raises:
        OSError: that cannot be.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]

    class Server(ThreadingMixIn, WSGIServer):
        daemon_threads = True
        address_family = family
        free = threading.BoundedSemaphore(MOST)

        def process_request(self, request: Any, client_address: Any) -> None:
            if self.free.acquire(blocking=False):
                super().process_request(request, client_address)
            else:
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            end = threading.Timer(LONGEST, _cut_off, [request])
            end.daemon = True
            end.start()
            try:
                super().process_request_thread(request, client_address)
            finally:
                end.cancel()
                self.free.release()

    return make_server(str(address[0]), port, served, Server, handler_class=_Handler)


def _cut_off(request: socket.socket) -> None:
    with suppress(OSError):  # it has gone by itself
        request.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    timeout = SLOW

    def log_message(self, *_: Any) -> None:
        """Nothing: a request is no event."""
