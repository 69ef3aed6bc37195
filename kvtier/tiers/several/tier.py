"""The tier over several devices."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from kvtier.errors import ClosedError, TierUnavailable
from kvtier.tiers.base import Inventory, Slots, Tier, TierUsage
from kvtier.tiers.several.homes import Homes
from kvtier.tiers.several.together import Together

PAUSE = 30.0
"""Seconds for which a device that failed is written to no more; then it is tried again."""


class Several:
    """A `Tier` that spreads blocks over tiers of one kind, one for each device; batches go to all devices at once.

    A device with a fault is written to no more until it is well, or worth a try; what would go there goes to the next.
    While a device is away, what it has is not there; somebody calls `returned` when it is back. `TierUnavailable` is
    raised when nobody is there whom a call is about.

    Args:
        name: of the tier.
        tiers: by the name of their device, which stays: it decides which blocks are written there.
        clock: monotonic seconds.
    """

    def __init__(self, name: str, tiers: Mapping[str, Tier], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._tiers = dict(tiers)
        self._together = Together(tiers)
        self._homes = Homes(tiers)
        self._clock = clock
        self._lock = threading.Lock()
        """Guards what follows; never held during calls."""
        self._usage = {device: TierUsage(0, 0, 0) for device in tiers}
        self._rest: dict[str, float] = {}
        """When a device that failed is written to again."""
        self._closed = False
        with suppress(TierUnavailable):
            self.inventory()

    @property
    def devices(self) -> dict[str, TierUsage]:
        """What each device said of itself when anybody asked last."""
        with self._lock:
            return dict(self._usage)

    def write(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        self._check_open()
        answers, left = [False] * len(keys), list(range(len(keys)))
        failed: set[str] = set()
        heard = not keys
        while left and (shares := self._shares(keys, left, failed)):
            said = self._together.ask({d: partial(_write, *_part(keys, slots, at)) for d, at in shares.items()})
            heard = heard or bool(said)
            for device, stored in said.items():
                _scatter(stored, answers, shares[device])
            at_device = {at: device for device, places in shares.items() for at in places}
            self._homes.wrote((at_device[at], keys[at]) for at in sorted(at_device) if answers[at])
            refused = {d: [at for at in places if not answers[at]] for d, places in shares.items()}
            failing = self._failing(refused, said)
            failed |= failing
            left = [at for device in failing for at in refused[device]]
        if not heard:
            raise TierUnavailable(f"no device of the {self.name} tier takes writes: {', '.join(self._tiers)}")
        return answers

    def read(self, keys: Sequence[bytes], slots: Slots) -> list[bool]:
        self._check_open()
        answers = [False] * len(keys)
        shares: dict[str, list[int]] = {}
        for at, device in enumerate(self._homes.of(keys)):
            if device is not None:
                shares.setdefault(device, []).append(at)
        said = self._together.ask({d: partial(_read, *_part(keys, slots, at)) for d, at in shares.items()})
        self._check_heard(said, shares)
        for device, whole in said.items():
            _scatter(whole, answers, shares[device])
        return answers

    def remove(self, keys: Sequence[bytes]) -> None:
        self._check_open()
        self._homes.forget(keys)
        said = self._forget({device: list({*keys, *self._homes.owed(device)}) for device in self._tiers})
        if keys:
            self._check_heard(said, self._tiers)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self._check_open()
        said = self._together.ask(dict.fromkeys(self._tiers, lambda tier: tier.contains(keys)))
        self._check_heard(said, self._tiers)
        for device, has in said.items():
            self._homes.learn((device, key) for key, there in zip(keys, has, strict=True) if there)
        return [home in said and said[home][at] for at, home in enumerate(self._homes.of(keys))]

    def inventory(self) -> Inventory:
        self._check_open()
        said = self._together.ask(dict.fromkeys(self._tiers, lambda tier: tier.inventory()))
        self._check_heard(said, self._tiers)
        # How old its blocks are, only a device itself knows: all are taken to have filled up in the same time.
        ages = np.concatenate([np.arange(len(has)) / max(1, len(has)) for has in said.values()])
        by_age = np.argsort(ages, kind="stable").tolist()
        found = [(device, key) for device, has in said.items() for key in has.keys]
        there = dict(self._learn([found[at] for at in by_age], by_age))
        keys = self._homes.by_age(there)
        records = np.concatenate([has.records for has in said.values()])
        return Inventory(keys, records[[there[key] for key in keys]])

    def returned(self, device: str) -> tuple[Inventory, list[bytes]]:
        """A device is there again, or well again: hear what it has.

        Returns:
            What it has and no other device, and keys that it had and has no more.

        Raises:
            TierUnavailable: it is away again.
        """
        self._check_open()
        had = self._homes.at(device)
        self._forget({device: self._homes.owed(device)})
        has = self._tiers[device].inventory()
        with self._lock:
            self._rest.pop(device, None)
        there = frozenset(has.keys)
        gone = self._homes.left(device, [key for key in had if key not in there])
        mine = self._learn([(device, key) for key in has.keys], range(len(has)))
        return Inventory([key for key, _ in mine], has.records[[at for _, at in mine]]), gone

    def dropped(self) -> list[bytes]:
        self._check_open()
        gone: list[bytes] = []
        for device, tier in self._tiers.items():
            with suppress(TierUnavailable):
                gone += self._homes.left(device, tier.dropped())
        return gone

    def usage(self) -> TierUsage:
        self._check_open()
        self._ask_usage(self._tiers)
        said, counters = self.devices, Counter[str]()
        for usage in said.values():
            counters.update(usage.counters)
        return TierUsage(
            sum(usage.capacity for usage in said.values()),
            sum(usage.used for usage in said.values()),
            sum(usage.blocks for usage in said.values()),
            "; ".join(f"{device}: {usage.fault}" for device, usage in said.items() if usage.fault),
            dict(counters),
        )

    def close(self) -> None:
        self._closed = True
        self._together.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the {self.name} tier was closed")

    def _check_heard(self, said: Mapping[str, object], asked: Iterable[str]) -> None:
        if not said and (devices := ", ".join(asked)):
            raise TierUnavailable(f"the {self.name} tier is away: {devices}")

    def _shares(self, keys: Sequence[bytes], places: Sequence[int], failed: set[str]) -> dict[str, list[int]]:
        """Which of the keys each device shall write; none when no device is well."""
        now, shares = self._clock(), dict[str, list[int]]()
        with self._lock:
            well = [device for device in self._tiers if device not in failed and self._rest.get(device, now) <= now]
        if well:
            for at, home in zip(places, self._homes.of([keys[at] for at in places]), strict=True):
                shares.setdefault(home if home in well else self._homes.pick(keys[at], well), []).append(at)
        return shares

    def _failing(self, refused: Mapping[str, Sequence[int]], said: Mapping[str, object]) -> set[str]:
        """Those of the devices that refused because they are not well; they rest."""
        doubtful = [device for device, places in refused.items() if places]
        self._ask_usage([device for device in doubtful if device in said])
        with self._lock:
            failing = {device for device in doubtful if device not in said or self._usage[device].fault}
            self._rest.update(dict.fromkeys(failing, self._clock() + PAUSE))
        return failing

    def _ask_usage(self, devices: Iterable[str]) -> None:
        said = self._together.ask(dict.fromkeys(devices, lambda tier: tier.usage()))
        with self._lock:
            for device in devices:
                usage = said.get(device) or replace(self._usage[device], fault="away")
                self._usage[device] = usage
                if usage.fault:
                    self._rest.setdefault(device, self._clock() + PAUSE)
                else:
                    self._rest.pop(device, None)

    def _learn(self, found: Sequence[tuple[str, bytes]], places: Iterable[int]) -> list[tuple[bytes, int]]:
        """What devices have and no other, each with its place; the others are made to forget what they have too."""
        strays: dict[str, list[bytes]] = {}
        kept = []
        for (device, key), at, known in zip(found, places, self._homes.learn(found), strict=True):
            if known:
                kept.append((key, at))
            else:
                strays.setdefault(device, []).append(key)
        self._forget(strays)
        return kept

    def _forget(self, keys: Mapping[str, Sequence[bytes]]) -> dict[str, bool]:
        """Have devices forget blocks; those that were there to hear it."""
        said = self._together.ask({device: partial(_remove, some) for device, some in keys.items() if some})
        for device in said:
            self._homes.forgot(device, keys[device])
        return said


def _part(keys: Sequence[bytes], slots: Slots, places: Sequence[int]) -> tuple[list[bytes], Slots]:
    return [keys[at] for at in places], Slots(slots.offsets[places], slots.nbytes[places])


def _scatter(part: Sequence[bool], whole: list[bool], places: Sequence[int]) -> None:
    for at, value in zip(places, part, strict=True):
        whole[at] = value


def _write(keys: Sequence[bytes], slots: Slots, tier: Tier) -> list[bool]:
    return tier.write(keys, slots)


def _read(keys: Sequence[bytes], slots: Slots, tier: Tier) -> list[bool]:
    return tier.read(keys, slots)


def _remove(keys: Sequence[bytes], tier: Tier) -> bool:
    tier.remove(keys)
    return True
