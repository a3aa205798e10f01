"""The mlx-lm engine over a text model that is made to take images: each is one token of its prompt.

What mlx-lm has for models that see is used as it is, but for reading the picture itself, which
wants a package of its own, and for the model's eyes: an image looks like its token.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama

from pion_vllm_mlx.serve import engine_mlx_lm

server: Any = importlib.import_module("mlx_lm.server")


class Processor:
    """Leaves a prompt as the chat template made it."""

    image_token = "<think>"

    def __call__(self, text: str, *, images: list[bytes]) -> tuple[str, list[mx.array]]:
        return text, [mx.zeros(1) for _ in images]


def embedded(model: Any, inputs: mx.array, *, pixel_values: list[mx.array]) -> mx.array:
    """The rows of a prompt, for the model."""
    rows: mx.array = model.model.embed_tokens(inputs)
    return rows


if __name__ == "__main__":
    server.load_processor = lambda model, config: Processor()
    server._decode_image = str.encode
    llama.Model.embed_inputs = embedded
    code = engine_mlx_lm.main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # as the engine itself does
