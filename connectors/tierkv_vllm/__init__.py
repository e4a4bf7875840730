# SPDX-License-Identifier: Apache-2.0
"""TierKV's connector for vLLM.

Two ways in: the `vllm.general_plugins` entry point registers the name, so that
`"kv_connector": "TierKVConnector"` is enough; or `"kv_connector_module_path": "tierkv_vllm"`.
Importing this package is light: no device, thread, socket or file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv_vllm.connector import TierKVConnector

CONNECTOR = "TierKVConnector"

__all__ = ["CONNECTOR", "TierKVConnector", "register"]


def register() -> None:
    """Make the connector known to vLLM by name. Runs in every vLLM process, possibly twice."""
    from tierkv_vllm.model_watch import watch

    watch()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # register_connector raises on a name it knows; there is no public way to ask first.
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "tierkv_vllm.connector", CONNECTOR)


def __getattr__(name: str) -> Any:
    # Only vLLM's factory needs the class; `register` must stay cheap in every process.
    if name == CONNECTOR:
        from tierkv_vllm.connector import TierKVConnector

        return TierKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
