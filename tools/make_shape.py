#!/usr/bin/env python3
"""GGUF of random weights in the exact shape of a published model, with the type mix that quantisers call Q4_K_M.

  make_shape.py --out FILE.gguf [--model qwen3-30b] [--layers 48] [--vocab FILE.gguf] [--seed 1]
  make_shape.py --out FILE.gguf --skew S                     # experts that routers prefer
  make_shape.py --out FILE.gguf --skew S --routers-only      # other routers for a file made with --skew
  make_shape.py --out FILE.gguf --model qwen35-35b --mtp 0.1 # with a layer for multi-token prediction
  make_shape.py --out FILE.gguf --model qwen35-397b --hollow # no weights, no room on disk: for `moebius plan`

For speed and memory only: weights are random quants of zero mean and the deviation that keeps activations sane, pieces
of a pool of 48 MB a type. The file streams to disk, peak RAM is about 0.5 GB.
--skew S (qwen3-30b) gives every expert a bias of standard deviation S on its logit (noise: 0.9): 0 chooses all equally
often, 0.5 gives the top quarter of 128 experts 60% of the tokens. The shape has no tensor for it, so the first 32
channels of the residual stream are one constant, which no layer writes to and routers read.
--mtp NOISE (qwen35) adds a layer whose drafts are often right: what layers add to the residual stream is so little that
the next token follows from the last one alone, which the layer sees, plus NOISE times a random product of the model's
hidden state. Without noise every draft is right; `moebius bench --draft mtp` prints the share that was.
The vocabulary is that of --vocab (the embedded model's when left out), filled up to the model's.
Needs: pip install 'gguf>=0.18' numpy (0.17 cannot write keys of Qwen3.5).
"""
import argparse
import pathlib
import time
import zlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Values and bytes of a block.
BLOCKS = {T.Q4_K: (256, 144), T.Q5_0: (32, 22), T.Q6_K: (256, 210), T.Q8_0: (32, 34), T.F32: (1, 4)}
# What stands in where columns are no multiple of 256.
OF_32 = {T.Q4_K: T.Q5_0, T.Q6_K: T.Q8_0}
POOL = 48 << 20
PIECE = 16 << 20
# Tokens of images, of models that see.
SEEN = [b"<|vision_start|>", b"<|vision_end|>", b"<|image_pad|>"]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Shape:
    """Keys and tensors of a file."""

    def __init__(self, args, arch, name, layers, n_vocab, context, width):
        self.arch, self.layers, self.width = arch, args.layers or layers, width
        self.n_vocab = args.n_vocab or n_vocab
        # Name, shape, type, deviation, mean.
        self.tensors = []
        self.w = w = gguf.GGUFWriter(args.out, arch)
        w.add_name(f"{name} shape, random, {self.layers} layers")
        self.is_mtp, self.of_sum = args.mtp is not None, 1.0 if args.mtp is None else 1e-3
        w.add_block_count(self.layers + self.is_mtp)
        w.add_context_length(context)
        w.add_embedding_length(width)
        w.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
        w.add_quantization_version(2)
        self.add_vocabulary(gguf.GGUFReader(args.vocab), args.vocab)

    def add_vocabulary(self, r, path):
        w, n = self.w, self.n_vocab
        for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre"):
            w.add_string(key, r.fields[key].contents())
        tokens = r.fields["tokenizer.ggml.tokens"]
        tokens = [bytes(tokens.parts[i]) for i in tokens.data]
        if len(tokens) > n:
            raise SystemExit(f"{path} has {len(tokens)} tokens, more than {n}")
        seen = SEEN if self.arch.startswith("qwen35") else []
        tokens = (tokens + [b"<|unused%d|>" % i for i in range(len(tokens), n)])[: n - len(seen)] + seen
        n_own = len(r.fields["tokenizer.ggml.tokens"].data)
        types = list(r.fields["tokenizer.ggml.token_type"].contents()) + [5] * (n - n_own)  # 5: unused
        w.add_token_list(tokens)
        w.add_token_types(types[: n - len(seen)] + [3] * len(seen))  # 3: control
        w.add_token_merges(r.fields["tokenizer.ggml.merges"].contents())
        eos = r.fields.get("tokenizer.ggml.eos_token_id")
        w.add_eos_token_id(eos.contents() if eos else n - 1)
        w.add_add_bos_token(False)
        w.add_chat_template(CHATML)

    def attention(self, heads, kv_heads, key, value, rope_base, eps=1e-6):
        self.w.add_head_count(heads)
        self.w.add_head_count_kv(kv_heads)
        self.w.add_key_length(key)
        self.w.add_value_length(value)
        self.w.add_rope_freq_base(rope_base)
        self.w.add_layer_norm_rms_eps(eps)

    def experts(self, n, used, ff, shared_ff=None):
        self.w.add_expert_count(n)
        self.w.add_expert_used_count(used)
        self.w.add_expert_feed_forward_length(ff)
        if shared_ff:
            self.w.add_expert_shared_feed_forward_length(shared_ff)
        self.n_experts, self.n_used = n, used

    def key(self, name, value):
        """A key of the architecture, which gguf has no method for."""
        add = self.w.add_float32 if isinstance(value, float) else self.w.add_uint32
        (self.w.add_array if isinstance(value, list) else add)(f"{self.arch}.{name}", value)

    def add(self, name, *shape, kind=T.Q4_K, std=0.02, mean=0.0):
        if kind != T.F32 and shape[-1] % 256:
            kind = OF_32[kind]
        self.tensors.append((name, shape, kind, std, mean))

    def norm(self, name, n, std=0.05, mean=1.0):
        self.add(name, n, kind=T.F32, std=std, mean=mean)

    def ends(self, is_tied=False):
        """What stands before and behind the layers."""
        self.is_tied = is_tied
        self.norm("output_norm.weight", self.width)
        if is_tied:
            self.add("token_embd.weight", self.n_vocab, self.width, kind=T.Q6_K)
        else:
            self.add("output.weight", self.n_vocab, self.width, kind=T.Q6_K)
            self.add("token_embd.weight", self.n_vocab, self.width, std=1.0)

    def each_layer(self):
        """The prefix of each layer's names, its number, and the type of what its rules give more bits."""
        for i in range(self.layers):
            yield f"blk.{i}.", i, finer(i, self.layers)

    def write(self, path, hollow, seed, skew, mtp):
        w = self.w
        for name, shape, kind, *_ in self.tensors:
            if kind == T.F32:
                w.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
            else:
                values, size = BLOCKS[kind]
                rows = (*shape[:-1], shape[-1] // values * size)
                n = int(np.prod(rows, dtype=np.int64))
                w.add_tensor_info(name, rows, np.dtype(np.uint8), n, raw_dtype=kind)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_ti_data_to_file()
        file = w.fout[0]
        fill = Fill(seed, skew, self.width, mtp)
        end, of_a_token = align(file.tell()), 0
        for name, shape, kind, std, mean in self.tensors:
            values, size = BLOCKS[kind]
            n = int(np.prod(shape, dtype=np.int64)) // values * size
            if "_exps." in name:
                of_a_token += n * self.n_used // self.n_experts
            elif self.is_tied or name != "token_embd.weight":
                of_a_token += n
            if not hollow:
                file.seek(end)
                for piece in fill.pieces(name, shape, kind, std, mean):
                    file.write(piece)
            end = align(end + n)
        file.truncate(end)
        file.close()
        print(f"{path}: {end / 1e9:.3f} GB, {of_a_token / 1e6:.1f} MB of weights a token")


class Fill:
    """Bytes of tensors. Those of a tensor are the same for the same seed, whatever --layers is."""

    def __init__(self, seed, skew, width, mtp=None):
        self.seed, self.skew, self.width, self.mtp, self.pools = seed, skew, width, mtp, {}

    def rng(self, name):
        return np.random.Generator(np.random.SFC64([self.seed, zlib.crc32(name.encode())]))

    def pieces(self, name, shape, kind, std, mean):
        rng = self.rng(name)
        if kind == T.F32:
            yield self.floats(name, rng, shape, std, mean).tobytes()
            return
        values, size = BLOCKS[kind]
        if name.endswith("nextn.eh_proj.weight"):
            d = self.width
            noise = self.mtp / d**0.5 * rng.standard_normal((d, d), dtype=np.float32)
            yield gguf.quants.quantize(np.hstack([np.eye(d, dtype=np.float32), noise]), kind).tobytes()
            return
        if self.skew is not None and name == "token_embd.weight":
            yield embedding(rng, int(np.prod(shape)), shape[-1]).tobytes()
            return
        pool = self.pools.get((kind, std))
        if pool is None:
            pool = MAKERS[kind](self.rng(f"{kind.name} {std}"), POOL // size, std)
            self.pools[kind, std] = pool
        # Rows of the constant channels add nothing: blocks of scale 0.
        is_cut = self.skew is not None and ("attn_output" in name or "ffn_down_exps" in name)
        blocks_a_row = shape[-1] // values
        blocks_a_matrix = blocks_a_row * int(np.prod(shape[-2:-1], dtype=np.int64))
        for _ in range(int(np.prod(shape[:-2], dtype=np.int64))):
            for at in range(0, blocks_a_matrix, PIECE // size):
                n = min(blocks_a_matrix - at, PIECE // size)
                start = rng.integers(len(pool) - n + 1)
                piece = pool[start : start + n]
                if is_cut and at == 0:
                    piece = piece.copy()
                    piece[: CONSTANT * blocks_a_row, SCALES[kind]] = 0
                yield piece.data

    def floats(self, name, rng, shape, std, mean):
        if self.skew is not None and name.endswith("ffn_gate_inp.weight"):
            return router(name, rng, *shape, self.skew)
        x = (mean + std * rng.standard_normal(shape)).astype(np.float32)
        if self.skew is not None and name.endswith("ffn_norm.weight"):
            x[:CONSTANT] = 1
        return x


def align(offset):
    return -(-offset // 32) * 32


def finer(i, n):
    """What quantisers give more bits: layers at both ends, every third between (`use_more_bits` of llama-quant.cpp)."""
    return T.Q6_K if i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2 else T.Q4_K


def halves(rng, n, d):
    """Scales about `d`, as the bytes of an f16."""
    return (d * rng.uniform(0.8, 1.2, n)).astype(np.float16).view(np.uint8).reshape(n, 2)


def random_blocks(rng, n, size):
    return np.frombuffer(bytearray(rng.bytes(n * size)), dtype=np.uint8).reshape(n, size)


def q4_k(rng, n, std):
    b = random_blocks(rng, n, 144)
    # 6-bit scales; minimums are the scales, so that a weight is d * scale * (q - 7.5).
    scales = rng.integers(32, 64, (n, 8), dtype=np.uint8)
    d = (std / (47.5 * 4.61) * rng.uniform(0.8, 1.2, n)).astype(np.float16)
    b[:, 0:2] = d.view(np.uint8).reshape(n, 2)
    b[:, 2:4] = (d.astype(np.float32) * 7.5).astype(np.float16).view(np.uint8).reshape(n, 2)
    low, high = scales[:, :4], scales[:, 4:]
    b[:, 4:8] = b[:, 8:12] = low | ((high >> 4) << 6)
    b[:, 12:16] = (high & 15) | ((high & 15) << 4)
    return b


def q6_k(rng, n, std):
    b = random_blocks(rng, n, 210)
    scales = rng.integers(64, 128, (n, 16), dtype=np.int16) * rng.choice(np.array([-1, 1], np.int16), (n, 16))
    b[:, 192:208] = scales.astype(np.int8).view(np.uint8)
    b[:, 208:210] = halves(rng, n, std / (95.5 * 18.47))
    return b


def q8_0(rng, n, std):
    b = random_blocks(rng, n, 34)
    b[:, 0:2] = halves(rng, n, std / 73.9)
    return b


def q5_0(rng, n, std):
    b = random_blocks(rng, n, 22)
    b[:, 0:2] = halves(rng, n, std / 9.23)
    return b


MAKERS = {T.Q4_K: q4_k, T.Q5_0: q5_0, T.Q6_K: q6_k, T.Q8_0: q8_0}
# Where the scales of a block are.
SCALES = {T.Q4_K: slice(0, 4), T.Q6_K: slice(208, 210)}
# Channels of the residual stream that --skew keeps constant: a sub-block of Q4_K.
CONSTANT = 32
# What `embedding` gives them.
CHANNEL = 63 * 7.5 / (47.5 * 4.61)


def embedding(rng, n, width):
    """Rows of deviation 1 whose first 32 values are CHANNEL."""
    b = q4_k(rng, n // 256, 1.0).reshape(-1, width // 256, 144)
    first = b[:, 0]
    scale = 1 / (47.5 * 4.61)
    first[:, 0:4] = np.frombuffer(np.array([scale, 7.5 * scale], np.float16).tobytes(), np.uint8)
    for at in (4, 8):  # scale and minimum of the first sub-block: 63
        first[:, at] = 63 | (first[:, at] & 0xC0)
    first[:, 16:48] |= 15  # low nibbles: its values
    return b


def router(name, rng, n_expert, width, skew):
    """Logits of deviation 0.9, and a bias of deviation `skew` for each expert by way of the constant channels."""
    x = 0.02 * rng.standard_normal((n_expert, width))
    layer = int(name.split(".")[1])
    # What the norm divides by: the embedding and what the layers before have added.
    rms = np.sqrt(1 + CONSTANT * CHANNEL**2 / width + 0.056 * layer)
    bias = skew * rng.standard_normal(n_expert)
    x[:, :CONSTANT] = (bias * rms / (CONSTANT * CHANNEL))[:, None]
    return x.astype(np.float32)


def qwen3(args):
    """Qwen3-30B-A3B and 235B-A22B: 128 experts, eight a token."""
    if args.model == "qwen3-235b":
        d, heads, ff, layers, name = 4096, 64, 1536, 94, "Qwen3-235B-A22B"
    else:
        d, heads, ff, layers, name = 2048, 32, 768, 48, "Qwen3-30B-A3B"
    kv, head, experts = 4, 128, 128
    s = Shape(args, "qwen3moe", name, layers, 151_936, 40_960, d)
    s.attention(heads, kv, head, head, 1e6)
    s.experts(experts, 8, ff)
    s.w.add_feed_forward_length(8 * ff)
    s.ends()
    for p, _, fine in s.each_layer():
        s.add(p + "attn_k.weight", kv * head, d)
        s.norm(p + "attn_k_norm.weight", head)
        s.norm(p + "attn_norm.weight", d)
        # Embeddings outweigh what attention adds, so that tokens and not contexts choose experts.
        s.add(p + "attn_output.weight", d, heads * head, std=0.004)
        s.add(p + "attn_q.weight", heads * head, d)
        s.norm(p + "attn_q_norm.weight", head)
        s.add(p + "attn_v.weight", kv * head, d, kind=fine)
        s.add(p + "ffn_down_exps.weight", experts, d, ff, kind=fine)
        s.add(p + "ffn_gate_exps.weight", experts, ff, d)
        s.add(p + "ffn_gate_inp.weight", experts, d, kind=T.F32)
        s.norm(p + "ffn_norm.weight", d)
        s.add(p + "ffn_up_exps.weight", experts, ff, d)
    return s


def qwen35(args):
    """Qwen3.5: three layers of delta nets to one of attention, experts and a shared one."""
    kv, head, k_heads, state = 2, 256, 16, 128
    if args.model == "qwen35-35b":
        name, layers, d, heads, experts, used, ff, v_heads = "Qwen3.5-35B-A3B", 40, 2048, 16, 256, 8, 512, 32
    else:
        name, layers, d, heads, experts, used, ff, v_heads = "Qwen3.5-397B-A17B", 60, 4096, 32, 512, 10, 1024, 64
    s = Shape(args, "qwen35moe", name, layers, 248_320, 262_144, d)
    s.attention(heads, kv, head, head, 1e7)
    s.experts(experts, used, ff, ff)
    s.w.add_rope_dimension_sections([11, 11, 10, 0])
    s.w.add_rope_dimension_count(64)
    s.w.add_ssm_conv_kernel(4)
    s.w.add_ssm_state_size(state)
    s.w.add_ssm_group_count(k_heads)
    s.w.add_ssm_time_step_rank(v_heads)
    s.w.add_ssm_inner_size(v_heads * state)
    s.key("full_attention_interval", 4)
    s.ends()
    inner, conv = v_heads * state, (2 * k_heads + v_heads) * state
    layers = list(s.each_layer())
    if s.is_mtp:
        s.key("nextn_predict_layers", 1)
        p = f"blk.{s.layers}."
        s.add(p + "nextn.eh_proj.weight", d, 2 * d, kind=T.Q8_0)
        s.norm(p + "nextn.enorm.weight", d, 0.0)
        s.norm(p + "nextn.hnorm.weight", d, 0.0)
        layers.append((p, 3, T.Q6_K))
    for p, i, fine in layers:
        s.norm(p + "attn_norm.weight", d)
        s.norm(p + "post_attention_norm.weight", d)
        if (i + 1) % 4:
            s.add(p + "attn_gate.weight", inner, d)
            s.add(p + "attn_qkv.weight", conv, d, kind=fine)
            s.norm(p + "ssm_a", v_heads, 0.1, -2.0)
            s.add(p + "ssm_alpha.weight", v_heads, d)
            s.add(p + "ssm_beta.weight", v_heads, d)
            s.add(p + "ssm_conv1d.weight", conv, 4, kind=T.F32, std=0.5)
            s.norm(p + "ssm_dt.bias", v_heads, 0.5, 0.0)
            s.norm(p + "ssm_norm.weight", state)
            s.add(p + "ssm_out.weight", d, inner, std=0.004 * s.of_sum)
        else:
            s.add(p + "attn_k.weight", kv * head, d)
            s.norm(p + "attn_k_norm.weight", head)
            s.add(p + "attn_output.weight", d, heads * head, std=0.004 * s.of_sum)
            s.add(p + "attn_q.weight", 2 * heads * head, d)
            s.norm(p + "attn_q_norm.weight", head)
            s.add(p + "attn_v.weight", kv * head, d, kind=fine)
        s.add(p + "ffn_down_exps.weight", experts, d, ff, kind=fine, std=0.02 * s.of_sum)
        s.add(p + "ffn_down_shexp.weight", d, ff, kind=fine, std=0.02 * s.of_sum)
        s.add(p + "ffn_gate_exps.weight", experts, ff, d)
        s.add(p + "ffn_gate_inp.weight", experts, d, kind=T.F32)
        s.norm(p + "ffn_gate_inp_shexp.weight", d, 0.02, 0.0)
        s.add(p + "ffn_gate_shexp.weight", ff, d)
        s.add(p + "ffn_up_exps.weight", experts, ff, d)
        s.add(p + "ffn_up_shexp.weight", ff, d)
    return s


def gemma4(args):
    """Gemma 4 26B-A4B: five layers with a window to one without, whose keys are its values; a dense network beside 128
    experts, eight a token."""
    d, heads, experts, ff, dense_ff, window = 2816, 16, 128, 704, 2112, 1024
    s = Shape(args, "gemma4", "Gemma 4 26B-A4B", 30, 262_144, 131_072, d)
    # Size of a head, key heads.
    layers = [(256, 8) if (i + 1) % 6 else (512, 2) for i in range(s.layers)]
    s.attention(heads, [kv for _, kv in layers], 512, 512, 1e6)
    s.experts(experts, 8, ff)
    s.w.add_feed_forward_length(dense_ff)
    s.w.add_rope_dimension_count(512)
    s.key("rope.freq_base_swa", 1e4)
    s.key("rope.dimension_count_swa", 256)
    s.key("final_logit_softcapping", 30.0)
    s.key("attention.sliding_window", window)
    s.key("attention.sliding_window_pattern", [kv == 8 for _, kv in layers])
    s.key("attention.key_length_swa", 256)
    s.key("attention.value_length_swa", 256)
    s.key("attention.shared_kv_layers", 0)
    s.key("embedding_length_per_layer_input", 0)
    s.ends(is_tied=True)
    s.norm("rope_freqs.weight", 256, 0.0)
    n_values, at = sum(kv == 8 for _, kv in layers), 0
    for p, i, fine in s.each_layer():
        head, kv = layers[i]
        s.add(p + "attn_k.weight", kv * head, d)
        s.norm(p + "attn_k_norm.weight", head)
        s.norm(p + "attn_norm.weight", d)
        s.add(p + "attn_output.weight", d, heads * head)
        s.add(p + "attn_q.weight", heads * head, d)
        s.norm(p + "attn_q_norm.weight", head)
        if kv == 8:
            s.add(p + "attn_v.weight", kv * head, d, kind=finer(at, n_values))
            at += 1
        s.add(p + "ffn_down.weight", d, dense_ff, kind=fine)
        s.norm(p + "ffn_down_exps.scale", experts, 0.0)
        s.add(p + "ffn_down_exps.weight", experts, d, ff, kind=fine)
        s.add(p + "ffn_gate.weight", dense_ff, d)
        s.norm(p + "ffn_gate_inp.scale", d, 0.0)
        s.add(p + "ffn_gate_inp.weight", experts, d, kind=T.F32, std=0.03)
        s.add(p + "ffn_gate_up_exps.weight", experts, 2 * ff, d)
        s.norm(p + "ffn_norm.weight", d)
        s.add(p + "ffn_up.weight", dense_ff, d)
        s.norm(p + "layer_output_scale.weight", 1, 0.0)
        # Small, so that tokens and not contexts choose experts.
        for name in ("post_attention_norm", "post_ffw_norm"):
            s.norm(f"{p}{name}.weight", d, 0.005, 0.1)
        for name in ("post_ffw_norm_1", "post_ffw_norm_2", "pre_ffw_norm_2"):
            s.norm(f"{p}{name}.weight", d)
    return s


def deepseek(args):
    """DeepSeek-V3, 671B: latent attention, three dense layers, 256 experts, eight a token and a shared one."""
    d, heads, experts, ff, dense_ff = 7168, 128, 256, 2048, 18_432
    q_lora, kv_lora, nope, rope, d_v, n_dense = 1536, 512, 128, 64, 128, 3
    s = Shape(args, "deepseek2", "DeepSeek-V3", 61, 129_280, 163_840, d)
    s.attention(heads, 1, kv_lora + rope, kv_lora, 10_000.0)
    s.experts(experts, 8, ff)
    w = s.w
    w.add_feed_forward_length(dense_ff)
    w.add_leading_dense_block_count(n_dense)
    w.add_q_lora_rank(q_lora)
    w.add_kv_lora_rank(kv_lora)
    w.add_key_length_mla(nope + rope)
    w.add_value_length_mla(d_v)
    w.add_rope_dimension_count(rope)
    w.add_expert_shared_count(1)
    w.add_expert_weights_scale(2.5)
    w.add_expert_weights_norm(True)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_expert_group_count(8)
    w.add_expert_group_used_count(4)
    s.ends()
    for p, i, fine in s.each_layer():
        s.norm(p + "attn_norm.weight", d)
        s.norm(p + "ffn_norm.weight", d)
        s.add(p + "attn_q_a.weight", q_lora, d)
        s.norm(p + "attn_q_a_norm.weight", q_lora)
        s.add(p + "attn_q_b.weight", heads * (nope + rope), q_lora)
        s.add(p + "attn_kv_a_mqa.weight", kv_lora + rope, d)
        s.norm(p + "attn_kv_a_norm.weight", kv_lora)
        s.add(p + "attn_k_b.weight", heads, kv_lora, nope)
        s.add(p + "attn_v_b.weight", heads, d_v, kv_lora)
        s.add(p + "attn_output.weight", d, heads * d_v, std=0.004)
        if i < n_dense:
            s.add(p + "ffn_gate.weight", dense_ff, d)
            s.add(p + "ffn_up.weight", dense_ff, d)
            s.add(p + "ffn_down.weight", d, dense_ff, kind=fine)
            continue
        s.add(p + "ffn_gate_inp.weight", experts, d, kind=T.F32)
        s.norm(p + "exp_probs_b.bias", experts, 0.05, 0.0)
        s.add(p + "ffn_gate_exps.weight", experts, ff, d)
        s.add(p + "ffn_up_exps.weight", experts, ff, d)
        s.add(p + "ffn_down_exps.weight", experts, d, ff, kind=fine)
        s.add(p + "ffn_gate_shexp.weight", ff, d)
        s.add(p + "ffn_up_shexp.weight", ff, d)
        s.add(p + "ffn_down_shexp.weight", d, ff, kind=fine)
    return s


MODELS = {
    "qwen3-30b": qwen3,
    "qwen3-235b": qwen3,
    "qwen35-35b": qwen35,
    "gemma4-26b": gemma4,
    "qwen35-397b": qwen35,
    "deepseek-671b": deepseek,
}


def other_routers(args):
    places = {t.name: t for t in gguf.GGUFReader(args.out).tensors if t.name.endswith("ffn_gate_inp.weight")}
    places = {name: (t.data_offset, [int(n) for n in t.shape]) for name, t in places.items()}
    with open(args.out, "r+b") as file:
        for name, (offset, (width, n_expert)) in places.items():
            file.seek(offset)
            file.write(router(name, Fill(args.seed, args.skew, width).rng(name), n_expert, width, args.skew).tobytes())
    print(f"{args.out}: {len(places)} routers with --skew {args.skew}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b")
    parser.add_argument("--layers", type=int, help="the model's when left out")
    parser.add_argument("--vocab", default=str(ROOT / "models" / "fable-29m-a10m-q4_k_m.gguf"))
    parser.add_argument("--n-vocab", type=int, help="the model's when left out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skew", type=float)
    parser.add_argument("--routers-only", action="store_true")
    parser.add_argument("--mtp", type=float, metavar="NOISE")
    parser.add_argument("--hollow", action="store_true")
    args = parser.parse_args()
    if args.routers_only and args.skew is None:
        parser.error("--routers-only wants --skew")
    if args.skew is not None and args.model != "qwen3-30b":
        parser.error("--skew is for qwen3-30b")
    if args.mtp is not None and not args.model.startswith("qwen35"):
        parser.error("--mtp is for qwen35")
    if args.model.startswith("qwen35") and not hasattr(gguf.GGUFWriter, "add_ssm_group_count"):
        parser.error("Qwen3.5's shapes need gguf 0.18 or later: pip install 'gguf>=0.18'")
    if args.routers_only:
        return other_routers(args)
    began = time.monotonic()
    MODELS[args.model](args).write(args.out, args.hollow, args.seed, args.skew, args.mtp)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
