# SPDX-License-Identifier: Apache-2.0
"""TierKV's log lines in vLLM's log.

vLLM gives handlers to the logger "vllm" alone, so lines of other packages below WARNING would be
lost. TierKV's loggers borrow those handlers, as they are now: level, format and file are vLLM's.
Where the user configures logging (`VLLM_CONFIGURE_LOGGING=0`), there is nothing to borrow and
nothing is touched.
"""

from __future__ import annotations

import logging

NAMES = ("tierkv", "tierkv_vllm")


def join_vllm() -> None:
    """Idempotent; called by every connector instance."""
    vllm = logging.getLogger("vllm")
    for name in NAMES:
        logger = logging.getLogger(name)
        if vllm.handlers and not logger.handlers:
            logger.handlers = list(vllm.handlers)
            logger.setLevel(vllm.level)
            logger.propagate = vllm.propagate
