# SPDX-License-Identifier: Apache-2.0
"""TierKV keeps the KV cache an LLM engine has computed, in tiers, and gives it back.

The engine-agnostic core. Importing it loads neither torch, nor redis, nor an engine.
"""

__version__ = "0.1.0"
