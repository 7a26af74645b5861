//! Incremental JSON: whether the text so far begins an object, and where the object ends.

/// Maximum nesting of a call's arguments.
const MAX_DEPTH: usize = 128;

/// What is expected next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expect {
    /// The `{` of the object itself.
    Open,
    /// A key or `}`.
    KeyOrEnd,
    Key,
    Colon,
    Value,
    /// A value or `]`.
    ValueOrEnd,
    /// `,` or the end of the innermost object or list.
    CommaOrEnd,
    /// Inside a string; a key or a value.
    Text {
        key: bool,
    },
    /// After a backslash.
    Escape {
        key: bool,
    },
    /// Inside `\uXXXX`: hexadecimal digits left.
    Hex {
        key: bool,
        left: u8,
    },
    /// Inside `true`, `false` or `null`: the bytes left.
    Word(&'static [u8]),
    Number(Digits),
}

/// Position in a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Digits {
    Minus,
    Zero,
    Whole,
    Point,
    Fraction,
    E,
    Sign,
    Exponent,
}

/// Result of a scan of a piece of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scanned {
    /// All of it belongs to the object, which is not complete.
    More,
    /// The object ends after this many bytes.
    End(usize),
    /// The byte at this index is invalid; a scan that continues from it fails again.
    Bad(usize),
}

/// Scans one JSON object byte by byte.
#[derive(Clone, Debug)]
pub(super) struct Scan {
    /// Open objects (true) and lists (false).
    open: Vec<bool>,
    expect: Expect,
}

impl Scan {
    /// Before the object's `{`.
    pub fn new() -> Scan {
        Scan { open: Vec::new(), expect: Expect::Open }
    }

    /// Inside an object, after one of its values.
    pub fn behind_value() -> Scan {
        Scan { open: vec![true], expect: Expect::CommaOrEnd }
    }

    /// Scans more of the text.
    pub fn push(&mut self, text: &str) -> Scanned {
        for (at, byte) in text.bytes().enumerate() {
            if !self.byte(byte) {
                return Scanned::Bad(at);
            }
            if self.open.is_empty() {
                return Scanned::End(at + 1);
            }
        }
        Scanned::More
    }

    /// Whether the object's `{` has been read.
    pub fn has_begun(&self) -> bool {
        self.expect != Expect::Open
    }

    /// Scans a byte; false when it is invalid here.
    fn byte(&mut self, byte: u8) -> bool {
        use Expect::*;
        if let Number(digits) = self.expect {
            match digits.next(byte) {
                Some(next) => {
                    self.expect = Number(next);
                    return true;
                }
                None if digits.may_end() => self.expect = CommaOrEnd,
                None => return false,
            }
        }
        let blank = matches!(byte, b' ' | b'\n' | b'\r' | b'\t');
        self.expect = match (self.expect, byte) {
            (Open | KeyOrEnd | Key | Colon | Value | ValueOrEnd | CommaOrEnd, _) if blank && !self.open.is_empty() => {
                return true;
            }
            (Open | Value | ValueOrEnd, b'{') => return self.enter(true, KeyOrEnd),
            (Value | ValueOrEnd, b'[') => return self.enter(false, ValueOrEnd),
            (KeyOrEnd, b'}') | (ValueOrEnd, b']') => return self.leave(),
            (CommaOrEnd, b'}' | b']') if self.open.last() == Some(&(byte == b'}')) => return self.leave(),
            (CommaOrEnd, b',') => {
                if self.open.last() == Some(&true) {
                    Key
                } else {
                    Value
                }
            }
            (KeyOrEnd | Key, b'"') => Text { key: true },
            (Colon, b':') => Value,
            (Value | ValueOrEnd, b'"') => Text { key: false },
            (Value | ValueOrEnd, b't') => Word(b"rue"),
            (Value | ValueOrEnd, b'f') => Word(b"alse"),
            (Value | ValueOrEnd, b'n') => Word(b"ull"),
            (Value | ValueOrEnd, b'-') => Number(Digits::Minus),
            (Value | ValueOrEnd, b'0') => Number(Digits::Zero),
            (Value | ValueOrEnd, b'1'..=b'9') => Number(Digits::Whole),
            (Text { key: true }, b'"') => Colon,
            (Text { key: false }, b'"') => CommaOrEnd,
            (Text { key }, b'\\') => Escape { key },
            (Text { .. }, 0x20..) => return true,
            (Escape { key }, b'u') => Hex { key, left: 4 },
            (Escape { key }, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Text { key },
            (Hex { key, left }, _) if byte.is_ascii_hexdigit() => match left {
                1 => Text { key },
                _ => Hex { key, left: left - 1 },
            },
            (Word([first, rest @ ..]), _) if *first == byte => {
                if rest.is_empty() {
                    CommaOrEnd
                } else {
                    Word(rest)
                }
            }
            _ => return false,
        };
        true
    }

    fn enter(&mut self, object: bool, expect: Expect) -> bool {
        self.open.push(object);
        self.expect = expect;
        self.open.len() <= MAX_DEPTH
    }

    fn leave(&mut self) -> bool {
        self.open.pop();
        self.expect = Expect::CommaOrEnd;
        true
    }
}

impl Digits {
    fn next(self, byte: u8) -> Option<Digits> {
        use Digits::*;
        match (self, byte) {
            (Minus, b'0') => Some(Zero),
            (Minus, b'1'..=b'9') | (Whole, b'0'..=b'9') => Some(Whole),
            (Zero | Whole, b'.') => Some(Point),
            (Point | Fraction, b'0'..=b'9') => Some(Fraction),
            (Zero | Whole | Fraction, b'e' | b'E') => Some(E),
            (E, b'+' | b'-') => Some(Sign),
            (E | Sign | Exponent, b'0'..=b'9') => Some(Exponent),
            _ => None,
        }
    }

