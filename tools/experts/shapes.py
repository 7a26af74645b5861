#!/usr/bin/env python3
"""Headers of large mixtures of experts, for `moebius plan`: files of their full size that take no room on disk.

    tools/experts/shapes.py FOLDER            # qwen35-397b.gguf, deepseek-671b.gguf
    moebius plan -m FOLDER/qwen35-397b.gguf --memory 48G --disk-speed 7G --memory-speed 80G

Dimensions are those of Qwen3.5-397B-A17B and DeepSeek-V3, weight types those that quantisers call Q4_K_M, the vocabulary
is the embedded model's, filled up. Weights are holes in the file: there is nothing to run.
Needs: pip install gguf numpy.
"""
import pathlib
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCKS = {T.Q4_K: (256, 144), T.Q6_K: (256, 210), T.Q8_0: (32, 34), T.F32: (1, 4)}


class Header:
    """Keys and tensors of a file."""

    def __init__(self, path, arch, name, n_layer, n_vocab):
        self.path, self.n_layer = path, n_layer
        self.w = w = gguf.GGUFWriter(path, arch)
        w.add_name(name)
        w.add_block_count(n_layer)
        w.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
        w.add_quantization_version(2)
        r = gguf.GGUFReader(ROOT / "models" / "fable-29m-a10m-q4_k_m.gguf")
        for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre"):
            w.add_string(key, r.fields[key].contents())
        tokens = r.fields["tokenizer.ggml.tokens"]
        tokens = [bytes(tokens.parts[i]) for i in tokens.data]
        types = list(r.fields["tokenizer.ggml.token_type"].contents()) + [5] * (n_vocab - len(tokens))
        w.add_token_list(tokens + [b"<unused%d>" % i for i in range(len(tokens), n_vocab)])
        w.add_token_types(types)
        w.add_token_merges(r.fields["tokenizer.ggml.merges"].contents())
        w.add_eos_token_id(r.fields["tokenizer.ggml.eos_token_id"].contents())
        w.add_add_bos_token(False)
        self.bytes = 0

    def better(self, i):
        """What quantisers give a finer type: layers at both ends and every third between."""
        n = self.n_layer
        return T.Q6_K if i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2 else T.Q4_K

    def add(self, name, *shape, kind=T.Q4_K):
        kind = T.Q8_0 if kind != T.F32 and shape[-1] % 256 else kind
        values, size = BLOCKS[kind]
        rows = (*shape[:-1], shape[-1] // values * size)
        n = int(np.prod(rows, dtype=np.int64)) if kind != T.F32 else 4 * int(np.prod(shape, dtype=np.int64))
        if kind == T.F32:
            self.w.add_tensor_info(name, shape, np.dtype(np.float32), n)
        else:
            self.w.add_tensor_info(name, rows, np.dtype(np.uint8), n, raw_dtype=kind)
        self.bytes += -(-n // 32) * 32

    def norm(self, name, n):
        self.add(name, n, kind=T.F32)

    def finish(self):
        self.w.write_header_to_file()
        self.w.write_kv_data_to_file()
        self.w.write_ti_data_to_file()
        file = self.w.fout[0]
        file.flush()
        file.truncate(-(-file.tell() // 32) * 32 + self.bytes)
        file.close()
        print(f"{self.path}: {self.bytes / 1e9:.1f} GB")


def qwen35(path):
    """Qwen3.5-397B-A17B: three layers of delta nets to one of attention, 512 experts, ten a token and a shared one."""
    layers, d, heads, kv, head, experts, used, ff, vocab = 60, 4096, 32, 2, 256, 512, 10, 1024, 248_320
    k_heads, v_heads, state = 16, 64, 128
    h = Header(path, "qwen35moe", "Qwen3.5-397B-A17B shape", layers, vocab)
    w = h.w
    w.add_context_length(262_144)
    w.add_embedding_length(d)
    w.add_head_count(heads)
    w.add_head_count_kv(kv)
    w.add_key_length(head)
    w.add_value_length(head)
    w.add_rope_freq_base(1e7)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_expert_count(experts)
    w.add_expert_used_count(used)
    w.add_expert_feed_forward_length(ff)
    w.add_expert_shared_feed_forward_length(ff)
    w.add_rope_dimension_sections([11, 11, 10, 0])
    w.add_rope_dimension_count(64)
    w.add_ssm_conv_kernel(4)
    w.add_ssm_state_size(state)
    w.add_ssm_group_count(k_heads)
    w.add_ssm_time_step_rank(v_heads)
    w.add_ssm_inner_size(v_heads * state)
    w.add_uint32("qwen35moe.full_attention_interval", 4)
    h.add("output.weight", vocab, d, kind=T.Q6_K)
    h.norm("output_norm.weight", d)
    h.add("token_embd.weight", vocab, d)
    for i in range(layers):
        p, fine = f"blk.{i}.", h.better(i)
        h.norm(p + "attn_norm.weight", d)
        h.norm(p + "post_attention_norm.weight", d)
        if (i + 1) % 4:
            inner, conv = v_heads * state, (2 * k_heads + v_heads) * state
            h.add(p + "attn_gate.weight", inner, d)
            h.add(p + "attn_qkv.weight", conv, d, kind=fine)
            h.norm(p + "ssm_a", v_heads)
            h.add(p + "ssm_alpha.weight", v_heads, d)
            h.add(p + "ssm_beta.weight", v_heads, d)
            h.add(p + "ssm_conv1d.weight", conv, 4, kind=T.F32)
            h.norm(p + "ssm_dt.bias", v_heads)
            h.norm(p + "ssm_norm.weight", state)
            h.add(p + "ssm_out.weight", d, inner)
        else:
            h.add(p + "attn_k.weight", kv * head, d)
            h.norm(p + "attn_k_norm.weight", head)
            h.add(p + "attn_output.weight", d, heads * head)
            h.add(p + "attn_q.weight", 2 * heads * head, d)
            h.norm(p + "attn_q_norm.weight", head)
            h.add(p + "attn_v.weight", kv * head, d, kind=fine)
        h.add(p + "ffn_down_exps.weight", experts, d, ff, kind=fine)
        h.add(p + "ffn_down_shexp.weight", d, ff, kind=fine)
        h.add(p + "ffn_gate_exps.weight", experts, ff, d)
        h.add(p + "ffn_gate_inp.weight", experts, d, kind=T.F32)
        h.norm(p + "ffn_gate_inp_shexp.weight", d)
        h.add(p + "ffn_gate_shexp.weight", ff, d)
        h.add(p + "ffn_up_exps.weight", experts, ff, d)
        h.add(p + "ffn_up_shexp.weight", ff, d)
    h.finish()


def deepseek(path):
    """DeepSeek-V3, 671B: latent attention, three dense layers, 256 experts, eight a token and a shared one."""
    layers, d, heads, experts, used, ff, dense_ff, vocab = 61, 7168, 128, 256, 8, 2048, 18_432, 129_280
    q_lora, kv_lora, nope, rope, d_v, n_dense = 1536, 512, 128, 64, 128, 3
    h = Header(path, "deepseek2", "DeepSeek-V3 shape", layers, vocab)
    w = h.w
    w.add_context_length(163_840)
    w.add_embedding_length(d)
    w.add_feed_forward_length(dense_ff)
    w.add_head_count(heads)
    w.add_head_count_kv(1)
    w.add_rope_freq_base(10_000.0)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_leading_dense_block_count(n_dense)
    w.add_q_lora_rank(q_lora)
    w.add_kv_lora_rank(kv_lora)
    w.add_key_length(kv_lora + rope)
    w.add_value_length(kv_lora)
    w.add_key_length_mla(nope + rope)
    w.add_value_length_mla(d_v)
    w.add_rope_dimension_count(rope)
    w.add_expert_feed_forward_length(ff)
    w.add_expert_count(experts)
    w.add_expert_used_count(used)
    w.add_expert_shared_count(1)
    w.add_expert_weights_scale(2.5)
    w.add_expert_weights_norm(True)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_expert_group_count(8)
    w.add_expert_group_used_count(4)
    h.add("output.weight", vocab, d, kind=T.Q6_K)
    h.norm("output_norm.weight", d)
    h.add("token_embd.weight", vocab, d)
    for i in range(layers):
        p, fine = f"blk.{i}.", h.better(i)
        h.norm(p + "attn_norm.weight", d)
        h.norm(p + "ffn_norm.weight", d)
        h.add(p + "attn_q_a.weight", q_lora, d)
        h.norm(p + "attn_q_a_norm.weight", q_lora)
        h.add(p + "attn_q_b.weight", heads * (nope + rope), q_lora)
        h.add(p + "attn_kv_a_mqa.weight", kv_lora + rope, d)
        h.norm(p + "attn_kv_a_norm.weight", kv_lora)
        h.add(p + "attn_k_b.weight", heads, kv_lora, nope)
        h.add(p + "attn_v_b.weight", heads, d_v, kv_lora)
        h.add(p + "attn_output.weight", d, heads * d_v)
        if i < n_dense:
            h.add(p + "ffn_gate.weight", dense_ff, d)
            h.add(p + "ffn_up.weight", dense_ff, d)
            h.add(p + "ffn_down.weight", d, dense_ff, kind=fine)
            continue
        h.add(p + "ffn_gate_inp.weight", experts, d, kind=T.F32)
        h.norm(p + "exp_probs_b.bias", experts)
        h.add(p + "ffn_gate_exps.weight", experts, ff, d)
        h.add(p + "ffn_up_exps.weight", experts, ff, d)
        h.add(p + "ffn_down_exps.weight", experts, d, ff, kind=fine)
        h.add(p + "ffn_gate_shexp.weight", ff, d)
        h.add(p + "ffn_up_shexp.weight", ff, d)
        h.add(p + "ffn_down_shexp.weight", d, ff, kind=fine)
    h.finish()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    qwen35(folder / "qwen35-397b.gguf")
    deepseek(folder / "deepseek-671b.gguf")
