//! The steps of a `tokenizer.json` around its model: what becomes of a text before it is cut, how it is cut, what is
//! put around the tokens, and how tokens are shown. A step that is not known is an error that names it, because a text
//! would be cut in another way than the model has learnt. Knows nothing of the vocabulary.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use crate::tokenizer::SPACE;
use crate::tokenizer::charsmap::Charsmap;
use crate::tokenizer::normalize::Step;
use crate::tokenizer::pretokenize::{Behavior, Split};
use crate::tokenizer::wordpiece::Cleaner;

/// How deep sequences may stand in sequences.
const MAX_DEPTH: usize = 8;
/// Most patterns of a file; each may take two megabytes. Files in use have up to four.
const MAX_PATTERNS: usize = 16;
/// Longest text that a step puts into a text, in bytes.
const MAX_ADDED: usize = 64;

/// What of a step is wrong, without the name of the file.
type Parsed<T> = Result<T, String>;

/// How a text is cut into words.
#[derive(Default)]
pub struct Cuts {
    /// What is changed before, text by text between special tokens.
    pub changes: Vec<Step>,
    pub splits: Vec<Split>,
    /// Words are their bytes, each written as a character.
    pub byte_level: bool,
    /// At blanks and around punctuation, as BERT does it.
    pub bert: bool,
    /// At blanks, before what follows.
    pub blanks: bool,
}

/// What is put around a text's tokens.
#[derive(Default)]
pub struct Around {
    pub before: Vec<u32>,
    pub after: Vec<u32>,
    /// Before, between and after two texts that are one input.
    pub pair: Option<[Vec<u32>; 3]>,
}

/// How tokens are shown.
#[derive(Default)]
pub struct Shown {
    pub byte_level: bool,
    /// `▁` is a space.
    pub spaces: bool,
    /// The first space of a text is left out.
    pub strips_space: bool,
    /// `##` continues a word, and all else begins one.
    pub pieces: bool,
}

/// Returns the steps of a normalizer.
pub fn normalizer(node: &Value) -> Parsed<Vec<Step>> {
    let mut steps = Vec::new();
    let mut n_patterns = 0;
    each(node, "normalizer", "normalizers", 0, &mut |kind, node| {
        steps.push(match kind {
            "NFC" => Step::Nfc,
            "NFD" => Step::Nfd,
            "NFKC" => Step::Nfkc,
            "NFKD" => Step::Nfkd,
            "Precompiled" => {
                let table = STANDARD.decode(text(node, "precompiled_charsmap")?).map_err(|why| why.to_string());
                let table = table.and_then(|table| Charsmap::new(&table));
                Step::Map(Box::new(table.map_err(|what| format!("normalizer Precompiled: {what}"))?))
            }
            "Lowercase" => Step::Lowercase,
            "BertNormalizer" => {
                let lowercases = flag(node, "lowercase", true)?;
                Step::Clean(Box::new(Cleaner::new(
                    flag(node, "clean_text", true)?,
                    flag(node, "handle_chinese_chars", true)?,
                    flag(node, "strip_accents", lowercases)?,
                    lowercases,
                )))
            }
            "Prepend" => Step::Prepend(added(node, "prepend")?),
            "Strip" => Step::Strip(flag(node, "strip_left", true)?, flag(node, "strip_right", true)?),
            "Replace" => match (text(&node["pattern"], "String"), text(&node["pattern"], "Regex")) {
                (Ok(""), _) => return Err("normalizer Replace: replaces the empty text".into()),
                (Ok(from), _) => Step::ReplaceText(from.into(), added(node, "content")?),
                (_, Ok(pattern)) => {
                    n_patterns += 1;
                    few_patterns("normalizer", n_patterns)?;
                    let split = Split::of(pattern, Behavior::Isolated, false);
                    let split = split.map_err(|what| format!("normalizer Replace: pattern {what}"))?;
                    Step::Replace(split.into_stepper()?, added(node, "content")?)
                }
                _ => return Err("normalizer Replace: has no pattern".into()),
            },
            other => return Err(format!("normalizer {other:?} is not known")),
        });
        Ok(())
    })?;
    Ok(steps)
}

/// Fails where there are too many patterns, before they are compiled.
fn few_patterns(part: &str, n: usize) -> Parsed<()> {
    match n > MAX_PATTERNS {
        true => Err(format!("{part}: it has more than {MAX_PATTERNS} patterns")),
        false => Ok(()),
    }
}

