# SPDX-License-Identifier: Apache-2.0
"""What tiers hold, looked at from outside of any engine: `tierkv ls`, `du`, `verify`, `purge`.

base.py     what can be asked of any place
disk.py     the directory of a disk tier, also while an engine uses it
redis.py    the keys of a Redis tier, listed by redis-py
chains.py   which chunks follow which, and whose they are
scrub.py    reads everything and compares checksums, at a bounded rate
"""

from tierkv.inventory.base import Inventory, NamespaceSummary, Problem, StoredChunk, open_inventory

__all__ = ["Inventory", "NamespaceSummary", "Problem", "StoredChunk", "open_inventory"]
