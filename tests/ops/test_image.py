"""services/Dockerfile: every command of it is run here, outside of Docker, of which there is no engine to be had.

In place of what an image has: this machine's Python, in an environment of its own that sees nothing of the one that the
tests run in, and, for the run, that one's packages beside the wheel, to read (a full install takes minutes; that it
resolves is tried). `groupadd` and `useradd` get an /etc of their own.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvtier
from tests.cluster.network import network, why_not
from tests.ops.manifests import ROOT, Pod, pods, rendered
from tests.ops.sandbox import Sandbox

DOCKERFILE = ROOT / "services" / "Dockerfile"
FILES = (DOCKERFILE, ROOT / "k8s" / "examples" / "vllm" / "Dockerfile")
BIN = Path(sys.executable).parent
PLAIN_ETC = 'mkdir "$1" && echo "root:x:0:0::/root:/bin/sh" >"$1/passwd" && echo "root:x:0:" >"$1/group" && \
  touch "$1/shadow" "$1/gshadow" && cp /etc/login.defs /etc/nsswitch.conf "$1" && mount --bind "$1" /etc && '


def instructions(file: Path) -> list[list[tuple[str, str]]]:
    """Instructions of each stage: name and words."""
    text = re.sub(r"\\\n", " ", "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#")))
    stages: list[list[tuple[str, str]]] = [[]]
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, words = line.partition(" ")
        if name == "FROM":
            stages.append([])
        stages[-1].append((name, re.sub(r"\s+", " ", words)))
    return stages


def all_of(stage: list[tuple[str, str]], name: str) -> list[str]:
    return [words for each, words in stage if each == name]


def environment_of(stage: list[tuple[str, str]]) -> dict[str, str]:
    return dict(word.split("=", 1) for words in all_of(stage, "ENV") for word in shlex.split(words))


@dataclass(frozen=True)
class Built:
    """What the first two stages left.

    Attributes:
        folder: of all of it: src, wheels, install.
        resolved: versions by name that the full install comes to.
    """

    folder: Path
    resolved: dict[str, str]

    @property
    def packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.folder / "install")}))

    def paths(self) -> dict[str, str]:
        site = sysconfig.get_path("purelib")
        return {
            "PATH": f"{self.folder}/install/bin:{self.folder}/fresh/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": f"{self.packages}:{site}",
        }


def rays() -> list[Pod]:
    return [pod for pod in pods(rendered("dev")) if pod.ray is not None]


def run(command: str, folder: Path, *arguments: str, where: str = "src", **env: str) -> str:
    """A RUN, in a folder that stands for the image's root."""
    for path in ("/src", "/wheels", "/install"):
        command = re.sub(rf"(?<![\w.]){path}\b", str(folder / path[1:]), command)
    done = subprocess.run(
        ["sh", "-c", command, "sh", *arguments],
        cwd=folder / where,
        env={"HOME": str(folder), "PATH": f"{folder}/fresh/bin:/usr/bin:/bin:/usr/sbin:/sbin"} | _pip() | env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _pip() -> dict[str, str]:
    """Where this machine's pip finds packages; nothing of where it puts them."""
    elsewhere = {"PIP_PYTHON", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER"}
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "HTTP", "http", "SSL")) and name not in elsewhere
    }


def test_no_command_reaches_the_environment_that_the_tests_run_in(built):
    said = run("python -m pip --version && command -v python && python -m pip list", built.folder)
    assert str(built.folder / "fresh") in said.splitlines()[0]
    assert "kvtier" not in said.partition("Package")[2]
    assert str(BIN) not in said


