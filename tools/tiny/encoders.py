"""Tiny random encoders of whole texts, whose witness is transformers and, for tokens, its tokenizers.

`encoders/NAME` in the tests' data holds `hf/` as sentence-transformers stores it, `model-f16.gguf` as llama.cpp's
converter writes it, and `golden.json`: texts with their token ids, the rows of some tokens, and their vectors, or pairs
of texts with their scores. `strings.json` are odd strings with their ids, from the bert tokenizer.
"""

import json
import random
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel

D_MODEL = 24
OUT = Path(__file__).parents[2] / "crates/conformance/tests/data/encoders"

PIECES = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] ! ' , - . / ? # $ ( ) a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 "
    "the fox dog jumps over lazy quick brown rank ing cafe naive 東 京 日 本 я п р и в е т ß σ ı ##a ##b ##c ##d ##e "
    "##f ##g ##h ##i ##k ##l ##m ##n ##o ##p ##r ##s ##t ##u ##v ##w ##y ##ing ##er ##ed ##est ##0 ##1 ##2 ##р ##и "
    "##в ##е ##т ##s ##ς ##σ"
)
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Café naïve, 東京 日本!",
    "привет",
    "",
    "ranking " * 12,
]
PAIRS = [("the fox", "The lazy dog jumps."), ("東京?", "quick"), ("rank", "ranking ranked ranker rankest " * 4)]


def bert_tokenizer():
    pieces = list(dict.fromkeys(PIECES.split()))
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return tokenizer, pieces


def randomize(model, seed):
    """Weights that half precision holds, of a size that moves every part of the result."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            is_norm = "norm" in name.lower() and name.endswith("weight")
            p.copy_((torch.randn_like(p) * (0.1 if p.dim() == 1 else 0.25) + float(is_norm)).half().float())
    return model.eval()


def settings(n_vocab, **more):
    return {
        "vocab_size": n_vocab,
        "hidden_size": D_MODEL,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "max_position_embeddings": 40,
        "attn_implementation": "eager",
        **more,
    }


def numbers(tensor):
    return [float(f"{x:.8g}") for x in tensor.flatten().tolist()]


def save_folder(folder, model, tokenizer, pooling):
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float16"}
    config = {key: value for key, value in config.items() if value is not None and not key.startswith("_")}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({k: v.half().contiguous() for k, v in model.state_dict().items() if v.is_floating_point()},
              folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"} | names))
    if pooling:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        modes = {f"pooling_mode_{mode}": mode == pooling for mode in ["cls_token", "mean_tokens"]}
        (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": D_MODEL} | modes))


NAMES = [
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.LayerNorm", "token_embd_norm"),
    ("encoder.layer.", "blk."),
    ("attention.self.query", "attn_q"),
    ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.dense", "ffn_down"),
    ("output.LayerNorm", "layer_output_norm"),
    ("pooler.dense", "cls"),
    ("classifier", "cls.output"),
]


def save_gguf(path, model, pieces, pooling, keeps_pooler):
    config = model.config
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_type_count(2)

    def written(piece):
        is_special = piece.startswith("[") and piece.endswith("]")
        return piece if is_special else piece[2:] if piece.startswith("##") and len(piece) > 2 else "\u2581" + piece

    writer.add_token_list([written(piece) for piece in pieces])
    writer.add_token_types([3 if i < 5 else 1 for i in range(len(pieces))])
    # llama.cpp writes the fourth so.
    for i, role in enumerate(["padding", "unknown", "cls", "seperator", "mask"]):
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", i)
    for name, tensor in model.state_dict().items():
        name = name.removeprefix("bert.")
        if not tensor.is_floating_point() or ("pooler" in name and not keeps_pooler):
            continue
        for old, new in NAMES:
            name = name.replace(old, new)
        half = tensor.dim() == 2 and not name.startswith(("token_types", "position_embd"))
        writer.add_tensor(name, tensor.numpy().astype(np.float16 if half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def embedder(name, pooling, seed):
    tokenizer, pieces = bert_tokenizer()
    model = randomize(BertModel(BertConfig(**settings(len(pieces)))), seed)
    save_folder(OUT / name / "hf", model, tokenizer, pooling)
    save_gguf(OUT / name / "model-f16.gguf", model, pieces, {"mean_tokens": 1, "cls_token": 2}[pooling], False)
    golden = []
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        with torch.no_grad():
            rows = model(torch.tensor([ids])).last_hidden_state[0].double()
        pooled = rows.mean(0) if pooling == "mean_tokens" else rows[0]
        at = sorted({0, len(ids) // 2, len(ids) - 1})
        vector = numbers(pooled / pooled.norm())
        golden.append({"text": text, "ids": ids, "at": at, "rows": numbers(rows[at]), "vector": vector})
    (OUT / name / "golden.json").write_text(json.dumps({"texts": golden}, ensure_ascii=False))


def reranker(name, seed):
    tokenizer, pieces = bert_tokenizer()
    model = randomize(BertForSequenceClassification(BertConfig(**settings(len(pieces), num_labels=1))), seed)
    save_folder(OUT / name / "hf", model, tokenizer, None)
    save_gguf(OUT / name / "model-f16.gguf", model, pieces, 4, True)
    golden = []
    for query, document in PAIRS:
        encoded = tokenizer.encode(query, document)
        with torch.no_grad():
            score = model(torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.type_ids])).logits
        golden.append({"query": query, "document": document, "ids": encoded.ids,
                       "second": encoded.type_ids.index(1), "score": numbers(score)[0]})
    (OUT / name / "golden.json").write_text(json.dumps({"pairs": golden}, ensure_ascii=False))


def odd_strings(n):
    """Strings of pieces that tokenizers disagree about."""
    rng = random.Random(7)
    pool = [*"abcdefghijklmnopqrstuvwxyz 0123456789", *"  \t\n\r\u00a0\u3000\u2028", *"!?.,-'\"#$%()[]{}<>@^_`~|\\/+*=;:&",
            *"éÉñüçßÅøœ\u0301\u0300\u0308İıςΣσ", *"東京日本語한국어ひらカナ", "\u0000", "\ufffd", "\u200b", "\u200d", "\ufe0f", "\x07",
            "\u0085", "\x0b", "\xad", "😀", "🦊", "👩\u200d💻", "\U0001f1e9\U0001f1ea", "\U00020000", "\uf900", "\u0e01", "ไ", "привет", "fox",
            "THE", "ing", "ranking", "[CLS]", "[SEP]", "##ing", "…", "—", "«", "»", "。", "、", "؟", "x" * 101, "a" * 100]
    return ["".join(rng.choices(pool, k=rng.randint(0, 24))) for _ in range(n)]


def strings():
    tokenizer, _ = bert_tokenizer()
    # Names of special tokens are text here, as they are where a client sends them.
    tokenizer.encode_special_tokens = True
    rows = [[text, tokenizer.encode(text, add_special_tokens=False).ids] for text in odd_strings(400)]
    (OUT / "strings.json").write_text(json.dumps(rows, ensure_ascii=True, separators=(",", ":")))


if __name__ == "__main__":
    embedder("bert", "cls_token", 11)
    embedder("bert_mean", "mean_tokens", 12)
    reranker("bert_rerank", 13)
    strings()
