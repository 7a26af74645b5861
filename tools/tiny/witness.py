"""The witness: the original model code, its weights, and what it answers."""
import numpy as np
import torch
import transformers
from gguf.quants import dequantize, quantize

N_GREEDY = 16


def original(cls, config=None, **settings):
    """The original model code with these settings; `config` names its configuration where that is not the class's."""
    config = getattr(transformers, config or cls + "Config")(**settings)
    return build(cls, config)


def build(cls, config):
    """The original model code of a configuration, computing as plainly as it can."""
    config._attn_implementation = "eager"
    model = getattr(transformers, cls + "ForCausalLM")(config).float().eval()
    if any("experts" in key for key, _ in model.named_parameters()):
        model.set_experts_implementation("eager")
    return model


def run(model, ids):
    """Logits of every position, [n, n_vocab]."""
    with torch.no_grad():
        return model(torch.tensor([list(map(int, ids))]), use_cache=False).logits[0].float().numpy()


def go_on(model, ids):
    """The greedy tokens after `ids`, and by how much each was the best."""
    ids, margins = list(ids), []
    for _ in range(N_GREEDY):
        row = run(model, ids)[-1]
        margins.append(np.diff(np.sort(row)[-2:])[0])
        ids.append(int(row.argmax()))
    return np.array(ids[-N_GREEDY:], np.int32), np.array(margins, np.float32)


def is_plain(key, w):
    """Norms, biases, sinks, routers and convolutions stay f32."""
    parts = ("gate_inp", ".gate.weight", "shared_expert_gate", "conv1d", "router")
    return w.ndim == 1 or key.endswith("bias") or any(part in key for part in parts)


def is_transposed(model, key):
    """Whether a matrix has its columns where others have their rows: gpt-oss's experts."""
    return model.config.model_type == "gpt_oss" and "experts" in key


def randomize(model, special=lambda key, p, r: None):
    """Random weights, exact in bf16, with which activations stay O(1) and the router is decisive. `special` gives the
    values of what wants others, from normal deviates."""
    tied = model.config.tie_word_embeddings
    buffers = ("layer_scalar", "e_score_correction_bias")
    with torch.no_grad():
        for key, p in [*model.named_parameters(), *(b for b in model.named_buffers() if b[0].endswith(buffers))]:
            r = torch.randn(p.shape)
            root = p.shape[-2 if is_transposed(model, key) else -1] ** 0.5
            value = special(key, p, r)
            if value is not None:
                p.copy_(value)
            elif "embed_tokens" in key:
                p.copy_(r * (0.1 if tied else 1.0))
            elif "lm_head" in key:
                p.copy_(r * 3 / root)
            elif key == "model.norm.weight" and tied:
                # A tied table has small rows: the last norm makes up for it.
                p.copy_((1 + 0.1 * r) * 30 / root)
            elif p.ndim == 1 or key.endswith("_bias"):
                p.copy_((0.0 if key.endswith("bias") else 1.0) + 0.1 * r)
            elif ".gate.weight" in key or "router" in key:
                p.copy_(r * 2 / root)
            else:
                p.copy_(r / root)
            p.copy_(p.to(torch.bfloat16).float())
    return model


def dequantized(model, dtype):
    """Rounds the weights in place as the file does. Rows are rounded one by one, so their order does not matter."""
    with torch.no_grad():
        for key, p in model.named_parameters():
            if is_plain(key, p):
                continue
            turn = (lambda w: np.swapaxes(w, -1, -2)) if is_transposed(model, key) else lambda w: w
            w = np.ascontiguousarray(turn(p.numpy()))
            back = dequantize(quantize(w, dtype), dtype).reshape(w.shape)
            p.copy_(torch.from_numpy(np.ascontiguousarray(turn(back))))
