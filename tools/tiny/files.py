"""Files of a tiny model: GGUF, folders, and the golden answers."""
import copy
import pathlib

import numpy as np
import torch
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import save_file

from .witness import dequantized, go_on, is_plain, run

DATA = pathlib.Path(__file__).resolve().parents[2] / "crates/conformance/tests/data"
N_TOKENS, N_LONG, EVERY = 40, 1000, 100

# The original code's name of a tensor of a layer, and GGUF's.
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "router.proj": "ffn_gate_inp", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    **{f"mlp.{shared}.{part}_proj": f"ffn_{part}_shexp"
       for shared in ("shared_expert", "shared_experts") for part in ("gate", "up", "down")},
}
# GGUF's name of a tensor of a layer, and the original code's in most architectures.
ORIGINAL = {ours: theirs for theirs, ours in reversed(NAMES.items())} | {"ffn_norm": "post_attention_layernorm"}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
       "output.weight": "lm_head.weight"}


def permute(w, n_head, back=False):
    """Rows of q or k so that the pairs of a head, half a head apart in the original code, are adjacent as in GGUF's
    llama; or back."""
    half = w.shape[0] // n_head // 2
    return w.reshape(n_head, *((half, 2) if back else (2, half)), *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def tensors(model, special, names=None, order=lambda key: 0):
    """GGUF name -> values, slowest axis first. `special(key, w, layer)` gives tensors of another form by their names in
    the layer, and `order` sorts what a layer has."""
    state = {k: v.float().numpy() for k, v in model.state_dict().items()}
    out = {ours: state[theirs] for ours, theirs in TOP.items()}
    if model.config.tie_word_embeddings:
        del out["output.weight"]
    names = NAMES | (names or {})
    for i in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        layer = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        for key in sorted(layer, key=order):
            w = layer[key]
            module, _, kind = key.rpartition(".")
            found = special(key, w, layer)
            if found is None and key.endswith("experts.gate_up_proj"):
                half = w.shape[1] // 2
                found = {"ffn_gate_exps.weight": w[:, :half], "ffn_up_exps.weight": w[:, half:]}
            elif found is None and key.endswith("experts.down_proj"):
                found = {"ffn_down_exps.weight": w}
            elif found is None:
                found = {f"{names[module]}.{kind}": w}
            out |= {f"blk.{i}.{name}": w for name, w in found.items()}
    return out


def uncentred(found):
    """The same with 1 added to norms that the original code stores as w - 1; those of delta nets are none of them."""
    is_norm = lambda name: name.endswith("norm.weight") and "ssm" not in name
    return {name: w + np.float32(1) if is_norm(name) else w for name, w in found.items()}


def open_gguf(path, arch, c, n_extra=0):
    """A GGUF file with the keys that every architecture has; `n_extra` layers predict further tokens."""
    w = GGUFWriter(path, arch)
    w.add_block_count(c.num_hidden_layers + n_extra)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    return w


def close_gguf(w, found, dtype):
    """Adds these tensors, matrices in this type, and writes the file."""
    for key, value in found.items():
        value = np.ascontiguousarray(value)
        if is_plain(key, value):
            w.add_tensor(key, value)
        else:
            w.add_tensor(key, quantize(value, dtype), raw_dtype=dtype)
    finish(w)


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_folder(folder, model):
    """The model as its publishers would store it: config.json and bf16 safetensors."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink()


def save(arrays, path):
    """A file of arrays that others may read: the library makes it private."""
    save_file(arrays, path)
    path.chmod(0o644)


def answers(model, tokens, long=None):
    """Exact answers on a prompt, every hundredth row of those on a long one, and the margins of greedy tokens."""
    golden = {"tokens": tokens.astype(np.int32), "logits": run(model, tokens)}
    golden["greedy"], margins = go_on(model, tokens)
    if long is not None:
        rows = np.ascontiguousarray(run(model, long)[EVERY - 1::EVERY])
        golden |= {"long_tokens": long.astype(np.int32), "long_logits": rows}
    return golden, margins


def prompts(seed, n_vocab):
    """A prompt, and a long one."""
    random = np.random.default_rng(seed)
    return tuple(random.integers(0, n_vocab, n) for n in (N_TOKENS, N_LONG))


def make(name, model, dtype, golden, write, folder=write_folder, more=lambda path: {}):
    """Makes the folder of a model: files in bf16 and in `dtype` (`write(path, dtype)`), the original's folder, and the
    answers on each. `more` makes other forms, and gives their answers."""
    path = DATA / name
    path.mkdir(parents=True, exist_ok=True)
    golden, margins = golden
    kind = dtype.name.lower()
    write(path / "model-bf16.gguf", T.BF16)
    if folder:
        folder(path / "hf", model)
    write(path / f"model-{kind}.gguf", dtype)
    golden |= more(path)
    dequantized(model, dtype)
    golden[f"logits_{kind}"] = run(model, golden["tokens"])
    save(golden, path / "golden.safetensors")
    for weights in path.rglob("*.safetensors"):
        weights.chmod(0o644)
    print(f"{name:24} std {golden['logits'].std():.2f}  margin {margins.min():.3f}", flush=True)
