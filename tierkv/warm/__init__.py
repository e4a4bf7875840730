# SPDX-License-Identifier: Apache-2.0
"""`tierkv warm` without its command line: reading prompts, sending them to an engine."""
