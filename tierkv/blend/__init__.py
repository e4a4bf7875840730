# SPDX-License-Identifier: Apache-2.0
"""Reuse of any text: find stored chunks anywhere in a prompt, and decide what to compute anew.

    fingerprints   a hash of every window of a prompt at once
    donors         which stored chunks there are, by fingerprint, and how they follow one another
    match          the longest runs of a prompt that donors cover, to the token
    plan           what is taken, what is recomputed, in which mode
    repeats        prompts that come back are worth exact KV

Knows token ids and chunks, no engine and no tensor. Why it works, and what it loses:
docs/explanation/any-text-reuse.md.
"""
