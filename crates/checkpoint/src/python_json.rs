//! JSON as Python writes it: `NaN`, `Infinity` and `-Infinity` are numbers there and no JSON.

use std::borrow::Cow;

/// Python's names.
const NAMES: [&str; 3] = ["NaN", "-Infinity", "Infinity"];

/// Returns the text with `by(name)` in place of each of these numbers; what strings contain is kept.
pub fn replace_numbers(text: &[u8], by: fn(&str) -> &'static [u8]) -> Cow<'_, [u8]> {
    let mut out = Vec::new();
    let (mut copied, mut at, mut in_string) = (0, 0, false);
    while let Some(&byte) = text.get(at) {
        match byte {
            b'\\' if in_string => at += 1,
            b'"' => in_string = !in_string,
            b'N' | b'-' | b'I' if !in_string => {
                if let Some(name) = NAMES.iter().find(|name| text[at..].starts_with(name.as_bytes())) {
                    out.extend_from_slice(&text[copied..at]);
                    out.extend_from_slice(by(name));
                    at += name.len();
                    copied = at;
                    continue;
                }
            }
            _ => {}
        }
        at += 1;
    }
    if copied == 0 {
        return text.into();
    }
    out.extend_from_slice(&text[copied..]);
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_replaced_outside_of_strings() {
        let replaced = |text: &str| {
            let by = |name: &str| -> &'static [u8] { if name == "NaN" { b"0" } else { b"null" } };
            String::from_utf8(replace_numbers(text.as_bytes(), by).into_owned()).unwrap()
        };
        assert_eq!(replaced(r#"{"a": [0.0, Infinity, -Infinity], "b": NaN}"#), r#"{"a": [0.0, null, null], "b": 0}"#);
        for kept in [r#"{"NaN": "Infinity \" NaN", "b": "\\", "c": -1}"#, "", "\"NaN", "\"\\"] {
            assert!(matches!(replace_numbers(kept.as_bytes(), |_| b"?"), Cow::Borrowed(_)), "{kept}");
        }
    }
}
