# SPDX-License-Identifier: Apache-2.0
"""`tierkv doctor`: what keeps TierKV from working here, or from working well, and what to do.

    finding.py      one thing that was found
    settings.py     the configuration: its mistakes, and tiers that do not fit together
    places.py       directories: file system, O_DIRECT, speed, who may read them
    limits.py       what this process may have: files, shared memory
    servers.py      Redis
    engine.py       which vLLM would run, and whether it would find TierKV
    launch.py       the flags and variables that it would run with
    examine.py      all of it

Looks and changes nothing, but for files without a name that are gone when it ends.
"""

from tierkv.doctor.examine import Examination, examine
from tierkv.doctor.finding import Finding, Level

__all__ = ["Examination", "Finding", "Level", "examine"]
