# SPDX-License-Identifier: Apache-2.0
"""Failed assertions of the shipped contract tests are explained like those of our own."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tierkv.testing.contract", "tierkv.testing.machine")
