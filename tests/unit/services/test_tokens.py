"""Who may come in from other hosts, as the tokens file says, and what is shown of that."""

from __future__ import annotations

import os
import stat
import sys

import pytest

from kvtier.errors import ConfigError, Unauthenticated
from kvtier_services import cli
from kvtier_services.gateway import tokens
from kvtier_services.gateway.audit import KEPT, AuditLog
from kvtier_services.gateway.register import Register
from kvtier_services.gateway.tokens import LOCAL, Quota


@pytest.fixture
def path(tmp_path):
    return tmp_path / "config" / "tokens.json"


@pytest.fixture
def kvtier(monkeypatch, tmp_path, path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVTIER_CONFIG", raising=False)
    (tmp_path / "kvtier.toml").write_text(f'[remote]\ntokens_file = "{path}"\n')

    def run(*args: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["kvtier", "token", *args])
        try:
            cli.main()
        except SystemExit as exit_:
            said = capsys.readouterr()
            return exit_.code or 0, said.out + said.err
        return 0, capsys.readouterr().out

    return run


def test_a_token_is_printed_once_and_nowhere_else(kvtier, path):
    code, token = kvtier("add", "alice", "--tenant", "red", "--cpu", "2GiB", "--requests", "50")
    assert code == 0
    assert token.startswith("kvt_")
    assert token.strip() not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    known = tokens.read(path)
    assert known.tenants["red"].quota == Quota(cpu=2 << 30, requests=50.0)
    salts = [entry.salt for entry in known.tenants.values()]
    _, shown = kvtier("list")
    assert shown == "alice: tenant red; cpu 2.0 GiB, 50 requests a second\n"
    assert all(salt not in shown + repr(known) for salt in salts)
    assert len(set(salts)) == 2, "the engines of the host have a salt of their own"


def test_a_quota_is_changed_in_part_and_a_second_token_shares_the_tenant(kvtier, path):
    kvtier("add", "alice", "--tenant", "red", "--cpu", "2GiB", "--requests", "50")
    salt = tokens.read(path).tenants["red"].salt
    kvtier("add", "root", "--tenant", "red", "--admin", "--pinned", "1GiB")
    assert tokens.read(path).tenants["red"] == tokens.TenantEntry(salt, Quota(2 << 30, 1 << 30, 50.0))
    assert "root: tenant red (admin)" in kvtier("list")[1]


def test_names_that_cannot_be_are_refused(kvtier):
    kvtier("add", "alice")
    for args, why in (
        (("add", "alice"), "already"),
        (("add", "a b"), "is no name"),
        (("add", "bob", "--cpu", "many"), "many"),
        (("revoke", "carol"), "there are alice"),
    ):
        code, said = kvtier(*args)
        assert code == 1
        assert why in said


@pytest.mark.parametrize(("mode", "fine"), [(0o440, True), (0o400, True), (0o444, False), (0o460, False)])
def test_of_root_it_may_be_read_by_a_group_as_kubernetes_mounts_secrets(path, monkeypatch, mode, fine):
    tokens.add(path, "alice")
    real = os.fstat

    def of_root(number: int) -> os.stat_result:
        (_, *others) = real(number)
        return os.stat_result((stat.S_IFREG | mode, *others[:3], 0, *others[4:]))

    monkeypatch.setattr(tokens.os, "fstat", of_root)
    monkeypatch.setattr(tokens.os, "getuid", lambda: 1000)
    if fine:
        assert tokens.read(path).tokens[0].name == "alice"
    else:
        with pytest.raises(ConfigError, match="chmod 600"):
            tokens.read(path)


def test_a_file_that_others_can_read_or_that_is_broken_is_refused(path):
    tokens.add(path, "alice")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        tokens.read(path)
    path.chmod(0o600)
    path.write_text("{")
    with pytest.raises(ConfigError, match="tokens_file"):
        tokens.read(path)
    path.write_text('{"tokens": [{"name": "x", "tenant": "y", "sha256": "' + 64 * "0" + '"}]}')
    with pytest.raises(ConfigError, match="which the file lacks"):
        tokens.read(path)


def test_the_register_follows_the_file_and_keeps_what_was_whole(path):
    token = tokens.add(path, "alice")
    register = Register(path)
    caller = register.caller(token)
    assert (caller.name, caller.admin, caller.tenant.name) == ("alice", False, "alice")
    assert register.local_salt == bytes.fromhex(tokens.read(path).tenants[LOCAL].salt)
    for wrong in ("", "kvt_", token + "x", token[:-1]):
        with pytest.raises(Unauthenticated, match="not known"):
            register.caller(wrong)
    other = tokens.add(path, "bob", quota=Quota(cpu=5))
    assert register.refresh()
    assert register.caller(token) is caller, "others do not disturb it"
    assert register.caller(other).tenant.quota.cpu == 5
    whole = path.read_text()
    path.write_text(whole[:20])
    assert not register.refresh()
    assert "tokens_file" in register.fault
    assert register.knows(caller)
    path.write_text(whole)
    assert register.refresh()
    assert not register.fault
    tokens.revoke(path, "alice")
    assert register.refresh()
    assert not register.knows(caller)
    with pytest.raises(Unauthenticated):
        register.caller(token)


def test_no_repr_shows_a_secret(path):
    token = tokens.add(path, "alice")
    register = Register(path)
    salt, caller = tokens.read(path).tenants["alice"].salt, register.caller(token)
    shown = repr(caller) + repr(tokens.read(path)) + repr(vars(register))
    assert token not in shown
    assert salt not in shown


def test_the_audit_log_is_appended_to_and_turned(tmp_path):
    path = tmp_path / "run" / "audit.log"
    for start in range(2):
        log = AuditLog(path, limit=300, clock=lambda: 12.5)
        for i in range(10):
            log.write(who="root", tenant="red", peer="ipv4:1", what="Drop", result="ok", keys=start * 10 + i)
    files = [path, *(path.with_name(f"audit.log.{i}") for i in range(1, KEPT + 1))]
    assert not path.with_name(f"audit.log.{KEPT + 1}").exists()
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files if file.exists())
    lines = [line for file in reversed(files) if file.exists() for line in file.read_text().splitlines()]
    assert [f'"keys":{i}' in line for i, line in zip(range(20 - len(lines), 20), lines, strict=True)] == [True] * len(
        lines
    )
    assert len(lines) >= 8
    assert lines[0].startswith('{"at":12.5,"who":"root","tenant":"red","peer":"ipv4:1","what":"Drop"')


def test_a_quota_that_cannot_be_read_again_is_not_written(path):
    tokens.add(path, "alice")
    for quota in (Quota(requests=float("inf")), Quota(requests=float("nan")), Quota(cpu=-1)):
        with pytest.raises(ConfigError, match="finite"):
            tokens.add(path, "bob", quota=quota)
    assert [entry.name for entry in tokens.read(path).tokens] == ["alice"]
