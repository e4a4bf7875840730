# SPDX-License-Identifier: Apache-2.0
"""What the tiers of this machine can do, against what the machine itself can do, measured in turns.

    ratio.py    medians and spreads
    dram.py     page copies on the CPU, beside memcpy           (needs torch)
    disk.py     the disk tier, beside plain reads and writes of the same file
    redis.py    the Redis tier, beside bare sockets
    tiers.py    all of them, for `tierkv bench tiers`

`benchmarks/` measures more, with the same code.
"""
