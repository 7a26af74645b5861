"""Tiny random encoders of whole texts, whose witness is transformers and, for tokens, its tokenizers.

`encoders/NAME` in the tests' data holds `hf/` as sentence-transformers stores it, `model-f16.gguf` as llama.cpp's
converter writes it, and `golden.json`: texts with their token ids, the rows of some tokens, and their vectors, or pairs
of texts with their scores. `strings.json` are odd strings with their ids, from the bert tokenizer.
"""

import json
import random
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (BertConfig, BertForSequenceClassification, BertModel, XLMRobertaConfig,
                          XLMRobertaForSequenceClassification, XLMRobertaModel)

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


# What some characters become, as SentencePiece writes its rules.
RULES = {
    "\uff21": "A", "\uff22": "B", "\ufb01": "fi", "\u00bd": "1\u20442", "e\u0301": "\u00e9", "\u00a0": " ",
    "\u3000": " ", "\u337f": "\u682a\u5f0f\u4f1a\u793e", "\t": " ", "\n": " ", "\r": " ", "\u0007": "",
    "\u200b": " ", "\u2460": "1", "\uff76\uff9e": "\u30ac", "\uff76": "\u30ab", "\u2028": " ",
}
WORDS = (
    "\u2581the \u2581fox \u2581dog \u2581jump s \u2581over \u2581la zy \u2581quick \u2581brown \u2581rank ing "
    "er ed est \u2581Caf \u2581na ive ra an in king th \u2581\u2581 東京 \u2581東京 日本 本語 при вет \u2581п рив "
    "\U0001f98a fi 1\u2044"
)


def compiled_rules():
    """The rules as SentencePiece compiles them."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    def codes(text):
        return " ".join(f"{ord(c):X}" for c in text)

    with tempfile.TemporaryDirectory() as folder:
        rules, texts, model = (f"{folder}/{name}" for name in ["rules.tsv", "texts", "model"])
        Path(rules).write_text("".join(f"{codes(a)}\t{codes(b)}\n" for a, b in RULES.items()))
        Path(texts).write_text("the fox and the dog\n" * 9)
        sentencepiece.SentencePieceTrainer.train(input=texts, model_prefix=model, vocab_size=20, hard_vocab_limit=False,
                                                 normalization_rule_tsv=rules, minloglevel=2)
        proto = sentencepiece_model_pb2.ModelProto()
        proto.ParseFromString(Path(model + ".model").read_bytes())
        return proto.normalizer_spec.precompiled_charsmap


def unigram_tokenizer(charsmap, with_words):
    rng = random.Random(3)
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    singles = "▁abcdefghijklmnopqrstuvwxyzABCFT0123.,!?'-é東京日本語株式会社ガカпривет"
    pieces += [(c, round(-7 - 3 * rng.random(), 4)) for c in dict.fromkeys(singles)]
    pieces += [(word, round(-4 - 5 * rng.random(), 4)) for word in dict.fromkeys(WORDS.split()) if len(word) > 1]
    pieces += [("<mask>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.normalizer = normalizers.Precompiled(charsmap)
    metaspace = pre_tokenizers.Metaspace("▁", "always")
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace]) if with_words else metaspace)
    tokenizer.decoder = decoders.Metaspace("▁", "always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    return tokenizer, pieces


def randomize(model, seed):
    """Weights that half precision holds, of a size that moves every part of the result."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            is_norm = "norm" in name.lower() and name.endswith("weight")
            p.copy_((torch.randn_like(p) * (0.1 if p.dim() == 1 else 0.25) + float(is_norm)).half().float())
    return model.eval()


SPECIAL = {
    BertConfig: ["[CLS]", "[SEP]", "[UNK]", "[PAD]"],
    XLMRobertaConfig: ["<s>", "</s>", "<unk>", "<pad>"],
}


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
    cls, sep, unk, pad = SPECIAL[type(model.config)]
    names = {"cls_token": cls, "sep_token": sep, "unk_token": unk, "pad_token": pad}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
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
    ("classifier.out_proj", "cls.output"),
    ("classifier.dense", "cls"),
    ("classifier", "cls.output"),
]


def write_pieces(writer, pieces):
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


def write_unigram(writer, pieces, charsmap):
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_type_count(1)
    writer.add_token_list([text for text, _ in pieces])
    writer.add_token_scores([score for _, score in pieces])
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "<pad>": 3, "<mask>": 3}
    writer.add_token_types([kinds.get(text, 1) for text, _ in pieces])
    writer.add_precompiled_charsmap(charsmap)
    for i, role in enumerate(["bos", "padding", "eos", "unknown"]):
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", i)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


