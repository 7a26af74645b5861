"""Tiny random encoders of whole texts besides BERT, whose witness is transformers and, for the vectors of models with
modules after the pooling, sentence-transformers. Files are as those of `encoders.py`.

    pip install sentence-transformers==6.2.0
    cd tools && python -m tiny.embedders [NAME]..
"""

import copy
import json
import sys

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (Gemma3TextConfig, Gemma3TextModel, ModernBertConfig, ModernBertModel, NomicBertConfig,
                          NomicBertModel)

from .encoders import OUT, TEXTS, bert_tokenizer, numbers, randomize, write_pieces

# Words that become tokens, by rank.
WORDS = "the fox dog jumps over lazy quick brown ranking naive caf in er an th qu ow".split()
LONG = "the quick brown fox jumps over the lazy dog " * 3


def grown(words, n):
    """The first `n` pieces that grow into these words, letter by letter from the left, and their merges: every way to
    cut a piece in two, so that ranks alone decide."""
    pieces = list(dict.fromkeys(word[:i] for word in words for i in range(2, len(word) + 1)))[:n]
    known = set(pieces)

    def cuts(piece):
        return [(a, b) for i in range(1, len(piece))
                for a, b in [(piece[:i], piece[i:])] if all(len(x) == 1 or x in known for x in (a, b))]

    return pieces, [cut for piece in pieces for cut in cuts(piece)]


def gemma_tokenizer():
    pieces, merges = grown(["▁" + word for word in WORDS], 60)
    singles = "▁abcdefghijklmnopqrstuvwxyzTC.,!"
    vocab = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{i:02X}>" for i in range(256)), *singles, *pieces]
    model = models.BPE({text: i for i, text in enumerate(vocab)}, merges, unk_token="<unk>", byte_fallback=True,
                       fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> $B <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)])
    tokenizer.add_special_tokens(vocab[:5])
    return tokenizer, vocab


def write_sentencepiece(writer, vocab):
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocab)
    first = next(i for i, text in enumerate(vocab) if len(text) > 1 and not text.startswith("<"))
    writer.add_token_scores([0.0 if i < first else float(first - i) for i in range(len(vocab))])
    kinds = [3, 3, 3, 2, 3] + [6] * 256
    writer.add_token_types(kinds + [1] * (len(vocab) - len(kinds)))
    for i, role in enumerate(["padding", "eos", "bos", "unknown", "mask"]):
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", i)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_add_space_prefix(False)


def byte_tokenizer():
    """Bytes as characters; the marks come after all others."""
    pieces, merges = grown(["Ġ" + word for word in WORDS], 60)
    marks = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    vocab = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *pieces, *marks]
    ids = {text: i for i, text in enumerate(vocab)}
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])])
    tokenizer.add_special_tokens(marks)
    return tokenizer, vocab, merges


def write_bytes(writer, vocab, merges):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("modern-bert")
    writer.add_token_list(vocab)
    writer.add_token_types([1] * (len(vocab) - 5) + [3] * 5)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    for role, mark in [("bos", "[CLS]"), ("eos", "[SEP]"), ("unknown", "[UNK]"), ("seperator", "[SEP]"),
                       ("padding", "[PAD]"), ("cls", "[CLS]"), ("mask", "[MASK]")]:
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", vocab.index(mark))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_add_sep_token(True)


def save_folder(folder, model, tokenizer, marks, pooling, dense=()):
    """A folder of sentence-transformers; `marks` are its special tokens by their roles."""
    folder.mkdir(parents=True, exist_ok=True)
    # A copy: tables in half precision do not become what they were.
    half = copy.deepcopy(model).half()
    half.config.dtype = "float16"
    half.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {"tokenizer_class": "PreTrainedTokenizerFast"} | {f"{role}_token": at for role, at in marks.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    width = model.config.hidden_size
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    settings = {"1_Pooling": {"embedding_dimension": width, "pooling_mode": pooling, "include_prompt": True}}
    for i, (w, bias) in enumerate(dense):
        path = f"{2 + i}_Dense"
        kinds.append((path, "Dense"))
        settings[path] = {"in_features": w.shape[1], "out_features": w.shape[0], "bias": bias is not None,
                          "activation_function": "torch.nn.modules.linear.Identity"}
        (folder / path).mkdir(exist_ok=True)
        tensors = {"linear.weight": w.half().contiguous()} | ({} if bias is None else {"linear.bias": bias.half()})
        save_file(tensors, folder / path / "model.safetensors")
    kinds.append((f"{len(kinds)}_Normalize", "Normalize"))
    for path, values in settings.items():
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(values))
    modules = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
               for i, (path, kind) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))


