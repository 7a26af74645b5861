//! Patterns of JSON schemas as ECMAScript has them, in the words of regular expressions proper: look-ahead at the start
//! becomes further patterns that must match too.

/// Most names that a pattern is written out into.
const MAX_NAMES: usize = 64;

/// Returns patterns that all match where this one does; `None` where that takes look-around.
pub(super) fn without_look_around(pattern: &str) -> Option<Vec<String>> {
    let pattern = unicode(pattern);
    if !has_look_around(&pattern) {
        return Some(vec![pattern]);
    }
    let (mut rest, mut others) = (pattern.strip_prefix('^').unwrap_or(&pattern), Vec::new());
    while let Some(inside) = rest.strip_prefix("(?=").or(rest.strip_prefix("(?!")) {
        let end = group_end(inside)?;
        others.push(if rest.starts_with("(?=") { format!("^(?:{})", &inside[..end]) } else { never(&inside[..end])? });
        rest = &inside[end + 1..];
    }
    if has_look_around(rest) || others.iter().any(|other| has_look_around(other)) {
        return None;
    }
    let mut all = vec![format!("^{rest}")];
    all.append(&mut others);
    Some(all)
}

/// Returns a pattern of the texts at whose start this one does not match, where it is simple.
fn never(inside: &str) -> Option<String> {
    let inside = inside.strip_prefix('^').unwrap_or(inside);
    if let Some(twice) = inside.strip_prefix(".*") {
        // Nowhere the same character twice.
        let (one, rest) = class(twice)?;
        return (rest == one && !one.starts_with('[')).then(|| format!("^(?:{one}?{})*{one}?$", negated(one)));
    }
    let (one, rest) = class(inside)?;
    let not = negated(one);
    match rest {
        "" => Some(format!(r"^(?:{not}[\s\S]*)?$")),
        "*$" => Some(not),
        "+$" => Some(format!(r"^(?:[\s\S]*{not}[\s\S]*)?$")),
        _ => None,
    }
}

/// Returns the class or character that a pattern begins with, and the rest.
fn class(pattern: &str) -> Option<(&str, &str)> {
    let len = match pattern.chars().next()? {
        '[' => class_end(pattern)?,
        '\\' => {
            1 + pattern[1..].chars().next().filter(|c| c.is_ascii_punctuation() || "dwsDWS".contains(*c))?.len_utf8()
        }
        c if "^$.|?*+(){}".contains(c) => return None,
        c => c.len_utf8(),
    };
    Some(pattern.split_at(len))
}

/// Returns the class of all other characters.
fn negated(one: &str) -> String {
    match one.strip_prefix('[') {
        Some(inner) => inner.strip_prefix('^').map_or_else(|| format!("[^{inner}"), |inner| format!("[{inner}")),
        None => format!("[^{one}]"),
    }
}

/// Length of the class that a pattern begins with.
fn class_end(pattern: &str) -> Option<usize> {
    let mut escaped = false;
    for (at, byte) in pattern.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b']' => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// Returns where the group ends that this is inside of.
fn group_end(inside: &str) -> Option<usize> {
    let (mut depth, mut at) = (0usize, 0);
    while let Some(byte) = inside.as_bytes().get(at) {
        match byte {
            b'\\' => at += 1,
            b'[' => at += class_end(&inside[at..])? - 1,
            b'(' => depth += 1,
            b')' if depth == 0 => return Some(at),
            b')' => depth -= 1,
            _ => {}
        }
        at += 1;
    }
    None
}

fn has_look_around(pattern: &str) -> bool {
    let mut at = 0;
    while let Some(byte) = pattern.as_bytes().get(at) {
        match byte {
            b'\\' => at += 1,
            b'[' => at += class_end(&pattern[at..]).map_or(0, |end| end - 1),
            b'(' if ["(?=", "(?!", "(?<=", "(?<!"].iter().any(|open| pattern[at..].starts_with(open)) => return true,
            _ => {}
        }
        at += 1;
    }
    false
}

/// Returns a pattern whose `\uXXXX` are `\x{XXXX}`.
fn unicode(pattern: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(pattern.len()), pattern);
    while let Some(at) = rest.find('\\') {
        let after = &rest[at + 1..];
        out.push_str(&rest[..at]);
        let digits = after.strip_prefix('u').and_then(|digits| digits.get(..4));
        match digits.filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit())) {
            Some(digits) => {
                out.push_str(&format!("\\x{{{digits}}}"));
                rest = &after[5..];
            }
            None => {
                let len = after.chars().next().map_or(0, char::len_utf8);
                out.push_str(&rest[at..at + 1 + len]);
                rest = &after[len..];
            }
        }
    }
    out + rest
}

