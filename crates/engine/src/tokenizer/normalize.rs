//! What becomes of a text before it is cut into words: Unicode's normal forms, and spaces written in another way. Knows
//! nothing of tokens.

use std::borrow::Cow;

use regex::{NoExpand, Regex};
use unicode_normalization::{
    IsNormalized, UnicodeNormalization, is_nfc_quick, is_nfd_quick, is_nfkc_quick, is_nfkd_quick,
};

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
    Replace(Regex, String),
    /// Every place of a text becomes another.
    ReplaceText(String, String),
    /// Blanks are taken off the left end, the right end.
    Strip(bool, bool),
}

/// Changes, one after the other.
#[derive(Default)]
pub struct Normalizer(pub Vec<Step>);

impl Normalizer {
    /// The changed text; `first` says that it stands at the beginning of a prompt.
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
    /// `None` where nothing changes.
    fn apply(&self, text: &str, first: bool) -> Option<String> {
        let unless = |is: IsNormalized| is != IsNormalized::Yes;
        let before = |prefix: &str| Some(format!("{prefix}{text}"));
        match self {
            Self::Nfc => unless(is_nfc_quick(text.chars())).then(|| text.nfc().collect()),
            Self::Nfd => unless(is_nfd_quick(text.chars())).then(|| text.nfd().collect()),
            Self::Nfkc => unless(is_nfkc_quick(text.chars())).then(|| text.nfkc().collect()),
            Self::Nfkd => unless(is_nfkd_quick(text.chars())).then(|| text.nfkd().collect()),
            Self::Lowercase => Some(text.chars().flat_map(char::to_lowercase).collect()),
            _ if text.is_empty() => None,
            Self::Prepend(prefix) => before(prefix),
            Self::PrependFirst(prefix) if first && !text.starts_with(prefix) => before(prefix),
            Self::PrependMissing(prefix) if !text.starts_with(prefix) => before(prefix),
            Self::PrependFirst(_) | Self::PrependMissing(_) => None,
            Self::Replace(pattern, to) => match pattern.replace_all(text, NoExpand(to)) {
                Cow::Owned(changed) => Some(changed),
                Cow::Borrowed(_) => None,
            },
            Self::ReplaceText(from, to) => text.contains(from.as_str()).then(|| text.replace(from, to)),
            Self::Strip(left, right) => {
                let text = if *left { text.trim_start() } else { text };
                Some(if *right { text.trim_end() } else { text }.into())
            }
        }
    }
}