/// Returns the steps of a pre-tokenizer.
pub fn pre_tokenizer(node: &Value) -> Parsed<Cuts> {
    let mut cuts = Cuts::default();
    each(node, "pre_tokenizer", "pretokenizers", 0, &mut |kind, node| {
        let first = cuts.splits.is_empty() && cuts.changes.is_empty();
        if cuts.blanks && kind != "Metaspace" {
            return Err(format!("pre_tokenizer {kind}: it follows WhitespaceSplit"));
        }
        if cuts.bert || kind == "BertPreTokenizer" && !first {
            return Err(format!("pre_tokenizer {kind}: BertPreTokenizer is known by itself alone"));
        }
        if cuts.byte_level {
            return Err(format!("pre_tokenizer {kind}: it follows ByteLevel"));
        }
        few_patterns("pre_tokenizer", cuts.splits.len() + 1)?;
        match kind {
            "Split" => cuts.splits.push(split(node)?),
            "BertPreTokenizer" => cuts.bert = true,
            "WhitespaceSplit" if first => cuts.blanks = true,
            "Digits" => {
                let pattern = if flag(node, "individual_digits", false)? { r"\p{N}" } else { r"\p{N}+" };
                cuts.splits.push(Split::of(pattern, Behavior::Isolated, false)?);
            }
            "ByteLevel" => {
                cuts.byte_level = true;
                if flag(node, "add_prefix_space", true)? {
                    if !first {
                        return Err("pre_tokenizer ByteLevel: adds a space to every word".into());
                    }
                    cuts.changes.push(Step::PrependMissing(" ".into()));
                }
                if flag(node, "use_regex", true)? {
                    cuts.splits.push(Split::gpt2()?);
                }
            }
            "Metaspace" => {
                if !first {
                    return Err("pre_tokenizer Metaspace: it follows others".into());
                }
                let by_word = std::mem::take(&mut cuts.blanks);
                if text(node, "replacement")? != SPACE {
                    return Err(format!("pre_tokenizer Metaspace: replacement is not {SPACE:?}"));
                }
                if by_word {
                    if scheme(node)? != "always" {
                        return Err("pre_tokenizer Metaspace: after WhitespaceSplit it marks every word".into());
                    }
                    cuts.changes.push(Step::Words(SPACE.into()));
                    cuts.splits.push(Split::of_text(SPACE, Behavior::MergedWithNext, false)?);
                    return Ok(());
                }
                cuts.changes.push(Step::ReplaceText(" ".into(), SPACE.into()));
                match scheme(node)? {
                    "never" => (),
                    "first" => cuts.changes.push(Step::PrependFirst(SPACE.into())),
                    _ => cuts.changes.push(Step::PrependMissing(SPACE.into())),
                }
                if flag(node, "split", true)? {
                    cuts.splits.push(Split::of_text(SPACE, Behavior::MergedWithNext, false)?);
                }
            }
            other => return Err(format!("pre_tokenizer {other:?} is not known")),
        }
        Ok(())
    })?;
    match cuts.blanks {
        true => Err("pre_tokenizer WhitespaceSplit: it is known in front of Metaspace alone".into()),
        false => Ok(cuts),
    }
}

fn split(node: &Value) -> Parsed<Split> {
    let behavior = match text(node, "behavior")? {
        "Isolated" => Behavior::Isolated,
        "Removed" => Behavior::Removed,
        "MergedWithPrevious" => Behavior::MergedWithPrevious,
        "MergedWithNext" => Behavior::MergedWithNext,
        "Contiguous" => Behavior::Contiguous,
        other => return Err(format!("pre_tokenizer Split: behavior {other:?} is not known")),
    };
    let invert = flag(node, "invert", false)?;
    let split = match (text(&node["pattern"], "Regex"), text(&node["pattern"], "String")) {
        (Ok(pattern), _) => Split::of(pattern, behavior, invert),
        (_, Ok(pattern)) => Split::of_text(pattern, behavior, invert),
        _ => return Err("pre_tokenizer Split: has no pattern".into()),
    };
    split.map_err(|what| format!("pre_tokenizer Split: pattern {what}"))
}

/// Returns where Metaspace puts a space: older files say so with a flag.
fn scheme(node: &Value) -> Parsed<&str> {
    match &node["prepend_scheme"] {
        Value::Null => Ok(if flag(node, "add_prefix_space", true)? { "always" } else { "never" }),
        Value::String(scheme) if ["always", "never", "first"].contains(&scheme.as_str()) => Ok(scheme),
        other => Err(format!("Metaspace: prepend_scheme {other} is not known")),
    }
}

