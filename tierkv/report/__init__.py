# SPDX-License-Identifier: Apache-2.0
"""Results as documents: one model, printed to a terminal or rendered as one HTML file."""
