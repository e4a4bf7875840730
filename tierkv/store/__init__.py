# SPDX-License-Identifier: Apache-2.0
"""The Store and what its callers handle: the rest of this package is its own business."""

from tierkv.store.context import Context
from tierkv.store.report import StoreReport, TierSummary
from tierkv.store.store import Store
from tierkv.store.tickets import LoadTicket

__all__ = ["Context", "LoadTicket", "Store", "StoreReport", "TierSummary"]
