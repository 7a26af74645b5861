//! Stop strings in a stream: which text may be emitted, which must wait, where the answer ends. Knows only text.

use super::Error;

/// Maximum number of stop strings of a request.
pub const MAX_STOP_STRINGS: usize = 64;
/// Maximum length of a stop string in bytes. It holds back at most this much text.
pub const MAX_STOP_BYTES: usize = 512;

/// Searches one request's text for its stop strings.
///
/// The outcome depends on the text alone, not on how tokens cut it: the match that ends first wins, and among
/// those that end together the longest.
#[derive(Clone, Debug)]
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    /// Whether the stop string that ended the text is part of it.
    include: bool,
    /// Text not emitted yet.
    pending: String,
    /// Bytes of `pending` that are searched already.
    searched: usize,
}

impl StopMatcher {
    /// Checks the stop strings against the limits.
    ///
    /// # Errors
    /// [`Error::StopStrings`] for too many stop strings, an empty one or one that is too long.
    pub fn new(stops: Vec<String>, include: bool) -> Result<StopMatcher, Error> {
        if stops.len() > MAX_STOP_STRINGS {
            return Err(Error::StopStrings(format!("{} stop strings, the limit is {MAX_STOP_STRINGS}", stops.len())));
        }
        for (i, stop) in stops.iter().enumerate() {
            if stop.is_empty() {
                return Err(Error::StopStrings(format!("stop string {i} is empty")));
            }
            if stop.len() > MAX_STOP_BYTES {
                let why = format!("stop string {i} has {} bytes, the limit is {MAX_STOP_BYTES}", stop.len());
                return Err(Error::StopStrings(why));
            }
        }
        Ok(StopMatcher { stops, include, pending: String::with_capacity(MAX_STOP_BYTES), searched: 0 })
    }

    /// Buffer for new text, to be filled before [`StopMatcher::advance`].
    pub fn pending(&mut self) -> &mut String {
        &mut self.pending
    }

    /// Moves to `out` the text that can no longer become part of a stop string. Returns the index of a complete stop
    /// string; the text after it is dropped.
    pub fn advance(&mut self, out: &mut String) -> Option<usize> {
        if let Some((start, end, which)) = self.find() {
            out.push_str(&self.pending[..if self.include { end } else { start }]);
            self.pending.clear();
            self.searched = 0;
            return Some(which);
        }
        let keep = self.held();
        let shown = self.pending.len() - keep;
        out.push_str(&self.pending[..shown]);
        self.pending.drain(..shown);
        self.searched = keep;
        None
    }

    /// Moves all text held back to `out`: no text follows that could complete a stop string.
    pub fn flush(&mut self, out: &mut String) {
        out.push_str(&self.pending);
        self.pending.clear();
        self.searched = 0;
    }

    /// Returns the match that ends first: `(start, end, index)`.
    fn find(&self) -> Option<(usize, usize, usize)> {
        let text = self.pending.as_bytes();
        let mut best: Option<(usize, usize, usize)> = None;
        for (which, stop) in self.stops.iter().enumerate() {
            let stop = stop.as_bytes();
            // A match that ends in the searched part would have been found earlier.
            let from = (self.searched + 1).saturating_sub(stop.len());
            let Some(at) = text[from..].windows(stop.len()).position(|w| w == stop) else { continue };
            let (start, end) = (from + at, from + at + stop.len());
            if best.is_none_or(|b| (end, start) < (b.1, b.0)) {
                best = Some((start, end, which));
            }
        }
        best
    }

    /// Length of the longest tail of the pending text that begins a stop string. It starts at a character boundary, as
    /// every stop string does.
    fn held(&self) -> usize {
        let text = self.pending.as_bytes();
        let starts = |stop: &String| {
            let longest = (stop.len() - 1).min(text.len());
            (1..=longest).rev().find(|&n| text.ends_with(&stop.as_bytes()[..n])).unwrap_or(0)
        };
        self.stops.iter().map(starts).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds `text` in pieces of `step` characters; returns the emitted text and the stop string that ended it.
    fn run(stops: &[&str], include: bool, text: &str, step: usize) -> (String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| s.to_string()).collect(), include).unwrap();
        let mut out = String::new();
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(step) {
            matcher.pending().extend(piece);
            if let Some(which) = matcher.advance(&mut out) {
                return (out, Some(which));
            }
            // Text that may still become a stop string is never emitted.
            assert!(text.starts_with(&out));
        }
        matcher.flush(&mut out);
        (out, None)
    }

    #[test]
    fn text_ends_at_the_first_complete_stop_string() {
        let cases: &[(&[&str], &str, &str, &str, Option<usize>)] = &[
            // stops, text, shown, shown with the stop string included, which
            (&[], "all of it", "all of it", "all of it", None),
            (&["END"], "the END of it", "the ", "the END", Some(0)),
            (&["END"], "the EN", "the EN", "the EN", None),
            (&["END"], "EEND", "E", "EEND", Some(0)),
            (&["aab"], "aaaab", "aa", "aaaab", Some(0)),
            (&["abc", "b"], "xabc", "xa", "xab", Some(1)),
            (&["bc", "abc"], "xabc", "x", "xabc", Some(1)),
            (&["\n\n", "é!"], "café\né!", "café\n", "café\né!", Some(1)),
            (&["é"], "e\u{301}éx", "e\u{301}", "e\u{301}é", Some(0)),
            (&["日本"], "日日本", "日", "日日本", Some(0)),
            (&["x"], "x", "", "x", Some(0)),
        ];
        for &(stops, text, shown, included, which) in cases {
            for step in [1, 2, 3, 100] {
                assert_eq!(run(stops, false, text, step), (shown.to_string(), which), "{stops:?} {text:?} {step}");
                assert_eq!(run(stops, true, text, step), (included.to_string(), which), "{stops:?} {text:?} {step}");
            }
        }
    }

    #[test]
    fn limits_are_named() {
        let many = vec!["x".to_string(); MAX_STOP_STRINGS + 1];
        let cases = [
            (many, "65 stop strings, the limit is 64"),
            (vec!["ok".into(), String::new()], "stop string 1 is empty"),
            (vec!["x".repeat(MAX_STOP_BYTES + 1)], "stop string 0 has 513 bytes, the limit is 512"),
        ];
        for (stops, expected) in cases {
            let error = StopMatcher::new(stops, false).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
