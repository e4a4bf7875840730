# SPDX-License-Identifier: Apache-2.0
"""Reuse of any text inside vLLM: the scheduler's and the worker's half of `tierkv.blend`.

    scheduler   Planner    finds donors, claims the prompt, taints its block hashes
    worker      Runner     turns donors' keys, recomputes the few tokens that matter, fills blocks

Nothing here is imported unless the configuration switches blending on.
"""