@pytest.fixture(scope="module")
def built() -> Iterator[Built]:
    _, wheel, packages, _ = instructions(DOCKERFILE)
    folder = Path(tempfile.mkdtemp(prefix="kvi", dir="/var/tmp"))  # the container has a /tmp of its own
    folder.chmod(0o755)
    before = own_environment()
    try:
        # With its own pip: another one would take the packages that it finds around itself for those to replace.
        subprocess.run([sys.executable, "-m", "venv", folder / "fresh"], check=True)
        for stage in (wheel, packages):
            for words in all_of(stage, "COPY"):
                *sources, target = [word for word in words.split() if not word.startswith("--from")]
                if "--from" not in words:
                    copy(sources, folder / "src" / target)
        env = {name: value.replace("/src", str(folder / "src")) for name, value in environment_of(wheel).items()}
        for words in all_of(wheel, "RUN"):
            run(words, folder, **env)
        (install,) = all_of(packages, "RUN")
        env = environment_of(packages)
        report = folder / "report.json"
        run(install, folder, VARIANT="cuda", PIP_DRY_RUN="1", PIP_REPORT=str(report), **env)
        # Else pip would take what this very environment has of kvtier out of it.
        run(install, folder, VARIANT="cpu", PIP_NO_DEPS="1", PIP_IGNORE_INSTALLED="1", **env)
        said = json.loads(report.read_text())["install"]
        yield Built(folder, {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in said})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert own_environment() == before, "the environment that the tests run in was changed"


def own_environment() -> dict[str, int]:
    """What there is of kvtier in the environment that the tests run in, with its times."""
    site = Path(sysconfig.get_path("purelib"))
    found = [*BIN.glob("kvtier*"), *site.glob("*kvtier*"), *site.glob("kvtier*/*")]
    return {str(path): path.stat().st_mtime_ns for path in found}


