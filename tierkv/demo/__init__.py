# SPDX-License-Identifier: Apache-2.0
"""`tierkv demo`: what the cache is worth, shown on this machine with a real model and server.

Talks to `vllm serve` as any client does, over processes and HTTP, and imports no engine.
"""
