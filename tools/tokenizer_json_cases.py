"""Makes the test data of tokenizer.json files: small ones of every kind, and the ids that Hugging Face's tokenizers give for texts.

    pip install tokenizers==0.23.3 tiktoken==0.14.0
    python tools/tokenizer_json_cases.py                     # writes crates/engine/tests/data/json/*.json and ../tiktoken.json
    python tools/tokenizer_json_cases.py OUT NAME=MODEL.gguf # whole vocabularies (pip install gguf): OUT/NAME.json, not for git

A file holds `tokenizer` (the tokenizer.json), `config` (the tokenizer_config.json) and `cases`: `text`; `ids` with the names
of special tokens as text; `parsed` where they differ with the names as tokens; `special` where it differs with what the
post-processor adds; `decoded` where it is not the text.
"""

import json
import pathlib
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tokenizer_cases import GPT2, LEAD, PATTERNS, ROOT, TEXTS, TAIL, cased, noise

DATA = ROOT / "crates/engine/tests/data/json"
NO_CASE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# As the models' files write them, where that differs from what `tokenizer_cases.py` has.
LLAMA3 = NO_CASE + "|" + LEAD + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL
QWEN2 = NO_CASE + "|" + LEAD + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL
O200K = cased(LEAD, "", NO_CASE + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
TEXTS = TEXTS + [
    "It's IT'S it'ſ we'll WE'LL I'm I'M \u212aelvin'S", "  two\n\n  three\t\t four \r\n\r\n five", "<s>a</s> b <tool> c<tool>d", "x <think>  y  </think> z",
    "word<one>word <one> word", "▁ already ▁▁written", "é e\u0301 ﬁ ﬀ Å \u212b", "日本語 中文123 한국어", "…… —— ""quotes""", "\n\n\n\n", " \n \n ", "a\u00a0 b\u3000 c",
]


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(pattern if isinstance(pattern, str) else Regex(pattern[0]), behavior, invert)


def regexes(patterns, last=None):
    steps = [split((p,)) for p in patterns]
    return pre_tokenizers.Sequence(steps + [last or pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def template(before, after=()):
    side = lambda tokens: [f"{t}:0" for t in tokens]
    single = " ".join([*side(before), "$A:0", *side(after)])
    return lambda tok: processors.TemplateProcessing(
        single=single, pair=single + " $B:1", special_tokens=[(t, tok.token_to_id(t)) for t in [*before, *after]]
    )


BYTES = dict(decoder=decoders.ByteLevel(), alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
SPACES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
CHARS = dict(decoder=decoders.Sequence(SPACES), fallback=True)
LLAMA2 = dict(decoder=decoders.Sequence([*SPACES, decoders.Strip(" ", 1, 0)]), fallback=True)
KINDS = {
    "gpt2": dict(pre=pre_tokenizers.ByteLevel(add_prefix_space=False), **BYTES),
    "gpt2_prefix": dict(pre=pre_tokenizers.ByteLevel(add_prefix_space=True), **BYTES),
    "qwen2": dict(norm=normalizers.NFC(), pre=regexes([QWEN2]), **BYTES),
    "llama3": dict(pre=regexes([LLAMA3]), post=template(["<s>"]), ignore_merges=True, **BYTES),
    "o200k": dict(pre=regexes([O200K]), **BYTES),
    "deepseek3": dict(norm=normalizers.Sequence([]), pre=regexes(PATTERNS["deepseek-v3"]), config=dict(add_bos_token=True, bos_token="<s>"), **BYTES),
    "digits": dict(pre=pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]), **BYTES),
    "llama2": dict(norm=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), post=template(["<s>"], ["</s>"]), **LLAMA2),
    "mistral": dict(pre=pre_tokenizers.Metaspace("▁", "first", split=False), post=template(["<s>"]), **LLAMA2),
    "metaspace": dict(pre=pre_tokenizers.Metaspace("▁", "always", split=True), decoder=decoders.Metaspace("▁", "always"), unk="<unk>", fuse=True),
    "gemma": dict(norm=normalizers.Replace(" ", "▁"), pre=split(" ", "merged_with_previous"), **CHARS),
    "unknown": dict(pre=pre_tokenizers.Sequence([split((r"\p{P}",), "removed"), split((r"\s+",), "merged_with_next")]), decoder=decoders.Fuse(), unk="<unk>"),
    "odd": dict(
        norm=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip(True, True), normalizers.Replace(Regex(r"\t+"), " ")]),
        pre=pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=False), split((r"[A-Za-z]+",), "contiguous", True), split((r"!+|x*",), "contiguous"), split("e", "merged_with_previous"),
        ]),
        decoder=decoders.Fuse(), unk="<unk>",
    ),
}


