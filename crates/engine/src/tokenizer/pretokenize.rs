//! Cutting a text into words before BPE joins their bytes: one table of what each `tokenizer.ggml.pre` names, and the
//! splits that a `tokenizer.json` brings along.
//!
//! Patterns are those of the models' own tokenizers. The usual ending `\s+(?!\S)|\s+` looks ahead; here it is a plain
//! `\s+` and a rule that gives the last blank back, so that every pattern is a regular expression in the strict sense:
//! no backtracking, no limit to run into. Knows nothing of tokens.

use std::ops::Range;

use regex::Regex;

use super::Error;
use super::stepper::{Found, Scan, Stepper};

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

/// What becomes of the places that a split finds, in the words of Hugging Face's tokenizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behavior {
    /// Each is a word.
    Isolated,
    /// They are left out.
    Removed,
    /// Each goes with what stands before it.
    MergedWithPrevious,
    /// Each goes with what stands behind it.
    MergedWithNext,
    /// Those side by side are one word.
    Contiguous,
}

/// Which words are taken whole when they are tokens as they stand, whatever the merges would make of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whole {
    /// None.
    No,
    /// All.
    Any,
    /// Those that begin with a line end.
    LineEnds,
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
const SEED: Pass = (
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+",
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

#[rustfmt::skip]
const GPT2_NAMES: &[&str] = &[
    "gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4", "gigachat", "a.x-4.0", "mellum", "modern-bert",
];

#[rustfmt::skip]
const QWEN2_NAMES: &[&str] = &[
    "qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2", "solar-open", "bailingmoe", "bailingmoe2",
    "llada-moe",
];

/// What each `tokenizer.ggml.pre` means. `ignore_merges`: a word that is a token is taken whole.
const TABLE: &[Row] = &[
    row(&["default"], &[(r"[\p{P}$+<=>^~|]+", Blanks::Keep), GPT2, DIGITS, (r"[0-9][0-9][0-9]", Blanks::Keep)]),
    row(GPT2_NAMES, &[GPT2]),
    row(
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[DIGIT, GPT2],
    ),
    Row {
        names: &["llama3", "llama-bpe", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"],
        passes: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
    },
    row(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[LLAMA3]),
    Row { names: &["glm4", "glm5"], passes: &[LLAMA3], ignore_merges: true, add_bos: false },
    row(QWEN2_NAMES, &[QWEN2]),
    row(&["seed-coder"], &[SEED]),
    row(&["qwen35"], &[QWEN35]),
    row(&["laguna"], &[(r"[^\n]+|\n+", Blanks::Keep), QWEN2]),
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

/// What a pass looks for.
enum Finder {
    /// A pattern of the table, which is known to read little beyond its matches.
    Known(Regex, Blanks),
    /// A pattern of a file. The second one, where there is one, is a run of blanks that ends in `\s+(?!\S)`.
    File(Stepper),
}

/// A search through one text.
enum Search<'s> {
    Known(&'s Regex, Blanks),
    File(Scan<'s>),
}

impl Search<'_> {
    /// Returns the next place that the pattern finds from `from` on.
    fn find(&mut self, text: &str, from: usize) -> Option<(usize, usize)> {
        match self {
            Self::Known(regex, blanks) => {
                let found = regex.find_at(text, from)?;
                Some((found.start(), blanks.end(text, found.start(), found.end())))
            }
            Self::File(scan) => {
                let Found { start, end, pattern } = scan.find(text, from)?;
                Some((start, if pattern == 0 { end } else { Blanks::GiveBack.end(text, start, end) }))
            }
        }
    }
}

/// One pass, compiled.
pub struct Split {
    finder: Finder,
    behavior: Behavior,
    invert: bool, // what lies between matches is what is found
}

/// Passes, each of which cuts the words of the one before it.
pub struct PreTokenizer {
    passes: Vec<Split>,
    /// Which words are taken whole.
    pub whole: Whole,
    /// Whether texts begin with BOS when the file does not say.
    pub add_bos: bool,
}

impl PreTokenizer {
    /// Returns the one of that name; an unknown name is an error that lists the known ones.
    pub fn new(name: &str) -> Result<Self, Error> {
        let row = Self::row(name)?;
        let compile = |&(pattern, blanks): &Pass| {
            let regex =
                Regex::new(pattern).map_err(|why| Error::Pattern { name: name.into(), source: Box::new(why) })?;
            Ok(Split { finder: Finder::Known(regex, blanks), behavior: Behavior::Isolated, invert: false })
        };
        let whole = match row.ignore_merges {
            _ if row.names == ["gemma4"] => Whole::LineEnds,
            true => Whole::Any,
            false => Whole::No,
        };
        let passes = row.passes.iter().map(compile).collect::<Result<_, Error>>()?;
        Ok(Self { passes, whole, add_bos: row.add_bos })
    }

    /// A name of each way that the table knows; `default` is none of its own, and Gemma 4's is no name of a file.
    pub fn names() -> impl Iterator<Item = &'static str> {
        let names = TABLE.iter().map(|row| if row.names[0] == "llama3" { "llama-bpe" } else { row.names[0] });
        names.filter(|name| !["default", "gemma4"].contains(name))
    }

    /// Returns the patterns after a name as `tokenizer.json` files have them, each cutting the words of the one before
    /// it: blanks look ahead there.
    pub fn patterns(name: &str) -> Result<Vec<String>, Error> {
        let pattern = |&(pattern, blanks): &Pass| match (blanks, pattern.strip_suffix(r"|\s+")) {
            (Blanks::GiveBack | Blanks::GiveBackInLine, Some(head)) => format!("{head}{LOOKAHEAD}"),
            _ => pattern.to_string(),
        };
        Ok(Self::row(name)?.passes.iter().map(pattern).collect())
    }

    /// Returns the row of a name; an unknown name is an error that lists the known ones.
    fn row(name: &str) -> Result<&'static Row, Error> {
        TABLE.iter().find(|row| row.names.contains(&name)).ok_or_else(|| Error::Pre {
            found: name.into(),
            known: TABLE.iter().flat_map(|row| row.names).copied().collect::<Vec<_>>().join(", "),
        })
    }

    /// One of passes that a file describes.
    pub fn of(passes: Vec<Split>, whole: Whole) -> Self {
        Self { passes, whole, add_bos: false }
    }

    /// Returns whether a part of a text may be in none of its words.
    pub fn removes(&self) -> bool {
        self.passes.iter().any(|pass| pass.behavior == Behavior::Removed)
    }

    /// Calls `each` with the words of a text, in order; together they are the text, but for what is removed.
    pub fn split(&self, text: &str, each: &mut dyn FnMut(&str)) {
        split(&self.passes, text, each);
    }
}

/// How the usual patterns end: a run of blanks leaves its last one to the word behind it.
const LOOKAHEAD: &str = r"|\s+(?!\S)|\s+";
/// Longest pattern of a file, in bytes; those in use have some hundred.
const MAX_PATTERN: usize = 16 << 10;

impl Split {
    /// Returns the split of a pattern in the words of Oniguruma, which is what `tokenizer.json` files are written for;
    /// `Err` says what of it is not supported.
    pub fn of(pattern: &str, behavior: Behavior, invert: bool) -> Result<Self, String> {
        if pattern.len() > MAX_PATTERN {
            return Err(format!("is {} bytes long, at most {MAX_PATTERN} are allowed", pattern.len()));
        }
        if let Some(construct) = other_meaning(pattern) {
            return Err(format!("uses {construct}, which is not supported"));
        }
        // Oniguruma's `^` and `$` are those of lines.
        let stepper = match pattern.strip_suffix(LOOKAHEAD) {
            Some(head) => Stepper::new(&[head, r"\s+"]),
            None => Stepper::new(&[pattern]),
        };
        Ok(Self { finder: Finder::File(stepper?), behavior, invert })
    }

    /// Returns the split at a text.
    pub fn of_text(text: &str, behavior: Behavior, invert: bool) -> Result<Self, String> {
        Self::of(&regex::escape(text), behavior, invert)
    }

    /// Returns the pattern alone; `Err` where it needs the rule of blanks.
    pub fn into_stepper(self) -> Result<Stepper, String> {
        match self.finder {
            Finder::File(stepper) if stepper.n_patterns() == 1 => Ok(stepper),
            _ => Err("looks ahead, which is not supported here".into()),
        }
    }

    /// GPT-2's words, which `ByteLevel` cuts by itself.
    pub fn gpt2() -> Result<Self, String> {
        let regex = Regex::new(GPT2.0).map_err(|error| error.to_string())?;
        Ok(Self { finder: Finder::Known(regex, GPT2.1), behavior: Behavior::Isolated, invert: false })
    }

    fn search(&self, bytes: usize) -> Search<'_> {
        match &self.finder {
            Finder::Known(regex, blanks) => Search::Known(regex, *blanks),
            Finder::File(stepper) => Search::File(stepper.scan(bytes)),
        }
    }

    /// Calls `each` with the pieces of a text.
    fn pieces(&self, text: &str, each: &mut dyn FnMut(&str)) {
        let mut pieces: Vec<(Range<usize>, bool)> = Vec::new();
        let (mut done, mut from) = (0, 0);
        let mut search = self.search(text.len());
        while let Some((start, end)) = search.find(text, from) {
            if start > done {
                pieces.push((done..start, self.invert));
            }
            if end > start {
                pieces.push((start..end, !self.invert));
            }
            done = end;
            from = match end > start {
                true => end,
                // An empty match moves on by a character.
                false => match text[end..].chars().next() {
                    Some(c) => end + c.len_utf8(),
                    None => break,
                },
            };
        }
        if done < text.len() {
            pieces.push((done..text.len(), self.invert));
        }
        let joins = |behavior, previous: bool, this: bool| match behavior {
            Behavior::MergedWithPrevious => this && !previous,
            Behavior::MergedWithNext => !this && previous,
            Behavior::Contiguous => this == previous,
            Behavior::Isolated | Behavior::Removed => false,
        };
        let mut i = 0;
        while let Some((range, found)) = pieces.get(i).cloned() {
            let (mut end, mut last) = (range.end, found);
            while let Some((next, found)) = pieces.get(i + 1).filter(|(_, found)| joins(self.behavior, last, *found)) {
                (end, last) = (next.end, *found);
                i += 1;
            }
            if !(found && self.behavior == Behavior::Removed) {
                each(&text[range.start..end]);
            }
            i += 1;
        }
    }
}

