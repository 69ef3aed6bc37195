from __future__ import annotations

import pytest

from kvtier.config.schema import CpuConfig, NvmeConfig
from kvtier.errors import ConfigError
from kvtier.eviction.admission import RULES
from kvtier.eviction.registry import NAMES, policy


def test_each_name_makes_a_fresh_policy():
    for name in NAMES:
        one, other = policy(name), policy(name)
        one.insert(1, 1, None)
        assert (len(one), len(other)) == (1, 0)


def test_an_unknown_name_is_said_with_the_nearest_one():
    with pytest.raises(ConfigError, match="no eviction policy 's3-fifo'; did you mean 's3fifo'"):
        policy("s3-fifo")


def test_the_configuration_takes_these_names_and_no_others():
    for name in NAMES:
        assert CpuConfig(policy=name).policy == name
    for rule in RULES:
        assert NvmeConfig(admission=rule).admission == rule
    with pytest.raises(ConfigError, match=f"cpu.policy is 'mru'.*{'.*'.join(NAMES)}"):
        CpuConfig(policy="mru")
    with pytest.raises(ConfigError, match=f"nvme.admission is 'never'.*{'.*'.join(RULES)}"):
        NvmeConfig(admission="never")
