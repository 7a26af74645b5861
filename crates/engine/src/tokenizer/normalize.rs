//! What becomes of a text before it is cut into words: Unicode's normal forms, and spaces written in another way. Knows
//! nothing of tokens.

use std::borrow::Cow;

use unicode_normalization::{
    IsNormalized, UnicodeNormalization, is_nfc_quick, is_nfd_quick, is_nfkc_quick, is_nfkd_quick,
};

use super::charsmap::Charsmap;
use super::stepper::Stepper;
use super::wordpiece::Cleaner;

/// Most steps. Files in use have one to four.
const MAX_STEPS: usize = 32;
/// How many times longer all steps together may make a text. Unicode's tables let the normal forms make a byte 3 (with
/// compatibility 11), and a space becomes the three bytes of `▁`.
const MAX_GROWTH: f64 = 36.0;
/// What all steps together may put before a text, in bytes.
const MAX_BEFORE: f64 = 64.0;

/// One change.
pub enum Step {
    /// Unicode's normal forms.
    Nfc,
    Nfd,
    Nfkc,
    Nfkd,
    /// Lower case, a character at a time.
    Lowercase,
    /// A text put before every text that is not empty.
    Prepend(String),
    /// The same, but before the first text of a prompt alone.
    PrependFirst(String),
    /// The same as `Prepend`, unless the text begins with it.
    PrependMissing(String),
    /// Every place that a pattern finds becomes a text.
    Replace(Stepper, String),
    /// Every place of a text becomes another.
    ReplaceText(String, String),
    /// Blanks are taken off the left end, the right end.
    Strip(bool, bool),
    /// BERT's.
    Clean(Box<Cleaner>),
    /// SentencePiece's table.
    Map(Box<Charsmap>),
    /// Blanks go, and each word between them begins with a text.
    Words(String),
}

/// Changes, one after the other.
#[derive(Default)]
pub struct Normalizer(pub Vec<Step>);

/// Checks what steps, one after the other, may make of a text; `Err` says what is too much.
pub fn check<'s>(steps: impl Iterator<Item = &'s Step>) -> Result<(), String> {
    let (mut n, mut growth, mut before) = (0, 1.0, 0.0);
    for step in steps {
        let (times, more) = step.growth();
        growth *= times;
        before = before * times + more;
        n += 1;
    }
    if n > MAX_STEPS {
        return Err(format!("normalizer: it has {n} steps, at most {MAX_STEPS} are allowed"));
    }
    match growth > MAX_GROWTH || before > MAX_BEFORE {
        true => Err(format!(
            "normalizer: a text may become {growth:.0} times longer and {before:.0} bytes, at most {MAX_GROWTH} times and \
             {MAX_BEFORE} bytes are allowed"
        )),
        false => Ok(()),
    }
}

impl Normalizer {
    /// Returns how many times shorter a text may become; `None` where there is no bound.
    pub fn shrink(&self) -> Option<usize> {
        let step = |step: &Step| match step {
            Step::Prepend(_) | Step::PrependFirst(_) | Step::PrependMissing(_) => Some(1),
            // Three letters of Hangul become one; one of mathematics, of four bytes, an ASCII one; an Angstrom sign two
            // bytes.
            Step::Nfc | Step::Nfd | Step::Lowercase => Some(4),
            Step::Nfkc | Step::Nfkd => Some(12),
            Step::ReplaceText(from, to) if !to.is_empty() => Some(from.len().div_ceil(to.len())),
            Step::ReplaceText(..) | Step::Replace(..) | Step::Strip(..) => None,
            Step::Clean(_) | Step::Map(_) | Step::Words(_) => None,
        };
        self.0.iter().try_fold(1usize, |times, one| step(one)?.checked_mul(times))
    }

    /// Returns the changed text; `first` says that it is at the beginning of a prompt.
    pub fn apply<'t>(&self, text: &'t str, first: bool) -> Cow<'t, str> {
        let mut text = Cow::Borrowed(text);
        for step in &self.0 {
            if let Some(changed) = step.apply(&text, first) {
                text = Cow::Owned(changed);
            }
        }
        text
    }
}

impl Step {
    /// Returns how many times longer a text may become, and by how many bytes beyond that.
    fn growth(&self) -> (f64, f64) {
        let len = |text: &str| text.len() as f64;
        match self {
            Self::Nfc | Self::Nfd => (3.0, 0.0),
            Self::Nfkc | Self::Nfkd => (11.0, 0.0),
            Self::Lowercase => (1.5, 0.0),
            Self::Prepend(text) | Self::PrependFirst(text) | Self::PrependMissing(text) => (1.0, len(text)),
            // A match of nothing stands before each character and behind the last.
            Self::Replace(pattern, to) if pattern.matches_nothing() => (1.0 + len(to), len(to)),
            Self::Replace(_, to) => (len(to).max(1.0), 0.0),
            Self::ReplaceText(from, to) => ((len(to) / len(from)).max(1.0), 0.0),
            Self::Strip(..) => (1.0, 0.0),
            Self::Map(map) => (map.growth(), 0.0),
            // A blank stands between two words.
            Self::Words(prefix) => (f64::midpoint(len(prefix), 1.0).max(1.0), len(prefix)),
            // Spaces around three bytes, decomposed, in lower case.
            Self::Clean(_) => (5.0 / 3.0 * 3.0 * 1.5, 0.0),
        }
    }

    /// `None` where nothing changes.
    fn apply(&self, text: &str, first: bool) -> Option<String> {
        let unless = |is: IsNormalized| is != IsNormalized::Yes;
        let before = |prefix: &str| Some(format!("{prefix}{text}"));
        match self {
            Self::Nfc => unless(is_nfc_quick(text.chars())).then(|| text.nfc().collect()),
            Self::Nfd => unless(is_nfd_quick(text.chars())).then(|| text.nfd().collect()),
            Self::Nfkc => unless(is_nfkc_quick(text.chars())).then(|| text.nfkc().collect()),
            Self::Nfkd => unless(is_nfkd_quick(text.chars())).then(|| text.nfkd().collect()),
            Self::Map(map) => Some(map.apply(text)),
            Self::Words(prefix) => {
                let mut out = String::with_capacity(text.len() + text.len() / 2);
                for word in text.split_whitespace() {
                    out.push_str(if word.starts_with(prefix.as_str()) { "" } else { prefix });
                    out.push_str(word);
                }
                Some(out)
            }
            Self::Clean(cleaner) => Some(cleaner.apply(text)),
            Self::Lowercase => Some(text.chars().flat_map(char::to_lowercase).collect()),
            _ if text.is_empty() => None,
            Self::Prepend(prefix) => before(prefix),
            Self::PrependFirst(prefix) if first && !text.starts_with(prefix) => before(prefix),
            Self::PrependMissing(prefix) if !text.starts_with(prefix) => before(prefix),
            Self::PrependFirst(_) | Self::PrependMissing(_) => None,
            Self::Replace(pattern, to) => pattern.replace(text, to),
            Self::ReplaceText(from, to) => text.contains(from.as_str()).then(|| text.replace(from, to)),
            Self::Strip(left, right) => {
                let text = if *left { text.trim_start() } else { text };
                Some(if *right { text.trim_end() } else { text }.into())
            }
        }
    }
}
