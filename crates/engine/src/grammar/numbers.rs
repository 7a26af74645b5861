//! How long a number of a JSON text has become. JSON Schema bounds values and not digits, and a weak model may write
//! digits until its answer is cut; llama.cpp's grammars stop at 16.

/// Longest number that goes on where it may also end: more than any float or 64-bit integer needs.
const MAX_BYTES: usize = 24;

/// Follows a JSON text byte by byte.
#[derive(Clone, Debug, Default)]
pub(super) struct Numbers {
    in_string: bool,
    escaped: bool,
    /// Bytes of the number that the text ends in.
    n: usize,
}

impl Numbers {
    /// More of the text.
    pub fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => (self.in_string, self.n) = (!self.in_string, 0),
                _ if !self.in_string && continues(byte) => self.n += 1,
                _ => self.n = 0,
            }
        }
    }

    /// Whether the number that the text ends in should end too.
    pub fn is_long(&self) -> bool {
        self.n >= MAX_BYTES
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
            let mut numbers = Numbers::default();
            text.as_bytes().chunks(3).for_each(|piece| numbers.push(piece));
            assert_eq!(numbers.is_long(), is_long, "{text}");
        }
    }
}
