"""Makes the tokenizer's test data: the ids that other tokenizers give for the same texts.

    pip install tokenizers==0.23.3 sentencepiece==0.2.3 gguf==0.19.0
    python tools/tokenizer_cases.py path/to/tokenizer.json     # the Hugging Face twin of models/fable-29m-a10m-q4_k_m.gguf

Writes to crates/engine/tests/data:
- fable_ids.json: ids by Hugging Face's `tokenizers`, special strings as text and parsed. For the embedded model.
- words.json: words of every pre-tokenizer, cut by Oniguruma (inside `tokenizers`) with the patterns as the models'
  own tokenizer.json files have them, look-ahead included.
- spm.model, spm.gguf, spm_ids.json: a small SentencePiece vocabulary with byte fallback, trained on LICENSE-APACHE, as
  SentencePiece's own file and as GGUF's keys, and ids by SentencePiece itself.
"""

import io
import json
import pathlib
import random
import sys

import gguf
import sentencepiece
from tokenizers import Regex, Tokenizer, pre_tokenizers

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "crates/engine/tests/data"

# All in Unicode's composed form, as one of the witnesses normalises to it.
TEXTS = [
    "", " ", "  ", "   a", "a   ", "\n", "\n\n", "\n \n", " \n\t\r\n x", "\r\n\r\n", "a\r\nb", "\t\tx",
    "Once upon a time, there was a fox who lost his hat.", "Hello, world!  How's it going?", "I'LL I'll we'Ve don'T 'tis o'clock",
    "1234567890 3.14 007 ½ ² Ⅷ 一二三", "x=1;y+=2;//z\n\tfor(i=0;i<n;++i){}\n", "https://example.org/a_b?c=d&e=%20f#g",
    "naïve café Äpfel Übermut ñandú ßtraße ÆØÅ", "Привет, мир! Как дела?", "日本語の文章です。中文字符、标点！", "한국어 문장입니다.",
    "مرحبا بالعالم ١٢٣", "नमस्ते दुनिया १२३", "ไทยภาษา", "🦙🦊👨‍👩‍👧‍👦🏳️‍🌈 emoji☺️", "\u00a0nbsp\u2003em\u3000ideographic\u2028ls", "\u200bzero\u200djoin\ufeffbom",
    "e\u0301e\u0323 a\u20d7 combining ̈alone", "CamelCaseWords HTTPServer iPhoneX ÄpfelBaum éCole", "snake_case kebab-case dot.case", "a/b\\c|d", "!!! ??? ... --- ''' \"\"\"",
    "tabs\tand\vvertical\fform", "\x00\x01\x7f\x80\x9f control", "end with spaces   ", "   \n   leading lines\n\n\n   ", "$5.00 + €6 = £7 ± ¥8 ^ ~ ` <tag/>",
    "<|im_start|>user\nHi<|im_end|>\n", "a<|endoftext|>b <|im_end|><|im_end|>", "<|im_start <|im_end|", "<s>x</s> <unk> <0x41> [INST]", "word" * 60, "ab " * 40, "ÿþ\uffff\U0010ffff",
]


def noise(n):
    """Texts of characters that sit at the borders of the patterns' classes."""
    rng = random.Random(7)
    alphabet = list("aZ09 '\n\r\t.,/!-_sSdDlL") + ["é", "É", "ǅ", "ʰ", "ª", "́", "ा", "中", "あ", "ア", "가", "🦊", "½", "Ⅷ", "٣", "\u00a0", "\u2028", "\u3000", "€", "。", "！", "‘", "\u200d", "  ", "'ll", "'VE"]
    return ["".join(rng.choices(alphabet, k=rng.randint(1, 24))) for _ in range(n)]


def write(name, value):
    path = DATA / name
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in value)
    path.write_text("[\n" + rows + "\n]\n", encoding="utf-8")
    print(path.relative_to(ROOT), path.stat().st_size, "bytes")


