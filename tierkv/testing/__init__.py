# SPDX-License-Identifier: Apache-2.0
"""What tests a tier, shipped so that tiers of other packages are held to the same contract.

    contract.py    TierContract: a pytest class; its subclass says how to make the tier
    machine.py     a hypothesis state machine of random operations against MayForget
    may_forget.py  the model: entries may vanish, they never change
    memory.py      MemoryTier: the contract in its simplest form
    faulty.py      FaultyTier(seed): any tier, with failures
    recording.py   RecordingTier: any tier, with a log of its calls
    samples.py     chunks and payloads whose bytes say where they come from

`contract.py` and `machine.py` need pytest and hypothesis; the others need nothing.
"""
