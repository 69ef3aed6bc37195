"""The connector in a worker's process: it loads what was promised, and saves what is complete."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvtier.codecs.registry import codec_for
from kvtier.connectors.vllm.link import Link
from kvtier.connectors.vllm.messages import Load, Outcome, Save, Step
from kvtier.connectors.vllm.options import Options
from kvtier.connectors.vllm.stored import Stored
from kvtier.connectors.vllm.transfer import Transfer

LOADS = 2
"""Loads at a time."""
ENDING = 5.0
"""Seconds that what is being saved may take when the engine ends."""


class WorkerSide:
    """See the module. Called by the engine's thread; loads and saves run on threads of their own.

    Args:
        stored: how the engine's layers lie in blocks.
        options: of the connector.
        rank: of this worker.
        link: to the host.
    """

    def __init__(self, stored: Stored, options: Options, *, rank: int, link: Link) -> None:
        self.counters: Counter[str] = Counter()
        self._stored, self._options, self._rank, self._link = stored, options, rank, link
        self._loads = ThreadPoolExecutor(LOADS, "kvtier-load")
        self._saves: queue.SimpleQueue[tuple[Callable[[], None], Save] | threading.Event | None] = queue.SimpleQueue()
        self._saver = threading.Thread(target=self._keep_saving, name="kvtier-saves", daemon=True)
        self._lock = threading.Lock()
        self._outcome = Outcome()
        self._received: set[str] = set()
        self._bad: set[int] = set()
        self._failed: set[str] = set()
        self._transfer: Transfer | None = None
        self._awaited: list[Future[None]] = []
        self._layers: dict[str, list[threading.Event]] = {}
        self._unsound = False
        self._begun: Step | None = None

    def register(self, pools: Mapping[str, Any]) -> None:
        """Take the engine's tensors, by layer."""
        codec_for(self._options.plan, self._stored.spec)  # once compiled before the first load, not in it
        shard = self._rank // self._stored.replicas
        verify = self._options.verify
        self._transfer = Transfer(self._stored, pools, rank=shard, link=self._link, verify=verify)
        self._saver.start()

    # Loads

    def begin(self, step: Step) -> None:
        """Begin what is to be loaded; what the step computes with is waited for by layer, or at the latest here."""
        transfer = self._transfer
        if transfer is None:
            return
        for load in step.loads:
            if not load.layerwise:
                self._loads.submit(self._load, transfer, load, ())
                continue
            transfer.pages.fence()()
            events = tuple(threading.Event() for _ in self._stored.names)
            for name, event in zip(self._stored.names, events, strict=True):
                self._layers.setdefault(name, []).append(event)
            self._awaited.append(self._loads.submit(self._load, transfer, load, events))

    def wait_layer(self, name: str) -> None:
        """Wait until a layer is loaded, or could not be."""
        for event in self._layers.pop(name, ()):
            event.wait()

    def _load(self, transfer: Transfer, load: Load, events: tuple[threading.Event, ...]) -> None:
        blocks, upto = load.blocks, load.blocks.start

        def there(layers: range) -> None:
            for layer in layers:
                events[layer].set()

        try:
            upto = transfer.load(blocks, there if events else None)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the engine computes what is not loaded
            self.counters[f"load_{type(exc).__name__}"] += 1
        finally:
            bad = blocks.pages[0][(upto - blocks.origin) // self._stored.page_tokens :]
            with self._lock:
                if self._stored.hybrid and bad:
                    self._failed.add(load.request)
                else:
                    self._bad.update(bad)
                self._outcome.loaded[load.request] = 1, upto
                if not events:
                    self._received.add(load.request)
                elif bad:
                    self._unsound = True
            for event in events:
                event.set()

    # Saves

    def finish(self, step: Step) -> None:
        """The model has run, as far as this step has it run: begin to save. Once a step."""
        for load in self._awaited:
            load.result()
        self._awaited.clear()
        self._layers.clear()
        if self._begun is step:
            return
        self._begun = step
        with self._lock:
            unsound, self._unsound = self._unsound, False
            if step.computes:
                self._outcome.step = step.number
        if not step.saves:
            return
        mine = self._rank % self._stored.replicas == 0
        fence = self._transfer.pages.fence() if self._transfer is not None else _nothing
        for save in step.saves:
            if unsound or not mine:
                # Computed on what could not be loaded, perhaps; or saved by another rank that has the same.
                self._saved(save, 0 if unsound else len(save.blocks.keys))
            else:
                self._saves.put((fence, save))

    def _keep_saving(self) -> None:
        while (asked := self._saves.get()) is not None:
            if isinstance(asked, threading.Event):
                asked.set()
                continue
            fence, save = asked
            blocks = 0
            try:
                fence()
                if self._transfer is not None:
                    saved = self._transfer.save(save.blocks)
                    blocks = saved.blocks + saved.present
                    if saved.refused:
                        self.counters[f"refused:{saved.refused}"] += 1
            except Exception as exc:  # noqa: BLE001 - whatever it is, it is not stored
                self.counters[f"refused:{type(exc).__name__}"] += 1
            finally:
                self._saved(save, blocks)

    def _saved(self, save: Save, blocks: int) -> None:
        with self._lock:
            self._outcome.saved[save.number] = 1, blocks

    # What the engine asks for

    def received(self) -> set[str]:
        """Requests whose load ended since the last call, well or not."""
        with self._lock:
            received, self._received = self._received, set()
        return received

    def failed(self) -> set[str]:
        """Requests of hybrid models that are to be computed from their beginning: there a page's number says little."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def bad_pages(self) -> set[int]:
        """Pages that could not be loaded, since the last call."""
        with self._lock:
            bad, self._bad = self._bad, set()
        return bad

    def settle(self, seconds: float) -> Outcome:
        """Wait, so long at most, until nothing is being saved any more; what became of loads and saves."""
        done = threading.Event()
        self._saves.put(done)
        done.wait(seconds)
        return self.outcome()

    def outcome(self) -> Outcome:
        """What became of loads and saves since the last call."""
        with self._lock:
            outcome, self._outcome = self._outcome, Outcome()
        return outcome

    def drain(self) -> dict[str, int]:
        """What was counted since the last call."""
        counted = dict(self.counters)
        self.counters.clear()
        return counted

    def close(self) -> None:
        """Finish what is queued, for a few seconds at most."""
        self._saves.put(None)
        if self._saver.is_alive():
            self._saver.join(ENDING)
        self._loads.shutdown(wait=True, cancel_futures=True)


def _nothing() -> None:
    """Nothing to wait for."""