/// Returns all texts that a pattern matches, where it is a row of characters and small classes, or a choice of such.
pub(super) fn finite(pattern: &str) -> Option<Vec<String>> {
    let body = pattern.strip_prefix('^')?.strip_suffix('$')?;
    let choice = body.strip_prefix("(?:").or(body.strip_prefix('(')).and_then(|body| body.strip_suffix(')'));
    let mut all = Vec::new();
    for one in choice.unwrap_or(body).split('|') {
        if choice.is_none() && body.contains('|') {
            return None;
        }
        all.append(&mut row(one)?);
    }
    (all.len() <= MAX_NAMES).then_some(all)
}

fn row(mut rest: &str) -> Option<Vec<String>> {
    let mut all = vec![String::new()];
    while !rest.is_empty() {
        let (one, after) = class(rest)?;
        let characters: Vec<char> = match one.strip_prefix('[').and_then(|one| one.strip_suffix(']')) {
            Some(inner) if inner.contains(['\\', '-', '^', '[']) => return None,
            Some(inner) => inner.chars().collect(),
            None => vec![one.chars().last().filter(|c| one.len() == 1 || c.is_ascii_punctuation())?],
        };
        if all.len() * characters.len() > MAX_NAMES || after.starts_with(['?', '*', '+', '{']) {
            return None;
        }
        all = all.iter().flat_map(|name| characters.iter().map(move |c| format!("{name}{c}"))).collect();
        rest = after;
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn look_ahead_at_the_start_becomes_patterns() {
        let cases: [(&str, Option<&[&str]>); 14] = [
            ("^a+$", Some(&["^a+$"])),
            (r"\u00e9[(?=]", Some(&[r"\x{00e9}[(?=]"])),
            (r"\\u00e9\(?=", Some(&[r"\\u00e9\(?="])),
            (r"^(?=.*\d)(?=[)\]])x$", Some(&["^x$", r"^(?:.*\d)", r"^(?:[)\]])"])),
            // pydantic's decimal, and zod's address of mail.
            (r"^(?!^[-+.]*$)[+-]?\d*\.?\d*$", Some(&[r"^[+-]?\d*\.?\d*$", "[^-+.]"])),
            (r"^(?!\.)(?!.*\.\.)[a-z.]+$", Some(&["^[a-z.]+$", r"^(?:[^\.][\s\S]*)?$", r"^(?:\.?[^\.])*\.?$"])),
            ("^(?!^[^a]+$)b", Some(&["^b", r"^(?:[\s\S]*[a][\s\S]*)?$"])),
            ("^(?!abc)x", None),
            ("a(?=b)", None),
            ("(?<=a)b", None),
            ("^(?=(?!a)b)c", None),
            ("^(?=a", None),
            ("^(?!.*ab)c", None),
            ("(?!", None),
        ];
        for (pattern, expected) in cases {
            let expected = expected.map(|all| all.iter().map(|one| one.to_string()).collect());
            assert_eq!(without_look_around(pattern), expected, "{pattern}");
        }
    }

    #[test]
    fn small_patterns_are_written_out() {
        for (pattern, expected) in [
            ("^score$", Some(vec!["score"])),
            ("^a[bc]$", Some(vec!["ab", "ac"])),
            (r"^(x|y\.z)$", Some(vec!["x", "y.z"])),
            ("score", None),
            ("^a|b$", None),
            ("^ab?$", None),
            ("^[a-z]$", None),
            (r"^\d$", None),
            ("^[abcdefgh][abcdefgh][abcdefgh]$", None),
        ] {
            let expected = expected.map(|all| all.into_iter().map(String::from).collect());
            assert_eq!(finite(pattern), expected, "{pattern}");
        }
    }
}
