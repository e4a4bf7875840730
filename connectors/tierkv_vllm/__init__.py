# SPDX-License-Identifier: Apache-2.0
"""TierKV's connector for vLLM. Importing this package is light: no device, thread, socket or file."""
