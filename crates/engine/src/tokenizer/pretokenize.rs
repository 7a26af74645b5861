//! Cutting a text into words before BPE joins their bytes: one table of what each `tokenizer.ggml.pre` names.
//!
//! Patterns are those of the models' own tokenizers. The usual ending `\s+(?!\S)|\s+` looks ahead; here it is a plain
//! `\s+` and a rule that gives the last blank back, so that every pattern is a regular expression in the strict sense
//! and a text of any shape takes linear time: no backtracking, no limit to run into. Knows nothing of tokens.

use regex::Regex;

use super::Error;

/// How a blank run that ends a match is treated.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Blanks {
    /// The match stands as it is.
    Keep,
    /// `\s+(?!\S)`: a run of two or more that text follows leaves its last character to what follows.
    GiveBack,
    /// The same, but runs up to a line end are words of their own (`\s*[\r\n]+` comes first in the pattern).
    GiveBackInLine,
}

/// One pass: every match is a word, and so is what lies between matches.
type Pass = (&'static str, Blanks);

/// A row of the table.
struct Row {
    names: &'static [&'static str],
    passes: &'static [Pass], // each cuts the words of the one before it
    ignore_merges: bool,
    add_bos: bool,
}

const GPT2: Pass = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+", Blanks::GiveBack);
const LLAMA3: Pass = (
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    Blanks::GiveBackInLine,
);
const QWEN2: Pass = (
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    Blanks::GiveBackInLine,
);
const QWEN35: Pass = (
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    Blanks::GiveBackInLine,
);
const GPT4O: Pass = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
    Blanks::GiveBackInLine,
);
const TEKKEN: Pass = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
    Blanks::GiveBackInLine,
);
const KIMI_K2: Pass = (
    r"\p{Han}+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    Blanks::GiveBackInLine,
);
const DIGIT: Pass = (r"\p{N}", Blanks::Keep);
const DIGITS: Pass = (r"\p{N}+", Blanks::Keep);
const THREE_DIGITS: Pass = (r"\p{N}{1,3}", Blanks::Keep);
const LINE_END: Pass = (r"[\r\n]", Blanks::Keep);
const CJK: Pass = (r"[一-龥ࠀ-一가-퟿]+", Blanks::Keep);
const DEEPSEEK_LETTERS: Pass = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    Blanks::Keep,
);
const DEEPSEEK3: Pass = (
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"##,
    Blanks::GiveBackInLine,
);

const fn row(names: &'static [&'static str], passes: &'static [Pass]) -> Row {
    Row { names, passes, ignore_merges: false, add_bos: false }
}

