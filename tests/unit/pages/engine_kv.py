# SPDX-License-Identifier: Apache-2.0
"""An engine's KV storage for tests, whose every byte is known without the code under test.

Byte x of the page of layer l and block b is (131 l + 31 b + 7 x + salt) mod 251, and lies at
start + l * layer_stride + b * block_stride + x. Bytes that belong to no page are FILLER.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tierkv.pages.layout import SlotLayout

FILLER = 254


def page_bytes(layer: int, block: int, size: int, salt: int = 0) -> bytes:
    return bytes((131 * layer + 31 * block + 7 * x + salt) % 251 for x in range(size))


@dataclass(frozen=True)
class Shape:
    """Sizes of an engine's KV. `order` is which axis is outermost: "LB" or "BL"."""

    order: str = "LB"
    layers: int = 3
    blocks: int = 8
    page: int = 40
    pad: int = 0
    """Bytes between a page and the next one."""
    start: int = 0
    """Bytes before the first page."""

    @property
    def strides(self) -> tuple[int, int]:
        pitch = self.page + self.pad
        return (self.blocks * pitch, pitch) if self.order == "LB" else (pitch, self.layers * pitch)

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page

    def slot_layout(self, chunk_blocks: int, ranks: int = 1) -> SlotLayout:
        return SlotLayout(16 * chunk_blocks, 16, self.block_bytes, ranks)


class EngineKV:
    """Storage on the CPU or another device, with byte views of its layers."""

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        self.shape = shape
        size = shape.start + shape.layers * shape.blocks * (shape.page + shape.pad)
        self.storage = torch.full((size,), FILLER, dtype=torch.uint8, device=device)
        layer_stride, block_stride = shape.strides
        self.views = [
            self.storage.view(torch.int8).as_strided(
                (shape.blocks, shape.page), (block_stride, 1), shape.start + layer * layer_stride
            )
            for layer in range(shape.layers)
        ]

    def address(self, layer: int, block: int) -> int:
        layer_stride, block_stride = self.shape.strides
        return self.shape.start + layer * layer_stride + block * block_stride

    def image(self, blocks: dict[int, bytes]) -> npt.NDArray[np.uint8]:
        """All bytes of a storage that holds these blocks (pages layer by layer) and FILLER."""
        image = np.full(self.storage.numel(), FILLER, np.uint8)
        page = self.shape.page
        for block, content in blocks.items():
            for layer in range(self.shape.layers):
                at = self.address(layer, block)
                part = content[layer * page : (layer + 1) * page]
                image[at : at + page] = np.frombuffer(part, np.uint8)
        return image

    def block(self, block: int, salt: int = 0) -> bytes:
        """What block `block` holds by the formula, pages layer by layer."""
        shape = self.shape
        return b"".join(page_bytes(n, block, shape.page, salt) for n in range(shape.layers))

    def all_blocks(self, salt: int = 0) -> dict[int, bytes]:
        return {block: self.block(block, salt) for block in range(self.shape.blocks)}

    def fill(self, blocks: dict[int, bytes]) -> None:
        self.storage.copy_(torch.from_numpy(self.image(blocks)))

    def bytes(self) -> npt.NDArray[np.uint8]:
        return self.storage.cpu().numpy()