def copy(sources: list[str], target: Path) -> None:
    """A COPY out of the repository, of what the ignore file lets through."""
    lines = (ROOT / "services" / "Dockerfile.dockerignore").read_text().splitlines()
    let = [line[1:] for line in lines if line.startswith("!")]
    for source in sources:
        assert any(source == one or fnmatch.fnmatch(source, f"{one}/*") for one in let), f"{source} is ignored"
        found = ROOT / source
        if found.is_dir():
            shutil.copytree(found, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(found, target)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_linter_has_nothing_to_say(file):
    done = subprocess.run([BIN / "hadolint", file], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_linter_would_say_it(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM python:latest\nRUN cd /tmp && pip install x\n")
    done = subprocess.run([BIN / "hadolint", tmp_path / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DL3007" in done.stdout


def test_it_ends_as_a_user_that_the_manifests_name():
    last = instructions(DOCKERFILE)[-1]
    users = {(pod.spec["securityContext"]["runAsUser"], pod.spec["securityContext"]["runAsGroup"]) for pod in rays()}
    assert users == {(1000, 1000)}
    assert all_of(last, "USER") == ["1000:1000"]
    assert all_of(last, "ENTRYPOINT") == ['["kvtier"]']
    assert not [words for stage in instructions(DOCKERFILE) for words in all_of(stage, "FROM") if "latest" in words]


def test_the_full_install_is_what_the_constraints_say(built):
    pinned: dict[str, str] = {}
    for file in (ROOT / "constraints.txt", ROOT / "services" / "constraints-image.txt"):
        lines = [line for line in file.read_text().splitlines() if "==" in line and not line.startswith("#")]
        pairs = (line.split(";")[0].strip().split("==") for line in lines)
        pinned |= {name.lower(): version for name, version in pairs}
    loose = {name: version for name, version in built.resolved.items() if name not in pinned}
    assert built.resolved["kvtier"] == kvtier.__version__
    # A CUDA build of torch brings its libraries, to the release.
    strangers = {name: loose[name] for name in loose if not name.startswith(("kvtier", "nvidia", "cuda", "triton"))}
    assert strangers == {}
    same = {name: (version.split("+")[0], pinned[name]) for name, version in built.resolved.items() if name in pinned}
    assert {name: both for name, both in same.items() if both[0] != both[1].split("+")[0]} == {}
    assert {"ray", "aiohttp", "torch", "triton"} <= built.resolved.keys()


def test_the_wheel_has_all_that_runs(built):
    (wheel,) = (built.folder / "wheels").iterdir()
    assert wheel.name.startswith(f"kvtier-{kvtier.__version__}-")
    pages = [path.name for path in (built.packages / "kvtier_services").rglob("*") if path.is_file()]
    assert {"cli.py", "stay.py"} <= {*pages}
    assert not (built.packages / "tests").exists()


@pytest.mark.skipif(bool(why_not()), reason=f"no namespaces: {why_not()}")
def test_users_and_groups_are_made(built):
    (users, *_) = all_of(instructions(DOCKERFILE)[-1], "RUN")
    script = shlex.quote(f"{PLAIN_ETC}{users} && id kvtier && getent group engines")
    said = run(f"unshare --mount sh -c {script} sh {built.folder}/etc", built.folder)
    assert "uid=1000(kvtier) gid=1000(kvtier) groups=1000(kvtier),2000(engines)" in said
    assert "engines:x:2000:kvtier" in said


@pytest.mark.skipif(bool(why_not()), reason=f"no namespaces: {why_not()}")
def test_it_runs_as_nobody_in_particular_on_a_tree_that_cannot_be_written(built):
    last = instructions(DOCKERFILE)[-1]
    _, warm = all_of(last, "RUN")
    said = run(warm, built.folder, where="install", **built.paths())
    assert str(built.packages) in said, "kernels are beside the package that was installed"
    assert f"kvtier {kvtier.__version__}" in said
    user, _, group = all_of(last, "USER")[0].partition(":")
    container = {
        "name": "kvtier",
        "env": [{"name": name, "value": value} for name, value in (environment_of(last) | built.paths()).items()],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    context = {"runAsUser": int(user), "runAsGroup": int(group), "fsGroup": int(group), "supplementalGroups": [2000]}
    spec = {"containers": [container], "securityContext": context, "volumes": [{"name": "tmp", "emptyDir": {}}]}
    warmed = "import time; from kvtier.codecs.cpu import decode, encode, jit; print(jit.CACHE_FOLDER)"
    with network() as net:
        sandbox = Sandbox(
            net,
            Path(tempfile.mkdtemp(prefix="kvj")),
            {},
            [],
            keep=[str(built.folder / name) for name in ("install", "fresh")],
        )
        sandbox.folder.chmod(0o755)
        try:
            pod = sandbox.pod(Pod("kvtier", "kvtier", {}, spec), 5)
            outputs = {}
            for name, command in {
                "version": [*json.loads(all_of(last, "ENTRYPOINT")[0]), "--version"],
                "doctor": ["kvtier", "doctor"],
                "write": ["sh", "-c", f"touch {built.packages}/x /x; id -u"],
                "warm": ["python", "-c", warmed],
            }.items():
                log = pod.log("kvtier")
                log.unlink(missing_ok=True)
                code = pod.start(container, command).wait(300)
                outputs[name] = (code, log.read_text())
            kernels = sorted(path.name for path in pod.folder.glob("volumes/tmp/kvtier-kernels/**/*.nbc"))
        finally:
            sandbox.end()
            shutil.rmtree(sandbox.folder, ignore_errors=True)
    assert outputs["version"] == (0, f"kvtier {kvtier.__version__}\n")
    code, report = outputs["doctor"]
    assert code in (0, 1), report
    assert "ok   versions" in report
    assert "Traceback" not in report
    assert outputs["write"][1].count("Read-only file system") == 2, outputs["write"]
    assert outputs["write"][1].endswith("1000\n")
    assert outputs["warm"][0] == 0, outputs["warm"]
    assert "/tmp/kvtier-kernels" in outputs["warm"][1]
    kept = sorted(path.name for path in built.packages.rglob("kvtier/codecs/**/*.nbc"))
    assert kernels == kept != [], "the image's kernels are used, and none was compiled anew"
