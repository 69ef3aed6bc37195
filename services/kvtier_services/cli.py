"""The `kvtier` command. Errors are one line; heavy packages are imported by the commands that need them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

from kvtier.errors import KVTierError

if TYPE_CHECKING:
    from kvtier.config import Config
    from kvtier_services.cluster.state import Running
    from kvtier_services.cluster.up import Started

T = TypeVar("T")

app = typer.Typer(
    help="A tiered cache of attention KV for LLM engines: GPU memory, pinned CPU memory, NVMe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="The configuration file, kvtier.toml.", no_args_is_help=True)
app.add_typer(config_app, name="config")
token_app = typer.Typer(help="Tokens of clients on other hosts: see docs/remote.md.", no_args_is_help=True)
app.add_typer(token_app, name="token")
index_app = typer.Typer(help="Which host holds which block, as the fleet's index has it.", no_args_is_help=True)
app.add_typer(index_app, name="index")

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="A kvtier.toml; else $KVTIER_CONFIG, ./kvtier.toml, defaults.")
]


def main() -> None:
    """Run the command line."""
    try:
        app()
    except KVTierError as exc:
        fail(str(exc))
    except KeyboardInterrupt:
        fail("interrupted")


def fail(message: str) -> NoReturn:
    """Say in one line what is wrong, and end with exit code 1."""
    typer.echo(f"kvtier: {' '.join(message.split())}", err=True)
    sys.exit(1)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,  # noqa: FBT002
) -> None:
    """See `app`."""
    if version:
        from kvtier import __version__

        typer.echo(f"kvtier {__version__}")
        context.exit()


@app.command()
def up(
    config: ConfigOption = None,
    address: Annotated[str, typer.Option(help="host:port of a running Ray cluster to use.")] = "",
    *,
    stay: Annotated[
        bool,
        typer.Option(
            "--stay",
            help="Stay in the foreground until SIGTERM: wait for the cluster, and start again what is gone of the "
            "controller. The tiers live on.",
        ),
    ] = False,
) -> None:
    """Start this host's kvtier: Ray, Redis and the tiers. Where it runs already, say so."""
    from msgspec.structs import replace

    from kvtier.config import find, load
    from kvtier_services.cluster.up import up as start

    settings = load(config)
    if address:
        settings = replace(settings, ray=replace(settings.ray, address=address))
    if stay:
        from kvtier_services.cluster.stay import stay as remain

        remain(settings, str(find(config) or ""))
        return
    with _steps() as say:
        started = start(settings, source=str(find(config) or ""), say=say)
    _started(started, "is up")


@app.command()
def join(
    head: Annotated[str, typer.Argument(help="host:port of the fleet's Ray head, as `kvtier status` shows it there.")],
    config: ConfigOption = None,
    token: Annotated[
        Path | None, typer.Option(help="File with the head's token: a copy of ray.token in its run_dir.")
    ] = None,
    host: Annotated[str, typer.Option(help="This machine's address for other hosts, if it has several.")] = "",
) -> None:
    """Make this host one of a fleet that `kvtier up` started elsewhere; `kvtier down` ends it here."""
    from kvtier.config import load
    from kvtier_services.cluster.join import join as start

    with _steps() as say:
        started = start(load(config), head, token=token, host=host, say=say)
    _started(started, "has joined")


@app.command()
def down(
    config: ConfigOption = None,
    flush: Annotated[float, typer.Option(help="Seconds for writing blocks down to NVMe that only memory has.")] = 10.0,
) -> None:
    """End what `kvtier up` started, and nothing else. What is on NVMe stays for the next `up`."""
    from kvtier.config import load
    from kvtier.config.schema import folder
    from kvtier_services.cluster.down import down as end

    settings = load(config)
    with _steps() as say:
        ended = end(settings, flush_seconds=flush, say=say)
    if not ended.ran:
        typer.echo(f"kvtier does not run in {folder(settings.run_dir)}")
        return
    if ended.stale:
        typer.echo("kvtier had ended by itself; what it left was removed")
    else:
        kept = f", {ended.written} blocks written down to NVMe" if ended.written else ""
        lost = f", {ended.lost} blocks that only memory had are gone" if ended.lost else ""
        typer.echo(f"kvtier is down after {ended.seconds:.1f} s{kept}{lost}")
    if ended.problems:
        fail("; ".join(ended.problems))


