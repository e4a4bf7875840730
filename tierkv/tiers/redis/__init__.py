# SPDX-License-Identifier: Apache-2.0
"""The Redis tier: `tier.py` is the tier, `check.py` what `tierkv doctor` asks.

    commands.py    what is said to a server and what it may answer
    link.py        one connection: pipelined requests, values received where they belong
    sinks.py       a record into a slot, believing nothing of it
    dial.py        opens a connection: TLS, AUTH, PING
    node.py        the connections to one server, and the task that brings them back
    discovery.py   asks Sentinel and the cluster, by redis-py
    topology.py    which server has a key: one, Sentinel's master, a cluster
    talk.py        requests to the servers that have the keys, and redirects
    names.py       what chunks are called on the server
    generation.py  how a whole namespace is forgotten without listing its keys
    verdicts.py    what the server last said about each key
    renewal.py     another life for keys that are used
    upkeep.py      looks after the servers in the background

Needs the package redis, which this does not import by itself.
"""