def fable(tokenizer_json):
    spec = json.loads(pathlib.Path(tokenizer_json).read_text(encoding="utf-8"))
    # GGUF names no normaliser, so the texts go in as they are.
    spec["normalizer"] = None
    parsed = Tokenizer.from_str(json.dumps(spec))
    plain = Tokenizer.from_str(json.dumps({**spec, "added_tokens": [], "post_processor": None}))
    texts = TEXTS + noise(150)
    write("fable_ids.json", [{"text": t, "ids": plain.encode(t).ids, "parsed": parsed.encode(t, add_special_tokens=False).ids} for t in texts])


CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def cased(lead, no, contraction):
    return f"{lead}[{UPPER}{no}]*[{LOWER}{no}]+{contraction}|{lead}[{UPPER}{no}]+[{LOWER}{no}]*{contraction}"


LEAD = r"[^\r\n\p{L}\p{N}]?"
PATTERNS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "llama-bpe": [CONTRACTIONS + "|" + LEAD + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL],
    "qwen2": [CONTRACTIONS + "|" + LEAD + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL],
    "qwen35": [CONTRACTIONS + "|" + LEAD + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + TAIL],
    "seed-coder": [CONTRACTIONS + "|" + LEAD + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + TAIL],
    "gpt-4o": [cased(LEAD, "", CONTRACTIONS + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL],
    "tekken": [cased(LEAD, "", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL],
    "kimi-k2": [r"[\p{Han}]+|" + cased(LEAD, r"&&[^\p{Han}]", CONTRACTIONS + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "deepseek-llm": [
        r"[\r\n]",
        r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*""" + TAIL,
    ],
}


def words():
    rows = []
    texts = [t for t in TEXTS if t] + noise(60)
    for name, patterns in PATTERNS.items():
        cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated") for p in patterns])
        rows += [{"pre": name, "words": [w for w, _ in cut.pre_tokenize_str(t)]} for t in texts]
    write("words.json", rows)


def spm():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((ROOT / "LICENSE-APACHE").read_text().splitlines()),
        model_writer=model, model_type="bpe", vocab_size=700, byte_fallback=True, split_digits=True, character_coverage=1.0,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=True,
        allow_whitespace_only_pieces=True, user_defined_symbols=["[INST]", "[/INST]"], minloglevel=2,
    )
    (DATA / "spm.model").write_bytes(model.getvalue())
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    n = sp.get_piece_size()
    kind = gguf.TokenType

    def token_type(i):
        if sp.is_unknown(i):
            return kind.UNKNOWN
        if sp.is_control(i):
            return kind.CONTROL
        if sp.is_byte(i):
            return kind.BYTE
        return kind.USER_DEFINED if sp.id_to_piece(i).endswith("INST]") else kind.NORMAL

    out = gguf.GGUFWriter(DATA / "spm.gguf", "llama")
    out.add_tokenizer_model("llama")
    out.add_tokenizer_pre("default")
    out.add_token_list([sp.id_to_piece(i).encode() for i in range(n)])
    out.add_token_scores([sp.get_score(i) for i in range(n)])
    out.add_token_types([token_type(i) for i in range(n)])
    out.add_bos_token_id(sp.bos_id())
    out.add_eos_token_id(sp.eos_id())
    out.add_unk_token_id(sp.unk_id())
    out.add_add_bos_token(True)
    out.add_add_space_prefix(True)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    prose = (ROOT / "LICENSE-APACHE").read_text()[2000:6000]
    # A user-defined token ends a word here and a space follows it in the engine, as in llama.cpp; SentencePiece has
    # the space before a text only. Texts with one are left to the whole vocabularies' cases.
    texts = [t for t in TEXTS + noise(100) + [prose] if "INST]" not in t]
    write("spm_ids.json", [{"text": t, "ids": sp.encode(t)} for t in texts])


if __name__ == "__main__":
    DATA.mkdir(parents=True, exist_ok=True)
    fable(sys.argv[1])
    words()
    spm()
