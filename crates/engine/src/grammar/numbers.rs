//! How long a number of a JSON text has become. JSON Schema bounds values and not digits, and a weak model may write
//! digits until its answer is cut; what reads the answer has 64 bits for an integer, and a double for the rest.

/// Longest number that goes on where it may also end: more than any double or 64-bit integer needs.
const MAX_BYTES: usize = 24;
/// Likewise where a text without quotes may stand in its place: longer than people write digits.
const MAX_BYTES_OF_TEXT: usize = 256;
/// Most digits of an exponent.
const MAX_EXPONENT: usize = 2;

/// Follows the text of a grammar byte by byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Numbers {
    /// Strings stand in quotes.
    quoted: bool,
    in_string: bool,
    escaped: bool,
    /// Bytes of the number that the text ends in.
    n: usize,
    /// Its digits before a point, as far as 64 bits hold them.
    whole: Option<i64>,
    /// A point has come.
    fraction: bool,
    /// Digits of its exponent, once that has begun.
    exponent: Option<usize>,
}

impl Numbers {
    /// Of JSON, with marks between its parts.
    pub const JSON: Numbers = Numbers {
        quoted: true,
        in_string: false,
        escaped: false,
        n: 0,
        whole: Some(0),
        fraction: false,
        exponent: None,
    };
    /// Of JSON among texts without quotes.
    pub const MIXED: Numbers = Numbers { quoted: false, ..Numbers::JSON };

    /// A token that is a mark: what stands behind it begins anew.
    pub fn mark(&mut self) {
        *self = Numbers { quoted: self.quoted, ..Numbers::JSON };
    }

    /// More of the text.
    pub fn push(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.byte(byte));
    }

    fn byte(&mut self, byte: u8) {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' if self.in_string => self.escaped = true,
            b'"' => {
                let in_string = self.quoted && !self.in_string;
                self.mark();
                self.in_string = in_string;
            }
            _ if !self.in_string && continues(byte) => {
                self.n += 1;
                self.digit(byte);
            }
            _ if self.n > 0 => self.mark(),
            _ => {}
        }
    }

    fn digit(&mut self, byte: u8) {
        match byte {
            b'.' => self.fraction = true,
            b'e' | b'E' => self.exponent = Some(0),
            b'0'..=b'9' => match &mut self.exponent {
                Some(n) => *n += 1,
                None if self.fraction => {}
                None => {
                    let digit = i64::from(byte - b'0');
                    self.whole = self.whole.and_then(|whole| whole.checked_mul(10)?.checked_add(digit));
                }
            },
            _ => {}
        }
    }

    /// Returns whether the number that the text ends in should end too.
    pub fn is_long(&self) -> bool {
        self.n >= if self.quoted { MAX_BYTES } else { MAX_BYTES_OF_TEXT }
    }

    /// Returns whether it is in a number, or about to begin one, and not in a string.
    pub fn may_count(&self) -> bool {
        self.quoted && !self.in_string
    }

    /// Returns whether these bytes would make the number larger than what reads it can hold.
    pub fn overflows(&self, bytes: &[u8]) -> bool {
        let mut after = *self;
        for &byte in bytes.iter() {
            if after.in_string || after.n > 0 && !continues(byte) {
                break;
            }
            after.byte(byte);
        }
        after.whole.is_none() || after.exponent.is_some_and(|n| n > MAX_EXPONENT)
    }
}

/// Returns whether a byte can be in a number after its first.
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

    #[test]
    fn integers_stay_within_64_bits() {
        let most = i64::MAX.to_string();
        for (text, more, overflows) in [
            ("{\"a\": ", most.as_str(), false),
            ("{\"a\": ", "9223372036854775808", true),
            ("{\"a\": -922337203685477580", "7", false),
            ("{\"a\": -922337203685477580", "9", true),
            ("{\"a\": 922337203685477580", ".9", false),
            ("{\"a\": 922337203685477580", ", 999", false),
            ("{\"a\": 0.", "9223372036854775808", false),
            ("{\"a\": 1e", "99", false),
            ("{\"a\": 1e+9", "99", true),
            ("[1, 2, ", "3", false),
            ("{", "\"9223372036854775808", false),
        ] {
            let mut numbers = Numbers::JSON;
            numbers.push(text.as_bytes());
            assert_eq!(numbers.overflows(more.as_bytes()), overflows, "{text} {more}");
        }
    }
}
