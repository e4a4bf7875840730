# SPDX-License-Identifier: Apache-2.0
"""What all configuration models share: frozen, no unknown keys, no value ever in an error.

`hide_input_in_errors` is set on every model through `Model`: without it a mistyped `pasword: x`
would print its value. Every field has a description and, where it can have one, a default: the
reference page, the JSON schema and the sample of `tierkv config init` are made from them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from tierkv.config.units import Duration, Size

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


class Model(BaseModel):
    """Base of every model; immutable, so it may be read from any thread."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )


def _no_truth_value(value: Any) -> Any:
    # YAML reads `yes` as True, and pydantic would take True for 1.
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "must be a whole number")
    return value


def _absolute(value: Any) -> Any:
    if not isinstance(value, str | os.PathLike):
        raise PydanticCustomError("path_type", "must be a path")
    text = os.fspath(value)
    if not isinstance(text, str) or "\0" in text or not text:
        raise PydanticCustomError("path_type", "must be a path")
    path = os.path.expanduser(text)
    if not os.path.isabs(path):
        # Relative to what? The engine's processes need not share the directory of the person who
        # wrote the file.
        raise PydanticCustomError(
            "path_relative", "is not an absolute path; begin it with / (or ~/, or a variable)"
        )
    return Path(path)


def _tier_name(value: str) -> str:
    if len(value) > 32 or not _NAME.fullmatch(value):
        raise PydanticCustomError(
            "tier_name",
            "is not a tier name; at most 32 lower-case letters, digits and single underscores, "
            "a letter first",
        )
    return value


Count = Annotated[int, BeforeValidator(_no_truth_value)]
AbsolutePath = Annotated[Path, BeforeValidator(_absolute)]
TierName = Annotated[str, AfterValidator(_tier_name)]


class SecretRef(Model):
    """Where a secret is kept, by exactly one of the two; it never stands in a configuration."""

    file: AbsolutePath | None = Field(
        None, description="File whose content is the secret; a newline at its end is not part of it"
    )
    env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        None, description="Environment variable whose value is the secret"
    )

    def model_post_init(self, context: Any) -> None:
        if (self.file is None) == (self.env is None):
            raise PydanticCustomError(
                "secret_ref",
                "needs exactly one of file and env, like {braces}",
                {"braces": "{file: /run/secrets/tierkv-key}"},
            )


class TierConfig(Model):
    """What every tier has. Subclasses add `type: Literal["…"]`, the discriminator.

    The first line of a subclass's docstring is its sentence on the reference page.
    """

    is_shared: ClassVar[bool] = False
    """Whether other engines, perhaps on other machines, use the same medium."""

    type: str
    name: TierName


class BoundedTierConfig(TierConfig):
    """What a tier has that counts its bytes itself and chooses what to give up."""

    capacity: Size
    policy: Literal["lru", "s3fifo"] = Field(
        "lru",
        description="Which chunks go first when the tier is full: the least recently used (lru), "
        "or those not asked for again soon (s3fifo)",
    )


class LowerTierConfig(TierConfig):
    """What the Store wants to know of every tier below DRAM."""

    write: Literal["through", "on_reuse", "on_evict"] = Field(
        "through",
        description="When a chunk is copied here: at once (through), when it is asked for again "
        "(on_reuse), or when DRAM is about to give it up (on_evict)",
    )
    load_deadline: Duration = Field(
        2.0, gt=0, description="A load that takes longer is late; the engine recomputes"
    )
    save_deadline: Duration = Field(
        30.0, gt=0, description="A save that takes longer counts as a failure of the tier"
    )
    write_queue: Size | None = Field(
        None,
        gt=0,
        description="Most bytes of chunks that wait to be copied here; beyond it the oldest is "
        "dropped. Waiting takes no memory beside DRAM's, but keeps chunks from being evicted. "
        "Without it half of DRAM, shared by the tiers below",
    )
    breaker_failures: Count = Field(
        5, ge=1, le=1000, description="Failures in a row after which the tier is left alone"
    )
    probe_after: Duration = Field(
        5.0, gt=0, description="How long it is left alone before one operation tries it again"
    )

    @property
    def reads_at_once(self) -> int:
        """Chunks that the Store has read from the tier at once; a quarter of it for writes."""
        return 8
