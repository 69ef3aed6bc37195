"""The index through TLS with client certificates, as a user that may do little; over a real server and a terminator."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import closing, suppress

import pytest
import trustme

from kvtier.errors import ConfigError
from kvtier.index.address import RedisAddress
from kvtier.index.base import Replica
from kvtier.index.connect import connect
from kvtier.index.options import RedisIndexOptions
from kvtier.testing.index import eventually, key, shows, told
from tests.redis_servers import ACL, fleet

SHORT = RedisIndexOptions(lookup_timeout=0.25, heartbeat=0.05, pause=0.02, longest_pause=0.1)
PASSWORD = "correct horse"


@pytest.fixture
def servers():
    with fleet() as servers:
        yield servers


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Writes certificates of an authority; the paths of the authority's, and of a server's and a client's."""
    tmp_path = tmp_path_factory.mktemp("certificates")
    ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
    paths = {"ca": tmp_path / "ca.pem"}
    ca.cert_pem.write_to_path(str(paths["ca"]))
    for name, who in (("server", "127.0.0.1"), ("client", "host@fleet.example")):
        issued = ca.issue_cert(who, key_type=trustme.KeyType.ECDSA)
        for kind, blobs in (("key", [issued.private_key_pem]), ("cert", issued.cert_chain_pems)):
            paths[f"{name}_{kind}"] = tmp_path / f"{name}_{kind}.pem"
            for blob in blobs:
                blob.write_to_path(str(paths[f"{name}_{kind}"]), append=True)
    return paths


class Terminator:
    """Takes TLS from clients that have a certificate, and talks plainly to a server, as stunnel and meshes do."""

    def __init__(self, context, port):
        self._context, self._port = context, port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._open = [self._listening]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                raw, _ = self._listening.accept()
                self._open.append(raw)
                threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw):
        with suppress(OSError):
            client = self._context.wrap_socket(raw, server_side=True)
            server = socket.create_connection(("127.0.0.1", self._port))
            self._open += [client, server]
            threading.Thread(target=_pump, args=(server, client), daemon=True).start()
            _pump(client, server)


def _pump(source, target):
    with suppress(OSError, ValueError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture(params=["native", "terminated"])
def tls_port(request, servers, certificates):
    """Port of a server behind TLS that wants client certificates."""
    user = f"user kvtier on >{PASSWORD.replace(' ', '_')} {ACL}"
    lines = ["user default off", user]
    if request.param == "native":
        tls = {"tls-cert-file": "server_cert", "tls-key-file": "server_key", "tls-ca-cert-file": "ca"}
        port = servers.tls_port(*lines, *(f"{name} {certificates[path]}" for name, path in tls.items()))
        if port is None:
            pytest.skip("the redis-server here was built without TLS; one on PATH that has it is used")
        yield port
        return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates["ca"])
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificates["server_cert"], certificates["server_key"])
    with closing(Terminator(context, servers.server(*lines).port)) as terminator:
        yield terminator.port


@pytest.fixture
def password_file(tmp_path):
    path = tmp_path / "password"
    path.write_text(PASSWORD.replace(" ", "_"))
    return str(path)


def test_the_index_works_through_tls_as_a_user_of_few_rights(tls_port, certificates, password_file):
    query = f"?ssl_ca_certs={certificates['ca']}&ssl_certfile={certificates['client_cert']}"
    address = RedisAddress(
        f"rediss://kvtier@127.0.0.1:{tls_port}/0{query}&ssl_keyfile={certificates['client_key']}", password_file
    )
    index = connect(address, host="alice", options=SHORT)
    try:
        index.publish([(key(number), 2, 10) for number in range(1000)])
        assert not index.needs_publish()
        mine = Replica(index.node, index.incarnation, 2, 10)
        assert shows(index, 999, [mine])
        index.discard([key(1)])
        told(index)
        assert shows(index, 1, [])
        index.forget(4711)
        assert [part.dead for part in index.sweep(trim=True)] == [0] * len(list(index.sweep(trim=True)))
        assert eventually(lambda: bool(index.status()["ok"]))
        assert index.status()["update_errors"] == index.status()["sweep_errors"] == 0
    finally:
        index.close()


@pytest.mark.parametrize("lacks", ["certificate", "authority"])
def test_without_a_certificate_or_its_authority_nobody_gets_in(tls_port, certificates, password_file, lacks):
    query = f"?ssl_ca_certs={certificates['ca']}" if lacks == "certificate" else "?ssl_check_hostname=true"
    index = connect(
        RedisAddress(f"rediss://kvtier@127.0.0.1:{tls_port}/0{query}", password_file), host="alice", options=SHORT
    )
    try:
        assert eventually(lambda: index.match([key(1)]) is None)
        assert not index.status()["ok"]
        assert index.status()["reason"]
    finally:
        index.close()


def test_a_certificate_that_is_not_there_is_a_reason_and_no_crash(tls_port, tmp_path, password_file):
    url = f"rediss://kvtier@127.0.0.1:{tls_port}/0?ssl_ca_certs={tmp_path / 'missing.pem'}"
    index = connect(RedisAddress(url, password_file), host="alice", options=SHORT)
    try:
        assert index.match([key(1)]) is None
        assert eventually(lambda: "missing" in str(index.status()["reason"]) or "No such file" in str(index.status()))
    finally:
        index.close()


def test_options_of_tls_without_tls_are_refused():
    with pytest.raises(ConfigError, match="ssl_ca_certs"):
        RedisAddress("redis://127.0.0.1/0?ssl_ca_certs=/ca.pem")
