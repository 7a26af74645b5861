//! How long a number of a JSON text has become. JSON Schema bounds values and not digits, and a weak model may write
//! digits until its answer is cut; llama.cpp's grammars stop at 16.

/// Longest number that goes on where it may also end: more than any float or 64-bit integer needs.
const MAX_BYTES: usize = 24;
/// Likewise where a text without quotes may stand in its place: longer than people write digits.
const MAX_BYTES_OF_TEXT: usize = 256;

/// Follows the text of a grammar byte by byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Numbers {
    /// Strings stand in quotes.
    quoted: bool,
    in_string: bool,
    escaped: bool,
    /// Bytes of the number that the text ends in.
    n: usize,
}

impl Numbers {
    /// Of JSON, with marks between its parts.
    pub const JSON: Numbers = Numbers { quoted: true, in_string: false, escaped: false, n: 0 };
    /// Of JSON among texts without quotes.
    pub const MIXED: Numbers = Numbers { quoted: false, ..Numbers::JSON };

    /// A token that is a mark: what stands behind it begins anew.
    pub fn mark(&mut self) {
        *self = Numbers { quoted: self.quoted, ..Numbers::JSON };
    }

    /// More of the text.
    pub fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => (self.in_string, self.n) = (self.quoted && !self.in_string, 0),
                _ if !self.in_string && continues(byte) => self.n += 1,
                _ => self.n = 0,
            }
        }
    }

    /// Whether the number that the text ends in should end too.
    pub fn is_long(&self) -> bool {
        self.n >= if self.quoted { MAX_BYTES } else { MAX_BYTES_OF_TEXT }
    }
}

/// Whether a byte can stand in a number behind its first.
pub(super) fn continues(byte: u8) -> bool {
    byte.is_ascii_digit() || b"+-.eE".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_long_outside_of_strings_alone() {
        let digits = "1".repeat(MAX_BYTES);
        for (text, is_long) in [
            (format!("{{\"a\": {digits}"), true),
            (format!("[{digits},{}", &digits[1..]), false),
            (format!("{{\"{digits}"), false),
            (format!("\"\\\"\", -0.{digits}"), true),
            (format!("\"\\\\\"{digits}"), true),
            (format!("\"\\\"{digits}"), false),
            (format!("{digits} "), false),
        ] {
            let mut numbers = Numbers::JSON;
            text.as_bytes().chunks(3).for_each(|piece| numbers.push(piece));
            assert_eq!(numbers.is_long(), is_long, "{text}");
        }
        // A quote in a thought does not hide the numbers behind it.
        let mut numbers = Numbers::JSON;
        numbers.push(b"he said \"so");
        numbers.mark();
        numbers.push(digits.as_bytes());
        assert!(numbers.is_long());
        let mut mixed = Numbers::MIXED;
        mixed.push(format!("\"{digits}").as_bytes());
        assert!(!mixed.is_long());
        mixed.push("7".repeat(MAX_BYTES_OF_TEXT).as_bytes());
        assert!(mixed.is_long());
    }
}