@app.command()
def drain(
    host: Annotated[str, typer.Argument(help="Its name, as `kvtier status` shows it.")],
    config: ConfigOption = None,
    seconds: Annotated[
        float | None, typer.Option(help="For handing blocks over to other hosts; fleet.drain unless given.", min=0)
    ] = None,
    flush: Annotated[float, typer.Option(help="Seconds for writing blocks down to NVMe that only memory has.")] = 10.0,
) -> None:
    """Let a host hand its blocks over to others and rest, over restarts too, until `kvtier undrain`."""
    from kvtier.config import load
    from kvtier_services.cluster import drain as draining

    settings = load(config)
    wait = float(settings.fleet.drain) if seconds is None else seconds
    with _steps() as say:
        say(f"draining {host}")
        said = _of_the_fleet(settings, lambda known: draining.drain(known, host, wait, flush))
    if said.get("fault"):
        typer.echo(f"note: {said['fault']}")
    handed, offered = said.get("handed", 0), said.get("offered", 0)
    others = f"{handed:,} of {offered:,} blocks handed over" if offered else "other hosts needed none of its blocks"
    typer.echo(f"{host} is drained: {others}, {said['written']:,} written down to NVMe")


@app.command()
def undrain(
    host: Annotated[str, typer.Argument(help="Its name, as `kvtier status` shows it.")], config: ConfigOption = None
) -> None:
    """Let a drained host work again."""
    from kvtier.config import load
    from kvtier_services.cluster import drain as draining

    was = _of_the_fleet(load(config), lambda known: draining.undrain(known, host))
    typer.echo(f"{host} works again" if was else f"{host} was not drained")


@app.command()
def status(
    config: ConfigOption = None,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,  # noqa: FBT002
    watch: Annotated[bool, typer.Option("--watch", help="Again every second, until Ctrl-C.")] = False,  # noqa: FBT002
) -> None:
    """Show tiers, hit ratio, moves, actors and Redis."""
    from kvtier.config import load
    from kvtier_services.cluster import look

    settings = load(config)
    known, alive = look.running(settings)
    if known is None or not alive:
        fail(_not_here(settings, known))
    with look.snapshots(settings, known) as snapshot:
        if json:
            import msgspec

            typer.echo(msgspec.json.encode(snapshot()).decode())
            return
        _show(snapshot, watch=watch)