/// Returns what of a pattern means something else, or nothing, to the `regex` crate, which would not say so.
fn other_meaning(pattern: &str) -> Option<&'static str> {
    let (mut in_class, mut escaped, mut repeats) = (0, false, false);
    let bytes = pattern.as_bytes();
    for (i, &byte) in bytes.iter().enumerate() {
        let was_repeat = std::mem::take(&mut repeats);
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'[' => in_class += 1,
            b']' if in_class > 0 => in_class -= 1,
            _ if in_class > 0 => (),
            b'+' if was_repeat => return Some("a possessive repetition"),
            b'?' if i > 0 && bytes[i - 1] == b'(' => {
                let flags = bytes[i + 1..].iter().take_while(|b| b.is_ascii_alphabetic() || **b == b'-');
                if flags.clone().any(|b| matches!(b, b'm' | b's' | b'x' | b'u')) {
                    return Some("a flag other than i");
                }
            }
            b'?' | b'*' | b'+' => repeats = true,
            _ => (),
        }
    }
    None
}

fn split(passes: &[Split], text: &str, each: &mut dyn FnMut(&str)) {
    let Some((pass, later)) = passes.split_first() else { return each(text) };
    if pass.behavior != Behavior::Isolated || pass.invert {
        return pass.pieces(text, &mut |piece| split(later, piece, each));
    }
    let mut done = 0;
    let mut search = pass.search(text.len());
    while let Some((start, end)) = search.find(text, done) {
        // A pattern of a file may match nothing; there the words are looked for with more care.
        if start == end {
            return pass.pieces(&text[done..], &mut |piece| split(later, piece, each));
        }
        if start > done {
            split(later, &text[done..start], each);
        }
        split(later, &text[start..end], each);
        done = end;
    }
    if done < text.len() {
        split(later, &text[done..], each);
    }
}

impl Blanks {
    /// Returns where a match that stands from `start` to `end` ends after the rule.
    fn end(self, text: &str, start: usize, end: usize) -> usize {
        let Some(last) = text[start..end].chars().next_back() else { return end };
        let gives_back = match self {
            Self::Keep => false,
            Self::GiveBack => last.is_whitespace(),
            Self::GiveBackInLine => last.is_whitespace() && !matches!(last, '\r' | '\n'),
        };
        let rest = end - last.len_utf8();
        // Only the alternative `\s+` can end in such a blank, or was seen to be the one, so the whole match is blank.
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