/// What each `tokenizer.ggml.pre` means. `ignore_merges`: a word that is a token is taken whole.
const TABLE: &[Row] = &[
    row(&["default"], &[(r"[\p{P}$+<=>^~|]+", Blanks::Keep), GPT2, DIGITS, (r"[0-9][0-9][0-9]", Blanks::Keep)]),
    row(&["gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4", "gigachat", "a.x-4.0"], &[GPT2]),
    row(&["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"], &[DIGIT, GPT2]),
    Row {
        names: &["llama3", "llama-bpe", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"],
        passes: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
    },
    row(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[LLAMA3]),
    Row { names: &["glm4", "glm5"], passes: &[LLAMA3], ignore_merges: true, add_bos: false },
    row(&["qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2", "solar-open"], &[QWEN2]),
    row(&["qwen35"], &[QWEN35]),
    row(&["gpt-4o", "llama4", "minimax-m2"], &[GPT4O]),
    Row { names: &["tekken"], passes: &[TEKKEN], ignore_merges: true, add_bos: true },
    row(&["kimi-k2"], &[KIMI_K2]),
    row(
        &["deepseek-llm"],
        &[
            LINE_END,
            DEEPSEEK_LETTERS,
            (r"\s?[!-/:-~！-／：-～‘-‟　-。]+", Blanks::Keep),
            (r"\s+$", Blanks::Keep),
            CJK,
            DIGITS,
        ],
    ),
    row(&["deepseek-coder"], &[LINE_END, (r"\s?\p{L}+", Blanks::Keep), (r"\s?\p{P}+", Blanks::Keep), CJK, DIGIT]),
    row(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm"],
        &[THREE_DIGITS, (r"[一-龥぀-ゟ゠-ヿ]+", Blanks::Keep), DEEPSEEK3],
    ),
    // Not a name of a file: what `tokenizer.ggml.model` = `gemma4` implies.
    row(&["gemma4"], &[(r"[^\n]+|\n+", Blanks::Keep)]),
];

/// A compiled row of the table.
pub struct PreTokenizer {
    passes: Vec<(Regex, Blanks)>,
    /// A word that is a token as it stands is taken whole, whatever the merges would make of it.
    pub ignore_merges: bool,
    /// Whether texts begin with BOS when the file does not say.
    pub add_bos: bool,
}

impl PreTokenizer {
    /// The one of that name; an unknown name is an error that lists the known ones.
    pub fn new(name: &str) -> Result<Self, Error> {
        let row = TABLE.iter().find(|row| row.names.contains(&name)).ok_or_else(|| Error::Pre {
            found: name.into(),
            known: TABLE.iter().flat_map(|row| row.names).copied().collect::<Vec<_>>().join(", "),
        })?;
        let compile = |&(pattern, blanks): &Pass| {
            let regex =
                Regex::new(pattern).map_err(|why| Error::Pattern { name: name.into(), source: Box::new(why) })?;
            Ok((regex, blanks))
        };
        Ok(Self {
            passes: row.passes.iter().map(compile).collect::<Result<_, Error>>()?,
            ignore_merges: row.ignore_merges,
            add_bos: row.add_bos,
        })
    }

    /// Calls `each` with the words of a text, in order; together they are the text.
    pub fn split(&self, text: &str, each: &mut dyn FnMut(&str)) {
        split(&self.passes, text, each);
    }
}

fn split(passes: &[(Regex, Blanks)], text: &str, each: &mut dyn FnMut(&str)) {
    let Some(((regex, blanks), later)) = passes.split_first() else { return each(text) };
    let mut done = 0;
    while let Some(found) = regex.find_at(text, done) {
        let end = blanks.end(text, found.start(), found.end());
        if found.start() > done {
            split(later, &text[done..found.start()], each);
        }
        split(later, &text[found.start()..end], each);
        done = end;
    }
    if done < text.len() {
        split(later, &text[done..], each);
    }
}

impl Blanks {
    /// Where a match that stands from `start` to `end` ends after the rule.
    fn end(self, text: &str, start: usize, end: usize) -> usize {
        let Some(last) = text[start..end].chars().next_back() else { return end };
        let gives_back = match self {
            Self::Keep => false,
            Self::GiveBack => last.is_whitespace(),
            Self::GiveBackInLine => last.is_whitespace() && !matches!(last, '\r' | '\n'),
        };
        let rest = end - last.len_utf8();
        // Only the alternative `\s+` can end in such a blank, so the whole match is blank.
        if gives_back && rest > start && end < text.len() { rest } else { end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_the_models_own_patterns() {
        let rows: serde_json::Value = serde_json::from_str(include_str!("../../tests/data/words.json")).unwrap();
        let mut wrong = String::new();
        let mut cutter: Option<(String, PreTokenizer)> = None;
        for row in rows.as_array().unwrap() {
            let name = row["pre"].as_str().unwrap();
            let expected: Vec<&str> = row["words"].as_array().unwrap().iter().map(|w| w.as_str().unwrap()).collect();
            let (_, pre) = match cutter.take() {
                Some(same) if same.0 == name => cutter.insert(same),
                _ => cutter.insert((name.into(), PreTokenizer::new(name).unwrap())),
            };
            let mut found = Vec::new();
            pre.split(&expected.concat(), &mut |word| found.push(word.to_string()));
            if found != expected {
                wrong += &format!("{name}:\n  found    {found:?}\n  expected {expected:?}\n");
            }
        }
        assert!(wrong.is_empty(), "{wrong}");
    }

    #[test]
    fn every_name_compiles_and_stands_once() {
        let names: Vec<_> = TABLE.iter().flat_map(|row| row.names).collect();
        for name in &names {
            assert!(PreTokenizer::new(name).is_ok(), "{name}");
            assert_eq!(names.iter().filter(|other| other == &name).count(), 1, "{name}");
        }
    }
}
