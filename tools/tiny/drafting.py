"""qwen35_mtp, deepseekv3_mtp: folders with a layer for multi-token prediction and a tokenizer of bytes.

Answers of the layer are those of its parts in transformers. Row t of `mtp_logits` is what it says of token t + 2, given
the model's hidden state of position t after the last norm and token t + 1; its position is t + 1 and sees rows 0
to t. Row t of `mtp_logits_2` is what it says of token t + 3, given its own hidden state of row t after its last norm and
the likeliest token of `mtp_logits[t]`.

    pip install torch==2.15.0 transformers==5.24.0 numpy==2.4.6 safetensors gguf
    cd tools && python -m tiny.drafting [NAME]..
"""
import copy
import json
import shutil
import sys
import tempfile
import zlib

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer

from .files import DATA, save
from .new import MIN_GAP, MIN_MARGIN, N_SEEDS, choices
from .published import base, experts, load, randomize, run, scale, write_config

N_TOKENS = 24
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(5))]
N_VOCAB = 256 + len(SPECIAL)
END = 256 + SPECIAL.index("<|im_end|>")


def qwen35():
    text = base("qwen3_5_text", None, 4, 4, 2, 16, attn_output_gate=True, full_attention_interval=2,
                layer_types=["linear_attention", "full_attention"] * 2, linear_conv_kernel_dim=4,
                linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
                mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, attention_bias=False,
                rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.5,
                                     mrope_section=[2, 1, 1], mrope_interleaved=True))
    text |= dict(vocab_size=N_VOCAB, eos_token_id=END)
    del text["architectures"]
    return dict(architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", text_config=text,
                image_token_id=8, video_token_id=9, vision_start_token_id=10, vision_end_token_id=11,
                tie_word_embeddings=False)


def deepseekv3():
    return base("deepseek_v3", "DeepseekV3ForCausalLM", 3, 4, 4, **experts() | dict(
        n_group=3, topk_group=2, num_nextn_predict_layers=1, moe_layer_freq=1, attention_bias=False,
        q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, rope_theta=10000,
        rope_scaling=dict(type="yarn", factor=4, original_max_position_embeddings=1024, beta_fast=32, beta_slow=1,
                          mscale=1.0, mscale_all_dim=1.0), vocab_size=N_VOCAB, eos_token_id=END))


MODELS = {"qwen35_mtp": (qwen35, transformers.Qwen3_5ForCausalLM),
          "deepseekv3_mtp": (deepseekv3, transformers.DeepseekV3ForCausalLM)}


def draft_layer(model, seed):
    """The layer, with random weights."""
    config = copy.deepcopy(model.config)
    if "qwen" in config.model_type:
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
    else:
        config = config.get_mtp_config()
    config._attn_implementation = config._experts_implementation = "eager"
    layer = MtpLayer(config, type(model.model.layers[-1]), type(model.model.norm), 0).float().eval()
    if hasattr(layer.mtp_block.mlp, "experts"):
        layer.mtp_block.mlp.experts.config = config
    layer.config = config
    randomize(layer, seed, 1.0)
    return layer


def named(layer, model, weights):
    """The layer's tensors by their published names."""
    n = model.config.num_hidden_layers
    if "qwen" in model.config.model_type:
        front, own = "mtp.layers.0.", dict(eh_proj="mtp.fc", enorm="mtp.pre_fc_norm_embedding",
                                           hnorm="mtp.pre_fc_norm_hidden", post_norm="mtp.norm")
        out = {}
    else:
        front = f"model.layers.{n}."
        own = {part: front + part for part in ("eh_proj", "enorm", "hnorm")} | {"post_norm": f"{front}shared_head.norm"}
        # Published files repeat both tables.
        out = {f"{front}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
               f"{front}shared_head.head.weight": weights["lm_head.weight"].clone()}
    for key, w in layer.state_dict().items():
        part, _, rest = key.partition(".")
        if part != "mtp_block":
            out[f"{own[part]}.{rest}"] = w
        elif rest.endswith("experts.gate_up_proj"):
            for i, pair in enumerate(w):
                for name, half in zip(("gate", "up"), pair.chunk(2)):
                    out[front + rest.replace("gate_up_proj", f"{i}.{name}_proj.weight")] = half.contiguous()
        elif rest.endswith("experts.down_proj"):
            for i, down in enumerate(w):
                out[front + rest.replace("down_proj", f"{i}.down_proj.weight")] = down.clone()
        else:
            out[front + rest] = w
    return {key: w.to(torch.bfloat16) for key, w in out.items()}


