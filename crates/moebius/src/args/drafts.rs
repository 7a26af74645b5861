//! What drafts tokens of answers.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Args, ValueEnum};

/// Drafts: guesses of the next tokens, several of which one step verifies.
#[derive(Debug, Clone, Default, Args)]
pub struct DraftArgs {
    /// What drafts the next tokens of an answer: one step verifies several, and the answer stays the same. It pays off
    /// where drafts are right often and a step of several tokens costs little more than one. FILE, a model's file,
    /// folder or name as -m takes it, is a smaller model with the same vocabulary that drafts, as many as pay
    #[arg(
        long, value_parser = DraftParser, value_name = "off|auto|ngram|mtp|FILE", default_value = "off",
        help_heading = "Engine"
    )]
    pub draft: DraftArg,
    /// Maximum number of tokens that are drafted at a time [default: 3; with auto 4, its maximum; with FILE up to 8, as
    /// many as pay, and where N is given always as many]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16), help_heading = "Engine")]
    pub draft_tokens: Option<u8>,
}

impl DraftArgs {
    /// Maximum number of drafts of a sequence in a step.
    pub fn n_max(&self) -> usize {
        match self.draft {
            DraftArg::Off => 0,
            DraftArg::Auto => usize::from(self.draft_tokens.unwrap_or(4).min(4)),
            DraftArg::Ngram | DraftArg::Mtp => usize::from(self.draft_tokens.unwrap_or(3)),
            DraftArg::Model(_) => usize::from(self.draft_tokens.unwrap_or(8)),
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, ValueEnum)]
pub enum DraftArg {
    /// Nothing
    #[default]
    Off,
    /// The model's layer if it has one, else the text itself, as many as pay: their number follows from measured times
    /// and from how often drafts were right
    Auto,
    /// The text itself: what followed its last tokens the last time, for answers that repeat their prompts; or what a
    /// JSON schema or grammar forces
    Ngram,
    /// The model's own layer for multi-token prediction, if it has one
    Mtp,
    /// Another model.
    #[value(skip)]
    Model(PathBuf),
}

/// Parses what drafts: one of the kinds, else another model.
#[derive(Clone)]
struct DraftParser;

impl TypedValueParser for DraftParser {
    type Value = DraftArg;

    fn parse_ref(&self, _: &clap::Command, _: Option<&clap::Arg>, value: &OsStr) -> Result<DraftArg, clap::Error> {
        let kind = value.to_str().and_then(|text| DraftArg::from_str(text, false).ok());
        Ok(kind.unwrap_or_else(|| DraftArg::Model(value.into())))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(DraftArg::value_variants().iter().filter_map(ValueEnum::to_possible_value)))
    }
}