    fn may_end(self) -> bool {
        matches!(self, Digits::Zero | Digits::Whole | Digits::Fraction | Digits::Exponent)
    }
}

/// Why a cursor could not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Halt {
    /// The text ends too early; more text may complete it.
    More,
    /// Something else follows.
    Not,
}

/// Reads from the front of a text that may be cut anywhere.
#[derive(Clone, Copy)]
pub(super) struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(text: &'a str) -> Cursor<'a> {
        Cursor { text, at: 0 }
    }

    /// Bytes read.
    pub fn at(&self) -> usize {
        self.at
    }

    pub fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// Skips blanks.
    pub fn blanks(&mut self) -> &mut Self {
        self.at = self.text.len() - self.rest().trim_start().len();
        self
    }

    /// Reads this text.
    pub fn expect(&mut self, expected: &str) -> Result<&mut Self, Halt> {
        match self.rest() {
            rest if rest.starts_with(expected) => {
                self.at += expected.len();
                Ok(self)
            }
            rest if expected.starts_with(rest) => Err(Halt::More),
            _ => Err(Halt::Not),
        }
    }

    /// Reads the first matching text; none is a prefix of another.
    pub fn expect_any(&mut self, expected: &[&str]) -> Result<&mut Self, Halt> {
        let mut halt = Halt::Not;
        for text in expected {
            match self.expect(text) {
                Ok(_) => return Ok(self),
                Err(Halt::More) => halt = Halt::More,
                Err(Halt::Not) => {}
            }
        }
        Err(halt)
    }

    /// Reads up to and including this text; returns what precedes it.
    pub fn until(&mut self, end: &str) -> Result<&'a str, Halt> {
        let found = self.rest().find(end).ok_or(Halt::More)?;
        let before = &self.rest()[..found];
        self.at += found + end.len();
        Ok(before)
    }

    /// As [`Cursor::until`], but none of `stops` may occur before.
    pub fn until_within(&mut self, end: &str, stops: &[char]) -> Result<&'a str, Halt> {
        let rest = self.rest();
        match (rest.find(end), rest.find(stops)) {
            (Some(found), Some(stop)) if stop < found => Err(Halt::Not),
            (Some(_), _) => self.until(end),
            // The stop may be where the end begins.
            (None, Some(stop)) if !end.starts_with(&rest[stop..]) => Err(Halt::Not),
            (None, _) => Err(Halt::More),
        }
    }

    /// Reads up to one of these characters; returns what precedes it, without trailing blanks.
    pub fn bare(&mut self, stops: &[char]) -> Result<&'a str, Halt> {
        let found = self.rest().find(stops).ok_or(Halt::More)?;
        let bare = self.rest()[..found].trim_end();
        self.at += found;
        if bare.is_empty() { Err(Halt::Not) } else { Ok(bare) }
    }

    /// Reads this text if it follows; returns whether it did.
    pub fn have(&mut self, text: &str) -> Result<bool, Halt> {
        match self.expect(text) {
            Ok(_) => Ok(true),
            Err(Halt::Not) => Ok(false),
            Err(Halt::More) => Err(Halt::More),
        }
    }

    /// Reads a JSON string.
    pub fn string(&mut self) -> Result<String, Halt> {
        let start = self.at;
        self.expect("\"")?;
        let mut escaped = false;
        for (at, c) in self.rest().char_indices() {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                '"' => {
                    self.at += at + 1;
                    return serde_json::from_str(&self.text[start..self.at]).map_err(|_| Halt::Not);
                }
                '\0'..='\x1f' => return Err(Halt::Not),
                _ => {}
            }
        }
        Err(Halt::More)
    }
}