def save_gguf(path, model, pieces, pooling, keeps_pooler, charsmap=None):
    config = model.config
    skipped = 0 if charsmap is None else config.pad_token_id + 1
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(config.max_position_embeddings - skipped)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    if charsmap is None:
        write_pieces(writer, pieces)
    else:
        write_unigram(writer, pieces, charsmap)
    for name, tensor in model.state_dict().items():
        name = name.removeprefix("bert.").removeprefix("roberta.")
        if not tensor.is_floating_point() or ("pooler" in name and not keeps_pooler):
            continue
        for old, new in NAMES:
            name = name.replace(old, new)
        tensor = tensor[skipped:] if name.startswith("position_embd") else tensor
        half = tensor.dim() == 2 and not name.startswith(("token_types", "position_embd"))
        writer.add_tensor(name, tensor.numpy().astype(np.float16 if half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def embedder(name, tokenizer, model, pooling, seed):
    model = randomize(model, seed)
    save_folder(OUT / name / "hf", model, tokenizer, pooling)
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
    return model


def reranker(name, tokenizer, model, has_segments, seed):
    model = randomize(model, seed)
    save_folder(OUT / name / "hf", model, tokenizer, None)
    golden = []
    for query, document in PAIRS:
        encoded = tokenizer.encode(query, document)
        segments = {"token_type_ids": torch.tensor([encoded.type_ids])} if has_segments else {}
        with torch.no_grad():
            score = model(torch.tensor([encoded.ids]), **segments).logits
        golden.append({"query": query, "document": document, "ids": encoded.ids,
                       "second": encoded.sequence_ids.index(1), "score": numbers(score)[0]})
    (OUT / name / "golden.json").write_text(json.dumps({"pairs": golden}, ensure_ascii=False))
    return model


def odd_strings(n):
    """Strings of pieces that tokenizers disagree about."""
    rng = random.Random(7)
    pool = [
        *"abcdefghijklmnopqrstuvwxyz 0123456789", *"  \t\n\r\u00a0\u3000\u2028",
        *"!?.,-'\"#$%()[]{}<>@^_`~|\\/+*=;:&", *"éÉñüçßÅøœ\u0301\u0300\u0308İıςΣσ", *"東京日本語한국어ひらカナ", "\u0000",
        "\ufffd", "\u200b", "\u200d", "\ufe0f", "\x07", "\u0085", "\x0b", "\xad", "😀", "🦊", "👩\u200d💻",
        "\U0001f1e9\U0001f1ea", "\U00020000", "\uf900", "\u0e01", "ไ", "привет", "fox", "THE", "ing", "ranking",
        "[CLS]", "[SEP]", "##ing", "…", "—", "«", "»", "。", "、", "؟", "x" * 101, "a" * 100,
    ]
    return ["".join(rng.choices(pool, k=rng.randint(0, 24))) for _ in range(n)]


def strings(name, tokenizer):
    # Names of special tokens are text here, as they are where a client sends them.
    tokenizer.encode_special_tokens = True
    rows = [[text, tokenizer.encode(text, add_special_tokens=False).ids] for text in odd_strings(400)]
    (OUT / name).write_text(json.dumps(rows, ensure_ascii=True, separators=(",", ":")))


def bert():
    tokenizer, pieces = bert_tokenizer()
    config = BertConfig(**settings(len(pieces)))
    for name, pooling, seed in [("bert", "cls_token", 11), ("bert_mean", "mean_tokens", 12)]:
        model = embedder(name, tokenizer, BertModel(config), pooling, seed)
        gguf_pooling = {"mean_tokens": 1, "cls_token": 2}[pooling]
        save_gguf(OUT / name / "model-f16.gguf", model, pieces, gguf_pooling, False)
    config = BertConfig(**settings(len(pieces), num_labels=1))
    model = reranker("bert_rerank", tokenizer, BertForSequenceClassification(config), True, 13)
    save_gguf(OUT / "bert_rerank/model-f16.gguf", model, pieces, 4, True)
    strings("strings.json", tokenizer)


def xlmr():
    charsmap = compiled_rules()
    tokenizer, pieces = unigram_tokenizer(charsmap, True)
    roberta = {"max_position_embeddings": 42, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
    config = XLMRobertaConfig(**settings(len(pieces), **roberta))
    model = embedder("xlmr", tokenizer, XLMRobertaModel(config), "cls_token", 14)
    save_gguf(OUT / "xlmr/model-f16.gguf", model, pieces, 2, False, charsmap)
    config = XLMRobertaConfig(**settings(len(pieces), num_labels=1, **roberta))
    model = reranker("xlmr_rerank", tokenizer, XLMRobertaForSequenceClassification(config), False, 15)
    save_gguf(OUT / "xlmr_rerank/model-f16.gguf", model, pieces, 4, True, charsmap)
    strings("strings_unigram.json", tokenizer)


if __name__ == "__main__":
    bert()
    xlmr()
