# SPDX-License-Identifier: Apache-2.0
"""Looking into a running engine: a UNIX socket that only its owner can open, and both its ends.

`protocol` says what travels, `discovery` where sockets lie; `server` and `publisher` live beside
the Store, `client` in whoever looks.
"""
