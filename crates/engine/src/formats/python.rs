//! Calls and values as Python writes them, where JSON's `true`, `false` and `null` are taken too.

use serde_json::Value;

use super::json::{Cursor, Halt};

/// Maximum nesting of a value.
const MAX_DEPTH: usize = 64;
/// What ends a name that is none.
const STOPS: &[char] = &[' ', '\n', '\t', ',', ')', '[', ']', '{', '}', '<', '>', '"', '\'', ':', ';'];

/// Returns whether a name may begin with it.
pub(super) fn begins_name(c: char) -> bool {
    c.is_alphabetic() || c == '_'
}

/// Reads the name of a function and the parenthesis after it.
pub(super) fn name<'a>(c: &mut Cursor<'a>) -> Result<&'a str, Halt> {
    if c.rest().chars().next().is_some_and(|first| !begins_name(first)) {
        return Err(Halt::Not);
    }
    c.until_within("(", STOPS)
}

/// Reads the next argument: its name, and its value as JSON; `None` at the closing parenthesis.
pub(super) fn argument<'a>(c: &mut Cursor<'a>, is_first: bool) -> Result<Option<(&'a str, String)>, Halt> {
    if c.blanks().have(")")? {
        return Ok(None);
    }
    if !is_first {
        c.expect(",")?;
        if c.blanks().have(")")? {
            return Ok(None);
        }
    }
    let key = c.until_within("=", &[',', ')', '(', '[', '{', '<', '"', '\'', '\n'])?.trim();
    if !key.starts_with(begins_name) {
        return Err(Halt::Not);
    }
    let mut json = String::new();
    value(c, &mut json, 0)?;
    Ok(Some((key, json)))
}

/// Returns a text that is one list or dictionary as JSON.
pub(super) fn collection(text: &str) -> Option<String> {
    let mut c = Cursor::new(text);
    let mut json = String::new();
    if !c.blanks().rest().starts_with(['[', '{', '(']) {
        return None;
    }
    value(&mut c, &mut json, 0).ok()?;
    c.blanks().rest().is_empty().then_some(json)
}

/// Reads a value, appended as JSON.
fn value(c: &mut Cursor<'_>, json: &mut String, depth: usize) -> Result<(), Halt> {
    if depth > MAX_DEPTH {
        return Err(Halt::Not);
    }
    let Some(first) = c.blanks().rest().chars().next() else { return Err(Halt::More) };
    match first {
        '"' | '\'' => {
            let text = string(c, first)?;
            json.push_str(&Value::from(text).to_string());
            Ok(())
        }
        '[' => list(c, json, "]", depth),
        '(' => list(c, json, ")", depth),
        '{' => object(c, json, depth),
        _ => word(c, json),
    }
}

fn list(c: &mut Cursor<'_>, json: &mut String, end: &str, depth: usize) -> Result<(), Halt> {
    c.expect(if end == "]" { "[" } else { "(" })?;
    json.push('[');
    let mut is_first = true;
    while !c.blanks().have(end)? {
        if !is_first {
            c.expect(",")?;
            if c.blanks().have(end)? {
                break;
            }
            json.push_str(", ");
        }
        is_first = false;
        value(c, json, depth + 1)?;
    }
    json.push(']');
    Ok(())
}

fn object(c: &mut Cursor<'_>, json: &mut String, depth: usize) -> Result<(), Halt> {
    c.expect("{")?;
    json.push('{');
    let mut is_first = true;
    while !c.blanks().have("}")? {
        if !is_first {
            c.expect(",")?;
            if c.blanks().have("}")? {
                break;
            }
            json.push_str(", ");
        }
        is_first = false;
        let Some(quote) = c.rest().chars().next() else { return Err(Halt::More) };
        if quote != '"' && quote != '\'' {
            return Err(Halt::Not);
        }
        json.push_str(&Value::from(string(c, quote)?).to_string());
        c.blanks().expect(":")?;
        json.push_str(": ");
        value(c, json, depth + 1)?;
    }
    json.push('}');
    Ok(())
}

/// Reads a number, or a word of Python's or JSON's.
fn word(c: &mut Cursor<'_>, json: &mut String) -> Result<(), Halt> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.' | '_');
    // What follows tells that the word has ended.
    let len = c.rest().find(|c| !is_part(c)).ok_or(Halt::More)?;
    let word = &c.rest()[..len];
    let said = match word {
        "True" | "true" => "true",
        "False" | "false" => "false",
        "None" | "null" => "null",
        // Digits beyond a float's stay.
        word if serde_json::from_str::<serde_json::Number>(word).is_ok() => word,
        _ => return Err(Halt::Not),
    };
    json.push_str(said);
    c.expect(word)?;
    Ok(())
}

/// Reads a string and its escapes. Line breaks are taken as they are: templates write them so.
fn string(c: &mut Cursor<'_>, quote: char) -> Result<String, Halt> {
    let text = c.rest();
    let mut out = String::new();
    let mut chars = text.char_indices().skip(1);
    while let Some((at, next)) = chars.next() {
        match next {
            _ if next == quote => {
                let len = at + next.len_utf8();
                c.expect(&text[..len])?;
                return Ok(out);
            }
            '\\' => {
                let (_, escape) = chars.next().ok_or(Halt::More)?;
                let n_digits = match escape {
                    'x' => 2,
                    'u' => 4,
                    'U' => 8,
                    _ => 0,
                };
                match escape {
                    '\n' => {}
                    'n' => out.push('\n'),
                    't' => out.push('\t'),
                    'r' => out.push('\r'),
                    'b' => out.push('\u{8}'),
                    'f' => out.push('\u{c}'),
                    '\\' | '\'' | '"' | '/' => out.push(escape),
                    'x' | 'u' | 'U' => {
                        let code = digits(&mut chars, n_digits)?;
                        out.push(paired(code, &mut chars)?);
                    }
                    other => out.extend(['\\', other]),
                }
            }
            _ => out.push(next),
        }
    }
    Err(Halt::More)
}

type Chars<'a> = std::iter::Skip<std::str::CharIndices<'a>>;

fn digits(chars: &mut Chars<'_>, n: usize) -> Result<u32, Halt> {
    (0..n).try_fold(0u32, |code, _| {
        let (_, digit) = chars.next().ok_or(Halt::More)?;
        let digit = digit.to_digit(16).ok_or(Halt::Not)?;
        code.checked_mul(16).map(|code| code + digit).ok_or(Halt::Not)
    })
}

/// Returns the character of a code, which JSON writes as two halves where it is past 16 bits. A half alone becomes
/// U+FFFD.
fn paired(code: u32, chars: &mut Chars<'_>) -> Result<char, Halt> {
    if (0xd800..0xdc00).contains(&code) {
        let mut ahead = chars.clone();
        let next = [ahead.next(), ahead.next()].map(|next| next.map(|(_, c)| c));
        match next {
            [None, _] | [Some('\\'), None] => return Err(Halt::More),
            [Some('\\'), Some('u')] => {
                let low = digits(&mut ahead, 4)?;
                if (0xdc00..0xe000).contains(&low) {
                    *chars = ahead;
                    return Ok(char::from_u32(0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00)).unwrap_or('\u{fffd}'));
                }
            }
            _ => {}
        }
    }
    Ok(char::from_u32(code).unwrap_or('\u{fffd}'))
}
