"""GGUF files for measurements: one in another type, and targets of any size with drawn weights.

python -m benchmarks.gguf_files <file.gguf> <out.gguf> [F32]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

FLOAT32 = GGMLQuantizationType.F32


def copy_fields(own: GGUFReader, writer: GGUFWriter, start: str = "") -> None:
    """Write the keys of a file whose names begin with `start`."""
    for key, field in own.fields.items():
        if key.startswith(start) and not key.startswith(("GGUF.", "general.architecture")):
            kind, *inner = field.types
            writer.add_key_value(key, field.contents(), kind, inner[-1] if inner else None)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def retyped(source: Path, out: Path, kind: GGMLQuantizationType) -> None:
    """Write a GGUF file with its quantised matrices in another type."""
    own = GGUFReader(source)
    writer = GGUFWriter(out, own.fields["general.architecture"].contents())
    copy_fields(own, writer)
    for tensor in own.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.tensor_type == FLOAT32:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    finish(writer)


@dataclass(frozen=True)
class Size:
    """A Llama model with heads of 64."""

    width: int
    blocks: int
    inner: int
    kv_heads: int

    def parameters(self, vocabulary: int) -> int:
        layer = self.width * (2 * self.width + 2 * 64 * self.kv_heads + 3 * self.inner)
        return self.blocks * layer + self.width * vocabulary


def drawn_target(out: Path, size: Size, tokenizer: Path, kind: GGMLQuantizationType) -> None:
    """Write a target of drawn weights with the tokenizer of another file; its output matrix is its
    embedding."""
    own, draw = GGUFReader(tokenizer), np.random.default_rng(0)
    writer = GGUFWriter(out, "llama")
    copy_fields(own, writer, "tokenizer.")
    writer.add_block_count(size.blocks)
    writer.add_context_length(2048)
    writer.add_embedding_length(size.width)
    writer.add_feed_forward_length(size.inner)
    writer.add_head_count(size.width // 64)
    writer.add_head_count_kv(size.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(64)
    vocabulary = len(own.fields["tokenizer.ggml.tokens"].contents())
    writer.add_vocab_size(vocabulary)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = draw.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(columns)
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)

    matrix("token_embd", vocabulary, size.width)
    writer.add_tensor("output_norm.weight", np.ones(size.width, dtype=np.float32))
    for block in range(size.blocks):
        for norm in ("attn_norm", "ffn_norm"):
            ones = np.ones(size.width, dtype=np.float32)
            writer.add_tensor(f"blk.{block}.{norm}.weight", ones)
        for name, rows, columns in (
            ("attn_q", size.width, size.width),
            ("attn_k", 64 * size.kv_heads, size.width),
            ("attn_v", 64 * size.kv_heads, size.width),
            ("attn_output", size.width, size.width),
            ("ffn_gate", size.inner, size.width),
            ("ffn_up", size.inner, size.width),
            ("ffn_down", size.width, size.inner),
        ):
            matrix(f"blk.{block}.{name}", rows, columns)
    finish(writer)


def drawn_head(out: Path, size: Size, tokenizer: Path, draft_vocab: int) -> None:
    """Write an EAGLE-3 head of drawn weights for such a target, in float16."""
    own, draw = GGUFReader(tokenizer), np.random.default_rng(1)
    writer = GGUFWriter(out, "eagle3")
    copy_fields(own, writer, "tokenizer.")
    width, third = size.width, size.blocks // 3
    writer.add_block_count(1)
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(size.inner)
    writer.add_head_count(width // 64)
    writer.add_head_count_kv(size.kv_heads)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(64)
    writer.add_vocab_size(len(own.fields["tokenizer.ggml.tokens"].contents()))
    writer.add_array("eagle3.target_layers", [1, third, 2 * third])
    writer.add_uint32("eagle3.target_hidden_size", width)
    writer.add_bool("eagle3.norm_before_residual", False)
    writer.add_bool("eagle3.norm_before_fc", False)
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm"):
        writer.add_tensor(f"{norm}.weight", np.ones(width, dtype=np.float32))
    for name, rows, columns in (
        ("fc", width, 3 * width),
        ("output", draft_vocab, width),
        ("blk.0.attn_q", width, 2 * width),
        ("blk.0.attn_k", 64 * size.kv_heads, 2 * width),
        ("blk.0.attn_v", 64 * size.kv_heads, 2 * width),
        ("blk.0.attn_output", width, width),
        ("blk.0.ffn_gate", size.inner, width),
        ("blk.0.ffn_up", size.inner, width),
        ("blk.0.ffn_down", width, size.inner),
    ):
        values = draw.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(columns)
        writer.add_tensor(f"{name}.weight", values.astype(np.float16))
    writer.add_tensor("d2t", np.arange(draft_vocab, dtype=np.int64))
    finish(writer)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("name two files, and a type of GGUF tensors or none for F32")
    retyped(Path(sys.argv[1]), Path(sys.argv[2]), GGMLQuantizationType[(*sys.argv, "F32")[3]])
