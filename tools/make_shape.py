#!/usr/bin/env python3
"""Random-weight GGUF in the exact shape of Qwen3-30B-A3B, with the type mix that quantisers call Q4_K_M.

  make_shape.py --out FILE.gguf [--layers 48] [--vocab FILE.gguf] [--seed 1] [--skew S]
  make_shape.py --out FILE.gguf --layers 48 --skew S --routers-only     # other routers for a file made with --skew

For speed and memory only: weights are random quants of zero mean and std 0.02 under sane block scales. The file streams to disk, peak
RAM is about 0.5 GB.
--skew S gives every expert a bias of standard deviation S on its logit (noise: 0.9): 0 chooses all equally often, 0.5 gives the top
quarter of 128 experts 60% of the tokens. The shape has no tensor for it, so the first 32 channels of the residual stream are one
constant, which no layer writes to and routers read. Embeddings outweigh what layers add, so that tokens and not contexts choose.
The vocabulary is that of --vocab (the embedded model's when left out), filled up to Qwen3's 151,936 tokens.
Needs: pip install gguf numpy.
"""
import argparse
import pathlib
import time
import zlib

import numpy as np
import gguf
from gguf import GGMLQuantizationType as T

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("--layers", type=int, default=4)
ap.add_argument("--out", required=True)
ap.add_argument("--vocab", default=str(pathlib.Path(__file__).parent.parent / "models/fable-29m-a10m-q4_k_m.gguf"))
ap.add_argument("--n-vocab", type=int, default=151936)
ap.add_argument("--seed", type=int, default=1)
ap.add_argument("--std", type=float, default=0.02)
ap.add_argument("--hidden", type=int, default=2048)
ap.add_argument("--heads", type=int, default=32)
ap.add_argument("--kv-heads", type=int, default=4)
ap.add_argument("--head-dim", type=int, default=128)
ap.add_argument("--experts", type=int, default=128)
ap.add_argument("--top-k", type=int, default=8)
ap.add_argument("--moe-ff", type=int, default=768)
ap.add_argument("--skew", type=float)
ap.add_argument("--routers-only", action="store_true")
a = ap.parse_args()
if a.routers_only and a.skew is None:
    ap.error("--routers-only wants --skew")
H, L, NE, FF = a.hidden, a.layers, a.experts, a.moe_ff
QD, KD = a.heads * a.head_dim, a.kv_heads * a.head_dim

def rng_for(name):  # same bytes for the same tensor name whatever --layers is
    return np.random.Generator(np.random.SFC64([a.seed, zlib.crc32(name.encode())]))

def rnd(rng, n):
    return np.frombuffer(bytearray(rng.bytes(n)), dtype=np.uint8)

CONSTANT = 32  # channels of the residual stream that --skew keeps constant: a sub-block of Q4_K

def q4_k(rng, n, std):
    nb = n // 256
    b = rnd(rng, nb * 144).reshape(nb, 144)
    sc = rng.integers(32, 64, (nb, 8), dtype=np.uint8)      # 6-bit scales; mins = scales, so w = d*sc*(q-7.5)
    d = (std / (47.5 * 4.61) * rng.uniform(0.8, 1.2, nb)).astype(np.float16)
    b[:, 0:2] = d.view(np.uint8).reshape(nb, 2)
    b[:, 2:4] = (d.astype(np.float32) * 7.5).astype(np.float16).view(np.uint8).reshape(nb, 2)
    lo, hi = sc[:, :4], sc[:, 4:]
    b[:, 4:8] = lo | ((hi >> 4) << 6)
    b[:, 8:12] = lo | ((hi >> 4) << 6)
    b[:, 12:16] = (hi & 15) | ((hi & 15) << 4)
    return b

