# SPDX-License-Identifier: Apache-2.0
"""The contract tests on the simplest tier: what fails here is the contract's own mistake."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tierkv.testing.contract import TierContract
from tierkv.testing.machine import tier_machine
from tierkv.testing.memory import Medium, MemoryTier
from tierkv.tiers.base import Tier


class TestMemoryTier(TierContract):
    @pytest.fixture(autouse=True)
    def medium(self) -> None:
        self.shelf = Medium()

    def make_tier(self) -> Tier:
        return MemoryTier(capacity=20, medium=self.shelf)


TestMemoryMachine = tier_machine(
    Medium, lambda medium: MemoryTier(capacity=5, medium=medium)
).TestCase
TestMemoryMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