def golden(name, texts, tokenizer, model, pooling, dense=()):
    """Rows of transformers after the dense modules, and vectors of sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    whole = SentenceTransformer(str(OUT / name / "hf"), device="cpu", model_kwargs={"dtype": torch.float32},
                                local_files_only=True)
    out = []
    for text in texts:
        ids = tokenizer.encode(text).ids
        with torch.no_grad():
            rows = model(torch.tensor([ids])).last_hidden_state[0].double()
            for w, bias in dense:
                rows = rows @ w.double().T + (0 if bias is None else bias.double())
        vector = torch.tensor(whole.encode(text)).double()
        pooled = {"mean": rows.mean(0), "cls": rows[0]}[pooling]
        # The mean of products is the product of the mean.
        assert (pooled / pooled.norm() - vector).abs().max() < 1e-6, name
        at = sorted({0, 1, len(ids) // 2, len(ids) - 1})
        out.append({"text": text, "ids": ids, "at": at, "rows": numbers(rows[at]), "vector": numbers(vector)})
        assert len(ids) <= model.config.max_position_embeddings, (text, len(ids))
    (OUT / name / "golden.json").write_text(json.dumps({"texts": out}, ensure_ascii=False))


def start_gguf(path, arch, config):
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    return writer


def finish_gguf(writer, state, rename, more=()):
    """Writes the tensors by `rename`'s names, matrices in half precision."""
    tensors = [(rename(name), tensor) for name, tensor in state.items()]
    for name, tensor in [*tensors, *more]:
        half = tensor.dim() == 2 and "token_types" not in name
        writer.add_tensor(name, tensor.numpy().astype(np.float16 if half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def replaced(name, pairs):
    for old, new in pairs:
        name = name.replace(old, new)
    return name


GEMMA = [
    ("embed_tokens.", "token_embd."), ("layers.", "blk."), ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm"), ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "post_attention_norm"), ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"), ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
]


def gemma_embedding():
    """EmbeddingGemma: a window on every layer but the sixth, and two matrices after the mean."""
    tokenizer, vocab = gemma_tokenizer()
    config = Gemma3TextConfig(
        vocab_size=len(vocab), hidden_size=18, intermediate_size=20, num_hidden_layers=7, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, query_pre_attn_scalar=8, max_position_embeddings=40, sliding_window=10,
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1000.0},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 30.0}},
        use_bidirectional_attention=True, pad_token_id=0, eos_token_id=1, bos_token_id=2, attn_implementation="eager")
    model = randomize(Gemma3TextModel(config), 21)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:  # These are stored without their 1.
                p.sub_(1.0).copy_(p.half().float())
    torch.manual_seed(22)
    dense = [((0.15 * torch.randn(28, 18)).half().float(), None), ((0.15 * torch.randn(12, 28)).half().float(), None)]
    marks = {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
    name = "gemma_embedding"
    save_folder(OUT / name / "hf", model, tokenizer, marks, "mean", dense)
    golden(name, [*TEXTS, LONG], tokenizer, model, "mean", dense)

    writer = start_gguf(OUT / name / "model-f16.gguf", "gemma-embedding", config)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1000.0)
    writer.add_rope_freq_base_swa(30.0)
    # That of the file, not the half that the configuration makes of it.
    writer.add_sliding_window(config.to_dict()["sliding_window"])
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    for i, (w, _) in enumerate(dense):
        writer.add_dense_features_dims(f"dense_{2 + i}", w.shape[1], w.shape[0])
    write_sentencepiece(writer, vocab)
    state = {name: tensor + name.endswith("norm.weight") for name, tensor in model.state_dict().items()}
    rename = lambda name: "output_norm.weight" if name == "norm.weight" else replaced(name, GEMMA)
    finish_gguf(writer, state, rename, [(f"dense_{2 + i}.weight", w) for i, (w, _) in enumerate(dense)])