def q6_k(rng, n, std):
    nb = n // 256
    b = rnd(rng, nb * 210).reshape(nb, 210)
    sc = rng.integers(64, 128, (nb, 16), dtype=np.int16) * rng.choice(np.array([-1, 1], np.int16), (nb, 16))
    b[:, 192:208] = sc.astype(np.int8).view(np.uint8)
    d = (std / (95.5 * 18.47) * rng.uniform(0.8, 1.2, nb)).astype(np.float16)
    b[:, 208:210] = d.view(np.uint8).reshape(nb, 2)
    return b

def q8_0(rng, n, std):
    nb = n // 32
    b = rnd(rng, nb * 34).reshape(nb, 34)
    b[:, 0:2] = (std / 73.9 * rng.uniform(0.8, 1.2, nb)).astype(np.float16).view(np.uint8).reshape(nb, 2)
    return b

def embedding(rng, n, hidden):
    """Rows of std 1 whose first 32 values are CHANNEL."""
    b = q4_k(rng, n, 1.0).reshape(-1, hidden // 256, 144)
    first = b[:, 0]
    scale = 1 / (47.5 * 4.61)
    first[:, 0:4] = np.frombuffer(np.array([scale, 7.5 * scale], np.float16).tobytes(), np.uint8)
    for at in (4, 8):  # scale and minimum of the first sub-block: 63
        first[:, at] = 63 | (first[:, at] & 0xC0)
    first[:, 16:48] |= 15  # low nibbles: its values
    return b

CHANNEL = 63 * 7.5 / (47.5 * 4.61)  # what `embedding` gives

def router(name, rng, n_expert, hidden):
    """Logits of std 0.9, and a bias of std --skew for each expert by way of the constant channels."""
    x = 0.02 * rng.standard_normal((n_expert, hidden))
    layer = int(name.split(".")[1])
    # What the norm divides by: the embedding and what the layers before have added.
    rms = np.sqrt(1 + CONSTANT * CHANNEL**2 / hidden + 0.056 * layer)
    bias = a.skew * rng.standard_normal(n_expert)
    x[:, :CONSTANT] = (bias * rms / (CONSTANT * CHANNEL))[:, None]
    return x.astype(np.float32)

MK = {T.Q4_K: (q4_k, 256, 144), T.Q6_K: (q6_k, 256, 210), T.Q8_0: (q8_0, 32, 34)}

def more_bits(i, n):  # llama-quant.cpp use_more_bits
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2

if a.routers_only:
    places = {t.name: t.data_offset for t in gguf.GGUFReader(a.out).tensors if t.name.endswith("ffn_gate_inp.weight")}
    with open(a.out, "r+b") as f:
        for name, offset in places.items():
            f.seek(offset)
            f.write(router(name, rng_for(name), NE, H).tobytes())
    print(f"{a.out}: {len(places)} routers with --skew {a.skew}")
    raise SystemExit

V = 0
w = gguf.GGUFWriter(a.out, "qwen3moe", use_temp_file=False)
r = gguf.GGUFReader(a.vocab)
w.add_name(f"Qwen3-30B-A3B-shape random {L} layers")
w.add_block_count(L); w.add_context_length(40960); w.add_embedding_length(H)
w.add_feed_forward_length(6144); w.add_head_count(a.heads); w.add_head_count_kv(a.kv_heads)
w.add_rope_freq_base(1e6); w.add_layer_norm_rms_eps(1e-6)
w.add_key_length(a.head_dim); w.add_value_length(a.head_dim)
w.add_expert_count(NE); w.add_expert_used_count(a.top_k); w.add_expert_feed_forward_length(FF)
w.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M); w.add_quantization_version(2)
for k in ("tokenizer.ggml.model", "tokenizer.ggml.pre"):
    w.add_string(k, r.fields[k].contents())