def train(kind):
    tok = Tokenizer(models.BPE(unk_token=kind.get("unk"), byte_fallback=kind.get("fallback", False), fuse_unk=kind.get("fuse", kind.get("fallback", False)), ignore_merges=kind.get("ignore_merges", False)))
    for name in ["norm", "pre", "decoder"]:
        if name in kind:
            setattr(tok, {"norm": "normalizer", "pre": "pre_tokenizer"}.get(name, name), kind[name])
    alphabet = kind.get("alphabet", ["▁", "中", "é"])
    first = [f"<0x{b:02X}>" for b in range(256)] if kind.get("fallback") else []
    # Training on lines of a text that says little keeps the files small; what matters are the steps around the model.
    trainer = trainers.BpeTrainer(vocab_size=480 if first or "alphabet" in kind else 330, initial_alphabet=alphabet, special_tokens=["<unk>", *first], show_progress=False)
    tok.train_from_iterator((ROOT / "LICENSE-APACHE").read_text().splitlines(), trainer)
    spec = json.loads(tok.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] == "<unk>"]
    tok = Tokenizer.from_str(json.dumps(spec))
    tok.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL])
    tok.add_tokens([
        AddedToken("<tool>", normalized=True), AddedToken("<think>", rstrip=True), AddedToken("</think>", lstrip=True, rstrip=True, normalized=False),
        AddedToken("<one>", single_word=True), AddedToken("\n\n", normalized=False), AddedToken("<tool> c", normalized=False),
    ])
    if "post" in kind:
        tok.post_processor = kind["post"](tok)
    return tok


def cases(spec, config, texts):
    parsed = Tokenizer.from_str(json.dumps(spec))
    # The library numbers added tokens anew when some are missing, so they are there under names that no text has.
    hidden = [{**t, "content": f"\ue000{t['id']}"} if t["special"] and t["content"] not in spec["model"]["vocab"] else t for t in spec["added_tokens"]]
    hidden = [t for t in hidden if not (t["special"] and t["content"] in spec["model"]["vocab"])]
    plain = Tokenizer.from_str(json.dumps({**spec, "added_tokens": hidden, "post_processor": None}))
    add = [parsed.token_to_id(config["bos_token"])] if config.get("add_bos_token") else []
    rows = []
    for text in texts:
        row = {"text": text, "ids": plain.encode(text, add_special_tokens=False).ids}
        ids = parsed.encode(text, add_special_tokens=False).ids
        if ids != row["ids"]:
            row["parsed"] = ids
        special = add + parsed.encode(text).ids
        if special != ids:
            row["special"] = special
        decoded = parsed.decode(ids, skip_special_tokens=False)
        if decoded != text:
            row["decoded"] = decoded
        rows.append(row)
    return rows


def write(path, spec, config, texts):
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in cases(spec, config, texts))
    head = f'"config": {json.dumps(config)},\n"tokenizer": {json.dumps(spec, ensure_ascii=False)},\n"cases": [\n{rows}\n]'
    path.write_text("{\n" + head + "\n}\n", encoding="utf-8")
    print(path, path.stat().st_size, "bytes")