MODERN = [
    ("embeddings.tok_embeddings", "token_embd"), ("embeddings.norm", "token_embd_norm"), ("final_norm", "output_norm"),
    ("layers.", "blk."), ("attn.Wqkv", "attn_qkv"), ("attn.Wo", "attn_output"), ("mlp_norm", "ffn_norm"),
    ("mlp.Wi", "ffn_up"), ("mlp.Wo", "ffn_down"),
]


def modern_bert():
    """ModernBERT: all is seen by the first of every three layers. The configuration is one of those on the hub, from
    before lists of layers."""
    tokenizer, vocab, merges = byte_tokenizer()
    marks = {role: f"[{role.upper()}]" for role in ["unk", "cls", "sep", "pad", "mask"]}
    ids = {role: vocab.index(mark) for role, mark in marks.items()}
    config = ModernBertConfig(
        vocab_size=len(vocab), hidden_size=24, intermediate_size=20, num_hidden_layers=5, num_attention_heads=3,
        max_position_embeddings=40, local_attention=10, global_rope_theta=1000.0, local_rope_theta=30.0,
        pad_token_id=ids["pad"], cls_token_id=ids["cls"], sep_token_id=ids["sep"], bos_token_id=ids["cls"],
        eos_token_id=ids["sep"], attn_implementation="eager")
    model = randomize(ModernBertModel(config), 23)
    name = "modern_bert"
    save_folder(OUT / name / "hf", model, tokenizer, marks, "cls")
    path = OUT / name / "hf/config.json"
    saved = {key: value for key, value in json.loads(path.read_text()).items()
             if key not in ["layer_types", "rope_parameters"]}
    saved |= {"global_attn_every_n_layers": 3, "global_rope_theta": 1000.0, "local_rope_theta": 30.0}
    path.write_text(json.dumps(saved, indent=1))
    golden(name, [*TEXTS, LONG], tokenizer, model, "cls")

    writer = start_gguf(OUT / name / "model-f16.gguf", "modern-bert", config)
    writer.add_layer_norm_eps(config.norm_eps)
    writer.add_rope_freq_base(1000.0)
    writer.add_rope_freq_base_swa(30.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_sliding_window(config.local_attention)
    writer.add_sliding_window_pattern(3)
    writer.add_string("modern-bert.hidden_activation", config.hidden_activation)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.CLS)
    write_bytes(writer, vocab, merges)
    finish_gguf(writer, model.state_dict(), lambda name: replaced(name, MODERN))


NOMIC = [
    ("embeddings.word_embeddings", "token_embd"), ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.LayerNorm", "token_embd_norm"), ("layers.", "blk."), ("self_attn.o_proj", "attn_output"),
    ("mlp.up_proj", "ffn_up"), ("mlp.gate_proj", "ffn_gate"), ("mlp.down_proj", "ffn_down"),
    ("post_attention_layernorm", "attn_output_norm"), ("post_mlp_layernorm", "layer_output_norm"),
]


def nomic_bert():
    """Nomic's BERT; the folder's tensors have the names of the first code."""
    tokenizer, pieces = bert_tokenizer()
    config = NomicBertConfig(
        vocab_size=len(pieces), hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3,
        max_position_embeddings=40, layer_norm_eps=1e-12, rope_parameters={"rope_type": "default", "rope_theta": 50.0},
        attn_implementation="eager")
    model = randomize(NomicBertModel(config), 24)
    marks = {role: f"[{role.upper()}]" for role in ["unk", "cls", "sep", "pad", "mask"]}
    name = "nomic_bert"
    save_folder(OUT / name / "hf", model, tokenizer, marks, "mean")
    golden(name, TEXTS, tokenizer, model, "mean")

    writer = start_gguf(OUT / name / "model-f16.gguf", "nomic-bert", config)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_rope_freq_base(50.0)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    write_pieces(writer, pieces)
    # Queries, keys and values are one matrix there.
    state = model.state_dict()
    apart = ["q_proj", "k_proj", "v_proj"]
    layers = [[state.pop(f"layers.{i}.self_attn.{part}.weight") for part in apart]
              for i in range(config.num_hidden_layers)]
    fused = [(f"blk.{i}.attn_qkv.weight", torch.cat(layer)) for i, layer in enumerate(layers)]
    finish_gguf(writer, state, lambda name: replaced(name, NOMIC), fused)


MAKERS = {make.__name__: make for make in [gemma_embedding, modern_bert, nomic_bert]}

if __name__ == "__main__":
    for name in sys.argv[1:] or MAKERS:
        MAKERS[name]()