@app.command()
def where(
    tokens: Annotated[str, typer.Argument(help="Token ids, with commas or spaces between them.")] = "",
    *,
    keyspace: Annotated[Path, typer.Option(help="What an engine wrote by `space.describe().write(FILE)`.")],
    file: Annotated[Path | None, typer.Option(help="A file with the token ids; - for the standard input.")] = None,
    config: ConfigOption = None,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Which hosts hold how much of a prompt, the longest prefix first."""
    from kvtier.config import load
    from kvtier_services import routers

    typer.echo(routers.where(load(config), keyspace, routers.tokens_of(tokens, file), json=json))


@app.command()
def events(
    host: Annotated[
        str, typer.Option(help="Name or address of another host of the fleet; this one unless given.")
    ] = "",
    *,
    dump: Annotated[bool, typer.Option("--dump", help="What the host has now, and no more.")] = False,
    since: Annotated[int | None, typer.Option(help="Begin with this batch, if it is still kept.", min=0)] = None,
    config: ConfigOption = None,
    json: Annotated[bool, typer.Option("--json", help="For machines: an object a line.")] = False,
) -> None:
    """Show what enters and leaves the tiers of a host as it happens, until Ctrl-C (see events.endpoint)."""
    from kvtier.config import load
    from kvtier_services import routers

    for line in routers.lines(load(config), host, since=since, dump=dump, json=json):
        typer.echo(line)


@app.command()
def doctor(config: ConfigOption = None) -> None:
    """Check what kvtier needs of this machine, and say how to fix what is missing."""
    from rich.console import Console

    from kvtier.config import load
    from kvtier_services.doctor import checks

    style = {"ok": "green", "warn": "yellow", "fail": "red"}
    console = Console(soft_wrap=True, highlight=False)
    failed = 0
    for check in checks(load(config)):
        failed += check.level == "fail"
        console.print(f"[{style[check.level]}]{check.level:4}[/] {check.name}: ", end="")
        console.print(check.found + (f"; {check.fix}" if check.fix else ""), markup=False)
    if failed:
        fail("one check failed" if failed == 1 else f"{failed} checks failed")


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A request trace: Mooncake's JSON lines, plain, .gz or .xz.")],
    *,
    cpu: Annotated[str, typer.Option(help="Memory of the CPU tier.")] = "64GiB",
    nvme: Annotated[str, typer.Option(help="Disk space of the NVMe tier; 0 for none.")] = "0",
    gpu: Annotated[str, typer.Option(help="GPU memory of the GPU tier; 0 for none.")] = "0",
    model: Annotated[str, typer.Option(help="Its name, or the path of a Hugging Face config.json.")] = "llama-3.1-8b",
    plan: Annotated[str, typer.Option(help="Precision plan of the blocks.")] = "int8",
    policy: Annotated[str, typer.Option(help="As cpu.policy: lru, fifo, s3fifo or cost.")] = "lru",
    admission: Annotated[str, typer.Option(help="As nvme.admission: auto, all or second.")] = "auto",
    endurance: Annotated[str, typer.Option(help="As nvme.endurance: bytes a day; 0 for no limit.")] = "0",
    block_tokens: Annotated[int, typer.Option(help="Tokens that an id of the trace stands for.", min=1)] = 512,
    alone: Annotated[bool, typer.Option("--alone", help="Only this host, not what surrounds it.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture into this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """How much memory, and which plan? Run a request trace through a host that keeps books and no bytes."""
    from kvtier.advisor.answer import answer
    from kvtier.advisor.replay import Setup

    sizes = {"cpu": cpu, "nvme": nvme, "gpu": gpu, "endurance": endurance}
    nbytes = {name: _bytes(text) for name, text in sizes.items()}
    setup = Setup(**nbytes, model=model, plan=plan, policy=policy, admission=admission)
    with _steps() as say:
        text = answer(trace, setup, block_tokens, alone=alone, picture=plot, json=json, say=say)
    typer.echo(text)


@app.command()
def advise(
    model: Annotated[str, typer.Option(help="Its name, or the path of a Hugging Face config.json.")] = "llama-3.1-8b",
    *,
    context: Annotated[str, typer.Option(help="Tokens of a sequence, prompt and answer: 32768, or 32k.")] = "32k",
    batch: Annotated[int, typer.Option(help="Sequences at a time.", min=1)] = 1,
    memory: Annotated[str, typer.Option(help="For KV, what weights leave; no limit unless given.")] = "",
    accuracy: Annotated[
        str, typer.Option(help="exact, high, good or low; or the greatest KL, in nats a token.")
    ] = "good",
    plan: Annotated[str, typer.Option(help="Show what this precision plan takes.")] = "",
    keep: Annotated[str, typer.Option(help="Show what pruning to this takes: 0.7 or 70%, or 1024 tokens.")] = "",
    recipe: Annotated[str, typer.Option(help="Of kvtier.flow, to be shown as fused; see docs/flow.md.")] = "default",
    page: Annotated[int, typer.Option(help="Tokens of a page of KV that is not encoded.", min=1)] = 16,
    measured: Annotated[
        Path | None, typer.Option(help="Losses of a model of yours: benchmarks.quality --save FILE.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture into this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """What a model's KV takes, what fits in a memory, and which plan and pruning lose least there."""
    from kvtier.advisor.advice import Question
    from kvtier.advisor.footprint import storage_of
    from kvtier_services import planning

    asked, fused = storage_of(plan, keep, page), planning.fused(recipe, model, page)
    question = Question(
        model,
        context=_tokens(context),
        batch=batch,
        memory=_bytes(memory) if memory else None,
        accuracy=accuracy,
        storages=(asked, fused) if asked else (fused,),
        page_tokens=page,
        measured=measured,
    )
    planning.show(question, plot=plot, json=json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def demo(context: typer.Context) -> None:
    """Let a language model answer over a long document, with its KV from each tier."""
    from importlib.util import find_spec

    if find_spec("kvtier_services.demo") is None:
        fail("this installation has no demo")
    from importlib import import_module

    sys.exit(import_module("kvtier_services.demo.play").main(context.args))


@index_app.command()
def check(
    config: ConfigOption = None,
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what differs.")] = False,
    seconds: Annotated[float, typer.Option(help="That all hosts together may take.", min=1)] = 120.0,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Compare the index with what the hosts have; exit code 1 when they differ, and were not mended."""
    from kvtier.config import load
    from kvtier_services.cluster import look
    from kvtier_services.cluster.check import check_index

    settings = load(config)
    known, alive = look.running(settings)
    if known is None or not alive:
        fail(_not_here(settings, known))
    try:
        compared = check_index(known, seconds, repair=repair)
    except OSError as exc:
        fail(f"the controller does not answer: {exc}")
    if json:
        import msgspec

        typer.echo(msgspec.json.encode({"well": compared.well, "hosts": compared.hosts}).decode())
    else:
        for line in compared.lines():
            typer.echo(line)
    if not compared.well:
        raise typer.Exit(1)


@token_app.command("add")
def token_add(
    name: Annotated[str, typer.Argument(help="Of the token, for people.")],
    config: ConfigOption = None,
    *,
    tenant: Annotated[str, typer.Option(help="Tenant that it belongs to; one of the same name unless given.")] = "",
    admin: Annotated[bool, typer.Option("--admin", help="It may evict, move and look at what others have.")] = False,
    cpu: Annotated[str, typer.Option(help="Bytes of the CPU tier that the tenant may take on a host; 0: any.")] = "",
    pinned: Annotated[str, typer.Option(help="Bytes of them that it may pin; 0: any.")] = "",
    nvme: Annotated[str, typer.Option(help="Bytes of the NVMe tier that it may take on a host; 0: any.")] = "",
    requests: Annotated[float | None, typer.Option(help="Calls a second that it may make; 0: any.", min=0)] = None,
) -> None:
    """Print a new token, once. Hosts that run know it within a second."""
    from kvtier.config import load
    from kvtier_services.gateway import tokens

    path = load(config).remote.tokens
    quota = tokens.quota_of(path, tenant or name, cpu=cpu, pinned=pinned, nvme=nvme, requests=requests)
    typer.echo(tokens.add(path, name, tenant=tenant, admin=admin, quota=quota))


@token_app.command("revoke")
def token_revoke(name: Annotated[str, typer.Argument(help="Of the token.")], config: ConfigOption = None) -> None:
    """Let a token be good for nothing; hosts that run end its sessions within a second."""
    from kvtier.config import load
    from kvtier_services.gateway import tokens

    tokens.revoke(load(config).remote.tokens, name)
    typer.echo(f"{name} is revoked")


@token_app.command("list")
def token_list(config: ConfigOption = None) -> None:
    """Show whose tokens there are, with their tenants' quotas. Neither tokens nor salts are shown."""
    from kvtier.config import load
    from kvtier_services.gateway import tokens

    known = tokens.read(load(config).remote.tokens)
    for one in known.tokens:
        quota = known.tenants[one.tenant].quota
        sizes = {"cpu": quota.cpu, "pinned": quota.pinned, "nvme": quota.nvme}
        limits = [f"{what} {_size(nbytes)}" for what, nbytes in sizes.items() if nbytes]
        limits += [f"{quota.requests:g} requests a second"] * bool(quota.requests)
        admin = " (admin)" if one.admin else ""
        typer.echo(f"{one.name}: tenant {one.tenant}{admin}; {', '.join(limits) or 'no quota'}")


@config_app.command()
def explain(config: ConfigOption = None) -> None:
    """Print every field with its description and the value that holds here, as a kvtier.toml."""
    from kvtier.config import explain as text
    from kvtier.config import load

    typer.echo(text(load(config)), nl=False)


def _of_the_fleet(settings: Config, question: Callable[[Running], T]) -> T:
    """Ask the controller of the kvtier that runs here."""
    from kvtier_services.cluster import look

    known, alive = look.running(settings)
    if known is None or not alive:
        fail(_not_here(settings, known))
    try:
        return question(known)
    except OSError as exc:
        fail(f"the controller does not answer: {exc}")


def _not_here(settings: Config, known: Running | None) -> str:
    from kvtier.config.schema import folder

    left = " (it ended without `kvtier down`, which removes what it left)" if known else ""
    how = f"join {known.address}` joins its fleet again" if known and known.joined else "up` starts it"
    return f"kvtier does not run in {folder(settings.run_dir)}{left}; `kvtier {how}"


def _started(started: Started, what: str) -> None:
    for note in started.notes:
        typer.echo(f"note: {note}")
    if started.already:
        typer.echo(f"kvtier already runs: {started.running.socket} (`kvtier status`, `kvtier down`)")
        return
    typer.echo(f"kvtier {what} after {started.seconds:.1f} s: {started.running.socket}")
    for host in started.hosts:
        whole = {"cpu": host["arena"]["capacity"]}  # it grows to this
        tiers = ", ".join(
            f"{tier['label']} {_size(whole.get(tier['tier'], tier['capacity']))}" for tier in host["hierarchy"]["tiers"]
        )
        typer.echo(
            f"{host['host']}: {tiers}" + (f"; metrics {host['metrics']['url']}" if host["metrics"]["url"] else "")
        )
    if started.page:
        typer.echo(f"status page: {started.page}")


def _bytes(text: str) -> int:
    """Read a size as people write it."""
    from kvtier.config import Size
    from kvtier.errors import ConfigError

    try:
        return int(Size.parse(text))
    except OverflowError as exc:
        raise ConfigError(f"{text[:20]}... is more than any memory; write a size as in 32GiB") from exc
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc


def _tokens(text: str) -> int:
    """Read a number of tokens as people write it."""
    from kvtier.config.units import tokens
    from kvtier.errors import ConfigError

    try:
        return tokens(text)
    except (OverflowError, ValueError) as exc:
        raise ConfigError(str(exc)[:200]) from exc


def _size(nbytes: int) -> str:
    from kvtier_services.monitor.words import size

    return size(nbytes)


class _steps:  # noqa: N801 - used like a function
    """Shows what is being done: a spinner on a terminal, nothing elsewhere."""

    def __enter__(self) -> Callable[[str], None]:
        from rich.console import Console

        self._status = Console(stderr=True).status("starting")
        if self._status.console.is_terminal:
            self._status.start()
        return self._status.update

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._status.stop()
        if kind is KeyboardInterrupt:
            typer.echo("kvtier: interrupted; what was under way is ended", err=True)
            sys.exit(130)


def _show(snapshot: Callable[[], dict[str, object]], *, watch: bool) -> None:
    import time

    from rich.console import Console
    from rich.live import Live

    from kvtier_services.monitor.status import render

    console = Console(highlight=False)
    if not watch:
        console.print(render(snapshot()))
        return
    with Live(render(snapshot()), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            time.sleep(1.0)
            live.update(render(snapshot()), refresh=True)


if __name__ == "__main__":
    main()
