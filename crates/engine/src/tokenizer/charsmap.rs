//! SentencePiece's compiled table of what characters become (`precompiled_charsmap`): a tree in one array (darts-clone)
//! and texts that end with a zero. Read as Hugging Face's library reads it, which takes the shortest entry of a grapheme
//! and not the longest of a text.

use unicode_segmentation::UnicodeSegmentation;

/// Largest table, in bytes; those in use have 250 kB.
const MAX_BYTES: usize = 4 << 20;
/// Longest grapheme that is looked up as a whole, in bytes.
const MAX_GRAPHEME: usize = 5;

/// What characters become.
pub struct Charsmap {
    units: Vec<u32>,
    texts: String,
    /// How many times longer an entry may make a text.
    growth: f64,
}

impl Charsmap {
    /// Reads a table; `Err` says what is wrong with it.
    pub fn new(bytes: &[u8]) -> Result<Charsmap, String> {
        if bytes.len() > MAX_BYTES {
            return Err(format!("it has {} bytes, at most {MAX_BYTES} are allowed", bytes.len()));
        }
        let short = || "it ends before its tree does".to_string();
        let (size, rest) = bytes.split_first_chunk().ok_or_else(short)?;
        let size = u32::from_le_bytes(*size) as usize;
        let (tree, texts) = rest.split_at_checked(size).ok_or_else(short)?;
        let units: Vec<u32> = tree.as_chunks().0.iter().map(|&unit| u32::from_le_bytes(unit)).collect();
        let texts = std::str::from_utf8(texts).map_err(|_| "its texts are not UTF-8".to_string())?;
        let mut map = Charsmap { units, texts: texts.into(), growth: 1.0 };
        map.growth = map.measure()?;
        Ok(map)
    }

    /// How many times longer a text may become.
    pub fn growth(&self) -> f64 {
        self.growth
    }

    /// Walks all entries that text may reach.
    fn measure(&self) -> Result<f64, String> {
        let (mut growth, mut n_seen) = (1.0f64, 0);
        let mut places: Vec<(u32, usize)> = self.units.first().map(|&root| (offset(root), 0)).into_iter().collect();
        while let Some((at, depth)) = places.pop() {
            n_seen += 1;
            if n_seen > self.units.len() {
                return Err("its tree has loops".into());
            }
            for byte in 1..=u8::MAX {
                let Some((at, is_end)) = self.step(at, byte) else { continue };
                match is_end {
                    true => {
                        let n = self.text(at).map_or(0, str::len);
                        growth = growth.max(n as f64 / (depth + 1) as f64);
                    }
                    false if depth + 1 < MAX_GRAPHEME => places.push((at, depth + 1)),
                    false => {}
                }
            }
        }
        Ok(growth)
    }

    /// The place that a byte leads to, and whether an entry ends there.
    fn step(&self, at: u32, byte: u8) -> Option<(u32, bool)> {
        let at = at ^ u32::from(byte);
        let unit = *self.units.get(at as usize)?;
        let is_child = byte != 0 && unit & (1 << 31 | 0xff) == u32::from(byte);
        is_child.then(|| (at ^ offset(unit), unit >> 8 & 1 == 1))
    }

    /// The text of an entry that ends at a place.
    fn text(&self, at: u32) -> Option<&str> {
        let start = (*self.units.get(at as usize)? & 0x7fff_ffff) as usize;
        self.texts.get(start..)?.split('\0').next()
    }

    /// Returns the changed text.
    pub fn apply(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut bytes = [0; 4];
        for grapheme in text.graphemes(true) {
            match self.find(grapheme).filter(|_| grapheme.len() <= MAX_GRAPHEME) {
                Some(to) => out.push_str(to),
                None => grapheme.chars().for_each(|c| {
                    let c = c.encode_utf8(&mut bytes);
                    out.push_str(self.find(c).unwrap_or(c));
                }),
            }
        }
        out
    }

    /// The shortest entry that a text begins with.
    fn find(&self, text: &str) -> Option<&str> {
        let mut at = offset(*self.units.first()?);
        for &byte in text.as_bytes() {
            let (next, is_end) = self.step(at, byte)?;
            if is_end {
                return self.text(next);
            }
            at = next;
        }
        None
    }
}

/// Where the children of a place are, from its unit in the array.
fn offset(unit: u32) -> u32 {
    (unit >> 10) << ((unit & (1 << 9)) >> 6)
}