def ranks():
    """A small tiktoken.model in the form of Kimi-K2's, and its ids by OpenAI's tiktoken."""
    import base64
    import collections
    import re

    import tiktoken

    pattern = PATTERNS["kimi-k2"][0]
    ranks = {bytes([b]): b for b in range(256)}
    words = [[bytes([b]) for b in word.encode()] for word in re.findall(r" ?\w+|[^\w\s]+|\s+", (ROOT / "LICENSE-APACHE").read_text() + "日本語の文章です。中文字符" * 9)]
    while len(ranks) < 420:
        (left, right), _ = collections.Counter(pair for word in words for pair in zip(word, word[1:])).most_common(1)[0]
        ranks[left + right] = len(ranks)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == (left, right):
                    word[i : i + 2] = [left + right]
                i += 1
    special = {f"<|reserved_token_{i}|>": i for i in range(len(ranks), len(ranks) + 256)}
    added = {len(ranks): "[BOS]", len(ranks) + 2: "<|im_end|>", len(ranks) + 9: "<|tool_call_begin|>"}
    for i, text in added.items():
        del special[f"<|reserved_token_{i}|>"]
        special[text] = i
    coder = tiktoken.Encoding("kimi", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    rows = [
        {"text": t, "ids": coder.encode(t, disallowed_special=()), "parsed": coder.encode(t, allowed_special="all")}
        for t in TEXTS + ["[BOS]a<|im_end|><|reserved_token_421|> [BOS"] + noise(60)
    ]
    lines = [base64.b64encode(token).decode() + f" {rank}" for token, rank in sorted(ranks.items(), key=lambda r: r[1])]
    config = {"bos_token": "[BOS]", "eos_token": "<|im_end|>", "added_tokens_decoder": {str(i): {"content": t, "special": True} for i, t in added.items()}}
    text = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path = DATA.parent / "tiktoken.json"
    path.write_text("{\n" + f'"config": {json.dumps(config)},\n"model": {json.dumps(lines)},\n"cases": [\n{text}\n]' + "\n}\n", encoding="utf-8")
    print(path, path.stat().st_size, "bytes")


def whole(out, name, gguf_file):
    """The tokenizer.json that belongs to a GGUF file's vocabulary, as the models' makers write it."""
    import gguf

    reader = gguf.GGUFReader(gguf_file)
    field = lambda key: reader.fields[f"tokenizer.ggml.{key}"].contents()
    tokens, types = field("tokens"), field("token_type")
    # Control and user-defined tokens are added tokens.
    added = [dict(id=i, content=t, single_word=False, lstrip=False, rstrip=False, normalized=False, special=k == 3) for i, (t, k) in enumerate(zip(tokens, types)) if k in (3, 4)]
    taken = {t["id"] for t in added}
    if name == "llama-spm":
        # Scores order the merges: every split of a token into two tokens is one.
        scores, vocab = field("scores"), {t: i for i, t in enumerate(tokens)}
        pairs = [(scores[i], t[:k], t[k:]) for i, t in enumerate(tokens) if types[i] == 1 for k in range(1, len(t)) if t[:k] in vocab and t[k:] in vocab]
        merges = [f"{l} {r}" for _, l, r in sorted(pairs, key=lambda p: (-p[0], vocab[p[1]], vocab[p[2]]))]
    else:
        merges = field("merges")
    kind = {"gpt-2": "gpt2", "qwen2": "qwen2", "llama-bpe": "llama3", "gemma-4": "gemma", "llama-spm": "llama2"}.get(name)
    kind = KINDS[kind] if kind else dict(pre=regexes(PATTERNS[name]), **BYTES)
    merges = [(l, r) for l, r in (m if isinstance(m, tuple) else (m[: m.index(" ", 1)], m[m.index(" ", 1) + 1 :]) for m in merges)]
    keep = {t: i for i, t in enumerate(tokens) if name in ("gemma-4", "llama-spm") or i not in taken}
    unk = "<unk>" if kind.get("fallback") else None
    tok = Tokenizer(models.BPE(keep, [tuple(m) for m in merges], byte_fallback=kind.get("fallback", False), fuse_unk=kind.get("fallback", False), unk_token=unk, ignore_merges=kind.get("ignore_merges", False)))
    for key in ["norm", "pre", "decoder"]:
        if key in kind:
            setattr(tok, {"norm": "normalizer", "pre": "pre_tokenizer"}.get(key, key), kind[key])
    spec = json.loads(tok.to_str())
    spec["added_tokens"] = added
    write(out / f"{name}.json", spec, {}, TEXTS + noise(400) + [(ROOT / "LICENSE-APACHE").read_text()])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for pair in sys.argv[2:]:
            whole(pathlib.Path(sys.argv[1]), *pair.split("="))
    else:
        DATA.mkdir(parents=True, exist_ok=True)
        for name, kind in KINDS.items():
            spec = json.loads(train(kind).to_str())
            if name == "qwen2":  # as older files write merges
                spec["model"]["merges"] = [" ".join(m) for m in spec["model"]["merges"]]
            write(DATA / f"{name}.json", spec, kind.get("config", {}), TEXTS + noise(40))
        ranks()