toks = [bytes(r.fields["tokenizer.ggml.tokens"].parts[i]) for i in r.fields["tokenizer.ggml.tokens"].data]
types = list(r.fields["tokenizer.ggml.token_type"].contents())
assert len(toks) <= a.n_vocab, f"--vocab has {len(toks)} tokens, more than {a.n_vocab}"
toks += [b"<|unused%d|>" % i for i in range(len(toks), a.n_vocab)]
types += [5] * (a.n_vocab - len(types))  # 5: unused
V = len(toks)
w.add_token_list(toks)
w.add_token_types(types)
w.add_token_merges(r.fields["tokenizer.ggml.merges"].contents())
w.add_eos_token_id(r.fields["tokenizer.ggml.eos_token_id"].contents() if "tokenizer.ggml.eos_token_id" in r.fields else V - 1)
w.add_add_bos_token(False)
w.add_chat_template("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

ts = [("output.weight", (V, H), T.Q6_K), ("output_norm.weight", (H,), T.F32), ("token_embd.weight", (V, H), T.Q4_K)]
for i in range(L):
    p = f"blk.{i}."
    hb = T.Q6_K if more_bits(i, L) else T.Q4_K
    ts += [(p + "attn_k.weight", (KD, H), T.Q4_K), (p + "attn_k_norm.weight", (a.head_dim,), T.F32),
           (p + "attn_norm.weight", (H,), T.F32), (p + "attn_output.weight", (H, QD), T.Q4_K),
           (p + "attn_q.weight", (QD, H), T.Q4_K), (p + "attn_q_norm.weight", (a.head_dim,), T.F32),
           (p + "attn_v.weight", (KD, H), hb), (p + "ffn_down_exps.weight", (NE, H, FF), hb),
           (p + "ffn_gate_exps.weight", (NE, FF, H), T.Q4_K), (p + "ffn_gate_inp.weight", (NE, H), T.F32),
           (p + "ffn_norm.weight", (H,), T.F32), (p + "ffn_up_exps.weight", (NE, FF, H), T.Q4_K)]
for name, shape, t in ts:
    if t == T.F32:
        w.add_tensor_info(name, shape, np.dtype(np.float32), int(np.prod(shape)) * 4)
    else:
        _, bs, by = MK[t]
        bshape = (*shape[:-1], shape[-1] // bs * by)
        w.add_tensor_info(name, bshape, np.dtype(np.uint8), int(np.prod(bshape)), raw_dtype=t)
t0 = time.time()
w.write_header_to_file(); w.write_kv_data_to_file(); w.write_ti_data_to_file()
tot = act = 0
for name, shape, t in ts:
    g = rng_for(name)
    if t == T.F32:
        if len(shape) == 1:
            x = (1 + 0.05 * g.standard_normal(shape)).astype(np.float32)
            if a.skew is not None and name.endswith("ffn_norm.weight"):
                x[:CONSTANT] = 1
        elif a.skew is not None:
            x = router(name, g, *shape)
        else:
            x = (0.02 * g.standard_normal(shape)).astype(np.float32)
    elif a.skew is not None and name == "token_embd.weight":
        x = embedding(g, V * H, H).reshape(-1)
    else:
        is_output = a.skew is not None and name.endswith("attn_output.weight")
        x = MK[t][0](g, int(np.prod(shape)), 0.004 if is_output else a.std)
        if a.skew is not None and (is_output or "ffn_down_exps" in name):
            # Rows of the constant channels add nothing: blocks of scale 0.
            scales = slice(0, 4) if t == T.Q4_K else slice(208, 210)
            x.reshape(-1, H, shape[-1] // 256, x.shape[-1])[:, :CONSTANT, :, scales] = 0
        x = x.reshape(-1)
    if t != T.F32:
        _, bs, by = MK[t]; x = x.reshape(*shape[:-1], shape[-1] // bs * by)
    w.write_tensor_data(x)
    tot += x.nbytes
    act += 0 if name == "token_embd.weight" else x.nbytes * a.top_k // NE if "_exps" in name else x.nbytes
w.close()
print(f"{a.out}: {tot/1e9:.3f} GB weights, active {act/1e6:.1f} MB/token (all but token_embd; experts x {a.top_k}/{NE}), {time.time()-t0:.0f} s")