def answers(model, layer, tokens):
    """`mtp_logits` and `mtp_logits_2`."""
    def rows(ids, hidden):
        x, n = model.get_input_embeddings()(ids[None]), len(ids)
        at = torch.arange(1, n + 1)[None]
        mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
        return layer(x, hidden[None], position_embeddings=model.model.rotary_emb(x, position_ids=at),
                     attention_mask=mask, position_ids=at, cache=None)[0]

    with torch.no_grad():
        t = torch.tensor(tokens)
        hidden = model.model(input_ids=t[None], use_cache=False).last_hidden_state[0]
        own = rows(t[1:], hidden[:-1])
        first, second = model.lm_head(own), []
        for i in range(len(t) - 1):
            ids = torch.cat([t[1:i + 2], first[i].argmax()[None]])
            second.append(model.lm_head(rows(ids, torch.cat([hidden[:i + 1], own[i:i + 1]]))[-1]))
    return first.numpy(), torch.stack(second).numpy()


def tokenizer(folder):
    """One token a byte, and some that no text holds."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    name = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    added = [dict(id=256 + i, content=text, single_word=False, lstrip=False, rstrip=False, normalized=False,
                  special=True) for i, text in enumerate(SPECIAL)]
    model = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
                 fuse_unk=False, byte_fallback=False, vocab={name[byte]: byte for byte in range(256)}, merges=[])
    whole = dict(version="1.0", truncation=None, padding=None, added_tokens=added, normalizer=None,
                 pre_tokenizer=level, post_processor=None, decoder=level, model=model)
    config = dict(clean_up_tokenization_spaces=False, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                  tokenizer_class="PreTrainedTokenizerFast")
    for file, value in [("tokenizer.json", whole), ("tokenizer_config.json", config)]:
        (folder / file).write_text(json.dumps(value, ensure_ascii=False) + "\n")


def build(name):
    make, cls = MODELS[name]
    config = make()
    path = DATA / name
    shutil.rmtree(path, ignore_errors=True)
    (path / "hf").mkdir(parents=True)
    for attempt in range(N_SEEDS):
        seed = attempt * 1000 + zlib.crc32(name.encode()) % 1000
        tokens = np.random.default_rng(seed).integers(12, 256, N_TOKENS)
        gaps = [1.0]
        with tempfile.TemporaryDirectory() as folder:
            write_config(folder, config.get("text_config", config))
            torch.manual_seed(seed)
            plain = transformers.AutoConfig.from_pretrained(folder)
            plain._attn_implementation = "eager"
            model = cls(plain).float().eval()
            randomize(model, seed, 1.0)
            scale(model, tokens, tied=False)
            model.to(torch.bfloat16).save_pretrained(folder)
            weights = load_file(f"{folder}/model.safetensors")
            write_config(folder, config.get("text_config", config))
            model = load(cls, folder)
        layer = draft_layer(model, seed + 1)
        with choices(gaps):
            logits, (first, second) = run(model, tokens), answers(model, layer, tokens)
        if min(gaps) > MIN_GAP and np.diff(np.sort(first)[:, -2:]).min() > MIN_MARGIN:
            break
    else:
        raise SystemExit(f"{name}: no seed below {N_SEEDS} keeps its choices apart")
    weights |= named(layer, model, weights)
    if "text_config" in config:
        weights = {key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key: w
                   for key, w in weights.items()}
    write_config(path / "hf", config)
    tokenizer(path / "hf")
    save_file(weights, path / "hf/model.safetensors", {"format": "pt"})
    (path / "hf/model.safetensors").chmod(0o644)
    save({"tokens": tokens.astype(np.int32), "logits": logits, "mtp_logits": first, "mtp_logits_2": second},
         path / "golden.safetensors")
    size = (path / "hf/model.safetensors").stat().st_size
    print(f"{name}: {size / 1e3:.0f} kB, deviation {logits.std():.2f} and {first.std():.2f}, seed {seed}", flush=True)


def main(names):
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in names or MODELS:
        build(name)


if __name__ == "__main__":
    main(sys.argv[1:])
