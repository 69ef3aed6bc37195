"""What a container runtime does for one container, with the kernel's own means: run as root in new namespaces.

python -m tests.ops.container SPEC, with JSON in it: `root` (an empty folder), `keep` (folders that the image has),
`hosts` (lines), `mounts` ([folder, path, writable]), `user`, `groups`, `capabilities`, `env`, `command`.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
RDONLY, NOSUID, BIND, REC, PRIVATE, REMOUNT = 1, 2, 4096, 16384, 1 << 18, 32
SYSTEM = ("bin", "lib", "lib32", "lib64", "sbin", "usr", "sys")
GROUPS = "kvtier:x:1000:\nengines:x:2000:kvtier\n"
USERS = "kvtier:x:1000:1000::/tmp:/bin/sh\nengine:x:1001:2000::/tmp:/bin/sh\n"


def mount(source: str, target: Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    if LIBC.mount(source.encode(), os.fsencode(target), kind.encode() or None, flags, data.encode() or None):
        raise OSError(ctypes.get_errno(), f"mount {source} {target}")


def bind(source: Path, target: Path, *, writable: bool) -> None:
    target.mkdir(parents=True, exist_ok=True)
    mount(str(source), target, flags=BIND | REC)
    if not writable:
        mount("", target, flags=BIND | REMOUNT | RDONLY)


def main(spec: dict) -> None:
    mount("", Path("/"), flags=PRIVATE | REC)
    root = Path(spec["root"])
    mount("tmpfs", root, "tmpfs", data="mode=755,size=64m")
    for name in SYSTEM:
        found = Path("/", name)
        if found.is_symlink():
            (root / name).symlink_to(found.readlink())
        elif found.is_dir():
            bind(found, root / name, writable=False)
    shutil.copytree("/etc", root / "etc", symlinks=True, ignore_dangling_symlinks=True)
    (root / "etc/hosts").write_text("\n".join(["127.0.0.1 localhost", *spec["hosts"], ""]))
    (root / "etc/group").write_text("root:x:0:\n" + GROUPS)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n" + USERS)
    (root / "proc").mkdir()
    mount("proc", root / "proc", "proc")
    bind(Path("/dev"), root / "dev", writable=True)
    for source, path, writable in spec["mounts"]:
        bind(Path(source), root / path[1:], writable=writable)
    for folder in spec["keep"]:  # over volumes: a checkout may lie in /tmp
        bind(Path(folder), root / folder[1:], writable=False)
    mount("", root, flags=REMOUNT | RDONLY, data="mode=755,size=64m")
    os.chroot(root)
    os.chdir("/")
    capabilities = ",".join(["-all", *(f"+{name.lower()}" for name in spec["capabilities"])])
    drop = ["setpriv", "--reuid", str(spec["user"]), "--regid", str(spec["groups"][0])]
    drop += ["--groups", ",".join(map(str, spec["groups"])), "--no-new-privs", "--inh-caps=-all"]
    drop += [f"--bounding-set={capabilities}"]
    os.execvpe("setpriv", [*drop, "--", *spec["command"]], spec["env"])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
