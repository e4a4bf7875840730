# SPDX-License-Identifier: Apache-2.0
"""`tierkv simulate`: what a trace of prompts would hit, by capacity and policy, without any KV."""
