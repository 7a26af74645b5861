#!/usr/bin/env python3
"""Makes the tiny models of crates/backend/tests/data: random weights as GGUF files, and their exact logits.

The witness is transformers (f32, eager attention), the code the models were published with: it shares nothing with this
project, and reads no GGUF file. Names, permutations and rope keys of the GGUF files are written here, as llama.cpp's
converters write them. For quantised files transformers gets the dequantised weights.

    pip install torch transformers gguf safetensors
    python tools/make_tiny_models.py crates/backend/tests/data

Each folder holds model-TYPE.gguf files and golden.safetensors: tokens [n], logits [n, n_vocab] for bf16, logits_TYPE
for the others, greedy [16] after the prompt on bf16. Made with gguf 0.19.0, torch 2.15.0, transformers 5.23.0.
"""
import pathlib
import sys

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter, quants
from safetensors.numpy import save_file

N_TOKENS, N_GREEDY = 40, 16
BASE = dict(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            max_position_embeddings=512, intermediate_size=96, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None)
ROPE = lambda kind, **k: {"rope_type": kind, "rope_theta": 10000.0, **k}

# name: transformers class, GGUF architecture, settings, quantised type beside bf16
MODELS = {
    "llama": ("Llama", "llama", dict(
        tie_word_embeddings=False, attention_bias=True,
        rope_parameters=ROPE("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=64)), T.Q5_1),
    "qwen3": ("Qwen3", "qwen3", dict(
        tie_word_embeddings=True,
        rope_parameters=ROPE("yarn", factor=4.0, original_max_position_embeddings=128)), T.Q8_0),
    "qwen3moe": ("Qwen3Moe", "qwen3moe", dict(
        tie_word_embeddings=False, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True,
        rope_parameters=ROPE("default")), T.Q4_0),
    "mixtral": ("Mixtral", "llama", dict(
        tie_word_embeddings=True, num_local_experts=5, num_experts_per_tok=2, intermediate_size=32, sliding_window=None,
        rope_parameters=ROPE("linear", factor=2.0)), T.Q4_1),
}


def make(name, seed):
    """A model whose activations stay O(1) and whose router is decisive; every weight exact in bf16."""
    cls, _, settings, _ = MODELS[name]
    config = getattr(transformers, cls + "Config")(**{**BASE, **settings})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, cls + "ForCausalLM")(config).float().eval()
    tied = config.tie_word_embeddings
    with torch.no_grad():
        for key, p in model.named_parameters():
            r = torch.randn(p.shape)
            if "embed_tokens" in key:
                p.copy_(r * (0.1 if tied else 1.0))
            elif "lm_head" in key:
                p.copy_(r * 3 / p.shape[-1] ** 0.5)
            elif key == "model.norm.weight" and tied:
                p.copy_((1 + 0.1 * r) * 30 / p.shape[-1] ** 0.5)
            elif p.ndim == 1:
                p.copy_((0.0 if key.endswith("bias") else 1.0) + 0.1 * r)
            elif ".gate.weight" in key:
                p.copy_(r * 2 / p.shape[-1] ** 0.5)
            else:
                p.copy_(r / p.shape[-1] ** 0.5)
            p.copy_(p.to(torch.bfloat16).float())
    return model


def run(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([list(map(int, tokens))]), use_cache=False).logits[0].numpy()


def permute(w, n_head):
    """Rows of q or k so that the pairs of a head, half a head apart in transformers, stand next to each other."""
    return w.reshape(n_head, 2, w.shape[0] // n_head // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def tensors(name, model):
    """GGUF name -> values, slowest axis first."""
    arch, c = MODELS[name][1], model.config
    state = {k: v.float().numpy() for k, v in model.state_dict().items()}
    out = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    if not c.tie_word_embeddings:
        out["output.weight"] = state["lm_head.weight"]
    attn = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
            "q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
    for i in range(c.num_hidden_layers):
        layer = {k.removeprefix(f"model.layers.{i}."): v for k, v in state.items() if k.startswith(f"model.layers.{i}.")}
        blk = f"blk.{i}."
        out[blk + "attn_norm.weight"] = layer.pop("input_layernorm.weight")
        out[blk + "ffn_norm.weight"] = layer.pop("post_attention_layernorm.weight")
        for key in [k for k in layer if k.startswith("self_attn.")]:
            _, part, kind = key.split(".")
            w = layer.pop(key)
            if arch == "llama" and part in ("q_proj", "k_proj"):
                w = permute(w, c.num_attention_heads if part == "q_proj" else c.num_key_value_heads)
            out[f"{blk}{attn[part]}.{kind}"] = w
        experts = {k.split("experts.")[1]: layer.pop(k) for k in list(layer) if "experts." in k}
        if experts:
            (gate,) = [layer.pop(k) for k in list(layer) if k.endswith(".gate.weight")]
            out[blk + "ffn_gate_inp.weight"] = gate
            both = experts.pop("gate_up_proj")
            half = both.shape[1] // 2
            out[blk + "ffn_gate_exps.weight"], out[blk + "ffn_up_exps.weight"] = both[:, :half], both[:, half:]
            out[blk + "ffn_down_exps.weight"] = experts.pop("down_proj")
            assert not experts, experts.keys()
        else:
            for part in ("gate", "up", "down"):
                out[f"{blk}ffn_{part}.weight"] = layer.pop(f"mlp.{part}_proj.weight")
        assert not layer, layer.keys()
    return out


def is_plain(key, w):
    """Norms, biases and routers stay f32."""
    return w.ndim == 1 or "gate_inp" in key or ".gate.weight" in key


def write(path, name, model, dtype):
    arch, c = MODELS[name][1], model.config
    rope = c.rope_parameters
    w = GGUFWriter(path, arch)
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_rope_dimension_count(c.head_dim)
    if rope["rope_type"] in ("yarn", "linear"):
        w.add_string(f"{arch}.rope.scaling.type", rope["rope_type"])
        w.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        plain = 1.0 / rope["rope_theta"] ** (np.arange(0, c.head_dim, 2) / c.head_dim)
        divisors = plain / model.model.rotary_emb.inv_freq.double().numpy()
        w.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    n_expert = getattr(c, "num_experts", None) or getattr(c, "num_local_experts", None)
    if n_expert:
        w.add_expert_count(n_expert)
        w.add_expert_used_count(c.num_experts_per_tok)
        if name == "qwen3moe":
            w.add_expert_feed_forward_length(c.moe_intermediate_size)
    for key, value in tensors(name, model).items():
        value = np.ascontiguousarray(value)
        if is_plain(key, value):
            w.add_tensor(key, value)
        else:
            w.add_tensor(key, quants.quantize(value, dtype), raw_dtype=dtype)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def dequantised(model, dtype):
    """Rounds the weights in place as the file does. Rows are rounded one by one, so their order does not matter."""
    with torch.no_grad():
        for key, p in model.named_parameters():
            if not is_plain(key, p):
                back = quants.dequantize(quants.quantize(p.numpy(), dtype), dtype)
                p.copy_(torch.from_numpy(back.reshape(p.shape)))


def main(out):
    for seed, (name, (_, _, _, dtype)) in enumerate(MODELS.items()):
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        model = make(name, seed)
        tokens = np.random.default_rng(seed).integers(0, BASE["vocab_size"], N_TOKENS)
        golden, all_ids = {"tokens": tokens.astype(np.int32), "logits": run(model, tokens)}, list(tokens)
        margins = []
        for _ in range(N_GREEDY):
            row = run(model, all_ids)[-1]
            margins.append(np.diff(np.sort(row)[-2:])[0])
            all_ids.append(int(row.argmax()))
        golden["greedy"] = np.array(all_ids[N_TOKENS:], np.int32)
        write(folder / "model-bf16.gguf", name, model, T.BF16)
        kind = dtype.name.lower()
        write(folder / f"model-{kind}.gguf", name, model, dtype)
        dequantised(model, dtype)
        golden[f"logits_{kind}"] = run(model, tokens)
        save_file(golden, folder / "golden.safetensors")
        std = golden["logits"].std()
        print(f"{name}: logits std {std:.2f}, least greedy margin {min(margins):.3f}, greedy {golden['greedy'].tolist()}")


main(pathlib.Path(sys.argv[1]))