/// Returns the tokens that a post-processor puts around a text.
pub fn post_processor(node: &Value) -> Parsed<Around> {
    let mut around = Around::default();
    each(node, "post_processor", "processors", 0, &mut |kind, node| {
        match kind {
            "ByteLevel" => (),
            "TemplateProcessing" => {
                let single = template(node, "single")?;
                around.before.extend(single.first().into_iter().flatten());
                around.after.extend(single.iter().skip(1).flatten());
                around.pair = template(node, "pair")?.try_into().ok();
            }
            "BertProcessing" | "RobertaProcessing" => {
                let [cls, sep] = ["cls", "sep"].map(|key| node[key][1].as_u64().and_then(|id| u32::try_from(id).ok()));
                let (Some(cls), Some(sep)) = (cls, sep) else {
                    return Err(format!("post_processor {kind}: cls or sep has no id"));
                };
                around.before.push(cls);
                around.after.push(sep);
                let n_between = if kind == "BertProcessing" { 1 } else { 2 };
                around.pair = Some([vec![cls], vec![sep; n_between], vec![sep]]);
            }
            other => return Err(format!("post_processor {other:?} is not known")),
        }
        Ok(())
    })?;
    Ok(around)
}

/// Returns the ids of a template's tokens in front of its first text, and after each text up to the next.
fn template(node: &Value, key: &str) -> Parsed<Vec<Vec<u32>>> {
    let mut parts = vec![Vec::new()];
    for piece in node[key].as_array().into_iter().flatten() {
        if piece.get("Sequence").is_some() {
            parts.push(Vec::new());
            continue;
        }
        let name = text(&piece["SpecialToken"], "id")?;
        let ids = &node["special_tokens"][name]["ids"];
        let ids = ids.as_array().into_iter().flatten().map(|id| u32::try_from(id.as_u64()?).ok());
        let ids = ids.collect::<Option<Vec<_>>>().filter(|ids| !ids.is_empty());
        let ids = ids.ok_or_else(|| format!("post_processor: token {name:?} has no ids"))?;
        parts.iter_mut().last().into_iter().for_each(|part| part.extend(&ids));
    }
    Ok(parts)
}

/// Returns how a decoder shows tokens.
pub fn decoder(node: &Value) -> Parsed<Shown> {
    let mut shown = Shown::default();
    each(node, "decoder", "decoders", 0, &mut |kind, node| {
        match kind {
            "ByteLevel" => shown.byte_level = true,
            "ByteFallback" | "Fuse" => (),
            "WordPiece" if node["prefix"] == "##" => (shown.pieces, shown.strips_space) = (true, true),
            "Metaspace" => {
                shown.spaces = true;
                shown.strips_space = scheme(node)? != "never";
            }
            "Replace" if node["pattern"]["String"] == SPACE && node["content"] == " " => shown.spaces = true,
            "Strip" if node["content"] == " " && node["stop"] == 0 => shown.strips_space = node["start"] != 0,
            other => return Err(format!("decoder {other:?} is not known in this form")),
        }
        Ok(())
    })?;
    Ok(shown)
}

/// Calls `step` with each step of a part, those inside sequences one after the other; `list` is what a sequence calls
/// them.
fn each(
    node: &Value,
    part: &str,
    list: &str,
    depth: usize,
    step: &mut dyn FnMut(&str, &Value) -> Parsed<()>,
) -> Parsed<()> {
    if node.is_null() {
        return Ok(());
    }
    if depth > MAX_DEPTH {
        return Err(format!("{part}: sequences nest more than {MAX_DEPTH} deep"));
    }
    match text(node, "type").map_err(|what| format!("{part}: {what}"))? {
        "Sequence" => {
            let steps = node[list].as_array().ok_or_else(|| format!("{part}: a sequence has no {list}"))?;
            steps.iter().try_for_each(|node| each(node, part, list, depth + 1, step))
        }
        kind => step(kind, node),
    }
}

fn text<'v>(node: &'v Value, key: &str) -> Parsed<&'v str> {
    node[key].as_str().ok_or_else(|| format!("{key} is no text"))
}

/// Returns a text that is put into texts.
fn added(node: &Value, key: &str) -> Parsed<String> {
    let text = text(node, key)?;
    match text.len() > MAX_ADDED {
        true => Err(format!("{key} is {} bytes long, at most {MAX_ADDED} are allowed", text.len())),
        false => Ok(text.into()),
    }
}

fn flag(node: &Value, key: &str, default: bool) -> Parsed<bool> {
    match &node[key] {
        Value::Null => Ok(default),
        Value::Bool(flag) => Ok(*flag),
        _ => Err(format!("{key} is neither true nor false")),
    }
}
